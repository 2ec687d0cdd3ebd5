/* SPDX-License-Identifier: Apache-2.0
 *
 * Logitless: cross-entropy for language models without the logits. The C interface, the only ABI.
 *
 * An op is a `logitless_op` of tensor pointers; a NULL pointer is an absent optional. Two verbs:
 * `logitless_workspace` says how many bytes a call needs, `logitless_run` runs it; a call that is
 * made many times is planned once, with `logitless_plan_create`. What every field means is
 * docs/semantics.md. Every struct starts with its own size: set it with the
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

typedef struct logitless_status {
  uint32_t struct_size;
  int32_t code;
  char message[248]; /* it ends with a NUL, and is empty when ok */
} logitless_status;

typedef struct logitless_tensor {
  uint32_t struct_size;
  int32_t dtype;
  void* data; /* it is a host or device address, or a WGPUBuffer on WebGPU */
  uint64_t byte_offset;
  int32_t device_type, device_index;
  int32_t rank; /* it is 0, 1 or 2 */
  int32_t reserved;
  int64_t shape[2], stride[2]; /* strides count elements; 0 broadcasts an input */
} logitless_tensor;

typedef struct logitless_loss_options {
  uint32_t struct_size;
  int32_t reduction;
  int64_t ignore_index;
  float label_smoothing, z_loss, logit_scale, softcap, temperature;
  int32_t out_of_range, empty_mean, input_kind;
  float probability_floor;
  int32_t allow_tf32;
  double normalizer; /* 0 says that tokens are counted */
  int64_t vocab_start, vocab_total;
} logitless_loss_options;

typedef struct logitless_divergence_options {
  uint32_t struct_size;
  int32_t kind;       /* LOGITLESS_FORWARD_KL ... */
  float beta;         /* 0 or in [2^-90, 1]; LOGITLESS_JSD and LOGITLESS_SKEW_KL alone read it */
  float label_weight; /* >= 0 */
  float teacher_logit_scale, teacher_softcap, teacher_temperature;
  int32_t reserved;
} logitless_divergence_options;

typedef struct logitless_op {
  uint32_t struct_size;
  int32_t kind;
  /* NULL takes the defaults of LOGITLESS_LOSS_OPTIONS_INIT */
  const logitless_loss_options* options;
  int32_t accumulate_grad_weight; /* only linear ops with gradients have it */
  int32_t reserved;
  const logitless_tensor *logits, *probabilities; /* [N,V] [N,V] */
  const logitless_tensor *input, *weight, *bias;  /* [N,D] [V,D] [V] */
  const logitless_tensor* target;                 /* [N] i32 or i64 */
  const logitless_tensor* loss; /* [N] where the reduction is none, else [] or [1] */
  const logitless_tensor *token_weight, *vocab_weight;  /* [N] [V] */
  const logitless_tensor* normalizer;                   /* [] f32 or i64 */
  const logitless_tensor *lse, *target_logit, *entropy; /* [N] [N] [N] */
  const logitless_tensor* argmax;                       /* [N] i32 or i64 */
  const logitless_tensor *row_reference, *row_log_sum;  /* [N] [N] */
  const logitless_tensor* weighted_logit_sum;           /* [N] */
  const logitless_tensor* grad_loss;                    /* it has the shape of loss */
  const logitless_tensor *grad_lse, *grad_target_logit, *grad_entropy; /* [N] [N] [N] */
  const logitless_tensor* grad_logits;                                 /* [N,V] */
  const logitless_tensor *grad_input, *grad_weight, *grad_bias;        /* [N,D] [V,D] [V] */
  /* [1] i32; faults are or-ed into it: 1 a target outside, 2 kept state that is another's, 4 a
   * temperature that is none */
  const logitless_tensor* fault;
  /* Linear Forward and Backward have these: logitless_kept_size says how large, and which key. */
  const logitless_tensor *kept, *kept_rows; /* [blocks * N to 64, 64] [N,8] */
  uint64_t kept_key;                        /* only Backward has it */
  int32_t consume_kept; /* only Backward has it: `kept` need not serve another one */
  int32_t reserved_2;
  const logitless_tensor* temperature; /* [N] f32; it replaces options.temperature */
  const logitless_tensor *logprob, *sum_p_squared, *mean_logit; /* [N] [N] [N] */
  const logitless_tensor* rank;                                 /* [N] i32 or i64 */
  const logitless_tensor* anchor; /* [N] f32; only a linear Forward on a shard has it */
  /* Combine has these, of P shards of the vocabulary, as their Forwards wrote them: each [P,N] */
  const logitless_tensor *shard_row_reference, *shard_row_log_sum, *shard_target_logit;
  const logitless_tensor *shard_entropy, *shard_argmax, *shard_weighted_logit_sum;
  const logitless_tensor *shard_sum_p_squared, *shard_mean_logit;
  const logitless_tensor* max_logprob;       /* [N] */
  const logitless_tensor* shard_max_logprob; /* [P,N] Combine has it */
  /* LinearDivergence ops have these. NULL takes LOGITLESS_DIVERGENCE_OPTIONS_INIT */
  const logitless_divergence_options* divergence;
  const logitless_tensor *teacher_input, *teacher_weight, *teacher_bias; /* [N,Dt] [V,Dt] [V] */
  const logitless_tensor* teacher_logits;               /* [N,V] in place of these three */
  const logitless_tensor* teacher_temperature;          /* [N] f32 */
  const logitless_tensor *teacher_entropy, *acceptance; /* [N] [N] */
  const logitless_tensor* mass_above;                   /* [N] */
  /* These are of a shard of the vocabulary; Forward has the sums and Backward the mean. */
  const logitless_tensor *teacher_row_reference, *teacher_row_log_sum; /* [N] [N] */
  const logitless_tensor *divergence_sum, *slope_sum, *slope_mean;     /* [N] [N] [N] */
  /* LinearCrossEntropy has these of chosen columns: Forward the second, Backward the third */
  const logitless_tensor* ids;                        /* [N,K] i32 or i64 */
  const logitless_tensor *logits_at, *grad_logits_at; /* [N,K] [N,K] */
  /* A linear Forward writes each token's k largest logits and their ids (i32 or i64); Combine does
   * too, of its shards' */
  const logitless_tensor *top_logits, *top_ids;             /* [N,k] [N,k] */
  const logitless_tensor *shard_top_logits, *shard_top_ids; /* [P,N*k] [P,N*k] */
  const logitless_tensor* id_offsets; /* [N+1] i32 or i64; ids and what goes with them are [M] */
  int32_t only_chosen;                /* only Backward has it: logits_at alone has a gradient */
  int32_t reserved_3;
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

typedef struct logitless_execution {
  uint32_t struct_size;
  int32_t device_type, device_index;
  int32_t reserved;
  void* stream;                       /* it is a cudaStream_t or a WGPUQueue */
  const logitless_executor* executor; /* only the CPU uses it; NULL takes the library's own pool */
} logitless_execution;

typedef struct logitless_workspace_size {
  uint32_t struct_size;
  uint32_t reserved;
  uint64_t minimum, recommended, alignment; /* they count bytes */
} logitless_workspace_size;

typedef struct logitless_workspace_buffer {
  uint32_t struct_size;
  uint32_t reserved;
  void* data;
  uint64_t bytes, byte_offset; /* during the call [data + byte_offset, + bytes) is the library's */
} logitless_workspace_buffer;

/* Forward keeps this for Backward in so many bytes: docs/semantics.md, "Kept state". */
typedef struct logitless_kept {
  uint32_t struct_size;
  uint32_t reserved;
  int64_t columns;       /* the vocabulary's first so many are kept; 0 says that nothing is */
  int64_t shape[2];      /* it is that of `kept`, whose dtype is the input's */
  int64_t rows_shape[2]; /* it is that of `kept_rows`, in f32 */
  uint64_t bytes;        /* both together have so many */
  uint64_t key;          /* Backward is told it as kept_key */
} logitless_kept;

/* A call whose rules were checked and whose work was divided once: docs/semantics.md, "Plans". */
typedef struct logitless_plan logitless_plan;
/* What differs from one run of a plan to the next. */
typedef struct logitless_plan_arguments {
  uint32_t struct_size;
  uint32_t count; /* the number of addresses */
  /* One for each tensor that the op had at create, in the order in which logitless_op lists them.
   * It takes the place of the tensor's `data`; byte_offset, shape and strides stay. */
  void* const* addresses;
  void* stream;      /* it is a cudaStream_t or a WGPUQueue */
  double normalizer; /* it replaces options.normalizer; 0 leaves that */
} logitless_plan_arguments;

/* These macros set every struct to its defaults; all that a macro does not name is zero. */
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
#define LOGITLESS_PLAN_ARGUMENTS_INIT {sizeof(logitless_plan_arguments), 0, 0, 0, 0.0}
#define LOGITLESS_LOSS_OPTIONS_INIT                                                               \
  {sizeof(logitless_loss_options), LOGITLESS_REDUCTION_MEAN, -100, 0.0f, 0.0f, 1.0f, 0.0f, 1.0f,  \
   LOGITLESS_OUT_OF_RANGE_ERROR, LOGITLESS_EMPTY_MEAN_ZERO, LOGITLESS_INPUT_LOGITS, 1e-9f, 0, 0.0, \
   0, 0}
#define LOGITLESS_DIVERGENCE_OPTIONS_INIT                                                         \
  {sizeof(logitless_divergence_options), LOGITLESS_FORWARD_KL, 0.5f, 0.0f, 1.0f, 0.0f, 1.0f, 0}
/* clang-format on */

/* Every function may be called with status = NULL; execution = NULL is the CPU with the library's
 * own pool, workspace = NULL one of 0 bytes. */

/* Finds the bytes of workspace that `run` needs for `op`. It is pure and cheap. If data pointers
 * are NULL, the answer is enough for any address, else for the given ones. Returns the status
 * code. On an error `size` is left as it was. */
LOGITLESS_API int32_t logitless_workspace(const logitless_op* op,
                                          const logitless_execution* execution,
                                          logitless_workspace_size* size, logitless_status* status);
/* Finds what a linear Forward keeps for Backward in `bytes` (UINT64_MAX is as much as there is),
 * and how large the tensors are, by a formula of the shape and the dtype alone, the same on
 * every device. `op` is the Forward; its data pointers may be NULL, `kept` and `kept_rows`
 * absent. Returns the code; on an error `kept` is left as it was. */
LOGITLESS_API int32_t logitless_kept_size(const logitless_op* op,
                                          const logitless_execution* execution, uint64_t bytes,
                                          logitless_kept* kept, logitless_status* status);
/* Runs `op` in any workspace >= minimum. It neither allocates nor synchronizes. Returns the
 * code. */
LOGITLESS_API int32_t logitless_run(const logitless_op* op,
                                    const logitless_workspace_buffer* workspace,
                                    const logitless_execution* execution, logitless_status* status);
/* Multiplies values by factor, in place, with each element rounded once, for gradients that were
 * made with the loss, before their upstream factor was known. `values` [n] are contiguous f32,
 * f16 or bf16; `factor` [] is f32 on the same device. Where the factor is exactly 1 nothing is
 * written: the kernel finds that out, and nobody waits for it. This is for CUDA only; on the
 * host it is one loop of the caller's. Returns the code. */
LOGITLESS_API int32_t logitless_scale(const logitless_tensor* values,
                                      const logitless_tensor* factor,
                                      const logitless_execution* execution,
                                      logitless_status* status);
/* Does the same for `count` vectors, 0 to 4 of them, in one launch. */
LOGITLESS_API int32_t logitless_scale_each(const logitless_tensor* const* values, int32_t count,
                                           const logitless_tensor* factor,
                                           const logitless_execution* execution,
                                           logitless_status* status);
/* Returns LOGITLESS_VERSION of the library loaded, which may be newer than this header. */
LOGITLESS_API int32_t logitless_version(void);
/* Writes one line about a backend, e.g. "AVX3_SPR, 2 threads", to `text`; or returns
 * backend_unavailable with the reason. */
LOGITLESS_API int32_t logitless_describe_backend(int32_t device_type, char* text, size_t bytes,
                                                 logitless_status* status);
/* Loads every kernel of the execution's device, and the matrix library, so that the first run does
 * not: CUDA otherwise loads a kernel at its first launch, which may wait for the device and may not
 * happen while a graph is captured. The matrix library loads its own kernels when a product of a
 * shape is first asked for, whatever is done here: run a linear op once before capturing it.
 * Where the driver is older than that for CUDA 12.4, a kernel is loaded at its first launch all the
 * same; where the matrix library is absent, the linear ops say so. Neither is an error here.
 * Nothing to do on the CPU. Returns the code. */
LOGITLESS_API int32_t logitless_warmup(const logitless_execution* execution,
                                       logitless_status* status);
/* On WebGPU a call's workspace is several buffers, made within a budget of bytes: pass it as the
 * workspace's data with at most that many bytes. It is destroyed when no call uses it any more. */
LOGITLESS_API int32_t logitless_webgpu_create_workspace(int32_t device_index, uint64_t bytes,
                                                        void** workspace, logitless_status* status);
LOGITLESS_API void logitless_webgpu_destroy_workspace(void* workspace);
/* Registers a device of the caller's (WGPUInstance, WGPUDevice, WGPUQueue of the same
 * wgpu-native), and gives the device_index by which executions and tensors then name it. The
 * same device has the same index. */
LOGITLESS_API int32_t logitless_webgpu_use_device(void* instance, void* device, void* queue,
                                                  int32_t* device_index, logitless_status* status);
/* Returns the handles of a device, 0 being the library's own, for making buffers on it. */
LOGITLESS_API int32_t logitless_webgpu_device(int32_t device_index, void** instance, void** device,
                                              void** queue, logitless_status* status);
/* Sets the threads of the library's own pool; 0 or less asks for the default
 * (LOGITLESS_NUM_THREADS, OMP_NUM_THREADS, the affinity mask, the cgroup quota). Returns the
 * number now in force. */
LOGITLESS_API int32_t logitless_set_num_threads(int32_t num_threads);
LOGITLESS_API int32_t logitless_num_threads(void);
/* This is every op as a handler of XLA's foreign function interface (XLA_FFI_Handler), for JAX:
 * `call_frame` is an XLA_FFI_CallFrame, the result an XLA_FFI_Error or NULL. Which attributes a
 * call carries is between this library and python/logitless/jax. */
LOGITLESS_API void* logitless_xla_run(void* call_frame);

/* As the `bytes` of a plan: those that are recommended for the op. */
#define LOGITLESS_RECOMMENDED UINT64_MAX

/* Plans `op` for runs in `bytes` of workspace, at least the minimum that logitless_workspace says.
 * The plan owns copies of all it was given and of the executor, but for the memory of tensors.
 * Where data pointers are given, runs bring addresses that are aligned as well; NULL plans for any
 * address. Destroy it with logitless_plan_destroy. Returns the code; on an error `plan` is left as
 * it was. */
LOGITLESS_API int32_t logitless_plan_create(const logitless_op* op,
                                            const logitless_execution* execution, uint64_t bytes,
                                            logitless_plan** plan, logitless_status* status);
/* Says what workspace a run of the plan takes: minimum and recommended are the plan's bytes. */
LOGITLESS_API int32_t logitless_plan_size(const logitless_plan* plan,
                                          logitless_workspace_size* size, logitless_status* status);
/* Runs the plan as logitless_run would run its op in a workspace of the plan's bytes: the same
 * bits. It checks addresses, overlaps and the workspace, neither allocates nor synchronizes, and
 * changes nothing of the plan, so that threads may run one at once, each in a workspace of its own.
 * Returns the code. */
LOGITLESS_API int32_t logitless_plan_run(const logitless_plan* plan,
                                         const logitless_plan_arguments* arguments,
                                         const logitless_workspace_buffer* workspace,
                                         logitless_status* status);
/* Frees the plan, which no thread may be running; work that it enqueued goes on. NULL is nothing.
 */
LOGITLESS_API void logitless_plan_destroy(logitless_plan* plan);

/* Returns 1 where Backward uses what Forward keeps, with inputs of `dtype` on a device of this type
 * under these options (NULL: the defaults); 0 where it does not, or an argument is unknown. The
 * answer is that of a whole vocabulary of any size, without grad_entropy. No device needs to be
 * there. */
LOGITLESS_API int32_t logitless_keeps(int32_t device_type, int32_t dtype,
                                      const logitless_loss_options* options);

#ifdef __cplusplus
}
#endif
#endif
