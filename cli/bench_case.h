// SPDX-License-Identifier: Apache-2.0
// One measurement of an op of one shape: its data, its time, the memory it touches and its error.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "cli/bench_gpu.h"
#include "cli/buffer.h"
#include "cli/op_shape.h"

namespace logitless::cli {

// Tensors by name, allocated and touched once, and reused by later measurements.
class Tensors {
 public:
  // Returns the view with memory: model-like numbers for an input, else zeros.
  TensorView get(const std::string& name, TensorView view, int64_t vocab);
  // Marks a tensor as overwritten: the next get() fills it again.
  void forget(const std::string& name);

 private:
  struct Entry {
    TensorView view{};
    int64_t vocab = 0;
    Buffer buffer;
  };
  std::map<std::string, Entry> entries_;
};

struct Measurement {
  WorkspaceSize size{};
  uint64_t workspace = 0;              // bytes
  std::vector<double> seconds;         // of each repeat, sorted
  std::optional<uint64_t> rss_growth;  // bytes, if the system reports it
  std::optional<double> error_ratio;   // the worst error / bound of the sampled elements

  double median() const;
  double best() const { return seconds.front(); }
};

struct MeasureOptions {
  std::optional<uint64_t> memory;  // bytes of workspace; default: the recommended number
  int repeats = 5;
  GpuBench* gpu = nullptr;  // null: the CPU is measured
  int samples = 2;          // tokens, and vocabulary rows, compared with the reference
};

// Runs once untimed, for the error and the memory touched, then `repeats` times; calls tick(i)
// before run i.
Measurement measure(const OpShape& shape, const MeasureOptions& options, Tensors& tensors,
                    const std::function<void(int)>& tick);

}  // namespace logitless::cli
