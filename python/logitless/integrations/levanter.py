# SPDX-License-Identifier: Apache-2.0
"""Replacements for Levanter's losses of a language model's head, on haliax's NamedArrays, in JAX.
torch is not needed.

    import levanter.models.lm_model
    from logitless.integrations.levanter import maybe_fused_next_token_loss

    levanter.models.lm_model.maybe_fused_next_token_loss = maybe_fused_next_token_loss
"""

from __future__ import annotations

import contextlib
from typing import Any

try:
    import haliax as hax  # type: ignore[import-not-found,unused-ignore]
except ModuleNotFoundError as error:
    raise ImportError("logitless.integrations.levanter needs haliax: pip install haliax") from error
import jax
import jax.numpy as jnp

from logitless._errors import renames
from logitless.integrations._arguments import only
from logitless.jax import linear_cross_entropy

_EXACT = (None, "highest", jax.lax.Precision.HIGHEST)
_NAMES = {
    "input": "pred_embeddings", "linear_weight": "pred_lm_head", "target": "target_y",
    "token_weight": "weight", "z_loss": "logsumexp_weight", "softcap": "logit_soft_cap",
}  # fmt: skip


def _weights(weight: Any, where: Any, axes: Any) -> Any:
    """Each token's weight, or None if all tokens have the same weight."""
    if where is not None:
        chosen = (where != 0).astype(jnp.float32)
        weight = chosen if weight is None else weight.astype(jnp.float32) * chosen
    return None if weight is None else hax.broadcast_to(weight, axes).astype(jnp.float32)


def _reduced(loss: Any, reduction: Any, axis: Any, weight: Any) -> Any:
    """The losses of tokens, reduced by a function of haliax along some of their axes."""
    weighted = loss if weight is None else loss * weight
    if reduction is None or axis == ():
        return weighted
    if weight is None or reduction is not hax.mean:
        return reduction(weighted, axis=axis)
    total = hax.sum(weight, axis=axis)
    return hax.where(total != 0, hax.sum(weighted, axis=axis) / hax.where(total != 0, total, 1), 0)


@renames(_NAMES)
def fused_cross_entropy_loss_and_logsumexp_penalty(
    pred_embeddings: Any,
    pred_lm_head: Any,
    Contract: Any,
    Label: Any,
    target_y: Any,
    *,
    reduction: Any = hax.mean,
    reduction_axis: Any = None,
    weight: Any = None,
    logsumexp_weight: float | None = 0.0,
    block_size: int | None = None,
    dtype: Any = jnp.float32,
    logit_soft_cap: float | None = None,
    precision: Any = None,
    implementation: str | None = None,
    where: Any = None,
    memory: int | str | None = None,
) -> Any:
    """-log softmax(logits)[target] + logsumexp_weight · lse² of each token, reduced: a NamedArray
    in f32. The logits are pred_embeddings · pred_lm_head along the axis Contract, softcapped.

    pred_embeddings has the axis Contract and axes of tokens. target_y has the axes of tokens, and
    holds indices along Label. pred_lm_head has Contract and Label in any order; if Contract is not
    its last axis in memory, the program makes a transposed copy. `weight` has the tokens' weights.
    hax.mean divides by their sum; if this is 0, the result is 0. `where` is a mask, which releases
    on PyPI take instead of weights. If hax.mean or hax.sum reduces all axes, loss and gradients are
    computed in one call; otherwise in Forward and Backward. Forward then keeps all logits, but
    nothing with `memory`, in f16, and in bf16 with a softcap. `block_size` has no effect.
    """
    only("dtype", None if dtype is None else jnp.dtype(dtype).name, None, "float32")
    only("precision", precision, *_EXACT)
    only("implementation", implementation, None)
    Contract = pred_embeddings.resolve_axis(Contract)
    Label = pred_lm_head.resolve_axis(Label)
    axes = hax.axis.without_axes(pred_embeddings.axes, Contract)
    weight = _weights(weight, where, axes)
    whole = reduction_axis is None and reduction in (hax.mean, hax.sum)
    options: dict[str, Any] = {"reduction": "none"}
    if whole:
        mean = reduction is hax.mean
        options = {"reduction": "mean" if mean else "sum"}
        if weight is not None:
            options["token_weight"] = weight.array
            options["normalizer"] = weight.array.sum() if mean else None
    highest = jax.default_matmul_precision("highest")
    with highest if precision is not None else contextlib.nullcontext():
        loss = linear_cross_entropy(
            pred_embeddings.rearrange((*axes, Contract)).array,
            pred_lm_head.rearrange((Label, Contract)).array,
            target_y.rearrange(axes).array,
            ignore_index=None, z_loss=logsumexp_weight or 0.0, softcap=logit_soft_cap,
            memory=memory, **options,
        )  # fmt: skip
    if whole:
        return hax.named(loss, ())
    return _reduced(hax.named(loss, axes), reduction, reduction_axis, weight)


def maybe_fused_next_token_loss(
    Pos: Any,
    Embed: Any,
    Vocab: Any,
    pred_embeddings: Any,
    pred_lm_head: Any,
    true_ids: Any,
    loss_weight: Any = None,
    reduction: Any = hax.mean,
    reduction_axis: Any = None,
    logsumexp_weight: float | None = None,
    block_size: int | None = None,
    dtype: Any = jnp.float32,
    logit_soft_cap: float | None = None,
    precision: Any = None,
    implementation: str | None = None,
    *,
    loss_mask: Any = None,
    memory: int | str | None = None,
) -> Any:
    """The loss of each token's successor along Pos; the last token has none. The logits are never
    computed as a whole, and `block_size` has no effect. `loss_mask` is the name of `loss_weight` in
    releases on PyPI."""
    Pos = pred_embeddings.resolve_axis(Pos.name)
    weight = hax.arange(Pos) != Pos.size - 1
    for given in (loss_weight, loss_mask):
        weight = weight if given is None else weight * given.astype(jnp.float32)
    return fused_cross_entropy_loss_and_logsumexp_penalty(
        pred_embeddings, pred_lm_head, Embed, Vocab, hax.roll(true_ids, -1, Pos),
        reduction=reduction, reduction_axis=reduction_axis, weight=weight,
        logsumexp_weight=logsumexp_weight, block_size=block_size, dtype=dtype,
        logit_soft_cap=logit_soft_cap, precision=precision, implementation=implementation,
        memory=memory,
    )  # fmt: skip
