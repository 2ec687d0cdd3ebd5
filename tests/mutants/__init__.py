# SPDX-License-Identifier: Apache-2.0
"""The mutants of the host's code: bugs that some test must catch, and the tests that are run."""

from mutants import chosen, combine, divergences, kernels, linear, logits, overlap, plans, token_options, tokens, topk
from mutants.mutant import TESTS, Edit, Mutant

MUTANTS = [
    *tokens.MUTANTS,
    *token_options.MUTANTS,
    *kernels.MUTANTS,
    *logits.MUTANTS,
    *linear.MUTANTS,
    *divergences.MUTANTS,
    *chosen.MUTANTS,
    *topk.MUTANTS,
    *combine.MUTANTS,
    *overlap.MUTANTS,
    *plans.MUTANTS,
]
_names = [mutant.name for mutant in MUTANTS]
assert len(set(_names)) == len(_names), "two mutants of one name"

__all__ = ["MUTANTS", "TESTS", "Edit", "Mutant"]
