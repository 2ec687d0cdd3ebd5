// SPDX-License-Identifier: Apache-2.0
// The table of bad calls that only `run` can see: addresses, overlaps, the workspace.
#pragma once

#include "rejects.h"

namespace logitless::testing {

// Moves one tensor onto the memory of another, `shift` bytes further.
inline Mistake onto(const char* name, const char* other, ptrdiff_t shift = 0) {
  return [=](Subject& s) {
    if (!s.has(name) || !s.has(other)) return false;
    s[name].data = static_cast<char*>(s[other].data) + shift;
    return true;
  };
}

inline const Reject kMemoryRejects[] = {
    {"workspace one byte short",
     [](Subject& s) {
       s.workspace.bytes = s.size.minimum - 1;
       return s.size.minimum > 0;
     },
     workspace_too_small, "workspace", Seen::by_run},
    {"no workspace",
     [](Subject& s) {
       s.workspace = {};
       return s.size.minimum > 0;
     },
     workspace_too_small, "workspace", Seen::by_run},
    {"NULL workspace", any_op([](Subject& s) { s.workspace.data = nullptr; }), invalid_argument,
     "workspace", Seen::by_run},
    {"misaligned workspace",
     any_op([](Subject& s) { s.workspace.byte_offset = s.size.alignment / 2; }), misaligned,
     "workspace", Seen::by_run},
    {"workspace past the end of memory", any_op([](Subject& s) { s.workspace.bytes = ~0ull; }),
     invalid_argument, "workspace", Seen::by_run},
    {"probabilities shifted on logits", onto("probabilities", "logits", 4), invalid_argument,
     "probabilities", Seen::by_run},
    {"grad_logits shifted on logits", onto("grad_logits", "logits", -4), invalid_argument,
     "grad_logits", Seen::by_run},
    {"grad_logits a row further", onto("grad_logits", "logits", 20), invalid_argument,
     "grad_logits", Seen::by_run},
    {"grad_logits f16 on logits",
     [](Subject& s) {
       return onto("grad_logits", "logits")(s) && dtype("grad_logits", DType::f16)(s);
     },
     invalid_argument, "grad_logits", Seen::by_run},
    {"grad_logits on logits with another pitch",
     [](Subject& s) {
       if (!onto("grad_logits", "logits")(s)) return false;
       s["grad_logits"].stride[0] = 6;
       return true;
     },
     invalid_argument, "grad_logits", Seen::by_run},
    {"probabilities on transposed logits",
     [](Subject& s) {
       if (!onto("probabilities", "logits")(s)) return false;
       s["probabilities"].stride = {1, 3};
       return true;
     },
     invalid_argument, "probabilities", Seen::by_run},
    {"columns that share one",
     [](Subject& s) {
       if (!onto("probabilities", "logits", 16)(s)) return false;
       s["probabilities"].stride[0] = s["logits"].stride[0] = 9;
       return true;
     },
     invalid_argument, "probabilities", Seen::by_run},
    {"columns that wrap into the next row's",
     [](Subject& s) {
       if (!onto("probabilities", "logits", 24)(s)) return false;
       s["probabilities"].stride[0] = s["logits"].stride[0] = 9;
       return true;
     },
     invalid_argument, "probabilities", Seen::by_run},
    {"interleaved elements that meet",
     [](Subject& s) {
       if (!onto("lse", "target_logit", 4)(s) || !s.forward()) return false;
       s["lse"].stride[0] = 2, s["target_logit"].stride[0] = 3;
       return true;
     },
     invalid_argument, "lse", Seen::by_run},
    {"kept at an address of its element alone",
     [](Subject& s) {
       if (!s.has("kept")) return false;
       s["kept"].byte_offset = 4;
       return true;
     },
     misaligned, "kept", Seen::by_run},
    {"an element inside a wider one", onto("fault", "target", 4), invalid_argument, "fault",
     Seen::by_run},
};

}  // namespace logitless::testing
