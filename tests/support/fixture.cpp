// SPDX-License-Identifier: Apache-2.0
// Guard bytes, copies to and from the device, and the comparison.
#include "fixture.h"

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace logitless::conformance {
namespace {

constexpr int kReportedFailures = 4;
constexpr size_t kStretch = 4096;  // bytes compared at a time

[[gnu::format(printf, 1, 2)]] std::string text(const char* format, ...) {
  char buffer[512];
  std::va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(buffer, sizeof(buffer), format, arguments);
  va_end(arguments);
  return buffer;
}

}  // namespace

DeviceCopy::Block DeviceCopy::make(size_t bytes) const {
  return {device_.allocate(bytes), bytes, std::vector<std::byte>(bytes),
          std::vector<std::byte>(bytes), std::vector<uint8_t>(bytes, 0)};
}

DeviceCopy::DeviceCopy(const TestDevice& device, const Pool& pool) : device_(device), pool_(pool) {
  for (size_t i = 0; i < pool.size(); ++i) {
    blocks_.push_back(make(pool[i].size()));
    std::memcpy(blocks_[i].before.data(), pool[i].data(), pool[i].size());
  }
}

DeviceCopy::~DeviceCopy() {
  for (const Block& block : blocks_) device_.release(block.device);
  if (workspace_.device != nullptr) device_.release(workspace_.device);
  if (workspace_object_ != nullptr) device_.destroy_workspace(workspace_object_);
}

size_t DeviceCopy::offset_of(const TensorView& view, size_t block) const {
  return static_cast<size_t>(static_cast<const std::byte*>(view.data) - pool_[block].data());
}

TensorView DeviceCopy::input(const TensorView& view) const {
  const size_t block = pool_.find(view);
  TensorView moved = view;
  if (!device_.has_addresses()) {
    moved.data = blocks_[block].device;
    moved.byte_offset += offset_of(view, block);
    return moved;
  }
  moved.data = static_cast<std::byte*>(blocks_[block].device) + offset_of(view, block);
  return moved;
}

TensorView DeviceCopy::output(const TensorView& view, bool keep, std::byte fill) {
  Block& block = blocks_[pool_.find(view)];
  const size_t first = offset_of(view, pool_.find(view)) + view.byte_offset;
  const auto size = static_cast<size_t>(size_of(view.dtype));
  const auto mark = [&](int64_t offset, size_t bytes) {
    std::fill_n(block.writable.begin() + first + offset, bytes, 1);
    if (!keep) std::fill_n(block.before.begin() + first + offset, bytes, fill);
  };
  if (view.rank == 2 && view.stride[1] == 1) {
    for (int64_t i = 0; i < view.shape[0]; ++i)
      mark(i * view.stride[0] * size, view.shape[1] * size);
  } else {
    for_each_element(view, [&](int64_t, int64_t offset) { mark(offset, size); });
  }
  return input(view);
}

Workspace DeviceCopy::workspace(const WorkspaceSize& size, uint64_t bytes, std::byte fill) {
  if (!device_.has_addresses()) {
    workspace_object_ = device_.make_workspace(bytes);
    return {.data = workspace_object_, .bytes = bytes};
  }
  const uint64_t alignment = std::max<uint64_t>(size.alignment, 1);
  workspace_ = make(2 * kGuardBytes + 2 * alignment + bytes);
  std::fill(workspace_.before.begin(), workspace_.before.end(), fill);
  // An odd multiple of the alignment, so not aligned any further.
  const auto base = reinterpret_cast<uintptr_t>(workspace_.device);
  uintptr_t start = (base + kGuardBytes + alignment - 1) / alignment * alignment;
  if (start / alignment % 2 == 0) start += alignment;
  workspace_start_ = start - base;
  workspace_bytes_ = bytes;
  std::fill_n(workspace_.writable.begin() + static_cast<int64_t>(workspace_start_), bytes, 1);
  return {.data = reinterpret_cast<void*>(start), .bytes = bytes};
}

void DeviceCopy::upload() {
  for (const Block& block : blocks_) device_.upload(block.device, block.before.data(), block.bytes);
  if (workspace_.device)
    device_.upload(workspace_.device, workspace_.before.data(), workspace_.bytes);
}

void DeviceCopy::download() {
  for (Block& block : blocks_) device_.download(block.after.data(), block.device, block.bytes);
  if (workspace_.device)
    device_.download(workspace_.after.data(), workspace_.device, workspace_.bytes);
}

Field DeviceCopy::field(const TensorView& view) const {
  Field field;
  field.dtype = view.dtype;
  field.shape.assign(view.shape.begin(), view.shape.begin() + view.rank);
  const size_t block = pool_.find(view), size = static_cast<size_t>(size_of(view.dtype));
  const std::byte* first = blocks_[block].after.data() + offset_of(view, block) + view.byte_offset;
  field.value.resize(element_count(view));
  field.bits.resize(field.value.size() * size);
  for_each_element(view, [&](int64_t i, int64_t offset) {
    field.value[i] = load(view.dtype, first + offset);
    std::memcpy(&field.bits[i * size], first + offset, size);
  });
  return field;
}

std::vector<std::string> DeviceCopy::violations(bool written) const {
  std::vector<std::string> found;
  const auto look = [&](const Block& block, const std::string& name, bool may_write) {
    size_t i = 0;
    const auto is_right = [&] {
      return block.before[i] == block.after[i] || (may_write && block.writable[i]);
    };
    while (i < block.bytes) {
      // A fast path for long runs of bytes that may all be written, or that are unchanged.
      const size_t many = std::min(kStretch, block.bytes - i), end = i + many;
      if ((may_write && std::memchr(&block.writable[i], 0, many) == nullptr) ||
          std::memcmp(&block.before[i], &block.after[i], many) == 0) {
        i = end;
      }
      while (i < end && is_right()) ++i;
      if (i == end) continue;
      found.push_back(text("%s: byte %zu of %zu changed from %02x to %02x%s", name.c_str(), i,
                           block.bytes, static_cast<unsigned>(block.before[i]),
                           static_cast<unsigned>(block.after[i]),
                           block.writable[i] ? " by a call that failed" : ""));
      return;
    }
  };
  for (size_t i = 0; i < blocks_.size(); ++i)
    look(blocks_[i], "tensor " + std::to_string(i), written);
  if (workspace_.device) look(workspace_, "workspace", true);
  return found;
}

uint64_t DeviceCopy::touched() const {
  if (workspace_object_ != nullptr) return device_.bytes_of_workspace(workspace_object_);
  const std::byte *before = workspace_.before.data() + workspace_start_,
                  *after = workspace_.after.data() + workspace_start_;
  uint64_t end = workspace_bytes_;
  while (end >= kStretch &&
         std::memcmp(before + end - kStretch, after + end - kStretch, kStretch) == 0)
    end -= kStretch;
  while (end > 0 && before[end - 1] == after[end - 1]) --end;
  return end;
}

void write_bits(const TensorView& view, const Field& field) {
  const auto size = static_cast<size_t>(size_of(view.dtype));
  for_each_element(view, [&](int64_t i, int64_t offset) {
    std::memcpy(view.as<std::byte>() + offset, &field.bits[static_cast<size_t>(i) * size], size);
  });
}

void Comparison::fail(const std::string& what) {
  if (++failures <= kReportedFailures) report += "  " + what + "\n";
}

void Comparison::merge(const Comparison& other, const std::string& context) {
  if (other.failures > 0) {
    failures += other.failures;
    if (report.size() < 4000) report += context + "\n" + other.report;
  }
  if (other.worst_ratio > worst_ratio) {
    worst_ratio = other.worst_ratio;
    worst = other.worst + ", " + context;
  }
}

namespace {

// An element's error divided by its bound: 0 if exact, NaN if NaNs or infinities do not match.
double error_ratio(double got, double want, double bound, DType dtype) {
  if (std::isnan(want)) return std::isnan(got) ? 0 : NAN;
  if (std::isnan(got) || !(bound >= 0)) return NAN;
  if (std::isinf(want)) return got == want ? 0 : NAN;
  if (std::isinf(got)) {
    // A result rounded to infinity is right if the bound reaches beyond the dtype's range.
    const double toward = std::signbit(got) ? -want : want;
    return toward + bound >= overflow_threshold(dtype) ? 0 : NAN;
  }
  const double error = std::fabs(got - want);
  if (error == 0) return 0;
  return std::isfinite(bound) ? error / bound : NAN;
}

void compare_indices(const std::string& name, const reference::Output& want, const Field& got,
                     Comparison* c) {
  for (size_t i = 0; i < got.value.size(); ++i) {
    const auto index = static_cast<int64_t>(got.value[i]);
    const std::vector<int64_t>& accepted = want.accepted.at(i);
    if (std::find(accepted.begin(), accepted.end(), index) != accepted.end()) continue;
    c->fail(text("%s[%zu] is %lld; accepted: %lld%s", name.c_str(), i,
                 static_cast<long long>(index),
                 accepted.empty() ? -1LL : static_cast<long long>(accepted[0]),
                 accepted.size() > 1 ? " and others" : ""));
  }
}

void compare_values(const std::string& name, const reference::Output& want, const Field& got,
                    Comparison* c) {
  const int64_t columns = got.shape.size() == 2 ? got.shape[1] : 1;
  for (size_t i = 0; i < got.value.size(); ++i) {
    const double ratio = error_ratio(got.value[i], want.value[i], want.bound[i], got.dtype);
    if (ratio > c->worst_ratio) {
      c->worst_ratio = ratio;
      c->worst = name;
    }
    if (ratio <= 1) continue;
    c->fail(
        text("%s[%lld, %lld] is %.9g; reference %.9g, bound %.3g, error %.3g (%.2f of the bound)",
             name.c_str(), static_cast<long long>(i / columns), static_cast<long long>(i % columns),
             got.value[i], want.value[i], want.bound[i], std::fabs(got.value[i] - want.value[i]),
             ratio));
  }
}

// If row_reference m may be any number within log s + log 2 of the row's maximum, row_log_sum must
// be lse - m for the m that was written; the maximum's own error does not widen its bound.
void move_to_anchors(const std::string& head, const Fields& got, reference::Result* beside) {
  const auto reference = beside->outputs.find(head + "row_reference"),
             log_sum = beside->outputs.find(head + "row_log_sum");
  if (reference == beside->outputs.end() || log_sum == beside->outputs.end()) return;
  const auto anchor = got.find(head + "row_reference");
  if (anchor == got.end()) return;
  for (size_t i = 0; i < anchor->second.value.size(); ++i) {
    const double m = anchor->second.value[i], maximum = reference->second.value[i];
    // Infinite or exact values have no bound to shift.
    if (!(log_sum->second.bound[i] > 0) || !std::isfinite(m - maximum)) continue;
    log_sum->second.bound[i] -= reference->second.bound[i];
    reference->second.bound[i] += log_sum->second.value[i] + std::log(2.0);
    log_sum->second.value[i] -= m - maximum;
  }
}
reference::Result beside_anchors(const reference::Result& want, const Fields& got) {
  reference::Result beside = want;
  move_to_anchors("", got, &beside);
  move_to_anchors("teacher_", got, &beside);
  return beside;
}

}  // namespace

Comparison compare(const reference::Result& wanted, const Fields& got) {
  Comparison c;
  const reference::Result want = wanted.anchored ? beside_anchors(wanted, got) : wanted;
  if (want.undecided) c.fail("the case lies where the contract allows either answer");
  for (const auto& [name, output] : want.outputs) {
    if (!got.contains(name)) c.fail(name + " was not written");
  }
  for (const auto& [name, field] : got) {
    const auto found = want.outputs.find(name);
    if (found == want.outputs.end()) {
      c.fail(name + " is not among the reference's outputs");
      continue;
    }
    if (found->second.accepted.empty() && found->second.value.size() != field.value.size()) {
      c.fail(text("%s has %zu elements, the reference %zu", name.c_str(), field.value.size(),
                  found->second.value.size()));
    } else if (!found->second.accepted.empty()) {
      compare_indices(name, found->second, field, &c);
    } else {
      compare_values(name, found->second, field, &c);
    }
  }
  return c;
}

Comparison compare(const reference::Result& want, const Outcome& got) {
  Comparison c;
  if (got.status.code() != want.status.code()) {
    c.fail(text("status %d (%s); the reference's is %d (%s)", static_cast<int>(got.status.code()),
                got.status.message(), static_cast<int>(want.status.code()), want.status.message()));
  } else if (got.status.ok()) {
    c = compare(want, got.fields);
  }
  const int64_t wanted = got.fault_wanted | (got.has_fault ? want.fault : 0);
  if (got.fault != wanted) {
    c.fail(text("fault is %lld, not %lld", static_cast<long long>(got.fault),
                static_cast<long long>(wanted)));
  }
  for (const std::string& violation : got.violations) c.fail(violation);
  return c;
}

std::string differing_bits(const Fields& a, const Fields& b) {
  std::string differing;
  for (const auto& [name, field] : a) {
    const auto found = b.find(name);
    if (found == b.end() || found->second.bits != field.bits) differing += name + " ";
  }
  return differing;
}

}  // namespace logitless::conformance
