# SPDX-License-Identifier: Apache-2.0
"""Temperatures, statistics and inactive tokens, as the conformance suite sees them on the CPU."""

from mutants.mutant import mutant

TOKENS = "src/cpu/tokens.cpp"
COMBINE = "include/logitless/combine.h"

MUTANTS = [
    mutant(
        "temperatures: a bad one sets no fault", TOKENS,
        "if (read->is_bad && fault) *fault.as<int32_t>() |= 4;",
        "if (read->is_bad && fault) *fault.as<int32_t>() |= 0;", "temperatures",
    ),
    mutant(
        "temperatures: the fault word forgets what it held", TOKENS, "*fault.as<int32_t>() |= 4;",
        "*fault.as<int32_t>() = 4;", "temperatures",
    ),
    mutant(
        "temperatures: the slope is not looked at", TOKENS, "(scale != 0 && !normal(scale / t))",
        "(scale < 0 && !normal(scale / t))", "temperatures",
    ),
    mutant(
        "temperatures: not the number's bits", TOKENS, "  own.temperature = temperature;",
        "  own.temperature = std::nextafter(temperature, 0.0f);", "temperatures",
    ),
    mutant(
        "inactive: the entropy's gradient is forgotten", TOKENS,
        "    if (*view && f32_at(*view, i) != 0) return true;",
        "    if (*view && view != &call.grad_entropy && f32_at(*view, i) != 0) return true;", "inactive",
    ),
    mutant(
        "inactive: with a forward too", TOKENS, "if (!call.forward) leave_out_inactive(call, tokens);",
        "if (call.gradients) leave_out_inactive(call, tokens);", "inactive",
    ),
    mutant(
        "inactive: kept rows as if none were", TOKENS,
        "if (t->place != nullptr) t->place[active] = k;",
        "if (t->place != nullptr) t->place[active] = active;", "kept",
    ),
    mutant("rank: that of an ignored token is 0", TOKENS, "counts ? statistic.index(row) : -1",
           "counts ? statistic.index(row) : statistic.tensor == &Call::rank ? 0 : -1", "statistics"),
    mutant(
        "combine: the squares by the probability once", COMBINE,
        "(pa == 0 ? 0 : pa * pa * a.sum_p_squared)", "(pa == 0 ? 0 : pa * a.sum_p_squared)", "combine",
    ),
    mutant(
        "combine: the largest log-probability of a's own distribution", COMBINE,
        "a.max_logprob + ra;", "a.max_logprob + 0 * ra;", "combine",
    ),
    mutant("combine: a log-probability above 0", COMBINE, "  return x > 0 ? 0 : x;", "  return x;", "combine"),
]  # fmt: skip
