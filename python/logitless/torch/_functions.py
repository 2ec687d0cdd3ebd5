# SPDX-License-Identifier: Apache-2.0
"""The functions on tensors that a user calls, except linear_divergence. docs/python.md explains
their options, docs/semantics.md has the formulas."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, overload

import torch
from torch import Tensor

from logitless import _abi, _statistics
from logitless._abi import Options, parse_memory
from logitless._call import EmptyMean, Reduction, check_shift, is_flat, options_of, shift_of
from logitless._errors import (
    OLD_OF_LOGPROB,
    LogitlessError,
    entropy_detached,
    invalid,
    not_supported,
    placed,
    refuses,
    wrong_device,
    wrong_dtype,
    wrong_shape,
)
from logitless._vocabulary import ABSENT, check_over, refuse_beside_ids
from logitless.torch import _among, _chosen, _kept, _memory, _ops, _run, _top, _vocabulary
from logitless.torch._autograd import (
    AFTER_STATISTICS,
    Call,
    FusedLoss,
    Loss,
    MainGrad,
    cast,
    cast_bias,
)
from logitless.torch._checks import (
    as_f32,
    check_bias,
    check_matrix,
    check_meta,
    check_overwritten,
    check_real,
    check_rows,
    check_target,
    check_tensor,
)
from logitless.torch._route import dispatches, refuse, refuse_layouts
from logitless.torch._run import Constants
from logitless.torch._split.given import Split, split_of_old, unexpected
from logitless.torch._zero import held

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from logitless import _call
    from logitless._statistics import RowStatisticName, StatisticName

    LossOptions: TypeAlias = _call.LossOptions[Tensor]

    class LinearOptions(_call.LinearOptions[Tensor], total=False):
        group: Any

    class LogprobOptions(_call.LogprobOptions[Tensor], total=False):
        group: Any

    class TopOptions(_call.ChosenOptions[Tensor], total=False):
        group: Any

    class ChosenOptions(TopOptions, total=False):
        over: Literal["vocab", "ids"]
        offsets: Tensor | None


Statistics: TypeAlias = _statistics.Statistics[Tensor]

_LOGPROB = list(_run.OUTPUTS).index(_run.LOGPROB)  # the entropy follows the log-probability
_INT32 = 1 << 31
_NORMAL_F32 = (2.0**-126, 2.0**127 * (2 - 2.0**-23))


_F = TypeVar("_F", bound=Callable[..., Any])


def passes_on(names: Sequence[str], of: Callable[..., Any]) -> Callable[[_F], _F]:
    """Decorates a function that passes `**options` on. Its signature, which help() and editors
    show, gets the parameters `names` of the function `of`, with their types and defaults."""
    known = inspect.signature(of).parameters
    taken = [known[name].replace(kind=inspect.Parameter.KEYWORD_ONLY) for name in names]

    def decorate(function: _F) -> _F:
        own = inspect.signature(function)
        shown = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        function.__signature__ = own.replace(parameters=shown + taken)  # type: ignore[attr-defined]
        return function

    return decorate


_OF_LOGITS = (
    "linear_bias", "ignore_index", "logit_scale", "softcap", "temperature", "shift", "memory",
    "vocab_ids",
)  # fmt: skip
_OF_LINEAR = (
    *_OF_LOGITS, "weight", "reduction", "label_smoothing", "z_loss", "token_weight", "normalizer",
    "empty_mean", "group",
)  # fmt: skip


def wanted_of(names: Any, table: Any = _statistics.STATISTICS) -> int:
    """The bits, as in _run, for these names of statistics."""
    return sum(_run.BITS[name] for name in _statistics.names_of(names, table)) if names else 0


def _shifted(target: Tensor, shift: int, ignore_index: int) -> Tensor:
    """Position i gets the target of i + shift; the last `shift` positions are ignored."""
    check_shift(shift, target.shape)
    if not isinstance(ignore_index, torch.SymInt):  # torch.compile turns a number into a SymInt
        _abi.check_ignore_index(ignore_index)
    if target.dtype is torch.int32 and not -_INT32 <= ignore_index < _INT32:
        target = target.long()
    return _moved(target, shift, ignore_index)


def _moved(values: Tensor, shift: int, rest: float) -> Tensor:
    """Element [..., i] is values[..., i + shift]; the last `shift` elements are `rest`."""
    shift = min(shift, values.shape[-1])
    # Not torch.nn.functional.pad, whose value is a double, which cannot hold every int64.
    moved = torch.full_like(values, rest, memory_format=torch.contiguous_format)
    moved[..., : values.shape[-1] - shift] = values[..., shift:]
    return moved


def _float_constant(name: str, value: Any) -> Tensor:
    """Weights of tokens or classes, or temperatures, converted to f32, which the core reads."""
    if not isinstance(value, Tensor):
        raise wrong_dtype(f"{name} is a {type(value).__name__}; allowed: a tensor")
    if value.requires_grad and torch.is_grad_enabled():
        raise invalid(f"{name} requires grad, but it is a constant here; pass {name}.detach()")
    return as_f32(name, value).resolve_neg()


def _token_weight(value: Any, shape: torch.Size, shift: int) -> Tensor:
    """The token weights in the target's shape, moved with their labels."""
    weight = _float_constant("token_weight", value)
    if weight.shape != shape:
        raise wrong_shape(f"token_weight has shape {tuple(weight.shape)}; allowed: {tuple(shape)}")
    return _moved(weight, shift, 1.0) if shift else weight


def _temperature(value: Any, shape: torch.Size, shift: int) -> tuple[Any, Tensor | None]:
    """Returns (number, None) for a number, which is an option, or (1.0, [N]) for a tensor in the
    target's shape, [N] or broadcastable to it; `shift` moves the tensor with the target."""
    if not isinstance(value, Tensor):
        if not isinstance(value, (float, int, torch.SymFloat, torch.SymInt)):
            raise wrong_dtype(
                f"temperature is a {type(value).__name__}; allowed: a number or a tensor"
            )
        return value, None
    value = _float_constant("temperature", value)
    if value.shape != shape:
        flat = is_flat(value.shape, shape)
        value = value.reshape(shape) if flat else value.expand(shape)
    if shift:
        value = _moved(value, shift, 1.0)
    return 1.0, value.reshape(-1)


def _normalizer(value: Any, device: torch.device) -> tuple[float, Tensor | None]:
    """The normalizer as the core takes it: a host number other than 0, or a tensor []."""
    if value is None:
        return 0.0, None
    if not isinstance(value, Tensor):
        if isinstance(value, bool) or not isinstance(value, (int, float, numbers.Real)):
            raise wrong_dtype(
                f"normalizer is a {type(value).__name__}; allowed: a number or a tensor []"
            )
        number: Any = value  # perhaps symbolic
        # A number would be part of a compiled graph, and each value would compile another. A number
        # that f32 cannot hold is passed to the core, which takes a double.
        if torch.compiler.is_compiling() and _NORMAL_F32[0] <= number <= _NORMAL_F32[1]:
            return 0.0, torch.ones((), dtype=torch.float32, device=device) * number
        if number == 0:  # in the core's options 0 means that tokens are counted
            return 0.0, torch.zeros((), dtype=torch.float32, device=device)
        return _abi.float_of("normalizer", number), None
    if value.requires_grad and torch.is_grad_enabled():
        raise invalid("normalizer requires grad, but it is a constant here; pass its detach()")
    if value.dtype not in (torch.float32, torch.int64):
        check_real("normalizer", value)
        floats = value.is_floating_point()
        value = as_f32("normalizer", value) if floats else value.to(torch.int64)
    return 0.0, value.resolve_neg()


def _autocast_dtype(input: Tensor) -> torch.dtype | None:
    kind = "cuda" if input.is_cuda else "cpu"
    if not torch.is_autocast_enabled(kind) or not (input.is_cuda or input.is_cpu):
        return None
    return torch.get_autocast_dtype(kind)


def _loss(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, constants: Constants,
    options: Options, memory: int | None, wanted: int, in_place: bool = False,
    main_grad: MainGrad | None = None, shard: Any = None, data: Any = None,
) -> Any:  # fmt: skip
    """The outputs in the order of _run.OUTPUTS, None where not wanted."""
    dtype = None if weight is None else _autocast_dtype(input) if data is None else data.dtype
    call = Call(constants, options, memory, wanted, dtype, in_place, main_grad)
    if shard is not None:
        from logitless.torch._split import rule

        assert weight is not None
        of = rule.loss if data is None else rule.own_loss
        return of(input, weight, bias, call, shard)
    needs = torch.is_grad_enabled() and (
        input.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
    )
    # is_neg: a lazy minus sign, which the dispatcher resolves.
    if (
        dispatches(input, weight, bias, *constants)
        or input.is_neg()
        or (weight is not None and weight.is_neg())
        or (bias is not None and bias.is_neg())
    ):
        return _ops.loss(input, weight, bias, call, needs)
    apply: Any
    try:
        if needs and call.fused(input, weight, bias, _kept.hooked()):
            apply = FusedLoss.apply
            loss = apply(input, weight, bias, call)
            statistics, call.statistics = call.statistics, ()
            return loss, *statistics, None, None, None
        if needs:
            apply = Loss.apply
            return apply(input, weight, bias, call)
        if dtype is not None:
            input, bias = cast(input, dtype), cast_bias(bias, dtype)
            weight = None if weight is None else cast(weight, dtype)
        return _run.forward(input, weight, bias, constants, options, memory, wanted)[0]
    except RuntimeError:  # torch's own message for a layout without strides names no tensor
        refuse_layouts((input, weight, bias, *constants))
        raise


@overload
def linear_cross_entropy(  # type: ignore[overload-overlap]  # () asks for nothing
    input: Tensor, linear_weight: Tensor, target: Tensor, *, return_statistics: tuple[()] = ...,
    options: None = ..., **keywords: Unpack[LinearOptions],
) -> Tensor: ...  # fmt: skip
@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *,
    return_statistics: StatisticName | Sequence[StatisticName],
    options: None = ..., **keywords: Unpack[LinearOptions],
) -> tuple[Tensor, Statistics]: ...  # fmt: skip
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: Reduction = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = 0.0,
    temperature: float | Tensor = 1.0,
    token_weight: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    shift: bool | int = False,
    memory: int | str | None = None,
    return_statistics: Any = (),
    empty_mean: EmptyMean = "zero",
    group: Any = None,
    vocab_ids: Tensor | None = None,
    options: None = None,
    **old: Any,
) -> Any:
    """Cross-entropy of the logits input @ linear_weight.T + linear_bias, without the logits.

    docs/semantics.md has the formulas, edge cases and error bounds; docs/python.md says what is
    kept in memory. [...] stands for any number of token dimensions, with N tokens in all.

    Tensors, on one device:

    - `input` [..., D], `linear_weight` [V, D]: one dtype, f32, f16 or bf16; autocast casts both.
    - `target` [...]: class indices, int64 or int32. Tokens whose target is `ignore_index` (None:
      -100) do not count.
    - `linear_bias` [V]: the input's dtype or f32.
    - `weight` [V] of classes and `token_weight` [...]: factors of the loss. They are converted to
      f32 and have no gradient.

    Options, those of torch.nn.functional.linear_cross_entropy and more:

    - `reduction`: "mean", "sum" or "none". `normalizer`: the divisor of "mean", a number or a
      tensor []; by default the sum of the class weights over the tokens that count. `empty_mean`:
      the mean over no token, "zero" or, as in PyTorch, "nan".
    - `label_smoothing` in [0, 1]; `z_loss`, the factor of lse^2.
    - `logit_scale`, `softcap`, `temperature`: a logit x becomes softcap tanh(logit_scale x /
      softcap) / temperature; a softcap of 0 or None means none. A temperature may be a tensor in
      the target's shape, [N] or broadcastable to it; it is converted to f32 and has no gradient. A
      token whose temperature is not a positive normal number has a NaN loss.
    - `shift`: True or k, for next-token prediction. Position i gets the target of position i + k,
      with the token_weight and temperature of that label; the last k positions do not count.
    - `memory`: the most bytes for the workspace and what is kept for backward, or a text such as
      "64MiB". None takes the value of `default_memory`.
    - `return_statistics`: names of fields of `Statistics`.
    - `vocab_ids` [V'], int64 or int32, each once, in any order: the softmax is over these rows of
      linear_weight alone, which are copied. linear_bias and weight still have V elements, and
      gradients are 0 at other rows. Targets and the statistic argmax are ids of the whole
      vocabulary; a target that is not in the list is out of range. A wrong list is an error on the
      CPU, and makes all results NaN on a GPU.
    - `group`: a process group (or its name) over which the vocabulary is split. linear_weight and
      linear_bias then hold this rank's columns. All other arguments are the same on every rank, and
      so are all results, to the bit. For other cases pass a `Split`; see docs/devices.md.
    - `options`: must be None. torch's LinearCrossEntropyOptions, which choose an algorithm, are
      refused.
    - `old`: Split's fields under their former names (vocab_start, vocab_total, vocab_blocks, ...),
      with a DeprecationWarning.

    DTensors: a linear_weight (and linear_bias) that is Shard(0) on exactly one mesh dimension
    determines the group and the columns; rows beyond Split.total are padding. The input must then
    be a DTensor too: on that mesh dimension Replicate, or Shard of a dimension of tokens, which is
    then the Split's sequence_dim. With an explicit `group` the input may be a plain tensor that is
    the same on every rank. A target that is a DTensor split like the input means local_tokens.
    Gradients are DTensors with the placements of their tensors; results are plain tensors.

    Returns the loss, f32: [], or [...] with reduction "none". With `return_statistics` it returns
    (loss, Statistics). input, linear_weight and linear_bias get gradients in their own dtypes.

    Raises LogitlessValueError, LogitlessTypeError, LogitlessNotSupportedError or, for tensors on
    several devices or a device that fails, LogitlessRuntimeError. The message names the argument,
    its value and what is allowed. A target out of range raises LogitlessValueError on the CPU. On a
    GPU it makes the loss of its token NaN, because the call does not wait for the device.
    """
    if options is not None:
        raise not_supported(
            f"options is a {type(options).__name__}; allowed: None (the loss is exact, and memory= "
            "bounds what it takes)"
        )
    if old:
        group = split_of_old(group, old, "linear_cross_entropy")
    outputs = linear_outputs(
        input, linear_weight, target, _run.LOSS, linear_bias, weight, reduction,
        ignore_index, label_smoothing, z_loss, logit_scale, softcap, temperature, token_weight,
        normalizer, shift, memory, empty_mean, group, vocab_ids,
        asked=lambda: wanted_of(return_statistics),
    )  # fmt: skip
    return _result(outputs, return_statistics)


def measured(
    input: Tensor, linear_weight: Tensor, target: Tensor, return_statistics: Sequence[str],
    **options: Any,
) -> tuple[Tensor, Statistics]:  # fmt: skip
    """(loss, statistics) of linear_cross_entropy, with statistics that have no gradient. Therefore
    a mean or sum and any statistics are computed in one call, with the gradients."""
    loss, *outputs = linear_outputs(
        input, linear_weight, target, _run.LOSS | _run.DETACHED | _run.ALL_DETACHED, **options,
        asked=lambda: wanted_of(return_statistics),
    )  # fmt: skip
    made = outputs[: AFTER_STATISTICS - 1]
    return loss, _statistics.Statistics(*(t if t is None else t.detach() for t in made))


def _result(outputs: Any, names: Any) -> Any:
    """The result for a caller who asked for the loss and the statistics `names`."""
    if not names:
        return outputs[0]
    return outputs[0], _statistics.Statistics(*outputs[1:AFTER_STATISTICS])


def linear_outputs(
    input: Tensor, linear_weight: Tensor, target: Any, wanted: int,
    linear_bias: Tensor | None = None, weight: Tensor | None = None, reduction: str = "mean",
    ignore_index: int | None = -100, label_smoothing: float = 0.0, z_loss: float = 0.0,
    logit_scale: float = 1.0, softcap: float | None = 0.0, temperature: float | Tensor = 1.0,
    token_weight: Tensor | None = None, normalizer: float | Tensor | None = None,
    shift: bool | int = False, memory: int | str | None = None, empty_mean: str = "zero",
    group: Any = None, vocab_ids: Tensor | None = None, *, main_grad: MainGrad | None = None,
    data: Any = None, size: bool | None = None, offsets: Tensor | None = None, k: int = 0,
    asked: Callable[[], int] | None = None,
) -> Any:  # fmt: skip
    """The outputs for linear_cross_entropy's arguments, in the order of _run.OUTPUTS; `wanted` has
    the bits (as in _run) of those to compute. asked() returns more of them; if it raises, all ranks
    of a group get the error. With LOGITS_AT the target is `ids` [..., K], or [M] with `offsets`.
    With TOP, for the `k` largest logits, the target may be None. `main_grad`: the tensor to which
    the weight's gradient is added. `data`: a shards.Data. If `size` is not None, nothing is
    computed and the result is the number of bytes that the call would take; True includes
    gradients."""
    check_rows("input", input, "[..., D]")
    linear_weight = held("linear_weight", linear_weight)
    check_matrix("linear_weight", linear_weight)
    if linear_bias is not None:
        linear_bias = held("linear_bias", linear_bias)
        check_bias(linear_bias, linear_weight)
    split = group if group is None or type(group) is Split else Split(group)
    if split is not None or hasattr(linear_weight, "placements") or hasattr(input, "placements"):
        from logitless.torch._split import placed as dtensors

        given = dtensors.Arguments(
            input, linear_weight, target, linear_bias, weight, token_weight, normalizer,
            temperature, split or Split(),
        )  # fmt: skip
        if any(map(dtensors.is_placed, given)):
            (
                input, linear_weight, target, linear_bias, weight, token_weight, normalizer,
                temperature, split,
            ) = dtensors.local(given, "ids" if wanted & _run.LOGITS_AT else "target")  # fmt: skip
    shard = ids = vocabulary = None
    check = _chosen.check_ids if wanted & _run.LOGITS_AT else check_target
    if split is not None:
        from logitless.torch._split import exchange, shards

        shard = shards.shard_of(split, input, linear_weight)
    elif offsets is not None:
        _chosen.check_list(input, target, offsets)
    elif target is not None or not wanted & _run.TOP:
        check(input, target, "input")
    try:
        shift = shift_of(shift)
        if asked is not None:
            wanted |= asked()
        anything = wanted & _run.TOP and target is None
        if anything:
            target = _top.target_of(input, shard)
        if shard is not None:
            shards.check_tokens(input, target, shard, shift, check)
            if data is not None:
                shard = data.shard(shard)
            if shard.size == 1 and not shard.blocks and not shard.replicas and shard.divisor == 1:
                linear_weight, linear_bias = shards.of_one(shard, linear_weight, linear_bias)
                shard = None
        if vocab_ids is not None:
            if main_grad is not None:
                raise not_supported(
                    'grad_accumulation is "main_grad"; allowed with vocab_ids: None'
                )
            refuse((input, linear_weight, linear_bias))
            vocabulary, shard = _vocabulary.listed(vocab_ids, linear_weight, shard)
            if anything:  # any listed class
                target = vocabulary.ordered[0].expand(target.shape)
            classes = None if weight is None else _float_constant("weight", weight)
            linear_weight, linear_bias, weight, target = vocabulary.arguments(
                linear_weight, linear_bias, classes, target, ignore_index, shift,
                "ids" if wanted & _run.LOGITS_AT else "target",
            )  # fmt: skip
            ignore_index = ABSENT
        if wanted & _run.TOP:
            _top.check_k(k, linear_weight.shape[0] if shard is None else shard.total)
        if wanted & _run.LOGITS_AT:
            ids, single = target, _chosen.is_single(target, offsets)
            wanted = _chosen.wanted_of(wanted, single)
            vocab = linear_weight.shape[0] if shard is None else shard.total
            if offsets is None:
                target = _chosen.targets_of(ids, vocab)
            else:
                target = _chosen.targets_of_lists(input, ids, offsets)
        options = options_of(
            reduction, ignore_index, label_smoothing, z_loss, logit_scale, softcap, temperature,
            empty_mean,
        )  # fmt: skip
        constants, options = _of_tokens(
            input, target, options, weight, token_weight, normalizer, shift
        )
        bound = _memory.default() if memory is None else parse_memory(memory)
    except LogitlessError as error:
        if shard is not None:
            exchange.tell(error, input, shard)
        raise
    try:
        if size is not None:
            return _bytes_of(
                input, linear_weight, linear_bias, constants, options, bound, wanted, size
            )
        if wanted & _run.LOGITS_AT:
            constants = _run.replaced(constants, ids=ids, id_offsets=offsets)
        outputs = _loss(
            input, linear_weight, linear_bias, constants, options, bound, wanted,
            main_grad=main_grad, shard=shard, data=data,
        )  # fmt: skip
        outputs = outputs if ids is None else _chosen.outputs_of(outputs, ids, single)
        return outputs if vocabulary is None else vocabulary.outputs_of(outputs)
    except LogitlessError as error:
        shape = constants.target.shape if data is None else (target.numel(),)
        ranks = None if shard is None else shard.gathered()
        if ids is not None and error.status == "target_out_of_range":
            error.args = (_chosen.in_callers_words(str(error), ids, offsets, ranks),)
        error.args = (_in_callers_words(error, shape, shift, ranks, memory is None),)
        raise


def _of_tokens(
    rows: Tensor, target: Tensor, options: Options, weight: Tensor | None,
    token_weight: Tensor | None, normalizer: float | Tensor | None, shift: int,
) -> tuple[Constants, Options]:  # fmt: skip
    """Returns the tensors without gradients as the core takes them, moved by `shift`, and the
    options. A temperature or normalizer that is a number is part of the options, one that is a
    tensor is among the tensors."""
    if shift:
        target = _shifted(target, shift, options.ignore_index)
    temperatures = None
    if type(options.temperature) is not float:
        number, temperatures = _temperature(options.temperature, target.shape, shift)
        options = _run.replaced(options, temperature=number)
    by = None
    if normalizer is not None:
        number, by = _normalizer(normalizer, rows.device)
        if number:
            options = _run.replaced(options, normalizer=number)
    constants = Constants(
        target,
        None if token_weight is None else _token_weight(token_weight, target.shape, shift),
        None if weight is None else _float_constant("weight", weight),
        by,
        temperatures,
    )
    return constants, options


def _in_callers_words(
    error: LogitlessError, shape: Sequence[int], shift: int = 0,
    ranks: tuple[int, int] | None = None, by_default: bool = False,
) -> str:  # fmt: skip
    """The core's error in terms of the caller's arguments."""
    message = str(error)
    if error.status == "target_out_of_range":
        return placed(message, shape, shift, ranks=ranks)
    if error.status == "workspace_too_small" and by_default:
        return message.replace("memory is", f"memory, that of {_memory.source()}, is", 1)
    if error.status == "wrong_dtype" and message.endswith("the dtype of input"):
        name = message.split(" ", 1)[0]
        return f"{message} (torch.autocast casts both, or {name}.to(input.dtype))"
    return message


def _bytes_of(
    input: Tensor, weight: Tensor, bias: Tensor | None, constants: Constants, options: Options,
    memory: int | None, wanted: int, gradients: bool,
) -> int:  # fmt: skip
    from logitless.torch import _planned

    call = Call(constants, options, memory, wanted, _autocast_dtype(input))
    return _planned.bytes_of(input, weight, bias, call, gradients)


@passes_on(_OF_LINEAR, linear_cross_entropy)
def workspace_size(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    return_statistics: StatisticName | Sequence[StatisticName] = (),
    gradients: bool = True,
    **options: Unpack[LinearOptions],
) -> int:
    """The number of bytes that `linear_cross_entropy` with these arguments takes beyond its
    arguments, results and gradients. Nothing is computed, and no element is read.

    These are the workspace and, if the gradients are not computed with the loss, what is kept for
    backward; both fit in `memory` (None: the value of `default_memory`). The copies for vocab_ids
    come on top. A compiled function may keep another amount.

    Arguments, shapes and errors are those of linear_cross_entropy, but a vocabulary that is split
    over ranks is not supported. `gradients`: True includes the backward, for the tensors that
    require a gradient, or for all if none does, as if every result had an upstream gradient. False
    is for a call under no_grad.
    """
    for name in options:
        if name not in _OF_LINEAR:
            raise unexpected("workspace_size", name)
    tensors = (input, linear_weight, target, options.get("linear_bias"))
    if options.get("group") is not None or any(hasattr(t, "placements") for t in tensors):
        raise not_supported(
            "workspace_size is of one process; allowed: plain tensors, such as a DTensor's "
            "to_local, and no group"
        )
    wanted = wanted_of(return_statistics) | _run.LOSS
    given: dict[str, Any] = {**options}
    ids, copied = given.pop("vocab_ids", None), 0
    if ids is not None:  # the first V' rows take the same bytes as the listed ones
        check_matrix("linear_weight", linear_weight)
        _vocabulary.check_list("vocab_ids", ids, linear_weight.shape[0], linear_weight)
        linear_weight = linear_weight[: ids.shape[0]]
        for name in ("linear_bias", "weight"):
            given[name] = None if given.get(name) is None else given[name][: ids.shape[0]]
        needs = any(isinstance(t, Tensor) and t.requires_grad for t in tensors)
        grad = gradients and (linear_weight.requires_grad or not needs)
        copied = linear_weight.nbytes * (1 + grad) + 3 * 8 * ids.shape[0]
    size: int = linear_outputs(input, linear_weight, target, wanted, **given, size=gradients)
    return copied + size


@overload
def linear_logprob(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, entropy: Literal[False] = ...,
    **options: Unpack[LogprobOptions],
) -> Tensor: ...  # fmt: skip
@overload
def linear_logprob(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, entropy: Literal[True, "detached"],
    **options: Unpack[LogprobOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@refuses(OLD_OF_LOGPROB)
@passes_on(_OF_LOGITS, linear_cross_entropy)
def linear_logprob(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    entropy: bool | str = False,
    group: Any = None,
    **options: Any,
) -> Any:
    """Log-probability of every target token, [...] f32, at most 0; for reinforcement learning.
    docs/semantics.md, "Statistics of a token", has the formulas.

    With `entropy=True` it returns the pair (logprob, entropy), both f32 and differentiable. With
    "detached" the entropy has no gradient, and no memory is reserved for one. Tokens that do not
    count give 0.

    `options` are some of the options of `linear_cross_entropy`: linear_bias, ignore_index,
    logit_scale, softcap, temperature, shift, vocab_ids and memory. `group`, a Split and DTensors
    split the vocabulary over ranks as in that function. Tensors and errors are the same, too.
    """
    old = {name: options.pop(name) for name in tuple(options) if name not in _OF_LOGITS}
    if old:
        group = split_of_old(group, old, "linear_logprob", 4)

    def asked() -> int:
        if not entropy:
            return 0
        return _run.ENTROPY | (_run.DETACHED if entropy_detached(entropy) else 0)

    outputs = linear_outputs(
        input, linear_weight, target, _run.LOGPROB, reduction="none", group=group, **options,
        asked=asked,
    )  # fmt: skip
    logprob, made = outputs[_LOGPROB : _LOGPROB + 2]
    return (logprob, made) if entropy else logprob


@overload
def linear_logprobs_at(  # type: ignore[overload-overlap]  # () asks for nothing
    input: Tensor, linear_weight: Tensor, ids: Tensor, *, return_statistics: tuple[()] = ...,
    **options: Unpack[ChosenOptions],
) -> Tensor: ...  # fmt: skip
@overload
def linear_logprobs_at(
    input: Tensor, linear_weight: Tensor, ids: Tensor, *,
    return_statistics: RowStatisticName | Sequence[RowStatisticName],
    **options: Unpack[ChosenOptions],
) -> tuple[Tensor, Statistics]: ...  # fmt: skip
def linear_logprobs_at(
    input: Tensor,
    linear_weight: Tensor,
    ids: Tensor,
    *,
    linear_bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = 0.0,
    temperature: float | Tensor = 1.0,
    memory: int | str | None = None,
    return_statistics: Any = (),
    group: Any = None,
    over: Literal["vocab", "ids"] = "vocab",
    offsets: Tensor | None = None,
    vocab_ids: Tensor | None = None,
) -> Any:
    """Log-probabilities of some classes of each token: a teacher's likeliest tokens, candidates, or
    the tokens that a sampler drew. docs/semantics.md, "Chosen columns", has the formulas.

    - `input` [..., D], `linear_weight` [V, D], `linear_bias` [V]: as in `linear_cross_entropy`.
    - `ids` [..., K], int64 or int32, K from 1 to 1024: the classes. -1 stands for no class: its
      log-probability is -inf, and its upstream gradient is not read. A token whose ids are all -1
      is not computed; its statistics are 0, its argmax -1. An id may be given more than once.
    - `over`: "vocab": the softmax is over the whole vocabulary. "ids": it is over the token's ids
      alone, where an id that is given twice counts twice. That multiplies only these classes, and
      cannot be combined with `return_statistics`, `group` or `vocab_ids`.
    - `offsets` [N + 1], int64 or int32, on the input's device, with `ids` [M]: lists of any length.
      Token i of the N, counted over all leading dimensions, has ids[offsets[i]:offsets[i + 1]].
      Offsets begin at 0, do not decrease and end at M. They cannot be combined with `group`.
    - `temperature`: a number, or a tensor in the shape of the tokens.
    - logit_scale, softcap, memory, group and vocab_ids: as in `linear_cross_entropy`; with the last
      two, `ids` are still ids of the whole vocabulary.
    - `return_statistics`: names of those `Statistics` that need no target.

    Returns f32 in the shape of `ids`, at most 0, each value differentiable. With
    `return_statistics` it returns (log-probabilities, Statistics).

    Raises the errors of linear_cross_entropy. Wrong ids and offsets raise on the CPU. On a GPU an
    id outside the vocabulary gives NaN without a gradient (with over="ids" all values of that token
    are NaN), and if offsets are wrong, an id that belongs to no list gives NaN.
    """
    alone = check_over(over)
    if alone or offsets is not None:
        beside = "over='ids'" if alone else "offsets"
        _chosen.refuse_groups((input, linear_weight, linear_bias, ids), group, beside)
    if alone:
        refuse_beside_ids(vocab_ids, return_statistics)
        return _among_ids(
            input, linear_weight, linear_bias, ids, offsets, logit_scale, softcap, temperature,
            memory,
        )  # fmt: skip
    outputs = linear_outputs(
        input, linear_weight, ids, _run.LOGITS_AT, linear_bias, reduction="none",
        ignore_index=ABSENT, logit_scale=logit_scale, softcap=softcap,
        temperature=temperature, memory=memory, group=group, offsets=offsets,
        vocab_ids=vocab_ids, asked=lambda: wanted_of(return_statistics, _statistics.OF_ROWS),
    )  # fmt: skip
    logprobs = outputs[_chosen.AT]
    return (logprobs, _result(outputs, True)[1]) if return_statistics else logprobs


def _among_ids(
    input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None, ids: Tensor,
    offsets: Tensor | None, logit_scale: float, softcap: float | None, temperature: Any,
    memory: Any,
) -> Tensor:  # fmt: skip
    """linear_logprobs_at over the ids alone."""
    check_rows("input", input, "[..., D]")
    linear_weight = held("linear_weight", linear_weight)
    check_matrix("linear_weight", linear_weight)
    if linear_bias is not None:
        linear_bias = held("linear_bias", linear_bias)
        check_bias(linear_bias, linear_weight)
    if offsets is None:
        _chosen.check_ids(input, ids, "input")
    else:
        _chosen.check_list(input, ids, offsets)
    number, temperatures = _temperature(temperature, input.shape[:-1], 0)
    options = options_of(
        "none", ABSENT, 0.0, 0.0, logit_scale, softcap, number, "zero"
    )  # fmt: skip
    bound = _memory.default() if memory is None else parse_memory(memory)
    given = (input, linear_weight, linear_bias, temperatures, ids, offsets)
    check_meta(_among.TENSORS, given)
    refuse(given, _among.TENSORS)
    if not torch.compiler.is_compiling():
        _abi.check_options(options)
    try:
        return _among.logprobs(
            input, linear_weight, linear_bias, temperatures, ids, offsets, options, bound,
            _autocast_dtype(input),
        )  # fmt: skip
    except LogitlessError as error:
        if error.status == "target_out_of_range":
            error.args = (_chosen.in_callers_words(str(error), ids, offsets),)
        error.args = (_in_callers_words(error, (), by_default=memory is None),)
        raise


@overload
def linear_topk(  # type: ignore[overload-overlap]  # () asks for nothing
    input: Tensor, linear_weight: Tensor, k: int, *, return_statistics: tuple[()] = ...,
    **options: Unpack[TopOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def linear_topk(
    input: Tensor, linear_weight: Tensor, k: int, *,
    return_statistics: RowStatisticName | Sequence[RowStatisticName],
    **options: Unpack[TopOptions],
) -> tuple[Tensor, Tensor, Statistics]: ...  # fmt: skip
def linear_topk(
    input: Tensor,
    linear_weight: Tensor,
    k: int,
    *,
    linear_bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = 0.0,
    temperature: float | Tensor = 1.0,
    memory: int | str | None = None,
    return_statistics: Any = (),
    group: Any = None,
    vocab_ids: Tensor | None = None,
) -> Any:
    """The k likeliest classes of each token of `input` [..., D] by the head `linear_weight` [V, D].

    Returns (log-probabilities, ids), both [..., k]: f32, at most 0, and int64. With
    `return_statistics` it returns (log-probabilities, ids, Statistics). The likeliest comes first,
    and of equal logits the lowest id. The results have no gradient. A token with a NaN among its
    logits gets log-probabilities that are NaN, and arbitrary ids. docs/semantics.md, "Top-k", has
    the definition.

    - `k`: from 1 to 256, and at most V. With `vocab_ids` [V'], which restrict the classes, at most
      V'.
    - linear_bias, logit_scale, softcap, temperature and memory: as in `linear_logprobs_at`.
    - `return_statistics`: names of those `Statistics` that need no target.
    - `group`, a Split and DTensors split the vocabulary over ranks; all ranks get the same bits.

    Raises LogitlessValueError for a k outside its range, and the errors of linear_cross_entropy.
    """
    with torch.no_grad():
        outputs = linear_outputs(
            input, linear_weight, None, _top.wanted_of(k), linear_bias, reduction="none",
            logit_scale=logit_scale, softcap=softcap, temperature=temperature, memory=memory,
            group=group, vocab_ids=vocab_ids, k=k,
            asked=lambda: wanted_of(return_statistics, _statistics.OF_ROWS),
        )  # fmt: skip
    made = outputs[_top.LOGITS], outputs[_top.IDS]
    return (*made, _result(outputs, True)[1]) if return_statistics else made


@overload
def cross_entropy(  # type: ignore[overload-overlap]  # () asks for nothing
    logits: Tensor, target: Tensor, *, return_statistics: tuple[()] = ...,
    **options: Unpack[LossOptions],
) -> Tensor: ...  # fmt: skip
@overload
def cross_entropy(
    logits: Tensor, target: Tensor, *, return_statistics: StatisticName | Sequence[StatisticName],
    **options: Unpack[LossOptions],
) -> tuple[Tensor, Statistics]: ...  # fmt: skip
def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    weight: Tensor | None = None,
    reduction: Reduction = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = 0.0,
    temperature: float | Tensor = 1.0,
    token_weight: Tensor | None = None,
    normalizer: float | Tensor | None = None,
    return_statistics: Any = (),
    empty_mean: EmptyMean = "zero",
) -> Any:
    """Cross-entropy of given `logits` [..., V], f32, f16 or bf16; the classes are always the last
    dimension. `target` [...], these options, result and errors are as in `linear_cross_entropy`;
    the gradient is that of the logits, in their dtype.
    """
    return _of_logits(
        logits, target, False, return_statistics, weight, reduction, ignore_index, label_smoothing,
        z_loss, logit_scale, softcap, temperature, token_weight, normalizer, empty_mean,
    )  # fmt: skip


def _of_logits(
    logits: Tensor, target: Tensor, in_place: bool, return_statistics: Any = (),
    weight: Tensor | None = None, reduction: str = "mean", ignore_index: int | None = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, logit_scale: float = 1.0,
    softcap: float | None = 0.0, temperature: float | Tensor = 1.0,
    token_weight: Tensor | None = None, normalizer: float | Tensor | None = None,
    empty_mean: str = "zero",
) -> Any:  # fmt: skip
    """cross_entropy. `in_place`: backward writes the gradient over the logits."""
    check_rows("logits", logits, "[..., V]")
    check_target(logits, target, "logits")
    wanted = wanted_of(return_statistics)
    options = options_of(
        reduction, ignore_index, label_smoothing, z_loss, logit_scale, softcap, temperature,
        empty_mean,
    )  # fmt: skip
    constants, options = _of_tokens(logits, target, options, weight, token_weight, normalizer, 0)
    try:
        outputs = _loss(
            logits, None, None, constants, options, None, wanted | _run.LOSS, in_place=in_place
        )
    except LogitlessError as error:
        error.args = (_in_callers_words(error, target.shape),)
        raise
    return _result(outputs, wanted)


@overload
def cross_entropy_(  # type: ignore[overload-overlap]  # () asks for nothing
    logits: Tensor, target: Tensor, *, return_statistics: tuple[()] = ...,
    **options: Unpack[LossOptions],
) -> Tensor: ...  # fmt: skip
@overload
def cross_entropy_(
    logits: Tensor, target: Tensor, *, return_statistics: StatisticName | Sequence[StatisticName],
    **options: Unpack[LossOptions],
) -> tuple[Tensor, Statistics]: ...  # fmt: skip
def cross_entropy_(logits: Tensor, target: Tensor, **options: Any) -> Any:
    """Like `cross_entropy`, but backward writes the gradient over the logits, so no second [N, V]
    is allocated. A leaf that requires grad, a view of one, or logits whose elements share memory
    raise LogitlessValueError.
    """
    check_rows("logits", logits, "[..., V]")
    if torch.is_grad_enabled() and logits.requires_grad:
        check_overwritten(logits)
    return _of_logits(logits, target, True, **options)


def softmax_(logits: Tensor, dim: int = -1) -> Tensor:
    """Softmax along `dim`, written over the logits (f32, f16 or bf16), which are returned.
    docs/semantics.md, "Softmax", has the definition. There is no gradient: logits that require grad
    raise LogitlessValueError, except under no_grad. So do logits that are no matrix along `dim`
    without a copy."""
    check_tensor("logits", logits)
    if torch.is_grad_enabled() and logits.requires_grad:
        raise invalid("logits requires grad; softmax_ has no gradient: use it under no_grad")
    # torch's softmax resolves the lazy minus sign
    if dispatches(logits) or logits.is_neg():
        if logits.is_cpu or logits.is_cuda or logits.is_meta:
            return torch.softmax(logits, dim, out=logits)
        raise wrong_device(f"logits is on {logits.device}; allowed: cpu, cuda")
    last = logits.movedim(dim, -1) if logits.dim() else logits.view(1)
    try:
        rows = last.view(-1, last.shape[-1]) if last.dim() != 2 and last.numel() else last
    except RuntimeError as error:
        raise wrong_shape(
            f"logits has shape {tuple(logits.shape)} and strides {logits.stride()}; allowed: what "
            f"is a matrix along dim {dim} without a copy"
        ) from error
    if rows.numel():
        _run.launch(_abi.SOFTMAX, ("logits", "probabilities"), (rows, rows), None, None, None)
        torch.autograd.graph.increment_version(logits)
    return logits
