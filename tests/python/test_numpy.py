# SPDX-License-Identifier: Apache-2.0
"""logitless.numpy: the torch functions' results bit for bit, gradients, layouts, errors."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import logitless.numpy as ln
import logitless.torch as lt
from logitless import _abi
from test_linear import F16, F32, OPTIONS, problem
from test_vocab_ids import VOCAB, list_of, targets_of

STATISTICS = ("lse", "target_logit", "logprob", "entropy", "argmax")


def numpy(*tensors: Any) -> Any:
    return [None if v is None else v.detach().numpy() for v in tensors]


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_same_bits_as_torch(name: str, reduction: str, dtype: torch.dtype) -> None:
    options: dict[str, Any] = dict(OPTIONS[name], reduction=reduction, shift=True)
    if reduction != "mean":
        options.pop("normalizer", None)
    x, w, b, t = problem((3, 11), 53, 24, dtype, bias=True)
    t = t.where(t != -100, torch.full_like(t, options.get("ignore_index", -100)))
    xn, wn, bn, tn = numpy(x, w, b, t)
    loss, s = ln.linear_cross_entropy(
        xn, wn, tn, linear_bias=bn, return_statistics=STATISTICS, **options
    )
    with torch.no_grad():
        theirs, ts = lt.linear_cross_entropy(
            x, w, t, linear_bias=b, return_statistics=STATISTICS, **options
        )
    assert np.array_equal(loss, theirs.numpy())
    for name in STATISTICS:
        assert np.array_equal(getattr(s, name), getattr(ts, name).numpy())
    if reduction == "none":
        return
    (again, _), grads = ln.linear_cross_entropy(
        xn, wn, tn, linear_bias=bn, return_statistics=("argmax",), return_gradients=True, **options
    )
    torch_loss = lt.linear_cross_entropy(x, w, t, linear_bias=b, **options)
    torch_loss.backward()
    assert again == torch_loss.item()
    for ours, v in zip(grads, (x, w, b)):
        assert v is not None and v.grad is not None and ours.dtype == v.detach().numpy().dtype
        assert np.array_equal(ours, v.grad.numpy())


def test_weights_and_normalizers() -> None:
    x, w, _, t = problem((3, 5), 9, 4)
    xn, wn, tn = numpy(x, w, t)
    classes, tokens = np.random.rand(9).astype(np.float32), np.random.rand(3, 5)
    for normalizer in (None, 3, 3.5, np.float32(2.5), np.int64(2), 0):
        ours = ln.linear_cross_entropy(
            xn, wn, tn, weight=classes, token_weight=tokens, normalizer=normalizer
        )
        theirs = lt.linear_cross_entropy(
            x, w, t, weight=torch.from_numpy(classes), token_weight=torch.from_numpy(tokens),
            normalizer=None if normalizer is None else float(normalizer),
        )  # fmt: skip
        assert ours == theirs.item()
    total = ln.linear_cross_entropy(xn, wn, tn, reduction="sum")
    for large in (np.array(1e39), np.float64(1e39)):  # infinite in f32
        assert ln.linear_cross_entropy(xn, wn, tn, normalizer=large) == np.float32(
            float(total) / 1e39
        )
    # rounded to f32 it would be 0, and the mean empty
    for small in (np.array(1e-46), np.float64(1e-46)):
        assert ln.linear_cross_entropy(xn, wn, tn, normalizer=small) == np.inf


def test_logits_softmax_and_logprob() -> None:
    z = np.random.default_rng(0).standard_normal((4, 6, 9)).astype(np.float32)
    t = np.random.default_rng(1).integers(0, 9, (4, 6))
    leaf = torch.from_numpy(z).clone().requires_grad_()
    theirs = lt.cross_entropy(leaf, torch.from_numpy(t), label_smoothing=0.1)
    theirs.backward()
    loss, grad = ln.cross_entropy(z, t, label_smoothing=0.1, return_gradients=True)
    assert loss == pytest.approx(theirs.item(), rel=1e-6)
    np.testing.assert_allclose(grad, leaf.grad, atol=1e-7)  # type: ignore[arg-type]
    for axis in (0, 1, -1):
        expected = torch.from_numpy(z).double().softmax(axis).numpy()
        np.testing.assert_allclose(ln.softmax(z, axis), expected, rtol=1e-5)
    x, w, _, target = problem((7,), 9, 4)
    ours = ln.linear_logprob(*numpy(x, w, target), temperature=0.5, entropy=True)
    expected_pair = lt.linear_logprob(x, w, target, temperature=0.5, entropy=True)
    for a, e in zip(ours, expected_pair):
        assert np.array_equal(a, e.detach().numpy())


@pytest.mark.parametrize(
    "layout", ["fortran", "negative", "sliced", "swapped", "unaligned", "none"]
)
def test_layouts(layout: str) -> None:
    x, w, _, t = numpy(*problem((8,), 9, 6))
    expected = ln.linear_cross_entropy(x, w, t)
    if layout == "fortran":
        x, w = np.asfortranarray(x), np.asfortranarray(w)
    elif layout == "negative":
        x, w = x[::-1].copy()[::-1], w[:, ::-1].copy()[:, ::-1]
    elif layout == "sliced":
        wide = np.zeros((8, 13), np.float32)
        wide[:, 1::2] = x
        x = wide[:, 1::2]
    elif layout == "swapped":
        x, t = x.astype(">f4"), t.astype(">i8")
    elif layout == "unaligned":
        raw = np.zeros(w.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(w.shape)
        raw[...] = w
        w = raw
    else:
        x, t, expected = x[:0], t[:0], 0.0
    assert ln.linear_cross_entropy(x, w, t) == expected


def _swapped(array: Any) -> Any:
    return array.astype(array.dtype.newbyteorder(">"))


_GRADIENTS: dict[str, Callable[[Any, Any, Any, Any, Any, Any], Any]] = {
    "linear_cross_entropy": lambda x, w, b, t, z, of: ln.linear_cross_entropy(
        x, w, of(t), linear_bias=b, return_gradients=True
    ),
    "a list of rows": lambda x, w, b, t, z, of: ln.linear_cross_entropy(
        x, w, of(t), linear_bias=b, vocab_ids=of(np.arange(9)), return_gradients=True
    ),
    "linear_divergence": lambda x, w, b, t, z, of: ln.linear_divergence(
        x, w, x, of(w[::-1]), target=of(t), linear_bias=b, return_gradients=True
    ),
    "cross_entropy": lambda x, w, b, t, z, of: ln.cross_entropy(z, of(t), return_gradients=True),
    "softmax": lambda x, w, b, t, z, of: (0, (ln.softmax(z),)),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("name", _GRADIENTS)
def test_gradients_in_another_byte_order(name: str, dtype: Any) -> None:
    x, w, b, t = numpy(*problem((8,), 9, 6, ignored=0, bias=True))
    arrays = [array.astype(dtype) for array in (x, w, b)]
    logits = (x @ w.T).astype(dtype)
    loss, expected = _GRADIENTS[name](*arrays, t, logits, lambda array: array)
    for swaps in ([True] * 3, [False, False, True]):
        given = [_swapped(array) if swap else array for array, swap in zip(arrays, swaps)]
        made, grads = _GRADIENTS[name](*given, t, _swapped(logits), _swapped)
        assert made == loss
        for ours, theirs in zip(grads, expected):
            assert ours.dtype.isnative and np.array_equal(ours, theirs)


@pytest.mark.parametrize("layout", ["swapped", "negative", "unaligned"])
def test_a_result_that_cannot_be_written_is_an_error(layout: str) -> None:
    z = np.ones((2, 9), np.float32)
    result = np.zeros((2, 9), np.float32)
    if layout == "swapped":
        result = result.astype(">f4")
    elif layout == "negative":
        result = result[:, ::-1]
    else:
        result = np.zeros(result.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(2, 9)
    with pytest.raises(RuntimeError, match=r"^probabilities is .* with strides"):
        ln._run(_abi.SOFTMAX, {"logits": z}, {"probabilities": result}, None, None)


def test_errors() -> None:
    x, w, _, t = numpy(*problem((8,), 9, 6, ignored=0))
    with pytest.raises(TypeError, match=r"input is float64; .*; use \.astype\(np\.float32\)"):
        ln.linear_cross_entropy(x.astype(float), w, t)
    with pytest.raises(
        TypeError, match=r"the dtype of input; use linear_weight\.astype\(input\.dty"
    ):
        ln.linear_cross_entropy(x, w.astype(np.float16), t)
    with pytest.raises(ValueError, match="weight"):
        ln.linear_cross_entropy(x, w[:, :5], t)
    with pytest.raises(ValueError, match="target"):
        ln.linear_cross_entropy(x, w, t + 9)
    with pytest.raises(ValueError, match="target has shape"):
        ln.linear_cross_entropy(x, w, t[:3])
    with pytest.raises(NotImplementedError, match="soft targets"):
        ln.linear_cross_entropy(x, w, t.astype(np.float32))
    with pytest.raises(ValueError, match="reduction is 'none'"):
        ln.linear_cross_entropy(x, w, t, reduction="none", return_gradients=True)
    with pytest.raises(TypeError, match=r"input is a Tensor; .*, as of np\.asarray"):
        ln.linear_cross_entropy(torch.from_numpy(x), w, t)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="input is a list"):
        ln.linear_cross_entropy([[1.0]], w, t)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="memory"):
        ln.linear_cross_entropy(x, w, t, memory=1)


WRONG_OPTIONS: dict[str, tuple[dict[str, Any], type, str]] = {
    "ignore_index": ({"ignore_index": 7.0}, TypeError, "ignore_index is 7.0"),
    "ignore_index, shift": ({"ignore_index": 7.0, "shift": 1}, TypeError, "ignore_index is 7.0"),
    "ignore_index large": ({"ignore_index": 1 << 70, "shift": 1}, ValueError, "ignore_index"),
    "normalizer huge": (
        {"normalizer": 10**400},
        ValueError,
        r"^normalizer is an int beyond 1\.8e\+308; allowed: what a float holds$",
    ),
    "temperature an array": ({"temperature": np.ones(2)}, ValueError, "temperature has shape"),
    "softcap an array": ({"softcap": np.array(2.0)}, TypeError, "softcap is a ndarray"),
    "softcap complex": ({"softcap": np.complex64(2)}, TypeError, "softcap is a complex64"),
    "a truth of NumPy": ({"logit_scale": np.bool_(True)}, TypeError, "logit_scale is a bool"),
    "scalar below f32": ({"softcap": np.float64(1e-46)}, ValueError, "softcap is 1e-46; allowed"),
    "normalizer a truth": ({"normalizer": True}, TypeError, "normalizer is a bool"),
    "normalizer a text": ({"normalizer": "2"}, TypeError, "normalizer is a str"),
    "normalizer a vector": ({"normalizer": np.ones(2)}, ValueError, r"normalizer has shape \(2,\)"),
    "normalizer complex": ({"normalizer": 2 + 1j}, TypeError, "normalizer is a complex"),
    "normalizer negative": ({"normalizer": np.float32(-2)}, ValueError, "normalizer is -2"),
    "token weights complex": ({"token_weight": np.ones(8) * 1j}, TypeError, "is complex128"),
    "token weights of texts": (
        {"token_weight": np.array(["1"] * 8)},
        TypeError,
        "token_weight is <U1",
    ),
    "token weights objects": ({"token_weight": np.ones(8, object)}, TypeError, "weight is object"),
    "token weights masked": (
        {"token_weight": np.ma.masked_array(np.ones(8), [1] + [0] * 7)},
        TypeError,
        "a masked array",
    ),
    "token weights beyond f32": (
        {"token_weight": np.array([1] * 7 + [-1e39])},
        ValueError,
        r"token_weight\[7\] is -1e\+39",
    ),
    "class weights complex": (
        {"weight": np.ones(9, np.complex64)},
        TypeError,
        "weight is complex64",
    ),
    "class weights below f32": ({"weight": [1e-46] * 9}, ValueError, r"weight\[0\] is 1e-46"),
    "softcap below f32": ({"softcap": 1e-46}, ValueError, "softcap is 1e-46; allowed"),
    "softcap beyond f32": ({"softcap": 1e39}, ValueError, r"softcap is 1e\+39; allowed"),
    "softcap huge": ({"softcap": 10**400}, ValueError, "softcap is an int beyond"),
    "shift": ({"shift": 1.7}, TypeError, "shift is a float"),
    "shift back": ({"shift": -1}, ValueError, r"shift is -1 of targets \(8,\); allowed: False, T"),
    "shift of every target": ({"shift": 8}, ValueError, "shift is 8 of targets .* or 0 to 7"),
    "shift a text": ({"shift": "1"}, TypeError, "shift is a str"),
    "normalizer of one": ({"normalizer": np.ones(1)}, ValueError, r"normalizer has shape \(1,\)"),
}


@pytest.mark.parametrize("name", WRONG_OPTIONS)
def test_a_wrong_option(name: str) -> None:
    options, kind, message = WRONG_OPTIONS[name]
    x, w, _, t = numpy(*problem((8,), 9, 6, ignored=0))
    with pytest.raises(kind, match=message):
        ln.linear_cross_entropy(x, w, t, **options)


def test_numbers_of_numpy_are_numbers() -> None:
    x, w, _, t = numpy(*problem((2, 6), 9, 6, ignored=0))
    of_loss = {"label_smoothing": 0, "z_loss": 2, "normalizer": 2, "memory": 1 << 20}
    of_labels = {"ignore_index": 2, "shift": 2}
    of_head = {"logit_scale": 2, "softcap": 2, "temperature": 2}
    of_teacher = {"teacher_logit_scale": 2, "teacher_softcap": 2, "teacher_temperature": 2}
    calls: list[tuple[Callable[..., Any], dict[str, Any]]] = [
        (lambda **o: ln.linear_cross_entropy(x, w, t, **o), {**of_loss, **of_labels, **of_head}),
        (
            lambda **o: ln.linear_cross_entropy(x, w, t, vocab_ids=np.arange(9), **o),
            {**of_loss, **of_labels, **of_head},
        ),
        (lambda **o: ln.linear_logprobs_at(x, w, t[..., None], **o)[0, 0, 0], of_head),
        (lambda **o: ln.linear_logprobs_at(x, w, t[..., None] * [1, 0], over="ids", **o)[0, 0, 0],
         of_head),
        (lambda **o: ln.linear_topk(x, w, 2, **o)[0][0, 0, 0], of_head),
        (
            lambda **o: ln.linear_divergence(x, w, x, w[::-1], target=t, kind="jsd", **o),
            {**of_labels, **of_head, **of_teacher, "beta": 1, "label_weight": 2, "normalizer": 2},
        ),
    ]  # fmt: skip
    for call, options in calls:
        for name, value in options.items():
            expected = call(**{name: value})
            assert call(**{name: np.int64(value)}) == expected, name
            if name not in ("ignore_index", "shift"):
                assert call(**{name: np.float32(value)}) == expected, name


def test_a_large_integer_is_a_normalizer() -> None:
    x, w, _, t = numpy(*problem((8,), 9, 6))
    expected = ln.linear_cross_entropy(x, w, t, normalizer=2.0**70)
    assert ln.linear_cross_entropy(x, w, t, normalizer=2**70) == expected > 0


@pytest.mark.parametrize("name", ["input", "linear_weight", "target", "linear_bias"])
def test_a_mask_is_not_lost(name: str) -> None:
    x, w, b, t = numpy(*problem((8,), 9, 6, ignored=0, bias=True))
    given = {"input": x, "linear_weight": w, "target": t, "linear_bias": b}
    given[name] = np.ma.masked_array(given[name], np.zeros(given[name].shape, bool))
    with pytest.raises(TypeError, match=f"{name} is a masked array; allowed: an array without"):
        ln.linear_cross_entropy(**given)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint64, np.bool_])
def test_a_target_of_another_dtype(dtype: Any, shift: int) -> None:
    x, w, _, t = numpy(*problem((2, 6), 9, 6, ignored=0))
    way = "" if dtype is np.bool_ else r"; use \.astype\(np\.int64\)"
    with pytest.raises(
        TypeError, match=f"^target is {np.dtype(dtype)}; allowed: int32, int64{way}$"
    ):
        ln.linear_cross_entropy(x, w, t.astype(dtype), shift=shift)


@pytest.mark.parametrize("shift", [0, 1, 3])
def test_a_wrong_target_has_the_callers_index(shift: int) -> None:
    x, w, _, t = numpy(*problem((2, 5), 9, 6, ignored=0))
    t[1, 3] = 99
    for gradients in (False, True):
        with pytest.raises(
            ValueError, match=r"^target\[1, 3\] \(flat: target\[8\]\) is 99; allowed"
        ):
            ln.linear_cross_entropy(x, w, t, shift=shift, return_gradients=gradients)
    with pytest.raises(ValueError, match=r"^target\[1, 3\] \(flat: target\[8\]\) is 99; allowed"):
        ln.cross_entropy(x @ w.T, t)
    with pytest.raises(ValueError, match=r"^target\[4\] is 99; allowed"):
        ln.linear_logprob(x[0], w, np.array([0, 0, 0, 0, 99]), shift=shift)


CHOSEN_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "softcap": {"softcap": 2.0, "logit_scale": -0.7},
    "temperature": {"temperature": 0.6},
}


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize("name", CHOSEN_OPTIONS)
def test_log_probabilities_of_chosen_columns(name: str, index: Any, dtype: torch.dtype) -> None:
    x, w, b, _ = numpy(*problem((3, 11), 53, 24, dtype, bias=True))
    options = CHOSEN_OPTIONS[name]
    ids = np.random.default_rng(5).integers(0, 53, (3, 11, 7)).astype(index)
    ids[..., 4] = ids[..., 0]
    ids[1, 2, 3] = -1
    made = ln.linear_logprobs_at(x, w, ids, linear_bias=b, **options)
    assert made.shape == ids.shape and made.dtype == np.float32
    for k in range(7):  # K = 1 and any other K have the bits of linear_logprob
        target = np.maximum(ids[..., k], 0)
        wanted = ln.linear_logprob(x, w, target, linear_bias=b, **options)
        wanted[ids[..., k] < 0] = -np.inf
        one = ln.linear_logprobs_at(x, w, ids[..., k : k + 1], linear_bias=b, **options)
        assert np.array_equal(made[..., k].view(np.int32), wanted.view(np.int32))
        assert np.array_equal(one[..., 0].view(np.int32), wanted.view(np.int32))


def test_a_temperature_of_each_token_of_chosen_columns() -> None:
    x, w, _, _ = numpy(*problem((2, 5), 9, 6))
    ids = np.arange(30).reshape(2, 5, 3) % 9
    temperature = np.linspace(0.5, 2, 10, dtype=np.float32).reshape(2, 5)
    made = ln.linear_logprobs_at(x, w, ids, temperature=temperature)
    for k in range(3):
        wanted = ln.linear_logprob(x, w, ids[..., k], temperature=temperature)
        assert np.array_equal(made[..., k], wanted)
    assert np.array_equal(made, ln.linear_logprobs_at(x, w, ids, temperature=temperature.ravel()))


def test_absent_columns_have_no_probability() -> None:
    x, w, _, _ = numpy(*problem((4,), 9, 6))
    ids = np.array([[-1, 3], [-1, -1], [2, -1], [1, 0]])
    x[1] = np.nan
    x[2] = np.nan
    made = ln.linear_logprobs_at(x, w, ids)
    assert np.array_equal(np.isneginf(made), ids == -1)
    assert np.isnan(made[2, 0]) and np.isfinite(made[0, 1]) and np.isfinite(made[3]).all()
    # A row of -inf gives NaN, but an absent id still gives its usual value.
    masked = np.full(9, -np.inf, np.float32)
    made = ln.linear_logprobs_at(w[:2, :6], w, ids[2:], linear_bias=masked)
    assert np.array_equal(np.isneginf(made), ids[2:] == -1) and np.isnan(made[1]).all()


def test_tokens_without_a_column_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, _, _ = numpy(*problem((4,), 9, 6))
    seen: list[Any] = []
    run = ln._run

    def recorded(kind: int, arrays: Any, *rest: Any) -> None:
        seen.append(arrays["target"])
        run(kind, arrays, *rest)

    monkeypatch.setattr(ln, "_run", recorded)
    ln.linear_logprobs_at(x, w, np.array([[-1, 3], [-1, -1], [2, -1], [-1, -1]]))
    assert (seen[0] == -100).tolist() == [False, True, False, True]


def test_a_probability_is_never_above_one() -> None:
    x, w, _, _ = numpy(*problem((1000,), 1, 6))
    made = ln.linear_logprobs_at(x, w, np.zeros((1000, 2), np.int64))
    assert not made.any()
    x, w, _, _ = numpy(*problem((1000,), 5, 6))
    made = ln.linear_logprobs_at(x * 100, w, np.arange(5000).reshape(1000, 5) % 5)
    assert made.max() == 0
    assert np.allclose(np.exp(made.astype(np.float64)).sum(-1), 1, atol=1e-5)


def test_no_token_has_no_chosen_columns() -> None:
    x, w = np.empty((2, 0, 6), np.float32), np.ones((9, 6), np.float32)
    assert ln.linear_logprobs_at(x, w, np.empty((2, 0, 4), np.int64)).shape == (2, 0, 4)


def test_wrong_ids_have_the_callers_index() -> None:
    x, w, _, _ = numpy(*problem((2, 5), 9, 6, ignored=0))
    for wrong in (9, -2, -100):
        ids = np.zeros((2, 5, 3), np.int64)
        ids[1, 3, 2] = wrong
        at = rf"^ids\[1, 3, 2\] \(flat: ids\[8, 2\]\) is {wrong}; allowed: 0 to 8, or -1 for none$"
        with pytest.raises(ValueError, match=at):
            ln.linear_logprobs_at(x, w, ids)
        with pytest.raises(ValueError, match=rf"^ids\[3, 2\] is {wrong}; allowed"):
            ln.linear_logprobs_at(x[1], w, ids[1])


@pytest.mark.parametrize(
    "shape", [(2, 5), (2, 5, 0), (2, 5, 1025), (5, 2, 3), (10, 3), (2, 5, 3, 1)]
)
def test_ids_of_another_shape(shape: tuple[int, ...]) -> None:
    x, w, _, _ = numpy(*problem((2, 5), 9, 6, ignored=0))
    with pytest.raises(ValueError, match=r"^ids has shape .*; allowed: \(2, 5, K\), .* 1 to 1024"):
        ln.linear_logprobs_at(x, w, np.zeros(shape, np.int64))


@pytest.mark.parametrize("over", ["vocab", "ids"])
def test_lists_have_the_bits_of_rows(over: str) -> None:
    x, w, b, _ = numpy(*problem((3, 4), 37, 19))
    rng = np.random.default_rng(3)
    ids = rng.integers(0, 37, (12, 5))
    counts = rng.integers(0, 6, 12)
    ids[np.arange(5) >= counts[:, None]] = -1
    offsets = np.append(0, np.cumsum(counts)).astype(np.int32)
    options: dict[str, Any] = {"linear_bias": b, "softcap": 3.0, "over": over}
    rows = ln.linear_logprobs_at(x, w, ids.reshape(3, 4, 5), **options)
    lists = ln.linear_logprobs_at(x, w, ids[ids != -1], offsets=offsets, **options)
    assert lists.shape == (counts.sum(),) and lists.dtype == np.float32
    assert np.array_equal(rows.reshape(12, 5)[ids != -1], lists)
    assert np.isneginf(rows.reshape(12, 5)[ids == -1]).all()


def test_over_the_ids_alone_is_their_softmax() -> None:
    x, w, _, _ = numpy(*problem((7,), 37, 19))
    b = np.random.default_rng(6).standard_normal(37).astype(np.float32)
    ids = np.random.default_rng(5).integers(0, 37, (7, 9))
    ids[2, 3:] = ids[4] = -1
    made = ln.linear_logprobs_at(x, w, ids, over="ids", linear_bias=b, temperature=0.7)
    z = np.take_along_axis((x.astype(np.float64) @ w.T + b) / 0.7, ids, 1)
    z[ids == -1] = -np.inf
    with np.errstate(invalid="ignore", divide="ignore"):
        expected = z - np.log(np.exp(z).sum(1, keepdims=True))
    assert np.allclose(made[ids != -1], expected[ids != -1], atol=1e-5)
    assert np.isneginf(made[ids == -1]).all() and made.max() <= 0
    # A single id has probability 1, and two equal ids 1/2 each.
    assert not ln.linear_logprobs_at(x, w, ids[:, :1], over="ids")[[0, 1, 2, 3, 5, 6]].any()
    twice = ln.linear_logprobs_at(x, w, np.repeat(ids[:1, :1], 14, 0).reshape(7, 2), over="ids")
    assert np.allclose(twice, np.log(0.5))


def test_a_masked_column_among_ids() -> None:
    x, w, _, _ = numpy(*problem((2,), 9, 6))
    b = np.array([0, -np.inf, 0, 0, 0, 0, 0, 0, 0], np.float32)
    made = ln.linear_logprobs_at(x, w, np.array([[1, 2], [1, 1]]), over="ids", linear_bias=b)
    assert np.isneginf(made[0, 0]) and made[0, 1] == 0 and np.isnan(made[1]).all()


@pytest.mark.parametrize("over", ["vocab", "ids"])
def test_logits_that_are_nan_warn_of_nothing(over: str) -> None:
    x, w, _, _ = numpy(*problem((3,), 9, 6))
    x[1], x[2] = np.nan, np.inf
    ids = np.array([[0, 1], [2, 3], [4, -1]])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = ln.linear_logprobs_at(x, w, ids, over=over)
        flat = ln.linear_logprobs_at(x, w, ids.ravel(), offsets=np.arange(0, 7, 2), over=over)
    assert np.isnan(made[1]).all() and np.array_equal(made.ravel(), flat, equal_nan=True)


def test_an_array_without_dimensions() -> None:
    x, w, _, _ = numpy(*problem((8,), 9, 6))
    none: Any = np.float32(1)
    of_rows = r"^input has shape \(\); allowed: \[\.\.\., D\]$"
    ids = np.arange(9)
    for call in (
        lambda: ln.linear_cross_entropy(none, w, np.int64(1)),
        lambda: ln.linear_cross_entropy(none, w, np.int64(1), vocab_ids=ids),
        lambda: ln.linear_logprobs_at(none, w, ids),
        lambda: ln.linear_logprobs_at(none, w, ids, offsets=np.array([0, 9])),
        lambda: ln.linear_topk(none, w, 1),
        lambda: ln.linear_divergence(none, w, x, w),
    ):
        with pytest.raises(ValueError, match=of_rows):
            call()
    with pytest.raises(ValueError, match=r"^logits has shape \(\); allowed: \[\.\.\., V\]$"):
        ln.cross_entropy(none, np.int64(1))
    with pytest.raises(ValueError, match=r"^axis is -1 for logits of shape \(\); allowed"):
        ln.softmax(none)
    with pytest.raises(ValueError, match=r"^teacher_weight has shape \(\); allowed: \[V, D\]$"):
        ln.linear_divergence(x, w, x, none, teacher_vocab_ids=ids)
    with pytest.raises(
        ValueError, match=r"^teacher_logits has shape \(\); allowed: \[\.\.\., V\]$"
    ):
        ln.linear_divergence(x, w, teacher_logits=none, teacher_vocab_ids=ids)


def test_a_wrong_temperature_of_the_teacher_is_its_own() -> None:
    x, w, _, _ = numpy(*problem((8,), 9, 6))
    for value, message in (
        (np.ones(3), r"teacher_temperature has shape \(3,\); allowed: \(8,\) as target"),
        (np.array([1] * 7 + [1e-46]), r"teacher_temperature\[7\] is 1e-46; allowed"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            ln.linear_divergence(x, w, x, w, teacher_temperature=value)
        with pytest.raises(ValueError, match=f"^{message.removeprefix('teacher_')}"):
            ln.linear_divergence(x, w, x, w, temperature=value)


def test_over_and_offsets_that_are_none() -> None:
    x, w, _, _ = numpy(*problem((2, 2), 9, 6))
    ids = np.arange(6)
    with pytest.raises(ValueError, match=r"^over is 'id'; allowed: 'vocab', 'ids'"):
        ln.linear_logprobs_at(x, w, ids, over="id", offsets=np.arange(5))
    with pytest.raises(NotImplementedError, match=r"^vocab_ids is given with over='ids'; "):
        ln.linear_logprobs_at(x, w, ids, over="ids", offsets=np.arange(5), vocab_ids=np.arange(9))
    with pytest.raises(ValueError, match=r"^offsets has shape \(4,\); allowed: \(5,\), N \+ 1"):
        ln.linear_logprobs_at(x, w, ids, offsets=np.arange(4))
    with pytest.raises(
        ValueError, match=r"^ids has shape \(2, 3\); allowed beside offsets: \(M,\)"
    ):
        ln.linear_logprobs_at(x, w, ids.reshape(2, 3), offsets=np.arange(5))
    with pytest.raises(TypeError, match=r"^offsets is float64; allowed: int32, int64"):
        ln.linear_logprobs_at(x, w, ids, offsets=np.arange(5.0))
    with pytest.raises(ValueError, match=r"^offsets\[2\] is 1; allowed: 4 to 6"):
        ln.linear_logprobs_at(x, w, ids, offsets=np.array([0, 4, 1, 6, 6]))
    with pytest.raises(ValueError, match=r"^ids\[5\] is 9; allowed: 0 to 8, or -1 for none"):
        ln.linear_logprobs_at(x, w, ids + 4, offsets=np.array([0, 1, 2, 2, 6]))
    none = ln.linear_logprobs_at(x, w, ids[:0], offsets=np.zeros(5, np.int64))
    assert none.shape == (0,)
    for over in ("vocab", "ids"):
        with pytest.raises(
            ValueError, match=r"^ids has shape \(6,\); allowed beside no tokens: \(0,\)$"
        ):
            ln.linear_logprobs_at(x[:0], w, ids, offsets=np.zeros(1, np.int64), over=over)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.bool_])
def test_ids_of_another_dtype(dtype: Any) -> None:
    x, w, _, _ = numpy(*problem((2, 5), 9, 6, ignored=0))
    with pytest.raises(TypeError, match=f"^ids is {np.dtype(dtype)}; allowed: int32, int64"):
        ln.linear_logprobs_at(x, w, np.zeros((2, 5, 3), dtype))


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize("name", CHOSEN_OPTIONS)
def test_the_likeliest_classes(name: str, dtype: torch.dtype) -> None:
    x, w, b, _ = numpy(*problem((3, 11), 53, 24, dtype, bias=True))
    options = CHOSEN_OPTIONS[name]
    every = np.broadcast_to(np.arange(53), (3, 11, 53))
    wanted = ln.linear_logprobs_at(x, w, every, linear_bias=b, **options)
    for k in (1, 7, 53):
        logprobs, ids = ln.linear_topk(x, w, k, linear_bias=b, **options)
        assert logprobs.shape == ids.shape == (3, 11, k)
        assert logprobs.dtype == np.float32 and ids.dtype == np.int64
        assert np.array_equal(logprobs, np.take_along_axis(wanted, ids, -1))
        assert np.array_equal(logprobs, -np.sort(-wanted, axis=-1)[..., :k])
        assert all(len(set(row)) == k for row in ids.reshape(-1, k))
    assert np.allclose(np.exp(logprobs.astype(np.float64)).sum(-1), 1, atol=1e-5)


def test_the_likeliest_classes_with_statistics() -> None:
    x, w, _, t = numpy(*problem((2, 5), 9, 6, ignored=0))
    names = ("lse", "entropy", "argmax", "sum_p_squared", "mean_logit", "max_logprob")
    logprobs, ids, made = ln.linear_topk(x, w, 4, return_statistics=names)
    _, wanted = ln.linear_cross_entropy(x, w, t, return_statistics=names)
    for name in names:
        assert np.array_equal(getattr(made, name), getattr(wanted, name)), name
    assert made.rank is None and made.logprob is None
    assert np.array_equal(ids[..., 0], made.argmax)
    assert np.allclose(logprobs[..., 0], made.max_logprob, atol=1e-6)
    pair = ln.linear_topk(x, w, 4)
    assert np.array_equal(pair[0], logprobs) and np.array_equal(pair[1], ids)
    alone = ln.linear_topk(x, w, 4, return_statistics="lse")[2]
    assert np.array_equal(alone.lse, made.lse) and alone.entropy is None
    with pytest.raises(
        ValueError, match=r"^return_statistics is 'rank'; allowed: 'lse', 'entropy'"
    ):
        ln.linear_topk(x, w, 4, return_statistics=("lse", "rank"))  # type: ignore[call-overload]


def test_a_temperature_of_each_token_of_the_likeliest_classes() -> None:
    x, w, _, _ = numpy(*problem((2, 5), 9, 6))
    temperature = np.linspace(0.5, 2, 10, dtype=np.float32).reshape(2, 5)
    logprobs, ids = ln.linear_topk(x, w, 3, temperature=temperature)
    assert np.array_equal(logprobs, ln.linear_logprobs_at(x, w, ids, temperature=temperature))


def test_equal_and_masked_and_nan_classes() -> None:
    x, w = np.ones((4, 6), np.float32), np.ones((9, 6), np.float32)
    assert np.array_equal(ln.linear_topk(x, w, 9)[1], np.broadcast_to(np.arange(9), (4, 9)))
    mask = np.full(9, -np.inf, np.float32)
    mask[[3, 7]] = 0
    logprobs, ids = ln.linear_topk(x, w, 4, linear_bias=mask)
    assert np.array_equal(ids[0], [3, 7, 0, 1]) and np.isneginf(logprobs[:, 2:]).all()
    x[2, 1] = np.nan
    logprobs, ids = ln.linear_topk(x, w, 4)
    assert np.array_equal(np.isnan(logprobs).any(-1), [False, False, True, False])
    assert np.isnan(logprobs[2]).all() and (ids >= 0).all() and (ids < 9).all()
    assert ln.linear_topk(np.empty((2, 0, 6), np.float32), w, 4)[1].shape == (2, 0, 4)
    assert ln.linear_topk(x[0], w, 4)[0].shape == (4,)


@pytest.mark.parametrize("k", [0, -1, 10, True])
def test_so_many_likeliest_classes_there_are_not(k: Any) -> None:
    x, w, _, _ = numpy(*problem((2, 5), 9, 6))
    with pytest.raises(ValueError, match=rf"^k is {k}; allowed: 1 to 9, the least of V and 256$"):
        ln.linear_topk(x, w, k)


def test_k_is_a_number() -> None:
    x, w, _, _ = numpy(*problem((2, 5), 300, 6))
    with pytest.raises(TypeError, match=r"^k is a float; allowed: an int$"):
        ln.linear_topk(x, w, 2.5)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match=r"^k is 257; allowed: 1 to 256, "):
        ln.linear_topk(x, w, 257)
    assert ln.linear_topk(x, w, int(np.int32(256)))[1].shape == (2, 5, 256)


@pytest.mark.parametrize("shift", [1, 3])
def test_a_weight_moves_with_its_label(shift: int) -> None:
    x, w, _, t = numpy(*problem((2, 5), 9, 6))
    weight = np.random.default_rng(0).random((2, 5))
    ours = ln.linear_cross_entropy(x, w, t, shift=shift, token_weight=weight, reduction="none")
    each = ln.linear_cross_entropy(
        x[:, :-shift], w, t[:, shift:], token_weight=weight[:, shift:], reduction="none"
    )
    assert np.array_equal(ours[:, :-shift], each) and not ours[:, -shift:].any()


def test_of_one_token_there_is_no_next_one() -> None:
    x, w, _, t = numpy(*problem((3, 1), 9, 6, ignored=0))
    assert ln.linear_cross_entropy(x, w, t, shift=True) == 0


@pytest.mark.parametrize("index", [1 << 31, (1 << 53) + 1, -(1 << 63)])
def test_shift_with_any_ignore_index(index: int) -> None:
    x, w, _, t = numpy(*problem((2, 6), 9, 6, ignored=0))
    expected = ln.linear_cross_entropy(x, w, t, shift=True)
    for target in (t, t.astype(np.int32)):
        assert ln.linear_cross_entropy(x, w, target, shift=True, ignore_index=index) == expected


@pytest.mark.parametrize("dtype", [F32, F16], ids=str)
@pytest.mark.parametrize("name", OPTIONS)
def test_a_list_of_rows_has_the_bits_of_torch(name: str, dtype: torch.dtype) -> None:
    options: dict[str, Any] = dict(OPTIONS[name], reduction="sum", shift=True)
    options.pop("normalizer", None)
    options["weight"] = np.linspace(0.5, 2, VOCAB, dtype=np.float32)
    ids = list_of()
    x, w, b, _ = problem((3, 11), VOCAB, 24, dtype, bias=True)
    ignored = options.get("ignore_index", -100)
    t = targets_of(ids, (3, 11))
    t = t.where(t != -100, torch.full_like(t, ignored))
    xn, wn, bn, tn, listed = numpy(x, w, b, t, ids)
    (loss, s), grads = ln.linear_cross_entropy(
        xn, wn, tn, linear_bias=bn, return_statistics=STATISTICS, return_gradients=True,
        vocab_ids=listed, **options,
    )  # fmt: skip
    options["weight"] = torch.from_numpy(options["weight"])
    theirs, of = lt.linear_cross_entropy(
        x, w, t, linear_bias=b, return_statistics=STATISTICS, vocab_ids=ids, **options
    )
    alone = lt.linear_cross_entropy(x, w, t, linear_bias=b, vocab_ids=ids, **options)
    alone.backward()
    assert loss == theirs.item()
    for statistic in STATISTICS:
        assert np.array_equal(getattr(s, statistic), getattr(of, statistic).detach().numpy())
    for ours, v in zip(grads, (x, w, b)):
        assert v is not None and v.grad is not None and np.array_equal(ours, v.grad.numpy())


def test_every_function_takes_a_list_of_rows() -> None:
    ids = list_of()
    x, w, b, _ = problem((3, 11), VOCAB, 24, bias=True)
    t = targets_of(ids, (3, 11))
    xn, wn, bn, tn, listed = numpy(x, w, b, t, ids)
    made = ln.linear_logprob(xn, wn, tn, linear_bias=bn, entropy=True, vocab_ids=listed)
    by = lt.linear_logprob(x, w, t, linear_bias=b, entropy=True, vocab_ids=ids)
    assert all(np.array_equal(o, v.detach().numpy()) for o, v in zip(made, by))
    chosen = np.stack((tn, tn), -1).clip(min=-1)
    at = ln.linear_logprobs_at(xn, wn, chosen, linear_bias=bn, vocab_ids=listed)
    by_torch = lt.linear_logprobs_at(x, w, torch.from_numpy(chosen), linear_bias=b, vocab_ids=ids)
    assert np.array_equal(at, by_torch.detach().numpy())
    ends = np.arange(0, 67, 2)
    ragged = ln.linear_logprobs_at(
        xn, wn, chosen.ravel(), offsets=ends, linear_bias=bn, vocab_ids=listed
    )
    assert np.array_equal(ragged, at.ravel())
    logprobs, top, s = ln.linear_topk(
        xn, wn, 5, linear_bias=bn, vocab_ids=listed, return_statistics="argmax"
    )
    ordered = np.sort(listed)
    by_hand = ln.linear_topk(xn, wn[ordered], 5, linear_bias=bn[ordered])
    assert np.array_equal(logprobs, by_hand[0]) and np.array_equal(top, ordered[by_hand[1]])
    assert s.argmax is not None and np.array_equal(s.argmax, top[..., 0])
    with pytest.raises(ValueError, match=r"^k is 14; allowed: 1 to 13"):
        ln.linear_topk(xn, wn, 14, vocab_ids=listed)


@pytest.mark.parametrize("logits", [False, True])
@pytest.mark.parametrize("paired", [False, True])
def test_a_divergence_over_a_list_of_rows(logits: bool, paired: bool) -> None:
    ids = list_of()
    x, w, b, _ = problem((3, 11), VOCAB, 24, bias=True)
    assert b is not None
    t = targets_of(ids, (3, 11))
    teacher, head = torch.randn(3, 11, 8), torch.randn(VOCAB, 8)
    of: dict[str, Any] = {"teacher_input": teacher, "teacher_weight": head}
    if logits:
        of = {"teacher_logits": teacher @ head.T}
    if paired:
        w, b = (v.detach()[:13].requires_grad_() for v in (w, b))
    name = "teacher_vocab_ids" if paired else "vocab_ids"
    options: dict[str, Any] = {"kind": "jsd", "label_weight": 0.3, "shift": True}
    loss = lt.linear_divergence(x, w, linear_bias=b, target=t, **{name: ids}, **of, **options)
    loss.backward()
    xn, wn, bn, tn, listed = numpy(x, w, b, t, ids)
    arrays = {key: value.numpy() for key, value in of.items()}
    made, grads = ln.linear_divergence(
        xn, wn, linear_bias=bn, target=tn, return_gradients=True, **{name: listed}, **arrays,
        **options,
    )  # fmt: skip
    assert made == loss.item()
    for ours, v in zip(grads, (x, w, b)):
        assert v.grad is not None and np.array_equal(ours, v.grad.numpy())


def test_wrong_lists_of_rows_are_named() -> None:
    x, w, _, t = numpy(*problem((2, 5), VOCAB, 6, ignored=0))
    t[...] = 7
    for ids, message in (
        ([7, 41], r"vocab_ids\[1\] is 41; allowed: 0 to 40, each once"),
        ([7, -1], r"vocab_ids\[1\] is -1; allowed: 0 to 40, each once"),
        ([7, 2, 2], r"vocab_ids\[2\] is 2, as vocab_ids\[1\] is; allowed: each id once"),
        ([[7]], r"vocab_ids has shape \(1, 1\); allowed: \(V',\), of 1 to 41 ids"),
        ([2, 8], r"target\[0, 0\] \(flat: target\[0\]\) is 7, which is not in vocab_ids; allowed"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            ln.linear_cross_entropy(x, w, t, vocab_ids=np.array(ids))
    with pytest.raises(TypeError, match=r"^vocab_ids is uint8; allowed: int32, int64"):
        ln.linear_topk(x, w, 1, vocab_ids=np.array([7], np.uint8))
    with pytest.raises(
        ValueError, match=r"^ids\[4\] is 9, which is not in vocab_ids; .* -1 for none"
    ):
        ln.linear_logprobs_at(
            x, w, np.array([7, -1, 2, 7, 9]), offsets=np.array([0, 5, *[5] * 9]),
            vocab_ids=np.array([2, 7]),
        )  # fmt: skip
    teacher: Any = {"teacher_input": x, "teacher_weight": w}
    with pytest.raises(ValueError, match=r"^vocab_ids and teacher_vocab_ids are both given"):
        ln.linear_divergence(x, w, vocab_ids=t[0], teacher_vocab_ids=t[0], **teacher)
    with pytest.raises(
        ValueError, match=r"^teacher_weight has shape \(40, 6\); allowed: 41 in its "
    ):
        ln.linear_divergence(x, w, x, w[1:], vocab_ids=np.array([2, 7]))


@pytest.mark.parametrize("truth", [np.True_, 1, 2, np.False_, 0, None])
def test_any_truth_asks_for_gradients(truth: Any) -> None:
    x, w = np.ones((3, 4), np.float32), np.eye(5, 4, dtype=np.float32)
    t = np.zeros(3, np.int64)
    for made in (
        ln.linear_cross_entropy(x, w, t, return_gradients=truth),
        ln.cross_entropy(x, t, return_gradients=truth),
        ln.linear_divergence(x, w, x, w, return_gradients=truth),
    ):
        assert isinstance(made, tuple) == bool(truth)


def test_numpy_needs_no_torch() -> None:
    code = "import sys, logitless.numpy; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env=_environment())


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
