# SPDX-License-Identifier: Apache-2.0
"""The frontier of time against workspace: a budget's predicted time, and its allowed time."""

from __future__ import annotations

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MIB = 1 << 20


def plan(cli: Path, shape: tuple[int, int, int], size: int) -> dict[str, Any]:
    """`logitless plan --device cuda`; without a GPU it predicts for one H200."""
    command = [str(cli), "plan", *map(str, shape), "--device", "cuda", "--dtype", "bf16",
               "--grad-dtype", "bf16", "--memory", str(size), "--json"]  # fmt: skip
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    found: dict[str, Any] = json.loads(ran.stdout)["plan"]
    return found


def trouble(cli: Path) -> str | None:
    """Why the command line cannot predict, or None."""
    try:
        plan(cli, (8, 8, 8), 1 << 30)
    except subprocess.CalledProcessError as failure:
        return str((failure.stderr.strip().splitlines() or ["no message"])[-1])
    except (OSError, subprocess.SubprocessError, ValueError, KeyError) as failure:
        return str(failure)
    return None


def whole_bytes(cli: Path | None, shape: tuple[int, int, int]) -> int:
    """The bytes of the plan that keeps all of E; without the command line, an estimate."""
    tokens, hidden, vocab = shape
    if cli is not None:
        return int(plan(cli, shape, 1 << 40)["bytes"])
    return 2 * tokens * vocab + 64 * MIB + 12 * tokens * hidden


def predict(cli: Path | None, shape: tuple[int, int, int], sizes: list[int]) -> list[float | None]:
    """Predicted milliseconds; None without the command line, or if it refuses the budget."""

    def ask(size: int) -> float | None:
        try:
            return float(plan(cli, shape, size)["predicted_ms"]) if cli else None
        except subprocess.CalledProcessError:
            return None

    with ThreadPoolExecutor() as pool:
        return list(pool.map(ask, sizes))


def bounds(sizes: list[int], times: list[float]) -> list[float]:
    """1.10 (1 + (1 - f) / 3) of the time with the whole of E; f the share of the way from the least
    workspace to the whole."""
    least, whole = sizes[0], sizes[-1]
    share = [(size - least) / max(1, whole - least) for size in sizes]
    return [1.10 * (1 + (1 - f) / 3) * times[-1] for f in share]
