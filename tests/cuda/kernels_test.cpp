// SPDX-License-Identifier: Apache-2.0
// Runs each of Hopper's kernels on a ragged shape small enough for compute-sanitizer
// (scripts/sanitize-device): several tiles, the last ones partial, more than one row of clusters,
// tiles cut into slices, panels in grad_weight's memory.
#include <cuda.h>
#include <cuda_runtime.h>
#include <cxxabi.h>

#include <cstdio>
#include <memory>
#include <set>
#include <stdexcept>
#include <string_view>

#include "resident.h"
#include "src/cuda/linear/search.h"
#include "src/cuda/runtime/kernel_file.h"
#include "src/cuda/runtime/runtime.h"
#include "tests/support/suite.h"

namespace logitless::conformance {
namespace {

struct Ragged {
  const char* name;
  Case call;
  double share;  // of the recommended workspace beyond the minimum
};

Case linear(OpKind op, DType dtype, Shape shape) {
  return {.op = op, .shape = shape, .dtype = dtype, .grad_input = dtype, .grad_weight = dtype};
}
Case f32_gradients(Case c) {
  c.grad_input = c.grad_weight = DType::f32;
  return c;
}
Case biased(Case c) {
  c.bias = true;
  return c;
}
Case smoothed(Case c) {
  c.options.label_smoothing = 0.1;
  c.vocab_weight = true;
  return biased(c);
}
Case smoothed_alone(Case c) {
  c.options.label_smoothing = 0.1;
  return c;
}
Case capped_alone(Case c) {
  c.options.softcap = 20;
  return c;
}
Case capped(Case c) {  // with smoothing, dz overwrites E
  c.options.softcap = 20;
  return smoothed(c);
}
Case tempered(Case c) {
  c.temperatures = true;
  return c;
}
Case ranked(Case c) {
  c.rank = c.sum_p_squared = true;
  return c;
}
Case with_entropy(Case c) {
  c.entropy = true;
  return c;
}
Case ignored(Case c) {
  c.ignored = 0.3;
  return c;
}

// Heads large enough for an engine to store the logits.
Case diverging(DType dtype) {
  Case c = linear(OpKind::divergence_forward_backward, dtype, {1000, 72, 4117});
  c.divergence.kind = DivergenceKind::jsd;
  c.statistics = c.logprob = c.grad_loss = true;
  c.teacher_hidden = 40;
  return ignored(c);
}

constexpr OpKind loss = OpKind::linear_forward, both = OpKind::linear_forward_backward,
                 backward = OpKind::linear_backward;
constexpr DType bf16 = DType::bf16, f16 = DType::f16;
constexpr Shape tiles{530, 72, 399}, cut{1300, 72, 1301}, lent{66, 256, 12001},
    partly_lent{300, 104, 12001}, few{100, 72, 399}, single{3, 72, 399}, half{200, 72, 399},
    deep{1100, 520, 399}, chunks{1100, 64, 1003};

std::vector<Ragged> ragged_losses() {
  return {
      {"loss_bf16", ignored(linear(loss, bf16, tiles)), 1},
      {"loss_without_copy_bf16", ignored(linear(loss, bf16, tiles)), 0},
      // Deep enough that the ring of stages wraps around often.
      {"loss_without_copy_deep_bf16", ignored(linear(loss, bf16, deep)), 0},
      {"loss_f16", linear(loss, f16, tiles), 1},
      {"loss_with_bias_bf16", ignored(biased(linear(loss, bf16, tiles))), 1},
      {"loss_smoothed_alone_bf16", smoothed_alone(linear(loss, bf16, tiles)), 1},
      {"loss_capped_alone_bf16", ignored(capped_alone(linear(loss, bf16, tiles))), 1},
      {"loss_smoothed_bf16", smoothed(linear(loss, bf16, tiles)), 1},
      {"loss_capped_bf16", ignored(capped(linear(loss, bf16, tiles))), 1},
      {"loss_tempered_bf16", ignored(tempered(linear(loss, bf16, tiles))), 1},
      // More tiles than multiprocessors: a block takes a second one.
      {"loss_of_many_tiles_bf16", ignored(linear(loss, bf16, {1100, 72, 4117})), 1},
      {"loss_with_entropy_bf16", ignored(with_entropy(linear(loss, bf16, tiles))), 1},
      {"loss_with_entropy_f16", with_entropy(linear(loss, f16, tiles)), 1},
      {"loss_ranked_bf16", ignored(ranked(linear(loss, bf16, tiles))), 1},
      {"loss_ranked_f16", ranked(linear(loss, f16, tiles)), 1},
      {"loss_capped_tempered_bf16", tempered(capped_alone(linear(loss, bf16, tiles))), 1},
      {"loss_capped_tempered_f16", tempered(capped_alone(linear(loss, f16, tiles))), 1},
      {"loss_with_bias_f16", biased(linear(loss, f16, tiles)), 1},
      {"few_loss_bf16", ignored(linear(loss, bf16, few)), 1},
      {"few_loss_without_copy_bf16", ignored(linear(loss, bf16, few)), 0},
      {"single_loss_bf16", linear(loss, bf16, single), 1},
      {"half_loss_without_copy_bf16", ignored(linear(loss, bf16, half)), 0},
      {"few_loss_with_bias_f16", biased(linear(loss, f16, few)), 1},
      {"divergence_bf16", diverging(bf16), 1},
      {"divergence_f16", diverging(f16), 1},
      {"divergence_tempered_bf16", tempered(diverging(bf16)), 1},
      {"divergence_tempered_f16", tempered(diverging(f16)), 1},
  };
}

std::vector<Ragged> ragged_gradients() {
  return {
      {"whole_bf16", ignored(linear(both, bf16, cut)), 1},
      {"whole_f32_gradients_bf16", f32_gradients(linear(both, bf16, cut)), 1},
      {"whole_with_bias_bf16", biased(linear(both, bf16, tiles)), 1},
      {"whole_smoothed_alone_bf16", smoothed_alone(linear(both, bf16, tiles)), 1},
      {"whole_capped_alone_bf16", ignored(capped_alone(linear(both, bf16, tiles))), 1},
      {"whole_capped_with_bias_bf16", capped_alone(biased(linear(both, bf16, tiles))), 1},
      {"whole_capped_smoothed_alone_bf16",
       ignored(capped_alone(smoothed_alone(linear(both, bf16, tiles)))), 1},
      {"whole_smoothed_bf16", ignored(smoothed(linear(both, bf16, tiles))), 1},
      {"whole_capped_bf16", ignored(capped(linear(both, bf16, cut))), 1},
      {"whole_tempered_bf16", ignored(tempered(linear(both, bf16, tiles))), 1},
      {"whole_with_entropy_bf16", ignored(with_entropy(linear(both, bf16, tiles))), 1},
      {"whole_with_entropy_f16", with_entropy(linear(both, f16, tiles)), 1},
      {"whole_ranked_bf16", ignored(ranked(linear(both, bf16, tiles))), 1},
      {"whole_capped_tempered_bf16", tempered(capped_alone(linear(both, bf16, tiles))), 1},
      {"whole_tempered_f16", tempered(linear(both, f16, tiles)), 1},
      {"frugal_capped_tempered_f16", tempered(capped_alone(linear(both, f16, tiles))), 1},
      {"whole_f16", ignored(linear(both, f16, cut)), 1},
      {"whole_f32_gradients_f16", f32_gradients(linear(both, f16, cut)), 1},
      {"whole_with_bias_f16", biased(linear(both, f16, tiles)), 1},
      {"frugal_capped_f16", capped(linear(both, f16, tiles)), 1},
      {"least_bf16", linear(both, bf16, cut), 0},
      {"least_capped_bf16", ignored(capped(linear(both, bf16, tiles))), 0},
      {"least_f16", linear(both, f16, cut), 0},
      {"whole_ranked_f16", ranked(linear(both, f16, tiles)), 1},
      {"backward_f16", ignored(linear(backward, f16, tiles)), 1},
      {"backward_tempered_f16", tempered(linear(backward, f16, tiles)), 1},
      {"backward_with_bias_f16", biased(linear(backward, f16, tiles)), 1},
      {"backward_bf16", ignored(linear(backward, bf16, tiles)), 1},
      {"backward_with_bias_bf16", biased(linear(backward, bf16, tiles)), 1},
      {"backward_smoothed_alone_bf16", smoothed_alone(linear(backward, bf16, tiles)), 1},
      {"backward_capped_bf16", capped(linear(backward, bf16, tiles)), 1},
      {"backward_capped_alone_bf16", ignored(capped_alone(linear(backward, bf16, tiles))), 1},
      {"backward_tempered_bf16", ignored(tempered(linear(backward, bf16, tiles))), 1},
      {"backward_tempered_with_bias_bf16", tempered(biased(linear(backward, bf16, tiles))), 1},
      {"backward_capped_tempered_bf16", tempered(capped_alone(linear(backward, bf16, tiles))), 1},
      {"chunks_bf16", ignored(linear(both, bf16, chunks)), 0.1},
      {"chunks_f16", ignored(linear(both, f16, chunks)), 0.1},
      {"chunks_f32_gradients_f16", f32_gradients(linear(both, f16, chunks)), 0.1},
      {"chunks_f32_gradients_bf16", f32_gradients(linear(both, bf16, chunks)), 0.1},
      {"half_whole_bf16", ignored(linear(both, bf16, half)), 1},
      {"few_whole_capped_alone_bf16", ignored(capped_alone(linear(both, bf16, few))), 1},
      {"single_whole_bf16", linear(both, bf16, single), 1},
      {"single_whole_with_bias_f16", biased(linear(both, f16, single)), 1},
      {"half_whole_f16", linear(both, f16, half), 1},
      {"few_backward_bf16", ignored(linear(backward, bf16, few)), 1},
      {"half_backward_with_bias_bf16", biased(linear(backward, bf16, half)), 1},
      {"lent_bf16", ignored(linear(both, bf16, lent)), 0.2},
      {"lent_f16", ignored(linear(both, f16, lent)), 0.2},
      {"partly_lent_with_bias_f16", biased(linear(both, f16, partly_lent)), 0.2},
      {"lent_smoothed_bf16", smoothed(linear(both, bf16, lent)), 0.2},
      {"lent_capped_bf16", capped(linear(both, bf16, lent)), 0.2},
      {"partly_lent_bf16", ignored(linear(both, bf16, partly_lent)), 0.2},
      {"partly_lent_smoothed_bf16", smoothed(linear(both, bf16, partly_lent)), 0.2},
  };
}

std::vector<Ragged> ragged() {
  std::vector<Ragged> all = ragged_losses();
  for (Ragged& one : ragged_gradients()) all.push_back(std::move(one));
  return all;
}

template <class F>
void with_problem(const Case& c, F&& f) {
  with_any_op(c.op, [&](auto op) {
    auto p = build<decltype(op)>(c);
    f(p);
  });
}

template <class Function>
Function driver_function(const char* name) {
  void* function = cuda::find_driver_function(name);
  if (function == nullptr) throw std::runtime_error(std::string("no ") + name);
  return reinterpret_cast<Function>(function);
}
#define DRIVER(name) driver_function<decltype(&name)>(#name)

// Demangles the name and removes its parameters.
std::string readable(const char* mangled) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> name(
      abi::__cxa_demangle(mangled, nullptr, nullptr, &status), std::free);
  const std::string whole = status == 0 ? name.get() : mangled;
  size_t end = whole.size();
  for (int open = 0; end > 0 && whole.back() == ')';) {
    --end;
    open += whole[end] == ')' ? 1 : whole[end] == '(' ? -1 : 0;
    if (open == 0) return whole.substr(0, end);
  }
  return whole;
}

// Returns the names of the kernels that a call launches, from a captured graph of it.
template <class Op>
std::set<std::string> kernels_of(Resident<Op>& call) {
  std::set<std::string> names;
  EXPECT_EQ(cudaStreamBeginCapture(call.stream(), cudaStreamCaptureModeThreadLocal), cudaSuccess);
  const Status status = call.run();
  EXPECT_TRUE(status.ok()) << status.message();
  cudaGraph_t graph = nullptr;
  EXPECT_EQ(cudaStreamEndCapture(call.stream(), &graph), cudaSuccess);
  size_t count = 0;
  EXPECT_EQ(cudaGraphGetNodes(graph, nullptr, &count), cudaSuccess);
  std::vector<cudaGraphNode_t> nodes(count);
  EXPECT_EQ(cudaGraphGetNodes(graph, nodes.data(), &count), cudaSuccess);
  for (const cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type{};
    EXPECT_EQ(cudaGraphNodeGetType(node, &type), cudaSuccess);
    if (type != cudaGraphNodeTypeKernel) continue;
    CUDA_KERNEL_NODE_PARAMS parameters{};
    if (DRIVER(cuGraphKernelNodeGetParams_v2)(node, &parameters) != CUDA_SUCCESS) continue;
    const char* name = nullptr;
    const CUresult code = parameters.func != nullptr
                              ? DRIVER(cuFuncGetName)(&name, parameters.func)
                              : DRIVER(cuKernelGetName)(&name, parameters.kern);
    if (code == CUDA_SUCCESS) names.insert(readable(name));
  }
  EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  return names;
}

std::set<std::string> kernels_of(const TestDevice& device, const Ragged& r) {
  std::set<std::string> names;
  with_problem(r.call, [&](auto& p) {
    Resident resident(device, p, r.share);
    EXPECT_TRUE(resident.run().ok());  // loads kernels outside of the capture
    names = kernels_of(resident);
  });
  return names;
}

// The names of all kernels that were compiled for the device.
std::set<std::string> compiled_kernels() {
  std::set<std::string> names;
  for (const cuda::KernelFile* f = cuda::KernelFile::first(); f != nullptr; f = f->next()) {
    cudaFunction_t function = nullptr;
    EXPECT_EQ(cudaGetFuncBySymbol(&function, f->kernel()), cudaSuccess);
    CUmodule module = nullptr;
    unsigned count = 0;
    EXPECT_EQ(DRIVER(cuFuncGetModule)(&module, function), CUDA_SUCCESS);
    EXPECT_EQ(DRIVER(cuModuleGetFunctionCount)(&count, module), CUDA_SUCCESS);
    std::vector<CUfunction> functions(count);
    EXPECT_EQ(DRIVER(cuModuleEnumerateFunctions)(functions.data(), count, module), CUDA_SUCCESS);
    for (const CUfunction one : functions) {
      const char* name = nullptr;
      EXPECT_EQ(DRIVER(cuFuncGetName)(&name, one), CUDA_SUCCESS);
      names.insert(readable(name));
    }
  }
  return names;
}

// What the names of the engine's own kernels have in common; nullptr if it has none, or if the
// driver does not name kernels: it does from CUDA 12.3 on.
const char* own_kernels(const TestDevice& device) {
  const cuda::DeviceInfo* info = nullptr;
  if (!cuda::find_device(device.execution().device.index, &info).ok()) return nullptr;
  if (cuda::find_driver_function("cuFuncGetName") == nullptr) return nullptr;
  const std::string_view engine = cuda::engine_for(*info).name();
  return engine == "sm90" ? "sm90::" : engine == "sm80" ? "::fused_logits_kernel" : nullptr;
}

std::vector<std::string> cuda_alone() {
  std::vector<std::string> names = device_names();
  std::erase_if(names, [](const std::string& name) { return name != "cuda"; });
  return names;
}

class CudaKernels : public testing::TestWithParam<std::tuple<std::string, Ragged>> {};

TEST_P(CudaKernels, AreRightAtRaggedShapes) {
  const TestDevice& device = conformance::device(std::get<0>(GetParam()));
  const Ragged& r = std::get<1>(GetParam());
  with_problem(r.call, [&](auto& p) {
    const uint64_t bytes = bytes_of(workspace_of(device, r.call), r.share);
    const Outcome got = execute(device, p.op, p.pool, {.memory = Memory::exact, .bytes = bytes});
    const Comparison result = compare(expected(device, p.op, p.model), got);
    EXPECT_TRUE(result.ok()) << describe(r.call) << "\n" << result.report;
  });
  if (own_kernels(device) == nullptr) return;
  for (const std::string& name : kernels_of(device, r))
    std::printf("[ kernel ] %s\n", name.c_str());
}

class CudaKernelNames : public testing::TestWithParam<std::string> {};

TEST_P(CudaKernelNames, EveryOneOfTheEnginesIsAmongTheRaggedCases) {
  const TestDevice& device = conformance::device(GetParam());
  const char* const own = own_kernels(device);
  if (own == nullptr) return;
  std::set<std::string> launched;
  for (const Ragged& r : ragged()) launched.merge(kernels_of(device, r));
  int count = 0;
  for (const std::string& name : compiled_kernels()) {
    if (name.find(own) == std::string::npos) continue;
    ++count;
    EXPECT_TRUE(launched.contains(name)) << name << " is launched by none";
  }
  EXPECT_GE(count, std::string_view(own) == "sm90::" ? 20 : 16);
}

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CudaKernels);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CudaKernelNames);
INSTANTIATE_TEST_SUITE_P(All, CudaKernels,
                         testing::Combine(testing::ValuesIn(cuda_alone()),
                                          testing::ValuesIn(ragged())),
                         [](const auto& info) {
                           return std::get<0>(info.param) + "_" + std::get<1>(info.param).name;
                         });
INSTANTIATE_TEST_SUITE_P(All, CudaKernelNames, testing::ValuesIn(cuda_alone()));

}  // namespace
}  // namespace logitless::conformance
