# SPDX-License-Identifier: Apache-2.0
"""The functions a user calls, except linear_divergence. docs/semantics.md has the formulas."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from logitless import _abi, _call, _statistics, _vocabulary
from logitless._abi import parse_memory
from logitless._arrays import (
    as_f32,
    check_range,
    check_real,
    check_unmasked,
    with_cast,
)
from logitless._call import (
    IGNORE_INDEX,
    EmptyMean,
    Reduction,
    check_shift,
    is_flat,
    options_of,
)
from logitless._errors import (
    OLD_OF_LOGPROB,
    LogitlessError,
    argument,
    entropy_detached,
    error_of,
    invalid,
    not_supported,
    placed,
    refuses,
    renames,
    wrong_dtype,
    wrong_shape,
)
from logitless.jax import _lists, _parallel
from logitless.jax._call import TOP, Call
from logitless.jax._loss import loss
from logitless.jax._run import Array, Tensor, explicit_sharding, run
from logitless.jax._vocabulary import Listed, host_of, refuse_axes

Statistics: TypeAlias = _statistics.Statistics[Array]

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from logitless._statistics import RowStatisticName, StatisticName

    Names: TypeAlias = StatisticName | Sequence[StatisticName]
    LossOptions: TypeAlias = _call.LossOptions[Any]

    class LinearOptions(_call.LinearOptions[Any], total=False):
        axis_name: str | tuple[str, ...] | None
        upstream: Literal["whole", "parts"] | None

    class LogprobOptions(_call.LogprobOptions[Any], total=False):
        axis_name: str | tuple[str, ...] | None
        upstream: Literal["whole", "parts"] | None

    class TopOptions(_call.ChosenOptions[Any], total=False):
        axis_name: str | tuple[str, ...] | None

    class ChosenOptions(TopOptions, total=False):
        over: Literal["vocab", "ids"]
        offsets: Any
        upstream: Literal["whole", "parts"] | None


def _opened(value: Any) -> Any:
    """The array of a framework's variable, as flax's nnx.Param, or of a box around one, as linen's
    Partitioned. Either may hold the other."""
    while not isinstance(value, (jax.Array, np.ndarray)):
        kind = type(value)
        if hasattr(kind, "__jax_array__"):
            value = value.__jax_array__()
        elif hasattr(kind, "unbox") and hasattr(kind, "replace_boxed"):
            value = value.unbox()
        else:
            break
    return value


_OF_LAYERS = {"kernel": "kernel[...].T", "embedding": "embedding[...]", "weight": "weight"}


def _array(name: str, value: Any) -> Array:
    value = _opened(value)
    if not isinstance(value, (jax.Array, np.ndarray)):
        of_layer = (way for has, way in _OF_LAYERS.items() if hasattr(value, has))
        way = next(of_layer, None) if name == "linear_weight" else None
        raise wrong_dtype(
            f"{name} is a {type(value).__name__}; allowed: an array"
            + (f", as its {way}" if way else "")
        )
    check_unmasked(name, value)
    return jnp.asarray(value)


_OPTIONAL = ("bias", "teacher_input", "teacher_weight", "teacher_bias", "teacher_logits")


def _arrays(given: dict[str, Any]) -> dict[str, Array]:
    """The arrays that are given; the core checks which optional ones go together."""
    return {
        name: _array(argument(name), value)
        for name, value in given.items()
        if value is not None or name not in _OPTIONAL
    }


def _on_host(value: Any) -> bool:
    """Whether an array's values can be read without waiting for another device."""
    if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer):
        return False
    return value.is_fully_addressable and {d.platform for d in value.devices()} == {"cpu"}


def _looked_at(value: Any) -> Any:
    """The values of an array that is on the host. None for other arrays, and for traced ones."""
    value = _opened(value)
    if isinstance(value, np.ndarray):
        return value
    return np.asarray(value) if _on_host(value) else None


def _f32(name: str, value: Any) -> Array:
    """A constant of the loss as f32. Refuses what JAX's own cast would lose: imaginary parts, and
    numbers that would become 0 or infinite."""
    value = _opened(value)
    array = _array(name, as_f32(name, value) if isinstance(value, np.ndarray) else value)
    check_real(name, np.dtype(array.dtype))
    if array.dtype == jnp.float64 and _on_host(array):
        as_f32(name, np.asarray(array))
    return array.astype(jnp.float32)


_INT32 = np.iinfo(np.int32)


def _as_int32(target: np.ndarray[Any, Any], ignore_index: int) -> tuple[Array, int]:
    """A host target and its ignore_index in int32. An ignore_index that does not fit becomes the
    least int32, which is then not allowed as a target."""
    ignored = target == ignore_index
    beyond = not _INT32.min <= ignore_index <= _INT32.max
    least = _INT32.min + beyond
    wrong = ~ignored & ((target < least) | (target > _INT32.max))
    if wrong.any():
        at = int(wrong.argmax())
        message = (
            f"target[{at}] is {target.flat[at]}; allowed: {least} to {_INT32.max}, or ignore_index "
            f"({ignore_index}), because JAX makes int32 of int64 unless jax_enable_x64 is set"
        )
        raise error_of(8, placed(message, target.shape))
    if beyond:
        target, ignore_index = np.where(ignored, _INT32.min, target), _INT32.min
    return jnp.asarray(target, jnp.int32), int(ignore_index)


def _target(value: Any, ignore_index: int) -> tuple[Array, int]:
    """The target, and the ignore_index in its dtype. Without jax_enable_x64 JAX silently keeps only
    the low 32 bits of an int64."""
    value = _opened(value)
    check_unmasked("target", value)
    narrow = jax.dtypes.canonicalize_dtype(np.int64) != np.int64
    if narrow and isinstance(value, jax.Array) and value.dtype == np.int64:
        # The array was made with jax_enable_x64, so anything computed from it here would be cut to
        # 32 bits.
        if isinstance(value, jax.core.Tracer):
            raise wrong_dtype("target is int64; allowed: int32 where jax_enable_x64 is not set")
        value = np.asarray(value)
    if narrow and isinstance(value, np.ndarray) and value.dtype in (np.int32, np.int64):
        return _as_int32(value, ignore_index)
    target = _array("target", value)
    if target.dtype != jnp.int32 or _INT32.min <= ignore_index <= _INT32.max:
        return target, ignore_index
    if narrow:
        raise invalid(
            f"ignore_index is {ignore_index}; allowed: an int32 (JAX makes int32 of int64 targets "
            "unless jax_enable_x64 is set), or any int64 with a NumPy target outside of jax.jit"
        )
    return target.astype(jnp.int64), ignore_index


def _number(name: str, value: Any) -> float:
    """`value` as a float. Raises unless it is a Python number, because options are constants of the
    compiled program."""
    real = isinstance(value, (int, float, np.integer, np.floating))
    if isinstance(value, bool) or not real:
        raise wrong_dtype(f"{name} is a {type(value).__name__}; allowed: a Python number")
    return _abi.float_of(name, value)


def _integer(name: str, value: Any) -> int:
    if not isinstance(value, (int, np.integer)):
        raise wrong_dtype(f"{name} is a {type(value).__name__}; allowed: a Python int")
    return int(value)


def _outputs(names: Any) -> tuple[str, ...]:
    return ("loss", *_statistics.names_of(names))


def check_head(head: Array, name: str = "linear_weight") -> None:
    if head.ndim != 2:
        raise wrong_shape(f"{name} has shape {head.shape}; allowed: [V, D]")


def _check_target(rows: Array, target: Array, what: str) -> None:
    _call.check_rows(rows, what)
    if jnp.issubdtype(target.dtype, jnp.floating):
        raise _call.soft_target(target.dtype, target.shape)
    if target.dtype not in (jnp.int32, jnp.int64):
        way = "; use .astype(jnp.int32)" if jnp.issubdtype(target.dtype, jnp.integer) else ""
        raise wrong_dtype(f"target is {target.dtype}; allowed: int32, int64{way}")
    if target.shape != rows.shape[:-1]:
        raise _call.wrong_target(target.shape, rows.shape, what)


def _moved(values: Array, shift: int, rest: float) -> Array:
    """Position i gets the value of position i + shift, and the last `shift` positions get `rest`.
    The result is sharded like `values`."""
    given = explicit_sharding(values)
    shift = min(shift, values.shape[-1])
    if given is None:
        end = jnp.full_like(values[..., :shift], rest)
        return jnp.concatenate([values[..., shift:], end], axis=-1)
    # JAX can slice only dimensions that are not sharded, and join only arrays with the same
    # sharding.
    spec = (*given.spec, *[None] * values.ndim)[: values.ndim - 1]
    whole = jax.sharding.NamedSharding(given.mesh, jax.sharding.PartitionSpec(*spec, None))
    values = jax.sharding.reshard(values, whole)
    end = jax.sharding.reshard(jnp.full_like(values[..., :shift], rest), whole)
    moved: Array = jnp.concatenate([values[..., shift:], end], axis=-1)
    moved = jax.sharding.reshard(moved, given)
    return moved


def _temperature(value: Any, shape: tuple[int, ...], shift: int) -> tuple[float, Array | None]:
    """Returns (number, None) for a number, which is a constant of the program, or (1.0, array) for
    an array in the target's shape, [N] or broadcastable to it; `shift` moves it with the target."""
    value = _opened(value)
    if not isinstance(value, (jax.Array, np.ndarray)):
        return _number("temperature", value), None
    array = _f32("temperature", value)
    flat = is_flat(array.shape, shape)
    array = array.reshape(shape) if flat else jnp.broadcast_to(array, shape)
    return 1.0, _moved(array, shift, 1.0) if shift else array


def _token_weight(value: Any, shape: tuple[int, ...], shift: int) -> Array:
    """The token weights [...], moved with the target."""
    weights = _f32("token_weight", value)
    if weights.shape != shape:
        raise wrong_shape(f"token_weight has shape {weights.shape}; allowed: {shape}")
    return _moved(weights, shift, 1.0) if shift else weights


def _normalizer(value: Any) -> tuple[float, Array | None]:
    """The normalizer as the core takes it: a host number other than 0, or an array []."""
    value = _opened(value)
    if value is None:
        return 0.0, None
    if isinstance(value, (jax.Array, np.ndarray)):
        if value.shape != ():
            raise wrong_shape(f"normalizer has shape {value.shape}; allowed: ()")
        if value.dtype == bool:
            raise wrong_dtype("normalizer is bool; allowed: a number or an array []")
        return 0.0, _f32("normalizer", value)
    number = _number("normalizer", value)
    # In the options, 0 means that tokens are counted.
    return (number, None) if number else (0.0, jnp.float32(0))


def _exact_products() -> bool:
    """Whether f32 products use unrounded operands, which is the default unless JAX's switch is
    set."""
    precision = jax.config.values["jax_default_matmul_precision"]
    return precision in (None, "highest", "float32", "F32_F32_F32")


def _vocab_of(arrays: dict[str, Array]) -> int:
    """V, or 0 if the array that has it has a wrong shape, which raises later."""
    if "weight" in arrays:
        return arrays["weight"].shape[0] if arrays["weight"].ndim == 2 else 0
    return arrays["logits"].shape[-1]


def listed_of(name: str, value: Any, vocab: int, axis_name: Any, rows: int | None = None) -> Listed:
    """A list of rows as the vocabulary. With `rows` it must have that many ids, in the order of the
    student's rows."""
    refuse_axes(name, axis_name)
    return Listed(name, _array(name, value), host_of(_looked_at(value)), vocab, rows)


def _labels(
    target: Any, ignore_index: int | None, shift: int, arrays: dict[str, Array], whole: bool,
    listed: Listed | None = None,
) -> tuple[Array, int]:  # fmt: skip
    """The checked target, moved by `shift`, and its ignore_index. `whole`: the arrays hold the
    whole vocabulary, or the `listed` rows of it."""
    what = next(iter(arrays))
    ignored = _integer("ignore_index", IGNORE_INDEX if ignore_index is None else ignore_index)
    _abi.check_ignore_index(ignored)
    looked_at = _looked_at(target)
    held, held_ignored = _target(target, ignored)
    _check_target(arrays[what], held, what)
    if shift:
        check_shift(shift, held.shape)
    vocab = _vocab_of(arrays)
    if listed is not None:
        listed.check(looked_at, ignored, shift, "target")
    elif looked_at is not None and vocab and whole:
        check_range(looked_at, vocab, ignored, shift)
    moved = _moved(held, shift, held_ignored) if shift else held
    if listed is None:
        return moved, held_ignored
    return listed.places(moved, held_ignored), _vocabulary.ABSENT


@contextlib.contextmanager
def _casts_named() -> Iterator[None]:
    """Adds to errors about a dtype how to cast to the input's."""
    try:
        yield
    except LogitlessError as error:
        error.args = (with_cast(str(error)),)
        raise


def _shaped(
    made: dict[str, Array], shape: tuple[int, ...], lists: bool = False
) -> dict[str, Array]:
    """Reshapes the outputs of tokens to the tokens' `shape`; with `lists`, logits_at [M] stays."""
    columns = {name: (x.shape[-1],) for name, x in made.items() if name in ("logits_at", *TOP)}
    return {
        name: x.reshape(*shape, *columns.get(name, ()))
        if x.ndim and not (lists and name == "logits_at")
        else x
        for name, x in made.items()
    }


def _loss(
    rows: dict[str, Any], target: Any, outputs: Sequence[str], *, weight: Any = None,
    reduction: Reduction = "mean", ignore_index: int | None = -100, label_smoothing: float = 0.0,
    z_loss: float = 0.0, logit_scale: float = 1.0, softcap: float | None = 0.0,
    temperature: Any = 1.0, token_weight: Any = None, normalizer: Any = None,
    shift: bool | int = False, memory: int | str | None = None, empty_mean: str = "zero",
    axis_name: Any = None, upstream: str | None = None, ids: Array | None = None, k: int = 0,
    vocab_ids: Any = None, offsets: Array | None = None,
) -> dict[str, Array]:  # fmt: skip
    """The outputs by name, in the shape of the target. `rows`: input, weight, bias, or logits.
    `ids` [..., K], or [M] with `offsets`, are for `logits_at`, `k` is for `top_logits` and
    `top_ids`."""
    arrays = _arrays(rows)
    what = next(iter(arrays))
    if "weight" in arrays and axis_name is None:
        check_head(arrays["weight"])
    shift = _integer("shift", shift)
    listed = None
    if vocab_ids is not None:
        listed = _listed_rows(vocab_ids, arrays, axis_name)
        weight = None if weight is None else listed.of("weight", _f32("weight", weight))
    target, ignore_index = _labels(target, ignore_index, shift, arrays, axis_name is None, listed)
    shape = target.shape
    number, counted = _normalizer(normalizer)
    degrees, temperatures = _temperature(temperature, shape, shift)
    options = options_of(
        reduction, ignore_index, _number("label_smoothing", label_smoothing),
        _number("z_loss", z_loss), _number("logit_scale", logit_scale),
        None if softcap is None else _number("softcap", softcap), degrees, empty_mean,
    )  # fmt: skip
    options = options._replace(
        normalizer=number, allow_tf32="weight" in arrays and not _exact_products()
    )
    operands = dict(arrays)
    # A linear loss keeps its dimensions of tokens, because each may be sharded.
    keeps = what == "input" and axis_name is None
    tokens = (shape or (1,)) if keeps else (math.prod(shape),)
    if what == "input" or not shape:
        operands[what] = arrays[what].reshape(*tokens, arrays[what].shape[-1])
    operands["target"] = target.reshape(tokens)
    if token_weight is not None:
        operands["token_weight"] = _token_weight(token_weight, shape, shift).reshape(tokens)
    if weight is not None:
        operands["vocab_weight"] = _f32("weight", weight)  # [V]
    if counted is not None:
        operands["normalizer"] = counted
    if temperatures is not None:
        operands["temperature"] = temperatures.reshape(tokens)
    if ids is not None and offsets is not None:
        operands |= {"ids": ids, "id_offsets": offsets}
    elif ids is not None:
        operands["ids"] = ids.reshape(*tokens, ids.shape[-1])
    call = Call(tuple(operands), tuple(outputs), options, parse_memory(memory), k)
    if axis_name is None and upstream is not None:
        raise invalid(f"upstream is {upstream!r} without axis_name")
    with _casts_named():
        if axis_name is not None:
            made = _parallel.loss(call, operands, axis_name, upstream)
        else:
            made = loss(call, list(operands.values()))
    if listed is not None and "argmax" in made:
        made["argmax"] = listed.whole(made["argmax"])
    return _shaped(made, shape, offsets is not None)


def _listed_rows(vocab_ids: Any, arrays: dict[str, Array], axis_name: Any) -> Listed:
    """Replaces the head's arrays in `arrays` by their listed rows, and returns the list."""
    check_head(arrays["weight"])
    listed = listed_of("vocab_ids", vocab_ids, arrays["weight"].shape[0], axis_name)
    for name in ("weight", "bias"):
        if name in arrays:
            arrays[name] = listed.of(argument(name), arrays[name])
    return listed


def _result(made: dict[str, Array]) -> Any:
    value = made.pop("loss")
    return (value, _statistics.Statistics(**made)) if made else value


@overload
def linear_cross_entropy(
    input: Any, linear_weight: Any, target: Any, *, return_statistics: tuple[()] = ...,
    **options: Unpack[LinearOptions],
) -> Array: ...  # fmt: skip
@overload
def linear_cross_entropy(
    input: Any, linear_weight: Any, target: Any, *, return_statistics: Names,
    **options: Unpack[LinearOptions],
) -> tuple[Array, Statistics]: ...  # fmt: skip
def linear_cross_entropy(
    input: Any,
    linear_weight: Any,
    target: Any,
    *,
    linear_bias: Any = None,
    weight: Any = None,
    reduction: Reduction = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = 0.0,
    temperature: Any = 1.0,
    token_weight: Any = None,
    normalizer: Any = None,
    shift: bool | int = False,
    memory: int | str | None = None,
    return_statistics: Any = (),
    empty_mean: EmptyMean = "zero",
    vocab_ids: Any = None,
    axis_name: str | tuple[str, ...] | None = None,
    upstream: Literal["whole", "parts"] | None = None,
) -> Any:
    """Cross-entropy of the logits input @ linear_weight.T + linear_bias, without the logits.

    docs/semantics.md has the formulas, edge cases and error bounds. [...] stands for any number of
    token dimensions, with N tokens in all. Numbers, strings and `memory` are constants of the
    compiled program.

    Arrays, or variables with a __jax_array__ method, such as flax's nnx.Param:

    - `input` [..., D], `linear_weight` [V, D]: one dtype, f32, f16 or bf16.
    - `target` [...]: class indices, int32 or int64. Tokens whose target is `ignore_index` (None:
      -100) do not count.
    - `linear_bias` [V]: the input's dtype or f32.
    - `weight` [V] of classes and `token_weight` [...]: factors of the loss. They are converted to
      f32 and have no gradient.

    Options:

    - `reduction`: "mean", "sum" or "none". `normalizer`: the divisor of "mean", a number or an
      array []; by default the sum of the class weights over the tokens that count. `empty_mean`:
      the mean over no token, "zero" or "nan".
    - `label_smoothing` in [0, 1]; `z_loss`, the factor of lse^2.
    - `logit_scale`, `softcap`, `temperature`: a logit x becomes softcap tanh(logit_scale x /
      softcap) / temperature; a softcap of 0 or None means none. A temperature may be an array in
      the target's shape, [N] or broadcastable to it; it is converted to f32 and has no gradient. A
      token whose temperature is not a positive normal number has a NaN loss.
    - `shift`: True or k, for next-token prediction. Position i gets the target of position i + k,
      with the token_weight and temperature of that label; the last k positions do not count.
    - `memory`: the most bytes for the workspace, or a text such as "64MiB". None takes what the
      library recommends.
    - `return_statistics`: names of fields of `Statistics`.
    - `vocab_ids` [V'], int32 or int64, each once, in any order: the softmax is over these rows of
      linear_weight alone, which are copied. linear_bias and weight still have V elements, and
      gradients are 0 at other rows. Targets and the statistic argmax are ids of the whole
      vocabulary; a target that is not in the list is out of range. A wrong list raises if its
      values can be read without waiting (NumPy, or JAX on the CPU outside of jit); otherwise every
      result is NaN.

    Sharded arrays need no option: tokens may be split along any dimension, and the vocabulary along
    the rows of linear_weight. Under jax.jit and outside of it each device then computes its own
    part, and no device has all of linear_weight.

    Inside of jax.shard_map, `axis_name` names the mesh axes over which the vocabulary is split. A
    device's linear_weight is then [V/P, D] and its linear_bias [V/P]; all other arguments are the
    same on all devices of these axes. With check_vma=False gradients need `upstream` too: "whole"
    if every device gets the whole upstream gradient and returns the whole gradient of input
    (jax.grad inside of jax.shard_map), "parts" if the devices' upstream gradients add up to the
    whole, as with JAX's own collectives (jax.grad around it).

    Returns the loss, f32: [], or [...] with reduction "none". With `return_statistics` it returns
    (loss, Statistics). Differentiable once with respect to input, linear_weight and linear_bias.

    Raises LogitlessValueError, LogitlessTypeError or LogitlessNotSupportedError where the call is
    traced; the message names the argument, its value and what is allowed. docs/python.md says when
    a target out of range raises.
    """
    made = _loss(
        {"input": input, "weight": linear_weight, "bias": linear_bias}, target,
        _outputs(return_statistics), weight=weight, reduction=reduction, ignore_index=ignore_index,
        label_smoothing=label_smoothing, z_loss=z_loss, logit_scale=logit_scale, softcap=softcap,
        temperature=temperature, token_weight=token_weight, normalizer=normalizer, shift=shift,
        memory=memory, empty_mean=empty_mean, axis_name=axis_name, upstream=upstream,
        vocab_ids=vocab_ids,
    )  # fmt: skip
    return _result(made)


@overload
def linear_logprob(
    input: Any, linear_weight: Any, target: Any, *, entropy: Literal[False] = ...,
    **options: Unpack[LogprobOptions],
) -> Array: ...  # fmt: skip
@overload
def linear_logprob(
    input: Any, linear_weight: Any, target: Any, *, entropy: Literal[True, "detached"],
    **options: Unpack[LogprobOptions],
) -> tuple[Array, Array]: ...  # fmt: skip
@refuses(OLD_OF_LOGPROB)
def linear_logprob(
    input: Any,
    linear_weight: Any,
    target: Any,
    *,
    temperature: Any = 1.0,
    linear_bias: Any = None,
    ignore_index: int | None = -100,
    logit_scale: float = 1.0,
    softcap: float | None = 0.0,
    shift: bool | int = False,
    memory: int | str | None = None,
    entropy: bool | str = False,
    vocab_ids: Any = None,
    axis_name: str | tuple[str, ...] | None = None,
    upstream: Literal["whole", "parts"] | None = None,
) -> Any:
    """Log-probability of every target token, [...] f32, at most 0; for reinforcement learning.
    docs/semantics.md, "Statistics of a token", has the formulas.

    With `entropy=True` it returns the pair (logprob, entropy), both f32 and differentiable; with
    "detached" the entropy has no gradient. Tokens that do not count give 0.

    Everything else is as in `linear_cross_entropy`: the arrays, linear_bias, ignore_index,
    logit_scale, softcap, temperature, shift, memory, vocab_ids, sharded arrays, axis_name,
    upstream and the errors.
    """
    detached = entropy_detached(entropy)
    made = _loss(
        {"input": input, "weight": linear_weight, "bias": linear_bias}, target,
        ("logprob", "entropy") if entropy else ("logprob",), reduction="none",
        ignore_index=ignore_index, logit_scale=logit_scale, softcap=softcap,
        temperature=temperature, shift=shift, memory=memory, axis_name=axis_name,
        upstream=upstream, vocab_ids=vocab_ids,
    )  # fmt: skip
    if not entropy:
        return made["logprob"]
    return made["logprob"], jax.lax.stop_gradient(made["entropy"]) if detached else made["entropy"]


_ABSENT = -1


def _as_target(value: Any) -> Array:
    """Ids or offsets in a dtype that a target may have."""
    held, _ = _target(value, _ABSENT)
    if held.dtype not in (jnp.int32, jnp.int64):
        raise wrong_dtype(f"target is {held.dtype}; allowed: int32, int64")
    return held


_as_ids = renames({"target": "ids"})(_as_target)
_as_offsets = renames({"target": "offsets"})(_as_target)


def _ids(value: Any, input: Array, vocab: int, listed: Listed | None) -> Array:
    """The checked ids [..., K]. `vocab`: the number of classes."""
    ids = _as_ids(value)
    _call.check_ids(ids.shape, input.shape)
    return _checked_ids(ids, _looked_at(value), vocab, listed, input.shape[:-1])


def _checked_ids(
    ids: Array, looked_at: Any, vocab: int, listed: Listed | None, tokens: tuple[int, ...] | None
) -> Array:
    """The ids, or with a list of rows their places in it. Raises for an id that does not exist, if
    ids can be read. `tokens`: the shape of the tokens, or None if ids are [M]."""
    if listed is not None:
        listed.check(looked_at, _ABSENT, 0, "ids")
        return listed.places(ids, _ABSENT)
    if looked_at is None or not vocab:
        return ids
    wrong = (looked_at < _ABSENT) | (looked_at >= vocab)
    if wrong.any():
        first = int(wrong.argmax())
        row, column = divmod(first, ids.shape[-1])
        at = f"{first}" if tokens is None else f"{row}, {column}"
        message = f"ids[{at}] is {looked_at.flat[first]}; allowed: 0 to {vocab - 1}, or -1 for none"
        raise error_of(8, placed(message, ids.shape if tokens is None else tokens, name="ids"))
    return ids


def _listed_ids(
    ids: Any, offsets: Any, input: Array, vocab: int, listed: Listed | None
) -> tuple[Array, Array]:
    """The checked ids [M] and offsets [N + 1]."""
    held, tokens = _as_ids(ids), math.prod(input.shape[:-1])
    _call.check_listed_ids(held.shape, tokens)
    ends = _looked_at(offsets)
    if ends is not None and ends.shape == (tokens + 1,) and ends.dtype in (np.int32, np.int64):
        _check_offsets(ends, held.shape[0])  # before JAX cuts them to 32 bits
    held_offsets = _as_offsets(offsets)
    _call.check_offsets(held_offsets.shape, tokens)
    return _checked_ids(held, _looked_at(ids), vocab, listed, None), held_offsets


def _check_offsets(ends: np.ndarray[Any, Any], places: int) -> None:
    """Like the core's check: offsets begin at 0, do not decrease, and end at M."""
    least, most = np.append(0, ends[:-1]), np.full(len(ends), places)
    least[-1], most[0] = places, 0
    wrong = (ends < least) | (ends > most)
    if wrong.any():
        at = int(wrong.argmax())
        raise invalid(f"offsets[{at}] is {ends[at]}; allowed: {least[at]} to {most[at]}")


@jax.custom_vjp
def _logprobs_at(
    logits: Array, lse: Array, reference: Array, log_sum: Array, ids: Array, there: Array
) -> Array:
    """The logits at `ids` minus the lse, -inf for absent ids. Only ids that are `there` have
    gradients. All arguments have the shape of `ids`."""
    return jnp.where(ids == _ABSENT, -jnp.inf, _less_lse(logits, reference, log_sum))


def _less_lse(logits: Array, reference: Array, log_sum: Array) -> Array:
    """[..., K]: the logits minus the lse, at most 0."""
    return jnp.minimum(0, (logits - reference) - log_sum)  # a NaN stays


def _logprobs_at_forward(*given: Array) -> Any:
    return _logprobs_at(*given), given[-1]


def _logprobs_at_backward(there: Array, upstream: Array) -> Any:
    to_logits = jnp.where(there, upstream, 0)
    none = jnp.zeros_like(to_logits)
    return to_logits, -to_logits, none, none, None, None


_logprobs_at.defvjp(_logprobs_at_forward, _logprobs_at_backward)


def _over_vocabulary(
    rows: dict[str, Any], ids: Array, offsets: Array | None, names: Sequence[str], vocab: int,
    options: dict[str, Any],
) -> tuple[Array, dict[str, Array]]:  # fmt: skip
    """The log-probabilities at the ids, and the statistics `names` of the tokens."""
    if offsets is None and ids.shape[-1] == 1:  # as linear_logprob does, with its bits
        made = _loss(rows, ids[..., 0], ("logprob", *names), **options)
        return jnp.where(ids == _ABSENT, -jnp.inf, made["logprob"][..., None]), made
    if offsets is None:
        some = (ids != _ABSENT).any(-1)
        target = jnp.where(some, jnp.clip(ids.max(-1), 0, vocab - 1), _ABSENT)
    else:
        some = _lists.any_of(ids != _ABSENT, offsets).reshape(rows["input"].shape[:-1])
        target = jnp.where(some, 0, _ABSENT)
    asked = dict.fromkeys(("logits_at", "lse", "row_reference", "row_log_sum", *names))
    made = _loss(rows, target, tuple(asked), ids=ids, offsets=offsets, **options)

    def at_ids(of_rows: Array) -> Array:
        if offsets is None:
            return jnp.broadcast_to(of_rows[..., None], ids.shape)
        return _lists.spread(of_rows.reshape(-1), offsets, ids.shape[0])

    state = (at_ids(lax.stop_gradient(made[n])) for n in ("row_reference", "row_log_sum"))
    there = (ids >= 0) & (ids < vocab)
    return _logprobs_at(made["logits_at"], at_ids(made["lse"]), *state, ids, there), made


def _among_ids(
    rows: dict[str, Any], ids: Array, offsets: Array | None, options: dict[str, Any]
) -> Array:
    """The log-probabilities at the ids, over a token's ids alone. Backward of the logits takes no
    product of the whole vocabulary, because the call asks for nothing else."""
    target = jnp.zeros(rows["input"].shape[:-1], jnp.int32)
    logits = _loss(rows, target, ("logits_at",), ids=ids, offsets=offsets, **options)["logits_at"]
    absent = ids == _ABSENT
    if offsets is None:
        return _log_softmax(logits, absent)
    return _lists.log_softmax(logits, offsets, absent)


@jax.custom_vjp
def _log_softmax(logits: Array, absent: Array) -> Array:
    """[..., K]: the log-softmax over each token's logits, in which those that are `absent` are
    -inf. The gradient of a token is exactly 0 if its upstream gradient is, whatever its logits
    are."""
    made: Array = _log_softmax_forward(logits, absent)[0]
    return made


@jax.jit
def _log_softmax_forward(logits: Array, absent: Array) -> Any:
    # 0 if all are absent, because -inf - (-inf) is NaN.
    shifted = jnp.where(absent.all(-1, keepdims=True), 0, logits)
    shifted = shifted - shifted.max(-1, keepdims=True)
    exps = jnp.exp(shifted)
    total = exps.sum(-1, keepdims=True)
    return jnp.where(absent, -jnp.inf, shifted - jnp.log(total)), (exps, total, absent)


@jax.jit
def _log_softmax_backward(kept: Any, upstream: Array) -> Any:
    exps, total, absent = kept
    upstream = jnp.where(absent, 0, upstream)
    grad = upstream - upstream.sum(-1, keepdims=True) / total * exps
    return jnp.where((upstream != 0).any(-1, keepdims=True), grad, 0), None


_log_softmax.defvjp(_log_softmax_forward, _log_softmax_backward)


@overload
def linear_logprobs_at(
    input: Any, linear_weight: Any, ids: Any, *, return_statistics: tuple[()] = ...,
    **options: Unpack[ChosenOptions],
) -> Array: ...  # fmt: skip
@overload
def linear_logprobs_at(
    input: Any, linear_weight: Any, ids: Any, *,
    return_statistics: RowStatisticName | Sequence[RowStatisticName],
    **options: Unpack[ChosenOptions],
) -> tuple[Array, Statistics]: ...  # fmt: skip
def linear_logprobs_at(
    input: Any,
    linear_weight: Any,
    ids: Any,
    *,
    linear_bias: Any = None,
    logit_scale: float = 1.0,
    softcap: float | None = 0.0,
    temperature: Any = 1.0,
    memory: int | str | None = None,
    return_statistics: Any = (),
    over: Literal["vocab", "ids"] = "vocab",
    offsets: Any = None,
    vocab_ids: Any = None,
    axis_name: str | tuple[str, ...] | None = None,
    upstream: Literal["whole", "parts"] | None = None,
) -> Any:
    """Log-probabilities of the classes `ids` [..., K] of each token, int32 or int64, K from 1 to
    1024: f32 in the shape of `ids`, at most 0, each differentiable. For a teacher's likeliest
    tokens, candidates, or the tokens that a sampler drew. docs/semantics.md, "Chosen columns", has
    the formulas.

    - `input` [..., D], `linear_weight` [V, D]: as in `linear_cross_entropy`, whose errors this
      function raises.
    - The id -1 stands for no class: its log-probability is -inf, and its upstream gradient is not
      read. A token whose ids are all -1 is not computed; its statistics are 0, its argmax -1. Any
      other id outside the vocabulary is an error on the CPU; on a GPU it gives NaN, without a
      gradient (with over="ids" all values of that token are NaN). An id may be given repeatedly.
    - `over`: "vocab": the softmax is over the whole vocabulary. "ids": it is over the token's ids
      alone, where an id that is given twice counts twice. That multiplies only these classes, and
      cannot be combined with `return_statistics` or `vocab_ids`.
    - `offsets` [N + 1], int32 or int64, with `ids` [M]: lists of any length. Token i of the N,
      counted over all leading dimensions, has ids[offsets[i]:offsets[i + 1]]. Offsets that do not
      begin at 0, that decrease or do not end at M are an error on the CPU; on a GPU an id that
      belongs to no list gives NaN.
    - over="ids" and `offsets` cannot be combined with `axis_name` or a split vocabulary.
    - The options are those of linear_logprob: temperature (a number, or an array in the shape of
      the tokens), logit_scale, softcap, linear_bias, memory, vocab_ids (`ids` are still ids of the
      whole vocabulary), axis_name, upstream.
    - `return_statistics`: names of those `Statistics` that need no target. The result is then
      (log-probabilities, Statistics)."""
    alone = _vocabulary.check_over(over)
    if axis_name is not None and (alone or offsets is not None):
        beside = "over='ids'" if alone else "offsets"
        raise not_supported(
            f"{beside} is given, and axis_name is {axis_name!r}; allowed beside it: None, and a "
            "linear_weight of the whole vocabulary"
        )
    if alone:
        _vocabulary.refuse_beside_ids(vocab_ids, return_statistics)
    names = _statistics.names_of(return_statistics, _statistics.OF_ROWS)
    hidden, head = _array("input", input), _array("linear_weight", linear_weight)
    _call.check_rows(hidden, "input")
    check_head(head)
    rows: dict[str, Any] = {"input": hidden, "weight": head, "bias": linear_bias}
    listed = None
    if vocab_ids is not None:
        rows = _arrays(rows)
        listed = _listed_rows(vocab_ids, rows, axis_name)
        head = rows["weight"]
    vocab = head.shape[0] * (1 if axis_name is None else _parallel.size_of(axis_name))
    ends = None
    if offsets is None:
        chosen = _ids(ids, hidden, vocab, listed)
    else:
        chosen, ends = _listed_ids(ids, offsets, hidden, vocab, listed)
    options: dict[str, Any] = {
        "reduction": "none", "ignore_index": _ABSENT, "logit_scale": logit_scale,
        "softcap": softcap, "temperature": temperature, "memory": memory, "axis_name": axis_name,
        "upstream": upstream,
    }  # fmt: skip
    if alone:
        return _among_ids(rows, chosen, ends, options)
    logprobs, made = _over_vocabulary(rows, chosen, ends, names, vocab, options)
    if not names:
        return logprobs
    if listed is not None and "argmax" in made:
        made["argmax"] = listed.whole(made["argmax"])
    return logprobs, _statistics.Statistics(**{name: made[name] for name in names})


@overload
def linear_topk(
    input: Any, linear_weight: Any, k: int, *, return_statistics: tuple[()] = ...,
    **options: Unpack[TopOptions],
) -> tuple[Array, Array]: ...  # fmt: skip
@overload
def linear_topk(
    input: Any, linear_weight: Any, k: int, *,
    return_statistics: RowStatisticName | Sequence[RowStatisticName],
    **options: Unpack[TopOptions],
) -> tuple[Array, Array, Statistics]: ...  # fmt: skip
def linear_topk(
    input: Any,
    linear_weight: Any,
    k: int,
    *,
    linear_bias: Any = None,
    logit_scale: float = 1.0,
    softcap: float | None = 0.0,
    temperature: Any = 1.0,
    memory: int | str | None = None,
    return_statistics: Any = (),
    axis_name: str | tuple[str, ...] | None = None,
    vocab_ids: Any = None,
) -> Any:
    """The k likeliest classes of each token of `input` [..., D] by the head `linear_weight` [V, D].

    Returns (log-probabilities, ids), both [..., k]: f32, at most 0, and int32. With
    `return_statistics` it returns (log-probabilities, ids, Statistics). The likeliest comes first,
    and of equal logits the lowest id. The results have no gradient. A token with a NaN among its
    logits gets log-probabilities that are NaN, and arbitrary ids. docs/semantics.md, "Top-k", has
    the definition.

    - `k`: a Python int from 1 to 256, and at most V. With `vocab_ids` [V'], which restrict the
      classes, at most V'.
    - linear_bias, logit_scale, softcap, temperature, memory and axis_name: as in
      `linear_logprobs_at`.
    - `return_statistics`: names of those `Statistics` that need no target.

    Raises LogitlessValueError for a k outside its range, and the errors of linear_cross_entropy.
    """
    names = _statistics.names_of(return_statistics, _statistics.OF_ROWS)
    hidden, head = _array("input", input), _array("linear_weight", linear_weight)
    _call.check_rows(hidden, "input")
    check_head(head)
    given: dict[str, Any] = {"input": hidden, "weight": head, "bias": linear_bias}
    rows = _arrays(given)
    listed = None
    if vocab_ids is not None:
        listed = _listed_rows(vocab_ids, rows, axis_name)
        head = rows["weight"]
    count = _integer("k", k)
    vocab = head.shape[0] * (1 if axis_name is None else _parallel.size_of(axis_name))
    most = min(vocab, _abi.MOST_LISTED)
    if isinstance(k, bool) or not 1 <= count <= most:
        raise invalid(f"k is {k}; allowed: 1 to {most}, the least of V and {_abi.MOST_LISTED}")
    rows = {name: lax.stop_gradient(x) for name, x in rows.items()}
    temperature = _opened(temperature)
    if isinstance(temperature, jax.Array):
        temperature = lax.stop_gradient(temperature)
    asked = dict.fromkeys((*TOP, "row_reference", "row_log_sum", *names))
    made = _loss(
        rows, jnp.zeros(hidden.shape[:-1], jnp.int32), tuple(asked), reduction="none",
        logit_scale=logit_scale, softcap=softcap, temperature=temperature, memory=memory,
        axis_name=axis_name, k=count,
    )  # fmt: skip
    of_rows = (made[name][..., None] for name in ("row_reference", "row_log_sum"))
    logprobs = _less_lse(made["top_logits"], *of_rows)
    if listed is not None:
        made |= {name: listed.whole(made[name]) for name in ("top_ids", "argmax") if name in made}
    if not names:
        return logprobs, made["top_ids"]
    kept = _statistics.Statistics(**{name: made[name] for name in names})
    return logprobs, made["top_ids"], kept


@overload
def cross_entropy(
    logits: Any, target: Any, *, return_statistics: tuple[()] = ...,
    **options: Unpack[LossOptions],
) -> Array: ...  # fmt: skip
@overload
def cross_entropy(
    logits: Any, target: Any, *, return_statistics: Names,
    **options: Unpack[LossOptions],
) -> tuple[Array, Statistics]: ...  # fmt: skip
def cross_entropy(
    logits: Any,
    target: Any,
    *,
    weight: Any = None,
    reduction: Reduction = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float | None = 0.0,
    temperature: Any = 1.0,
    token_weight: Any = None,
    normalizer: Any = None,
    return_statistics: Any = (),
    empty_mean: EmptyMean = "zero",
) -> Any:
    """Cross-entropy of given `logits` [..., V], f32, f16 or bf16. `target` [...], these options,
    result and errors are as in `linear_cross_entropy`. Under jit the gradient reuses the logits'
    memory if nothing else needs them (within a program, or if they are a donated argument).
    """
    made = _loss(
        {"logits": logits}, target, _outputs(return_statistics), weight=weight,
        reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing,
        z_loss=z_loss, logit_scale=logit_scale, softcap=softcap, temperature=temperature,
        token_weight=token_weight, normalizer=normalizer, empty_mean=empty_mean,
    )  # fmt: skip
    return _result(made)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _softmax(logits: Array, axis: int) -> Array:
    moved = jnp.moveaxis(logits, axis, -1)
    if not moved.size:
        return logits
    rows = moved if moved.ndim > 1 else moved[None]  # [..., C]
    result = Tensor("probabilities", rows.shape, np.dtype(rows.dtype))
    made = run(_abi.SOFTMAX, {"logits": rows}, [result], None)["probabilities"]
    return jnp.moveaxis(made.reshape(moved.shape), -1, axis)


@_softmax.defjvp
def _softmax_jvp(axis: int, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    p = _softmax(*primals, axis)
    moved = p * tangents[0]
    return p, moved - p * moved.sum(axis, keepdims=True)


def softmax(logits: Any, axis: int = -1) -> Array:
    """Softmax of `logits`, f32, f16 or bf16, along `axis`, in their shape and dtype; differentiable
    any number of times. docs/semantics.md, "Softmax", has the definition. Under jit the result
    reuses the logits' memory if nothing else needs them. Raises LogitlessValueError for an `axis`
    that does not exist, and LogitlessTypeError for another dtype.
    """
    logits = _array("logits", logits)
    axis = _integer("axis", axis)
    if not -logits.ndim <= axis < logits.ndim:
        raise invalid(f"axis is {axis} for logits of shape {logits.shape}")
    return _softmax(logits, axis % logits.ndim)
