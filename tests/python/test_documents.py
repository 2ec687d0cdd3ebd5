# SPDX-License-Identifier: Apache-2.0
"""Every code block of the documents can be pasted: Python runs (document_names.py), commands are
shell and name what exists, C and C++ compile, CMake, JavaScript and JSON parse."""

from __future__ import annotations

import ast
import json
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

import document_names
from document_names import ROOT, code_blocks

PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in [*ROOT.glob("*.md"), *(p for f in ("docs", "bench", "examples", "web")
                                       for p in (ROOT / f).rglob("*.md"))]
)  # fmt: skip
BLOCKS = [
    pytest.param(page, block, id=f"{page}:{block.line}")
    for page in PAGES
    for block in code_blocks.scan((ROOT / page).read_text())[0]
]
JUDGED = {"python", "sh", "c", "cpp", "cmake", "js", "json"}
Block = code_blocks.Block


def of(*languages: str) -> pytest.MarkDecorator:
    chosen = [p for p in BLOCKS if p.values[1].language in languages]
    return pytest.mark.parametrize("page, block", chosen)


def test_blocks_are_fenced_and_of_a_language_that_is_judged() -> None:
    breaches = [
        f"{page}:{line}: {sentence}"
        for page in PAGES
        for line, sentence in code_blocks.scan((ROOT / page).read_text())[1]
    ]
    assert not breaches, "\n".join(breaches)
    assert {block.language for _, block in (p.values for p in BLOCKS)} <= JUDGED | {"text"}
    assert len(BLOCKS) > 40 and "bench/README.md" in PAGES


def test_a_block_that_wrapping_would_merge_is_found() -> None:
    page = "Then:\n\n    a --b\n    c --d\n\n```\nx\n```\n```sh\ny\n"
    blocks, breaches = code_blocks.scan(page)
    assert [line for line, _ in breaches] == [3, 4, 6, 9] and blocks == [Block("", "x\n", 7)]
    assert code_blocks.scan("- a list\n  goes on\n```sh\n    x\n```\n") == (
        [Block("sh", "    x\n", 4)], [],
    )  # fmt: skip


@of("python")
def test_python_compiles(page: str, block: Block) -> None:
    ast.parse("\n" * (block.line - 1) + block.text, page)


@pytest.mark.parametrize(
    "page", [p for p in PAGES if any(True for _ in document_names.python_blocks(p))]
)
def test_python_runs_as_pasted(page: str, tmp_path: pathlib.Path) -> None:
    ranks = document_names.RANKS.get(page, 1)
    path = os.pathsep.join(p for p in sys.path if p)
    shared = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    shared |= {"DOCUMENT_MEETING": str(tmp_path / "meeting"), "DOCUMENT_RANKS": str(ranks)}
    programs = [
        subprocess.Popen(
            [sys.executable, document_names.__file__, page],
            env={**shared, "DOCUMENT_RANK": str(rank)},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    said = [program.communicate(timeout=300)[0] for program in programs]
    assert [program.returncode for program in programs] == [0] * ranks, said[0]
    told = len(re.findall(rf"^{re.escape(page)}:\d+: (ran|not run)", said[0], re.M))
    assert told == len(list(document_names.python_blocks(page))), said[0]


# Shell.

TRACKED = set(
    subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split("\n")
) - {""}  # fmt: skip
MAKEFILE = (ROOT / "Makefile").read_text()
PRESETS = {
    preset["name"]
    for preset in json.loads((ROOT / "CMakePresets.json").read_text())["configurePresets"]
}
CMAKE = "\n".join(
    path.read_text() for path in [ROOT / "CMakeLists.txt", *(ROOT / "cmake").glob("*.cmake"),
                                  *(ROOT / "cli").glob("CMakeLists.txt")]
)  # fmt: skip
FOLDERS = {path.split("/")[0] for path in TRACKED if "/" in path}


def commands(text: str) -> Iterator[list[str]]:
    """The simple commands of a script, as words."""
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
        lexer.whitespace_split = True
        command: list[str] = []
        for word in [*lexer, ";"]:
            if set(word) <= set(";&|"):
                if command:
                    yield command
                command = []
            elif word not in ("do", "done", "then", "fi"):
                command.append(word)


def options_of(program: str) -> str:
    """The source of a program and of the modules of its folder that it imports: its options are
    sought in this text. So the program need not start, nor its framework be installed."""
    source = (ROOT / program).read_text()
    beside = (ROOT / program).parent
    for name in re.findall(r"^(?:from|import) (\w+)", source, re.M):
        if (beside / f"{name}.py").exists():
            source += (beside / f"{name}.py").read_text()
    return source


def check_path(word: str) -> None:
    """A path into this repository must be tracked, or a place where something is made."""
    word = re.split("[=:]", word.strip("'\""))[-1] if "=" in word else word
    folder = word.split("/")[0]
    if folder == "build" and "/" in word:
        made = word.split("/")[1]
        scripts = "".join(
            (ROOT / p).read_text() for p in TRACKED if re.match("(bench|scripts)/setup", p)
        )
        assert made in PRESETS or f"build/{made}" in scripts, f"{word}: nothing makes build/{made}"
    elif folder in FOLDERS and "/" in word:
        parent = word.rsplit("/", 1)[0] + "/"
        named = word in TRACKED or any(path.startswith(f"{word.rstrip('/')}/") for path in TRACKED)
        made = not pathlib.Path(word).suffix or "DATE" in word
        assert named or (made and any(p.startswith(parent) for p in TRACKED)), (
            f"{word} is not there"
        )


def check_command(words: list[str]) -> None:
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        for part in words[0].split("=", 1)[1].split(":"):
            check_path(part)
        words = words[1:]
    if not words or words[0] == "for":
        return
    program, arguments = words[0], words[1:]
    for word in words:
        check_path(word)
    if "/" in program and program.split("/")[0] in FOLDERS:
        assert program in TRACKED, f"{program} is not there"
    if program == "make":
        for target in (a for a in arguments if "=" not in a and not a.startswith("-")):
            assert re.search(rf"^{re.escape(target)}:", MAKEFILE, re.M), f"make {target}"
    elif program in ("cmake", "ctest"):
        for i, argument in enumerate(arguments):
            if argument == "--preset":
                assert arguments[i + 1] in PRESETS, f"--preset {arguments[i + 1]}"
    elif program.rsplit("/", 1)[-1] in ("python", "python3") and arguments[0].endswith(".py"):
        program, arguments = arguments[0], arguments[1:]
        assert program in TRACKED, f"{program} is not there"
    if program in TRACKED:
        source = options_of(program)
        for option in (a.split("=")[0] for a in arguments if a.startswith("--")):
            assert f'"{option}"' in source, f"{program} has no option {option}"
    for define in re.findall(r"(?:-D ?|define\.)(LOGITLESS_\w+)", " ".join(words)):
        assert re.search(rf"\b{define}\b", CMAKE), f"CMake has no {define}"


@of("sh")
def test_commands_are_shell_and_name_what_is_there(page: str, block: Block) -> None:
    done = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    read = list(commands(block.text))
    assert read
    for words in read:
        check_command(words)


@pytest.mark.parametrize(
    "command, complaint",
    [
        ("make demos", "make demos"),
        ("cmake --preset quick", "--preset quick"),
        ("python bench/compare.py", "bench/compare.py"),
        ("python bench/jax_heads.py --shape 1x2x3", "--shape"),
        ("A=1 bench/setup-gpus", "bench/setup-gpus"),
        ("pip install . -C cmake.define.LOGITLESS_CUDAS=OFF", "LOGITLESS_CUDAS"),
        ("LOGITLESS_LIBRARY=build/devices/liblogitless.so make test", "build/devices"),
        ("python bench/trainer.py --out bench/result/x", "bench/result/x"),
        # two commands that a line break has joined
        ("bench/frontier_chart.py x.json --out y python bench/compare_gpu.py --library z",
         "--library"),
    ],
)  # fmt: skip
def test_a_command_that_names_nothing_is_found(command: str, complaint: str) -> None:
    with pytest.raises(AssertionError, match=re.escape(complaint)):
        for words in commands(command):
            check_command(words)


def test_commands_in_sentences_name_what_is_there() -> None:
    """Targets of make, and scripts, that stand in `backquotes`."""
    wrong = []
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.M | re.S)
        for span in re.findall(r"`([^`\n]+)`", text):
            if re.match(r"make [a-z]|(scripts|bench|tests|examples)/[\w./-]+( |$)", span):
                try:
                    words = span.split("(")[0].split(" ")
                    check_command(words[:2] if words[0] == "make" else words[:1])
                except AssertionError as e:
                    wrong.append(f"{page}: `{span}`: {e}")
    assert not wrong, "\n".join(wrong)


def calls_of_our_program() -> Iterator[tuple[str, list[str]]]:
    """Calls of `logitless` in blocks of commands and in `backquotes`."""
    for page in PAGES:
        if page.startswith("docs/experiments/"):  # old records, whose commands may no longer exist
            continue
        text = (ROOT / page).read_text()
        blocks = [b.text for b in code_blocks.scan(text)[0] if b.language == "sh"]
        spans = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
        for call in [*blocks, *(span for span in spans if span.startswith("logitless "))]:
            yield from ((page, words) for words in commands(call) if words[0] == "logitless")


def test_our_program_has_the_commands_and_options() -> None:
    program = pathlib.Path(os.environ["LOGITLESS_LIBRARY"]).parent / "cli/logitless"
    calls = [(page, words) for page, words in calls_of_our_program() if len(words) > 1]
    assert len(calls) >= 10
    if not program.exists():
        pytest.skip(f"{program} is not built")
    helps: dict[str, str] = {}
    for page, (_, command, *arguments) in calls:
        if command.startswith("-"):
            continue
        if command not in helps:
            asked = subprocess.run([program, command, "--help"], capture_output=True, text=True)
            assert asked.returncode == 0, f"{page}: logitless {command}: {asked.stderr}"
            helps[command] = asked.stdout
        for option in (word.split("=")[0] for word in arguments if word.startswith("--")):
            known = re.search(rf"{option}\b", helps[command])
            assert known, f"{page}: logitless {command} has no {option}"


# C and C++.


def is_of_an_example(text: str) -> bool:
    """Whether the text stands in an example, which other tests compile and run."""
    return any(text in path.read_text() for path in (ROOT / "examples").iterdir() if path.is_file())


# Code that the snippets of a page assume.
GIVEN = {
    "README.md": """
        #include <logitless/logitless.h>
        #include <new>
        using namespace logitless;
        void document(TensorView input, TensorView weight, TensorView target, TensorView loss,
                      TensorView grad_weight) {{
        {}
        }}"""
}


@of("c", "cpp")
def test_c_and_cpp_compile(page: str, block: Block, tmp_path: pathlib.Path) -> None:
    if is_of_an_example(block.text) and "main(" not in block.text:
        return
    source = tmp_path / f"document.{block.language}"
    source.write_text(GIVEN.get(page, "{}").format(block.text) if page in GIVEN else block.text)
    compiler = {"c": ["cc", "-std=c11"], "cpp": ["c++", "-std=c++20"]}[block.language]
    include = ["-I", str(ROOT / "include")]
    whole = "main(" in block.text
    library = os.environ["LOGITLESS_LIBRARY"]
    program = tmp_path / "document"
    link = ["-o", str(program), library, "-lm"] if whole else ["-fsyntax-only"]
    done = subprocess.run(
        [*compiler, "-Wall", "-Wno-unused", "-Werror", *include, str(source), *link],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    if whole:
        (tmp_path / "liblogitless.so.0").symlink_to(library)  # the installed name
        found = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
        ran = subprocess.run([program], env=found, capture_output=True, text=True)
        assert ran.returncode == 0 and not ran.stderr and ran.stdout, ran.stderr


# CMake, JavaScript and JSON.


@of("cmake")
def test_cmake_parses(page: str, block: Block, tmp_path: pathlib.Path) -> None:
    script = tmp_path / "document.cmake"
    script.write_text(f"if(FALSE)\n{block.text}endif()\n")
    done = subprocess.run(["cmake", "-P", script], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr


@of("js")
def test_javascript_parses(page: str, block: Block, tmp_path: pathlib.Path) -> None:
    playwrights = ROOT.glob(".venv-web/lib/*/site-packages/playwright/driver/node")
    node = shutil.which("node") or next(playwrights, None)
    if node is None:
        pytest.skip("there is no node, nor Playwright's")
    script = tmp_path / "document.mjs"
    script.write_text(block.text)
    done = subprocess.run([node, "--check", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@of("json")
def test_json_parses(page: str, block: Block) -> None:
    json.loads(block.text)
