# SPDX-License-Identifier: Apache-2.0
"""The loss with a vocabulary that is split over a process group. Every rank holds some rows of the
weight. Hidden states and targets are the same on all ranks, or the hidden states are split along a
dimension of tokens.

    forward    where gradients follow, the targets' logits first, exchanged by 4 bytes a token and
               rank: what each rank's Forward keeps of its columns is relative to them. Then each
               rank's Forward; one all-gather of the rows' states, 12 bytes a token and rank, and 4
               more for each of entropy, smoothing and the like, and for each chosen column, whose
               logit is the ranks' largest; every rank folds these in the ranks' order (combine.py)
    backward   each rank's Backward on its columns, from the global states and what it has kept: its
               grad_weight is done, its grad_input is a part in f32, which the ranks exchange and
               add up in their order
    own        if each rank has its own tokens and loss (Shard.own: data parallelism), hidden states
               and targets are gathered first, grad_input's sums go to the tokens' owners, and
               grad_weight is that of the mean of the ranks' losses, like FSDP's
    errors     on the CPU the ranks tell each other before they exchange, and raise the same one

Collectives are torch's functional ones, which torch.compile traces.
"""

from __future__ import annotations

import pathlib
import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from logitless import _abi
from logitless._abi import Options
from logitless._errors import argument, not_supported, wrong_device
from logitless._statistics import names_where
from logitless.torch import _autograd, _kept, _ops, _run
from logitless.torch._autograd import Call, asked_of, cast, cast_bias, first_order, taken
from logitless.torch._device import allows_tf32
from logitless.torch._dispatch import compose
from logitless.torch._route import refuse_layouts
from logitless.torch._run import Constants
from logitless.torch._split import blocks, combine, exchange, overlapped, ranks, shards, sums
from logitless.torch._split.depends import depending
from logitless.torch._split.shards import Shard
from logitless.torch._split.sums import Tokens

_DIFFERENTIABLE = tuple(
    bit for bit in _run.OUTPUTS if bit & (_run.LOSS | _run.DIFFERENTIABLE)
)  # the loss, the statistics with a gradient, and the logits at ids
_ENTROPY = list(_run.OUTPUTS).index(_run.ENTROPY)
_CONSTANTS = len(Constants._fields)


def _as_result(x: Tensor, shard: Shard, local_tokens: bool) -> Tensor:
    """A result that the caller may change in place; with `local_tokens` only the rank's own
    tokens."""
    if local_tokens and shard.sequence_dim is not None:
        x = exchange.own_tokens(x, shard, shard.sequence_dim)
    return x.clone()


def _flat(constants: Constants) -> Constants:
    """The constants with targets and token weights [N]."""
    target, token_weight, vocab_weight, normalizer, temperature, ids, _ = constants
    return Constants(
        target.reshape(-1),
        None if token_weight is None else token_weight.reshape(-1),
        vocab_weight,
        normalizer,
        temperature,
        _run.matrix(ids),
    )


class ShardedLoss(Function):
    """The autograd rule: the outputs in the order of _run.OUTPUTS, None where not wanted."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, call: Call, shard: Shard
    ) -> tuple[Tensor | None, ...]:
        ctx.call, ctx.shard = call, shard
        ctx.set_materialize_grads(False)
        x, w, b = input, weight, bias
        if call.dtype is not None:
            x, w, b = cast(x, call.dtype), cast(w, call.dtype), cast_bias(b, call.dtype)
        constants, options, wanted = call.release(), call.options, call.wanted
        if options.label_smoothing > 0:
            wanted |= _run.WEIGHTED
        dim, shape = shard.sequence_dim, constants.target.shape
        counted = constants
        facts: Sequence[int] = ()
        if shards.waits(x):
            facts = exchange.facts_of(
                shard, input, call.dtype, w, wanted, _dtypes_of(constants, shard),
                _columns(constants),
            )  # fmt: skip
        if dim is not None:
            # The sizes of what is gathered depend on these facts.
            exchange.together(shard, x, facts, lambda: None)
            facts = ()
            x = exchange.gather_tokens(x, shard, dim)
            if shard.local_tokens:
                constants = _gathered(constants, shard, dim)
                shape = constants.target.shape
        rows = x.reshape(-1, x.shape[-1])  # [N, D]
        constants = _flat(constants)
        if shard.of_any:
            wanted |= _followed_by(ctx.needs_input_grad, (x, w, b), (weight, bias), shard)
            wanted |= _run.OF_ENTROPY if call.of_entropy else 0
        given = (w, b)
        w, b = shards.columns(shard, w, b)
        of = (shard, given, w, blocks.blocks_of(shard, rows, w, b, constants, call, wanted))
        anchor = None
        if shard.keeps:
            own = exchange.together(shard, rows, facts, blocks.local_targets, *of)
            anchor, facts = exchange.all_gather(own, shard).amax(0), ()  # [N]
        local, own_indices, kept = exchange.together(
            shard, rows, facts, blocks.local_states, *of, anchor
        )
        states = exchange.all_gather(local, shard)  # [P b, m, N]
        indices = None
        if call.wanted & (_run.ARGMAX | _run.TOP):
            indices = exchange.all_gather(own_indices, shard)  # [P b, j, N]
        tokens = Tokens(*constants[:4])
        whole, local_tokens = options, shard.local_tokens and dim is not None
        if local_tokens:  # the loss is reduced over the rank's own tokens
            whole = options._replace(reduction=_abi.REDUCTION_NONE, normalizer=0.0)
            tokens = tokens._replace(normalizer=None)
        row_state, found = combine.combine(
            states, indices, tokens, whole, wanted, call.wanted, constants.ids
        )
        entropy = found[_ENTROPY]
        outputs = [
            t
            if t is None or t.dim() == 0
            else _as_result(t.view((*shape, *t.shape[1:])), shard, local_tokens)
            for t in found
        ]
        if local_tokens:
            counted = _flat(counted) if shard.own else constants
            outputs[0] = _reduced(outputs[0], Tokens(*counted[:4]), options)
        gathered_rows = None if dim is None else rows
        keeping = [t for pair in kept for t in pair or (None, None)]
        ctx.save_for_backward(
            input, weight, bias, *constants, row_state, entropy, gathered_rows, *keeping
        )
        ctx.unused = [_tf32(rows)]  # kept state can be used by one Backward at a time
        ctx.shape, ctx.dtype, ctx.whole = input.shape, input.dtype, shape
        constant = [
            t
            for t, bit in zip(outputs, _run.OUTPUTS)
            if t is not None and bit not in _DIFFERENTIABLE
        ]
        detached = outputs[_ENTROPY] if call.wanted & _run.DETACHED else None
        if detached is not None:
            constant.append(detached)
        ctx.mark_non_differentiable(*constant)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> Any:
        return *first_order(ctx, ShardedLoss._gradients, upstream), None, None

    @staticmethod
    def _gradients(ctx: Any, *upstream: Tensor | None) -> tuple[Tensor | None, ...]:
        call, shard, needs = ctx.call, ctx.shard, ctx.needs_input_grad
        if ranks.ON and shard.size > 1:
            ranks.before_backward(upstream, needs[0], ctx.saved_tensors, shard)
        input, weight, bias, *rest = ctx.saved_tensors
        constants, rest = Constants(*rest[:_CONSTANTS]), rest[_CONSTANTS:]
        (row_state, entropy, rows), kept = rest[:3], rest[3:]
        options: Options = call.options
        grads: Sequence[Tensor | None] = upstream
        if shard.local_tokens:
            grads = _whole_upstream(upstream, call.wanted, constants, options, shard, ctx.whole)
            constants = constants._replace(normalizer=None)
            options = options._replace(reduction=_abi.REDUCTION_NONE, normalizer=0.0)
        given, options, constants = asked_of(
            grads, options, shard.total, *constants, row_state, entropy
        )
        w, b = shards.columns(shard, cast(weight, call.dtype), cast_bias(bias, call.dtype))
        if rows is None:
            rows = cast(input, call.dtype).reshape(-1, input.shape[-1])
        made = _followed_by(needs, (rows, w, b), (weight, bias), shard)
        state = taken(ctx.unused)
        serves = state == _tf32(rows) and _autograd.of_columns(upstream)
        of = ((rows, w, b, *constants), options, call.memory, made, given, kept if serves else None)
        grad_input = None
        if overlapped.serves(shard, rows, needs[0]):
            grad_input, *own = overlapped.gradients(shard, ctx.shape, ctx.dtype, *of)
            weights, biases = ([own[0]], [own[1]]) if w.shape[0] else ([], [])
        else:
            parts, weights, biases = exchange.together(
                shard, rows, (), blocks.local_gradients, shard, *of
            )
            if needs[0]:
                part = sums.tree_of(parts)
                grad_input = exchange.reduce_grad_input(part, shard, ctx.shape, ctx.dtype)
        if state is not None:
            ctx.unused.append(state)
        of_others = (rows, w, b, *constants, *given)
        grad_weight = _of_rows(weights, weight, needs[1], of_others, shard)
        return grad_input, grad_weight, _of_rows(biases, bias, needs[2], of_others, shard)


def _followed_by(
    needs: Sequence[bool], tensors: Sequence[Tensor | None],
    parameters: tuple[Tensor, Tensor | None], shard: Shard,
) -> int:  # fmt: skip
    """The bits of _run.followed_by: the input's gradient is computed in f32, the others as
    _made_dtype says. `parameters` are weight and bias before autocast's cast, `tensors` the
    operands after it."""
    made = [_made_dtype(p if n else None, shard) for p, n in zip(parameters, needs[1:])]
    return _run.followed_by((torch.float32 if needs[0] else None, *made), tensors)


def _of_rows(
    parts: Sequence[Tensor], like: Tensor | None, needed: bool, inputs: Sequence[Tensor | None],
    shard: Shard,
) -> Tensor | None:  # fmt: skip
    """The gradient of weight or bias from those of its blocks. Zeros on a rank without columns,
    where other ranks use the `inputs`."""
    if like is None or not needed:
        return None
    if not parts:
        return depending(torch.zeros_like(like), *inputs)
    whole = parts[0] if len(parts) == 1 else torch.cat(list(parts))
    return _padded(_mean(whole, shard), like)


def _made_dtype(grad: Tensor | None, shard: Shard) -> torch.dtype | None:
    """The dtype in which the core computes this gradient: f32 if the ranks' gradients are averaged,
    because a mean is rounded once, after the sum."""
    if grad is None:
        return None
    return torch.float32 if shard.own else grad.dtype


def _mean(grad: Tensor, shard: Shard) -> Tensor:
    """The gradient of the mean of the ranks' losses; `grad` is the sum over the tokens of this
    rank's group."""
    if shard.divisor != 1:
        grad = grad.div_(shard.divisor)
    return exchange.all_reduce(grad, shard.replicas) if shard.replicas else grad


def _padded(grad: Tensor | None, like: Tensor | None) -> Tensor | None:
    """The gradient with zeros for rows that are padding, in the dtype of `like`."""
    if grad is None or like is None:
        return None
    missing = like.shape[0] - grad.shape[0]
    if missing:
        grad = torch.cat((grad, grad.new_zeros(missing, *grad.shape[1:])))
    return cast(grad, like.dtype)


def _gathered(constants: Constants, shard: Shard, dim: int) -> Constants:
    """The constants of all tokens, from each rank's own. Temperatures are [N], of own tokens."""
    target, token_weight, vocab_weight, normalizer, temperature, ids, _ = constants

    def whole(own: Tensor | None) -> Tensor | None:
        return None if own is None else exchange.gather_tokens(own, shard, dim)

    if temperature is not None:
        temperature = exchange.gather_tokens(temperature.view(target.shape), shard, dim).reshape(-1)
    target = exchange.gather_tokens(target, shard, dim)
    token_weight, ids = whole(token_weight), whole(ids)
    return Constants(target, token_weight, vocab_weight, normalizer, temperature, ids)


def _dtypes_of(constants: Constants, shard: Shard) -> dict[str, torch.dtype | None]:
    """The dtypes of the constants that _gathered gathers."""
    if shard.sequence_dim is None or not shard.local_tokens:
        return {}
    names = ("target", "token_weight", "temperature", "ids")
    given = {name: getattr(constants, name) for name in names}
    return {name: None if t is None else t.dtype for name, t in given.items()}


def _columns(constants: Constants) -> int:
    """The number of a token's chosen columns."""
    return 0 if constants.ids is None else constants.ids.shape[-1]


def _reduced(losses: Tensor | None, tokens: Tokens, options: Options) -> Tensor | None:
    if losses is None or options.reduction == _abi.REDUCTION_NONE:
        return losses
    return sums.reduced(losses.reshape(-1), tokens, options)


def _whole_upstream(
    upstream: Any, wanted: int, constants: Constants, options: Options, shard: Shard,
    shape: torch.Size,
) -> list[Tensor | None]:  # fmt: skip
    """The upstream gradients of all tokens [N] or [N, K], if a rank's outputs are those of its own
    tokens, so that ranks have different ones. That of the loss is expanded as if the loss were not
    reduced. It takes one collective, whichever outputs a rank has used."""
    dim = shard.sequence_dim
    assert dim is not None
    length = list(shape)
    length[dim] //= shard.size
    grads = list(upstream)
    if grads[0] is not None and options.reduction == _abi.REDUCTION_MEAN:
        tokens = Tokens(*constants[:4])
        if shard.own:
            tokens = tokens._replace(target=exchange.own_tokens(tokens.target, shard, dim))
        grads[0] = sums.mean_of(grads[0], tokens, options)
    detached = _run.ENTROPY if wanted & _run.DETACHED else 0
    asked = [bit for bit in _DIFFERENTIABLE if wanted & bit & ~detached]
    none = constants.target.new_zeros((), dtype=torch.float32)
    planes, sizes = [], []  # one per output, and one per chosen column
    for bit, grad in zip(_run.OUTPUTS, grads):
        if bit in asked:
            columns = _columns(constants) if bit == _run.LOGITS_AT else 1
            g = none if grad is None else grad
            each = g.movedim(-1, 0) if bit == _run.LOGITS_AT and g.dim() else g
            planes.append(each.expand(columns, *length))
            sizes.append(columns)
    whole = exchange.gather_tokens(torch.cat(planes), shard, dim + 1).flatten(1)  # [m, N]
    parts = dict(zip(asked, torch.split(whole, sizes)))
    made: list[Tensor | None] = [None] * len(grads)
    for place, bit in enumerate(_run.OUTPUTS):
        if bit in asked:
            made[place] = parts[bit].t() if bit == _run.LOGITS_AT else parts[bit][0]
    return made


def refuse(call: Call) -> None:
    """Refuses calls that a split vocabulary does not support."""
    for name in names_where("of_whole_rows"):
        if call.wanted & _run.BITS[name]:
            raise not_supported(
                f"return_statistics is {name!r} with a group; a shard does not know the target's "
                "logit of another"
            )
    if call.main_grad is not None:
        raise not_supported('grad_accumulation="main_grad" is not supported with a group')


def check_devices(input: Tensor, given: Any) -> None:
    """Checks the devices of a NamedTuple's tensors. The core's Forward cannot check that of
    the token weights, because only Combine gets them."""
    _check_places(input, given._fields, given)


def _check_places(input: Tensor, names: Sequence[str], tensors: Sequence[Tensor | None]) -> None:
    for name, tensor in zip(names, tensors):
        if tensor is not None and tensor.device != input.device:
            raise wrong_device(
                f"{argument(name)} is on {tensor.device}; allowed: {input.device}, where the input "
                "is"
            )


def _tf32(rows: Tensor) -> bool:
    """Whether f32 products, and so kept state, are in TF32."""
    return rows.is_cuda and rows.dtype is torch.float32 and allows_tf32()


def _keeps(input: Tensor, call: Call, shard: Shard) -> bool:
    """Whether Forward keeps state, by conditions that are the same on all ranks. A Backward of
    target_logit alone does not need kept state."""
    if not shard.of_any or _ops.hooked():
        return False
    if not call.wanted & sum(_DIFFERENTIABLE) & ~_run.TARGET_LOGIT:
        return False
    if shard.blocks and call.memory is not None:  # the reason is in Block.kept_bytes
        return False
    return _kept.serves(call.dtype or input.dtype, input.device.type, call.options)


def _checked(input: Tensor, weight: Tensor, bias: Tensor | None, call: Call, shard: Shard) -> Shard:
    """The shard with what Forward needs to know of Backward. Raises for whatever this rank alone
    can know to be wrong."""
    refuse(call)
    tensors = (input, weight, bias, *call.constants)
    refuse_layouts(tensors)
    # The dispatcher takes meta's kernels if one tensor is on meta: results that nobody writes.
    _check_places(input, tuple(_run.INPUTS), tensors)
    if not torch.compiler.is_compiling():
        _abi.check_options(call.options)
    with_grad = torch.is_grad_enabled()
    shard = _run.replaced(
        shard,
        of_input=with_grad and input.requires_grad,
        of_any=with_grad and any(t is not None and t.requires_grad for t in (input, weight, bias)),
    )
    return _run.replaced(shard, keeps=_keeps(input, call, shard))


def loss(
    input: Tensor, weight: Tensor, bias: Tensor | None, call: Call, shard: Shard
) -> tuple[Tensor | None, ...]:
    """The outputs in the order of _run.OUTPUTS."""
    try:
        shard = _checked(input, weight, bias, call, shard)
    except Exception as error:
        exchange.tell(error, input, shard)
        raise
    call.options = _run.replaced(call.options, vocab_start=shard.start, vocab_total=shard.total)
    if ranks.ON and shard.size > 1:
        ranks.before_forward(input, weight, bias, call, shard)
    if torch.compiler.is_compiling():
        return _traced(input, weight, bias, call, shard)
    apply: Any = ShardedLoss.apply
    outputs: tuple[Tensor | None, ...] = apply(input, weight, bias, call, shard)
    return outputs


def own_loss(
    input: Tensor, weight: Tensor, bias: Tensor | None, call: Call, shard: Shard
) -> list[Tensor | None]:
    """The outputs of this rank's own tokens. All ranks must have the same number of tokens, in any
    shape."""
    shape, count = call.constants.target.shape, call.constants.target.numel()
    call.constants = _flat(call.constants)
    if input.layout is torch.strided:  # others are refused on every rank
        input = input.reshape(count, input.shape[-1])
    outputs = loss(input, weight, bias, call, shard)
    return [t if t is None or t.dim() == 0 else t.view(shape) for t in outputs]


def _revision() -> str:
    """A digest of this op's code. Torch caches compiled graphs on disk by the names of the ops, not
    by their code, and graphs of another revision must not be used."""
    folder = pathlib.Path(__file__).parent
    files = [*sorted(folder.glob("*.py")), *sorted(folder.parent.glob("*.py"))]
    try:
        code = b"".join(file.read_bytes() for file in files)
    except OSError:  # not installed as files
        code = b""
    return f"{'.'.join(map(str, _abi.VERSION))}-{zlib.crc32(code):08x}"


_REVISION = _revision()


def _sharded_loss(*args: Any) -> list[Tensor]:
    input, weight, bias, constants, options, memory = _ops.split_arguments(args)
    wanted, dtype, *where, _ = args[_ops.BEHIND :]
    call = Call(constants, options, memory, wanted, dtype)
    apply: Any = ShardedLoss.apply
    return [t for t in apply(input, weight, bias, call, Shard(*where)) if t is not None]


# The loss for torch.compile, as an op that is composed of other ops, through which the compiler
# traces, including the autograd rule. A plain autograd.Function would get a graph of its own, which
# fails at dynamic sizes.
compose(
    f"sharded_loss({_ops.TENSORS}, {_ops.OPTIONS}, int wanted, ScalarType? dtype, str group, "
    "int rank, int size, SymInt start, SymInt total, int? sequence_dim, bool local_tokens, "
    "bool reduce_input_grad, bool ordered, int blocks, bool own, str replicas, float divisor, "
    "bool keeps, bool of_input, bool of_any, str revision) -> Tensor[]",
    _sharded_loss,
)


def _traced(
    input: Tensor, weight: Tensor, bias: Tensor | None, call: Call, shard: Shard
) -> tuple[Tensor | None, ...]:
    made = torch.ops.logitless.sharded_loss(
        *_ops.arguments(
            (input, weight, bias, *call.constants), call.options, call.memory, call.wanted,
            call.dtype, *shard, _REVISION,
        )
    )  # fmt: skip
    rest = iter(made)
    return tuple(next(rest) if call.wanted & bit else None for bit in _run.OUTPUTS)
