// SPDX-License-Identifier: Apache-2.0
// Tries hostile inputs, one field at a time, on the CPU (`values`: for the ops of kOps alone):
//   values       NaN and both infinities in each element of each floating input, and targets far
//                outside: the status is the reference's, no byte outside the outputs changes, and
//                what the reference says is finite is within its bound
//   extents      each size, stride and offset of each field, and N, V and D of the whole call, at
//                and around 2^31 and 2^56: refused, or planned with right sizes
//   misalignment each field at every byte of 64: refused if unaligned, else the same bits
// --step K takes every Kth element of `values`.
#include <cmath>
#include <limits>
#include <set>

#include "fuzz/judge.h"
#include "tests/api/subject.h"
#include "tests/reliability/report.h"
#include "tests/support/judge.h"

namespace logitless::reliability {
namespace {

using conformance::Case;
using testing::Subject;

constexpr int64_t kExtents[] = {(int64_t{1} << 31) - 1, int64_t{1} << 31, (int64_t{1} << 31) + 1,
                                (int64_t{1} << 56) - 1, int64_t{1} << 56, (int64_t{1} << 56) + 1,
                                int64_t{1} << 62,       INT64_MAX};

struct Counts {
  int64_t values = 0, extents = 0, misalignments = 0;
  std::set<std::string> fields;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const conformance::OpKind op : kOps) {
    for (const DType dtype : kDtypes) {
      for (const bool everything : {false, true}) {
        Case c{.op = op, .shape = {5, 4, 19}, .dtype = dtype, .statistics = true};
        c.options.reduction = everything ? Reduction::mean : Reduction::none;
        c.bias = true, c.bias_dtype = dtype;
        if (everything) conformance::apply_everything(c);
        all.push_back(c);
      }
    }
  }
  return all;
}

// Compares values that are finite in the reference, with their bounds.
void compare(const reference::Result& want, const conformance::Outcome& got,
             const std::string& what) {
  if (got.status.code() != want.status.code()) {
    broken("%s: %s; the reference: %s", what.c_str(), got.status.message(), want.status.message());
  }
  for (const std::string& violation : got.violations)
    broken("%s: %s", what.c_str(), violation.c_str());
  if (!got.status.ok()) return;
  for (const auto& [name, field] : got.fields) {
    const auto found = want.outputs.find(name);
    if (found == want.outputs.end() || name == "argmax" || name == "rank") continue;
    for (size_t i = 0; i < field.value.size(); ++i) {
      const reference::Output& w = found->second;
      if (fuzz::within(field.value[i], w.value[i], w.bound[i], field.dtype)) continue;
      broken("%s: %s[%zu] is %g; the reference: %g, bound %g", what.c_str(), name.c_str(), i,
             field.value[i], w.value[i], w.bound[i]);
    }
  }
}

template <class Op>
void hostile_values(const Case& c, const conformance::TestDevice& cpu, int64_t step,
                    Counts* counts) {
  constexpr double inf = std::numeric_limits<double>::infinity();
  conformance::Problem<Op> problem = conformance::build<Op>(c);
  std::vector<std::pair<std::string, TensorView>> inputs;
  logitless_op unused{};
  for_each_tensor(problem.op, unused,
                  [&](const char* name, Access access, const TensorView& view, const auto*) {
                    if (view && access != Access::write) inputs.push_back({name, view});
                  });
  for (const auto& [name, view] : inputs) {
    counts->fields.insert(name);
    const bool whole = view.dtype == DType::i64 || view.dtype == DType::i32;
    const std::vector<double> before = conformance::read(view);
    const std::vector<double> odd =
        whole ? std::vector<double>{-1, 19, 1e6, 2147483647, -2147483648.0}
              : std::vector<double>{NAN, inf, -inf};
    for (size_t i = counts->values % step; i < before.size(); i += step) {
      for (const double value : odd) {
        std::vector<double> values = before;
        values[i] = value;
        conformance::write(view, values);
        const std::string what =
            describe(c) + ", " + name + "[" + std::to_string(i) + "] = " + std::to_string(value);
        compare(conformance::expected(cpu, problem.op, problem.model),
                conformance::execute(cpu, problem.op, problem.pool), what);
        ++counts->values;
      }
    }
    conformance::write(view, before);
  }
}

// A call without memory: `workspace` answers or refuses, `run` refuses, nothing is written.
void expect_refused(Subject& s, const std::string& what, Counts* counts) {
  ++counts->extents;
  WorkspaceSize size{};
  const Status asked = s.ask_workspace(&size);
  if (asked.code() == StatusCode::internal) broken("%s: %s", what.c_str(), asked.message());
  if (asked.ok() && (size.minimum > size.recommended || size.alignment == 0)) {
    broken("%s: minimum %" PRIu64 ", recommended %" PRIu64, what.c_str(), size.minimum,
           size.recommended);
  }
  const auto before = s.snapshot();
  const Status ran = s.call_run();
  if (ran.ok() || ran.code() == StatusCode::internal) {
    broken("%s: run says '%s'", what.c_str(), ran.ok() ? "ok" : ran.message());
  }
  if (s.snapshot() != before) broken("%s: bytes were written", what.c_str());
}

// Gives one field one bad number. Its data is NULL, so that even a legal call cannot run.
void hostile_field(Subject& s, const std::string& name, Counts* counts) {
  const TensorView good = s[name];
  const auto with = [&](const char* which, int64_t value, auto&& change) {
    s[name].data = nullptr;
    change(s[name]);
    expect_refused(s, describe(s) + ", " + name + "." + which + " " + std::to_string(value),
                   counts);
    s[name] = good;
  };
  for (const int64_t value : kExtents) {
    for (int axis = 0; axis < good.rank; ++axis) {
      with("shape", value, [&](TensorView& v) { v.shape[axis] = value; });
      with("stride", value, [&](TensorView& v) { v.stride[axis] = value; });
      with("stride", -value, [&](TensorView& v) { v.stride[axis] = -value; });
    }
    with("byte_offset", value,
         [&](TensorView& v) { v.byte_offset = static_cast<uint64_t>(value); });
    with("byte_offset", -value,
         [&](TensorView& v) { v.byte_offset = -static_cast<uint64_t>(value); });
  }
}

// Changes N, V or D in every field that has it.
void hostile_size(Subject& s, int64_t old_size, int64_t value, DType dtype, Counts* counts) {
  std::map<std::string, TensorView> good;
  for (auto& [name, view] : s.views) {
    good[name] = *view;
    view->data = nullptr;
    if (view->dtype == DType::f32 && view->rank == 2) view->dtype = dtype;
    for (int axis = 0; axis < view->rank; ++axis) {
      if (view->shape[axis] == old_size) view->shape[axis] = value;
    }
    if (view->rank == 2) view->stride = {view->shape[1], 1};
  }
  if (s.accumulate != nullptr) *s.accumulate = false;
  expect_refused(s, describe(s) + ": size " + std::to_string(value), counts);
  for (auto& [name, view] : s.views) *view = good[name];
}

void hostile_extents(Counts* counts) {
  testing::for_each_judged_subject([&](Subject& s) {
    for (const auto& [name, view] : s.views) {
      counts->fields.insert(name);
      if (!*view) continue;
      hostile_field(s, name, counts);
    }
    for (const int64_t size : {Subject::n, Subject::v, Subject::d}) {
      for (const int64_t value : kExtents) {
        for (const DType dtype : kDtypes) hostile_size(s, size, value, dtype, counts);
      }
    }
  });
}

std::vector<char> outputs(Subject& s) {
  std::vector<char> bytes;
  for (const auto& [name, view] : s.views) {
    // A backend may write as much of kept state as it uses; Backward's results show whether it is
    // right.
    if (!s.written(name) || name == "kept" || !*view) continue;
    const char* first = view->as<char>();
    bytes.insert(bytes.end(), first,
                 first + conformance::element_count(*view) * size_of(view->dtype));
  }
  return bytes;
}

void hostile_addresses(Counts* counts) {
  testing::for_each_subject([&](Subject& s) {
    if (!s.call_run().ok()) broken("%s: %s", describe(s).c_str(), s.call_run().message());
    const std::vector<char> want = outputs(s);
    for (auto& [name, view] : s.views) {
      if (!*view) continue;
      const TensorView good = *view;
      const auto content = s.snapshot();
      const auto bytes =
          static_cast<size_t>(conformance::element_count(good) * size_of(good.dtype));
      const int64_t alignment = name == "kept" ? kept_alignment : size_of(good.dtype);
      for (int64_t shift = 1; shift < 64; ++shift) {
        for (auto& [block, memory] : s.memory) memory->content = content.at(block);
        char* data = static_cast<char*>(good.data);
        if (s.access.at(name) != Access::write) std::memmove(data + shift, data, bytes);
        view->data = data + shift;
        const auto before = s.snapshot();
        const Status status = s.call_run();
        const bool aligned = shift % alignment == 0;
        ++counts->misalignments;
        if (aligned ? !status.ok() : status.code() != StatusCode::misaligned) {
          broken("%s, %s shifted by %" PRId64 ": code %d '%s'", describe(s).c_str(), name.c_str(),
                 shift, static_cast<int>(status.code()), status.message());
        }
        if (aligned ? outputs(s) != want : s.snapshot() != before) {
          broken("%s, %s shifted by %" PRId64 ": other bytes", describe(s).c_str(), name.c_str(),
                 shift);
        }
        *view = good;
      }
      for (auto& [block, memory] : s.memory) memory->content = content.at(block);
    }
  });
}

int hostile(int64_t step) {
  Counts counts;
  const conformance::TestDevice& cpu = conformance::device("cpu");
  for (const Case& c : cases()) {
    conformance::with_op(c.op,
                         [&](auto op) { hostile_values<decltype(op)>(c, cpu, step, &counts); });
  }
  hostile_extents(&counts);
  hostile_addresses(&counts);
  figure("fields", static_cast<int64_t>(counts.fields.size()));
  figure("values", counts.values);
  figure("extents", counts.extents);
  figure("misalignments", counts.misalignments);
  return 0;
}

}  // namespace
}  // namespace logitless::reliability

int main(int argc, char** argv) {
  return logitless::reliability::hostile(logitless::reliability::option(argc, argv, "--step", 1));
}
