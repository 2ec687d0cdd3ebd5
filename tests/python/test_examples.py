# SPDX-License-Identifier: Apache-2.0
"""The examples run, and training with logitless has the loss curves of plain PyTorch."""

from __future__ import annotations

import json
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples/python"
sys.path.insert(0, str(EXAMPLES))
pytest.importorskip("tokenizers")
import train_gpt  # noqa: E402

SMALL = {
    "vocab": 1024,
    "hidden": 64,
    "layers": 1,
    "batch": 8,
    "context": 32,
    "threads": 1,
    "quiet": True,
}


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return train_gpt.encode(train_gpt.read_text(())[:100_000], 1024)


@pytest.fixture(autouse=True)
def the_threads_of_torch() -> Iterator[None]:
    """Restores torch's number of threads, which training sets."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_f32_training_follows_plain_pytorch(device: str, ids: torch.Tensor) -> None:
    curves = []
    for loss in ("plain", "logitless"):
        s = train_gpt.Settings(**SMALL, loss=loss, device=device, steps=50)
        curves.append(train_gpt.train(s, ids)["losses"])
    assert max(abs(a - b) for a, b in zip(*curves)) <= 1e-3
    assert curves[1][-1] < curves[1][0] - 0.5, "it learns"


def test_bf16_training_is_no_worse_on_held_out_text(device: str, ids: torch.Tensor) -> None:
    held_out = {}
    for loss in ("plain", "logitless"):
        s = train_gpt.Settings(**SMALL, loss=loss, device=device, dtype="bfloat16", steps=60)
        held_out[loss] = train_gpt.train(s, ids)["held_out"]
    assert held_out["logitless"] <= held_out["plain"] + 0.01, held_out


def run(example: str, *arguments: str, code: int = 0) -> str:
    """The example's output. It has one thread: models this small gain nothing by more."""
    path = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [sys.executable, EXAMPLES / example, *arguments],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_train_gpt_draws_both_curves(tmp_path: pathlib.Path) -> None:
    picture, text = tmp_path / "curves.png", tmp_path / "text.txt"
    text.write_text(train_gpt.read_text(())[:50_000])
    small = ("--steps", "4", "--vocab", "512", "--hidden", "32", "--layers", "1", "--batch", "4")
    where = ("--device", "cpu", "--text", str(text), "--output", str(picture))
    out = run("train_gpt.py", *small, *where)
    results = json.loads(picture.with_suffix(".json").read_text())
    assert set(results) == {"plain", "logitless"} and "largest difference" in out
    assert all(len(r["losses"]) == 4 and r["peak_mib"] > 0 for r in results.values())
    assert picture.read_bytes().startswith(b"\x89PNG") or "no matplotlib" in out


@pytest.mark.slow
def test_finetuning_a_transformers_model() -> None:
    pytest.importorskip("transformers")
    out = run("finetune_transformers.py", "--steps", "5", "--vocab", "512", "--device", "cpu")
    difference = float(out.rsplit(":", 1)[1])
    assert difference < 1e-3, out


def test_a_jax_model() -> None:
    pytest.importorskip("jax")
    out = run("jax_head.py", "--steps", "10", "--batch", "256", "--hidden", "32")
    assert float(out.rsplit(":", 1)[1]) < 1e-4, out


@pytest.mark.slow
def test_a_jax_model_on_a_mesh() -> None:
    pytest.importorskip("jax")
    on_four = ("--mesh", "2x2", "--cpu-devices", "4")
    out = run("jax_mesh.py", *on_four, "--steps", "20", "--compare", "1e-5")
    meshes = re.findall(r"\{(.*)\}: a device holds \[(\d+), 64\] of the head \[(\d+), 64\]", out)
    assert [mesh for mesh, *_ in meshes] == ["'data': 2, 'vocab': 2", "'data': 1, 'vocab': 1"], out
    assert [int(vocab) // int(rows) for _, rows, vocab in meshes] == [2, 1], out
    first, second, *alone = (float(loss) for loss in re.findall(r": loss (\S+),", out))
    assert second < first - 0.5 and len(alone) == 2, "it learns"


@pytest.mark.slow
def test_a_difference_on_a_mesh_is_an_error() -> None:
    pytest.importorskip("jax")
    one_step = ("--mesh", "1x2", "--cpu-devices", "2", "--steps", "1")
    assert "largest difference" in run("jax_mesh.py", *one_step, "--compare", "-1", code=1)
