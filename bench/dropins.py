# SPDX-License-Identifier: Apache-2.0
"""Our replacements of other libraries' functions, compared with the originals: time and memory of
one head on one GPU, in bf16.

    LOGITLESS_LIBRARY=build/device/liblogitless.so PYTHONPATH=python python bench/dropins.py \\
        --peers-from FOLDER --json OUT.json

Each library's function, ours in its place with its default memory, and ours with `--memory` (all
logits fit by default) take turns in bursts in one process, in balanced orders; medians
of `--rounds`, by the device's events. Random data and upstream gradients. MiB: the allocator's peak
beyond the inputs and their gradients. `time` and `memory`: ours with the default memory / theirs;
the targets are at most 1.00 and 1.10. `off`: the difference of the gradients of the hidden states,
relative to their norm.

FOLDER holds the libraries' packages (trl, verl, unsloth_zoo, liger_kernel, prime_rl), of which the
files of these functions alone are imported; a library that is absent or fails is left out, with one
line that says so. Needs a GPU; `--tiny` tries it anywhere, and its figures mean nothing."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_timing import MIB, Clock, Contender, bursts, first_calls
from torch import Tensor

from logitless._abi import parse_memory
from logitless.integrations import liger, prime_rl, unsloth, verl
from logitless.integrations.trl import TrlPatch
from logitless.torch import default_memory

Outputs = tuple[Tensor, ...]
Function = Callable[[Tensor, Tensor, Tensor], Outputs]
TRL_CHUNK = 32768  # the value that trl.trainer.utils passes


def bare(folder: Path, *packages: str) -> None:
    """Makes the packages importable without what their own __init__ imports."""
    for name in packages:
        path = folder.joinpath(*name.split("."))
        if not path.is_dir():
            raise ImportError(f"{folder} has no {name}")
        module = types.ModuleType(name)
        module.__path__ = [str(path)]
        sys.modules.setdefault(name, module)


def stand_in(name: str, **values: Any) -> None:
    """A stub module with the given values, which are all that these functions use."""
    module = types.ModuleType(name)
    vars(module).update(values)
    sys.modules.setdefault(name, module)


# The outputs that trainers of TRL 1.16 ask for (log-probabilities are made in any case), and how
# many of the results, from the first on, get an upstream gradient.
TRAINERS: dict[str, tuple[tuple[str, ...], int]] = {
    "log-probability alone": (("log_probs",), 1),
    "SFT": (("log_probs", "entropy", "is_top1"), 1),
    "GRPO, entropy bonus": (("log_probs", "entropy"), 2),
    "KTO": (("log_probs", "entropy", "mean_logits"), 1),
    "DPO, weighting": (("entropy", "log_sum_sq_probs", "mean_logits", "is_top1"), 1),
}


def of_trl(function: Callable[[], Any], outputs: tuple[str, ...], count: int) -> Function:
    own = function()

    def call(x: Tensor, w: Tensor, t: Tensor) -> Outputs:
        made: Outputs = own.apply(x, w, None, t, 1.0, TRL_CHUNK, None, 1.0, outputs)
        return made[:count]

    return call


def trls(folder: Path) -> Any:
    bare(folder, "trl", "trl.trainer")
    stand_in("trl.trainer.utils", maybe_gather_lm_head_ctx=lambda *_: contextlib.nullcontext())
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    return ChunkedLogProbFunction


def verls_kernel(folder: Path) -> Function:
    bare(folder, "verl", "verl.utils")
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    return lambda x, w, t: linear_cross_entropy(x, w, t, 1.0, "none", None)[:1]


def verls_module(folder: Path) -> Function:
    bare(folder, "verl", "verl.utils")
    from verl.utils.experimental.torch_functional import FusedLinearForPPO

    module = FusedLinearForPPO()
    return lambda x, w, t: module(x, w, t)[:1]


def unsloths(folder: Path) -> Function:
    bare(folder, "unsloth_zoo", "unsloth_zoo.fused_losses", "unsloth_zoo.temporary_patches")
    from unsloth_zoo.fused_losses.chunked_logprob import unsloth_chunked_logprobs

    return lambda x, w, t: (unsloth_chunked_logprobs(x[None], w, t[None])[0],)


def layer_of(made: Callable[..., Any], chunk: int) -> Function:
    layers: dict[int, Any] = {}

    def call(x: Tensor, w: Tensor, t: Tensor) -> Outputs:
        if id(w) not in layers:
            with torch.device("meta"):
                layers[id(w)] = made(*reversed(w.shape), chunk)
            layers[id(w)].weight = w
        ones = torch.ones(t.shape, device=t.device)[None]
        return (layers[id(w)](x[None], t[None], ones)["logprobs"][0],)

    return call


def primes(folder: Path, chunk: int) -> Function:
    names = ("prime_rl", "prime_rl.trainer", "prime_rl.trainer.models", "prime_rl.utils")
    bare(folder, *names, "prime_rl.trainer.models.layers")
    stand_in("prime_rl.utils.logger", get_logger=None)
    stand_in("prime_rl.utils.vlm", get_final_logit_softcapping=None)
    from prime_rl.trainer.models.layers.lm_head import FusedOutputLinear

    return layer_of(FusedOutputLinear, chunk)


def of_liger(function: Any, reduction: str, accum_dtype: torch.dtype | None) -> Function:
    middle = (None, None, -100, 0.0, 0.0, reduction, None, False, accum_dtype)
    return lambda x, w, t: function.apply(x, w, t, *middle)[:1]


def ligers(folder: Path) -> Any:
    sys.path.append(str(folder))
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    return LigerFusedLinearCrossEntropyFunction


def cases(folder: Path) -> dict[str, tuple[Callable[[], Function], Callable[[], Function]]]:
    """By name, a pair of functions that make the library's function and ours."""
    found: dict[str, tuple[Callable[[], Function], Callable[[], Function]]] = {}
    for name, (outputs, count) in TRAINERS.items():
        found[f"TRL, {name}"] = tuple(  # type: ignore[assignment]
            functools.partial(of_trl, function, outputs, count)
            for function in (lambda: trls(folder), lambda: TrlPatch(None))
        )
    found["verl's kernel"] = (
        lambda: verls_kernel(folder),
        lambda: lambda x, w, t: verl.linear_cross_entropy(x, w, t)[:1],
    )
    found["verl's FusedLinearForPPO"] = (
        lambda: verls_module(folder),
        lambda: lambda x, w, t: verl.FusedLinearForPPO()(x, w, t)[:1],
    )
    ours = unsloth.chunked_hidden_states_selective_log_softmax
    found["Unsloth"] = (
        lambda: unsloths(folder),
        lambda: lambda x, w, t: (ours(x[None], w, t[None])[0],),
    )
    for chunk in (8192, 1024):
        found[f"prime-rl, chunks of {chunk}"] = (
            functools.partial(primes, folder, chunk),
            functools.partial(layer_of, prime_rl.FusedOutputLinear, chunk),
        )
    for name, how in {
        "mean": ("mean", None), "none": ("none", None), "mean, f32 sums": ("mean", torch.float32)
    }.items():  # fmt: skip
        found[f"Liger, {name}"] = (
            lambda how=how: of_liger(ligers(folder), *how),  # type: ignore[misc]
            functools.partial(of_liger, liger.FusedLinearCrossEntropyFunction, *how),
        )
    return found


class Head:
    def __init__(self, tokens: int, hidden: int, vocab: int, device: str) -> None:
        torch.manual_seed(0)
        self.x = torch.randn(tokens, hidden, device=device).bfloat16().requires_grad_()
        w = (torch.randn(vocab, hidden, device=device) / hidden**0.5).bfloat16()
        self.w = torch.nn.Parameter(w)
        self.t = torch.randint(0, vocab, (tokens,), device=device)
        self.upstream = [torch.randn(tokens, device=device) for _ in range(2)]

    def run(self, function: Function, backward: bool) -> None:
        self.x.grad = self.w.grad = None
        with torch.set_grad_enabled(backward):
            outputs = function(self.x, self.w, self.t)
        if backward:
            given = [u if o.dim() else torch.ones_like(o) for o, u in zip(outputs, self.upstream)]
            torch.autograd.backward(outputs, given)

    def gradient(self, function: Function) -> Tensor:
        self.run(function, True)
        assert self.x.grad is not None
        found, self.x.grad, self.w.grad = self.x.grad.float(), None, None
        return found

    def gradient_bytes(self, backward: bool) -> int:
        return 2 * (self.x.numel() + self.w.numel()) if backward else 0


def within(memory: int | None, call: Callable[[], None]) -> Callable[[], None]:
    def bounded() -> None:
        with default_memory(memory):
            call()

    return bounded


def measure(
    clock: Clock, head: Head, functions: dict[str, Function], backward: bool, given: Any
) -> dict[str, tuple[float, float]]:
    """(milliseconds, MiB) of each function. One that fails is printed and left out."""
    found, contenders = {}, []
    for name, function in functions.items():
        call = functools.partial(head.run, function, backward)
        memory = parse_memory(given.memory) if name == "more" else None
        contender = Contender(name, within(memory, call))
        if why := first_calls(clock, contender, given.limit, given.burst):
            print(f"  {name}: {why}", flush=True)
            continue
        contenders.append(contender)
    bursts(clock, contenders, given.rounds)
    for contender in contenders:
        head.x.grad = head.w.grad = None
        peak = (clock.peak(contender.call) or 0) - head.gradient_bytes(backward)
        found[contender.name] = (contender.ms, max(peak, 0) / MIB)
    return found


def row(name: str, what: str, found: dict[str, tuple[float, float]], off: float) -> str:
    cells = [f"{name:28s} {what:9s}"]
    for contender in ("theirs", "ours", "more"):
        ms, mib = found.get(contender, (float("nan"),) * 2)
        cells.append(f"{ms:8.2f} {mib:6.0f}")
    if {"theirs", "ours"} <= set(found):
        theirs, ours = found["theirs"], found["ours"]
        cells.append(f"{ours[0] / theirs[0]:6.2f} {ours[1] / max(theirs[1], 1e-9):6.2f}")
    return "  ".join(cells) + f"  {off:.1e}"


def compare(name: str, made: Any, head: Head, clock: Clock, given: Any) -> list[dict[str, Any]]:
    functions: dict[str, Function] = {}
    for who, make in zip(("theirs", "ours"), made):
        try:
            functions[who] = make()
        except Exception as failure:  # a library may fail to import in any way
            print(f"{name}, {who}: {type(failure).__name__}: {str(failure)[:150]}", flush=True)
    functions["more"] = functions["ours"]
    off = float("nan")
    with contextlib.suppress(Exception):
        a, b = (head.gradient(functions[who]) for who in ("theirs", "ours"))
        off = float((a - b).norm() / b.norm())
        del a, b
    rows = []
    for backward, what in ((True, "both"), (False, "forward")):
        found = measure(clock, head, functions, backward, given)
        print(row(name, what, found, off), flush=True)
        rows += [
            {"function": name, "pass": what, "who": who, "ms": ms, "mib": mib, "off": off}
            for who, (ms, mib) in found.items()
        ]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="8192x2048x151936", help="tokens x hidden x vocab")
    parser.add_argument("--peers-from", type=Path, default=Path("build/peers/site-packages"))
    parser.add_argument("--only", default="", help="the functions whose names have this text")
    parser.add_argument("--memory", default="2600MiB", help="what ours may take instead")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--burst", type=float, default=0.1, help="seconds")
    parser.add_argument("--limit", type=float, default=90, help="seconds of a first call")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    shape = "64x32x300" if given.tiny else given.shape
    device = "cuda" if torch.cuda.is_available() and not given.tiny else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    about = f"{name}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}"
    print(f"{about}, N x D x V {shape}, bf16; ours in {given.memory}: last two figures")
    print(f"{'':38s}  {'theirs ms':>9s} {'MiB':>5s}  {'ours ms':>8s} {'MiB':>6s}  "
          f"{'more ms':>8s} {'MiB':>6s}  {'time':>6s} {'memory':>6s}  off")  # fmt: skip
    os.environ.setdefault("UNSLOTH_IS_PRESENT", "1")
    head, clock = Head(*map(int, shape.split("x")), device), Clock(device)
    rows: list[dict[str, Any]] = []
    for case, made in cases(given.peers_from).items():
        if given.only in case:
            rows += compare(case, made, head, clock, given)
            if given.json:
                given.json.write_text(json.dumps({"about": about, "shape": shape, "rows": rows}))


if __name__ == "__main__":
    main()
