# SPDX-License-Identifier: Apache-2.0
"""Checks that a patched model changes its head's logits only in the way that the loss assumes.

In place of the logits, the head gives the model a few probe rows of V columns, here called the
answer: logits of some of the call's hidden states, and invented ones. What the model makes of them
must in every column agree with the scale, the softcap and the vocabulary size that the loss uses.
Some rows are NaN, so that a model that uses its logits for more than the loss gets a loss of NaN.
In the backward pass a gradient of ones flows back through the model and must arrive multiplied by
the slopes of scale and softcap only. This finds uses that the forward pass does not show, and
detached logits.

The checks are ops, so that they also run in compiled code. On the CPU every call is checked before
its loss is used. On a GPU this is so for a new kind of call only (one whose key is not settled); in
other calls the device makes the loss NaN if the rows differ, and a later call raises.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless._errors import not_supported
from logitless.integrations import _callers
from logitless.torch._dispatch import define

# The keys of calls outside of compiled programs: already checked, or not yet. A compiled program
# has its own key, because its check is at its first run.
SETTLED, NEW = 0, -1

_REAL = 3  # rows that are logits of hidden states
# Each invented row is one byte of a number per column, times one of these factors. Small values
# show a scale under a softcap, any softcap changes the largest, and all are exact in 16 bits.
_FACTORS = (2.0**-6, 2.0**-2, 1.0, 2.0**6)
# Rows of NaN come first, in the middle and last, because a model may leave some rows out. The
# two invented rows of smaller values, which no common softcap saturates, follow the real rows.
_COUNT = 11
_MIDDLE = slice(1 + _REAL, 3 + _REAL)
_MASKED = -6e4  # the logit of a masked column; f16 can represent it
_BLOCK = 8192  # columns whose weights are cast at a time

_settled: set[int] = set()  # keys of programs that passed the check
_programs = itertools.count(1)
_late: deque[tuple[Any, Tensor, str]] = deque()  # unread reports: event, report, model
_late_lock = threading.Lock()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator,unused-ignore]
def new_program() -> int:
    """The key of the program that is being compiled."""
    return next(_programs)


class Transform(NamedTuple):
    """How a model changes its head's logits, as the loss assumes it."""

    scale: float
    softcap: float  # 0: none
    columns: int  # the vocabulary size; further columns are padding


class _Report(NamedTuple):
    """What a check found, in numbers that the device computes."""

    differing: float  # number of columns
    first: float  # of these columns
    made: float  # the model's value in this column
    known: float  # the expected value in this column, if it is no padding
    ratio: float  # model's values to expected ones, if the same everywhere; otherwise 0
    poisoned: float  # 1 if the model's loss is NaN and ours is not
    others: float  # number, from 1, of the loss's first other tensor that differs; 0: none


def _is_settled(key: int) -> bool:
    return key == SETTLED or key in _settled


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def _waits(device: torch.device, key: int) -> bool:
    """Whether the host waits for the report."""
    if device.type != "cuda":
        return True
    return not _is_settled(key) and not _is_capturing()


def _real(input: Tensor, weight: Tensor, bias: Tensor | None, dtype: Any, key: int) -> Tensor:
    flat = input.reshape(-1, input.shape[-1])
    if _is_settled(key) or not len(flat):
        return weight.new_zeros(_REAL, weight.shape[0], dtype=dtype)
    rows = chosen(flat).to(dtype)
    with torch.autocast(input.device.type, enabled=False):
        made = [rows @ block.to(dtype).T for block in torch.split(weight, _BLOCK)]
    logits = torch.cat(made, -1)
    return logits if bias is None else logits + bias.to(dtype)


def chosen(input: Tensor) -> Tensor:
    """[3, D]: the first, the middle and the last of the hidden states [..., D]."""
    flat = input.reshape(-1, input.shape[-1])
    return torch.stack([flat[0], flat[len(flat) // 2], flat[-1]])


def _answer(real: Tensor) -> Tensor:
    columns = torch.arange(real.shape[-1], device=real.device)
    number = columns * 2654435761  # its low 32 bits differ for every column
    rows = [
        (((number >> shift) & 255) - 128) * factor
        for shift, factor in zip((0, 8, 16, 24), _FACTORS)
    ]
    zeros = torch.zeros_like(rows[0])  # shows an addition
    # no NaN under anomaly detection, which would raise
    nan = torch.full_like(zeros, 0 if torch.is_anomaly_enabled() else torch.nan)
    made_up = [torch.stack(part).to(real.dtype) for part in ([*rows[:2], nan, *rows[2:]], [zeros])]
    nan = nan[None].to(real.dtype)
    return torch.cat([nan, real, *made_up, nan])[None]


def _known(rows: Tensor, scale: float, softcap: float) -> Tensor:
    logits = rows.float() * scale
    return torch.tanh(logits / softcap) * softcap if softcap else logits


def _report_of(made: Tensor, rows: Tensor, transform: Transform) -> list[Tensor]:
    """The first five numbers of a report, for made [K, C] with C >= columns."""
    u = _unit(rows, made)
    columns = transform.columns
    known = _known(rows[:, :columns], transform.scale, transform.softcap)
    known = known.to(made.dtype).float()
    words, behind = made[:, :columns].float(), _finite(made)[:, columns:].float()
    if torch.float16 in (rows.dtype, made.dtype):  # f16 has infinities where f32 has numbers
        words, known = (t.clamp(_MASKED, -_MASKED) for t in (words, known))
    # Allows for the roundings of a division, a tanh, a product, one more operation, and the
    # expected value.
    wrong = ~words.isclose(known, rtol=6 * u, atol=1e-6, equal_nan=True)
    small, known_small = words[_MIDDLE], known[_MIDDLE]
    ratio = (small * known_small).sum() / known_small.square().sum()
    columns_wrong = torch.cat([wrong.any(0), ~(behind <= _MASKED).all(0)])
    if columns >= 64:  # roundings have both signs, so a wrong scale shows in the ratio first
        columns_wrong |= ~((ratio - 1).abs() <= 2 * u)
    first = columns_wrong.int().argmax()
    # index_select, because indexing with a tensor [] would make the host wait for its value.
    at = first.clamp(max=columns - 1)[None]
    row = wrong.index_select(1, at)[:, 0].int().argmax()[None]
    picked = [t.index_select(1, at).index_select(0, row).sum() for t in (words, known)]
    if behind.shape[1]:
        most = behind.amax(0).index_select(0, (first - columns).clamp(min=0)[None]).sum()
        picked[0] = torch.where(first < columns, picked[0], most)
    fits = small.isclose(known_small * ratio, rtol=2e-2, atol=1e-6).all()
    return [
        columns_wrong.sum(), first, *picked, torch.where(fits, ratio, 0.0)
    ]  # fmt: skip


def _finite(rows: Tensor) -> Tensor:
    """The rows that are not NaN. Slices, because a list of indices would be copied to the GPU, and
    the host would wait."""
    return torch.cat([rows[1:6], rows[7:10]])


def _unit(*tensors: Tensor, least: float = 2.0**-14) -> float:
    """The unit roundoff of the coarsest dtype, at least `least`: a fast tanh errs more in f32."""
    return max(least, *(torch.finfo(t.dtype).eps / 2 for t in tensors))


def _differ(given: Tensor, known: Tensor) -> Tensor:
    return (given.to(known.device, known.dtype) != known).any()


def _check_shapes(made: Tensor, rows: Tensor, transform: Transform, who: str) -> None:
    """Checks the shapes, which does not need values from the device."""
    count, total = rows.shape[1:]
    columns = transform.columns
    if made.dim() == 3 and made.shape[:2] == (1, count) and made.shape[2] in (columns, total):
        return
    if made.dim() != 3 or made.shape[:2] != (1, count):
        what = f"of {[1, count, total]} it makes {list(made.shape)}, where [1, {count}, V] is known"
        raise not_supported(f"{who} {_CHANGES}: {what}")
    what = f"it makes {made.shape[2]} columns of the head's {total}, where {columns} are known"
    if made.shape[2] < total:
        what += f"; pass vocab_size={made.shape[2]} to patch_transformers if they are the first"
    raise not_supported(f"{who} {_CHANGES}: {what}")


_CHANGES = "changes its logits after the lm_head in a way that is not known here"


def _raise(report: _Report, names: Sequence[str], total: int, columns: int, who: str) -> None:
    """`total`: the number of columns that the model makes. Of these `columns` are tokens."""
    if report.others:
        raise other(names[int(report.others) - 1])
    if report.differing and report.first >= columns:
        raise not_supported(
            f"{who} keeps its logits from column {int(report.first)} on ({report.made:g} in this "
            f"one), and vocab_size is {columns}: further columns are padding, which the loss does "
            f"not have; pass vocab_size={total} to patch_transformers (the default, unless the "
            "configuration has another), or mask these logits in the model"
        )
    if report.differing:
        what = (
            f"{int(report.differing)} of {total} columns differ, the first is column "
            f"{int(report.first)} ({report.made:g} where {report.known:g} is known)"
        )
        if report.ratio and int(report.differing) > total // 2:
            what += f"; they are {report.ratio:.4g} times what is known"
        way = "logit_scale= or softcap="
        if report.made <= _MASKED and report.first + report.differing == total:
            way = f"vocab_size={int(report.first)}"
        raise not_supported(
            f"{who} {_CHANGES}: {what}; pass {way} to patch_transformers if that says it"
        )
    if report.poisoned:
        raise not_supported(
            f"{who} makes more of its logits than the loss of its loss_function (a z-loss, say), "
            "and there are none; allowed: a model that makes nothing else of them (the patch has "
            "z_loss=)"
        )


def check_head(own: Tensor, real: Tensor) -> None:
    """Compares the output of the head's own forward with the logits that we compute from its weight
    and bias, for the same hidden states."""
    half = own.dtype != torch.float32 or real.dtype != torch.float32
    own, real = own.detach().float(), real.float()
    if own.shape != real.shape:
        raise not_supported(
            f"the lm_head's own forward makes {own.shape[-1]} columns, and has {real.shape[-1]}"
        )
    size = real.abs().amax(-1, keepdim=True) * (2e-2 if half else 1e-3)
    far = ((own - real).abs() > size) | (own.isfinite() != real.isfinite())
    columns = far.any(0)
    if not bool(columns.any()):
        return
    first = int(columns.int().argmax())
    row = int(far[:, first].int().argmax())
    raise not_supported(
        "the lm_head's own forward makes other logits than its weight and bias: "
        f"{int(columns.sum())} of {len(columns)} columns differ, the first is column {first} "
        f"({float(own[row, first]):g} where {float(real[row, first]):g} is known); allowed: the "
        "products of its weight and its bias"
    )


def other(name: str) -> Exception:
    return not_supported(
        f"the model gives its loss another {name} than it was called with; allowed: the same"
    )


def _next_late() -> tuple[Tensor, str] | None:
    with _late_lock:  # several threads may call
        if not _late or not _late[0][0].query():
            return None
        _, values, who = _late.popleft()
        return values, who


def _raise_late() -> None:
    # A query would break a capture.
    if not _late or _is_capturing():
        return
    while (found := _next_late()) is not None:
        values, who = found
        if len(values) == 1:  # from a backward pass
            if values[0]:
                raise not_supported(f"in an earlier call {who} {_GRADIENT}")
            continue
        *found_in, total, columns = values.tolist()
        report = _Report(*found_in)
        if report.others or report.differing or report.poisoned:
            names = ("labels or num_items_in_batch",) * int(report.others or 1)
            _raise(report, names, int(total), int(columns), f"in an earlier call {who}")


def _checked(
    out: Tensor, loss: Tensor, made: Tensor, real: Tensor, given: Sequence[Tensor],
    known: Sequence[Tensor], scale: float, softcap: float, columns: int, names: str, who: str,
    key: int, asks: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns `out` and the factor of its gradient. If the check fails, it raises where the host
    waits for the report, otherwise both are NaN."""
    _raise_late()
    if asks and not _is_settled(key):
        _callers.check(compiled=key > 0)
    transform, told = Transform(scale, softcap, columns), names.split()
    for name, a, b in zip(told, given, known):
        if a.shape != b.shape:
            raise other(name)
    rows = _answer(real)
    _check_shapes(made, rows, transform, who)
    pairs = [_differ(a, b).to(made.device) for a, b in zip(given, known)]
    pairs.append(torch.ones((), dtype=torch.bool, device=made.device))
    which = (torch.stack(pairs).int().argmax() + 1) % len(pairs)
    poisoned = (out.isnan() & ~loss.to(out.device).isnan()).any()
    numbers = [*_report_of(made[0], rows[0], transform), poisoned, which]
    report = torch.stack([number.to(made.device, torch.float32) for number in numbers])
    if _waits(made.device, key):
        _raise(_Report(*report.tolist()), told, made.shape[2], columns, who)
        if key > 0 and all(a.numel() for a in given):  # an empty batch shows nothing
            _settled.add(key)
        return out.clone(), torch.ones_like(out)
    bad = (report[0] + report[5] + report[6]) > 0
    sizes = [report.new_full((1,), size) for size in (made.shape[2], columns)]
    _tell_later(torch.cat([report, *sizes]), who)
    factor = torch.ones_like(out).masked_fill(bad.to(out.device), torch.nan)
    return out * factor, factor


def _tell_later(report: Tensor, who: str) -> None:
    if _is_capturing():
        return  # a captured graph can only make the loss NaN
    host = torch.empty(report.shape, dtype=report.dtype, pin_memory=report.is_cuda)
    host.copy_(report, non_blocking=True)
    make_event: Any = torch.cuda.Event
    event = make_event()
    event.record(torch.cuda.current_stream(report.device))
    _late.append((event, host, who))


_GRADIENT = (
    "makes of its logits, or of their gradients, what the loss does not: it adds to its loss "
    "something made of them, detaches them or has a hook on them; allowed: the loss of its "
    "loss_function alone (the patch has z_loss=)"
)


def _returned(
    grad: Tensor, real: Tensor, scale: float, softcap: float, columns: int, who: str
) -> Tensor:
    """0, or NaN if the gradient of the answer [1, K, V] is not the one that follows from a gradient
    of ones at the logits."""
    rows = _finite(_answer(real)[0])[:, :columns].float()
    given = _finite(grad[0])[:, :columns].float()
    known = torch.full_like(rows, scale)
    if softcap:
        known = known * (1 - torch.tanh(rows * (scale / softcap)).square())
    far = (given - known).abs() > 8 * _unit(real, grad, least=2.0**-17) * abs(scale)
    bad = (far | ~given.isfinite()).any()
    if _waits(grad.device, SETTLED):
        if bool(bad):
            raise not_supported(f"{who} {_GRADIENT}")
    elif not _is_capturing():
        _tell_later(torch.stack([bad.float()]), who)
    return torch.zeros_like(bad, dtype=torch.float32).masked_fill(bad, torch.nan)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.lists = len(inputs[4]), len(inputs[5])
    ctx.save_for_backward(output[1])


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Any, ...]:
    lists = ([None] * count for count in ctx.lists)
    return grad * ctx.saved_tensors[0], *[None] * 3, *lists, *[None] * 7


define(
    "rows_real(Tensor input, Tensor weight, Tensor? bias, ScalarType dtype, SymInt key) -> Tensor",
    _real, lambda input, weight, bias, dtype, key: weight.new_empty(
        _REAL, weight.shape[0], dtype=dtype),
)  # fmt: skip
define(
    "rows_answer(Tensor real) -> Tensor",
    _answer, lambda real: real.new_empty(1, _COUNT, real.shape[-1]),
)  # fmt: skip
define(
    "rows_checked(Tensor out, Tensor loss, Tensor made, Tensor real, Tensor[] given, "
    "Tensor[] known, float scale, float softcap, SymInt columns, str names, str who, SymInt key, "
    "bool asks) -> (Tensor, Tensor)",
    _checked, lambda out, *_: (torch.empty_like(out), torch.empty_like(out)),
    rule=_backward, setup=_setup,
)  # fmt: skip
define(
    "rows_returned(Tensor grad, Tensor real, float scale, float softcap, SymInt columns, str who) "
    "-> Tensor",
    _returned, lambda grad, *_: grad.new_empty((), dtype=torch.float32),
)  # fmt: skip
_ops: Any = torch.ops.logitless


def real_rows(
    input: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, key: int
) -> Tensor:
    """[3, V]: logits of three of the hidden states [..., D], or zeros if the call's `key` is
    settled."""
    bias = None if bias is None else bias.detach()
    made: Tensor = _ops.rows_real(input.detach(), weight.detach(), bias, dtype, key)
    return made


def answer(real: Tensor) -> Tensor:
    """[1, K, V]: the rows that the head gives the model in place of logits: `real` and invented
    ones."""
    made: Tensor = _ops.rows_answer(real)
    return made


class _Asked(torch.autograd.Function):
    """The loss. Its backward pass also sends ones back through what the model made of the answer;
    _Answered checks how they arrive."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, logits: Tensor) -> Tensor:
        ctx.shape, ctx.dtype, ctx.device = logits.shape, logits.dtype, logits.device
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor]:
        return grad, torch.ones((), dtype=ctx.dtype, device=ctx.device).expand(ctx.shape)


class _Answered(torch.autograd.Function):
    """The answer. Its backward pass runs before the loss's, so that hooks around the head see the
    head's backward pass begin, and FSDP gathers parameters that it freed since."""

    @staticmethod
    def forward(
        ctx: Any, made: Tensor, loss: Tensor, real: Tensor, transform: Transform, who: str
    ) -> Tensor:
        ctx.told, ctx.shape, ctx.dtype, ctx.device = (
            (*transform, who),
            loss.shape,
            loss.dtype,
            loss.device,
        )
        ctx.save_for_backward(real)
        return made.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (real,) = ctx.saved_tensors
        found: Tensor = _ops.rows_returned(grad, real, *ctx.told)
        return None, found.to(ctx.device, ctx.dtype).expand(ctx.shape), None, None, None


def answered(made: Tensor, loss: Tensor, real: Tensor, transform: Transform, who: str) -> Tensor:
    """The answer, for a model whose `loss` will have a gradient."""
    apply: Any = _Answered.apply
    result: Tensor = apply(made, loss, real, transform, who)
    return result


def asked(loss: Tensor, logits: Tensor) -> Tensor:
    """The loss, as the result of a loss_function of `logits`, which the model made from the
    answer."""
    apply: Any = _Asked.apply
    result: Tensor = apply(loss, logits)
    return result


def checked(
    out: Tensor, loss: Tensor, made: Tensor, real: Tensor, pairs: Sequence[tuple[str, Any, Any]],
    transform: Transform, who: str, key: int, asks: bool,
) -> Tensor:  # fmt: skip
    """Returns `out`, the model's loss, which contains our `loss`. If `made` is not what `transform`
    makes of the answer, or if the two tensors of a pair differ, it raises or returns NaN. If
    `asks`, it also raises for a Trainer that will need logits."""
    given = [a.detach() for _, a, _ in pairs]
    known = [b.detach() for _, _, b in pairs]
    names = " ".join(name for name, _, _ in pairs)
    result: tuple[Tensor, Tensor] = _ops.rows_checked(
        out, loss.detach(), made.detach(), real, given, known, *transform, names, who, key, asks
    )
    return result[0]
