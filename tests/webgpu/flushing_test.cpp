// SPDX-License-Identifier: Apache-2.0
// A GPU may flush subnormal operands and results to 0; a CPU's Vulkan does not.
// LOGITLESS_TEST_FLUSH=1 makes it do so: a thread inherits the floating-point mode of its creator,
// so the mode is set before the device is found, and the driver's threads keep it. The tests' own
// thread, which compares, restores its mode.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "src/webgpu/native.h"
#include "src/webgpu/recorder.h"
#include "src/webgpu/run.h"
#include "tests/support/judge.h"
#include "tests/support/problem.h"
#include "tests/support/suite.h"

#ifdef __x86_64__
#include <xmmintrin.h>
#endif

namespace logitless::conformance {
namespace {

bool flushes() {
  const char* text = std::getenv("LOGITLESS_TEST_FLUSH");
  return text != nullptr && std::strcmp(text, "1") == 0;
}

#ifdef __x86_64__
constexpr unsigned kFlush = 0x8000 | 0x0040;  // MXCSR: flush results and operands

class OwnModeAgain : public testing::Environment {
 public:
  void SetUp() override { _mm_setcsr(_mm_getcsr() & ~kFlush); }
};
[[maybe_unused]] const bool set_before_main = [] {
  if (!flushes()) return false;
  _mm_setcsr(_mm_getcsr() | kFlush);
  testing::AddGlobalTestEnvironment(new OwnModeAgain);
  return true;
}();
#endif

// The sum of a number's halves, as slices.wgsl adds them.
float doubled_on_the_device(webgpu::NativeDevice* device, float half) {
  const float halves[8] = {half, half, half, half, half, half, half, half};
  const uint32_t counted[4] = {1, 0, 0, 0};
  const webgpu::SliceParams params{.row_length = 1, .slices = 2, .slice_stride = 1};
  const webgpu::Buffer uniforms =
      device->create_buffer(webgpu::Recorder::kSlotBytes * webgpu::Recorder::kSlots);
  const webgpu::Buffer slices = device->create_buffer(sizeof(halves));
  const webgpu::Buffer result = device->create_buffer(16), rows = device->create_buffer(16);
  device->write(slices, 0, halves, sizeof(halves));
  device->write(rows, 0, counted, sizeof(counted));
  webgpu::Recorder recorder(device, uniforms);
  recorder.dispatch("slices", "add_slices", {}, params,
                    {{slices, 0, 32}, {result, 0, 16}, {rows, 0, 16}}, 1);
  EXPECT_TRUE(recorder.finish());
  float sum = -1;
  EXPECT_TRUE(device->read(result, 0, &sum, 4));
  for (const webgpu::Buffer buffer : {uniforms, slices, result, rows}) {
    device->destroy_buffer(buffer);
  }
  return sum;
}

// Without flushing, the tests below would prove nothing.
TEST(WebGpuFlushing, IsAsAskedFor) {
  Status status;
  webgpu::NativeDevice* device = webgpu::find_device(0, &status);
  ASSERT_NE(device, nullptr) << status.message();
  EXPECT_EQ(doubled_on_the_device(device, 0x1p-126f), 0x1p-125f);
  if (flushes()) {
    EXPECT_EQ(doubled_on_the_device(device, 0x1p-130f), 0.0f);
  }
  volatile float least = 0x1p-126f;
  EXPECT_EQ(least * 0.25f, 0x1p-128f) << "the thread that judges flushes too";
}

// Calls whose factors are normal numbers and whose result is too, while a product of some factors
// is subnormal: the order of the multiplications decides whether the result is right.
class WebGpuFaint : public testing::Test {
 protected:
  static constexpr int64_t kTokens = 5;
  // A row that one kernel handles whole, and one that is too long for it.
  static constexpr int64_t kColumns[] = {97, 4500};

  static Case plain(int64_t vocab) {
    Case c{.op = OpKind::forward_backward, .shape = {kTokens, 1, vocab}, .statistics = true};
    c.options.reduction = Reduction::none;
    c.grad_loss = true;
    return c;
  }
  // z falls from `above` by `depth`, in another way in each row.
  static std::vector<double> slopes(const Case& c, double depth, double above = 0) {
    const double slope = c.options.logit_scale / static_cast<double>(c.options.temperature);
    std::vector<double> logits;
    for (int64_t i = 0; i < kTokens; ++i) {
      for (int64_t j = 0; j < c.shape.vocab; ++j) {
        const auto at = static_cast<double>((j * 31 + i * 7) % c.shape.vocab);
        logits.push_back((above - depth * at / static_cast<double>(c.shape.vocab)) / slope);
      }
    }
    return logits;
  }
  static std::vector<double> likeliest(int64_t vocab) {
    std::vector<double> columns;
    for (int64_t i = 0; i < kTokens; ++i) {
      int64_t j = 0;
      while ((j * 31 + i * 7) % vocab != 0) ++j;
      columns.push_back(static_cast<double>(j));
    }
    return columns;
  }
  static std::vector<double> all(int64_t count, double value) {
    return std::vector<double>(static_cast<size_t>(count), value);
  }
  template <class Op>
  Fields judged(const Problem<Op>& p, const std::string& what) const {
    const Outcome outcome = execute(device_, p.op, p.pool);
    const Comparison result = compare(expected(device_, p.op, p.model), outcome);
    EXPECT_TRUE(result.ok()) << what << "\n" << result.report;
    return outcome.fields;
  }

  const TestDevice& device_ = device("webgpu");
};

TEST_F(WebGpuFaint, ColumnsUnderASteepSlope) {
  for (const int64_t vocab : kColumns) {
    for (const float scale : {16.0f, -300.0f, 1e25f}) {
      for (const bool smoothing : {false, true}) {
        Case c = plain(vocab);
        c.options.logit_scale = scale;
        c.options.label_smoothing = smoothing ? 0.1f : 0;
        auto p = build<CrossEntropyForwardBackward>(c);
        write(p.op.logits, slopes(c, 95));
        write(p.op.grad_loss, all(kTokens, 3e-3));
        judged(p, describe(c));
        // The kernel of plain calls has one factor for all rows.
        c.statistics = false;
        c.options.reduction = Reduction::sum;
        auto summed = build<CrossEntropyForwardBackward>(c);
        write(summed.op.logits, slopes(c, 95));
        write(summed.op.grad_loss, {3e-3});
        judged(summed, describe(c) + ", summed");
      }
    }
  }
}

TEST_F(WebGpuFaint, AProbabilityTimesItsEntropysFactor) {
  for (const int64_t vocab : kColumns) {
    Case c = plain(vocab);
    c.op = OpKind::backward;
    c.grad_entropy = true;
    auto p = build<CrossEntropyBackward>(c);
    write(p.op.logits, slopes(c, 86));
    write(p.op.grad_loss, all(kTokens, 0));
    write(p.op.grad_entropy, all(kTokens, 1e-3));
    judged(p, describe(c));
  }
}

TEST_F(WebGpuFaint, AGradientOfSeveralTinyFactors) {
  for (const int64_t vocab : kColumns) {
    Case c = plain(vocab);
    c.token_weight = true;
    c.options.logit_scale = 1e25f;
    auto p = build<CrossEntropyForwardBackward>(c);
    write(p.op.logits, slopes(c, 20));
    write(p.op.grad_loss, all(kTokens, 1e-25));
    write(p.op.weights.token, {1e-25, -1e-20, 1e-30, 1, 1e-40});
    judged(p, describe(c));
  }
}

TEST_F(WebGpuFaint, ALossOfATinyWeightAndALargeOne) {
  for (const int64_t vocab : kColumns) {
    for (const float smoothing : {0.0f, 0.5f}) {
      Case c = plain(vocab);
      c.token_weight = c.vocab_weight = true;
      c.options.label_smoothing = smoothing;
      auto p = build<CrossEntropyForwardBackward>(c);
      // The target is far more likely than the others.
      const double apart = 12.0 * static_cast<double>(vocab);
      write(p.op.logits, slopes(c, apart));
      write(p.op.target, likeliest(vocab));
      write(p.op.weights.vocab, all(vocab, 1e-34));
      write(p.op.weights.token, {1e10, 1e30, 1, 1e10, 1e10});
      judged(p, describe(c));
    }
  }
}

TEST_F(WebGpuFaint, ASquareOfATinyShareAndALargeLogit) {
  Case c = plain(97);
  c.token_weight = true;
  c.options.z_loss = 1e-20f;
  auto p = build<CrossEntropyForwardBackward>(c);
  write(p.op.logits, slopes(c, 1e18, 1e20));
  write(p.op.weights.token, {1e-20, 1e-25, 1, 1e-19, 0});
  judged(p, describe(c));
}

TEST_F(WebGpuFaint, TheGradientOfAProbabilityBesideAFloor) {
  for (const int64_t vocab : kColumns) {
    Case c = plain(vocab);
    c.statistics = false;
    c.token_weight = c.vocab_weight = true;
    c.options.label_smoothing = 0.1f;
    c.options.input_kind = InputKind::probabilities;
    auto p = build<CrossEntropyForwardBackward>(c);
    std::vector<double> probabilities;
    for (const double z : slopes(c, 60)) probabilities.push_back(std::exp(z));
    write(p.op.logits, probabilities);
    write(p.op.weights.vocab, all(vocab, 1e-15));
    write(p.op.weights.token, {1e-20, 1e-25, 1, 1e20, 1e-30});
    judged(p, describe(c));
  }
}

// A softcap multiplies by halves of numbers (times in numbers.wgsl), whose products are tiny here.
TEST_F(WebGpuFaint, LogitsFarBelowASoftcap) {
  for (const float softcap : {1.0f, 30.0f, 1e-3f}) {
    for (int exponent = -60; exponent >= -126; exponent -= 2) {
      Case c = plain(97);
      c.options.softcap = softcap;
      auto p = build<CrossEntropyForwardBackward>(c);
      std::vector<double> logits = normals(kTokens * 97, 5, std::ldexp(1.0, exponent));
      write(p.op.logits, logits);
      judged(p, describe(c) + ", 2^" + std::to_string(exponent));
    }
  }
}

}  // namespace
}  // namespace logitless::conformance
