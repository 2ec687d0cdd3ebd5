# SPDX-License-Identifier: Apache-2.0
"""Errors: the exception's kind, the name of the argument, and what is allowed. Never a crash."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import logitless
from logitless import _abi, _errors
from logitless.torch import (
    cross_entropy,
    cross_entropy_,
    softmax_,
)
from splits import linear_cross_entropy, linear_logprob
from test_linear import F32, problem


def call(change: dict[str, Any], **options: Any) -> Any:
    torch.manual_seed(0)
    x, w, b, t = problem((4,), 9, 5, bias=True)
    given: dict[str, Any] = {"x": x.detach(), "w": w.detach(), "b": b.detach(), "t": t, **change}  # type: ignore[union-attr]
    return linear_cross_entropy(
        given["x"], given["w"], given["t"], linear_bias=given["b"], **options
    )


TENSORS: dict[str, tuple[dict[str, Any], type, str]] = {
    "input of integers": ({"x": torch.ones(4, 5, dtype=torch.int64)}, TypeError, "input"),
    "input of f64": (
        {"x": torch.ones(4, 5, dtype=torch.float64)}, TypeError,
        r"input is float64; .*\(input.float\(\)\)$",
    ),
    "input of complex": ({"x": torch.ones(4, 5, dtype=torch.complex64)}, TypeError, "input"),
    "input a list": ({"x": [[1.0]]}, TypeError, "^input is a list; allowed: a tensor$"),
    "input an array": (
        {"x": np.ones((4, 5), np.float32)}, TypeError,
        "^input is a ndarray; allowed: a tensor, as of torch.from_numpy$",
    ),
    "weight a Linear": (
        {"w": torch.nn.Linear(5, 9)}, TypeError,
        "^linear_weight is a Linear; allowed: a tensor, as its weight$",
    ),
    "input a scalar": ({"x": torch.tensor(1.0)}, ValueError, "input"),
    "weight of another dtype": (
        {"w": torch.ones(9, 5).half()}, TypeError,
        r"^linear_weight is float16; allowed: float32, the dtype of input \(torch.autocast casts "
        r"both, or linear_weight.to\(input.dtype\)\)$",
    ),
    "weight of another hidden size": ({"w": torch.ones(9, 6)}, ValueError, "weight"),
    "weight a vector": ({"w": torch.ones(45)}, ValueError, "linear_weight has shape"),
    "weight a list": ({"w": [[1.0]]}, TypeError, "linear_weight is a list"),
    "weight empty": ({"w": torch.ones(0, 5), "b": None}, ValueError, "weight"),
    "hidden size 0": ({"x": torch.ones(4, 0), "w": torch.ones(9, 0)}, ValueError, "D >= 1"),
    "bias of another size": ({"b": torch.ones(8)}, ValueError, "bias"),
    "bias of f16 beside f32": ({"b": torch.ones(9).half()}, TypeError, "bias is float16"),
    "bias a matrix": (
        {"b": torch.ones(9, 1)}, ValueError, r"^linear_bias has shape \(9, 1\); allowed: \(9,\)",
    ),
    "bias a scalar": (
        {"b": torch.tensor(1.0)}, ValueError, r"^linear_bias has shape \(\); allowed: \(9,\)",
    ),
    "bias a number": ({"b": 1.0}, TypeError, "^linear_bias is a float; allowed: a tensor"),
    "target of another shape": ({"t": torch.zeros(5, dtype=torch.int64)}, ValueError, "target has"),
    "target transposed": (
        {"x": torch.ones(2, 3, 5), "t": torch.zeros(3, 2, dtype=torch.int64)}, ValueError, "target",
    ),
    "target of i16": (
        {"t": torch.zeros(4, dtype=torch.int16)}, TypeError,
        r"target is int16.*\(target.long\(\)\)",
    ),
    "target a list": ({"t": [0, 1, 2, 3]}, TypeError, "target is a list"),
    "target too large": ({"t": torch.full((4,), 9)}, ValueError, "target"),
    "target negative": ({"t": torch.full((4,), -1)}, ValueError, "target"),
    "soft targets": ({"t": torch.ones(4, 9)}, NotImplementedError, "soft targets and top-k"),
    "sparse weight": (
        {"w": torch.ones(9, 5).to_sparse()}, RuntimeError, "^linear_weight has layout",
    ),
    "sparse input": ({"x": torch.ones(4, 5).to_sparse()}, RuntimeError, "^input has layout"),
    "sparse rows": ({"x": torch.ones(4, 5).to_sparse_csr()}, RuntimeError, "^input has layout"),
    "sparse target": (
        {"t": torch.ones(4, dtype=torch.int64).to_sparse()}, RuntimeError, "^target has layout",
    ),
    "a freed weight": ({"w": None}, ValueError, "weight has shape .* and NULL data"),
    "weight on meta": ({"w": torch.ones(9, 5, device="meta")}, RuntimeError, "weight is on meta"),
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in TENSORS if name.startswith("bias a ")])
@pytest.mark.parametrize("grad", [False, True])
def test_a_wrong_bias_of_blocks_of_the_vocabulary(name: str, grad: bool) -> None:
    change, kind, message = TENSORS[name]
    with pytest.raises(kind, match=message):
        call({**change, "w": torch.ones(9, 5, requires_grad=grad)}, vocab_blocks=2)


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("grad", [False, True])
def test_a_wrong_tensor(name: str, grad: bool) -> None:
    change, kind, message = TENSORS[name]
    change = dict(change)
    if name == "a freed weight":
        change["w"] = torch.ones(9, 5)
        change["w"].untyped_storage().resize_(0)
    elif grad and isinstance(change.get("w"), torch.Tensor):
        change["w"] = change["w"].clone().requires_grad_()
    with pytest.raises(kind, match=message):
        call(change)


OPTIONS: dict[str, tuple[dict[str, Any], type, str]] = {
    "reduction": ({"reduction": "batchmean"}, ValueError, "reduction is 'batchmean'; allowed"),
    "reduction of no text": ({"reduction": 1}, ValueError, "reduction"),
    "label_smoothing above 1": ({"label_smoothing": 1.5}, ValueError, "label_smoothing"),
    "label_smoothing NaN": ({"label_smoothing": float("nan")}, ValueError, "label_smoothing"),
    "label_smoothing a text": ({"label_smoothing": "0.1"}, TypeError, "label_smoothing"),
    "z_loss": ({"z_loss": -1.0}, ValueError, "z_loss"),
    "logit_scale": ({"logit_scale": float("inf")}, ValueError, "logit_scale"),
    "softcap": ({"softcap": -1.0}, ValueError, "softcap"),
    "temperature": ({"temperature": 0.0}, ValueError, "temperature"),
    "temperatures of another shape": (
        {"temperature": torch.ones(5)}, ValueError, r"temperature has shape \(5,\); allowed: \(4",
    ),
    "temperatures with grad": (
        {"temperature": torch.ones(4, requires_grad=True)}, ValueError, r"temperature.detach\(\)",
    ),
    "temperature a list": ({"temperature": [1.0] * 4}, TypeError, "temperature is a list"),
    "ignore_index": ({"ignore_index": 1 << 70}, ValueError, "ignore_index"),
    "ignore_index of no integer": ({"ignore_index": 7.0}, TypeError, "ignore_index is 7.0"),
    "ignore_index of no integer, shift": (
        {"ignore_index": 7.0, "shift": True}, TypeError, "ignore_index is 7.0",
    ),
    "ignore_index a text, shift": (
        {"ignore_index": "7", "shift": True}, TypeError, "ignore_index is '7'",
    ),
    "ignore_index too large, shift": (
        {"ignore_index": 1 << 70, "shift": True}, ValueError, "ignore_index",
    ),
    "normalizer": (
        {"normalizer": -1.0}, ValueError, r"normalizer is -1; allowed: finite, >= 0 \(None: coun",
    ),
    "normalizer beyond a float": (
        {"normalizer": 10**400}, ValueError, "^normalizer is an int beyond 1.8e",
    ),
    "normalizer a text": ({"normalizer": "1"}, TypeError, "normalizer"),
    "normalizer a vector": ({"normalizer": torch.ones(3)}, ValueError, "normalizer"),
    "normalizer of a sum": ({"normalizer": 2.0, "reduction": "sum"}, ValueError, "normalizer"),
    "class weights of another size": ({"weight": torch.ones(8)}, ValueError, "^weight has shape"),
    "class weights a list": ({"weight": [1.0] * 9}, TypeError, "weight is a list"),
    "class weights with grad": (
        {"weight": torch.ones(9, requires_grad=True)}, ValueError, r"weight.detach\(\)",
    ),
    "token weights of another shape": ({"token_weight": torch.ones(5)}, ValueError, "token_weight"),
    "class weights of complex numbers": (
        {"weight": torch.full((9,), 2j)}, TypeError, "^weight is complex64; allowed: real numbers",
    ),
    "token weights of complex numbers": (
        {"token_weight": torch.full((4,), 2j)}, TypeError, "^token_weight is complex64; allowed: r",
    ),
    "temperatures of complex numbers": (
        {"temperature": torch.full((4,), 2j)}, TypeError, "^temperature is complex64; allowed: r",
    ),
    "normalizer of complex numbers": (
        {"normalizer": torch.tensor(2j)}, TypeError, "^normalizer is complex64; allowed: real",
    ),
    "options": (
        {"options": SimpleNamespace()}, NotImplementedError,
        "^options is a SimpleNamespace; allowed: None",
    ),
    "memory too small": ({"memory": 1}, ValueError, "memory is 1 bytes; allowed: >= "),
    "memory a bad text": ({"memory": "lots"}, ValueError, 'memory is "lots"'),
    "memory a fraction": ({"memory": 1e6 + 0.5}, ValueError, "memory is 1000000.5; allowed: byt"),
    "memory without end": ({"memory": float("inf")}, ValueError, "memory is inf; allowed: byt"),
    "memory negative": ({"memory": -5}, ValueError, "memory is -5; allowed: bytes from 0 to 2"),
    "memory a negative float": ({"memory": -1.0}, ValueError, r"memory is -1\.0; allowed: byt"),
    "memory NaN": ({"memory": float("nan")}, ValueError, "memory is nan; allowed: bytes from 0"),
    "memory a bool": ({"memory": True}, ValueError, "memory is True; allowed: bytes from 0"),
    "memory of 2^63": ({"memory": 1 << 63}, ValueError, "memory is 9223372036854775808; allow"),
    "memory a huge float": ({"memory": 1e300}, ValueError, r"memory is 1e\+300; allowed: bytes"),
    "memory a huge text": ({"memory": "1e300GiB"}, ValueError, 'memory is "1e300GiB"; allowed:'),
    "memory a text of 2^63": ({"memory": "8388608TiB"}, ValueError, 'memory is "8388608TiB"; all'),
    "memory a text of NaN": ({"memory": "nanMiB"}, ValueError, 'memory is "nanMiB"; allowed'),
    "memory a text of digits without end": (
        {"memory": "9" * 5000}, ValueError, r'memory is "9+"; allowed: bytes from 0',
    ),
    "statistics a bool": (
        {"return_statistics": True}, TypeError, "^return_statistics is True; allowed: 'lse', ",
    ),
    "statistics": ({"return_statistics": ("perplexity",)}, ValueError, "return_statistics"),
    "empty_mean": ({"empty_mean": "inf"}, ValueError, "empty_mean"),
    "shift": ({"shift": -1}, ValueError, "shift"),
    "shift beyond the tokens": (
        {"shift": 4}, ValueError, r"^shift is 4 of targets \(4,\); allowed: False, True, or 0 to 3",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_a_wrong_option(name: str) -> None:
    options, kind, message = OPTIONS[name]
    with pytest.raises(kind, match=message):
        call({}, **options)


def test_a_memory_too_small_names_the_least_and_the_recommended() -> None:
    x, w, t = torch.ones(256, 64), torch.ones(5000, 64), torch.zeros(256, dtype=torch.int64)
    number = r"(\d+) \((\d+\.\d) ([KM])iB\)"
    with pytest.raises(
        ValueError, match=rf"^memory is 100 bytes; allowed: >= {number}; recommended: {number}$"
    ) as caught:
        linear_cross_entropy(x, w, t, memory=100)
    found = re.findall(number, str(caught.value))
    assert found[1][2] == "M"
    for bytes, rounded, unit in found:
        assert f"{int(bytes) / {'K': 1 << 10, 'M': 1 << 20}[unit]:.1f}" == rounded
    linear_cross_entropy(x, w, t, memory=int(found[0][0]))


LOST = (1e-50, -1e-50, 1e39, -1e39)
HELD = (0.0, 1e-40, 1e38, float("inf"))


@pytest.mark.parametrize("number", LOST)
@pytest.mark.parametrize("name", ["token_weight", "weight", "temperature", "normalizer"])
def test_a_number_that_f32_does_not_hold_is_no_other_number(name: str, number: float) -> None:
    shape = {"token_weight": (4,), "weight": (9,), "temperature": (4,), "normalizer": ()}[name]
    value = torch.full(shape, 1.0, dtype=torch.float64)
    value[(-1,) * value.dim()] = number
    where = rf"\[{shape[0] - 1}\]" if shape else ""
    said = rf"^{name}{where} is {re.escape(str(number))}; allowed: 0, or 1.4e-45 to 3.4e\+38 in si"
    with pytest.raises(ValueError, match=said):
        call({}, **{name: value})
    if name == "token_weight":
        with pytest.raises(ValueError, match=r"^token_weight\[1, 0\] is"):
            linear_cross_entropy(
                torch.ones(2, 2, 5), torch.ones(9, 5), torch.zeros(2, 2).long(),
                token_weight=torch.tensor([[1, 1], [number, 1]], dtype=torch.float64),
            )  # fmt: skip
    if name != "normalizer":
        with pytest.raises(ValueError, match=f"^{name}"):
            cross_entropy(torch.ones(4, 9), torch.zeros(4).long(), **{name: value})


@pytest.mark.parametrize("number", HELD)
def test_a_number_that_f32_holds_is_taken(number: float) -> None:
    weight = torch.full((4,), number, dtype=torch.float64)
    found = call({}, token_weight=weight, reduction="none")
    assert torch.equal(found, call({}, token_weight=weight.float(), reduction="none"))
    call({}, weight=torch.full((9,), number, dtype=torch.float64))
    with FlopCounterMode(display=False):  # a dispatch mode
        call({}, token_weight=weight)


@pytest.mark.parametrize("function", [cross_entropy, linear_cross_entropy, linear_logprob])
@pytest.mark.parametrize("shift", [0, 1, 3])
def test_a_wrong_target_is_named_by_its_own_index(function: Any, shift: int) -> None:
    t = torch.arange(30).view(2, 3, 5) % 9
    t[1, 0, 4] = 77
    rows = torch.randn(2, 3, 5, 9, requires_grad=True)
    given = (rows, t) if function is cross_entropy else (rows, torch.randn(9, 9), t)
    options = {} if function is cross_entropy else {"shift": shift}
    said = re.escape("target[1, 0, 4] (flat: target[19]) is 77; allowed: 0 to 8")
    with pytest.raises(ValueError, match=f"^{said}"):
        function(*given, **options)
    if function is not cross_entropy:
        with torch.no_grad(), pytest.raises(ValueError, match=f"^{said}"):
            function(*given, **options, vocab_blocks=2)


@pytest.mark.parametrize("tokens", [0, 1])
def test_one_token_has_no_next_one(tokens: int) -> None:
    x, w = torch.ones(2, tokens, 5), torch.ones(9, 5)
    t = torch.zeros(2, tokens, dtype=torch.int64)
    assert linear_cross_entropy(x, w, t, shift=True) == 0
    assert linear_cross_entropy(x, w, t, shift=True, empty_mean="nan").isnan()
    if tokens:
        with pytest.raises(ValueError, match=r"^shift is 2 of targets \(2, 1\); allowed: "):
            linear_cross_entropy(x, w, t, shift=2)


def test_torchs_options_are_refused_by_name() -> None:
    options = pytest.importorskip("torch.nn.modules.linear_cross_entropy_options")
    with pytest.raises(NotImplementedError, match=r"^options is a LinearCrossEntropyOptions; allo"):
        call({}, options=options.LinearCrossEntropyOptions())
    assert torch.equal(call({}, options=None), call({}))


def test_an_unknown_argument_is_pythons_error() -> None:
    with pytest.raises(TypeError, match="chunk_size"):
        call({}, chunk_size=4)


def test_errors_carry_the_cores_status() -> None:
    with pytest.raises(logitless.LogitlessError) as caught:
        call({"t": torch.full((4,), 9)})
    assert caught.value.status == "target_out_of_range"
    assert isinstance(caught.value, ValueError)
    with pytest.raises(logitless.LogitlessTypeError) as wrong:
        call({"w": torch.ones(9, 5).half()})
    assert wrong.value.status == "wrong_dtype"


def test_a_call_after_an_error_is_right() -> None:
    x, w, _, t = problem((4,), 9, 5, ignored=0)
    good = linear_cross_entropy(x, w, t)
    for _ in range(3):
        with pytest.raises(ValueError, match="target"):
            linear_cross_entropy(x, w, t + 9)
        assert torch.equal(linear_cross_entropy(x, w, t), good)


def test_logits_of_a_wrong_kind() -> None:
    t = torch.zeros(4, dtype=torch.int64)
    with pytest.raises(TypeError, match="logits is float64"):
        cross_entropy(torch.ones(4, 9, dtype=torch.float64), t)
    with pytest.raises(ValueError, match="logits"):
        cross_entropy(torch.ones(4, 0), t)
    with pytest.raises(TypeError, match="logits"):
        softmax_(torch.ones(4, 9, dtype=torch.int64))
    with pytest.raises(NotImplementedError, match="soft targets"):
        linear_logprob(torch.ones(4, 5), torch.ones(9, 5), torch.ones(4, 9))


@pytest.mark.parametrize("function", [cross_entropy, cross_entropy_])
def test_logits_that_are_no_tensor(function: Any) -> None:
    t = torch.zeros(1, dtype=torch.int64)
    for logits in ([1.0], None, 3):
        with pytest.raises(TypeError, match=r"logits is a .*; allowed: a tensor$"):
            function(logits, t)
        with pytest.raises(TypeError, match=r"logits is a .*; allowed: a tensor$"):
            softmax_(logits)  # type: ignore[arg-type]


def test_a_tangent_is_refused_not_lost() -> None:
    from torch.autograd import forward_ad

    x, w, _, t = (v if v is None else v.detach() for v in problem((4,), 9, 5))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        for call in (
            lambda: linear_cross_entropy(dual, w, t),
            lambda: linear_cross_entropy(dual, w.clone().requires_grad_(), t),
            lambda: linear_logprob(dual, w, t),
            lambda: cross_entropy(dual, t.clamp(0, 4)),
            lambda: softmax_(dual),
        ):
            with pytest.raises(NotImplementedError, match="forward-mode"):
                call()
        linear_cross_entropy(x, w, t)  # fine without a tangent


def test_tensors_of_two_devices() -> None:
    device = "cuda" if torch.cuda.is_available() else "meta"
    x, w, _, t = problem((4,), 9, 5)
    with pytest.raises(RuntimeError, match="weight is on"):
        linear_cross_entropy(x, w.to(device), t)
    with pytest.raises(RuntimeError, match="target is on"):
        linear_cross_entropy(x, w, t.to(device))


def test_the_library_names_its_backends() -> None:
    assert "thread" in logitless.describe_backend("cpu")
    with pytest.raises(RuntimeError, match="webgpu"):
        logitless.describe_backend("webgpu")
    with pytest.raises(ValueError, match="device is 'tpu'"):
        logitless.describe_backend("tpu")
    before = logitless.num_threads()
    assert logitless.set_num_threads(2) == 2 and logitless.num_threads() == 2
    logitless.set_num_threads(before)


def test_addresses_must_be_as_many_as_the_views() -> None:
    view = _abi.View("logits", _abi.F32, _abi.CPU, 0, (2, 3), (3, 1))
    views = (view, view._replace(name="probabilities"))
    plan = _abi.Plan(_abi.SOFTMAX, views, None, (_abi.CPU, 0))
    for count in (1, 3):
        with pytest.raises(ValueError, match=f"{count} addresses of 2 tensors"):
            plan.run([torch.ones(2, 3).data_ptr()] * count, 0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, None), (7, 7), ("7", 7), ("64MiB", 64 << 20), (" 1.5 GB ", 15 * 10**8),
        ("2kb", 2000), (1e9, 10**9), ((1 << 63) - 1, (1 << 63) - 1),
        ("9223372036854775807", (1 << 63) - 1), ("9007199254740993B", (1 << 53) + 1),
    ],
)  # fmt: skip
def test_memory_texts(text: Any, expected: int | None) -> None:
    assert _abi.parse_memory(text) == expected
    assert F32 is torch.float32


PLACED: dict[str, tuple[str, tuple[Any, ...], str]] = {
    "a vector": ("target[3] is 9; allowed", ((5,),), "target[3] is 9; allowed"),
    "a scalar": ("target[0] is 9; allowed", ((),), "target is 9; allowed"),
    "a matrix": ("target[8] is 99; a", ((2, 5),), "target[1, 3] (flat: target[8]) is 99; a"),
    "shifted": ("target[7] is 99; a", ((2, 5), 1), "target[1, 3] (flat: target[8]) is 99; a"),
    "a shifted vector": ("target[2] is 99; a", ((5,), 2), "target[4] is 99; a"),
    "three dimensions": (
        "target[23] is 7", ((2, 3, 4),), "target[1, 2, 3] (flat: target[23]) is 7",
    ),
    "another name": (
        "labels[7] is 9", ((2, 5), 1, "labels"), "labels[1, 3] (flat: labels[8]) is 9",
    ),
    "gathered": (
        "target[7] is 9", ((2, 3), 0, "target", (1, 2)),
        "target[1, 1] (flat: target[4]) on rank 0 is 9",
    ),
    "gathered, of another rank": (
        "target[5] is 9", ((2,), 0, "target", (0, 3)), "target[1] on rank 2 is 9",
    ),
    "no such element": ("target[12] is 9", ((2, 5),), "target[12] is 9"),
    "another tensor": ("my_target[1] is 9", ((2, 5),), "my_target[1] is 9"),
    "another message": ("target has shape (2,)", ((2, 5),), "target has shape (2,)"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLACED)
def test_an_element_is_named_by_the_callers_index(name: str) -> None:
    message, how, expected = PLACED[name]
    assert _errors.placed(message, *how) == expected
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"), _errors.places(*how):
        raise _errors.invalid(message)
