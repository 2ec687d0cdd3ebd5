# SPDX-License-Identifier: Apache-2.0
"""scripts/release: what it refuses, and what it writes beside the artefacts. The artefacts take
minutes; `scripts/release VERSION --trial` makes and tries them."""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import zipfile
from typing import Any

import pytest

import logitless

ROOT = pathlib.Path(__file__).resolve().parents[2]
_loader = importlib.machinery.SourceFileLoader("release", str(ROOT / "scripts/release"))
_spec = importlib.util.spec_from_loader("release", _loader)
assert _spec is not None
release: Any = importlib.util.module_from_spec(_spec)
sys.modules["release"] = release
_loader.exec_module(release)


def test_another_version_is_refused_by_every_file_that_says_it() -> None:
    with pytest.raises(release.Wrong) as error:
        release.check("9.8.7", True)
    for file in (*release.VERSIONS, "include/logitless/c.h"):
        assert f"{file} says version {logitless.__version__}" in str(error.value)


def test_what_is_not_ready_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release, "run", lambda command: " M README.md\n")
    monkeypatch.setattr(release, "notes_of", lambda version: None)
    monkeypatch.setattr(release, "FIELDS", {"pyproject.toml": (r'^version = "()', r'^name = "()')})
    with pytest.raises(release.Wrong) as error:
        release.check(logitless.__version__, False)
    words = (
        "the checkout has changes",
        f"no heading [{logitless.__version__}]",
        "pyproject.toml: version is empty; fill it in",
        "pyproject.toml: name is empty",
    )
    assert all(word in str(error.value) for word in words)


def test_notes_are_a_section_of_the_changelog(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(release, "ROOT", tmp_path)
    text = "# Changelog\n\n## [0.2.0] - 2027-01-02\n### Added\n- a\n\n## [0.1.0]\n- b\n"
    (tmp_path / "CHANGELOG.md").write_text(text)
    assert release.notes_of("0.2.0") == "### Added\n- a\n"
    assert release.notes_of("0.1.0") == "- b\n"
    assert release.notes_of("0.2") is None


def test_artefacts_are_described(tmp_path: pathlib.Path) -> None:
    made = release.Release("0.1.0", tmp_path)
    wheel = tmp_path / "cpu/logitless-0.1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    wheel.write_bytes(b"x" * (3 << 19))
    made.cpu = lambda: made.tested.append((made.name_of(wheel), "right: cpu, 15 s"))
    made.make("cpu")
    other = tmp_path / "cuda13" / wheel.name  # the same file name
    other.parent.mkdir()
    other.write_bytes(b"y")
    made = release.Release("0.1.0", tmp_path)  # a later run, of another part
    made.left_out.append(("cuda12", "there is no nvcc"))
    made.describe("- a thing\n")
    told = (tmp_path / "TESTED.md").read_text()
    assert f"| cpu/{wheel.name} | 1.5 | right: cpu, 15 s |" in told
    assert "| cuda12 | | left out: there is no nvcc |" in told
    assert (tmp_path / "NOTES.md").read_text() == "# Logitless 0.1.0\n\n- a thing\n"
    bill = json.loads((tmp_path / "sbom.json").read_text())
    assert bill["bomFormat"] == "CycloneDX"
    assert [part["name"] for part in bill["components"]] == ["highway", "cudart_static"]
    sums = dict(reversed(line.split("  ")) for line in
                (tmp_path / "SHA256SUMS").read_text().splitlines())  # fmt: skip
    assert sums[f"cpu/{wheel.name}"] == hashlib.sha256(wheel.read_bytes()).hexdigest()
    both = {f"{part}/{wheel.name}" for part in ("cpu", "cuda13")}
    assert set(sums) == both | {"TESTED.md", "NOTES.md", "sbom.json"}


def test_the_sbom_names_the_highway_that_is_built() -> None:
    version = {part["name"]: part["version"] for part in release.sbom("1")["components"]}["highway"]
    assert f"highway-{version}" in (ROOT / "scripts/fetch_highway").read_text()


def test_the_kernels_package_loads_the_hub_folder(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("kernels")
    wheel = tmp_path / "logitless-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in (ROOT / "python/logitless").rglob("*.py"):
            archive.write(path, path.relative_to(ROOT / "python"))
        archive.write(logitless.library_path(), "logitless/liblogitless.so")
    hub = tmp_path / "hub"
    machine = os.uname().machine
    release.make_variant(
        wheel, hub / f"build/torch-stable-abi28-cpu-{machine}-linux", "0.1.0", "cpu"
    )
    made = release.Release("0.1.0", tmp_path)
    made.try_hub(hub)
    ((what, told),) = made.tested
    assert what == "hub" and told.startswith("loaded by the kernels package"), told


def test_wrong_arguments_are_refused() -> None:
    for arguments, words in ((["0.1.0", "--only", "msi"], "invalid choice: 'msi'"),
                             ([], "required: version")):  # fmt: skip
        done = subprocess.run(
            [sys.executable, ROOT / "scripts/release", *arguments], capture_output=True, text=True
        )
        assert done.returncode == 2 and words in done.stderr
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/release", "9.8.7", "--trial", "--only", "sdist"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1 and "version 9.8.7 is not ready" in done.stderr
