# SPDX-License-Identifier: Apache-2.0
"""The notebooks of examples/notebooks run from a copy in an empty folder, without a network, and
show what their text says."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "examples/notebooks"
SECONDS = 180  # about one minute on two idle cores; here other tests run beside
PROGRAM = """
import json, pathlib, socket, sys
import run

def refused(*_):
    raise OSError("a notebook must not use the network")

socket.socket.connect = refused
found = run.run(pathlib.Path(sys.argv[1]))
print(json.dumps({name: found[name] for name in sys.argv[2:]}))
"""


def found(notebook: str, folder: pathlib.Path, *names: str) -> dict[str, Any]:
    """The values of these names after the notebook's last cell."""
    shutil.copy(NOTEBOOKS / notebook, folder)
    environment = {name: text for name, text in os.environ.items() if name != "HF_HUB_OFFLINE"}
    path = os.pathsep.join([str(ROOT / "python"), str(NOTEBOOKS), *sys.path])
    environment |= {
        "PYTHONPATH": path, "MPLBACKEND": "Agg", "CUDA_VISIBLE_DEVICES": "",
        "HF_HOME": str(folder / "cache"),
        "OMP_WAIT_POLICY": "passive",  # else threads that wait for a busy core take the other
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, notebook, *names],
        env=environment, cwd=folder, capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    values: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return values


def test_finetuning_is_the_same_in_less_memory(tmp_path: pathlib.Path) -> None:
    values = found("finetune.ipynb", tmp_path, "runs", "STEPS")
    own, patched = values["runs"]["TRL"], values["runs"]["patch_trl()"]
    assert len(own["losses"]) == len(patched["losses"]) == values["STEPS"]
    assert patched["losses"] == pytest.approx(own["losses"], abs=1e-4)
    assert own["losses"][-1] < own["losses"][0] - 2, "it learns"
    assert (own["calls"], patched["calls"]) == (0, values["STEPS"])
    assert 0 < patched["mib"] < own["mib"] / 2
    assert own["seconds"] > 0 and patched["seconds"] > 0
    assert (tmp_path / "finetune.png").read_bytes().startswith(b"\x89PNG")


def test_distilling_shows_the_error_of_bf16_logits(tmp_path: pathlib.Path) -> None:
    values = found("distil.ipynb", tmp_path, "curves", "distilled", "near")
    ours, exact = values["curves"]["linear_divergence"], values["curves"]["f32 logits"]
    assert ours == pytest.approx(exact, rel=1e-2)
    assert ours[-1] < ours[0] / 10, "it learns"
    points = values["distilled"] + values["near"]
    divergences = [point["divergence"] for point in points]
    assert divergences == sorted(divergences, reverse=True)
    assert divergences[0] > 1 and divergences[-1] < 1e-6
    for point in points:
        assert point["linear_divergence"] < 0.01
        if point["divergence"] < 1e-3:
            assert point["bf16 logits"] > 100 * point["linear_divergence"]
    assert (tmp_path / "distil.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("notebook", sorted(p.name for p in NOTEBOOKS.glob("*.ipynb")))
def test_the_stored_outputs_are_of_one_whole_run_and_small(notebook: str) -> None:
    text = (NOTEBOOKS / notebook).read_text()
    cells = [c for c in json.loads(text)["cells"] if c["cell_type"] == "code"]
    assert [c["execution_count"] for c in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert {o.get("name", "picture") for o in outputs} == {"stdout", "picture"}, "no warnings"
    assert sum("image/png" in o.get("data", {}) for o in outputs) == 1
    assert len(text) < 150_000
