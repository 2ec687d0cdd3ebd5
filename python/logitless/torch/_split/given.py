# SPDX-License-Identifier: Apache-2.0
"""How a vocabulary is split, as a caller passes it."""

from __future__ import annotations

import dataclasses
import operator
import warnings
from collections.abc import Mapping
from typing import Any, Literal

import torch

from logitless._errors import invalid, wrong_dtype


@dataclasses.dataclass(frozen=True)
class Split:
    """Describes how a vocabulary is split over the ranks of a group, or into blocks. Pass it as
    `group=` if a process group alone is not enough (docs/devices.md).

    - `group`: a torch.distributed.ProcessGroup, or its name. linear_weight and linear_bias are this
      rank's columns. Unless other fields say so, all other arguments are the same on every rank,
      and so are all results, to the bit. None: one process, with `blocks`.
    - `start`, `total`: the first column of this rank, and the number of columns of all ranks. None:
      torch.chunk's split of `total`, or equal shards. Rows of the weight beyond `total` are
      padding.
    - `blocks`: a power of two that the number of ranks divides. The vocabulary is computed in that
      many separate blocks of equal width; the last may be narrower or empty. Everything then has
      the same bits for any number of ranks that divides `blocks`, one process included.
    - `sequence_dim`: the dimension of tokens along which the input is split over the group, too.
      Targets and results are those of all tokens.
    - `local_tokens`: with `sequence_dim`, targets and results are those of the rank's own tokens; a
      sum or mean is then the rank's part of the whole one.
    - `reduce_input_grad`: if False, the input's gradient is the rank's part of a sum.
    - `reduce_dtype`: "float32" adds the parts of that gradient in the ranks' order, so that every
      rank has the same bits; "input" leaves the sum to the backend, in the input's dtype.

    Nothing is checked here: the function that gets the Split raises LogitlessValueError or
    LogitlessNotSupportedError.
    """

    group: Any = None
    _: dataclasses.KW_ONLY
    start: int | None = None
    total: int | None = None
    blocks: int | None = None
    sequence_dim: int | None = None
    local_tokens: bool = False
    reduce_input_grad: bool = True
    reduce_dtype: Literal["float32", "input"] = "float32"


# Earlier keywords of the functions, and the fields of Split that replace them.
OLD = {
    "vocab_start": "start",
    "vocab_total": "total",
    "vocab_blocks": "blocks",
    "sequence_dim": "sequence_dim",
    "local_tokens": "local_tokens",
    "reduce_input_grad": "reduce_input_grad",
    "reduce_dtype": "reduce_dtype",
}


def unexpected(function: str, name: str) -> TypeError:
    """The error that Python itself raises for a keyword that a function does not have."""
    return TypeError(f"{function}() got an unexpected keyword argument {name!r}")


def split_of_old(group: Any, old: Mapping[str, Any], function: str, stacklevel: int = 3) -> Split:
    """The Split for `group` and the earlier keywords `old`, with a DeprecationWarning. `function`
    is the function that they were passed to, `stacklevel` - 2 calls above this one."""
    for name in old:
        if name not in OLD:
            raise unexpected(function, name)
    fields = {OLD[name]: value for name, value in old.items()}
    if isinstance(group, Split):
        name, field = next(zip(old, fields))
        raise invalid(f"{name} is given beside a Split; allowed: Split({field}=...)")
    warnings.warn(
        f"{', '.join(old)} of {function} will go; allowed from now on: group=Split(group, "
        f"{', '.join(f'{field}=...' for field in fields)})",
        DeprecationWarning,
        stacklevel=stacklevel,
    )
    return Split(group, **fields)


def of_integers(split: Split) -> Split:
    """The Split with integers as Python's; refuses what is none."""
    made: dict[str, Any] = {}
    for name in ("start", "total", "sequence_dim"):
        value = getattr(split, name)
        if value is None or isinstance(value, (int, torch.SymInt)):
            continue
        try:
            made[name] = operator.index(value)
        except TypeError:
            raise wrong_dtype(f"Split.{name} is {value!r}; allowed: None, or an int") from None
    return dataclasses.replace(split, **made) if made else split


def check_group(split: Split) -> None:
    """Refuses fields other than `blocks` without a group."""
    if split.group is None and split != Split(blocks=split.blocks):
        given = next(
            field.name
            for field in dataclasses.fields(Split)
            if field.name != "blocks" and getattr(split, field.name) != field.default
        )
        raise invalid(f"Split.{given} is given without a group, whose ranks it is about")
