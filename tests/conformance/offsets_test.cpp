// SPDX-License-Identifier: Apache-2.0
// Offsets beyond 2^32: rows and columns of every matrix are gigabytes apart, in address space where
// only the elements' own pages exist. Results keep their bounds, and those of invariant backends
// the bits of dense tensors. Strides of axes with one element may be anything.
#include <map>
#include <utility>

#include "tests/support/judge.h"
#include "tests/support/problem.h"
#include "tests/support/suite.h"

namespace logitless::conformance {
namespace {

class Offsets : public ConformanceTest {};

constexpr int64_t kApart = (int64_t{1} << 31) + 3;  // elements

// Copies an op's tensors to a device. Matrices have their rows (axis 0) or columns (axis 1) kApart
// elements apart, and elements of the other axis `step` apart. Axis -1 keeps the layout.
template <class Op>
class Spread {
 public:
  Spread(const TestDevice& device, const Op& host, int axis, int64_t step = 1)
      : device_(device), op_(host) {
    logitless_op unused{};
    for_each_tensor(op_, unused, [&](const char*, Access, TensorView& view, auto&&) {
      if (view) move(view, axis, step);
    });
    place(op_, device.tensors());
  }
  ~Spread() {
    for (const auto& [data, bytes] : memory_) device_.unreserve(data, bytes);
  }
  Spread(const Spread&) = delete;
  Spread& operator=(const Spread&) = delete;

  Fields run() {
    WorkspaceSize size;
    Status status = workspace(op_, device_.execution(), &size);
    EXPECT_TRUE(status.ok()) << status.message();
    void* scratch = device_.allocate(size.recommended + 1);
    status = logitless::run(op_, {scratch, size.recommended}, device_.execution());
    EXPECT_TRUE(status.ok()) << status.message();
    Fields fields;
    const logitless_op unused{};
    for_each_tensor(op_, unused,
                    [&](const char* name, Access access, const TensorView& view, const auto*) {
                      if (view && access != Access::read) fields[name] = read(view);
                    });
    fields.erase("fault");
    device_.release(scratch);
    return fields;
  }

 private:
  void move(TensorView& view, int axis, int64_t step) {
    const TensorView host = view;
    if (view.rank == 2 && axis >= 0) {
      view.stride[axis] = kApart;
      view.stride[1 - axis] = step;
    }
    view.byte_offset = 0;
    const auto size = static_cast<size_t>(size_of(view.dtype));
    TestDevice::Ranges used;
    size_t bytes = size;
    for_each_element(view, [&](int64_t, int64_t offset) {
      used.emplace_back(offset, size);
      bytes = std::max(bytes, static_cast<size_t>(offset) + size);
    });
    view.data = device_.reserve(bytes, used);
    memory_.emplace_back(view.data, bytes);
    std::vector<std::byte> elements(element_count(view) * size);
    const std::byte* first = static_cast<const std::byte*>(host.data) + host.byte_offset;
    for_each_element(host, [&](int64_t i, int64_t offset) {
      std::copy_n(first + offset, size, &elements[i * size]);
    });
    for_each_element(view, [&](int64_t i, int64_t offset) {
      device_.upload(static_cast<std::byte*>(view.data) + offset, &elements[i * size], size);
    });
  }

  Field read(const TensorView& view) const {
    Field field{.dtype = view.dtype,
                .shape = {view.shape.begin(), view.shape.begin() + view.rank},
                .value = {},
                .bits = {}};
    const auto size = static_cast<size_t>(size_of(view.dtype));
    field.bits.resize(element_count(view) * size);
    for_each_element(view, [&](int64_t i, int64_t offset) {
      device_.download(&field.bits[i * size], static_cast<std::byte*>(view.data) + offset, size);
      field.value.push_back(load(view.dtype, &field.bits[i * size]));
    });
    return field;
  }

  const TestDevice& device_;
  Op op_;
  std::vector<std::pair<void*, size_t>> memory_;
};

TEST_P(Offsets, MatricesGigabytesApart) {
  // With three rows or columns, kApart elements each, offsets exceed 2^32.
  Case c{.op = op_, .shape = {3, 3, 3}, .dtype = dtype_, .statistics = true};
  c.grad_input = c.grad_weight = DType::bf16;
  with_op(op_, [&](auto op) {
    using Op = decltype(op);
    const Problem<Op> p = build<Op>(c);
    const Fields dense = Spread<Op>(device_, p.op, -1).run();
    const Comparison result = compare(expected(device_, p.op, p.model), dense);
    EXPECT_TRUE(result.ok()) << result.report;
    for (const auto& way : {std::pair{0, 1}, std::pair{1, 1}, std::pair{0, 2}}) {
      const int axis = way.first, step = way.second;
      const Fields far = Spread<Op>(device_, p.op, axis, step).run();
      if (device_.batch_invariant(c)) {
        EXPECT_EQ(differing_bits(dense, far), "") << "axis " << axis << ", step " << step;
      }
      // Another layout may be multiplied by another algorithm, so bits may differ and only the
      // bounds hold.
      const Comparison apart = compare(expected(device_, p.op, p.model), far);
      EXPECT_TRUE(apart.ok()) << "axis " << axis << ", step " << step << "\n" << apart.report;
    }
  });
}

// The stride of an axis of one element, or of an empty view, may be anything, as may the shape and
// stride entries beyond a view's rank.
template <class Op>
Op with_free_strides(Op op, int64_t stride) {
  logitless_op unused{};
  for_each_tensor(op, unused, [&](const char*, Access, TensorView& view, auto&&) {
    const bool empty = view && element_count(view) == 0;
    for (int32_t d = 0; view && d < 2; ++d) {
      if (d >= view.rank) view.shape[d] = stride;
      if (d >= view.rank || empty || view.shape[d] == 1) view.stride[d] = stride;
    }
  });
  return op;
}

TEST_P(Offsets, AStrideThatIsNeverTakenMayBeAnything) {
  for (const Shape& shape :
       {Shape{1, 16, 300}, Shape{600, 1, 9}, Shape{5, 64, 1}, Shape{1, 1, 1}, Shape{0, 16, 40}}) {
    for (const bool everything : {false, true}) {
      Case c{.op = op_, .shape = shape, .dtype = dtype_};
      if (everything) apply_everything(c);
      with_op(op_, [&](auto op) {
        using Op = decltype(op);
        const Problem<Op> p = build<Op>(c);
        const Outcome dense = execute(device_, p.op, p.pool);
        const Comparison result = compare(expected(device_, p.op, p.model), dense);
        EXPECT_TRUE(result.ok()) << describe(c) << "\n" << result.report;
        for (const int64_t stride : {INT64_MAX, int64_t{0}}) {
          const Outcome free = execute(device_, with_free_strides(p.op, stride), p.pool);
          ASSERT_TRUE(free.status.ok()) << describe(c) << ": " << free.status.message();
          EXPECT_EQ(free.size.minimum, dense.size.minimum) << describe(c) << ", " << stride;
          EXPECT_EQ(free.size.recommended, dense.size.recommended) << describe(c) << ", " << stride;
          EXPECT_EQ(differing_bits(dense.fields, free.fields), "") << describe(c) << ", " << stride;
          EXPECT_EQ(free.violations, std::vector<std::string>{});
        }
      });
    }
  }
}

LOGITLESS_CONFORMANCE_SUITE_OF(Offsets, kOps, (std::vector{DType::f32, DType::bf16}));

}  // namespace
}  // namespace logitless::conformance
