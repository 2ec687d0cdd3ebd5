# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face causal LM that computes its loss without logits.

With labels, the model's own forward runs without them, and its lm_head answers with the loss
instead of the logits: a module call as ever, so that hooks of FSDP, DDP and accelerate run.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from typing import Any

import torch
from torch import Tensor

from logitless._errors import invalid, not_supported
from logitless.torch import linear_cross_entropy

# What a patched module keeps, beside its `forward`: Patch.unpatch takes them away again.
_PATCH, _PENDING, _OWN_FORWARD = "_logitless_patch", "_logitless_pending", "_logitless_forward"


class _Pending:
    """One forward call with labels: what the head needs, and the loss it gave."""

    def __init__(self, labels: Tensor, options: dict[str, Any]) -> None:
        self.labels = labels
        self.options = options
        self.loss: Tensor | None = None


def _head_forward(self: Any, input: Tensor) -> Tensor:
    pending: _Pending | None = getattr(self, _PENDING, None)
    if pending is None:
        logits: Tensor = _own_forward(self)(input)
        return logits
    labels = pending.labels.to(input.device)
    if labels.shape != input.shape[:-1]:
        raise invalid(
            f"labels has shape {tuple(labels.shape)}; allowed: {tuple(input.shape[:-1])}, one for "
            "every position the head is given (logits_to_keep does not go with labels)"
        )
    loss = linear_cross_entropy(
        input, self.weight, labels, linear_bias=self.bias, **pending.options
    )
    pending.loss = loss
    # What the model does with its "logits" then (a softcap, a scale) is done to one number.
    answer: Tensor = loss.detach().reshape(1, 1, 1)
    return answer


def _own_forward(module: Any) -> Any:
    own = module.__dict__.get(_OWN_FORWARD)
    return own if own is not None else functools.partial(type(module).forward, module)


def _model_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    patch: _Settings = self.__dict__[_PATCH]
    forward = _own_forward(self)
    labels = kwargs.pop("labels", None)
    if labels is None or (patch.eval_logits and not self.training):
        return (
            forward(*args, **kwargs) if labels is None else forward(*args, labels=labels, **kwargs)
        )
    shift_labels = kwargs.pop("shift_labels", None)
    options: dict[str, Any] = {**patch.options, "shift": shift_labels is None}
    if (items := kwargs.pop("num_items_in_batch", None)) is not None:
        options["normalizer"] = items.to(labels.device) if isinstance(items, Tensor) else items
    options["ignore_index"] = kwargs.pop("ignore_index", -100)
    as_tuple = kwargs.pop("return_dict", None) is False
    head = self.get_output_embeddings()
    pending = _Pending(labels if shift_labels is None else shift_labels, options)
    head.__dict__[_PENDING] = pending
    try:
        output = forward(*args, **kwargs, return_dict=True)
    finally:
        del head.__dict__[_PENDING]
    if pending.loss is None:
        raise not_supported(f"{type(self).__name__} did not call its lm_head once with all tokens")
    patch.check(output.logits, pending.loss)
    output = dataclasses.replace(output, loss=pending.loss, logits=None)
    return output.to_tuple() if as_tuple else output


class _Settings:
    """How the model makes logits of its head's products. Plain data: copies with the model."""

    def __init__(self, model: Any, options: dict[str, Any], eval_logits: bool) -> None:
        config = model.config.get_text_config() if hasattr(model, "config") else None
        found: dict[str, Any] = {"empty_mean": "nan"}
        if softcap := getattr(config, "final_logit_softcapping", None):
            found["softcap"] = softcap
        if isinstance(scale := getattr(model, "logit_scale", None), (int, float)):
            found["logit_scale"] = scale
        elif scaling := getattr(config, "logits_scaling", None):
            found["logit_scale"] = 1.0 / scaling
        self.options = {**found, **options}
        self.eval_logits = eval_logits
        self.checked = False

    def check(self, answered: Tensor, loss: Tensor) -> None:
        """Once, with the first loss: what the model made of the number that its head answered must
        be what the loss was told of scale and softcap."""
        if self.checked or torch.compiler.is_compiling():
            return
        self.checked = True
        expected = loss.detach() * self.options.get("logit_scale", 1.0)
        if softcap := self.options.get("softcap", 0.0):
            expected = torch.tanh(expected / softcap) * softcap
        made = answered.detach().reshape(-1)
        same = made.numel() == 1 and torch.allclose(
            made.float(), expected.reshape(1).float(), rtol=2e-2, atol=1e-6, equal_nan=True
        )
        if not same:
            raise not_supported(
                "the model changes its logits after the lm_head in a way that is not known here; "
                "pass logit_scale= or softcap= to patch_transformers"
            )


class Patch:
    """A patched model. `with` unpatches at its end; so does `unpatch()`."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __enter__(self) -> Any:
        return self.model

    def __exit__(self, *_: Any) -> None:
        self.unpatch()

    def unpatch(self) -> None:
        """Restores the model; a second time does nothing."""
        for module in (self.model, self.model.get_output_embeddings()):
            if _PATCH not in module.__dict__:
                continue
            del module.__dict__[_PATCH]
            own = module.__dict__.pop(_OWN_FORWARD)
            if own is None:
                del module.__dict__["forward"]
            else:
                module.__dict__["forward"] = own


def patch_transformers(model: Any, *, eval_logits: bool = False, **options: Any) -> Patch:
    """Makes `model` (Llama, Qwen, Gemma, GPT-2, ... ForCausalLM) compute its loss without logits.

    With labels, output.loss is the loss and output.logits is None; without them nothing changes.
    `eval_logits`: in eval mode leave the model as it is, for metrics made of logits. `options` go
    to linear_cross_entropy (label_smoothing, z_loss, memory, ...); scale and softcap are those of
    the model.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None:
        raise invalid(f"{type(model).__name__} has no output embeddings; allowed: a causal LM")
    if not isinstance(head, torch.nn.Linear) or type(head).forward is not torch.nn.Linear.forward:
        raise not_supported(
            f"the lm_head is a {type(head).__name__}; allowed: a plain torch.nn.Linear (merge or "
            "leave out adapters and quantization on it)"
        )
    if _PATCH in model.__dict__:
        raise invalid("model is patched already; allowed: once, until unpatch()")
    settings = _Settings(model, options, eval_logits)
    for module, function in ((model, _model_forward), (head, _head_forward)):
        own = module.__dict__.get("forward")
        module.__dict__[_PATCH] = settings
        module.__dict__[_OWN_FORWARD] = own
        # A method, so that a deepcopy of the model is bound to the copy; a function of its own, so
        # that it may carry the signature that trainers look at.
        own_copy = types.FunctionType(function.__code__, function.__globals__)
        functools.update_wrapper(own_copy, type(module).forward)
        module.__dict__["forward"] = types.MethodType(own_copy, module)
    return Patch(model)
