# SPDX-License-Identifier: Apache-2.0
"""TRL's trainers without logits.

SFTTrainer, DPOTrainer, KTOTrainer, GRPOTrainer and RLOOTrainer replace the model's forward by one
that runs the backbone and gives its hidden states and the head's weight to a function of TRL's own.
That function is replaced here, for all of them at once.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from typing import Any

import torch
from torch import Tensor

from logitless._abi import parse_memory
from logitless._call import IGNORE_INDEX
from logitless._errors import LogitlessError, invalid, not_supported, renames
from logitless._statistics import StatisticName
from logitless.integrations._memory import Sizes, frugal
from logitless.torch import linear_cross_entropy

# TRL's trainers look their function up there at every call; it has these arguments.
_MODULE, _NAME = "trl.trainer.utils", "_ChunkedLogProbFunction"
_ARGUMENTS = (
    "hidden", "weight", "bias", "targets", "temperature", "chunk_size", "final_logit_softcapping",
    "logit_scale", "outputs",
)  # fmt: skip
# It gives these beside the log-probabilities, where `outputs` names them, and None elsewhere.
_OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
# Each output is made of one of these statistics. The rank does not serve, because it is 0 for every
# one of several largest logits.
_STATISTICS: dict[str, StatisticName] = {
    "entropy": "entropy", "log_sum_sq_probs": "sum_p_squared", "mean_logits": "mean_logit",
    "is_top1": "argmax",
}  # fmt: skip


class TrlPatch:
    """TRL patched. `with` unpatches at its end; so does `unpatch()`. `calls` counts how often a
    trainer came here: once for every forward of a model, but not in compiled code."""

    def __init__(self, memory: int | None) -> None:
        self.calls = 0
        self.memory = memory
        self._own: Any = None

    def __enter__(self) -> TrlPatch:
        return self

    def __exit__(self, *_: Any) -> None:
        self.unpatch()

    def unpatch(self) -> None:
        """Gives TRL its own function back; a second time does nothing."""
        if self._own is not None:
            setattr(importlib.import_module(_MODULE), _NAME, self._own)
            self._own = None

    @renames(
        {
            "input": "hidden",
            "linear_weight": "weight",
            "linear_bias": "bias",
            "target": "targets",
            "softcap": "final_logit_softcapping",
        }
    )
    def apply(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = _OUTPUTS,
    ) -> tuple[Tensor | None, ...]:
        """(log_probs, entropy, log_sum_sq_probs, mean_logits, is_top1) of every token, as TRL's
        function; `chunk_size` says what that takes, and so what is taken here by default."""
        if not torch.compiler.is_compiling():
            self.calls += 1
        if unknown := sorted(set(outputs) - {"log_probs", *_OUTPUTS}):
            raise invalid(f"outputs has {unknown[0]!r}; allowed: log_probs, {', '.join(_OUTPUTS)}")
        if final_logit_softcapping == 0:
            raise invalid("final_logit_softcapping is 0; allowed: None for none, numbers > 0")
        if hasattr(weight, "ds_id") and torch.is_grad_enabled():
            raise not_supported(
                "the weight is a parameter of DeepSpeed ZeRO-3, which is taken apart again before "
                "backward; allowed: ZeRO-1 and 2, FSDP"
            )
        memory = frugal(self.memory, hidden, weight, lambda call: _peak(call, chunk_size))
        weight, bias, context = _alike(hidden, weight, bias)
        names = [statistic for output, statistic in _STATISTICS.items() if output in outputs]
        with context:
            _, s = linear_cross_entropy(
                hidden, weight, targets, linear_bias=bias, reduction="none",
                temperature=temperature, logit_scale=logit_scale, softcap=final_logit_softcapping,
                memory=memory, return_statistics=("logprob", *names),
            )  # fmt: skip
        squares, is_top1 = s.sum_p_squared, None
        if squares is not None:
            squares = squares.log().where(targets != IGNORE_INDEX, 0)
        if s.argmax is not None:
            is_top1 = s.argmax == targets
        return s.logprob, s.entropy, squares, s.mean_logit, is_top1


# TRL's function makes the logits of so many tokens and `chunk_size` columns at a time.
_TOKENS = 4096


def _peak(call: Sizes, chunk_size: int) -> int:
    """Bytes that TRL's function takes at most: a tile of logits, and f32 sums of 16-bit gradients
    from its first tile on."""
    return call.size * min(call.tokens, _TOKENS) * chunk_size + call.f32_sums


def _alike(
    hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | None, Any]:
    """(weight, bias, context) for products in the dtype that TRL has them in: that of
    autocast, or else that of the hidden states. The gradient of an f32 weight is formed in f32."""
    kind, dtype = hidden.device.type, hidden.dtype
    context: Any = contextlib.nullcontext()
    if torch.is_autocast_enabled(kind):
        return weight, None if bias is None else bias.float(), context
    if dtype is torch.float32:
        weight = weight.float()
    elif weight.dtype is not dtype:
        context = torch.autocast(kind, dtype)
    return weight, None if bias is None else bias.float(), context


def _function() -> Any:
    """TRL's own, if all about it is as known; else an error that says what is not."""
    try:
        trl = importlib.import_module("trl")
    except ModuleNotFoundError as error:
        if error.name != "trl":
            raise
        raise ImportError("patch_trl needs TRL 1.16: pip install trl") from error

    def unknown(what: str) -> LogitlessError:
        return not_supported(
            f"TRL {trl.__version__} {what}, so that its trainers cannot be patched; known: TRL 1.16"
        )

    try:
        module = importlib.import_module(_MODULE)
    except ModuleNotFoundError as error:
        raise unknown(f"has no {_MODULE}") from error
    function: Any = getattr(module, _NAME, None)
    if isinstance(function, TrlPatch):
        raise invalid("TRL is patched already; allowed: once, until unpatch()")
    if not hasattr(function, "forward"):
        raise unknown(f"has no {_MODULE}.{_NAME} with a forward")
    parameters = inspect.signature(function.forward).parameters
    names = tuple(parameters)[1:]  # the first parameter is ctx
    if names != _ARGUMENTS:
        raise unknown(
            f"has a {_MODULE}.{_NAME} of {', '.join(names)} instead of {', '.join(_ARGUMENTS)}"
        )
    if parameters["outputs"].default != _OUTPUTS:
        raise unknown(
            f"has a {_MODULE}.{_NAME} with the outputs {parameters['outputs'].default} instead of "
            f"{_OUTPUTS}"
        )
    if f" {_NAME}.apply(" not in inspect.getsource(module):
        raise unknown(f"does not call {_NAME}.apply in {_MODULE}")
    return function


def check_forward(model: Any) -> None:
    """Raises where a trainer of TRL has replaced the model's forward, which makes its loss of its
    own then."""
    forward = vars(model).get("forward")
    while forward is not None:
        function = getattr(forward, "func", None) or getattr(forward, "__func__", forward)
        module = getattr(function, "__globals__", {}).get("__name__", "")
        if module.partition(".")[0] == "trl":
            raise not_supported(
                f"a trainer of TRL has replaced the forward of {type(model).__name__} and makes "
                "the loss itself; use patch_trl() there"
            )
        forward = getattr(function, "__wrapped__", None)


def is_patched() -> bool:
    """Whether TRL's trainers come here, whatever models they train."""
    return isinstance(getattr(sys.modules.get(_MODULE), _NAME, None), TrlPatch)


def patch_trl(*, memory: int | str | None = None) -> TrlPatch:
    """Makes TRL's trainers compute log-probabilities and entropies without logits, all of this
    process, until `unpatch()` of the result or the end of its `with`. `memory` is that of
    linear_cross_entropy; None is what TRL's own function takes, unless default_memory says
    another."""
    patch = TrlPatch(parse_memory(memory))
    patch._own = _function()
    setattr(importlib.import_module(_MODULE), _NAME, patch)
    return patch
