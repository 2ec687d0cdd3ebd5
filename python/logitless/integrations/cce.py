# SPDX-License-Identifier: Apache-2.0
"""A replacement for Cut Cross Entropy. Gradients here are always exact and summed in f32; small
gradients cannot be filtered."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from logitless._call import Reduction
from logitless._errors import invalid, renames, wrong_shape
from logitless._statistics import StatisticName
from logitless.integrations._arguments import only
from logitless.integrations._memory import Sizes, frugal
from logitless.torch import Split
from logitless.torch import linear_cross_entropy as _linear_cross_entropy

# Cut Cross Entropy's presets; all except the first need sums in f32. The gradients here are always
# those of the most exact preset.
_PRESETS = (
    "cce", "cce_exact", "cce_kahan", "cce_kahan_full", "cce_kahan_full_c", "cce_kahan_full_e",
    "cce_kahan_full_c_full_e",
)  # fmt: skip


@dataclasses.dataclass
class VocabParallelOptions:
    """This rank's columns [start, stop) of the vocabulary, which is split over `group` (None: all
    processes), and whether the gradient of `e` is summed over the ranks.

    The signature is that of cut_cross_entropy/vocab_parallel/utils.py at commit d42911f, with the
    additional `vocab_size`. If this is None, as it is with Cut Cross Entropy's own options, every
    call makes the ranks exchange the largest `stop`, which waits for the GPU. `from_vocab` sets it.
    """

    start: int
    stop: int
    group: Any = None
    reduce_e_grad: bool = True
    vocab_size: int | None = None

    @classmethod
    def from_vocab(
        cls, vocab_size: int, group: Any = None, reduce_e_grad: bool = True
    ) -> VocabParallelOptions:
        """The options of this rank, if the vocabulary is split into shares whose sizes differ by at
        most one, the larger shares first."""
        rank, size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
        each, more = divmod(vocab_size, size)
        start = rank * each + min(rank, more)
        return cls(start, start + each + (rank < more), group, reduce_e_grad, vocab_size)


def _where(options: Any, e: Tensor, c: Tensor) -> Split | None:
    """The `group` argument of linear_cross_entropy for these options."""
    if options is None:
        return None
    if not hasattr(options, "reduce_e_grad"):
        only("vocab_parallel_options", options, None)
    if c.shape[0] != options.stop - options.start:
        raise wrong_shape(
            f"c has shape {tuple(c.shape)}; allowed with vocab_parallel_options: "
            f"{options.stop - options.start} rows"
        )
    group = torch.distributed.group.WORLD if options.group is None else options.group
    total = getattr(options, "vocab_size", None)
    if total is None:
        last = torch.tensor(options.stop, device=e.device)
        torch.distributed.all_reduce(last, torch.distributed.ReduceOp.MAX, group)
        total = int(last)
    return Split(group, start=options.start, total=total, reduce_input_grad=options.reduce_e_grad)


@renames({"input": "e", "linear_weight": "c", "target": "targets", "linear_bias": "bias"})
def linear_cross_entropy(
    e: Tensor,
    c: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    reduction: Reduction = "mean",
    shift: bool | int = 0,
    return_lse: bool = False,
    filter_eps: float | str | None = "auto",
    accum_e_fp32: bool = False,
    accum_c_fp32: bool = False,
    filter_e_grad: bool = True,
    filter_c_grad: bool = True,
    impl: Any = "cce",
    vocab_parallel_options: Any = None,
    *,
    memory: int | str | None = None,
) -> Any:
    """The loss of `e` [..., D], `c` [V, D] and `targets` [...], or with `return_lse` the pair
    (loss, lse). With `shift` and reduction "none" both have the shape of targets[..., shift:].

    With `vocab_parallel_options` (ours or Cut Cross Entropy's own), c and bias hold this rank's
    columns. e and targets, whose indices are of the whole vocabulary, are the same on every rank,
    and so are the results. A mean is over the valid tokens of this call. `impl` may be any
    preset, by its name in upper or lower case or as a member of Cut Cross Entropy's enumeration.
    `memory` is an additional argument, that of logitless.torch's function. Its default is the bytes
    that Cut Cross Entropy needs (those of the f32 sums that the options request), or the minimum of
    our function if that is more, unless default_memory sets another.
    """
    only("filter_eps", filter_eps, "auto", None, 0.0)
    for name, value in (("filter_e_grad", filter_e_grad), ("filter_c_grad", filter_c_grad)):
        only(name, value, True, False)  # logitless has no filter to turn off
    for name, value in (("accum_e_fp32", accum_e_fp32), ("accum_c_fp32", accum_c_fp32)):
        only(name, value, False, True)  # sums are always f32
    name = getattr(impl, "name", impl)
    name = name.lower() if isinstance(name, str) else name
    only("impl", name, *_PRESETS)

    def peak(call: Sizes) -> int:  # bytes of the f32 sums that the options request
        of_c = call.f32_weight_sums if accum_c_fp32 or name != "cce" else 0
        of_e = call.f32_sums - call.f32_weight_sums if accum_e_fp32 or name != "cce" else 0
        return of_c + of_e

    count = int(shift)
    if count and not 0 <= count < targets.shape[-1]:
        raise invalid(f"shift is {shift}; allowed: 0 to {targets.shape[-1] - 1}")
    names: list[StatisticName] = ["lse"] if return_lse else []
    result: Any = _linear_cross_entropy(
        e, c, targets, linear_bias=bias, ignore_index=ignore_index,
        softcap=softcap, reduction=reduction, shift=count, memory=frugal(memory, e, c, peak),
        return_statistics=names, group=_where(vocab_parallel_options, e, c),
    )  # fmt: skip
    loss, lse = (result[0], result[1].lse) if return_lse else (result, None)
    if count:
        lse = None if lse is None else lse[..., :-count]
        loss = loss[..., :-count] if reduction == "none" else loss
    return (loss, lse) if return_lse else loss
