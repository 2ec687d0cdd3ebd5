// SPDX-License-Identifier: Apache-2.0
// A problem whose tensors stay on the device, for calls that are repeated or captured.
#pragma once

#include <cuda_runtime.h>

#include "gtest/gtest.h"
#include "tests/support/judge.h"

namespace logitless::conformance {

inline uint64_t bytes_of(const WorkspaceSize& size, double share) {
  const auto range = static_cast<double>(size.recommended - size.minimum);
  return size.minimum + static_cast<uint64_t>(share * range);
}

// The problem must outlive the Resident. Work runs on the stream of the thread that made the
// Resident. The workspace has minimum + share (recommended - minimum) bytes.
template <class Op>
class Resident {
 public:
  Resident(const TestDevice& device, const Problem<Op>& p, double share = 1)
      : device_(device), problem_(p), op_(p.op), execution_(device.execution()) {
    for (size_t i = 0; i < p.pool.size(); ++i) {
      blocks_.push_back({device.allocate(p.pool[i].size()), Bytes(p.pool[i].size())});
    }
    logitless_op unused{};
    for_each_tensor(op_, unused, [&](const char* name, Access access, TensorView& view, auto&&) {
      if (!view) return;
      const TensorView host = view;
      if (access != Access::read) outputs_[name] = host;
      view.data = static_cast<std::byte*>(blocks_[p.pool.find(host)].first) + offset_of(host);
    });
    place(op_, device.tensors());
    WorkspaceSize size;
    const Status status = workspace(op_, execution_, &size);
    EXPECT_TRUE(status.ok()) << status.message();
    const uint64_t bytes = bytes_of(size, share);
    scratch_ = {device.allocate(bytes + 1), bytes};
    upload();
  }
  ~Resident() {
    (void)cudaStreamSynchronize(stream());
    device_.release(scratch_.data);
    for (const auto& [data, bytes] : blocks_) device_.release(data);
  }
  Resident(const Resident&) = delete;
  Resident& operator=(const Resident&) = delete;

  const Op& op() const { return op_; }
  const Workspace& scratch() const { return scratch_; }
  const Execution& execution() const { return execution_; }
  cudaStream_t stream() const { return static_cast<cudaStream_t>(execution_.stream); }
  // Uploads the problem's current inputs, and resets the outputs.
  void upload() {
    for (size_t i = 0; i < blocks_.size(); ++i) {
      device_.upload(blocks_[i].first, problem_.pool[i].data(), problem_.pool[i].size());
    }
  }
  Status run() { return logitless::run(op_, scratch_, execution_); }
  // Returns every byte of every tensor, after waiting for the device.
  std::vector<std::byte> bits() {
    std::vector<std::byte> all;
    for (auto& [data, host] : blocks_) {
      device_.download(host.data(), data, host.size());
      all.insert(all.end(), host.data(), host.data() + host.size());
    }
    return all;
  }
  Fields fields() {
    (void)bits();
    Fields fields;
    for (const auto& [name, host] : outputs_) {
      if (name == "fault") continue;
      TensorView view = host;
      view.data = blocks_[problem_.pool.find(host)].second.data() + offset_of(host);
      fields[name] = {.dtype = view.dtype,
                      .shape = {view.shape.begin(), view.shape.begin() + view.rank},
                      .value = read(view),
                      .bits = {}};
    }
    return fields;
  }

 private:
  size_t offset_of(const TensorView& view) const {
    const std::byte* start = problem_.pool[problem_.pool.find(view)].data();
    return static_cast<size_t>(static_cast<const std::byte*>(view.data) - start);
  }

  const TestDevice& device_;
  const Problem<Op>& problem_;
  Op op_;
  Execution execution_;
  std::vector<std::pair<void*, Bytes>> blocks_;
  std::map<std::string, TensorView> outputs_;  // on the host
  Workspace scratch_;
};

// Puts other inputs into the same memory, with one token fewer that counts.
template <class Op>
void change_inputs(const Op& op) {
  const TensorView& rows = [&]() -> const TensorView& {
    if constexpr (LinearOp<Op>) {
      return op.input;
    } else {
      return op.logits;
    }
  }();
  std::vector<double> values = read(rows);
  for (double& x : values) x *= -0.75;
  write(rows, values);
  if constexpr (LossOp<Op>) {
    std::vector<double> target = read(op.target);
    const auto vocab = static_cast<double>(vocab_of(op));
    for (double& t : target) t = t >= 0 && t < vocab - 1 ? t + 1 : t;
    target[target.size() / 2] = static_cast<double>(op.options.ignore_index);
    write(op.target, target);
  }
}

}  // namespace logitless::conformance
