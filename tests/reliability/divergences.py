# SPDX-License-Identifier: Apache-2.0
"""Random divergences of two heads, by as many processes as there are processors."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor

from reliability.common import NotKept, Row, Settings, number, run

PROMISE = "Every element of random divergences lies within its bound of the reference"
HOW = (
    "random calls of every kind, dtype and option, values that are infinite or NaN among them, in"
    " workspaces of every size, dz kept or not"
)
KINDS = ("forward_kl", "reverse_kl", "jsd", "skew_kl", "tv")
SEEDS = 1_000_000  # seeds per process


def promise(backend: str) -> tuple[str, str]:
    return f"{PROMISE} ({backend})", HOW


def _shard(
    program: str, device: int, calls: int, job: int, environment: dict[str, str]
) -> tuple[str, int]:
    """What a process wrote, and its exit code."""
    seed = 1 + job * SEEDS
    options = ["--calls", str(calls), "--seed", str(seed), "--device", str(device)]
    done = run([program, *options], 1700, environment)
    if done.returncode not in (0, 1) or "failing seeds:" not in done.stdout:
        words = (done.stderr.strip() or "no word").splitlines()[-1]
        raise NotKept(f"seeds from {seed} on: ended with {done.returncode}: {words}")
    return done.stdout, done.returncode


def _numbers(name: str, text: str) -> list[float]:
    return [float(value) for value in re.findall(rf"^{name}: ([\d.]+)", text, re.M)]


def random_calls(
    settings: Settings, calls: int, device: int, environment: dict[str, str] | None = None
) -> list[Row]:
    """`device` is 1 for CUDA. Raises with the seeds that failed, each of which runs alone again."""
    program, jobs = str(settings.program("divergences")), len(os.sched_getaffinity(0))
    each = -(-calls // jobs)
    with ThreadPoolExecutor(jobs) as pool:
        made = list(
            pool.map(lambda job: _shard(program, device, each, job, environment or {}), range(jobs))
        )
    text = "".join(part for part, _ in made)
    worst = {kind: max(_numbers(f"worst {kind}", text), default=0.0) for kind in KINDS}
    failing = " ".join(re.findall(r"^failing seeds:([ \d]*)$", text, re.M)).split()
    figure = (
        f"{number(int(sum(_numbers('calls', text))))} calls of"
        f" {number(int(sum(_numbers('cases', text))))} cases in {jobs} processes;"
        f" largest error / bound: {', '.join(f'{kind} {worst[kind]:.3f}' for kind in KINDS)}"
    )
    if failing or any(code for _, code in made):
        again = f"{program} --device {device} --cases 1 --seed"
        raise NotKept(f"{figure}; failing seeds: {' '.join(failing)} ({again} S)")
    return [Row(*promise("CUDA" if device else "CPU"), f"{figure}; no seed failed")]


def host(settings: Settings) -> list[Row]:
    return random_calls(settings, 400 if settings.short else 20_000, 0)
