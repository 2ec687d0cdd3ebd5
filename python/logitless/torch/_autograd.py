# SPDX-License-Identifier: Apache-2.0
"""The eager autograd rule of the loss.

Sum and mean of a linear loss: the gradients are computed with the loss, for an upstream gradient of
1, and backward returns them times the upstream gradient. A second backward repeats the call.
Otherwise (reduction "none", a differentiable statistic, given logits, f16 that keeps state):
Forward, then Backward, which for a linear loss uses what Forward kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from logitless import _abi
from logitless._abi import Options
from logitless._errors import not_supported
from logitless.torch import _device, _kept, _lists, _run
from logitless.torch._dispatch import ONCE_ONLY
from logitless.torch._kept import Keep, Kept
from logitless.torch._run import Constants, Upstream


def held_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a gradient waits for its upstream factor: not f16, which lacks the
    range."""
    return torch.float32 if dtype is torch.float16 else dtype


class Asked(NamedTuple):
    """A request to Backward."""

    upstream: Upstream
    options: Options
    constants: Constants


_LOGITS_AT = list(_run.OUTPUTS).index(_run.LOGITS_AT)
AFTER_STATISTICS = 1 + len(_run.STATISTICS)


def asked_of(grads: Sequence[Tensor | None], options: Options, vocab: Any, *saved: Any) -> Asked:
    """The request to Backward. `grads` are the upstream gradients of the outputs, in their order;
    `vocab` is the number of the head's columns in this process; `saved` are the constants,
    row_state and the entropy."""
    constants, (row_state, entropy) = Constants(*saved[:-2]), saved[-2:]
    grad_loss, grad_lse, grad_target_logit, grad_logprob, grad_entropy = grads[:5]
    ids, grad_logits_at = constants.ids, grads[_LOGITS_AT]
    if grad_logits_at is not None:  # of log-probabilities: logits minus lse
        assert ids is not None
        ids = ids.reshape(grad_logits_at.shape)
        there = (ids >= 0) & (ids < (options.vocab_total or vocab))
        grad_logits_at = grad_logits_at.where(there, 0.0)
        if constants.id_offsets is None:
            of_rows = grad_logits_at.sum(-1)
        else:
            of_rows = _lists.sums(grad_logits_at, constants.id_offsets)  # [N]
            of_rows = of_rows.view(constants.target.shape)
        grad_lse = _difference(grad_lse, of_rows)
    if grad_logprob is not None:
        weighted = constants.token_weight is not None or constants.vocab_weight is not None
        if options.of_nll() and not weighted:  # logprob is then -loss
            grad_loss = _difference(grad_loss, grad_logprob)
        else:  # logprob is target_logit - lse
            grad_lse = _difference(grad_lse, grad_logprob)
            if grad_target_logit is not None:
                grad_logprob = grad_target_logit + grad_logprob
            grad_target_logit = grad_logprob
    if grad_loss is None:
        # An absent grad_loss would mean 1, and the 0 of a mean is NaN if it divides by 0.
        grad_loss = row_state.new_zeros(()).expand(row_state.shape[1])  # [N]
        options = options._replace(reduction=_abi.REDUCTION_NONE, normalizer=0.0)
        constants = constants._replace(normalizer=None)
    entropy = None if grad_entropy is None else entropy
    upstream = Upstream(
        row_state, entropy, grad_loss, grad_lse, grad_target_logit, grad_entropy, grad_logits_at
    )
    return Asked(upstream, options, constants)


def _difference(a: Tensor | None, b: Tensor) -> Tensor:
    return -b if a is None else a - b


def of_columns(grads: Sequence[Tensor | None]) -> bool:
    """Whether Backward needs the logits of every column. For an upstream gradient of target_logit
    alone it does not, and needs no kept state."""
    return any(g is not None for g, bit in zip(grads, _run.OUTPUTS) if bit != _run.TARGET_LOGIT)


def cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None or tensor.dtype is dtype else tensor.to(dtype)


def cast_bias(bias: Tensor | None, dtype: torch.dtype | None) -> Tensor | None:
    """The bias in the dtype, except that an f32 one stays f32 beside 16-bit inputs."""
    return bias if bias is None or bias.dtype is torch.float32 else cast(bias, dtype)


class MainGrad(NamedTuple):
    """The tensor to which grad_weight is added."""

    weight: Tensor
    buffer: Tensor  # [V, D] f32

    def added(self) -> None:
        # Megatron's optimizer reads this attribute
        if hasattr(self.weight, "grad_added_to_main_grad"):
            self.weight.grad_added_to_main_grad = True


_NONE: Any = (None,) * len(Constants._fields)
_SAVED = len(_run.INPUTS) + 2  # the last two tensors are row state and entropy; kept state follows
_CONSTANT = sum(_run.CONSTANTS) | _run.DETACHED


class Call:
    """A call of a loss, without the tensors that have gradients."""

    __slots__ = (
        "constants",
        "dtype",
        "in_place",
        "main_grad",
        "memory",
        "options",
        "statistics",
        "wanted",
    )

    def __init__(
        self, constants: Constants, options: Options, memory: int | None, wanted: int,
        dtype: torch.dtype | None = None, in_place: bool = False, main_grad: MainGrad | None = None,
    ) -> None:  # fmt: skip
        self.constants = constants
        self.options = options
        self.memory = memory
        self.wanted = wanted
        self.dtype = dtype  # of the products, under autocast
        self.in_place = in_place  # the gradient overwrites the logits
        self.statistics: Any = ()  # of a fused call, beside its one output
        self.main_grad = main_grad

    def release(self) -> Constants:
        """Returns the constants and drops this object's references to them, because the call lives
        as long as the loss, and the constants need not."""
        constants, self.constants = self.constants, _NONE
        return constants

    def fused(
        self, input: Tensor, weight: Tensor | None, bias: Tensor | None, hooked: bool,
        all_needed: bool = False,
    ) -> bool:  # fmt: skip
        """Whether the gradients are computed in the forward call. `hooked`: whether nothing may be
        kept. `all_needed`: as if every tensor required a gradient."""
        none = self.options.reduction == _abi.REDUCTION_NONE
        follows = self.wanted & _run.DIFFERENTIABLE and not self.wanted & _run.ALL_DETACHED
        if weight is None or none or follows:
            return False
        bounded = self.memory is not None and self.memory >= 0  # below 0 it is an _abi.Room
        if torch.float16 not in (input.dtype, weight.dtype) or hooked or bounded:
            return True
        return not self._keeps_f16(input, weight, bias, all_needed)

    def _keeps_f16(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, all_needed: bool
    ) -> bool:
        """Whether it is better to compute f16 gradients from kept state when the gradient scaler's
        factor is known; computed in the forward call, they would wait for it in f32. It is not if
        kept state takes more than twice the bytes of the f32 gradients, or if all gradients are f32
        (of f32 parameters under autocast) and need not wait."""
        given = [t for t in (input, weight, bias) if t is not None]
        needed = [t for t in given if all_needed or t.requires_grad]
        if all(t.dtype is not torch.float16 for t in needed):
            return False
        if not _kept.serves(self.dtype or input.dtype, input.device.type, self.options):
            return False
        waiting = sum(4 * t.numel() for t in needed)
        kept = 2 * self.constants.target.numel() * weight.shape[0]
        return (kept if self.memory is None else min(kept, -self.memory)) <= 2 * waiting

    def keep(
        self, input: Tensor, dtypes: tuple[torch.dtype | None, ...], device: str
    ) -> Keep | None:
        """The `keep` argument of Forward for the cast `input`, if gradients of `dtypes` follow."""
        serves = _kept.serves(input.dtype, device, self.options) and not _kept.hooked()
        if not serves and self.memory is None:
            return None
        main_grad = self.main_grad if dtypes[1] is not None else None
        return Keep(
            dtypes, main_grad and main_grad.buffer, bytes=None if serves else 0,
            of_entropy=self.of_entropy,
        )  # fmt: skip

    @property
    def of_entropy(self) -> bool:
        """Whether the entropy may get an upstream gradient."""
        return self.wanted & (_run.ENTROPY | _run.DETACHED) == _run.ENTROPY


NO_TRANSFORMS = (
    "torch.func transforms (grad, vmap, ..., is_grads_batched, vectorize=True) are not supported; "
    "use torch.autograd, or torch.nn.functional.cross_entropy inside them"
)


_is_batched: Any = torch._C._functorch.is_legacy_batchedtensor


def refuse_batches(upstream: Sequence[Tensor | None]) -> None:
    """Refuses a vmap over backward, whose tensors have no memory of their own."""
    if any(g is not None and _is_batched(g) for g in upstream):
        raise not_supported(NO_TRANSFORMS)


class Once(Function):
    """Marks gradients made under create_graph: differentiating one by anything that it depends on
    is an error, never a silent zero."""

    @staticmethod
    def forward(ctx: Any, anchors: int, *tensors: Tensor) -> Any:
        grads = tensors[anchors:]
        return grads if len(grads) > 1 else grads[0]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise not_supported(ONCE_ONLY)


def once(anchors: Sequence[Tensor | None], grads: Sequence[Tensor | None]) -> Any:
    """The gradients, marked. Autograd visits a node only on a path to the tensor that is
    differentiated by. So every input and upstream gradient from which the gradients were computed
    must be an anchor."""
    given = [g for g in grads if g is not None]
    if not given:
        return tuple(grads)
    needed = [t for t in anchors if t is not None and t.requires_grad]
    apply: Any = Once.apply
    with torch.enable_grad():
        marked = apply(len(needed), *needed, *given)
    rest = iter(marked if isinstance(marked, tuple) else (marked,))
    return tuple(None if g is None else next(rest) for g in grads)


def first_order(ctx: Any, gradients: Any, upstream: Sequence[Tensor | None]) -> Any:
    """Calls `gradients` on the upstream gradients, and marks the result under create_graph. The
    context's first saved tensors must be those that have gradients."""
    if not torch.is_grad_enabled():
        return gradients(ctx, *upstream)
    call = getattr(ctx, "call", None)  # an op has none, and no main_grad
    if call is not None and call.main_grad is not None and ctx.needs_input_grad[1]:
        raise not_supported(  # the sum in main_grad is outside the graph and cannot be marked
            'grad_accumulation="main_grad" adds outside the graph; allowed: backward without '
            "create_graph"
        )
    with torch.no_grad():
        grads = gradients(ctx, *upstream)
    return once((*ctx.saved_tensors[:3], *upstream), grads)


def scaled(grads: Sequence[Tensor | None], factor: Tensor) -> None:
    """Multiplies every gradient by the factor [] in place, on the CPU, unless the factor is 1."""
    value = factor.item()
    if value != 1:
        for grad in grads:
            if grad is not None:
                grad.mul_(value)


class FusedLoss(Function):
    """The loss [] of input, weight, bias, whose gradients are made with it."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, call: Call
    ) -> Tensor | None:
        ctx.call = call
        ctx.dtypes = _dtypes(ctx, input, weight, bias)
        constants = call.release()
        loss, call.statistics, ctx.grads = FusedLoss._made(
            ctx, input, weight, bias, constants, call.wanted
        )
        ctx.scale = None
        if call.main_grad is None and input.is_cuda:
            ctx.scale = _device.Scale(ctx.grads)
        ctx.save_for_backward(input, weight, bias, *constants)
        return loss

    @staticmethod
    def _made(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, constants: Constants,
        wanted: int,
    ) -> tuple[Tensor, Any, list[Tensor | None]]:  # fmt: skip
        """The loss, its statistics, and the gradients for an upstream gradient of 1."""
        call, dtypes = ctx.call, ctx.dtypes
        if call.dtype is not None:
            input, weight = cast(input, call.dtype), cast(weight, call.dtype)
            bias = cast_bias(bias, call.dtype)
        if torch.float16 in dtypes:
            dtypes = tuple(None if t is None else held_dtype(t) for t in dtypes)
        if call.main_grad is not None and dtypes[1] is not None:
            dtypes = (dtypes[0], torch.float32, dtypes[2])
        return _run.forward_backward(
            input, weight, bias, constants, call.options, call.memory, wanted, dtypes
        )

    @staticmethod
    def backward(ctx: Any, factor: Tensor) -> Any:
        return *first_order(ctx, FusedLoss._hand_out, (factor,)), None

    @staticmethod
    def _hand_out(ctx: Any, factor: Tensor) -> Sequence[Tensor | None]:
        refuse_batches((factor,))
        # The context gives up its references, so that .grad can take the tensors.
        grads: list[Tensor | None] | None
        grads, ctx.grads = ctx.grads, None
        if grads is None:
            input, weight, bias, *rest = ctx.saved_tensors
            *_, grads = FusedLoss._made(ctx, input, weight, bias, Constants(*rest), _run.LOSS)
        main_grad, scale, ctx.scale = ctx.call.main_grad, ctx.scale, None
        if main_grad is not None and grads[1] is not None:
            main_grad.buffer.addcmul_(grads[1], factor)
            main_grad.added()
            grads[1] = None
        if scale is not None:
            scale.by(factor)
        elif factor.is_cuda:
            if any(grad is not None for grad in grads):
                _device.Scale(grads).by(factor)
        else:
            scaled(grads, factor)
        if torch.float16 in ctx.dtypes:
            return [None if g is None else cast(g, t) for g, t in zip(grads, ctx.dtypes)]
        return grads


class Loss(Function):
    """The outputs in their order, None where not wanted, from input, weight and bias; without a
    weight, from the logits."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None, call: Call
    ) -> tuple[Tensor | None, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        x, w, b = input, weight, bias
        keep = None
        if weight is not None:
            if call.dtype is not None:
                x, w, b = cast(x, call.dtype), cast(weight, call.dtype), cast_bias(b, call.dtype)
            keep = call.keep(x, _dtypes(ctx, input, weight, bias), x.device.type)
        results, row_state, kept, _ = _run.forward(
            x, w, b, call.constants, call.options, call.memory, call.wanted | _run.ROW_STATE, keep
        )
        entropy, *constants = results[4:AFTER_STATISTICS]
        if entropy is not None and not call.of_entropy:
            constants.append(entropy)
            entropy = None
        if call.wanted & _CONSTANT:
            ctx.mark_non_differentiable(*(t for t in constants if t is not None))
        saved = (input, weight, bias, *call.release(), row_state, entropy)
        if kept is None:
            ctx.kept = None
            ctx.save_for_backward(*saved)
        else:
            ctx.kept = [kept.state]
            ctx.save_for_backward(*saved, kept.columns, kept.rows)
        return results

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> Any:
        return *first_order(ctx, Loss._gradients, upstream), None

    @staticmethod
    def _gradients(ctx: Any, *upstream: Tensor | None) -> Sequence[Tensor | None]:
        """Kept state can be used by one Backward at a time; another thread's runs without it. It
        cannot be used after a Backward with the entropy or in f16, which overwrites it with dz."""
        refuse_batches(upstream)
        state = taken(ctx.kept) if ctx.kept and of_columns(upstream) else None
        if state is None:
            return recompute(ctx, *upstream)
        columns, rows = ctx.saved_tensors[_SAVED:]
        consume = _kept.consumes(columns.dtype is torch.float16, upstream[4] is not None)
        grads = recompute(ctx, *upstream, kept=Kept(columns, rows, state, consume))
        if consume:
            columns.untyped_storage().resize_(0)
        else:
            ctx.kept.append(state)
        return grads


def taken(unused: list[Any]) -> Any:
    """Takes the list's element, or None: only one of two threads gets it."""
    try:
        return unused.pop()
    except IndexError:
        return None


def _dtypes(
    ctx: Any, input: Tensor, weight: Tensor | None, bias: Tensor | None
) -> tuple[torch.dtype | None, ...]:
    """The dtypes of the gradients that are needed."""
    needs = ctx.needs_input_grad
    return (
        input.dtype if needs[0] else None,
        weight.dtype if weight is not None and needs[1] else None,
        bias.dtype if bias is not None and needs[2] else None,
    )


def recompute(
    ctx: Any, *upstream: Tensor | None, kept: Kept | None = None
) -> Sequence[Tensor | None]:
    """Runs Backward from the forward call's inputs, its row state and what it kept."""
    call = ctx.call
    main_grad = call.main_grad if ctx.needs_input_grad[1] else None
    saved = ctx.saved_tensors
    input, weight, bias = saved[:3]
    if call.in_place:
        torch.autograd.graph.increment_version(input)
    vocab = None if weight is None else weight.shape[0]
    asked = asked_of(upstream, call.options, vocab, *saved[3:_SAVED])
    grads = _run.backward(
        cast(input, call.dtype),
        None if weight is None else cast(weight, call.dtype),
        cast_bias(bias, call.dtype),
        asked.constants,
        asked.options,
        call.memory,
        asked.upstream,
        _dtypes(ctx, input, weight, bias),
        in_place=call.in_place,
        main_grad=None if main_grad is None else main_grad.buffer,
        kept=kept,
    )
    if main_grad is not None:
        main_grad.added()
    return grads
