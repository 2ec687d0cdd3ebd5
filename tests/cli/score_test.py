# SPDX-License-Identifier: Apache-2.0
"""logitless score: a line of each token, by the formulas; blocks; bad input; whole output."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import subprocess
import unittest
from typing import Any

from support import (
    DEVICES,
    PROGRAM,
    SANITIZED,
    CliTest,
    Head,
    Tensors,
    pack,
    read,
    run,
    safetensors,
    unpack,
)  # fmt: skip

BLOCK = 2048  # of cli/score.cpp


def parse(line: str) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(line, parse_constant=refuse)


def large(tokens: int, hidden: int = 2, vocab: int = 7) -> Tensors:
    numbers = random.Random(3)
    values = [numbers.gauss(0, 1) for _ in range((tokens + vocab) * hidden)]
    return {
        "hidden": ("F32", [tokens, hidden], pack("F32", values[: tokens * hidden])),
        "weight": ("F32", [vocab, hidden], pack("F32", values[tokens * hidden :])),
        "target": ("I32", [tokens], pack("I32", [numbers.randrange(vocab) for _ in range(tokens)])),
    }


class ScoreTest(CliTest):
    def lines(self, *arguments: str) -> list[Any]:
        return [parse(line) for line in self.succeed("score", *arguments).splitlines()]

    def log_softmax(self, head: Head, token: int, **options: float) -> list[float]:
        x, softcap = head.input[token], options.get("softcap", 0)
        logits = []
        for row, bias in zip(head.weight, head.bias, strict=True):
            z = options.get("scale", 1) * (sum(a * b for a, b in zip(x, row, strict=True)) + bias)
            z = softcap * math.tanh(z / softcap) if softcap else z
            logits.append(z / options.get("temperature", 1))
        lse = math.log(sum(math.exp(z) for z in logits))
        return [z - lse for z in logits]

    def check_lines(
        self, lines: list[Any], head: Head, top: int, device: str = "cpu", **options: float
    ) -> None:
        self.assertEqual(len(lines), head.tokens)
        for i, (line, target) in enumerate(zip(lines, head.target, strict=True)):
            self.assertEqual((line["index"], line["target"]), (i, target))
            if target == -100:
                self.assertEqual(set(line), {"index", "target", "ignored"})
                self.assertIs(line["ignored"], True)
                continue
            log_p = self.log_softmax(head, i, **options)
            self.assertAlmostEqual(line["logprob"], log_p[target], delta=2e-6)
            self.assertEqual(line["rank"], sum(other > log_p[target] for other in log_p))
            more = {"top_ids", "top_logprobs"} if top else set()
            self.assertEqual(set(line), {"index", "target", "logprob", "rank"} | more)
            if not top:
                continue
            order = sorted(range(head.vocab), key=lambda j: -log_p[j])[:top]
            self.assertEqual(line["top_ids"], order)
            for got, j in zip(line["top_logprobs"], order, strict=True):
                self.assertAlmostEqual(got, log_p[j], delta=2e-6)
            # on the CPU to the bit; the reference computes in double
            if line["rank"] < top and device == "cpu":
                self.assertEqual(line["top_logprobs"][line["rank"]], line["logprob"])

    def test_lines_are_the_formulas(self) -> None:
        for device, (dtype, target), top in itertools.product(
            DEVICES, (("F32", "I64"), ("F16", "I32"), ("BF16", "I64")), (0, 1, 4, 11)
        ):
            with self.subTest(device=device, dtype=dtype, top=top):
                head = Head(dtype)
                path = self.file(safetensors(head.tensors(target)))
                asked = ("--top", str(top)) if top else ()
                lines = self.lines(path, "--bias", "bias", "--device", device, *asked)
                self.check_lines(lines, head, top, device)

    def test_options_are_those_of_loss(self) -> None:
        head = Head()
        path = self.file(safetensors(head.tensors()))
        given = ("--bias", "bias", "--temperature", "0.5", "--softcap", "2", "--logit-scale", "3")
        options = {"temperature": 0.5, "softcap": 2.0, "scale": 3.0}
        for device in DEVICES:
            lines = self.lines(path, *given, "--top", "3", "--device", device)
            self.check_lines(lines, head, 3, device, **options)
        least = self.refuse("score", path, *given, "--memory", "1").split("needs at least ")[1]
        small = self.lines(path, *given, "--top", "3", "--memory", str(int(least.split()[0]) * 2))
        self.check_lines(small, head, 3, **options)

    def test_shift(self) -> None:
        head = Head()
        head.target[3] = 4
        path = self.file(safetensors(head.tensors()))
        lines = self.lines(path, "--bias", "bias", "--shift", "1", "--top", "2")
        moved = [[*row[1:], -100] for row in (head.target[:3], head.target[3:])]
        head.target = [target for row in moved for target in row]
        self.check_lines(lines, head, 2)

    def test_numbers_that_json_lacks_are_null(self) -> None:
        """A NaN in a row, a logit of infinity, a target of probability 0."""
        tensors: Tensors = {
            "hidden": ("F32", [4, 1], pack("F32", [math.nan, math.inf, 1.0, 1.0])),
            "weight": ("F32", [3, 1], pack("F32", [1.0, 0.5, 0.25])),
            "bias": ("F32", [3], pack("F32", [0.0, 0.0, -math.inf])),
            "target": ("I64", [4], pack("I64", [0, 1, 2, 0])),
        }
        path = self.file(safetensors(tensors))
        for device in DEVICES:
            lines = self.lines(path, "--bias", "bias", "--device", device, "--top", "3")
            self.assertEqual([line["logprob"] is None for line in lines], [True, True, True, False])
            self.assertEqual(lines[0]["top_logprobs"], [None] * 3)
            self.assertEqual(lines[2]["top_ids"], [0, 1, 2])
            self.assertEqual(lines[2]["rank"], 2)
            self.assertIsNone(lines[3]["top_logprobs"][2])
            self.assertTrue(all("ignored" not in line for line in lines))
            report = self.json(
                "score", path, "--device", device, "--out", str(self.directory / "o")
            )
            self.assertEqual((report["scored"], report["log_probability"]), (4, None))

    def test_targets_outside(self) -> None:
        head = Head()
        head.target[4] = 11
        tensors = head.tensors()
        path = self.file(safetensors(tensors))
        for device in DEVICES:
            for shift in ("0", "1"):
                line = self.refuse("score", path, "--device", device, "--shift", shift, "--json")
                self.assertIn("target[1, 1] is 11; allowed: 0 to 10, or ignore_index -100", line)
            lines = self.lines(path, "--bias", "bias", "--out-of-range", "ignore")
            self.assertEqual([i for i, line in enumerate(lines) if "ignored" in line], [3, 4])

    def test_blocks_cannot_be_seen(self) -> None:
        for tokens in (BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 5):
            path = self.file(safetensors(large(tokens)))
            out = self.directory / "tokens.safetensors"
            self.succeed("loss", path, "--per-token", str(out))
            whole = {name: unpack(t[0], t[2]) for name, t in read(out)[0].items()}
            lines = self.lines(path)
            self.assertEqual([line["index"] for line in lines], list(range(tokens)))
            self.assertEqual([line["rank"] for line in lines], whole["rank"])
            logprobs = unpack("F32", pack("F32", [line["logprob"] for line in lines]))
            self.assertEqual(logprobs, whole["log_probability"])

    def test_a_bad_target_of_a_late_block_is_told_before_a_line_is_written(self) -> None:
        tensors = large(2 * BLOCK + 5)
        target = unpack("I32", tensors["target"][2])
        target[2 * BLOCK + 1] = 7
        tensors["target"] = ("I32", [2 * BLOCK + 5], pack("I32", target))
        path = self.file(safetensors(tensors))
        out = self.directory / "out"
        out.write_bytes(b"what was there")
        for more in ((), ("--out", str(out)), ("--top", "3")):
            line = self.refuse("score", path, *more)
            self.assertIn(f"target[{2 * BLOCK + 1}] is 7; allowed: 0 to 6", line)
        self.assertEqual(out.read_bytes(), b"what was there")

    def peak(self, tokens: int) -> int:
        """The peak resident memory of the command, in KiB."""
        path = self.file(safetensors(large(tokens, hidden=1, vocab=64)))
        process = subprocess.Popen(
            [PROGRAM, "score", path, "--top", "64", "--threads", "1", "--out",
             str(self.directory / "out")], stdout=subprocess.DEVNULL,
        )  # fmt: skip
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        self.assertEqual(process.returncode, 0)
        return usage.ru_maxrss

    @unittest.skipIf(SANITIZED, "the sanitizer keeps what is freed")
    def test_memory_does_not_grow_with_the_tokens(self) -> None:
        few, many = self.peak(BLOCK), self.peak(12 * BLOCK)
        outputs = 11 * BLOCK * 64 * 12 // 1024  # KiB for top-k alone, if all were held
        self.assertLess(many - few, outputs / 4, f"{few} KiB, then {many}")

    def test_out(self) -> None:
        head = Head()
        path = self.file(safetensors(head.tensors()))
        given = ("score", path, "--bias", "bias", "--top", "2")
        lines = self.succeed(*given)
        self.assertEqual(self.succeed(*given, "--json"), lines)
        out = self.directory / "lines.jsonl"
        report = self.json(*given, "--out", str(out))
        self.assertEqual(out.read_text(), lines)
        log_p = [-v for v in head.expected()["losses"] if v]
        self.assertEqual((report["tokens"], report["scored"]), (6, 5))
        self.assertAlmostEqual(report["log_probability"], sum(log_p), delta=1e-5)
        self.assertAlmostEqual(report["perplexity"], math.exp(-sum(log_p) / 5), delta=1e-4)
        ranks = [parse(line).get("rank") for line in lines.splitlines()]
        self.assertEqual(report["accuracy"], ranks.count(0) / 5)
        text = self.succeed(*given, "--out", str(out))
        for word in ("5 of 6 scored", "perplexity", "accuracy", "workspace", str(out)):
            self.assertIn(word, text)

    def test_no_tokens(self) -> None:
        tensors = large(0)
        path = self.file(safetensors(tensors))
        self.assertEqual(self.succeed("score", path, "--top", "3"), "")
        out = self.directory / "out"
        report = self.json("score", path, "--out", str(out))
        self.assertEqual((report["tokens"], report["perplexity"]), (0, None))
        self.assertEqual(out.read_bytes(), b"")
        self.assertIn("0 of 0", self.succeed("score", path, "--out", str(out)))
        self.assertIn("temperature", self.refuse("score", path, "--temperature", "0"))

    def test_bad_input(self) -> None:
        head = Head()
        path = self.file(safetensors({**head.tensors(), "few": ("I64", [2, 2], bytes(32))}))
        for arguments, word in (
            ([], "file"),
            ([path, "--weight", "nope"], '--weight: the file has no tensor "nope"'),
            ([path, "--target", "few"], '--target: tensor "few" has 4 elements; allowed: 6'),
            ([path, "--top", "0"], "--top: 0; allowed: >= 1"),
            ([path, "--top", "257"], "--top: 257; allowed: <= 256"),
            ([path, "--top", "12"], "--top: 12; allowed: 1 to 11, the rows of --weight"),
            ([path, "--temperature", "0"], "temperature is 0"),
            ([path, "--out", path], "would overwrite the input"),
            ([path, "--reduction", "sum"], "--reduction"),
            ([path, "--device", "cuda"], "score does not take cuda"),
        ):
            with self.subTest(arguments=arguments):
                self.assertIn(word, self.refuse("score", *arguments, "--json"))
        self.assertEqual(self.left_behind(), {"in.safetensors"})

    def test_a_full_disk_is_a_failure(self) -> None:
        path = self.file(safetensors(large(2 * BLOCK)))
        with open("/dev/full", "w", encoding="utf-8") as full:
            done = subprocess.run(
                [PROGRAM, "score", path], stdout=full, stderr=subprocess.PIPE, text=True,
                check=False,
            )  # fmt: skip
        self.assertEqual((done.returncode, done.stderr.count("\n")), (1, 1))

    def test_an_error_names_its_field(self) -> None:
        path = self.file(safetensors(Head().tensors()))
        for arguments, field in (("--top", "12"), "--top"), (("--bias", "no"), "--bias"):
            error = json.loads(run("score", path, *arguments, "--json").stdout)["error"]
            self.assertEqual((error["code"], error["field"]), ("bad_input", field))


if __name__ == "__main__":
    unittest.main()
