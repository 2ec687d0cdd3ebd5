/* SPDX-License-Identifier: Apache-2.0
 *
 * Logitless: cross-entropy for language models without the logits. The C interface, the only ABI.
 *
 * An op is a `logitless_op` of tensor pointers; a NULL pointer is an absent optional. Two verbs:
 * `logitless_workspace` says how many bytes a call needs, `logitless_run` runs it; a call that is
 * made many times is planned once, with `logitless_plan_create`. docs/semantics.md says what the
 * fields mean. Every struct starts with its own size: set it with the
 * LOGITLESS_*_INIT macros. A smaller struct_size (an older header) is zero-extended; a larger one
 * is accepted only if its tail is zero.
 */
#ifndef LOGITLESS_C_H_
#define LOGITLESS_C_H_

#include <stddef.h>
#include <stdint.h>

#define LOGITLESS_VERSION_MAJOR 0
#define LOGITLESS_VERSION_MINOR 1
#define LOGITLESS_VERSION_PATCH 0
#define LOGITLESS_VERSION \
  (LOGITLESS_VERSION_MAJOR * 10000 + LOGITLESS_VERSION_MINOR * 100 + LOGITLESS_VERSION_PATCH)

#if defined(_WIN32)
#define LOGITLESS_API
#else
#define LOGITLESS_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Enums are int32_t in the structs: an unknown value is a status, never undefined behaviour. */
enum {
  LOGITLESS_OK = 0,
  /* a value is wrong, or a field is missing, unwanted or overlaps */
  LOGITLESS_INVALID_ARGUMENT = 1,
  LOGITLESS_WRONG_SHAPE = 2,
  LOGITLESS_WRONG_DTYPE = 3,
  LOGITLESS_WRONG_DEVICE = 4,
  LOGITLESS_MISALIGNED = 5, /* an address is no multiple of its element's size */
  LOGITLESS_UNKNOWN_ENUM = 6,
  LOGITLESS_WORKSPACE_TOO_SMALL = 7,
  LOGITLESS_TARGET_OUT_OF_RANGE = 8,
  LOGITLESS_BACKEND_UNAVAILABLE = 9,
  LOGITLESS_NOT_SUPPORTED = 10,
  LOGITLESS_DEVICE_ERROR = 11,
  LOGITLESS_INTERNAL = 12
};
enum {
  LOGITLESS_F32 = 0,
  LOGITLESS_F16 = 1,
  LOGITLESS_BF16 = 2,
  LOGITLESS_I32 = 3,
  LOGITLESS_I64 = 4
};
/* LOGITLESS_REFERENCE is the double-precision oracle; its tensors say LOGITLESS_CPU. */
enum { LOGITLESS_CPU = 0, LOGITLESS_CUDA = 1, LOGITLESS_WEBGPU = 2, LOGITLESS_REFERENCE = 3 };
enum { LOGITLESS_REDUCTION_NONE = 0, LOGITLESS_REDUCTION_SUM = 1, LOGITLESS_REDUCTION_MEAN = 2 };
enum { LOGITLESS_OUT_OF_RANGE_ERROR = 0, LOGITLESS_OUT_OF_RANGE_IGNORE = 1 };
enum { LOGITLESS_EMPTY_MEAN_ZERO = 0, LOGITLESS_EMPTY_MEAN_NAN = 1 };
enum { LOGITLESS_INPUT_LOGITS = 0, LOGITLESS_INPUT_PROBABILITIES = 1 };
enum {
  LOGITLESS_SOFTMAX = 0,
  LOGITLESS_CROSS_ENTROPY_FORWARD = 1,
  LOGITLESS_CROSS_ENTROPY_BACKWARD = 2,
  LOGITLESS_CROSS_ENTROPY_FORWARD_BACKWARD = 3,
  LOGITLESS_LINEAR_CROSS_ENTROPY_FORWARD = 4,
  LOGITLESS_LINEAR_CROSS_ENTROPY_BACKWARD = 5,
  LOGITLESS_LINEAR_CROSS_ENTROPY_FORWARD_BACKWARD = 6,
  LOGITLESS_COMBINE = 7,
  LOGITLESS_LINEAR_DIVERGENCE_FORWARD = 8,
  LOGITLESS_LINEAR_DIVERGENCE_BACKWARD = 9,
  LOGITLESS_LINEAR_DIVERGENCE_FORWARD_BACKWARD = 10
};
/* Divergences of a student p from a teacher q: docs/semantics.md, "Divergences of two heads". */
enum {
  LOGITLESS_FORWARD_KL = 0,
  LOGITLESS_REVERSE_KL = 1,
  LOGITLESS_JSD = 2,
  LOGITLESS_SKEW_KL = 3,
  LOGITLESS_TV = 4
};

/* Why a call failed: a code, and a message that names the field, its value and what is allowed. */
typedef struct logitless_status {
  uint32_t struct_size;
  int32_t code;
  char message[248]; /* ends with a NUL; empty when ok */
} logitless_status;

/* A strided view of the caller's memory. */
typedef struct logitless_tensor {
  uint32_t struct_size;
  int32_t dtype;
  void* data; /* a host or device address, or a WGPUBuffer on WebGPU */
  uint64_t byte_offset;
  int32_t device_type, device_index;
  int32_t rank; /* 0, 1 or 2 */
  int32_t reserved;
  int64_t shape[2], stride[2]; /* strides in elements; 0 broadcasts an input */
} logitless_tensor;

/* What the loss is: docs/semantics.md, "Logits" to "Reduction"; ranges: LossOptions in ops.h. */
typedef struct logitless_loss_options {
  uint32_t struct_size;
  int32_t reduction;
  int64_t ignore_index;
  float label_smoothing, z_loss, logit_scale, softcap, temperature;
  int32_t out_of_range, empty_mean, input_kind;
  float probability_floor;
  int32_t allow_tf32;
  double normalizer; /* 0: the number of tokens that count */
  int64_t vocab_start, vocab_total;
} logitless_loss_options;

/* The options of a divergence, besides the student's logitless_loss_options. */
typedef struct logitless_divergence_options {
  uint32_t struct_size;
  int32_t kind;       /* LOGITLESS_FORWARD_KL ... */
  float beta;         /* 0 or in [2^-90, 1]; for LOGITLESS_JSD and LOGITLESS_SKEW_KL only */
  float label_weight; /* >= 0 */
  float teacher_logit_scale, teacher_softcap, teacher_temperature;
  int32_t reserved;
} logitless_divergence_options;

/* The tensors of one op. The structs of ops.h say which of them an op of each kind has. */
typedef struct logitless_op {
  uint32_t struct_size;
  int32_t kind;
  /* NULL: LOGITLESS_LOSS_OPTIONS_INIT */
  const logitless_loss_options* options;
  int32_t accumulate_grad_weight; /* only in linear ops with gradients */
  int32_t reserved;
  const logitless_tensor *logits, *probabilities; /* [N,V] [N,V] */
  const logitless_tensor *input, *weight, *bias;  /* [N,D] [V,D] [V] */
  const logitless_tensor* target;                 /* [N] i32 or i64 */
  const logitless_tensor* loss; /* [N] where the reduction is none, else [] or [1] */
  const logitless_tensor *token_weight, *vocab_weight;                 /* [N] [V] */
  const logitless_tensor* normalizer;                                  /* [] f32 or i64 */
  const logitless_tensor *lse, *target_logit, *entropy;                /* [N] [N] [N] */
  const logitless_tensor* argmax;                                      /* [N] i32 or i64 */
  const logitless_tensor *row_reference, *row_log_sum;                 /* [N] [N] */
  const logitless_tensor* weighted_logit_sum;                          /* [N] */
  const logitless_tensor* grad_loss;                                   /* the shape of loss */
  const logitless_tensor *grad_lse, *grad_target_logit, *grad_entropy; /* [N] [N] [N] */
  const logitless_tensor* grad_logits;                                 /* [N,V] */
  const logitless_tensor *grad_input, *grad_weight, *grad_bias;        /* [N,D] [V,D] [V] */
  /* [1] i32; faults are or-ed into it: 1 a target outside the vocabulary, 2 kept state of another
   * Forward, 4 a temperature that is not allowed */
  const logitless_tensor* fault;
  /* For linear Forward and Backward; logitless_kept_size gives the shapes and the key. */
  const logitless_tensor *kept, *kept_rows; /* [blocks * rows, 64] [N,8] */
  uint64_t kept_key;                        /* only in Backward */
  int32_t consume_kept;                     /* only in Backward: no further Backward reads `kept` */
  int32_t reserved_2;
  const logitless_tensor* temperature; /* [N] f32; replaces options.temperature */
  const logitless_tensor *logprob, *sum_p_squared, *mean_logit; /* [N] [N] [N] */
  const logitless_tensor* rank;                                 /* [N] i32 or i64 */
  const logitless_tensor* anchor; /* [N] f32; only in a linear Forward on a shard */
  /* For Combine: what Forward wrote on P shards of the vocabulary, each [P,N] */
  const logitless_tensor *shard_row_reference, *shard_row_log_sum, *shard_target_logit;
  const logitless_tensor *shard_entropy, *shard_argmax, *shard_weighted_logit_sum;
  const logitless_tensor *shard_sum_p_squared, *shard_mean_logit;
  const logitless_tensor* max_logprob;       /* [N] */
  const logitless_tensor* shard_max_logprob; /* [P,N] for Combine */
  /* For LinearDivergence ops. NULL: LOGITLESS_DIVERGENCE_OPTIONS_INIT */
  const logitless_divergence_options* divergence;
  const logitless_tensor *teacher_input, *teacher_weight, *teacher_bias; /* [N,Dt] [V,Dt] [V] */
  const logitless_tensor* teacher_logits;               /* [N,V] in place of the three above */
  const logitless_tensor* teacher_temperature;          /* [N] f32 */
  const logitless_tensor *teacher_entropy, *acceptance; /* [N] [N] */
  const logitless_tensor* mass_above;                   /* [N] */
  /* For a divergence on a shard; the sums are Forward's outputs, the mean Backward's input. */
  const logitless_tensor *teacher_row_reference, *teacher_row_log_sum; /* [N] [N] */
  const logitless_tensor *divergence_sum, *slope_sum, *slope_mean;     /* [N] [N] [N] */
  /* Chosen columns of LinearCrossEntropy: logits_at in Forward, grad_logits_at in Backward */
  const logitless_tensor* ids;                        /* [N,K] i32 or i64 */
  const logitless_tensor *logits_at, *grad_logits_at; /* [N,K] [N,K] */
  /* Each token's k largest logits and their ids (i32 or i64), outputs of a linear Forward and of
   * Combine, which reads the shards' */
  const logitless_tensor *top_logits, *top_ids;             /* [N,k] [N,k] */
  const logitless_tensor *shard_top_logits, *shard_top_ids; /* [P,N*k] [P,N*k] */
  const logitless_tensor* id_offsets; /* [N+1] i32 or i64; ids and *logits_at are then [M] */
  int32_t only_chosen;                /* only in Backward: logits_at alone has a gradient */
  int32_t grad_input_first; /* only in Backward: a plan can run in parts, grad_input's first */
} logitless_op;

/* Runs fn(context, i) for every i in [0, count), in any order, on any threads; returns when all are
 * done. */
typedef struct logitless_executor {
  uint32_t struct_size;
  int32_t num_threads;
  void* state;
  void (*parallel_for)(void* state, int64_t count, void (*fn)(void* context, int64_t i),
                       void* context);
} logitless_executor;

/* Where a call runs. */
typedef struct logitless_execution {
  uint32_t struct_size;
  int32_t device_type, device_index;
  int32_t reserved;
  void* stream;                       /* a cudaStream_t or a WGPUQueue */
  const logitless_executor* executor; /* CPU only; NULL: the library's own pool */
} logitless_execution;

/* How much memory a call needs besides its tensors. */
typedef struct logitless_workspace_size {
  uint32_t struct_size;
  uint32_t reserved;
  uint64_t minimum, recommended, alignment; /* bytes */
} logitless_workspace_size;

/* The memory that logitless_workspace sizes. */
typedef struct logitless_workspace_buffer {
  uint32_t struct_size;
  uint32_t reserved;
  void* data;
  uint64_t bytes, byte_offset; /* the library may use [data + byte_offset, + bytes) */
} logitless_workspace_buffer;

/* What Forward keeps for Backward: docs/semantics.md, "Kept state". */
typedef struct logitless_kept {
  uint32_t struct_size;
  uint32_t reserved;
  int64_t columns;       /* the number kept, from the vocabulary's first; 0: nothing is */
  int64_t shape[2];      /* of `kept`, in the input's dtype */
  int64_t rows_shape[2]; /* of `kept_rows`, in f32 */
  uint64_t bytes;        /* of both tensors together */
  uint64_t key;          /* Backward's kept_key */
} logitless_kept;

/* A call whose rules are checked and whose work is divided once: docs/semantics.md, "Plans". */
typedef struct logitless_plan logitless_plan;
/* What may differ between runs of a plan. */
typedef struct logitless_plan_arguments {
  uint32_t struct_size;
  uint32_t count; /* of addresses */
  /* One for each tensor that the op had at create, in the order of logitless_op. It replaces the
   * tensor's `data`; byte_offset, shape and strides stay. */
  void* const* addresses;
  void* stream;      /* a cudaStream_t or a WGPUQueue */
  double normalizer; /* replaces options.normalizer; 0: not replaced */
  int32_t part;      /* 0: all; 1 to 3 with grad_input_first: docs/semantics.md, "Plans" */
  int32_t reserved;
} logitless_plan_arguments;

/* The defaults of every struct. */
/* clang-format off */
#define LOGITLESS_STATUS_INIT {sizeof(logitless_status), LOGITLESS_OK, {0}}
#define LOGITLESS_TENSOR_INIT {sizeof(logitless_tensor), 0, 0, 0, 0, 0, 0, 0, {0, 0}, {0, 0}}
#define LOGITLESS_OP_INIT(kind)                                                                   \
  {sizeof(logitless_op), kind, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,                           \
   0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,                     \
   0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,                     \
   0, 0, 0, 0, 0, 0, 0, 0, 0, 0}
#define LOGITLESS_EXECUTOR_INIT {sizeof(logitless_executor), 0, 0, 0}
#define LOGITLESS_EXECUTION_INIT {sizeof(logitless_execution), 0, 0, 0, 0, 0}
#define LOGITLESS_WORKSPACE_SIZE_INIT {sizeof(logitless_workspace_size), 0, 0, 0, 0}
#define LOGITLESS_WORKSPACE_BUFFER_INIT {sizeof(logitless_workspace_buffer), 0, 0, 0, 0}
#define LOGITLESS_KEPT_INIT {sizeof(logitless_kept), 0, 0, {0, 0}, {0, 0}, 0, 0}
#define LOGITLESS_PLAN_ARGUMENTS_INIT {sizeof(logitless_plan_arguments), 0, 0, 0, 0.0, 0, 0}
#define LOGITLESS_LOSS_OPTIONS_INIT                                                               \
  {sizeof(logitless_loss_options), LOGITLESS_REDUCTION_MEAN, -100, 0.0f, 0.0f, 1.0f, 0.0f, 1.0f,  \
   LOGITLESS_OUT_OF_RANGE_ERROR, LOGITLESS_EMPTY_MEAN_ZERO, LOGITLESS_INPUT_LOGITS, 1e-9f, 0, 0.0, \
   0, 0}
#define LOGITLESS_DIVERGENCE_OPTIONS_INIT                                                         \
  {sizeof(logitless_divergence_options), LOGITLESS_FORWARD_KL, 0.5f, 0.0f, 1.0f, 0.0f, 1.0f, 0}
/* clang-format on */

/* Where a function takes them, status may be NULL, execution = NULL is the CPU with the library's
 * own pool, and workspace = NULL is one of 0 bytes. */

/* Finds the bytes of workspace that `run` needs for `op`. Pure and cheap. With NULL data pointers
 * the answer is enough for any address, else for the given ones. Returns the status code. On an
 * error `size` is unchanged. */
LOGITLESS_API int32_t logitless_workspace(const logitless_op* op,
                                          const logitless_execution* execution,
                                          logitless_workspace_size* size, logitless_status* status);
/* Finds what a linear Forward keeps for Backward in `bytes` (UINT64_MAX: no limit) and the
 * shapes of its tensors, by a formula of the op's kind, shape and dtype, which for a shard of a
 * divergence depends on the device too.
 * `op` is the Forward; its data pointers may be NULL, `kept` and `kept_rows` absent. Returns the
 * code; on an error `kept` is unchanged. */
LOGITLESS_API int32_t logitless_kept_size(const logitless_op* op,
                                          const logitless_execution* execution, uint64_t bytes,
                                          logitless_kept* kept, logitless_status* status);
/* Runs `op` in a workspace of at least `minimum` bytes. Neither synchronizes nor, except for the
 * reference and WebGPU's workspace, allocates. Returns the code; refused calls write no output. */
LOGITLESS_API int32_t logitless_run(const logitless_op* op,
                                    const logitless_workspace_buffer* workspace,
                                    const logitless_execution* execution, logitless_status* status);
/* Multiplies `values` by `factor` in place, each element rounded once: for gradients made together
 * with the loss, before their upstream factor was known. `values` [n] are contiguous f32, f16 or
 * bf16; `factor` [] is f32 on the same device. If the factor is exactly 1, the kernel writes
 * nothing; the host does not wait to learn that. CUDA only: on the host the caller can write the
 * loop. Returns the code. */
LOGITLESS_API int32_t logitless_scale(const logitless_tensor* values,
                                      const logitless_tensor* factor,
                                      const logitless_execution* execution,
                                      logitless_status* status);
/* logitless_scale for `count` vectors, 0 to 4, in one launch. */
LOGITLESS_API int32_t logitless_scale_each(const logitless_tensor* const* values, int32_t count,
                                           const logitless_tensor* factor,
                                           const logitless_execution* execution,
                                           logitless_status* status);
/* Writes the sum of `count` vectors, 1 to 16, each [n] contiguous f32, to `sum` [n], contiguous
 * f32, f16 or bf16: added in f32 in the order of `parts`, rounded once. `sum` may be one of the
 * parts if it is f32. For the parts of grad_input that the ranks of a group have. CUDA only.
 * Returns the code. */
LOGITLESS_API int32_t logitless_add(const logitless_tensor* const* parts, int32_t count,
                                    const logitless_tensor* sum,
                                    const logitless_execution* execution, logitless_status* status);
/* Returns LOGITLESS_VERSION of the library loaded, which may be newer than this header. */
LOGITLESS_API int32_t logitless_version(void);
/* Writes one line about a backend, e.g. "AVX3_SPR, 2 threads", to `text`; or returns
 * backend_unavailable with the reason. */
LOGITLESS_API int32_t logitless_describe_backend(int32_t device_type, char* text, size_t bytes,
                                                 logitless_status* status);
/* Loads every kernel of the execution's device, and the matrix library. Otherwise CUDA loads a
 * kernel at its first launch, which may wait for the device and is not allowed while a graph is
 * captured. The matrix library still loads its own kernels at the first product of a shape: run a
 * linear op once before capturing it. A driver older than CUDA 12.4's still loads kernels at their
 * first launch, and without the matrix library it is the linear ops that fail; neither is an error
 * here. Does nothing but on CUDA. Returns the code. */
LOGITLESS_API int32_t logitless_warmup(const logitless_execution* execution,
                                       logitless_status* status);
/* On WebGPU a call's workspace is several buffers within a budget of bytes: pass it as the
 * workspace's data, with at most that many bytes. */
LOGITLESS_API int32_t logitless_webgpu_create_workspace(int32_t device_index, uint64_t bytes,
                                                        void** workspace, logitless_status* status);
/* Frees such a workspace; the device keeps its buffers until enqueued calls are done. */
LOGITLESS_API void logitless_webgpu_destroy_workspace(void* workspace);
/* Registers the caller's device (WGPUInstance, WGPUDevice, WGPUQueue of the same wgpu-native) and
 * gives the device_index that names it in executions and tensors. Registering it again gives the
 * same index. */
LOGITLESS_API int32_t logitless_webgpu_use_device(void* instance, void* device, void* queue,
                                                  int32_t* device_index, logitless_status* status);
/* Returns the handles of a device, for making buffers on it; 0 is the library's own. */
LOGITLESS_API int32_t logitless_webgpu_device(int32_t device_index, void** instance, void** device,
                                              void** queue, logitless_status* status);
/* Sets the threads of the library's own pool; 0 or less asks for the default
 * (LOGITLESS_NUM_THREADS, OMP_NUM_THREADS, the affinity mask, the cgroup quota). Returns the
 * number now in force. */
LOGITLESS_API int32_t logitless_set_num_threads(int32_t num_threads);
/* Returns the number of threads of that pool. */
LOGITLESS_API int32_t logitless_num_threads(void);
/* Every op as one handler of XLA's foreign function interface (XLA_FFI_Handler), for JAX:
 * `call_frame` is an XLA_FFI_CallFrame, the result an XLA_FFI_Error or NULL. The
 * attributes of a call are private to this library and python/logitless/jax. */
LOGITLESS_API void* logitless_xla_run(void* call_frame);

/* Passed as the `bytes` of a plan: the op's recommended number. */
#define LOGITLESS_RECOMMENDED UINT64_MAX

/* Plans `op` for runs in `bytes` of workspace, at least logitless_workspace's minimum. The plan
 * copies all that it is given, the executor too, but not the memory of tensors. If a data pointer
 * is given, every run's address must be aligned as well as it is; NULL plans for any address.
 * Destroy it with logitless_plan_destroy. Returns the code; on an error `plan` is unchanged. */
LOGITLESS_API int32_t logitless_plan_create(const logitless_op* op,
                                            const logitless_execution* execution, uint64_t bytes,
                                            logitless_plan** plan, logitless_status* status);
/* Gives the workspace of a run: minimum and recommended are both the plan's bytes. */
LOGITLESS_API int32_t logitless_plan_size(const logitless_plan* plan,
                                          logitless_workspace_size* size, logitless_status* status);
/* Runs the plan. Results have the bits of logitless_run in a workspace of the plan's bytes. It
 * checks addresses, overlaps and the workspace; it neither allocates nor synchronizes. Threads may
 * run one plan at once, each in its own workspace. Returns the code. */
LOGITLESS_API int32_t logitless_plan_run(const logitless_plan* plan,
                                         const logitless_plan_arguments* arguments,
                                         const logitless_workspace_buffer* workspace,
                                         logitless_status* status);
/* Frees the plan, which no thread may be running; enqueued work goes on. NULL does nothing. */
LOGITLESS_API void logitless_plan_destroy(logitless_plan* plan);

/* Returns 1 if Backward uses what Forward keeps, for inputs of `dtype` on a device of this type
 * with these options (NULL: the defaults); 0 if it does not, or an argument is unknown. Answers
 * for a whole vocabulary of any size, without grad_entropy. No device need be present. */
LOGITLESS_API int32_t logitless_keeps(int32_t device_type, int32_t dtype,
                                      const logitless_loss_options* options);

#ifdef __cplusplus
}
#endif
#endif
