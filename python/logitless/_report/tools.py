# SPDX-License-Identifier: Apache-2.0
"""`python -m logitless info`, `plan` and `selftest`: what an installed package can say and check
without a build."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import platform
import time

import logitless
from logitless import _abi
from logitless._errors import LogitlessError
from logitless._report import command

BACKENDS = ("cpu", "cuda", "webgpu")
DTYPES = {"f32": (_abi.F32, 4), "f16": (_abi.F16, 2), "bf16": (_abi.BF16, 2)}
DEVICES = {"cpu": _abi.CPU, "cuda": _abi.CUDA}
_MIB = 1 << 20


def info(arguments: list[str]) -> int:
    argparse.ArgumentParser(
        prog="python -m logitless info",
        description="The package's version and file, and what each backend is on this machine.",
    ).parse_args(arguments)
    print(f"logitless {logitless.__version__}, Python {platform.python_version()}")
    print(f"library: {logitless.library_path()}")
    for backend in BACKENDS:
        works, text = command.usable(backend)
        print(f"{backend}: {'' if works else 'not available: '}{text}")
    for package in ("torch", "jax", "numpy"):
        there = importlib.util.find_spec(package) is not None
        print(f"{package}: {importlib.metadata.version(package) if there else 'not installed'}")
    return 0


def _views(
    sizes: tuple[int, int, int], dtype: str, device: str, gradients: bool
) -> list[_abi.View]:
    """Views of a head's tensors, without memory."""
    n, d, v = sizes
    code, at = DTYPES[dtype][0], DEVICES[device]

    def matrix(name: str, rows: int) -> _abi.View:
        return _abi.View(name, code, at, 0, (rows, d), (d, 1))

    found = [matrix("input", n), matrix("weight", v)]
    found.append(_abi.View("target", _abi.I64, at, 0, (n,), (1,)))
    found.append(_abi.View("loss", _abi.F32, at, 0, (), ()))
    if gradients:
        found += [matrix("grad_input", n), matrix("grad_weight", v)]
    return found


def _line(name: str, *bytes: int) -> str:
    return f"  {name:28}" + "".join(f" {b / _MIB:10.1f}" for b in bytes)


def plan(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m logitless plan",
        description="How much memory a head's loss needs beside its tensors: the least, and what "
        "the library uses if `memory` does not bound it.",
    )
    parser.add_argument("tokens", type=int)
    parser.add_argument("hidden", type=int)
    parser.add_argument("vocab", type=int)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--device", choices=DEVICES, help="cuda where there is a GPU")
    a = parser.parse_args(arguments)
    sizes = (a.tokens, a.hidden, a.vocab)
    device = a.device or ("cuda" if command.usable("cuda")[0] else "cpu")
    element = DTYPES[a.dtype][1]
    for name, value, least in (
        ("TOKENS", a.tokens, 0),
        ("HIDDEN", a.hidden, 1),
        ("VOCAB", a.vocab, 1),
    ):
        if value < least:
            return command.refuse(name, f"{value} is out of range; allowed: >= {least}", "plan")
    lines = [f"{a.dtype} on {device}: MiB, least and recommended"]
    calls = {
        "loss alone": (_abi.LINEAR_CROSS_ENTROPY_FORWARD, False),
        "loss and gradients": (_abi.LINEAR_CROSS_ENTROPY_FORWARD_BACKWARD, True),
    }
    try:
        for name, (kind, gradients) in calls.items():
            views = _views(sizes, a.dtype, device, gradients)
            made = _abi.Plan(kind, views, _abi.Options(), (DEVICES[device], 0))
            lines.append(_line(name, made.minimum, made.recommended))
    except LogitlessError as error:
        return command.refuse("--device", str(error), "plan")
    kept = _abi.whole_kept(a.tokens, a.vocab, DTYPES[a.dtype][0])
    lines.append(_line("kept from loss to gradients", 0, kept))
    lines.append(_line("the gradients themselves", element * a.hidden * (a.tokens + a.vocab)))
    lines.append(_line("all logits would be", element * a.tokens * a.vocab))
    print(*lines, sep="\n")
    return 0


def _without_torch(limit: float) -> int:
    """selftest where only NumPy is installed."""
    from logitless._report import numbers

    end, start = time.monotonic() + limit, time.monotonic()
    rows = numbers.run(60, lambda: end - time.monotonic())
    print(*map(command.line_of, rows), sep="\n")
    right = all(row["cases"] > 0 and not row["failures"] for row in rows)
    took = time.monotonic() - start
    print(f"{'right' if right else 'NOT RIGHT'}: cpu in f32 alone, {took:.0f} s")
    print("the rest needs PyTorch, which is not installed")
    return 0 if right else 1


def selftest(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m logitless selftest",
        description="Whether Logitless is right on this machine, in at most a minute: random calls "
        "on the CPU, and on the first GPU with each kind of kernels that it has, beside the "
        "formulas in double. Exit code 0: right; 1: something is wrong, or could not be checked.",
    )
    parser.add_argument("--device", choices=DEVICES, help="that one alone")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds (%(default)s)")
    a = parser.parse_args(arguments)
    if not 10 <= a.limit <= 3600:
        why = f"{a.limit} is out of range; allowed: 10 to 3600"
        return command.refuse("--limit", why, "selftest")
    if importlib.util.find_spec("torch") is None:
        if a.device == "cuda" or importlib.util.find_spec("numpy") is None:
            why = "is not installed; selftest needs it, or NumPy for the CPU alone"
            return command.refuse("torch", why, "selftest")
        return _without_torch(a.limit)
    found, text = command.usable("cuda")
    if a.device == "cuda" and not found:
        return command.refuse("--device", text, "selftest")
    devices = [a.device] if a.device else ["cpu", *(["cuda"] if found else [])]
    parts = [(d, name) for d in devices for name in (command.engines() if d == "cuda" else ["cpu"])]
    start, right = time.monotonic(), True
    for i, (device, name) in enumerate(parts):
        share = (a.limit - (time.monotonic() - start)) / (len(parts) - i)
        report = command.Report(device, share)
        # A part that starts takes some seconds before its first case.
        report.part("conformance", name, max(5.0, share - 6))
        lines = [line for line in command.table(report.whole) if line.startswith(name)]
        print(*lines, sep="\n")
        for entry in (*report.whole["failed"], *report.whole["left_out"]):
            print(f"{name}: {entry['part']}: {entry['reason']}")
        right = right and report.right([name]) is True and not report.whole["left_out"]
    took = time.monotonic() - start
    where = " and ".join(dict.fromkeys(device for device, _ in parts))
    print(f"{'right' if right else 'NOT RIGHT'}: {where}, {took:.0f} s")
    if not found and a.device is None:
        print(f"cuda was not checked: {text}")
    return 0 if right else 1
