# SPDX-License-Identifier: Apache-2.0
"""A loss for torchtitan, with the interface of ChunkedLossWrapper, which it replaces. The trainer
passes hidden states and the lm_head to it, on the last pipeline stage only."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from torch import Tensor

from logitless._errors import invalid, not_supported, renames
from logitless.integrations._heads import through
from logitless.integrations._memory import Sizes, frugal
from logitless.torch import Split, linear_cross_entropy
from logitless.torch._split import placed


class HeadLoss:
    """The part of LinearCrossEntropyLoss that does not need torchtitan: loss(pred, labels,
    global_valid_tokens), where pred are hidden states."""

    lm_head: Any = None
    global_vocab_size: int | None = None
    num_chunks = 8

    def set_lm_head(self, lm_head: Any) -> None:
        """Sets the module whose weight [V, D] (and bias) makes the logits. Call it before the first
        loss."""
        self.lm_head = lm_head

    def tp_group(self) -> Any:
        """The group over which the rows of a plain weight are split, or None."""
        return None

    def _peak(self, call: Sizes) -> int:
        """The largest number of bytes that torchtitan's wrapper needs: a chunk's logits and two f32
        tensors of the same size, and f32 sums of the gradient of the hidden states."""
        chunk = -(-call.tokens // self.num_chunks) * call.vocab
        return (call.size + 8) * chunk + 4 * call.tokens * call.width

    @renames({"input": "pred", "target": "labels", "normalizer": "global_valid_tokens"})
    def __call__(
        self,
        pred: Tensor,
        labels: Tensor,
        global_valid_tokens: Any = None,
        **loss_inputs: Any,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns (loss, {}). The loss is a sum in f32 over the tokens of pred [..., D] whose label
        [...] is not -100, divided by `global_valid_tokens` if given. This is the number of valid
        tokens on all data and context parallel ranks, so that the ranks' losses add up to the mean.

        The interface is that of torchtitan 0.3.0, torchtitan/components/loss.py, and `loss_inputs`
        are unused as in its CrossEntropyLoss. Hooks of the lm_head run, including FSDP's. If the
        weight is a DTensor, its placements tell over which ranks it is split. A plain weight is the
        rank's share within `tp_group`; the gradient of pred is then the rank's part of a sum.
        spmd_types adds the parts up where pred was gathered, as for the product of lm_head.
        """
        head = self.lm_head
        if head is None:
            raise invalid("lm_head is None; allowed: a module, given to set_lm_head before")

        def loss(hidden: Tensor) -> Tensor:
            made: Tensor = linear_cross_entropy(
                hidden, head.weight, labels, linear_bias=getattr(head, "bias", None),
                reduction="sum" if global_valid_tokens is None else "mean",
                normalizer=global_valid_tokens,
                memory=frugal(None, hidden, head.weight, self._peak),
                group=self._where(hidden, head.weight),
            )  # fmt: skip
            return made

        return through(head, loss, pred), {}

    def _where(self, pred: Tensor, weight: Tensor) -> Any:
        if placed.is_placed(weight):
            return None if placed.is_placed(pred) else placed.group_of(weight)
        group = self.tp_group()
        if group is None:
            return None
        return Split(group, total=self.global_vocab_size, reduce_input_grad=False)


def _spmd_group() -> Any:
    """The tensor-parallel group of torchtitan's spmd_types backend, if there is one."""
    import spmd_types as spmd  # type: ignore[import-not-found,unused-ignore]
    from torchtitan.distributed import (  # type: ignore[import-not-found,unused-ignore]
        spmd_types,
        utils,
    )

    if utils.get_spmd_backend() != "spmd_types" or spmd_types.spmd_mesh_size("tp") <= 1:
        return None
    if spmd.is_type_checking():
        raise not_supported("the type checking of spmd_types is on; allowed: off")
    return spmd_types.current_spmd_mesh().get_group("tp")


@functools.cache
def _loss_class() -> Any:
    from torchtitan.components.loss import (  # type: ignore[import-not-found,unused-ignore]
        ChunkedLossWrapper,
        CrossEntropyLoss,
    )

    class Loss(HeadLoss, ChunkedLossWrapper):  # type: ignore[misc,unused-ignore]
        """Takes ChunkedLossWrapper's place in a trainer's configuration. `num_chunks` determines
        the bytes that ChunkedLossWrapper needs, which bound the memory here too, unless
        default_memory sets another."""

        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(ChunkedLossWrapper.Config):  # type: ignore[misc,unused-ignore]
            pass

        def __init__(self, config: Any, *, compile_config: Any = None) -> None:
            if not isinstance(config.loss_fn, CrossEntropyLoss.Config):
                raise not_supported(
                    f"loss_fn is a {type(config.loss_fn).__qualname__}, which has no counterpart "
                    "here; allowed: CrossEntropyLoss.Config"
                )
            self.global_vocab_size = config.loss_fn.global_vocab_size
            self.num_chunks = config.num_chunks

        def tp_group(self) -> Any:
            return _spmd_group()

    Loss.__name__ = Loss.__qualname__ = "LinearCrossEntropyLoss"
    return Loss


def __getattr__(name: str) -> Any:
    """LinearCrossEntropyLoss, which is made at its first use because it imports torchtitan's
    class."""
    if name != "LinearCrossEntropyLoss":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _loss_class()
