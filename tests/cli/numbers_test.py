# SPDX-License-Identifier: Apache-2.0
"""A number on the command line is the one that is computed with, or an error that names it."""

from __future__ import annotations

import json
import re
import unittest

from support import CliTest, Head, run, safetensors

COMMANDS = [c for c in json.loads(run("info", "--json").stdout)["commands"] if c != "info"]
# LOST become 0 or infinite in f32 (the last two in double too). NONE are no numbers.
LOST = ("1e-46", "-1e-50", "7e-46", "3.5e38", "-1e39", "1e-400", "1e400")
NONE = ("nan", "-nan", "x", "1,5", "1.5x", "")


class NumbersTest(CliTest):
    def options(self, command: str, kind: str) -> list[str]:
        return re.findall(rf"^ +(--[\w-]+) {kind}\b", self.succeed(command, "--help"), re.M)

    def arguments(self, command: str) -> list[str]:
        path = self.file(safetensors(Head().tensors()))
        files = dict.fromkeys(("loss", "score", "demo"), [path])
        return {"plan": ["4", "4", "4"], **files}.get(command, [])

    def test_what_f32_does_not_hold_is_an_error_of_its_option(self) -> None:
        tried = 0
        for command in COMMANDS:
            for option in self.options(command, "FLOAT"):
                for value in LOST + NONE:
                    with self.subTest(command=command, option=option, value=value):
                        # One argument, because a separate "-..." would be an option.
                        given = (*self.arguments(command), f"{option}={value}")
                        error = self.refuse(command, *given)
                        name = option[2:].replace("-", "[-_]")
                        self.assertRegex(error, rf"^logitless: {command}: (--)?{name}\b")
                        self.assertIn(value.replace("-nan", "nan") or option, error)
                        tried += 1
        self.assertGreaterEqual(tried, 5 * len(LOST + NONE))

    def test_the_error_says_what_is_allowed(self) -> None:
        path = self.file(safetensors(Head().tensors()))
        for option, value in (("--softcap", "1e-46"), ("--logit-scale", "-1e-50")):
            self.assertEqual(
                self.refuse("loss", path, f"{option}={value}"),
                f"logitless: loss: {option}: {value}; allowed: 0, or 1.4e-45 to 3.4e+38 in size "
                "(f32)\n",
            )

    def test_what_f32_holds_is_taken(self) -> None:
        path = self.file(safetensors(Head().tensors()))
        for value in ("0", "0.0", "-0", "1e-45", "1.5e-45", "1e-40", "1e-3", "0x1p-3", "+2"):
            with self.subTest(value=value):
                self.succeed("loss", path, "--z-loss", value)
        self.assertIn("z_loss is inf", self.refuse("loss", path, "--z-loss", "inf"))
        for scale in ("3.4028234e38", "3.40282351e38"):
            self.succeed("loss", path, "--logit-scale", scale)

    def test_integers_fit_and_are_decimal(self) -> None:
        for command in COMMANDS:
            for option in self.options(command, "U?INT"):
                for value in ("1e3", "1.5", "nan", "9" * 30, "0x10", "010", ""):
                    with self.subTest(command=command, option=option, value=value):
                        error = self.refuse(command, *self.arguments(command), option, value)
                        self.assertIn(option, error)

    def test_integers_beyond_a_doubles_are_taken_as_they_are(self) -> None:
        path = self.file(safetensors(Head().tensors()))  # one of its targets is -100
        for value in (2**53 - 1, 2**53, 2**53 + 1, -(2**53) - 1, 2**63 - 1):
            with self.subTest(value=value):
                space = self.json("plan", "4", "4", "4", f"--memory={abs(value)}")["workspace"]
                self.assertEqual(space["given"], abs(value))
                error = self.refuse("loss", path, f"--ignore-index={value}")
                self.assertRegex(error, rf"target\[.*\] is -100; .* ignore_index {value}\n")
        given = self.json("plan", "4", "4", "4", f"--memory={2**53 + 1} kB")["workspace"]["given"]
        self.assertEqual(given, (2**53 + 1) * 1000)
        for value in (2**63, f"{2**53}KiB", "-1"):
            with self.subTest(value=value):
                self.assertIn(
                    f'--memory: "{value}"', self.refuse("plan", "4", "4", "4", f"--memory={value}")
                )


if __name__ == "__main__":
    unittest.main()
