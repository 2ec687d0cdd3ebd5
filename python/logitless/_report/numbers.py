# SPDX-License-Identifier: Apache-2.0
"""A sample of f32 calls on the CPU, compared with the formulas of docs/semantics.md in double. It
needs NumPy alone, for machines without PyTorch; with PyTorch selftest takes conformance.py."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

import logitless.numpy
from logitless import _abi

Array = np.ndarray[Any, Any]
KINDS = {"forward_kl": 0, "reverse_kl": 1, "jsd": 2, "skew_kl": 3, "tv": 4}
# Limits of relative errors, 4 to 10 times those of a correct library.
_VALUE, _GRADIENT, _SLOPE = 2e-6, 3e-6, 1e-4


def _sizes(seed: int) -> tuple[int, int, int]:
    pick = random.Random(seed).choice
    return pick([1, 3, 9, 65]), pick([8, 17, 72]), pick([5, 133, 1000])


def _error(got: Array, want: Array) -> float:
    """The error of the whole, relative to its 2-norm; infinite where one is not finite."""
    if not (np.isfinite(got).all() and np.isfinite(want).all()):
        return float("inf")
    return float(np.linalg.norm(got - want)) / max(float(np.linalg.norm(want)), 1e-30)


def _cap(z: Array, softcap: float) -> Array:
    capped: Array = softcap * np.tanh(z / softcap) if softcap else z
    return capped


def _log_softmax(z: Array) -> Array:
    z = z - z.max(1, keepdims=True)
    made: Array = z - np.log(np.exp(z).sum(1, keepdims=True))
    return made


def loss(seed: int) -> float:
    """The largest error of a loss and its gradients, in units of its limit."""
    n, d, v = _sizes(seed)
    rng, pick = np.random.default_rng(seed), random.Random(seed + 1).choice
    smoothing, softcap, scale = pick([0.0, 0.1]), pick([0.0, 5.0]), pick([1.0, 0.5])
    x = rng.standard_normal((n, d), np.float32)
    w = (rng.standard_normal((v, d)) * (2 / d**0.5)).astype(np.float32)
    target = rng.integers(0, v, n)
    target[1::5] = -100
    value, grads = logitless.numpy.linear_cross_entropy(
        x, w, target, reduction="sum", label_smoothing=smoothing, softcap=softcap,
        logit_scale=scale, return_gradients=True,
    )  # fmt: skip
    raw = scale * (x.astype(np.float64) @ w.astype(np.float64).T)  # [N, V]
    log_p = _log_softmax(_cap(raw, softcap))
    onehot = np.zeros_like(raw)
    onehot[np.arange(n), np.maximum(target, 0)] = 1
    goal = (1 - smoothing) * onehot + smoothing / v
    counts = (target >= 0)[:, None]
    want = -(goal * log_p * counts).sum()
    slope = 1 - np.tanh(raw / softcap) ** 2 if softcap else 1.0
    dz = (np.exp(log_p) - goal) * slope * scale * counts  # [N, V]
    want = float(want)
    return max(
        abs(float(value) - want) / (1 + abs(want)) / _VALUE,
        _error(grads.input, dz @ w) / _GRADIENT,
        _error(grads.linear_weight, dz.T @ x) / _GRADIENT,
    )


def _view(name: str, a: Array) -> _abi.View:
    dtype = _abi.F32 if a.dtype == np.float32 else _abi.I64
    return _abi.View(name, dtype, _abi.CPU, 0, a.shape, tuple(s // a.itemsize for s in a.strides))


def divergence(seed: int) -> float:
    """The largest error of a divergence's losses, and of the gradient of the hidden states along a
    random direction against a difference of two losses, in units of its limit."""
    name = list(KINDS)[seed % len(KINDS)]
    (n, d, v), rng = _sizes(seed), np.random.default_rng(seed)
    beta = 0.3 if name in ("jsd", "skew_kl") else 0.5
    softcap = random.Random(seed + 1).choice([0.0, 5.0])
    x, tx = rng.standard_normal((2, n, d), np.float32)
    w, tw = (rng.standard_normal((2, v, d)) * (2 / d**0.5)).astype(np.float32)
    losses, grad = np.empty(n, np.float32), np.empty_like(x)
    options = _abi.Divergence(
        reduction=_abi.REDUCTION_NONE, kind=KINDS[name], beta=beta, softcap=softcap
    )
    tensors = {"input": x, "weight": w, "teacher_input": tx, "teacher_weight": tw, "loss": losses,
               "grad_input": grad}  # fmt: skip
    views = [_view(field, a) for field, a in tensors.items()]
    plan = _abi.Plan(_abi.LINEAR_DIVERGENCE_FORWARD_BACKWARD, views, options, (_abi.CPU, 0))
    memory = np.empty(plan.bytes + plan.alignment, np.uint8)
    address = memory.ctypes.data + -memory.ctypes.data % plan.alignment
    plan.run([a.ctypes.data for a in tensors.values()], address)
    log_q = _log_softmax(tx.astype(np.float64) @ tw.astype(np.float64).T)
    q = np.exp(log_q)

    def exact(hidden: Array) -> Array:
        log_p = _log_softmax(_cap(hidden @ w.astype(np.float64).T, softcap))
        p = np.exp(log_p)
        m = (1 - beta) * p + beta * q
        of_q, of_p = q * (log_q - np.log(m)), p * (log_p - np.log(m))
        each = {"forward_kl": q * (log_q - log_p), "reverse_kl": p * (log_p - log_q),
                "jsd": beta * of_q + (1 - beta) * of_p, "skew_kl": of_q,
                "tv": np.abs(p - q) / 2}[name]  # fmt: skip
        made: Array = each.sum(1)
        return made

    along, step = rng.standard_normal((n, d)), 1e-6
    slope = (exact(x + step * along) - exact(x - step * along)) / (2 * step)
    value = np.abs(losses - exact(x.astype(np.float64))) / (1 + np.abs(losses))
    return max(float(value.max()) / _VALUE, _error((grad * along).sum(1), slope) / _SLOPE)


FUNCTIONS: dict[str, Callable[[int], float]] = {
    "linear_cross_entropy": loss,
    "linear_divergence": divergence,
}


def run(cases: int, seconds: Callable[[], float]) -> list[dict[str, Any]]:
    """The rows of a report: `cases` of each function, or as many as `seconds()` allow."""
    rows = []
    for function, check in FUNCTIONS.items():
        worst, failures, done = 0.0, [], 0
        for seed in range(cases):
            if seconds() <= 0:
                break
            error = check(seed)
            done, worst = done + 1, max(worst, error)
            if not error <= 1:
                failures.append(f"seed {seed}: {error:.1f} times its limit")
        rows.append({"engine": "cpu", "function": function, "dtype": "f32", "cases": done,
                     "worst": worst, "failures": failures})  # fmt: skip
    return rows
