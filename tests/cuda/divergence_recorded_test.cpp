// SPDX-License-Identifier: Apache-2.0
// Divergences on RecordedCuda, which runs nothing: a call allocates nothing, keeps CUDA's rules,
// does everything that can fail before its first launch, and makes only the products that it needs.
#include <set>
#include <string>

#include "divergence_ops.h"
#include "recorded.h"
#include "src/cuda/divergence/plan.h"
#include "tests/support/allocation_count.h"

#include <gtest/gtest.h>

namespace logitless::cuda {
namespace {

using Both = LinearDivergenceForwardBackward;
using Forward = LinearDivergenceForward;
using Back = LinearDivergenceBackward;
using conformance::allocations;

constexpr RecordedCuda::Device kDevices[] = {{"A100", 8, 0, true, 108, 166912},
                                             {"H100", 9, 0, true, 132, 232448}};
constexpr Execution kExecution{.device = {DeviceType::cuda, 0}};
void* const kMemory = reinterpret_cast<void*>(int64_t{1} << 46);

// A share of 0 is the minimum workspace, 1 the recommended one.
template <class Op>
Status run_nowhere(const Op& op, double share) {
  WorkspaceSize size;
  const Status status = workspace(op, kExecution, &size);
  if (!status.ok()) return status;
  const auto range = static_cast<double>(size.recommended - size.minimum);
  return run(op, {kMemory, size.minimum + static_cast<uint64_t>(share * range)}, kExecution);
}

template <class F>
void for_ops(F&& use) {
  for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
    for (const HeadSizes s :
         {HeadSizes{33, 61, 301, 40, dtype}, HeadSizes{2048, 256, 60000, 256, dtype}}) {
      for (const DivergenceKind kind : {DivergenceKind::forward_kl, DivergenceKind::jsd}) {
        for (const bool all : {false, true}) {
          const AskedOf asked{.target = all,
                              .biases = all,
                              .temperatures = all,
                              .weights = all,
                              .given_logits = all,
                              .statistics = all,
                              .transposed = all,
                              .reduction = all ? Reduction::none : Reduction::mean,
                              .kind = kind};
          use(divergence_op<Both>(s, asked));
          auto forward = divergence_op<Forward>(s, asked);
          use(forward);
          add_kept(&forward);
          use(forward);
          for (const bool sums : {false, true}) {
            auto shard = divergence_op<Forward>(s, asked);
            make_shard(&shard, sums);
            use(shard);
          }
          auto back = divergence_op<Back>(s, asked);
          use(back);
          auto of_shard = back;
          make_shard(&of_shard);
          use(of_shard);
          add_kept(&back);
          back.teacher = {};
          use(back);
        }
      }
    }
  }
}

TEST(DivergenceRecorded, KeepsTheRulesAndAllocatesNothing) {
  for (const auto& device : kDevices) {
    RecordedCuda machine({device});
    for_ops([&](const auto& op) {
      for (const double share : {0.0, 0.3, 1.0, 3.0}) {
        WorkspaceSize size;
        Status status = workspace(op, kExecution, &size);
        ASSERT_TRUE(status.ok()) << status.message();
        EXPECT_LE(size.minimum, size.recommended);
        const int before = machine.launches();
        const int64_t allocated = allocations();
        status = run_nowhere(op, share);
        EXPECT_EQ(allocations(), allocated);
        EXPECT_TRUE(status.ok()) << status.message();
        EXPECT_STREQ(machine.fault(), "");
        EXPECT_GT(machine.launches(), before);
        EXPECT_EQ(machine.live(), 0);
      }
    });
  }
}

TEST(DivergenceRecorded, NothingIsAskedForTheFirstTimeAfterALaunch) {
  const std::set<std::string> launches{
      "cudaLaunchKernelExC",        "cudaMemcpyAsync",          "cublasLtMatmul",
      "cublasLtMatrixLayoutCreate", "cublasLtMatmulDescCreate", "cublasLtMatmulDescSetAttribute"};
  for (const auto& device : kDevices) {
    for_ops([&](const auto& op) {
      RecordedCuda machine({device});
      EXPECT_TRUE(run_nowhere(op, 1).ok());
      EXPECT_EQ(machine.first_asked_late(launches), "");
    });
  }
}

TEST(DivergenceRecorded, AQuestionThatFailsIsSaidBeforeAnythingIsLaunched) {
  const std::set<std::string> may_fail{"cudaGetDevice",
                                       "cudaSetDevice",
                                       "cuCtxGetId",
                                       "cuCtxGetCurrent",
                                       "dlsym",
                                       "dlopen",
                                       "cublasLtMatmulAlgoCheck",
                                       "cublasLtMatmulAlgoConfigGetAttribute"};
  const Both op = divergence_op<Both>({33, 61, 301, 40});
  for (int n = 1;; ++n) {
    RecordedCuda machine({kDevices[1]});
    machine.fail_question(n);
    const Status status = run_nowhere(op, 1);
    if (machine.failed() == nullptr) {
      EXPECT_TRUE(status.ok()) << status.message();
      EXPECT_GT(n, 8);
      break;
    }
    if (!may_fail.contains(machine.failed())) {
      EXPECT_FALSE(status.ok()) << machine.failed();
    }
    if (!status.ok()) {
      EXPECT_EQ(machine.launches(), machine.launches_before_failure()) << machine.failed();
    }
    machine.fail_question(0);
    EXPECT_TRUE(run_nowhere(op, 1).ok()) << machine.failed();
  }
}

// Counts products: cuBLASLt's, and the engine's own kernel of logits, recognized by its grid.
struct Products final : RecordedCuda::Listener {
  int count = 0, of_engine = 0;
  void launch(const cudaLaunchConfig_t& config, const void*, void**, const Parameter*,
              int) override {
    if (config.gridDim.x == 132 && config.blockDim.x == 384) ++of_engine, ++count;
  }
  void copy(void*, const void*, size_t) override {}
  void encode(const Map&, CUtensorMap*) override {}
  void* layout(int, uint64_t, uint64_t, int64_t) override { return this; }
  void* description(int, int) override { return this; }
  void* preference() override { return this; }
  void set(void*, int, const void*, size_t) override {}
  void choose(const Operands&, void*, lt::Algorithm*) override {}
  void multiply(const Operands&, std::array<const void*, 6>, const lt::Algorithm&, void*,
                size_t) override {
    ++count;
  }
};
template <class Op>
int products_of(RecordedCuda* machine, const Op& op, double share = 1, int* of_engine = nullptr) {
  Products products;
  machine->listener = &products;
  const Status status = run_nowhere(op, share);
  machine->listener = nullptr;
  if (of_engine != nullptr) *of_engine = products.of_engine;
  EXPECT_TRUE(status.ok()) << status.message();
  return products.count;
}

// The recommended workspace holds all tokens of these sizes in one chunk.
void expect_products_of(const RecordedCuda::Device& device) {
  const HeadSizes s{512, 256, 60000, 128};
  RecordedCuda machine({device});
  EXPECT_EQ(products_of(&machine, divergence_op<Forward>(s)), 2);
  EXPECT_EQ(products_of(&machine, divergence_op<Both>(s)), 4);
  EXPECT_EQ(products_of(&machine, divergence_op<Back>(s)), 4);
  EXPECT_EQ(products_of(&machine, divergence_op<Both>(s, {.grad_weight = false})), 3);
  EXPECT_EQ(products_of(&machine, divergence_op<Both>(s, {.given_logits = true})), 3);
  Both op = divergence_op<Both>(s);
  op.grad_input = {};
  EXPECT_EQ(products_of(&machine, op), 3);
  Forward forward = divergence_op<Forward>(s);
  add_kept(&forward);
  EXPECT_EQ(products_of(&machine, forward), 2);
  Back back = divergence_op<Back>(s);
  add_kept(&back);
  back.teacher = {};
  EXPECT_EQ(products_of(&machine, back), 2);
  back.grad_weight = {};
  EXPECT_EQ(products_of(&machine, back), 1);
}
TEST(DivergenceRecorded, MakesTheProductsThatAreAskedFor) {
  for (const auto& device : kDevices) expect_products_of(device);
}

// The engine computes both heads' logits, except with a bias, a softcap, a negative scale or in
// f32.
TEST(DivergenceRecorded, AnEngineStoresTheLogits) {
  HeadSizes s{512, 256, 60000, 128};
  for (const bool hopper : {false, true}) {
    RecordedCuda machine({kDevices[hopper]});
    const auto stored = [&](const Both& op) {
      int of_engine = 0;
      EXPECT_GE(products_of(&machine, op, 1, &of_engine), 4);
      return of_engine;
    };
    EXPECT_EQ(stored(divergence_op<Both>(s)), hopper ? 2 : 0);
    EXPECT_EQ(stored(divergence_op<Both>(s, {.temperatures = true})), hopper ? 2 : 0);
    EXPECT_EQ(stored(divergence_op<Both>(s, {.biases = true})), 0);
    Both op = divergence_op<Both>(s);
    op.divergence.teacher_softcap = 30;
    EXPECT_EQ(stored(op), 0);
    op = divergence_op<Both>(s);
    op.options.logit_scale = -1;
    EXPECT_EQ(stored(op), 0);
    s.dtype = DType::f32;
    EXPECT_EQ(stored(divergence_op<Both>(s)), 0);
    s.dtype = DType::bf16;
  }
}

// States that are given need no product, in any plan of Backward.
TEST(DivergenceRecorded, MakesTheProductsOfAShard) {
  const HeadSizes s{512, 256, 60000, 128};
  RecordedCuda machine({kDevices[0]});
  for (const bool sums : {false, true}) {
    Forward forward = divergence_op<Forward>(s);
    make_shard(&forward, sums);
    EXPECT_EQ(products_of(&machine, forward), 2);
  }
  for (const DivergenceKind kind : {DivergenceKind::forward_kl, DivergenceKind::jsd}) {
    Back given = divergence_op<Back>(s, {.kind = kind});
    make_shard(&given);
    const DeviceInfo* info = nullptr;
    ASSERT_TRUE(find_device(0, &info).ok());
    const DivergenceCall call = make_divergence(Call(given));
    const DivergencePlan least = smallest_plan(call, *info);
    ASSERT_EQ(least.way, DivergenceWay::columns);
    const DivergencePlan quick = recommended_plan(call, least.bytes, *info);
    ASSERT_EQ(quick.way, DivergenceWay::columns);
    ASSERT_GE(s.vocab % quick.columns, 4096);  // so grad_weight's last product is two
    EXPECT_EQ(products_of(&machine, given), 4 * divide_up(s.vocab, quick.columns) + 1);
    given.grad_input_first = true;
    Plan plan;
    ASSERT_TRUE(plan.create(given, kExecution).ok());
    std::vector<int> of_parts;
    for (const int part : {1, 2, 3}) {
      Products products;
      machine.listener = &products;
      EXPECT_TRUE(plan.run(Addresses(given), {kMemory, quick.bytes}, nullptr, 0, part).ok());
      machine.listener = nullptr;
      of_parts.push_back(products.count);
    }
    const int first = static_cast<int>(4 * divide_up(s.vocab, quick.columns)) - 1;
    EXPECT_EQ(of_parts, (std::vector{first, 1, 1}));
    given.grad_input_first = false;
    EXPECT_EQ(products_of(&machine, given, 0), 4 * divide_up(s.vocab, least.columns));
  }
}

// Heads of equal depth take one algorithm for their logits, so equal heads have equal bits.
TEST(DivergenceRecorded, HeadsOfOneDepthHaveOneAlgorithm) {
  for (const int64_t depth : {256, 128}) {
    RecordedCuda machine({kDevices[0]});
    EXPECT_TRUE(run_nowhere(divergence_op<Forward>({512, 256, 60000, depth}), 1).ok());
    EXPECT_EQ(machine.heuristics(), depth == 256 ? 1 : 2);
  }
}

TEST(DivergenceRecorded, NoTokensTakeNoProduct) {
  RecordedCuda machine({kDevices[1]});
  const HeadSizes s{0, 64, 300, 64};
  EXPECT_EQ(products_of(&machine, divergence_op<Forward>(s)), 0);
  EXPECT_EQ(products_of(&machine, divergence_op<Both>(s)), 0);
  EXPECT_GT(machine.launches(), 0);
  EXPECT_STREQ(machine.fault(), "");
}

}  // namespace
}  // namespace logitless::cuda
