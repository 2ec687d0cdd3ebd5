// SPDX-License-Identifier: Apache-2.0
// What options beyond plain logits change of a tile: 64 x 192 logits of a warpgroup, of which this
// thread's are d[4 i + 2 h + c] at row 8 h and column 8 i + 2 (lane % 4) + c. The registers are the
// logits': what is done to them is done a few at a time, behind branches that the compiler does not
// move work across.
#pragma once

#include "src/cuda/linear.cuh"
#include "src/cuda/sm90/units.cuh"

namespace logitless::cuda::sm90 {

struct TileOptions {
  MapFactors map;
  const float* bias;          // [V + padding]  null: none
  const float* class_weight;  // [V + padding]  null: 1
  bool smoothing, entropy;    // terms of dz
  float near_cap;             // sums_kept: |z| beyond which what is left to the cap is kept
};

// Whether `x`, which the compiler takes for a new value at every place.
__device__ inline bool again(bool x) {
  int value = x;
  asm volatile("" : "+r"(value));
  return value != 0;
}

// f(element, column of the tile) for the thread's 48 of row h, 2 kPairs of them at a time.
template <int kPairs = 4, class F>
__device__ inline void each_of_row(float (&d)[96], int h, F&& f) {
  const int own = 2 * static_cast<int>(threadIdx.x % 4);
#pragma unroll
  for (int group = 0; group < 24; group += kPairs) {
    if (!again(true)) continue;
#pragma unroll
    for (int i = group; i < group + kPairs; ++i) {
      f(d[4 * i + 2 * h], 8 * i + own);
      f(d[4 * i + 2 * h + 1], 8 * i + own + 1);
    }
  }
}

// f(the two elements of pair i, i) for the thread's 24 pairs of row h.
template <class F>
__device__ inline void each_pair_of_row(float (&d)[96], int h, F&& f) {
#pragma unroll
  for (int group = 0; group < 24; group += 4) {
    if (!again(true)) continue;
#pragma unroll
    for (int i = group; i < group + 4; ++i) f(d[4 * i + 2 * h], d[4 * i + 2 * h + 1], i);
  }
}

// z of a capped logit, within the 3 u32 of its bound: where a bias carries a logit whose product is
// about 0 there is nothing else to make good for more. By tanh's argument y:
//   y <= 0.6   map_small: tanh y = y + y^3 P(y^2), coefficients and range of Cephes' tanhf
//   y <= 1.4   map_large: the same with a longer polynomial (relative error 0.12 u32 as fitted)
//   beyond     map_large: 1 - 2 / (e^2y + 1), to 2.5 u32 by ex2.approx and rcp.approx (9 at 0.6)
constexpr float most_of_small = 0.6f, most_of_polynomial = 1.4f;

__device__ inline float map_small(const MapFactors& f, float raw) {
  const float y = raw * (0.5f * f.inward), y2 = y * y, z = raw * f.slope;
  float p = fmaf(-5.70498872745e-3f, y2, 2.06390887954e-2f);
  p = fmaf(p, y2, -5.37397155531e-2f);
  p = fmaf(p, y2, 1.33314422036e-1f);
  p = fmaf(p, y2, -3.33332819422e-1f);
  return fmaf(z, p * y2, z);
}
__device__ inline float map_large(const MapFactors& f, float raw) {
  const float y = raw * (0.5f * f.inward), y2 = y * y, z = raw * f.slope;
  float p = fmaf(-0x1.674f2ep-17f, y2, 0x1.117034p-13f);
  p = fmaf(p, y2, -0x1.892978p-11f);
  p = fmaf(p, y2, 0x1.722b4cp-9f);
  p = fmaf(p, y2, -0x1.100ac6p-7f);
  p = fmaf(p, y2, 0x1.620b58p-6f);
  p = fmaf(p, y2, -0x1.b987cep-5f);
  p = fmaf(p, y2, 0x1.110c0ep-3f);
  p = fmaf(p, y2, -0x1.555536p-2f);
  const float near = fmaf(z, p * y2, z);
  const float e = exp2_fast(fabsf(raw) * f.inward * log2e);
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(e + 1.0f));
  const float far = copysignf(fmaf(-2.0f, inverse, 1.0f), raw) * f.outward;
  return fabsf(y) > most_of_polynomial ? far : near;
}

// raw -> z. `column`: of the vocabulary, the tile's first.
__device__ inline void map_tile(float (&d)[96], const TileOptions& o, int column) {
  const float2* bias = reinterpret_cast<const float2*>(o.bias + column) + threadIdx.x % 4;
  const float small = 2 * most_of_small / o.map.inward;
#pragma unroll
  for (int group = 0; group < 24; group += 4) {
    if (again(o.bias != nullptr)) {
#pragma unroll
      for (int i = group; i < group + 4; ++i) {
        const float2 b = __ldg(bias + 4 * i);
        d[4 * i] += b.x, d[4 * i + 1] += b.y, d[4 * i + 2] += b.x, d[4 * i + 3] += b.y;
      }
    }
    if (again(o.map.capped)) {
      float most = 0;
#pragma unroll
      for (int i = 4 * group; i < 4 * group + 16; ++i) most = fmaxf(most, fabsf(d[i]));
      if (__any_sync(whole_warp, most > small)) {
#pragma unroll
        for (int i = 4 * group; i < 4 * group + 16; ++i) {  // by its own size alone
          d[i] = fabsf(d[i]) > small ? map_large(o.map, d[i]) : map_small(o.map, d[i]);
        }
      } else {
#pragma unroll
        for (int i = 4 * group; i < 4 * group + 16; ++i) d[i] = map_small(o.map, d[i]);
      }
    } else if (again(!o.map.identity)) {
#pragma unroll
      for (int i = 4 * group; i < 4 * group + 16; ++i) d[i] *= o.map.slope;
    }
  }
}

__device__ inline float class_weight_at(const TileOptions& o, int column) {
  return o.class_weight != nullptr ? __ldg(o.class_weight + column) : 1.0f;
}

__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(whole_warp, x, 1);
  return x + __shfl_xor_sync(whole_warp, x, 2);
}

// sum c_j z_j of a row's columns but the target's; `left` columns exist. Most tiles have all and no
// target.
__device__ inline float weighted_sum(float (&d)[96], int h, const TileOptions& o, int column,
                                     int left, int target) {
  const bool has_target = target >= 0 && target < 192;
  float sum = 0;
  if (left < 192 || __any_sync(whole_warp, has_target)) {
    each_of_row(d, h, [&](float z, int j) {
      if (j >= left || j == target) return;
      const float c = class_weight_at(o, column + j);
      if (c != 0) sum = fmaf(c, z, sum);
    });
  } else if (o.class_weight == nullptr) {
    each_of_row(d, h, [&](float z, int) { sum += z; });
  } else {
    const float2* weights =
        reinterpret_cast<const float2*>(o.class_weight + column) + threadIdx.x % 4;
    each_pair_of_row(d, h, [&](float z0, float z1, int i) {
      const float2 c = __ldg(weights + 4 * i);
      if (c.x != 0) sum = fmaf(c.x, z0, sum);
      if (c.y != 0) sum = fmaf(c.y, z1, sum);
    });
  }
  return quad_sum(sum);
}

// The lowest column of the maximum. What is left out is -inf: of -inf alone the first column.
__device__ inline int lowest_column(float (&d)[96], int h, float maximum) {
  int lowest = INT32_MAX;
  each_of_row(d, h, [&](float z, int j) {
    if (z == maximum) lowest = min(lowest, j);
  });
  lowest = min(lowest, __shfl_xor_sync(whole_warp, lowest, 1));
  return min(lowest, __shfl_xor_sync(whole_warp, lowest, 2));
}

// sum e^(z - m) (z - m) of a row, whose reference is m.
__device__ inline float shifted_sum(float (&d)[96], int h, float reference) {
  float sum = 0;
  each_of_row(d, h, [&](float z, int) {
    const float x = z - reference;
    sum = fmaf(exp2_fast(x * log2e), fmaxf(x, least_exponent), sum);
  });
  return quad_sum(sum);
}

// E without its lift times the softcap's slope.
__device__ inline float capped(const TileOptions& o, float z, float e) {
  const float t = z * o.map.backward;
  return e * fmaf(-t, t, 1.0f);
}

// From E, z is known to 2^-9, and 1 - (z / cap)^2 as well while it is no smaller than a tenth. Of
// an element closer to the cap a negative number is kept in E's place: the sign of z and 1 - |z| /
// cap, five bits of its exponent and nine of its mantissa, in the sixteen upper bits (form_dz.cu).
constexpr float near_cap = 0.9375f;                      // of the cap
constexpr uint32_t first_left_code = (103u << 9) - 128;  // of 2^-24; codes begin at a normal number
__device__ inline float encode_left(const MapFactors& map, float z) {
  const float left = fmaxf(fmaf(-fabsf(z), map.backward, 1.0f), 0x1p-24f);
  const uint32_t code = (__float_as_uint(left) >> 14) - first_left_code;
  return __uint_as_float((0x8000u | (z < 0 ? 0x4000u : 0u) | code) << 16);
}
__device__ inline float log_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y * 0x1.62e430p-1f;
}
// z, and the softcap's slope there, from the middle of what the code stands for.
__device__ inline float decode_left(const MapFactors& map, float kept, float* slope) {
  const uint32_t bits = __float_as_uint(kept);
  const float left = __uint_as_float((((bits >> 16 & 0x3fff) + first_left_code) << 14) | 0x2000u);
  *slope = left * (2 - left);
  const float z = (1 - left) * fabsf(map.outward);
  return (bits >> 30 & 1) != 0 ? -z : z;
}

// dz times the softcap's slope; of a column that does not exist 0.
__device__ inline float draw_of(const TileOptions& o, float probability, const RowGradient& g,
                                float z, float log2_p, int column, bool exists) {
  const float p = exp2_fast(log2_p);
  float draw = probability * p;
  if (o.smoothing && exists) draw = fmaf(-g.smoothing, class_weight_at(o, column), draw);
  if (o.entropy) {
    const float information = fmaxf(log2_p * 0x1.62e430p-1f, least_exponent) + g.entropy_value;
    draw = fmaf(-(g.entropy * p), information, draw);
  }
  return exists ? draw * cap_slope(o.map, z) : 0.0f;
}

}  // namespace logitless::cuda::sm90
