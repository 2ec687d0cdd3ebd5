# SPDX-License-Identifier: Apache-2.0
"""The output of a run: lines on the terminal, and the same in a text and a JSON file that are
written after every part."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch


def machine(device: str) -> dict[str, str]:
    facts = {"date": datetime.date.today().isoformat(), "torch": torch.__version__,
             "python": sys.version.split()[0], "command": " ".join(sys.argv)}  # fmt: skip
    if device == "cuda":
        facts["device"] = torch.cuda.get_device_name()
        query = "driver_version,power.limit,clocks.max.sm"
        try:
            line = subprocess.run(
                ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "--id=0"],
                capture_output=True, text=True, timeout=20, check=True,
            ).stdout.strip()  # fmt: skip
            facts[query] = line
        except (OSError, subprocess.SubprocessError):
            pass
    else:
        facts["device"] = f"CPU, {torch.get_num_threads()} threads"
    return facts


class Report:
    def __init__(self, device: str, prefix: Path | None, limit: float) -> None:
        self.start, self.limit, self.prefix = time.perf_counter(), limit, prefix
        self.facts = machine(device)
        self.records: list[dict[str, Any]] = []
        self.lines: list[str] = []
        self.say(", ".join(f"{k} {v}" for k, v in self.facts.items()))

    def elapsed(self) -> float:
        return time.perf_counter() - self.start

    def time_for(self, what: str, seconds: float) -> bool:
        """Whether about `seconds` more fit the limit; says what is left out where they do not."""
        if self.elapsed() + seconds <= self.limit:
            return True
        self.say(f"left out for time ({self.elapsed():.0f} of {self.limit:.0f} s used): {what}")
        return False

    def say(self, line: str) -> None:
        print(line, flush=True)
        self.lines.append(line)

    def once(self, line: str) -> None:
        if line not in self.lines:
            self.say(line)

    def record(self, line: str, **values: Any) -> None:
        self.say(line)
        self.records.append(values)

    def save(self) -> None:
        if self.prefix is None:
            return
        self.prefix.parent.mkdir(parents=True, exist_ok=True)
        self.prefix.with_suffix(".txt").write_text("\n".join(self.lines) + "\n")
        whole = {"machine": self.facts, "seconds": self.elapsed(), "records": self.records}
        self.prefix.with_suffix(".json").write_text(json.dumps(whole, indent=1) + "\n")
