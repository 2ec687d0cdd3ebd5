# SPDX-License-Identifier: Apache-2.0
"""Mutants of src/cuda. All are compiled into one program, each behind a switch: what stands between
@{ and }@ in a piece of text that is in its file once, and what replaces it, of the same type."""

from __future__ import annotations

from dataclasses import dataclass

_ROWS, _LINEAR = ("softmax", "forward", "backward"), ("linear",)


def _tests(ops: tuple[str, ...], names: tuple[str, ...]) -> str:
    return ":".join(f"*/{name}/cuda_{op}*" for name in names for op in ops)


_TABLE = (
    "Conformance.EveryShape", "Edges.*", "Shards.*", "Invariants.*", "NonFinite.*",
)  # fmt: skip
_PAIRS = "*/Conformance.EveryOptionAloneAndInPairs/cuda_{}*_bf16"

# googletest filters, by the group that a mutant names. "portable": with the kernels that every
# architecture runs.
TESTS: dict[str, str] = {
    "rows": _tests(_ROWS, (*_TABLE, "CudaRows.AreRight*")) + ":" + ":".join(_PAIRS.format(op) for op in _ROWS),
    "linear": _tests(_LINEAR, _TABLE) + ":" + _PAIRS.format("linear"),
    "portable": _tests(_LINEAR, (*_TABLE, "Determinism.RunTwice")) + ":" + _PAIRS.format("linear"),
    "tokens": _tests(("forward", "linear_forward"), _TABLE)
    + ":*/Conformance.EveryOptionAloneAndInPairs/cuda_forward*_f32",
    "hopper": "*/Conformance.EveryShape/cuda_linear*f16:*/Invariants.*/cuda_linear*f16:"
    "*/WorkspaceSizes.AnySize*/cuda_linear*f16:*/Cuda.EveryPlan*/cuda_linear*_bf16",
    "offsets": "*/Offsets.*:*/CudaOffsets.*:*/CudaHeads.*",
    "workspace": "*/WorkspaceSizes.*:" + _tests(_LINEAR, _TABLE),
}


@dataclass(frozen=True)
class CudaMutant:
    name: str
    file: str  # in src/cuda
    marked: str
    new: str
    tests: str  # of TESTS


_M = CudaMutant
_WAIT = r"""@{asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [%0], %1;\n"
      "@done bra.uni over;\n"
      "bra.uni again;\n"
      "over:\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");}@"""

MUTANTS = [
    # Tokens
    _M("tokens, compaction: the block's offset left out", "tokens.cu",
       "int k = @{t.block_valid[blockIdx.x]}@ + __popc", "0 * t.block_valid[blockIdx.x]", "tokens"),
    _M("tokens, compaction: the warp's own place alone", "tokens.cu",
       "for (int w = 0; w < warp; ++w) @{k += warp_valid[w];}@", "", "tokens"),
    _M("tokens, normalizer: N", "tokens.cu",
       "s.normalizer = @{normalizer_of(in, counted)}@;",
       "normalizer_of(in, static_cast<double>(t.total))", "tokens"),
    _M("tokens, normalizer: rows with a bad target do not count", "tokens.cu",
       "} else if (kind == TokenKind::outside && @{!present(in.vocab_weight)}@) {", "false", "tokens"),
    _M("tokens, smoothing: the sum of class weights is V", "tokens.cu",
       "weight_sum = @{block_sum(own)}@;", "0 * block_sum(own) + static_cast<double>(in.whole())",
       "tokens"),
    _M("tokens, target outside: no fault", "tokens.cu",
       "if (@{outside > 0 && present(in.fault)}@)", "false", "tokens"),
    _M("tokens, target outside: fault not sticky", "tokens.cu",
       "@{atomicOr(address<int>(in.fault), 1);}@", "*address<int>(in.fault) = 1;", "tokens"),
    _M("tokens, target outside: loss 0", "tokens.cu",
       "const float value = @{kind == TokenKind::outside}@ ? nan_value()", "false", "tokens"),
    _M("tokens, target outside: reduced loss without NaN", "tokens.cu",
       "if (@{s.outside > 0}@) sum = nan", "false", "tokens"),
    _M("tokens, target: compared in 32 bits", "tokens.cuh",
       "if (@{target >= 0 && target < in.whole()}@) return TokenKind::counts;",
       "static_cast<int>(target) >= 0 && static_cast<int>(target) < in.whole()", "tokens"),
    _M("tokens, ignored: gradient rows not cleared", "tokens.cu",
       "if (@{kind_of_target(in, load_int(in.target, i)) == TokenKind::counts}@) return;\n"
       "  for (int64_t j", "true", "rows"),
    _M("tokens, ignored: statistics left as they were", "tokens.cu",
       "@{put_statistics(out.statistics, i, s, 0, -1);}@", "", "tokens"),
    _M("tokens, mean: the last token left out", "tokens.cu",
       "for (int k = threadIdx.x; k < @{valid}@; k += threads) sum += losses[k];",
       "valid - (valid > 1)", "tokens"),
    _M("tokens, empty mean: 0 where NaN is asked for", "tokens.cu",
       "if (s.empty_mean) sum = @{in.options.empty_mean == EmptyMean::zero}@ ? 0", "true", "tokens"),
    _M("tokens, token weight: 1", "tokens.cu",
       "t.token_weight[k] = @{a}@;", "a * 0 + 1", "tokens"),
    # Linear ops
    _M("linear, last column: not in the sums", "block_exponentials.cu",
       "sum += @{y}@;", "(j + i == tile.count - 1 && tile.count > 1 ? 0.0f : y)", "portable"),
    _M("linear, maximum: of the first lane alone", "block_exponentials.cu",
       "maximum = @{warp_max(maximum)}@;", "__shfl_sync(whole_warp, maximum, 0)", "portable"),
    _M("linear, target: counted in the sums twice", "block_exponentials.cu",
       "if (@{j + i == target}@) z[g][i] = -infinity();", "false", "portable"),
    _M("linear, E: rows of no token not cleared", "block_exponentials.cu",
       "if (@{stores && j < tile.count}@)\n", "false", "portable"),
    _M("linear, E: relative to the segment's maximum", "block_exponentials.cu",
       "e[i] = y * @{lift}@ *", "(lift * 0 + 1)", "portable"),
    _M("linear, E: without the softcap's slope", "block_exponentials.cu",
       "(kPlain ? 1.0f : @{cap_slope(call.map, z[g][i])}@);", "1.0f", "portable"),
    _M("linear, argmax: the highest of equals", "block_exponentials.cu",
       "argmax = @{min(argmax, j + i)}@;", "(argmax == INT32_MAX ? j + i : max(argmax, j + i))",
       "portable"),
    _M("linear, weighted sum: without class weights", "block_exponentials.cu",
       "weighted = fmaf(@{c}@, z[g][i], weighted);", "1.0f", "portable"),
    _M("linear, row: the last segment left out", "rows.cu",
       "for (int64_t b = lane; b < @{partials.segments}@; b += 32) {\n"
       "    const float own = partials.maximum[base + b], s",
       "partials.segments - (partials.segments > 1)", "linear"),
    _M("linear, row: segments not rescaled to the common maximum", "rows.cu",
       "own == -infinity() ? 1.0f : @{exp_nonpositive(own - maximum)}@;", "1.0f", "linear"),
    _M("linear, row: the target's own term left out", "rows.cu",
       "const float total = @{sum + at_target}@;", "sum", "linear"),
    _M("linear, entropy: the target's own term left out", "rows.cu",
       "if (@{here && at_target > 0}@) shifted", "false", "linear"),
    _M("linear, far rows: never made again", "rows.cu",
       "const bool far = @{state.reference - z > most_nats}@;", "false", "linear"),
    _M("linear, steep rows: never made again", "rows.cu",
       "const bool steep = @{onehot > most_onehot * probability}@;", "false", "linear"),
    _M("linear, rows made again: only the first", "rows.cu",
       "for (int n = 0; n < @{count}@; ++n) {", "1", "linear"),
    _M("linear, rows made again: the last k left out", "rows.cu",
       "for (int64_t d = lane; d < @{call.weight.shape[1]}@; d += 32) {",
       "call.weight.shape[1] - (call.weight.shape[1] > 1)", "linear"),
    _M("linear, E: the target's column not written", "rows.cu",
       "if (@{j < 0 || j >= panel.columns || factors[row].again != 0}@) return;", "true", "linear"),
    _M("linear, dz: the target is not subtracted", "block_gradients.cu",
       "is_target ? @{target_draw(g.probability, g.onehot, p, -expm1f(log_p))}@", "g.probability * p",
       "portable"),
    _M("linear, dz: smoothing left out", "block_gradients.cu",
       "if (@{g.smoothing != 0 && j + i < tile.count}@) {", "false", "portable"),
    _M("linear, dz: rows of no token not cleared", "block_gradients.cu",
       "const RowGradient g = @{valid}@ ? gradients[tile.row]", "true", "portable"),
    _M("linear, target's dot: the last k left out", "gather.cu",
       "for (int64_t d = lane; d < @{call.weight.shape[1]}@; d += 32) {",
       "call.weight.shape[1] - (call.weight.shape[1] > 1)", "linear"),
    _M("linear, gather: rows not compacted", "gather.cu",
       "copy_row<T>(input, @{chunk.tokens.row[chunk.first + k]}@, pitch, to);",
       "static_cast<int>(chunk.first + k)", "linear"),
    _M("linear, gather: no zeros behind the row", "gather.cu",
       "to[j] = @{j < count}@ ? source", "true", "linear"),
    _M("linear, grad_input: the last column left out", "finish.cu",
       "for (int64_t d = threadIdx.x; d < @{out.shape[1]}@; d += 256) {\n    // A row",
       "out.shape[1] - (out.shape[1] > 1)", "linear"),
    _M("linear, grad_input: smoothing's own term left out", "finish.cu",
       "if (@{s != 0}@) x = fmaf(-s, class_row[d], x);", "false", "linear"),
    _M("linear, grad_input: in the compacted order", "finish.cu",
       "const int64_t i = @{chunk.tokens.row[chunk.first + row]}@;",
       "static_cast<int>(chunk.first + row)", "linear"),
    _M("linear, grad_weight: the common factor left out", "finish.cu",
       "const float x = any ? @{scale}@ * sums[j * pitch + d] : 0.0f;", "1.0f", "linear"),
    _M("linear, grad_weight: overwritten where it accumulates", "finish.cu",
       "*to = from_f32<T>(@{accumulate}@ ? to_f32(*to) + x : x);", "false", "linear"),
    _M("linear, grad_bias: one row in four", "finish.cu",
       "for (int64_t row = slab * bias_slab_rows + @{part}@; row < end; row += 4) {", "0", "linear"),
    _M("linear, chunks: grad_weight of the last one alone", "linear_run.h",
       "return multiply(&p, one(), @{!first_chunk_}@);", "false", "workspace"),
    _M("linear, chunks: accumulated from the start", "linear_run.h",
       "multiply(&p, &m_.tokens.scalars->gradient_scale, @{call_.accumulate || !first_chunk_}@);",
       "true", "linear"),
    _M("linear, 32-bit offset of a row of weight", "linear_run.h",
       "return {start + @{column * w.stride[0] * size_of(w.dtype)}@, w.stride[0]",
       "static_cast<int64_t>(static_cast<int32_t>(column * w.stride[0] * size_of(w.dtype)))", "offsets"),
    # Hopper's own kernel
    _M("hopper, last columns: not masked", "sm90/forward.cuh",
       "if (@{left < tile_columns}@) {", "false", "hopper"),
    _M("hopper, maximum: of half of a row's lanes", "sm90/forward.cuh",
       "@{maximum = fmaxf(maximum, __shfl_xor_sync(whole_warp, maximum, 2));}@", "", "hopper"),
    _M("hopper, sum: of half of a row's lanes", "sm90/forward.cuh",
       "@{sum += __shfl_xor_sync(whole_warp, sum, 2);}@", "", "hopper"),
    _M("hopper, sum: every second column left out", "sm90/forward.cuh",
       "s0 += @{e0}@;", "0.0f", "hopper"),
    _M("hopper, target: counted in the sums twice", "sm90/forward.cuh",
       "if (@{own == 8 * i}@) d[4 * i + 2 * h] = -infinity();", "false", "hopper"),
    _M("hopper, partial sums: in the place of the row above", "sm90/forward.cuh",
       "const int64_t at = @{row}@ * a.partials.segments + column_tile;", "max(row - 1, 0)",
       "hopper"),
    _M("hopper, E: relative to the tile's maximum", "sm90/forward.cuh",
       "x = kOptions && caps ? capped(a.options, x, e0) * lift : e0 * @{lift}@;", "1.0f", "hopper"),
    _M("hopper, dz: half of the exponent", "sm90/forward.cuh",
       "return fminf(@{fmaf(x - start.anchor, log2e, -start.log2_sum)}@, 0.0f);", "0.5f * (x - start.anchor)", "hopper"),
    _M("hopper, dz: the target is not subtracted", "sm90/forward.cuh",
       "if (@{own == 8 * i}@) d[4 * i + 2 * h] = x;", "false", "hopper"),
    _M("hopper, stores: neighbours not traded", "sm90/forward.cuh",
       "odd ? @{uint2{other, own}}@ : uint2{own, other}", "uint2{own, other}", "hopper"),
    _M("hopper, valid tokens: one too few", "sm90/forward.cuh",
       "valid = @{valid_rows(a.chunk)}@;", "max(valid_rows(a.chunk) - 1, 0)", "hopper"),
    _M("hopper, copies: one row of input too far", "sm90/tma.cuh",
       '"r"(shared_address(barrier)), "r"(column), "r"(@{row}@)\n      : "memory");', "row + 1",
       "hopper"),
    _M("hopper, copies: one row of the weight too far", "sm90/tma.cuh",
       '"r"(@{row}@), "h"(mask)', "row + 1", "hopper"),
    _M("hopper, barriers: nobody waits", "sm90/pipeline.cuh", _WAIT, "", "hopper"),
    _M("hopper, options: bias left out", "sm90/options.cuh",
       "if (again(@{o.bias != nullptr}@)) {", "false", "linear"),
    _M("hopper, options: large logits by the polynomial", "sm90/options.cuh",
       "d[i] = @{fabsf(d[i]) > small}@ ? map_large", "false", "linear"),
    _M("hopper, options: E without the softcap's slope", "sm90/options.cuh",
       "return e == 0 ? 0.0f : e * @{cap_slope(o.map, z)}@;", "1.0f", "linear"),
    _M("hopper, options: dz without the softcap's slope", "sm90/options.cuh",
       "return exists ? draw * @{cap_slope(o.map, z)}@ : 0.0f;", "1.0f", "linear"),
    _M("hopper, options: weighted sum without class weights", "sm90/options.cuh",
       "if (c != 0) sum = fmaf(@{c}@, z, sum);", "1.0f", "linear"),
    _M("hopper, options: weighted sum of the target twice", "sm90/options.cuh",
       "if (@{j >= left || j == target}@) return;", "j >= left", "linear"),
    _M("hopper, options: argmax of one lane", "sm90/options.cuh",
       "@{lowest = min(lowest, __shfl_xor_sync(whole_warp, lowest, 1));}@", "", "linear"),
    _M("hopper, options: entropy's exponent", "sm90/options.cuh",
       "sum = fmaf(exp2_fast(@{x * log2e}@), fmaxf", "x", "linear"),
    _M("hopper, options: dz without the smoothing", "sm90/options.cuh",
       "if (@{o.smoothing}@ && exists) draw", "false", "linear"),
    _M("hopper, options: dz without the entropy's term", "sm90/options.cuh",
       "if (@{o.entropy}@) {", "false", "linear"),
    _M("hopper, options: the target's dz without the smoothing", "rows.cu",
       "if (@{g.smoothing != 0 && target >= 0}@) {", "false", "linear"),
    _M("hopper, options: bias of two columns", "gather.cu",
       "if (bias != nullptr) bias[j] = @{exists ? load(call.bias, j) : 0.0f}@;", "load(call.bias, j % 2)",
       "linear"),
    _M("hopper, smoothing's line: left out", "sm90/product.cuh",
       "if (@{sink->line != 0}@ && j < left) x", "false", "linear"),
    _M("hopper, smoothing's line: of grad_weight without class weights", "sm90/product.cuh",
       "sink.line = @{a.class_weight != nullptr}@ ? a", "false", "linear"),
    _M("hopper, serves: any address", "sm90/forward.cu",
       "rows &&\n         @{aligned}@;", "true", "linear"),
    # Hopper's gradients' products
    _M("hopper, products: the last row left out", "sm90/product.cuh",
       "if (@{row >= rows}@) return sink;", "row + 1 >= rows", "hopper"),
    _M("hopper, grad_input: without the row's factor", "sm90/product.cuh",
       "sink.factor = @{a.factors[a.first_row + row].scale}@;", "1.0f", "hopper"),
    _M("hopper, grad_input: in the compacted order", "sm90/product.cuh",
       "i = @{a.chunk.tokens.row[a.chunk.first + a.first_row + row]}@;",
       "static_cast<int>(a.chunk.first + a.first_row + row)", "hopper"),
    _M("hopper, products: the common factor left out", "sm90/product.cuh",
       "return @{scale}@ * (sink.factor", "1.0f", "hopper"),
    _M("hopper, products: the last column left out", "sm90/product.cuh",
       "if (@{j + 1 < left}@) write_one(to + j + 1, x.y, a.add);", "j + 2 < left", "hopper"),
    _M("hopper, products: overwritten where they accumulate", "sm90/product.cuh",
       "*to = @{add}@ ? *to + x : x;", "false", "workspace"),
    _M("hopper, products: on top of the last tile's", "sm90/tile.cuh",
       "const int add = @{k > 0 || step > 0}@;", "true", "hopper"),
    _M("hopper, slices: the last one left out", "sm90/product.cuh",
       "for (int slice = 0; slice < @{cut.slices}@; ++slice) {", "cut.slices - 1", "hopper"),
    _M("hopper, slices: each from the start", "sm90/cut.h",
       "return item < whole() ? 0 : @{depth * ((item - whole()) / tail) / slices}@;", "0", "hopper"),
    # Given logits
    _M("rows, last column: not in lse", "row_state.cuh",
       "e[h] = exp_of_row(@{raw[h] - shift}@);",
       "column + h == n - 1 && n > 1 ? -infinity() : raw[h] - shift", "rows"),
    _M("rows, maximum: of the first warp alone", "row_state.cuh",
       "all.maximum = warp_max(@{leads}@ ? warps->maximum[lane]", "lane == 0", "rows"),
    _M("rows, tiles: not rescaled to the common maximum", "row_state.cuh",
       "const float factor = @{exp_nonpositive(by)}@;", "1.0f", "rows"),
    _M("rows, cluster: the last block's columns left out", "logit_rows.cuh",
       "return combine_lanes(@{lane < cluster}@ ? exchange->table[lane]",
       "lane < cluster - 1", "rows"),
    _M("rows, tiles: the last one alone", "logit_rows.cuh",
       "partial = @{index == 0}@ ? next : combine_two", "true", "rows"),
    _M("rows, target: the gradient of p alone", "logit_rows.cuh",
       "if (@{t == writer}@) store", "false", "rows"),
    _M("rows, target: read after it was written", "logit_rows.cuh",
       "@{target_logit = map_raw(a.map, to_f32(*address<const T>(call.logits, i, target)));}@", "",
       "rows"),
    _M("rows, gradient: without the softcap's slope", "logit_rows.cuh",
       "draw *= @{cap_slope(map, z)}@;", "1.0f", "rows"),
    _M("rows, gradient: smoothing without class weights", "logit_rows.cuh",
       "draw -= @{present(class_weight)}@ ? smoothing", "false", "rows"),
    _M("rows, output: the last columns left out", "row_tile.cuh",
       "if (@{t < rest}@) {", "false", "rows"),
    _M("rows, output: the last column of strided rows left out", "row_tile.cuh",
       "for (int j = t; j < @{tile.n}@; j += threads) {\n      store", "tile.n - (tile.n > 1)", "rows"),
    _M("rows, tile: its first columns not read", "row_tile.cuh",
       "if (@{t < head}@) to[t] = from[t];", "false", "rows"),
    _M("rows, 32-bit offset", "numbers.cuh",
       "v.byte_offset) + @{i * v.stride[0]}@ +", "static_cast<int32_t>(i * v.stride[0])", "offsets"),
    _M("probabilities, floor left out", "probability_rows.cuh",
       "sum -= weight * logf(static_cast<float>(load(probabilities, i, j) + @{floor}@));", "0.0",
       "rows"),
    _M("probabilities, gradient: smoothing without the target's share", "probability_rows.cuh",
       "return j == target ? @{onehot + q}@ : q;", "onehot", "rows"),
]
