# SPDX-License-Identifier: Apache-2.0
"""`python -m logitless report` on the CPU, at tiny heads whose figures mean nothing."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import pathlib
import signal
import socket
import subprocess
import sys
from typing import Any

import pytest
import torch

import logitless
import logitless.numpy
from logitless._report import command, conformance, heads, tools
from logitless.torch import workspace_size

PYTHON = pathlib.Path(logitless.__file__).parents[1]


def run(folder: pathlib.Path, *arguments: str, **environment: str) -> Any:
    path = os.pathsep.join([str(PYTHON), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "logitless", *arguments], cwd=folder, text=True,
        capture_output=True, env=os.environ | {"PYTHONPATH": path} | environment,
    )  # fmt: skip


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The printed table and the text of the file of one run."""
    folder = tmp_path_factory.mktemp("report")
    done = run(folder, "report", "--device", "cpu", "--quick", "--no-compile", "--out", "it.json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in folder.iterdir()] == ["it.json"]
    return done.stdout, (folder / "it.json").read_text()


def test_a_report_has_every_part(reported: tuple[str, str]) -> None:
    whole = json.loads(reported[1])
    assert whole["report"] == command.VERSION and whole["right"] is True
    assert whole["machine"]["logitless"] == logitless.__version__
    assert whole["machine"]["torch"] == torch.__version__
    rows = {(row["function"], row["dtype"]) for row in whole["conformance"]}
    assert rows == {(f, d) for f in conformance.FUNCTIONS for d in heads.DTYPES}
    assert all(row["cases"] == 1 and row["failures"] == [] for row in whole["conformance"])
    assert [entry["engine"] for entry in whole["heads"]] == ["cpu", "cpu"]
    for entry in whole["heads"]:
        names = {"3 products", "1 products", "loss, ours", "loss + gradients, ours",
                 "log-probability + entropy, ours"}  # fmt: skip
        assert set(entry["figures"]) == names
        assert all(figure["ms"] > 0 for figure in entry["figures"].values())
    assert whole["left_out"] == whole["failed"] == []
    assert "linear_divergence      bf16    1 cases" in reported[0]
    assert "cpu: tiny, bf16, N 64, D 32, V 300" in reported[0]


def test_it_names_no_folder_and_no_host(reported: tuple[str, str]) -> None:
    for text in reported:
        for word in (socket.gethostname(), str(pathlib.Path.home()), str(PYTHON), "/tmp"):
            assert word not in text
    line = command.scrubbed('Traceback\n  File "/home/ada/x.py"\nOSError: /home/ada/lib/a.so: no')
    assert line == "OSError: a path: no"
    for text in ("No file: '/home/ada lovelace/lib.so'", "Permission denied: '/home/ada'",
                 f"in {pathlib.Path.home()} of {socket.gethostname()}"):  # fmt: skip
        line = command.scrubbed(text)
        assert "ada" not in line and "/" not in line
        assert socket.gethostname() not in line.split()
    report = command.Report("cpu", 100)
    report.take({"record": "conformance", "failures": ["RuntimeError: /home/ada/x.so: no"]}, "cpu")
    assert report.whole["conformance"][0]["failures"] == ["RuntimeError: a path: no"]


def test_what_fails_is_told_and_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    report = command.Report("cpu", 100)
    rows = conformance.run("cpu", 1, lambda: 1)
    assert all(row.failures == [] for row in rows)
    monkeypatch.setattr(conformance, "_VALUE", 1e-12)
    rows = conformance.run("cpu", 1, lambda: 1)
    assert all(row.failures for row in rows if row.function != "cross_entropy")
    for row in rows:
        report.take({"record": "conformance", **row.__dict__}, "cpu")
    assert not report.right(["cpu"])
    assert "of its limit" in "\n".join(command.table(report.whole))


@pytest.mark.parametrize("which", range(2))
def test_a_wrong_gradient_is_found(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient that is off by 3 % is found in each function and dtype."""
    right = conformance._value_and_gradients

    def wrong(call: Any, leaves: Any, upstream: Any) -> Any:
        value, gradients = right(call, leaves, upstream)
        if leaves[0].dtype != torch.float64:
            at = min(which, len(gradients) - 1)
            gradients[at] = gradients[at] * 1.03
        return value, gradients

    monkeypatch.setattr(conformance, "_value_and_gradients", wrong)
    rows = conformance.run("cpu", 2, lambda: 1)
    assert all(row.failures for row in rows), rows


def test_nan_and_a_call_that_raises_are_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    def nan(draw: conformance.Draw) -> conformance.Sample:
        sample = conformance._given_logits(draw)
        return conformance.Sample(lambda v: sample.ours(v) * math.nan, sample.exact, sample.leaves)

    def raises(draw: conformance.Draw) -> conformance.Sample:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(conformance, "FUNCTIONS", {"nan": nan, "raises": raises})
    rows = conformance.run("cpu", 1, lambda: 1)
    assert all(len(row.failures) == 1 and row.worst == 0 for row in rows)
    assert "RuntimeError: no such kernel" in rows[-1].failures[0]


def test_time_that_is_up_leaves_out_and_says_so() -> None:
    assert all(row.cases == 0 for row in conformance.run("cpu", 3, lambda: 0))
    report = command.Report("cpu", 100)
    report.part("heads", "cpu", 1)
    assert report.whole["left_out"] == [{"part": "heads", "engine": "cpu", "reason": "time"}]
    assert report.right(["cpu"]) is None  # nothing was checked
    assert "left out for time: cpu, heads" in command.table(report.whole)


def test_a_part_that_crashes_takes_no_other_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(*_: Any, **__: Any) -> Any:
        line = json.dumps({"record": "conformance", "function": "f", "dtype": "f32", "cases": 1,
                           "failures": [], "worst": 0.5})  # fmt: skip
        return subprocess.CompletedProcess([], -signal.SIGSEGV, line + "\n", "")

    monkeypatch.setattr(subprocess, "run", killed)
    report = command.Report("cpu", 100)
    report.part("conformance", "cpu", 30)
    assert len(report.whole["conformance"]) == 1
    assert report.whole["failed"][0]["reason"] == "ended by signal 11"
    assert not report.right(["cpu"])


def test_engines_are_those_that_the_library_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    said = 'cuda: LOGITLESS_CUDA_KERNELS is "?"; allowed on device 0 (A: B): sm90, portable, sm80\n'
    told = subprocess.CompletedProcess([], 0, said, "")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: told)
    assert command.engines() == ["sm90", "portable", "sm80"]


def test_torch_compile_is_measured_beside_the_default_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ["sm90", "portable", "sm80"]  # the default ones come first
    heads: list[tuple[str, float, bool]] = []

    def part(_: object, name: str, engine: str, seconds: float, *options: str) -> None:
        if name == "heads":
            heads.append((engine, seconds, "--compiled" in options))

    monkeypatch.setattr(command, "engines", lambda: names)
    monkeypatch.setattr(command.Report, "part", part)
    command.make("cuda", False, True, command.LIMIT)
    assert [engine for engine, _, _ in heads] == names
    assert [compiled for _, _, compiled in heads] == [True, False, False]
    assert all(seconds > 100 for _, seconds, _ in heads)  # if the parts before take no time


def test_a_head_that_does_not_fit_takes_fewer_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    from logitless._report import worker

    head = worker.HEADS[0]
    for gib, tokens in ((140, 8192), (6, 4096), (4, 1024), (1, 512)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gib=gib: (gib << 30, 0))
        assert worker._that_fits(head).tokens == tokens


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["report", "--limit", "1"], "--limit: 1.0 is out of range; allowed: 10 to 3600"),
        (["report", "--out", "no/such.json"], "--out: no/such.json: no such folder"),
        (["report", "--out", "."], "--out: .: not a file that can be written"),
        (["report", "--frob"], "unrecognized arguments: --frob"),
        ([], "usage: python -m logitless {info,plan,selftest,report}"),
        (["train"], "usage: python -m logitless {info,plan,selftest,report}"),
    ],
)
def test_bad_arguments(arguments: list[str], text: str, tmp_path: pathlib.Path) -> None:
    done = run(tmp_path, *arguments)
    assert done.returncode == 2 and text in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there(tmp_path: pathlib.Path) -> None:
    done = run(tmp_path, "report", "--device", "cuda")
    assert done.returncode == 2 and "--device: cuda: " in done.stderr


def test_info_says_what_is_there(tmp_path: pathlib.Path) -> None:
    done = run(tmp_path, "info")
    assert done.returncode == 0, done.stderr
    assert f"logitless {logitless.__version__}" in done.stdout
    assert f"library: {logitless.library_path()}" in done.stdout
    assert f"cpu: {logitless.describe_backend('cpu')}" in done.stdout
    assert f"torch: {torch.__version__}" in done.stdout
    if not torch.cuda.is_available():
        assert "\ncuda: not available: " in done.stdout


def test_plan_says_what_a_head_needs(tmp_path: pathlib.Path) -> None:
    done = run(tmp_path, "plan", "512", "64", "50257", "--dtype", "f32", "--device", "cpu")
    assert done.returncode == 0, done.stderr
    rows = {line[2:30].strip(): [float(x) for x in line[30:].split()]
            for line in done.stdout.splitlines()[1:]}  # fmt: skip
    assert rows["all logits would be"] == [98.2]
    assert rows["the gradients themselves"] == [12.4]
    for name in ("loss alone", "loss and gradients"):
        least, recommended = rows[name]
        assert 0 < least <= recommended < 98.2
    x, w = torch.empty(512, 64, requires_grad=True), torch.empty(50257, 64, requires_grad=True)
    used = workspace_size(x, w, torch.zeros(512, dtype=torch.int64)) / (1 << 20)
    assert abs(rows["loss and gradients"][1] - used) < 0.1 * used


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan", "-1", "8", "9"), "logitless plan: TOKENS: -1 is out of range; allowed: >= 0"),
        (("plan", "1", "0", "9"), "logitless plan: HIDDEN: 0 is out of range; allowed: >= 1"),
        (("plan", "1", "8"), "the following arguments are required: vocab"),
        (("plan", "1", "8", "9", "--dtype", "f64"), "invalid choice: 'f64'"),
        (("selftest", "--limit", "3"), "--limit: 3.0 is out of range; allowed: 10 to 3600"),
        (("info", "more"), "unrecognized arguments: more"),
        (("selftests",), "usage: python -m logitless {info,plan,selftest,report}"),
    ],
)
def test_wrong_arguments_are_refused(
    tmp_path: pathlib.Path, arguments: tuple[str, ...], words: str
) -> None:
    done = run(tmp_path, *arguments)
    assert done.returncode == 2 and words in done.stderr, done.stderr
    assert done.stdout == ""


def test_selftest_is_right_here(tmp_path: pathlib.Path) -> None:
    done = run(tmp_path, "selftest", "--device", "cpu", "--limit", "120")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len([line for line in lines if line.endswith(": right")]) == 15
    assert lines[-1].startswith("right: cpu, ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", ["wrong", "crashed", "no time"])
def test_selftest_tells_what_is_not_right(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    def part(self: Any, name: str, engine: str, seconds: float, *_: str) -> None:
        row = {"engine": engine, "function": "f", "dtype": "f32", "cases": 1, "worst": 7.0,
               "failures": ["seed 3: 7 times its limit"] if how == "wrong" else []}  # fmt: skip
        self.whole["conformance"].append(row)
        if how == "crashed":
            self.whole["failed"].append({"part": name, "engine": engine, "reason": "signal 11"})
        if how == "no time":
            self.whole["left_out"].append({"part": "g in f32", "engine": engine, "reason": "time"})

    monkeypatch.setattr(command.Report, "part", part)
    assert tools.selftest(["--device", "cpu"]) == 1
    told = capsys.readouterr().out
    words = {"wrong": "seed 3: 7 times", "crashed": "signal 11", "no time": "g in f32: time"}
    assert words[how] in told and "NOT RIGHT: cpu" in told


@pytest.mark.parametrize("wrong", ["", "value", "gradient"])
def test_selftest_without_torch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wrong: str
) -> None:
    found = importlib.util.find_spec
    hidden = lambda name: None if name == "torch" else found(name)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", hidden)
    if wrong:
        of = logitless.numpy.linear_cross_entropy

        def altered(*args: Any, **options: Any) -> Any:
            loss, grads = of(*args, **options)
            if wrong == "value":
                return loss * 1.001, grads
            grads.linear_weight[0] += 0.01
            return loss, grads

        monkeypatch.setattr(logitless.numpy, "linear_cross_entropy", altered)
    assert tools.selftest([]) == (1 if wrong else 0)
    told = capsys.readouterr().out
    assert "cpu        linear_divergence      f32    60 cases" in told
    assert told.splitlines()[-2].startswith("NOT RIGHT: cpu" if wrong else "right: cpu")
    assert tools.selftest(["--device", "cuda"]) == 2
    hidden_too = lambda name: None if name in ("torch", "numpy") else found(name)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", hidden_too)
    assert tools.selftest([]) == 2
