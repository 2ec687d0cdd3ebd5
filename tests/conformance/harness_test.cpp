// SPDX-License-Identifier: Apache-2.0
// Tests the suite itself: a backend that returns one wrong byte or element is caught, wherever it
// is.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>
#include <set>

#include "gtest/gtest.h"
#include "tests/support/judge.h"
#include "tests/support/rotation.h"
#include "tests/support/shards.h"

namespace logitless::conformance {
namespace {

using Op = LinearCrossEntropyForwardBackward;

// The reference backend, except that `lie` changes each block of memory as it is read back.
class LyingDevice : public TestDevice {
 public:
  using Lie = std::function<void(std::byte* host, size_t bytes)>;
  explicit LyingDevice(Lie lie) : lie_(std::move(lie)) {}
  const char* name() const override { return "lying"; }
  Device tensors() const override { return honest_.tensors(); }
  Execution execution() const override { return honest_.execution(); }
  void* allocate(size_t bytes) const override { return honest_.allocate(bytes); }
  void release(void* data) const override { honest_.release(data); }
  void upload(void* device, const std::byte* host, size_t bytes) const override {
    honest_.upload(device, host, bytes);
  }
  void download(std::byte* host, const void* device, size_t bytes) const override {
    honest_.download(host, device, bytes);
    lie_(host, bytes);
  }
  void* reserve(size_t bytes, const Ranges& used) const override {
    return honest_.reserve(bytes, used);
  }
  void unreserve(void* data, size_t bytes) const override { honest_.unreserve(data, bytes); }

 private:
  const TestDevice& honest_ = device("reference");
  Lie lie_;
};

Problem<Op> strided_problem() {
  Case c{
      .op = OpKind::linear_forward_backward, .placement = Placement::strided, .statistics = true};
  return build<Op>(c);
}

Comparison judged(const LyingDevice::Lie& lie) {
  const Problem<Op> p = strided_problem();
  return compare(reference::evaluate(p.op, p.model), execute(LyingDevice(lie), p.op, p.pool));
}

// Flips a bit in one byte of the allocation with this number, in the order of downloads.
LyingDevice::Lie flip(size_t allocation, size_t byte) {
  return [=, seen = size_t{0}](std::byte* host, size_t bytes) mutable {
    if (seen++ == allocation && byte < bytes) host[byte] ^= std::byte{0x10};
  };
}

size_t allocation_of(const char* name) {
  const Problem<Op> p = strided_problem();
  size_t found = 0;
  const logitless_op unused{};
  for_each_tensor(p.op, unused,
                  [&](const char* field, Access, const TensorView& view, const auto*) {
                    if (view && std::string(name) == field) found = p.pool.find(view);
                  });
  return found;
}

TEST(Harness, AcceptsTheReference) {
  const Comparison c = judged([](std::byte*, size_t) {});
  EXPECT_TRUE(c.ok()) << c.report;
  EXPECT_LE(c.worst_ratio, 1);
}

TEST(Harness, SeesGuardBytesInFrontAndBehindEveryTensor) {
  const Problem<Op> p = strided_problem();
  for (size_t i = 0; i < p.pool.size(); ++i) {
    EXPECT_FALSE(judged(flip(i, kGuardBytes - 1)).ok()) << "in front of tensor " << i;
    EXPECT_FALSE(judged(flip(i, p.pool[i].size() - kGuardBytes)).ok()) << "behind tensor " << i;
  }
}

TEST(Harness, SeesTheGapsOfStridedOutputs) {
  for (const char* name : {"grad_input", "grad_weight", "lse"}) {
    // Elements are at least 8 bytes apart, so the fifth byte belongs to none.
    EXPECT_FALSE(judged(flip(allocation_of(name), kGuardBytes + 4)).ok()) << name;
  }
}

TEST(Harness, SeesInputsWrittenTo) {
  for (const char* name : {"input", "weight", "target"}) {
    EXPECT_FALSE(judged(flip(allocation_of(name), kGuardBytes)).ok()) << name;
  }
}

TEST(Harness, SeesOneWrongElement) {
  for (const char* name : {"loss", "lse", "entropy", "argmax", "grad_input", "grad_weight"}) {
    // The byte with the high bits of an f32's fraction, or the lowest byte of an index.
    const size_t byte = std::string(name) == "argmax" ? 0 : 2;
    EXPECT_FALSE(judged(flip(allocation_of(name), kGuardBytes + byte)).ok()) << name;
  }
}

reference::Result result(double value, double bound) {
  reference::Result want;
  want.outputs["loss"].value = {value};
  want.outputs["loss"].bound = {bound};
  return want;
}

bool accepts(double got, double want, double bound, DType dtype = DType::f32) {
  Field field;
  field.dtype = dtype;
  field.shape = {1};
  field.value = {got};
  return compare(result(want, bound), Fields{{"loss", field}}).ok();
}

TEST(Harness, ComparesElementByElement) {
  EXPECT_TRUE(accepts(1.5, 1, 0.5));
  EXPECT_FALSE(accepts(1.5001, 1, 0.5));
  EXPECT_FALSE(accepts(1, 1.001, 0));
  EXPECT_TRUE(accepts(NAN, NAN, 0));
  EXPECT_FALSE(accepts(NAN, 1, 10));
  EXPECT_FALSE(accepts(1, NAN, 10));
  EXPECT_FALSE(accepts(1, 1.0001, NAN));
  EXPECT_FALSE(accepts(1, 2, INFINITY));
  EXPECT_TRUE(accepts(INFINITY, INFINITY, 0));
  EXPECT_FALSE(accepts(-INFINITY, INFINITY, 0));
  EXPECT_FALSE(accepts(INFINITY, 1e30, 1));
  EXPECT_TRUE(accepts(INFINITY, 1e39, 1));
  EXPECT_TRUE(accepts(INFINITY, 65519, 30, DType::f16));
  EXPECT_FALSE(accepts(INFINITY, 65000, 30, DType::f16));
  // A sum that is less than its rounding errors may have either sign.
  EXPECT_TRUE(accepts(-INFINITY, 1e5, 2e5, DType::f16));
  EXPECT_FALSE(accepts(-INFINITY, 1e5, 1e5, DType::f16));
}

class AsynchronousDevice final : public LyingDevice {
 public:
  AsynchronousDevice() : LyingDevice([](std::byte*, size_t) {}) {}
  bool synchronous() const override { return false; }
  bool tensor_cores(DType dtype) const override { return dtype != DType::f32; }
};

// For a target out of range on a backend that cannot refuse it, the suite expects a loss of NaN and
// gradient rows of zeros, and NaN for a mean that includes this token.
TEST(Harness, WantsNaNForATargetOutsideOfAnAsynchronousBackend) {
  const AsynchronousDevice device;
  for (const Reduction reduction : {Reduction::none, Reduction::mean}) {
    Case c{.op = OpKind::linear_forward_backward, .statistics = true};
    c.options.reduction = reduction;
    const Problem<Op> p = build<Op>(c);
    const std::vector<double> target = read(p.op.target);
    const auto clean = expected(device, p.op, p.model);
    for (const double bad : {37.0, -1.0, 0x1p62}) {
      std::vector<double> changed = target;
      changed[4] = bad;
      write(p.op.target, changed);
      EXPECT_EQ(tokens_outside(p.op), std::vector<size_t>{4});
      const auto want = expected(device, p.op, p.model);
      ASSERT_TRUE(want.status.ok());
      const auto& loss = want.outputs.at("loss").value;
      const auto& gradient = want.outputs.at("grad_input").value;
      EXPECT_TRUE(std::isnan(loss[reduction == Reduction::none ? 4 : 0]));
      EXPECT_EQ(want.outputs.at("lse").value[4], 0);
      for (int64_t i = 0; i < 9 * 19; ++i) {
        const double value = i / 19 == 4 ? 0 : clean.outputs.at("grad_input").value[i];
        EXPECT_NEAR(gradient[i], value, 1e-12 * std::fabs(value));
      }
    }
  }
}

// Only 16-bit inputs get the bound of tensor cores, which is narrower for sums of few products.
TEST(Harness, BoundsFollowTheInputsDtype) {
  const AsynchronousDevice device;
  for (const DType dtype : {DType::f32, DType::bf16}) {
    const Problem<Op> p = build<Op>({.op = OpKind::linear_forward_backward, .dtype = dtype});
    const double plain = reference::evaluate(p.op, p.model).outputs.at("loss").bound[0];
    const double here = expected(device, p.op, p.model).outputs.at("loss").bound[0];
    if (dtype == DType::f32) {
      EXPECT_EQ(here, plain);
    } else {
      EXPECT_LT(here, plain);  // 4 + 19 / 16 < 4 + sqrt 19
    }
  }
}

// Splits of a vocabulary: even, uneven, and with special content in one shard.
TEST(Harness, DividesAVocabularyInEveryWay) {
  for (const int64_t vocab : {1, 37, 50257}) {
    for (int64_t shards = 1; shards <= 8; ++shards) {
      std::set<std::string> names;
      for (const Split& split : splits_of(vocab, shards)) {
        names.insert(split.name);
        EXPECT_EQ(std::ssize(split.sizes), shards);
        EXPECT_EQ(std::accumulate(split.sizes.begin(), split.sizes.end(), int64_t{0}), vocab);
        const int64_t least = *std::min_element(split.sizes.begin(), split.sizes.end());
        const int64_t most = *std::max_element(split.sizes.begin(), split.sizes.end());
        EXPECT_GE(least, 0);
        EXPECT_TRUE(split.content == Split::plain || split.sizes[split.shard] > 0);
        if (vocab == 1) continue;  // most shards have no columns
        EXPECT_EQ(least == 0, split.name == "one without columns");
        EXPECT_EQ(least > 0 && most >= 2 * least, split.name == "uneven");
      }
      EXPECT_TRUE(vocab == 1 || names.size() == (shards == 1 ? 2 : 5)) << vocab << " " << shards;
    }
  }
}

// The reference passes for every content of a shard; an inexact device fails.
TEST(Harness, JudgesEveryContentOfAShard) {
  for (const OpKind op :
       {OpKind::forward, OpKind::backward, OpKind::linear_forward, OpKind::linear_backward}) {
    const Case c{.op = op, .shape = {11, 7, 37}, .dtype = DType::f32};
    for (const Split& split : splits_of(37, 3)) {
      const Comparison honest = judge_shards(device("reference"), c, split);
      EXPECT_TRUE(honest.ok()) << split.name << "\n" << honest.report;
      // Flips the low byte of every float that the device returns.
      const LyingDevice lying([](std::byte* host, size_t bytes) {
        for (size_t k = kGuardBytes; k + kGuardBytes < bytes; k += 4) host[k] ^= std::byte{0xff};
      });
      EXPECT_FALSE(judge_shards(lying, c, split).ok()) << split.name;
    }
  }
}

TEST(Harness, MissingAndUnexpectedFieldsFail) {
  EXPECT_FALSE(compare(result(1, 1), Fields{}).ok());
  EXPECT_FALSE(compare(reference::Result{}, Fields{{"loss", Field{}}}).ok());
}

TEST(Harness, SixCommitsRunEveryCase) {
  CasesByTest all = {{"All/Edges.Alone", {""}}, {"All/Edges.Few", {"/a", "/b", "/c"}}};
  for (int i = 0; i < 12; ++i) all["All/Edges.Swept"].push_back("/cpu_" + std::to_string(i));
  for (int i = 0; i < 64; ++i) all["All/Edges.Many"].push_back("/cpu_" + std::to_string(i));
  for (const size_t first : {size_t{0}, size_t{944}}) {
    std::map<std::string, int> runs;
    for (size_t seed = first; seed < first + 6; ++seed) {
      const CasesByTest chosen = part_of(all, seed);
      EXPECT_EQ(chosen.at("All/Edges.Swept").size(), 4u);
      EXPECT_GE(chosen.at("All/Edges.Many").size(), 10u);
      for (const auto& [test, cases] : chosen) {
        for (const std::string& c : cases) ++runs[test + c];
      }
    }
    EXPECT_EQ(runs.size(), count(all));
    for (const auto& [name, times] : runs)
      EXPECT_EQ(times, name.starts_with("All/Edges.Many")    ? 1
                       : name.starts_with("All/Edges.Swept") ? 2
                                                             : 6)
          << name;
  }
}

TEST(Harness, SixCommitsRunEveryCaseOfASlowProgramOnce) {
  CasesByTest all = {{"WebGpu.Alone", {""}}, {"All/Edges.Few", {"/a", "/b", "/c"}}};
  for (int i = 0; i < 9; ++i) all["All/Edges.Swept"].push_back("/cpu_" + std::to_string(i));
  std::map<std::string, int> runs;
  for (size_t seed = 7; seed < 13; ++seed) {
    for (const auto& [test, cases] : part_of(all, seed, true)) {
      EXPECT_LE(cases.size(), 2u) << test;
      for (const std::string& c : cases) ++runs[test + c];
    }
  }
  EXPECT_EQ(runs.size(), count(all));
  for (const auto& [name, times] : runs) EXPECT_EQ(times, name == "WebGpu.Alone" ? 6 : 1) << name;
}

TEST(Harness, TakesWhatGoogletestsFilterTakes) {
  const std::string name = "All/Edges.OneColumn/cpu_forward_f32";
  for (const char* filter : {"*", "*/Edges.*", "*x*:*_f32", "-*_f16", "*/Edges.*-*_f16:*_bf16"})
    EXPECT_TRUE(takes(filter, name)) << filter;
  for (const char* filter : {"Edges.*", "*_f3", "-*_f32", "*/Edges.*-*_f16:*/Edges.One*"})
    EXPECT_FALSE(takes(filter, name)) << filter;
}

TEST(Harness, NarrowFloats) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (uint32_t bits = 0; bits < 65536; ++bits) {
      const auto before = static_cast<uint16_t>(bits);
      uint16_t after;
      std::byte memory[2];
      std::memcpy(memory, &before, 2);
      const double value = load(dtype, memory);
      store(dtype, value, memory);
      std::memcpy(&after, memory, 2);
      ASSERT_TRUE(std::isnan(value) || before == after) << bits;
    }
  }
  EXPECT_EQ(round_to(DType::bf16, 1 + 0x1p-8), 1);
  EXPECT_EQ(round_to(DType::bf16, 1 + 3 * 0x1p-8), 1 + 0x1p-6);
  EXPECT_EQ(round_to(DType::f16, 65519.9), 65504);
  EXPECT_EQ(round_to(DType::f16, 65520), INFINITY);
  EXPECT_EQ(round_to(DType::f16, 0x1p-25), 0);
  EXPECT_EQ(round_to(DType::f16, 0x1.8p-25), 0x1p-24);
}

}  // namespace
}  // namespace logitless::conformance
