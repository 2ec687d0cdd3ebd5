# SPDX-License-Identifier: Apache-2.0
"""The row kernels, the packing and the products: src/cpu/{row,exp,pack,gemm_tile}-inl.h,
row_kernels.cpp, gemm*.cpp."""

from mutants.mutant import Edit, Mutant, mutant

ROW, ROWS, EXP = "src/cpu/row-inl.h", "src/cpu/row_kernels.cpp", "src/cpu/exp-inl.h"
MAP, GRADIENT, SUMS = "src/row/map.h", "src/row/gradient.h", "src/row/sums.h"
PACK, GEMM, AMX = "src/cpu/pack-inl.h", "src/cpu/gemm.cpp", "src/cpu/gemm_amx.cpp"
BOTH = "logits linear"

MUTANTS = [
    mutant(
        "lse: of a stale maximum", ROWS,
        "const double old_factor = old_shift == 0 ? 1 : std::exp(old_shift);",
        "const double old_factor = 1;", BOTH,
    ),
    mutant(
        "lse: the block's sum is not shifted to the row's maximum", ROWS,
        "const double new_factor = new_shift == 0 ? 1 : std::exp(new_shift);",
        "const double new_factor = 1;", BOTH,
    ),
    mutant(
        "lse: of logits rounded to bf16", ROWS,
        "  const float shift = state->maximum == kMinusInfinity ? 0 : state->maximum;\n",
        "  const float shift = state->maximum == kMinusInfinity ? 0 : state->maximum;\n"
        "  static thread_local float rounded[4096];\n  static thread_local uint16_t narrow[4096];\n"
        "  store_from_f32(logits, count, DType::bf16, narrow);\n"
        "  load_as_f32(narrow, DType::bf16, count, rounded);\n"
        "  logits = rounded;\n",
        BOTH,
    ),
    mutant(
        "entropy: shifted sums are not moved to the new maximum", SUMS,
        "by.factor * (shifted + by.sum * by.shift)", "by.factor * shifted", BOTH,
    ),
    mutant(
        "entropy: 0 log 0 is NaN", ROW, "t = hn::MulAdd(y, hn::Max(x, least), t);",
        "t = hn::MulAdd(y, x, t);", BOTH,
    ),
    mutant(
        "entropy: its gradient has 0 log 0 = NaN", ROW,
        "hn::Add(hn::Max(log_p, least), entropy_value);", "hn::Add(log_p, entropy_value);", BOTH,
    ),
    mutant(
        "entropy: its gradient with the wrong sign", ROW,
        "entropy = hn::Set(d, g.entropy * f.slope);", "entropy = hn::Set(d, -g.entropy * f.slope);", BOTH,
    ),
    mutant(
        "NaN x 0: a -inf logit at class weight 0", ROW,
        "s = hn::Add(s, hn::IfThenZeroElse(hn::Eq(c, zero), hn::Mul(c, z_at)));",
        "s = hn::MulAdd(c, z_at, s);", BOTH,
    ),
    mutant(
        "NaN: lost in the row's maximum", ROWS,
        "if (std::isnan(state->sum) && !infinite) state->maximum = state->sum;",
        "if (std::isnan(state->sum)) state->sum = 1;", BOTH,
    ),
    mutant(
        "NaN: lost beside an infinite logit", ROWS,
        "    if (std::isnan(logits[j])) state->maximum = logits[j];\n", "", "kernels",
    ),
    mutant(
        "a row of -inf: a number, not NaN", ROWS,
        "const double log_sum = nothing ? std::numeric_limits<double>::quiet_NaN() : std::log(sum);",
        "const double log_sum = nothing ? 0 : std::log(sum);", BOTH,
    ),
    mutant(
        "argmax: the last of equal logits", ROWS, ".second_leads = block.maximum > maximum",
        ".second_leads = block.maximum >= maximum", BOTH,
    ),
    mutant(
        "argmax: counted from the block's first column", SUMS, "argmax = m.first_column + second.argmax;",
        "argmax = second.argmax;", BOTH,
    ),
    mutant(
        "softcap: derivative from u, not from c", ROW,
        "return hn::NegMulAdd(rest, rest, hn::Add(rest, rest));",
        "const V c_t = hn::Sub(hn::Set(d, 1.0f), rest);\n"
        "  const V t = hn::MulAdd(hn::Mul(hn::Mul(c_t, c_t), c_t), hn::Set(d, 1.0f / 3), c_t);\n"
        "  return hn::NegMulAdd(t, t, hn::Set(d, 1.0f));",
        BOTH,
    ),
    mutant(
        "softcap: derivative from u at the target", ROWS,
        "const double t = static_cast<double>(z) * map.temperature / map.softcap;",
        "const double t = std::atanh(static_cast<double>(z) * map.temperature / map.softcap);", BOTH,
    ),
    mutant(
        "NaN x 0: an infinite logit at scale 0 under a softcap", MAP,
        "map.scale == 0 ? HUGE_VALF :", "map.scale == 0 ? FLT_MAX :", "kernels",
    ),
    mutant(
        "softcap: the largest number stands in for infinity under a tiny scale", ROWS,
        "if (f.limit == std::numeric_limits<float>::max()) return", "if (map.scale > 1e30f) return", BOTH,
    ),
    mutant("softcap: no derivative at the target", ROWS, "slope *= (1 - t) * (1 + t);", "slope *= 1 + 0 * t;", BOTH),
    Mutant(
        "temperature: before the softcap",
        (
            Edit(
                MAP, "const double inward = 2 * std::fabs(static_cast<double>(map.scale)) / map.softcap;",
                "const double inward =\n"
                "      2 * std::fabs(static_cast<double>(map.scale)) / map.softcap / map.temperature;",
            ),
            Edit(MAP, "static_cast<double>(map.softcap) / map.temperature, map.scale);",
                 "static_cast<double>(map.softcap), map.scale);"),
            Edit(ROWS, "static_cast<double>(z) * map.temperature / map.softcap;",
                 "static_cast<double>(z) / map.softcap;"),
        ),
        ("logits", "linear"),
    ),
    mutant("temperature: not in the gradient", MAP, "if (!f.capped) return f;",
           "if (!f.capped) return f;\n  f.slope = map.scale;", BOTH),
    mutant(
        "label smoothing: the gradient without class weights", ROW,
        "for_columns<kSmoothing == 2>(z, weight,", "for_columns<false>(z, weight,", BOTH,
    ),
    mutant(
        "label smoothing: the target's gradient without its class weight", ROWS,
        "log_p + g.entropy_value, class_weight);", "log_p + g.entropy_value, 1 + 0 * class_weight);", BOTH,
    ),
    mutant(
        "label smoothing: the loss without class weights", ROWS,
        "? weighted_sum<true>(logits, class_weight, count)", "? weighted_sum<false>(logits, class_weight, count)",
        BOTH,
    ),
    mutant(
        "target: p - 1 with the rounding of p", GRADIENT,
        "own = g.onehot * p_minus_1 + (static_cast<double>(g.probability) - g.onehot) * p;",
        "own = g.probability * static_cast<float>(p) - g.onehot + 0 * p_minus_1;", "kernels",
    ),
    mutant(
        "exp: a coefficient off by 1e-5", EXP, "T(0x1.fffffcp-2)", "T(0x1.fffdfcp-2)", f"{BOTH} kernels",
    ),
    mutant(
        "last column: not in the sum of exponentials", ROW,
        "add(hn::LoadNOr(hn::Set(d, kMinusInfinity), d, z + i, rest), s, t);",
        "add(hn::LoadNOr(hn::Set(d, kMinusInfinity), d, z + i, rest - (count > 1)), s, t);", BOTH,
    ),
    mutant(
        "last column: not in the sum of class weights times logits", ROW,
        "    if constexpr (kWeights) c = hn::LoadN(d, weight + i, rest);",
        "    if constexpr (kWeights) c = hn::LoadN(d, weight + i, rest - 1);", BOTH,
    ),
    mutant(
        "label smoothing: the gradient from exponentials without class weights", ROW,
        "for_columns<kSmoothing == 2>(e, weight,", "for_columns<false>(e, weight,", "logits",
    ),
    mutant(
        "temperature: not in the gradient from exponentials", ROWS,
        "g.probability * slope * std::exp(shift)", "g.probability * map.scale * std::exp(shift)", "logits",
    ),
    mutant(
        "sum_p_squared: of a stale maximum", SUMS,
        "by.factor * by.factor * squares", "by.factor * squares", "kernels",
    ),
    mutant(
        "mass_above: of a stale maximum", SUMS,
        "mass = m.first.factor * mass +", "mass = mass +", "kernels",
    ),
    mutant(
        "mass_above: the target counts where its logit was made otherwise", ROWS,
        "const int64_t next = wants.target + 1;", "const int64_t next = wants.target;", "kernels",
    ),
    mutant(
        "mass_above: what equals the target's logit is above it", ROW,
        "hn::IfThenElseZero(hn::Gt(z_at, bound), y)", "hn::IfThenElseZero(hn::Ge(z_at, bound), y)", "statistics",
    ),
    mutant(
        "rank: the target counts where its logit was made otherwise", ROWS,
        "    if (here && z[wants.target] > wants.target_logit) --rare.above;\n", "    (void)here;\n", "kernels",
    ),
    mutant(
        "bf16: cut off, not rounded", ROWS,
        "const V rounded = hn::Add(bits, hn::Add(lowest, hn::Set(du, 0x7fffu)));",
        "const V rounded = hn::Add(bits, hn::Xor(lowest, lowest));", "kernels",
    ),
    mutant(
        "bf16: a NaN rounds to inf", ROWS,
        "hn::IfThenElse(nan, hn::Or(bits, hn::Set(du, 0x400000u)), rounded)",
        "hn::IfThenElse(nan, hn::Set(du, 0x7f800000u), rounded)", "kernels",
    ),
    mutant(
        "32-bit offset: of packed elements", PACK,
        "           (r * source.row_stride + column * source.column_stride) * size_of(source.dtype);",
        "           static_cast<int32_t>((r * source.row_stride + column * source.column_stride) *\n"
        "                                size_of(source.dtype));",
        "offsets",
    ),
    mutant(
        "packing: rows beyond the last are not zero", PACK,
        "        std::memset(buffer[r], 0, padded * reader.engine.element);",
        "        if (rows == 0) std::memset(buffer[r], 0, padded * reader.engine.element);",
        "gemm linear",
    ),
    mutant(
        "packing: the depth beyond the last column is not zero", PACK,
        "    std::memset(static_cast<char*>(buffer) + count * engine.element, 0,\n"
        "                (padded - count) * engine.element);",
        "    if (count == 0) std::memset(buffer, 0, padded * engine.element);",
        "gemm linear",
    ),
    mutant(
        "last k: of a product", GEMM, "const int64_t lanes = p.k * engine.element / lane_bytes;",
        "const int64_t lanes = p.k * engine.element / lane_bytes - 1;", "linear",
    ),
    mutant(
        "last k: at the end of a depth block", GEMM,
        "const int64_t steps = std::min(lane_depth, lanes - k);",
        "const int64_t steps = std::min(lane_depth, lanes - k) - (k > 0);", "linear",
    ),
    mutant(
        "few rows: the last lanes left out", GEMM, "for (int64_t k = 0; k < lanes; k += step) {",
        "for (int64_t k = 0; k + step <= lanes; k += step) {", "gemm",
    ),
    mutant(
        "few rows: the second lanes overwrite", GEMM, "p.c + i * engine.a_rows * p.c_stride + j, p.c_stride, k > 0);",
        "p.c + i * engine.a_rows * p.c_stride + j, p.c_stride, false);", "gemm",
    ),
    mutant(
        "few rows: of the weight's first rows", GEMM, "reader.at(row0 + j + r, 0)", "reader.at(j + r, 0)", "gemm",
    ),
    mutant(
        "few rows: half a lane behind the last k", GEMM, "rows % engine.b_columns != 0 || columns != p.k) {",
        "rows % engine.b_columns != 0) {", "gemm",
    ),
    mutant(
        "few rows: rows picked one by one", GEMM, "!aligned || source.row_index != nullptr ||", "!aligned ||", "gemm",
    ),
    mutant(
        "chain: a product's second block overwrites", GEMM, "k > 0 && p.onto != Onto::sum ? Onto::chain : p.onto;",
        "p.onto;", "linear",
    ),
    mutant(
        "sum: a product continues the chains of those before", GEMM, "multiply_tile(engine.arithmetic, a, b_block, steps, c, p.c_stride, onto);",
        "multiply_tile(engine.arithmetic, a, b_block, steps, c, p.c_stride, onto == Onto::sum ? Onto::chain : onto);",
        "gemm",
    ),
    mutant(
        "NaN x 0: what an output held before is multiplied by 0", GEMM,
        "      const auto old = overwrite ? hn::Zero(df) : hn::LoadU(df, to + j);",
        "      const auto old =\n"
        "          hn::Mul(hn::LoadU(df, to + j), hn::Set(df, overwrite ? 0.0f : 1.0f));",
        "determinism",
    ),
    mutant(
        "AMX, last k: of a product", AMX, "const int64_t steps = std::min(depth, p.k - k) / 32;",
        "const int64_t steps = std::min(depth, p.k - k) / 32 - (k + depth >= p.k);", "linear-bf16", "all",
    ),
    mutant(
        "AMX, chain: a product's second block overwrites", AMX, "p.onto != Onto::nothing || k > 0);",
        "p.onto != Onto::nothing);", "linear-bf16", "all",
    ),
    mutant(
        "AMX, last row: of one of the four tiles, in another's place", AMX, "_tile_stored(3, c + 16 * c_stride + 16, stride);",
        "_tile_stored(3, c + 16 * c_stride, stride);", "linear-bf16", "all",
    ),
]  # fmt: skip
