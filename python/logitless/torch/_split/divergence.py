# SPDX-License-Identifier: Apache-2.0
"""A divergence of two heads whose vocabulary is split over a process group. Every rank holds some
rows of both heads. The hidden states of both and the targets are the same on all ranks, or split
along a dimension of tokens; then, as in rule.py, they are gathered first, and grad_input's sums are
sent to the tokens' owners.

    forward    each rank's states of both heads, one all-gather of 16 to 28 bytes a token and rank,
               which every rank folds in the ranks' order; then each rank's sums over its columns,
               one all-gather of 4 to 12 bytes, added in that order
    backward   each rank's Backward on its columns, from the global states and the global mean that
               dz subtracts: its grad_weight is done, its grad_input is a part, exchanged as rule.py
               has it

On CUDA, without `memory` and hooks on saved tensors, the first Forward keeps the rank's logits of
both heads in f32 until Backward, 8 N V / P bytes. Else states, sums and gradients each compute them
anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from logitless import _abi, _divergence
from logitless._abi import Divergence, Options
from logitless._errors import not_supported
from logitless.torch import _divergence_ops as ops
from logitless.torch import _divergence_run as run
from logitless.torch import _ops, _run
from logitless.torch._autograd import cast, first_order
from logitless.torch._device import Between
from logitless.torch._dispatch import compose, define
from logitless.torch._divergence_run import BITS, OF_TENSORS, SLOPE, Inputs
from logitless.torch._split import combine, exchange, overlapped, ranks, rule, shards, sums
from logitless.torch._split.depends import depending
from logitless.torch._split.given import Split
from logitless.torch._split.shards import Shard
from logitless.torch._split.sums import Tokens


class Asked(NamedTuple):
    """A call without its tensors."""

    options: Divergence
    memory: int | None
    dtype: torch.dtype | None  # of the products, under autocast
    wanted: int

    def bits(self, *names: str) -> int:
        return self.wanted & sum([BITS[name] for name in names])

    def needs_logprob(self) -> bool:
        return bool(self.options.label_weight or self.bits("logprob"))


def refuse(split: Split) -> None:
    """Refuses the fields of a Split that a divergence does not support."""
    if split.blocks is not None:
        raise not_supported(
            f"Split.blocks is {split.blocks!r}; allowed for linear_divergence: None, for its sums "
            "are those of each rank's columns"
        )


class _Own(NamedTuple):
    """A rank's own columns. If it has none, one made-up column, so that this rank raises the same
    errors as the others."""

    inputs: Inputs
    start: int
    empty: bool


def of_columns(inputs: Inputs, shard: Shard) -> _Own:
    """The rows of both heads that are columns of the vocabulary; padding follows them."""
    weight = inputs.weight
    padding = max(weight.shape[0] - (shard.total - shard.start), 0)
    left = weight.shape[0] - padding
    empty = left <= 0

    def rows(t: Tensor | None) -> Tensor | None:
        if t is None or (not padding and not empty):
            return t
        return t.new_zeros(1, *t.shape[1:]) if empty else t[: t.shape[0] - padding]

    def columns(t: Tensor | None) -> Tensor | None:
        if t is None or (not padding and not empty):
            return t
        return t.new_zeros(*t.shape[:-1], 1) if empty else t[..., : t.shape[-1] - padding]

    own = _run.replaced(
        inputs, weight=rows(weight), bias=rows(inputs.bias),
        teacher_weight=rows(inputs.teacher_weight), teacher_bias=rows(inputs.teacher_bias),
        teacher_logits=columns(inputs.teacher_logits),
    )  # fmt: skip
    return _Own(own, 0 if empty else shard.start, empty)


_OF_TOKENS = ("target", "token_weight", "temperature", "teacher_temperature")


def _dtypes_of(inputs: Inputs, shard: Shard) -> dict[str, torch.dtype | None]:
    """The dtypes of the tensors that _gathered gathers; and whether there is a target, which the
    states depend on."""
    names: tuple[str, ...] = () if shard.sequence_dim is None else ("teacher_input",)
    if shard.local_tokens:
        names = (*names, *_OF_TOKENS)
    given = {name: getattr(inputs, name) for name in names}
    made = {name: None if t is None else t.dtype for name, t in given.items()}
    return {"target": None if inputs.target is None else torch.int64, **made}


def _gathered(inputs: Inputs, asked: Asked, shard: Shard) -> Inputs:
    """The inputs of all tokens, from each rank's own. A teacher's logits are of all tokens
    already."""
    dim = shard.sequence_dim
    if dim is None:
        return inputs
    shape, made = inputs.input.shape[:-1], {}
    for name in ("input", "teacher_input"):
        rows = getattr(inputs, name)
        if rows is not None:
            made[name] = exchange.gather_tokens(cast(rows, asked.dtype), shard, dim)
    for name in _OF_TOKENS if shard.local_tokens else ():
        values = getattr(inputs, name)
        if values is not None:
            whole = exchange.gather_tokens(values.view(shape), shard, dim)
            made[name] = whole.reshape(-1) if values.dim() == 1 else whole
    return _run.replaced(inputs, **made)


def _arguments(own: _Own, asked: Asked, shard: Shard) -> tuple[Any, ...]:
    options = _run.replaced(asked.options, vocab_start=own.start, vocab_total=shard.total)
    wanted = asked.wanted
    if own.empty or own.inputs.weight.shape[0] == shard.total:
        wanted &= ~run.KEEP
    return ops.arguments(own.inputs, options, asked.memory, asked.dtype, wanted)


Kept = tuple[Tensor | None, Tensor | None]


def _own_states(shard: Shard, given: Inputs, own: _Own, asked: Asked) -> tuple[Tensor, Kept]:
    """This rank's states [1, k, N], and what is kept of its logits; without columns, the states of
    an empty shard."""
    shards.check_rows(shard, own.inputs.weight, (given.weight, given.bias))
    arguments = _arguments(own, asked, shard)
    states, *kept = torch.ops.logitless.divergence_states(*arguments)
    if own.empty:
        names = run.rows_of_states(given.target is not None, asked.wanted)
        none = [torch.full_like(s, _NONE.get(n, 0.0)) for n, s in zip(names, states)]
        states = depending(torch.stack(none), states)
    keeps = arguments[ops._WANTED] & run.KEEP
    return states.unsqueeze(0), (kept[0], kept[1]) if keeps else (None, None)


_NONE = dict.fromkeys(
    ("row_reference", "teacher_row_reference", "target_logit"), -float("inf")
)  # of a shard without columns


def _own_sums(shard: Shard, own: _Own, asked: Asked, states: Tensor, kept: Kept) -> Tensor:
    """This rank's sums [1, k, N]; zeros without columns."""
    made: Tensor = torch.ops.logitless.divergence_sums(
        *_arguments(own, asked, shard), states, *kept
    )
    return (depending(torch.zeros_like(made), made) if own.empty else made).unsqueeze(0)


class _Whole(NamedTuple):
    """The whole vocabulary's states and results."""

    states: Tensor  # [4, N]
    found: dict[str, Tensor]  # the student's logprob and the entropies that are asked for, [N]


def _folded(states: Tensor, tokens: Tokens, shard: Shard, asked: Asked, has_target: bool) -> _Whole:
    """The whole vocabulary's states and results, from the shards' states [P, k, N]."""
    place = {name: i for i, name in enumerate(run.rows_of_states(has_target, asked.wanted))}
    made, found = [], {}
    options = Options(
        reduction=_abi.REDUCTION_NONE, ignore_index=asked.options.ignore_index,
        vocab_total=shard.total,
    )  # fmt: skip
    for head in ("", "teacher_"):
        entropy, wanted = f"{head}entropy", 0
        names = [f"{head}row_reference", f"{head}row_log_sum"]
        names.append("target_logit" if has_target else names[0])
        if entropy in place:
            names.append(entropy)
            wanted |= _run.ENTROPY
        given = wanted
        if not head and asked.needs_logprob():
            wanted |= _run.LOGPROB
        every = torch.stack([states[:, place[name]] for name in names], 1)  # [P, 3 or 4, N]
        row_state, outputs = combine.combine(
            every, None, tokens._replace(normalizer=None), options, given, wanted
        )
        made.append(row_state)
        outputs_by_name = dict(zip(_run.OUTPUTS.values(), outputs))
        found.update({
            f"{head}{name}": made_of for name, made_of in outputs_by_name.items()
            if made_of is not None
        })  # fmt: skip
    return _Whole(torch.cat(made), found)


def _losses(divergence: Tensor, found: dict[str, Tensor], given: Inputs, asked: Asked,
            shard: Shard) -> Tensor:  # fmt: skip
    """The losses [N] of the tokens, 0 for ignored ones."""
    losses = divergence
    if asked.options.label_weight:
        losses = losses - asked.options.label_weight * found["logprob"]
    if given.token_weight is not None:
        losses = losses * given.token_weight
    if given.target is None:
        return losses
    target = given.target.long()
    outside = (target < 0) | (target >= shard.total)  # on the CPU an error already
    losses = torch.where(outside, float("nan"), losses)
    return torch.where(target == asked.options.ignore_index, 0.0, losses)


def _tokens(given: Inputs, asked: Asked) -> tuple[Tokens, Asked]:
    """The Tokens and options for Combine. Without a target every token counts; then the target is
    made up, and never ignored."""
    if given.target is not None:
        return Tokens(given.target, given.token_weight, None, given.normalizer), asked
    target = given.input.new_zeros(given.tokens(), dtype=torch.int64)
    asked = asked._replace(options=_run.replaced(asked.options, ignore_index=-1))
    return Tokens(target, given.token_weight, None, given.normalizer), asked


class ShardedDivergence(Function):
    """The autograd rule: the wanted outputs, in their order."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, rest: tuple[Any, ...],
        asked: Asked, shard: Shard,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.asked, ctx.shard = asked, shard
        ctx.set_materialize_grads(False)
        inputs = Inputs(input, weight, bias, *rest)
        ctx.shape, ctx.dtype = input.shape, input.dtype
        facts: Sequence[int] = ()
        if shards.waits(input):
            rows, _ = shards.columns(shard, weight, None)
            teacher = 0 if inputs.teacher_input is None else inputs.teacher_input.shape[-1]
            facts = exchange.facts_of(
                shard, input, asked.dtype, rows, asked.wanted, _dtypes_of(inputs, shard),
                teacher=teacher,
            )  # fmt: skip
        if shard.sequence_dim is not None:
            exchange.together(shard, input, facts, lambda: None)  # sizes depend on these
            inputs, facts = _gathered(inputs, asked, shard), ()
        given = inputs.flat()
        own = of_columns(given, shard)
        states, kept = exchange.together(shard, input, facts, _own_states, shard, given, own, asked)
        tokens, of_tokens = _tokens(given, asked)
        has_target = given.target is not None
        whole = _folded(exchange.all_gather(states, shard), tokens, shard, of_tokens, has_target)
        parts = exchange.together(
            shard, input, (), _own_sums, shard, own, asked, whole.states, kept
        )
        total = sums.ordered_sum(exchange.all_gather(parts, shard))  # [k, N]
        made = dict(zip(run.rows_of_sums(asked.wanted), total))
        found = {**whole.found, **made}
        found["loss"] = _losses(made["divergence_sum"], found, given, asked, shard)
        shape = inputs.input.shape[:-1]
        outputs = [
            rule._as_result(found[name].reshape(shape), shard, shard.local_tokens)
            for name, bit in BITS.items()
            if asked.wanted & bit
        ]
        of_loss: Any = of_tokens.options
        if of_loss.reduction != _abi.REDUCTION_NONE:
            outputs[0] = sums.reduced(outputs[0].reshape(-1), tokens, of_loss).clone()
        ctx.save_for_backward(*inputs, whole.states, made.get("slope_sum"), *kept)
        ctx.mark_non_differentiable(*outputs[1:])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> Any:
        if upstream[0] is None:
            return (None,) * 6
        return *first_order(ctx, ShardedDivergence._gradients, upstream), None, None, None

    @staticmethod
    def _gradients(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        asked, shard = ctx.asked, ctx.shard
        if ranks.ON and shard.size > 1:
            ranks.before_backward(upstream[:1], ctx.needs_input_grad[0], ctx.saved_tensors, shard)
        *saved, states, slope_mean, columns, rows = ctx.saved_tensors
        inputs = Inputs(*saved)
        wanted = sum(bit for bit, need in zip(OF_TENSORS, ctx.needs_input_grad) if need)
        given, grad_loss = inputs.flat(), upstream[0]
        if shard.local_tokens and grad_loss is not None:
            grad_loss, given, asked = _of_all(grad_loss, given, asked, shard, ctx.shape[:-1])
        own, needs = of_columns(given, shard), ctx.needs_input_grad
        of: Any = (
            given,
            own,
            asked._replace(wanted=wanted),
            grad_loss,
            states,
            slope_mean,
            columns,
            rows,
        )
        grad_input = None
        if overlapped.serves(shard, given.input, needs[0]):
            of = (*of, overlapped.where(shard, ctx.shape, ctx.dtype))
            made = _own_gradients(shard, *of)
            grad_input = made[0].view(ctx.shape)
        else:
            made = exchange.together(shard, inputs.input, (), _own_gradients, shard, *of)
            if needs[0]:
                grad_input = exchange.reduce_grad_input(made[0], shard, ctx.shape, ctx.dtype)
        grad_weight, grad_bias = (g if need else None for g, need in zip(made[1:], needs[1:]))
        return (
            grad_input, rule._padded(grad_weight, inputs.weight),
            rule._padded(grad_bias, inputs.bias),
        )  # fmt: skip


def _of_all(
    grad_loss: Tensor, given: Inputs, asked: Asked, shard: Shard, shape: torch.Size
) -> tuple[Tensor, Inputs, Asked]:
    """The upstream gradient of all tokens [N], for a loss that is not reduced, gathered from those
    of each rank's own tokens, which have this `shape`."""
    tokens, of_tokens = _tokens(given, asked)
    of_loss: Any = of_tokens.options
    if of_loss.reduction == _abi.REDUCTION_MEAN:
        grad_loss = sums.mean_of(grad_loss, tokens, of_loss)
    dim = shard.sequence_dim
    assert dim is not None
    whole = exchange.gather_tokens(grad_loss.expand(shape), shard, dim).reshape(-1)
    options = _run.replaced(asked.options, reduction=_abi.REDUCTION_NONE, normalizer=0.0)
    return whole, given._replace(normalizer=None), asked._replace(options=options)


def _own_gradients(
    shard: Shard, given: Inputs, own: _Own, asked: Asked, grad_loss: Tensor, states: Tensor,
    slope_mean: Tensor | None, kept: Tensor | None, kept_rows: Tensor | None,
    where: tuple[Any, ...] = (),
) -> Sequence[Tensor]:  # fmt: skip
    """The gradients of input, weight and bias; zeros of a rank without columns. With `where`, that
    of the input is added over the ranks."""
    call = (*_arguments(own, asked, shard), grad_loss, states, slope_mean, kept, kept_rows)
    logitless: Any = torch.ops.logitless
    made: Sequence[Tensor] = (
        logitless.divergence_backward_over_ranks(*call, own.empty, *where)
        if where
        else logitless.divergence_shard_backward(*call)
    )
    if not own.empty:
        return made
    like = (made[0], given.weight, made[2] if given.bias is None else given.bias)
    zeros = [
        depending(torch.zeros_like(t), g) if asked.wanted & bit else g
        for t, g, bit in zip(like, made, OF_TENSORS)
    ]
    return (made[0], *zeros[1:]) if where else zeros


def _over_ranks(*args: Any) -> tuple[Tensor, ...]:
    *call, empty = args[: -overlapped.BEHIND]
    backward: Any = run.shard_backward
    inputs, options, memory, dtype, wanted = ops._split(call)
    given = call[ops._WANTED + 1 :]

    def own(part: Tensor | None, between: Between) -> tuple[Tensor, ...]:
        if not empty:
            made = backward(
                inputs, options, memory, dtype, wanted, *given, part=part, between=between
            )
            return ops._filled(made, inputs.input)
        first, *others = ops._shard_backward_fake(*call)
        return overlapped.without_columns(first if part is None else part, between), *others

    return overlapped.exchanged(inputs.input, args[-overlapped.BEHIND :], own)


def _over_ranks_fake(*args: Any) -> tuple[Tensor, ...]:
    *call, _ = args[: -overlapped.BEHIND]
    _, *others = ops._shard_backward_fake(*call)
    return overlapped.result_like(args[0], args[-overlapped.BEHIND :]), *others


# The gradients of a shard, as divergence_shard_backward has them, with that of the input added over
# the ranks while that of the weight is made (overlapped.py).
define(
    f"divergence_backward_over_ranks({ops.OF_SHARD}, bool empty, {overlapped.GROUP}) "
    f"-> ({ops._GRADS})",
    _over_ranks, _over_ranks_fake,
)  # fmt: skip


def _keeps_on(input: Tensor) -> bool:
    return input.is_cuda


def divergence(
    inputs: Inputs, options: Divergence, memory: int | None, wanted: int,
    dtype: torch.dtype | None, shard: Shard,
) -> Sequence[Tensor]:  # fmt: skip
    """The outputs that are `wanted`, in their order."""
    bits = wanted
    needed = [
        torch.is_grad_enabled() and t is not None and t.requires_grad
        for t in (inputs.input, inputs.weight, inputs.bias)
    ]
    if any(needed):
        bits |= sum(bit for bit, need in zip(OF_TENSORS, needed) if need)
        bits |= SLOPE if _divergence.subtracts_mean(options) else 0
        # With all logits kept, a rank computes them once, not three times.
        if memory is None and shard.size > 1 and _keeps_on(inputs.input) and not _ops.hooked():
            bits |= run.KEEP
    shard = _run.replaced(shard, of_input=needed[0], of_any=any(needed))
    asked = Asked(options, memory, dtype, bits)
    if ranks.ON and shard.size > 1:
        ranks.before_divergence(inputs, asked, shard)
    if torch.compiler.is_compiling():
        return _traced(inputs, asked, shard)
    apply: Any = ShardedDivergence.apply
    outputs: Sequence[Tensor] = apply(*inputs[:3], tuple(inputs[3:]), asked, shard)
    return outputs


def _sharded_divergence(*args: Any) -> list[Tensor]:
    inputs, options, memory, dtype, wanted = ops._split(args)
    group, rank, size, dim, local, reduces, ordered, of_input, of_any, _ = args[ops._WANTED + 1 :]
    shard = Shard(
        group, rank, size, options.vocab_start, options.vocab_total, dim, local, reduces, ordered,
        of_input=of_input, of_any=of_any,
    )  # fmt: skip
    apply: Any = ShardedDivergence.apply
    asked = Asked(options, memory, dtype, wanted)
    return list(apply(*inputs[:3], tuple(inputs[3:]), asked, shard))


# For torch.compile, like the other losses' (rule.py).
compose(
    f"sharded_divergence({ops._TENSORS}, {ops._OPTIONS}, int wanted, str group, int rank, "
    "int size, int? sequence_dim, bool local_tokens, bool reduce_input_grad, bool ordered, "
    "bool of_input, bool of_any, str revision) -> Tensor[]",
    _sharded_divergence,
)


def _traced(inputs: Inputs, asked: Asked, shard: Shard) -> Sequence[Tensor]:
    options = _run.replaced(asked.options, vocab_start=shard.start, vocab_total=shard.total)
    made: Sequence[Tensor] = torch.ops.logitless.sharded_divergence(
        *ops.arguments(inputs, options, asked.memory, asked.dtype, asked.wanted), shard.group,
        shard.rank, shard.size, shard.sequence_dim, shard.local_tokens, shard.reduce_input_grad,
        shard.ordered, shard.of_input, shard.of_any, rule._REVISION,
    )  # fmt: skip
    return made
