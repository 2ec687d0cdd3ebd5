# SPDX-License-Identifier: Apache-2.0
"""A patch that makes TRL's trainers compute their losses without logits.

SFTTrainer, DPOTrainer, KTOTrainer, GRPOTrainer and RLOOTrainer replace the model's forward by one
that runs the backbone and passes its hidden states and the head's weight to a function of TRL.
DistillationTrainer passes those of its student and its teacher to another function. The patch
replaces both functions, for all trainers at once.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless._abi import parse_memory
from logitless._call import IGNORE_INDEX
from logitless._errors import LogitlessError, invalid, not_supported, renames
from logitless._statistics import StatisticName
from logitless.integrations._divergence import Head, generalized_jsd
from logitless.integrations._memory import Sizes, frugal
from logitless.torch import linear_cross_entropy
from logitless.torch._functions import _autocast_dtype
from logitless.torch._zero import gathered


class _Known(NamedTuple):
    """What this module assumes about a function of TRL."""

    name: str
    module: str  # where its trainers look it up at every call
    arguments: tuple[str, ...]
    also: str | None = None  # another module that has it


_LOGPROB = _Known(
    "_ChunkedLogProbFunction", "trl.trainer.utils",
    ("hidden", "weight", "bias", "targets", "temperature", "chunk_size", "final_logit_softcapping",
     "logit_scale", "outputs"),
)  # fmt: skip
_DIVERGENCE = _Known(
    "ChunkedDivergenceFunction", "trl.trainer.distillation_trainer",
    ("student_hidden", "student_weight", "student_bias", "teacher_hidden", "teacher_weight",
     "teacher_bias", "beta", "temperature", "student_logit_scale",
     "student_final_logit_softcapping", "teacher_logit_scale", "teacher_final_logit_softcapping"),
    "trl.kernels.chunked_divergence",
)  # fmt: skip
# What TRL's function returns besides the log-probabilities; None unless `outputs` names it.
_OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
# The statistic from which each output is computed. is_top1 does not use the rank, which is 0 for
# all of several equal largest logits.
_STATISTICS: dict[str, StatisticName] = {
    "entropy": "entropy", "log_sum_sq_probs": "sum_p_squared", "mean_logits": "mean_logit",
    "is_top1": "argmax",
}  # fmt: skip


class TrlPatch:
    """The patch of TRL, until `unpatch()` or the end of a `with` block. `calls` counts the calls of
    its functions: one for every forward of a model, or of a student and its teacher together. Calls
    in compiled code are not counted."""

    def __init__(self, memory: int | None) -> None:
        self.calls = 0
        self.memory = memory
        self.divergence = TrlDivergence(self)
        self._own: list[tuple[str, str, Any]] = []

    def __enter__(self) -> TrlPatch:
        return self

    def __exit__(self, *_: Any) -> None:
        self.unpatch()

    def unpatch(self) -> None:
        """Restores TRL's functions. A second call has no effect."""
        for module, name, function in self._own:
            setattr(importlib.import_module(module), name, function)
        self._own = []

    def _replace(self, known: _Known, function: Any, by: Any) -> None:
        for module in filter(None, (known.module, known.also)):
            self._own.append((module, known.name, function))
            setattr(importlib.import_module(module), known.name, by)

    def _count(self) -> None:
        if not torch.compiler.is_compiling():
            self.calls += 1

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
        """(log_probs, entropy, log_sum_sq_probs, mean_logits, is_top1) of every token, like TRL's
        function; None for results that `outputs` does not name. `chunk_size` determines the bytes
        that TRL's function needs, which are the default memory here."""
        self._count()
        if unknown := sorted(set(outputs) - {"log_probs", *_OUTPUTS}):
            raise invalid(f"outputs has {unknown[0]!r}; allowed: log_probs, {', '.join(_OUTPUTS)}")
        _check_softcap("final_logit_softcapping", final_logit_softcapping)
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


class TrlDivergence:
    """The replacement for TRL's ChunkedDivergenceFunction. Its patch counts the calls."""

    def __init__(self, patch: TrlPatch) -> None:
        self._patch = patch

    @renames(
        {
            "input": "student_hidden",
            "linear_weight": "student_weight",
            "linear_bias": "student_bias",
            "logit_scale": "student_logit_scale",
            "softcap": "student_final_logit_softcapping",
            "teacher_input": "teacher_hidden",
            "teacher_softcap": "teacher_final_logit_softcapping",
        }
    )
    def apply(
        self,
        student_hidden: Tensor,
        student_weight: Tensor,
        student_bias: Tensor | None,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        teacher_bias: Tensor | None,
        beta: float,
        temperature: float = 1.0,
        student_logit_scale: float = 1.0,
        student_final_logit_softcapping: float | None = None,
        teacher_logit_scale: float = 1.0,
        teacher_final_logit_softcapping: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(divergence, the student's entropy) of every token, [N] in f32; the entropy has no
        gradient, as in TRL."""
        self._patch._count()
        _check_softcap("student_final_logit_softcapping", student_final_logit_softcapping)
        _check_softcap("teacher_final_logit_softcapping", teacher_final_logit_softcapping)
        with gathered(student_weight, student_bias, teacher_weight, teacher_bias):
            divergence, statistics = generalized_jsd(
                Head(student_hidden, student_weight, student_bias),
                Head(teacher_hidden, teacher_weight, teacher_bias),
                "hidden", self._patch.memory, _divergence_peak,
                beta=beta, temperature=temperature, logit_scale=student_logit_scale,
                softcap=student_final_logit_softcapping, teacher_logit_scale=teacher_logit_scale,
                teacher_softcap=teacher_final_logit_softcapping, reduction="none",
                return_statistics=("entropy",),
            )  # fmt: skip
        return divergence, statistics.entropy


def _check_softcap(name: str, value: float | None) -> None:
    if value == 0:
        raise invalid(f"{name} is 0; allowed: None for none, numbers > 0")


# Tokens whose logits TRL's function computes at a time, for `chunk_size` columns.
_TOKENS = 4096


def _peak(call: Sizes, chunk_size: int) -> int:
    """The largest number of bytes that TRL's function needs: a tile of logits, and from the first
    tile on f32 sums of 16-bit gradients."""
    return call.size * min(call.tokens, _TOKENS) * chunk_size + call.f32_sums


_COLUMNS = 32768  # columns of the divergence's tile, even if the vocabulary has fewer


def _divergence_peak(call: Sizes) -> int:
    """The largest number of bytes that TRL's function needs, which is at the end of its backward
    pass: a tile of f32 logits for each head, a 16-bit copy of the gradients of the last tile, and
    f32 sums of the gradients."""
    tiles = 8 * min(call.tokens, _TOKENS) * _COLUMNS
    if not call.gradients or call.size == 4:
        return tiles
    rows, columns = (
        max(n - 1, 0) % m + 1 for n, m in ((call.tokens, _TOKENS), (call.vocab, _COLUMNS))
    )
    return tiles + call.size * rows * columns + call.f32_sums


def _alike(
    hidden: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | None, Any]:
    """(weight, bias, context) with which products have the same dtype as in TRL: that of autocast,
    or outside of autocast that of the hidden states. The gradient of an f32 weight is computed in
    f32."""
    kind, dtype = hidden.device.type, hidden.dtype
    context: Any = contextlib.nullcontext()
    if _autocast_dtype(hidden) is not None:
        return weight, None if bias is None else bias.float(), context
    if dtype is torch.float32:
        weight = weight.float()
    elif weight.dtype is not dtype:
        context = torch.autocast(kind, dtype)
    return weight, None if bias is None else bias.float(), context


def _functions() -> tuple[Any, Any]:
    """TRL's own two functions. Raises if anything that this module assumes about them does not
    hold."""
    try:
        trl = importlib.import_module("trl")
    except ModuleNotFoundError as error:
        if error.name != "trl":
            raise
        raise ImportError("patch_trl needs TRL 1.16: pip install trl") from error
    version = trl.__version__
    logprob, divergence = _own(version, _LOGPROB, _OUTPUTS), _own(version, _DIVERGENCE)
    ours = TrlPatch(parse_memory("1MiB"))  # whatever default_memory says
    _check_numbers(version, _LOGPROB, logprob, ours, _probe_logprob)
    _check_numbers(version, _DIVERGENCE, divergence, ours.divergence, _probe_divergence)
    return logprob, divergence


def _own(version: str, known: _Known, outputs: tuple[str, ...] | None = None) -> Any:
    def unknown(what: str) -> LogitlessError:
        return not_supported(
            f"TRL {version} {what}, so that its trainers cannot be patched; known: TRL 1.16"
        )

    found: list[Any] = []
    for name in filter(None, (known.module, known.also)):
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] != "trl":
                raise
            raise unknown(f"has no {name}") from error
        found.append(getattr(module, known.name, None))
    full, function = f"{known.module}.{known.name}", found[0]
    if isinstance(function, (TrlPatch, TrlDivergence)):
        raise invalid("TRL is patched already; allowed: once, until unpatch()")
    if not hasattr(function, "forward"):
        raise unknown(f"has no {full} with a forward")
    if any(other is not function for other in found):
        raise unknown(f"has another {known.name} in {known.also} than in {known.module}")
    parameters = inspect.signature(function.forward).parameters
    names = tuple(parameters)[1:]  # the first parameter is ctx
    if names != known.arguments:
        raise unknown(f"has a {full} of {', '.join(names)} instead of {', '.join(known.arguments)}")
    if outputs is not None and parameters["outputs"].default != outputs:
        raise unknown(
            f"has a {full} with the outputs {parameters['outputs'].default} instead of {outputs}"
        )
    if f" {known.name}.apply(" not in inspect.getsource(importlib.import_module(known.module)):
        raise unknown(f"does not call {known.name}.apply in {known.module}")
    return function


# If TRL uses the known formulas, its results differ from ours by a few roundings in f32.
_PROBE_ERROR = 1e-4
_TOKENS_OF_PROBE, _VOCAB_OF_PROBE = 6, 11


def _wave(*shape: int, step: float) -> Tensor:
    """Numbers between -2 and 2 that require a gradient, made without a random generator."""
    count = torch.arange(shape[0] * (shape[1] if len(shape) > 1 else 1), device="cpu")
    return _marked((2 * (step * (count + 1)).sin()).float().reshape(shape).requires_grad_())


def _marked(tensor: Tensor) -> Tensor:
    """The tensor, marked as a whole parameter where ZeRO-3 is on: TRL's functions read the mark."""
    known: Any = sys.modules.get("transformers.integrations.deepspeed")
    if known is not None and known.is_deepspeed_zero3_enabled():
        module: Any = importlib.import_module("deepspeed.runtime.zero.partition_parameters")
        tensor.ds_status = module.ZeroParamStatus.AVAILABLE  # type: ignore[attr-defined]
    return tensor


def _probe_logprob(function: Any) -> list[Tensor]:
    """All outputs of `function` that the trainers ask for, and gradients, on the CPU."""
    x, w = _wave(_TOKENS_OF_PROBE, 5, step=0.7), _wave(_VOCAB_OF_PROBE, 5, step=1.3)
    b, t = _wave(_VOCAB_OF_PROBE, step=2.1), torch.arange(_TOKENS_OF_PROBE, device="cpu")
    t = t.masked_fill(t == 2, IGNORE_INDEX)
    made: list[Tensor] = []
    for softcap, scale in ((None, 1.0), (3.0, 0.6)):
        outputs = function.apply(x, w, b, t, 1.3, 4, softcap, scale, _OUTPUTS)
        counts = t != IGNORE_INDEX
        found = [o[counts].float() for o in outputs]
        total = (found[0] * _wave(len(found[0]), step=0.4)).sum() + found[1].sum()
        made += [*found, *torch.autograd.grad(total, (x, w, b))]
    return made


def _probe_divergence(function: Any) -> list[Tensor]:
    x, w = _wave(_TOKENS_OF_PROBE, 5, step=0.7), _wave(_VOCAB_OF_PROBE, 5, step=1.3)
    b, c = _wave(_VOCAB_OF_PROBE, step=2.1), _wave(_VOCAB_OF_PROBE, step=0.9)
    y, v = _wave(_TOKENS_OF_PROBE, 3, step=1.9), _wave(_VOCAB_OF_PROBE, 3, step=0.3)
    factors = _wave(_TOKENS_OF_PROBE, step=0.4)
    made: list[Tensor] = []
    for beta in (0.0, 0.3, 1.0):
        for options in ((1.0, 1.0, None, 1.0, None), (1.3, 0.6, 3.0, 1.7, 2.5)):
            divergence, entropy = function.apply(
                x, w, b, y.detach(), _marked(v.detach()), _marked(c.detach()), beta, *options
            )
            grads = torch.autograd.grad((divergence * factors.detach()).sum(), (x, w, b))
            made += [divergence, entropy, *grads]
    return made


@torch.enable_grad()
def _check_numbers(version: str, known: _Known, theirs: Any, ours: Any, probe: Any) -> None:
    """Raises unless TRL's function and ours give the same numbers: a signature says nothing about
    the formula."""
    full = f"{known.module}.{known.name}"
    with torch.inference_mode(False), torch.autocast("cpu", enabled=False):
        exact = probe(ours)
        try:
            found = probe(theirs)
        except Exception as error:
            raise not_supported(
                f"TRL {version} has a {full} that does not run as known ({error}), so that its "
                "trainers cannot be patched; known: TRL 1.16"
            ) from error
    for a, e in zip((x.detach() for x in found), (x.detach() for x in exact), strict=True):
        if a.shape != e.shape or not (a - e).abs().max() <= _PROBE_ERROR * (1 + e.abs().max()):
            raise not_supported(
                f"TRL {version} has a {full} that computes something else, so that its trainers "
                "cannot be patched; known: TRL 1.16"
            )


def check_forward(model: Any) -> None:
    """Raises if a trainer of TRL has replaced the model's forward. The replacement computes the
    loss itself."""
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
    """Whether TRL is patched, so that all of its trainers use this module's functions."""
    return isinstance(getattr(sys.modules.get(_LOGPROB.module), _LOGPROB.name, None), TrlPatch)


def patch_trl(*, memory: int | str | None = None) -> TrlPatch:
    """Makes TRL's trainers in this process compute log-probabilities, entropies and divergences
    without logits, until the result's `unpatch()` or the end of a `with` block. `memory` is that of
    linear_cross_entropy and linear_divergence; its default is the bytes that TRL's own functions
    need, unless default_memory sets another. docs/integrations.md says which trainers it covers."""
    patch = TrlPatch(parse_memory(memory))
    logprob, divergence = _functions()
    patch._replace(_LOGPROB, logprob, patch)
    patch._replace(_DIVERGENCE, divergence, patch.divergence)
    return patch
