# SPDX-License-Identifier: Apache-2.0
"""An error speaks of the arguments that its function has. Several of them have other names in the
core, where `weight` is the head and not the class weights."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import logitless.numpy
import logitless.torch
from logitless import LogitlessError, _abi
from logitless.integrations import cce, liger, megatron, verl
from test_second_derivatives import PassThrough

TOKENS, HIDDEN, VOCAB = 6, 5, 9
ROLES: dict[str, Any] = {
    "input": np.ones((TOKENS, HIDDEN), np.float32),
    "head": np.ones((VOCAB, HIDDEN), np.float32),
    "bias": np.ones(VOCAB, np.float32),
    "logits": np.ones((TOKENS, VOCAB), np.float32),
    "target": np.zeros(TOKENS, np.int32),
    "classes": np.ones(VOCAB, np.float32),
    "tokens": np.ones(TOKENS, np.float32),
    "normalizer": np.array(3.0, np.float32),
}
ROLE_OF = {
    "input": "input", "_input": "input", "e": "input", "hidden": "input", "logits": "logits",
    "linear_weight": "head", "lin_weight": "head", "c": "head", "linear_bias": "bias",
    "bias": "bias", "target": "target", "targets": "target", "labels": "target",
    "ce_weight": "classes", "token_weight": "tokens", "normalizer": "normalizer",
}  # fmt: skip
# In these functions `weight` is the head: their names are another library's, or older.
FLATTENED = ("verl.linear_cross_entropy", "megatron.linear_cross_entropy")  # labels of any shape
OF_THE_HEAD = ("linear_logprob", "liger.apply", *FLATTENED)
OPTIONS = frozenset(
    "reduction ignore_index label_smoothing z_loss logit_scale softcap temperature shift memory "
    "return_statistics empty_mean return_gradients gradients entropy dim axis "
    "lse_square_scale return_z_loss accum_dtype use_token_scaling return_token_accuracy "
    "return_predicted_tokens return_lse filter_eps accum_e_fp32 accum_c_fp32 filter_e_grad "
    "filter_c_grad impl vocab_parallel_options dist_process_group ce_impl ce_mode "
    "chunk_mem_const group vocab_start vocab_total sequence_dim local_tokens "
    "reduce_input_grad reduce_dtype vocab_blocks axis_name upstream tp_group "
    "sequence_parallel".split()
)


def functions() -> dict[str, Callable[..., Any]]:
    """Every public function, by the binding's name and its own."""
    found: dict[str, Callable[..., Any]] = {
        "integrations.cce.linear_cross_entropy": cce.linear_cross_entropy,
        "integrations.verl.linear_cross_entropy": verl.linear_cross_entropy,
        "integrations.megatron.linear_cross_entropy": megatron.linear_cross_entropy,
        "integrations.liger.apply": liger.FusedLinearCrossEntropyFunction.apply,
        "integrations.liger.module": liger.LigerFusedLinearCrossEntropyLoss().forward,
        "torch.CrossEntropyLoss": logitless.torch.CrossEntropyLoss().forward,
        "torch.LinearCrossEntropyLoss": logitless.torch.LinearCrossEntropyLoss().forward,
        "torch.LinearCrossEntropyHead": logitless.torch.LinearCrossEntropyHead(
            HIDDEN, VOCAB
        ).forward,
    }
    for name in logitless.torch.__all__:
        if name == "set_default_memory":  # which takes no tensor
            continue
        if inspect.isfunction(function := getattr(logitless.torch, name)):
            found[f"torch.{name}"] = function
    for name, function in vars(logitless.numpy).items():
        own = getattr(function, "__module__", None) == "logitless.numpy"
        if inspect.isfunction(function) and own and not name.startswith("_"):
            found[f"numpy.{name}"] = function
    if importlib.util.find_spec("jax") is not None:
        module = importlib.import_module("logitless.jax")
        for name in module.__all__:
            if not inspect.isclass(function := getattr(module, name)):
                found[f"jax.{name}"] = function
    return found


FUNCTIONS = functions()


def tensors(name: str) -> dict[str, str]:
    """The role of every tensor among the arguments."""
    roles = {}
    for argument, parameter in inspect.signature(FUNCTIONS[name]).parameters.items():
        if argument == "weight":
            roles[argument] = "head" if name.endswith(OF_THE_HEAD) else "classes"
        elif argument in ROLE_OF:
            roles[argument] = ROLE_OF[argument]
        elif parameter.kind is not parameter.VAR_KEYWORD and not argument.startswith("_"):
            assert argument in OPTIONS, f"{name} has a new argument, {argument}: say what it is"
    return roles


def wrong(role: str, alone: bool) -> Iterator[tuple[str, Any]]:
    """What is wrong with a tensor, and that tensor. `alone`: nothing else gives its shape."""
    right = ROLES[role]
    # The tensors are as wide as they are; else the other operand is named.
    if role in ("input", "logits"):
        if not alone:
            yield "shape", np.concatenate((right, right[:1]))
        yield "dtype", right.astype(np.int32)
    elif role == "normalizer":
        yield "shape", np.ones(2, np.float32)
    else:
        wider = (*right.shape[:-1], right.shape[-1] + 1)
        yield "shape", np.ones(wider, right.dtype)
        yield "rank", right[None, None]
        if role in ("head", "bias", "target"):
            yield "dtype", right.astype(np.int16 if role == "target" else np.float16)


CASES = [
    pytest.param(name, argument, value, id=f"{name}-{argument}-{what}")
    for name in FUNCTIONS
    for argument, role in tensors(name).items()
    for what, value in wrong(role, alone="target" not in tensors(name).values())
    if (role, what) != ("target", "rank") or not name.endswith(FLATTENED)
]


def arguments(name: str, **changed: Any) -> dict[str, Any]:
    """Those of a right call, but for what is changed, as the binding takes them."""
    made: dict[str, Any] = {}
    for argument, value in ({a: ROLES[r] for a, r in tensors(name).items()} | changed).items():
        if name.startswith("jax."):
            import jax.numpy as jnp

            made[argument] = jnp.asarray(value)
        else:
            made[argument] = value if name.startswith("numpy.") else torch.from_numpy(value.copy())
    return made


@pytest.mark.parametrize("mode", [contextlib.nullcontext, PassThrough], ids=["plain", "dispatched"])
@pytest.mark.parametrize(("name", "argument", "value"), CASES)
def test_an_error_names_the_arguments_of_its_function(
    name: str, argument: str, value: Any, mode: Any
) -> None:
    if mode is PassThrough and (name.startswith(("jax.", "numpy.")) or name.endswith("softmax_")):
        return  # under this mode softmax_ is torch's own
    given = arguments(name, **{argument: value})
    with pytest.raises(LogitlessError) as caught, mode():
        FUNCTIONS[name](**given)
    message = str(caught.value)
    words = set(re.findall(r"(?<![\w.-])[a-z_]\w*", message))
    assert argument in words, message
    foreign = {*_abi.TENSORS, "options"} - set(inspect.signature(FUNCTIONS[name]).parameters)
    assert not words & foreign, message


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_right_call_is_right(name: str) -> None:
    """So that those above fail for the one reason that they are given."""
    FUNCTIONS[name](**arguments(name))


@pytest.mark.parametrize("name", [n for n in FUNCTIONS if "normalizer" in tensors(n)])
def test_a_wrong_number_is_named_as_it_was_given(name: str) -> None:
    with pytest.raises(ValueError, match=r"^normalizer is -2; allowed"):
        FUNCTIONS[name](**{**arguments(name), "normalizer": -2.0})


@pytest.mark.parametrize("name", [n for n in FUNCTIONS if "head" in tensors(n).values()])
def test_a_head_that_does_not_go_with_the_input_is_named(name: str) -> None:
    (head,) = (argument for argument, role in tensors(name).items() if role == "head")
    given = arguments(name, **{head: np.ones((VOCAB, HIDDEN + 1), np.float32)})
    with pytest.raises(ValueError, match=rf"^{head} has shape \[9, 6\]; allowed: \[9, 5\]"):
        FUNCTIONS[name](**given)
