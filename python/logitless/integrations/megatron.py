# SPDX-License-Identifier: Apache-2.0
"""Replacements for Megatron-Core's heads: its fused function, an output layer that returns the
loss, and an output_processor, which its models call with hidden states. The vocabulary is split
over the tensor-parallel ranks. All collectives are on the `tp_group` of the call or the layer,
which lies within the last pipeline stage."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from logitless._call import Reduction
from logitless._errors import invalid, not_supported, renames
from logitless.integrations._heads import through
from logitless.integrations._memory import Sizes, frugal
from logitless.torch import Split
from logitless.torch import linear_cross_entropy as _linear_cross_entropy

_ARGUMENTS = {"input": "hidden", "linear_weight": "weight", "target": "labels", "group": "tp_group"}


# Columns whose logits and gradients Megatron's kernels compute at a time.
_COLUMNS = 3072


def _peak(call: Sizes) -> int:
    """The largest number of bytes that Megatron's fused function needs: the gradients of _COLUMNS
    columns' logits, f32 sums of the gradient of hidden, and two numbers for each token and
    each _COLUMNS columns."""
    columns = call.size * min(_COLUMNS, call.vocab) + 8 * -(-call.vocab // _COLUMNS)
    return call.tokens * (columns + 4 * call.width)


def _where(group: Any, sequence_parallel: bool, reduce_input_grad: bool = True) -> Split | None:
    """The Split for a group. With sequence parallelism the first dimension of the tokens is split
    too."""
    if group is None:
        return None
    return Split(
        group,
        sequence_dim=0 if sequence_parallel else None,
        reduce_input_grad=sequence_parallel or reduce_input_grad,
    )


@renames(_ARGUMENTS)
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    tp_group: Any = None,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    sequence_parallel: bool = False,
    *,
    normalizer: float | Tensor | None = None,
    memory: int | str | None = None,
) -> Tensor:
    """The loss in f32: of every token [N], or a scalar.

    The signature is that of Megatron-LM's megatron/core/fusions/fused_linear_cross_entropy.py at
    commit 020c805. hidden [..., D] and labels [...] have the same number of tokens; weight [V / P,
    D] is the equal share of this rank, one of P. With `sequence_parallel`, hidden is this rank's
    part along its first dimension; labels and results are those of all tokens. The gradient of
    hidden is reduced, as in Megatron: it is the sum over the ranks or, with `sequence_parallel`,
    this rank's tokens' part of the sum. A mean is over the tokens of this call. If data or context
    parallel ranks have other tokens, pass as `normalizer` the number of valid tokens on all these
    ranks. `memory` is that of logitless.torch's function; its default is the bytes that Megatron's
    kernels need, unless default_memory sets another.
    """
    loss: Tensor = _linear_cross_entropy(
        hidden.reshape(-1, hidden.shape[-1]), weight, labels.reshape(-1), reduction=reduction,
        ignore_index=ignore_index, normalizer=normalizer,
        memory=frugal(memory, hidden, weight, _peak, labels.numel()),
        group=_where(tp_group, sequence_parallel),
    )  # fmt: skip
    return loss


def _check(layer: Any) -> None:
    refused = {
        "is_expert": getattr(layer, "is_expert", False),
        "defer_embedding_wgrad_compute": getattr(
            layer.config, "defer_embedding_wgrad_compute", False
        ),
    }
    for name, is_on in refused.items():
        if is_on:
            raise not_supported(f"{name} is set, which has no counterpart here; allowed: False")


@renames({**_ARGUMENTS, "input": "input_", "linear_bias": "bias"})
def _loss_of(
    layer: Any, input_: Tensor, weight: Tensor | None, labels: Tensor | None, **options: Any
) -> Tensor:
    """The loss, [b, s] or a scalar, of the logits that a ColumnParallelLinear would compute from
    `input_` [s, b, h]."""
    _check(layer)
    weight = layer.weight if weight is None else weight
    if weight is None or labels is None:
        raise invalid(f"{'labels' if labels is None else 'weight'} is None; allowed: a tensor")
    where = _where(
        layer.tp_group, layer.sequence_parallel, not getattr(layer, "disable_grad_reduce", False)
    )
    loss: Tensor = _linear_cross_entropy(
        input_, weight, labels.transpose(0, 1),
        linear_bias=None if layer.skip_bias_add else layer.bias, group=where, **options,
    )  # fmt: skip
    return loss.transpose(0, 1).contiguous() if loss.dim() else loss


def output_processor(
    *,
    hidden_states: Tensor,
    output_layer: Any,
    output_weight: Tensor | None = None,
    labels: Tensor | None = None,
    loss_mask: Tensor | None = None,
    context: Mapping[str, Any] | None = None,
    config: Any = None,
    **_rest: Any,
) -> Tensor:
    """For Megatron-Core 0.18 and later: GPTModel.forward(..., output_processor=output_processor)
    calls this function instead of its output layer. It returns the loss of every token, [b, s] in
    f32, as compute_language_model_loss does, for hidden_states [s, b, h] (with sequence parallelism
    the rank's part of s) and labels [b, s]. The loss of an ignored label (-100) is 0.

    `context` (forward's output_processor_context) may hold options of logitless.torch's
    linear_cross_entropy: z_loss, softcap, temperature, memory, ... With {"reduction": "sum"}, or
    with "mean" and the "normalizer" of all data and context parallel ranks, the result is a scalar,
    in which loss_mask [b, s] weights the tokens. The arguments are those of gpt_model.py at commit
    d98e8a6. The output layer's hooks run; its logits are not computed. Raises NotImplementedError
    for an expert's layer, and for one that defers the embedding's weight gradient.
    """
    options = dict(context or {"reduction": "none"})
    if options.setdefault("reduction", "none") == "mean" and options.get("normalizer") is None:
        raise invalid(
            "reduction is 'mean' without normalizer; allowed: with the number of tokens that count "
            "on all data and context parallel ranks"
        )
    if options["reduction"] != "none" and loss_mask is not None:
        options["token_weight"] = loss_mask.transpose(0, 1)
    if getattr(config, "use_mup", False):
        options.setdefault("logit_scale", config.mup_output_mult)

    def loss(input_: Tensor) -> Tensor:
        return _loss_of(output_layer, input_, output_weight, labels, **options)

    made: Tensor = through(output_layer, loss, hidden_states)
    return made


class _GivesLoss:
    """A forward that calls ColumnParallelLinear's only if no loss is wanted."""

    def forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        output_cross_entropy_loss: bool | None = None,
        labels: Tensor | None = None,
        reduction: str = "none",
        ignore_index: int = -100,
    ) -> Any:
        """The loss of input_ [s, b, h] in f32, [b, s] or a scalar, if `labels` [b, s] are given or
        output_cross_entropy_loss is True (without labels an error). Otherwise, or if it is False,
        the result of ColumnParallelLinear."""
        asked = output_cross_entropy_loss
        if not (labels is not None if asked is None else asked):
            whole: Any = super()
            return whole.forward(input_, weight, runtime_gather_output)
        own: Any = self
        tokens = None if labels is None else labels.numel()
        memory = frugal(None, input_, own.weight if weight is None else weight, _peak, tokens)
        return _loss_of(
            self, input_, weight, labels, reduction=reduction, ignore_index=ignore_index,
            memory=memory,
        )  # fmt: skip


@functools.cache
def module_of(column_parallel_linear: type) -> type:
    """The class LinearCrossEntropyModule, derived from the given ColumnParallelLinear."""
    text = (
        "A ColumnParallelLinear whose forward gives the loss where it is given labels, with the "
        "arguments of Megatron-LM's module of this name at commit 0053230."
    )
    return type(
        "LinearCrossEntropyModule", (_GivesLoss, column_parallel_linear),
        {"__module__": __name__, "__doc__": text},
    )  # fmt: skip


def __getattr__(name: str) -> Any:
    """LinearCrossEntropyModule, which is made at its first use because it imports Megatron-Core's
    class."""
    if name != "LinearCrossEntropyModule":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megatron.core.tensor_parallel import (  # type: ignore[import-not-found,unused-ignore]
        ColumnParallelLinear,
    )

    return module_of(ColumnParallelLinear)
