# SPDX-License-Identifier: Apache-2.0
"""The wheel: one for every Python, works in an empty environment without a compiler, imports fast;
and builds by pip and scripts/wheel. $LOGITLESS_WHEEL names a wheel that is already built."""

from __future__ import annotations

import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import zipfile

import pytest
import tomllib

import cubin
from logitless import _abi

ROOT = pathlib.Path(__file__).resolve().parents[2]
VERSIONS = ("3.10", "3.11", "3.12", "3.13")
ARM = ROOT / "build/aarch64-python"  # made by scripts/setup aarch64
NUMBERS = """
import numpy as np, logitless.numpy as ln
x, w = np.ones((3, 4), np.float32), np.arange(20, dtype=np.float32).reshape(5, 4) / 20
loss, grads = ln.linear_cross_entropy(x, w, np.array([0, 1, 4]), return_gradients=True)
z = x @ w.T
expected = (np.log(np.exp(z).sum(1)) - z[[0, 1, 2], [0, 1, 4]]).mean()
assert abs(loss - expected) < 1e-6 and grads.linear_weight.shape == w.shape
"""

# Entries of a CMake cache that change the compiled objects.
CACHED = (
    "LOGITLESS_(?:CUDA|CUDA_ARCHITECTURES|CUDA_LISTING|CUDA_UNOPTIMIZED|CPU_TARGETS|FRAMES|WEBGPU|WERROR)"
    "|CMAKE_(?:C|CXX|CUDA)_COMPILER|CMAKE_BUILD_TYPE"
)

CUDA = """
import logitless
try: print(logitless.describe_backend("cuda"))
except RuntimeError as error: print(error)
"""


def options() -> dict[str, str]:
    """CMake options of the build that made the other tests' library, whose objects ccache has.
    Without them CUDA is left out, because its kernels take minutes to compile."""
    cache = pathlib.Path(_abi.library_path()).parent / "CMakeCache.txt"
    if not cache.exists() or shutil.which("ccache") is None:
        return {"LOGITLESS_CUDA": "OFF", "LOGITLESS_CPU_TARGETS": "baseline"}
    return dict(re.findall(rf"^({CACHED}):\w+=(.*)$", cache.read_text(), re.MULTILINE))


def settings(folder: str, defined: dict[str, str]) -> list[str]:
    """Options of pip: where CMake builds, which is as deep as the library's folder so that the
    compiler's cache knows the objects, and CMake's variables."""
    cmake = [f"-Ccmake.define.{name}={value}" for name, value in defined.items()]
    return [f"-Cbuild-dir=build/{folder}", *cmake]


def build(command: list[str | pathlib.Path], **environment: str) -> subprocess.CompletedProcess:
    cache = {"CCACHE_BASEDIR": str(ROOT), "CCACHE_NOHASHDIR": "1", **os.environ}
    environment = {**cache, "PYTHON": sys.executable, **environment}
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, str]:
    """The wheel of this machine, and what scripts/wheel said."""
    folder = tmp_path_factory.mktemp("wheel")
    done = build([ROOT / "scripts/wheel", folder, *settings("wheel", options())])
    assert done.returncode == 0, done.stderr
    (made,) = folder.glob("*.whl")
    return made, done.stdout


@pytest.fixture(scope="module")
def wheel(request: pytest.FixtureRequest) -> pathlib.Path:
    if given := os.environ.get("LOGITLESS_WHEEL"):
        return pathlib.Path(given)
    return request.getfixturevalue("built")[0]


def python_of(version: str) -> str | None:
    """An interpreter of that version: on the path, of pyenv or of uv."""
    pyenv = pathlib.Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    uv = pathlib.Path(os.environ.get("UV_PYTHON_INSTALL_DIR", "~/.local/share/uv/python"))
    places = [
        sys.executable,
        shutil.which(f"python{version}"),
        *pyenv.glob(f"versions/{version}.*/bin/python"),
        *uv.expanduser().glob(f"cpython-{version}.*/bin/python{version}"),
    ]
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    for place in filter(None, places):
        done = subprocess.run([place, "-c", code], capture_output=True, text=True)
        if done.stdout.strip() == version:  # a shim of pyenv may lack its Python
            return str(place)
    return None


def install(python: str, wheel: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    """Makes an environment with only the wheel; returns its interpreter."""
    subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True)
    made = folder / "bin/python"
    pip = [sys.executable, "-m", "pip", "--python", made]
    subprocess.run([*pip, "install", "-q", "--no-index", wheel], check=True)
    return made


@pytest.fixture(scope="module")
def empty(wheel: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return install(sys.executable, wheel, tmp_path_factory.mktemp("empty"))


@pytest.fixture(scope="module", params=VERSIONS)
def each(
    request: pytest.FixtureRequest,
    wheel: pathlib.Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> pathlib.Path:
    """The interpreter of an environment with only the wheel, for each Python found."""
    found = python_of(request.param)
    if found is None:
        pytest.skip(f"no Python {request.param} on the path, of pyenv or of uv")
    return install(found, wheel, tmp_path_factory.mktemp("each"))


def run(python: pathlib.Path | str, code: str, **environment: str) -> str:
    """The output of the code, run with an empty PATH, without a compiler."""
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
    (licence,) = (n for n in names if n.endswith(".dist-info/licenses/LICENSE"))
    assert zipfile.ZipFile(wheel).read(licence) == (ROOT / "LICENSE").read_bytes()
    (metadata,) = (n for n in names if n.endswith(".dist-info/WHEEL"))
    tags = re.findall(r"^Tag: (.*)$", zipfile.ZipFile(wheel).read(metadata).decode(), re.M)
    assert all(re.fullmatch(r"py3-none-\w+", tag) for tag in tags), tags
    assert f"py3-none-{wheel.stem.split('-')[-1].split('.')[0]}" in tags


def test_the_description_has_no_link_into_the_source_and_its_program_runs(
    wheel: pathlib.Path, empty: pathlib.Path
) -> None:
    files = zipfile.ZipFile(wheel)
    (metadata,) = (n for n in files.namelist() if n.endswith(".dist-info/METADATA"))
    description = files.read(metadata).decode().split("\n\n", 1)[1]
    assert description == (ROOT / "python/README.md").read_text()
    links = re.findall(r"\]\(([^)]*)\)|(?:src|href|srcset)=\"([^\"]*)", description)
    assert all("://" in address for pair in links for address in pair if address), links
    (code,) = re.findall(r"^```python\n(.*?)^```", description, re.MULTILINE | re.DOTALL)
    run(sys.executable, code, PYTHONPATH=site_of(empty))


def test_it_installs_where_glibc_is_older_than_the_builders(wheel: pathlib.Path) -> None:
    """What g++ would link in needs glibc 2.36; Ubuntu 22.04 has 2.35 and RHEL 9 has 2.34."""
    glibc = int(platform.libc_ver()[1].split(".")[1])
    if glibc > 36:
        pytest.skip(f"built where glibc is 2.{glibc}, whose headers ask for newer functions")
    (oldest,) = re.findall(r"manylinux_2_(\d+)_", wheel.name)
    assert int(oldest) <= 34, wheel.name


def test_an_empty_environment_of_each_python_without_a_compiler(each: pathlib.Path) -> None:
    code = "import logitless; print(logitless.__version__, logitless.describe_backend('cpu'))"
    assert run(each, code).startswith("0.1.0 ")
    path = run(each, "import logitless; print(logitless.library_path())").strip()
    assert path.startswith(site_of(each))


def test_numbers_in_each_python(each: pathlib.Path) -> None:
    numpy = [sys.executable, "-m", "pip", "--python", each, "install", "-q", "numpy"]
    done = subprocess.run([*numpy, "--only-binary=:all:"], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"no NumPy from the package index: {done.stderr.strip().splitlines()[-1]}")
    run(each, NUMBERS)


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
    assert ".nv_fatbin" in headers  # the section of CUDA kernels
    assert not re.search(r"NEEDED.*(cuda|cublas)", headers), "it would not load without them"
    run(sys.executable, NUMBERS, **hidden)


def test_the_build_says_what_it_makes_and_makes_that(
    built: tuple[pathlib.Path, str], tmp_path: pathlib.Path
) -> None:
    made, said = built
    if "wheel: CUDA " not in said:
        assert re.search(r"wheel: .*the CUDA backend is left out: about \d+ min on", said), said
        return
    about = re.search(
        r"wheel: CUDA [\d.]+ \(\S+\), kernels for ([^(]*?)( \(.*\))?: about \d+ min on", said
    )
    assert about, said
    if asked := options().get("LOGITLESS_CUDA_ARCHITECTURES"):
        assert about[1].split() == asked.split(";")
    expected = set()
    for number, kind in re.findall(r"(\d+)[af]?(-\w+)?", about[1]):
        expected |= {(cubin.ELF, int(number))} if kind != "-virtual" else set()
        expected |= {(cubin.PTX, int(number))} if kind != "-real" else set()
    zipfile.ZipFile(made).extractall(tmp_path)
    library = (tmp_path / "logitless/liblogitless.so").read_bytes()
    assert {(entry.kind, entry.number) for entry in cubin.entries(library)} == expected


@pytest.mark.slow
def test_pip_builds_the_cpu_alone_when_asked_and_says_so(tmp_path: pathlib.Path) -> None:
    quick = {"LOGITLESS_CPU_TARGETS": "baseline", "CMAKE_CXX_FLAGS_RELEASE": "-O0"}
    cuda = {"LOGITLESS_CUDA": "OFF", "LOGITLESS_WEBGPU": "OFF"}
    pip = [sys.executable, "-m", "pip", "install", "-v", ".", "--no-deps", "--no-build-isolation"]
    done = build([*pip, "--target", tmp_path, *settings("wheel-cpu", {**quick, **cuda})])
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"logitless: LOGITLESS_CUDA is OFF, .*: about \d+ min on", done.stderr)
    assert "built without it" in run(sys.executable, CUDA, PYTHONPATH=str(tmp_path))
    run(sys.executable, NUMBERS, PYTHONPATH=str(tmp_path))


def configure(folder: pathlib.Path, **defined: str) -> str:
    """What CMake says when it only configures a wheel's build."""
    variables = [f"-D{name}={value}" for name, value in {"SKBUILD": "ON", **defined}.items()]
    done = build(["cmake", "-S", ROOT, "-B", folder, "-DCMAKE_BUILD_TYPE=Release", *variables])
    assert (done.returncode == 0) == ("CMake Error" not in done.stderr), done.stderr
    return " ".join((done.stdout + done.stderr).split())


@pytest.mark.slow
def test_one_architecture_when_asked(tmp_path: pathlib.Path) -> None:
    said = configure(tmp_path, LOGITLESS_CUDA_ARCHITECTURES="90a-real")
    if "no CUDA compiler found" in said:
        pytest.skip("no CUDA compiler here")
    assert re.search(r"logitless: CUDA \S+ \(\S+\), kernels for 90a-real: about \d+ min", said), (
        said
    )
    commands = (tmp_path / "compile_commands.json").read_text()
    assert set(re.findall(r"\b(?:sm|compute)_\w+", commands)) == {"compute_90a", "sm_90a"}


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        (
            "LOGITLESS_CUDA_ARCHITECTURES",
            "75-real",
            'has "75-real"; allowed: all, or numbers from 80',
        ),
        (
            "LOGITLESS_CUDA_ARCHITECTURES",
            "80;native",
            'has "native"; allowed: all, or numbers from 80',
        ),
        ("LOGITLESS_CUDA", "maybe", 'is "maybe"; allowed: AUTO, ON, OFF'),
    ],
)
def test_options_that_are_not_allowed(
    tmp_path: pathlib.Path, name: str, value: str, allowed: str
) -> None:
    assert f"{name} {allowed}" in configure(tmp_path, **{name: value})


def test_the_wheel_of_another_machine(tmp_path: pathlib.Path) -> None:
    """64-bit Arm: cross-built, and run under emulation if qemu is installed."""
    wrong = build([ROOT / "scripts/wheel", tmp_path], MACHINE="riscv64")
    assert wrong.returncode == 1 and "MACHINE is riscv64; allowed: " in wrong.stderr
    if shutil.which("aarch64-linux-gnu-g++") is None:
        pytest.skip("no cross compiler: scripts/setup aarch64")
    defined = {"LOGITLESS_CPU_TARGETS": "baseline", "LOGITLESS_CUDA": "AUTO"}
    quick = settings("wheel-aarch64", defined)
    done = build([ROOT / "scripts/wheel", tmp_path, *quick], MACHINE="aarch64")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "wheel: another machine's library, the CUDA backend is left out" in done.stdout
    (made,) = tmp_path.glob("*.whl")
    assert re.fullmatch(r"logitless-0\.1\.0-py3-none-manylinux\w*_aarch64\.whl", made.name)
    zipfile.ZipFile(made).extractall(tmp_path)
    header = (tmp_path / "logitless/liblogitless.so").read_bytes()[:20]
    assert header[:4] == b"\x7fELF" and header[18:20] == bytes([183, 0])  # EM_AARCH64
    if shutil.which("qemu-aarch64") is None or not ARM.exists():
        pytest.skip("tags and ELF machine are right; to run it too: scripts/setup aarch64")
    emulate = [shutil.which("qemu-aarch64"), "-cpu", "max", "-L", ARM, ARM / "usr/bin/python3"]
    code = NUMBERS + "import platform; print(platform.machine(), ln.__file__)"
    done = subprocess.run(
        [*emulate, "-c", code], env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True
    )
    assert done.stdout.split() == ["aarch64", str(tmp_path / "logitless/numpy.py")], done.stderr


def test_jax_is_asked_for_by_name(empty: pathlib.Path) -> None:
    done = subprocess.run([empty, "-c", "import logitless.jax"], capture_output=True, text=True)
    assert "logitless.jax needs JAX 0.6.1 or newer" in done.stderr


@pytest.mark.slow
def test_importing_takes_a_twenty_fifth_of_what_torch_takes(empty: pathlib.Path) -> None:
    """Both imports are timed in one process, in processor time, as a machine's speed varies."""
    code = """
import time; start = time.process_time()
import torch; middle = time.process_time()
import logitless.torch; print((time.process_time() - middle) / (middle - start))
"""
    site = site_of(empty)
    parts = [float(run(sys.executable, code, PYTHONPATH=site)) for _ in range(3)]
    assert min(parts) < 0.04, parts


def test_the_version_is_said_once_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == ".".join(map(str, _abi.VERSION))
    assert f"VERSION {project['version']}" in (ROOT / "CMakeLists.txt").read_text()
