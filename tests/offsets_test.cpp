// SPDX-License-Identifier: Apache-2.0
// Offsets past 2^32: rows and columns of every matrix gigabytes apart, in address space of which
// only the elements' pages exist, give the bits of dense ones.
#include <sys/mman.h>

#include <map>
#include <utility>

#include "judge.h"
#include "problem.h"
#include "suite.h"

namespace logitless::conformance {
namespace {

// Zeroed address space; a page exists once it is written.
class Sparse {
 public:
  explicit Sparse(size_t bytes)
      : bytes_(bytes),
        data_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}
  ~Sparse() {
    if (ok()) munmap(data_, bytes_);
  }
  Sparse(const Sparse&) = delete;
  Sparse& operator=(const Sparse&) = delete;
  bool ok() const { return data_ != MAP_FAILED; }
  void* data() const { return data_; }

 private:
  size_t bytes_;
  void* data_;
};

class Offsets : public ConformanceTest {};

constexpr int64_t kApart = (int64_t{1} << 31) + 3;  // elements

// Moves every matrix to sparse memory, its rows (axis 0) or its columns (axis 1) kApart elements
// apart, neighbours on the other axis `step`.
template <class Op>
void spread(Op& op, int axis, int64_t step, std::vector<std::unique_ptr<Sparse>>& memory) {
  logitless_op unused{};
  for_each_tensor(op, unused, [&](const char* name, Access access, TensorView& view, auto&&) {
    if (!view || view.rank != 2) return;
    TensorView far = view;
    far.stride[axis] = kApart;
    far.stride[1 - axis] = step;
    const size_t bytes =
        size_of(view.dtype) * (view.shape[axis] * kApart + view.shape[1 - axis] * step);
    memory.push_back(std::make_unique<Sparse>(bytes));
    ASSERT_TRUE(memory.back()->ok()) << name << ": " << bytes << " bytes of address space";
    far.data = memory.back()->data();
    far.byte_offset = 0;
    if (access == Access::read) write(far, read(view));
    view = far;
  });
}

template <class Op>
std::map<std::string, std::vector<double>> run_in_place(const TestDevice& device, const Op& op) {
  std::map<std::string, std::vector<double>> values;
  WorkspaceSize size;
  Status status = workspace(op, device.execution(), &size);
  EXPECT_TRUE(status.ok()) << status.message();
  const Bytes scratch(size.recommended + 1);
  status = run(op, {scratch.data(), size.recommended}, device.execution());
  EXPECT_TRUE(status.ok()) << status.message();
  const logitless_op unused{};
  for_each_tensor(op, unused,
                  [&](const char* name, Access access, const TensorView& view, const auto*) {
                    if (view && access != Access::read && std::string(name) != "fault")
                      values[name] = read(view);
                  });
  return values;
}

TEST_P(Offsets, MatricesGigabytesApart) {
  // Three rows or columns reach past 2^32 elements.
  for (const auto& way : {std::pair{0, 1}, std::pair{1, 1}, std::pair{0, 2}}) {
    const int axis = way.first, step = way.second;
    Case c{.op = op_, .shape = {3, 3, 3}, .dtype = dtype_, .statistics = true};
    c.grad_input = c.grad_weight = DType::bf16;
    with_op(op_, [&](auto op) {
      const auto p = build<decltype(op)>(c);
      const auto dense = run_in_place(device_, p.op);
      auto far = p.op;
      std::vector<std::unique_ptr<Sparse>> memory;
      spread(far, axis, step, memory);
      if (HasFatalFailure()) return;
      EXPECT_EQ(run_in_place(device_, far), dense) << "axis " << axis << ", step " << step;
    });
  }
}

constexpr DType kTwo[] = {DType::f32, DType::bf16};
LOGITLESS_CONFORMANCE_SUITE_OF(Offsets, kOps, kTwo);

}  // namespace
}  // namespace logitless::conformance
