# SPDX-License-Identifier: Apache-2.0
"""Where the package and its library are, unless they are installed: this checkout's python/ and
build/release (or $LOGITLESS_LIBRARY). A test with the argument `device` runs on each of DEVICES."""

from __future__ import annotations

import os
import pathlib
import random
import sys
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parents[2]
if "LOGITLESS_TEST_INSTALLED" not in os.environ:
    os.environ.setdefault("LOGITLESS_LIBRARY", str(ROOT / "build/release/liblogitless.so"))
    sys.path.insert(0, str(ROOT / "python"))

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

import logitless.torch  # noqa: E402, F401
import ranks  # noqa: E402
import rotation  # noqa: E402
from logitless.torch import _run  # noqa: E402

hypothesis.settings.register_profile("suite", deadline=None, derandomize=True, max_examples=40)
hypothesis.settings.load_profile("suite")
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shuffle",
        metavar="SEED",
        help="--shuffle=SEED: the files in an order made of SEED, and each one's tests",
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """--shuffle keeps a file's tests together, so that a module's fixtures are made only once."""
    rotation.rotate(config, items)
    seed = config.getoption("--shuffle")
    if seed is None:
        return
    order = random.Random(seed)
    files: dict[pathlib.Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    every = list(files.values())
    order.shuffle(every)
    for tests in every:
        order.shuffle(tests)
    items[:] = [item for tests in every for item in tests]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object) -> None:
    rotation.node_down(node)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    rotation.report(terminalreporter)
    seed = terminalreporter.config.getoption("--shuffle")
    if seed is not None:
        terminalreporter.write_line(f"in the order of --shuffle={seed}")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "device" in metafunc.fixturenames:
        values = [pytest.param(d, marks=[pytest.mark.cuda] if d == "cuda" else []) for d in DEVICES]
        metafunc.parametrize("device", values)


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch.manual_seed(0)
    if "torch._dynamo" in sys.modules:
        # Dynamo compiles a function at most eight times, and tests share the package's functions.
        torch._dynamo.reset()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The kinds of op that _run.launch ran, in order."""
    kinds: list[int] = []
    real = _run.launch

    def spy(kind: int, *rest: object, **options: object) -> object:
        kinds.append(kind)
        return real(kind, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(_run, "launch", spy)
    yield kinds


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, ranks.Group]]:
    """Groups of ranks, by size. Their processes start with their first case."""
    made = {size: ranks.Group(size, tmp_path_factory.mktemp("ranks")) for size in ranks.SIZES}
    yield made
    for group in made.values():
        group.stop()
