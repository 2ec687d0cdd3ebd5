#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The command line: every command and its JSON, bad input, hostile files, gradients written."""

from __future__ import annotations

import json
import math
import random
import struct
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

PROGRAM = ""  # set by main
FORMATS = {"F32": "f", "F16": "e", "I32": "i", "I64": "q"}

Tensors = dict[str, tuple[str, list[int], bytes]]  # name -> dtype, shape, data
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
        return [
            struct.unpack("<f", b"\0\0" + data[i : i + 2])[0] for i in range(0, len(data), 2)
        ]
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

    def __init__(self, dtype: str = "F32", tokens: int = 6, hidden: int = 5, vocab: int = 11):
        numbers = random.Random(7)
        self.dtype, self.tokens, self.hidden, self.vocab = dtype, tokens, hidden, vocab

        def matrix(rows: int, columns: int) -> Matrix:
            values = [numbers.gauss(0, 1) for _ in range(rows * columns)]
            values = unpack(dtype, pack(dtype, values))  # as stored
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
        """Bad input: the exit code, nothing on stdout, one line on stderr, which it returns."""
        done = run(*arguments)
        self.assertEqual(done.returncode, code, f"{arguments}: {done.stdout}{done.stderr}")
        self.assertEqual(done.stdout, "")
        self.assertRegex(done.stderr, r"\Alogitless: [^\n]+\n\Z")
        self.assertLess(len(done.stderr), 500)
        return done.stderr

    def left_behind(self) -> set[str]:
        return {path.name for path in self.directory.iterdir()}


class GeneralTest(CliTest):
    def test_help_and_version(self) -> None:
        self.assertIn("loss", self.succeed("--help"))
        self.assertRegex(self.succeed("--version"), r"^logitless \d+\.\d+\.\d+\n$")
        for command in json.loads(self.succeed("info", "--json"))["commands"]:
            self.assertIn("--json", self.succeed(command, "--help"))

    def test_bad_commands_are_one_line(self) -> None:
        self.assertIn("subcommand", self.refuse())
        self.assertIn("frobnicate", self.refuse("frobnicate"))
        self.assertIn("--frobnicate", self.refuse("info", "--frobnicate"))

    def test_a_full_disk_is_a_failure(self) -> None:
        with open("/dev/full", "w", encoding="utf-8") as full:
            done = subprocess.run(
                [PROGRAM, "info"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
            )
        self.assertEqual(done.returncode, 1)
        self.assertEqual(done.stderr.count("\n"), 1)


class InfoTest(CliTest):
    def test_info(self) -> None:
        info = self.json("info")
        self.assertRegex(info["version"], r"^\d+\.\d+\.\d+$")
        backends = {b["name"]: b for b in info["backends"]}
        self.assertEqual(set(backends), {"cpu", "cuda", "webgpu", "reference"})
        self.assertTrue(backends["cpu"]["available"] and backends["reference"]["available"])
        for backend in backends.values():
            self.assertTrue(backend["description" if backend["available"] else "reason"])
        self.assertIn(info["cpu"]["isa"], info["cpu"]["isas"])
        text = self.succeed("info")
        for word in (info["version"], info["cpu"]["isa"], "threads", *backends):
            self.assertIn(word, text)

    def test_threads_are_the_environments(self) -> None:
        done = run("info", "--json", env={"LOGITLESS_NUM_THREADS": "3"})
        cpu = json.loads(done.stdout)["cpu"]
        self.assertEqual(cpu["threads"], 3)
        self.assertIn("LOGITLESS_NUM_THREADS", cpu["threads_from"])


class LossTest(CliTest):
    def assert_near(self, got: list[float], want: list[float], bound: float) -> None:
        self.assertEqual(len(got), len(want))
        scale = max(abs(v) for v in want)
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            self.assertLessEqual(abs(a - b), bound * scale, f"element {i}: {a} for {b}")

    def test_gradients_are_the_formulas(self) -> None:
        for device in DEVICES:
            for dtype, target, smoothing in (
                ("F32", "I64", 0.0),
                ("F16", "I32", 0.1),
                ("BF16", "I64", 0.1),
            ):
                with self.subTest(device=device, dtype=dtype):
                    self.check_gradients(device, Head(dtype), target, smoothing)

    def check_gradients(self, device: str, head: Head, target: str, smoothing: float) -> None:
        want = head.expected(smoothing)
        # 16-bit inputs round the stored probability and a scaled row of hidden states.
        bound = {"F32": 1e-6, "F16": 4e-3, "BF16": 3e-2}[head.dtype]
        out = self.directory / "out.safetensors"
        report = self.json(
            "loss",
            self.file(safetensors(head.tensors(target))),
            *("--device", device, "--bias", "bias", "--label-smoothing", str(smoothing)),
            *("--gradients", str(out)),
        )
        self.assertEqual((report["tokens"], report["valid"], report["ignored"]), (6, 5, 1))
        self.assertLess(abs(report["loss"] - want["loss"]), 2e-6 * want["loss"])
        tensors, metadata = read(out)
        self.assertEqual(metadata["reduction"], "mean")
        self.assertAlmostEqual(float(metadata["loss"]), want["loss"], delta=1e-5)
        shapes = {"grad_input": [2, 3, 5], "grad_weight": [11, 5], "grad_bias": [11]}
        self.assertEqual({n: t[1] for n, t in tensors.items()}, shapes)
        for name, (dtype, _, data) in tensors.items():
            self.assertEqual(dtype, "F32")
            self.assert_near(unpack(dtype, data), want[name], bound)
        self.assertEqual(self.left_behind(), {"in.safetensors", "out.safetensors"})

    def test_16_bit_gradients(self) -> None:
        head = Head()
        want = head.expected()
        for name, bound in (("f16", 2e-3), ("bf16", 1e-2)):
            out = self.directory / "out.safetensors"
            self.succeed(
                "loss",
                self.file(safetensors(head.tensors())),
                *("--device", DEVICES[0], "--bias", "bias", "--grad-dtype", name),
                *("--gradients", str(out)),
            )
            dtype, _, data = read(out)[0]["grad_weight"]
            self.assertEqual(dtype, name.upper())
            self.assert_near(unpack(dtype, data), want["grad_weight"], bound)

    def test_per_token(self) -> None:
        head = Head()
        want = head.expected()
        for device in DEVICES:
            out = self.directory / "tokens.safetensors"
            report = self.json(
                "loss",
                self.file(safetensors(head.tensors())),
                *("--device", device, "--bias", "bias", "--reduction", "none", "--statistics"),
                *("--per-token", str(out)),
            )
            self.assert_near(report["loss"], want["losses"], 1e-6)
            tensors = read(out)[0]
            self.assertEqual(
                set(tensors), {"loss", "lse", "target_logit", "entropy", "argmax"}
            )
            values = {name: unpack(t[0], t[2]) for name, t in tensors.items()}
            self.assertEqual(tensors["lse"][1], [2, 3])
            self.assert_near(values["loss"], want["losses"], 1e-6)
            logs = [b - a for a, b in zip(values["lse"], values["target_logit"], strict=True)]
            self.assert_near(logs, [-v for v in want["losses"]], 1e-6)
            self.assertEqual(values["argmax"][3], -1)  # the ignored token
            valid = [i for i, t in enumerate(head.target) if t != -100]
            correct = sum(values["argmax"][i] == head.target[i] for i in valid)
            statistics = report["statistics"]
            self.assertAlmostEqual(statistics["accuracy"], correct / len(valid))
            mean = sum(want["losses"]) / len(valid)
            self.assertAlmostEqual(statistics["perplexity"], math.exp(mean), delta=1e-4)

    def test_text_says_what_json_says(self) -> None:
        path = self.file(safetensors(Head().tensors()))
        text = self.succeed("loss", path, "--device", DEVICES[0], "--statistics")
        report = self.json("loss", path, "--device", DEVICES[0], "--statistics")
        self.assertIn(f"{report['loss']:.5f}"[:6], text)
        for word in ("perplexity", "accuracy", "workspace", "5 of 6"):
            self.assertIn(word, text)

    def test_unaligned_tensors_are_read(self) -> None:
        head = Head()
        for device in DEVICES:
            losses = [
                self.json(
                    "loss",
                    self.file(safetensors({"a": ("U8", [n], b"x" * n), **head.tensors()}, " " * n)),
                    *("--device", device, "--bias", "bias"),
                )["loss"]
                for n in range(9)
            ]
            self.assertEqual(len(set(losses)), 1)
            self.assertAlmostEqual(losses[0], head.expected()["loss"], delta=1e-5)

    def test_bad_input(self) -> None:
        head = Head()
        path = self.file(safetensors({**head.tensors(), "odd": ("U8", [3], b"abc")}))
        target = dict(head.tensors())
        target["target"] = ("I64", [6], pack("I64", [0, 1, 2, 3, 4, 11]))
        outside = self.file(safetensors(target), "outside.safetensors")
        out = str(self.directory / "out.safetensors")
        for arguments, word in (
            ([], "file"),
            ([path, "--weight", "nope"], '"hidden"'),  # what there is
            ([path, "--bias", "odd"], "U8"),
            ([path, "--target", "hidden"], "target"),
            ([path, "--hidden", "bias"], "dimensions"),
            ([path, "--weight", "bias"], "dimensions"),
            ([path, "--label-smoothing", "2"], "label_smoothing"),
            ([path, "--label-smoothing", "x"], "--label-smoothing"),
            ([path, "--temperature", "0"], "temperature"),
            ([path, "--temperature", "nan"], "temperature"),
            ([path, "--reduction", "median"], "median"),
            ([path, "--memory", "64XB"], "64XB"),
            ([path, "--memory=-1"], "--memory"),
            ([path, "--ignore-index", "99999999999999999999"], "--ignore-index"),
            ([path, "--gradients", path], "overwrite"),
            ([path, "--gradients", str(self.directory)], "regular"),
            ([path, "--gradients", str(self.directory / "no" / "x")], "No such file"),
            ([path, "--gradients", out, "--per-token", out], "same file"),
            ([path, "--gradients", out, "--temperature", "0"], "temperature"),
            ([outside, "--device", DEVICES[0]], "target"),
            ([str(self.directory / "absent")], "No such file"),
            ([str(self.directory)], "regular"),
            (["/dev/zero"], "regular"),
        ):
            with self.subTest(arguments=arguments):
                self.assertIn(word, self.refuse("loss", *arguments, "--json"))
        self.assertIn("2 dev", self.refuse("loss", path, "--device", "2 dev"))
        self.assertEqual(self.left_behind(), {"in.safetensors", "outside.safetensors"})

    def test_output_is_whole_or_absent(self) -> None:
        path = self.file(safetensors(Head().tensors()))
        out = self.directory / "out.safetensors"
        out.write_bytes(b"what was there")
        # A limit on the size of files stops the writing halfway, as a full disk does.
        limit = f'ulimit -f 0; trap "" XFSZ; exec "$0" loss "$1" --gradients "$2" --device {DEVICES[0]}'
        done = subprocess.run(
            ["bash", "-c", limit, PROGRAM, path, str(out)], capture_output=True, check=False
        )
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertEqual(done.stderr.count(b"\n"), 1)
        self.assertEqual(out.read_bytes(), b"what was there")
        self.assertEqual(self.left_behind(), {"in.safetensors", "out.safetensors"})
        self.succeed("loss", path, "--gradients", str(out), "--device", DEVICES[0])
        self.assertEqual(set(read(out)[0]), {"grad_input", "grad_weight"})


def entry(offsets: str = "[0,4]", dtype: str = '"F32"', shape: str = "[1]") -> str:
    return f'{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}'


class HostileFileTest(CliTest):
    def hostile(self) -> dict[str, bytes]:
        good = safetensors(Head().tensors())
        e = entry()
        headers: dict[str, tuple[str, bytes]] = {
            "no object": ("[]", b""),
            "a number": ("1", b""),
            "null": ("null", b""),
            "nothing": ("", b""),
            "spaces": ("    ", b""),
            "garbage": ("{{{{", b""),
            "garbage after": ("{}x", b""),
            "a NUL": ('{"a":' + e + "}\0", b"1234"),
            "half an object": ('{"a":' + e, b"1234"),
            "not UTF-8": ("{}", b""),  # replaced below
            "deep arrays": ("[" * 100_000, b""),
            "deep objects": ('{"a":' * 100_000, b""),
            "deep shape": ('{"a":' + entry(shape="[" * 100_000 + "]" * 100_000) + "}", b"1234"),
            "object in entry": ('{"a":{"dtype":{}}}', b""),
            "tensor is a string": ('{"a":"F32"}', b""),
            "tensor is an array": ('{"a":[]}', b""),
            "tensor named twice": ('{"a":%s,"a":%s}' % (e, e), b"1234"),
            "field twice": ('{"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}', b"1234"),
            "unknown field": ('{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":1}}', b"1234"),
            "no dtype": ('{"a":{"shape":[1],"data_offsets":[0,4]}}', b"1234"),
            "no shape": ('{"a":{"dtype":"F32","data_offsets":[0,4]}}', b"1234"),
            "no offsets": ('{"a":{"dtype":"F32","shape":[1]}}', b"1234"),
            "unknown dtype": ('{"a":%s}' % entry(dtype='"F31"'), b"1234"),
            "dtype is a number": ('{"a":%s}' % entry(dtype="3"), b"1234"),
            "shape is a number": ('{"a":%s}' % entry(shape="1"), b"1234"),
            "shape is negative": ('{"a":%s}' % entry(shape="[-1]"), b"1234"),
            "shape of two negatives": ('{"a":%s}' % entry(shape="[-1,-1]"), b"1234"),
            "shape is a fraction": ('{"a":%s}' % entry(shape="[1.0]"), b"1234"),
            "shape is huge": ('{"a":%s}' % entry(shape="[1" + "0" * 500 + "]"), b"1234"),
            "shape passes 2^64": ('{"a":%s}' % entry(shape="[4294967296,4294967296,4]"), b"1234"),
            "shape wraps to 4 bytes": ('{"a":%s}' % entry(shape="[9223372036854775809]"), b"1234"),
            "shape passes 2^63 of nothing": (
                '{"a":%s}' % entry("[0,0]", shape="[0,18446744073709551615]"), b""),
            "many dimensions": ('{"a":%s}' % entry(shape="[" + "1," * 99 + "1]"), b"1234"),
            "wrong product": ('{"a":%s}' % entry(shape="[2]"), b"1234"),
            "half a byte": ('{"a":%s}' % entry("[0,1]", '"F4"', "[1]"), b"1"),
            "offsets are negative": ('{"a":%s}' % entry("[-4,0]"), b"1234"),
            "offsets run backwards": ('{"a":%s}' % entry("[4,0]"), b"1234"),
            "offsets beyond the file": ('{"a":%s}' % entry("[4,8]"), b"1234"),
            "offsets beyond 2^64": ('{"a":%s}' % entry("[0,18446744073709551616]"), b"1234"),
            "offsets near 2^64": ('{"a":%s}' % entry("[18446744073709551612,0]"), b"1234"),
            "one offset": ('{"a":%s}' % entry("[0]"), b"1234"),
            "three offsets": ('{"a":%s}' % entry("[0,4,8]"), b"1234"),
            "tensors overlap": ('{"a":%s,"b":%s}' % (entry("[0,4]"), entry("[2,6]")), b"123456"),
            "tensors coincide": ('{"a":%s,"b":%s}' % (e, e), b"1234"),
            "a hole": ('{"a":%s,"b":%s}' % (e, entry("[8,12]")), b"x" * 12),
            "bytes left over": ('{"a":%s}' % e, b"12345"),
            "metadata is a list": ('{"__metadata__":[]}', b""),
            "metadata holds a number": ('{"__metadata__":{"a":1}}', b""),
            "metadata nests": ('{"__metadata__":{"a":{}}}', b""),
            "long name": ('{"%s":1}' % ("x" * 100_000), b""),
            "name with controls": ('{"a\\n\\u001b[31m":1}', b""),
        }  # fmt: skip
        files = {name: file_of(text.encode(), data) for name, (text, data) in headers.items()}
        files["not UTF-8"] = file_of(b'{"\xff\xfe":' + e.encode() + b"}", b"1234")
        files["empty"] = b""
        files["seven bytes"] = b"1234567"
        files["length alone"] = struct.pack("<Q", 8)
        files["length beyond the file"] = file_of(b"{}", length=3)
        files["length beyond 2^63"] = file_of(b"{}", length=2**64 - 1)
        files["length wraps"] = file_of(b"{}", length=2**64 - 8)
        files["length of 100 GB"] = file_of(b"{}", length=10**11)
        for share in range(1, 10):
            files[f"cut to {share}0 %"] = good[: len(good) * share // 10]
        files["one byte short"] = good[:-1]
        return files

    def test_hostile_files_are_refused_in_one_line(self) -> None:
        for name, content in self.hostile().items():
            with self.subTest(name):
                line = self.refuse("loss", self.file(content), "--device", DEVICES[0])
                self.assertIn("in.safetensors: ", line)
                self.assertNotIn("\x1b", line)

    def test_an_unusual_file_is_taken(self) -> None:
        tensors = Head().tensors()
        tensors["empty"] = ("F32", [0, 3], b"")
        tensors["scalar"] = ("F64", [], b"12345678")
        raw = safetensors(tensors, padding=" " * 5 + "\n")
        self.json("loss", self.file(raw), "--device", DEVICES[0])
        text = raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]].decode()
        text = text.replace("{", '{"__metadata__":{"format":"pt"},', 1)
        raw = file_of(text.encode(), raw[len(raw) - sum(len(t[2]) for t in tensors.values()) :])
        self.json("loss", self.file(raw), "--device", DEVICES[0])


DEVICES = ["cpu", "reference"]

if __name__ == "__main__":
    PROGRAM = sys.argv.pop(1)
    unittest.main()
