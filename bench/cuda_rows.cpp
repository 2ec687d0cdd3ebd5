// SPDX-License-Identifier: Apache-2.0
// Measures row ops on one GPU and a device-to-device copy of the same bytes: softmax, loss alone,
// and mean loss with the gradient: out of place, the same with label smoothing, and in place.
// Prints one JSON line for each shape, op and dtype; `stream_share` and `graph_share` are the
// copy's time over the op's, as calls on a stream and as a replayed graph.
#include <cuda_runtime.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "logitless/logitless.h"

namespace {

using logitless::DType;
using logitless::Status;
using logitless::TensorView;

void check(cudaError_t code, const char* what) {
  if (code == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(code));
  std::exit(1);
}
void check(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.message());
  std::exit(1);
}

struct Memory {
  explicit Memory(size_t bytes) : bytes(bytes) {
    check(cudaMalloc(&data, bytes + 1), "cudaMalloc");
  }
  ~Memory() { (void)cudaFree(data); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  void* data = nullptr;
  size_t bytes;
};

// Fills memory with bell-shaped logits in f32 or bf16, by repeating a random block.
void fill(const Memory& memory, DType dtype) {
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 2);
  constexpr size_t count = size_t{1} << 20;
  std::vector<float> wide(count);
  for (float& x : wide) x = normal(random);
  std::vector<uint16_t> narrow(count);
  for (size_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, &wide[i], sizeof(bits));
    narrow[i] = static_cast<uint16_t>(bits >> 16);
  }
  const bool f32 = dtype == DType::f32;
  const void* source = f32 ? static_cast<const void*>(wide.data()) : narrow.data();
  const size_t block = count * (f32 ? 4 : 2);
  for (size_t at = 0; at < memory.bytes; at += block) {
    check(cudaMemcpy(static_cast<char*>(memory.data) + at, source,
                     std::min(block, memory.bytes - at), cudaMemcpyHostToDevice),
          "cudaMemcpy");
  }
}

class Timer {
 public:
  explicit Timer(cudaStream_t stream, int repeats) : stream_(stream), repeats_(repeats) {
    check(cudaEventCreate(&begin_), "cudaEventCreate");
    check(cudaEventCreate(&end_), "cudaEventCreate");
  }
  // The median milliseconds of a call of `enqueue`.
  template <class F>
  double operator()(F&& enqueue) {
    for (int i = 0; i < 3; ++i) enqueue();
    std::vector<double> times;
    for (int i = 0; i < repeats_; ++i) {
      check(cudaEventRecord(begin_, stream_), "cudaEventRecord");
      enqueue();
      check(cudaEventRecord(end_, stream_), "cudaEventRecord");
      check(cudaEventSynchronize(end_), "cudaEventSynchronize");
      float milliseconds;
      check(cudaEventElapsedTime(&milliseconds, begin_, end_), "cudaEventElapsedTime");
      times.push_back(milliseconds);
    }
    std::nth_element(times.begin(), times.begin() + repeats_ / 2, times.end());
    return times[repeats_ / 2];
  }
  template <class F>
  double graph(F&& enqueue) {
    enqueue();
    cudaGraph_t captured;
    cudaGraphExec_t executable;
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "capture");
    enqueue();
    check(cudaStreamEndCapture(stream_, &captured), "capture");
    check(cudaGraphInstantiate(&executable, captured, 0), "cudaGraphInstantiate");
    const double time =
        (*this)([&] { check(cudaGraphLaunch(executable, stream_), "cudaGraphLaunch"); });
    check(cudaGraphExecDestroy(executable), "cudaGraphExecDestroy");
    check(cudaGraphDestroy(captured), "cudaGraphDestroy");
    return time;
  }

 private:
  cudaStream_t stream_;
  int repeats_;
  cudaEvent_t begin_, end_;
};

TensorView on_device(TensorView view) {
  view.device = {logitless::DeviceType::cuda, 0};
  return view;
}

struct Bench {
  cudaStream_t stream;
  Timer timer;
  int64_t rows, columns;
  DType dtype;
  double copy;  // milliseconds

  template <class Op>
  void report(const char* name, const Op& op, int transfers) {
    logitless::Execution execution;
    execution.device = {logitless::DeviceType::cuda, 0};
    execution.stream = stream;
    logitless::WorkspaceSize size;
    check(logitless::workspace(op, execution, &size));
    const Memory scratch(size.recommended + 1);
    const logitless::Workspace workspace{scratch.data, size.recommended};
    const auto call = [&] { check(logitless::run(op, workspace, execution)); };
    const double calls = timer(call), graph = timer.graph(call);
    const double bytes =
        static_cast<double>(rows) * columns * logitless::size_of(dtype) * transfers;
    const double whole = copy * transfers / 2;  // the time of copying the same bytes
    const nlohmann::json line{{"op", name},
                              {"rows", rows},
                              {"columns", columns},
                              {"dtype", dtype == DType::f32 ? "f32" : "bf16"},
                              {"stream_ms", calls},
                              {"graph_ms", graph},
                              {"copy_ms", whole},
                              {"gb_per_s", bytes / graph * 1e-6},
                              {"stream_share", whole / calls},
                              {"graph_share", whole / graph}};
    std::printf("%s\n", line.dump().c_str());
    std::fflush(stdout);
  }
};

void measure(int64_t rows, int64_t columns, DType dtype, int repeats, cudaStream_t stream) {
  const size_t bytes = static_cast<size_t>(rows * columns * logitless::size_of(dtype));
  const Memory logits(bytes), other(bytes), target(rows * sizeof(int64_t)), loss(sizeof(float));
  fill(logits, dtype);
  std::vector<int64_t> targets(rows);
  for (int64_t i = 0; i < rows; ++i) targets[i] = i * 7919 % columns;
  check(cudaMemcpy(target.data, targets.data(), target.bytes, cudaMemcpyHostToDevice),
        "cudaMemcpy");
  Timer timer(stream, repeats);
  const double copy = timer([&] {
    check(cudaMemcpyAsync(other.data, logits.data, bytes, cudaMemcpyDeviceToDevice, stream),
          "cudaMemcpyAsync");
  });
  Bench bench{stream, timer, rows, columns, dtype, copy};
  const TensorView in = on_device(logitless::matrix_view(logits.data, dtype, rows, columns));
  const TensorView out = on_device(logitless::matrix_view(other.data, dtype, rows, columns));
  const TensorView at = on_device(logitless::vector_view(target.data, DType::i64, rows));
  const TensorView mean = on_device(logitless::scalar_view(loss.data, DType::f32));
  bench.report("softmax", logitless::Softmax{.logits = in, .probabilities = out}, 2);
  bench.report("loss", logitless::CrossEntropyForward{.logits = in, .target = at, .loss = mean}, 1);
  bench.report("loss_gradient",
               logitless::CrossEntropyForwardBackward{
                   .logits = in, .target = at, .loss = mean, .grad_logits = out},
               2);
  logitless::CrossEntropyForwardBackward smoothed{
      .logits = in, .target = at, .loss = mean, .grad_logits = out};
  smoothed.options.label_smoothing = 0.1f;
  bench.report("loss_gradient_smoothed", smoothed, 2);
  // Last, because it overwrites the logits.
  bench.report("loss_gradient_in_place",
               logitless::CrossEntropyForwardBackward{
                   .logits = in, .target = at, .loss = mean, .grad_logits = in},
               2);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Row ops on a GPU beside a copy");
  std::vector<int64_t> rows{1024, 4096, 8192}, columns{128256, 50257, 32000};
  int repeats = 21;
  app.add_option("--rows", rows);
  app.add_option("--columns", columns);
  app.add_option("--repeats", repeats)->check(CLI::Range(1, 10000));
  CLI11_PARSE(app, argc, argv);
  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  for (const int64_t v : columns) {
    for (const int64_t n : rows) {
      for (const DType dtype : {DType::bf16, DType::f32}) measure(n, v, dtype, repeats, stream);
    }
  }
  return 0;
}
