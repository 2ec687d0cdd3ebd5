# SPDX-License-Identifier: Apache-2.0
"""Top-k: src/cpu/top.*, src/row/top.h, and what the linear ops make of them."""

from mutants.mutant import mutant

RUN, KERNELS = "src/cpu/linear_run.cpp", "src/cpu/row_kernels.cpp"
TOP, ORDER, COMBINE = "src/cpu/top.cpp", "src/row/top.h", "src/cpu/combine.cpp"

MUTANTS = [
    mutant(
        "top-k, ties: the highest id first",
        ORDER,
        "(a.id) < static_cast",
        "(a.id) > static_cast",
        "topk",
    ),
    mutant(
        "top-k: the smallest logits",
        ORDER,
        "return a.logit > b.logit;",
        "return a.logit < b.logit;",
        "topk",
    ),
    mutant(
        "top-k, a full list: what is equal goes in",
        TOP,
        "if (!comes_before(entry, heap[0])) return;",
        "",
        "topk",
    ),
    mutant(
        "top-k, the filter: what is equal is nothing new",
        KERNELS,
        "FindFirstTrue(d, hn::Ge(hn::LoadU(d, z + from), lowest))",
        "FindFirstTrue(d, hn::Gt(hn::LoadU(d, z + from), lowest))",
        "topk",
    ),
    mutant(
        "top-k, the filter: nothing behind the last whole vector",
        KERNELS,
        "  while (from < count && !(z[from] >= least)) ++from;\n  return from;",
        "  return count;",
        "topk",
    ),
    mutant(
        "top-k, the filter: of the list as it was before the tile",
        TOP,
        "j = find_at_least(z, j + 1, width, lowest())) {",
        "j = find_at_least(z, j + 2, width, lowest())) {",
        "topk",
    ),
    mutant(
        "top-k, ids: counted in the shard",
        RUN,
        "tile_width(tile), call_.vocab_start() + first);",
        "tile_width(tile), first);",
        "topk",
    ),
    mutant(
        "top-k, ids: counted in the tile",
        RUN,
        "tile_width(tile), call_.vocab_start() + first);",
        "tile_width(tile), call_.vocab_start());",
        "topk",
    ),
    mutant(
        "top-k, a row's last tile: columns behind the vocabulary",
        RUN,
        "vocab_tile, tile_width(tile), call_",
        "vocab_tile, vocab_tile, call_",
        "topk",
    ),
    mutant(
        "top-k: the last thread's list is left out",
        RUN,
        "for (int64_t lane = 1; lane < plan_.lanes; ++lane) all.add",
        "for (int64_t lane = 1; lane < plan_.lanes - 1; ++lane) all.add",
        "topk",
    ),
    mutant(
        "top-k: lists of the chunk before",
        RUN,
        "    lists_of(lane).clear(count_);\n",
        "    if (first_ == 0) lists_of(lane).clear(count_);\n",
        "topk",
    ),
    mutant(
        "top-k: of the compacted token",
        RUN,
        "const int64_t i = tokens_->row[first_ + n];",
        "const int64_t i = first_ + n;",
        "topk",
    ),
    mutant(
        "top-k, NaN: an ordinary row",
        RUN,
        "  if (std::isnan(states()[first_ + n].reference)) return write_without_order(call_, i);\n",
        "",
        "topk",
    ),
    mutant(
        "top-k, NaN: ids of none",
        TOP,
        "{std::numeric_limits<float>::quiet_NaN(), r}",
        "{std::numeric_limits<float>::quiet_NaN(), -1}",
        "topk",
    ),
    mutant(
        "top-k: not sorted",
        TOP,
        "  std::sort_heap(list, list + count_[n], comes_before);\n",
        "",
        "topk",
    ),
    mutant(
        "top-k: what has no list is left",
        RUN,
        "  if (call.top_logits) clear_lists(call);\n",
        "",
        "topk",
    ),
    mutant(
        "top-k, Combine: tokens that do not count are left",
        COMBINE,
        "  if (call.top_logits) clear_lists(call);\n",
        "",
        "topk",
    ),
    mutant(
        "top-k, Combine: the first shard's NaN alone",
        TOP,
        "for (int64_t s = 0; s < shards; ++s) {\n    if (std::isnan",
        "for (int64_t s = 0; s < 1; ++s) {\n    if (std::isnan",
        "topk",
    ),
    mutant(
        "top-k, Combine: of the first token",
        TOP,
        "{element_at(logits, row(s), i * count + r), id_at",
        "{element_at(logits, row(s), r), id_at",
        "topk",
    ),
]
