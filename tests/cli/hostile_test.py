# SPDX-License-Identifier: Apache-2.0
"""Truncated, lying and hostile .safetensors files are refused in one line."""

from __future__ import annotations

import struct
import unittest

from support import DEVICES, CliTest, Head, file_of, safetensors

WORDS = {
    "no object": "header is an array",
    "a number": "header is 1",
    "null": "header is null",
    "deep arrays": "header is an array",
    "deep objects": "unknown field",
    "deep shape": "array in its shape",
    "object in entry": "an object for",
    "tensor is a string": 'is "F32"',
    "tensor is an array": "is an array",
    "tensor named twice": "named twice",
    "field twice": "shape twice",
    "unknown field": 'unknown field "x"',
    "no dtype": "no dtype",
    "no shape": "no shape",
    "no offsets": "no data_offsets",
    "unknown dtype": 'unknown dtype "F31"',
    "dtype is a number": "has 3 for",
    "shape is a number": "has 1 for",
    "shape is negative": "-1 in its shape",
    "shape of two negatives": "-1 in its shape",
    "shape is a fraction": '"1.0" in its shape',
    "shape passes 2^64": "passes 2^64",
    "shape wraps to 4 bytes": "passes 2^64",
    "shape passes 2^63 of nothing": "has a size of",
    "many dimensions": "more than 64",
    "wrong product": "need 8",
    "half a byte": "whole bytes",
    "offsets are negative": "-4 in its data_offsets",
    "offsets run backwards": "backwards",
    "offsets beyond the file": "ends at byte 8 of the data, which has 4",
    "offsets beyond 2^64": "18446744073709551616",
    "offsets near 2^64": "backwards",
    "one offset": "needs two",
    "three offsets": "more than two",
    "tensors overlap": "overlap",
    "tensors coincide": "overlap",
    "a hole": "bytes 4 to 8",
    "bytes left over": "bytes 4 to 5",
    "metadata is a list": "__metadata__",
    "metadata holds a number": "1 for",
    "metadata nests": "an object for",
    "long name": "...",
    "name with controls": "x1b",
    "empty": "too short",
    "seven bytes": "too short",
    "length beyond 2^63": "allowed: <= 100000000",
    "length wraps": "allowed: <= 100000000",
    "length of 100 GB": "allowed: <= 100000000",
    "length alone": "truncated",
    "length beyond the file": "truncated",
    **{f"cut to {share}0 %": "truncated" for share in (1, 2, 3, 4)},
    **{f"cut to {share}0 %": "ends at byte" for share in (5, 6, 7, 8, 9)},
    "one byte short": "ends at byte",
}  # what the message about a file says; "not JSON" for files that are not listed


def entry(offsets: str = "[0,4]", dtype: str = '"F32"', shape: str = "[1]") -> str:
    return f'{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}'


def header(*entries: str) -> str:
    """The JSON header of a file whose tensors a, b and c have these entries."""
    return "{" + ",".join(f'"{name}":{e}' for name, e in zip("abc", entries, strict=False)) + "}"


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
            "not UTF-8": ("{}", b""),  # replaced below by bytes
            "deep arrays": ("[" * 100_000, b""),
            "deep objects": ('{"a":' * 100_000, b""),
            "deep shape": ('{"a":' + entry(shape="[" * 100_000 + "]" * 100_000) + "}", b"1234"),
            "object in entry": ('{"a":{"dtype":{}}}', b""),
            "tensor is a string": ('{"a":"F32"}', b""),
            "tensor is an array": ('{"a":[]}', b""),
            "tensor named twice": ('{"a":' + e + ',"a":' + entry("[4,8]") + "}", b"12345678"),
            "field twice": (header(e.replace('"shape":', '"shape":[1],"shape":')), b"1234"),
            "unknown field": (header(e.replace('"shape":', '"x":1,"shape":')), b"1234"),
            "no dtype": ('{"a":{"shape":[1],"data_offsets":[0,4]}}', b"1234"),
            "no shape": ('{"a":{"dtype":"F32","data_offsets":[0,4]}}', b"1234"),
            "no offsets": ('{"a":{"dtype":"F32","shape":[1]}}', b"1234"),
            "unknown dtype": (header(entry(dtype='"F31"')), b"1234"),
            "dtype is a number": (header(entry(dtype="3")), b"1234"),
            "shape is a number": (header(entry(shape="1")), b"1234"),
            "shape is negative": (header(entry(shape="[-1]")), b"1234"),
            "shape of two negatives": (header(entry(shape="[-1,-1]")), b"1234"),
            "shape is a fraction": (header(entry(shape="[1.0]")), b"1234"),
            "shape is huge": (header(entry(shape="[1" + "0" * 500 + "]")), b"1234"),
            "shape passes 2^64": (header(entry(shape="[4294967296,4294967296,4]")), b"1234"),
            "shape wraps to 4 bytes": (header(entry(shape="[576460752303423489]")), b"1234"),
            "shape passes 2^63 of nothing": (
                header(entry("[0,0]", shape="[0,18446744073709551615]")), b""),
            "many dimensions": (header(entry(shape="[" + "1," * 99 + "1]")), b"1234"),
            "wrong product": (header(entry(shape="[2]")), b"1234"),
            "half a byte": (header(entry("[0,1]", '"F4"', "[1]")), b"1"),
            "offsets are negative": (header(entry("[-4,0]")), b"1234"),
            "offsets run backwards": (header(entry("[4,0]")), b"1234"),
            "offsets beyond the file": (header(entry("[4,8]")), b"1234"),
            "offsets beyond 2^64": (header(entry("[0,18446744073709551616]")), b"1234"),
            "offsets near 2^64": (header(entry("[18446744073709551612,0]")), b"1234"),
            "one offset": (header(entry("[0]")), b"1234"),
            "three offsets": (header(entry("[0,4,8]")), b"1234"),
            "tensors overlap": (header(entry("[0,4]"), entry("[2,6]")), b"123456"),
            "tensors coincide": (header(e, e), b"1234"),
            "a hole": (header(e, entry("[8,12]")), b"x" * 12),
            "bytes left over": (header(e), b"12345"),
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
                self.assertIn(WORDS.get(name, "not JSON"), line)

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

    def test_empty_tensors_of_any_shape_and_place(self) -> None:
        """None of them has a byte, whatever else their shapes say and wherever they lie."""
        huge = 2**33
        weight = ("F32", [11, 5], bytes(4 * 11 * 5))
        for odd in range(4):
            for leading in ([0], [2, 0, 3], [huge, huge, 0], [0, huge, huge]):
                with self.subTest(odd=odd, leading=leading):
                    tensors = {
                        "weight": weight,
                        "odd": ("U8", [odd], bytes(odd)),
                        "hidden": ("F32", [*leading, 5], b""),
                        "target": ("I64", leading, b""),
                        "bias": ("F32", [11], bytes(44)),
                        "weights": ("F32", leading, b""),
                    }
                    path = self.file(safetensors(tensors))
                    out = str(self.directory / "out.safetensors")
                    report = self.json("loss", path, "--gradients", out, "--per-token", out + "2",
                                       "--bias", "bias", "--token-weight", "weights")  # fmt: skip
                    self.assertEqual((report["tokens"], report["loss"]), (0, 0))
        for leading in ([huge, huge], [huge, 2**29], [2**40]):
            for reduction in ("mean", "none"):
                tensors = {
                    "hidden": ("F32", [*leading, 0], b""),
                    "target": ("I64", [0], b""),
                    "weight": ("F32", [11, 0], b""),
                }
                path = self.file(safetensors(tensors))
                line = self.refuse("loss", path, "--reduction", reduction)
                self.assertIn("dimension of 0", line)


if __name__ == "__main__":
    unittest.main()
