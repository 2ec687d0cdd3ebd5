# SPDX-License-Identifier: Apache-2.0
"""Mutants of the logits' own product for sm_80 (linear/portable/fused_logits.cu), as CudaMutant's
arguments."""

_FILE = "linear/portable/fused_logits.cu"

SM80 = [
    (f"sm80, {name}", _FILE, marked, new, "sm80")
    for name, marked, new in (
        ("last column: not in the sums", "column == one || @{column >= end}@", "column >= end - 1"),
        ("target: counted in the sums twice", "if (@{column == one}@ ||", "false"),
        ("operands: read beyond the last chunk of D", "there && @{left_ > 0}@ ?", "true"),
        ("operands: D has no end", "if (@{left_ <= 0}@) there_ = 0;", "false"),
        (
            "operands: of the same tile for ever",
            "if (@{s == 0 && step + stages == steps}@)",
            "false",
        ),
        (
            "operands: rows of the first tile",
            "input_ += (@{first_row + row}@) * a_.input_pitch",
            "row",
        ),
        (
            "tiles: the last group has all rows",
            "height = @{min(int64_t{group}, rows - of_group * group)}@",
            "int64_t{group}",
        ),
        (
            "rows: the last one does not count",
            "const int row = first_row + threadIdx.x, bytes = @{row < valid}@ ?",
            "row + 1 < valid",
        ),
        (
            "maximum: of a lane",
            "fmaxf(sums.maximum, @{__shfl_xor_sync(whole_warp, sums.maximum, lanes)}@)",
            "sums.maximum",
        ),
        (
            "sum: of three lanes",
            "*x += @{__shfl_xor_sync(whole_warp, *x, lanes)}@;",
            "*x * (lanes == 1)",
        ),
        ("sum: the warps' maxima left out", "all.sum = fmaf(own.sum, @{lift}@, all.sum);", "1.0f"),
        (
            "sum: exponentials of the last warp left out",
            "n < @{warps_across}@; ++n) {\n      const RowSums",
            "warps_across - 1",
        ),
        (
            "entropy: the warps' distance left out",
            "moved = fmaf(@{fmaxf(distance, least_exponent)}@,",
            "0.0f",
        ),
        (
            "squares: moved as the sum is",
            "all.squared = fmaf(own.squared, @{lift * lift}@,",
            "lift",
        ),
        ("mass: not moved", "all.mass = fmaf(own.mass, @{lift}@, all.mass);", "1.0f"),
        (
            "above: ties count",
            "if (@{z > rows.anchor[in_tile + 8 * r]}@) {",
            "z >= rows.anchor[in_tile + 8 * r]",
        ),
        (
            "argmax: the highest of equals",
            "sums->argmax = @{min(sums->argmax, column + offset(n))}@;",
            "(sums->argmax == INT32_MAX ? column + offset(n) : max(sums->argmax, column + offset(n)))",
        ),
        ("argmax: of any warp", "if (@{own.maximum == all.maximum}@) all.argmax", "true"),
        (
            "weighted sum: without class weights",
            "present(weight) ? @{of_column(weight, a.call.in.start(), n)}@",
            "1.0f",
        ),
        (
            "weighted sum: the target's column too",
            "is_other = offset(n) < left && @{offset(n) != target(r)}@;",
            "true",
        ),
        ("bias: left out", "map_raw(map, @{logits.at(r, n) + bias[n]}@);", "logits.at(r, n)"),
        (
            "map: of the tile's first row",
            "a.chunk.first + @{row(r)}@);\n#pragma unroll",
            "first_row",
        ),
        (
            "E: relative to the warp's maximum",
            "(z - anchor) * log2e : y * @{lift}@;",
            "(lift * 0 + 1)",
        ),
        ("E: without the softcap's slope", "e[k] *= @{cap_slope(map, z)}@;", "1.0f"),
        (
            "E: codes relative to the maximum",
            "e[k] = kCodes ? @{(z - anchor) * log2e}@",
            "x * log2e",
        ),
        ("E: rows of no token not cleared", "n < @{(a.end - valid) * eighths}@;", "int64_t{0}"),
        (
            "top-k: a column for another",
            "logits.at(r, n + 1), @{logits.at(r, n + 2)}@,",
            "logits.at(r, n)",
        ),
        (
            "top-k: sums of the first block",
            "(@{a.first + tile_column}@) / fused_columns",
            "int64_t{tile_column}",
        ),
        (
            "top-k: the target of the first block",
            "- (@{static_cast<int>(a.first)}@ + column);",
            "0",
        ),
        ("top-k: the last columns left out", "if (@{offset(n) + k < left}@) to[k]", "k < 0"),
        ("top-k: rows of the chunk's start", "(@{row(r) - a.row}@) * a.pitch", "in_tile + 8 * r"),
    )
]
