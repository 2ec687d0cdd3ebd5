// SPDX-License-Identifier: Apache-2.0
// Verbs other than `workspace` and `run`: scale, add, kept_size, keeps, the WebGPU calls; on a
// machine with neither CUDA nor WebGPU. A refused call writes nothing.
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "logitless/logitless.h"
#include "messages.h"

namespace logitless {
namespace {

// Values [5] and a factor [], both f32, on the CPU. The CPU has no scale and refuses the call, but
// only after every other rule is checked.
struct Scaling {
  std::array<float, 6> memory{1, 2, 3, 4, 5, 6};
  float two = 2;
  logitless_tensor values, factor;
  logitless_execution execution = LOGITLESS_EXECUTION_INIT;
  int32_t count = 2;

  Scaling()
      : values(detail::to_c(vector_view(memory.data(), DType::f32, 5))),
        factor(detail::to_c(scalar_view(&two, DType::f32))) {}
};

struct Mistake {
  const char* name;
  std::function<void(Scaling&)> make;
  int32_t code;
  const char* field;  // that the message must name
};

const Mistake kMistakes[] = {
    {"none", [](Scaling&) {}, LOGITLESS_NOT_SUPPORTED, "cuda"},
    {"a negative count", [](Scaling& s) { s.count = -1; }, LOGITLESS_INVALID_ARGUMENT, "count"},
    {"five at once", [](Scaling& s) { s.count = 5; }, LOGITLESS_INVALID_ARGUMENT, "count"},
    {"another device", [](Scaling& s) { s.values.device_type = LOGITLESS_CUDA; },
     LOGITLESS_WRONG_DEVICE, "values"},
    {"another index", [](Scaling& s) { s.factor.device_index = 1; }, LOGITLESS_WRONG_DEVICE,
     "factor"},
    {"no such device", [](Scaling& s) { s.execution.device_type = 9; }, LOGITLESS_UNKNOWN_ENUM,
     "device"},
    {"a second cpu",
     [](Scaling& s) {
       s.execution.device_index = s.values.device_index = s.factor.device_index = 1;
     },
     LOGITLESS_WRONG_DEVICE, "device"},
    {"a matrix", [](Scaling& s) { s.values.rank = 2; }, LOGITLESS_WRONG_SHAPE, "values"},
    {"a scalar", [](Scaling& s) { s.values.rank = 0; }, LOGITLESS_WRONG_SHAPE, "values"},
    {"a factor with an axis", [](Scaling& s) { s.factor.rank = 1; }, LOGITLESS_WRONG_SHAPE,
     "factor"},
    {"integers", [](Scaling& s) { s.values.dtype = LOGITLESS_I32; }, LOGITLESS_WRONG_DTYPE,
     "values"},
    {"an unknown dtype", [](Scaling& s) { s.values.dtype = 77; }, LOGITLESS_UNKNOWN_ENUM, "values"},
    {"no device of a tensor", [](Scaling& s) { s.values.device_type = -1; }, LOGITLESS_UNKNOWN_ENUM,
     "values"},
    {"a factor of 16 bits", [](Scaling& s) { s.factor.dtype = LOGITLESS_BF16; },
     LOGITLESS_WRONG_DTYPE, "factor"},
    {"a negative size", [](Scaling& s) { s.values.shape[0] = -2; }, LOGITLESS_WRONG_SHAPE,
     "values"},
    {"gaps", [](Scaling& s) { s.values.stride[0] = 2; }, LOGITLESS_WRONG_SHAPE, "values"},
    {"no memory", [](Scaling& s) { s.values.data = nullptr; }, LOGITLESS_INVALID_ARGUMENT,
     "values"},
    {"no factor", [](Scaling& s) { s.factor.data = nullptr; }, LOGITLESS_INVALID_ARGUMENT,
     "factor"},
    {"half an element", [](Scaling& s) { s.values.byte_offset = 2; }, LOGITLESS_MISALIGNED,
     "values"},
    {"a struct of no size", [](Scaling& s) { s.values.struct_size = 0; },
     LOGITLESS_INVALID_ARGUMENT, "values"},
    {"a factor's reserved field", [](Scaling& s) { s.factor.reserved = 1; },
     LOGITLESS_INVALID_ARGUMENT, "factor"},
    {"an execution's reserved field", [](Scaling& s) { s.execution.reserved = 1; },
     LOGITLESS_INVALID_ARGUMENT, "execution"},
};

TEST(Scale, RefusesEachMistakeByItsField) {
  for (const Mistake& mistake : kMistakes) {
    Scaling s;
    mistake.make(s);
    const std::array<float, 6> before = s.memory;
    const std::array<const logitless_tensor*, 5> vectors{&s.values, &s.values, &s.values, &s.values,
                                                         &s.values};
    logitless_status status = LOGITLESS_STATUS_INIT;
    EXPECT_EQ(logitless_scale_each(vectors.data(), s.count, &s.factor, &s.execution, &status),
              mistake.code)
        << mistake.name << ": " << status.message;
    EXPECT_NE(std::strstr(status.message, mistake.field), nullptr)
        << mistake.name << ": " << status.message;
    EXPECT_EQ(testing::number_for_a_name(status.message, static_cast<StatusCode>(status.code)), "")
        << mistake.name << ": " << status.message;
    EXPECT_EQ(s.memory, before) << mistake.name;
  }
}

TEST(Scale, OfNothingIsDone) {
  Scaling s;
  s.values.shape[0] = 0;
  s.values.data = nullptr;
  const logitless_tensor* const vectors[] = {&s.values, &s.values};
  EXPECT_EQ(logitless_scale_each(vectors, 2, &s.factor, nullptr, nullptr), LOGITLESS_OK);
  EXPECT_EQ(logitless_scale_each(nullptr, 0, &s.factor, nullptr, nullptr), LOGITLESS_OK);
  EXPECT_EQ(logitless_scale_each(nullptr, 1, &s.factor, nullptr, nullptr),
            LOGITLESS_INVALID_ARGUMENT);
}

// Three parts [5] and their sum, all f32, on the CPU, which refuses the call after every other
// rule.
struct Adding {
  std::array<float, 20> memory{};
  std::array<logitless_tensor, 3> parts;
  logitless_tensor sum;
  logitless_execution execution = LOGITLESS_EXECUTION_INIT;
  int32_t count = 3;

  Adding() : sum(detail::to_c(vector_view(memory.data() + 15, DType::f32, 5))) {
    for (size_t i = 0; i < 3; ++i) {
      parts[i] = detail::to_c(vector_view(memory.data() + 5 * i, DType::f32, 5));
    }
  }
};
struct WrongSum {
  const char* name;
  std::function<void(Adding&)> make;
  int32_t code;
  const char* field;
};
const WrongSum kWrongSums[] = {
    {"none", [](Adding&) {}, LOGITLESS_NOT_SUPPORTED, "cuda"},
    {"in place", [](Adding& a) { a.sum.data = a.parts[1].data; }, LOGITLESS_NOT_SUPPORTED, "cuda"},
    {"no parts", [](Adding& a) { a.count = 0; }, LOGITLESS_INVALID_ARGUMENT, "count"},
    {"17 parts", [](Adding& a) { a.count = 17; }, LOGITLESS_INVALID_ARGUMENT, "count"},
    {"16 bits", [](Adding& a) { a.parts[2].dtype = LOGITLESS_BF16; }, LOGITLESS_WRONG_DTYPE,
     "parts"},
    {"integers", [](Adding& a) { a.sum.dtype = LOGITLESS_I32; }, LOGITLESS_WRONG_DTYPE, "sum"},
    {"another length", [](Adding& a) { a.parts[1].shape[0] = 4; }, LOGITLESS_WRONG_SHAPE, "parts"},
    {"a matrix", [](Adding& a) { a.sum.rank = 2; }, LOGITLESS_WRONG_SHAPE, "sum"},
    {"gaps", [](Adding& a) { a.parts[0].stride[0] = 2; }, LOGITLESS_WRONG_SHAPE, "parts"},
    {"another device", [](Adding& a) { a.parts[0].device_type = LOGITLESS_CUDA; },
     LOGITLESS_WRONG_DEVICE, "parts"},
    {"half a part", [](Adding& a) { a.sum.data = a.memory.data() + 2; }, LOGITLESS_INVALID_ARGUMENT,
     "sum overlaps"},
    {"16 bits in place",
     [](Adding& a) { a.sum.data = a.parts[0].data, a.sum.dtype = LOGITLESS_BF16; },
     LOGITLESS_INVALID_ARGUMENT, "sum overlaps"},
};

TEST(Add, RefusesEachMistakeByItsField) {
  for (const WrongSum& mistake : kWrongSums) {
    Adding a;
    mistake.make(a);
    std::array<const logitless_tensor*, 17> parts;
    parts.fill(a.parts.data());
    for (size_t i = 0; i < 3; ++i) parts[i] = &a.parts[i];
    logitless_status status = LOGITLESS_STATUS_INIT;
    EXPECT_EQ(logitless_add(parts.data(), a.count, &a.sum, &a.execution, &status), mistake.code)
        << mistake.name << ": " << status.message;
    EXPECT_NE(std::strstr(status.message, mistake.field), nullptr)
        << mistake.name << ": " << status.message;
    EXPECT_EQ(a.memory, Adding().memory) << mistake.name;
  }
  EXPECT_EQ(logitless_add(nullptr, 1, nullptr, nullptr, nullptr), LOGITLESS_INVALID_ARGUMENT);
}

// A library with WebGPU returns invalid_argument, one without it backend_unavailable.
void expect_refused(int32_t code, const logitless_status& status, const char* what) {
  EXPECT_EQ(code, status.code) << what;
  EXPECT_TRUE(code == LOGITLESS_INVALID_ARGUMENT || code == LOGITLESS_BACKEND_UNAVAILABLE) << what;
  EXPECT_NE(status.message[0], 0) << what;
}

TEST(WebGpuVerbs, RefuseNullAndTellWhyThereIsNoDevice) {
  logitless_status status = LOGITLESS_STATUS_INIT;
  expect_refused(logitless_webgpu_create_workspace(0, 64, nullptr, &status), status, "workspace");
  void* const untouched = &status;
  for (int missing = 0; missing < 4; ++missing) {
    int32_t index = 77;
    void* handles[] = {&status, &status, &status};
    if (missing < 3) handles[missing] = nullptr;
    expect_refused(logitless_webgpu_use_device(handles[0], handles[1], handles[2],
                                               missing == 3 ? nullptr : &index, &status),
                   status, "use_device");
    EXPECT_EQ(index, 77);
  }
  // This program runs with LOGITLESS_WEBGPU_LIBRARY=none, so there is no WebGPU.
  void* made = untouched;
  EXPECT_EQ(logitless_webgpu_create_workspace(0, 64, &made, &status),
            LOGITLESS_BACKEND_UNAVAILABLE);
  EXPECT_EQ(made, untouched);
  EXPECT_EQ(logitless_webgpu_device(0, &made, &made, &made, &status),
            LOGITLESS_BACKEND_UNAVAILABLE);
  EXPECT_EQ(made, untouched);
  logitless_webgpu_destroy_workspace(nullptr);
}

// Returns a linear Forward whose tensors have no memory yet.
LinearCrossEntropyForward keeping(int64_t tokens, int64_t vocab, DType dtype) {
  return {.input = matrix_view(nullptr, dtype, tokens, 4),
          .weight = matrix_view(nullptr, dtype, vocab, 4),
          .target = vector_view(nullptr, DType::i64, tokens)};
}

TEST(KeptSize, IsAFormulaOfShapeAndDtype) {
  const struct {
    int64_t tokens, vocab;
    DType dtype;
    uint64_t bytes;
    int64_t columns;
    uint64_t kept;
  } cases[] = {
      {65, 1000, DType::f32, UINT64_MAX, 1000, 65 * 32 + 16 * 64 * 128 * 4},
      {64, 1000, DType::bf16, UINT64_MAX, 1000, 64 * 32 + 16 * 64 * 64 * 2},
      {64, 1000, DType::bf16, 64 * 32 + 16 * 64 * 64 * 2 - 1, 960, 64 * 32 + 15 * 64 * 64 * 2},
      {64, 1000, DType::bf16, 64 * 32 + 14 * 64 * 64 * 2, 768, 64 * 32 + 12 * 64 * 64 * 2},
      {64, 1000, DType::bf16, 64 * 32 + 2 * 64 * 64 * 2, 0, 0},
      {64, 1000, DType::f16, UINT64_MAX, 1000, 64 * 32 + 16 * 64 * 64 * 2},
      {0, 1000, DType::f32, UINT64_MAX, 0, 0},
      {1, 1, DType::f32, UINT64_MAX, 1, 32 + 64 * 64 * 4},
  };
  for (const auto& c : cases) {
    Kept kept;
    ASSERT_TRUE(kept_size(keeping(c.tokens, c.vocab, c.dtype), {}, c.bytes, &kept).ok());
    EXPECT_EQ(kept.columns, c.columns);
    EXPECT_EQ(kept.bytes, c.kept);
  }
}

// On CUDA a divergence's shard keeps f32 logits: of both heads, or of the student beside given
// ones.
TEST(KeptSize, OfAShardsLogits) {
  const Device cuda{DeviceType::cuda, 0};
  const auto on_cuda = [&](TensorView view) {
    view.device = cuda;
    return view;
  };
  LinearDivergenceForward op{.options = {.vocab_start = 100, .vocab_total = 400}};
  op.input = op.teacher.input = on_cuda(matrix_view(nullptr, DType::bf16, 70, 4));
  op.weight = op.teacher.weight = on_cuda(matrix_view(nullptr, DType::bf16, 131, 4));
  const auto size_of_op = [&](uint64_t bytes = UINT64_MAX) {
    Kept kept;
    const Status status = kept_size(op, {.device = cuda}, bytes, &kept);
    EXPECT_TRUE(status.ok()) << status.message();
    return kept;
  };
  const Kept both = size_of_op();
  EXPECT_EQ(both.columns, 131);
  EXPECT_EQ(both.shape[0], 128 * 3 * 4);
  EXPECT_EQ(both.bytes, 70u * 32 + 2 * 128 * 192 * 4);
  EXPECT_EQ(size_of_op(both.bytes - 1).columns, 0);
  op.teacher.bias = on_cuda(vector_view(nullptr, DType::f32, 131));
  EXPECT_NE(size_of_op().key, both.key);
  op.teacher.bias = {};
  op.teacher.temperature = on_cuda(vector_view(nullptr, DType::f32, 70));
  EXPECT_NE(size_of_op().key, both.key);
  op.teacher = {};
  op.teacher.logits = on_cuda(matrix_view(nullptr, DType::f32, 70, 131));
  EXPECT_EQ(size_of_op().bytes, 70u * 32 + 128 * 192 * 4);
}

TEST(KeptSize, TellsCallsApartByTheirKey) {
  const auto key_of = [](const LinearCrossEntropyForward& op) {
    Kept kept;
    EXPECT_TRUE(kept_size(op, {}, UINT64_MAX, &kept).ok());
    return kept.key;
  };
  const LinearCrossEntropyForward op = keeping(70, 500, DType::f32);
  const uint64_t key = key_of(op);
  EXPECT_NE(key, 0u);
  EXPECT_EQ(key_of(op), key);
  LinearCrossEntropyForward reduced = op;
  reduced.options.reduction = Reduction::sum;
  EXPECT_EQ(key_of(reduced), key);
  EXPECT_NE(key_of(keeping(71, 500, DType::f32)), key);
  EXPECT_NE(key_of(keeping(70, 501, DType::f32)), key);
  EXPECT_NE(key_of(keeping(70, 500, DType::bf16)), key);
  const std::function<void(LossOptions&)> changes[] = {
      [](LossOptions& o) { o.ignore_index = 3; },
      [](LossOptions& o) { o.softcap = 3; },
      [](LossOptions& o) { o.logit_scale = 3; },
      [](LossOptions& o) { o.temperature = 3; },
      [](LossOptions& o) { o.label_smoothing = 1; },
      [](LossOptions& o) { o.allow_tf32 = true; },
      [](LossOptions& o) { o.out_of_range = OutOfRange::ignore; }};
  for (const auto& change : changes) {
    LinearCrossEntropyForward other = op;
    change(other.options);
    EXPECT_NE(key_of(other), key);
  }
}

TEST(KeptSize, RefusesWhatKeepsNothing) {
  Kept kept{.columns = 7};
  LinearCrossEntropyForward op = keeping(70, 500, DType::f32);
  op.target = {};
  const Status missing = kept_size(op, {}, 0, &kept);
  EXPECT_EQ(missing.code(), StatusCode::invalid_argument);
  EXPECT_NE(std::string(missing.message()).find("target"), std::string::npos);
  EXPECT_EQ(kept.columns, 7);
  EXPECT_EQ(kept_size(keeping(70, 500, DType::f32), {}, 0, nullptr).code(),
            StatusCode::invalid_argument);
  logitless_op softmax = LOGITLESS_OP_INIT(LOGITLESS_SOFTMAX);
  logitless_kept size = LOGITLESS_KEPT_INIT;
  logitless_status status = LOGITLESS_STATUS_INIT;
  EXPECT_EQ(logitless_kept_size(&softmax, nullptr, 0, &size, &status), LOGITLESS_INVALID_ARGUMENT);
  EXPECT_STREQ(status.message,
               "op.kind is Softmax; allowed: LinearCrossEntropyForward, LinearDivergenceForward");
}

TEST(Keeps, NothingOfWhatIsNotKnown) {
  EXPECT_EQ(logitless_keeps(LOGITLESS_CPU, LOGITLESS_F32, nullptr), 1);
  EXPECT_EQ(logitless_keeps(LOGITLESS_REFERENCE, LOGITLESS_F32, nullptr), 0);
  for (const int32_t device : {-1, 4, INT32_MAX}) {
    EXPECT_EQ(logitless_keeps(device, LOGITLESS_F32, nullptr), 0);
  }
  for (const int32_t dtype : {-1, int32_t{LOGITLESS_I32}, int32_t{LOGITLESS_I64}, 5}) {
    EXPECT_EQ(logitless_keeps(LOGITLESS_CPU, dtype, nullptr), 0);
  }
  logitless_loss_options options = LOGITLESS_LOSS_OPTIONS_INIT;
  options.struct_size = 3;
  EXPECT_EQ(logitless_keeps(LOGITLESS_CPU, LOGITLESS_F32, &options), 0);
}

TEST(Messages, NameDevicesAndOps) {
  Scaling s;
  logitless_status status = LOGITLESS_STATUS_INIT;
  s.factor.device_type = LOGITLESS_CUDA;
  EXPECT_EQ(logitless_scale(&s.values, &s.factor, nullptr, &status), LOGITLESS_WRONG_DEVICE);
  EXPECT_STREQ(status.message, "factor is on cuda:0; allowed: cpu:0");
  s.factor.device_type = LOGITLESS_CPU;
  s.factor.dtype = LOGITLESS_BF16;
  EXPECT_EQ(logitless_scale(&s.values, &s.factor, nullptr, &status), LOGITLESS_WRONG_DTYPE);
  EXPECT_STREQ(status.message, "factor is bf16; allowed: f32");
  for (int32_t kind : {-1, 11, 99}) {
    logitless_op op = LOGITLESS_OP_INIT(kind);
    EXPECT_EQ(logitless_run(&op, nullptr, nullptr, &status), LOGITLESS_UNKNOWN_ENUM);
    EXPECT_EQ(std::string(status.message),
              "op.kind is " + std::to_string(kind) +
                  "; allowed: Softmax, Combine, and CrossEntropy, LinearCrossEntropy and "
                  "LinearDivergence with Forward, Backward or ForwardBackward");
  }
  logitless_op op = LOGITLESS_OP_INIT(LOGITLESS_COMBINE);
  op.consume_kept = 1;
  EXPECT_EQ(logitless_run(&op, nullptr, nullptr, &status), LOGITLESS_INVALID_ARGUMENT);
  EXPECT_STREQ(status.message, "consume_kept is set; Combine does not have it");
  EXPECT_EQ(logitless_describe_backend(7, nullptr, 0, &status), LOGITLESS_UNKNOWN_ENUM);
  EXPECT_STREQ(status.message, "execution.device.type is 7; allowed: cpu, cuda, webgpu, reference");
}

}  // namespace
}  // namespace logitless
