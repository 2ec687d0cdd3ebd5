// SPDX-License-Identifier: Apache-2.0
// What a call enqueues on CUDA: a few kernels and nothing else, since each costs the host two
// microseconds. Thousands of tokens are compacted in more than one launch.
#include <cuda_runtime.h>

#include <algorithm>
#include <map>

#include "resident.h"
#include "src/cuda/linear/search.h"
#include "src/cuda/runtime/runtime.h"
#include "tests/support/suite.h"

namespace logitless::conformance {
namespace {

class CudaLaunches : public ConformanceTest {
 protected:
  Case plain(Shape shape) const {
    return {
        .op = op_, .shape = shape, .dtype = dtype_, .grad_input = dtype_, .grad_weight = dtype_};
  }
};

// Counts the nodes of a graph of one call, by kind.
template <class F>
std::map<cudaGraphNodeType, int> nodes_of(cudaStream_t stream, F&& run) {
  EXPECT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
  const Status status = run();
  EXPECT_TRUE(status.ok()) << status.message();
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
  size_t count = 0;
  EXPECT_EQ(cudaGraphGetNodes(graph, nullptr, &count), cudaSuccess);
  std::vector<cudaGraphNode_t> nodes(count);
  EXPECT_EQ(cudaGraphGetNodes(graph, nodes.data(), &count), cudaSuccess);
  std::map<cudaGraphNodeType, int> kinds;
  for (const cudaGraphNode_t node : nodes) {
    cudaGraphNodeType kind;
    EXPECT_EQ(cudaGraphNodeGetType(node, &kind), cudaSuccess);
    ++kinds[kind];
  }
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  return kinds;
}

// The limit of launches for a plain call whose logits are one block, or for Hopper's kernels.
int most_launches(OpKind op, bool own_products) {
  switch (op) {
    case OpKind::softmax:
      return 1;
    case OpKind::backward:
      return 2;
    case OpKind::forward:
    case OpKind::forward_backward:
      return 3;
    case OpKind::linear_forward:
      return own_products ? 4 : 5;
    case OpKind::linear_backward:
      return own_products ? 10 : 14;
    case OpKind::linear_forward_backward:
      return own_products ? 10 : 14;
    default:  // divergences: divergence_recorded_test.cpp
      return 0;
  }
}

// The launches of a call: this library's kernels and cuBLASLt's products, of one kernel each, or
// two if the depth is split.
struct Launches {
  int64_t kernels = 0, products = 0;
};

// The portable engine's plain call: blocks of logits in turn, each a product and a kernel over it,
// and panels of E or dz with their two products.
Launches launches_of(const cuda::LinearShape& s, const cuda::LinearPlan& plan) {
  const auto pieces = [](int64_t n, int64_t size) { return n == 0 ? 0 : (n + size - 1) / size; };
  // One kernel compacts the tokens, another rounds grad_weight's sum.
  Launches all{.kernels = 1 + (sums_grad_weight(s, plan) ? 1 : 0)};
  for (int64_t first = 0; first < s.tokens; first += plan.token_chunk) {
    const int64_t rows = std::min(plan.token_chunk, s.tokens - first);
    const auto logits = [&](int64_t columns) {
      const int64_t blocks = pieces(rows, plan.block_rows) * pieces(columns, plan.block_columns);
      all.kernels += blocks;
      all.products += blocks;
    };
    all.kernels += 2;  // one gathers the input, one combines the rows' states
    if (s.forward) logits(s.vocab);
    if (!s.gradients()) continue;
    const bool mixed = plan.stored_columns > 0 && plan.stored_columns < s.vocab;
    // Two kernels compute dz from E and the extra rows, one product computes grad_weight.
    if (plan.stored_columns > 0) {
      all.kernels += 2;
      all.products += 1;
    }
    if (plan.stored_columns == s.vocab) {
      all.kernels += pieces(rows, plan.sum_rows);
      all.products += pieces(rows, plan.sum_rows);
      continue;
    }
    for (int64_t j = plan.stored_columns; j < s.vocab; j += plan.remade_columns) {
      logits(std::min(plan.remade_columns, s.vocab - j));
      all.kernels += mixed ? 2 : 1;
      all.products += 2;
    }
    all.kernels += 1;  // rounds grad_input's sum
    all.products += mixed ? 1 : 0;
  }
  return all;
}

template <class Op>
void expect_few(OpKind kind, const Resident<Op>& call, int kernels) {
  bool own_products = false;
  if constexpr (LinearOp<Op>) {
    const cuda::DeviceInfo* info = nullptr;
    ASSERT_TRUE(cuda::find_device(call.execution().device.index, &info).ok());
    const cuda::Asked asked = cuda::asked_of(call.op(), *info);
    const cuda::LinearShape& shape = asked.shape;
    own_products = &asked.engine != cuda::engines().back();
    const cuda::LinearPlan plan = asked.plan(call.scratch().bytes);
    if (!own_products && plan.block_columns < shape.vocab) {
      const Launches said = launches_of(shape, plan);
      EXPECT_GE(kernels, said.kernels + said.products);
      EXPECT_LE(kernels, said.kernels + 2 * said.products);
      return;
    }
  }
  EXPECT_LE(kernels, most_launches(kind, own_products));
}

TEST_P(CudaLaunches, APlainCallIsAFewKernelsAndNothingElse) {
  ASSERT_TRUE(warmup(device_.execution()).ok());
  for (const Shape shape : {Shape{33, 64, 304}, Shape{600, 128, 4096}}) {
    with_op(op_, [&](auto op) {
      Problem<decltype(op)> p = build<decltype(op)>(plain(shape));
      Resident<decltype(op)> resident(device_, p);
      ASSERT_TRUE(resident.run().ok());
      auto kinds = nodes_of(resident.stream(), [&] { return resident.run(); });
      const int kernels = kinds[cudaGraphNodeTypeKernel];
      std::printf("[ launches ] %s: %d\n", name_of(op_), kernels);
      SCOPED_TRACE(describe(plain(shape)));
      expect_few(op_, resident, kernels);
      kinds.erase(cudaGraphNodeTypeKernel);
      EXPECT_TRUE(kinds.empty()) << "a node of kind " << kinds.begin()->first;
    });
  }
}

// Token counts around one block's and one launch's limit, and far above both.
TEST_P(CudaLaunches, ThousandsOfTokensCountAndLieInOrder) {
  if (op_ == OpKind::softmax) return;
  for (const int64_t tokens : {1023, 1025, 8192, 20011, 65536, 65537, 90001}) {
    Case c = plain({tokens, 9, 21});
    c.ignored = 0.3;
    c.outside = 0.01;
    c.fault = true;
    c.statistics = has_forward(op_);
    c.token_weight = c.vocab_weight = true;
    c.options.label_smoothing = 0.1f;
    for (const Reduction reduction : {Reduction::mean, Reduction::none}) {
      c.options.reduction = reduction;
      c.grad_loss = reduction == Reduction::none && has_gradient(op_);
      const Comparison result = judge(device_, c);
      EXPECT_TRUE(result.ok()) << describe(c) << "\n" << result.report;
    }
  }
}

std::vector<std::string> cuda_alone() {
  std::vector<std::string> names = device_names();
  std::erase_if(names, [](const std::string& name) { return name != "cuda"; });
  return names;
}

constexpr DType kTwo[] = {DType::f32, DType::bf16};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CudaLaunches);
INSTANTIATE_TEST_SUITE_P(All, CudaLaunches,
                         testing::Combine(testing::ValuesIn(cuda_alone()), testing::ValuesIn(kOps),
                                          testing::ValuesIn(kTwo)),
                         parameter_name);

}  // namespace
}  // namespace logitless::conformance
