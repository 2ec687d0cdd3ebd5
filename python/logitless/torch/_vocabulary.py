# SPDX-License-Identifier: Apache-2.0
"""A list of rows as the vocabulary: turns a call's arguments into those of a call on the listed
rows alone, which are copied, and its results into those of the whole vocabulary. The contract is
docs/semantics.md, "A list of rows as the vocabulary".

    sort_list   the list in ascending order, and whether it is wrong, which is found on the device
    places      the place of each target or id in the list

Both are ops, so that on the CPU they raise errors under torch.compile too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from logitless import _abi, _vocabulary
from logitless._call import IGNORE_INDEX, check_shift
from logitless._errors import not_supported, wrong_device, wrong_dtype
from logitless._vocabulary import ABSENT
from logitless.torch import _run
from logitless.torch._checks import check_matrix, check_rows, check_tensor
from logitless.torch._dispatch import define


def _sort_list(ids: Tensor, vocab: int, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """The sorted list, the order that sorts it, and whether it is wrong. The ids of a wrong list
    are clipped to rows that exist."""
    ordered, order = ids.long().sort(stable=True)
    twice = ordered[1:] == ordered[:-1]
    wrong = (ordered[0] < 0) | (ordered[-1] >= vocab) | twice.any()
    return ordered.clamp(0, vocab - 1), order, wrong


def _sort_list_on_host(ids: Tensor, vocab: int, name: str) -> tuple[Tensor, Tensor, Tensor]:
    made = _sort_list(ids, vocab, name)
    if made[2]:
        outside = (ids < 0) | (ids >= vocab)
        if outside.any():
            place = int(outside.int().argmax())
            raise _vocabulary.wrong_id(name, place, int(ids[place]), vocab)
        order = made[1]
        again = int((made[0][1:] == made[0][:-1]).int().argmax())
        first, place = int(order[again]), int(order[again + 1])
        raise _vocabulary.given_twice(name, place, first, int(ids[place]))
    return made


def _sort_list_fake(ids: Tensor, vocab: int, name: str) -> tuple[Tensor, Tensor, Tensor]:
    made = ids.new_empty(ids.shape, dtype=torch.int64)
    return made, torch.empty_like(made), ids.new_empty((), dtype=torch.bool)


def _places(
    target: Tensor, ordered: Tensor, order: Tensor, wrong: Tensor, ignored: int, shift: int,
    name: str, listed: str,
) -> Tensor:  # fmt: skip
    """The place of each target in the list's order: ABSENT if it is `ignored`, beyond the list's
    end if the list does not have it. In a wrong list every place is 0, whose row is NaN."""
    wanted = target.long().contiguous()
    at = torch.searchsorted(ordered, wanted).clamp(max=ordered.shape[0] - 1)
    missing = ordered[at] != wanted
    made = order[at].masked_fill(missing, ordered.shape[0]).masked_fill(wrong, 0)
    return made.masked_fill(wanted == ignored, ABSENT)


def _places_on_host(target: Tensor, *rest: Any) -> Tensor:
    made = _places(target, *rest)
    ordered, _, _, ignored, shift, name, listed = rest
    missing = made == ordered.shape[0]
    if shift:  # the shift drops these targets
        missing[..., :shift] = False
    if missing.any():
        place = int(missing.reshape(-1).int().argmax())
        value = int(target.reshape(-1)[place])
        raise _vocabulary.not_listed(name, place, value, target.shape, listed, ignored)
    return made


def _places_fake(target: Tensor, *_: Any) -> Tensor:
    return target.new_empty(target.shape, dtype=torch.int64)


define(
    "sort_list(Tensor ids, SymInt vocab, str name) -> (Tensor sorted, Tensor order, Tensor wrong)",
    _sort_list, _sort_list_fake, on_host=_sort_list_on_host,
)  # fmt: skip
define(
    "places(Tensor target, Tensor sorted, Tensor order, Tensor wrong, int ignored, int shift, "
    "str name, str listed) -> Tensor",
    _places, _places_fake, on_host=_places_on_host,
)  # fmt: skip


class _Rows(Function):
    """The rows of a tensor; the first is NaN if the list is `wrong`. The gradient is copied to the
    rows: that of index_select would be added on a GPU, in no fixed order."""

    @staticmethod
    def forward(tensor: Tensor, rows: Tensor, wrong: Tensor) -> Tensor:
        made = tensor.index_select(0, rows)
        made[:1].masked_fill_(wrong, float("nan"))
        return made

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        tensor, rows, _ = inputs
        ctx.save_for_backward(rows)
        ctx.shape = tensor.shape

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        return grad.new_zeros(ctx.shape).index_copy_(0, rows, grad), None, None


class Vocabulary(NamedTuple):
    """A list of rows, on the head's device."""

    name: str
    vocab: Any  # the number of ids in the whole vocabulary
    ordered: Tensor  # [V'] i64, ascending
    order: Tensor  # [V'] i64, for each id of `ordered` its row in the call
    wrong: Tensor  # bool [], whether the list is wrong: then all results are NaN
    rows: Tensor  # [V'] i64, the weight's rows in the call's order; of a rank those that it has

    def of(self, tensor: Any) -> Any:
        """The listed rows of a weight [V, D] or a bias [V]."""
        apply: Any = _Rows.apply
        return None if tensor is None else apply(tensor, self.rows, self.wrong)

    def columns(self, logits: Tensor | None) -> Tensor | None:
        """[..., V'] of a teacher's logits [..., V], which have no gradient."""
        if logits is None:
            return None
        made = logits.detach().index_select(-1, self.rows)
        made[..., :1].masked_fill_(self.wrong, float("nan"))
        return made

    def places(self, target: Tensor, ignored: int | None, shift: int, name: str) -> Tensor:
        """[...] i64: the places in the list of a target or ids, which are given as ids of the whole
        vocabulary. Ignored ones become ABSENT, which is therefore the ignore_index of the call on
        the listed rows."""
        if target.dtype not in (torch.int32, torch.int64):
            raise wrong_dtype(f"{name} is {str(target.dtype)[6:]}; allowed: int32, int64")
        if target.device != self.rows.device:
            raise wrong_device(
                f"{name} is on {target.device}; allowed: {self.rows.device}, where linear_weight is"
            )
        ignored = IGNORE_INDEX if ignored is None else ignored
        _abi.check_ignore_index(ignored)
        if shift:
            check_shift(shift, target.shape)
        made: Tensor = torch.ops.logitless.places(
            target, self.ordered, self.order, self.wrong, ignored, shift, name, self.name
        )
        return made

    def arguments(
        self, weight: Tensor, bias: Tensor | None, classes: Tensor | None, target: Tensor,
        ignored: int | None, shift: int, name: str,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:  # fmt: skip
        """The weight, bias, class weights and target of a loss over the listed rows."""
        check_extent("linear_bias", bias, weight.shape[0], weight.device)
        check_extent("weight", classes, self.vocab, weight.device)
        if classes is not None:  # [V] of all ranks
            classes = classes.index_select(0, self.ordered)
        places = self.places(target, ignored, shift, name)
        return self.of(weight), self.of(bias), classes, places

    def whole(self, places: Tensor) -> Tensor:
        """Places in the list as ids of the whole vocabulary; negative numbers stay as they are."""
        # Indexing by a tensor [] would read it on the host.
        ids = self.ordered.index_select(0, places.clamp(min=0).reshape(-1))
        return torch.where(places < 0, places, ids.view(places.shape))

    def outputs_of(self, outputs: Sequence[Any]) -> list[Any]:
        """A loss's outputs, in the order of _run.OUTPUTS, with ids of the whole vocabulary."""
        made = list(outputs)
        for place in _IDS:
            if made[place] is not None:
                made[place] = self.whole(made[place])
        return made


_IDS = [list(_run.OUTPUTS).index(bit) for bit in (_run.ARGMAX, _run.TOP_IDS)]


def check_list(name: str, ids: Any, vocab: Any, weight: Tensor, rows: Any = None) -> None:
    check_tensor(name, ids)
    if hasattr(ids, "placements"):
        raise not_supported(f"{name} is a DTensor; allowed: a plain tensor, equal on every rank")
    _vocabulary.check_list(name, str(ids.dtype)[6:], ids.shape, vocab, rows)
    if ids.device != weight.device:
        raise wrong_device(
            f"{name} is on {ids.device}; allowed: {weight.device}, where linear_weight is"
        )


def sorted_ids(name: str, ids: Tensor, vocab: Any) -> tuple[Tensor, Tensor, Tensor]:
    made: tuple[Tensor, Tensor, Tensor] = torch.ops.logitless.sort_list(ids, vocab, name)
    return made


def listed(ids: Any, weight: Tensor, shard: Any = None) -> tuple[Vocabulary, Any]:
    """The Vocabulary of `vocab_ids` for a weight [V, D], and the shard that has the rank's own ids.
    With a group this reads two numbers from the device."""
    name, vocab = "vocab_ids", weight.shape[0] if shard is None else shard.total
    check_list(name, ids, vocab, weight)
    if shard is not None and shard.blocks:
        raise not_supported("Split.blocks is given; allowed beside vocab_ids: None")
    if shard is not None and torch.compiler.is_compiling():
        raise not_supported(
            "vocab_ids is given with a group under torch.compile, and how many of the ids a rank "
            "has is read on the host; allowed: the call outside of what is compiled"
        )
    if shard is not None and shard.size > 1:
        from logitless.torch._split import ranks

        if ranks.ON:
            ranks.before_list(name, ids, shard)
    ordered, _, wrong = sorted_ids(name, ids, vocab)
    order, rows = torch.arange(ids.shape[0], device=ids.device), ordered
    if shard is not None:
        start, stop = shard.start, min(shard.start + weight.shape[0], shard.total)
        bounds = torch.searchsorted(ordered, ordered.new_tensor([start, stop]))
        first, end = bounds.tolist()
        rows = ordered[first:end] - start
        shard = shard._replace(start=first, total=ids.shape[0])
    return Vocabulary(name, vocab, ordered, order, wrong, rows), shard


def paired(ids: Any, weight: Tensor, vocab: Any) -> Vocabulary:
    """The Vocabulary of `teacher_vocab_ids`, in the order of the rows of the student's `weight`."""
    name = "teacher_vocab_ids"
    check_list(name, ids, vocab, weight, weight.shape[0])
    ordered, order, wrong = sorted_ids(name, ids, vocab)
    rows = torch.empty_like(ordered).index_copy_(0, order, ordered)
    return Vocabulary(name, vocab, ordered, order, wrong, rows)


def check_extent(
    name: str, tensor: Any, vocab: Any, device: torch.device, last: bool = False
) -> None:
    if tensor is None:
        return
    check_tensor(name, tensor)
    if tensor.device != device:
        raise wrong_device(f"{name} is on {tensor.device}; allowed: {device}, as linear_weight is")
    if tensor.dim() == 0 or tensor.shape[-1 if last else 0] != vocab:
        raise _vocabulary.wrong_extent(name, tensor.shape, vocab, last)


class Heads(NamedTuple):
    """The tensors of a divergence from which a list chooses rows."""

    weight: Tensor
    bias: Tensor | None
    teacher_weight: Any
    teacher_bias: Any
    teacher_logits: Any
    target: Tensor | None


def of_divergence(
    vocab_ids: Any, teacher_vocab_ids: Any, heads: Heads, ignored: int | None, shift: int,
    shard: Any = None,
) -> tuple[Heads, Any]:  # fmt: skip
    """The heads of a divergence over the listed rows, and the shard that has a rank's own rows. In
    the returned target ABSENT is the ignore_index."""
    weight, bias, teacher_weight, teacher_bias, logits, target = heads
    if vocab_ids is not None and teacher_vocab_ids is not None:
        raise _vocabulary.both_given()
    device = weight.device
    if vocab_ids is not None:
        rows = weight.shape[0]
        vocabulary, shard = listed(vocab_ids, weight, shard)
        check_extent("linear_bias", bias, rows, device)
        weight, bias = vocabulary.of(weight), vocabulary.of(bias)
    else:
        if shard is not None:
            raise not_supported(
                "teacher_vocab_ids is given with a group, whose ranks have not the teacher's rows "
                "that belong to theirs of the student; allowed: teacher_weight[teacher_vocab_ids], "
                "of which each rank has the rows of its linear_weight"
            )
        rows = _teachers_vocab(teacher_weight, logits)
        vocabulary = paired(teacher_vocab_ids, weight, rows)
    for name, tensor in (("teacher_weight", teacher_weight), ("teacher_bias", teacher_bias)):
        check_extent(name, tensor, rows, device)
    check_extent("teacher_logits", logits, rows, device, last=True)
    if target is not None:
        target = vocabulary.places(target, ignored, shift, "target")
    with torch.no_grad():  # the teacher has no gradient
        teacher = vocabulary.of(teacher_weight), vocabulary.of(teacher_bias)
    return Heads(weight, bias, *teacher, vocabulary.columns(logits), target), shard


def _teachers_vocab(weight: Any, logits: Any) -> Any:
    """The number of the teacher's classes; the core checks that only one of both is given."""
    if weight is None and logits is None:
        raise _vocabulary.no_teacher()
    if weight is not None:
        check_matrix("teacher_weight", weight)
        return weight.shape[0]
    check_rows("teacher_logits", logits, "[..., V]")
    return logits.shape[-1]
