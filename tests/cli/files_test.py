# SPDX-License-Identifier: Apache-2.0
"""Files that commands write are whole or absent, and no input, other output or file is touched."""

from __future__ import annotations

import os
import signal
import subprocess
import time
import unittest
from pathlib import Path

from support import PROGRAM, CliTest, Head, file_of, safetensors

QUICK_DEMO = ("--steps", "1", "--dim", "8", "--units", "0", "--context", "2", "--words", "3",
              "--batch", "32", "--threads", "1")  # fmt: skip
QUICK_BENCH = ("--op", "softmax", "--n", "2", "--v", "16", "--repeats", "1", "--samples", "0",
               "--threads", "1")  # fmt: skip


def text(words: int = 3000) -> str:
    return " ".join(f"word{i * i % 97}" for i in range(words)) + "\n"


class FilesTest(CliTest):
    def commands(self) -> dict[str, tuple[str, ...]]:
        """A command for each option that writes a file, without the file's name at the end."""
        head = self.file(safetensors(Head().tensors()))
        loss = ("loss", head)
        corpus = self.file(text().encode(), "corpus.txt")
        demo = ("demo", corpus, *QUICK_DEMO)
        return {
            "gradients": (*loss, "--gradients"),
            "per-token": (*loss, "--per-token"),
            "out": ("score", head, "--out"),
            "generate": (*demo, "--generate"),
            "save": (*demo, "--save"),
            "chart": ("bench", *QUICK_BENCH, "--chart"),
        }

    def subfolder(self, name: str) -> Path:
        folder = self.directory / name
        folder.mkdir()
        return folder

    def contents(self, folder: Path) -> dict[str, bytes]:
        return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}

    def test_only_the_file_named_is_written(self) -> None:
        for name, command in self.commands().items():
            with self.subTest(name):
                folder = self.subfolder(name)
                bystanders = {f"out{end}": b"a bystander" for end in (".tmp", "~", ".new")}
                for other, content in bystanders.items():
                    (folder / other).write_bytes(content)
                (folder / "victim").write_bytes(b"a victim")
                (folder / "out.part").symlink_to("victim")
                # A symbolic link's target is replaced and keeps its mode; the link stays.
                (folder / "real").write_bytes(b"old")
                (folder / "real").chmod(0o600)
                (folder / "out").symlink_to("real")
                self.succeed(*command, str(folder / "out"))
                self.assertTrue((folder / "out").is_symlink())
                self.assertTrue((folder / "out.part").is_symlink())
                self.assertEqual((folder / "real").stat().st_mode & 0o777, 0o600)
                after = self.contents(folder)
                self.assertGreater(len(after["real"]), 10)
                written = {"out": after["real"], "real": after["real"]}
                victim = {"out.part": b"a victim", "victim": b"a victim"}
                self.assertEqual(after, bystanders | written | victim)

    def test_a_link_to_no_file_yet(self) -> None:
        command = self.commands()["gradients"]
        folder = self.subfolder("folder")
        (folder / "dangling").symlink_to(folder / "fresh")
        (folder / "circle").symlink_to("circle")
        self.succeed(*command, str(folder / "dangling"))
        self.assertTrue((folder / "dangling").is_symlink())
        self.assertGreater(len((folder / "fresh").read_bytes()), 10)
        self.assertIn("circle", self.refuse(*command, str(folder / "circle")))
        names = {path.name for path in folder.iterdir()}
        self.assertEqual(names, {"fresh", "dangling", "circle"})

    def test_no_input_is_overwritten(self) -> None:
        commands = self.commands()
        folder = self.subfolder("texts")
        (folder / "one.txt").write_text(text(), encoding="utf-8")
        (folder / "two.txt").write_text(text(), encoding="utf-8")
        (self.directory / "hard").hardlink_to(self.directory / "corpus.txt")
        (self.directory / "soft").symlink_to("corpus.txt")
        head = self.directory / "in.safetensors"
        (self.directory / "soft_head").symlink_to(head)
        over_folder = ("demo", str(folder), *QUICK_DEMO)
        cases = [(commands[name], out) for name in ("gradients", "per-token", "out")
                 for out in (head, self.directory / "texts" / ".." / "in.safetensors",
                             self.directory / "soft_head")]  # fmt: skip
        cases += [(commands[name], self.directory / out) for name in ("generate", "save")
                  for out in ("corpus.txt", "texts/../corpus.txt", "hard", "soft")]  # fmt: skip
        cases += [
            ((*over_folder, f"--{name}"), folder / "two.txt") for name in ("generate", "save")
        ]
        before = {p: p.read_bytes() for p in self.directory.rglob("*") if p.is_file()}
        for command, out in cases:
            with self.subTest(command=command[-1], out=out):
                line = self.refuse(*command, str(out))
                self.assertIn("would overwrite the input", line)
                self.assertIn(command[-1], line)
        after = {p: p.read_bytes() for p in self.directory.rglob("*") if p.is_file()}
        self.assertEqual(after, before)

    def test_two_outputs_are_two_files(self) -> None:
        head = self.file(safetensors(Head().tensors()))
        corpus = self.file(text().encode(), "corpus.txt")
        self.subfolder("sub")
        (self.directory / "link").symlink_to("out")
        (self.directory / "folder").symlink_to("sub")
        out = str(self.directory / "out")
        for command, one, two in (
            (("loss", head), "--gradients", "--per-token"),
            (("demo", corpus, *QUICK_DEMO), "--generate", "--save"),
        ):
            for first, second in (
                (out, out),
                (out, str(self.directory / "." / "sub" / ".." / "out")),
                (out, f"{self.directory}//out"),
                (out, os.path.relpath(out)),
                (out, str(self.directory / "link")),
                (str(self.directory / "sub" / "x"), str(self.directory / "folder" / "x")),
            ):
                for existing in (False, True):
                    with self.subTest(command=command[0], second=second, existing=existing):
                        if existing:
                            Path(first).write_bytes(b"old")
                        line = self.refuse(*command, one, first, two, second)
                        self.assertIn("same file", line)
                        self.assertIn(one, line)
                        self.assertIn(two, line)
                        if existing:
                            self.assertEqual(Path(first).read_bytes(), b"old")
                            Path(first).unlink()
        self.assertEqual(
            self.left_behind(), {"in.safetensors", "corpus.txt", "sub", "link", "folder"}
        )

    def test_the_standard_output_is_an_output(self) -> None:
        for name, command in self.commands().items():
            with self.subTest(name):
                out = self.directory / "out"
                with out.open("wb") as stdout:
                    done = subprocess.run([PROGRAM, *command, str(out)], stdout=stdout,
                                          stderr=subprocess.PIPE, check=False)  # fmt: skip
                self.assertEqual(done.returncode, 2, done.stderr)
                self.assertIn(b"the standard output", done.stderr)
                out.unlink()
        head = self.directory / "in.safetensors"
        before = head.read_bytes()
        with head.open("ab") as stdout:
            done = subprocess.run([PROGRAM, "loss", str(head)], stdout=stdout,
                                  stderr=subprocess.PIPE, check=False)  # fmt: skip
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertEqual(head.read_bytes(), before)

    def test_a_full_disk_leaves_the_old_file(self) -> None:
        for name, command in self.commands().items():
            with self.subTest(name):
                out = self.directory / "old"
                out.write_bytes(b"what was there")
                here = self.left_behind()
                # A limit on file sizes makes writing fail, as on a full disk.
                limited = ["bash", "-c", 'ulimit -f 0; exec "$0" "$@"', PROGRAM, *command, str(out)]
                done = subprocess.run(limited, capture_output=True, text=True, check=False)
                self.assertEqual(done.returncode, 1, done.stderr)
                self.assertRegex(done.stderr, r"\Alogitless: [^\n]*old: [^\n]+\n\Z")
                self.assertEqual(out.read_bytes(), b"what was there")
                self.assertEqual(self.left_behind(), here)

    def test_what_is_no_file_is_refused(self) -> None:
        folder = self.subfolder("folder")
        os.mkfifo(self.directory / "pipe")
        here = self.left_behind()
        for name, command in self.commands().items():
            for out in ("/dev/full", "/dev/null", str(folder), str(self.directory / "pipe"),
                        str(folder / "no" / "x"), f"{folder}/absent/",
                        str(self.directory / "corpus.txt" / "x")):  # fmt: skip
                with self.subTest(name, out=out):
                    self.assertIn(f"{command[-1]}: {out}: ", self.refuse(*command, out))
        self.assertEqual(self.left_behind() - here, {"in.safetensors", "corpus.txt"})
        self.assertEqual(list(folder.iterdir()), [])


class InterruptedTest(CliTest):
    """A command that is stopped while it works leaves none of the files it writes."""

    def long_input(self) -> Path:
        """A head of zeros that takes minutes, and that no test waits for."""
        tokens, hidden, vocab = 8192, 512, 65536
        parts = {"hidden": [tokens, hidden], "weight": [vocab, hidden], "target": [tokens]}
        entries, at = [], 0
        for name, shape in parts.items():
            size = 4 * shape[0] * (shape[1] if len(shape) > 1 else 1)
            dtype = "I32" if name == "target" else "F32"
            entries.append(f'"{name}":{{"dtype":"{dtype}","shape":{shape},'
                           f'"data_offsets":[{at},{at + size}]}}')  # fmt: skip
            at += size
        header = "{" + ",".join(entries) + "}"
        header += " " * (-len(header) % 8)
        path = self.directory / "long.safetensors"
        path.write_bytes(file_of(header.encode()))
        os.truncate(path, 8 + len(header) + at)
        return path

    def start(self, *arguments: str, ignored: tuple[int, ...] = ()) -> subprocess.Popen[str]:
        """The command, once its temporary file is there."""

        def prepare() -> None:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)

        before = self.left_behind()
        process = subprocess.Popen(
            [PROGRAM, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            preexec_fn=prepare,
        )  # fmt: skip
        self.addCleanup(process.kill)
        for _ in range(6000):  # a minute in all, for a busy machine
            if process.poll() is not None or self.left_behind() != before:
                break
            time.sleep(0.01)
        self.assertIsNone(process.returncode, "it ended before it could be stopped")
        self.assertNotEqual(self.left_behind(), before, "it writes to no file beside its output")
        return process

    def commands(self) -> dict[str, tuple[str, ...]]:
        corpus = self.file(text().encode(), "corpus.txt")
        out = str(self.directory / "out")
        return {
            "loss": ("loss", str(self.long_input()), "--gradients", out, "--per-token", out + "2"),
            "score": ("score", str(self.long_input()), "--out", out),
            "demo": ("demo", corpus, "--seconds", "1000", "--save", out, "--generate", out + "2"),
            "bench": ("bench", "--repeats", "1000", "--chart", out),
        }

    def test_a_signal_ends_it_and_nothing_stays(self) -> None:
        for name, command in self.commands().items():
            here = self.left_behind()
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                with self.subTest(name, signal=number):
                    process = self.start(*command)
                    process.send_signal(number)
                    _, errors = process.communicate(timeout=60)
                    self.assertEqual(process.returncode, -number, errors)
                    self.assertEqual(self.left_behind(), here)

    def test_a_signal_that_was_ignored_stays_ignored(self) -> None:
        command = self.commands()["loss"]
        process = self.start(*command, ignored=(signal.SIGHUP,))
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        self.assertEqual(process.returncode, -signal.SIGTERM)

    def test_an_input_cut_short_while_it_is_read(self) -> None:
        path = self.long_input()
        size = path.stat().st_size
        here = self.left_behind()
        # With many threads, usually a worker finds the file's end, and two may at once.
        for _ in range(8):
            os.truncate(path, size)
            process = self.start("loss", str(path), "--gradients", str(self.directory / "out"),
                                 "--threads", "16")  # fmt: skip
            os.truncate(path, 4096)
            _, errors = process.communicate(timeout=60)
            self.assertEqual((process.returncode, errors.count("\n")), (1, 1), errors)
            self.assertIn("the file changed while it was read", errors)
            self.assertEqual(self.left_behind(), here)


if __name__ == "__main__":
    unittest.main()
