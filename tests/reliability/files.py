# SPDX-License-Identifier: Apache-2.0
"""Mutated .safetensors files through the command line, a process for each."""

from __future__ import annotations

import json
import os
import random
import re
import struct
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from reliability.common import NotKept, Row, Settings, number

NUMBERS = [0, 1, 2**31 - 1, 2**31, 2**32, 2**56, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -1, 10**40]
SIZES = {"hidden": [2, 3, 5], "weight": [11, 5], "bias": [11], "target": [2, 3]}


def good(numbers: random.Random) -> bytes:
    header, data = {}, b""
    for name, shape in SIZES.items():
        count = 1
        for size in shape:
            count *= size
        if name == "target":
            raw = struct.pack(f"<{count}q", *(numbers.randrange(11) for _ in range(count)))
        else:
            raw = struct.pack(f"<{count}f", *(numbers.gauss(0, 1) for _ in range(count)))
        header[name] = {
            "dtype": "I64" if name == "target" else "F32",
            "shape": shape,
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def mutated(raw: bytes, numbers: random.Random) -> bytes:
    """One to three changes; most land in the header, which is what is parsed."""
    for _ in range(numbers.randint(1, 3)):
        (length,) = struct.unpack("<Q", raw[:8]) if len(raw) >= 8 else (0,)
        end = min(8 + length, len(raw))
        kind = numbers.randrange(7)
        at = numbers.randrange(max(1, end if numbers.random() < 0.8 else len(raw)))
        if kind == 0:
            raw = raw[:at]
        elif kind == 1 and raw:
            raw = raw[:at] + bytes([numbers.randrange(256)]) + raw[at + 1 :]
        elif kind == 2:
            raw = raw[:at] + numbers.randbytes(numbers.randint(1, 9)) + raw[at:]
        elif kind == 3:
            raw = raw[:at] + raw[at + numbers.randint(1, 20) :]
        elif kind == 4:
            raw = struct.pack("<Q", numbers.choice(NUMBERS) % 2**64) + raw[8:]
        elif kind == 5:  # another number in the header, of fitting length
            places = list(re.finditer(rb"\d+", raw[8:end]))
            if places:
                place = numbers.choice(places)
                text = str(numbers.choice(NUMBERS)).encode()
                header = raw[8 : 8 + place.start()] + text + raw[8 + place.end() : end]
                raw = struct.pack("<Q", len(header)) + header + raw[end:]
        else:  # a piece of the header is repeated
            piece = raw[at : min(end, at + numbers.randint(1, 60))]
            header = raw[8:at] + piece + raw[at:end] if at >= 8 else raw[8:end]
            raw = struct.pack("<Q", len(header)) + header + raw[end:]
    return raw


def verdict(program: Path, path: Path) -> str:
    """ "taken" or "refused"; NotKept where the program does anything else."""
    try:
        done = subprocess.run(
            [program, "loss", path, "--threads", "1"], capture_output=True, timeout=60,
            check=False, env={**os.environ, "LOGITLESS_WEBGPU_LIBRARY": "none"},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise NotKept(f"no end with {path}") from None
    if done.returncode == 0 and not done.stderr:
        return "taken"
    one_line = re.fullmatch(rb"logitless: [^\n\x1b]{1,500}\n", done.stderr) is not None
    if done.returncode in (1, 2) and one_line and not done.stdout:
        return "refused"
    kept = path.with_name(f"kept-{path.name}")
    kept.write_bytes(path.read_bytes())
    raise NotKept(f"exit code {done.returncode} and {done.stderr[:200]!r} of {kept}")


def mutated_files(settings: Settings) -> list[Row]:
    count = 400 if settings.short else 10_000
    workers = len(os.sched_getaffinity(0))
    folder = Path(tempfile.mkdtemp(prefix="reliability-"))
    original = folder / "good.safetensors"
    original.write_bytes(good(random.Random(1)))
    if verdict(settings.cli, original) != "taken":
        raise NotKept("the file without a mutation is refused")

    def one(seed: int) -> str:
        numbers = random.Random(seed)
        path = folder / f"{seed}.safetensors"
        path.write_bytes(mutated(good(numbers), numbers))
        result = verdict(settings.cli, path)
        path.unlink()
        return result

    with ThreadPoolExecutor(workers) as pool:
        results = list(pool.map(one, range(count)))
    original.unlink()
    folder.rmdir()
    refused = results.count("refused")
    return [
        Row(
            "A damaged or lying .safetensors file is refused in one line, never a crash",
            "random cuts, bytes, insertions, lengths and numbers of the header, through"
            " `logitless loss`, a process each",
            f"{number(count)} files: {number(refused)} refused in one line,"
            f" {number(count - refused)} still legal and read, no crash",
            refused > count // 2,
        )
    ]
