#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes tests/goldens/*.json: loss, statistics and gradients by PyTorch in float64.

Every input is an integer from -64 to 64 divided by 16, 32 or 64 (or that plus a large offset), so
it is exact in f32, and without the offset in f16 and bf16 too; every option is exact in f32. The
cross-entropy itself is torch.nn.functional.cross_entropy wherever it has the option; the softcap,
temperature, scale, z-loss, token weights, the caller's normalizer, the statistics and the loss of
given probabilities are written out, and every gradient is autograd's.

    python3 -m venv venv && venv/bin/pip install torch==2.13.0 numpy
    venv/bin/python scripts/make_goldens.py
"""

from __future__ import annotations

import json
import pathlib
from typing import Any

import torch
from torch.nn import functional

Case = dict[str, Any]
DEFAULTS: Case = {
    "reduction": "mean",
    "ignore_index": -100,
    "label_smoothing": 0.0,
    "z_loss": 0.0,
    "logit_scale": 1.0,
    "softcap": 0.0,
    "temperature": 1.0,
    "normalizer": 0.0,
    "input_kind": "logits",
    "probability_floor": 0.0,
}
FOLDER = pathlib.Path(__file__).resolve().parent.parent / "tests" / "goldens"


class Numbers:
    """A linear congruential generator: multiples of 1/16 in [-4, 4)."""

    def __init__(self, seed: int) -> None:
        self.state = seed

    def next(self) -> float:
        self.state = (self.state * 1664525 + 1013904223) % 2**32
        return ((self.state >> 25) - 64) / 16

    def list(self, count: int, scale: float = 1.0) -> list[float]:
        return [self.next() * scale for _ in range(count)]


def tensor(case: Case, name: str, shape: tuple[int, ...]) -> torch.Tensor | None:
    if name not in case:
        return None
    return torch.tensor(case[name], dtype=torch.float64).reshape(shape).requires_grad_()


def raw_logits(case: Case, leaves: dict[str, torch.Tensor]) -> torch.Tensor:
    n, v, d = case["tokens"], case["columns"], case["hidden"]
    shapes = {"logits": (n, v), "input": (n, d), "weight": (v, d), "bias": (v,)}
    for name, shape in shapes.items():
        leaf = tensor(case, name, shape)
        if leaf is not None:
            leaves[name] = leaf
    if "logits" in leaves:
        return leaves["logits"]
    return functional.linear(leaves["input"], leaves["weight"], leaves.get("bias"))


def map_logits(case: Case, raw: torch.Tensor) -> torch.Tensor:
    z = raw * case["logit_scale"]
    if case["softcap"] > 0:
        z = case["softcap"] * torch.tanh(z / case["softcap"])
    temperatures = constants(case, "temperatures")
    return z / (case["temperature"] if temperatures is None else temperatures[:, None])


def constants(case: Case, name: str) -> torch.Tensor | None:
    return torch.tensor(case[name], dtype=torch.float64) if name in case else None


def token_losses(case: Case, z: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    vocab_weight = constants(case, "vocab_weight")
    if case["input_kind"] == "probabilities":
        # z holds probabilities. torch lacks this loss with smoothing, so this is the formula.
        v = case["columns"]
        c = torch.ones(v, dtype=torch.float64) if vocab_weight is None else vocab_weight
        valid = target != case["ignore_index"]
        onehot = functional.one_hot(target.clamp(min=0), v).double()
        e = case["label_smoothing"]
        q = (1 - e) * c * onehot + e / v * c
        losses = -(q * torch.log(z + case["probability_floor"])).sum(1) * valid
    else:
        losses = functional.cross_entropy(
            z,
            target,
            weight=vocab_weight,
            ignore_index=case["ignore_index"],
            label_smoothing=case["label_smoothing"],
            reduction="none",
        )
        if case["z_loss"] > 0:
            losses = (
                losses + (target != case["ignore_index"]) * case["z_loss"] * z.logsumexp(1) ** 2
            )
    token_weight = constants(case, "token_weight")
    return losses if token_weight is None else losses * token_weight


def reduced_loss(case: Case, losses: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if case["reduction"] == "none":
        return losses
    if case["reduction"] == "sum":
        return losses.sum()
    valid = target[target != case["ignore_index"]]
    vocab_weight = constants(case, "vocab_weight")
    counted = float(len(valid)) if vocab_weight is None else float(vocab_weight[valid].sum())
    return losses.sum() / (case["normalizer"] or counted)


def check_against_torch(
    case: Case, z: torch.Tensor, target: torch.Tensor, loss: torch.Tensor
) -> None:
    """Where torch has all the options, its own reduction must agree: its weighted mean, too,
    divides by the sum of the targets' class weights."""
    own = case["z_loss"] > 0 or case["normalizer"] != 0 or case["input_kind"] != "logits"
    if own or "token_weight" in case:
        return
    whole = functional.cross_entropy(
        z,
        target,
        weight=constants(case, "vocab_weight"),
        ignore_index=case["ignore_index"],
        label_smoothing=case["label_smoothing"],
        reduction=case["reduction"],
    )
    torch.testing.assert_close(whole, loss, rtol=1e-13, atol=1e-13)


def statistics(case: Case, z: torch.Tensor, target: torch.Tensor) -> dict[str, torch.Tensor]:
    valid = target != case["ignore_index"]
    lse = z.logsumexp(1)
    log_p = torch.log_softmax(z, 1)
    c = constants(case, "vocab_weight")
    z_t = z.gather(1, target.clamp(min=0)[:, None])
    return {
        "lse": lse * valid,
        "target_logit": z_t[:, 0] * valid,
        "entropy": -(log_p.exp() * log_p).sum(1) * valid,
        "row_reference": z.amax(1) * valid,
        "row_log_sum": (z - z.amax(1, keepdim=True)).exp().sum(1).log() * valid,
        "weighted_logit_sum": (z if c is None else c * z).sum(1) * valid,
        "logprob": log_p.gather(1, target.clamp(min=0)[:, None])[:, 0] * valid,
        "rank": torch.where(valid, (z > z_t).sum(1), -1),
        "sum_p_squared": (log_p.exp() ** 2).sum(1) * valid,
        "mean_logit": z.mean(1) * valid,
        "max_logprob": log_p.amax(1) * valid,
        "mass_above": (log_p.exp() * (z > z_t)).sum(1) * valid,
    }


def golden(case: Case) -> Case:
    case = {**DEFAULTS, **case}
    leaves: dict[str, torch.Tensor] = {}
    target = torch.tensor(case["target"], dtype=torch.int64)
    z = map_logits(case, raw_logits(case, leaves))
    losses = token_losses(case, z, target)
    loss = reduced_loss(case, losses, target)
    check_against_torch(case, z, target, loss)
    grad_loss = constants(case, "grad_loss")
    objective = (loss if grad_loss is None else loss * grad_loss.reshape(loss.shape)).sum()
    outputs: dict[str, torch.Tensor] = {"loss": loss}
    if case["input_kind"] == "logits":
        outputs |= statistics(case, z, target)
        argmax = torch.where(target != case["ignore_index"], z.argmax(1), -1)
        outputs["argmax"] = argmax
        for name in ("lse", "target_logit", "entropy"):
            upstream = constants(case, f"grad_{name}")
            if upstream is not None:
                objective = objective + (outputs[name] * upstream).sum()
    objective.backward()
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        outputs[f"grad_{name}"] = leaf.grad
    case["outputs"] = {name: value.detach().flatten().tolist() for name, value in outputs.items()}
    return case


def sizes(n: int, v: int, d: int, seed: int, linear: bool = True) -> Case:
    """A problem of n tokens, v columns and d hidden."""
    numbers = Numbers(seed)
    case: Case = {
        "tokens": n,
        "columns": v,
        "hidden": d,
        "target": [(5 * i + seed) % v for i in range(n)],
    }
    if linear:
        case |= {
            "input": numbers.list(n * d),
            "weight": numbers.list(v * d, 0.5),
            "bias": numbers.list(v),
        }
    else:
        case |= {"logits": numbers.list(n * v)}
    return case


def with_ignored(case: Case) -> Case:
    case["target"] = [-100 if i % 3 == 1 else t for i, t in enumerate(case["target"])]
    return case


def class_weights(v: int) -> list[float]:
    return [(0.25 * ((3 * j) % 7)) for j in range(v)]


def everything(n: int, v: int) -> Case:
    return {
        "label_smoothing": 0.125,
        "z_loss": 0.0625,
        "logit_scale": 0.75,
        "softcap": 2.5,
        "temperature": 1.25,
        "vocab_weight": class_weights(v),
        "token_weight": [0.5 + 0.25 * (i % 4) for i in range(n)],
        "grad_lse": [0.5 - 0.25 * i for i in range(n)],
        "grad_target_logit": [1.0 - 0.5 * i for i in range(n)],
        "grad_entropy": [0.25 * i - 0.75 for i in range(n)],
    }


def options() -> dict[str, Case]:
    n, v = 6, 7
    return {
        "default": {},
        "none": {"reduction": "none"},
        "sum": {"reduction": "sum"},
        "none_upstream": {"reduction": "none", "grad_loss": [1.5, -0.5, 2.0, 0.0, 0.25, 3.0]},
        "mean_upstream": {"grad_loss": [-2.5]},
        "smoothing": {"label_smoothing": 0.125},
        "smoothing_one": {"label_smoothing": 1.0},
        "class_weights_mean": {"vocab_weight": class_weights(v)},
        "class_weights_smoothing_none": {
            "vocab_weight": class_weights(v),
            "label_smoothing": 0.25,
            "reduction": "none",
        },
        "class_weights_smoothing_sum": {
            "vocab_weight": class_weights(v),
            "label_smoothing": 0.25,
            "reduction": "sum",
        },
        "class_weights_smoothing_mean": {"vocab_weight": class_weights(v), "label_smoothing": 0.25},
        "token_weights": {"token_weight": [0.5, 1.0, 0.0, 2.0, 1.5, 0.25]},
        "z_loss": {"z_loss": 0.125},
        "scale_softcap_temperature": {"logit_scale": -0.5, "softcap": 1.5, "temperature": 0.75},
        "normalizer": {"normalizer": 12.5},
        "temperature_each": {
            "reduction": "none",
            "softcap": 2.5,
            "temperatures": [0.5, 1.0, 4.0, 0.75, 1.5, 2.0],
        },
        "statistics": {
            "grad_lse": [1.0] * n,
            "grad_target_logit": [-0.5] * n,
            "grad_entropy": [0.75] * n,
        },
        "everything_none": {"reduction": "none", **everything(n, v)},
        "everything_mean": everything(n, v),
    }


def probability_cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for name, extra in {
        "plain": {},
        "smoothing_weights": {
            "label_smoothing": 0.25,
            "vocab_weight": class_weights(5),
            "reduction": "none",
        },
    }.items():
        case = with_ignored(sizes(5, 5, 1, 9, linear=False))
        case["logits"] = [abs(p) / 4 for p in case["logits"]]
        cases[f"probabilities_{name}"] = golden(
            {**case, "input_kind": "probabilities", "probability_floor": 2.0**-20, **extra}
        )
    return cases


def all_cases() -> dict[str, Case]:
    cases: dict[str, Case] = {}
    for name, extra in options().items():
        cases[f"linear_{name}"] = golden({**with_ignored(sizes(6, 7, 4, 3)), **extra})
        cases[f"given_{name}"] = golden({**with_ignored(sizes(6, 7, 1, 4, linear=False)), **extra})
    cases["linear_large"] = golden({**sizes(9, 67, 13, 5), **everything(9, 67)})
    offset = sizes(4, 9, 1, 6, linear=False)
    offset["logits"] = [z + 16384.0 for z in offset["logits"]]
    cases["given_offset"] = golden({**offset, "reduction": "none", "label_smoothing": 0.125})
    one = sizes(3, 1, 2, 7)
    cases["linear_one_class"] = golden({**one, "label_smoothing": 0.25})
    cases.update(probability_cases())
    return cases


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for old in FOLDER.glob("*.json"):
        old.unlink()
    for name, case in all_cases().items():
        text = json.dumps(case, separators=(",", ":"), allow_nan=False)
        (FOLDER / f"{name}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
