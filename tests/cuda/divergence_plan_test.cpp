// SPDX-License-Identifier: Apache-2.0
// How CUDA divides divergences, and the memory that this takes; needs no GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "divergence_ops.h"
#include "src/cuda/divergence/plan.h"

namespace logitless::cuda {
namespace {

using Both = LinearDivergenceForwardBackward;
using Back = LinearDivergenceBackward;

constexpr uint64_t MiB = uint64_t{1} << 20;
const DeviceInfo kH200{.major = 9, .multiprocessors = 132};
constexpr HeadSizes kLlama{8192, 4096, 128256, 4096, DType::bf16};

std::vector<HeadSizes> heads() {
  std::vector<HeadSizes> all;
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    for (HeadSizes s :
         {kLlama, HeadSizes{20480, 768, 50257, 1024}, HeadSizes{1, 1, 1, 1}, HeadSizes{0, 3, 7, 3},
          HeadSizes{513, 40, 1025, 8}, HeadSizes{100000, 64, 100, 64}}) {
      s.dtype = dtype;
      all.push_back(s);
    }
  }
  return all;
}
template <class F>
void for_calls(F&& use) {
  for (const HeadSizes& s : heads()) {
    for (const bool options : {false, true}) {
      AskedOf asked{.target = options,
                    .biases = options,
                    .temperatures = options,
                    .weights = options,
                    .given_logits = options,
                    .statistics = options,
                    .transposed = options};
      use(Call(divergence_op<Both>(s, asked)));
      asked.f32_gradients = true;
      use(Call(divergence_op<Back>(s, asked)));
      use(Call(divergence_op<LinearDivergenceForward>(s, asked)));
      Back kept = divergence_op<Back>(s, asked);
      if (s.tokens > 0) add_kept(&kept);
      use(Call(kept));
    }
  }
}
std::vector<uint64_t> budgets(const DivergenceCall& call) {
  const uint64_t least = smallest_plan(call, kH200).bytes;
  const LinearShape& s = call.student.shape;
  const uint64_t most = least + uint64_t(s.tokens + 64) * (s.vocab + 64) * 4 + 3072 * MiB;
  std::vector<uint64_t> all;
  for (uint64_t i = 0; i < 12; ++i) all.push_back(least + (most - least) * i * i / 121);
  return all;
}

TEST(DivergencePlan, FitsItsBudgetToTheByte) {
  for_calls([](const Call& call) {
    const DivergenceCall made = make_divergence(call);
    for (const uint64_t bytes : budgets(made)) {
      const DivergencePlan p = quickest_plan(made, bytes, kH200);
      EXPECT_LE(p.bytes, bytes);
      EXPECT_GT(p.bytes, 0u);
      EXPECT_EQ(p.bytes, place_divergence(made, p, nullptr).bytes);
    }
  });
}

TEST(DivergencePlan, MoreMemoryNeverTakesLonger) {
  for_calls([](const Call& call) {
    const DivergenceCall made = make_divergence(call);
    double before = 1e30;
    for (const uint64_t bytes : budgets(made)) {
      const double now = quickest_plan(made, bytes, kH200).seconds;
      EXPECT_LE(now, before) << bytes;
      before = now;
    }
  });
}

TEST(DivergencePlan, ALlamasTakesFourProductsInWhatIsRecommended) {
  for (const DivergenceKind kind : {DivergenceKind::forward_kl, DivergenceKind::jsd}) {
    const DivergenceCall call = make_divergence(Call(divergence_op<Both>(kLlama, {.kind = kind})));
    const uint64_t most = 2 * uint64_t(kLlama.tokens) * kLlama.vocab + 1229 * MiB;
    const DivergencePlan p = recommended_plan(call, 0, kH200);
    EXPECT_LE(p.bytes, most);
    EXPECT_EQ(p.way, DivergenceWay::whole);
    EXPECT_GE(p.chunk, 512);
    const double products = 4 * 2.0 * 8192 * 4096 * 128256 / 680e12;
    EXPECT_LT(p.seconds, 1.25 * products) << "chunks of " << p.chunk;
  }
}

TEST(DivergencePlan, ALlamasRunsInLittleMemory) {
  const Both op = divergence_op<Both>(kLlama);
  const uint64_t sums = 4 * uint64_t(kLlama.tokens) * kLlama.hidden;
  const DivergencePlan p = smallest_plan(make_divergence(Call(op)), kH200);
  EXPECT_LE(p.bytes, 256 * MiB + sums);
  EXPECT_EQ(p.way, DivergenceWay::columns);
  // f32 gradients are accumulated in place, so chunks of tokens need no memory of the weight's
  // size.
  const Both added = divergence_op<Both>(kLlama, {.f32_gradients = true});
  const DivergencePlan q = quickest_plan(make_divergence(Call(added)), 768 * MiB, kH200);
  EXPECT_EQ(q.way, DivergenceWay::chunks);
}

// Without a target every token counts. Rows aligned to 16 bytes are then read in place.
TEST(DivergencePlan, InputsAreNotCopiedWhereEveryTokenCounts) {
  const auto copies = [](const Call& call) {
    const DivergenceCall made = make_divergence(call);
    const DivergencePlan p = smallest_plan(made, kH200);
    char* const base = reinterpret_cast<char*>(int64_t{1} << 40);
    const DivergenceMemory m = place_divergence(made, p, base);
    EXPECT_EQ(m.student.m.input == nullptr, m.teacher.m.input == nullptr);
    return m.student.m.input != nullptr;
  };
  EXPECT_FALSE(copies(Call(divergence_op<Both>(kLlama))));
  EXPECT_FALSE(copies(Call(divergence_op<LinearDivergenceForward>(kLlama))));
  EXPECT_TRUE(copies(Call(divergence_op<Both>(kLlama, {.target = true}))));
  EXPECT_TRUE(copies(Call(divergence_op<Back>(kLlama))));
  EXPECT_TRUE(copies(Call(divergence_op<Both>({33, 64, 300, 64}))));
  EXPECT_TRUE(copies(Call(divergence_op<Both>({32, 60, 300, 60}))));
  Both op = divergence_op<Both>(kLlama);
  for (TensorView* v : {&op.input, &op.teacher.input}) v->byte_offset = 8;
  EXPECT_TRUE(copies(Call(op)));
  // Addresses are not known yet, and the plan must serve any.
  for (TensorView* v : {&op.input, &op.teacher.input}) v->byte_offset = 0, v->data = nullptr;
  EXPECT_TRUE(copies(Call(op)));
}

// More memory stores dz of more columns, which reduces the products from six to four.
TEST(DivergencePlan, MemoryHoldsDzOfAShareOfTheColumns) {
  const DivergenceCall call = make_divergence(Call(divergence_op<Both>(kLlama)));
  int64_t stored = 0;
  for (const uint64_t bytes : {384, 768, 1184, 1600, 2104}) {
    const DivergencePlan p = quickest_plan(call, bytes * MiB, kH200);
    EXPECT_EQ(p.way, DivergenceWay::columns) << bytes;
    EXPECT_GE(p.stored, stored) << bytes;
    EXPECT_LT(p.stored, kLlama.vocab) << bytes;
    EXPECT_EQ(p.stored % 64, 0);
    stored = p.stored;
  }
  EXPECT_GT(stored, kLlama.vocab / 2);
  EXPECT_EQ(quickest_plan(call, 3072 * MiB, kH200).way, DivergenceWay::whole);
}

TEST(DivergencePlan, AFrozenHeadNeedsNoDzOfAllTokens) {
  const Both op = divergence_op<Both>(kLlama, {.grad_weight = false});
  const DivergenceCall call = make_divergence(Call(op));
  EXPECT_EQ(smallest_plan(call, kH200).way, DivergenceWay::chunks);
}

// A Backward of kept dz needs neither logits nor a teacher.
TEST(DivergencePlan, KeptDzLeavesTwoProducts) {
  Back op = divergence_op<Back>(kLlama);
  add_kept(&op);
  op.teacher = {};
  const DivergenceCall call = make_divergence(Call(op));
  ASSERT_TRUE(call.from_kept);
  EXPECT_TRUE(call.alike);
  const DivergencePlan p = smallest_plan(call, kH200);
  EXPECT_EQ(p.way, DivergenceWay::from_kept);
  EXPECT_LE(p.bytes, 6 * uint64_t(kLlama.tokens) * kLlama.hidden + 16 * MiB);
  EXPECT_LT(p.seconds, 1.1 * 2 * 2.0 * 8192 * 4096 * 128256 / 680e12);
}

// Factors that differ per row would overflow an f16 input, so dz is multiplied by them in a copy.
TEST(DivergencePlan, FactorsThatDifferAreNotMultipliedToAnInputOfF16) {
  for (const DType dtype : {DType::f16, DType::bf16}) {
    for (const Reduction reduction : {Reduction::none, Reduction::mean}) {
      HeadSizes s = kLlama;
      s.dtype = dtype;
      Back op = divergence_op<Back>(s, {.reduction = reduction});
      add_kept(&op);
      const bool copies = dtype == DType::f16 && reduction == Reduction::none;
      EXPECT_EQ(make_divergence(Call(op)).scales_panel(), copies);
    }
  }
}

// Equal heads must give exactly 0, so both must read their weight in the same way.
TEST(DivergencePlan, EqualHeadsAreReadAlike) {
  const DivergenceCall one =
      make_divergence(Call(divergence_op<Both>({33, 61, 300, 61}, {.transposed = true})));
  EXPECT_TRUE(one.student.shape.copies_weight && one.teacher.shape.copies_weight);
  // A row of 320 elements is a multiple of 16 bytes and could be read in place.
  const DivergenceCall other =
      make_divergence(Call(divergence_op<Both>({33, 61, 320, 61}, {.transposed = true})));
  EXPECT_TRUE(other.student.shape.copies_weight && other.teacher.shape.copies_weight);
}

// Arrays that are in use at the same time must be disjoint and inside the workspace.
struct Place {
  const char* name;
  const void* data;
  uint64_t size;
};
std::vector<Place> places_of(const DivergenceCall& call, const DivergencePlan& p,
                             const DivergenceMemory& m, bool gradients) {
  const LinearShape& s = call.student.shape;
  const auto element = static_cast<uint64_t>(size_of(s.dtype));
  const bool whole = p.way == DivergenceWay::whole, by_columns = p.way == DivergenceWay::columns;
  const bool by_chunk = p.way == DivergenceWay::none || p.way == DivergenceWay::chunks;
  const auto tokens = static_cast<uint64_t>(s.tokens);
  const auto all = static_cast<uint64_t>(whole_rows(s.tokens));
  const uint64_t rows = by_chunk ? p.chunk : all, pitch = s.hidden_pitch();
  const uint64_t chunk = p.way == DivergenceWay::none ? std::min(p.chunk, s.tokens) : p.chunk;
  const uint64_t width = by_columns || call.scales_panel() ? p.columns : panel_pitch(s.vocab);
  const bool blocks = by_columns && gradients;
  const LogitsOfHeads& made = blocks ? m.block : m.logits;
  const uint64_t logits = blocks ? rows * width * 4 : chunk * panel_pitch(s.vocab) * 4;
  std::vector<Place> places{{"tokens", m.tokens.row, tokens * 4},
                            {"states", m.states, tokens * sizeof(DivergenceState)},
                            {"grad_weight_sum", m.student.m.grad_weight_sum, s.vocab * pitch * 4}};
  const auto push_dz = [&](const char* name, const char* dz, uint64_t columns) {
    if (dz == reinterpret_cast<const char*>(made.student)) return;
    places.push_back({name, dz, rows * columns * element});
  };
  const bool some = by_columns || call.scales_panel();
  push_dz("dz", m.dz, by_columns ? p.stored : panel_pitch(s.vocab));
  if (blocks || !by_columns) push_dz("block_dz", m.block_dz, some ? p.columns : 0);
  const DivergenceHead& head = gradients ? m.ready : m.student;
  const uint64_t inputs = whole && !gradients ? chunk : rows;
  places.push_back({"input", head.m.input, inputs * pitch * element});
  places.push_back({"target_logit", head.m.target_logit, inputs * 4});
  places.push_back({"slope", head.m.slope, inputs * 4});
  if (gradients || !whole) {
    const uint64_t sums = p.way == DivergenceWay::chunks ? p.chunk : tokens;
    places.push_back({"grad_input_sum", m.student.m.grad_input_sum, sums * pitch * 4});
  }
  if (gradients && whole) return places;
  places.push_back({"logits", made.student, logits});
  places.push_back({"teacher_logits", made.teacher, logits});
  if (blocks) return places;
  for (const Partials* sums : {&m.sums, &m.teacher_sums}) {
    const uint64_t size = std::min(chunk, tokens) * sums->segments * 4;
    places.push_back({"maximum", sums->maximum, size});
    places.push_back({"sum", sums->sum, size});
  }
  return places;
}

TEST(DivergencePlan, ArraysLieApart) {
  char* const base = reinterpret_cast<char*>(int64_t{1} << 40);
  for_calls([&](const Call& call) {
    const DivergenceCall made = make_divergence(call);
    for (const uint64_t bytes : budgets(made)) {
      const DivergencePlan p = quickest_plan(made, bytes, kH200);
      const DivergenceMemory m = place_divergence(made, p, base);
      for (const bool gradients : {false, true}) {
        std::vector<Place> places = places_of(made, p, m, gradients);
        std::erase_if(places, [](const Place& x) { return x.data == nullptr || x.size == 0; });
        std::ranges::sort(places, {}, &Place::data);
        const char* end = base;
        for (const Place& x : places) {
          EXPECT_GE(static_cast<const char*>(x.data), end) << x.name << ", " << name_of(p.way);
          end = static_cast<const char*>(x.data) + x.size;
        }
        EXPECT_LE(end, base + p.bytes);
      }
    }
  });
}

// If an engine stores a large vocabulary's logits, chunks have 1024 tokens, which fill its tiles.
TEST(DivergencePlan, AnEnginesTilesAreFull) {
  for (const HeadSizes& s : {kLlama, HeadSizes{8192, 2048, 151936, 4096, DType::bf16}}) {
    const DivergencePlan p =
        recommended_plan(make_divergence(Call(divergence_op<Both>(s))), 0, kH200);
    EXPECT_EQ(p.sum_columns, 192);
    EXPECT_EQ(p.chunk, 1024);
  }
}

}  // namespace
}  // namespace logitless::cuda
