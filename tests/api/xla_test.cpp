// SPDX-License-Identifier: Apache-2.0
// Calls the XLA handler as XLA does: a call frame goes in, results or an error come out.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <deque>
#include <string>
#include <variant>
#include <vector>

#include "logitless/c.h"
#include "src/xla/ffi.h"

namespace logitless::xla {
struct Error {
  std::string message;
  int code;
};

namespace {

Error* create_error(ErrorCreate* e) { return new Error{e->message, e->code}; }

using Value = std::variant<int32_t, int64_t, float, double, std::string>;

int type_of(const Value& value) {
  constexpr int types[] = {type_s32, type_s64, type_f32, type_f64};
  return types[value.index()];
}

// Owns what a call frame points to.
struct Frame {
  struct Attribute {
    std::string name;
    Value value;
    Text text{}, name_text{};
    Scalar scalar{};
  };
  struct Array {
    Buffer buffer;
    std::vector<int64_t> shape;
  };

  Api api{};
  CallFrame frame{};
  std::deque<Array> arrays;
  std::deque<Attribute> attributes;
  std::vector<void*> arguments, results, values;
  std::vector<int> argument_kinds, result_kinds, kinds;
  std::vector<Text*> names;

  void add(std::vector<void*>* to, int type, void* data, std::vector<int64_t> shape) {
    Array& a = arrays.emplace_back(Array{{}, std::move(shape)});
    a.buffer = {sizeof(Buffer), nullptr, type, data, static_cast<int64_t>(a.shape.size()),
                a.shape.data()};
    to->push_back(&a.buffer);
  }
  void argument(int type, void* data, std::vector<int64_t> shape) {
    add(&arguments, type, data, std::move(shape));
  }
  void result(int type, void* data, std::vector<int64_t> shape) {
    add(&results, type, data, std::move(shape));
  }
  void set(const std::string& name, Value value) {
    for (Attribute& a : attributes) {
      if (a.name == name) {
        a.value = std::move(value);
        return;
      }
    }
    attributes.push_back({name, std::move(value)});
  }

  // Returns {0, ""} where the handler returned no error.
  Error call(int stage = stage_execute) {
    argument_kinds.resize(arguments.size(), kind_buffer);
    result_kinds.resize(results.size(), kind_buffer);
    names.clear(), values.clear(), kinds.clear();
    for (Attribute& a : attributes) {
      a.name_text = {a.name.data(), a.name.size()};
      names.push_back(&a.name_text);
      if (const auto* text = std::get_if<std::string>(&a.value)) {
        a.text = {text->data(), text->size()};
        kinds.push_back(attribute_text), values.push_back(&a.text);
      } else {
        std::visit([&](auto& v) { a.scalar = {type_of(a.value), &v}; }, a.value);
        kinds.push_back(attribute_scalar), values.push_back(&a.scalar);
      }
    }
    api.error_create = create_error;
    const auto size = [](const auto& v) { return static_cast<int64_t>(v.size()); };
    frame = {sizeof(CallFrame),
             nullptr,
             &api,
             nullptr,
             stage,
             {sizeof(Values), nullptr, size(arguments), argument_kinds.data(), arguments.data()},
             {sizeof(Values), nullptr, size(results), result_kinds.data(), results.data()},
             {sizeof(Attributes), nullptr, size(names), kinds.data(), names.data(), values.data()}};
    auto* error = static_cast<Error*>(logitless_xla_run(&frame));
    if (error == nullptr) return {"", 0};
    const Error copy = *error;
    delete error;
    return copy;
  }
};

// Softmax of [2, 3] with a workspace of 64 bytes.
struct SoftmaxFrame : Frame {
  float logits[6] = {0, 1, 2, 3, 3, 3}, probabilities[6] = {9, 9, 9, 9, 9, 9};
  alignas(64) char scratch[192] = {};

  SoftmaxFrame() {
    argument(type_f32, logits, {2, 3});
    result(type_f32, probabilities, {2, 3});
    result(type_u8, scratch, {128});
    set("device_type", int32_t{LOGITLESS_CPU});
    set("kind", int32_t{LOGITLESS_SOFTMAX});
    set("fields", "logits probabilities");
    set("workspace_bytes", int64_t{64});
    set("alignment", int64_t{64});
  }
  Buffer& buffer(size_t i) { return arrays[i].buffer; }
  bool untouched() const { return probabilities[0] == 9 && probabilities[5] == 9; }
};

TEST(Xla, SaysItsVersion) {
  Metadata metadata{};
  MetadataExtension extension{{sizeof(extension), extension_metadata, nullptr}, &metadata};
  CallFrame frame{};
  frame.extension = &extension.base;
  EXPECT_EQ(logitless_xla_run(&frame), nullptr);
  EXPECT_EQ(metadata.version.major, 0);
  EXPECT_EQ(metadata.version.minor, 1);
  EXPECT_EQ(metadata.traits, 0u);
}

TEST(Xla, RunsInTheExecuteStageAlone) {
  SoftmaxFrame f;
  for (int stage = 0; stage < stage_execute; ++stage) {
    EXPECT_EQ(f.call(stage).message, "");
    EXPECT_TRUE(f.untouched());
  }
  EXPECT_EQ(f.call().message, "");
  const double sum = 1 + std::exp(1) + std::exp(2);
  for (int j = 0; j < 3; ++j) {
    EXPECT_NEAR(f.probabilities[j], std::exp(j) / sum, 1e-6);
    EXPECT_NEAR(f.probabilities[3 + j], 1.0 / 3, 1e-6);
  }
}

TEST(Xla, DimensionsBeforeTheLastAreOne) {
  SoftmaxFrame flat, deep;
  for (size_t i = 0; i < 2; ++i) {
    deep.arrays[i].shape = {1, 2, 1, 3};
    deep.buffer(i).rank = 4;
    deep.buffer(i).shape = deep.arrays[i].shape.data();
  }
  ASSERT_EQ(flat.call().message, "");
  ASSERT_EQ(deep.call().message, "");
  EXPECT_EQ(std::memcmp(flat.probabilities, deep.probabilities, sizeof(flat.probabilities)), 0);
}

// Loss and gradients with most options away from their defaults.
struct LossFrame : Frame {
  static constexpr int64_t N = 5, V = 7, D = 3;
  float input[N * D], weight[V * D], loss = 9;
  int32_t target[N] = {0, 6, 3, -7, 2};
  float grad_input[N * D] = {}, grad_weight[V * D] = {};
  std::vector<char> scratch;
  logitless_loss_options options = LOGITLESS_LOSS_OPTIONS_INIT;
  int64_t bytes = 0;
  logitless_tensor tensors[6];
  logitless_op op = LOGITLESS_OP_INIT(LOGITLESS_LINEAR_CROSS_ENTROPY_FORWARD_BACKWARD);

  static logitless_tensor view(void* data, int32_t dtype, std::vector<int64_t> shape) {
    logitless_tensor t = LOGITLESS_TENSOR_INIT;
    t.dtype = dtype, t.data = data, t.rank = static_cast<int32_t>(shape.size());
    for (size_t d = 0; d < shape.size(); ++d) t.shape[d] = shape[d];
    t.stride[0] = shape.size() == 2 ? shape[1] : 1, t.stride[1] = 1;
    return t;
  }

  LossFrame() {
    for (int i = 0; i < N * D; ++i) input[i] = std::sin(static_cast<float>(i));
    for (int i = 0; i < V * D; ++i) weight[i] = std::cos(static_cast<float>(2 * i));
    options.reduction = LOGITLESS_REDUCTION_MEAN, options.ignore_index = -7;
    options.label_smoothing = 0.1f, options.z_loss = 0.01f, options.logit_scale = 3;
    options.softcap = 2, options.temperature = 0.5f, options.empty_mean = LOGITLESS_EMPTY_MEAN_NAN;
    options.allow_tf32 = 1, options.normalizer = 2.5;
    tensors[0] = view(input, LOGITLESS_F32, {N, D});
    tensors[1] = view(weight, LOGITLESS_F32, {V, D});
    tensors[2] = view(target, LOGITLESS_I32, {N});
    tensors[3] = view(&loss, LOGITLESS_F32, {});
    tensors[4] = view(grad_input, LOGITLESS_F32, {N, D});
    tensors[5] = view(grad_weight, LOGITLESS_F32, {V, D});
    op.options = &options;
    op.input = &tensors[0], op.weight = &tensors[1], op.target = &tensors[2];
    op.loss = &tensors[3], op.grad_input = &tensors[4], op.grad_weight = &tensors[5];
    logitless_workspace_size size = LOGITLESS_WORKSPACE_SIZE_INIT;
    EXPECT_EQ(logitless_workspace(&op, nullptr, &size, nullptr), LOGITLESS_OK);
    bytes = static_cast<int64_t>(size.recommended);
    scratch.resize(size.recommended + size.alignment + 2, 0x5a);
    argument(type_f32, input, {N, D});
    argument(type_f32, weight, {V, D});
    argument(type_s32, target, {N});
    result(type_f32, &loss, {});
    result(type_f32, grad_input, {N, D});
    result(type_f32, grad_weight, {V, D});
    result(type_u8, scratch.data() + 1, {static_cast<int64_t>(scratch.size()) - 2});
    set("device_type", int32_t{LOGITLESS_CPU});
    set("kind", op.kind);
    set("fields", "input weight target loss grad_input grad_weight");
    set("workspace_bytes", bytes);
    set("alignment", static_cast<int64_t>(size.alignment));
    set("reduction", options.reduction);
    set("ignore_index", options.ignore_index);
    set("label_smoothing", options.label_smoothing);
    set("z_loss", options.z_loss);
    set("logit_scale", options.logit_scale);
    set("softcap", options.softcap);
    set("temperature", options.temperature);
    set("empty_mean", options.empty_mean);
    set("allow_tf32", options.allow_tf32);
    set("normalizer", options.normalizer);
  }
};

TEST(Xla, EveryOptionReachesTheOp) {
  LossFrame ours, theirs;
  std::vector<char> memory(static_cast<size_t>(theirs.bytes) + 64);
  logitless_workspace_buffer workspace = LOGITLESS_WORKSPACE_BUFFER_INIT;
  workspace.data = memory.data();
  workspace.byte_offset = -reinterpret_cast<uintptr_t>(memory.data()) % 64;
  workspace.bytes = static_cast<uint64_t>(theirs.bytes);
  ASSERT_EQ(logitless_run(&theirs.op, &workspace, nullptr, nullptr), LOGITLESS_OK);
  ASSERT_EQ(ours.call().message, "");
  EXPECT_EQ(ours.loss, theirs.loss);
  EXPECT_EQ(std::memcmp(ours.grad_input, theirs.grad_input, sizeof(ours.grad_input)), 0);
  EXPECT_EQ(std::memcmp(ours.grad_weight, theirs.grad_weight, sizeof(ours.grad_weight)), 0);
  EXPECT_EQ(ours.scratch.front(), 0x5a);
  EXPECT_EQ(ours.scratch.back(), 0x5a);
  for (const auto& a : ours.attributes) {
    if (!std::holds_alternative<float>(a.value)) continue;
    LossFrame other;
    other.set(a.name, std::get<float>(a.value) * 0.5f);
    ASSERT_EQ(other.call().message, "") << a.name;
    EXPECT_NE(other.loss, ours.loss) << a.name;
  }
  LossFrame empty;  // no target counts, so empty_mean applies
  for (int32_t& t : empty.target) t = -7;
  empty.set("normalizer", 0.0);
  ASSERT_EQ(empty.call().message, "");
  EXPECT_TRUE(std::isnan(empty.loss));
}

TEST(Xla, AStatusIsAnErrorWithItsMessage) {
  LossFrame f;
  f.target[2] = 7;
  const Error error = f.call();
  EXPECT_EQ(error.code, error_out_of_range);
  EXPECT_EQ(error.message, "target[2] is 7; allowed: 0 to 6, or ignore_index -7");
  EXPECT_EQ(f.loss, 9);
  LossFrame g;
  g.set("label_smoothing", 2.0f);
  EXPECT_EQ(g.call().code, error_invalid_argument);
  EXPECT_EQ(g.loss, 9);
  LossFrame h;
  h.set("device_type", int32_t{LOGITLESS_WEBGPU});
  EXPECT_NE(h.call().code, 0);
}

TEST(Xla, KeptStateThatIsNoneIsAnError) {
  for (const char* fields : {"input weight target kept grad_input grad_weight",
                             "input weight target kept_rows grad_input grad_weight",
                             "input weight target kept kept_rows grad_weight"}) {
    LossFrame f;
    f.set("kind", int32_t{LOGITLESS_LINEAR_CROSS_ENTROPY_BACKWARD});
    f.set("fields", fields);
    const Error error = f.call();
    EXPECT_NE(error.code, 0) << fields;
    EXPECT_NE(error.message.find("kept"), std::string::npos) << error.message;
  }
}

// A divergence with most options away from their defaults, with gradients or state for them.
struct DivergenceFrame : Frame {
  static constexpr int64_t N = 5, V = 7, D = 3, Dt = 2;
  float input[N * D], weight[V * D], teacher_input[N * Dt], teacher_weight[V * Dt];
  float loss = 9, grad_loss = 0.5f, losses[N] = {}, grad_losses[N] = {1, -2, 0.5f, 3, 0};
  int32_t target[N] = {0, 6, 3, -7, 2};
  float grad_input[N * D] = {}, grad_weight[V * D] = {};
  std::vector<float> kept = std::vector<float>(64 * 64), kept_rows = std::vector<float>(N * 8);
  std::vector<char> scratch = std::vector<char>(1 << 20);

  DivergenceFrame() {
    for (int i = 0; i < N * D; ++i) input[i] = std::sin(static_cast<float>(i));
    for (int i = 0; i < V * D; ++i) weight[i] = std::cos(static_cast<float>(2 * i));
    for (int i = 0; i < N * Dt; ++i) teacher_input[i] = std::sin(static_cast<float>(3 * i));
    for (int i = 0; i < V * Dt; ++i) teacher_weight[i] = std::cos(static_cast<float>(5 * i));
    set("device_type", int32_t{LOGITLESS_CPU});
    set("workspace_bytes", static_cast<int64_t>(scratch.size()) - 64);
    set("alignment", int64_t{64});
    set("ignore_index", int64_t{-7});
    set("logit_scale", 3.0f);
    set("softcap", 2.0f);
    set("temperature", 0.5f);
    set("divergence", int32_t{LOGITLESS_JSD});
    set("beta", 0.25f);
    set("label_weight", 0.5f);
    set("teacher_logit_scale", 1.5f);
    set("teacher_softcap", 3.0f);
    set("teacher_temperature", 0.75f);
  }
  void inputs(bool with_teacher) {
    arguments.clear(), results.clear(), argument_kinds.clear(), result_kinds.clear();
    argument(type_f32, input, {N, D});
    argument(type_f32, weight, {V, D});
    argument(type_s32, target, {N});
    if (!with_teacher) return;
    argument(type_f32, teacher_input, {N, Dt});
    argument(type_f32, teacher_weight, {V, Dt});
  }
  Error run(int32_t kind, const std::string& fields) {
    result(type_u8, scratch.data(), {static_cast<int64_t>(scratch.size())});
    set("kind", kind);
    set("fields", fields);
    return call();
  }
  Error both() {
    inputs(true);
    result(type_f32, &loss, {});
    result(type_f32, grad_input, {N, D});
    result(type_f32, grad_weight, {V, D});
    return run(LOGITLESS_LINEAR_DIVERGENCE_FORWARD_BACKWARD,
               "input weight target teacher_input teacher_weight loss grad_input grad_weight");
  }
  Error forward() {
    inputs(true);
    set("reduction", int32_t{LOGITLESS_REDUCTION_NONE});
    result(type_f32, losses, {N});
    result(type_f32, kept.data(), {64, 64});
    result(type_f32, kept_rows.data(), {N, 8});
    return run(LOGITLESS_LINEAR_DIVERGENCE_FORWARD,
               "input weight target teacher_input teacher_weight loss kept kept_rows");
  }
  // Computes the gradients from kept state, without a teacher, or from both heads.
  Error backward(bool of_kept) {
    inputs(!of_kept);
    set("reduction", int32_t{LOGITLESS_REDUCTION_NONE});
    argument(type_f32, grad_losses, {N});
    if (of_kept) {
      argument(type_f32, kept.data(), {64, 64});
      argument(type_f32, kept_rows.data(), {N, 8});
    }
    result(type_f32, grad_input, {N, D});
    result(type_f32, grad_weight, {V, D});
    return run(
        LOGITLESS_LINEAR_DIVERGENCE_BACKWARD,
        std::string("input weight target ") +
            (of_kept ? "grad_loss kept kept_rows" : "teacher_input teacher_weight grad_loss") +
            " grad_input grad_weight");
  }
};

TEST(Xla, EveryOptionOfADivergenceReachesTheOp) {
  DivergenceFrame ours, theirs;
  ASSERT_EQ(ours.both().message, "");
  const auto view = [](float* data, std::vector<int64_t> shape) {
    return LossFrame::view(data, LOGITLESS_F32, std::move(shape));
  };
  logitless_loss_options options = LOGITLESS_LOSS_OPTIONS_INIT;
  options.ignore_index = -7, options.logit_scale = 3, options.softcap = 2;
  options.temperature = 0.5f;
  logitless_divergence_options divergence = LOGITLESS_DIVERGENCE_OPTIONS_INIT;
  divergence.kind = LOGITLESS_JSD, divergence.beta = 0.25f, divergence.label_weight = 0.5f;
  divergence.teacher_logit_scale = 1.5f, divergence.teacher_softcap = 3;
  divergence.teacher_temperature = 0.75f;
  DivergenceFrame& f = theirs;
  const logitless_tensor input = view(f.input, {f.N, f.D}), weight = view(f.weight, {f.V, f.D}),
                         teacher_input = view(f.teacher_input, {f.N, f.Dt}),
                         teacher_weight = view(f.teacher_weight, {f.V, f.Dt}),
                         target = LossFrame::view(f.target, LOGITLESS_I32, {f.N}),
                         loss = view(&f.loss, {}), grad_input = view(f.grad_input, {f.N, f.D}),
                         grad_weight = view(f.grad_weight, {f.V, f.D});
  logitless_op op = LOGITLESS_OP_INIT(LOGITLESS_LINEAR_DIVERGENCE_FORWARD_BACKWARD);
  op.options = &options, op.divergence = &divergence, op.input = &input, op.weight = &weight;
  op.teacher_input = &teacher_input, op.teacher_weight = &teacher_weight, op.target = &target;
  op.loss = &loss, op.grad_input = &grad_input, op.grad_weight = &grad_weight;
  logitless_workspace_buffer workspace = LOGITLESS_WORKSPACE_BUFFER_INIT;
  workspace.data = f.scratch.data();
  workspace.byte_offset = -reinterpret_cast<uintptr_t>(f.scratch.data()) % 64;
  workspace.bytes = f.scratch.size() - 64;
  ASSERT_EQ(logitless_run(&op, &workspace, nullptr, nullptr), LOGITLESS_OK);
  EXPECT_EQ(ours.loss, theirs.loss);
  EXPECT_EQ(std::memcmp(ours.grad_input, theirs.grad_input, sizeof(ours.grad_input)), 0);
  EXPECT_EQ(std::memcmp(ours.grad_weight, theirs.grad_weight, sizeof(ours.grad_weight)), 0);
  for (const auto& a : ours.attributes) {
    DivergenceFrame other;
    if (a.name == "divergence") {
      other.set(a.name, int32_t{LOGITLESS_TV});
    } else if (std::holds_alternative<float>(a.value)) {
      other.set(a.name, std::get<float>(a.value) * 0.5f);
    } else {
      continue;
    }
    ASSERT_EQ(other.both().message, "") << a.name;
    EXPECT_NE(other.loss, ours.loss) << a.name;
  }
}

TEST(Xla, ADivergencesBackwardTakesWhatIsKeptAndLeavesIt) {
  DivergenceFrame f, again;
  ASSERT_EQ(f.forward().message, "");
  const std::vector<float> kept = f.kept, rows = f.kept_rows;
  ASSERT_EQ(again.backward(false).message, "");
  for (int time = 0; time < 2; ++time) {
    for (float& g : f.grad_input) g = 9;
    ASSERT_EQ(f.backward(true).message, "");
    for (int i = 0; i < f.N * f.D; ++i) EXPECT_NEAR(f.grad_input[i], again.grad_input[i], 1e-5);
    for (int i = 0; i < f.V * f.D; ++i) EXPECT_NEAR(f.grad_weight[i], again.grad_weight[i], 1e-5);
    EXPECT_TRUE(f.kept == kept && f.kept_rows == rows);
  }
  for (float& x : f.kept) x = 0;  // if gradients change, Backward reads `kept`
  ASSERT_EQ(f.backward(true).message, "");
  for (const float g : f.grad_input) EXPECT_EQ(g, 0);
}

TEST(Xla, AnOptionOfADivergenceIsNoLosss) {
  LossFrame loss;
  loss.set("beta", 0.5f);
  const Error error = loss.call();
  EXPECT_EQ(error.code, error_invalid_argument);
  EXPECT_NE(error.message.find("divergence is set"), std::string::npos) << error.message;
  DivergenceFrame smoothed;
  smoothed.set("label_smoothing", 0.5f);
  EXPECT_NE(smoothed.both().message.find("label_smoothing"), std::string::npos);
  DivergenceFrame unknown;
  unknown.set("divergence", int32_t{99});
  EXPECT_NE(unknown.both().message.find("divergence kind is 99"), std::string::npos);
  DivergenceFrame other;  // kept state of a wrong shape is an error
  ASSERT_EQ(other.forward().message, "");
  other.kept_rows.resize(8);
  other.inputs(false);
  other.argument(type_f32, other.grad_losses, {other.N});
  other.argument(type_f32, other.kept.data(), {64, 64});
  other.argument(type_f32, other.kept_rows.data(), {1, 8});
  other.result(type_f32, other.grad_input, {other.N, other.D});
  const Error shape = other.run(LOGITLESS_LINEAR_DIVERGENCE_BACKWARD,
                                "input weight target grad_loss kept kept_rows grad_input");
  EXPECT_NE(shape.message.find("kept"), std::string::npos) << shape.message;
}

// Truncates to bf16.
uint16_t as_bf16(double x) {
  return static_cast<uint16_t>(std::bit_cast<uint32_t>(static_cast<float>(x)) >> 16);
}

// A shard in bf16, half of a vocabulary, whose Forward keeps exponentials.
struct ShardFrame : Frame {
  static constexpr int64_t N = 5, V = 7, D = 3;
  uint16_t input[N * D], weight[V * D];
  float grad_loss = 0.5f;
  int32_t target[N] = {0, 13, 3, 9, -100};  // tokens 1 and 3: in another shard
  float anchor[N] = {};
  std::vector<char> scratch = std::vector<char>(1 << 20);

  ShardFrame() {
    for (int i = 0; i < N * D; ++i) input[i] = as_bf16(std::sin(i));
    for (int i = 0; i < V * D; ++i) weight[i] = as_bf16(std::cos(2 * i));
    set("device_type", int32_t{LOGITLESS_CPU});
    set("workspace_bytes", static_cast<int64_t>(scratch.size()) - 64);
    set("alignment", int64_t{64});
    set("reduction", int32_t{LOGITLESS_REDUCTION_SUM});
    set("vocab_start", int64_t{0});
    set("vocab_total", 2 * V);
  }
  void inputs() {
    arguments.clear(), results.clear(), argument_kinds.clear(), result_kinds.clear();
    argument(type_bf16, input, {N, D});
    argument(type_bf16, weight, {V, D});
    argument(type_s32, target, {N});
  }
  Error run(int32_t kind, const std::string& fields) {
    result(type_u8, scratch.data(), {static_cast<int64_t>(scratch.size())});
    set("kind", kind);
    set("fields", fields);
    return call();
  }
};

// Has memory to keep every column of the shard.
struct KeptShard : ShardFrame {
  std::vector<uint16_t> kept = std::vector<uint16_t>(64 * 64);
  std::vector<float> kept_rows = std::vector<float>(N * 8);
  float row_reference[N] = {}, row_log_sum[N] = {};

  Error forward(bool with_anchor = true) {
    inputs();
    if (with_anchor) argument(type_f32, anchor, {N});
    result(type_f32, row_reference, {N});
    result(type_f32, row_log_sum, {N});
    result(type_bf16, kept.data(), {64, 64});
    result(type_f32, kept_rows.data(), {N, 8});
    return run(LOGITLESS_LINEAR_CROSS_ENTROPY_FORWARD,
               std::string("input weight target ") + (with_anchor ? "anchor " : "") +
                   "row_reference row_log_sum kept kept_rows");
  }
  // Returns grad_input, from kept state or from logits that Backward computes again.
  std::vector<float> backward(bool of_kept) {
    std::vector<float> grad_input(N * D);
    inputs();
    argument(type_f32, row_reference, {N});
    argument(type_f32, row_log_sum, {N});
    argument(type_f32, &grad_loss, {});
    if (of_kept) {
      argument(type_bf16, kept.data(), {64, 64});
      argument(type_f32, kept_rows.data(), {N, 8});
    }
    result(type_f32, grad_input.data(), {N, D});
    EXPECT_EQ(run(LOGITLESS_LINEAR_CROSS_ENTROPY_BACKWARD,
                  std::string("input weight target row_reference row_log_sum grad_loss ") +
                      (of_kept ? "kept kept_rows " : "") + "grad_input")
                  .message,
              "");
    return grad_input;
  }
};

TEST(Xla, AShardKeepsStateRelativeToItsAnchor) {
  KeptShard f;
  ASSERT_EQ(f.forward().message, "");
  const std::vector<float> first = f.kept_rows;
  const std::vector<float> again = f.backward(false), kept = f.backward(true);
  for (size_t i = 0; i < kept.size(); ++i) EXPECT_NEAR(kept[i], again[i], 0.01) << i;
  for (size_t i = 0; i < size_t{f.N};
       ++i) {  // row i uses the anchor if its target is in another shard
    KeptShard other;
    other.anchor[i] = 1;
    ASSERT_EQ(other.forward().message, "");
    const std::vector<float> rows = other.kept_rows, grad_input = other.backward(true);
    for (size_t k = 0; k < kept.size(); ++k) EXPECT_NEAR(grad_input[k], again[k], 0.01) << k;
    const bool same = std::memcmp(&first[8 * i], &rows[8 * i], 8 * sizeof(float)) == 0;
    EXPECT_EQ(same, f.target[i] < f.V) << i;
  }
  const Error missing = f.forward(false);
  EXPECT_EQ(missing.code, error_invalid_argument);
  EXPECT_NE(missing.message.find("anchor is missing"), std::string::npos) << missing.message;
}

// Logits of chosen columns in lists, and gradients from them alone.
struct ChosenFrame : Frame {
  static constexpr int64_t N = 3, V = 7, D = 3, M = 5;
  float input[N * D], weight[V * D], bias[V], logits_at[M] = {};
  float grad_logits_at[M] = {1, -2, 0.5f, 3, 0.25f};
  float grad_input[N * D], grad_weight[V * D], grad_bias[V];
  int32_t target[N] = {}, ids[M] = {6, 2, 2, -1, 0};
  int64_t id_offsets[N + 1] = {0, 2, 2, 5};
  std::vector<char> scratch = std::vector<char>(1 << 20);

  ChosenFrame() {
    for (int i = 0; i < N * D; ++i) input[i] = std::sin(static_cast<float>(i));
    for (int i = 0; i < V * D; ++i) weight[i] = std::cos(static_cast<float>(2 * i));
    for (int i = 0; i < V; ++i) bias[i] = 0.1f * static_cast<float>(i);
    for (float& g : grad_input) g = 9;
    for (float& g : grad_weight) g = 9;
    for (float& g : grad_bias) g = 9;
    set("device_type", int32_t{LOGITLESS_CPU});
    set("workspace_bytes", static_cast<int64_t>(scratch.size()) - 64);
    set("alignment", int64_t{64});
    set("reduction", int32_t{LOGITLESS_REDUCTION_NONE});
    set("ignore_index", int64_t{-1});
    set("softcap", 2.0f);
  }
  Error run(int32_t kind) {
    const bool forward = kind == LOGITLESS_LINEAR_CROSS_ENTROPY_FORWARD;
    arguments.clear(), results.clear(), argument_kinds.clear(), result_kinds.clear();
    argument(type_f32, input, {N, D});
    argument(type_f32, weight, {V, D});
    argument(type_f32, bias, {V});
    argument(type_s32, target, {N});
    argument(type_s32, ids, {M});
    argument(type_s64, id_offsets, {N + 1});
    if (forward) {
      result(type_f32, logits_at, {M});
    } else {
      argument(type_f32, grad_logits_at, {M});
      result(type_f32, grad_input, {N, D});
      result(type_f32, grad_weight, {V, D});
      result(type_f32, grad_bias, {V});
    }
    result(type_u8, scratch.data(), {static_cast<int64_t>(scratch.size())});
    set("kind", kind);
    set("fields", std::string("input weight bias target ids id_offsets ") +
                      (forward ? "logits_at" : "grad_logits_at grad_input grad_weight grad_bias"));
    return call();
  }
};

TEST(Xla, OnlyChosenColumnsOfListsHaveGradients) {
  ChosenFrame f;
  ASSERT_EQ(f.run(LOGITLESS_LINEAR_CROSS_ENTROPY_FORWARD).message, "");
  f.set("only_chosen", int32_t{1});
  ASSERT_EQ(f.run(LOGITLESS_LINEAR_CROSS_ENTROPY_BACKWARD).message, "");
  double grad_input[f.N * f.D] = {}, grad_weight[f.V * f.D] = {}, grad_bias[f.V] = {};
  for (int64_t i = 0; i < f.N; ++i) {
    for (int64_t m = f.id_offsets[i]; m < f.id_offsets[i + 1]; ++m) {
      const int64_t j = f.ids[m];
      if (j < 0) {
        EXPECT_TRUE(std::isinf(f.logits_at[m]) && f.logits_at[m] < 0);
        continue;
      }
      double z = f.bias[j];
      for (int64_t d = 0; d < f.D; ++d) z += double{f.input[i * f.D + d]} * f.weight[j * f.D + d];
      const double capped = 2 * std::tanh(z / 2);
      EXPECT_NEAR(f.logits_at[m], capped, 1e-5) << m;
      const double a = f.grad_logits_at[m] * (1 - capped * capped / 4);
      grad_bias[j] += a;
      for (int64_t d = 0; d < f.D; ++d) {
        grad_input[i * f.D + d] += a * f.weight[j * f.D + d];
        grad_weight[j * f.D + d] += a * f.input[i * f.D + d];
      }
    }
  }
  for (int i = 0; i < f.N * f.D; ++i) EXPECT_NEAR(f.grad_input[i], grad_input[i], 1e-5) << i;
  for (int i = 0; i < f.V * f.D; ++i) EXPECT_NEAR(f.grad_weight[i], grad_weight[i], 1e-5) << i;
  for (int i = 0; i < f.V; ++i) EXPECT_NEAR(f.grad_bias[i], grad_bias[i], 1e-5) << i;
}

TEST(Xla, OnlyChosenIsOneOpsAlone) {
  ChosenFrame f;
  f.set("only_chosen", int32_t{1});
  EXPECT_NE(f.run(LOGITLESS_LINEAR_CROSS_ENTROPY_FORWARD).message.find("only_chosen is set"),
            std::string::npos);
  f.set("label_smoothing", 0.5f);
  const Error error = f.run(LOGITLESS_LINEAR_CROSS_ENTROPY_BACKWARD);
  EXPECT_EQ(error.code, error_invalid_argument);
  EXPECT_NE(error.message.find("label_smoothing is 0.5 with only_chosen"), std::string::npos)
      << error.message;
  for (int32_t only_chosen : {0, 1}) {  // if 0, the loss too has an upstream gradient, 1
    ChosenFrame other;
    other.set("only_chosen", only_chosen);
    ASSERT_EQ(other.run(LOGITLESS_LINEAR_CROSS_ENTROPY_BACKWARD).message, "");
    EXPECT_EQ(other.grad_bias[5] != 0, only_chosen == 0);  // column 5 is in no list
  }
  ChosenFrame wrong;
  wrong.id_offsets[3] = 4;
  const Error short_of = wrong.run(LOGITLESS_LINEAR_CROSS_ENTROPY_FORWARD);
  EXPECT_NE(short_of.message.find("id_offsets[3] is 4; allowed: 5 to 5"), std::string::npos)
      << short_of.message;
}

TEST(Xla, MalformedFramesAreErrors) {
  struct Case {
    const char* what;
    void (*change)(SoftmaxFrame*);
  };
  const Case cases[] = {
      {"attribute", [](SoftmaxFrame* f) { f->set("unheard_of", int32_t{1}); }},
      {"attribute", [](SoftmaxFrame* f) { f->set("kind", int64_t{0}); }},
      {"attribute", [](SoftmaxFrame* f) { f->set("kind", "softmax"); }},
      {"attribute", [](SoftmaxFrame* f) { f->set("only_chosen", int64_t{1}); }},
      {"only_chosen", [](SoftmaxFrame* f) { f->set("only_chosen", int32_t{1}); }},
      {"attribute", [](SoftmaxFrame* f) { f->set("fields", int32_t{1}); }},
      {"kind", [](SoftmaxFrame* f) { f->set("kind", int32_t{77}); }},
      {"options", [](SoftmaxFrame* f) { f->set("z_loss", 0.5f); }},
      {"fields", [](SoftmaxFrame* f) { f->set("fields", ""); }},
      {"fields", [](SoftmaxFrame* f) { f->set("fields", "logits"); }},
      {"fields", [](SoftmaxFrame* f) { f->set("fields", "logits logits"); }},
      {"fields", [](SoftmaxFrame* f) { f->set("fields", "logits probability"); }},
      {"fields", [](SoftmaxFrame* f) { f->set("fields", "logits probabilities fault"); }},
      {"fields", [](SoftmaxFrame* f) { f->set("fields", "logits  probabilities"); }},
      {"input", [](SoftmaxFrame* f) { f->set("fields", "input probabilities"); }},
      {"probabilities", [](SoftmaxFrame* f) { f->set("fields", "logits -"); }},
      {"logits is f64; allowed: f32", [](SoftmaxFrame* f) { f->buffer(0).dtype = type_f64; }},
      {"element type 99", [](SoftmaxFrame* f) { f->buffer(0).dtype = 99; }},
      {"rank", [](SoftmaxFrame* f) { f->buffer(1).rank = -1; }},
      {"rank", [](SoftmaxFrame* f) { f->buffer(0).rank = 1; }},
      {"rank", [](SoftmaxFrame* f) { f->buffer(0).rank = 0; }},
      {"workspace", [](SoftmaxFrame* f) { f->buffer(2).shape[0] = 127; }},
      {"workspace", [](SoftmaxFrame* f) { f->buffer(2).dtype = type_f32; }},
      {"workspace", [](SoftmaxFrame* f) { f->set("workspace_bytes", int64_t{-1}); }},
      {"workspace", [](SoftmaxFrame* f) { f->set("workspace_bytes", INT64_MAX); }},
      {"workspace", [](SoftmaxFrame* f) { f->set("alignment", int64_t{0}); }},
      {"workspace", [](SoftmaxFrame* f) { f->set("alignment", INT64_MAX); }},
      {"buffers", [](SoftmaxFrame* f) { f->results.clear(); }},
      {"buffers", [](SoftmaxFrame* f) { f->arguments.resize(40, f->arguments[0]); }},
      {"none", [](SoftmaxFrame* f) { f->argument_kinds = {2}; }},
  };
  for (const Case& c : cases) {
    SoftmaxFrame f;
    c.change(&f);
    const Error error = f.call();
    EXPECT_NE(error.code, 0) << c.what;
    EXPECT_NE(error.message.find(c.what), std::string::npos) << c.what << ": " << error.message;
    EXPECT_TRUE(f.untouched()) << c.what;
  }
}

}  // namespace
}  // namespace logitless::xla
