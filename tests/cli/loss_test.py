# SPDX-License-Identifier: Apache-2.0
"""logitless loss: loss, statistics and gradients are the formulas'; bad input; whole output."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import unittest

from support import DEVICES, PROGRAM, CliTest, Head, pack, read, run, safetensors, unpack


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
        # 16-bit gradients round the stored probabilities and a scaled row of hidden states.
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

    def test_shift(self) -> None:
        """A position of a sequence [B, T] is given the target of the one `shift` places later."""
        for name, shift, ignored in itertools.product(
            ("I64", "I32"), (0, 1, 2, 3, 1 << 40), (-100, 1 << 40)
        ):
            head = Head()
            head.target[3] = 4
            content = safetensors(head.tensors(name))
            moved = [row[shift:] + [-100] * 3 for row in (head.target[:3], head.target[3:])]
            head.target = [target for row in moved for target in row[:3]]
            report = self.json(
                "loss",
                self.file(content),
                *("--bias", "bias", "--reduction", "none"),
                *("--shift", str(shift), "--ignore-index", str(ignored)),
            )
            self.assertEqual(report["valid"], 2 * max(0, 3 - shift))
            want = head.expected()["losses"] if shift < 3 else [0.0] * 6
            for a, b in zip(report["loss"], want, strict=True):
                self.assertAlmostEqual(a, b, delta=1e-5)
        flat = Head()
        tensors = flat.tensors()
        tensors["target"] = (tensors["target"][0], [6], tensors["target"][2])
        error = self.refuse("loss", self.file(safetensors(tensors)), "--bias", "bias", "--shift", "1")
        self.assertRegex(error, r'"target" has the shape \[6\]; allowed with --shift: \[2, 3\]')
        for value in ("-1", "1.5", "x"):
            error = self.refuse("loss", self.file(b""), "--shift", value)
            self.assertRegex(error, r"--shift: (-1; allowed: >= 0|.* is no integer)$")

    def test_a_bad_target_is_named_as_the_file_has_it(self) -> None:
        for shape, bad, name in (
            ([2, 3], 4, "target[1, 1]"),
            ([2, 3], 5, "target[1, 2]"),
            ([6], 4, "target[4]"),
            ([1, 2, 3], 4, "target[0, 1, 1]"),
        ):
            head = Head()
            head.target[bad] = 11
            tensors = head.tensors()
            for tensor, more in (("target", []), ("hidden", [5])):
                dtype, _, data = tensors[tensor]
                tensors[tensor] = (dtype, shape + more, data)
            path = self.file(safetensors(tensors))
            for device, shift in itertools.product(DEVICES, ("0", "1")):
                with self.subTest(shape=shape, bad=bad, shift=shift, device=device):
                    given = ("loss", path, "--shift", shift, "--device", device, "--json")
                    said = f"{name} is 11; allowed: 0 to 10, or ignore_index -100"
                    self.assertIn(said, self.refuse(*given))
                    error = json.loads(run(*given).stdout)["error"]
                    self.assertEqual(error["code"], "target_out_of_range")
                    self.assertEqual(error["field"], "target")

    def test_a_token_weight_moves_with_its_target(self) -> None:
        """token_weight[b, t] weighs the loss of the position that predicts target[b, t]."""
        weights = [0.5, 2.0, 0.25, 7.0, 0.0, 3.0]
        for shift in (0, 1, 2, 5):
            head = Head()
            head.target[3] = 4
            tensors = {**head.tensors(), "tw": ("F32", [2, 3], pack("F32", weights))}
            path = self.file(safetensors(tensors))
            given = ("loss", path, "--bias", "bias", "--reduction", "none", "--shift", str(shift))
            plain = self.json(*given)["loss"]
            weighted = self.json(*given, "--token-weight", "tw")["loss"]
            for i, (a, b) in enumerate(zip(weighted, plain, strict=True)):
                row, column = divmod(i, 3)
                weight = weights[row * 3 + column + shift] if column + shift < 3 else 0.0
                self.assertAlmostEqual(a, weight * b, delta=1e-6)
        tensors["tw"] = ("F32", [6], tensors["tw"][2])
        error = self.refuse(
            "loss", self.file(safetensors(tensors)), "--token-weight", "tw", "--shift", "1"
        )
        self.assertRegex(error, r'--token-weight: tensor "tw" has the shape \[6\]; .*\[2, 3\]')

    def test_a_loss_that_is_no_number_says_of_how_many_tokens(self) -> None:
        for bad, kind in ((float("nan"), "nan"), (float("inf"), "nan|inf")):
            head = Head()
            head.input[4][1] = bad
            path = self.file(safetensors(head.tensors()))
            for reduction in ("mean", "sum", "none"):
                with self.subTest(bad=bad, reduction=reduction):
                    text = self.succeed("loss", path, "--reduction", reduction)
                    self.assertRegex(
                        text, "tokens +5 of 6 count, 1 ignored; the loss of 1 is NaN or infinite"
                    )
                    if reduction != "none":
                        self.assertRegex(text, rf"loss +({kind})  \({reduction}\)")
                    self.assertEqual(
                        self.json("loss", path, "--reduction", reduction)["not_finite"], 1
                    )
        path = self.file(safetensors(Head().tensors()))
        self.assertNotIn("NaN", self.succeed("loss", path))
        self.assertEqual(self.json("loss", path)["not_finite"], 0)

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
                set(tensors),
                {"loss", "log_probability", "lse", "target_logit", "entropy", "argmax", "rank",
                 "mass_above"},
            )
            values = {name: unpack(t[0], t[2]) for name, t in tensors.items()}
            self.assertEqual(tensors["lse"][1], [2, 3])
            self.assert_near(values["loss"], want["losses"], 1e-6)
            self.assert_near(values["log_probability"], [-v for v in want["losses"]], 1e-6)
            logs = [b - a for a, b in zip(values["lse"], values["target_logit"], strict=True)]
            self.assert_near(logs, values["log_probability"], 1e-6)
            self.assertEqual(
                (values["argmax"][3], values["rank"][3]), (-1, -1)
            )  # token 3 is ignored
            valid = [i for i, t in enumerate(head.target) if t != -100]
            correct = sum(values["argmax"][i] == head.target[i] for i in valid)
            self.assertEqual(
                [values["rank"][i] == 0 for i in valid],
                [values["argmax"][i] == head.target[i] for i in valid],
            )
            self.assertEqual(
                [m == 0 for m in values["mass_above"]], [r <= 0 for r in values["rank"]]
            )
            statistics = report["statistics"]
            self.assertAlmostEqual(statistics["accuracy"], correct / len(valid))
            mean = sum(want["losses"]) / len(valid)
            self.assertAlmostEqual(statistics["perplexity"], math.exp(mean), delta=1e-4)

    def test_log_probability_and_rank_beside_a_large_offset(self) -> None:
        """At an offset of 2^14, f32 holds lse only to 2^-10: too little for these results."""
        tensors = {
            "hidden": ("F32", [4, 1], pack("F32", [1.0] * 4)),
            "weight": ("F32", [3, 1], pack("F32", [0.125, 1.0, 0.5])),
            "bias": ("F32", [3], pack("F32", [16384.0] * 3)),
            "target": ("I64", [4], pack("I64", [0, 1, 2, 1])),
        }
        out = self.directory / "tokens.safetensors"
        for device in DEVICES:
            report = self.json(
                "loss", self.file(safetensors(tensors)), "--bias", "bias", "--device", device,
                "--statistics", "--per-token", str(out),
            )  # fmt: skip
            values = {name: unpack(t[0], t[2]) for name, t in read(out)[0].items()}
            lse = math.log(math.exp(0.125) + math.exp(1) + math.exp(0.5))
            logs = [0.125 - lse, 1 - lse, 0.5 - lse, 1 - lse]
            self.assert_near(values["log_probability"], logs, 1e-6)
            self.assertEqual(values["rank"], [2, 0, 1, 0])
            above = [1 - math.exp(logs[0]), 0, math.exp(logs[1]), 0]
            self.assert_near(values["mass_above"], above, 1e-6)
            self.assertEqual(report["statistics"]["accuracy"], 0.5)
            perplexity = math.exp(-sum(logs) / 4)
            self.assertAlmostEqual(report["statistics"]["perplexity"], perplexity, delta=1e-5)

    def test_per_token_losses_of_a_reduced_loss(self) -> None:
        head = Head()
        path = self.file(safetensors(head.tensors()))
        for reduction in ("none", "sum", "mean"):
            for gradients in ([], ["--gradients", str(self.directory / "gradients")]):
                for smoothing in (0.0, 0.1):
                    with self.subTest(reduction=reduction, gradients=gradients):
                        want = head.expected(smoothing)
                        out = self.directory / "tokens.safetensors"
                        report = self.json(
                            "loss", path, "--bias", "bias", "--label-smoothing", str(smoothing),
                            "--reduction", reduction, "--per-token", str(out), *gradients,
                        )  # fmt: skip
                        loss, log = (unpack("F32", read(out)[0][name][2])
                                     for name in ("loss", "log_probability"))  # fmt: skip
                        self.assert_near(loss, want["losses"], 1e-6)
                        self.assertEqual((loss[3], log[3]), (0, 0))  # token 3 is ignored
                        self.assert_near(log, [-v for v in head.expected()["losses"]], 1e-6)
                        if reduction == "none":
                            self.assertEqual(report["loss"], loss)
        # The smallest workspace of the gradients is enough for the per-token losses too.
        arguments = ("loss", path, "--per-token", str(out), *gradients, "--memory")
        least = self.refuse(*arguments, "1").split("needs at least ")[1].split()[0]
        self.succeed(*arguments, least)

    def test_the_cost_is_what_is_saved(self) -> None:
        path = self.file(safetensors(Head(tokens=64, hidden=32, vocab=1000).tensors()))
        gradients = ("--gradients", str(self.directory / "out"))
        for arguments, held in (
            ((), "the logits are 250.0 KiB"),
            (gradients, "the logits and their gradient are 500.0 KiB"),
        ):
            line = self.succeed("loss", path, *arguments).split("\ncost")[1].splitlines()[0]
            self.assertIn(f"({held}: nothing is saved at this size; --memory ", line)
            memory = line.split("--memory ")[1].split()[0]
            text = self.succeed("loss", path, *arguments, "--memory", memory)
            self.assertIn(f"({held}), ", text)
        report = self.json("loss", path)
        self.assertEqual(report["logits_bytes"], 256_000)

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
        odd = {
            "odd": ("U8", [3], b"abc"),
            "half": ("F16", [11, 5], bytes(2 * 55)),
            "half_bias": ("F16", [11], bytes(22)),
        }
        path = self.file(safetensors({**head.tensors(), **odd}))
        target = dict(head.tensors())
        target["target"] = ("I64", [6], pack("I64", [0, 1, 2, 3, 4, 11]))
        outside = self.file(safetensors(target), "outside.safetensors")
        out = str(self.directory / "out.safetensors")
        for arguments, word in (
            ([], "file"),
            # the message lists the tensors that the file has
            ([path, "--weight", "nope"], '"hidden"'),
            ([path, "--bias", "odd"], '--bias: tensor "odd" has dtype U8; allowed: F32, F16, BF16'),
            ([path, "--hidden", "target"], "allowed: F32, F16, BF16\n"),
            ([path, "--target", "hidden"], "allowed: I32, I64\n"),
            ([path, "--vocab-weight", "odd"], "allowed: F32\n"),
            ([path, "--weight", "half"], "weight is f16; allowed: f32, the dtype of input"),
            ([path, "--bias", "half_bias"], "bias is f16; allowed: f32\n"),
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
        # A limit on file sizes makes writing fail, as on a full disk.
        limit = (
            f'ulimit -f 0; trap "" XFSZ; exec "$0" loss "$1" --gradients "$2" --device {DEVICES[0]}'
        )
        done = subprocess.run(
            ["bash", "-c", limit, PROGRAM, path, str(out)], capture_output=True, check=False
        )
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertEqual(done.stderr.count(b"\n"), 1)
        self.assertEqual(out.read_bytes(), b"what was there")
        self.assertEqual(self.left_behind(), {"in.safetensors", "out.safetensors"})
        self.succeed("loss", path, "--gradients", str(out), "--device", DEVICES[0])
        self.assertEqual(set(read(out)[0]), {"grad_input", "grad_weight"})


if __name__ == "__main__":
    unittest.main()
