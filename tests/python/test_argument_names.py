# SPDX-License-Identifier: Apache-2.0
"""One name for one thing: linear_weight and linear_bias are the head's, `weight` has one weight per
class. An error names the arguments that its function has, whatever the core calls them."""

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
from logitless.integrations import cce, liger, megatron, unsloth, verl
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
    "ids": np.zeros((TOKENS, 3), np.int32),
}
TEACHERS = "teacher's "  # prefix of a second head's roles
ROLES |= {f"{TEACHERS}{role}": ROLES[role] for role in ("input", "head", "bias")}
ROLE_OF = {
    "input": "input", "_input": "input", "e": "input", "hidden": "input", "logits": "logits",
    "linear_weight": "head", "lin_weight": "head", "c": "head", "vocab_weights": "head",
    "lm_head": "head", "linear_bias": "bias", "hidden_states": "input", "input_ids": "target",
    "index": "target", "ids": "ids",
    "bias": "bias", "target": "target", "targets": "target", "labels": "target",
    "teacher_input": "teacher's input", "teacher_weight": "teacher's head",
    "teacher_bias": "teacher's bias",
    "ce_weight": "classes", "token_weight": "tokens", "normalizer": "normalizer",
}  # fmt: skip
# In these functions, named like other libraries', `weight` is the head's weight.
FLATTENED = ("verl.linear_cross_entropy", "megatron.linear_cross_entropy")  # labels of any shape
OF_THE_HEAD = ("liger.apply", *FLATTENED)
OPTIONS = frozenset(
    "reduction ignore_index label_smoothing z_loss logit_scale softcap temperature shift memory "
    "return_statistics empty_mean return_gradients gradients entropy dim axis "
    "lse_square_scale return_z_loss accum_dtype use_token_scaling return_token_accuracy "
    "return_predicted_tokens return_lse filter_eps accum_e_fp32 accum_c_fp32 filter_e_grad "
    "filter_c_grad impl vocab_parallel_options dist_process_group ce_impl ce_mode "
    "kind beta label_weight teacher_temperature teacher_logit_scale teacher_softcap "
    "vocab_ids teacher_vocab_ids "  # lists of rows
    "over offsets "  # of linear_logprobs_at
    "teacher_logits "  # instead of the teacher's head
    "chunk_mem_const group axis_name upstream tp_group "
    "sequence_parallel chunks logit_scale_multiply logit_scale_divide logit_softcapping "
    "options k".split()
)


def functions() -> dict[str, Callable[..., Any]]:
    """Public functions of the bindings, and some modules and functions of integrations."""
    found: dict[str, Callable[..., Any]] = {
        "integrations.cce.linear_cross_entropy": cce.linear_cross_entropy,
        "integrations.verl.linear_cross_entropy": verl.linear_cross_entropy,
        "integrations.megatron.linear_cross_entropy": megatron.linear_cross_entropy,
        "integrations.liger.apply": liger.FusedLinearCrossEntropyFunction.apply,
        "integrations.verl.module": verl.FusedLinearForPPO().forward,
        "integrations.unsloth": unsloth.chunked_hidden_states_selective_log_softmax,
        "integrations.liger.module": liger.LigerFusedLinearCrossEntropyLoss().forward,
        "torch.CrossEntropyLoss": logitless.torch.CrossEntropyLoss().forward,
        "torch.LinearCrossEntropyLoss": logitless.torch.LinearCrossEntropyLoss().forward,
        "torch.LinearDivergenceLoss": logitless.torch.LinearDivergenceLoss().forward,
        "torch.LinearCrossEntropyHead": logitless.torch.LinearCrossEntropyHead(
            HIDDEN, VOCAB
        ).forward,
    }
    for name in logitless.torch.__all__:
        if name == "set_default_memory":  # it takes no tensor
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
    """(what is wrong, the wrong tensor). `alone`: no other tensor determines its shape."""
    right = ROLES[role]
    role = role.removeprefix(TEACHERS)
    # These tensors define the width, so an error names the other operand.
    if role in ("input", "logits"):
        if not alone:
            yield "shape", np.concatenate((right, right[:1]))
        yield "dtype", right.astype(np.int32)
    elif role == "normalizer":
        yield "shape", np.ones(2, np.float32)
    else:
        # The last dimension of ids may have any size.
        wider = (*right.shape[:-1], right.shape[-1] + 1)
        wider = (TOKENS + 1, 3) if role == "ids" else wider
        yield "shape", np.ones(wider, right.dtype)
        yield "rank", right[None, None]
        if role in ("head", "bias", "target", "ids"):
            indexes = role in ("target", "ids")
            yield "dtype", right.astype(np.int16 if indexes else np.float16)


CASES = [
    pytest.param(name, argument, value, id=f"{name}-{argument}-{what}")
    for name in FUNCTIONS
    for argument, role in tensors(name).items()
    for what, value in wrong(role, alone={"target", "ids"}.isdisjoint(tensors(name).values()))
    if (role, what) != ("target", "rank") or not name.endswith(FLATTENED)
    if what != "dtype" or role == "target" or not name.endswith("unsloth")  # it casts the input
]


def arguments(name: str, **changed: Any) -> dict[str, Any]:
    """The arguments of a right call, in the binding's types, except those that are `changed`."""
    made: dict[str, Any] = {"k": 2} if "k" in inspect.signature(FUNCTIONS[name]).parameters else {}
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
        return  # softmax_ runs torch's own op under a dispatch mode
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
    """Otherwise the wrong calls above could fail for another reason."""
    FUNCTIONS[name](**arguments(name))


OURS = [n for n in FUNCTIONS if not n.startswith("integrations.")]
RENAMED = {"weight": "linear_weight", "bias": "linear_bias"}


@pytest.mark.parametrize("name", [n for n in OURS if "head" in tensors(n).values()])
def test_the_head_has_one_name(name: str) -> None:
    roles = tensors(name)
    assert roles["linear_weight"] == "head" and roles["linear_bias"] == "bias"
    assert roles.get("weight", "classes") == "classes" and "bias" not in roles


@pytest.mark.parametrize("old", RENAMED)
@pytest.mark.parametrize("name", [n for n in OURS if n.endswith("linear_logprob")])
def test_a_name_of_before_is_refused_in_a_sentence(name: str, old: str) -> None:
    given = arguments(name)
    given[old] = given.pop(RENAMED[old])
    with pytest.raises(TypeError) as caught:
        FUNCTIONS[name](**given)
    now = f"{old} is no argument of linear_logprob; allowed: {RENAMED[old]}, its name now"
    assert str(caught.value) == now and isinstance(caught.value, LogitlessError)
    assert old not in inspect.signature(FUNCTIONS[name]).parameters


@pytest.mark.parametrize("old", RENAMED)
def test_a_gradient_of_the_head_has_its_name(old: str) -> None:
    given = arguments("numpy.linear_cross_entropy")
    _, grads = logitless.numpy.linear_cross_entropy(**given, return_gradients=True)
    assert getattr(grads, RENAMED[old]).shape == given[RENAMED[old]].shape
    with pytest.raises(AttributeError, match=rf"^{old} is no field .* allowed: {RENAMED[old]}"):
        getattr(grads, old)


def test_a_head_that_is_a_module_is_named_as_its_own() -> None:
    head = logitless.torch.LinearCrossEntropyHead(HIDDEN + 1, VOCAB)
    target = torch.from_numpy(ROLES["target"])
    with pytest.raises(ValueError, match=r"^head\.weight has shape \[9, 6\]; allowed: \[V, 5\]"):
        head(torch.ones(TOKENS, HIDDEN), target)
    head = logitless.torch.LinearCrossEntropyHead(HIDDEN, VOCAB, bias=True)
    head.bias = torch.nn.Parameter(torch.ones(VOCAB + 1))
    with pytest.raises(ValueError, match=r"^head\.bias has shape \[10\]; allowed: \[9\]"):
        head(torch.ones(TOKENS, HIDDEN), target)


def test_modules_name_every_option_that_their_function_has() -> None:
    """Then an editor shows them, and a wrong name is an error in the constructor."""
    lt = logitless.torch

    def options(function: Any) -> dict[str, Any]:
        found = inspect.signature(function).parameters.items()
        held = set(OPTIONS) - {"return_gradients", "gradients", "options"} | {"weight"}
        return {name: p.default for name, p in found if name in held}

    of_linear = options(lt.linear_cross_entropy)
    split = set(inspect.signature(lt.linear_cross_entropy).parameters)
    split -= set(inspect.signature(logitless.numpy.linear_cross_entropy).parameters)
    for module in (lt.LinearCrossEntropyLoss, lt.LinearCrossEntropyHead):
        assert options(module) == {n: d for n, d in of_linear.items() if n not in split}
        with pytest.raises(TypeError, match="unexpected keyword argument 'softcp'"):
            module(5, 9, softcp=3) if module is lt.LinearCrossEntropyHead else module(softcp=3)
    assert options(lt.CrossEntropyLoss) == options(lt.cross_entropy)


@pytest.mark.parametrize("name", [n for n in FUNCTIONS if "normalizer" in tensors(n)])
def test_a_wrong_number_is_named_as_it_was_given(name: str) -> None:
    with pytest.raises(ValueError, match=r"^normalizer is -2; allowed"):
        FUNCTIONS[name](**{**arguments(name), "normalizer": -2.0})


@pytest.mark.parametrize("name", [n for n in FUNCTIONS if "head" in tensors(n).values()])
def test_a_head_that_does_not_go_with_the_input_is_named(name: str) -> None:
    (head,) = (argument for argument, role in tensors(name).items() if role == "head")
    given = arguments(name, **{head: np.ones((VOCAB, HIDDEN + 1), np.float32)})
    with pytest.raises(ValueError, match=rf"^{head} has shape \[9, 6\]; allowed: \[V, 5\]"):
        FUNCTIONS[name](**given)
