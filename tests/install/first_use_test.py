# SPDX-License-Identifier: Apache-2.0
"""The commands that a newcomer types first: what they fetch and build, and whether their advice
works. Only CMake's own checks compile anything; $LOGITLESS_PROGRAM is this build's command line."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CMAKE = os.environ.get("LOGITLESS_CMAKE", "cmake")
HIGHWAY = "highway-1.3.0.tar.gz"
NO_NETWORK = {f"{kind}_proxy": "http://127.0.0.1:9" for kind in ("http", "https", "all")}
PLAIN = ("-G", "Ninja", "-D", "LOGITLESS_CUDA=OFF", "-D", "CMAKE_BUILD_TYPE=Release")


def run(*command: object, cwd: Path = ROOT, **environment: str) -> tuple[int, str]:
    """The exit code, and what was said with its line breaks and margins taken out."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        check=False,
    )
    return done.returncode, " ".join(done.stdout.split())


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


class FirstUse(unittest.TestCase):
    def setUp(self) -> None:
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)

    def clone(self) -> Path:
        """The sources as a fresh clone has them, without what was fetched or built."""
        clone = self.folder / "clone"
        clone.mkdir()
        for entry in ROOT.iterdir():
            if entry.name not in ("third_party", "build", ".git"):
                (clone / entry.name).symlink_to(entry)
        return clone

    def configure(self, clone: Path, *options: object, **environment: str) -> tuple[int, str]:
        return run(CMAKE, "-S", clone, "-B", self.folder / "out", *options, **environment)


class Highway(FirstUse):
    def test_the_advice_after_a_failed_download_works(self) -> None:
        clone = self.clone()
        code, said = self.configure(clone, *PLAIN, **NO_NETWORK)
        self.assertNotEqual(code, 0, said)
        self.assertEqual(said.count("CMake Error"), 1, said)
        self.assertRegex(said, "Highway could not be had from https://.* scripts/fetch_highway and")
        self.assertIn("then the same command again", said)
        self.assertIn("or pass -DLOGITLESS_HIGHWAY_URL=FILE with the release tarball", said)
        # The script needs no network: this curl copies the tarball of this checkout.
        fetched = ROOT / "third_party" / HIGHWAY
        tools = self.folder / "tools"
        program(tools, "curl", f'while [ "$1" != -o ]; do shift; done; cp "{fetched}" "$2"')
        code, said = run(
            "scripts/fetch_highway", cwd=clone, PATH=f"{tools}:{os.environ['PATH']}", **NO_NETWORK
        )
        self.assertEqual(code, 0, said)
        self.assertTrue((clone / "third_party" / HIGHWAY).exists())
        code, said = self.configure(clone, *PLAIN, **NO_NETWORK)
        self.assertEqual(code, 0, said)
        self.assertIn("no webgpu.h found (scripts/fetch_webgpu)", said)
        (clone / "third_party/webgpu").mkdir()
        (clone / "third_party/webgpu/webgpu.h").touch()
        code, said = self.configure(clone, *PLAIN, **NO_NETWORK)
        self.assertEqual(code, 0, said)
        self.assertNotIn("no webgpu.h", said)

    def test_pip_is_told_in_its_own_words(self) -> None:
        code, said = self.configure(self.clone(), *PLAIN, "-D", "SKBUILD=ON", **NO_NETWORK)
        self.assertNotEqual(code, 0, said)
        self.assertIn("or pass -C cmake.define.LOGITLESS_HIGHWAY_URL=FILE with", said)
        self.assertIn("run scripts/fetch_highway and then pip again", said)

    def test_a_tarball_that_was_named_is_the_one_meant(self) -> None:
        code, said = self.configure(ROOT, *PLAIN, "-D", "LOGITLESS_HIGHWAY_URL=/nowhere/h.tar.gz")
        self.assertNotEqual(code, 0, said)
        self.assertIn("had from /nowhere/h.tar.gz (there is no such file): LOGITLESS_HIGH", said)
        code, said = self.configure(ROOT, *PLAIN)  # the option stays in CMake's cache
        self.assertNotEqual(code, 0, said)
        code, said = self.configure(ROOT, *PLAIN, "-D", "LOGITLESS_HIGHWAY_URL=")  # as advised
        self.assertEqual(code, 0, said)


class Cuda(FirstUse):
    """Which nvcc is found, and for which GPUs kernels are built."""

    def test_a_compiler_installed_after_the_first_run_is_found(self) -> None:
        nvcc = shutil.which("nvcc")
        if nvcc is None or Path(nvcc).parent in (Path("/usr/bin"), Path("/bin")):
            self.skipTest("no nvcc, or none that can be hidden")
        auto = ("-D", "LOGITLESS_CUDA=AUTO", "-D", "LOGITLESS_CUDA_ARCHITECTURES=90a-real")
        code, said = self.configure(ROOT, *auto, PATH="/usr/bin:/bin", CUDACXX="", CUDA_PATH="")
        self.assertEqual(code, 0, said)
        if "no CUDA compiler found" not in said:
            self.skipTest("CMake finds nvcc beside the path")
        code, said = self.configure(ROOT, *auto)
        self.assertEqual(code, 0, said)
        self.assertRegex(said, r"CUDA \S+ \(\S+\), kernels for 90a-real: about")

    def architectures(self, served: str, smi: str) -> tuple[str, str]:
        """What is built for the GPUs that this nvidia-smi shows, and why."""
        program(self.folder, "nvidia-smi", smi)
        script = self.folder / "gpus.cmake"
        script.write_text(
            f"include({ROOT}/cmake/gpus.cmake)\n"
            f'logitless_find_gpus("{served}" found why)\nmessage("<${{found}}> ${{why}}")\n'
        )
        path = f"{self.folder}:{os.environ['PATH']}"
        code, said = run(CMAKE, "-P", script, PATH=path)
        self.assertEqual(code, 0, said)
        found, why = re.fullmatch("<(.*?)> (.*)", said).groups()
        return found, why

    def test_kernels_are_for_the_gpus_that_are_there(self) -> None:
        every = "80;89-real;90a-real;100-real;120"
        for gpus, expected in (
            ("8.0", "80-real"), ("8.6", "80-real"), ("8.9", "89-real"), ("9.0", "90a-real"),
            ("10.0", "100-real"), ("12.0", "120-real"),
            # GPUs without code of their own: of generations that have some, and of one without any
            ("8.7", "80"), ("10.3", "100"), ("12.1", "120"), ("11.0", "100-virtual"),
            ("9.0 9.0", "90a-real"), ("8.6 9.0 8.0", "80-real;90a-real"), ("8.6 8.7", "80"),
            ("7.5 8.9", "89-real"),
        ):  # fmt: skip
            found, why = self.architectures(every, f"printf '%s\\n' {gpus}")
            self.assertEqual(found, expected, gpus)
            self.assertIn("for the GPU here", why)
            self.assertIn("LOGITLESS_CUDA_ARCHITECTURES=all", why)
        old = "80;89-real;90-virtual;90a-real"  # the default before CUDA 12.8
        self.assertEqual(self.architectures(old, "echo 12.0")[0], "90-virtual")
        self.assertEqual(self.architectures(old, "echo 9.0")[0], "90a-real")

    def test_without_a_gpu_that_is_served_they_are_for_all(self) -> None:
        for smi in ("exit 9", "echo 'No devices were found'", "echo '[N/A]'", "echo 9.0; exit 1"):
            found, why = self.architectures("80;90a-real", smi)
            self.assertEqual(found, "", smi)
            self.assertIn("no GPU here, so for all that are served", why)
        found, why = self.architectures("80;90a-real", "echo 7.5")
        self.assertEqual(found, "")
        self.assertIn("7.5, below 8.0, which is not served, so for all", why)


class Build(FirstUse):
    """What is built, and what is refused. Most tests share a folder, because configuring it again
    is quicker than a new one, and so pass every option that they depend on."""

    shared: tempfile.TemporaryDirectory[str]

    @classmethod
    def setUpClass(cls) -> None:
        cls.shared = tempfile.TemporaryDirectory()

    @classmethod
    def tearDownClass(cls) -> None:
        cls.shared.cleanup()

    def command(self, targets: str = "baseline", commands: str = "all", *more: str) -> list[str]:
        asked = (f"LOGITLESS_CPU_TARGETS={targets}", f"LOGITLESS_CLI_COMMANDS={commands}")
        asked += more or ("SKBUILD=OFF", "LOGITLESS_BUILD_CLI=ON")
        options = [word for value in asked for word in ("-D", value)]
        return [CMAKE, "-S", str(ROOT), "-B", self.shared.name, *PLAIN, *options]

    def test_native_is_what_the_library_chooses(self) -> None:
        code, said = run(*self.command("native"))
        self.assertEqual(code, 0, said)
        native = re.search(r"CPU kernels for (\w+), this machine's", said)
        self.assertIsNotNone(native, said)
        done = subprocess.run(
            [os.environ["LOGITLESS_PROGRAM"], "info", "--json"],
            env={k: v for k, v in os.environ.items() if k != "LOGITLESS_CPU_TARGET"},
            capture_output=True,
            text=True,
            check=True,
        )
        self.assertIn(native[1], done.stdout)
        self.assertEqual(native[1], json.loads(done.stdout)["cpu"]["isa"])

    def test_who_waits_for_pip_before_a_terminal_is_told_what_it_takes(self) -> None:
        """pip hides a build's output, but the build can still write to the terminal of pip."""
        command = self.command("baseline", "all", "SKBUILD=ON", "LOGITLESS_BUILD_CLI=OFF")
        child, terminal = pty.fork()
        if child == 0:
            with open(os.devnull, "w") as nowhere:
                done = subprocess.run(command, stdin=nowhere, stdout=nowhere, stderr=nowhere)
            os._exit(done.returncode)
        said = b""
        while True:
            try:
                said += os.read(terminal, 4096)
            except OSError:  # the other end is closed
                break
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)
        self.assertRegex(
            said.decode(), r"^\s+logitless: LOGITLESS_CUDA is OFF, .* min on \d+ cores"
        )

    def test_an_instruction_set_that_nobody_knows(self) -> None:
        code, said = run(*self.command("natives"))
        self.assertNotEqual(code, 0)
        self.assertIn('is "natives"; allowed: all, some, baseline, native', said)

    def test_a_command_that_nobody_knows(self) -> None:
        code, said = run(*self.command("baseline", "demo;dance"))
        self.assertNotEqual(code, 0)
        self.assertIn('has "dance"; allowed: all, or of info plan check loss score bench demo', said)

    def steps(self, preset: str, *options: str) -> str:
        """What a build by this preset would do, in a folder of its own."""
        out = self.folder / "out"
        code, said = run(CMAKE, "--preset", preset, "-B", out, *options)
        self.assertEqual(code, 0, said)
        code, said = run(CMAKE, "--build", out, "--", "-t", "commands")
        self.assertEqual(code, 0, said)
        return said

    def test_the_demo_builds_what_it_needs(self) -> None:
        said = self.steps("demo")
        for never in ("gtest", "tests/", "cuda", "webgpu_objects", "bench", "check.cpp", "plan_"):
            self.assertNotIn(never, said)
        self.assertIn("cli/logitless", said)

    def test_the_release_builds_no_tests(self) -> None:
        said = self.steps("release", "-D", "LOGITLESS_CUDA=OFF")
        self.assertNotIn("_test", said)
        self.assertNotIn("examples/CMake", said)
        self.assertIn("cli/logitless", said)


class Setup(FirstUse):
    def needs(self, *what: str) -> list[str]:
        """What scripts/setup asks for on a machine that has nothing, and no apt-get."""
        bare = self.folder / "bare"
        bare.mkdir(exist_ok=True)
        for tool in ("bash", "dirname", "id"):
            if not (bare / tool).exists():
                (bare / tool).symlink_to(shutil.which(tool))
        done = subprocess.run(
            [bare / "bash", "scripts/setup", *what], cwd=ROOT, env={"PATH": str(bare)},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        self.assertEqual(done.returncode, 1, done.stdout)
        self.assertIn("please install", done.stderr)
        return re.findall(r"^setup:   (\S+) \(", done.stderr, re.MULTILINE)

    def test_only_the_tests_want_a_test_framework(self) -> None:
        self.assertIn("g++", self.needs())
        self.assertIn("g++", self.needs("demo"))
        self.assertFalse({"libgtest-dev", "libgmock-dev"} & {*self.needs(), *self.needs("demo")})
        self.assertLessEqual({"libgtest-dev", "libgmock-dev"}, {*self.needs("test")})


def make(*goals: str) -> subprocess.CompletedProcess[str]:
    """Runs make as from a shell: without the flags of the `make test` that may run this test."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    return subprocess.run(
        ["make", *goals], cwd=ROOT, env=own, capture_output=True, text=True, check=True
    )


class Make(FirstUse):
    def test_the_demo_says_first_what_will_happen_and_how_long(self) -> None:
        done = make("-n", "demo")
        first = done.stdout.splitlines()[0]
        self.assertRegex(first, r'^echo "demo: builds .* s on two cores.*trains .* s\b')
        self.assertIn("--preset demo", done.stdout)
        self.assertNotIn("setup test", done.stdout)

    def test_help_is_a_list_in_groups(self) -> None:
        done = make("help")
        groups = [block.splitlines() for block in done.stdout.split("\n\n")]
        self.assertGreaterEqual(len(groups), 3)
        listed = []
        for heading, *lines in groups:
            self.assertFalse(heading.startswith(" "), heading)
            for line in lines:
                name = re.fullmatch(r"  make ([a-z-]+) {1,19}(?<=^.{27})\S.*", line)
                self.assertIsNotNone(name, line)
                listed.append(name[1])
        self.assertEqual(listed[:2], ["help", "demo"])
        self.assertLess(listed.index("install"), listed.index("test"))
        self.assertLess(listed.index("test"), listed.index("mutants"))
        text = (ROOT / "Makefile").read_text()
        self.assertEqual(
            sorted(listed), sorted(re.findall(r"^([a-z-]+):.*## ", text, re.MULTILINE))
        )


if __name__ == "__main__":
    unittest.main()
