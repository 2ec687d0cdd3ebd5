// SPDX-License-Identifier: Apache-2.0
// One measurement: an op of one shape, its data, its time, the memory it touches and its error.
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

// Tensors by name, allocated and touched once, kept from one measurement to the next.
class Tensors {
 public:
  // The view with memory of its size: numbers like a model's where it is an input, zeros elsewhere.
  TensorView get(const std::string& name, TensorView view, int64_t vocab);
  void forget(const std::string& name);  // its numbers were overwritten

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
  uint64_t workspace = 0;              // bytes given
  std::vector<double> seconds;         // of every repeat, sorted
  std::optional<uint64_t> rss_growth;  // bytes; where the system tells
  std::optional<double> error_ratio;   // worst error / bound over the sampled elements

  double median() const;
  double best() const { return seconds.front(); }
};

struct MeasureOptions {
  std::optional<uint64_t> memory;  // bytes of workspace; none: the recommended
  int repeats = 5;
  GpuBench* gpu = nullptr;  // none: the CPU
  int samples = 2;          // tokens and vocabulary rows that are judged; 0: none
};

// Runs once unmeasured, which tells the error and the memory touched, then `repeats` times;
// tick(i) comes before run i.
Measurement measure(const OpShape& shape, const MeasureOptions& options, Tensors& tensors,
                    const std::function<void(int)>& tick);

}  // namespace logitless::cli
