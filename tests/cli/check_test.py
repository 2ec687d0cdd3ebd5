# SPDX-License-Identifier: Apache-2.0
"""logitless check: passes on this machine, and says so when something does not."""

from __future__ import annotations

import json
import unittest

from support import OPS, CliTest, run


class CheckTest(CliTest):
    def test_this_machine_passes(self) -> None:
        report = self.json("check", "--cases", "20")
        self.assertEqual(report["failures"], 0)
        dtypes = ("f32", "f16", "bf16")
        rows = {(row["op"], row["dtype"]) for row in report["rows"]}
        self.assertEqual(rows, {(op, dtype) for op in OPS for dtype in dtypes})
        self.assertEqual({r["device"] for r in report["rows"]}, {"cpu", *self.cuda()})
        self.assertEqual(report["cases"], sum(r["cases"] for r in report["rows"]))
        for row in report["rows"]:
            self.assertEqual(row["cases"], 20)
            self.assertGreater(row["worst_ratio"], 0)
            self.assertLessEqual(row["worst_ratio"], 1)
            self.assertIn("N=", row["worst"])

    def cuda(self) -> list[str]:
        """["cuda"] where this library and machine have it."""
        backends = {b["name"]: b for b in self.json("info")["backends"]}
        return ["cuda"] if backends["cuda"]["available"] else []

    def test_an_absent_device_says_why(self) -> None:
        done = run("check", "--device", "cuda", "--op", "softmax", "--cases", "6")
        if self.cuda():
            self.assertEqual(done.returncode, 0)
            self.assertRegex(done.stdout, r"cuda +softmax +bf16 +6 ")
        else:
            self.assertEqual(done.returncode, 1)
            self.assertIn("cuda", done.stderr)
            self.assertEqual(done.stderr.count("\n"), 1)

    def test_every_instruction_set(self) -> None:
        info = self.json("info")
        report = self.json("check", "--every-isa", "--op", "linear-forward", "--dtype", "f32",
                           "--cases", "6")  # fmt: skip
        self.assertEqual([row["isa"] for row in report["rows"]], info["cpu"]["isas"])
        self.assertEqual(report["failures"], 0)

    def test_the_reference_is_checked_where_asked(self) -> None:
        report = self.json("check", "--device", "cpu,reference", "--op", "softmax", "--cases", "6")
        devices = [row["device"] for row in report["rows"]]
        self.assertEqual(sorted(devices), ["cpu"] * 3 + ["reference"] * 3)

    def test_text(self) -> None:
        text = self.succeed("check", "--op", "forward", "--dtype", "f32,bf16", "--cases", "6")
        self.assertRegex(text, r"cpu +forward +bf16 +6 ")
        self.assertRegex(text, r"\nPASSED: 12 cases, 0 failed")
        self.assertIn("ratios near 1 are usual there", text)
        text = self.succeed("check", "--op", "forward", "--dtype", "f32", "--cases", "6")
        self.assertNotIn("ratios near 1", text)

    def test_a_split_vocabulary(self) -> None:
        ops = ("forward", "backward", "linear-forward", "linear-backward")
        report = self.json("check", "--shards", "3", "--cases", "30", "--device", "cpu")
        self.assertEqual((report["failures"], report["shards"]), (0, 3))
        rows = [(row["op"], row["dtype"]) for row in report["rows"]]
        self.assertEqual(rows, [(op, dtype) for op in ops for dtype in ("f32", "f16", "bf16")])
        for row in report["rows"]:
            self.assertEqual(row["cases"], 30)
            self.assertGreater(row["worst_ratio"], 0)
            self.assertIn(", 3 shards, ", row["worst"])
        self.assertNotIn("shards", self.json("check", "--op", "softmax", "--cases", "6"))

    def test_any_number_of_shards(self) -> None:
        for shards in ("1", "2", "5", "8"):
            with self.subTest(shards=shards):
                text = self.succeed("check", "--shards", shards, "--cases", "20", "--device",
                                    "cpu,reference", "--dtype", "bf16", "--op",
                                    "linear-forward,linear-backward")  # fmt: skip
                self.assertRegex(text, r"cpu +linear-backward +bf16 +20 ")
                self.assertRegex(text, r"\nPASSED: 80 cases, 0 failed")

    def test_a_failure_names_the_shards(self) -> None:
        # With a bound of 0, every rounding fails. The cases cycle through the kinds of shards.
        done = run("check", "--shards", "3", "--op", "linear-backward", "--dtype", "f32",
                   "--device", "cpu", "--cases", "9", "--within", "0")  # fmt: skip
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stdout, r"\nFAILED: 9 cases, \d failed")
        self.assertRegex(done.stdout, r"3 shards, even\n")
        self.assertIn("combined", done.stdout)  # names what was judged

    def test_failures_are_told(self) -> None:
        arguments = ["check", "--op", "linear-forward-backward", "--dtype", "f32",
                     "--cases", "6", "--within", "0.001"]  # fmt: skip
        done = run(*arguments)
        self.assertEqual(done.returncode, 1)
        self.assertEqual(done.stderr, "")
        self.assertRegex(done.stdout, r"\nFAILED: 6 cases, \d failed")
        self.assertIn("N=", done.stdout)  # a failure names the case
        self.assertIn("grad_", done.stdout)  # a failure names the output
        done = run(*arguments, "--json")
        self.assertEqual(done.returncode, 1)
        report = json.loads(done.stdout)
        self.assertGreater(report["failures"], 0)
        self.assertTrue(report["rows"][0]["report"])

    def test_bad_input(self) -> None:
        for arguments, word in (
            (["--device", "gpu"], "gpu"),
            (["--op", "forwards"], "forwards"),
            (["--dtype", "f8"], "f8"),
            (["--cases", "0"], "--cases"),
            (["--within", "2"], "--within"),
            (["--shards", "0"], "--shards"),
            (["--shards", "9"], "--shards"),
            (["--shards", "two"], "--shards"),
            (["--shards", "2", "--op", "forward,softmax"], "softmax"),
            (["--shards", "2", "--op", "forward-backward"], "linear-backward"),
        ):
            with self.subTest(arguments=arguments):
                self.assertIn(word, self.refuse("check", *arguments))


if __name__ == "__main__":
    unittest.main()
