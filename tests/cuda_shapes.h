// SPDX-License-Identifier: Apache-2.0
// Shapes of linear ops on CUDA, workspaces for them, and what is planned there.
#pragma once

#include <algorithm>
#include <array>
#include <vector>

#include "src/cuda/linear/linear.h"
#include "src/cuda/linear/plan.h"

namespace logitless::cuda {

constexpr uint64_t MiB = uint64_t{1} << 20;

inline std::vector<LinearShape> shapes() {
  std::vector<LinearShape> all;
  for (const bool fused : {false, true}) {
    for (const auto& [tokens, vocab, hidden] : {std::array<int64_t, 3>{8192, 128256, 4096},
                                                {20480, 50257, 768},
                                                {0, 7, 3},
                                                {1, 1, 1},
                                                {1, 128256, 4096},
                                                {513, 1025, 40},
                                                {4096, 129280, 7168}}) {
      for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
        LinearShape s{.tokens = tokens, .vocab = vocab, .hidden = hidden, .dtype = dtype};
        s.fused = fused && dtype != DType::f32;
        s.can_store = dtype != DType::f16;
        all.push_back(s);
        s.plain = s.fused;
        all.push_back(s);
        s.reads_input = s.fused;
        all.push_back(s);
        s.reads_input = false;
        s.grad_input = s.grad_weight = true;
        all.push_back(s);
        s.lends_grad_weight = s.fused;
        all.push_back(s);
        s.direct_grad_input = s.lends_grad_input = s.fused;
        all.push_back(s);
        s.bias = s.grad_bias = s.smoothing = s.weighted_sum = s.entropy = s.fused;
        s.forms_dz = s.fused && s.can_store;
        s.plain = false;
        all.push_back(s);
        s.bias = s.grad_bias = s.smoothing = s.weighted_sum = s.entropy = s.forms_dz = false;
        s.plain = s.fused;
        s.grad_weight_f32 = true;
        all.push_back(s);
        s.grad_weight_f32 = s.lends_grad_weight = false;
        s.grad_bias = s.smoothing = s.weighted_sum = s.entropy = s.argmax = true;
        s.direct_grad_weight = s.fused = s.plain = false;
        s.copies_weight = true;
        all.push_back(s);
      }
    }
  }
  return all;
}

inline uint64_t bytes_of(const LinearShape& s, const LinearPlan& p) {
  Arena arena;
  place_linear(s, p, &arena);
  return arena.used();
}

inline std::vector<uint64_t> budgets(const LinearShape& s) {
  const uint64_t least = smallest_plan(s, {}).bytes;
  const uint64_t whole = least + uint64_t(s.tokens + 64) * (s.vocab + 64) * 4 + 64 * MiB;
  std::vector<uint64_t> all;
  for (int i = 0; i < 12; ++i) all.push_back(least + (whole - least) * i * i / 121);
  return all;
}

// The call and its plan; those of both of two passes.
struct Planned {
  LinearShape shape;
  LinearPlan plan;
};
inline std::vector<Planned> passes(const LinearShape& s, uint64_t bytes) {
  const LinearPlan p = plan_linear(s, {}, bytes);
  if (p.kind != PlanKind::two_passes) return {{s, p}};
  std::vector<Planned> both;
  for (const LinearShape& pass : {first_pass(s, p.first_rows), second_pass(s, p.first_rows)}) {
    both.push_back({pass, plan_linear(pass, {}, bytes - state_bytes(s))});
  }
  return both;
}

}  // namespace logitless::cuda
