# SPDX-License-Identifier: Apache-2.0
"""Chosen columns: src/cpu/chosen.*, and what the linear ops and the tokens make of them."""

from mutants.mutant import mutant

RUN, TOKENS = "src/cpu/linear_run.cpp", "src/cpu/tokens.cpp"
CHOSEN, HEADER = "src/cpu/chosen.cpp", "src/cpu/chosen.h"
ONLY = "src/cpu/only_chosen.cpp"

MUTANTS = [
    mutant(
        "chosen, the last one: not found", CHOSEN, "int64_t count = 0;\n  const ChosenPlaces places = places_of(call, row);",
        "int64_t count = 0;\n  ChosenPlaces places = places_of(call, row);\n  places.count -= places.count > 1;", "chosen",
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
        "const int64_t column = id - call.vocab_start();", "const int64_t column = id;",
        "chosen",
    ),
    mutant(
        "chosen, inactive tokens: an absent id has a gradient", CHOSEN,
        "    if (is_column(call, id_at(call.ids, places, k)) &&\n        element_at(call.grad_logits_at, places, k) != 0) {",
        "    if (element_at(call.grad_logits_at, places, k) != 0) {", "chosen",
    ),
    mutant(
        "chosen, inactive tokens: only ids of this shard have gradients", CHOSEN,
        "    if (is_column(call, id_at(call.ids, places, k)) &&\n",
        "    if (chosen_column(call, id_at(call.ids, places, k)) >= 0 &&\n", "chosen",
    ),
    mutant(
        "chosen, sizes of gradients: an absent id's too", CHOSEN, "    if (!is_column(call, id_at(call.ids, places, k))) continue;\n", "",
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
        "chosen, logits: of the compacted token", RUN, "const ChosenPlaces places = places_of(call_, tokens_->row[first_ + n]);",
        "const ChosenPlaces places = places_of(call_, first_ + n);", "chosen",
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
        "element_at(call.grad_logits_at, places, k) * inv_gradient_scale", "element_at(call.grad_logits_at, places, k)", "chosen",
    ),
    mutant("lists: an offset may be below the one before", CHOSEN, "i == tokens ? all : before,", "i == tokens ? all : std::min<int64_t>(before, 0),", "chosen"),
    mutant("lists: the first offset is not looked at", CHOSEN, "most = i == 0 ? 0 : all;", "most = all;", "chosen"),
    mutant("lists: they may end before the ids do", CHOSEN, "i == 0 ? 0 : i == tokens ? all : before", "i == 0 ? 0 : before", "chosen"),
    mutant("lists: one begins a place late", HEADER, "const int64_t first = int_at(call.id_offsets, i);", "const int64_t first = int_at(call.id_offsets, i) + (i > 1);", "chosen"),
    mutant("lists of a chunk: all begin with the first", CHOSEN, "first += places_of(call, rows[n]).count;", "first += 0 * places_of(call, rows[n]).count;", "chosen"),
    mutant(
        "lists, room for them: of one token", "src/cpu/plan.cpp", "shape.chosen_of_lists > 0 ? shape.chosen_of_lists : chunk * shape.chosen",
        "shape.chosen_of_lists > 0 ? 1 : chunk * shape.chosen", "chosen",
    ),
    mutant("only chosen, inactive tokens: a loss of 1", TOKENS, "  if (call.only_chosen) return has_chosen_gradient(call, i);\n", "", "chosen"),
    mutant("only chosen, factors: without the softcap's slope", ONLY, "const bool capped = map.softcap > 0;", "const bool capped = false;", "chosen"),
    mutant("only chosen, factors: without the map's slope", ONLY, "gradient * slope_at(map, z)", "gradient", "chosen"),
    mutant("only chosen, factors: the first token's map", ONLY, "map_of(map_, tokens, n)", "map_of(map_, tokens, 0)", "chosen"),
    mutant("only chosen, logits: without the bias", ONLY, "map_block(map, &z, call_.bias ? &bias : nullptr, 1);", "map_block(map, &z, call_.bias && hidden < 0 ? &bias : nullptr, 1);", "chosen"),
    mutant("only chosen, grad_input: the last place alone", ONLY, "add_scaled(w, 0, factor, 1, hidden, false, sum, 0);", "add_scaled(w, 0, factor, 1, hidden, true, sum, 0);", "chosen"),
    mutant(
        "only chosen, grad_input: inactive rows are left", ONLY,
        "if (call_.grad_input) store_rows(nullptr", "if (call_.grad_input && i < 0) store_rows(nullptr", "chosen",
    ),
    mutant("only chosen, the sort: a column begins one early", ONLY, "end, int64_t{0});", "end, int64_t{-1});", "chosen"),
    mutant("only chosen, the sort: of compacted tokens", ONLY, "use(column, Summand{tokens.row[n], factors(n)[k]})", "use(column, Summand{n, factors(n)[k]})", "chosen"),
    mutant("only chosen, grad_weight: unchosen rows are added to", ONLY, "  if (first == last && call_.accumulate) return;\n", "", "chosen"),
    mutant("only chosen, grad_weight: never added", ONLY, "call_.grad_weight,\n             call_.accumulate);", "call_.grad_weight);", "chosen"),
    mutant("only chosen, grad_bias: of the first place", ONLY, "sum += s->factor;", "sum = first->factor;", "chosen"),
]
