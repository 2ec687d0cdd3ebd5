# SPDX-License-Identifier: Apache-2.0
"""The command line as a whole, and info."""

from __future__ import annotations

import json
import subprocess
import unittest

from support import PROGRAM, CliTest, run


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
        for device in info["cuda"]["devices"]:
            self.assertIn(device["name"], text)
            self.assertRegex(device["compute_capability"], r"^\d+\.\d$")

    def test_threads_are_the_environments(self) -> None:
        done = run("info", "--json", env={"LOGITLESS_NUM_THREADS": "3"})
        cpu = json.loads(done.stdout)["cpu"]
        self.assertEqual(cpu["threads"], 3)
        self.assertIn("LOGITLESS_NUM_THREADS", cpu["threads_from"])


if __name__ == "__main__":
    unittest.main()
