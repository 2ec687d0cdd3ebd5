# SPDX-License-Identifier: Apache-2.0
"""Split, the keywords that it replaced, and the signatures around it."""

from __future__ import annotations

import ast
import inspect
import pathlib
import subprocess
import sys
import typing
from typing import Any

import pytest
import torch

import logitless.jax
import logitless.numpy
import logitless.torch
from logitless import _statistics
from logitless.torch import Split, linear_cross_entropy, linear_logprob
from splits import FIELDS

ROOT = pathlib.Path(__file__).parents[2]
GIVEN = (torch.ones(2, 4), torch.ones(10, 4), torch.zeros(2, dtype=torch.int64))
VALUES: dict[str, Any] = {
    "vocab_start": 3, "vocab_total": 7, "vocab_blocks": 2, "sequence_dim": 0, "local_tokens": True,
    "reduce_input_grad": False, "reduce_dtype": "input",
}  # fmt: skip


@pytest.mark.parametrize("function", [linear_cross_entropy, linear_logprob])
@pytest.mark.parametrize("name", FIELDS)
def test_an_old_keyword_is_taken_with_a_warning(function: Any, name: str) -> None:
    where = rf"^{name} of {function.__name__} will go; .*Split\(group, {FIELDS[name]}=\.\.\.\)"
    with pytest.warns(DeprecationWarning, match=where) as warned:
        try:
            function(*GIVEN, **{name: VALUES[name]})
        except ValueError as error:  # there is no process group here
            assert name != "vocab_blocks" and f"Split.{FIELDS[name]}" in str(error)
    assert warned[0].filename == __file__


def test_old_keywords_and_a_split_are_the_same_call() -> None:
    with pytest.warns(DeprecationWarning):
        old = linear_cross_entropy(*GIVEN, vocab_blocks=2)
    assert old.equal(linear_cross_entropy(*GIVEN, group=Split(blocks=2)))
    with pytest.warns(DeprecationWarning):
        old = linear_logprob(*GIVEN, vocab_blocks=2)
    assert old.equal(linear_logprob(*GIVEN, group=Split(blocks=2)))


@pytest.mark.parametrize("function", [linear_cross_entropy, linear_logprob])
def test_a_split_beside_an_old_keyword_is_an_error(function: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^vocab_blocks is given beside a Split; allowed: Split\("
    ):
        function(*GIVEN, group=Split(blocks=2), vocab_blocks=2)


@pytest.mark.parametrize("name", ["linear_cross_entropy", "linear_logprob", "workspace_size"])
def test_a_keyword_that_there_never_was(name: str) -> None:
    function = getattr(logitless.torch, name)
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword argument 'foo'"):
        function(*GIVEN, foo=1)
    for private in ("main_grad", "data", "size", "_bits", "_main_grad"):
        with pytest.raises(TypeError, match=private):
            function(*GIVEN, **{private: None})


def test_a_split_without_fields_is_no_split() -> None:
    assert linear_cross_entropy(*GIVEN, group=Split()).equal(linear_cross_entropy(*GIVEN))


def test_a_split_of_one_process_in_a_compiled_function() -> None:
    def of(x: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(x, w, t, group=Split(blocks=2))

    compiled = torch.compile(of, backend="aot_eager", fullgraph=True)
    assert compiled(*GIVEN).equal(of(*GIVEN))


def test_a_tree_of_a_symbol_is_that_of_its_number() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    from logitless.torch._split.sums import tree_sum

    traced = make_fx(tree_sum, tracing_mode="symbolic")(torch.zeros(100))
    for size in (0, 1, 2, 3, 5, 8, 1023, 1024, 1025, 4097, 1_100_000):
        values = torch.randn(size)
        total = values
        while len(total) > 1:
            total = torch.cat((total, total.new_zeros(len(total) % 2)))
            total = total[::2] + total[1::2]
        assert total.sum().equal(tree_sum(values))
        assert total.sum().equal(traced(values))
        assert not tree_sum(values)._is_view()


def test_help_shows_no_private_parameter() -> None:
    for module in (logitless.torch, logitless.jax, logitless.numpy):
        for name, function in vars(module).items():
            if name.startswith("_") or not callable(function) or inspect.isclass(function):
                continue
            if not getattr(function, "__module__", "").startswith("logitless"):
                continue
            names = inspect.signature(function).parameters
            assert not [n for n in names if n.startswith("_")], f"{module.__name__}.{name}"
    parameters = inspect.signature(linear_cross_entropy).parameters.values()
    assert len([p for p in parameters if p.kind is not p.VAR_KEYWORD]) <= 21


def test_the_table_of_statistics_is_the_type() -> None:
    """Type checkers read another definition, because Python 3.10 has no generic named tuples."""
    source = pathlib.Path(str(_statistics.__file__)).read_text()
    (typed,) = (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.ClassDef)
                and n.name == "Statistics")  # fmt: skip
    fields = [line.target.id for line in typed.body if isinstance(line, ast.AnnAssign)]  # type: ignore[union-attr]
    names = list(_statistics.STATISTICS)
    assert fields == names == list(_statistics.Statistics._fields)
    assert names == list(typing.get_args(_statistics.StatisticName))


TYPED = '''
import numpy as np, torch
from torch import Tensor
import logitless.jax as lj, logitless.numpy as ln, logitless.torch as lt
x, w, t = torch.ones(2, 4), torch.ones(9, 4), torch.zeros(2, dtype=torch.int64)
a, b, c = np.ones((2, 4), np.float32), np.ones((9, 4), np.float32), np.zeros(2, np.int64)
f, g = lt.LinearCrossEntropyHead(4, 9), lt.LinearCrossEntropyHead(4, 9, return_statistics="lse")
h = lt.LinearCrossEntropyHead.from_linear(torch.nn.Linear(4, 9))
k, m = lt.LinearCrossEntropyLoss(reduction="sum"), lt.CrossEntropyLoss(return_statistics=("lse",))
pairs = [
    lt.linear_cross_entropy(x, w, t),
    lt.linear_cross_entropy(x, w, t, group=lt.Split(blocks=2)),
    lt.linear_logprob(x, w, t),
    lt.cross_entropy(x, t), lt.cross_entropy_(x, t), f(x, t), f(x), h(x, t), k(x, w, t),
]
reveal_type(pairs)
reveal_type(lt.linear_cross_entropy(x, w, t, return_statistics=("lse", "rank")))
reveal_type(lt.linear_logprob(x, w, t, entropy="detached"))
reveal_type(g(x, t))
reveal_type(m(x, t))
reveal_type(lt.workspace_size(x, w, t, linear_bias=None))
reveal_type(lj.linear_cross_entropy(a, b, c))
reveal_type(lj.linear_logprob(a, b, c, entropy=True))
reveal_type(lj.cross_entropy(a, c, return_statistics="lse"))
reveal_type(ln.linear_cross_entropy(a, b, c))
reveal_type(ln.linear_cross_entropy(a, b, c, return_gradients=True))
reveal_type(ln.cross_entropy(a, c, return_statistics="lse", return_gradients=True))
reveal_type(ln.linear_logprob(a, b, c))
'''  # fmt: skip
WRONG = {
    'lt.linear_cross_entropy(x, w, t, reduction="avg")': "call-overload",
    'lt.linear_cross_entropy(x, w, t, return_statistics="top")': "arg-type",
    "lt.linear_cross_entropy(x, w, t, foo=1)": "call-overload",
    'lt.linear_logprob(x, w, t, reduction="sum")': "call-overload",
    'lj.linear_cross_entropy(a, b, c, reduction="avg")': "call-overload",
    'ln.linear_cross_entropy(a, b, c, empty_mean="one")': "call-overload",
}


def test_a_type_checker_knows_the_results(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("mypy")
    program = tmp_path / "typed.py"
    program.write_text(TYPED + "\n".join(WRONG))
    run = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", str(program)],
        cwd=ROOT / "python", capture_output=True, text=True, env={"MYPYPATH": "."} , check=False,
    )  # fmt: skip
    revealed = [
        line.split("note: ", 1)[1] for line in run.stdout.splitlines() if "Revealed" in line
    ]
    assert len(revealed) == TYPED.count("reveal_type"), run.stdout + run.stderr
    assert revealed[0] == 'Revealed type is "list[torch._tensor.Tensor]"'
    for line in revealed:  # NumPy's array type has Any as its shape
        assert "Any" not in line.replace("numpy.ndarray[tuple[Any, ...], numpy.dtype[Any]]", "")
    errors = {line.split(":")[1]: line for line in run.stdout.splitlines() if ": error: " in line}
    assert len(errors) == len(WRONG), run.stdout
    for line, code in zip(errors.values(), WRONG.values()):
        assert line.endswith(f"[{code}]"), line
