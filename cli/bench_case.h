// SPDX-License-Identifier: Apache-2.0
// One measurement is of an op of one shape: its data, its time, the memory it touches and its
// error.
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

// Tensors have names, are allocated and touched once, and stay from one measurement to the next.
class Tensors {
 public:
  // Returns the view with memory of its size: numbers like a model's where it is an input, zeros
  // elsewhere.
  TensorView get(const std::string& name, TensorView view, int64_t vocab);
  // its numbers were overwritten, so the next get makes new ones
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
  uint64_t workspace = 0;              // the op was given so many bytes
  std::vector<double> seconds;         // they are of every repeat, sorted
  std::optional<uint64_t> rss_growth;  // it counts bytes, and is there where the system tells
  std::optional<double> error_ratio;   // it is the worst error / bound over the sampled elements

  double median() const;
  double best() const { return seconds.front(); }
};

struct MeasureOptions {
  // It counts bytes of workspace; without it the recommended one is taken.
  std::optional<uint64_t> memory;
  int repeats = 5;
  GpuBench* gpu = nullptr;  // without one the CPU is measured
  int samples = 2;          // so many tokens and vocabulary rows are judged
};

// Runs once unmeasured, which tells the error and the memory touched, then `repeats` times; tick(i)
// comes before run i.
Measurement measure(const OpShape& shape, const MeasureOptions& options, Tensors& tensors,
                    const std::function<void(int)>& tick);

}  // namespace logitless::cli
