# SPDX-License-Identifier: Apache-2.0
"""logitless bench: lines, table, chart, progress bar; right results and memory."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess
import unittest
from xml.etree import ElementTree

from support import OPS, PROGRAM, SANITIZED, CliTest


def read_terminal(leader: int) -> bytes:
    """All that was written to a terminal whose other end is closed.

    The output comes in pieces, and the last may come after the writer has exited. At its end a
    read fails (Linux) or returns nothing.
    """
    shown = b""
    while select.select([leader], [], [], 5)[0]:
        try:
            piece = os.read(leader, 100_000)
        except OSError:
            break
        if not piece:
            break
        shown += piece
    return shown


class BenchTest(CliTest):
    def test_a_sweep_streams_lines(self) -> None:
        text = self.succeed(
            "bench", "--json", "--op", "linear-forward-backward,forward-backward",
            "--n", "7,20", "--d", "24", "--v", "500", "--dtype", "f32,bf16",
            "--threads", "1", "--repeats", "3",
        )  # fmt: skip
        rows = [json.loads(line) for line in text.splitlines()]
        keys = [(r["op"], r["tokens"], r["dtype"]) for r in rows]
        self.assertEqual(len(rows), 8)
        self.assertEqual(len(set(keys)), 8)
        for row in rows:
            self.assertGreater(row["ms_min"], 0)
            self.assertGreaterEqual(row["ms_median"], row["ms_min"])
            self.assertEqual((row["threads"], row["repeats"]), (1, 3))
            self.assertGreater(row["bandwidth_gbytes_per_second"], 0)
            self.assertLessEqual(row["error_ratio"], 1)
            self.assertGreater(row["error_ratio"], 0)
            if row["op"].startswith("linear"):
                self.assertGreater(row["peak_gflops"], 0)
                flops = 3 * 2 * row["tokens"] * 24 * 500
                self.assertAlmostEqual(row["gflops"] * row["ms_median"], flops * 1e-6, places=6)
                self.assertEqual(row["logits_bytes"], row["tokens"] * 500 * 4)

    def test_quick_is_small_but_for_what_is_named(self) -> None:
        for named, expected in (
            (["--n", "5"], (5, 128, 32768, 2)),
            (["--d", "8", "--v", "300", "--repeats", "3"], (512, 8, 300, 3)),
        ):
            row = self.json("bench", "--quick", "--samples", "0", *named)
            found = tuple(row[key] for key in ("tokens", "hidden", "vocab", "repeats"))
            self.assertEqual(found, expected)

    def test_whole_logits_and_where_others_stand_beside_it(self) -> None:
        small = ["bench", "--d", "8", "--v", "4096", "--repeats", "1", "--samples", "0"]
        head, row, *rest = self.succeed(*small, "--n", "64").splitlines()
        self.assertIn("  logits  workspace  ", head)
        self.assertIn(" 1.0 MiB ", row)
        self.assertIn("logits: ", rest[-2])
        self.assertIn("make bench-cpu", rest[-1])
        given = self.succeed(*small, "--n", "64", "--op", "softmax")  # it is given the logits
        self.assertNotIn("logits: ", given)
        self.assertIn("make bench-cpu", given)

    def test_every_op_is_right(self) -> None:
        for extra in ([], ["--in-place"]):
            text = self.succeed(
                "bench", "--json", "--op", ",".join(OPS), "--n", "9", "--d", "33", "--v", "1000",
                "--dtype", "f32,f16,bf16", "--repeats", "1", "--samples", "9", *extra,
            )  # fmt: skip
            rows = [json.loads(line) for line in text.splitlines()]
            self.assertEqual(len(rows), 3 * len(OPS))
            for row in rows:
                with self.subTest(op=row["op"], dtype=row["dtype"], extra=extra):
                    self.assertLessEqual(row["error_ratio"], 1)
                    self.assertGreater(row["error_ratio"], 0)

    def test_cuda(self) -> None:
        sweep = ["bench", "--json", "--device", "cuda", "--op", ",".join(OPS), "--n", "70",
                 "--d", "96", "--v", "3001", "--dtype", "f32,f16,bf16", "--repeats", "2",
                 "--samples", "9"]  # fmt: skip
        backends = {b["name"]: b for b in self.json("info")["backends"]}
        if not backends["cuda"]["available"]:
            self.assertIn("cuda: ", self.refuse(*sweep, code=1))
            return
        for extra in ([], ["--in-place"]):
            rows = [json.loads(line) for line in self.succeed(*sweep, *extra).splitlines()]
            self.assertEqual(len(rows), 3 * len(OPS))
            for row in rows:
                with self.subTest(op=row["op"], dtype=row["dtype"], extra=extra):
                    self.assertIn(row["device"], backends["cuda"]["description"])
                    self.assertLessEqual(row["error_ratio"], 1)
                    self.assertGreater(row["error_ratio"], 0)
                    self.assertGreater(row["ms_min"], 0)
                    self.assertGreater(row["bandwidth_gbytes_per_second"], 0)

    def test_webgpu(self) -> None:
        sweep = ["bench", "--json", "--device", "webgpu", "--op", ",".join(OPS), "--n", "20",
                 "--d", "36", "--v", "1502", "--dtype", "f32,f16", "--repeats", "2",
                 "--samples", "9"]  # fmt: skip
        backends = {b["name"]: b for b in self.json("info")["backends"]}
        if not backends["webgpu"]["available"]:
            self.assertNotIn("webgpu", os.environ.get("LOGITLESS_TEST_DEVICES", ""))
            self.assertIn("webgpu: ", self.refuse(*sweep, code=1))
            return
        for extra in ([], ["--in-place"], ["--grad-dtype", "f16", "--memory", "40MiB"]):
            rows = [json.loads(line) for line in self.succeed(*sweep, *extra).splitlines()]
            self.assertEqual(len(rows), 2 * len(OPS))
            for row in rows:
                with self.subTest(op=row["op"], dtype=row["dtype"], extra=extra):
                    self.assertIn(row["device"], backends["webgpu"]["description"])
                    self.assertLessEqual(row["error_ratio"], 1)
                    self.assertGreater(row["error_ratio"], 0)
                    self.assertGreater(row["ms_min"], 0)
                    self.assertGreater(row["bandwidth_gbytes_per_second"], 0)
                    if row["op"].startswith("linear"):
                        self.assertEqual(row["arithmetic"], "f32 tiles")
                        self.assertGreater(row["peak_gflops"], 0)

    def test_first_call(self) -> None:
        first = ["bench", "--json", "--device", "cuda", "--first-call", "--n", "70", "--d", "96",
                 "--v", "3001", "--dtype", "bf16"]  # fmt: skip
        backends = {b["name"]: b for b in self.json("info")["backends"]}
        for extra in ([], ["--warmup"]):
            if not backends["cuda"]["available"]:
                self.assertIn("cuda: ", self.refuse(*first, *extra, code=1))
                continue
            row = json.loads(self.succeed(*first, *extra))
            self.assertEqual("warmup_ms" in row, bool(extra))
            self.assertGreater(row["first_ms"], 0)
            self.assertGreater(row["second_ms"], 0)

    def test_memory_grows_by_the_workspace(self) -> None:
        shape = ["--n", "600", "--d", "64", "--v", "20000", "--repeats", "1", "--samples", "0"]
        memory = ["--memory", "10MiB,40MiB"]
        text = self.succeed("bench", "--json", *shape, *memory)
        for row in (json.loads(line) for line in text.splitlines()):
            plan = self.json("plan", "600", "64", "20000", f"--memory={row['workspace_bytes']}")
            used = plan["workspace"]["used"]
            self.assertIsNone(row["error_ratio"])
            if row["rss_growth_bytes"] is not None and not SANITIZED:
                self.assertLess(abs(row["rss_growth_bytes"] - used), 1 << 20)

    def test_table_and_chart(self) -> None:
        path = self.directory / "chart.svg"
        text = self.succeed(
            "bench", "--op", "linear-forward,softmax", "--n", "5", "--d", "8", "--v", "100,200",
            "--repeats", "1", "--chart", str(path),
        )  # fmt: skip
        self.assertEqual(text.count("linear-forward"), 2)
        self.assertIn("machine", text)
        root = ElementTree.parse(path).getroot()
        words = [e.text or "" for e in root.iter("{http://www.w3.org/2000/svg}text")]
        self.assertEqual(sum(word.startswith("softmax") for word in words), 2)
        bars = [
            e for e in root.iter("{http://www.w3.org/2000/svg}rect") if e.get("height") == "16.0"
        ]
        self.assertEqual(len(bars), 4)

    def test_a_terminal_gets_a_bar(self) -> None:
        arguments = ["bench", "--n", "5", "--d", "8", "--v", "100", "--repeats", "1"]
        leader, follower = pty.openpty()
        done = subprocess.run(
            [PROGRAM, *arguments], stdout=subprocess.PIPE, stderr=follower, text=True, check=False
        )
        os.close(follower)
        shown = read_terminal(leader).decode()
        os.close(leader)
        self.assertEqual(done.returncode, 0)
        self.assertIn("[", shown)
        self.assertTrue(shown.endswith("\r\x1b[K"))  # the progress bar is erased at the end
        self.assertNotIn("\x1b", done.stdout)

    def test_bad_input(self) -> None:
        for arguments, word in (
            (["--n", "0"], "--n"),
            (["--n", "1,x"], "x"),
            (["--d", "-1"], "-1"),
            (["--dtype", "f32,f99"], "f99"),
            (["--op", "linear"], "linear"),
            (["--repeats", "0"], "--repeats"),
            (["--memory", "1B", "--n", "5", "--v", "9"], "--memory"),
            (["--memory", "x"], "--memory"),
            (["--first-call"], "--device cuda"),
            (["--first-call", "--device", "webgpu"], "--device cuda"),
            (["--first-call", "--device", "cuda", "--n", "1,2"], "--first-call"),
            (["--warmup"], "--first-call"),
            (["--chart", str(self.directory / "no" / "x.svg")], "--chart"),
            (["--n", "100000000", "--v", "1000000", "--op", "forward"], "available"),
        ):
            with self.subTest(arguments=arguments):
                self.assertIn(word, self.refuse("bench", *arguments, "--json"))
                self.assertIn(word, self.refuse("bench", *arguments))  # before any table is printed


if __name__ == "__main__":
    unittest.main()
