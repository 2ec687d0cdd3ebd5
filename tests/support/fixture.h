// SPDX-License-Identifier: Apache-2.0
// Runs an op on a backend in guarded memory and compares its outputs with the reference, element by
// element.
#pragma once

#include <map>
#include <span>
#include <string>
#include <vector>

#include "device.h"
#include "memory.h"
#include "outside.h"
#include "src/reference/reference.h"

namespace logitless::conformance {

enum class Memory { minimum, recommended, exact };

// How a call runs: directly, or through a plan created with other addresses of the same alignment,
// without addresses, or of an op with grad_input_first that runs in parts.
enum class By { run, plan, plan_of_any_address, parts };

struct RunPlan {
  Memory memory = Memory::recommended;
  uint64_t bytes = 0;  // for Memory::exact
  const Executor* executor = nullptr;
  std::byte fill{0x5A};  // in outputs and workspace before the run
  By by = By::run;
  int parts = 3;  // By::parts: how many of them run
};

// One output as the backend wrote it.
struct Field {
  DType dtype = DType::f32;
  std::vector<int64_t> shape;
  std::vector<double> value;    // dense, row-major
  std::vector<std::byte> bits;  // of the elements, dense
};
using Fields = std::map<std::string, Field>;
// Writes field.bits, which are dense, to the view's elements.
void write_bits(const TensorView& view, const Field& field);

struct Outcome {
  Status status;
  WorkspaceSize size;
  Fields fields;
  Fields kept;                          // kept state, in the backend's own layout
  std::vector<std::string> violations;  // changes of bytes that the op must not change
  uint64_t given = 0;                   // bytes of workspace
  uint64_t touched = 0;                 // the end of the workspace's changed bytes
  bool has_fault = false;
  // the fault word after the run, and the reference's
  int64_t fault = 0, fault_wanted = 0;
};

// The pool's tensors and a workspace, on a device.
class DeviceCopy {
 public:
  DeviceCopy(const TestDevice& device, const Pool& pool);
  ~DeviceCopy();
  DeviceCopy(const DeviceCopy&) = delete;
  DeviceCopy& operator=(const DeviceCopy&) = delete;

  // Returns the view of the device's copy. An output's elements may change; they start as `fill`,
  // or as they are if `keep`.
  TensorView input(const TensorView& view) const;
  TensorView output(const TensorView& view, bool keep, std::byte fill);
  Workspace workspace(const WorkspaceSize& size, uint64_t bytes, std::byte fill);
  void upload();
  void download();
  // Returns an output, downloaded.
  Field field(const TensorView& host_view) const;
  std::vector<std::string> violations(bool written) const;
  uint64_t touched() const;

 private:
  struct Block {
    void* device = nullptr;
    size_t bytes = 0;
    std::vector<std::byte> before, after;
    std::vector<uint8_t> writable;
  };
  Block make(size_t bytes) const;
  size_t offset_of(const TensorView& view, size_t block) const;

  const TestDevice& device_;
  const Pool& pool_;
  std::vector<Block> blocks_;
  Block workspace_;
  size_t workspace_start_ = 0;
  uint64_t workspace_bytes_ = 0;
  void* workspace_object_ = nullptr;  // if a workspace is an object, not memory
};

// Whether the run reads the output `view` too.
template <class Op>
bool is_read(const Op& op, const TensorView& view) {
  bool read = false;
  const logitless_op unused{};
  for_each_tensor(op, unused,
                  [&](const char*, Access access, const TensorView& other, const auto*) {
                    if (other && access == Access::read && other.data == view.data) read = true;
                  });
  return read;
}

template <class Op>
void place(Op& op, const Device& tensors) {
  logitless_op unused{};
  for_each_tensor(op, unused, [&](const char*, Access, TensorView& view, auto&&) {
    if (view) view.device = tensors;
  });
}

// Runs `op` through a plan made with other addresses or with none; `host` is the op in the pool.
template <class Op>
Status run_planned(const TestDevice& device, const Op& op, const Op& host, const Pool& pool,
                   const Workspace& scratch, const Execution& execution, const RunPlan& how) {
  const By by = how.by;
  const DeviceCopy elsewhere(device, pool);
  Op other = host;
  logitless_op unused{};
  for_each_tensor(other, unused, [&](const char*, Access, TensorView& view, auto&&) {
    if (view) view = elsewhere.input(view);
    if (by == By::plan_of_any_address) view.data = nullptr;
  });
  place(other, device.tensors());
  Plan plan;
  Status status = plan.create(other, execution, scratch.bytes);
  if (by != By::parts) {
    return status.ok() ? plan.run(Addresses(op), scratch, execution.stream) : status;
  }
  for (int part = 1; status.ok() && part <= how.parts; ++part) {
    status = plan.run(Addresses(op), scratch, execution.stream, 0, part);
  }
  return status;
}

template <class Op>
Outcome execute(const TestDevice& device, const Op& host, const Pool& pool,
                const RunPlan& plan = {}) {
  DeviceCopy copy(device, pool);
  Op op = host;
  std::vector<std::pair<std::string, TensorView>> outputs, kept;
  TensorView fault;
  logitless_op unused{};
  for_each_tensor(op, unused, [&](const char* name, Access access, TensorView& view, auto&&) {
    if (!view) return;
    if (access == Access::read) {
      view = copy.input(view);
      return;
    }
    const TensorView before = view;
    const bool keep = access == Access::read_write || is_read(host, before);
    view = copy.output(before, keep, plan.fill);
    if (std::string("fault") == name) {
      fault = before;
    } else if (std::string(name).starts_with("kept")) {
      kept.emplace_back(name, before);
    } else {
      outputs.emplace_back(name, before);
    }
  });
  place(op, device.tensors());
  Execution execution = device.execution();
  execution.executor = plan.executor;

  Outcome outcome;
  Op asked = op;
  for_each_tensor(asked, unused, [&](const char*, Access, TensorView& view, auto&&) {
    if (plan.by == By::plan_of_any_address) view.data = nullptr;
  });
  outcome.status = workspace(asked, execution, &outcome.size);
  if (!outcome.status.ok()) return outcome;
  const uint64_t bytes = plan.memory == Memory::minimum       ? outcome.size.minimum
                         : plan.memory == Memory::recommended ? outcome.size.recommended
                                                              : plan.bytes;
  const Workspace scratch = copy.workspace(outcome.size, bytes, plan.fill);
  copy.upload();
  outcome.status = plan.by == By::run
                       ? run(op, scratch, execution)
                       : run_planned(device, op, host, pool, scratch, execution, plan);
  copy.download();
  outcome.violations = copy.violations(outcome.status.ok());
  outcome.given = bytes;
  outcome.touched = copy.touched();
  for (const auto& [name, view] : outputs) outcome.fields[name] = copy.field(view);
  for (const auto& [name, view] : kept) outcome.kept[name] = copy.field(view);
  if (fault) {
    outcome.has_fault = true;
    outcome.fault = static_cast<int64_t>(copy.field(fault).value[0]);
    outcome.fault_wanted = read_integers(fault)[0];
    const bool outside = !tokens_outside(host).empty() || !ids_outside(host).empty();
    if (!device.synchronous() && outside) outcome.fault_wanted |= 1;
  }
  return outcome;
}

struct Comparison {
  int64_t failures = 0;
  double worst_ratio = 0;  // of error to bound
  std::string worst;       // where that is
  std::string report;      // the first failures
  bool ok() const { return failures == 0; }
  void fail(const std::string& what);
  void merge(const Comparison& other, const std::string& context);
};

// Expects |got - value| <= bound, NaN exactly where the value is NaN, and equal infinities (or
// one of the value's sign, if the bound reaches beyond the dtype's range).
Comparison compare(const reference::Result& want, const Fields& got);
// Compares a whole run, including status and guard bytes.
Comparison compare(const reference::Result& want, const Outcome& got);
// The names of the fields whose bits differ.
std::string differing_bits(const Fields& a, const Fields& b);

}  // namespace logitless::conformance
