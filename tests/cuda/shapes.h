// SPDX-License-Identifier: Apache-2.0
// Shapes of CUDA's linear ops for tests, workspaces for them, and the plans they get.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "src/cuda/linear/search.h"
#include "src/cuda/linear/tiled/engine.h"
#include "tests/cuda/toy/toy.h"

namespace logitless::cuda {

constexpr uint64_t MiB = uint64_t{1} << 20;

// Hopper's engine, the one for sm_80, and the one that serves every GPU.
inline const Engine& hopper() { return *engines().front(); }
inline const Engine& sm80() {
  const auto is_it = [](const Engine* e) { return std::strcmp(e->name(), "sm80") == 0; };
  return **std::find_if(engines().begin(), engines().end(), is_it);
}
inline const Engine& portable() { return *engines().back(); }
// An engine whose tiles differ from Hopper's.
inline const Engine& toy_engine() {
  static const toy::ToyEngine engine;
  return engine;
}
inline bool is_tiled(const Engine& engine) { return &engine != &portable() && &engine != &sm80(); }

inline Asked on(const Engine& engine, LinearShape shape) {
  const bool own = is_tiled(engine);
  if (own) shape.kernels.others = Origin::again_dz;
  shape.kernels.takes_eights = !own;
  return {engine, shape, {}};
}

// Adds Forward and Backward of a shape with kept state, of all columns or of about half.
inline void add_kept(const Engine& engine, LinearShape s, std::vector<Asked>* all) {
  for (const int64_t columns : {s.vocab, s.vocab / 2 / 3072 * 3072}) {
    if (columns == 0 || s.tokens == 0) continue;
    s = {.tokens = s.tokens, .vocab = s.vocab, .hidden = s.hidden, .dtype = s.dtype};
    s.kept_columns = columns;
    all->push_back(on(engine, s));
    s.forward = false;
    s.grad_input = s.grad_weight = true;
    const Origin formed = !is_tiled(engine) ? Origin::dz_in_panels : Origin::dz_by_rows;
    s.kernels.kept = s.dtype == DType::f16 ? formed : Origin::e;
    all->push_back(on(engine, s));
    s.input_first = true;
    all->push_back(on(engine, s));
    s.input_first = false;
    s.grad_bias = s.smoothing = true;
    all->push_back(on(engine, s));
    s.kernels.kept = Origin::dz_by_rows;
    if (is_tiled(engine)) all->push_back(on(engine, s));
    s.kernels.kept = Origin::dz_in_panels;
    all->push_back(on(engine, s));
    s.kernels.direct_grad_input = s.kernels.lends_grad_input = s.kernels.lends_grad_weight =
        is_tiled(engine);
    all->push_back(on(engine, s));
  }
}

inline std::vector<Asked> shapes() {
  std::vector<Asked> all;
  for (const Engine* best : {&portable(), &sm80(), &hopper(), &toy_engine()}) {
    for (const auto& [tokens, vocab, hidden] : {std::array<int64_t, 3>{8192, 128256, 4096},
                                                {20480, 50257, 768},
                                                {0, 7, 3},
                                                {1, 1, 1},
                                                {1, 128256, 4096},
                                                {513, 1025, 40},
                                                {4096, 129280, 7168}}) {
      for (const DType dtype : {DType::bf16, DType::f16, DType::f32}) {
        LinearShape s{.tokens = tokens, .vocab = vocab, .hidden = hidden, .dtype = dtype};
        const Engine& engine = dtype == DType::f32 ? portable() : *best;
        const bool own = is_tiled(engine);
        add_kept(engine, s, &all);
        const auto add = [&] {
          // f16 gradients keep E as codes (keep_codes).
          const Origin kept = s.kernels.kept;
          if (dtype == DType::f16 && s.gradients()) s.kernels.kept = Origin::dz_by_rows;
          all.push_back(on(engine, s));
          s.kernels.kept = kept;
        };
        add();
        s.kernels.plain = own;
        add();
        s.kernels.reads_input = own;
        add();
        s.kernels.reads_input = false;
        s.grad_input = s.grad_weight = true;
        add();
        s.kernels.lends_grad_weight = own;
        add();
        s.kernels.direct_grad_input = s.kernels.lends_grad_input = own;
        add();
        s.bias = s.grad_bias = s.smoothing = own;
        if (own) s.sums = SumKind::weighted | SumKind::maximum | SumKind::shifted;
        if (own) s.kernels.kept = Origin::dz_in_place;
        s.kernels.plain = false;
        add();
        s.bias = s.grad_bias = s.smoothing = false;
        s.kernels.kept = Origin::e;
        s.sums = {};
        s.kernels.plain = own;
        s.grad_weight_f32 = true;
        add();
        s.grad_weight_f32 = s.kernels.lends_grad_weight = false;
        s.grad_bias = s.smoothing = true;
        s.sums = SumKind::weighted | SumKind::maximum | SumKind::shifted | SumKind::argmax;
        s.kernels.direct_grad_weight = s.kernels.plain = false;
        s.copies_weight = true;
        s.kernels.direct_grad_input = s.kernels.lends_grad_input = false;
        if (dtype == DType::f16) s.kernels.kept = Origin::dz_by_rows;
        all.push_back(on(portable(), s));
      }
    }
  }
  return all;
}

inline std::vector<uint64_t> budgets(const Asked& asked) {
  const LinearShape& s = asked.shape;
  const uint64_t least = asked.smallest().bytes;
  const uint64_t whole = least + uint64_t(s.tokens + 64) * (s.vocab + 64) * 4 + 64 * MiB;
  std::vector<uint64_t> all;
  for (int i = 0; i < 12; ++i) all.push_back(least + (whole - least) * i * i / 121);
  return all;
}

}  // namespace logitless::cuda
