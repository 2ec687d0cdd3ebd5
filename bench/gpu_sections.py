# SPDX-License-Identifier: Apache-2.0
"""The parts of compare_gpu.py that work on one head: ours and the peers, the options, the
frontier of time against workspace, and loops of seconds."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from dataclasses import dataclass

import gpu_frontier
import native
import torch
from gpu_head import ALL_OPTIONS, MIB, Head, Reference, errors
from gpu_native import Call, Library
from gpu_peers import PEERS, Peer, with_options
from gpu_report import Report
from gpu_timing import Clock, Contender, bursts, first_calls, reason, steady

THREE, ONE = "three products", "one product"


@dataclass
class Bench:
    arguments: argparse.Namespace
    library: Library
    clock: Clock
    report: Report

    def ready(self, contender: Contender) -> bool:
        """Runs the contender for the first time; prints one line if that fails."""
        why = first_calls(self.clock, contender, self.arguments.cap, self.arguments.burst)
        if why:
            self.report.record(
                f"  {contender.name}: failed: {why}", contender=contender.name, failed=why
            )
        return why is None

    def tell(self, section: str, head: Head, contenders: list[Contender]) -> None:
        times = {c.name: c.ms for c in contenders}
        for c in contenders:
            ratio = c.ms / times[c.base] if c.base in times else 1.0
            mib, wrong = c.facts.get("mib"), c.facts.get("errors")
            text = f"  {c.name:38s} {c.ms:9.3f} ms  x {ratio:6.3f}"
            text += f"  {mib:8.1f} MiB" if isinstance(mib, float) else " " * 14
            if isinstance(wrong, dict):
                text += "  errors: " + ", ".join(f"{k} {v:.1e}" for k, v in wrong.items())
            self.report.record(
                text, section=section, head=head.name, shape=head.shape, contender=c.name, ms=c.ms,
                base=c.base, ratio=ratio, samples=c.samples, ours=c.ours, **c.facts,
            )  # fmt: skip


def floors(head: Head) -> list[Contender]:
    return [Contender(name, call, THREE) for name, call in head.floor().items()]


def ours(name: str, call: Call, base: str = THREE) -> Contender:
    mib = call.bytes / MIB
    return Contender(f"ours, {name}{mib:.0f} MiB", call, base, ours=True, facts={"mib": mib})


def judged(head: Head, want: Reference, contender: Contender) -> Contender:
    """Runs the contender once into gradients of NaN, and compares them with double."""
    tensors = contender.call.tensors
    for name in ("grad_input", "grad_weight"):
        tensors[name].fill_(float("nan"))
    contender.call()
    contender.facts["errors"] = errors(
        want, head.loss, tensors["grad_input"], tensors["grad_weight"]
    )
    return contender


def peers(bench: Bench, head: Head, want: Reference) -> tuple[list[Contender], list[Contender]]:
    """The peers for loss and gradients, and those for the loss alone."""
    train, loss = [], []
    for key in bench.arguments.peers:
        name = PEERS[key][0]
        if not bench.report.time_for(f"{head.name}: {name}", 20 if bench.clock.cuda else 0):
            break
        try:
            peer = Peer(key, head.input, head.weight, head.target)
        except ImportError as absent:
            bench.report.once(f"  {name}: absent here ({absent}); bench/setup-gpu installs it")
            continue
        except Exception as failure:  # importing a peer may fail in any way
            bench.report.once(f"  {name}: failed to load: {reason(failure)}")
            continue
        both = Contender(name, peer.train, THREE)
        if bench.ready(both):
            both.facts["errors"] = errors(want, peer.loss, peer.input.grad, peer.weight.grad)
            peer.release()
            both.facts["mib"] = extra(bench.clock, peer.train, head.gradient_bytes)
            train.append(both)
        alone = Contender(f"{name}, loss only", peer.loss_only, ONE)
        if bench.ready(alone):
            alone.facts["mib"] = extra(bench.clock, peer.loss_only, 0)
            loss.append(alone)
        peer.release()
    return train, loss


def extra(clock: Clock, call: Callable[[], object], gradients: int) -> float | None:
    """Peak MiB beyond inputs and `gradients` bytes; None without a GPU."""
    peak = clock.peak(call)
    return None if peak is None else (peak - gradients) / MIB


def workspaces(head: Head) -> dict[str, int | None]:
    """Bytes of workspace by name; None: the recommended size."""
    return {
        "recommended": None,
        "compile's memory": head.compile_bytes,
        "1 GiB + 4 N D": 1024 * MIB + head.sums,
        "128 MiB + 4 N D": head.frugal_bytes,
        "64 MiB + 4 N D": 64 * MIB + head.sums,
    }


def heads(bench: Bench, head: Head, want: Reference) -> None:
    """Loss and gradients, and the loss alone, of ours, the floor and the peers."""
    mine = [
        judged(head, want, ours(f"{k}, ", head.both(size))) for k, size in workspaces(head).items()
    ]
    each = torch.empty(head.shape[0], device=head.device)
    head.forward(128 * MIB, loss=each)()
    alone = ours("loss only, ", head.forward(128 * MIB), ONE)
    small = ours("loss only, ", head.forward(16 * MIB), ONE)
    alone.facts["errors"] = {"loss": abs(float(each.double().mean()) - want.loss)}
    train, loss = peers(bench, head, want)
    three, one, _ = floors(head)
    contenders = [c for c in (*mine, three, one, alone, small) if bench.ready(c)] + train + loss
    bursts(bench.clock, contenders, bench.arguments.rounds)
    bench.tell("heads", head, contenders)


def options(bench: Bench, head: Head, want: Reference) -> None:
    """Half the targets ignored, every option at once and some alone, f32 weight gradients,
    statistics."""
    size, device = head.compile_bytes, head.device
    plain = ours("none ignored, ", head.both(size))
    half = judged(
        head,
        head.reference(target=head.half),
        ours("half ignored, ", head.both(size, target=head.half), plain.name),
    )
    half_small = ours("half ignored, ", head.both(head.frugal_bytes, target=head.half), plain.name)
    extras = head.option_tensors()
    inputs = {k: extras[k] for k in ("bias", "vocab_weight", "token_weight")}
    every = judged(
        head,
        head.reference(**ALL_OPTIONS, **inputs),
        ours("every option, ", head.both(size, options=ALL_OPTIONS, **extras)),
    )
    few = {k: v for k, v in ALL_OPTIONS.items() if k != "softcap"}
    singles = [
        judged(
            head,
            head.reference(softcap=30.0),
            ours("softcap, ", head.both(size, options={"softcap": 30.0})),
        ),
        ours("label smoothing, ", head.both(size, options={"label_smoothing": 0.1})),
        ours("bias, ", head.both(size, **{k: v for k, v in extras.items() if "bias" in k})),
        ours("every option but the softcap, ", head.both(size, options=few, **extras)),
    ]
    wide = torch.zeros_like(head.weight, dtype=torch.float32)  # [V, D]
    f32 = judged(head, want, ours("f32 grad_weight, ", head.both(size, grad_weight=wide)))
    added = ours(
        "f32 grad_weight, accumulated, ", head.both(size, accumulate=True, grad_weight=wide)
    )
    statistics = {
        k: torch.empty(head.shape[0], device=device) for k in ("lse", "target_logit", "entropy")
    }
    alone = ours("loss only, ", head.forward(128 * MIB), ONE)
    told = ours("loss and statistics, ", head.forward(128 * MIB, **statistics), ONE)
    contenders = [plain, half, half_small, every, *singles, f32, added]
    contenders += [*floors(head), alone, told]
    if "compile" in bench.arguments.peers:
        h, w = head.input.detach().requires_grad_(), head.weight.detach().requires_grad_()
        loss = with_options(**ALL_OPTIONS)

        def run() -> None:
            h.grad = w.grad = None
            loss(
                h, w, head.target, inputs["bias"], inputs["vocab_weight"], inputs["token_weight"]
            ).backward()

        contenders.append(Contender("torch.compile, every option", run, THREE))
    contenders = [c for c in contenders if bench.ready(c)]
    if contenders[-1].name.startswith("torch"):
        h.grad = w.grad = None
        contenders[-1].facts["mib"] = extra(bench.clock, run, head.gradient_bytes)
    bursts(bench.clock, contenders, bench.arguments.rounds)
    bench.tell("options", head, contenders)


def frontier(bench: Bench, head: Head, want: Reference) -> None:
    """Time at budgets in geometric steps from the minimum to the whole of E."""
    del want
    least = head.both(0).bytes
    whole = gpu_frontier.whole_bytes(bench.arguments.cli, head.shape)
    count = bench.arguments.budgets
    sizes = [round(least * (whole / least) ** (i / (count - 1))) for i in range(count)]
    expected = gpu_frontier.predict(bench.arguments.cli, head.shape, sizes)
    contenders = [ours("frontier, ", head.both(size)) for size in sizes]
    floor = floors(head)[0]
    if not all([bench.ready(c) for c in [*contenders, floor]]):
        return
    bursts(bench.clock, [*contenders, floor], bench.arguments.rounds)
    slowest = gpu_frontier.bounds(sizes, [c.ms for c in contenders])
    bench.tell("frontier floor", head, [floor])
    for c, size, bound, predicted in zip(contenders, sizes, slowest, expected, strict=True):
        text = (
            f"{predicted:9.3f} ms, {c.ms / predicted:5.3f} of it"
            if predicted
            else "unknown (--cli)"
        )
        bench.report.record(
            f"  {size / MIB:8.1f} MiB {c.ms:9.3f} ms  x {c.ms / floor.ms:6.3f}  "
            f"{'within' if c.ms <= bound else 'BEYOND'} {bound:9.3f}  predicted {text}",
            section="frontier", head=head.name, shape=head.shape, bytes=size, ms=c.ms,
            floor_ms=floor.ms,
            ratio=c.ms / floor.ms, bound_ms=bound, predicted_ms=predicted, samples=c.samples,
        )  # fmt: skip


def steadily(bench: Bench, head: Head, want: Reference) -> None:
    """Each contender alone in a loop of seconds, at the clocks that the power limit allows. Twice,
    in opposite orders."""
    del want
    three, one, _ = floors(head)
    contenders = [three, *(ours(f"{k}, ", head.both(b)) for k, b in workspaces(head).items() if b)]
    contenders += [one, ours("loss only, ", head.forward(128 * MIB), ONE)]
    for key in bench.arguments.steady_peers:
        try:
            peer = Peer(key, head.input, head.weight, head.target)
        except Exception as failure:  # absent or broken; the others go on
            bench.report.say(f"  {PEERS[key][0]}: not here: {reason(failure)}")
            continue
        contenders.append(Contender(peer.name, peer.train, THREE))
    contenders = [c for c in contenders if bench.ready(c)]
    for order in (contenders, contenders[::-1]):
        for c in order:
            c.samples.append(steady(bench.clock, c.call, bench.arguments.steady))
    bench.tell("steady", head, contenders)


HEAD_SECTIONS = {  # a section's description, function and expected seconds on an H200
    "heads": ("loss and gradients beside the peers", heads, 30),
    "options": ("options, ignored tokens, f32 sums", options, 15),
    "frontier": ("time against workspace", frontier, 10),
    "steady": ("loops of seconds", steadily, 35),
}


def run_head(bench: Bench, head: Head, sections: list[str]) -> None:
    tokens, hidden, vocab = head.shape
    chosen = [s for s in HEAD_SECTIONS if s in sections]
    if not chosen:
        return
    want = (
        head.reference()
        if {"heads", "options"} & set(chosen)
        else Reference(0, *[torch.empty(0)] * 2)
    )
    for section in chosen:
        what, function, seconds = HEAD_SECTIONS[section]
        if not bench.report.time_for(f"{head.name}, {section}", seconds if bench.clock.cuda else 0):
            continue
        bench.report.say(f"\n{head.name}: N {tokens}, D {hidden}, V {vocab}: {what}")
        try:
            function(bench, head, want)
        except (native.Failure, RuntimeError) as failure:
            why = reason(failure)
            bench.report.record(
                f"  {section}: stopped: {why}", section=section, head=head.name, failed=why
            )
        gc.collect()
        if bench.clock.cuda:
            torch.cuda.empty_cache()
        bench.report.save()
