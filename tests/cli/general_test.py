# SPDX-License-Identifier: Apache-2.0
"""The command line as a whole, and info."""

from __future__ import annotations

import json
import subprocess
import unittest

from support import PROGRAM, CliTest, Head, run, safetensors


class GeneralTest(CliTest):
    def test_help_and_version(self) -> None:
        self.assertIn("loss", self.succeed("--help"))
        self.assertRegex(self.succeed("--version"), r"^logitless \d+\.\d+\.\d+\n$")
        for command in json.loads(self.succeed("info", "--json"))["commands"]:
            self.assertIn("--json", self.succeed(command, "--help"))

    def test_bad_commands_are_one_line(self) -> None:
        said = "logitless: a command is missing; see logitless --help\n"
        self.assertEqual(self.refuse(), said)
        self.assertIn("frobnicate", self.refuse("frobnicate"))
        self.assertIn("--frobnicate", self.refuse("info", "--frobnicate"))

    def error(self, *arguments: str) -> tuple[str, str | None, str]:
        """Code, field and message of an error with --json. Stderr has one line for a person too."""
        done = run(*arguments, "--json")
        self.assertIn(done.returncode, (1, 2))
        self.assertRegex(done.stderr, r"\Alogitless: [^\n]+\n\Z")
        self.assertEqual(done.stdout.count("\n"), 1)
        answer = json.loads(done.stdout)
        self.assertEqual(set(answer), {"error"})
        error = answer["error"]
        self.assertEqual(set(error), {"code", "field", "message"})
        self.assertIn(error["message"], done.stderr)
        return error["code"], error["field"], error["message"]

    def test_an_error_is_json_too(self) -> None:
        path = self.file(safetensors(Head().tensors()))
        for arguments, code, field in (
            (("frobnicate",), "bad_input", "frobnicate"),
            (("info", "--frobnicate"), "bad_input", "--frobnicate"),
            (("plan", "1", "2"), "bad_input", "V"),
            (("plan", "1", "2", "x"), "bad_input", "V"),
            (("plan", "64", "32", "1000", "--memory", "1"), "bad_input", "--memory"),
            (("plan", "64", "32", "1000", "--steps"), "bad_input", "--steps"),
            (("plan", "9000000000", "9000000000", "9"), "invalid_argument", "weight"),
            (("loss", path, "--temperature", "0"), "invalid_argument", "temperature"),
            (("loss", path, "--bias", "nope"), "bad_input", "--bias"),
            (("loss", path, "--bias", "target"), "bad_input", "--bias"),
            (("loss", path, "--gradients", path), "bad_input", "--gradients"),
            (("loss", path + "2"), "bad_input", "file"),
            (("score", path + "2"), "bad_input", "file"),
            (("score", path, "--top", "x"), "bad_input", "--top"),
            (("loss", path, "--device", "cuda"), "bad_input", "--device"),
            (("demo", path + "2"), "bad_input", None),
        ):
            with self.subTest(arguments=arguments):
                self.assertEqual(self.error(*arguments)[:2], (code, field))
        outside = Head()
        outside.target[0] = 11
        path = self.file(safetensors(outside.tensors()))
        self.assertEqual(self.error("loss", path)[:2], ("target_out_of_range", "target"))
        done = run("loss", "--json", "--help")
        self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_every_device_is_taken_or_refused_by_name(self) -> None:
        path = self.file(safetensors(Head().tensors()))
        commands = {
            "plan": ("plan", "2", "8", "16"),
            "check": ("check", "--op", "softmax", "--dtype", "f32", "--cases", "3"),
            "bench": ("bench", "--op", "linear-forward", "--n", "2", "--d", "8", "--v", "16",
                      "--repeats", "1", "--samples", "0"),
            "loss": ("loss", path),
            "score": ("score", path),
        }  # fmt: skip
        served = {
            "cpu": ["plan", "check", "bench", "loss", "score"], "cuda": ["plan", "check", "bench"],
            "webgpu": ["plan", "bench"], "reference": ["check", "loss", "score"],
        }  # fmt: skip
        for name, command in commands.items():
            for device, takers in served.items():
                with self.subTest(command=name, device=device):
                    done = run(*command, "--device", device)
                    if name in takers:  # 1: the library or the machine lacks it
                        self.assertIn(done.returncode, (0, 1), done.stderr)
                        self.assertNotIn("allowed", done.stderr)
                        continue
                    line = self.refuse(*command, "--device", device)
                    allowed = [d for d, t in served.items() if name in t]
                    self.assertIn(
                        f"--device: {name} does not take {device} ({', '.join(takers)} do); "
                        f"allowed: {', '.join(allowed)}", line
                    )  # fmt: skip
            self.assertIn('"gpu" is no device', self.refuse(*command, "--device", "gpu"))

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
        for name in backends:  # each backend has a line, which says its name once
            self.assertRegex(text, rf"(?m)^{name} +(absent: )?(?!{name}\b)\S")

    def test_cuda(self) -> None:
        info = self.json("info")
        cuda = {b["name"]: b for b in info["backends"]}["cuda"]
        if "cuda" not in info:
            self.assertIn("built without", cuda["reason"])
            return
        self.assertRegex(info["cuda"]["driver_floor"], r"^\d+\.0$")
        self.assertEqual(bool(info["cuda"]["devices"]), cuda["available"])
        text = self.succeed("info")
        self.assertIn("driver floor: one for CUDA " + info["cuda"]["driver_floor"], text)
        if not cuda["available"]:
            self.assertRegex(cuda["reason"], r"driver|device")
            return
        self.assertIn("batch invariance: ", cuda["description"])
        self.assertIn("row_reference: the row's maximum", cuda["description"])
        for device in info["cuda"]["devices"]:
            references = device["row_reference_of_linear_ops"]
            self.assertEqual(set(references), {"f32", "f16", "bf16"})
            self.assertEqual(references["f32"], "maximum")
            self.assertLessEqual(set(references.values()), {"maximum", "near the maximum"})
            self.assertIn(device["name"], text)
            self.assertRegex(device["compute_capability"], r"^\d+\.\d$")

    def test_threads_are_the_environments(self) -> None:
        done = run("info", "--json", env={"LOGITLESS_NUM_THREADS": "3"})
        cpu = json.loads(done.stdout)["cpu"]
        self.assertEqual(cpu["threads"], 3)
        self.assertIn("LOGITLESS_NUM_THREADS", cpu["threads_from"])


if __name__ == "__main__":
    unittest.main()
