// SPDX-License-Identifier: Apache-2.0
#include "cli/first_call.h"

#include <fmt/core.h>
#include <nlohmann/json.hpp>

#include <chrono>
#include <vector>

#include "cli/text.h"
#ifdef LOGITLESS_WITH_CUDA
#include "src/cuda/runtime/runtime.h"
#endif

namespace logitless::cli {

#ifdef LOGITLESS_WITH_CUDA
namespace {

constexpr Device kGpu{DeviceType::cuda, 0};

void check_cuda(cudaError_t code, const char* what) {
  if (code != cudaSuccess) throw Failure(fmt::format("{}: {}", what, cudaGetErrorString(code)));
}

template <class F>
double milliseconds(F&& work) {
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
      .count();
}

// Zero-filled tensors: values do not affect which code is loaded.
class Zeros {
 public:
  ~Zeros() {
    for (void* data : all_) (void)cudaFree(data);
  }
  void* take(uint64_t bytes) {
    void* data = nullptr;
    check_cuda(cudaMalloc(&data, bytes + 1), "cudaMalloc");
    all_.push_back(data);
    check_cuda(cudaMemset(data, 0, bytes), "cudaMemset");
    return data;
  }

 private:
  std::vector<void*> all_;
};

template <class Op>
nlohmann::json measure(const OpShape& shape, bool warmed) {
  nlohmann::json out = {{"op", shape.op},
                        {"tokens", shape.tokens},
                        {"hidden", shape.hidden},
                        {"vocab", shape.vocab},
                        {"dtype", name_of(shape.dtype)}};
  out["driver_ms"] = milliseconds([] {
    const cuda::DeviceInfo* none;
    // find_device gives the reason
    if (cudaFree(nullptr) != cudaSuccess) check(cuda::find_device(0, &none));
  });
  Zeros zeros;
  Op op;
  set_views(op, shape, [&](const char*, TensorView view) {
    uint64_t bytes = static_cast<uint64_t>(size_of(view.dtype));
    for (int d = 0; d < view.rank; ++d) bytes *= static_cast<uint64_t>(view.shape[d]);
    view.data = zeros.take(bytes);
    view.device = kGpu;
    return view;
  });
  check_cuda(cudaDeviceSynchronize(), "the tensors");
  const Execution execution{.device = kGpu};
  if (warmed) out["warmup_ms"] = milliseconds([&] { check(warmup(execution)); });
  WorkspaceSize size;
  const double asked = milliseconds([&] { check(workspace(op, execution, &size)); });
  const Workspace memory{zeros.take(size.recommended), size.recommended};
  check_cuda(cudaDeviceSynchronize(), "the workspace");
  const auto call = [&] {
    return milliseconds([&] {
      check(run(op, memory, execution));
      check_cuda(cudaDeviceSynchronize(), "the call");
    });
  };
  out["first_ms"] = asked + call();
  out["second_ms"] = call();
  return out;
}

}  // namespace

void run_first_call(const Context& context, const OpShape& shape, bool warmed) {
  const auto out = with_op(shape.op, [&](auto op) { return measure<decltype(op)>(shape, warmed); });
  if (context.json) return print_json(out);
  for (const auto& [name, value] : out.items()) fmt::print("{:<12}{}\n", name, value.dump());
}
#else
void run_first_call(const Context&, const OpShape&, bool) {
  throw Failure("cuda: this library was built without it");
}
#endif

}  // namespace logitless::cli
