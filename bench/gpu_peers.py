# SPDX-License-Identifier: Apache-2.0
"""The peers: other ways to compute loss and gradients of an LM head in PyTorch. bench/setup-gpu
installs them; one that is absent is left out and said so. Each maps (input, weight, target) to
the mean loss."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable

import torch
import torch.nn.functional as F

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
QUACK_CHUNK = 4096  # QuACK's default


def plain(h: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(h, w).float(), t)


def eager() -> Loss:
    return plain


def compiled() -> Loss:
    torch._dynamo.reset()  # else the second shape compiles with dynamic shapes, and is slower
    return torch.compile(plain, dynamic=False)


def cce(exact: bool) -> Loss:
    from cut_cross_entropy import linear_cross_entropy

    if not exact:
        return linear_cross_entropy
    if "accum_e_fp32" in inspect.signature(linear_cross_entropy).parameters:
        return functools.partial(linear_cross_entropy, impl="cce_exact")
    # The release on PyPI lacks the other options.
    return functools.partial(linear_cross_entropy, filter_eps=None)


def _liger_triton(wide: bool) -> Loss:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    dtype = torch.float32 if wide else None
    return functools.partial(liger_fused_linear_cross_entropy, accum_dtype=dtype)


def liger_sm90() -> Loss:
    from liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90 import (
        liger_fused_linear_cross_entropy_sm90,
    )

    return liger_fused_linear_cross_entropy_sm90


def liger_flsce() -> Loss:
    from liger_kernel.ops.cutedsl.ops.fused_scaled_cross_entropy_sm90 import (
        LigerFusedScaledCrossEntropySM90Function,
    )

    def loss(h: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return LigerFusedScaledCrossEntropySM90Function.apply(h, w, t).mean()

    return loss


@functools.cache
def pin_quack() -> None:
    """QuACK 0.6.5 raises if D equals its chunk, because it cannot tell rows from columns then. Its
    own advice is to pin the operand of its epilogue, which changes nothing else."""
    import quack.linear_cross_entropy as quack
    from quack.epilogue.frontend import gemm_epilogue
    from quack.epilogue.ops import ColVecLoad

    @gemm_epilogue(ops={"v": ColVecLoad("v")})
    def scaled(acc, v):  # in the peer's language, not Python's
        return {"D": acc * v}

    quack._lce_vscale_epi = scaled


def _quack(scaled: bool) -> Loss:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    def loss(h: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        if scaled and w.shape[1] == QUACK_CHUNK:
            pin_quack()
        # The autotuner (tuned=True) takes over a minute for a first result at these shapes.
        return chunked_linear_cross_entropy(
            h, w, t, chunk_size=QUACK_CHUNK, use_scaled_exp=None if scaled else False, tuned=False
        )

    return loss


# option of the command line: its name and the function that makes the loss
PEERS: dict[str, tuple[str, Callable[[], Loss]]] = {
    "compile": ("torch.compile", compiled),
    "eager": ("torch eager", eager),
    "quack": ("QuACK", functools.partial(_quack, True)),
    "quack-older": ("QuACK, older path, untuned", functools.partial(_quack, False)),
    "liger-sm90": ("Liger SM90 CuTe", liger_sm90),
    "liger-flsce": ("Liger FLSCE SM90", liger_flsce),
    "liger": ("Liger (Triton)", functools.partial(_liger_triton, False)),
    "liger-f32": ("Liger (Triton), f32 sums", functools.partial(_liger_triton, True)),
    "cce": ("CCE", functools.partial(cce, False)),
    "cce-exact": ("CCE exact", functools.partial(cce, True)),
}
STRONG = (
    "compile",
    "eager",
    "quack",
    "quack-older",
    "liger-sm90",
    "liger-flsce",
    "liger",
    "cce",
    "cce-exact",
)


class Peer:
    """A peer on one head: `train` leaves the gradients in `input.grad` and `weight.grad`."""

    def __init__(self, key: str, h: torch.Tensor, w: torch.Tensor, t: torch.Tensor) -> None:
        self.name, make = PEERS[key]
        self.function = make()  # raises ImportError if the peer is absent
        self.target = t
        self.input = h.detach().requires_grad_()
        self.weight = w.detach().requires_grad_()
        self.loss = torch.empty(())

    def train(self) -> None:
        self.input.grad = self.weight.grad = None
        loss = self.function(self.input, self.weight, self.target)
        loss.backward()
        self.loss = loss.detach()

    def loss_only(self) -> None:
        with torch.no_grad():
            self.function(self.input.detach(), self.weight.detach(), self.target)

    def release(self) -> None:
        self.input.grad = self.weight.grad = None


def with_options(
    softcap: float, label_smoothing: float, z_loss: float
) -> Callable[..., torch.Tensor]:
    """torch.compile's counterpart of the contender "every option": bias, softcap, smoothing, z-loss,
    class and token weights; without its statistics."""

    def loss(
        h: torch.Tensor, w: torch.Tensor, t: torch.Tensor, bias: torch.Tensor,
        classes: torch.Tensor, tokens: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        z = softcap * torch.tanh(F.linear(h, w, bias).float() / softcap)
        lse = torch.logsumexp(z, 1)
        each = F.cross_entropy(
            z, t, weight=classes, label_smoothing=label_smoothing, reduction="none"
        )
        return (tokens * (each + z_loss * lse**2)).sum() / classes[t].sum()

    torch._dynamo.reset()
    return torch.compile(loss, dynamic=False)
