/* SPDX-License-Identifier: Apache-2.0
 *
 * The C interface from C11, against the shared library: sizes of structs, NULLs, small calls.
 *   logits z = [[0, log 3], [0, log 3]], target [1, 0]: p = [1/4, 3/4], loss = mean(log 4/3, log 4)
 */
#include <math.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "logitless/c.h"

#define CHECK(condition)                                                           \
  do {                                                                             \
    if (!(condition)) {                                                            \
      fprintf(stderr, "%s:%d: %s (%s)\n", __FILE__, __LINE__, #condition, g_what); \
      ++g_failures;                                                                \
    }                                                                              \
  } while (0)

static int g_failures;
static const char* g_what = "";

/* A struct of a newer version of the library: today's struct and a tail that today's library
 * does not know. */
#define NEWER(type) \
  struct {          \
    type value;     \
    char tail[16];  \
  }

static NEWER(logitless_op) g_op;
static NEWER(logitless_loss_options) g_options;
static NEWER(logitless_tensor) g_target, g_loss;
static NEWER(logitless_executor) g_executor;
static NEWER(logitless_execution) g_execution;
static NEWER(logitless_workspace_size) g_size;
static NEWER(logitless_workspace_buffer) g_workspace;
static NEWER(logitless_status) g_status;
static NEWER(logitless_plan_arguments) g_arguments;
static logitless_tensor g_tensors[8];

static float g_logits[4], g_loss_value, g_one = 1, g_gradient[4], g_input_gradient[2];
static float g_input[2] = {1, 1}, g_weight[2];
static int64_t g_target_value[2] = {1, 0};
static _Alignas(64) char g_memory[1 << 22];

static logitless_tensor view(void* data, int32_t dtype, int32_t rank, int64_t rows,
                             int64_t columns) {
  logitless_tensor t = LOGITLESS_TENSOR_INIT;
  t.dtype = dtype;
  t.data = data;
  t.rank = rank;
  t.shape[0] = rows;
  t.shape[1] = columns;
  t.stride[0] = rank == 2 ? columns : 1;
  t.stride[1] = 1;
  return t;
}

static void run_in_order(void* state, int64_t count, void (*fn)(void*, int64_t), void* context) {
  ++*(int*)state;
  for (int64_t i = 0; i < count; ++i) fn(context, i);
}
static int g_regions;

/* Fills g_op with an op of this kind on this device and its tensors, of two tokens. */
static void set_up(int32_t kind, int32_t device) {
  const logitless_op op = LOGITLESS_OP_INIT(kind);
  const logitless_loss_options options = LOGITLESS_LOSS_OPTIONS_INIT;
  const logitless_executor executor = {sizeof(logitless_executor), 2, &g_regions, run_in_order};
  const logitless_execution execution = LOGITLESS_EXECUTION_INIT;
  const logitless_workspace_size size = LOGITLESS_WORKSPACE_SIZE_INIT;
  const logitless_workspace_buffer workspace = LOGITLESS_WORKSPACE_BUFFER_INIT;
  const logitless_status status = LOGITLESS_STATUS_INIT;
  const logitless_plan_arguments arguments = LOGITLESS_PLAN_ARGUMENTS_INIT;
  const int linear = kind >= LOGITLESS_LINEAR_CROSS_ENTROPY_FORWARD;
  for (int i = 0; i < 4; ++i) g_logits[i] = i % 2 == 0 ? 0 : logf(3);
  g_weight[0] = 0, g_weight[1] = logf(3);
  g_loss_value = -1;
  for (int i = 0; i < 4; ++i) g_gradient[i] = -1;
  g_tensors[0] = view(g_logits, LOGITLESS_F32, 2, 2, 2);
  g_tensors[1] = view(g_gradient, LOGITLESS_F32, 2, 2, linear ? 1 : 2);
  g_tensors[2] = view(g_input, LOGITLESS_F32, 2, 2, 1);
  g_tensors[3] = view(g_weight, LOGITLESS_F32, 2, 2, 1);
  g_tensors[4] = view(g_input_gradient, LOGITLESS_F32, 2, 2, 1);
  g_tensors[5] = view(&g_one, LOGITLESS_F32, 0, 0, 0);
  g_target.value = view(g_target_value, LOGITLESS_I64, 1, 2, 0);
  g_loss.value = view(&g_loss_value, LOGITLESS_F32, 0, 0, 0);
  g_options.value = options;
  g_executor.value = executor;
  g_execution.value = execution;
  g_execution.value.device_type = device;
  g_execution.value.executor = &g_executor.value;
  g_size.value = size;
  g_workspace.value = workspace;
  g_workspace.value.data = g_memory;
  g_workspace.value.bytes = sizeof(g_memory);
  g_status.value = status;
  g_op.value = op;
  g_arguments.value = arguments;
  if (linear) {
    g_op.value.input = &g_tensors[2];
    g_op.value.weight = &g_tensors[3];
  } else {
    g_op.value.logits = &g_tensors[0];
  }
  if (kind == LOGITLESS_SOFTMAX) {
    g_op.value.probabilities = &g_tensors[1];
    return;
  }
  g_op.value.options = &g_options.value;
  g_op.value.target = &g_target.value;
  /* Each family of ops is declared in the order Forward, Backward, ForwardBackward. */
  const int position = (kind - LOGITLESS_CROSS_ENTROPY_FORWARD) % 3;
  if (position != 1) g_op.value.loss = &g_loss.value;
  if (position == 0) return;
  g_op.value.grad_loss = &g_tensors[5];
  if (linear) {
    g_op.value.grad_weight = &g_tensors[1];
    g_op.value.grad_input = &g_tensors[4];
  } else {
    g_op.value.grad_logits = &g_tensors[1];
  }
}

static int32_t ask(void) {
  return logitless_workspace(&g_op.value, &g_execution.value, &g_size.value, &g_status.value);
}

/* Runs g_op through a plan. Addresses are listed in the order of the fields of logitless_op. */
static int32_t run_plan(void) {
  logitless_plan* plan = NULL;
  void* addresses[8];
  uint32_t count = 0;
  const logitless_op* op = &g_op.value;
  const logitless_tensor* listed[] = {
      op->logits,         op->probabilities, op->input,     op->weight,
      op->target,         op->loss,          op->grad_loss, op->grad_logits,
      op->grad_input,     op->grad_weight,   op->ids,       op->logits_at,
      op->grad_logits_at, op->top_logits,    op->top_ids,   op->id_offsets};
  int32_t code = logitless_plan_create(op, &g_execution.value, g_workspace.value.bytes, &plan,
                                       &g_status.value);
  CHECK((code == LOGITLESS_OK) == (plan != NULL));
  for (size_t i = 0; i < sizeof(listed) / sizeof(listed[0]); ++i) {
    if (listed[i] != NULL) addresses[count++] = listed[i]->data;
  }
  g_arguments.value.count = count;
  g_arguments.value.addresses = addresses;
  if (code == LOGITLESS_OK) code = logitless_plan_size(plan, &g_size.value, &g_status.value);
  if (code == LOGITLESS_OK) {
    code = logitless_plan_run(plan, &g_arguments.value, &g_workspace.value, &g_status.value);
  }
  logitless_plan_destroy(plan);
  return code;
}

static int32_t run(void) {
  return logitless_run(&g_op.value, &g_workspace.value, &g_execution.value, &g_status.value);
}

/* Tests every rule about the size of one struct, which `call` reads. The bytes from `shorter`
 * on are set, but must not be read where struct_size ends there. */
static void size_rules(const char* what, int32_t (*call)(void), void* wrapped, size_t bytes,
                       size_t shorter) {
  unsigned char* memory = wrapped;
  unsigned char saved[1024];
  const uint32_t bad[] = {0, 3, 12, 4104, UINT32_MAX}; /* 12 cuts a field in two */
  uint32_t size = (uint32_t)(bytes + 16);
  g_what = what;
  memcpy(saved, memory, bytes);
  memset(memory + bytes, 0, 16);
  CHECK(call() == LOGITLESS_OK);
  memcpy(memory, &size, sizeof(size));
  CHECK(call() == LOGITLESS_OK);
  memory[bytes + 15] = 1;
  CHECK(call() == LOGITLESS_NOT_SUPPORTED);
  CHECK(strstr(g_status.value.message, "struct_size") != NULL);
  memory[bytes + 15] = 0;
  for (int i = 0; i < 5; ++i) {
    memcpy(memory, &bad[i], sizeof(bad[i]));
    CHECK(call() == LOGITLESS_INVALID_ARGUMENT);
    CHECK(strstr(g_status.value.message, "struct_size") != NULL);
  }
  size = (uint32_t)shorter;
  memcpy(memory, saved, bytes);
  memcpy(memory, &size, sizeof(size));
  memset(memory + shorter, 0xFF, bytes - shorter);
  CHECK(call() == LOGITLESS_OK);
  memcpy(memory, saved, bytes);
  g_what = "";
}

static void test_struct_sizes(int32_t device) {
  set_up(LOGITLESS_CROSS_ENTROPY_FORWARD, device);
  size_rules("op", ask, &g_op, sizeof(logitless_op), offsetof(logitless_op, grad_loss));
  size_rules("op", run, &g_op, sizeof(logitless_op), offsetof(logitless_op, grad_loss));
  size_rules("options", run, &g_options, sizeof(logitless_loss_options),
             offsetof(logitless_loss_options, normalizer));
  size_rules("target", run, &g_target, sizeof(logitless_tensor),
             offsetof(logitless_tensor, stride)); /* stride 0 repeats the first target */
  size_rules("loss", run, &g_loss, sizeof(logitless_tensor), offsetof(logitless_tensor, shape));
  size_rules("execution", run, &g_execution, sizeof(logitless_execution),
             offsetof(logitless_execution, stream));
  size_rules("size", ask, &g_size, sizeof(logitless_workspace_size),
             offsetof(logitless_workspace_size, recommended));
  size_rules("workspace", run, &g_workspace, sizeof(logitless_workspace_buffer),
             offsetof(logitless_workspace_buffer, byte_offset));
  size_rules("size", run_plan, &g_size, sizeof(logitless_workspace_size),
             offsetof(logitless_workspace_size, recommended));
  size_rules("arguments", run_plan, &g_arguments, sizeof(logitless_plan_arguments),
             offsetof(logitless_plan_arguments, stream));
}

/* Nothing beyond what the caller's struct holds is written. */
static void test_outputs_of_other_sizes(void) {
  set_up(LOGITLESS_CROSS_ENTROPY_FORWARD, LOGITLESS_REFERENCE);
  g_size.value.struct_size = offsetof(logitless_workspace_size, alignment);
  g_size.value.alignment = 12345;
  CHECK(ask() == LOGITLESS_OK);
  CHECK(g_size.value.alignment == 12345);
  CHECK(g_size.value.struct_size == offsetof(logitless_workspace_size, alignment));

  g_op.value.kind = 99;
  memset(&g_status, 0x7F, sizeof(g_status));
  g_status.value.struct_size = offsetof(logitless_status, message) + 8;
  CHECK(run() == LOGITLESS_UNKNOWN_ENUM);
  CHECK(g_status.value.code == LOGITLESS_UNKNOWN_ENUM);
  CHECK(memcmp(g_status.value.message, "op.kind", 8) == 0); /* 7 letters and the NUL fit */
  CHECK(g_status.value.message[8] == 0x7F);
  g_status.value.struct_size = 0;
  g_status.value.code = 77;
  CHECK(run() == LOGITLESS_UNKNOWN_ENUM);
  CHECK(g_status.value.code == 77);
  g_status.value.struct_size = sizeof(g_status);
  CHECK(run() == LOGITLESS_UNKNOWN_ENUM);
  CHECK(strstr(g_status.value.message, "op.kind is 99") != NULL);
  CHECK(g_status.tail[0] == 0x7F && g_status.tail[15] == 0x7F);
}

static void test_executor(void) {
  set_up(LOGITLESS_CROSS_ENTROPY_FORWARD, LOGITLESS_CPU);
  g_executor.value.num_threads = 0;
  CHECK(run() == LOGITLESS_INVALID_ARGUMENT);
  CHECK(strstr(g_status.value.message, "num_threads") != NULL);
  g_executor.value.num_threads = 1;
  g_executor.value.parallel_for = NULL;
  CHECK(run() == LOGITLESS_INVALID_ARGUMENT);
  CHECK(strstr(g_status.value.message, "parallel_for") != NULL);
  g_executor.value.struct_size =
      offsetof(logitless_executor, state); /* it is zero-extended, so it has no function */
  CHECK(run() == LOGITLESS_INVALID_ARGUMENT);
}

static void test_reserved_and_foreign_fields(void) {
  set_up(LOGITLESS_CROSS_ENTROPY_FORWARD, LOGITLESS_CPU);
  g_op.value.reserved = 1;
  CHECK(run() == LOGITLESS_INVALID_ARGUMENT);
  CHECK(strstr(g_status.value.message, "reserved") != NULL);
  g_op.value.reserved = 0;
  g_execution.value.reserved = 1;
  CHECK(run() == LOGITLESS_INVALID_ARGUMENT);
  g_execution.value.reserved = 0;
  g_workspace.value.reserved = 1;
  CHECK(run() == LOGITLESS_INVALID_ARGUMENT);
  g_workspace.value.reserved = 0;
  g_target.value.reserved = 1;
  CHECK(run() == LOGITLESS_INVALID_ARGUMENT);
  CHECK(strstr(g_status.value.message, "target.reserved") != NULL);
  g_target.value.reserved = 0;
  g_target.value.rank = -1;
  CHECK(run() == LOGITLESS_WRONG_SHAPE);
  CHECK(strstr(g_status.value.message, "target") != NULL);
  g_target.value.rank = 1;
  CHECK(run() == LOGITLESS_OK);
  /* Fields of other ops are refused by name, not ignored. */
  g_op.value.grad_weight = &g_tensors[1];
  CHECK(run() == LOGITLESS_INVALID_ARGUMENT);
  CHECK(strstr(g_status.value.message, "grad_weight") != NULL);
  g_op.value.grad_weight = NULL;
  g_op.value.grad_lse = &g_tensors[1];
  CHECK(run() == LOGITLESS_INVALID_ARGUMENT);
  CHECK(strstr(g_status.value.message, "grad_lse") != NULL);
  g_op.value.grad_lse = NULL;
  g_op.value.accumulate_grad_weight = 1;
  CHECK(run() == LOGITLESS_INVALID_ARGUMENT);
  CHECK(strstr(g_status.value.message, "accumulate_grad_weight") != NULL);
  set_up(LOGITLESS_SOFTMAX, LOGITLESS_CPU);
  g_op.value.options = &g_options.value;
  CHECK(run() == LOGITLESS_INVALID_ARGUMENT);
  CHECK(strstr(g_status.value.message, "options") != NULL);
}

static void test_nulls(void) {
  logitless_status status = LOGITLESS_STATUS_INIT;
  logitless_op empty = LOGITLESS_OP_INIT(0);
  char text[128];
  CHECK(logitless_run(NULL, NULL, NULL, NULL) == LOGITLESS_INVALID_ARGUMENT);
  CHECK(logitless_workspace(NULL, NULL, NULL, NULL) == LOGITLESS_INVALID_ARGUMENT);
  CHECK(logitless_run(NULL, NULL, NULL, &status) == LOGITLESS_INVALID_ARGUMENT);
  CHECK(status.code == LOGITLESS_INVALID_ARGUMENT && strstr(status.message, "op is NULL") != NULL);
  for (int32_t kind = -1; kind <= 11; ++kind) {
    const int32_t expected =
        kind < 0 || kind > 10 ? LOGITLESS_UNKNOWN_ENUM : LOGITLESS_INVALID_ARGUMENT;
    empty.kind = kind;
    CHECK(logitless_run(&empty, NULL, NULL, &status) == expected);
    CHECK(logitless_run(&empty, NULL, NULL, NULL) == expected);
  }
  set_up(LOGITLESS_CROSS_ENTROPY_FORWARD, LOGITLESS_CPU);
  CHECK(logitless_workspace(&g_op.value, NULL, NULL, &status) == LOGITLESS_INVALID_ARGUMENT);
  CHECK(strstr(status.message, "size") != NULL);
  CHECK(logitless_workspace(&g_op.value, NULL, &g_size.value, NULL) == LOGITLESS_OK);
  CHECK(logitless_run(&g_op.value, NULL, NULL, &status) ==
        (g_size.value.minimum > 0 ? LOGITLESS_WORKSPACE_TOO_SMALL : LOGITLESS_OK));
  CHECK(logitless_run(&g_op.value, &g_workspace.value, NULL, NULL) == LOGITLESS_OK);
  g_op.value.options = NULL; /* the op then has the defaults */
  g_loss_value = -1;
  CHECK(logitless_run(&g_op.value, &g_workspace.value, NULL, &status) == LOGITLESS_OK);
  CHECK(fabsf(g_loss_value - 0.5f * logf(16.0f / 3)) < 1e-6f);
  CHECK(status.code == LOGITLESS_OK && status.message[0] == 0);
  CHECK(logitless_describe_backend(LOGITLESS_CPU, NULL, 0, NULL) == LOGITLESS_OK);
  CHECK(logitless_describe_backend(LOGITLESS_CPU, NULL, 9, NULL) == LOGITLESS_INVALID_ARGUMENT);
  CHECK(logitless_describe_backend(LOGITLESS_CPU, text, 0, NULL) == LOGITLESS_OK);
}

static void test_describe_version_threads(void) {
  logitless_status status = LOGITLESS_STATUS_INIT;
  char text[128];
  CHECK(logitless_version() == LOGITLESS_VERSION);
  CHECK(logitless_describe_backend(LOGITLESS_CPU, text, sizeof(text), &status) == LOGITLESS_OK);
  CHECK(strstr(text, "threads") != NULL);
  CHECK(logitless_describe_backend(LOGITLESS_REFERENCE, text, sizeof(text), &status) ==
        LOGITLESS_OK);
  CHECK(strlen(text) > 4);
  CHECK(logitless_describe_backend(LOGITLESS_REFERENCE, text, 5, &status) == LOGITLESS_OK);
  CHECK(strlen(text) == 4);
  for (int32_t absent = LOGITLESS_CUDA; absent <= LOGITLESS_WEBGPU; ++absent) {
    CHECK(logitless_describe_backend(absent, text, sizeof(text), &status) ==
          LOGITLESS_BACKEND_UNAVAILABLE);
    CHECK(text[0] == 0 && strlen(status.message) > 8);
  }
  CHECK(logitless_describe_backend(77, text, sizeof(text), &status) == LOGITLESS_UNKNOWN_ENUM);
  CHECK(logitless_set_num_threads(3) == 3);
  CHECK(logitless_num_threads() == 3);
  const int32_t standard = logitless_set_num_threads(0);
  CHECK(standard >= 1 && logitless_num_threads() == standard);
  CHECK(logitless_set_num_threads(-5) == standard);
}

static void test_scale(void) {
  CHECK(logitless_scale(NULL, NULL, NULL, NULL) == LOGITLESS_INVALID_ARGUMENT);
}

static void test_warmup(void) {
  CHECK(logitless_warmup(NULL, NULL) == LOGITLESS_OK);
  logitless_execution execution = LOGITLESS_EXECUTION_INIT;
  logitless_status status = LOGITLESS_STATUS_INIT;
  for (int32_t device = LOGITLESS_CPU; device <= LOGITLESS_REFERENCE; ++device) {
    char text[256];
    execution.device_type = device;
    const int32_t present = logitless_describe_backend(device, text, sizeof(text), NULL);
    CHECK(logitless_warmup(&execution, &status) == present);
    CHECK((status.message[0] == 0) == (present == LOGITLESS_OK));
  }
  execution.device_type = 4;
  CHECK(logitless_warmup(&execution, &status) == LOGITLESS_UNKNOWN_ENUM);
  execution.device_type = LOGITLESS_CPU;
  execution.device_index = 1;
  CHECK(logitless_warmup(&execution, &status) == LOGITLESS_WRONG_DEVICE);
  execution.device_index = 0;
  execution.struct_size = 0;
  CHECK(logitless_warmup(&execution, &status) == LOGITLESS_INVALID_ARGUMENT);
}

static void expect_values(const float* values, const float* expected, int count) {
  for (int i = 0; i < count; ++i) {
    if (!(fabsf(values[i] - expected[i]) < 2e-7f)) {
      fprintf(stderr, "%s: value %d is %.9g; expected %.9g\n", g_what, i, values[i], expected[i]);
      ++g_failures;
    }
  }
}

/* The gradients follow from dz = (p - onehot) / 2 = [[1, -1], [-3, 3]] / 8. */
static void test_every_op(int32_t device) {
  const float log3 = logf(3), loss = 0.5f * logf(16.0f / 3);
  const float probabilities[] = {0.25f, 0.75f, 0.25f, 0.75f};
  const float grad_logits[] = {0.125f, -0.125f, -0.375f, 0.375f};
  const float grad_weight[] = {-0.25f, 0.25f};
  const float grad_input[] = {-0.125f * log3, 0.375f * log3};
  static const char* const names[] = {"Softmax",
                                      "CrossEntropyForward",
                                      "CrossEntropyBackward",
                                      "CrossEntropyForwardBackward",
                                      "LinearCrossEntropyForward",
                                      "LinearCrossEntropyBackward",
                                      "LinearCrossEntropyForwardBackward"};
  for (int32_t k = 0; k < 14; ++k) {
    const int32_t kind = k / 2, by_plan = k % 2;
    g_what = names[kind];
    set_up(kind, device);
    CHECK(ask() == LOGITLESS_OK);
    CHECK(g_size.value.minimum <= g_size.value.recommended);
    CHECK(g_size.value.recommended <= sizeof(g_memory));
    g_workspace.value.bytes = g_size.value.minimum;
    CHECK((by_plan ? run_plan() : run()) == LOGITLESS_OK);
    CHECK(g_status.value.code == LOGITLESS_OK && g_status.value.message[0] == 0);
    if (kind == LOGITLESS_SOFTMAX) expect_values(g_gradient, probabilities, 4);
    if (g_op.value.loss != NULL) expect_values(&g_loss_value, &loss, 1);
    if (g_op.value.grad_logits != NULL) expect_values(g_gradient, grad_logits, 4);
    if (g_op.value.grad_weight != NULL) expect_values(g_gradient, grad_weight, 2);
    if (g_op.value.grad_input != NULL) expect_values(g_input_gradient, grad_input, 2);
  }
  g_what = "";
}

/* Statistics and a temperature per token. Temperatures [1/2, 0] make p = [1/10, 9/10] in the first
 * row, whose target is column 0, and NaN in the second. */
static void test_statistics_and_temperatures(int32_t device) {
  float values[6][2];
  int64_t rank[2] = {7, 7};
  float temperature[2] = {0.5f, 0};
  int32_t fault = 8;
  logitless_tensor each[6], ranks = view(rank, LOGITLESS_I64, 1, 2, 0);
  logitless_tensor fault_view = view(&fault, LOGITLESS_I32, 1, 1, 0);
  g_what = "the op's last fields";
  for (int i = 0; i < 6; ++i) each[i] = view(values[i], LOGITLESS_F32, 1, 2, 0);
  each[3].data = temperature;
  for (int32_t kind = LOGITLESS_CROSS_ENTROPY_FORWARD;
       kind <= LOGITLESS_LINEAR_CROSS_ENTROPY_FORWARD; kind += 3) {
    set_up(kind, device);
    g_target_value[0] = 0;
    g_op.value.loss = NULL;
    g_op.value.logprob = &each[0];
    g_op.value.sum_p_squared = &each[1];
    g_op.value.mean_logit = &each[2];
    g_op.value.temperature = &each[3];
    g_op.value.max_logprob = &each[4];
    g_op.value.mass_above = &each[5];
    g_op.value.rank = &ranks;
    g_op.value.fault = &fault_view;
    fault = 8;
    CHECK(run() == LOGITLESS_OK);
    CHECK(fabsf(values[0][0] - logf(0.1f)) < 1e-6f);
    CHECK(fabsf(values[1][0] - 0.82f) < 1e-6f);
    CHECK(fabsf(values[2][0] - logf(3)) < 1e-6f);
    CHECK(fabsf(values[4][0] - logf(0.9f)) < 1e-6f && isnan(values[4][1]));
    CHECK(fabsf(values[5][0] - 0.9f) < 1e-6f && isnan(values[5][1]));
    CHECK(rank[0] == 1 && rank[1] >= 0 && rank[1] < 2);
    for (int i = 0; i < 3; ++i) CHECK(isnan(values[i][1]));
    CHECK(fault == (8 | 4));
    g_options.value.temperature = 0.5f; /* two temperatures are an error */
    CHECK(run() == LOGITLESS_INVALID_ARGUMENT);
    CHECK(strstr(g_status.value.message, "temperature") != NULL);
  }
  g_target_value[0] = 1;
  g_what = "";
}

/* The student's p is [1/4, 3/4] in both rows, the teacher's q [1/2, 1/2]. */
static void test_divergence(int32_t device) {
  logitless_divergence_options options = LOGITLESS_DIVERGENCE_OPTIONS_INIT;
  float teacher[4] = {2, 2, -1, -1}, acceptance[2], entropy[2];
  logitless_tensor logits = view(teacher, LOGITLESS_F32, 2, 2, 2);
  logitless_tensor each[2] = {view(acceptance, LOGITLESS_F32, 1, 2, 0),
                              view(entropy, LOGITLESS_F32, 1, 2, 0)};
  const float loss[] = {0.5f * logf(4.0f / 3), 0.75f * logf(1.5f) - 0.25f * logf(2)};
  const float first[] = {-0.25f, 0.25f}; /* grad_weight of forward_kl: sum of p - q, input 1 */
  g_what = "divergences";
  for (int32_t kind = LOGITLESS_FORWARD_KL; kind <= LOGITLESS_REVERSE_KL; ++kind) {
    set_up(LOGITLESS_LINEAR_CROSS_ENTROPY_FORWARD_BACKWARD, device);
    g_op.value.kind = LOGITLESS_LINEAR_DIVERGENCE_FORWARD_BACKWARD;
    g_op.value.target = NULL;
    g_op.value.teacher_logits = &logits;
    g_op.value.acceptance = &each[0];
    g_op.value.teacher_entropy = &each[1];
    options.kind = kind;
    g_op.value.divergence = kind == LOGITLESS_FORWARD_KL ? NULL : &options;
    CHECK(ask() == LOGITLESS_OK);
    CHECK(run() == LOGITLESS_OK);
    CHECK(g_status.value.message[0] == 0);
    CHECK(fabsf(g_loss_value - loss[kind]) < 1e-6f);
    for (int i = 0; i < 2; ++i) {
      CHECK(fabsf(acceptance[i] - 0.75f) < 1e-6f && fabsf(entropy[i] - logf(2)) < 1e-6f);
    }
    if (kind == LOGITLESS_FORWARD_KL) expect_values(g_gradient, first, 2);
  }
  options.kind = 5;
  CHECK(run() == LOGITLESS_UNKNOWN_ENUM);
  options.kind = LOGITLESS_FORWARD_KL;
  options.reserved = 1;
  CHECK(run() == LOGITLESS_INVALID_ARGUMENT);
  CHECK(strstr(g_status.value.message, "divergence.reserved") != NULL);
  set_up(LOGITLESS_LINEAR_CROSS_ENTROPY_FORWARD, device);
  g_op.value.divergence = &options;
  CHECK(run() == LOGITLESS_INVALID_ARGUMENT);
  CHECK(strstr(g_status.value.message, "divergence is set") != NULL);
  g_what = "";
}

/* The heads of test_divergence as one shard: given the states, Forward writes reverse_kl's sums;
 * a missing state is an error. */
static void test_divergence_sums(int32_t device) {
  logitless_divergence_options options = LOGITLESS_DIVERGENCE_OPTIONS_INIT;
  float teacher[4] = {2, 2, -1, -1}, sums[2][2];
  float states[4][2] = {
      {logf(3), logf(3)}, {logf(4.0f / 3), logf(4.0f / 3)}, {2, -1}, {logf(2), logf(2)}};
  const float want = 0.75f * logf(1.5f) - 0.25f * logf(2);
  logitless_tensor logits = view(teacher, LOGITLESS_F32, 2, 2, 2), state[4], sum[2];
  for (int i = 0; i < 4; ++i) state[i] = view(states[i], LOGITLESS_F32, 1, 2, 0);
  for (int i = 0; i < 2; ++i) sum[i] = view(sums[i], LOGITLESS_F32, 1, 2, 0);
  g_what = "sums of divergences";
  set_up(LOGITLESS_LINEAR_CROSS_ENTROPY_FORWARD, device);
  g_op.value.kind = LOGITLESS_LINEAR_DIVERGENCE_FORWARD;
  g_op.value.target = NULL;
  g_op.value.loss = NULL;
  g_op.value.teacher_logits = &logits;
  g_op.value.divergence = &options;
  options.kind = LOGITLESS_REVERSE_KL;
  g_op.value.row_reference = &state[0];
  g_op.value.row_log_sum = &state[1];
  g_op.value.teacher_row_reference = &state[2];
  g_op.value.divergence_sum = &sum[0];
  g_op.value.slope_sum = &sum[1];
  CHECK(run() == LOGITLESS_INVALID_ARGUMENT);
  CHECK(strstr(g_status.value.message, "teacher_row_log_sum is missing") != NULL);
  g_op.value.teacher_row_log_sum = &state[3];
  CHECK(ask() == LOGITLESS_OK);
  CHECK(run() == LOGITLESS_OK);
  CHECK(g_status.value.message[0] == 0);
  for (int i = 0; i < 2; ++i) {
    CHECK(fabsf(sums[0][i] - want) < 1e-6f && fabsf(sums[1][i] - want) < 1e-6f);
  }
  g_what = "";
}

/* Both rows have the logits [0, log 3]; the first row's ids name column 1 twice. */
static void test_chosen_columns(int32_t device) {
  int32_t ids[2][3] = {{1, 0, 1}, {-1, 0, -1}};
  float logits[2][3], gradients[2][3] = {{0.5f, 2, 0.25f}, {NAN, -1, NAN}};
  logitless_tensor id = view(ids, LOGITLESS_I32, 2, 2, 3),
                   at = view(logits, LOGITLESS_F32, 2, 2, 3);
  const float first[] = {logf(3), 0, logf(3)}, grad_weight[] = {1, 0.75f};
  g_what = "chosen columns";
  set_up(LOGITLESS_LINEAR_CROSS_ENTROPY_FORWARD, device);
  g_op.value.ids = &id;
  CHECK(run() == LOGITLESS_INVALID_ARGUMENT);
  CHECK(strstr(g_status.value.message, "ids is given without logits_at") != NULL);
  g_op.value.logits_at = &at;
  for (int by_plan = 0; by_plan < 2; ++by_plan) {
    CHECK((by_plan ? run_plan() : run()) == LOGITLESS_OK);
    expect_values(logits[0], first, 3);
    CHECK(logits[1][1] == 0 && isinf(logits[1][0]) && isinf(logits[1][2]));
  }
  ids[1][2] = 2;
  CHECK(run() == LOGITLESS_TARGET_OUT_OF_RANGE);
  CHECK(strstr(g_status.value.message, "ids[1, 2] is 2; allowed: 0 to 1") != NULL);
  ids[1][2] = -1;
  set_up(LOGITLESS_LINEAR_CROSS_ENTROPY_BACKWARD, device);
  g_one = 0; /* no gradient of the loss */
  at.data = gradients;
  g_op.value.ids = &id;
  g_op.value.grad_logits_at = &at;
  CHECK(run() == LOGITLESS_OK);
  expect_values(g_gradient, grad_weight, 2);
  g_one = 1;
  /* The same ids as lists. With only_chosen no softmax is computed. */
  int64_t listed[4] = {1, 0, 1, 0}, offsets[3] = {0, 3, 4};
  float of_listed[4] = {0.5f, 2, 0.25f, -1};
  logitless_tensor list = view(listed, LOGITLESS_I64, 1, 4, 0),
                   at_list = view(of_listed, LOGITLESS_F32, 1, 4, 0),
                   ends = view(offsets, LOGITLESS_I64, 1, 3, 0);
  set_up(LOGITLESS_LINEAR_CROSS_ENTROPY_BACKWARD, device);
  g_op.value.grad_loss = NULL;
  g_op.value.only_chosen = 1;
  g_op.value.ids = &list;
  g_op.value.grad_logits_at = &at_list;
  g_op.value.id_offsets = &ends;
  CHECK(run() == LOGITLESS_OK);
  expect_values(g_gradient, grad_weight, 2);
  offsets[1] = 5;
  CHECK(run() == LOGITLESS_INVALID_ARGUMENT);
  CHECK(strstr(g_status.value.message, "id_offsets[1] is 5; allowed: 0 to 4") != NULL);
  set_up(LOGITLESS_LINEAR_CROSS_ENTROPY_FORWARD, device);
  g_op.value.only_chosen = 1;
  CHECK(run() == LOGITLESS_INVALID_ARGUMENT);
  CHECK(strstr(g_status.value.message, "only_chosen is set; LinearCrossEntropyForward does not") !=
        NULL);
  /* only Forward and Backward take ids */
  set_up(LOGITLESS_LINEAR_CROSS_ENTROPY_FORWARD_BACKWARD, device);
  g_op.value.ids = &id;
  CHECK(run() == LOGITLESS_INVALID_ARGUMENT);
  CHECK(strstr(g_status.value.message, "ids is set; LinearCrossEntropyForwardBackward does not") !=
        NULL);
  g_what = "";
}

/* Both rows have the logits [0, log 3]. */
static void test_largest_logits(int32_t device) {
  int32_t ids[2][2];
  float logits[2][2];
  logitless_tensor id = view(ids, LOGITLESS_I32, 2, 2, 2),
                   top = view(logits, LOGITLESS_F32, 2, 2, 2);
  const float want[] = {logf(3), 0};
  g_what = "largest logits";
  set_up(LOGITLESS_LINEAR_CROSS_ENTROPY_FORWARD, device);
  g_op.value.top_logits = &top;
  CHECK(run() == LOGITLESS_INVALID_ARGUMENT);
  CHECK(strstr(g_status.value.message, "top_logits is given without top_ids") != NULL);
  g_op.value.top_ids = &id;
  for (int by_plan = 0; by_plan < 2; ++by_plan) {
    CHECK((by_plan ? run_plan() : run()) == LOGITLESS_OK);
    for (int i = 0; i < 2; ++i) {
      expect_values(logits[i], want, 2);
      CHECK(ids[i][0] == 1 && ids[i][1] == 0);
    }
  }
  /* only linear ops have top_logits */
  set_up(LOGITLESS_CROSS_ENTROPY_FORWARD, device);
  g_op.value.top_logits = &top;
  CHECK(run() == LOGITLESS_INVALID_ARGUMENT);
  CHECK(strstr(g_status.value.message, "top_logits is set; CrossEntropyForward does not") != NULL);
  g_what = "";
}

/* Each of two shards has one column: logits [0, log 3] of both tokens. */
static void test_combine(int32_t device) {
  const float log3 = logf(3), loss = 0.5f * logf(16.0f / 3), lse[] = {logf(4), logf(4)};
  float reference[] = {0, 0, log3, log3}, log_sum[] = {0, 0, 0, 0};
  float target_logit[] = {-INFINITY, 0, log3, -INFINITY}, whole[2];
  int64_t target[] = {1, 0};
  logitless_tensor views[4];
  logitless_op op = LOGITLESS_OP_INIT(LOGITLESS_COMBINE);
  g_what = "combine";
  set_up(LOGITLESS_CROSS_ENTROPY_FORWARD, device);
  views[0] = view(reference, LOGITLESS_F32, 2, 2, 2);
  views[1] = view(log_sum, LOGITLESS_F32, 2, 2, 2);
  views[2] = view(target_logit, LOGITLESS_F32, 2, 2, 2);
  views[3] = view(whole, LOGITLESS_F32, 1, 2, 0);
  g_target.value = view(target, LOGITLESS_I64, 1, 2, 0);
  op.shard_row_reference = &views[0];
  op.shard_row_log_sum = &views[1];
  op.shard_target_logit = &views[2];
  op.target = &g_target.value;
  op.loss = &g_loss.value;
  op.lse = &views[3];
  op.options = &g_options.value;
  g_op.value = op;
  CHECK(run() == LOGITLESS_INVALID_ARGUMENT);
  CHECK(strstr(g_status.value.message, "vocab_total") != NULL);
  g_options.value.vocab_total = 2;
  CHECK(run() == LOGITLESS_OK);
  expect_values(&g_loss_value, &loss, 1);
  expect_values(whole, lse, 2);
  g_op.value.logits = &views[0];
  CHECK(run() == LOGITLESS_INVALID_ARGUMENT);
  CHECK(strstr(g_status.value.message, "logits") != NULL);
  g_what = "";
}

int main(void) {
  test_struct_sizes(LOGITLESS_CPU);
  test_struct_sizes(LOGITLESS_REFERENCE);
  test_outputs_of_other_sizes();
  test_executor();
  test_reserved_and_foreign_fields();
  test_nulls();
  test_describe_version_threads();
  test_scale();
  test_warmup();
  test_every_op(LOGITLESS_REFERENCE);
  test_every_op(LOGITLESS_CPU);
  test_statistics_and_temperatures(LOGITLESS_REFERENCE);
  test_statistics_and_temperatures(LOGITLESS_CPU);
  test_divergence(LOGITLESS_REFERENCE);
  test_divergence(LOGITLESS_CPU);
  test_divergence_sums(LOGITLESS_REFERENCE);
  test_divergence_sums(LOGITLESS_CPU);
  test_chosen_columns(LOGITLESS_REFERENCE);
  test_chosen_columns(LOGITLESS_CPU);
  test_largest_logits(LOGITLESS_REFERENCE);
  test_largest_logits(LOGITLESS_CPU);
  test_combine(LOGITLESS_REFERENCE);
  test_combine(LOGITLESS_CPU);
  if (g_failures == 0) printf("every check passed\n");
  return g_failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
