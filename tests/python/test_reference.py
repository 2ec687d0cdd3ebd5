# SPDX-License-Identifier: Apache-2.0
"""The API reference: docstrings are complete, and docstrings and the headers' comments name only
what exists. The pages themselves are made by scripts/docs, a stage of make test."""

from __future__ import annotations

import pathlib
import sys
import types

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import docstrings  # noqa: E402
import doxygen_comments  # noqa: E402


def test_every_docstring_is_there_and_names_what_is_there() -> None:
    pytest.importorskip("jax")
    assert docstrings.complaints_of_all() == []


def complaints(code: str, own: bool = True) -> list[str]:
    module = types.ModuleType("some")
    exec(code, vars(module))
    known = docstrings.known_names([module])
    return list(docstrings.complaints(module, known, own))


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("def f(): pass", "some.f has no docstring of its own"),
        ("class C:\n  'Made.'\n  def f(self): pass", "some.C.f has no docstring of its own"),
        ("def f(x):\n  'Of `x` and `y`.'", "some.f: its docstring names `y`, which is nowhere"),
        ("def f(x, y):\n  'Of x.'", "some.f: its docstring does not say what y is"),
        ("def f(x):\n  'Of `x.'", "some.f: a ` of its docstring is not closed"),
    ],
)
def test_a_broken_docstring_is_told(code: str, complaint: str) -> None:
    assert complaints(code) == [complaint]


@pytest.mark.parametrize(
    "code",
    [
        "def f(x, **rest):\n  'Of x and `rest`.'",
        "def f(x):\n  'Of x.'\ndef g(x):\n  'As f.'",
        "class C:\n  'Made of `f`.'\n  def f(self):\n    'Made.'",
    ],
)
def test_a_whole_docstring_is_not(code: str) -> None:
    assert complaints(code) == []


def test_arguments_of_other_libraries_need_no_words() -> None:
    assert complaints("def f(x):\n  'Theirs.'", own=False) == []


def test_a_comment_that_names_nothing_is_told() -> None:
    texts = {"a.h": "// `b` and `c`, `run(b)`\nint b;\n/* `d`\n * too */\nvoid run();  // b`\n"}
    assert doxygen_comments.unknown_names(texts) == [
        "a.h:1: a comment names `c`, which is nowhere",
        "a.h:3: a comment names `d`, which is nowhere",
        "a.h:5: a ` of a comment is not closed",
    ]


def test_what_doxygen_says_of_a_struct_or_a_function_of_c_is_told() -> None:
    said = [
        "a.h:1: warning: Compound ns::S is not documented.",
        "a.h:2: warning: Member x (variable) of struct ns::S is not documented.",
        "a.h:3: warning: Member f(int x) (function) of file a.h is not documented.",
        "a.h:4: warning: Member S(int x) (function) of struct ns::S is not documented.",
    ]
    assert doxygen_comments.without_comment("\n".join(said)) == [said[0], said[2]]
