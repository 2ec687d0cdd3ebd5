// SPDX-License-Identifier: Apache-2.0
// The gradients' products, ready for their launch. Their kernels take minutes to compile, and are
// in two sources so that they compile side by side.
#pragma once

#include "src/cuda/linear/sm90/engine.h"
#include "src/cuda/linear/sm90/product.cuh"

namespace logitless::cuda::sm90 {

struct Prepared {
  Operands operands;
  ProductArguments a;
  DType out;
};

Prepared whole_input(const LinearWork& work, const tiled::Kept& kept, bool of_e);
Prepared weight_product(const LinearWork& work, const Panel& panel, const char* rows, bool of_e,
                        bool add);

template <Gradient kGradient>
void use_teams(const LinearMemory& m, int teams, int32_t slots, Prepared* p) {
  p->a.teams = static_cast<int32_t>(teams);
  p->a.slots = m.slots;
  p->a.slot_count = slots;
  p->a.cut = work_of<kGradient>(p->a, p->a.chunk.rows, true).cut;
}

// Adds the slices of the tiles that were cut.
template <Gradient kGradient>
void join(const LinearWork& work, const Prepared& p);

template <class F>
void with_half(DType dtype, F&& f) {
  if (dtype == DType::f16) {
    f(__half{});
  } else {
    f(__nv_bfloat16{});
  }
}

template <class F>
void with_types(DType dtype, DType out, F&& f) {
  with_half(dtype, [&](auto element) {
    if (out != DType::f32) return f(element, element);
    f(element, float{});
  });
}

}  // namespace logitless::cuda::sm90
