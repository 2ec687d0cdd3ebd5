# SPDX-License-Identifier: Apache-2.0
"""The peers of compare_later.py: other log-probabilities whose gradient arrives later.
They are no part of this repository. Each is imported from where it is installed, or from a folder
of packages that holds only what is named here:

    verl   verl/utils/kernel/ and verl/utils/device.py
    trl    trl/kernels/chunked_logprob.py (its trl.trainer.utils takes the function from there)
    cce    cut_cross_entropy"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import gpu_peers
import torch
from torch import Tensor

Call = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]  # of input, weight, target
TRL_CHUNK = 32768  # columns of the vocabulary, TRL's _CHUNKED_LOGPROB_CHUNK_SIZE


class Peer(NamedTuple):
    """A call that returns (log-probabilities [N],), and one that also returns the entropies [N]."""

    logprob: Call
    both: Call | None


def compiled() -> Peer:
    """torch.compile of the obvious code."""

    def call(input: Tensor, weight: Tensor, target: Tensor, entropy: bool) -> tuple[Tensor, ...]:
        logp = torch.log_softmax((input @ weight.t()).float(), -1)
        logprob = logp.gather(1, target[:, None])[:, 0]
        return (logprob, -(logp.exp() * logp).sum(-1)) if entropy else (logprob,)

    calls = [torch.compile(functools.partial(call, entropy=entropy)) for entropy in (False, True)]
    return Peer(*calls)


def verl() -> Peer:
    """verl's function always computes the entropy; without `both` it gets no gradient."""
    from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy

    def both(input: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        logprob, entropy = linear_cross_entropy(input, weight, target, 1.0, "none", None)
        return logprob, entropy

    return Peer(lambda *tensors: both(*tensors)[:1], both)


def trl() -> Peer:
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    def call(outputs: tuple[str, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        input, weight, target = tensors
        made = ChunkedLogProbFunction.apply(
            input, weight, None, target, 1.0, TRL_CHUNK, None, 1.0, outputs
        )
        return made[: len(outputs)]

    alone, both = ("log_probs",), ("log_probs", "entropy")
    return Peer(functools.partial(call, alone), functools.partial(call, both))


def cce() -> Peer:
    """The exact variant: the default drops small gradients, most of them on random data."""
    loss = functools.partial(gpu_peers.cce(exact=True), reduction="none")
    return Peer(lambda *tensors: (-loss(*tensors),), None)


PEERS: dict[str, Callable[[], Peer]] = {"verl": verl, "trl": trl, "cce": cce}
