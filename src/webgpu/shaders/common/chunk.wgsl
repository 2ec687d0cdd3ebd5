// SPDX-License-Identifier: Apache-2.0
// The uniform and the targets of shaders that read a chunk's tokens. src/webgpu/run.h has the same
// struct.

struct Params {
  tokens: u32,
  base: u32,    // of the targets or of emit's output, in words
  stride: u32,  // in words
  wide: u32,    // 1: a target is two words
  ignore_low: u32,
  ignore_high: u32,
  vocab_total: u32,
  vocab_start: u32,
  vocab: u32,  // columns of the views
  flags: u32,
  nan: u32,
  fault: u32,  // index of the fault's word
  sums: u32,   // index of the first sum to write
  word: u32,   // the row's word that emit reads
  // What emit writes: 0 the word, 1 lse, 2 logprob, 3 an index of 32 bits, 4 an index of 64 bits, 5
  // the negated word.
  kind: u32,
  row_words: u32,  // of a State or an Extra
  chosen: u32,     // ids per token, up to 64
  id_words: u32,   // words per id: 1 or 2
}

@group(0) @binding(0) var<uniform> p: Params;
@group(0) @binding(1) var<storage, read> targets: array<u32>;
