// SPDX-License-Identifier: Apache-2.0
// What the suite needs of a backend under test besides the library's two verbs: memory on its
// device, and what it promises beyond the contract's common part.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "logitless/logitless.h"

namespace logitless::conformance {

class TestDevice {
 public:
  virtual ~TestDevice() = default;
  virtual const char* name() const = 0;
  virtual Device tensors() const = 0;  // where tensors say they are
  virtual Execution execution() const = 0;
  virtual void* allocate(size_t bytes) const = 0;  // aligned to 128
  virtual void release(void* data) const = 0;
  virtual void upload(void* device, const std::byte* host, size_t bytes) const = 0;
  virtual void download(std::byte* host, const void* device,
                        size_t bytes) const = 0;  // waits for the device
  // Errors of targets are statuses, and the caller's threads run the work.
  virtual bool synchronous() const { return true; }
  virtual bool has_threads() const { return false; }
  virtual bool tensor_cores() const { return false; }
  // Instruction sets to force in turn, best first; none: nothing to force.
  virtual std::vector<std::string> instruction_sets() const { return {}; }
  virtual bool force_instruction_set(const std::string&) const { return false; }
};

// Every backend this library has, by name: "reference", "cpu".
const std::vector<const TestDevice*>& devices();
const TestDevice& device(const std::string& name);

}  // namespace logitless::conformance
