# SPDX-License-Identifier: Apache-2.0
"""The wheel: one for every Python, works in an empty environment without a compiler, imports fast.
$LOGITLESS_WHEEL names one that is built already."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
import tomllib

from logitless import _abi

ROOT = pathlib.Path(__file__).resolve().parents[2]
NUMBERS = """
import numpy as np, logitless.numpy as ln
x, w = np.ones((3, 4), np.float32), np.arange(20, dtype=np.float32).reshape(5, 4) / 20
loss, grads = ln.linear_cross_entropy(x, w, np.array([0, 1, 4]), return_gradients=True)
z = x @ w.T
expected = (np.log(np.exp(z).sum(1)) - z[[0, 1, 2], [0, 1, 4]]).mean()
assert abs(loss - expected) < 1e-6 and grads.linear_weight.shape == w.shape
"""

# These entries of a CMake cache decide what the objects are.
CACHED = (
    "LOGITLESS_(?:CUDA|CUDA_ARCHITECTURES|CUDA_LISTING|CPU_TARGETS|FRAMES|WEBGPU|WERROR)"
    "|CMAKE_(?:C|CXX|CUDA)_COMPILER|CMAKE_BUILD_TYPE"
)

CUDA = """
import logitless
try: print(logitless.describe_backend("cuda"))
except RuntimeError as error: print(error)
"""


def options() -> dict[str, str]:
    """Those of the build that made the library of the other tests, whose objects the compiler's
    cache has. Where there is none, CUDA is left out, because its kernels take minutes."""
    cache = pathlib.Path(_abi.library_path()).parent / "CMakeCache.txt"
    if not cache.exists() or shutil.which("ccache") is None:
        return {"LOGITLESS_CUDA": "OFF", "LOGITLESS_CPU_TARGETS": "baseline"}
    return dict(re.findall(rf"^({CACHED}):\w+=(.*)$", cache.read_text(), re.MULTILINE))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    if given := os.environ.get("LOGITLESS_WHEEL"):
        return pathlib.Path(given)
    folder = tmp_path_factory.mktemp("wheel")
    defined = {f"cmake.define.{name}": value for name, value in options().items()}
    settings = {"build-dir": "build/wheel", **defined}  # the folder is as deep as the library's
    subprocess.run(
        [ROOT / "scripts/wheel", folder, *(f"-C{k}={v}" for k, v in settings.items())],
        check=True,
        env={"CCACHE_BASEDIR": str(ROOT), **os.environ, "PYTHON": sys.executable},
    )
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def empty(wheel: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """An environment of nothing but the wheel; its interpreter."""
    folder = tmp_path_factory.mktemp("empty")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin/python"
    pip = [sys.executable, "-m", "pip", "--python", python]
    subprocess.run([*pip, "install", "-q", "--no-index", wheel], check=True)
    return python


def run(python: pathlib.Path | str, code: str, **environment: str) -> str:
    """Without a compiler, or anything else, on the path."""
    env = {"PATH": "/nowhere", "HOME": os.environ.get("HOME", "/"), **environment}
    done = subprocess.run([python, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def site_of(python: pathlib.Path) -> str:
    return run(python, "import sysconfig; print(sysconfig.get_path('purelib'))").strip()


def test_the_tag_and_the_contents(wheel: pathlib.Path) -> None:
    assert "-py3-none-manylinux" in wheel.name and wheel.stat().st_size < 100 << 20
    names = zipfile.ZipFile(wheel).namelist()
    assert "logitless/liblogitless.so" in names and "logitless/py.typed" in names
    sources = {str(p.relative_to(ROOT / "python")) for p in (ROOT / "python").rglob("*.py")}
    assert sources <= set(names)
    assert all(n.startswith(("logitless/", "logitless-")) for n in names)


def test_an_empty_environment_without_a_compiler(empty: pathlib.Path) -> None:
    code = "import logitless; print(logitless.__version__, logitless.describe_backend('cpu'))"
    assert run(empty, code).startswith("0.1.0 ")
    path = run(empty, "import logitless; print(logitless.library_path())").strip()
    assert path.startswith(site_of(empty))


def test_every_framework_with_the_wheel(empty: pathlib.Path) -> None:
    site = site_of(empty)
    run(sys.executable, NUMBERS, PYTHONPATH=site)
    code = f"""
import torch, logitless, logitless.torch as lt
assert logitless.__file__.startswith({site!r})
x = torch.randn(3, 4, requires_grad=True); w = torch.randn(5, 4)
lt.linear_cross_entropy(x, w, torch.tensor([0, 1, 4])).backward(); assert x.grad.any()
"""
    run(sys.executable, code, PYTHONPATH=site)
    code = f"""
import jax, numpy as np, logitless, logitless.jax as lj
assert logitless.__file__.startswith({site!r})
x, w = np.ones((3, 4), np.float32), np.arange(20, dtype=np.float32).reshape(5, 4)
assert jax.jit(jax.grad(lj.linear_cross_entropy))(x, w, np.array([0, 1, 4])).any()
"""
    run(sys.executable, code, PYTHONPATH=site)


def test_the_wheel_with_cuda_is_small_and_needs_no_gpu(
    wheel: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    hidden = {"PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "-1"}
    said = run(sys.executable, CUDA, **hidden)
    if "built without it" in said:
        pytest.skip("the wheel was built without CUDA")
    assert "cuda: " in said
    assert wheel.stat().st_size < 100 << 20
    headers = subprocess.run(
        ["readelf", "-SWd", tmp_path / "logitless/liblogitless.so"], capture_output=True, text=True
    ).stdout
    assert ".nv_fatbin" in headers  # the kernels are in this section
    assert not re.search(r"NEEDED.*(cuda|cublas)", headers), "it would not load without them"
    run(sys.executable, NUMBERS, **hidden)


def test_jax_is_asked_for_by_name(empty: pathlib.Path) -> None:
    done = subprocess.run([empty, "-c", "import logitless.jax"], capture_output=True, text=True)
    assert "logitless.jax needs JAX 0.6.1 or newer" in done.stderr


def test_importing_takes_less_than_50_ms_beyond_torch(empty: pathlib.Path) -> None:
    code = """
import torch, time
start = time.process_time(); import logitless.torch; print(time.process_time() - start)
"""
    site = site_of(empty)
    times = [float(run(sys.executable, code, PYTHONPATH=site)) for _ in range(3)]
    assert min(times) < 0.050, times


def test_the_version_is_said_once_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == ".".join(map(str, _abi.VERSION))
    assert f"VERSION {project['version']}" in (ROOT / "CMakeLists.txt").read_text()
