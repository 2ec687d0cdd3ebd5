// SPDX-License-Identifier: Apache-2.0
// Writes down what a call launches on a fake machine (tests/cuda/recorded.h): kernels, copies and
// products in order, with grids and every argument, in a form that does not change between builds.
// An address is a name and an offset, a kernel its name without namespaces. Descriptions, tensor
// maps and algorithms appear where they are used, not where they are created.
#pragma once

#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tests/cuda/recorded.h"

namespace logitless::guards {

// Finds the names of this program's functions, kernels included, in its own symbol table.
class FunctionNames {
 public:
  FunctionNames();
  std::string of(const void* function) const;

 private:
  std::map<uintptr_t, std::string> names_;
};

class Transcript final : public cuda::RecordedCuda::Listener {
 public:
  explicit Transcript(const FunctionNames* functions) : functions_(functions) {}

  // Names the memory from `start` up to the next named address, or for a terabyte.
  void name(const void* start, std::string name) {
    memory_[reinterpret_cast<uintptr_t>(start)] = std::move(name);
  }
  const std::string& text() const { return text_; }
  int launches() const { return launches_; }

  void launch(const cudaLaunchConfig_t& config, const void* kernel, void** values,
              const cuda::Parameter* parameters, int count) override;
  void copy(void* to, const void* from, size_t bytes) override;
  void encode(const Map& from, CUtensorMap* map) override;
  void* layout(int type, uint64_t rows, uint64_t columns, int64_t stride) override;
  void* description(int compute_type, int scale_type) override;
  void* preference() override;
  void set(void* object, int attribute, const void* value, size_t bytes) override;
  void choose(const Operands&, void* preference, cuda::lt::Algorithm*) override;
  void multiply(const Operands&, std::array<const void*, 6> alpha_a_b_beta_c_d,
                const cuda::lt::Algorithm&, void* workspace, size_t bytes) override;

 private:
  // Returns "" if the address is in no named memory.
  std::string name_of(uint64_t address) const;
  std::string address(const void* p) const;
  // Returns a parameter's words, with addresses as names.
  std::string words(const unsigned char* value, size_t bytes) const;
  std::string of(const Operands& o) const;
  void* keep(std::string text);

  const FunctionNames* functions_;
  std::map<uintptr_t, std::string> memory_;
  // A deque, so that pointers to descriptions, layouts, maps and algorithms stay valid.
  std::deque<std::string> objects_;
  std::string text_;
  int launches_ = 0;
};

}  // namespace logitless::guards
