# SPDX-License-Identifier: Apache-2.0
"""Tunix' log-probabilities and entropies of an nnx model, without its logits, in JAX. torch is not
needed.

    from tunix.rl import algo_core, common
    from logitless.integrations import tunix as ours

    common.compute_per_token_logps = ours.compute_per_token_logps
    common.get_per_token_logps = ours.get_per_token_logps
    algo_core.compute_entropy_from_logits = ours.compute_entropy_from_logits

The model's own code runs, but its head gives eight numbers in place of logits. The model must
return these numbers after the softcap of its configuration, which the loss uses.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import Any, NamedTuple

try:
    from flax import nnx  # type: ignore[import-not-found,unused-ignore]
    from tunix.rl import common  # type: ignore[import-not-found,unused-ignore]
except ModuleNotFoundError as error:
    raise ImportError(
        "logitless.integrations.tunix needs Tunix: pip install google-tunix"
    ) from error
import jax
import jax.numpy as jnp
import numpy as np

from logitless._errors import not_supported, renames
from logitless.jax import linear_logprob

_ALLOWED = (
    "allowed: a model of Tunix 0.1.7's with its embedder.decode or its lm_head, plain "
    "(return_logits=False and the model's own function make logits)"
)
# The primitives that a head may have besides one product.
_MOVES = frozenset((
    "convert_element_type", "transpose", "sharding_constraint", "copy", "copy_p", "reshape",
    "mesh_cast", "squeeze", "broadcast_in_dim",
))  # fmt: skip
_INNER = ("jaxpr", "call_jaxpr")
_SOFTCAPS = (("final_logits_softcap",), ("config", "final_logit_softcap"))


def _refused(model: Any, what: str) -> Exception:
    return not_supported(f"the {type(model).__name__} {what}; {_ALLOWED}")


class _Head(NamedTuple):
    """A call of a head. hidden and weight are cast to the dtype of its product."""

    hidden: Any  # [B, T, D]
    weight: Any  # [V, D]
    softcap: float
    dtype: Any  # of the logits


def _steps(jaxpr: Any) -> Any:
    for equation in jaxpr.eqns:
        inner = [equation.params[name] for name in _INNER if name in equation.params]
        if inner:
            yield from _steps(getattr(inner[0], "jaxpr", inner[0]))
        else:
            yield equation


def _product(model: Any, own: Any, hidden: Any, weight: Any) -> tuple[Any, Any]:
    """(dtype of the head's product, that of its logits); raises if it is more than a product."""
    traced = jax.make_jaxpr(own)(hidden)
    steps = list(_steps(traced.jaxpr))
    products = [step for step in steps if step.primitive.name == "dot_general"]
    others = {step.primitive.name for step in steps} - {"dot_general"} - _MOVES
    (out,) = traced.out_avals
    if len(products) != 1 or others or out.shape != (*hidden.shape[:-1], weight.shape[0]):
        found = ", ".join([f"{len(products)} products", *sorted(others)])
        raise _refused(model, f"has a head of {found} that gives {out.shape} (an adapter?)")
    (dtype,) = {operand.aval.dtype for operand in products[0].invars}
    return dtype, out.dtype


def _softcap_of(model: Any) -> float:
    for path in _SOFTCAPS:
        value = functools.reduce(lambda owner, name: getattr(owner, name, None), path, model)
        if value:
            return float(value)
    return 0.0


def _capped(logits: Any, softcap: float) -> Any:
    return softcap * jnp.tanh(logits / softcap) if softcap else logits


def _check_probe(model: Any, made: Any, probe: np.ndarray[Any, Any], softcap: float) -> None:
    """Raises unless the model returned `probe` after the softcap, and nothing else."""
    if isinstance(made, jax.core.Tracer) or getattr(made, "shape", None) != probe.shape:
        raise _refused(model, f"makes something else of its head's logits than their {probe.shape}")
    wide = probe.astype(np.float64)
    expected = softcap * np.tanh(wide / softcap) if softcap else wide
    found = np.asarray(made).astype(np.float64)
    eps = float(jnp.finfo(probe.dtype).eps)  # type: ignore[no-untyped-call,unused-ignore]
    if np.abs(found - expected).max() > 4 * eps * abs(expected).max():
        raise _refused(
            model, f"makes {found.ravel().tolist()} of logits {wide.ravel().tolist()}, and a "
            f"softcap of {softcap} would be {expected.ravel().tolist()}",
        )  # fmt: skip


def _run(model: Any, tokens: Any, **options: Any) -> _Head:
    """Runs the model's forward with eight numbers in place of its logits."""
    tied = getattr(model, "lm_head", None) is None
    owner, name = (getattr(model, "embedder", None), "decode") if tied else (model, "lm_head")
    own = getattr(owner, name, None)
    held = getattr(owner, "input_embedding", None) if tied else getattr(own, "w", None)
    if own is None or held is None:
        raise _refused(model, "has no head that is known")
    weight = held[...] if tied else held[...].T
    softcap = _softcap_of(model)
    given: list[tuple[Any, ...]] = []
    with contextlib.ExitStack() as folding:

        def head(hidden: Any) -> Any:
            if given:
                raise _refused(model, "calls its head more than once")
            dtype, of_logits = _product(model, own, hidden, weight)
            probe = np.linspace(-3, 3, 8).astype(of_logits).reshape(1, 1, 8) * (softcap or 1.0)
            probe = probe.astype(of_logits)
            given.append((hidden.astype(dtype), weight.astype(dtype), of_logits, probe))
            # From here on the model computes with values, not tracers: _check_probe reads them.
            folding.enter_context(jax.ensure_compile_time_eval())
            return jnp.asarray(probe)

        state = vars(owner)
        before = state.get(name)
        state[name] = head
        try:
            made, _ = model(tokens, **options)
        finally:
            if before is None:
                del state[name]
            else:
                state[name] = before
    if not given:
        raise _refused(model, f"does not call its {name}")
    hidden, weight, dtype, probe = given[0]
    _check_probe(model, made, probe, softcap)
    return _Head(hidden, weight, softcap, dtype)


@jax.tree_util.register_pytree_node_class
class Logits:
    """Stands for logits [B, T, V], and becomes them where it is used as an array. Their entropy is
    already computed."""

    def __init__(
        self, hidden: Any, weight: Any, entropy: Any, softcap: float, temperature: float,
        padded: bool, dtype: Any,
    ) -> None:  # fmt: skip
        self.hidden, self.weight, self.entropy = hidden, weight, entropy
        self.rest = (softcap, temperature, padded, dtype)

    def tree_flatten(self) -> Any:
        return (self.hidden, self.weight, self.entropy), self.rest

    @classmethod
    def tree_unflatten(cls, rest: Any, arrays: Any) -> Logits:
        return cls(*arrays, *rest)

    def __jax_array__(self) -> Any:
        softcap, temperature, padded, dtype = self.rest
        logits = _capped(jnp.dot(self.hidden, self.weight.T).astype(dtype), softcap) / temperature
        return jnp.pad(logits, ((0, 0), (1, 0), (0, 0))) if padded else logits


def compute_entropy_from_logits(logits: Any) -> Any:
    """[B, T], as Tunix' function. For `Logits` no logits are computed."""
    if isinstance(logits, Logits):
        return logits.entropy
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    return -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)


_STATIC = ("pad_id", "eos_id", "stop_gradient", "return_logits", "temperature", "memory")


@functools.partial(jax.jit, static_argnames=_STATIC)
@renames({"input": "hidden states", "linear_weight": "head", "target": "tokens"})
def compute_per_token_logps(
    graphdef: Any,
    state: Any,
    prompt_tokens: Any,
    completion_tokens: Any,
    pad_id: int,
    eos_id: int,
    images: Any = None,
    stop_gradient: bool = True,
    return_logits: bool = False,
    segment_ids: Any = None,
    segment_positions: Any = None,
    temperature: float = 1.0,
    *,
    memory: int | str | None = None,
) -> Any:
    """The log-probabilities of completion_tokens [B, T] in f32. With segment_ids [B, T], which mark
    packed sequences, those of all tokens of the row, 0 at its first. With `return_logits` the pair
    of them and `Logits`."""
    model = nnx.merge(graphdef, state)
    tokens, positions, mask, own_segments = common.process_ids(
        prompt_tokens, completion_tokens, pad_id, eos_id, segment_ids, segment_positions
    )
    options = {"positions": positions, "cache": None, "attention_mask": mask}
    segments = own_segments if segment_ids is None else segment_ids
    if segments is not None and _takes(model, "segment_ids"):
        options["segment_ids"] = segments
    if images is not None:
        options["images"] = images
    head = _run(model, tokens, **options)
    packed = segment_ids is not None
    kept = (tokens if packed else completion_tokens).shape[1] - packed
    if temperature == 0.0:
        temperature = 1.0
    hidden = head.hidden[:, -kept - 1 : -1]
    entropies: Any = return_logits
    logps: Any = linear_logprob(
        hidden, head.weight, tokens[:, -kept:], softcap=head.softcap, temperature=temperature,
        memory=memory, ignore_index=None, entropy=entropies,
    )  # fmt: skip
    logits = None
    if return_logits:
        logps, entropy = logps
        if packed:  # Tunix pads with logits of 0
            flat = jnp.log(jnp.float32(head.weight.shape[0]))
            entropy = jnp.pad(entropy, ((0, 0), (1, 0)), constant_values=flat)
        logits = Logits(hidden, head.weight, entropy, head.softcap, temperature, packed, head.dtype)
    if packed:
        logps = jnp.pad(logps, ((0, 0), (1, 0)))
    if stop_gradient:
        logps, logits = jax.lax.stop_gradient((logps, logits))
    return (logps, logits) if return_logits else logps


def _takes(model: Any, name: str) -> bool:
    given = inspect.signature(model.__call__).parameters.values()
    return any(p.name == name or p.kind is p.VAR_KEYWORD for p in given)


@nnx.jit(static_argnames=("logits_to_keep",))  # type: ignore[untyped-decorator,unused-ignore]
def get_per_token_logps(
    model: Any,
    input_tokens: Any,
    positions: Any,
    attn_mask: Any,
    logits_to_keep: int,
    images: Any = None,
) -> Any:
    """The log-probabilities of the last logits_to_keep tokens, [B, K] f32; DPOTrainer calls it."""
    options = {} if images is None else {"images": images}
    head = _run(
        model, input_tokens, positions=positions, attention_mask=attn_mask, cache=None, **options
    )
    return linear_logprob(
        head.hidden[:, -logits_to_keep - 1 : -1], head.weight, input_tokens[:, -logits_to_keep:],
        softcap=head.softcap, ignore_index=None,
    )  # fmt: skip
