// SPDX-License-Identifier: Apache-2.0
// The rules of docs/semantics.md about memory: NULL, alignment, overlap, the workspace. Addresses
// exist on the host and on CUDA; WebGPU has handles.
#include <array>

#include "src/kept.h"
#include "src/message.h"
#include "src/overlap.h"
#include "src/rules.h"
#include "src/validate.h"

namespace logitless {
namespace {

Footprint footprint(const TensorView& v) {
  Footprint f;
  int64_t bytes = 0;
  if (!extent(v, &bytes) || bytes == 0) return f;
  f.address = reinterpret_cast<uintptr_t>(v.data) + v.byte_offset;
  f.bytes = static_cast<uint64_t>(bytes);
  f.element = static_cast<uint64_t>(size_of(v.dtype));
  for (int32_t d = 0; d < v.rank; ++d) {
    if (v.shape[d] == 1) continue;
    f.last[d] = static_cast<uint64_t>(v.shape[d] - 1);
    f.stride[d] = static_cast<uint64_t>(v.stride[d]) * f.element;
  }
  return f;
}

Footprint footprint(const Workspace& w) {
  const uint64_t address = reinterpret_cast<uintptr_t>(w.data) + w.byte_offset;
  return {.address = address, .bytes = w.bytes, .element = w.bytes};
}

Status check_addresses(const Call& call) {
  for (const Field& field : call.fields()) {
    const TensorView& v = *field.view;
    if (!field.given() || elements(v) == 0) continue;
    if (v.data == nullptr) {
      return error(StatusCode::invalid_argument, "%s has shape %s and NULL data", field.name.data(),
                   shape_text(v).text);
    }
    const Footprint f = footprint(v);
    if (!has_addresses(call)) {
      if (v.byte_offset % f.element == 0) continue;
      return error(StatusCode::misaligned, "%s.byte_offset is %llu; allowed: multiples of %llu",
                   field.name.data(), static_cast<unsigned long long>(v.byte_offset),
                   static_cast<unsigned long long>(f.element));
    }
    if (f.address < v.byte_offset || f.address + f.bytes < f.address) {
      return error(StatusCode::invalid_argument, "%s: address %p and offset %llu pass 2^64",
                   field.name.data(), v.data, static_cast<unsigned long long>(v.byte_offset));
    }
    if (f.address % f.element != 0) {
      return error(StatusCode::misaligned, "%s is at address %p + %llu; allowed: multiples of %lld",
                   field.name.data(), v.data, static_cast<unsigned long long>(v.byte_offset),
                   static_cast<long long>(f.element));
    }
  }
  return {};
}

Status check_workspace(const Call& call, const Workspace& w, const WorkspaceSize& size) {
  if (w.bytes < size.minimum) {
    return error(StatusCode::workspace_too_small,
                 "workspace has %llu bytes; allowed: >= %llu (recommended: %llu)",
                 static_cast<unsigned long long>(w.bytes),
                 static_cast<unsigned long long>(size.minimum),
                 static_cast<unsigned long long>(size.recommended));
  }
  if (w.bytes == 0) return {};
  if (w.data == nullptr) {
    return error(StatusCode::invalid_argument, "workspace has %llu bytes and NULL data",
                 static_cast<unsigned long long>(w.bytes));
  }
  if (!has_addresses(call)) return {};
  const uint64_t address = footprint(w).address;
  if (address < w.byte_offset || address + w.bytes < address) {
    return error(StatusCode::invalid_argument,
                 "workspace: address %p, offset %llu and %llu bytes "
                 "pass 2^64",
                 w.data, static_cast<unsigned long long>(w.byte_offset),
                 static_cast<unsigned long long>(w.bytes));
  }
  if (size.alignment > 1 && address % size.alignment != 0) {
    return error(StatusCode::misaligned,
                 "workspace is at address %p + %llu; allowed: multiples "
                 "of %llu",
                 w.data, static_cast<unsigned long long>(w.byte_offset),
                 static_cast<unsigned long long>(size.alignment));
  }
  return {};
}

// In place is allowed only element for element: the same addresses in the same dtype.
bool in_place(const Field& out, const Field& in) {
  return in.name == "logits" && (out.name == "grad_logits" || out.name == "probabilities") &&
         out.view->dtype == in.view->dtype && footprint(*out.view) == footprint(*in.view);
}

// WebGPU does not let one dispatch bind a buffer twice if it writes it; no dispatch writes two
// outputs.
Status check_buffers(const Fields& fields) {
  for (size_t i = 0; i < fields.size(); ++i) {
    const Field& a = fields[i];
    for (size_t j = 0; j < i; ++j) {
      const Field& b = fields[j];
      if (!a.given() || !b.given() || a.view->data == nullptr || a.view->data != b.view->data) {
        continue;
      }
      if ((!a.written() && !b.written()) || in_place(a, b)) continue;
      if (a.written() != b.written()) {
        return error(StatusCode::invalid_argument,
                     "%s and %s are in one buffer; allowed on webgpu: where both are only read, "
                     "both only written, or in place",
                     a.name.data(), b.name.data());
      }
      if (may_overlap(footprint(*a.view), footprint(*b.view))) {
        return error(StatusCode::invalid_argument, "%s overlaps %s", a.name.data(), b.name.data());
      }
    }
  }
  return {};
}

Status check_overlaps(const Call& call, const Workspace& w) {
  const Fields fields = call.fields();
  if (!has_addresses(call)) return check_buffers(fields);
  std::array<Footprint, std::tuple_size_v<decltype(Fields::field)>> prints;
  for (size_t i = 0; i < fields.size(); ++i) {
    if (fields[i].given()) prints[i] = footprint(*fields[i].view);
  }
  const Footprint scratch = footprint(w);
  for (size_t i = 0; i < fields.size(); ++i) {
    const Field& a = fields[i];
    if (may_overlap(prints[i], scratch)) {
      return error(StatusCode::invalid_argument, "%s overlaps the workspace", a.name.data());
    }
    for (size_t j = 0; j < i; ++j) {
      const Field& b = fields[j];
      if (!a.written() && !b.written()) continue;
      if (!may_overlap(prints[i], prints[j]) || in_place(a, b)) continue;
      return error(StatusCode::invalid_argument, "%s overlaps %s", a.name.data(), b.name.data());
    }
  }
  return {};
}

// Kernels move kept state 16 bytes at a time, and a WebGPU buffer is bound at multiples of 256.
Status check_kept_address(const Call& call) {
  const TensorView& v = call["kept"];
  if (!v || elements(v) == 0) return {};
  const uint64_t allowed = has_addresses(call) ? kept_alignment : kept_binding;
  const uint64_t address = has_addresses(call) ? footprint(v).address : v.byte_offset;
  if (address % allowed == 0) return {};
  return error(StatusCode::misaligned, "kept is at address %p + %llu; allowed: multiples of %llu",
               v.data, static_cast<unsigned long long>(v.byte_offset),
               static_cast<unsigned long long>(allowed));
}

}  // namespace

Status validate_data(const Call& call, const Workspace& workspace, const WorkspaceSize& size) {
  Status status = check_addresses(call);
  if (status.ok()) status = check_workspace(call, workspace, size);
  if (status.ok()) status = check_overlaps(call, workspace);
  if (status.ok()) status = check_kept_address(call);
  return status;
}

}  // namespace logitless
