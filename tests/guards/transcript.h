// SPDX-License-Identifier: Apache-2.0
// Writes down what a call launches on a machine that is not there (tests/cuda/recorded.h): kernels,
// copies and products in order, with their grids and every argument, in words that hold from one
// build of the library to the next. An address is a name and an offset, a kernel its name without
// namespaces. How often and when a description, a tensor map or an algorithm is asked for leaves no
// trace: each stands where it is used.
#pragma once

#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tests/cuda/recorded.h"

namespace logitless::guards {

// Finds names of this program's functions, those of kernels, in its own symbol table.
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

  // Names memory from `start` on, up to the next that has a name, or a terabyte.
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
  // Returns "" where it is the address of nothing that has a name.
  std::string name_of(uint64_t address) const;
  std::string address(const void* p) const;
  // Returns the words of a parameter, addresses among them by name.
  std::string words(const unsigned char* value, size_t bytes) const;
  std::string of(const Operands& o) const;
  void* keep(std::string text);

  const FunctionNames* functions_;
  std::map<uintptr_t, std::string> memory_;
  // Descriptions, layouts, maps and algorithms stay where they are.
  std::deque<std::string> objects_;
  std::string text_;
  int launches_ = 0;
};

}  // namespace logitless::guards
