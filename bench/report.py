# SPDX-License-Identifier: Apache-2.0
"""Figures of a run: shares of the machine's peaks, ratios to the peers, the bounds they are held
against, and the table on the terminal."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field
from typing import Any

from timing import Contender

MIB = 1 << 20
# Our op is compared with the fastest contender whose name begins so, except a copy.
TORCH = ("torch", "F.")


@dataclass
class Group:
    kind: str  # "gradients", "loss" or "logits"
    tokens: int
    hidden: int  # 0: logits are given
    vocab: int
    dtype: str
    contenders: list[Contender]
    rounds: int = 0
    copy_ms: float | None = None  # of the probe's copy of the logits' bytes

    @property
    def title(self) -> str:
        what = {"gradients": "loss + gradients", "loss": "loss only",
                "logits": "cross-entropy on given logits, loss + gradient"}[self.kind]  # fmt: skip
        hidden = f" D {self.hidden}" if self.hidden else ""
        return f"{what}, N {self.tokens}{hidden} V {self.vocab}, {self.dtype}"

    @property
    def shape(self) -> str:
        return "x".join(str(n) for n in (self.tokens, self.hidden, self.vocab) if n)

    def flop(self, name: str) -> float:
        """FLOP of the definition's products, without ignored tokens; some plans do more."""
        products = {"gradients": 6, "loss": 2, "logits": 0}[self.kind]
        share = 0.5 if "half ignored" in name else 1.0
        return share * products * self.tokens * self.vocab * self.hidden

    def seconds(self, name: str) -> float | None:
        for c in self.contenders:
            if c.name == name and c.ok:
                return c.median
        return None

    @property
    def ours(self) -> float | None:
        """Our seconds, which the others are compared with."""
        return self.seconds("ours") or self.seconds("ours, in place")

    def best_torch(self) -> Contender | None:
        peers = [c for c in self.contenders if c.ok and c.name.startswith(TORCH)]
        peers = [c for c in peers if c.name != "torch copy_"]
        return min(peers, key=lambda c: c.median, default=None)

    def weight_bytes(self) -> int:
        return self.vocab * self.hidden * (4 if self.dtype == "f32" else 2)


def peaks(probes: list[dict[str, Any]]) -> dict[str, float | None]:
    """The median over the probes of a run of the best each found."""

    def figure(name: str, key: str) -> float | None:
        values = [p[name][key] for p in probes if p.get(name)]
        return statistics.median(values) if values else None

    return {
        "f32_fma_gflops": figure("f32_fma", "gflops_best"),
        "bf16_dot_gflops": figure("bf16_dot", "gflops_best"),
        "amx_bf16_gflops": figure("amx_bf16", "gflops_best"),
        "read_gb_per_s": figure("read", "gb_per_s_best"),
    }


def ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a and b else None


@dataclass
class Bound:
    name: str
    value: float | None  # None: not measured
    limit: float
    at_least: bool = True
    note: str = ""
    met: bool = field(init=False)

    def __post_init__(self) -> None:
        self.met = self.value is not None and (
            self.value >= self.limit if self.at_least else self.value <= self.limit
        )


def share_of_peak(group: Group, name: str, peak: dict[str, float | None], key: str) -> float | None:
    seconds = group.seconds(name)
    return ratio(group.flop(name) / seconds * 1e-9, peak[key]) if seconds else None


def _peak_bound(group: Group, peak: dict[str, float | None], limit: float) -> list[Bound]:
    kind = "loss + gradients" if group.kind == "gradients" else "loss only"
    key = "f32_fma_gflops" if group.dtype == "f32" else "bf16_dot_gflops"
    name = f"{kind} {group.shape} {group.dtype}: share of "
    out = [
        Bound(name + key.removesuffix("_gflops"), share_of_peak(group, "ours", peak, key), limit)
    ]
    if group.dtype == "bf16" and peak["amx_bf16_gflops"]:
        share = share_of_peak(group, "ours", peak, "amx_bf16_gflops")
        out.append(Bound(name + "amx_bf16", share, limit, note="no bound named for this unit"))
    return out


def _gradient_bounds(group: Group, peak: dict[str, float | None]) -> list[Bound]:
    label = f"loss + gradients {group.shape} {group.dtype}: "
    ours = group.seconds("ours")
    out: list[Bound] = []
    if group.tokens >= 1024:
        out += _peak_bound(group, peak, 0.90 if group.dtype == "f32" else 0.88)
    if group.tokens >= 256:
        best = group.best_torch()
        limit = 1.3 if group.dtype == "f32" else 1.25
        name = best.name if best else "no peer ran"
        out.append(
            Bound(
                label + "best PyTorch / ours",
                ratio(best.median if best else None, ours),
                limit,
                note=name,
            )
        )
        out.append(Bound(label + "eager / ours", ratio(group.seconds("torch eager"), ours), 1.6))
        out.append(
            Bound(
                label + "all options / plain",
                ratio(group.seconds("ours, all options"), ours),
                1.10,
                False,
            )
        )
        out.append(
            Bound(
                label + "quarter workspace / default",
                ratio(group.seconds("ours, quarter workspace"), ours),
                1.06,
                False,
            )
        )
    logits = 4 * group.tokens * group.vocab
    for c in group.contenders:
        if c.name == "ours" and c.facts:
            limit = logits / 2 + 16 * MIB
            out.append(
                Bound(
                    label + "default workspace, MiB",
                    c.facts["workspace_bytes"] / MIB,
                    limit / MIB,
                    False,
                )
            )
        if c.name == "ours, quarter workspace" and c.facts:
            limit = logits / 4 + 16 * MIB
            out.append(
                Bound(
                    label + "quarter plan's minimum, MiB",
                    c.facts["minimum_bytes"] / MIB,
                    limit / MIB,
                    False,
                )
            )
    return out


def _loss_bounds(group: Group, peak: dict[str, float | None]) -> list[Bound]:
    label = f"loss only {group.shape} {group.dtype}: "
    ours = group.seconds("ours")
    out = _peak_bound(group, peak, 0.90) if group.tokens >= 1024 else []
    if group.tokens <= 8:
        rate = group.weight_bytes() / ours * 1e-9 if ours else None
        out.append(
            Bound(
                label + "weight bytes / time / read bandwidth",
                ratio(rate, peak["read_gb_per_s"]),
                0.80,
            )
        )
    for c in group.contenders:
        if c.name == "ours" and c.facts:
            out.append(Bound(label + "workspace, MiB", c.facts["workspace_bytes"] / MIB, 16, False))
    return out


def _logits_bounds(group: Group) -> list[Bound]:
    label = f"given logits {group.shape} {group.dtype}: "
    ours = group.seconds("ours, in place")
    copies = [
        s for s in (group.seconds("torch copy_"), group.copy_ms and group.copy_ms * 1e-3) if s
    ]
    limit = 0.80 if group.dtype == "f32" else 0.50
    return [
        Bound(label + "fastest copy / ours", ratio(min(copies, default=None), ours), limit),
        Bound(label + "PyTorch eager / ours", ratio(group.seconds("torch eager"), ours), 8.0),
    ]


def bounds(
    groups: list[Group], peak: dict[str, float | None], rss: list[dict[str, Any]]
) -> list[Bound]:
    out: list[Bound] = []
    for group in groups:
        if group.kind == "gradients":
            out += _gradient_bounds(group, peak)
        elif group.kind == "loss":
            out += _loss_bounds(group, peak)
        else:
            out += _logits_bounds(group)
    for case in rss:
        growth = case.get("growth_bytes")
        off = abs(growth - case["workspace_bytes"]) / MIB if growth is not None else None
        out.append(
            Bound(f"resident growth off the predicted bytes, MiB: {case['case']}", off, 1.0, False)
        )
    return out


def contender_json(group: Group, c: Contender, peak: dict[str, float | None]) -> dict[str, Any]:
    out: dict[str, Any] = {"name": c.name, "status": c.status, **c.facts}
    if not c.ok:
        return out
    out["ms"] = {"median": c.median * 1e3, "min": min(c.samples) * 1e3, "max": max(c.samples) * 1e3}
    out["samples_ms"] = [s * 1e3 for s in c.samples]
    if c.loss is not None and math.isfinite(c.loss):
        out["loss"] = c.loss
    if group.hidden:
        out["gflops"] = group.flop(c.name) / c.median * 1e-9
        for key in ("f32_fma_gflops", "bf16_dot_gflops", "amx_bf16_gflops"):
            if peak[key] and (key == "f32_fma_gflops") == (group.dtype == "f32"):
                out["share_of_" + key.removesuffix("_gflops")] = share_of_peak(
                    group, c.name, peak, key
                )
        if group.kind == "loss":
            out["weight_gb_per_s"] = group.weight_bytes() / c.median * 1e-9
    return out


def group_json(group: Group, peak: dict[str, float | None]) -> dict[str, Any]:
    return {
        "kind": group.kind, "tokens": group.tokens, "hidden": group.hidden, "vocab": group.vocab,
        "dtype": group.dtype, "rounds": group.rounds, "probe_copy_ms": group.copy_ms,
        "contenders": [contender_json(group, c, peak) for c in group.contenders],
    }  # fmt: skip


def memory_of(c: Contender) -> int | None:
    """Bytes beyond inputs and gradients: the workspace and the kept state of ours, what a call of a
    peer holds."""
    if "workspace_bytes" in c.facts:
        return int(c.facts["workspace_bytes"] + c.facts.get("kept_bytes", 0))
    return c.facts.get("growth_bytes")


def print_table(groups: list[Group]) -> None:
    """A Markdown table of ours and the peers: a line for each contender, a column per dtype."""
    dtypes = list(dict.fromkeys(g.dtype for g in groups))
    print("\n| ms (x ours) [MiB beyond inputs and gradients] | " + " | ".join(dtypes) + " |")
    print("|---|" + "---|" * len(dtypes))
    for kind, shape in dict.fromkeys((g.kind, g.shape) for g in groups):
        row = {g.dtype: g for g in groups if (g.kind, g.shape) == (kind, shape)}
        names = [c.name for c in next(iter(row.values())).contenders if is_compared(c.name)]
        for name in names:
            cells = [_cell(row[d], name) if d in row else "" for d in dtypes]
            print(f"| {TITLES[kind]}, {shape}: {name} | " + " | ".join(cells) + " |")


TITLES = {"gradients": "loss + gradients", "loss": "loss alone", "logits": "given logits"}


def is_compared(name: str) -> bool:
    return name in ("ours", "ours, in place") or name.startswith(TORCH)


def _cell(group: Group, name: str) -> str:
    c = next((c for c in group.contenders if c.name == name), None)
    if c is None or not c.ok:
        return c.status if c is not None else ""
    ours = group.ours
    against = f" ({c.median / ours:.2f})" if ours else ""
    held = memory_of(c)
    return f"{c.median * 1e3:.1f}{against}" + (f" [{held / MIB:.0f}]" if held is not None else "")


def print_group(group: Group) -> None:
    print(f"\n{group.title}  ({group.rounds} rounds)")
    ours = group.ours
    print(f"  {'':38} {'ms':>10} {'min':>10} {'max':>10} {'GFLOP/s':>9} {'/ ours':>7} {'MiB':>8}")
    for c in group.contenders:
        if not c.ok:
            print(f"  {c.name:38} {c.status}")
            continue
        times = "".join(f" {s * 1e3:10.2f}" for s in (c.median, min(c.samples), max(c.samples)))
        rate = f"{group.flop(c.name) / c.median * 1e-9:9.1f}" if group.hidden else f"{'':9}"
        against = f"{c.median / ours:7.2f}" if ours else f"{'':7}"
        held = memory_of(c)
        scratch = f"{held / MIB:8.1f}" if held is not None else ""
        note = f"  {c.facts['acc_policy']}" if "acc_policy" in c.facts else ""
        print(f"  {c.name:38}{times} {rate} {against} {scratch}{note}")


def print_summary(
    peak: dict[str, float | None], rss: list[dict[str, Any]], held: list[Bound]
) -> None:
    print("\nPeaks, all threads (median over the run of the best of each probe)")
    for name, value in peak.items():
        print(f"  {name:38} {f'{value:10.1f}' if value else 'not on this CPU':>10}")
    print("\nResident growth of one call, workspace fresh")
    for case in rss:
        if "growth_bytes" in case:
            sizes = (
                f"{case['growth_bytes'] / MIB:10.2f} MiB of {case['workspace_bytes'] / MIB:10.2f}"
            )
        print(f"  {case['case']:48} {sizes if 'growth_bytes' in case else case['status']}")
    print("\nBounds")
    for b in held:
        figure = f"{b.value:10.3f}" if b.value is not None else f"{'-':>10}"
        sign = ">=" if b.at_least else "<="
        verdict = b.note if b.note.startswith("no bound") else "met" if b.met else "MISSED"
        note = f"  ({b.note})" if b.note and verdict != b.note else ""
        print(f"  {b.name:72} {figure} {sign} {b.limit:8.3f}  {verdict}{note}")
