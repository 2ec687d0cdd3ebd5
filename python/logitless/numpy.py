# SPDX-License-Identifier: Apache-2.0
"""Logitless for NumPy, on the CPU: plain functions, gradients as results. docs/semantics.md has the
formulas. Arrays are float32, float16 or ml_dtypes' bfloat16, targets int32 or int64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, TypeAlias, TypeVar, overload

try:
    import numpy as np
    from numpy.typing import NDArray
except ModuleNotFoundError as error:
    raise ImportError("logitless.numpy needs NumPy 1.24 or newer: pip install numpy") from error

from logitless import _abi, _call, _divergence, _statistics, _vocabulary
from logitless._abi import AnyOptions, Plan, View, parse_memory
from logitless._arrays import as_f32, check_unmasked, places_in, sorted_list, with_cast
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
    placed,
    refuses,
    renames,
    wrong_dtype,
    wrong_shape,
)

Array = NDArray[Any]

_DTYPES = {
    "float32": _abi.F32,
    "float16": _abi.F16,
    "bfloat16": _abi.BF16,
    "int32": _abi.I32,
    "int64": _abi.I64,
}

Statistics: TypeAlias = _statistics.Statistics[Array]
DivergenceStatistics: TypeAlias = _divergence.DivergenceStatistics[Array]
Loss: TypeAlias = np.float32 | Array
_O = TypeVar("_O", _abi.Options, _abi.Divergence)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from logitless._divergence import Kind
    from logitless._divergence import Names as DivergenceNames
    from logitless._statistics import RowStatisticName, StatisticName

    Names: TypeAlias = StatisticName | Sequence[StatisticName]
    LossOptions: TypeAlias = _call.LossOptions[Array]
    LinearOptions: TypeAlias = _call.LinearOptions[Array]
    LogprobOptions: TypeAlias = _call.LogprobOptions[Array]
    TopNames: TypeAlias = RowStatisticName | Sequence[RowStatisticName]
    TopOptions: TypeAlias = _call.ChosenOptions[Array]
    DivergenceOptions: TypeAlias = _divergence.DivergenceOptions[Array]


class Gradients(NamedTuple):
    """The loss's gradients with respect to the arguments of the same names, in the shapes and
    dtypes of these, in native byte order. linear_bias is None if the call has no bias."""

    input: Array
    linear_weight: Array
    linear_bias: Array | None = None

    @property
    def weight(self) -> NoReturn:
        raise AttributeError(
            "weight is no field of Gradients; allowed: linear_weight, its name now"
        )

    @property
    def bias(self) -> NoReturn:
        raise AttributeError("bias is no field of Gradients; allowed: linear_bias, its name now")


_OF_GRADIENTS = ("input", "weight", "bias")  # the fields of Gradients by the core's names


def _view(name: str, array: Array) -> tuple[View, Array]:
    """A view that the core can read, and the array that it describes: a copy if the byte order is
    foreign, the memory is not aligned, or a stride is negative or no multiple of the element
    size."""
    dtype = _DTYPES.get(array.dtype.name)
    if dtype is None:
        indexes = name in ("target", "ids", "id_offsets")
        allowed = "int32, int64" if indexes else "float32, float16, bfloat16"
        if array.dtype.kind == "f":
            allowed += "; use .astype(np.float32)"
        raise wrong_dtype(f"{argument(name)} is {array.dtype}; allowed: {allowed}")
    size = array.itemsize
    odd = any(stride < 0 or stride % size for stride in array.strides)
    if odd or not array.dtype.isnative or not array.flags.aligned:
        array = np.array(array, dtype=array.dtype.newbyteorder("="), order="C", copy=True)
    strides = tuple(stride // size for stride in array.strides)
    return View(name, dtype, _abi.CPU, 0, array.shape, strides), array


def _empty(shape: tuple[int, ...], like: Array) -> Array:
    """A result of this dtype that the core can write."""
    return np.empty(shape, like.dtype.newbyteorder("="))


def _run(
    kind: int, given: dict[str, Array | None], made: dict[str, Array | None],
    options: AnyOptions | None, memory: int | None, most: int = 0,
) -> None:  # fmt: skip
    """Runs the op, which reads the arrays `given` and writes the results `made`."""
    arrays = given | made
    pairs = [_view(name, array) for name, array in arrays.items() if array is not None]
    views = [view for view, _ in pairs]
    for view, held in pairs:
        result = made.get(view.name)
        if result is not None and held is not result:  # the copy would get the result
            raise error_of(
                12,
                f"{view.name} is {result.dtype.str} with strides {result.strides}; allowed of a "
                "result: native byte order, aligned, strides that are multiples of the element",
            )
    plan = Plan(kind, views, options, (_abi.CPU, 0), memory=memory, most=most)
    workspace = np.empty(plan.bytes + plan.alignment, np.uint8)
    address = -(-workspace.ctypes.data // plan.alignment) * plan.alignment
    plan.run([array.ctypes.data for _, array in pairs], address)


def _array(name: str, value: Any) -> Array:
    if not isinstance(value, np.ndarray) and not np.isscalar(value):
        way = ", as of np.asarray" if hasattr(value, "__array__") else ""
        raise wrong_dtype(f"{name} is a {type(value).__name__}; allowed: a NumPy array{way}")
    check_unmasked(name, value)
    return np.asarray(value)


def _number(value: Any) -> Any:
    """A NumPy scalar as a Python number. Other values, which the core checks, are unchanged."""
    if isinstance(value, np.integer):
        return int(value)
    return float(value) if isinstance(value, np.floating) else value


def _numbers(options: _O) -> _O:
    return type(options)(*map(_number, options))


def _memory(value: Any) -> int | None:
    return parse_memory(_number(value))


def _integer(name: str, value: Any) -> int:
    if not isinstance(value, (int, np.integer)):
        raise wrong_dtype(f"{name} is a {type(value).__name__}; allowed: an int")
    return int(value)


def _target(value: Any, rows: Array, what: str) -> Array:
    """Class indices in the shape of `rows` [..., D] (`what` in messages) without the last
    dimension."""
    _call.check_rows(rows, what)
    target = _array("target", value)
    if target.dtype.kind == "f":
        raise _call.soft_target(target.dtype, target.shape)
    target = _integers("target", target)
    if target.shape != rows.shape[:-1]:
        raise _call.wrong_target(target.shape, rows.shape, what)
    return target


def _integers(name: str, value: Any) -> Array:
    array = _array(name, value)
    if array.dtype.name not in ("int32", "int64"):
        way = "; use .astype(np.int64)" if array.dtype.kind in "iu" else ""
        raise wrong_dtype(f"{name} is {array.dtype}; allowed: int32, int64{way}")
    return array


def _token_weight(value: Any, shape: tuple[int, ...], shift: int) -> Array:
    """[N], from an array in the shape of the tokens; shifted like the target."""
    held = as_f32("token_weight", value)
    if held.shape != shape:
        raise wrong_shape(f"token_weight has shape {held.shape}; allowed: {shape}")
    return (_moved(held, shift, 1.0) if shift else held).reshape(-1)


class _Call:
    """One call: the arrays by the core's names, flattened, and the options."""

    def __init__(
        self, what: str, rows: Array, heads: dict[str, Array | None], target: Array | None,
        shift: int, options: AnyOptions, names: Sequence[str], normalizer: Any, token_weight: Any,
    ) -> None:  # fmt: skip
        """`rows` [..., D] are the array `what`. `heads` are flattened; the other arrays are not."""
        self.whole, self.shape, self.shift, self.names = rows.shape, rows.shape[:-1], shift, names
        tokens = math.prod(self.shape)
        self.arrays: dict[str, Array | None] = {
            what: rows.reshape(tokens, rows.shape[-1]), **heads
        }  # fmt: skip
        if target is not None:
            if shift:
                check_shift(shift, target.shape)
                target = _shifted(target, shift, options.ignore_index)
            self.arrays["target"] = target.reshape(-1)
        changed: dict[str, Any] = {"normalizer": _normalizer(normalizer)}
        if normalizer is not None and changed["normalizer"] == 0:
            self.arrays["normalizer"] = np.zeros((), np.float32)
        both = {"temperature": _temperature, "teacher_temperature": _teacher_temperature}
        for name, moved in both.items():
            value = getattr(options, name, None)
            if isinstance(value, np.ndarray):
                self.arrays[name] = moved(value, self.shape, shift)
                changed[name] = 1.0
        if token_weight is not None:
            self.arrays["token_weight"] = _token_weight(token_weight, self.shape, shift)
        self.options: AnyOptions = options._replace(**changed)

    def evaluate(
        self, kinds: tuple[int, int], of: Sequence[str], gradients: bool, statistics: Any,
        memory: Any = None, most: int = 0,
    ) -> tuple[Any, list[Any]]:  # fmt: skip
        """Runs the first of two ops, or with `gradients` the second, and returns the function's
        result and the gradients of the arrays `of`, the first of which are the rows. Errors about
        a target give its index in the caller's array."""
        none = self.options.reduction == _abi.REDUCTION_NONE
        if gradients and none:
            raise invalid("reduction is 'none'; allowed with gradients: 'mean', 'sum'")
        tokens = math.prod(self.shape)
        made: dict[str, Any] = {"loss": np.empty(tokens if none else (), np.float32)}
        made |= {name: np.empty(tokens, _dtype_of(name)) for name in self.names}
        grads: dict[str, Any] = {}
        for name in of if gradients else ():
            array = self.arrays.get(name)
            grads[f"grad_{name}"] = None if array is None else _empty(array.shape, array)
        memory = _memory(memory)
        try:
            _run(kinds[bool(gradients)], self.arrays, made | grads, self.options, memory, most)
        except LogitlessError as error:
            error.args = (with_cast(placed(str(error), self.shape, self.shift)),)
            raise
        result = made["loss"].reshape(self.shape) if none else made["loss"][()]
        if self.names:
            shaped = {name: made[name].reshape(self.shape) for name in self.names}
            result = (result, statistics(**shaped))
        if gradients:
            grads[f"grad_{of[0]}"] = grads[f"grad_{of[0]}"].reshape(self.whole)
        return result, list(grads.values())


def _loss(
    what: str, rows: Any, heads: dict[str, Array | None], target: Any, *, weight: Any,
    token_weight: Any, normalizer: Any, return_statistics: Any, shift: Any = 0, **options: Any,
) -> _Call:  # fmt: skip
    rows = _array(what, rows)
    target, shift = _target(target, rows, what), _integer("shift", shift)
    converted, names = _numbers(options_of(**options)), _statistics.names_of(return_statistics)
    if weight is not None:
        heads = {**heads, "vocab_weight": as_f32("weight", weight)}
    return _Call(what, rows, heads, target, shift, converted, names, normalizer, token_weight)


def _most(tokens: int, weight: Array, heads: int = 1) -> int:
    """The most memory that a call of so many heads can use."""
    vocab, hidden = weight.shape
    return int(4 * (heads * tokens * vocab + tokens * hidden + vocab * hidden))


def _normalizer(value: Any) -> float:
    """The normalizer as a number of the core's options. There 0 means that the tokens are counted,
    so the caller of this function passes a normalizer of 0 as an array."""
    if value is None:
        return 0.0
    if isinstance(value, int) and not isinstance(value, bool):
        return _abi.float_of("normalizer", value)
    array = np.asarray(value)
    if array.dtype.kind not in "iuf":
        raise wrong_dtype(
            f"normalizer is a {type(value).__name__}; allowed: a number or an array []"
        )
    if array.ndim:
        raise wrong_shape(f"normalizer has shape {array.shape}; allowed: a number or an array []")
    return float(array)


def _shifted(target: Array, shift: int, ignore_index: int) -> Array:
    _abi.check_ignore_index(ignore_index)
    if target.dtype == np.int32 and not -(1 << 31) <= ignore_index < 1 << 31:
        target = target.astype(np.int64)
    return _moved(target, shift, ignore_index)


def _moved(values: Array, shift: int, rest: float) -> Array:
    shift = min(shift, values.shape[-1])
    moved = np.full_like(values, rest)
    moved[..., : values.shape[-1] - shift] = values[..., shift:]
    return moved


def _temperature(value: Array, shape: tuple[int, ...], shift: int) -> Array:
    """[N], from an array in the target's shape, of shape [N], or broadcastable to the target's
    shape; shifted like the target."""
    held = as_f32("temperature", value)
    flat = is_flat(held.shape, shape)
    held = held.reshape(shape) if flat else np.broadcast_to(held, shape)
    return (_moved(held, shift, 1.0) if shift else held).reshape(-1)


_teacher_temperature = renames({"temperature": "teacher_temperature"})(_temperature)


class _Listed:
    """A list of rows as the vocabulary: turns a call's arguments into those of a call on these rows
    alone, and the ids in its results into ids of the whole vocabulary. The contract is
    docs/semantics.md, "A list of rows as the vocabulary"."""

    def __init__(self, name: str, ids: Any, vocab: int, rows: int | None = None) -> None:
        """`rows`: the number of ids that the list must have; the listed rows then keep the order of
        `ids`, and are in ascending order otherwise."""
        ids = _array(name, ids)
        _vocabulary.check_list(name, ids.dtype.name, ids.shape, vocab, rows)
        self.name, self.vocab = name, vocab
        self.ordered, self.order = sorted_list(name, ids, vocab)
        self.rows = ids
        if rows is None:
            self.rows, self.order = self.ordered, np.arange(len(ids))

    def of(self, name: str, array: Any, axis: int = 0) -> Any:
        """The listed rows of a weight, a bias or class weights or, along the last axis, logits."""
        if array is None:
            return None
        array = _array(name, array)
        if array.ndim == 0 or array.shape[axis] != self.vocab:
            raise _vocabulary.wrong_extent(name, array.shape, self.vocab, axis < 0)
        return np.take(array, self.rows, axis)

    def places(self, target: Array, ignored: Any, shift: int = 0, name: str = "target") -> Array:
        """The place of each target, or id, in the list; ABSENT for `ignored` ones, so that ABSENT
        is the ignore_index of the call on the listed rows."""
        ignored = IGNORE_INDEX if ignored is None else _number(ignored)
        _abi.check_ignore_index(ignored)
        if shift:
            check_shift(shift, target.shape)
        return places_in(target, self.ordered, self.order, ignored, shift, name, self.name)

    def whole(self, places: Array | None) -> Array | None:
        """The ids of the whole vocabulary at these `places` of the list; negative values are
        kept."""
        return None if places is None else np.where(places < 0, places, self.ordered[places])

    def gradients(self, made: Gradients) -> Gradients:
        return Gradients(made.input, *(self._spread(grad) for grad in made[1:]))  # type: ignore[arg-type]

    def _spread(self, grad: Array | None) -> Array | None:
        if grad is None:
            return None
        whole = np.zeros((self.vocab, *grad.shape[1:]), grad.dtype)
        whole[self.rows] = grad
        return whole


def _linear_of_list(
    ids: Any, input: Array, linear_weight: Array, target: Array, linear_bias: Array | None,
    memory: Any, gradients: bool, options: dict[str, Any],
) -> Any:  # fmt: skip
    listed = _Listed("vocab_ids", ids, len(_weight(linear_weight)))
    checked = _target(target, _array("input", input), "input")
    shift = _integer("shift", options["shift"])
    places = listed.places(checked, options["ignore_index"], shift)
    classes = options["weight"]
    if classes is not None:
        classes = listed.of("weight", as_f32("weight", classes))
    given = {**options, "weight": classes, "ignore_index": _vocabulary.ABSENT}
    made = _linear(
        input, listed.of("linear_weight", linear_weight), places,
        listed.of("linear_bias", linear_bias), memory, gradients, given,
    )  # fmt: skip
    grads: Any
    result, grads = made if gradients else (made, None)
    if options["return_statistics"]:
        loss, statistics = result
        result = (loss, statistics._replace(argmax=listed.whole(statistics.argmax)))
    return (result, listed.gradients(grads)) if gradients else result


def _linear(
    input: Array, linear_weight: Array, target: Array, linear_bias: Array | None, memory: Any,
    gradients: bool, options: dict[str, Any],
) -> Any:  # fmt: skip
    weight = _weight(linear_weight)
    bias = None if linear_bias is None else _array("linear_bias", linear_bias)
    call = _loss("input", input, {"weight": weight, "bias": bias}, target, **options)
    kinds = (_abi.LINEAR_CROSS_ENTROPY_FORWARD, _abi.LINEAR_CROSS_ENTROPY_FORWARD_BACKWARD)
    most = _most(math.prod(call.shape), weight)
    result, grads = call.evaluate(
        kinds, _OF_GRADIENTS, gradients, _statistics.Statistics, memory, most
    )
    return (result, Gradients(*grads)) if gradients else result


@overload
def linear_cross_entropy(  # type: ignore[overload-overlap]  # () asks for nothing
    input: Array, linear_weight: Array, target: Array, *, return_statistics: tuple[()] = ...,
    return_gradients: Literal[False] = ..., **options: Unpack[LinearOptions],
) -> Loss: ...  # fmt: skip
@overload
def linear_cross_entropy(
    input: Array, linear_weight: Array, target: Array, *, return_statistics: Names,
    return_gradients: Literal[False] = ..., **options: Unpack[LinearOptions],
) -> tuple[Loss, Statistics]: ...  # fmt: skip
@overload
def linear_cross_entropy(  # type: ignore[overload-overlap]  # () asks for nothing
    input: Array, linear_weight: Array, target: Array, *, return_statistics: tuple[()] = ...,
    return_gradients: Literal[True], **options: Unpack[LinearOptions],
) -> tuple[Loss, Gradients]: ...  # fmt: skip
@overload
def linear_cross_entropy(
    input: Array, linear_weight: Array, target: Array, *, return_statistics: Names,
    return_gradients: Literal[True], **options: Unpack[LinearOptions],
) -> tuple[tuple[Loss, Statistics], Gradients]: ...  # fmt: skip
def linear_cross_entropy(
    input: Array, linear_weight: Array, target: Array, *, linear_bias: Array | None = None,
    weight: Array | None = None, reduction: Reduction = "mean", ignore_index: int | None = -100,
    label_smoothing: float = 0.0, z_loss: float = 0.0, logit_scale: float = 1.0,
    softcap: float | None = 0.0, temperature: float | Array = 1.0,
    token_weight: Array | None = None, normalizer: float | Array | None = None,
    shift: bool | int = False, memory: int | str | None = None,
    return_statistics: Any = (), empty_mean: EmptyMean = "zero", vocab_ids: Array | None = None,
    return_gradients: bool = False,
) -> Any:  # fmt: skip
    """Cross-entropy of the logits input @ linear_weight.T + linear_bias, without the logits.

    - `input` [..., D], `linear_weight` [V, D]: one dtype, float32, float16 or bfloat16.
    - `target` [...]: class indices, int64 or int32.
    - `linear_bias` [V]: the input's dtype or float32.

    All options mean the same as in logitless.torch, except that a `memory` of None is what the
    library recommends. docs/semantics.md has the formulas. Of the options that take arrays:

    - `weight` [V] of classes and `token_weight` [...]: factors of the loss.
    - `temperature`: a number, or an array in the target's shape, of shape [N] (N tokens in all), or
      broadcastable to the target's shape. `shift` moves it, and token_weight, with the targets.
    - `vocab_ids` [V'], int64 or int32: the softmax is over these rows of linear_weight alone.

    Returns the loss, float32: a scalar, or [...] with reduction "none". With `return_statistics`
    the result is (loss, Statistics). With `return_gradients`, for reductions "mean" and "sum", the
    function returns (result, Gradients), computed in one pass. Raises LogitlessValueError, for a
    target out of range too, LogitlessTypeError or LogitlessNotSupportedError.
    """
    options = {
        "weight": weight, "reduction": reduction, "ignore_index": ignore_index,
        "label_smoothing": label_smoothing, "z_loss": z_loss, "logit_scale": logit_scale,
        "softcap": softcap, "temperature": temperature, "token_weight": token_weight,
        "normalizer": normalizer, "shift": shift, "return_statistics": return_statistics,
        "empty_mean": empty_mean,
    }  # fmt: skip
    given = (input, linear_weight, target, linear_bias, memory, return_gradients, options)
    return _linear(*given) if vocab_ids is None else _linear_of_list(vocab_ids, *given)


@overload
def linear_logprob(
    input: Array, linear_weight: Array, target: Array, *, entropy: Literal[False] = ...,
    **options: Unpack[LogprobOptions],
) -> Array: ...  # fmt: skip
@overload
def linear_logprob(
    input: Array, linear_weight: Array, target: Array, *, entropy: Literal[True, "detached"],
    **options: Unpack[LogprobOptions],
) -> tuple[Array, Array]: ...  # fmt: skip
@refuses(OLD_OF_LOGPROB)
def linear_logprob(
    input: Array, linear_weight: Array, target: Array, *, temperature: float | Array = 1.0,
    linear_bias: Array | None = None, ignore_index: int | None = -100, logit_scale: float = 1.0,
    softcap: float | None = 0.0, shift: bool | int = False, memory: int | str | None = None,
    entropy: bool | str = False, vocab_ids: Array | None = None,
) -> Any:  # fmt: skip
    """Log-probability of every target token: [...], float32, at most 0. With `entropy` (True, or
    "detached", which means the same here) it returns the pair (logprob, entropy), both float32.
    Both are 0 for tokens whose target is `ignore_index`. docs/semantics.md, "Statistics of a
    token", has the formulas. The arrays, the other options and the errors are as in
    `linear_cross_entropy`.
    """
    entropy_detached(entropy)
    _, made = linear_cross_entropy(
        input, linear_weight, target, linear_bias=linear_bias, reduction="none",
        ignore_index=ignore_index, logit_scale=logit_scale, softcap=softcap,
        temperature=temperature, shift=shift, memory=memory, vocab_ids=vocab_ids,
        return_statistics=("logprob", "entropy") if entropy else "logprob",
    )  # fmt: skip
    return (made.logprob, made.entropy) if entropy else made.logprob


def _among_ids(logits: Array, token: Array, tokens: int) -> Array:
    """The log-softmax over each token's own logits. `logits` [P] are those of all tokens, and
    `token` [P] is the token of each."""
    z = logits.astype(np.float64)
    most = np.full(tokens, -np.inf)
    with np.errstate(invalid="ignore", divide="ignore"):
        np.maximum.at(most, token, z)
        shifted = z - most[token]
        total = np.bincount(token, np.exp(shifted), tokens)
        return _never_above_0((shifted - np.log(total)[token]).astype(np.float32))


def linear_logprobs_at(
    input: Array, linear_weight: Array, ids: Array, *, over: str = "vocab",
    offsets: Array | None = None, temperature: float | Array = 1.0,
    linear_bias: Array | None = None, logit_scale: float = 1.0, softcap: float | None = 0.0,
    memory: int | str | None = None, vocab_ids: Array | None = None,
) -> Array:  # fmt: skip
    """Log-probabilities of chosen columns of each token: float32, in the shape of `ids`, at most 0.
    docs/semantics.md, "Chosen columns", has the formulas.

    - `ids` [..., K], int64 or int32, K from 1 to 1024: the columns, or -1 for none, which gives
      -inf. Tokens whose ids are all -1 are not computed.
    - `over`: "vocab", the softmax over the vocabulary; or "ids", over the token's ids alone, which
      does not need the other columns' logits and allows no `vocab_ids`.
    - `offsets` [N + 1], int64 or int32, with `ids` [M]: for tokens with different numbers of
      columns. Token i, counted over all leading dimensions, has ids[offsets[i]:offsets[i + 1]].

    The arrays, the other options and the errors are as in `linear_cross_entropy`; a `temperature`
    is in the shape of the tokens. Raises LogitlessValueError for wrong ids and offsets.
    """
    alone = _vocabulary.check_over(over)
    if alone:
        _vocabulary.refuse_beside_ids(vocab_ids, ())
    rows = _array("input", input)
    _call.check_rows(rows, "input")
    tokens = math.prod(rows.shape[:-1])
    if offsets is None:
        chosen, ends = _integers("ids", ids), None
        _call.check_ids(chosen.shape, rows.shape)
        places = np.arange(0, chosen.size + 1, chosen.shape[-1])
    else:
        chosen, ends = _integers("ids", ids), _integers("offsets", offsets)
        _call.check_listed_ids(chosen.shape, tokens)
        _call.check_offsets(ends.shape, tokens)
        places = ends
    weight = _weight(linear_weight)
    if vocab_ids is not None:
        listed = _Listed("vocab_ids", vocab_ids, len(weight))
        chosen = listed.places(chosen, _vocabulary.ABSENT, name="ids")
        weight = listed.of("linear_weight", weight)
        linear_bias = listed.of("linear_bias", linear_bias)
    flat = chosen if ends is not None else chosen.reshape(tokens, chosen.shape[-1])  # [M] or [N, K]
    before = np.append(0, np.cumsum(chosen != -1)).take(places, mode="clip")  # [N + 1]
    none = np.diff(before) == 0  # [N]
    logits = np.empty(flat.shape, np.float32)
    options = _of_head(logit_scale, softcap, temperature)
    columns: dict[str, Array | None] = {
        "target": np.where(none, options.ignore_index, 0), "ids": flat, "id_offsets": ends,
    }  # fmt: skip
    made: dict[str, Array | None] = {"logits_at": logits}
    try:
        state = _state_of(rows, weight, linear_bias, options, memory, columns, made, not alone)
    except LogitlessError as error:
        leading = rows.shape[:-1] if ends is None else chosen.shape
        error.args = (with_cast(placed(str(error), leading, name="ids")),)
        raise
    token, each = np.repeat(np.arange(tokens), np.diff(places)), logits.ravel()
    if alone:
        logprobs = _among_ids(each, token, tokens)
    else:
        logprobs = _logprobs(each, *(of_row[token] for of_row in state))
    logprobs[chosen.ravel() == -1] = -np.inf
    return logprobs.reshape(chosen.shape)


def _weight(value: Any, name: str = "linear_weight") -> Array:
    weight = _array(name, value)
    if weight.ndim != 2:
        raise wrong_shape(f"{name} has shape {weight.shape}; allowed: [V, D]")
    return weight


def _of_head(logit_scale: Any, softcap: Any, temperature: Any) -> _abi.Options:
    """The options of a call that returns no loss."""
    return _numbers(options_of("none", None, 0.0, 0.0, logit_scale, softcap, temperature, "zero"))


def _state_of(
    rows: Array, weight: Array, bias: Array | None, options: AnyOptions, memory: Any,
    more: dict[str, Array | None], made: dict[str, Array | None], states: bool = True,
) -> tuple[Array, Array]:  # fmt: skip
    """Runs a Forward with the further inputs `more` and results `made`, and returns row_reference
    and row_log_sum [N]. Without `states` these two are not computed and hold arbitrary values."""
    tokens, hidden = math.prod(rows.shape[:-1]), rows.shape[-1]
    reference, log_sum = np.empty(tokens, np.float32), np.empty(tokens, np.float32)
    arrays: dict[str, Array | None] = {
        "input": rows.reshape(tokens, hidden), "weight": weight,
        "bias": None if bias is None else _array("linear_bias", bias), **more,
    }  # fmt: skip
    if states:
        made = made | {"row_reference": reference, "row_log_sum": log_sum}
    if isinstance(options.temperature, np.ndarray):
        arrays["temperature"] = _temperature(options.temperature, rows.shape[:-1], 0)
        options = options._replace(temperature=1.0)
    most = _most(tokens, weight)
    _run(_abi.LINEAR_CROSS_ENTROPY_FORWARD, arrays, made, options, _memory(memory), most)
    return reference, log_sum


def _logprobs(logits: Array, reference: Array, log_sum: Array) -> Array:
    with np.errstate(invalid="ignore"):
        return _never_above_0((logits - reference) - log_sum)


def _never_above_0(logprobs: Array) -> Array:
    logprobs[logprobs > 0] = 0  # a NaN stays
    return logprobs


@overload
def linear_topk(  # type: ignore[overload-overlap]  # () asks for nothing
    input: Array, linear_weight: Array, k: int, *, return_statistics: tuple[()] = ...,
    **options: Unpack[TopOptions],
) -> tuple[Array, Array]: ...  # fmt: skip
@overload
def linear_topk(
    input: Array, linear_weight: Array, k: int, *, return_statistics: TopNames,
    **options: Unpack[TopOptions],
) -> tuple[Array, Array, Statistics]: ...  # fmt: skip
def linear_topk(
    input: Array, linear_weight: Array, k: int, *, linear_bias: Array | None = None,
    temperature: float | Array = 1.0, logit_scale: float = 1.0, softcap: float | None = 0.0,
    memory: int | str | None = None, return_statistics: Any = (), vocab_ids: Array | None = None,
) -> Any:  # fmt: skip
    """The `k` most likely classes of each token of `input` [..., D] by the head `linear_weight` [V,
    D]: (log-probabilities, ids), both [..., k], float32 (at most 0) and int64. The most likely
    class comes first, and of equal logits the lowest id. If one of a token's logits is NaN, its
    log-probabilities are NaN and its ids arbitrary.

    `k` is from 1 to 256 and at most V; with `vocab_ids` [V'], which are then the only classes, at
    most V'. With `return_statistics`, names of statistics that need no target, it returns
    (log-probabilities, ids, Statistics). The other options and the errors are as in
    `linear_logprobs_at`; a `k` outside its range raises LogitlessValueError. docs/semantics.md,
    "Top-k", has the definition.
    """
    rows, weight = _array("input", input), _weight(linear_weight)
    listed = None
    if vocab_ids is not None:
        listed = _Listed("vocab_ids", vocab_ids, len(weight))
        weight = listed.of("linear_weight", weight)
        linear_bias = listed.of("linear_bias", linear_bias)
    names = _statistics.names_of(return_statistics, _statistics.OF_ROWS)
    _call.check_rows(rows, "input")
    count, most = _integer("k", k), min(weight.shape[0], _abi.MOST_LISTED)
    if isinstance(k, bool) or not 1 <= count <= most:
        raise invalid(f"k is {k}; allowed: 1 to {most}, the least of V and {_abi.MOST_LISTED}")
    shape = rows.shape[:-1]
    tokens = math.prod(shape)
    logits, ids = np.empty((tokens, count), np.float32), np.empty((tokens, count), np.int64)
    made: dict[str, Array] = {name: np.empty(tokens, _dtype_of(name)) for name in names}
    options = _of_head(logit_scale, softcap, temperature)
    columns: dict[str, Array | None] = {"target": np.zeros(tokens, np.int64)}
    top: dict[str, Array | None] = {"top_logits": logits, "top_ids": ids, **made}
    try:
        reference, log_sum = _state_of(rows, weight, linear_bias, options, memory, columns, top)
    except LogitlessError as error:
        error.args = (with_cast(str(error)),)
        raise
    logprobs = _logprobs(logits, reference[:, None], log_sum[:, None])
    if listed is not None:
        ids = listed.ordered[ids]
        if "argmax" in made:
            made["argmax"] = listed.ordered[made["argmax"]]
    logprobs, ids = logprobs.reshape(*shape, count), ids.reshape(*shape, count)
    if not names:
        return logprobs, ids
    kept = {name: array.reshape(shape) for name, array in made.items()}
    return logprobs, ids, _statistics.Statistics(**kept)


def _dtype_of(name: str) -> type:
    return np.int64 if name in _statistics.names_where("indexes") else np.float32


@overload
def linear_divergence(  # type: ignore[overload-overlap]  # () asks for nothing
    input: Array, linear_weight: Array, teacher_input: Array | None = ...,
    teacher_weight: Array | None = ..., *, return_statistics: tuple[()] = ...,
    return_gradients: Literal[False] = ..., **options: Unpack[DivergenceOptions],
) -> Loss: ...  # fmt: skip
@overload
def linear_divergence(
    input: Array, linear_weight: Array, teacher_input: Array | None = ...,
    teacher_weight: Array | None = ..., *, return_statistics: DivergenceNames,
    return_gradients: Literal[False] = ..., **options: Unpack[DivergenceOptions],
) -> tuple[Loss, DivergenceStatistics]: ...  # fmt: skip
@overload
def linear_divergence(  # type: ignore[overload-overlap]  # () asks for nothing
    input: Array, linear_weight: Array, teacher_input: Array | None = ...,
    teacher_weight: Array | None = ..., *, return_statistics: tuple[()] = ...,
    return_gradients: Literal[True], **options: Unpack[DivergenceOptions],
) -> tuple[Loss, Gradients]: ...  # fmt: skip
@overload
def linear_divergence(
    input: Array, linear_weight: Array, teacher_input: Array | None = ...,
    teacher_weight: Array | None = ..., *, return_statistics: DivergenceNames,
    return_gradients: Literal[True], **options: Unpack[DivergenceOptions],
) -> tuple[tuple[Loss, DivergenceStatistics], Gradients]: ...  # fmt: skip
def linear_divergence(
    input: Array, linear_weight: Array, teacher_input: Array | None = None,
    teacher_weight: Array | None = None, *, kind: Kind = "forward_kl", beta: float = 0.5,
    target: Array | None = None, label_weight: float = 0.0, ignore_index: int | None = -100,
    shift: bool | int = False, temperature: float | Array = 1.0,
    teacher_temperature: float | Array | None = None, logit_scale: float = 1.0,
    softcap: float | None = 0.0, linear_bias: Array | None = None,
    teacher_logit_scale: float = 1.0, teacher_softcap: float | None = 0.0,
    teacher_bias: Array | None = None, teacher_logits: Array | None = None,
    token_weight: Array | None = None, reduction: Reduction = "mean",
    normalizer: float | Array | None = None, empty_mean: EmptyMean = "zero",
    memory: int | str | None = None, return_statistics: Any = (), vocab_ids: Array | None = None,
    teacher_vocab_ids: Array | None = None, return_gradients: bool = False,
) -> Any:  # fmt: skip
    """The divergence of the student's head from the teacher's for each token, without the logits of
    either. Arguments and result are as in logitless.torch, without a group; the formulas are in
    docs/semantics.md, "Divergences of two heads". With `return_gradients`, for reductions "mean"
    and "sum", it returns (result, Gradients), where the gradients are those of the student's
    arrays. Raises LogitlessValueError, LogitlessTypeError or LogitlessNotSupportedError."""
    listed = paired = None
    if vocab_ids is not None and teacher_vocab_ids is not None:
        raise _vocabulary.both_given()
    if vocab_ids is not None:
        listed = _Listed("vocab_ids", vocab_ids, len(_weight(linear_weight)))
        linear_weight = listed.of("linear_weight", linear_weight)
        linear_bias = listed.of("linear_bias", linear_bias)
    elif teacher_vocab_ids is not None:
        vocab = _teachers_vocab(teacher_weight, teacher_logits)
        students = len(_weight(linear_weight))
        paired = _Listed("teacher_vocab_ids", teacher_vocab_ids, vocab, students)
    of_both = listed or paired
    if of_both is not None:
        teacher_weight = of_both.of("teacher_weight", teacher_weight)
        teacher_bias = of_both.of("teacher_bias", teacher_bias)
        teacher_logits = of_both.of("teacher_logits", teacher_logits, -1)
        if target is not None:
            checked = _target(target, _array("input", input), "input")
            target = of_both.places(checked, ignore_index, _integer("shift", shift))
            ignore_index = _vocabulary.ABSENT
    names = _divergence.names_of(return_statistics)
    options = _divergence.options_of(
        kind, beta, label_weight, reduction, ignore_index, logit_scale, softcap, temperature,
        teacher_logit_scale, teacher_softcap, teacher_temperature, empty_mean,
    )  # fmt: skip
    options = _numbers(options)
    rows, weight = _array("input", input), _weight(linear_weight)
    _call.check_rows(rows, "input")
    shift = _integer("shift", shift)
    _divergence.check_shift_has_target(shift, target)
    tokens = math.prod(rows.shape[:-1])
    heads: dict[str, Any] = {
        "weight": weight, "bias": linear_bias, "teacher_input": teacher_input,
        "teacher_weight": teacher_weight, "teacher_bias": teacher_bias,
        "teacher_logits": teacher_logits,
    }  # fmt: skip
    for name, value in heads.items():
        if value is None:
            continue
        value = _array(argument(name), value)
        if name in ("teacher_input", "teacher_logits"):
            _divergence.check_teachers_rows(name, value.shape, rows.shape[:-1])
            value = value.reshape(tokens, value.shape[-1])
        heads[name] = value
    if target is not None:
        target = _target(target, rows, "input")
    call = _Call("input", rows, heads, target, shift, options, names, normalizer, token_weight)
    kinds = (_abi.LINEAR_DIVERGENCE_FORWARD, _abi.LINEAR_DIVERGENCE_FORWARD_BACKWARD)
    kept, most = _divergence.DivergenceStatistics, _most(tokens, weight, heads=2)
    result, grads = call.evaluate(kinds, _OF_GRADIENTS, return_gradients, kept, memory, most)
    if not return_gradients:
        return result
    every = Gradients(*grads)
    return result, every if listed is None else listed.gradients(every)


def _teachers_vocab(weight: Any, logits: Any) -> int:
    """The number of the teacher's classes; the core checks that weight and logits are not both
    given."""
    if weight is None and logits is None:
        raise _vocabulary.no_teacher()
    if weight is not None:
        return int(_weight(weight, "teacher_weight").shape[0])
    columns = _array("teacher_logits", logits)
    _call.check_rows(columns, "teacher_logits")
    return int(columns.shape[-1])


@overload
def cross_entropy(  # type: ignore[overload-overlap]  # () asks for nothing
    logits: Array, target: Array, *, return_statistics: tuple[()] = ...,
    return_gradients: Literal[False] = ..., **options: Unpack[LossOptions],
) -> Loss: ...  # fmt: skip
@overload
def cross_entropy(
    logits: Array, target: Array, *, return_statistics: Names,
    return_gradients: Literal[False] = ..., **options: Unpack[LossOptions],
) -> tuple[Loss, Statistics]: ...  # fmt: skip
@overload
def cross_entropy(  # type: ignore[overload-overlap]  # () asks for nothing
    logits: Array, target: Array, *, return_statistics: tuple[()] = ...,
    return_gradients: Literal[True], **options: Unpack[LossOptions],
) -> tuple[Loss, Array]: ...  # fmt: skip
@overload
def cross_entropy(
    logits: Array, target: Array, *, return_statistics: Names,
    return_gradients: Literal[True], **options: Unpack[LossOptions],
) -> tuple[tuple[Loss, Statistics], Array]: ...  # fmt: skip
def cross_entropy(
    logits: Array, target: Array, *, weight: Array | None = None, reduction: Reduction = "mean",
    ignore_index: int | None = -100, label_smoothing: float = 0.0, z_loss: float = 0.0,
    logit_scale: float = 1.0, softcap: float | None = 0.0, temperature: float | Array = 1.0,
    token_weight: Array | None = None, normalizer: float | Array | None = None,
    return_statistics: Any = (), empty_mean: EmptyMean = "zero",
    return_gradients: bool = False,
) -> Any:  # fmt: skip
    """Cross-entropy of given `logits` [..., V], float32, float16 or bfloat16. `target` [...], these
    options, result and errors are as in `linear_cross_entropy`. With `return_gradients`, for
    reductions "mean" and "sum", it returns (result, gradient), where the gradient has the shape and
    dtype of the logits.
    """
    options = {
        "weight": weight, "reduction": reduction, "ignore_index": ignore_index,
        "label_smoothing": label_smoothing, "z_loss": z_loss, "logit_scale": logit_scale,
        "softcap": softcap, "temperature": temperature, "token_weight": token_weight,
        "normalizer": normalizer, "return_statistics": return_statistics, "empty_mean": empty_mean,
    }  # fmt: skip
    call = _loss("logits", logits, {}, target, **options)
    kinds = (_abi.CROSS_ENTROPY_FORWARD, _abi.CROSS_ENTROPY_FORWARD_BACKWARD)
    result, grads = call.evaluate(kinds, ("logits",), return_gradients, _statistics.Statistics)
    return (result, grads[0]) if return_gradients else result


def softmax(logits: Array, axis: int = -1) -> Array:
    """Softmax of `logits`, float32, float16 or bfloat16, along `axis`, as a new array of the same
    shape and dtype. docs/semantics.md, "Softmax", has the definition. Raises LogitlessValueError
    for an `axis` that does not exist, and LogitlessTypeError for another dtype."""
    logits, axis = _array("logits", logits), _integer("axis", axis)
    if not -logits.ndim <= axis < logits.ndim:
        raise invalid(f"axis is {axis} for logits of shape {logits.shape}; allowed: one of theirs")
    moved = np.moveaxis(logits, axis, -1)
    rows = moved.reshape(-1, moved.shape[-1]) if moved.size else moved.reshape(0, 1)
    result = _empty(rows.shape, rows)
    _run(_abi.SOFTMAX, {"logits": rows}, {"probabilities": result}, None, None)
    return np.moveaxis(result.reshape(moved.shape), -1, axis)
