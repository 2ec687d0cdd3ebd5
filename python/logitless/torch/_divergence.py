# SPDX-License-Identifier: Apache-2.0
"""linear_divergence: the function a user calls. The formulas are docs/semantics.md, "Divergences of
two heads"."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, overload

import torch
from torch import Tensor

from logitless import _abi, _divergence
from logitless._abi import Divergence, parse_memory
from logitless._call import shift_of
from logitless._divergence import (
    check_shift_has_target,
    check_teachers_rows,
    names_of,
    options_of,
)
from logitless._errors import (
    LogitlessError,
    not_supported,
    renames,
    wrong_shape,
)
from logitless._vocabulary import ABSENT
from logitless.torch import _divergence_ops, _divergence_run, _memory, _ops, _vocabulary
from logitless.torch._checks import (
    check_bias,
    check_matrix,
    check_meta,
    check_rows,
    check_target,
    check_tensor,
)
from logitless.torch._divergence_run import BITS, Inputs
from logitless.torch._functions import (
    _autocast_dtype,
    _in_callers_words,
    _normalizer,
    _shifted,
    _temperature,
    _token_weight,
)
from logitless.torch._route import dispatches, refuse, refuse_layouts
from logitless.torch._run import replaced
from logitless.torch._vocabulary import Heads
from logitless.torch._zero import held

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from logitless._call import EmptyMean, Reduction
    from logitless._divergence import Kind, Names

    class DivergenceOptions(_divergence.DivergenceOptions[Tensor], total=False):
        group: Any


DivergenceStatistics: TypeAlias = _divergence.DivergenceStatistics[Tensor]


@overload
def linear_divergence(  # type: ignore[overload-overlap]  # () asks for nothing
    input: Tensor, linear_weight: Tensor, teacher_input: Tensor | None = ...,
    teacher_weight: Tensor | None = ..., *, return_statistics: tuple[()] = ...,
    **options: Unpack[DivergenceOptions],
) -> Tensor: ...  # fmt: skip
@overload
def linear_divergence(
    input: Tensor, linear_weight: Tensor, teacher_input: Tensor | None = ...,
    teacher_weight: Tensor | None = ..., *, return_statistics: Names,
    **options: Unpack[DivergenceOptions],
) -> tuple[Tensor, DivergenceStatistics]: ...  # fmt: skip
def linear_divergence(
    input: Tensor,
    linear_weight: Tensor,
    teacher_input: Tensor | None = None,
    teacher_weight: Tensor | None = None,
    *,
    kind: Kind = "forward_kl",
    beta: float = 0.5,
    target: Tensor | None = None,
    label_weight: float = 0.0,
    ignore_index: int | None = -100,
    shift: bool | int = False,
    temperature: float | Tensor = 1.0,
    teacher_temperature: float | Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = 0.0,
    linear_bias: Tensor | None = None,
    teacher_logit_scale: float = 1.0,
    teacher_softcap: float | None = 0.0,
    teacher_bias: Tensor | None = None,
    teacher_logits: Tensor | None = None,
    token_weight: Tensor | None = None,
    reduction: Reduction = "mean",
    normalizer: float | Tensor | None = None,
    empty_mean: EmptyMean = "zero",
    memory: int | str | None = None,
    return_statistics: Any = (),
    group: Any = None,
    vocab_ids: Tensor | None = None,
    teacher_vocab_ids: Tensor | None = None,
) -> Any:
    """The divergence of a student's head from a teacher's for each token, over the whole
    vocabulary, without the logits of either: for distillation.

    Between p = softmax(input @ linear_weight.T + linear_bias), the student's, and q =
    softmax(teacher_input @ teacher_weight.T + teacher_bias), the divergence of a token by `kind` is

        "forward_kl"   sum q log(q/p)
        "reverse_kl"   sum p log(p/q)
        "jsd"          beta sum q log(q/m) + (1 - beta) sum p log(p/m),  m = (1 - beta) p + beta q
        "skew_kl"      sum q log(q/m)
        "tv"           1/2 sum |p - q|

    and its loss is token_weight (divergence + label_weight (lse - z of its target)). There is no
    factor T². docs/semantics.md, "Divergences of two heads", has formulas, edges and error bounds.

    Tensors; those of both heads have one dtype, f32, f16 or bf16, but biases may also be f32:

    - `input` [..., D], `linear_weight` [V, D], `linear_bias` [V]: the student's.
    - `teacher_input` [..., Dt], `teacher_weight` [V, Dt], `teacher_bias` [V]; or, instead of this
      head, `teacher_logits` [..., V] in any of these dtypes.
    - `target` [...], optional: class indices, int64 or int32. Tokens whose target is `ignore_index`
      do not count and are not read. Without a target all tokens count. A `label_weight` other than
      0, the statistic "logprob" and `shift` need a target.
    - `token_weight` [...]: a factor of the loss, converted to f32, without a gradient.

    Options:

    - `beta`: 0 or in [2^-90, 1]; read by "jsd" and "skew_kl" alone.
    - `logit_scale`, `softcap` and `temperature`, `teacher_logit_scale`, `teacher_softcap` and
      `teacher_temperature` (None: `temperature`): each head's own, as in `linear_cross_entropy`.
    - `shift`: as in `linear_cross_entropy`; both temperatures move with the label.
    - reduction, normalizer, empty_mean and memory: as in `linear_cross_entropy`.
    - `return_statistics`: names of `DivergenceStatistics`.
    - `vocab_ids` [V'], int64 or int32, each once: both softmaxes are over these rows of the heads,
      or columns of teacher_logits, alone.
    - `teacher_vocab_ids` [V']: for a student with a smaller vocabulary, such as a draft model.
      linear_weight is [V', D], and its row j corresponds to row teacher_vocab_ids[j] of the
      teacher. With either list targets are ids of the whole vocabulary.
    - `group`: a process group (or its name) over which the vocabulary is split. linear_weight,
      linear_bias, teacher_weight, teacher_bias and teacher_logits are then this rank's columns. All
      other arguments are the same on every rank, and so are all results, to the bit. For other
      cases pass a `Split` without blocks (docs/devices.md); with its sequence_dim teacher_input is
      split like `input`, and teacher_logits have a row for every token.

    Returns the loss, f32: [], or [...] with reduction "none". With `return_statistics` it returns
    (loss, DivergenceStatistics). input, linear_weight and linear_bias get gradients. The teacher's
    tensors get none, even if they require one, so that both heads may share a weight.

    Raises the errors of `linear_cross_entropy`; a target out of range makes the loss of its token
    NaN on a GPU here, too.
    """
    check_rows("input", input, "[..., D]")
    linear_weight = held("linear_weight", linear_weight)
    check_matrix("linear_weight", linear_weight)
    if linear_bias is not None:
        linear_bias = held("linear_bias", linear_bias)
        check_bias(linear_bias, linear_weight)
    shard = None if group is None else _shard_of(group, input, linear_weight)
    tokens = input.shape[:-1]
    try:
        shift = shift_of(shift)
        check_shift_has_target(shift, target)
        if target is not None:
            _check_target(input, target, shard, shift)
        if vocab_ids is not None or teacher_vocab_ids is not None:
            refuse((input, linear_weight, linear_bias))
            teacher_weight = held("teacher_weight", teacher_weight)
            teacher_bias = held("teacher_bias", teacher_bias)
            heads, shard = _vocabulary.of_divergence(
                vocab_ids, teacher_vocab_ids,
                Heads(
                    linear_weight, linear_bias, teacher_weight, teacher_bias, teacher_logits, target
                ),
                ignore_index, shift, shard,
            )  # fmt: skip
            linear_weight, linear_bias, teacher_weight, teacher_bias, teacher_logits, target = heads
            ignore_index = ignore_index if target is None else ABSENT
        names = names_of(return_statistics)
        wanted = BITS["loss"] + sum([BITS[name] for name in names])
        options = options_of(
            kind, beta, label_weight, reduction, ignore_index, logit_scale, softcap, temperature,
            teacher_logit_scale, teacher_softcap, teacher_temperature, empty_mean,
        )  # fmt: skip
        every = tokens if shard is None else torch.Size(shard.whole(tokens))
        if shard is not None and not shard.local_tokens:
            tokens = every
        teacher = _teacher(
            input.shape[:-1], every, teacher_input, teacher_weight, teacher_bias, teacher_logits
        )
        bound = _memory.default() if memory is None else parse_memory(memory)
        inputs, options = _of_tokens(
            (input, linear_weight, linear_bias), teacher, target, token_weight, normalizer, options,
            shift, teacher_temperature is None, tokens,
        )  # fmt: skip
        if shard is not None and shard.size == 1:
            inputs, shard = _of_one(inputs, shard), None
        check_meta(Inputs._fields, inputs)
        if shard is not None:
            from logitless.torch._split import rule

            rule.check_devices(inputs.input, inputs)
        plain = not dispatches(*inputs)
        if not torch.compiler.is_compiling():
            _check(inputs, options)
        if not plain and every == input.shape[:-1] and _ops.shapes_alone(*inputs):
            _divergence_run.check_shapes(inputs.in_dtype(_autocast_dtype(input)), options, wanted)
    except LogitlessError as error:
        if error.status != "target_out_of_range":  # its message has the place already
            error.args = (_in_callers_words(error, tokens, 0, None, memory is None),)
        if shard is not None:
            from logitless.torch._split import exchange

            exchange.tell(error, input, shard)
        raise
    try:
        if shard is not None:
            from logitless.torch._split import divergence as split

            loss, *statistics = split.divergence(
                inputs, options, bound, wanted, _autocast_dtype(input), shard
            )
        else:
            loss, *statistics = _divergence_ops.divergence(
                inputs, options, bound, wanted, _autocast_dtype(input), plain
            )
    except LogitlessError as error:
        ranks = None if shard is None else shard.gathered()
        error.args = (_in_callers_words(error, tokens, shift, ranks, memory is None),)
        raise
    if not names:
        return loss
    made = dict(zip(names, statistics))
    return loss, _divergence.DivergenceStatistics(*[made.get(n) for n in _divergence.STATISTICS])


def _shard_of(group: Any, input: Tensor, weight: Tensor) -> Any:
    from logitless.torch._split import divergence as of_ranks
    from logitless.torch._split import placed, shards
    from logitless.torch._split.given import Split

    split = group if type(group) is Split else Split(group)
    of_ranks.refuse(split)
    for name, tensor in (("input", input), ("linear_weight", weight)):
        if placed.is_placed(tensor):
            raise not_supported(
                f"{name} is a DTensor; allowed for linear_divergence: plain tensors, as of "
                "to_local()"
            )
    return shards.shard_of(split, input, weight)


def _of_one(inputs: Inputs, shard: Any) -> Inputs:
    """The inputs without a group, for a group of one rank."""
    from logitless.torch._split import divergence as of_ranks
    from logitless.torch._split import shards

    shards.of_one(shard, inputs.weight, inputs.bias)
    return of_ranks.of_columns(inputs, shard).inputs


_TEACHER = ("teacher_input", "teacher_weight", "teacher_bias", "teacher_logits")


def _check_target(input: Tensor, target: Any, shard: Any, shift: int) -> None:
    if shard is None:
        return check_target(input, target, "input")
    from logitless.torch._split import shards

    return shards.check_tokens(input, target, shard, shift)


def _teacher(
    own: torch.Size, every: torch.Size, *given: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The teacher's tensors without gradients; the core checks which may be given together. Logits
    are for all tokens, hidden states for the rank's `own` tokens."""
    for name, value in zip(_TEACHER, given):
        if value is None:
            continue
        check_tensor(name, held(name, value))
        if name == "teacher_weight":
            check_matrix(name, value)
        elif name == "teacher_bias":
            if value.dim() != 1:
                raise wrong_shape(f"teacher_bias has shape {tuple(value.shape)}; allowed: [V]")
        else:
            logits = name == "teacher_logits" and every != own
            whose = "the tokens of all ranks" if logits else "the tokens of input"
            check_teachers_rows(name, value.shape, every if logits else own, whose)
    return tuple([None if value is None else value.detach() for value in given])


_teacher_temperature = renames({"temperature": "teacher_temperature"})(_temperature)


def _of_tokens(
    student: tuple[Tensor, Tensor, Tensor | None], teacher: tuple[Tensor | None, ...],
    target: Tensor | None, token_weight: Tensor | None, normalizer: float | Tensor | None,
    options: Divergence, shift: int, one_temperature: bool, tokens: torch.Size,
) -> tuple[Inputs, Divergence]:  # fmt: skip
    """The tensors of a call, where those that belong to labels are moved by `shift`, and the
    options, which include temperatures and a normalizer that are numbers. `tokens`: the shape of
    the tokens that have labels."""
    if target is not None and shift:
        target = _shifted(target, shift, options.ignore_index)
    number, temperatures = _temperature(options.temperature, tokens, shift)
    teacher_number, teacher_temperatures = number, temperatures
    if not one_temperature:
        teacher_number, teacher_temperatures = _teacher_temperature(
            options.teacher_temperature, tokens, shift
        )
    by, by_tensor = _normalizer(normalizer, student[0].device)
    weights = None if token_weight is None else _token_weight(token_weight, tokens, shift)
    options = replaced(
        options, temperature=number, teacher_temperature=teacher_number, normalizer=by
    )
    of_tokens = (target, weights, by_tensor, temperatures)
    tensors: list[Any] = [*student, *of_tokens, *teacher, teacher_temperatures]
    return Inputs(*tensors), options


def _check(inputs: Inputs, options: Divergence) -> None:
    """Refuses, with this library's messages, what the dispatcher would refuse with its own."""
    _abi.check_options(options)
    refuse_layouts(inputs, Inputs._fields)
