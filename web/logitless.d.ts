// SPDX-License-Identifier: Apache-2.0
// Types of logitless.js. N tokens, V vocabulary, D hidden. The repository's docs/semantics.md says
// what every option and statistic means; the names here are its names in camelCase.

/// <reference types="@webgpu/types" />

export type DType = 'f32' | 'f16' | 'i32';
export type StatusCode =
  | 'invalid_argument' | 'wrong_shape' | 'wrong_dtype' | 'wrong_device' | 'misaligned' | 'unknown_enum'
  | 'workspace_too_small' | 'target_out_of_range' | 'backend_unavailable' | 'not_supported' | 'device_error' | 'internal';

/** Thrown by a call that is refused; `device_error` carries WebGPU's own message. */
export class LogitlessError extends Error {
  readonly code: StatusCode;
}

/** Resolves to the reason why there is no WebGPU, as a sentence for the visitor; or to null. */
export function whyUnavailable(): Promise<string | null>;

/** A strided view of a GPU buffer. */
export class Tensor<D extends DType = DType> {
  readonly buffer: GPUBuffer;
  readonly shape: number[];
  readonly dtype: D;
  readonly byteOffset: number;
  readonly stride: number[];
  readonly bytes: number;
  readonly isContiguous: boolean;
  /**
   * Resolves to the elements, once everything recorded before has run; f16 as bits. Contiguous tensors
   * only. Rejects with WebGPU's message if the call that wrote them failed, or one that wrote its inputs.
   */
  read(): Promise<D extends 'f32' ? Float32Array : D extends 'f16' ? Uint16Array : Int32Array>;
  /** Resolves to the first element; for tensors with a single one. */
  item(): Promise<number>;
  /**
   * Takes effect before what is recorded later. An odd number of f16 is `misaligned`, unless it fills a
   * tensor that is not in a buffer of the caller's.
   */
  write(data: Float32Array | Uint16Array | Int32Array): void;
  /** Frees the buffer, unless it is the caller's. */
  destroy(): void;
}

export interface LossOptions {
  reduction?: 'none' | 'sum' | 'mean';
  ignoreIndex?: number;
  labelSmoothing?: number;
  zLoss?: number;
  logitScale?: number;
  softcap?: number;
  temperature?: number;
  outOfRange?: 'error' | 'ignore';
  emptyMean?: 'zero' | 'nan';
  /** The divisor of a mean; 0 or absent: computed from the tokens that count. */
  normalizer?: number;
  /** For a shard of the vocabulary: its first column, and the number of columns of the whole. */
  vocabStart?: number;
  vocabTotal?: number;
}

export type Statistic =
  | 'lse' | 'targetLogit' | 'entropy' | 'argmax' | 'rowReference' | 'rowLogSum' | 'weightedLogitSum' | 'logprob' | 'rank'
  | 'sumPSquared' | 'meanLogit' | 'maxLogprob' | 'massAbove';

/** Statistics that a call writes, into tensors of the caller or new ones. */
export interface Statistics {
  lse?: Tensor<'f32'>;  // each [N]
  targetLogit?: Tensor<'f32'>;
  entropy?: Tensor<'f32'>;
  argmax?: Tensor<'i32'>;
  rowReference?: Tensor<'f32'>;
  rowLogSum?: Tensor<'f32'>;
  weightedLogitSum?: Tensor<'f32'>;
  logprob?: Tensor<'f32'>;
  rank?: Tensor<'i32'>;
  sumPSquared?: Tensor<'f32'>;
  meanLogit?: Tensor<'f32'>;
  maxLogprob?: Tensor<'f32'>;
  massAbove?: Tensor<'f32'>;
}

export interface CallOptions extends Omit<LossOptions, 'temperature'>, Statistics {
  /** One for all tokens, or one per token, [N]. */
  temperature?: number | Tensor<'f32'>;
  tokenWeight?: Tensor<'f32'>;  // [N]
  vocabWeight?: Tensor<'f32'>;  // [V]
  gradLoss?: Tensor<'f32'>;  // shaped like the loss
  /** Statistics to write into new tensors. */
  statistics?: Statistic[];
  /** Where the loss goes; absent: a new tensor. */
  loss?: Tensor<'f32'>;  // [N] for reduction none, else []
  fault?: Tensor<'i32'>;  // [1]
  /** Bytes of workspace; absent: the recommended size. A size below the minimum is raised to it. */
  budget?: number;
}

export interface LinearCall extends CallOptions {
  input: Tensor;  // [N, D]
  weight: Tensor;  // [V, D]
  bias?: Tensor;  // [V]
  target: Tensor<'i32'>;  // [N]
  /** Which gradients: true for all. */
  gradients?: boolean | ('input' | 'weight' | 'bias')[];
  /** Adds to gradWeight and gradBias, which must be given. */
  accumulate?: boolean;
  gradientDtype?: 'f32' | 'f16';
  gradInput?: Tensor;  // [N, D]
  gradWeight?: Tensor;  // [V, D]
  gradBias?: Tensor;  // [V]
}

export interface DivergenceOptions {
  /** Absent: 'forward_kl'. */
  divergence?: 'forward_kl' | 'reverse_kl' | 'jsd' | 'skew_kl' | 'tv';
  /** Of jsd and skew_kl: the teacher's share of the mixture. */
  beta?: number;
  /** The weight of the labels' cross-entropy, which is added to the divergence. */
  labelWeight?: number;
  teacherLogitScale?: number;
  teacherSoftcap?: number;
}

export interface DivergenceCall extends Omit<LinearCall, 'target' | 'statistics' | 'labelSmoothing' | 'zLoss' | 'vocabWeight'>, DivergenceOptions {
  target?: Tensor<'i32'>;  // [N]; absent: every token counts
  /** The teacher: a head (the next three), or its logits. */
  teacherInput?: Tensor;  // [N, Dt]
  teacherWeight?: Tensor;  // [V, Dt]
  teacherBias?: Tensor;  // [V]
  teacherLogits?: Tensor;  // [N, V]
  /** One for all tokens, or one per token, [N]. */
  teacherTemperature?: number | Tensor<'f32'>;
  statistics?: DivergenceStatistic[];
  teacherEntropy?: Tensor<'f32'>;  // [N]
  acceptance?: Tensor<'f32'>;  // [N]
}

export type DivergenceStatistic = 'entropy' | 'teacherEntropy' | 'acceptance' | 'logprob';

export interface LogitsCall extends CallOptions {
  logits: Tensor;  // [N, V]
  target: Tensor<'i32'>;  // [N]
  inputKind?: 'logits' | 'probabilities';
  probabilityFloor?: number;
  gradients?: boolean;
  /** The gradient takes the place of the logits. */
  inPlace?: boolean;
  gradLogits?: Tensor;  // [N, V]
}

export type Result = {
  loss: Tensor<'f32'>;
  gradInput?: Tensor;
  gradWeight?: Tensor;
  gradBias?: Tensor;
  gradLogits?: Tensor;
  /** Present if the call was given one. */
  fault?: Tensor<'i32'>;
  /** The size of the workspace that the call uses. */
  workspaceBytes: number;
} & Statistics;

export interface EvaluateCall extends LossOptions, DivergenceOptions {
  kind?: 'softmax' | 'crossEntropyForward' | 'crossEntropyForwardBackward' | 'linearCrossEntropyForward' | 'linearCrossEntropyForwardBackward' | 'linearDivergenceForward' | 'linearDivergenceForwardBackward';
  teacherTemperature?: number;
  tensors: Record<string, Float32Array | Uint16Array | Int32Array>;
  /** The shapes of the tensors that are not vectors. */
  shapes: Record<string, number[]>;
  outputs: Record<string, number[]>;
  inputKind?: 'logits' | 'probabilities';
  probabilityFloor?: number;
  /** Adds to the gradients, whose previous values are among `tensors`. */
  accumulate?: boolean;
  bounds?: boolean;
}

export class Logitless {
  /**
   * Rejects with `backend_unavailable` and a sentence for the visitor if there is no WebGPU.
   * `device`: one of yours; `limits: 'default'` asks for none beyond WebGPU's defaults.
   */
  static create(options?: {device?: GPUDevice; limits?: 'default'; wasm?: string | URL}): Promise<Logitless>;
  readonly device: GPUDevice;
  /** Resolves with WebGPU's reason when the device is lost: make another Logitless and other tensors then. */
  readonly lost: Promise<string>;
  readonly isLost: boolean;
  /** The number of pipelines that calls have needed so far, and of those compiled or refused: to show progress. */
  readonly pipelines: {asked: number; ready: number};

  empty<D extends DType = 'f32'>(shape: number[], dtype?: D): Tensor<D>;
  tensor(data: Float32Array, shape?: number[]): Tensor<'f32'>;
  tensor(data: Int32Array, shape?: number[]): Tensor<'i32'>;
  tensor(data: Uint16Array, shape?: number[], dtype?: 'f16'): Tensor<'f16'>;
  /** A tensor in a buffer of the caller's, which destroy() leaves alone; its usage must have STORAGE. */
  wrap<D extends DType = 'f32'>(buffer: GPUBuffer, shape: number[], dtype?: D, view?: {byteOffset?: number; stride?: number[]}): Tensor<D>;

  /** Like the ops below, records the work and returns at once. */
  linearCrossEntropy(call: LinearCall): Result;
  linearDivergence(call: DivergenceCall): Result & Pick<DivergenceCall, 'teacherEntropy' | 'acceptance'>;
  crossEntropy(call: LogitsCall): Result;
  softmax(logits: Tensor, options?: {into?: Tensor}): Tensor;
  /** Resolves once all that was recorded since the last done() is accepted; rejects with WebGPU's message. */
  done(): Promise<void>;

  /**
   * Bytes of workspace of linearCrossEntropy on these shapes, or, with a teacher, of linearDivergence.
   * `gradientDtype` is `dtype` if absent.
   */
  plan(shape: {tokens: number; hidden: number; vocab: number; teacherHidden?: number; teacherLogits?: boolean; gradients?: boolean; dtype?: 'f32' | 'f16'; gradientDtype?: 'f32' | 'f16'} & LossOptions & DivergenceOptions & {teacherTemperature?: number}): {minimum: number; recommended: number};
  /** Evaluates an op in double precision on the CPU; with `bounds`, also the error that the contract allows. */
  evaluate(call: EvaluateCall): Record<string, {value: Float64Array; bound?: Float64Array}>;
}
