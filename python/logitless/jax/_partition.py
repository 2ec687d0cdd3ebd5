# SPDX-License-Identifier: Apache-2.0
"""Linear losses of sharded arrays under plain jax.jit: XLA's partitioner asks, through
jax.experimental.custom_partitioning, what each device has to compute.

    tokens       [...], split over the mesh axes of the input's dimensions except the last: every
                 device has its own tokens; a mean's normalizer, a reduced loss and the gradients of
                 weight and bias are summed over these axes, the gradients in f32, rounded once
    vocabulary   split over the mesh axes of the weight's rows, as in _parallel.py inside of
                 jax.shard_map: the targets' logits and the shards' states are gathered and
                 combined, the parts of the input's gradient exchanged and added up. A divergence of
                 two heads refuses a split vocabulary

The hidden dimension is whole on every device. If the number of devices does not divide the tokens,
ignored tokens pad those of the last device. A vocabulary that it does not divide is whole on every
device.

Kept state has no layout that another split could read. A device keeps the state of its own tokens
and columns, as arrays [..., b, 64] and [..., p, 8], if its tokens are a multiple of 64 (any number,
if the tokens are not split) and its columns whole blocks of 64; b counts the blocks, and p is the
number of parts into which the vocabulary can be split. `kept_parts` holds the number of parts of
each dimension of the tokens and, as its last element, of the vocabulary; it is 0 if nothing was
kept. The partitioner may split Backward differently from Forward: then these numbers differ, and
Backward computes the logits again. If one call computes loss and gradients, no other call reads its
kept state, so a device keeps it for any number of tokens and columns.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from logitless import _abi
from logitless._abi import AnyOptions, Divergence
from logitless._errors import argument, not_supported
from logitless._statistics import names_where
from logitless.jax import _lists, _parallel, _run, _shards
from logitless.jax._call import Call, tokens_of
from logitless.jax._run import Array, Tensor

_F32, _I32 = np.dtype(np.float32), np.dtype(np.int32)
_BLOCK = 64  # columns in a block of kept state; its tokens must be a multiple of 64 too
_PARTS = "kept_parts"
KEPT = (*_run.KEPT, _PARTS)
# The factors (names of dimensions in Shardy's rule): the partitioner splits dimensions of the same
# factor alike. The tokens' factors are n0, n1, ...; v is the vocabulary, and k its blocks of kept
# state, split like v or not at all; no other may be split. Arrays that are not listed have only the
# tokens' dimensions.
_COLUMNS: dict[str, tuple[str, ...]] = {
    "weight": ("v", "d"),
    "bias": ("v",),
    "vocab_weight": ("c",),
    "id_offsets": ("o",),
    "teacher_weight": ("v", "t"),
    "teacher_bias": ("v",),
}
_ROWS: dict[str, tuple[str, ...]] = {  # the factors that follow those of the tokens
    "input": ("d",),
    "ids": ("a",),
    "logits_at": ("a",),
    "top_logits": ("r",),
    "top_ids": ("r",),
    "kept": ("k", "s"),
    "kept_rows": ("k", "e"),
    "teacher_input": ("t",),
    "teacher_logits": ("v",),
}
# What a divergence's Backward does not need if it has kept state.
_TEACHER = (
    "teacher_input", "teacher_weight", "teacher_bias", "teacher_logits", "teacher_temperature",
)  # fmt: skip


def _partitioned_call() -> Any:
    call = custom_partitioning(lambda x: x)
    call.def_partition(lambda *_: None, sharding_rule="->")
    return jax.make_jaxpr(call)(jax.ShapeDtypeStruct((), _F32))


# JAX lowers a program without knowing its devices, unless the program contains a partitioned call.
# It is enough if that call is a parameter of a primitive: Op.lowered is such a parameter.
FOR_DEVICES = _partitioned_call()


class Op(NamedTuple):
    """One op of the core on the whole arrays."""

    kind: int
    names: tuple[str, ...]  # of the operands
    results: tuple[Tensor, ...]
    options: AnyOptions
    memory: int | None
    tokens: tuple[int, ...]  # the tokens' shape
    lowered: Any = FOR_DEVICES

    @property
    def only_chosen(self) -> bool:
        """Whether it computes logits_at alone, or only gradients from it, as with over="ids"."""
        made = [result.name for result in self.results]
        return made == ["logits_at"] or _run.only_chosen(self.names)

    @property
    def keeps(self) -> bool:
        return any(result.name == "kept" for result in self.results)

    def made(self) -> list[Tensor]:
        """The results and, if state is kept, `kept_parts`."""
        parts = Tensor(_PARTS, (len(self.tokens) + 1,), _I32)
        return [*self.results, *([parts] if self.keeps else [])]

    def flat(self) -> Op:
        return self._replace(results=tuple(r._replace(shape=_flat(r)) for r in self.results))


def run(
    kind: int, operands: dict[str, Array], results: Sequence[Tensor], options: AnyOptions,
    memory: int | None,
) -> dict[str, Array]:  # fmt: skip
    """_run.run for a linear op on arrays that may be sharded, with any number of dimensions of
    tokens. If it returns or takes `kept`, so does it `kept_parts`."""
    tokens = tokens_of(operands)
    whole = isinstance(options, Divergence)  # its vocabulary is not split
    parts = 1 if whole else _most_parts(operands["weight"].shape[0])
    spread = tuple(_spread(result, tokens, parts) for result in results)
    op = Op(kind, tuple(operands), spread, options, memory, tokens)
    made = linear_p.bind(*operands.values(), op=op)
    return {result.name: x for result, x in zip(op.made(), made)}


def _most_parts(vocab: int) -> int:
    """The largest number of parts, of whole blocks each, into which kept state's vocabulary can be
    split over all devices of this platform: it is not known yet on which of them the program will
    run."""
    if vocab % _BLOCK:
        return 1
    default = jax.config.values.get("jax_default_device")
    return math.gcd(vocab // _BLOCK, jax.device_count(getattr(default, "platform", default)))


def _usable(parts: int, devices: int) -> int:
    """The number of parts that a program for `devices` devices can use. The vocabulary could not be
    split over a mesh axis whose size has no common divisor with `parts`: if the mesh may have such
    an axis, this is 1."""
    return parts if pow(parts, devices, devices) == 0 else 1


def _kept_parts(tensors: Sequence[Tensor], devices: int) -> int:
    """The number of parts into which the vocabulary of the kept state among these tensors may be
    split."""
    parts = (x.shape[-2] for x in tensors if x.name == "kept_rows")
    return _usable(max(parts, default=1), devices)


def _spread(result: Tensor, tokens: tuple[int, ...], parts: int) -> Tensor:
    """The shape of kept state with all dimensions of the tokens, if devices could share these;
    `kept_rows` has a row for each part of the vocabulary. Other results are returned unchanged."""
    count = math.prod(tokens)
    if result.name == "kept_rows":
        return result._replace(shape=(*tokens, parts, *result.shape[1:]))
    if result.name == "kept" and count and count % _BLOCK == 0:
        return result._replace(shape=(*tokens, result.shape[0] // count, _BLOCK))
    return result


def may_keep(input: Any, weight: Any) -> bool:
    """Whether state can be kept for arrays whose sharding is known already, outside of jax.jit."""
    if isinstance(input, jax.core.Tracer) or isinstance(weight, jax.core.Tracer):
        return True
    own, columns = (x.sharding.shard_shape(x.shape) for x in (input, weight))
    whole = own == input.shape or math.prod(own[:-1]) % _BLOCK == 0
    parts = weight.shape[0] // max(columns[0], 1)
    most = _usable(_most_parts(weight.shape[0]), len(weight.sharding.device_set))
    return whole and bool(most % parts == 0)


def factors(name: str, dimensions: int) -> tuple[str, ...]:
    """The factors of the dimensions of an operand or a result."""
    name = name.removeprefix("grad_")
    if name in _COLUMNS:
        return _COLUMNS[name]
    if name == _PARTS:
        return ("p",)
    rest = _ROWS.get(name, ())
    return (*(f"n{i}" for i in range(dimensions - len(rest))), *rest)


def _may_be_split(factor: str) -> bool:
    return factor in "vk" or factor.startswith("n")


def _flat(tensor: Tensor) -> tuple[int, ...]:
    """The core's shape of an operand or a result, with one dimension of tokens."""
    name, shape, _ = tensor
    if name == "kept_rows":
        return (math.prod(shape[:-2]), shape[-1])
    of = factors(name, len(shape))
    if "n0" not in of:
        return shape
    rows = len(shape) - len(_ROWS.get(name.removeprefix("grad_"), ())) + (name == "kept")
    return (math.prod(shape[:rows]), *shape[rows:])


def _flattened(given: dict[str, Array]) -> dict[str, Array]:
    if "kept_rows" in given:
        given = given | {"kept_rows": given["kept_rows"][..., :1, :]}
    return {name: x.reshape(_flat(_tensor(name, x))) for name, x in given.items()}


def _shaped(name: str, x: Array, shape: tuple[int, ...]) -> Array:
    """A result in its final shape. `kept_rows` has a place for each part of the vocabulary; a
    device that holds several parts fills all their places with the same values."""
    if name != "kept_rows" or x.shape == shape:
        return x.reshape(shape)
    return jnp.broadcast_to(x.reshape(*shape[:-2], 1, shape[-1]), shape)


def _tensor(name: str, aval: Any) -> Tensor:
    return Tensor(name, tuple(aval.shape), np.dtype(aval.dtype))


# --- what a device does ---


class Split:
    """How the partitioner split the factors of an op: the axes, and the numbers of parts."""

    def __init__(self, mesh: Any, axes: dict[str, tuple[str, ...]], op: Op, vocab: int) -> None:
        self.mesh, self.axes, self.tokens, self.vocab = mesh, axes, op.tokens, vocab
        self.parts = {f: math.prod(mesh.shape[axis] for axis in axes[f]) for f in axes}
        self.by_token = tuple(f"n{i}" for i in range(len(op.tokens)))
        self.token_axes = tuple(axis for f in self.by_token for axis in axes.get(f, ()))
        self.token_parts = [self.parts.get(f, 1) for f in self.by_token]
        self.vocab_axes = axes.get("v", ())

    def own(self, tensor: Tensor) -> tuple[int, ...]:
        """The shape of a device's part of a tensor."""
        of = factors(tensor.name, len(tensor.shape))
        return tuple(-(-size // self.parts.get(f, 1)) for f, size in zip(of, tensor.shape))

    @property
    def even(self) -> bool:
        return not any(size % parts for size, parts in zip(self.tokens, self.token_parts))

    @property
    def keeps(self) -> bool:
        own = math.prod(self.tokens) // math.prod(self.token_parts)
        whole = not self.token_axes or (self.even and own % _BLOCK == 0)
        return whole and ("k" in self.axes or not self.vocab_axes)

    @property
    def kept_parts(self) -> list[int] | None:
        """The numbers of parts for kept state, or None if nothing can be kept."""
        return [*self.token_parts, self.parts.get("v", 1)] if self.keeps else None


def _sum_of_scalars(x: Array, split: Split) -> Array:
    """[]: the sum of all devices' scalars, added in the same order on each."""
    if not split.token_axes:
        return x
    return _shards.tree_sum(lax.all_gather(x, split.token_axes))


def _sum_of_gradients(x: Array, split: Split) -> Array:
    return lax.psum(x, split.token_axes) if split.token_axes else x


def _padded(target: Array | None, split: Split, options: AnyOptions) -> Array | None:
    """The targets, where padding after the last token is ignored. If the call has no targets but
    padding, targets of class 0 are made."""
    if target is None and not split.even:
        target = jnp.zeros(split.own(Tensor("target", split.tokens, _I32)), _I32)
    if target is None:
        return None
    for i, factor in enumerate(split.by_token):
        size, own = split.tokens[i], target.shape[i]
        if size % split.parts.get(factor, 1):
            index = lax.axis_index(split.axes[factor]) * own + jnp.arange(own)
            inside = (index < size).reshape([-1 if j == i else 1 for j in range(target.ndim)])
            target = jnp.where(inside, target, jnp.asarray(options.ignore_index, target.dtype))
    return target


def _counted(operands: dict[str, Array], split: Split, options: AnyOptions) -> dict[str, Array]:
    """The operands, with the normalizer of a mean over all devices' tokens if the call has none."""
    counted = options.reduction == _abi.REDUCTION_MEAN and not options.normalizer
    if not split.token_axes or not counted or "normalizer" in operands:
        return operands
    if "target" not in operands:  # all count
        return operands | {"normalizer": jnp.float32(math.prod(split.tokens))}
    tokens = _shards.Tokens(
        operands["target"], options.ignore_index, split.vocab, operands.get("vocab_weight")
    )
    return operands | {"normalizer": _sum_of_scalars(_shards.divisor(tokens), split)}


def _agreed(operands: dict[str, Array], split: Split, options: AnyOptions) -> dict[str, Array]:
    """The operands, where targets [N] and ids [N, K] are made wrong here if they are wrong on any
    device: the CPU's call then fails on every device, instead of leaving the others waiting in a
    collective."""
    target = operands["target"]
    if not split.token_axes or not target.size:
        return operands
    tokens = _shards.Tokens(target, options.ignore_index, split.vocab)
    if "ids" in operands:
        ids = operands["ids"]
        wrong = ((ids < -1) | (ids >= split.vocab)) & ~tokens.ignored()[:, None]
        some, index, value = _first_wrong(ids.reshape(-1), wrong.reshape(-1), split)
        row, column = index // ids.shape[1], index % ids.shape[1]
        ids = ids.at[row, column].set(jnp.where(some, value, ids[row, column]))
        counts = target.at[row].set(jnp.where(some, 0, target[row]))  # or it would not be read
        operands, target = operands | {"ids": ids}, counts
    some, index, value = _first_wrong(operands["target"], tokens.outside(), split)
    return operands | {"target": target.at[index].set(jnp.where(some, value, target[index]))}


def _first_wrong(values: Array, wrong: Array, split: Split) -> tuple[Array, Array, Array]:
    """Whether any device has a wrong value, its place there, and the value."""
    first = jnp.argmax(wrong)
    own = jnp.stack([wrong.any().astype(values.dtype), first.astype(values.dtype), values[first]])
    every = lax.all_gather(own, split.token_axes)  # [P, 3]
    some, index, value = every[jnp.argmax(every[:, 0])]
    return some > 0, index, value


def _own_tokens(split: Split) -> Array:
    """[n]: the flat indices, among all N tokens, of this device's tokens; N for padding."""
    flat, inside = jnp.zeros((), _I32), jnp.ones((), bool)
    for size, factor in zip(split.tokens, split.by_token):
        own = -(-size // split.parts.get(factor, 1))
        first = lax.axis_index(split.axes[factor]) * own if split.axes.get(factor) else 0
        index = first + jnp.arange(own, dtype=_I32)
        flat, inside = flat[..., None] * size + index, inside[..., None] & (index < size)
    return jnp.where(inside, flat, math.prod(split.tokens)).reshape(-1)


def _own_lists(
    operands: dict[str, Array], split: Split, fails: bool
) -> tuple[dict[str, Array], Array | None]:
    """The operands with only the lists of this device's tokens; and [M]: which of the original
    places each of the M places is, or M if it is not used; None if there are no places. Unused
    places belong to the last token, with the id -1. If `fails`, offsets or ids that are wrong
    anywhere are made wrong here too, as in _agreed."""
    ids, offsets = operands["ids"], operands["id_offsets"]
    places = ids.shape[0]
    if not places:  # an offset other than 0 is wrong, and stays wrong in the result
        last = jnp.abs(offsets).max()
        own = jnp.zeros(operands["input"].shape[0] + 1, last.dtype).at[-1].set(last)
        return {**operands, "id_offsets": own}, None
    place, ends = _lists.part_of(offsets, places, _own_tokens(split))
    there = place < places
    found = {"id_offsets": ends}
    for name, none in (("ids", -1), ("grad_logits_at", 0)):
        if name in operands:
            found[name] = jnp.where(there, operands[name][jnp.minimum(place, places - 1)], none)
    if fails:
        wrong, value = _lists.first_wrong(offsets, places)
        found["id_offsets"] = ends.at[0].set(offsets[0]).at[-1].set(jnp.where(wrong, value, places))
        outside = (ids < -1) | (ids >= split.vocab)
        some, other = outside.any() & ~there[-1], ids[jnp.argmax(outside)]
        found["ids"] = found["ids"].at[-1].set(jnp.where(some, other, found["ids"][-1]))
        target = operands["target"]
        found["target"] = target.at[-1].set(jnp.where(some, 0, target[-1]))
    return operands | found, place


def _of_all_lists(logits: Array, place: Array, split: Split) -> Array:
    """[M]: the logits of all places, from the places that each device has; NaN at places in no
    list."""
    own = jnp.stack((logits, jnp.ones_like(logits)))
    every = lax.psum(jnp.zeros_like(own).at[:, place].set(own, mode="drop"), split.token_axes)
    return jnp.where(every[1] > 0, every[0], jnp.nan)


def _with_kept(
    parts: Sequence[int] | None, operands: dict[str, Array],
    made: Callable[[dict[str, Array]], dict[str, Array]],
) -> dict[str, Array]:  # fmt: skip
    """The results of `made` from the operands, which include kept state only if it was split into
    these `parts`. None: kept state cannot be used."""
    if _PARTS not in operands:
        return made(operands)

    def without(*names: str) -> dict[str, Array]:
        return made({name: x for name, x in operands.items() if name not in names})

    if parts is None:
        return without(*KEPT)
    # Within one program both sides are constants, so XLA drops the other branch.
    of_this_split = (operands[_PARTS] == jnp.array(parts, jnp.int32)).all()
    either: dict[str, Array] = lax.cond(
        of_this_split, lambda: without(_PARTS, *_TEACHER), lambda: without(*KEPT)
    )
    return either


def _of_tokens(split: Split, op: Op, operands: dict[str, Array]) -> dict[str, Array]:
    """The results on a device that has the whole vocabulary."""
    results = [r for r in op.results if split.keeps or r.name not in KEPT]
    return _with_kept(
        split.kept_parts, operands,
        lambda given: _run.run(op.kind, given, results, op.options, op.memory),
    )  # fmt: skip


def _of_shards(split: Split, op: Op, operands: dict[str, Array]) -> dict[str, Array]:
    """The results on a device that has a shard of the vocabulary."""
    names = tuple(name for name in operands if name not in KEPT)
    wanted = [result for result in op.results if result.name.startswith("grad_")]
    state = ("row_reference", "row_log_sum")
    outputs = [r.name for r in op.results if r not in wanted and r.name not in (*state, *KEPT)]
    k = next((r.shape[-1] for r in op.results if r.name == "top_ids"), 0)
    call = Call(names, tuple(outputs), op.options, op.memory, k).of_shards(split.vocab)
    shard = _parallel.Shard(split.vocab_axes, split.parts["v"], False, None, False)
    made: dict[str, Array] = {}
    given = operands
    if op.kind != _abi.LINEAR_CROSS_ENTROPY_BACKWARD:
        keeps = bool(wanted) or (op.keeps and split.keeps)
        made, kept = _parallel.forward(call, shard, operands, keeps)
        of_backward = {name: kept[name] for name in (*state, *_run.KEPT) if name in kept}
        given = operands | of_backward | {"grad_loss": jnp.float32(1)}
        made = kept | made
    if wanted:
        own = _with_kept(
            split.kept_parts, given,
            lambda given: _parallel.own_gradients(call, shard, given, wanted),
        )  # fmt: skip
        made |= _parallel.exchanged(shard, own, wanted)
    return made


def _on_device(split: Split, op: Op, fails: bool, *arrays: Array) -> list[Array]:
    """The results on each device, from its parts of the operands. `fails`: a wrong target makes the
    call raise."""
    summed = [f"grad_{name}" for name in _COLUMNS] if split.token_axes else []
    shapes = [split.own(result) for result in op.results]
    own = op._replace(
        results=tuple(
            Tensor(r.name, shape, _F32 if r.name in summed else r.dtype)
            for r, shape in zip(op.results, shapes)
        )
    ).flat()
    given = dict(zip(op.names, arrays))
    target = _padded(given.get("target"), split, op.options)
    if target is not None:
        given["target"] = target
    operands = _counted(_flattened(given), split, op.options)
    # The Backward of a loss follows a Forward that would have raised already. The Backward of a
    # divergence may use no result of a Forward, which XLA then leaves out.
    fails = fails and target is not None and op.kind != _abi.LINEAR_CROSS_ENTROPY_BACKWARD
    place = None
    if "id_offsets" in operands and split.token_axes:
        operands, place = _own_lists(operands, split, fails)
    elif fails:
        operands = _agreed(operands, split, op.options)
    made = (_of_shards if split.vocab_axes else _of_tokens)(split, own, operands)
    if place is not None and "logits_at" in made:
        made["logits_at"] = _of_all_lists(made["logits_at"], place, split)
    for result, shape in zip(op.results, shapes):
        name = result.name
        if name in KEPT and name not in made:
            made[name] = jnp.zeros(shape, result.dtype)
        elif name == "loss" and not shape:
            made[name] = _sum_of_scalars(made[name], split)
        elif name in summed:
            made[name] = _sum_of_gradients(made[name], split).astype(result.dtype)
        made[name] = _shaped(name, made[name], shape)
    made[_PARTS] = jnp.array(split.kept_parts or [0] * (len(op.tokens) + 1), jnp.int32)
    return [made[result.name] for result in op.made()]


# --- the partitioner ---


def _axes(name: str, mesh: Any, array: Any) -> dict[str, tuple[str, ...]]:
    """The mesh axes over which an array's factors are split: those along which the start of a
    device's part changes."""
    of = factors(name, len(array.shape))
    # An invented shape, which every split divides; the array's own shape may leave a remainder.
    parts = array.sharding.devices_indices_map((mesh.size,) * len(of))
    found = {}
    for i, factor in enumerate(of):
        first = [parts[device][i].start or 0 for device in mesh.devices.flat]
        begins = np.reshape(first, mesh.devices.shape)
        steps = {
            axis: begins.take(1, axis=a).flat[0]
            for a, axis in enumerate(mesh.axis_names)
            if begins.shape[a] > 1
        }
        axes = sorted((axis for axis in steps if steps[axis]), key=lambda axis: -steps[axis])
        if axes and _may_be_split(factor):
            found[factor] = tuple(axes)
    return found


def _split(mesh: Any, op: Op, input: Any, weight: Any, parts: int) -> Split:
    """The split that follows from the shardings that the partitioner suggests for the input and the
    weight. `parts`: the number of parts into which kept state's vocabulary can be split."""
    vocab = weight.shape[0]
    if mesh.empty:  # nothing is known of the arrays' axes
        devices = list(input.sharding.devices_indices_map((1,) * len(input.shape)))
        mesh = Mesh(np.array(devices), ("devices",))
        return Split(mesh, {}, op, vocab)
    axes = _axes("input", mesh, input)
    columns = _axes("weight", mesh, weight).get("v", ())
    taken = {axis for of in axes.values() for axis in of}
    divided = vocab % math.prod(mesh.shape[axis] for axis in columns) == 0
    if columns and divided and not taken & set(columns):
        axes["v"] = columns
        if parts % math.prod(mesh.shape[axis] for axis in columns) == 0:
            axes["k"] = columns
    return Split(mesh, axes, op, vocab)


def _refuse_vocabulary(split: Split, given: Iterable[tuple[str, Any]]) -> None:
    """Refuses a divergence whose vocabulary is split over axes that do not split its tokens. If an
    axis splits both, as in FSDP, XLA gathers the vocabulary."""
    for name, array in given:
        axes = _axes(name, split.mesh, array).get("v", ())
        others = [axis for axis in axes if axis not in split.token_axes]
        if others:
            raise not_supported(
                f"{argument(name)} is split over the mesh axes {others} by its vocabulary; allowed "
                "in linear_divergence: a vocabulary that is whole on every device "
                "(jax.lax.with_sharding_constraint makes it so); tokens may be split"
            )


def _refuse(split: Split, op: Op) -> None:
    whole = names_where("of_whole_rows")
    name = next((result.name for result in op.results if result.name in whole), None)
    if split.vocab_axes and name is not None:
        raise not_supported(
            f"return_statistics is {name!r}, and linear_weight is split over the mesh axes "
            f"{list(split.vocab_axes)} by its rows; a shard does not know the target's logit of "
            "another (jax.lax.with_sharding_constraint makes the weight whole on every device)"
        )


def _refuse_lists(split: Split, op: Op) -> None:
    """Refuses a split vocabulary if the chosen columns are in lists, or are the only result."""
    listed = "id_offsets" in op.names
    if split.vocab_axes and (listed or op.only_chosen):
        beside = "offsets" if listed else "over='ids'"
        raise not_supported(
            f"{beside} is given, and linear_weight is split over the mesh axes "
            f"{list(split.vocab_axes)} by its rows; allowed beside it: a weight that is whole on "
            "every device (jax.lax.with_sharding_constraint makes it so)"
        )


def _rule(given: Sequence[Tensor], made: Sequence[Tensor], parts: int) -> dict[str, Any]:
    """The arguments of def_partition: Shardy's rule, the factors that may not be split, in the
    rule's order, and the sizes of factors that are part of a dimension. If kept state has several
    parts, each dimension of the vocabulary has two factors, and the first one counts these
    parts."""
    sizes: dict[str, int] = {}

    def word(factor: str, size: int) -> str:
        if parts == 1 or factor not in "vk" or size == parts:
            return "k" if factor == "v" and parts > 1 else factor
        rest = "u" if factor == "v" else "b"
        sizes[rest] = size // parts
        return f"(k {rest})"

    sides = [
        [" ".join(map(word, factors(x.name, len(x.shape)), x.shape)) for x in side]
        for side in (given, made)
    ]
    rule = " -> ".join(", ".join(side) for side in sides)
    words = dict.fromkeys(re.findall(r"\w+", rule))
    split = ("v", "k", "u") if parts > 1 else ("v",)
    whole = tuple(f for f in words if f not in split and not f.startswith("n"))
    return {"sharding_rule": rule, "need_replication_factors": whole, **sizes}


def _partitioned(*operands: Array, op: Op, fails: bool, devices: int) -> Any:
    given, made = list(map(_tensor, op.names, operands)), op.made()
    at = {name: i for i, name in enumerate(op.names)}
    parts = _kept_parts((*given, *made), devices)

    def partition(mesh: Any, arguments: Any, results: Any) -> Any:
        input, weight = (arguments[at[name]] for name in ("input", "weight"))
        split = _split(mesh, op, input, weight, parts)
        _refuse(split, op)
        _refuse_lists(split, op)
        if isinstance(op.options, Divergence):
            _refuse_vocabulary(split, zip(op.names, arguments))

        def sharding(tensor: Tensor) -> NamedSharding:
            of = [split.axes.get(f) for f in factors(tensor.name, len(tensor.shape))]
            return NamedSharding(split.mesh, PartitionSpec(*of))

        on_device = functools.partial(_on_device, split, op, fails)
        return split.mesh, on_device, list(map(sharding, made)), tuple(map(sharding, given))

    def whole(*operands: Array) -> list[Array]:  # only its types are read
        made_whole: list[Array] = linear_p.bind(*operands, op=op)
        return made_whole

    call = custom_partitioning(whole)
    # JAX cannot decode the sharding if only a part of a mesh axis splits the blocks of kept state.
    call.def_partition(partition, decode_shardings=False, **_rule(given, made, parts))
    return call(*operands)


# --- the primitive ---

linear_p = Primitive("logitless_linear")
linear_p.multiple_results = True
linear_p.def_impl(functools.partial(_run.evaluate, linear_p))


def _on_one_device(*arrays: Array, op: Op) -> list[Array]:
    """The op on one device. Kept state may come from another program, in which the op was split."""
    results, whole = op.flat().results, [1] * (len(op.tokens) + 1)
    made = _with_kept(
        whole, _flattened(dict(zip(op.names, arrays))),
        lambda given: _run.run(op.kind, given, results, op.options, op.memory),
    )  # fmt: skip
    made[_PARTS] = jnp.array(whole, jnp.int32)
    return [_shaped(result.name, made[result.name], result.shape) for result in op.made()]


@linear_p.def_abstract_eval
def _abstract(*avals: Any, op: Op) -> Any:
    _run.refuse_checked(avals)
    flat = {
        name: jax.core.ShapedArray(_flat(_tensor(name, aval)), aval.dtype)
        for name, aval in zip(op.names, avals)
        if name != _PARTS
    }
    params = op.flat()._replace(names=tuple(flat))._asdict()
    del params["tokens"], params["lowered"]
    _run.abstract(*flat.values(), **params)
    return [_typed(result, op, avals) for result in op.made()]


def _typed(result: Tensor, op: Op, avals: Sequence[Any]) -> Any:
    """A result's type. On a mesh of explicit axes it includes the sharding: a gradient is sharded
    like its primal, and other results follow the weight and the input."""
    known = {name: getattr(aval, "sharding", None) for name, aval in zip(op.names, avals)}
    given = {name: s for name, s in known.items() if s is not None and not s.mesh.empty}
    if not given:
        return jax.core.ShapedArray(result.shape, result.dtype)
    mesh = next(iter(given.values())).mesh
    of = result.name.removeprefix("grad_")
    axes: dict[str, Any] = {}
    for name in ("weight", "input") if of == result.name else (of,):
        if name in given:
            axes |= dict(zip(factors(name, len(given[name].spec)), given[name].spec))
    split = {f: (a,) if isinstance(a, str) else a or () for f, a in axes.items()}
    columns = split.get("v", ())
    taken = {axis for f, of_tokens in split.items() if f.startswith("n") for axis in of_tokens}
    parts = _kept_parts(op.results, mesh.size)
    if not taken & set(columns) and parts % math.prod(mesh.shape[axis] for axis in columns) == 0:
        axes["k"] = columns
    spec = [axes.get(factor) for factor in factors(result.name, len(result.shape))]
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    return jax.core.ShapedArray(result.shape, result.dtype, sharding=sharding)


def partitions() -> bool:
    """Whether this JAX has the partitioner and is configured to use it. Otherwise every device
    computes everything."""
    known = (
        "need_replication_factors"
        in inspect.signature(custom_partitioning.def_partition).parameters
    )
    return known and bool(jax.config.values.get("jax_use_shardy_partitioner", True))


def _lowered(context: Any, *operands: Any, op: Op) -> Any:
    """A custom call on one device and inside of jax.shard_map; otherwise XLA's partitioner splits
    the op."""
    module = context.module_context
    devices = getattr(module.axis_context, "device_assignment", None)
    if devices is None or len(devices) < 2 or not partitions():
        return mlir.lower_fun(_on_one_device)(context, *operands, op=op)
    fails = "cpu" in module.platforms
    split = functools.partial(_partitioned, op=op, fails=fails, devices=len(devices))
    return mlir.lower_fun(split)(context, *operands)


mlir.register_lowering(linear_p, _lowered)
ad.primitive_jvps[linear_p] = _run.jvp


def _batched(operands: Sequence[Array], dims: Sequence[int | None], *, op: Op) -> Any:
    return _run.one_after_another(linear_p, operands, dims, op=op)


batching.primitive_batchers[linear_p] = _batched
