// SPDX-License-Identifier: Apache-2.0
// What a call puts on its stream on CUDA: few kernels and nothing else, since each costs the host
// two microseconds; and tokens by the thousands, which are prepared in more than one launch.
#include <cuda_runtime.h>

#include <map>

#include "logitless/c.h"
#include "resident.h"
#include "suite.h"

namespace logitless::conformance {
namespace {

class CudaLaunches : public ConformanceTest {
 protected:
  Case plain(Shape shape) const {
    return {
        .op = op_, .shape = shape, .dtype = dtype_, .grad_input = dtype_, .grad_weight = dtype_};
  }
};

// The kinds of the nodes of a graph made of one call.
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

// Of a plain call; without Hopper's own kernels the matrix library adds its own.
int most_launches(OpKind op, bool own_products) {
  switch (op) {
    case OpKind::softmax:
      return 1;
    case OpKind::forward:
    case OpKind::backward:
      return 3;
    case OpKind::forward_backward:
      return 4;
    case OpKind::linear_forward:
      return own_products ? 4 : 5;
    case OpKind::linear_backward:
      return own_products ? 9 : 14;
    case OpKind::linear_forward_backward:
      return own_products ? 10 : 14;
  }
  return 0;
}

TEST_P(CudaLaunches, APlainCallIsAFewKernelsAndNothingElse) {
  ASSERT_TRUE(warmup(device_.execution()).ok());
  char text[512] = {};
  ASSERT_EQ(logitless_describe_backend(LOGITLESS_CUDA, text, sizeof(text), nullptr), 0);
  const std::string device = text;
  const bool own_products = dtype_ != DType::f32 && device.find("sm_90") != std::string::npos &&
                            device.find("portable") == std::string::npos;
  for (const Shape shape : {Shape{33, 64, 304}, Shape{600, 128, 4096}}) {
    with_op(op_, [&](auto op) {
      Problem<decltype(op)> p = build<decltype(op)>(plain(shape));
      Resident<decltype(op)> resident(device_, p);
      ASSERT_TRUE(resident.run().ok());
      auto kinds = nodes_of(resident.stream(), [&] { return resident.run(); });
      const int kernels = kinds[cudaGraphNodeTypeKernel];
      std::printf("[ launches ] %s: %d\n", name_of(op_), kernels);
      EXPECT_LE(kernels, most_launches(op_, own_products)) << describe(plain(shape));
      kinds.erase(cudaGraphNodeTypeKernel);
      EXPECT_TRUE(kinds.empty()) << "a node of kind " << kinds.begin()->first;
    });
  }
}

// Around the tokens that one launch prepares, and far beyond.
TEST_P(CudaLaunches, ThousandsOfTokensCountAndLieInOrder) {
  if (op_ == OpKind::softmax) return;
  for (const int64_t tokens : {8191, 8192, 8193, 20011}) {
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
