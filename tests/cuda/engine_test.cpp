// SPDX-License-Identifier: Apache-2.0
// How calls are given to engines: a toy engine that computes on the host, listed before the
// portable one, and an invented device.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "shapes.h"
#include "src/cuda/linear/sm90/engine.h"
#include "src/cuda/linear/tiled/engine.h"
#include "src/cuda/promises.h"

namespace logitless::cuda {
namespace {

constexpr int64_t toy_vocab = 5, toy_multiprocessors = 3;

// Computes the mean loss of f32 heads with five columns, for devices with three multiprocessors.
class Toy final : public Engine {
 public:
  const char* name() const override { return "toy"; }
  bool serves(const DeviceInfo& device) const override {
    return device.multiprocessors == toy_multiprocessors;
  }
  bool serves(const Call&, const LinearShape& s) const override { return s.vocab == toy_vocab; }
  bool is_batch_invariant() const override { return true; }
  bool finds_maximum(const LinearShape&) const override { return false; }
  void describe(const Call&, LinearCall* call, const DeviceInfo&) const override {
    call->shape.kernels.kept = Origin::again_dz;
  }
  DeviceSpeed speed(const DeviceInfo&) const override { return {.products = 1, .memory = 1}; }
  void each_plan(const LinearShape& s, const DeviceSpeed&, uint64_t,
                 const std::function<void(const LinearPlan&)>& consider) const override {
    consider({.token_chunk = s.tokens,
              .chunks = 1,
              .bytes = static_cast<uint64_t>(s.tokens) * sizeof(float)});
  }
  void place(Lifetime, const LinearShape&, const LinearPlan&, Arena*,
             LinearMemory*) const override {}
  void for_steps(const LinearShape& s, const LinearPlan&, StepVisitor* visitor) const override {
    visitor->visit(
        {.kind = StepKind::logits, .panel = {.columns = s.vocab}, .tokens = {0, s.tokens}});
  }
  double seconds(const LinearShape&, const LinearPlan&, const DeviceSpeed&,
                 const Step& step) const override {
    return static_cast<double>(step.panel.columns * step.tokens.count);
  }
  void run(const LinearCall& call, const LinearPlan&, char* workspace, const DeviceInfo&,
           Stream*) const override {
    const LinearShape& s = call.shape;
    auto* losses = reinterpret_cast<float*>(workspace);
    float sum = 0;
    for (int64_t i = 0; i < s.tokens; ++i) {
      double total = 0, at_target = 0;
      for (int64_t j = 0; j < s.vocab; ++j) {
        double z = 0;
        for (int64_t d = 0; d < s.hidden; ++d) {
          z += static_cast<double>(call.input.as<float>()[i * s.hidden + d]) *
               call.weight.as<float>()[j * s.hidden + d];
        }
        total += std::exp(z);
        if (call.in.target.as<int32_t>()[i] == j) at_target = z;
      }
      losses[i] = static_cast<float>(std::log(total) - at_target);
      sum += losses[i];
    }
    *call.outputs.loss.as<float>() = sum / static_cast<float>(s.tokens);
  }
};

// An engine whose tiles of 128 columns do not divide 192, of which kept columns are multiples.
class Wide final : public tiled::TiledEngine {
 public:
  static constexpr tiled::Tile tile{.rows = 128, .columns = 128, .depth = 32};
  static_assert(tile.is_valid());
  Wide() : TiledEngine(tile) {}
  const char* name() const override { return "wide"; }
  bool serves(const DeviceInfo&) const override { return true; }
  bool serves(const Call&, const LinearShape&) const override { return true; }
  bool is_batch_invariant() const override { return true; }
  bool finds_maximum(const LinearShape&) const override { return true; }
  DeviceSpeed speed(const DeviceInfo&) const override { return {}; }
  void logits(const LinearWork&, int64_t, int64_t, const Panel&) const override {}
  void remake(const LinearWork&, const Panel&) const override {}
  void input_sums(const LinearWork&, const tiled::Kept&, const Range&, float*, bool,
                  bool) const override {}
  void grad_input(const LinearWork&, const tiled::Kept&, bool) const override {}
  void grad_weight(const LinearWork&, const Panel&, const char*, bool, bool) const override {}
};

TensorView view(void* data, DType dtype, std::initializer_list<int64_t> shape) {
  TensorView v{.data = data, .dtype = dtype, .rank = static_cast<int32_t>(shape.size())};
  std::copy(shape.begin(), shape.end(), v.shape.begin());
  for (int i = v.rank - 1, stride = 1; i >= 0; --i) {
    v.stride[static_cast<size_t>(i)] = stride;
    stride *= static_cast<int>(v.shape[static_cast<size_t>(i)]);
  }
  return v;
}

struct Head {
  std::vector<float> input = {1, 0, 0, 1, 1, 1}, weight;  // [3, 2], [V, 2]
  std::vector<int32_t> target = {0, 3, 4};
  float loss = 0;
  LinearCrossEntropyForward op;

  explicit Head(int64_t vocab) {
    for (int64_t i = 0; i < 2 * vocab; ++i) weight.push_back(static_cast<float>(i % 7) / 4 - 1);
    op.input = view(input.data(), DType::f32, {3, 2});
    op.weight = view(weight.data(), DType::f32, {vocab, 2});
    op.target = view(target.data(), DType::i32, {3});
    op.loss = view(&loss, DType::f32, {});
  }
};

const Toy toy;
const Engine* const list[] = {&toy, &portable()};
const DeviceInfo toy_device{.major = 11, .multiprocessors = toy_multiprocessors};

const char* engine_of(int64_t vocab, const DeviceInfo& device) {
  return make_call(list, Head(vocab).op, device).engine->name();
}

TEST(CudaEngine, TheFirstOfTheListThatServesTakesTheCall) {
  EXPECT_STREQ(engine_of(toy_vocab, toy_device), "toy");
  for (const int64_t vocab : {1, 4, 6, 50257})
    EXPECT_STREQ(engine_of(vocab, toy_device), "portable");
  EXPECT_STREQ(engine_of(toy_vocab, {.major = 9, .multiprocessors = 132}), "portable");
}

// Top-k needs kernels that write logits to memory.
TEST(CudaEngine, OneThatListsLogitsTakesACallForThem) {
  Head head(toy_vocab);
  std::vector<float> logits(6);
  std::vector<int32_t> ids(6);
  head.op.top_logits = view(logits.data(), DType::f32, {3, 2});
  head.op.top_ids = view(ids.data(), DType::i32, {3, 2});
  EXPECT_STREQ(make_call(list, head.op, toy_device).engine->name(), "portable");
  const DeviceInfo hopper{.major = 9, .multiprocessors = 132};
  for (const DType dtype : {DType::f32, DType::bf16}) {
    head.op.input.dtype = head.op.weight.dtype = dtype;
    EXPECT_STREQ(make_call(engines(), head.op, hopper).engine->name(),
                 dtype == DType::f32 ? "portable" : "sm90");
  }
}

TEST(CudaEngine, ItsSizesAreItsOwn) {
  const auto [engine, call] = make_call(list, Head(toy_vocab).op, toy_device);
  const Asked asked{*engine, call.shape, engine->speed(toy_device)};
  EXPECT_EQ(asked.smallest().bytes, 3 * sizeof(float));
  EXPECT_EQ(asked.plan(1 << 20).bytes, 3 * sizeof(float));
  EXPECT_EQ(asked.recommended().bytes, 3 * sizeof(float));
  EXPECT_FALSE(call.shape.can_keep());
}

// The cache of plans must not return one engine's plan for another.
TEST(CudaEngine, APlanIsTheEnginesOwn) {
  const auto [engine, call] = make_call(list, Head(toy_vocab).op, toy_device);
  const uint64_t own = on(*engine, call.shape).smallest().bytes;
  EXPECT_GT(on(portable(), call.shape).smallest().bytes, own);
  EXPECT_EQ(on(*engine, call.shape).smallest().bytes, own);
}

TEST(CudaEngine, ItRunsWhatItPlanned) {
  Head head(toy_vocab);
  const auto [engine, call] = make_call(list, head.op, toy_device);
  const LinearPlan plan = on(*engine, call.shape).plan(1 << 20);
  std::vector<char> workspace(plan.bytes);
  engine->run(call, plan, workspace.data(), toy_device, nullptr);
  EXPECT_NEAR(head.loss, 1.6094, 1.5);  // about log V
  const float first = head.loss;
  head.weight[0] += 1;  // raises the first target's own logit
  engine->run(call, plan, workspace.data(), toy_device, nullptr);
  EXPECT_LT(head.loss, first);
}

// A product of the remaining logits starts at a tile, so the kept columns end with one, or with the
// vocabulary.
TEST(CudaEngine, AShareThatIsKeptEndsWithATile) {
  const Wide wide;
  const Engine* const engines[] = {&wide, &portable()};
  Head head(1001);
  std::vector<char> kept(64), rows(64);
  for (const auto& [blocks, columns] :
       {std::pair{3, 128}, {6, 384}, {9, 512}, {1, 0}, {16, 1001}}) {
    head.op.kept = view(kept.data(), DType::f32, {blocks * 64, 64});
    head.op.kept_rows = view(rows.data(), DType::f32, {3, 8});
    EXPECT_EQ(make_call(engines, head.op, toy_device).call.shape.kept_columns, columns) << blocks;
  }
}

// Every engine has kept columns exactly where logitless_keeps says so.
TEST(CudaEngine, KeptStateServesWhereTheLibrarySaysSo) {
  Head head(1001);
  std::vector<char> kept(64), rows(64);
  for (const Engine* engine : {&hopper(), &toy_engine(), &sm80(), &portable()}) {
    const Engine* const engines[] = {engine, &portable()};
    for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      for (const float softcap : {0.0f, 30.0f}) {
        for (const float smoothing : {0.0f, 0.1f}) {
          LinearCrossEntropyForward op = head.op;
          op.input.dtype = op.weight.dtype = dtype;
          op.options.softcap = softcap;
          op.options.label_smoothing = smoothing;
          op.kept = view(kept.data(), dtype, {16 * 64, 64});
          op.kept_rows = view(rows.data(), DType::f32, {3, 8});
          logitless_loss_options options = LOGITLESS_LOSS_OPTIONS_INIT;
          options.softcap = softcap;
          options.label_smoothing = smoothing;
          const bool keeps =
              logitless_keeps(LOGITLESS_CUDA, static_cast<int32_t>(dtype), &options) != 0;
          const DeviceInfo device{.major = 9, .multiprocessors = 132};
          EXPECT_EQ(make_call(engines, op, device).call.shape.kept_columns, keeps ? 1001 : 0)
              << engine->name() << ", dtype " << static_cast<int>(dtype) << ", softcap " << softcap
              << ", smoothing " << smoothing;
        }
      }
    }
  }
}

// The list of engines has Hopper's first on Hopper, and the portable one, which serves every
// device, last.
TEST(CudaEngine, TheLibrarysListEndsWithOneThatServesEveryCall) {
  EXPECT_STREQ(engines().back()->name(), "portable");
  for (const int major : {8, 9, 10, 12}) {
    const DeviceInfo device{.major = major, .multiprocessors = 132};
    EXPECT_TRUE(engines().back()->serves(device));
    const bool own = major == 9 && sm90::has_code();
    EXPECT_STREQ(engine_for(device).name(), own ? "sm90" : "portable");
  }
}

// For a statistic that needs the row's maximum, every engine finds it. Otherwise
// reference_is_maximum() says what the engine of this device does.
TEST(CudaEngine, ARowReferenceIsTheMaximumWhereItIsPromised) {
  for (const Engine* engine : engines()) {
    EXPECT_TRUE(engine->finds_maximum({.sums = SumKind::maximum})) << engine->name();
  }
  for (const int major : {8, 9, 10}) {
    const DeviceInfo device{.major = major, .multiprocessors = 132};
    EXPECT_TRUE(reference_is_maximum(device, DType::f32));
    for (const DType half : {DType::f16, DType::bf16}) {
      EXPECT_NE(reference_is_maximum(device, half), major == 9 && sm90::has_code());
    }
  }
}

// LOGITLESS_CUDA_KERNELS names the only engine to use.
TEST(CudaEngine, ANameLeavesTheOthersOut) {
  const DeviceInfo named{.major = 9, .multiprocessors = 132, .kernels = "portable"};
  EXPECT_STREQ(engine_for(named).name(), "portable");
  EXPECT_TRUE(check_named_engine(named).ok());
  EXPECT_TRUE(check_named_engine({.major = 8}).ok());
  EXPECT_EQ(check_named_engine({.major = 9, .kernels = "sm90"}).ok(), sm90::has_code());
  DeviceInfo device = toy_device;
  std::strcpy(device.kernels, "portable");
  EXPECT_STREQ(engine_of(toy_vocab, device), "portable");
  std::strcpy(device.kernels, "toy");
  EXPECT_STREQ(engine_of(toy_vocab, device), "toy");
}

// What was not measured on its own hardware is no default.
TEST(CudaEngine, TheKernelsForSm80AreUsedWhereTheyAreNamed) {
  Head head(toy_vocab);
  head.op.input = view(head.input.data(), DType::bf16, {3, 8});
  head.op.weight = view(head.weight.data(), DType::bf16, {5, 8});
  for (const int major : {8, 9, 10, 12}) {
    const DeviceInfo device{.major = major, .multiprocessors = 132};
    DeviceInfo named = device;
    std::strcpy(named.kernels, "sm80");
    EXPECT_STRNE(engine_for(device).name(), "sm80");
    EXPECT_STREQ(engine_for(named).name(), "sm80");
    EXPECT_FALSE(named.has_clusters());
    EXPECT_TRUE(half_linear_ops_are_batch_invariant(named));
    EXPECT_EQ(half_linear_ops_are_batch_invariant(device), major == 9 && sm90::has_code());
    const auto takes = [&](const LinearCrossEntropyForward& op) {
      return std::strcmp(make_call(engines(), op, named).engine->name(), "sm80") == 0;
    };
    EXPECT_TRUE(takes(head.op));
    LinearCrossEntropyForward other = head.op;
    other.weight.byte_offset = 8;
    EXPECT_FALSE(takes(other));
    other = head.op;
    other.weight.stride = {1, 8};  // rows are not contiguous, and a product can read them
    other.weight.shape[0] = 8;
    EXPECT_FALSE(takes(other));
    other.weight.stride = {2, 3};
    EXPECT_TRUE(takes(other)) << "they are copied";
    other = head.op;
    other.weight.stride[0] = (int64_t{1} << 22) - 8;
    EXPECT_TRUE(takes(other));
    other.weight.stride[0] = int64_t{1} << 22;
    EXPECT_FALSE(takes(other));
    other = head.op;
    other.input.dtype = other.weight.dtype = DType::f32;
    EXPECT_FALSE(takes(other));
  }
  EXPECT_FALSE(check_named_engine({.major = 7, .kernels = "sm80"}).ok());
}

TEST(CudaEngine, AnUnknownNameIsAnErrorThatListsThoseOfTheDevice) {
  const Status unknown = check_named_engine({.name = "A100", .kernels = "own"});
  EXPECT_EQ(unknown.code(), StatusCode::invalid_argument);
  EXPECT_STREQ(unknown.message(),
               "cuda: LOGITLESS_CUDA_KERNELS is \"own\"; allowed on device 0 (A100): portable");
  EXPECT_FALSE(check_named_engine({.major = 8, .kernels = "sm90"}).ok());
}

}  // namespace
}  // namespace logitless::cuda
