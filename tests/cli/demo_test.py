# SPDX-License-Identifier: Apache-2.0
"""logitless demo, as a whole, on small made-up texts."""

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
QUICK = ["--dim", "32", "--units", "16", "--context", "4", "--batch", "64"]


def demo(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PROGRAM, "demo", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def made_up_text(words: int) -> str:
    """Nine words in ten follow from the word two places before, but none from the last word."""
    rng = random.Random(1)
    names = [f"word{i}" for i in range(400)]
    later = list(range(400))
    rng.shuffle(later)
    text, before, last = [], 0, 1
    for i in range(words):
        before, last = last, later[before] if rng.random() < 0.9 else rng.randrange(400)
        text.append(names[last] + (".\n" if i % 12 == 11 else ""))
    return " ".join(text)


class DemoTest(unittest.TestCase):
    folder: Path

    @classmethod
    def setUpClass(cls) -> None:
        cls.temporary = tempfile.TemporaryDirectory()
        cls.folder = Path(cls.temporary.name)
        cls.text = cls.folder / "text"
        cls.text.write_text(made_up_text(30000), encoding="utf-8")

    @classmethod
    def tearDownClass(cls) -> None:
        cls.temporary.cleanup()

    def outcome(self, *arguments: object) -> dict[str, Any]:
        done = demo("--json", *arguments)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(done.stderr, "")
        return json.loads(done.stdout)

    def refuse(self, *arguments: object) -> str:
        done = demo(*arguments)
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertEqual(done.stdout, "")
        self.assertEqual(done.stderr.count("\n"), 1)
        self.assertTrue(done.stderr.startswith("logitless: demo: "), done.stderr)
        return done.stderr

    def test_learns_and_beats_what_only_counts(self) -> None:
        outcome = self.outcome(self.text, *QUICK, "--steps", 1200)
        loss, perplexity = outcome["training"]["loss"], outcome["perplexity"]
        self.assertEqual(len(loss), 1200)
        self.assertLess(sum(loss[-50:]), 0.6 * sum(loss[:50]))
        self.assertLess(2 * perplexity["model"], perplexity["unigram"])
        self.assertLess(perplexity["model"], perplexity["bigram"])
        # One word in ten of the corpus is random, so no model can do better.
        self.assertGreater(perplexity["model"], 2)
        # The count includes <unk>, <document>, "." and the end of a line.
        self.assertEqual(outcome["model"]["vocab"], 404)
        self.assertLess(outcome["exactness"]["largest_difference"], 1e-5)
        memory = outcome["memory_bytes"]
        self.assertEqual(memory["logits"], 64 * 404 * 4)
        for part in ("workspace", "parameters", "gradients", "optimizer", "peak_resident"):
            self.assertGreater(memory[part], 0)

    def test_a_seed_fixes_everything(self) -> None:
        arguments = [self.text, *QUICK, "--steps", 20, "--words", 30]
        one = self.outcome(*arguments, "--threads", 1)
        two = self.outcome(*arguments, "--threads", 2)
        other = self.outcome(*arguments, "--seed", 2)
        for key in ("loss", "steps", "tokens"):
            self.assertEqual(one["training"][key], two["training"][key])
        self.assertEqual(one["perplexity"], two["perplexity"])
        self.assertEqual(one["sample"], two["sample"])
        self.assertNotEqual(one["training"]["loss"], other["training"]["loss"])

    def test_options_reach_the_model(self) -> None:
        outcome = self.outcome(
            self.text, "--steps", 2, "--dim", 24, "--units", 0, "--context", 7, "--vocab", 100,
            "--batch", 50, "--dtype", "f32", "--threads", 1,
        )  # fmt: skip
        model, training = outcome["model"], outcome["training"]
        self.assertEqual(
            (model["dim"], model["units"], model["context"], model["vocab"]), (24, 0, 7, 100)
        )
        self.assertEqual(model["parameters"], 100 * 24 + 100 + 7 * 24 + 24)
        self.assertEqual((training["batch"], training["steps"]), (50, 2))
        self.assertEqual(outcome["machine"]["dtype"], "f32")
        self.assertEqual(outcome["machine"]["threads"], 1)

    def test_finds_text_by_itself(self) -> None:
        outcome = self.outcome(
            "--steps", 1, "--dim", 8, "--units", 0, "--context", 4, "--words", 2, "--batch", 64
        )  # fmt: skip
        text = outcome["text"]
        self.assertGreater(text["files"], 100)
        self.assertGreater(text["heldout_files"], 0)
        self.assertGreaterEqual(outcome["model"]["vocab"], min(30000, text["distinct"] / 2))
        # A model with hardly any training predicts words by their frequency.
        perplexity = outcome["perplexity"]
        self.assertLess(abs(math.log(perplexity["model"] / perplexity["unigram"])), 0.2)

    def test_time_ends_the_training(self) -> None:
        outcome = self.outcome(self.text, *QUICK, "--seconds", 0.5)
        self.assertGreater(outcome["training"]["steps"], 1)
        self.assertGreaterEqual(outcome["training"]["seconds"], 0.5)
        self.assertLess(outcome["training"]["seconds"], 60)

    def test_says_it_in_lines_where_there_is_no_terminal(self) -> None:
        done = demo(self.text, *QUICK, "--steps", 30, "--words", 20)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stdout, r"(?m)^step 1 ")  # printed at once
        for word in ("Vocabulary", "100 %", "Memory", "unigram", "bigram", "this model", "Exact"):
            self.assertIn(word, done.stdout)
        self.assertNotIn("\x1b", done.stdout)
        self.assertNotIn("\r", done.stdout)

    def test_saves_a_model_that_loss_reads_and_text(self) -> None:
        model, text = self.folder / "model.safetensors", self.folder / "written"
        outcome = self.outcome(
            self.text, *QUICK, "--steps", 300, "--save", model, "--generate", text, "--words", 200
        )
        written = text.read_text(encoding="utf-8")
        self.assertEqual(written, outcome["sample"])
        words = written.replace(".", " ").split()
        self.assertEqual(len(words), 200)
        self.assertGreater(len(set(words)), 20)
        self.assertTrue(all(word.startswith("word") for word in words))

        data = model.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        vocabulary = json.loads(header["__metadata__"]["vocabulary"])
        self.assertEqual(len(vocabulary), 404)
        self.assertEqual(header["weight"]["shape"], [404, 32])
        self.assertEqual(header["unit_weight"]["shape"], [16, 4 * 32])
        done = subprocess.run(
            [PROGRAM, "loss", str(model), "--bias", "bias", "--json"],
            capture_output=True,
            text=True,
            check=False,
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        loss = json.loads(done.stdout)["loss"]
        # The file holds some of the held-out words, so its loss is near the overall mean.
        self.assertAlmostEqual(2.718281828**loss / outcome["perplexity"]["model"], 1, delta=0.4)

    def test_files_appear_only_if_all_went_well(self) -> None:
        self.refuse(self.text, "--save", self.folder / "no" / "model")
        self.refuse(self.text, "--generate", self.folder)
        self.refuse(self.text, "--save", self.folder / "x", "--generate", self.folder / "x")
        self.refuse(self.folder / "missing", "--save", self.folder / "x")
        self.assertFalse((self.folder / "x").exists())

    def test_refuses_bad_input_in_one_line(self) -> None:
        (self.folder / "empty").write_bytes(b"")
        (self.folder / "short").write_text("just a few words", encoding="utf-8")
        (self.folder / "binary").write_bytes(bytes(5000))
        (self.folder / "folder").mkdir()
        self.assertIn("missing", self.refuse(self.folder / "missing"))
        self.assertIn("0 words", self.refuse(self.folder / "empty"))
        self.assertIn("4 words", self.refuse(self.folder / "short"))
        self.assertIn("not a text", self.refuse(self.folder / "binary"))
        self.assertIn("folder", self.refuse(self.folder / "folder"))
        for option, value in (
            ("--steps", "0"), ("--steps", "many"), ("--seconds", "-1"), ("--dim", "0"),
            ("--context", "0"), ("--vocab", "2"), ("--batch", "0"), ("--dtype", "f64"),
            ("--threads", "0"), ("--units", "-1"), ("--temperature", "0"),
        ):  # fmt: skip
            self.assertIn(option, self.refuse(self.text, option, value))


if __name__ == "__main__":
    unittest.main()
