# SPDX-License-Identifier: Apache-2.0
"""One op of the core as a JAX primitive, lowered to a custom call of the library's XLA handler.

The workspace is an additional result of the custom call: XLA plans it with its other buffers, and
nothing is allocated while the op runs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from logitless import _abi
from logitless._abi import AnyOptions, Divergence, Plan, View
from logitless._errors import LogitlessRuntimeError, argument, not_supported, wrong_dtype

Array = jax.Array

_F32 = np.dtype(np.float32)
_TARGET = "logitless_xla_run"
for _platform in ("cpu", "CUDA"):
    jax.ffi.register_ffi_target(
        _TARGET, jax.ffi.pycapsule(_abi.library.logitless_xla_run), platform=_platform
    )
DTYPES = {
    "float32": _abi.F32,
    "float16": _abi.F16,
    "bfloat16": _abi.BF16,
    "int32": _abi.I32,
    "int64": _abi.I64,
}
# The core may write the result (second name) over the operand (first name); XLA copies the operand
# beforehand if it is needed later.
_IN_PLACE = (("logits", "grad_logits"), ("logits", "probabilities"))
# What Forward does not write of kept state holds what was in the memory before, perhaps NaNs. Where
# JAX looks for NaNs in all arrays of floats, kept state is unsigned integers outside of the custom
# call (see kept_of).
KEPT = ("kept", "kept_rows")
BACKWARD_OF_KEPT = (_abi.LINEAR_CROSS_ENTROPY_BACKWARD, _abi.LINEAR_DIVERGENCE_BACKWARD)
# This op overwrites kept state, which is therefore also a result of the custom call, though nobody
# uses it.
_CONSUMES_KEPT = _abi.LINEAR_CROSS_ENTROPY_BACKWARD
_OF_KEY = ("input", "weight", "bias", "target", "temperature")  # operands in kept state's key
# Arrays [..., V] that the custom call takes unreshaped, and reads as [N, V]: XLA would copy a
# reshaped array before it is overwritten.
_FLAT = ("logits", "grad_logits", "probabilities")
_OF_SHARD = ("vocab_start", "vocab_total")  # options that only a shard has
_ATTRIBUTES = {"kind": "divergence"}  # renamed, because a custom call has its own `kind`
ONCE_ONLY = (
    "logitless: the loss can be differentiated once only; its gradients have no gradient (use "
    "optax.softmax_cross_entropy_with_integer_labels for second derivatives)"
)


class Tensor(NamedTuple):
    """The name, shape and dtype of an operand or a result."""

    name: str
    shape: tuple[int, ...]
    dtype: Any


def only_chosen(names: Sequence[str]) -> bool:
    """Whether an op with these tensors is a Backward from the gradient of logits_at alone. Every
    other Backward must be given grad_loss: if it is missing, the core takes it as 1."""
    return "grad_logits_at" in names and "grad_loss" not in names


class _Workspace(NamedTuple):
    bytes: int
    alignment: int


def _view(tensor: Tensor, device: tuple[int, int]) -> View:
    name, shape, dtype = tensor
    code = DTYPES.get(dtype.name)
    if code is None:
        allowed = "int32, int64" if name == "target" else "float32, float16, bfloat16"
        if dtype.name == "float64":
            allowed += "; use .astype(jnp.float32)"
        raise wrong_dtype(f"{argument(name)} is {dtype.name}; allowed: {allowed}")
    if len(shape) > 2 and name in _FLAT:
        shape = (math.prod(shape[:-1]), shape[-1])
    strides = [1] * len(shape)
    for d in range(len(shape) - 1, 0, -1):
        strides[d - 1] = strides[d] * shape[d]
    return View(name, code, *device, shape, strides)


def _in_core(tensor: Tensor, input: Any) -> Tensor:
    """The tensor with the dtype that it has in the core, in a call of this `input`."""
    if tensor.name not in KEPT:
        return tensor
    return tensor._replace(dtype=_F32 if tensor.name == "kept_rows" else np.dtype(input.dtype))


def _bitcast(x: Array, dtype: Any) -> Array:
    return x if x.dtype == dtype else jax.lax.bitcast_convert_type(x, dtype)


@functools.lru_cache(maxsize=1024)
def _plan(
    device: tuple[int, int], kind: int, tensors: tuple[Tensor, ...], options: AnyOptions | None,
    memory: int | None, threads: int,
) -> _Workspace:  # fmt: skip
    views = [_view(tensor, device) for tensor in tensors]
    shapes = {tensor.name: tensor.shape for tensor in tensors}
    most = 0  # bytes of all logits and all gradients in f32: no plan takes more
    if "weight" in shapes and len(shapes["weight"]) == 2:
        (tokens, hidden), vocab = shapes["input"], shapes["weight"][0]
        logits = (2 if isinstance(options, Divergence) else 1) * tokens * vocab
        most = 4 * (logits + tokens * hidden + vocab * hidden)
    how: dict[str, Any] = {"memory": memory, "most": most, "only_chosen": only_chosen([*shapes])}
    if "kept" in shapes:
        code = views[0].dtype
        kept_bytes = _abi.kept_bytes(tokens, math.prod(shapes["kept"]), _abi.KEPT_ELEMENT[code])
        if kind in BACKWARD_OF_KEPT and options is not None:
            inputs = [view for view in views if view.name in _OF_KEY]
            if isinstance(options, Divergence):  # Forward has a teacher, which is not in the key
                teacher = View("teacher_logits", code, *device, (tokens, vocab), (vocab, 1))
                inputs.append(teacher)
            key = _abi.kept_size(inputs, options, device, kept_bytes).key
            how |= {"kept_key": key, "consume_kept": kind == _CONSUMES_KEPT}
    plan = Plan(kind, views, options, device, **how)
    return _Workspace(plan.bytes, plan.alignment)


def _devices(device_type: int) -> Sequence[int]:
    """The numbers of the devices of this type on which a program may run: XLA chooses one only when
    the program runs."""
    if device_type == _abi.CUDA:
        try:
            return sorted(device.local_hardware_id for device in jax.local_devices(backend="cuda"))
        except RuntimeError:  # no GPU here: the program is exported, or only lowered
            pass
    return [0]


def _planned(
    device_type: int, avals: Sequence[Any], kind: int, names: Sequence[str],
    results: tuple[Tensor, ...], options: AnyOptions | None, memory: int | None,
) -> _Workspace:  # fmt: skip
    """Sizes of a plan's workspace that are enough on every device that the core supports."""
    operands = tuple(
        Tensor(name, tuple(aval.shape), np.dtype(aval.dtype)) for name, aval in zip(names, avals)
    )
    tensors = tuple(_in_core(tensor, operands[0]) for tensor in operands + results)
    threads = int(_abi.library.logitless_num_threads())
    made, refused = [], []
    for index in _devices(device_type):
        device = (device_type, index)
        try:
            made.append(_plan(device, kind, tensors, options, memory, threads))
        except LogitlessRuntimeError as error:  # an unsupported older device; others may do
            refused.append(error)
    if not made:
        raise refused[0]
    return _Workspace(*map(max, zip(*made)))


run_p = Primitive("logitless")
run_p.multiple_results = True


def run(
    kind: int, operands: dict[str, Array], results: Sequence[Tensor], options: AnyOptions | None,
    memory: int | None = None,
) -> dict[str, Array]:  # fmt: skip
    """The results of the op `kind`, by name."""
    names, arrays = tuple(operands), operands.values()
    made = run_p.bind(
        *arrays, kind=kind, names=names, results=tuple(results), options=options, memory=memory
    )
    return {result.name: array for result, array in zip(results, made)}


@functools.lru_cache(maxsize=1024)
def _jitted(primitive: Primitive, params: tuple[tuple[str, Any], ...]) -> Any:
    def run_alone(*operands: Array) -> Any:
        return primitive.bind(*operands, **dict(params))

    run_alone.__name__ = run_alone.__qualname__ = primitive.name
    # As JAX marks its own: if jax_debug_nans finds a NaN, the error names the primitive. Without
    # the mark JAX would look for it inside, by evaluating the primitive again.
    vars(run_alone)["_apply_primitive"] = True
    return jax.jit(run_alone)


def evaluate(primitive: Primitive, *operands: Array, **params: Any) -> Any:
    """Runs the primitive outside of jit, as a separate program that is compiled once."""
    with jax.disable_jit(False):  # or the primitive would be evaluated again
        return _jitted(primitive, tuple(params.items()))(*operands)


def varying(x: Any) -> frozenset[str]:
    """The mesh axes over which a value varies, by its type under jax.shard_map's check_vma; the
    attribute's name changes with JAX's version."""
    aval = x if isinstance(x, jax.core.AbstractValue) else jax.typeof(x)
    found = getattr(aval, "vma", None) or getattr(
        getattr(aval, "manual_axis_type", None), "varying", None
    )
    return frozenset(found or ())


def pvary(x: Array, axes: frozenset[str]) -> Array:
    """The value, with a type that also varies over these axes."""
    missing = tuple(sorted(axes - varying(x)))
    if not missing:
        return x
    cast: Any = getattr(jax.lax, "pcast", None)
    typed: Array = cast(x, missing, to="varying") if cast else vars(jax.lax)["pvary"](x, missing)
    return typed


def explicit_sharding(x: Any) -> Any:
    """How a value is sharded by its type, on a mesh of explicit axes; None if it is not."""
    sharding = getattr(jax.typeof(x), "sharding", None)
    if sharding is None or not any(sharding.spec):
        return None
    if isinstance(x, jax.core.Tracer):
        return sharding
    return jax.sharding.NamedSharding(x.sharding.mesh, sharding.spec)  # has a mesh of devices


def refuse_checked(avals: Sequence[Any]) -> None:
    """Refuses operands that vary over mesh axes. With check_vma, jax.shard_map asks every primitive
    over which mesh axes its results vary; this one has no answer, and gradients would be wrong."""
    for aval in avals:
        if varying(aval):
            raise not_supported(
                f"an operand varies over the mesh axes {sorted(varying(aval))}; pass "
                "check_vma=False to jax.shard_map"
            )


def _results_like(aval: Any, results: Sequence[Tensor]) -> Any:
    """The results' types, which vary like an operand's."""
    axes = varying(aval)
    if not axes:
        return [jax.core.ShapedArray(result.shape, result.dtype) for result in results]

    def zeros() -> list[Array]:
        return [pvary(jnp.zeros(result.shape, result.dtype), axes) for result in results]

    return jax.make_jaxpr(zeros)().out_avals


@run_p.def_abstract_eval
def abstract(
    *avals: Any, results: tuple[Tensor, ...], memory: int | None, options: AnyOptions | None,
    **params: Any,
) -> Any:  # fmt: skip
    if not _is_of_shard(options):  # a shard's operands all vary over the same axes
        refuse_checked(avals)
    # Only to raise errors where the call is traced: the workspace depends on the device.
    _planned(_abi.CPU, avals, results=results, memory=None, options=options, **params)
    return _results_like(avals[0], results)


def _is_of_shard(options: AnyOptions | None) -> bool:
    return options is not None and bool(options.vocab_total)


def _attributes(options: AnyOptions | None) -> dict[str, Any]:
    if options is None:
        return {}
    types: dict[str, Any] = dict.fromkeys(options._fields, np.float32)
    types |= dict.fromkeys(("reduction", "empty_mean", "allow_tf32", "kind"), np.int32)
    types |= {"ignore_index": np.int64, "normalizer": np.float64}
    types |= dict.fromkeys(_OF_SHARD, np.int64)
    values = options._asdict()
    if not _is_of_shard(options):
        values = {name: value for name, value in values.items() if name not in _OF_SHARD}
    return {_ATTRIBUTES.get(n, n): types[n](value) for n, value in values.items()}


def _custom_call(
    device_type: int, *operands: Array, kind: int, names: tuple[str, ...],
    results: tuple[Tensor, ...], options: AnyOptions | None, memory: int | None,
) -> Sequence[Array]:  # fmt: skip
    workspace = _planned(device_type, operands, kind, names, results, options, memory)
    dtypes = [result.dtype for result in results]
    results = tuple(_in_core(result, operands[0]) for result in results)
    operands = tuple(
        _bitcast(x, _in_core(Tensor(name, x.shape, x.dtype), operands[0]).dtype)
        for name, x in zip(names, operands)
    )
    outputs = {result.name: i for i, result in enumerate(results)}
    aliases = {}
    for source, result in _IN_PLACE:
        if source in names and result in outputs:
            operand, output = names.index(source), outputs[result]
            if operands[operand].dtype == results[output].dtype:
                aliases[operand] = output
    types = [jax.ShapeDtypeStruct(result.shape, result.dtype) for result in results]
    fields = [*names, *outputs]
    for name in KEPT if kind == _CONSUMES_KEPT else ():
        if name in names:
            operand = names.index(name)
            aliases[operand] = len(types)
            types.append(jax.ShapeDtypeStruct(operands[operand].shape, operands[operand].dtype))
            fields.append("-")
    types.append(jax.ShapeDtypeStruct((workspace.bytes + workspace.alignment,), np.uint8))
    more = {"only_chosen": np.int32(1)} if only_chosen(names) else {}
    call = jax.ffi.ffi_call(_TARGET, types, input_output_aliases=aliases)
    made = call(
        *operands,
        device_type=np.int32(device_type),
        kind=np.int32(kind),
        fields=" ".join(fields),
        workspace_bytes=np.int64(workspace.bytes),
        alignment=np.int64(workspace.alignment),
        **more,
        **_attributes(options),
    )
    return [_bitcast(x, dtype) for x, dtype in zip(made, dtypes)]


for _platform, _device in (("cpu", _abi.CPU), ("cuda", _abi.CUDA)):
    mlir.register_lowering(
        run_p, mlir.lower_fun(functools.partial(_custom_call, _device)), platform=_platform
    )
run_p.def_impl(functools.partial(evaluate, run_p))


def jvp(*_: Any, **__: Any) -> Any:
    raise not_supported(ONCE_ONLY)


ad.primitive_jvps[run_p] = jvp


def one_after_another(
    primitive: Primitive, operands: Sequence[Array], dims: Sequence[int | None], **params: Any
) -> Any:
    """The batching rule of primitives without a better one: a loop that runs the op once for each
    slice."""
    mapped = [jnp.moveaxis(x, d, 0) for x, d in zip(operands, dims) if d is not None]

    def one(slices: Sequence[Array]) -> Any:
        rest = iter(slices)
        given = [x if d is None else next(rest) for x, d in zip(operands, dims)]
        return primitive.bind(*given, **params)

    results = jax.lax.map(one, mapped)
    return results, [0] * len(results)


def _batched(operands: Sequence[Array], dims: Sequence[int | None], **params: Any) -> Any:
    if params["kind"] != _abi.SOFTMAX:
        return one_after_another(run_p, operands, dims, **params)
    logits = jnp.moveaxis(operands[0], dims[0] or 0, 0)  # [B, ..., C]
    results = (params["results"][0]._replace(shape=logits.shape),)
    return run_p.bind(logits, **params | {"results": results}), [0]


batching.primitive_batchers[run_p] = _batched
