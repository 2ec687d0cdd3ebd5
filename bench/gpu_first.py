# SPDX-License-Identifier: Apache-2.0
"""First calls, each in a process of its own: ours alone on the machine, then the peers at the same
time."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpu_peers import PEERS
from gpu_sections import Bench

Process = subprocess.Popen[str]


def start(bench: Bench, contender: str, *more: str) -> Process:
    script = Path(__file__).parent / "first_call.py"
    command = [
        sys.executable,
        str(script),
        "--library",
        bench.arguments.library,
        "--contender",
        contender,
        "--head",
        bench.arguments.heads[0],
        "--device",
        bench.library.device,
        *more,
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def result(process: Process, seconds: float) -> dict[str, Any]:
    try:
        out, wrong = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return {"failed": f"no result within {seconds:.0f} s"}
    if process.returncode == 0:
        return json.loads(out.splitlines()[-1])
    return {"failed": (wrong.strip().splitlines() or ["no message"])[-1][:200]}


def tell(bench: Bench, name: str, r: dict[str, Any]) -> None:
    text = r.get("failed") or (f"load {r['load_s']:6.2f} s, first {r['first_s']:6.2f} s, "
                               f"second {r['second_s'] * 1e3:8.1f} ms")  # fmt: skip
    bench.report.record(f"  {name:34s} {text}", section="first", name=name, **r)


def first(bench: Bench) -> None:
    for name, more in (("ours", ()), ("ours, warmed up (in load)", ("--warmup",))):
        if bench.report.time_for(name, 20 if bench.clock.cuda else 0):
            tell(bench, name, result(start(bench, "ours", *more), bench.arguments.cap))
    if not bench.arguments.first_peers or not bench.report.time_for("first calls of the peers", 60):
        return
    running = {key: start(bench, key) for key in bench.arguments.first_peers}
    for key, process in running.items():
        tell(bench, PEERS[key][0], result(process, bench.arguments.cap))
    bench.report.save()
