// SPDX-License-Identifier: Apache-2.0
// What the suite needs of a backend beyond `workspace` and `run`: memory on its device, and its
// promises beyond the contract's common part.
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
  virtual Device tensors() const = 0;  // where its tensors are
  virtual Execution execution() const = 0;
  virtual void* allocate(size_t bytes) const = 0;  // aligned to 128
  virtual void release(void* data) const = 0;
  virtual void upload(void* device, const std::byte* host, size_t bytes) const = 0;
  virtual void download(std::byte* host, const void* device,
                        size_t bytes) const = 0;  // waits for the device
  // Reserves `bytes` of address space of which only these ranges (offset, bytes) are memory,
  // zeroed.
  using Ranges = std::vector<std::pair<size_t, size_t>>;
  virtual void* reserve(size_t bytes, const Ranges& used) const = 0;
  virtual void unreserve(void* data, size_t bytes) const = 0;
  // If false, a tensor is a buffer and an offset, and a workspace is an object of the library.
  virtual bool has_addresses() const { return true; }
  virtual void* make_workspace(uint64_t) const { return nullptr; }
  virtual void destroy_workspace(void*) const {}
  // Bytes that a workspace object has allocated so far.
  virtual uint64_t bytes_of_workspace(const void*) const { return 0; }
  // Whether an error of a target is returned as a status; if not, it is in the fault word.
  virtual bool synchronous() const { return true; }
  // Whether a run divides its work over an executor's threads.
  virtual bool has_threads() const { return false; }
  // Whether products of this input dtype use tensor cores ("Accuracy" of the contract).
  virtual bool tensor_cores(DType) const { return false; }
  // Whether f32 products have a mode with a mantissa of 10 bits.
  virtual bool has_tf32() const { return false; }
  // Whether a linear op's row_reference is the row's maximum even if no statistic needs it.
  virtual bool reference_is_maximum(DType) const { return true; }
  // Whether Forward keeps state of inputs of this dtype, which Backward checks before use.
  virtual bool keeps_state(DType) const { return false; }
  // The most chosen columns per token; more are refused.
  virtual int64_t most_chosen() const { return 1024; }
  // Whether ids may be lists and only_chosen may be set; otherwise both are refused.
  virtual bool has_id_lists() const { return true; }
  // Whether linear Forwards and Combine have top-k; otherwise they refuse it.
  virtual bool has_top() const { return true; }
  // Whether a token's loss and statistics are independent of its batch ("Determinism").
  virtual bool batch_invariant(const Case&) const { return true; }
  // The instruction sets that can be forced, best first.
  virtual std::vector<std::string> instruction_sets() const { return {}; }
  virtual bool force_instruction_set(const std::string&) const { return false; }
};

// A backend of this library, which may be absent on this machine.
struct Found {
  std::string name;
  const TestDevice* device = nullptr;
  std::string reason;  // why there is none
};
// The backends of this build, present or not: "reference", "cpu", "cuda"; "webgpu" if asked for.
const std::vector<Found>& all_devices();
// The present backends that LOGITLESS_TEST_DEVICES names ("reference,cpu" if unset).
const std::vector<const TestDevice*>& devices();
// Whether LOGITLESS_TEST_DEVICES, or its default, names the backend, present or not.
bool asked_for(const std::string& name);
const TestDevice& device(const std::string& name);

#ifdef LOGITLESS_WITH_WEBGPU
Found find_webgpu_device();
#endif
#ifdef LOGITLESS_WITH_CUDA
Found find_cuda_device(int index = 0);
#endif

}  // namespace logitless::conformance
