# SPDX-License-Identifier: Apache-2.0
"""logitless plan: its numbers agree with each other and with what runs."""

from __future__ import annotations

import unittest

from support import OPS, CliTest, Head, run, safetensors


class PlanTest(CliTest):
    SHAPE = ("300", "64", "3000")

    def test_every_op_and_dtype(self) -> None:
        for op in OPS:
            for dtype in ("f32", "f16", "bf16"):
                with self.subTest(op=op, dtype=dtype):
                    plan = self.json(
                        "plan", *self.SHAPE, "--op", op, "--dtype", dtype, "--grad-dtype", dtype
                    )
                    space = plan["workspace"]
                    self.assertLessEqual(space["minimum"], space["recommended"])
                    self.assertEqual(space["given"], space["recommended"])
                    self.assertLessEqual(space["used"], space["given"])
                    text = self.succeed("plan", *self.SHAPE, "--op", op, "--dtype", dtype)
                    self.assertIn(op, text)

    def test_the_numbers_agree(self) -> None:
        smallest = self.json("plan", *self.SHAPE)["workspace"]["minimum"]
        for given in (smallest, smallest * 2, 3_000_000, 100_000_000):
            out = self.json("plan", *self.SHAPE, f"--memory={given}")
            plan, space = out["plan"], out["workspace"]
            self.assertEqual(space["given"], given)
            self.assertLessEqual(space["used"], given)
            self.assertGreaterEqual(space["used"], space["minimum"])
            self.assertEqual(sum(part["bytes"] for part in plan["parts"]), space["used"])
            self.assertGreaterEqual(plan["chunks"] * plan["token_chunk"], 300)
            self.assertLess((plan["chunks"] - 1) * plan["token_chunk"], 300)
            self.assertEqual(plan["products"], 3 if plan["name"] == "stored chunks" else 4)
            self.assertEqual(plan["flops"], plan["products"] * 2 * 300 * 64 * 3000)
            avoided = max(0, 2 * 300 * 3000 * 4 - space["used"])
            self.assertEqual(out["logits_bytes_avoided"], avoided)
        self.assertEqual(plan["name"], "stored chunks")
        least = self.json("plan", *self.SHAPE, f"--memory={smallest}")
        self.assertEqual(least["plan"]["name"], "recompute")
        self.assertEqual(least["workspace"]["used"], smallest)
        self.assertIn(str(smallest), self.refuse("plan", *self.SHAPE, f"--memory={smallest - 1}"))
        forward = self.json("plan", *self.SHAPE, "--op", "linear-forward")
        self.assertEqual((forward["plan"]["name"], forward["plan"]["products"]), ("loss only", 1))
        avoided = 300 * 3000 * 4 - forward["workspace"]["used"]
        self.assertEqual(forward["logits_bytes_avoided"], avoided)
        frozen = self.json("plan", *self.SHAPE, "--no-grad-weight")
        self.assertEqual(frozen["plan"]["products"], 2)

    def test_divergences(self) -> None:
        product = 2 * 300 * 64 * 3000
        for op, own in (("forward", 2), ("backward", 4), ("forward-backward", 4)):
            one = (*self.SHAPE, "--op", f"divergence-{op}")
            for dtype in ("f32", "f16", "bf16"):
                plan = self.json("plan", *one, "--dtype", dtype, "--grad-dtype", dtype)
                space = plan["workspace"]
                self.assertLessEqual(space["minimum"], space["used"])
                self.assertLessEqual(space["used"], space["given"])
                self.assertEqual(sum(p["bytes"] for p in plan["plan"]["parts"]), space["used"])
                self.assertEqual(plan["plan"]["products"], own)
                self.assertEqual(plan["plan"]["flops"], own * product)
            wide = self.json("plan", *one, "--teacher-hidden", "128")
            self.assertEqual(wide["teacher_hidden"], 128)
            self.assertEqual(wide["plan"]["flops"], (own + 1) * product)
            logits = self.json("plan", *one, "--teacher-logits")
            self.assertEqual(logits["plan"]["products"], own - 1)
            self.assertIn("a teacher of D 64", self.succeed("plan", *one))
            least = self.json("plan", *one, f"--memory={space['minimum'] * 3}", "--dtype", "bf16")
            held = (2 + (op != "forward")) * 300 * 3000 * 4
            self.assertEqual(
                least["logits_bytes_avoided"], held - least["workspace"]["used"]
            )  # fmt: skip
        kept = self.json("plan", *self.SHAPE, "--op", "divergence-backward", "--kept", "1GiB")
        self.assertEqual((kept["plan"]["products"], kept["kept"]["columns"]), (2, 3000))
        for wrong in (
            ("--kept", "1GiB", "--op", "divergence-forward-backward"),
            ("--teacher-logits",), ("--teacher-hidden", "8"),
            ("--op", "divergence-forward", "--teacher-logits", "--teacher-hidden", "8"),
            ("--op", "divergence-forward", "--shards", "2"),
            ("--op", "divergence-forward", "--device", "cuda", "--steps"),
        ):  # fmt: skip
            self.assertIn("; allowed: ", self.refuse("plan", *self.SHAPE, *wrong))

    def test_divergences_on_gpus(self) -> None:
        """A build with CUDA or WebGPU plans divergences for them on a machine without a GPU too."""
        backends = self.json("info")["backends"]
        absent = {b["name"] for b in backends if "built without it" in b.get("reason", "")}
        for device in ("cuda", "webgpu"):
            one = (*self.SHAPE, "--device", device, "--op", "divergence-forward-backward")
            if device in absent:
                self.assertIn("built without it", self.refuse("plan", *one, code=1))
                continue
            out = self.json("plan", *one, "--teacher-hidden", "128")
            space = out["workspace"]
            self.assertLessEqual(space["minimum"], space["used"])
            self.assertLessEqual(space["used"], space["given"])
            self.assertEqual(out["plan"]["products"], 4)
            least = self.json("plan", *one, f"--memory={space['minimum']}")
            self.assertGreaterEqual(least["plan"]["chunks"], out["plan"]["chunks"])
            kept = self.json("plan", *one[:-1], "divergence-backward", "--kept", "1GiB")
            self.assertEqual(kept["plan"]["products"], 2)
            self.assertGreaterEqual(kept["plan"]["token_chunk"] * kept["plan"]["chunks"], 300)
            self.assertIn("a teacher of D 64", self.succeed("plan", *one))

    def test_a_shard_of_the_vocabulary(self) -> None:
        for op in ("linear-forward", "linear-backward"):
            one = (*self.SHAPE, "--op", op, "--kept", "1GiB", "--shards", "3")
            shard = self.json("plan", *one)
            self.assertEqual((shard["vocab"], shard["vocab_total"]), (1000, 3000))
            self.assertEqual(shard["kept"]["columns"], 1000)
            self.assertIn("V 1000 of 3000", self.succeed("plan", *one))
        refused = self.refuse("plan", *self.SHAPE, "--shards", "2")
        self.assertIn("--shards: given with --op linear-forward-backward", refused)

    def test_what_is_kept_takes_a_product_less(self) -> None:
        backward = (*self.SHAPE, "--op", "linear-backward")
        plain = self.json("plan", *backward)
        whole = self.json("plan", *backward, "--kept", "1GiB")
        # kept has 47 blocks of 64 columns of 320 rows, and kept_rows 32 bytes a token.
        kept = {"columns": 3000, "holds": "f32 logits", "bytes": 300 * 32 + 47 * 64 * 320 * 4}
        self.assertEqual(whole["kept"], kept)
        self.assertEqual((whole["plan"]["name"], whole["plan"]["products"]), ("kept logits", 2))
        self.assertLess(whole["workspace"]["minimum"], plain["workspace"]["minimum"])
        half = self.json("plan", *backward, "--kept", str(kept["bytes"] // 2), "--dtype", "f32")
        self.assertEqual(half["kept"]["columns"], 1344)
        self.assertEqual((half["plan"]["name"], half["plan"]["products"]), ("recompute", 3))
        product = 2 * 300 * 64 * 3000
        self.assertAlmostEqual(half["plan"]["flops"] / product, 3 - 1344 / 3000)
        self.assertIn("1344 of 3000 columns", self.succeed(
            "plan", *backward, "--kept", str(kept["bytes"] // 2)))  # fmt: skip
        rounded = self.json("plan", *backward, "--kept", "1GiB", "--dtype", "bf16")
        self.assertEqual(rounded["plan"]["name"], "kept exponentials")
        forward = (*self.SHAPE, "--op", "linear-forward")
        keeping = self.json("plan", *forward, "--kept", "1GiB")
        self.assertEqual(keeping["kept"], kept)
        self.assertEqual(keeping["plan"], self.json("plan", *forward)["plan"])
        self.assertIn("--kept", self.refuse("plan", *self.SHAPE, "--kept", "1GiB"))

    def avoided(self, *arguments: str) -> str:
        text = self.succeed("plan", *arguments)
        return next(line for line in text.splitlines() if line.startswith("avoided"))

    def test_what_is_avoided_is_what_is_not_held(self) -> None:
        # A first-time user's small size: all tokens are one chunk, and the workspace is larger than
        # the logits and their gradient.
        toy = ("64", "32", "1000")
        self.assertEqual(self.json("plan", *toy)["logits_bytes_avoided"], 0)
        line = self.avoided(*toy)
        self.assertRegex(
            line, r"^avoided     nothing: the logits and their gradient are 500.0 KiB; "
        )
        self.assertRegex(line, r"--memory \d+KiB would do$")
        memory = line.split("--memory ")[1].split()[0]
        space = self.json("plan", *toy, "--memory", memory)
        self.assertGreater(space["logits_bytes_avoided"], 0)
        self.assertLess(space["workspace"]["used"], 512_000)
        # These logits are smaller than any workspace.
        self.assertRegex(self.avoided("2", "32", "10"), r"nothing is saved at this size$")
        self.assertRegex(self.avoided("0", "32", "10"), r"nothing is saved at this size$")
        # Here too all tokens are one chunk: the workspace holds the logits, not their gradient.
        one = ("128", "8", "30000")
        plan = self.json("plan", *one)["plan"]
        self.assertEqual((plan["chunks"], plan["name"]), (1, "stored chunks"))
        line = self.avoided(*one)
        self.assertRegex(line, r"^avoided     [\d.]+ MiB of the gradient alone: one chunk hold")
        memory = line.split("--memory ")[1].split()[0]
        plan = self.json("plan", *one, "--memory", memory)["plan"]
        self.assertNotIn("logits of one chunk", {part["name"] for part in plan["parts"]})
        many = ("4096", "64", "50000")
        text = r"^avoided     1\.[345] GiB: the logits and their gradient are 1.5 GiB, [\d.]+ x"
        self.assertRegex(self.avoided(*many), text)
        text = r"^avoided     7\d\d\.\d MiB: the logits are 781.2 MiB, [\d.]+ x"
        self.assertRegex(self.avoided(*many, "--op", "linear-forward"), text)

    def test_the_rest_of_the_workspace_is_explained(self) -> None:
        spare = "(the rest: scratch of more threads)"
        self.assertIn(spare, self.succeed("plan", *self.SHAPE, "--threads", "1"))
        self.assertNotIn(spare, self.succeed("plan", *self.SHAPE, "--threads", "16"))
        self.assertNotIn(spare, self.succeed("plan", *self.SHAPE, "--memory", "4MiB"))

    def test_webgpu_without_a_device(self) -> None:
        shape = ("1024", "768", "50257", "--device", "webgpu")
        if "built without it" in run("plan", *shape).stderr:
            return
        out = self.json("plan", *shape)
        plan, space = out["plan"], out["workspace"]
        self.assertEqual((plan["products"], space["used"]), (3, plan["bytes"]))
        self.assertLess(space["minimum"], 64 << 20)
        self.assertGreater(plan["windows"], 1)
        least = self.json("plan", *shape, f"--memory={space['minimum']}")
        self.assertEqual(least["plan"]["products"], 4)
        self.assertEqual(least["workspace"]["used"], space["minimum"])
        self.assertGreater(least["plan"]["predicted_ms"], plan["predicted_ms"])
        self.assertEqual(least["plan"]["slices"], 1)
        self.assertGreater(plan["slices"], 1)
        self.refuse("plan", *shape, f"--memory={space['minimum'] - 1}")
        for op in OPS:
            self.assertIn(op, self.succeed("plan", *shape, "--op", op))
        # Outputs in f32 need no scratch: they are computed in place, for any dtype of logits.
        for op in ("forward-backward", "softmax"):
            spaces = [self.json("plan", *shape, "--op", op, "--dtype", dtype)["workspace"]
                      for dtype in ("f32", "f16")]  # fmt: skip
            self.assertEqual(*spaces)

    def test_a_plan_is_what_runs(self) -> None:
        head = Head(tokens=300, hidden=16, vocab=700)
        path = self.file(safetensors({n: t for n, t in head.tensors().items() if n != "bias"}))
        out = str(self.directory / "out.safetensors")
        for gradients, op in (([], "linear-forward"),
                              (["--gradients", out], "linear-forward-backward")):  # fmt: skip
            space = self.json("plan", "300", "16", "700", "--op", op)["workspace"]
            report = self.json("loss", path, *gradients)
            self.assertEqual(report["workspace_bytes"], space["recommended"])
            least = space["minimum"]
            whole = report["loss"]
            report = self.json("loss", path, *gradients, f"--memory={least}")
            self.assertEqual(report["loss"], whole)  # any workspace gives the same bits
            self.refuse("loss", path, *gradients, f"--memory={least - 1}")

    def steps_agree(self, shape: tuple[str, ...], least: int) -> None:
        def seconds(steps: list[dict]) -> float:
            return sum(
                step.get("count", 1) * seconds(step["steps"])
                if "steps" in step
                else step.get("predicted_ms", 0.0)
                for step in steps
            )

        for given in (least, 192 << 20, 8 << 30):
            arguments = ("plan", *shape, f"--memory={max(given, least)}", "--steps")
            plan = self.json(*arguments)["plan"]
            # The rest of predicted_ms is launch overhead: 0.09 ms for each of one or two passes.
            launches = plan["predicted_ms"] - seconds(plan["steps"])
            self.assertAlmostEqual(launches / 0.09, round(launches / 0.09), places=6)
            self.assertIn(round(launches / 0.09), (1, 2))
            text = self.succeed(*arguments)
            for words in ("of tokens [0, ", "input x weight, columns [0, ", "(transposed) x input"):
                self.assertIn(words, text)
        self.assertNotIn("steps", self.json("plan", *shape)["plan"])

    def test_cuda_needs_no_device(self) -> None:
        shape = ("8192", "4096", "128256", "--dtype", "bf16", "--grad-dtype", "bf16",
                 "--device", "cuda")  # fmt: skip
        if "cuda" not in self.json("info"):
            self.assertEqual(run("plan", *shape).returncode, 1)
            return
        least = self.json("plan", *shape)["workspace"]["minimum"]
        before, kinds = 0.0, set()
        for given in (least, 2 * least, 1 << 29, 1 << 30, 3 << 30, 8 << 30):
            out = self.json("plan", *shape, f"--memory={max(given, least)}")
            plan, space = out["plan"], out["workspace"]
            self.assertLessEqual(space["used"], space["given"])
            self.assertGreaterEqual(space["used"], space["minimum"])
            self.assertGreaterEqual(plan["chunks"] * plan["token_chunk"], 8192)
            self.assertTrue(3 <= plan["products"] <= 4)
            # A plan with more memory is never slower.
            self.assertTrue(before == 0 or plan["predicted_ms"] <= before * 1.000001)
            before = plan["predicted_ms"]
            kinds.add(plan["name"])
        self.assertEqual((plan["name"], plan["products"]), ("whole", 3))
        self.assertGreater(len(kinds), 1)
        loss = self.json("plan", *shape, "--op", "linear-forward")["plan"]
        self.assertEqual((loss["name"], loss["products"]), ("loss only", 1))
        text = self.succeed("plan", *shape)
        self.assertIn("predicted", text)
        self.steps_agree(shape, least)
        self.assertIn(str(least), self.refuse("plan", *shape, f"--memory={least - 1}"))
        self.assertIn("linear", self.refuse("plan", *shape, "--op", "softmax"))
        kept = self.json("plan", *shape, "--op", "linear-backward", "--kept", "3GiB", "--steps")
        self.assertEqual((kept["kept"]["columns"], kept["plan"]["products"]), (128256, 2))
        self.assertNotIn("logits", {step.get("step") for step in kept["plan"]["steps"]})
        part = self.json("plan", *shape, "--op", "linear-backward", "--kept", "1GiB")
        self.assertEqual(part["kept"]["columns"] % 192, 0)
        self.assertTrue(2 < part["plan"]["products"] < 3)
        text = self.succeed("plan", *shape, "--op", "linear-forward", "--kept", "1GiB")
        self.assertIn(f"E of {part['kept']['columns']} of 128256 columns", text)

    def test_threads_add_scratch(self) -> None:
        spaces = [
            self.json("plan", *self.SHAPE, "--threads", str(n))["workspace"] for n in (1, 2, 8, 16)
        ]
        self.assertEqual(len({space["minimum"] for space in spaces}), 1)
        # The recommended size has room for at least eight threads on every machine, so a plan of
        # that size is the same on all of them.
        self.assertEqual(len({space["recommended"] for space in spaces[:3]}), 1)
        self.assertLess(spaces[2]["recommended"], spaces[3]["recommended"])
        for few, more in zip(spaces, spaces[1:], strict=False):
            self.assertLess(few["used"], more["used"])
        self.assertEqual(spaces[3]["used"], spaces[3]["recommended"])

    def test_sizes(self) -> None:
        for text, size in (
            ("3000000", 3000000),
            ("3MB", 3000000),
            ("0.003 GB", 3000000),
            ("4MiB", 4 << 20),
            ("4096 KiB", 4 << 20),
        ):
            space = self.json("plan", *self.SHAPE, "--memory", text)["workspace"]
            self.assertEqual(space["given"], size)
        for text in ("", "MiB", "1XiB", "-1", "1e99", "nan", "inf", "0x10", "1MiB2"):
            self.assertIn("--memory", self.refuse("plan", *self.SHAPE, f"--memory={text}"))

    def test_bad_input(self) -> None:
        for arguments, word in (
            ([], "N"),
            (["1", "2"], "V"),
            (["1", "2", "3", "4"], "4"),
            (["x", "2", "3"], "x"),
            (["1.5", "2", "3"], "1.5"),
            (["1", "0", "3"], "D"),
            (["1", "2", "0"], "V"),
            (["1", "2", "-3"], "-3"),
            (["1", "2", "99999999999999999999"], "V"),
            (["1", "2", "010"], "010"),
            (["9000000000", "9000000000", "9"], "2^56"),
            ([*self.SHAPE, "--dtype", "f64"], "f64"),
            ([*self.SHAPE, "--op", "backwards"], "backwards"),
            ([*self.SHAPE, "--device", "reference"], "reference"),
            ([*self.SHAPE, "--threads", "-1"], "-1"),
            ([*self.SHAPE, "--memory", "1"], "at least"),
            ([*self.SHAPE, "--no-grad-weight", "--no-grad-input"], "grad"),
        ):
            with self.subTest(arguments=arguments):
                self.assertIn(word, self.refuse("plan", *arguments))


if __name__ == "__main__":
    unittest.main()
