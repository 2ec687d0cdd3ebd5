// SPDX-License-Identifier: Apache-2.0
// What the suite needs of a backend under test besides the library's two verbs: memory on its
// device, and what it promises beyond the contract's common part.
#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "cases.h"

namespace logitless::conformance {

class TestDevice {
 public:
  virtual ~TestDevice() = default;
  virtual const char* name() const = 0;
  virtual Device tensors() const = 0;  // the device of its tensors
  virtual Execution execution() const = 0;
  virtual void* allocate(size_t bytes) const = 0;  // aligned to 128
  virtual void release(void* data) const = 0;
  virtual void upload(void* device, const std::byte* host, size_t bytes) const = 0;
  virtual void download(std::byte* host, const void* device,
                        size_t bytes) const = 0;  // waits for the device
  // Reserves address space of which only these ranges (offset, bytes) are memory, zeroed, and which
  // ends after `bytes`.
  using Ranges = std::vector<std::pair<size_t, size_t>>;
  virtual void* reserve(size_t bytes, const Ranges& used) const = 0;
  virtual void unreserve(void* data, size_t bytes) const = 0;
  // If false, a tensor is a buffer and an offset, and a workspace is an object of the library's.
  virtual bool has_addresses() const { return true; }
  virtual void* make_workspace(uint64_t) const { return nullptr; }
  virtual void destroy_workspace(void*) const {}
  // Bytes made of a workspace so far.
  virtual uint64_t bytes_of_workspace(const void*) const { return 0; }
  // Whether errors of targets are statuses; and whether the caller's threads run the work.
  virtual bool synchronous() const { return true; }
  virtual bool has_threads() const { return false; }
  // How sums of products of this input dtype are formed ("Accuracy" of the contract).
  virtual bool tensor_cores(DType) const { return false; }
  // Whether there is a mode for f32 with a mantissa of 10 bits.
  virtual bool has_tf32() const { return false; }
  // Whether row_reference of a linear op of such inputs is the row's maximum even if no statistic
  // needs that.
  virtual bool reference_is_maximum(DType) const { return true; }
  // Whether Forward keeps state of such inputs and Backward checks it before use.
  virtual bool keeps_state(DType) const { return false; }
  // How many columns of a token linear ops can choose; more are refused.
  virtual int64_t most_chosen() const { return 1024; }
  // Whether chosen columns may be lists, or alone have a gradient; otherwise that is refused.
  virtual bool has_id_lists() const { return true; }
  // Whether linear Forwards and Combine list the largest logits; otherwise they refuse to.
  virtual bool has_top() const { return true; }
  // Whether a token's loss and statistics are independent of its batch ("Determinism").
  virtual bool batch_invariant(const Case&) const { return true; }
  // The instruction sets to force in turn, best first; none if there is nothing to force.
  virtual std::vector<std::string> instruction_sets() const { return {}; }
  virtual bool force_instruction_set(const std::string&) const { return false; }
};

// A backend of this library; on this machine it may be absent.
struct Found {
  std::string name;
  const TestDevice* device = nullptr;
  std::string reason;  // why there is none
};
// Every backend, in the order "reference", "cpu", "cuda", "webgpu".
const std::vector<Found>& all_devices();
// Those that the tests run on: named in LOGITLESS_TEST_DEVICES ("reference,cpu" if unset) and
// present.
const std::vector<const TestDevice*>& devices();
// Whether the environment asks for the backend, present or not.
bool asked_for(const std::string& name);
const TestDevice& device(const std::string& name);

#ifdef LOGITLESS_WITH_WEBGPU
Found find_webgpu_device();
#endif
#ifdef LOGITLESS_WITH_CUDA
Found find_cuda_device(int index = 0);
#endif

}  // namespace logitless::conformance
