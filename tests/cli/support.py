# SPDX-License-Identifier: Apache-2.0
"""What the tests of the command line share: running it, .safetensors files, a head in double."""

from __future__ import annotations

import json
import math
import os
import random
import struct
import subprocess
import tempfile
import unittest
from pathlib import Path
from typing import Any

PROGRAM = os.environ["LOGITLESS_PROGRAM"]
SANITIZED = any(
    name in Path(PROGRAM).read_bytes() for name in (b"__asan_init", b"__tsan_init")
)
DEVICES = ("cpu", "reference")
OPS = (
    "linear-forward", "linear-backward", "linear-forward-backward",
    "forward", "backward", "forward-backward", "softmax",
)  # fmt: skip
FORMATS = {"F32": "f", "F16": "e", "I32": "i", "I64": "q"}

Tensors = dict[str, tuple[str, list[int], bytes]]  # a name has a dtype, a shape and data
Matrix = list[list[float]]


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PROGRAM, *arguments], capture_output=True, text=True, timeout=300, check=False, **options
    )


def pack(dtype: str, values: list[Any]) -> bytes:
    if dtype == "BF16":
        return b"".join(struct.pack("<f", v)[2:] for v in values)
    return struct.pack(f"<{len(values)}{FORMATS[dtype]}", *values)


def unpack(dtype: str, data: bytes) -> list[Any]:
    if dtype == "BF16":
        return [struct.unpack("<f", b"\0\0" + data[i : i + 2])[0] for i in range(0, len(data), 2)]
    form = FORMATS[dtype]
    return list(struct.unpack(f"<{len(data) // struct.calcsize(form)}{form}", data))


def file_of(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def safetensors(tensors: Tensors, padding: str = "") -> bytes:
    header: dict[str, Any] = {}
    data = b""
    for name, (dtype, shape, raw) in tensors.items():
        begin = len(data)
        data += raw
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, len(data)]}
    return file_of((json.dumps(header) + padding).encode(), data)


def read(path: Path) -> tuple[Tensors, dict[str, str]]:
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    data = raw[8 + length :]
    return {
        name: (t["dtype"], t["shape"], data[slice(*t["data_offsets"])])
        for name, t in header.items()
    }, metadata


class Head:
    """A small head, and its loss and gradients in double."""

    def __init__(
        self, dtype: str = "F32", tokens: int = 6, hidden: int = 5, vocab: int = 11
    ) -> None:
        numbers = random.Random(7)
        self.dtype, self.tokens, self.hidden, self.vocab = dtype, tokens, hidden, vocab

        def matrix(rows: int, columns: int) -> Matrix:
            values = [numbers.gauss(0, 1) for _ in range(rows * columns)]
            # round the values to the file's dtype
            values = unpack(dtype, pack(dtype, values))
            return [values[i * columns : (i + 1) * columns] for i in range(rows)]

        self.input = matrix(tokens, hidden)
        self.weight = matrix(vocab, hidden)
        self.bias = matrix(1, vocab)[0]
        self.target = [numbers.randrange(vocab) for _ in range(tokens)]
        self.target[tokens // 2] = -100

    def flat(self, rows: Matrix) -> bytes:
        return pack(self.dtype, [value for row in rows for value in row])

    def tensors(self, target: str = "I64") -> Tensors:
        return {
            "hidden": (self.dtype, [2, self.tokens // 2, self.hidden], self.flat(self.input)),
            "weight": (self.dtype, [self.vocab, self.hidden], self.flat(self.weight)),
            "bias": (self.dtype, [self.vocab], self.flat([self.bias])),
            "target": (target, [2, self.tokens // 2], pack(target, self.target)),
        }

    def expected(self, smoothing: float = 0.0) -> dict[str, Any]:
        grad_input = [[0.0] * self.hidden for _ in range(self.tokens)]
        grad_weight = [[0.0] * self.hidden for _ in range(self.vocab)]
        grad_bias = [0.0] * self.vocab
        losses = [0.0] * self.tokens
        valid = sum(t != -100 for t in self.target)
        for i, t in enumerate(self.target):
            if t == -100:
                continue
            x = self.input[i]
            z = [
                sum(a * b for a, b in zip(x, w, strict=True)) + c
                for w, c in zip(self.weight, self.bias, strict=True)
            ]
            lse = math.log(sum(math.exp(v) for v in z))
            for j, v in enumerate(z):
                q = (1 - smoothing) * (j == t) + smoothing / self.vocab
                losses[i] += q * (lse - v)
                g = (math.exp(v - lse) - q) / valid
                grad_bias[j] += g
                for d in range(self.hidden):
                    grad_input[i][d] += g * self.weight[j][d]
                    grad_weight[j][d] += g * x[d]
        return {
            "losses": losses,
            "loss": sum(losses) / valid,
            "grad_input": [v for row in grad_input for v in row],
            "grad_weight": [v for row in grad_weight for v in row],
            "grad_bias": grad_bias,
        }


class CliTest(unittest.TestCase):
    def setUp(self) -> None:
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.directory = Path(directory.name)

    def file(self, content: bytes, name: str = "in.safetensors") -> str:
        path = self.directory / name
        path.write_bytes(content)
        return str(path)

    def succeed(self, *arguments: str) -> str:
        done = run(*arguments)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stderr, "")
        return done.stdout

    def json(self, *arguments: str) -> Any:
        text = self.succeed(*arguments, "--json")
        self.assertEqual(text.count("\n"), 1, text)
        return json.loads(text)

    def refuse(self, *arguments: str, code: int = 2) -> str:
        """Expects an error: this exit code and one line on stderr, which it returns.

        Stdout must be empty, or with --json have the same message in an object.
        """
        done = run(*arguments)
        self.assertEqual(done.returncode, code, f"{arguments}: {done.stdout}{done.stderr}")
        if "--json" in arguments:
            error = json.loads(done.stdout)["error"]
            self.assertEqual(set(error), {"code", "field", "message"})
            self.assertIn(error["message"], done.stderr)
            self.assertEqual(done.stdout.count("\n"), 1)
        else:
            self.assertEqual(done.stdout, "")
        self.assertRegex(done.stderr, r"\Alogitless: [^\n]+\n\Z")
        self.assertLess(len(done.stderr), 500)
        return done.stderr

    def left_behind(self) -> set[str]:
        return {path.name for path in self.directory.iterdir()}
