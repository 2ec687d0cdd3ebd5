# SPDX-License-Identifier: Apache-2.0
"""Divergences of two heads: src/cpu/divergence_{run,kernels}.cpp."""

from mutants.mutant import mutant

RUN, KERNELS = "src/cpu/divergence_run.cpp", "src/cpu/divergence_kernels.cpp"

MUTANTS = [
    mutant(
        "divergences, mean of f: the last tile is left out", RUN, "mean += wants_.mean ? block.mean : 0;",
        "mean += wants_.mean && tile + 1 < plan_.vocab_tiles ? block.mean : 0;", "divergences",
    ),
    mutant(
        "divergences, teacher: the student's map", RUN, "head == student ? map_of(n) : teacher_map_of(n)", "map_of(n)",
        "divergences",
    ),
    mutant(
        "divergences, teacher's temperature: at the compacted index", RUN,
        "tokens_->teacher_temperature, tokens_->row[first_ + n]", "tokens_->teacher_temperature, first_ + n",
        "divergences",
    ),
    mutant(
        "divergences, given logits: rows one after the other", RUN, "{tokens_->row + first_ + n, nullptr,",
        "{tokens_->row + n, nullptr,", "divergences",
    ),
    mutant(
        "divergences, forward_kl: an infinite distance of nothing", KERNELS,
        "hn::IfThenZeroElse(hn::Eq(q, zero), hn::Mul(q, distance))", "hn::Mul(q, distance)", "divergence-edges",
    ),
    mutant(
        "divergences, mixture: one logarithm near 1", KERNELS, "return log_of(d, u, hn::IfThenElse(less, w, more));",
        "return log_of(d, u, hn::Sub(u, hn::Set(d, 1.0f)));", "kernels",
    ),
    mutant(
        "divergences, mixture: e of the wrong side", KERNELS, "log_of_mixture(d, b.beta, b.rest, above, s, e)",
        "log_of_mixture(d, b.beta, b.rest, hn::Not(above), s, e)", "kernels",
    ),
    mutant(
        "divergences, mixture: a ratio that ends at e^-80", KERNELS, "least = hn::Set(d, -87.0f), one",
        "least = hn::Set(d, -80.0f), one", "divergence-edges",
    ),
    mutant(
        "divergences, label: no onehot", KERNELS,
        "if (terms.label_weight == 0 || target < 0 || target >= count) return;",
        "if (terms.label_weight >= 0 || target < 0 || target >= count) return;", "divergences",
    ),
    mutant(
        "divergences, upstream: its mantissa is lost", RUN, "{std::ldexp(1.0f, power - 1), 2 * last}",
        "{std::ldexp(1.0f, power - 1), 1}", "divergences",
    ),
    mutant(
        "divergences, kept: no row is far from its teacher", RUN,
        "terms_.kind == DivergenceKind::reverse_kl ? row.value : 0", "0", "divergence-edges",
    ),
    mutant(
        "divergences of shards: a mean of their own", RUN, "if (call_.slope_mean && terms_.kind != DivergenceKind::forward_kl)",
        "if (call_.slope_mean && terms_.kind == DivergenceKind::forward_kl)", "divergence-shards",
    ),
    mutant(
        "divergences of shards: one head's sum for both", RUN, "own ? call_.row_log_sum : call_.teacher_row_log_sum",
        "own ? call_.row_log_sum : call_.row_log_sum", "divergence-shards",
    ),
    mutant(
        "divergences of shards: states of the compacted index", RUN, "const int64_t i = tokens_->row[first_ + n];\n    const bool own",
        "const int64_t i = first_ + n;\n    const bool own", "divergence-shards",
    ),
    mutant(
        "divergences of shards: a target elsewhere is 0", RUN,
        "states(student)[n].target_logit = states(teacher)[n].target_logit =\n          -std::numeric_limits<float>::infinity();",
        "states(student)[n].target_logit = states(teacher)[n].target_logit = 0;", "divergence-shards",
    ),
]  # fmt: skip
