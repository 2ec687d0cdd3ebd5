# SPDX-License-Identifier: Apache-2.0
"""Combine: the fold of a token's shards, src/row/{shards,statistics}.h, and src/cpu/combine.cpp."""

from mutants.mutant import mutant

FOLD, OP = "src/row/shards.h", "src/cpu/combine.cpp"

MUTANTS = [
    mutant(
        "fold: a shard whose log sum is -inf has its reference", FOLD,
        "return s.log_sum == -INFINITY ? -INFINITY : s.reference;", "return s.reference;", "combine-op",
    ),
    mutant(
        "fold: a NaN is less than any reference", FOLD,
        "all.reference = first_leads || m1 != m1 ? m1 : m2;", "all.reference = first_leads ? m1 : m2;", "combine-op",
    ),
    mutant(
        "fold: sums as if the references were equal", FOLD,
        "(static_cast<double>(m) - all.reference) + s.log_sum;", "s.log_sum + 0 * all.reference;", "combine-op",
    ),
    mutant(
        "fold: no probability times NaN", FOLD,
        "(p2 == 0 ? 0 : p2 * (second.entropy - r2))", "(p2 * (second.entropy - r2))", "combine-op",
    ),
    mutant(
        "fold: entropy without the shards' own probabilities", FOLD,
        "p1 * (first.entropy - r1)", "p1 * first.entropy", "combine-op",
    ),
    mutant(
        "fold: squares of the shard's own distribution", FOLD,
        "p1 * p1 * first.sum_p_squared", "p1 * first.sum_p_squared", "combine-op",
    ),
    mutant(
        "fold: the largest log-probability of the shard's own distribution", FOLD,
        "first.max_logprob + r1;", "first.max_logprob + 0 * r1;", "combine-op",
    ),
    mutant(
        "fold: the largest log-probability of the last shard", FOLD,
        "highest1 >= highest2 || highest1 != highest1", "highest1 != highest1", "combine-op",
    ),
    mutant(
        "combine: the largest log-probability is that of the shards' log sum",
        "src/row/statistics.h", "s.of_shards ? s.shards_max_logprob : s.max_logprob()", "s.max_logprob()", "combine-op",
    ),
    mutant(
        "fold: the argmax of the last of equal logits", FOLD,
        "first_leads = m1 >= m2;", "first_leads = m1 > m2;", "combine-op",
    ),
    mutant(
        "fold: the target's logit of the last shard", FOLD,
        "first.target_logit > second.target_logit ||", "first.target_logit > 1e30f ||", "combine-op",
    ),
    mutant(
        "combine: only the first two shards", OP, "fold_shards(shards,",
        "fold_shards(std::min<int64_t>(shards, 2),", "combine-op",
    ),
    mutant(
        "combine: tokens at the compacted index", OP, "fold_token(call.shards(), views, tokens.row[k]);", "fold_token(call.shards(), views, k);",
        "combine-op",
    ),
    mutant(
        "combine: argmax counts from the shard's first column", OP,
        "  call.options.vocab_start = 0;\n", "", "combine-op",
    ),
    mutant("combine: temperatures may be bad", OP, "  call.temperature = {};\n", "", "combine-op"),
]  # fmt: skip
