# SPDX-License-Identifier: Apache-2.0
"""linear_divergence: the function a user calls. The formulas are docs/semantics.md, "Divergences of
two heads"."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

import jax

from logitless import _abi, _call, _divergence, _vocabulary
from logitless._abi import Divergence, parse_memory
from logitless._call import IGNORE_INDEX
from logitless._divergence import (
    MIXTURES,
    check_shift_has_target,
    check_teachers_rows,
    names_of,
    options_of,
)
from logitless._errors import invalid, renames
from logitless.jax import _parallel_divergence
from logitless.jax._call import Call
from logitless.jax._functions import (
    _arrays,
    _casts_named,
    _exact_products,
    _integer,
    _labels,
    _listed_rows,
    _normalizer,
    _number,
    _shaped,
    _temperature,
    _token_weight,
    check_head,
    listed_of,
)
from logitless.jax._loss import loss
from logitless.jax._run import Array

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from logitless._call import EmptyMean, Reduction
    from logitless._divergence import Kind, Names

    class DivergenceOptions(_divergence.DivergenceOptions[Any], total=False):
        axis_name: str | tuple[str, ...] | None
        upstream: Literal["whole", "parts"] | None


DivergenceStatistics: TypeAlias = _divergence.DivergenceStatistics[Array]


@overload
def linear_divergence(
    input: Any, linear_weight: Any, teacher_input: Any = ..., teacher_weight: Any = ..., *,
    return_statistics: tuple[()] = ..., **options: Unpack[DivergenceOptions],
) -> Array: ...  # fmt: skip
@overload
def linear_divergence(
    input: Any, linear_weight: Any, teacher_input: Any = ..., teacher_weight: Any = ..., *,
    return_statistics: Names, **options: Unpack[DivergenceOptions],
) -> tuple[Array, DivergenceStatistics]: ...  # fmt: skip
def linear_divergence(
    input: Any,
    linear_weight: Any,
    teacher_input: Any = None,
    teacher_weight: Any = None,
    *,
    kind: Kind = "forward_kl",
    beta: float = 0.5,
    target: Any = None,
    label_weight: float = 0.0,
    ignore_index: int | None = -100,
    shift: bool | int = False,
    temperature: Any = 1.0,
    teacher_temperature: Any = None,
    logit_scale: float = 1.0,
    softcap: float | None = 0.0,
    linear_bias: Any = None,
    teacher_logit_scale: float = 1.0,
    teacher_softcap: float | None = 0.0,
    teacher_bias: Any = None,
    teacher_logits: Any = None,
    token_weight: Any = None,
    reduction: Reduction = "mean",
    normalizer: Any = None,
    empty_mean: EmptyMean = "zero",
    memory: int | str | None = None,
    return_statistics: Any = (),
    vocab_ids: Any = None,
    teacher_vocab_ids: Any = None,
    axis_name: str | tuple[str, ...] | None = None,
    upstream: Literal["whole", "parts"] | None = None,
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

    Arrays; those of both heads have one dtype, f32, f16 or bf16, but biases may also be f32:

    - `input` [..., D], `linear_weight` [V, D], `linear_bias` [V]: the student's.
    - `teacher_input` [..., Dt], `teacher_weight` [V, Dt], `teacher_bias` [V]; or, instead of this
      head, `teacher_logits` [..., V] in any of these dtypes.
    - `target` [...], optional: class indices, int32 or int64. Tokens whose target is `ignore_index`
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
    - `vocab_ids` [V'], int32 or int64, each once: both softmaxes are over these rows of the heads,
      or columns of teacher_logits, alone.
    - `teacher_vocab_ids` [V']: for a student with a smaller vocabulary, such as a draft model.
      linear_weight is [V', D], and its row j corresponds to row teacher_vocab_ids[j] of the
      teacher. With either list targets are ids of the whole vocabulary, and wrong lists are treated
      as in linear_cross_entropy.

    Sharded arrays: tokens may be split along any dimension. The vocabulary must be whole on every
    device; a split vocabulary is an error.

    Inside of jax.shard_map, `axis_name` and `upstream` are as in linear_cross_entropy. A device's
    linear_weight, linear_bias, teacher_weight, teacher_bias and teacher_logits are then its own
    columns. All other arguments are the same on all devices of the axes, and so are all results, to
    the bit.

    Returns the loss, f32: [], or [...] with reduction "none". With `return_statistics` it returns
    (loss, DivergenceStatistics); the statistics have no gradient. Differentiable once in input,
    linear_weight and linear_bias. The gradients of the teacher's arrays are zeros and cost nothing,
    so that both heads may share a weight.

    Raises as linear_cross_entropy does.
    """
    shift = _integer("shift", shift)
    check_shift_has_target(shift, target)
    names = names_of(return_statistics)
    options = options_of(
        kind, beta, label_weight, reduction, ignore_index, logit_scale, softcap, temperature,
        teacher_logit_scale, teacher_softcap, teacher_temperature, empty_mean,
    )  # fmt: skip
    given = {
        "input": input, "weight": linear_weight, "bias": linear_bias,
        "teacher_input": teacher_input, "teacher_weight": teacher_weight,
        "teacher_bias": teacher_bias, "teacher_logits": teacher_logits,
    }  # fmt: skip
    arrays = _heads(given)
    listed = _listed(vocab_ids, teacher_vocab_ids, arrays, axis_name)
    one_temperature = teacher_temperature is None
    of_tokens, options = _of_tokens(
        arrays, target, token_weight, normalizer, _numbers(options), shift, one_temperature,
        axis_name is None, listed,
    )  # fmt: skip
    shape = arrays["input"].shape[:-1]
    tokens = (shape or (1,)) if axis_name is None else (math.prod(shape),)
    if axis_name is None and upstream is not None:
        raise invalid(f"upstream is {upstream!r} without axis_name")
    operands = {
        name: x.reshape(*tokens, x.shape[-1]) if name in _ROWS else x for name, x in arrays.items()
    }
    operands |= {n: x if n == "normalizer" else x.reshape(tokens) for n, x in of_tokens.items()}
    call = Call(tuple(operands), ("loss", *names), options, parse_memory(memory))
    with _casts_named():
        if axis_name is None:
            made = loss(call, list(operands.values()))
        else:
            made = _parallel_divergence.divergence(call, operands, axis_name, upstream)
        made = _shaped(made, shape)
    value = made.pop("loss")
    if not names:
        return value
    statistics = {name: jax.lax.stop_gradient(x) for name, x in made.items()}
    return value, _divergence.DivergenceStatistics(**statistics)


_ROWS = ("input", "teacher_input", "teacher_logits")


def _heads(given: dict[str, Any]) -> dict[str, Array]:
    """The arrays of both heads, the teacher's without gradients."""
    arrays = _arrays(given)
    _call.check_rows(arrays["input"], "input")
    for name, x in arrays.items():
        if name in _ROWS:
            check_teachers_rows(name, x.shape, arrays["input"].shape[:-1])
        if name.startswith("teacher"):
            arrays[name] = jax.lax.stop_gradient(x)
    return arrays


def _listed(
    vocab_ids: Any, teacher_vocab_ids: Any, arrays: dict[str, Array], axis_name: Any
) -> Any:
    """The list of rows, if one is given; replaces the arrays by their listed rows."""
    if vocab_ids is None and teacher_vocab_ids is None:
        return None
    if vocab_ids is not None and teacher_vocab_ids is not None:
        raise _vocabulary.both_given()
    if vocab_ids is not None:
        listed = _listed_rows(vocab_ids, arrays, axis_name)
    else:
        check_head(arrays["weight"])
        if "teacher_weight" in arrays:
            check_head(arrays["teacher_weight"], "teacher_weight")
            vocab = arrays["teacher_weight"].shape[0]
        elif "teacher_logits" in arrays:
            vocab = arrays["teacher_logits"].shape[-1]
        else:
            raise _vocabulary.no_teacher()
        rows = arrays["weight"].shape[0]
        listed = listed_of("teacher_vocab_ids", teacher_vocab_ids, vocab, axis_name, rows)
    for name, axis in (("teacher_weight", 0), ("teacher_bias", 0), ("teacher_logits", -1)):
        if name in arrays:
            arrays[name] = listed.of(name, arrays[name], axis)
    return listed


_NUMBERS = (
    "logit_scale", "softcap", "label_weight", "teacher_logit_scale", "teacher_softcap",
)  # fmt: skip


def _numbers(options: Divergence) -> Divergence:
    names = (*_NUMBERS, *(("beta",) if options.kind in MIXTURES else ()))
    numbers: Any = {name: _number(name, getattr(options, name)) for name in names}
    return options._replace(**numbers)


_teacher_temperature = renames({"temperature": "teacher_temperature"})(_temperature)


def _of_tokens(
    arrays: dict[str, Array], target: Any, token_weight: Any, normalizer: Any, options: Divergence,
    shift: int, one_temperature: bool, whole: bool, listed: Any = None,
) -> tuple[dict[str, Array], Divergence]:  # fmt: skip
    """The arrays that have a value for each token, where those that belong to labels are moved by
    `shift`, and the normalizer if it is an array; and the options, which include temperatures and a
    normalizer that are numbers."""
    shape = arrays["input"].shape[:-1]
    ignored = _integer("ignore_index", options.ignore_index)
    _abi.check_ignore_index(ignored)
    found = {}
    if target is None:
        ignored = IGNORE_INDEX  # not read
    else:
        found["target"], ignored = _labels(target, ignored, shift, arrays, whole, listed)
    if token_weight is not None:
        found["token_weight"] = _token_weight(token_weight, shape, shift)
    by, counted = _normalizer(normalizer)
    number, temperatures = _temperature(options.temperature, shape, shift)
    others = number, temperatures
    if not one_temperature:
        others = _teacher_temperature(options.teacher_temperature, shape, shift)
    arrays_of = {
        "normalizer": counted, "temperature": temperatures, "teacher_temperature": others[1],
    }  # fmt: skip
    found |= {name: x for name, x in arrays_of.items() if x is not None}
    return found, options._replace(
        ignore_index=ignored, temperature=number, teacher_temperature=others[0], normalizer=by,
        allow_tf32=not _exact_products(),
    )  # fmt: skip
