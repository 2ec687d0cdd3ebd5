# SPDX-License-Identifier: Apache-2.0
"""Cut Cross Entropy's signature. The gradients here are always exact and summed in f32, so that no
filtering of small ones can be asked for."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from logitless._errors import invalid, renames
from logitless.integrations._arguments import only
from logitless.torch import linear_cross_entropy as _linear_cross_entropy


@renames({"input": "e", "linear_weight": "c", "target": "targets", "linear_bias": "bias"})
def linear_cross_entropy(
    e: Tensor,
    c: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    reduction: str = "mean",
    shift: bool | int = 0,
    return_lse: bool = False,
    filter_eps: float | str | None = "auto",
    accum_e_fp32: bool = False,
    accum_c_fp32: bool = False,
    filter_e_grad: bool = True,
    filter_c_grad: bool = True,
    impl: Any = "cce",
    vocab_parallel_options: Any = None,
) -> Any:
    """The loss, or with `return_lse` the pair (loss, lse). With `shift` and reduction "none" they
    have the shape of targets[..., shift:]."""
    only("filter_eps", filter_eps, "auto", None, 0.0)
    for name, value in (("filter_e_grad", filter_e_grad), ("filter_c_grad", filter_c_grad)):
        only(name, value, True, False)  # logitless has no filter to turn off
    for name, value in (("accum_e_fp32", accum_e_fp32), ("accum_c_fp32", accum_c_fp32)):
        only(name, value, False, True)  # sums are always f32
    name = getattr(impl, "name", impl)
    only("impl", name.lower() if isinstance(name, str) else name, "cce", "cce_exact")
    only("vocab_parallel_options", vocab_parallel_options, None)
    count = int(shift)
    if count and not 0 <= count < targets.shape[-1]:
        raise invalid(f"shift is {shift}; allowed: 0 to {targets.shape[-1] - 1}")
    result = _linear_cross_entropy(
        e, c, targets, linear_bias=bias, ignore_index=ignore_index,
        softcap=softcap, reduction=reduction, shift=count,
        return_statistics=("lse",) if return_lse else (),
    )  # fmt: skip
    loss, lse = (result[0], result[1].lse) if return_lse else (result, None)
    if count:
        lse = None if lse is None else lse[..., :-count]
        loss = loss[..., :-count] if reduction == "none" else loss
    return (loss, lse) if return_lse else loss
