# SPDX-License-Identifier: Apache-2.0
"""The exchange of grad_input's parts between GPUs of one host, while grad_weight is made.

A rank writes its part to memory that the other ranks can read (torch's symmetric memory). Each
rank then copies the parts of its share of the tokens, adds them in the ranks' order, and copies the
other shares' sums. The copies are made by the GPUs' copy engines, on a stream of their own, so they
take no multiprocessors from the products; NCCL's kernels would. The addition runs between the two
halves of grad_weight's product, because a product leaves no multiprocessor free.

    the rank's stream   grad_input | barrier | half of grad_weight | add | barrier | the other half
    the other stream                         | copies of parts     |               | copies of sums

Between the barriers and the joins of the streams:
- A part is written when its rank's Backward begins. By then every rank has passed the second
  barrier of the call before, and so has copied all parts that it needed.
- A rank's sums are written after the first barrier, which no rank reaches before its copies of the
  sums of the call before are done. They have a place of their own: a part, which is written before
  that barrier, never overlaps the sums of a smaller call.
- Calls of a group on several streams run one after another, as NCCL's collectives do.

The memory belongs to a group and a device, and stays until the group ends. It holds 4 N D bytes and
the sums of a rank's share. If it cannot be had (another host, no access between the GPUs, a CPU,
PyTorch before 2.11, LOGITLESS_PEER_MEMORY=0), or is too small in a compiled function or while a
CUDA graph is captured, the ranks use the group's collectives (exchange.py), which give the same
bits. All ranks decide this together."""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless import _abi
from logitless.torch._device import DTYPES
from logitless.torch._split import ranks

_VARIABLE = "LOGITLESS_PEER_MEMORY"
_ALIGNMENT = 1 << 21
_DEFAULT_SECONDS = 600.0
_new_stream: Any = torch.cuda.Stream
_streams: dict[int, torch.cuda.Stream] = {}


class Room(NamedTuple):
    """The bytes of a buffer: for parts, and behind them for sums."""

    parts: int
    sums: int

    def has(self, other: Room) -> bool:
        return self.parts >= other.parts and self.sums >= other.sums

    def grown(self, other: Room) -> Room:
        """Room for both. At least half as large again where it grows, so that the buffers of
        earlier calls stay few and small."""
        return Room(*(old if old >= new else _aligned(max(new, old * 3 // 2))
                      for old, new in zip(self, other)))  # fmt: skip


class _Memory:
    """A buffer on each GPU of a group that all of them can read, and this rank's two streams: the
    one of the call, and one for copies."""

    def __init__(self, handle: Any, tensor: Tensor, room: Room, timeout_ms: int) -> None:
        self.handle, self.tensor, self.timeout_ms = handle, tensor, timeout_ms
        self.room = room
        self.last: Any = None  # the event after the last call outside of graphs
        device = tensor.device
        if device.index not in _streams:
            _streams[device.index] = _new_stream(device, priority=-1)
        self.device, self.side = device, _streams[device.index]

    def of(self, rank: int, shape: Sequence[int], dtype: torch.dtype, first_byte: int) -> Tensor:
        """A view of the rank's buffer."""
        made: Tensor = self.handle.get_buffer(
            rank, tuple(shape), dtype, first_byte // dtype.itemsize
        )
        return made

    def begin(self) -> None:
        """Makes the call's stream wait for the call before, which may be on another stream. A graph
        cannot wait for what is outside of it."""
        if self.last is not None and not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(self.device).wait_event(self.last)

    def end(self) -> None:
        if not torch.cuda.is_current_stream_capturing():
            self.last = torch.cuda.current_stream(self.device).record_event()

    def barrier(self, channel: int) -> None:
        """Makes the call's stream wait for those of all ranks."""
        self.handle.barrier(channel=channel, timeout_ms=self.timeout_ms)

    def fork(self) -> None:
        """Makes the stream of copies wait for the call's."""
        self.side.wait_stream(torch.cuda.current_stream(self.device))

    def beside(self) -> Any:
        """A context in which copies are made by the other stream."""
        return torch.cuda.stream(self.side)

    def join(self) -> None:
        """Makes the call's stream wait for the copies."""
        torch.cuda.current_stream(self.device).wait_stream(self.side)

    def add(self, parts: Sequence[Tensor], sum: Tensor) -> None:
        """Writes the sum of the parts, f32, in their order."""
        stream = torch.cuda.current_stream(self.device).cuda_stream
        _abi.add(
            [part.data_ptr() for part in parts], sum.data_ptr(), DTYPES[sum.dtype], sum.numel(),
            self.device.index, stream,
        )  # fmt: skip


class _Of(NamedTuple):
    """What a group has on a device: its newest memory (None: it can have none), and smaller ones of
    earlier calls, whose addresses captured graphs may hold."""

    memory: _Memory | None
    older: tuple[_Memory, ...] = ()


# For each group and device index. A weak key, because a later group may have the same name.
_memories: Any = weakref.WeakKeyDictionary()
_rendezvous = 0  # how often this process has called torch's; see _make


def _timeout_ms(group: Any, device: torch.device) -> int:
    """The group's timeout for a collective: a rank waits as long for the others here."""
    options = getattr(group._get_backend(device), "options", None)
    timeout = getattr(options, "_timeout", None)
    seconds = _DEFAULT_SECONDS if timeout is None else timeout.total_seconds()
    return int(1000 * seconds)


def _host() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{socket.gethostname()} {file.read().strip()}"
    except OSError:
        return socket.gethostname()


def _agree(group: Any, own: Any) -> list[Any]:
    import torch.distributed as dist

    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, own, group=group)
    return every


def _allocate(device: torch.device, bytes: int) -> Tensor | None:
    # Before 2.11 a group must be enabled by hand, and a later group of its name gets its ranks.
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < (2, 11) or os.environ.get(_VARIABLE, "1") in ("", "0"):
        return None
    try:
        from torch._C._distributed_c10d import _SymmetricMemory

        memory: Any = _SymmetricMemory
        made: Tensor = memory.empty_strided_p2p((bytes,), (1,), torch.uint8, device)
    except (ImportError, AttributeError, TypeError, RuntimeError):
        return None
    return made


def _make(group: Any, device: torch.device, room: Room) -> _Memory | None:
    """Memory on every rank's GPU, or None on every rank. Waits for all ranks."""
    global _rendezvous
    tensor = _allocate(device, -(-sum(room) // _ALIGNMENT) * _ALIGNMENT)
    # A rank without memory must not leave the others in `rendezvous`. That numbers its messages by
    # process, so ranks that have called it for other groups would wait for each other in vain.
    found = _agree(group, (tensor is not None, _host(), _rendezvous))
    if not all(has for has, *_ in found) or len({tuple(facts) for _, *facts in found}) > 1:
        return None
    made, error = None, None
    _rendezvous += 1
    try:
        from torch._C._distributed_c10d import _SymmetricMemory

        rendezvous: Any = _SymmetricMemory.rendezvous
        handle = rendezvous(tensor, group.group_name)
        assert tensor is not None
        made = _Memory(handle, tensor, room, _timeout_ms(group, device))
    except (AttributeError, TypeError, RuntimeError) as e:  # such as no access between the GPUs
        error = str(e)
    return made if all(e is None for e in _agree(group, error)) else None


def _memory_of(name: str, device: torch.device, room: Room, makes: bool) -> _Memory | None:
    """The group's memory with that much room; made, if there is none, where `makes` says so."""
    group: Any = ranks.group_of(name)
    devices = _memories.setdefault(group, {})
    of = devices.get(device.index)
    if of is not None and (of.memory is None or of.memory.room.has(room)):
        memory: _Memory | None = of.memory
        return memory
    if not makes or torch.cuda.is_current_stream_capturing():
        return None
    older: tuple[_Memory, ...] = ()
    if of is not None:
        older, room = (*of.older, of.memory), of.memory.room.grown(room)
    made = _make(group, device, room)
    devices[device.index] = _Of(made, older)
    return made


class Layout(NamedTuple):
    """Which of N tokens belong to which rank: with a sequence_dim those that its own input has, in
    `outer` runs of `run` tokens; else runs of `run` tokens in the ranks' order, the last of which
    may be shorter or empty, and every rank gets the sums of all."""

    tokens: int
    outer: int
    run: int
    gathers: bool

    def runs(self, rank: int, size: int) -> list[tuple[int, int]]:
        """(first token, number of tokens) of each run."""
        found = []
        for i in range(self.outer):
            first = min((i * size + rank) * self.run, self.tokens)
            found.append((first, min(self.run, self.tokens - first)))
        return found


_MOST_RUNS = 64  # a copy for each run and rank


def layout_of(shape: Sequence[int], dim: int | None, size: int) -> Layout:
    """`shape` is that of this rank's input [..., D]."""
    *dims, _ = shape
    own = 1
    for n in dims:
        own *= n
    if dim is None:
        return Layout(own, 1, -(-own // size), True)
    outer = 1
    for n in dims[:dim]:
        outer *= n
    return Layout(own * size, outer, own // max(outer, 1), False)


class Exchange:
    """One exchange. `part` [N, D] f32 is where grad_input's part is written; then, each once and in
    this order, `send`, `add` and `result`."""

    def __init__(
        self, memory: _Memory, rank: int, size: int, layout: Layout, hidden: int,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self._memory, self._rank, self._size, self._layout = memory, rank, size, layout
        self._hidden, self._dtype = hidden, dtype
        memory.begin()
        self.part = self._part(rank)  # [N, D]
        self._runs = layout.runs(rank, size)
        own = sum(count for _, count in self._runs)
        # Allocated on the call's stream, which waits for the copies before they are freed.
        self._copied = self.part.new_empty(size - 1, own, hidden)  # [P - 1, n, D]
        tokens = layout.tokens if layout.gathers else own
        self._result = self.part.new_empty(tokens, hidden, dtype=dtype)

    def _part(self, rank: int) -> Tensor:
        return self._memory.of(rank, (self._layout.tokens, self._hidden), torch.float32, 0)

    def _sums(self, rank: int) -> Tensor:
        shape, behind = (self._layout.run, self._hidden), self._memory.room.parts
        return self._memory.of(rank, shape, self._dtype, behind)

    def _others(self) -> list[int]:
        """The other ranks. Each rank begins with another one, so that no GPU sends to two."""
        return [(self._rank + k) % self._size for k in range(1, self._size)]

    def send(self) -> None:
        """Copies the other ranks' parts of this rank's tokens, once all are written."""
        memory = self._memory
        memory.barrier(0)
        memory.fork()
        with memory.beside():
            for to, rank in zip(self._copied, self._others()):
                part, done = self._part(rank), 0
                for first, count in self._runs:
                    to[done : done + count].copy_(part[first : first + count])
                    done += count

    def add(self) -> None:
        """Adds the parts of this rank's tokens, and copies the other ranks' sums."""
        memory, gathers = self._memory, self._layout.gathers
        memory.join()
        total = self._sums(self._rank) if gathers else self._result
        copied = dict(zip(self._others(), self._copied))
        done = 0
        for first, count in self._runs:
            parts = [
                self.part[first : first + count]
                if rank == self._rank
                else copied[rank][done : done + count]
                for rank in range(self._size)
            ]
            if count:
                memory.add(parts, total[done : done + count])
            done += count
        if gathers:
            self._place(self._rank)
        memory.barrier(1)
        if not gathers:
            return
        memory.fork()
        with memory.beside():
            for rank in self._others():
                self._place(rank)

    def _place(self, rank: int) -> None:
        """Copies a rank's sums to the result."""
        ((first, count),) = self._layout.runs(rank, self._size)
        self._result[first : first + count].copy_(self._sums(rank)[:count])

    def result(self) -> Tensor:
        """The sums [N, D] of all tokens, or those of this rank's own."""
        self._memory.join()
        self._memory.end()
        return self._result

    def abandon(self) -> None:
        """After an error: no copy is under way when this object's tensors are freed."""
        self._memory.join()


def _aligned(bytes: int) -> int:
    return -(-bytes // 256) * 256


def room_of(layout: Layout, hidden: int, dtype: torch.dtype) -> Room:
    sums = layout.run * hidden * dtype.itemsize if layout.gathers else 0
    return Room(_aligned(4 * layout.tokens * hidden), _aligned(sums))


def exchange_of(
    group: str, rank: int, size: int, shape: Sequence[int], dim: int | None, like: Tensor,
    dtype: torch.dtype, makes: bool = True,
) -> Exchange | None:  # fmt: skip
    """The exchange for an input of this `shape` and `dtype`, or None if the group's collectives are
    to be used. The answer is the same on every rank. If `makes`, it may wait for the other ranks,
    where it is the first for so many tokens."""
    layout, hidden = layout_of(shape, dim, size), shape[-1]
    if size > _abi.MOST_ADDED or layout.outer > _MOST_RUNS or not layout.tokens * hidden:
        return None
    memory = _memory_of(group, like.device, room_of(layout, hidden, dtype), makes)
    if memory is None:
        return None
    return Exchange(memory, rank, size, layout, hidden, dtype)
