# SPDX-License-Identifier: Apache-2.0
"""Chosen columns: src/cpu/chosen.*, and what the linear ops and the tokens make of them."""

from mutants.mutant import mutant

RUN, TOKENS = "src/cpu/linear_run.cpp", "src/cpu/tokens.cpp"
CHOSEN, HEADER = "src/cpu/chosen.cpp", "src/cpu/chosen.h"

MUTANTS = [
    mutant(
        "chosen, the last one: not found", CHOSEN, "for (int64_t k = 0; k < most_; ++k) {",
        "for (int64_t k = 0; k < most_ - (most_ > 1); ++k) {", "chosen",
    ),
    mutant("chosen, one column's: the last k first", CHOSEN, ": a.k < b.k;", ": a.k > b.k;", "chosen"),
    mutant(
        "chosen, a tile's: its first column is the last tile's", CHOSEN,
        "begin = std::lower_bound(begin, end, first, before);",
        "begin = std::lower_bound(begin, end, first + 1, before);", "chosen",
    ),
    mutant(
        "chosen, a tile's: the next tile's first column too", CHOSEN,
        "std::lower_bound(begin, end, first + width, before)", "std::lower_bound(begin, end, first + width + 1, before)",
        "chosen",
    ),
    mutant(
        "chosen, of a shard: counted in the shard", CHOSEN,
        "id = id_at(call.ids, i, k), column = id - call.vocab_start();", "id = id_at(call.ids, i, k), column = id;",
        "chosen",
    ),
    mutant(
        "chosen, inactive tokens: an absent id has a gradient", CHOSEN,
        "    if (is_column(call, id_at(call.ids, i, k)) && element_at(call.grad_logits_at, i, k) != 0) {",
        "    if (element_at(call.grad_logits_at, i, k) != 0) {", "chosen",
    ),
    mutant(
        "chosen, inactive tokens: only ids of this shard have gradients", CHOSEN,
        "    if (is_column(call, id_at(call.ids, i, k)) && element_at",
        "    if (chosen_column(call, i, k) >= 0 && element_at", "chosen",
    ),
    mutant(
        "chosen, sizes of gradients: an absent id's too", CHOSEN, "    if (!is_column(call, id_at(call.ids, i, k))) continue;\n", "",
        "chosen",
    ),
    mutant(
        "chosen, sizes of gradients: of none", TOKENS,
        "    include(size_of_chosen_gradients(call, tokens.row[k]), &sizes.statistic);\n", "", "chosen",
    ),
    mutant("chosen, ids in 32 bits: read in 64", HEADER, "ids.dtype == DType::i64 ?", "ids.dtype != DType::f32 ?", "chosen"),
    mutant("chosen, outside: no error below -1", TOKENS, "if (id >= -1 && id <", "if (id <", "chosen"),
    mutant(
        "chosen, outside: of the shard", TOKENS, "id < call.vocab_total()) continue;", "id < call.vocab()) continue;", "chosen",
    ),
    mutant(
        "chosen, outside: of tokens that do not count", TOKENS,
        "for (int64_t n = 0; n < tokens.valid; ++n) {\n    const int64_t i = tokens.row[n];",
        "for (int64_t n = 0; n < tokens.total; ++n) {\n    const int64_t i = n;", "chosen",
    ),
    mutant(
        "chosen, logits: of the compacted token", RUN, "element_at(call_.logits_at, tokens_->row[first_ + n], c.k)",
        "element_at(call_.logits_at, first_ + n, c.k)", "chosen",
    ),
    mutant(
        "chosen, logits: what is absent is left", RUN,
        "  if (call.logits_at) fill(call.logits_at, -std::numeric_limits<float>::infinity());\n", "", "chosen",
    ),
    mutant("chosen alone: the map of the panel's first token", RUN, "map_block(map_of(row + r), &z,", "map_block(map_of(row), &z,", "chosen"),
    mutant(
        "chosen alone: the bias of the panel's first column", RUN, "element_as_f32(call_.bias, columns[c])",
        "element_as_f32(call_.bias, columns[0])", "chosen",
    ),
    mutant("chosen alone: the last columns are not made", RUN, "    make();\n  });", "  });", "chosen"),
    mutant("chosen, gradients: the last one of a column alone", RUN, "sum += chosen[next].gradient;", "sum = chosen[next].gradient;", "chosen"),
    mutant(
        "chosen, gradients: the target has none of its own", RUN,
        "g.onehot = (column == tokens_->target[first_ + n] ? g.onehot : 0) - sum;", "g.onehot = -sum;", "chosen",
    ),
    mutant(
        "chosen, gradients: of a rounded row without the map's slope", RUN,
        "static_cast<float>(sum * slope_at(map, 0))", "sum", "kept",
    ),
    mutant(
        "chosen, gradients: as they are given", CHOSEN,
        "element_at(call.grad_logits_at, row, k) * inv_gradient_scale", "element_at(call.grad_logits_at, row, k)", "chosen",
    ),
]
