# SPDX-License-Identifier: Apache-2.0
"""Mutants of src/webgpu: of its shaders and its dispatcher."""

from __future__ import annotations

from mutants.mutant import Edit, Mutant
from mutants.webgpu_chosen import CHOSEN
from mutants.webgpu_divergences import DIVERGENCES
from mutants.webgpu_plain import PLAIN


def _shader(name: str) -> str:
    return f"src/webgpu/shaders/{name}.wgsl"


_SLOTS, _COMBINE, _ROW = map(_shader, ("slots", "combine", "row"))
_PRODUCT, _TOKENS, _SUM = map(_shader, ("product", "tokens", "sum"))
_GATHER, _SCATTER = map(_shader, ("gather", "scatter"))
_KEEP, _KEPT = _shader("keep"), "src/webgpu/kept.cpp"
_RANK, _TEMPERATURE = _shader("rank"), _shader("temperature")
_FOLD, _CHUNK, _RUN = _shader("fold"), "src/webgpu/chunk.cpp", "src/webgpu/run.cpp"
_NUMBERS, _TARGET, _LOGIT, _LOSS, _OPERANDS = (
    _shader(f"common/{name}") for name in ("numbers", "target", "logit", "loss", "product")
)

# Groups of googletest filters of webgpu_suite, by the name that a mutant gives.
TESTS: dict[str, str] = {
    "rows": "*/Conformance.Every*/webgpu_forward*_f32:*/Conformance.Every*/webgpu_backward_f32"
    ":*/NonFinite.*_f32:*/Invariants.*_f32",
    "linear": "*/Conformance.Every*/webgpu_linear_*_f32:*/Edges.*/webgpu_linear*_f32",
    "dtypes": "*/Conformance.Every*/webgpu_*forward_*16"
    ":*/Conformance.Every*/webgpu_forward_backward_f32",
    "device": "WebGpu.*",
    "tiles": "WebGpu.LargeTilesAndSlices",
    "sums": "WebGpu.SumsOfManyTokens",
    "blocks": "WebGpu.ManySmall*",
    "plain": "WebGpu.*Row*:*/Edges.*/webgpu_forward_backward_f32",
}


def _mutant(name: str, file: str, old: str, new: str, tests: str) -> Mutant:
    return Mutant(name, (Edit(file, old, new),), tuple(tests.split()))


def _each(name: str, shaders: str, old: str, new: str, tests: str) -> list[Mutant]:
    """A mutant for each of several shaders that have the same text."""
    return [
        _mutant(f"{name}, in {shader}", _shader(shader), old, new, tests)
        for shader in shaders.split()
    ]


MUTANTS: tuple[Mutant, ...] = (
    _mutant(
        "the last column is dropped",
        _SLOTS,
        "    if (local >= columns) {\n      continue;\n    }\n    let column",
        "    if (local + 1u >= columns) {\n      continue;\n    }\n    let column",
        "rows",
    ),
    _mutant(
        "smoothing without its pass",
        _LOSS,
        "  if (p.smoothing > 0.0) {\n    let spread",
        "  if (p.smoothing > 2.0) {\n    let spread",
        "rows",
    ),
    _mutant(
        "a stale maximum",
        _COMBINE,
        "by = max(slot.m - m, -200.0)",
        "by = max(partials[first].m - m, -200.0)",
        "linear rows",
    ),
    _mutant(
        "the last column of a short row is dropped",
        _ROW,
        "    if (column < columns) {\n      let z",
        "    if (column + 1u < columns) {\n      let z",
        "rows",
    ),
    _mutant(
        "the last short row is not made",
        _ROW,
        "number < p.rows;",
        "number + 1u < p.rows;",
        "rows",
    ),
    _mutant(
        "the short rows of a workgroup share a maximum",
        _ROW,
        "most = max(most, largest[first + k]);",
        "most = max(most, largest[k]);",
        "rows",
    ),
    _mutant(
        "a leader forgets its last number",
        _ROW,
        "k < row_threads; k += leaders) {\n      all",
        "k + leaders < row_threads; k += leaders) {\n      all",
        "rows",
    ),
    _mutant(
        "a missing barrier before the leaders",
        _ROW,
        "  sums[first + lane] = own;\n  workgroupBarrier();",
        "  sums[first + lane] = own;",
        "rows",
    ),
    _mutant(
        "too few threads for a row",
        "src/webgpu/chunk.cpp",
        "window.columns <= 256 ? 4",
        "window.columns <= 512 ? 4",
        "rows",
    ),
    _mutant(
        "a missing barrier of the maximum",
        _SLOTS,
        "    workgroupBarrier();\n    if (thread < step) {\n      let other = tree_max",
        "    if (thread < step) {\n      let other = tree_max",
        "rows",
    ),
    _mutant(
        "a missing barrier of the product",
        _PRODUCT,
        "      workgroupBarrier();\n      if (step + 1u < steps) {",
        "      if (step + 1u < steps) {",
        "tiles",
    ),
    _mutant(
        "a missing barrier of the small product",
        _shader("product_small"),
        "      workgroupBarrier();\n      for (var k = 0u; k < 8u; k++) {",
        "      for (var k = 0u; k < 8u; k++) {",
        "linear",
    ),
    _mutant(
        "the next part of a tile is the last one again",
        _PRODUCT,
        "next_b = fetch_b(thread, first_column, begin + (step + 1u) * 16u, end);",
        "next_b = fetch_b(thread, first_column, begin + step * 16u, end);",
        "tiles",
    ),
    *_each(
        "a block of the depth overwrites those before",
        "product product_small",
        "    adds = true;",
        "",
        "blocks",
    ),
    _mutant(
        "the depth is one block",
        _OPERANDS,
        "max(depth / 4u, p.block_depth)",
        "max(depth, p.block_depth)",
        "blocks",
    ),
    _mutant(
        "grad_bias is one block",
        _SUM,
        "first += 16u) {\n    var part = 0.0;\n    for (var r = first; r < min(first + 16u",
        "first += 999u) {\n    var part = 0.0;\n    for (var r = first; r < min(first + 999u",
        "blocks",
    ),
    _mutant(
        "a slice begins where the first does",
        _PRODUCT,
        "let begin = group.z * p.slice_depth;",
        "let begin = 0u * p.slice_depth;",
        "tiles",
    ),
    _mutant(
        "a slice of a small product ends where the last does",
        _shader("product_small"),
        "let depth = min(depth_of(), begin + p.slice_depth);",
        "let depth = depth_of();",
        "tiles",
    ),
    _mutant(
        "the last slice is not added",
        _shader("slices"),
        "k < p.slices; k++",
        "k + 1u < p.slices; k++",
        "tiles",
    ),
    _mutant(
        "slices overwrite the windows before",
        _shader("slices"),
        "    sum += result[at];",
        "",
        "device",
    ),
    _mutant(
        "NaN is not told by its bits",
        _NUMBERS,
        "return (bitcast<u32>(x) & 0x7fffffffu) > infinity_bits;",
        "return x != x && x > 0.0;",
        "rows",
    ),
    _mutant(
        "the z-loss has no gradient",
        _LOSS,
        "w += 2.0 * p.z_loss",
        "w += 0.0 * p.z_loss",
        "rows",
    ),
    _mutant(
        "the softcap's slope is that of one",
        _LOGIT,
        "dz *= (1.0 - mapped.t) * (1.0 + mapped.t)",
        "dz *= (1.0 - mapped.t) * (1.0 - mapped.t)",
        "rows",
    ),
    _mutant(
        "a tiny probability times the entropy's factor first",
        _LOGIT,
        "s.entropy_factor * (probability * (log_p + s.entropy))",
        "s.entropy_factor * probability * (log_p + s.entropy)",
        "faint",
    ),
    _mutant(
        "halves of a tiny product vanish",
        _NUMBERS,
        "abs(whole) < 0x1p-60f &&",
        "abs(whole) < 0.0 &&",
        "faint",
    ),
    _mutant(
        "a tiny weight times a tiny gradient vanishes",
        _LOSS,
        "let ga = by(by(slope, upstream), s.token_weight);",
        "let ga = by(slope, upstream * s.token_weight);",
        "faint",
    ),
    _mutant(
        "grad_input in one block",
        _CHUNK,
        ".block_depth = 32};",
        ".block_depth = 1u << 30};",
        "blocks",
    ),
    _mutant(
        "the entropy's gradient forgets the entropy",
        _LOGIT,
        "(log_p + s.entropy)",
        "(log_p)",
        "rows",
    ),
    _mutant(
        "the target's column is the next one",
        _LOGIT,
        "  if (column == s.target_column) {\n    dz",
        "  if (column == s.target_column + 1u) {\n    dz",
        "rows",
    ),
    _mutant(
        "the hidden numbers start again after 16",
        _OPERANDS,
        "p.a_stride + column / 4u]",
        "p.a_stride + column / 4u % 4u]",
        "linear tiles",
    ),
    _mutant(
        "the bias is added twice",
        _OPERANDS,
        "v[k] += bias[column + k];",
        "v[k] += 2.0 * bias[column + k];",
        "linear tiles",
    ),
    _mutant(
        "a chunk overwrites grad_weight",
        "src/webgpu/chunk.cpp",
        "const bool adds = call_.accumulate || !chunk.is_first;",
        "const bool adds = call_.accumulate;",
        "linear",
    ),
    _mutant(
        "grad_input of the last window alone",
        "src/webgpu/chunk.cpp",
        ".adds = window.index > 0 ? 1u : 0u",
        ".adds = 0u",
        "device linear",
    ),
    _mutant(
        "an ignored token counts",
        _TARGET,
        "return Target(ignored, none);",
        "return Target(counts, none);",
        "rows",
    ),
    _mutant(
        "the high word of ignore_index is not looked at",
        _TARGET,
        "low == p.ignore_low && high == p.ignore_high",
        "low == p.ignore_low",
        "rows",
    ),
    _mutant(
        "the fault word is overwritten",
        _TOKENS,
        "    atomicOr(&fault[p.fault], 1u);\n  }\n}\n\nvar",
        "    atomicStore(&fault[p.fault], 0u);\n  }\n}\n\nvar",
        "rows edges",
    ),
    _mutant(
        "the mean is the sum",
        _SUM,
        "bits = bitcast<u32>(divided(sum, n, scalars.exponent));",
        "bits = bitcast<u32>(sum);",
        "rows",
    ),
    _mutant(
        "a sum of 255",
        _SUM,
        "  if (i < p.count) {\n    return values",
        "  if (i < p.count && i % 256u < 255u) {\n    return values",
        "linear rows",
    ),
    _mutant(
        "subnormal halves are zero",
        _GATHER,
        "f32(mantissa) * 5.9604644775390625e-8",
        "f32(mantissa) * 0.0",
        "dtypes halves",
    ),
    _mutant(
        "halves are cut, not rounded",
        _SCATTER,
        "(bits + half + ((bits >> drop) & 1u)) >> drop",
        "bits >> drop",
        "dtypes",
    ),
    _mutant(
        "a matrix with gaps is cast as one without",
        "src/webgpu/copies.cpp",
        "v.stride[1] == 1 && v.stride[0] == part.columns &&",
        "v.stride[1] == 1 &&",
        "dtypes halves",
    ),
    _mutant(
        "half of a matrix is cast",
        "src/webgpu/copies.cpp",
        '    const uint32_t groups = blocks(count, 512);\n    recorder_.cast("f16_to_f32"',
        '    const uint32_t groups = blocks(count, 1024);\n    recorder_.cast("f16_to_f32"',
        "dtypes halves",
    ),
    _mutant(
        "the neighbour of a half is cleared",
        _SCATTER,
        "atomicAnd(&view16[at / 2u], ~(0xffffu << shift));",
        "atomicAnd(&view16[at / 2u], 0u);",
        "dtypes",
    ),
    _mutant(
        "the lowest number is no logit",
        _SLOTS,
        "    if (!is_nan(z[k])) {",
        "    if (!is_nan(z[k]) && z[k] > lowest) {",
        "rows",
    ),
    _mutant(
        "the words of a negative normalizer cancel",
        _SUM,
        "  if (high < 0x80000000u) {\n    return f32(high)",
        "  if (true) {\n    return f32(bitcast<i32>(high))",
        "normalizers",
    ),
    *PLAIN,
    *DIVERGENCES,
    *CHOSEN,
    _mutant(
        "the last sums of a workgroup are left out",
        _SUM,
        "i < p.count; i += 256u",
        "i < p.count; i += 512u",
        "sums",
    ),
    *_each("a quarter of the values", "sum", "(value(i + 512u) + value(i + 768u))", "0.0", "sums"),
    *_each(
        "a quarter of the tokens",
        "tokens",
        "(count_of(i + 512u) + count_of(i + 768u))",
        "0.0",
        "sums",
    ),
    _mutant(
        "smoothing is plain",
        "src/webgpu/plan.cpp",
        "return o.label_smoothing == 0 && ",
        "return ",
        "rows",
    ),
    _mutant(
        "a window's columns start at 0",
        "src/webgpu/chunk.cpp",
        "  p.first_column = u32(window.first);",
        "  p.first_column = 0;",
        "device",
    ),
    _mutant(
        "kept state is not looked at",
        _KEEP,
        "if (is_counted(rows[i].kind) && !is_kept(i)) {",
        "if (is_counted(rows[i].kind) && !is_kept(i) && p.tokens == 0u) {",
        "kept",
    ),
    _mutant(
        "kept state of fewer columns",
        _KEEP,
        " && kept_rows[at + kept_columns] == p.columns;",
        ";",
        "kept",
    ),
    _mutant("consumed state stays", _KEEP, "if (p.consumes != 0u) {", "if (false) {", "kept"),
    _mutant("kept state's fault", _KEEP, "(&fault[p.fault], 2u)", "(&fault[p.fault], 4u)", "kept"),
    _mutant(
        "kept logits from a slab's beginning",
        _KEPT,
        "chunk.tokens, column - slab, columns}",
        "chunk.tokens, 0, columns}",
        "kept",
    ),
    _mutant(
        "kept logits of the first chunk",
        _KEPT,
        "part{chunk.first, chunk.tokens,",
        "part{0, chunk.tokens,",
        "kept",
    ),
    _mutant(
        "a slab lies over the one before",
        _KEPT,
        "slab * kept_rows_of(problem_.tokens)",
        "slab",
        "kept",
    ),
    _mutant(
        "columns that are made again come first",
        "src/webgpu/chunk.cpp",
        "u32((window.first - window.index * plan_.window) / 4)",
        "0",
        "kept",
    ),
    _mutant(
        "any column may be the last one kept",
        _KEPT,
        "room / kept_block * kept_block",
        "room - 1",
        "kept",
    ),
    _mutant(
        "a small device keeps what it cannot bind",
        "src/webgpu/plan.cpp",
        "if (limits.storage_binding_bytes < slab_binding_bytes(kMostTokens)) p.kept",
        "if (false) p.kept",
        "kept",
    ),
    _mutant(
        "short rows have a log-probability of their own",
        "src/webgpu/plan.cpp",
        'p.vocab <= kColumnsAtOnce && !call["logprob"];',
        "p.vocab <= kColumnsAtOnce;",
        "logprob",
    ),
    _mutant(
        "a slot's squares are scaled once",
        _COMBINE,
        "slot.squared * factor * factor",
        "slot.squared * factor",
        "ranks",
    ),
    _mutant("equal logits are above", _NUMBERS, "  return x > y;", "  return x >= y;", "ranks"),
    _mutant(
        "the rank in the last window",
        _RANK,
        "extras[token].rank += atomicLoad(&above);",
        "extras[token].rank = atomicLoad(&above);",
        "ranks",
    ),
    _mutant(
        "the mass above of the last window",
        _RANK,
        "var all = extras[token].mass_above;",
        "var all = 0.0;",
        "ranks",
    ),
    _mutant(
        "the mass above of rows that are read once: all columns",
        _ROW,
        "mass.x += select(0.0, e, is_over);",
        "mass.x += e;",
        "ranks",
    ),
    _mutant(
        "the mass above of rows that are read once: a number in a row of +inf",
        _ROW,
        "extras[token].mass_above = select(above, s.log_sum, is_nan(s.log_sum));",
        "extras[token].mass_above = above;",
        "ranks",
    ),
    _mutant(
        "the mass above: not of the whole row's probability",
        _RANK,
        "all + tree[0] * share",
        "all + tree[0]",
        "ranks",
    ),
    _mutant(
        "a quotient is cut, not rounded",
        _TEMPERATURE,
        "  if (q.low > half ||",
        "  if (q.low > 2u * half ||",
        "temperatures",
    ),
    _mutant(
        "the least quotient is none",
        _TEMPERATURE,
        "q.e >= -126 &&",
        "q.e > -126 &&",
        "temperatures",
    ),
    _mutant(
        "a bad temperature's fault",
        _TEMPERATURE,
        "atomicOr(&fault[p.fault], 4u);",
        "atomicOr(&fault[p.fault], 1u);",
        "temperatures",
    ),
    _mutant(
        "a temperature of 1 in plain's gradient",
        _shader("plain"),
        "let slope = select(p.slope, own_slope, own_temperature);",
        "let slope = p.slope;",
        "temperatures",
    ),
    _mutant(
        "tokens without a gradient are listed",
        _TOKENS,
        "  if ((p.flags & is_backward) == 0u) {",
        "  if (true) {",
        "inactive",
    ),
    _mutant(
        "0 times infinity is no gradient",
        _TOKENS,
        "!(is_number && (is_zero(g) || is_zero(a)))",
        "!(is_zero(g) || is_zero(a))",
        "inactive",
    ),
    _mutant(
        "plain rows without a gradient",
        _shader("plain"),
        "(scalars.upstream & 0x7fffffffu) == 0u) {",
        "p.rows == 0u) {",
        "inactive",
    ),
    _mutant(
        "a compiler sees through sums in two parts",
        _FOLD,
        "return bitcast<f32>(bitcast<u32>(x) ^ p.zero);",
        "return x;",
        "combine",
    ),
    _mutant(
        "products of one part",
        _FOLD,
        "quick_sum(r.x, r.y + (a.x * b.y + a.y * b.x))",
        "vec2<f32>(r.x, 0.0)",
        "combine",
    ),
    _mutant(
        "a quotient of one part",
        _FOLD,
        "return plus(quick_sum(first, second), vec2<f32>(rest.x / b.x, 0.0));",
        "return vec2<f32>(first, 0.0);",
        "combine",
    ),
    _mutant(
        "the lower parts are forgotten",
        _FOLD,
        "folds[token].entropy_low = all.entropy.y;",
        "folds[token].entropy_low = 0.0;",
        "combine",
    ),
    _mutant(
        "a far shard has no entropy",
        _FOLD,
        "if (apart.x < -745.0) {",
        "if (apart.x < -40.0) {",
        "combine",
    ),
    _mutant(
        "the square's power of two",
        _FOLD,
        "part_of(product(least, least), under.sum_p_squared, 2 * n)",
        "part_of(product(least, least), under.sum_p_squared, n)",
        "combine",
    ),
    _mutant(
        "the largest log-probability of the shard's own distribution",
        _FOLD,
        "joined(over.max_logprob, -rest)",
        "over.max_logprob",
        "combine",
    ),
    _mutant(
        "the lower part of the largest log-probability is lost",
        _FOLD,
        "folds[token].max_logprob_low = all.max_logprob.y;",
        "folds[token].max_logprob_low = 0.0;",
        "combine",
    ),
    _mutant(
        "of equal maxima the last shard's argmax",
        _FOLD,
        "(is_same && !is_nan(m1))",
        "false",
        "combine",
    ),
    _mutant(
        "a shard without probability counts",
        _FOLD,
        "} else if (!second_empty) {",
        "} else {",
        "combine",
    ),
    _mutant(
        "a NaN of one shard is lost",
        _FOLD,
        "select(m2, m1, first_leads || is_nan(m1));",
        "select(m2, m1, first_leads);",
        "combine",
    ),
    _mutant(
        "the shard's own stride",
        _CHUNK,
        "shard * row.stride[0]",
        "shard * row.shape[1]",
        "combine",
    ),
    _mutant(
        "a shard's vocab_start",
        _RUN,
        "if (call.combines) options.vocab_start = 0;",
        "",
        "combine",
    ),
)
TESTS["logprob"] = "WebGpuToken.TheLogProbability*"
TESTS["ranks"] = "WebGpuToken.RanksOf*:WebGpuToken.EqualLogits*"
TESTS["temperatures"] = "WebGpuToken.*Temperature*"
TESTS["inactive"] = "WebGpuToken.NothingIsRead*:WebGpuToken.OneUpstream*"
TESTS["kept"] = "*/KeptState.*_f32:WebGpuKept.*"
TESTS["normalizers"] = "*/Edges.NormalizersOfAView/webgpu_forward_f32"
TESTS["edges"] = "*/Edges.TargetsOutside*/webgpu_forward*_f32"
TESTS["halves"] = "*/Conformance.EveryShape/webgpu_*_f16:*/Edges.*_f16"
TESTS["divergences"] = "*/Divergences.*/webgpu_*_f32:*/Divergences.Kept*_f16"
TESTS["divergences"] += ":*/Conformance.Every*/webgpu_divergence_forward_backward_f32"
TESTS["faint"] = "WebGpuFaint.*"  # with subnormals flushed, as GPUs may
TESTS["chosen"] = "*/ChosenColumns.*_f32:WebGpuChosen.*"
TESTS["combine"] = "*/Combines.*forward_f32"
