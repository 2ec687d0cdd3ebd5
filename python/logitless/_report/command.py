# SPDX-License-Identifier: Apache-2.0
"""Runs the parts of a report, and writes their results as one JSON file and a table."""

from __future__ import annotations

import argparse
import datetime
import getpass
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import logitless
from logitless._errors import LogitlessError

VERSION = 1  # of the JSON file's format
LIMIT = 290.0
KERNELS = "LOGITLESS_CUDA_KERNELS"
WHO = {"ours": "ours", "compile": "torch.compile"}


def usable(backend: str) -> tuple[bool, str]:
    """Whether the backend is available, and its description or why it is not."""
    try:
        return True, logitless.describe_backend(backend)
    except LogitlessError as error:
        return False, str(error)


def engines() -> list[str]:
    """The names of the engines (sets of CUDA kernels) for this GPU, the default ones first. They
    are read from the library's error about an unknown engine."""
    code = "import logitless\ntry: logitless.describe_backend('cuda')\nexcept "
    code += "logitless.LogitlessError as error: print(error)"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                          env=os.environ | {KERNELS: "?"}, check=True)  # fmt: skip
    _, found, names = told.stdout.strip().partition(f'{KERNELS} is "?"; allowed on device')
    return names.rpartition(": ")[2].split(", ") if found else []


def scrubbed(text: str) -> str:
    """The last line of `text`, without paths and the names of user and host."""
    line = (text.strip().splitlines() or [""])[-1]
    for name in (str(Path.home()), getpass.getuser(), socket.gethostname()):
        line = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "...", line)
    line = re.sub(r"(['\"])/[^'\"]*\1", "a path", line)
    return re.sub(r"(?<![\w.])(?:\.\.\.)?/[^\s'\":,;]+", "a path", line)[:300]


class Report:
    def __init__(self, device: str, limit: float) -> None:
        self.device, self.start, self.limit = device, time.monotonic(), limit
        self.whole: dict[str, Any] = {
            "report": VERSION, "date": datetime.date.today().isoformat(), "machine": {},
            "conformance": [], "heads": [], "left_out": [], "failed": [],
        }  # fmt: skip

    def left(self) -> float:
        return self.limit - (time.monotonic() - self.start)

    def part(self, name: str, engine: str, seconds: float, *options: str) -> None:
        """Runs one part in its own process, and adds its records to the report."""
        if seconds < 5:
            self.whole["left_out"].append({"part": name, "engine": engine, "reason": "time"})
            return
        command = [sys.executable, "-m", "logitless._report.worker", name, "--device", self.device]
        command += ["--seconds", f"{seconds:.0f}", *options]
        environment = os.environ | ({KERNELS: engine} if self.device == "cuda" else {})
        out, why = "", ""
        try:
            # A worker that hangs is killed. The records that it wrote before are still read.
            done = subprocess.run(command, env=environment, capture_output=True, text=True,
                                  timeout=seconds + 45)  # fmt: skip
            out, why = done.stdout, scrubbed(done.stderr) if done.returncode else ""
            if done.returncode < 0:
                why = f"ended by signal {-done.returncode}"
        except subprocess.TimeoutExpired as late:
            taken = late.stdout or b""
            out = taken.decode() if isinstance(taken, bytes) else taken
            why = f"no end after {seconds + 45:.0f} s"
        if why:
            self.whole["failed"].append({"part": name, "engine": engine, "reason": why})
        for line in out.splitlines():
            self.take(json.loads(line), engine)

    def take(self, record: dict[str, Any], engine: str) -> None:
        kind = record.pop("record")
        if kind == "machine":
            self.whole["machine"] = record
        else:
            if "failures" in record:
                record["failures"] = [scrubbed(failure) for failure in record["failures"]]
            key = {"head": "heads", "left out": "left_out"}.get(kind, kind)
            self.whole[key].append({"engine": engine, **record})

    def right(self, engines: list[str]) -> bool | None:
        """False if something is wrong or failed; otherwise True, or None if some kernels were not
        checked."""
        rows = self.whole["conformance"]
        if self.whole["failed"] or any(row["failures"] for row in rows):
            return False
        return True if {row["engine"] for row in rows} == set(engines) else None


def _cell(figures: dict[str, Any], floor: dict[str, Any], name: str) -> str:
    found = figures.get(name)
    if found is None:
        return "-"
    if "failed" in found:
        return str(found["failed"])
    mib = "" if found["mib"] is None else f" [{found['mib']:.0f}]"
    return f"{found['ms'] / floor['ms']:.3f}{mib}" if "ms" in floor else f"{found['ms']:.2f} ms"


def line_of(row: dict[str, Any]) -> str:
    """What was found of one function and dtype."""
    verdict = "; ".join(row["failures"][:3]) or "right"
    return (
        f"{row['engine']:10s} {row['function']:22s} {row['dtype']:5s} {row['cases']:3d} cases, "
        f"largest error {row['worst']:.2f} of its limit: {verdict}"
    )


def table(whole: dict[str, Any]) -> list[str]:
    """The report as lines of text. The times of a head are in units of the time that its matrix
    products alone take."""
    lines = [", ".join(f"{k} {v}" for k, v in whole["machine"].items()), ""]
    lines += map(line_of, whole["conformance"])
    lines += ["", "x the bare matrix products of the same run, [MiB beyond inputs and gradients]"]
    for entry in whole["heads"]:
        name, dtype, *shape = entry["head"]
        figures = entry["figures"]
        lines.append(
            f"{entry['engine']}: {name}, {dtype}, N {shape[0]}, D {shape[1]}, V {shape[2]}"
        )
        for section in dict.fromkeys(n.rpartition(", ")[0] for n in figures if ", " in n):
            count = 1 if section == "loss" else 3
            floor = figures.get(f"{count} products", {})
            cells = [f"{title} {_cell(figures, floor, f'{section}, {who}')}"
                     for who, title in WHO.items() if f"{section}, {who}" in figures]  # fmt: skip
            base = f"{floor['ms']:.3f} ms" if "ms" in floor else "unknown"
            lines.append(f"  {section:28s} {', '.join(cells)}; the products {base}")
    for entry in whole["left_out"]:
        what = entry.get("part") or ", ".join(map(str, entry["head"]))
        lines.append(f"left out for {entry['reason']}: {entry['engine']}, {what}")
    for entry in whole["failed"]:
        lines.append(f"FAILED: {entry['engine']}, {entry['part']}: {entry['reason']}")
    return lines


def make(device: str, quick: bool, compiled: bool, limit: float) -> dict[str, Any]:
    report = Report(device, limit)
    names = engines() if device == "cuda" else ["cpu"]
    report.part("machine", names[0], 30)
    quickly = ["--quick"] if quick else []
    for name in names:
        report.part("conformance", name, min(45, report.left() / 4), *quickly)
    # torch.compile, which takes the most time, is measured once: with the first engine.
    for i, name in enumerate(names):
        rest = len(names) - 1 - i
        more = ["--compiled"] if compiled and i == 0 else []
        report.part("heads", name, report.left() - 20 - 50 * rest, *quickly, *more)
    report.whole["right"] = report.right(names)
    report.whole["seconds"] = round(time.monotonic() - report.start)
    return report.whole


def write(path: Path, whole: dict[str, Any]) -> None:
    """Writes the file. If writing fails, no partial file is left at `path`."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(whole, indent=1) + "\n")
    partial.replace(path)


def refuse(field: str, message: str, asked: str = "report") -> int:
    print(f"logitless {asked}: {field}: {message}", file=sys.stderr)
    return 2


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m logitless report",
        description="Whether Logitless is right and how fast it is on this machine, in at most "
        "five minutes: a sample of calls beside the formulas in double, five heads beside bare "
        "matrix products and torch.compile, with every kind of kernels that the GPU has. Writes "
        "one JSON file without names, folders or hosts, and prints it as a table.",
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], help="cuda where there is a GPU")
    parser.add_argument("--out", type=Path, help="the file; logitless-report-DATE.json by default")
    parser.add_argument("--quick", action="store_true", help="tiny heads, to try the command")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds (%(default)s)")
    a = parser.parse_args(arguments)
    if importlib.util.find_spec("torch") is None:
        return refuse("torch", "the report needs PyTorch; pip install torch")
    if not 10 <= a.limit <= 3600:
        return refuse("--limit", f"{a.limit} is out of range; allowed: 10 to 3600")
    cuda, text = usable("cuda")
    if a.device == "cuda" and not cuda:
        return refuse("--device", text)
    out = a.out or Path(f"logitless-report-{datetime.date.today().isoformat()}.json")
    if not out.absolute().parent.is_dir():
        return refuse("--out", f"{out}: no such folder")
    if out.is_dir() or not os.access(out.absolute().parent, os.W_OK):
        return refuse("--out", f"{out}: not a file that can be written")
    whole = make(a.device or ("cuda" if cuda else "cpu"), a.quick, not a.no_compile, a.limit)
    print(*table(whole), sep="\n")
    write(out, whole)
    print(f"\n{out}: {whole['seconds']} s; docs/gpus.md says where it can be sent")
    return 1 if whole["right"] is False else 0
