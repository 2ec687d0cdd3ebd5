# SPDX-License-Identifier: Apache-2.0
"""The contenders of compare_cpu.py: calls of ours and of PyTorch on the same inputs.

Head: input [N, D], weight [V, D], target [N], random. Ours writes into gradients that exist; PyTorch
allocates its own in each call, as autograd does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import native
import torch
import torch.nn.functional as F
from timing import Contender, TooSlow

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
NATIVE = {torch.float32: native.F32, torch.bfloat16: native.BF16, torch.int64: native.I64}
MIB = 1 << 20
POLICIES = ("accurate", "balanced", "compact")
CHUNK = 256

# All options of the loss at once; the weights and the bias come with them.
ALL_OPTIONS = {
    "label_smoothing": 0.1,
    "z_loss": 1e-4,
    "logit_scale": 1.1,
    "softcap": 30.0,
    "temperature": 0.9,
}


def view(tensor: torch.Tensor) -> native.Tensor:
    return native.tensor(tensor.data_ptr(), NATIVE[tensor.dtype], tuple(tensor.shape))


class Scratch:
    """One workspace for all calls, written once, 64-byte aligned, as large as the largest needs."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def address(self, size: int) -> int:
        if self._bytes.numel() < size + 64:
            self._bytes = torch.zeros(0, dtype=torch.uint8)
            self._bytes = torch.zeros(size + 64, dtype=torch.uint8).fill_(1)
        return (self._bytes.data_ptr() + 63) // 64 * 64


class Head:
    def __init__(self, tokens: int, weight: torch.Tensor, seed: int = 1) -> None:
        self.tokens, (self.vocab, self.hidden) = tokens, weight.shape
        self.weight = weight  # [V, D]
        self.dtype = weight.dtype
        generator = torch.Generator().manual_seed(seed)
        self.input = torch.randn(tokens, self.hidden, generator=generator).to(self.dtype)  # [N, D]
        self.target = torch.randint(self.vocab, (tokens,), generator=generator)  # [N]
        self.half_target = self.target.clone()  # [N]  every second token is ignored
        self.half_target[::2] = -100
        self.bias = torch.randn(self.vocab, generator=generator)  # [V]
        self.vocab_weight = torch.rand(self.vocab, generator=generator) + 0.5  # [V]
        self.token_weight = torch.rand(tokens, generator=generator) + 0.5  # [N]
        self.reference: torch.Tensor | None = None  # [N, D]  PyTorch's gradient of input


def random_weight(vocab: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    """[V, D] of variance 1 / D, so that logits have variance 1."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.empty(vocab, hidden, dtype=dtype)
    bound = (3.0 / hidden) ** 0.5
    # In parts, so that bf16 needs no second whole matrix.
    for rows in weight.split(max(1, (1 << 26) // hidden)):
        rows.copy_(torch.empty(rows.shape).uniform_(-bound, bound, generator=generator))
    return weight


class Gradients:
    """Outputs of ours, touched once and shared by every call of a head: grad_input [N, D] and
    grad_weight [V, D] of one dtype."""

    def __init__(self, head: Head, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.input = torch.zeros(head.tokens, head.hidden, dtype=dtype).fill_(1)
        self.weight = torch.zeros(head.vocab, head.hidden, dtype=dtype).fill_(1)
        self.bias = torch.ones(head.vocab)  # [V]


def workspace_bytes(which: str, sizes: native.Sizes, head: Head, weight_sum: bool) -> int:
    """`which`: recommended, minimum, or quarter. Quarter is a quarter of the f32 logits, 16 MiB,
    and the f32 sum that 16-bit gradients of weight need; the recommended size if that is less."""
    if which == "minimum":
        return sizes.minimum
    if which == "recommended":
        return sizes.recommended
    quarter = head.tokens * head.vocab + 16 * MIB
    if weight_sum:
        quarter += 4 * head.vocab * head.hidden
    return min(quarter, sizes.recommended)


def ours(
    library: native.Library,
    scratch: Scratch,
    head: Head,
    name: str,
    gradients: Gradients | None,
    which: str = "recommended",
    all_options: bool = False,
    half_ignored: bool = False,
) -> Contender:
    tensors = {
        "input": head.input,
        "weight": head.weight,
        "target": head.half_target if half_ignored else head.target,
        "loss": torch.zeros(1),
    }
    if gradients is not None:
        tensors |= {"grad_input": gradients.input, "grad_weight": gradients.weight}
    if all_options:
        tensors |= {
            "bias": head.bias,
            "vocab_weight": head.vocab_weight,
            "token_weight": head.token_weight,
            "entropy": torch.zeros(head.tokens),
            "argmax": torch.zeros(head.tokens, dtype=torch.int64),
        }
        if gradients is not None:
            tensors["grad_bias"] = gradients.bias
    kind = (
        native.LINEAR_CROSS_ENTROPY_FORWARD
        if gradients is None
        else native.LINEAR_CROSS_ENTROPY_FORWARD_BACKWARD
    )
    options = ALL_OPTIONS if all_options else {}
    op = native.make_op(kind, {n: view(t) for n, t in tensors.items()}, **options)
    contender = Contender(name, lambda: None)
    try:
        sizes = library.workspace(op)
    except native.Failure as failure:
        contender.status = f"failed: {failure}"
        return contender
    weight_sum = gradients is not None and gradients.dtype != torch.float32
    size = workspace_bytes(which, sizes, head, weight_sum)
    contender.facts = {
        "workspace_bytes": size,
        "minimum_bytes": sizes.minimum,
        "recommended_bytes": sizes.recommended,
    }
    if size < sizes.minimum:
        contender.status = f"not run: {size} bytes are less than the minimum, {sizes.minimum}"
        return contender
    scratch.address(size)

    def call() -> float:
        library.run(op, scratch.address(size), size)
        return tensors["loss"].item()  # the closure keeps the op's tensors alive

    def compare() -> None:
        if gradients is not None and head.reference is not None and plain:
            reference = head.reference.double()
            difference = (gradients.input.double() - reference).norm() / reference.norm()
            contender.facts["grad_input_difference_from_eager"] = difference.item()

    plain = not all_options and not half_ignored
    contender.call, contender.release = call, compare
    return contender


def ours_later(
    library: native.Library,
    scratch: Scratch,
    head: Head,
    name: str,
    gradients: Gradients,
    kept_bytes: int,
) -> Contender:
    """Forward without reduction, then Backward with an upstream gradient of each token."""
    shared = {
        "input": head.input,
        "weight": head.weight,
        "target": head.target,
        "row_reference": torch.zeros(head.tokens),
        "row_log_sum": torch.zeros(head.tokens),
    }
    written = {"loss": torch.zeros(head.tokens)}
    later = {
        "grad_loss": (head.token_weight - 1) / head.tokens,
        "grad_input": gradients.input,
        "grad_weight": gradients.weight,
    }

    def make(kind: int, own: dict[str, torch.Tensor]) -> native.Op:
        views = {n: view(t) for n, t in (shared | own).items()}
        return native.make_op(kind, views, reduction=native.REDUCTION_NONE)

    kept = library.kept(make(native.LINEAR_CROSS_ENTROPY_FORWARD, written), kept_bytes)
    if kept.columns > 0:
        shared["kept"] = torch.ones(tuple(kept.shape), dtype=head.dtype)
        shared["kept_rows"] = torch.ones(tuple(kept.rows_shape))
    ops = [
        make(native.LINEAR_CROSS_ENTROPY_FORWARD, written),
        make(native.LINEAR_CROSS_ENTROPY_BACKWARD, later),
    ]
    ops[1].kept_key = kept.key if kept.columns > 0 else 0
    sizes = [library.workspace(op).recommended for op in ops]
    scratch.address(max(sizes))

    def call() -> float:
        for op, size in zip(ops, sizes, strict=True):
            library.run(op, scratch.address(size), size)
        # the closure keeps the ops' tensors alive
        return (written | shared | later)["loss"].mean().item()

    facts = {"workspace_bytes": max(sizes), "kept_bytes": kept.bytes}
    return Contender(name, call, facts=facts)


def linear_then_loss(x: torch.Tensor, w: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(x, w), target)


Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def peer(head: Head, name: str, function: Loss, gradients: bool, compiles: bool) -> Contender:
    x = head.input.detach().requires_grad_(gradients)
    w = head.weight.detach().requires_grad_(gradients)

    def call() -> float:
        if not gradients:
            with torch.no_grad():
                return function(x, w, head.target).item()
        loss = function(x, w, head.target)
        loss.backward()
        return loss.item()

    def release() -> None:
        if name == EAGER and x.grad is not None:
            head.reference = x.grad
        x.grad = w.grad = None

    facts = {"gradient_bytes": x.nbytes + w.nbytes if gradients else 0}
    return Contender(name, call, release=release, compiles=compiles, facts=facts)


def chunked(policy: str, chunk: int | None) -> Loss:
    options: dict[str, Any] = {"acc_policy": policy}
    if chunk is not None:
        options["batch_chunk_size"] = chunk
    return functools.partial(
        F.linear_cross_entropy, options=torch.nn.LinearCrossEntropyOptions(**options)
    )


EAGER = "torch eager"
COMPILED = "torch.compile"
DEFAULT = "F.linear_cross_entropy, default"
AUTO = "F.linear_cross_entropy, auto chunks"
CHUNKED = f"F.linear_cross_entropy, {CHUNK}-row chunks"
COPY = "torch copy_"
PEERS = (EAGER, COMPILED, DEFAULT, AUTO, CHUNKED)


def best_chunked(head: Head, gradients: bool, cap_seconds: float) -> Contender:
    """The fastest accumulation policy, by one timed call of each after a first one."""
    times: dict[str, float] = {}
    failure = "no policy ran"
    for policy in POLICIES:
        candidate = peer(head, CHUNKED, chunked(policy, CHUNK), gradients, compiles=False)
        try:
            candidate.once(cap_seconds)
            times[policy] = candidate.once(cap_seconds)
        except TooSlow:
            failure = f"too slow: more than {cap_seconds:.0f} s"
        except Exception as error:  # one policy may be refused, and the others not
            failure = f"failed: {type(error).__name__}: {str(error).splitlines()[0][:160]}"
    if not times:
        return Contender(CHUNKED, lambda: None, status=failure)
    best = min(times, key=times.__getitem__)
    contender = peer(head, CHUNKED, chunked(best, CHUNK), gradients, compiles=False)
    contender.facts = {"acc_policy": best, "seconds_by_policy": times}
    return contender


def peers(head: Head, gradients: bool, cap_seconds: float) -> list[Contender]:
    torch.compiler.reset()
    compiled = torch.compile(linear_then_loss, dynamic=False, fullgraph=True)
    out = [
        peer(head, EAGER, linear_then_loss, gradients, compiles=False),
        peer(head, COMPILED, compiled, gradients, compiles=True),
        peer(head, DEFAULT, F.linear_cross_entropy, gradients, compiles=False),
    ]
    if gradients:
        out.append(peer(head, AUTO, chunked("auto", None), gradients, compiles=False))
    return [*out, best_chunked(head, gradients, cap_seconds)]


def logits_contenders(
    library: native.Library, scratch: Scratch, tokens: int, vocab: int, dtype: torch.dtype
) -> list[Contender]:
    """Cross-entropy on given logits [N, V]: loss and gradient, ours in place."""
    generator = torch.Generator().manual_seed(2)
    source = torch.randn(tokens, vocab, generator=generator).to(dtype)  # [N, V]
    target = torch.randint(vocab, (tokens,), generator=generator)  # [N]
    logits, loss = source.clone(), torch.zeros(1)
    tensors = {"logits": logits, "target": target, "loss": loss, "grad_logits": logits}
    op = native.make_op(
        native.CROSS_ENTROPY_FORWARD_BACKWARD, {n: view(t) for n, t in tensors.items()}
    )

    def restore() -> None:
        logits.copy_(source)

    mine = Contender("ours, in place", lambda: None, prepare=restore)
    try:
        size = library.workspace(op).recommended
    except native.Failure as failure:
        mine.status = f"failed: {failure}"
        size = 0
    mine.facts = {"workspace_bytes": size}

    def call() -> float:
        library.run(op, scratch.address(size), size)
        return loss.item()

    mine.call = call
    leaf = source.detach().requires_grad_()
    torch.compiler.reset()
    compiled = torch.compile(F.cross_entropy, dynamic=False, fullgraph=True)

    def torch_peer(name: str, function: Callable[..., torch.Tensor], compiles: bool) -> Contender:
        def call() -> float:
            result = function(leaf, target)
            result.backward()
            return result.item()

        facts = {"gradient_bytes": leaf.nbytes}
        return Contender(
            name, call, release=lambda: setattr(leaf, "grad", None), compiles=compiles, facts=facts
        )

    return [
        mine,
        torch_peer(EAGER, F.cross_entropy, compiles=False),
        torch_peer(COMPILED, compiled, compiles=True),
        Contender(COPY, restore),
    ]
