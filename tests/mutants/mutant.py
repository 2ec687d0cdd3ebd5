# SPDX-License-Identifier: Apache-2.0
"""A mutant, and the groups of tests that are run on it: the quick ones that should catch it, of the
programs in tests/CMakeLists.txt, with a googletest filter where a whole program takes too long."""

from __future__ import annotations

from dataclasses import dataclass


def of_cpu(suite: str, ops: str, names: tuple[str, ...] = ("*",), dtype: str = "") -> str:
    """Tests of a conformance program for the CPU backend's ops that begin so."""
    chosen = [f"{name}/cpu_{op}*{dtype}" for name in names for op in ops.split() or [""]]
    return f"{suite}_test:{':'.join(chosen)}"


LOGITS, LINEAR = "softmax forward backward", "linear"
TABLE = ("*EveryShape", "*EveryOptionAloneAndInPairs")

TESTS: dict[str, list[str]] = {
    "validation": ["rejects_test", "accepts_test"],
    "overlap": ["overlap_test"],
    "plans": ["plan_rules_test", "rejects_test"],
    "tokens": ["tokens_test"],
    "kernels": ["row_kernels_test"],
    "gemm": ["gemm_test"],
    "logit-ops": ["logit_ops_test"],
    "plan": ["plan_test"],
    "logits": [
        of_cpu("conformance", LOGITS, TABLE),
        of_cpu("edges", LOGITS),
        of_cpu("nonfinite", LOGITS),
        of_cpu("invariants", LOGITS),
    ],
    "linear": [
        of_cpu("conformance", LINEAR, TABLE),
        of_cpu("edges", LINEAR),
        of_cpu("nonfinite", LINEAR),
        of_cpu("invariants", LINEAR),
    ],
    "chosen": [of_cpu("chosen", "")],
    "topk": [of_cpu("topk", "")],
    "divergences": [of_cpu("conformance", "divergence", TABLE)],
    "divergence-edges": [of_cpu("divergence", "")],
    "divergence-shards": [of_cpu("divergence_shards", "")],
    "linear-bf16": [of_cpu("conformance", LINEAR, TABLE, "_bf16")],
    "edges": [of_cpu("edges", LINEAR)],
    "nonfinite": [of_cpu("nonfinite", LINEAR)],
    "temperatures": [of_cpu("temperatures", "")],
    "statistics": [of_cpu("statistics", "")],
    "inactive": [of_cpu("inactive", "")],
    "shards": [of_cpu("shards", "")],
    "combine": ["shards_test:Combine.*"],
    "combine-op": [of_cpu("combine", "")],
    "offsets": [of_cpu("offsets", "")],
    "kept": [of_cpu("kept", "")],
    "workspace": ["plan_test", of_cpu("workspace", "", ("*BytesAskedFor*",), "f32")],
    "determinism": [of_cpu("determinism", LINEAR, dtype="_f32")],
    "determinism-bf16": [of_cpu("determinism", LINEAR, ("*RunTwice",), "_bf16")],
    "invariance": [of_cpu("invariance", LINEAR, dtype="_f32")],
}


@dataclass(frozen=True)
class Edit:
    file: str
    old: str  # must occur exactly once in the file
    new: str


@dataclass(frozen=True)
class Mutant:
    name: str
    edits: tuple[Edit, ...]
    tests: tuple[str, ...]  # keys of TESTS
    targets: str = (
        # LOGITLESS_CPU_TARGETS of the build; "all" includes AMX, which the CPU must have.
        "some"
    )


def mutant(name: str, file: str, old: str, new: str, tests: str, targets: str = "some") -> Mutant:
    """One edit of one file; tests: names of groups."""
    return Mutant(name, (Edit(file, old, new),), tuple(tests.split()), targets)
