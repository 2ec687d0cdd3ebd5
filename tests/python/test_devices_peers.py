# SPDX-License-Identifier: Apache-2.0
"""The exchange of grad_input's parts over memory that all ranks can read: the bits of the group's
collectives, for any number of tokens and any dimension that is split, call after call. On the CPU
a shared file stands for the GPUs' memory, and ranks are late in turn. On GPUs
(LOGITLESS_TEST_RANKS=nccl) the public functions are called."""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import ranks
from logitless.torch import Split, linear_cross_entropy, linear_divergence, linear_logprob
from logitless.torch._split import exchange, overlapped, peers, sums
from logitless.torch._split.shards import Shard
from ranks import Rank
from test_linear import BF16, F16, F32

GPU = ranks.BACKEND == "nccl"
Results = Mapping[str, Any]


class Files:
    """Memory like peers._Memory's, in a file for each rank. Rank `late` is late at everything that
    it writes or copies, and before each barrier."""

    def __init__(self, me: Rank, folder: pathlib.Path, room: peers.Room) -> None:
        self.me, self.late, self.room = me, 0, room
        self.buffers = [
            torch.from_file(str(folder / f"{rank}"), True, sum(room), dtype=torch.uint8)
            for rank in range(me.size)
        ]

    def of(self, rank: int, shape: Sequence[int], dtype: torch.dtype, first_byte: int) -> Tensor:
        flat = self.buffers[rank][first_byte:].view(dtype)
        count = torch.Size(shape).numel()
        return flat[:count].view(*shape)

    def wait(self) -> None:
        if self.me.rank == self.late:
            time.sleep(0.02)

    def barrier(self, channel: int) -> None:
        self.wait()
        dist.barrier()

    def begin(self) -> None: ...

    def end(self) -> None: ...

    def fork(self) -> None: ...

    def join(self) -> None: ...

    def beside(self) -> Any:
        self.wait()
        return contextlib.nullcontext()

    def add(self, parts: Sequence[Tensor], sum: Tensor) -> None:
        self.wait()
        sum.copy_(sums.ordered_sum(torch.stack(list(parts))))


def shared_folder(me: Rank) -> pathlib.Path:
    """A new folder, the same for all ranks."""
    name = [tempfile.mkdtemp() if me.rank == 0 else ""]
    dist.broadcast_object_list(name)
    return pathlib.Path(name[0])


# The shape of a rank's own input, and the dimension that is split.
SHAPES: dict[str, tuple[tuple[int, ...], int | None]] = {
    "divided": ((12, 5), None),
    "not divided": ((13, 5), None),
    "fewer tokens than ranks": ((1, 3), None),
    "batches": ((3, 7, 4), None),
    "first of two": ((2, 3, 4), 0),
    "second of two": ((3, 2, 4), 1),
    "second of three": ((2, 3, 5, 4), 1),
    "one": ((4, 3), 0),
}


def exchanged(
    me: Rank, names: Sequence[str], dtype: torch.dtype = BF16, rounds: int = 4
) -> tuple[int, dict[str, Tensor]]:
    """Exchanges by shared files, several times in turn, with other parts, in the same memory.
    Returns how many times the result has other bits than that of collectives, and the results that
    all ranks have."""
    layouts = {name: peers.layout_of(*SHAPES[name], me.size) for name in names}
    room = peers.Room(0, 0)
    for name, layout in layouts.items():
        room = room.grown(peers.room_of(layout, SHAPES[name][0][-1], dtype))
    memory: Any = Files(me, shared_folder(me), room)
    group = dist.group.WORLD.group_name  # type: ignore[union-attr]
    wrong, found = 0, {}
    for i, name in [(i, name) for i in range(rounds) for name in names]:
        (shape, dim), layout = SHAPES[name], layouts[name]
        memory.late = i % me.size
        part = torch.randn(layout.tokens, shape[-1], generator=ranks.generator(10 * i + me.rank))
        made = peers.Exchange(memory, me.rank, me.size, layout, shape[-1], dtype)
        memory.wait()
        made.part.copy_(part)
        made.send()
        made.add()
        got = made.result().view(shape)
        found[f"{name} {i}"] = got
        if len(names) > 1:
            continue  # collectives between two exchanges would hide a race of the two
        shard = Shard(group, me.rank, me.size, 0, 0, dim)
        wrong += not torch.equal(
            got, exchange.reduce_grad_input(part, shard, torch.Size(shape), dtype)
        )
    for i, name in [(i, name) for i in range(rounds) for name in names if len(names) > 1]:
        (shape, dim), layout = SHAPES[name], layouts[name]
        part = torch.randn(layout.tokens, shape[-1], generator=ranks.generator(10 * i + me.rank))
        shard = Shard(group, me.rank, me.size, 0, 0, dim)
        want = exchange.reduce_grad_input(part, shard, torch.Size(shape), dtype)
        wrong += not torch.equal(found[f"{name} {i}"], want)
    return wrong, {
        name: t for name, t in found.items() if SHAPES[name.rpartition(" ")[0]][1] is None
    }


def run_exchange(me: Rank, name: str, dtype: torch.dtype) -> Results:
    wrong, found = exchanged(me, [name], dtype)
    assert not wrong
    return found


SEVERAL = ("fewer tokens than ranks", "batches", "one", "divided", "second of three")


def run_several(me: Rank) -> Results:
    """Calls of several sizes in turn, in one memory, with nothing between them."""
    wrong, found = exchanged(me, SEVERAL)
    assert not wrong
    return found


def _one_barrier(left_out: int) -> Callable[..., None]:
    def barrier(self: Any, channel: int) -> None:
        self.wait()
        if channel != left_out:
            dist.barrier()

    return barrier


_runs, _sums = peers.Layout.runs, peers.Exchange._sums


def _behind_this_part(self: Any, rank: int) -> Tensor:
    """Sums whose place depends on the call's size: a larger call's part overwrites them."""
    behind = peers._aligned(4 * self._layout.tokens * self._hidden)
    return self._memory.of(rank, (self._layout.run, self._hidden), self._dtype, behind)


MUTANTS: dict[str, tuple[Any, str, Any]] = {
    "parts are read before they are written": (Files, "barrier", _one_barrier(0)),
    "sums are read before they are written": (Files, "barrier", _one_barrier(1)),
    "another rank's tokens": (
        peers.Layout,
        "runs",
        lambda self, rank, size: _runs(self, 0 if rank == 1 else rank, size),
    ),
    "a rank's own sums for all": (
        peers.Exchange,
        "_sums",
        lambda self, rank: _sums(self, self._rank),
    ),
    "a larger part over another call's sums": (peers.Exchange, "_sums", _behind_this_part),
}


def mutated(me: Rank, name: str) -> Results:
    where, function, mutant = MUTANTS[name]
    with mock.patch.object(where, function, mutant):
        names = SEVERAL if mutant is _behind_this_part else ["divided"]
        wrong = torch.tensor(exchanged(me, names)[0])
    dist.all_reduce(wrong)
    assert wrong, "no rank has noticed"
    return {}


@pytest.mark.skipif(GPU, reason="the files stand for a GPU's memory")
@pytest.mark.parametrize("size", ranks.SIZES)
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, BF16) for name in SHAPES), ("divided", F32), ("divided", F16)]
)
def test_the_exchange_has_the_bits_of_collectives(
    groups: dict[int, ranks.Group], size: int, name: str, dtype: torch.dtype
) -> None:
    groups[size].call(run_exchange, name, dtype)


@pytest.mark.skipif(GPU, reason="the files stand for a GPU's memory")
@pytest.mark.parametrize("size", ranks.SIZES)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_known_bug_makes_a_check_fail(
    groups: dict[int, ranks.Group], size: int, name: str
) -> None:
    groups[size].call(mutated, name)


@pytest.mark.skipif(GPU, reason="the files stand for a GPU's memory")
@pytest.mark.parametrize("size", ranks.SIZES)
def test_calls_of_several_sizes_share_a_memory(groups: dict[int, ranks.Group], size: int) -> None:
    groups[size].call(run_several)


def test_room_grows_where_it_must() -> None:
    small, large = peers.Room(2560, 256), peers.Room(2816, 128)
    assert small.has(small) and not small.has(large)
    grown = small.grown(large)
    assert grown.has(small) and grown.has(large)
    assert grown.sums == small.sums and grown.parts >= 1.5 * small.parts
    assert grown.parts % 256 == 0


def test_a_trace_is_seen_where_torch_does_not_tell() -> None:
    """PyTorch before 2.13 traces backwards without `is_compiling`."""
    seen = []

    def traced(x: Tensor) -> Tensor:
        seen.append(overlapped.is_traced())
        return x * 2

    with mock.patch.object(torch.compiler, "is_compiling", lambda: False):
        make_fx(traced)(torch.ones(2))
        traced(torch.ones(2))
    assert seen == [True, False]


def test_runs_cover_every_token_once() -> None:
    for size in (2, 3, 4, 7):
        for shape, dim in SHAPES.values():
            layout = peers.layout_of(shape, dim, size)
            runs = [run for rank in range(size) for run in layout.runs(rank, size)]
            covered = [t for first, count in runs for t in range(first, first + count)]
            assert sorted(covered) == list(range(layout.tokens))


# Whole calls on the CPU, with torch's symmetric memory, streams and the GPU's addition replaced.


class Symmetric:
    """torch's _SymmetricMemory, in files of one folder. Its calls are numbered by process."""

    folder: pathlib.Path
    me: Rank
    made = 0
    fails = False  # no access between the GPUs

    @staticmethod
    def _file(rank: int, number: int, bytes: int) -> Tensor:
        name = str(Symmetric.folder / f"{number}-{rank}")
        return torch.from_file(name, True, bytes, dtype=torch.uint8)

    @staticmethod
    def empty_strided_p2p(size: Any, stride: Any, dtype: Any, device: Any) -> Tensor:
        Symmetric.made += 1
        return Symmetric._file(Symmetric.me.rank, Symmetric.made, size[0])

    @staticmethod
    def rendezvous(tensor: Tensor, name: str) -> Any:
        if Symmetric.fails:
            raise RuntimeError("no access between the GPUs")
        files = [
            Symmetric._file(rank, Symmetric.made, tensor.numel())
            for rank in range(Symmetric.me.size)
        ]
        return Handle(files)


class Handle:
    def __init__(self, files: list[Tensor]) -> None:
        self.files = files

    def get_buffer(
        self, rank: int, shape: Sequence[int], dtype: torch.dtype, storage_offset: int
    ) -> Tensor:
        flat = self.files[rank].view(dtype)[storage_offset:]
        return flat[: torch.Size(shape).numel()].view(*shape)

    def barrier(self, channel: int, timeout_ms: int) -> None:
        assert timeout_ms > 0
        dist.barrier()


class Stream:
    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, other: Stream) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def record_event(self) -> object:
        return object()


@contextlib.contextmanager
def as_on_gpus(me: Rank) -> Any:
    """Calls on the CPU take the way of a GPU's."""
    import torch._C._distributed_c10d as c10d

    Symmetric.folder, Symmetric.me, Symmetric.made = shared_folder(me), me, 0
    Symmetric.fails = False
    with contextlib.ExitStack() as stack:

        def replace(where: Any, name: str, by: Any) -> None:
            stack.enter_context(mock.patch.object(where, name, by))

        replace(c10d, "_SymmetricMemory", Symmetric)
        replace(torch.cuda, "is_current_stream_capturing", lambda: False)
        replace(torch.cuda, "current_stream", lambda device: Stream())
        replace(torch.cuda, "stream", lambda side: contextlib.nullcontext())
        replace(peers, "_new_stream", Stream)
        replace(peers, "_streams", {})
        replace(peers, "_rendezvous", 0)
        replace(overlapped, "_on_gpu", lambda rows: True)
        replace(
            peers._Memory,
            "add",
            lambda self, parts, sum: sum.copy_(sums.ordered_sum(torch.stack(list(parts)))),
        )
        yield


def whole_calls(me: Rank) -> Results:
    """Losses of every kind of head, of growing and shrinking sizes, by both ways."""
    with as_on_gpus(me):
        with_peers, without = new_group(True), new_group(False)
        used = Used()
        with used.watching():
            for sizes in SMALL:
                for kind, of in itertools.product(KINDS, OPS):
                    head = Head(me, kind, F32, sizes, of)
                    want = head.call(without)
                    same(head.call(with_peers), want)
                    same(head.call(with_peers), want)
        count = len(SMALL) * len(KINDS) * len(OPS)
        assert (used.peers, used.collectives) == (2 * count, count)
        ((of, _),) = [(o, 0) for o in peers._memories[with_peers].values()]
        assert of.memory is not None and of.memory.room.has(peers.Room(4 * 203 * 32, 0))
        assert 1 <= len(of.older) <= 8
    return {}


def refused_on_one_rank(me: Rank) -> Results:
    """Where one rank has no peer memory, all ranks use collectives, for good."""
    head = Head(me, "plain", F32, (64, 64, 1024))
    want = head.call(dist.group.WORLD)
    for why in ("variable", "version", "history", "access", "host"):
        with as_on_gpus(me), contextlib.ExitStack() as stack:
            group, last = dist.new_group(), me.rank == me.size - 1
            if why == "variable":
                stack.enter_context(environment("0" if last else "1"))
            if why == "version" and last:
                stack.enter_context(mock.patch.object(torch, "__version__", "2.10.1+cu130"))
            if why == "history" and last:
                peers._rendezvous += 1
            if why == "access":
                Symmetric.fails = last
            if why == "host" and last:
                stack.enter_context(mock.patch.object(peers, "_host", lambda: "another"))
            used = Used()
            with used.watching():
                same(head.call(group), want)
                same(head.call(group), want)
            assert (used.peers, used.collectives) == (0, 2), why
    return {}


def a_group_made_anew(me: Rank) -> Results:
    """A later group does not get the memory of an earlier one, even of the same name."""
    head = Head(me, "plain", F32, (64, 64, 1024))
    want = head.call(dist.group.WORLD)
    with as_on_gpus(me):
        used = Used()
        with used.watching():
            for i in range(2):
                group = dist.new_group()
                same(head.call(group), want)
                assert Symmetric.made == i + 1
                dist.destroy_process_group(group)
        assert used.peers == 2
    return {}


def calls_that_have_collectives(me: Rank) -> Results:
    """Those that the page lists, decided without waiting for any rank."""
    with as_on_gpus(me):
        x = torch.zeros(65, 2, 8)
        group = dist.group.WORLD.group_name  # type: ignore[union-attr]
        of: Any = peers.exchange_of
        assert of(group, me.rank, me.size, (65, 2, 8), 1, x, F32) is None  # 65 runs
        assert of(group, 0, 17, (2, 8), None, x, F32) is None  # 17 ranks
        assert of(group, me.rank, me.size, (0, 8), None, x, F32) is None
        assert of(group, me.rank, me.size, (2, 8), None, x, F32, False) is None  # compiled first
        assert Symmetric.made == 0
        head, used = Head(me, "plain", F32, (16, 8, 64)), Used()
        with used.watching():
            for split in ({"reduce_dtype": "input"}, {"blocks": 4 if me.size != 3 else None},
                          {"reduce_input_grad": False}):  # fmt: skip
                head.split |= {"blocks": None, "reduce_dtype": "float32", "reduce_input_grad": True}
                if split.get("blocks", 1) is not None:
                    head.split |= split
                    head.call(dist.group.WORLD)
        assert used.peers == used.collectives == 0
    return {}


CPU_CASES: dict[str, Callable[..., Results]] = {
    f.__name__: f
    for f in (whole_calls, refused_on_one_rank, a_group_made_anew, calls_that_have_collectives)
}


def run_cpu(me: Rank, name: str) -> Results:
    return CPU_CASES[name](me)


@pytest.mark.skipif(GPU, reason="this is about ranks on the CPU")
@pytest.mark.parametrize("size", ranks.SIZES)
@pytest.mark.parametrize("name", CPU_CASES)
def test_whole_calls(groups: dict[int, ranks.Group], size: int, name: str) -> None:
    groups[size].call(run_cpu, name)


_CPU = torch.device("cpu")

# On GPUs: losses and divergences, whose exchange is by the GPUs' own memory.


class Head:
    """A rank's columns of a head (`kind`: one of KINDS) for one `of` OPS, its input and targets."""

    def __init__(
        self, me: Rank, kind: str, dtype: torch.dtype, sizes: tuple[int, int, int],
        of: str = "loss",
    ) -> None:  # fmt: skip
        tokens, hidden, vocab = sizes
        g = ranks.generator(1)
        whole = (torch.randn(vocab, hidden, generator=g) / hidden**0.5).to(dtype)
        each = -(-vocab // me.size)
        cuts = [min(rank * each, vocab) for rank in range(me.size + 1)]
        if kind == "one rank has all":
            cuts = [0] * me.size + [vocab]
        start, stop = cuts[me.rank], cuts[me.rank + 1]
        self.weight = whole[start:stop].contiguous()
        self.teacher = whole.roll(1, 0)[start:stop].contiguous() if of == "divergence" else None
        self.split: dict[str, Any] = {"start": start, "total": vocab}
        self.options: dict[str, Any] = {}
        shape: tuple[int, ...] = (tokens,)
        if kind == "first dimension":
            shape, self.split["sequence_dim"] = (tokens * me.size,), 0
        if kind == "second dimension":
            shape, self.split["sequence_dim"] = (3, tokens * me.size), 1
        self.input = torch.randn(*shape, hidden, generator=g).to(dtype)
        self.target = torch.randint(0, vocab, shape, generator=g)
        if kind == "ignored":
            self.target[::2] = -100
        if kind == "memory":
            self.options["memory"] = "48MiB"
        if kind == "frozen":
            self.weight.requires_grad_(False)
        self.frozen = kind == "frozen"
        dim = self.split.get("sequence_dim")
        if dim is not None:
            self.input = self.input.chunk(me.size, dim)[me.rank].contiguous()

    def loss(self, x: Tensor, w: Tensor, group: Any) -> Tensor:
        split = Split(group, **self.split)
        if self.teacher is None:
            return linear_cross_entropy(x, w, self.target, group=split, **self.options)
        return linear_divergence(
            x, w, x.detach() * 0.5, self.teacher, kind="reverse_kl", target=self.target,
            label_weight=0.5, group=split, **self.options,
        )  # fmt: skip

    def call(self, group: Any) -> list[Tensor]:
        x = self.input.detach().requires_grad_()
        w = self.weight.detach().requires_grad_(not self.frozen)
        loss = self.loss(x, w, group)
        loss.backward()
        return [t for t in (loss.detach(), x.grad, w.grad) if t is not None]


KINDS = (
    "plain", "first dimension", "second dimension", "memory", "one rank has all", "ignored",
    "frozen",
)  # fmt: skip
OPS = ("loss", "divergence")
SMALL = ((16, 64, 302), (1, 128, 115), (203, 32, 99), (100, 40, 300), (3, 8, 5))
SIZES = ((64, 64, 1024), (1, 128, 515), (1023, 256, 4099), (2048, 1024, 32064), (3, 8, 5))


@contextlib.contextmanager
def environment(value: str) -> Any:
    with mock.patch.dict(os.environ, {"LOGITLESS_PEER_MEMORY": value}):
        yield


class Used:
    """How often peer memory, and how often collectives were used."""

    def __init__(self) -> None:
        self.peers = self.collectives = 0
        self._of = peers.exchange_of

    def exchange_of(self, *args: Any) -> Any:
        found = self._of(*args)
        self.peers += found is not None
        self.collectives += found is None
        return found

    def watching(self) -> Any:
        return mock.patch.object(overlapped.peers, "exchange_of", self.exchange_of)


def new_group(peer_memory: bool) -> Any:
    """A group whose first exchange decides that it has no peer memory, if it shall have none."""
    group = dist.new_group()
    if not peer_memory:
        with environment("0"):
            device = torch.device("cuda", torch.cuda.current_device()) if GPU else _CPU
            peers._memory_of(group.group_name, device, peers.Room(1, 1), True)
    return group


def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> None:
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x.isnan(), y.isnan())
        assert torch.equal(x.nan_to_num(), y.nan_to_num())


def gpu_calls(me: Rank, dtype: torch.dtype) -> Results:
    """Three calls of each head, of growing and shrinking sizes, by both ways."""
    with_peers, without = new_group(True), new_group(False)
    used = Used()
    count = 0
    with used.watching():
        for sizes in SIZES:
            for kind, of in itertools.product(KINDS, OPS):
                head = Head(me, kind, dtype, sizes, of)
                want = head.call(without)
                for _ in range(3):
                    same(head.call(with_peers), want)
                count += 1
    assert (used.peers, used.collectives) == (3 * count, count)
    return {}


def gpu_graph(me: Rank) -> Results:
    for of in OPS:
        _graph(me, of)
    return {}


def _graph(me: Rank, of: str) -> None:
    """200 replays of a graph with other inputs, eager calls of the same group between them, and a
    call of more tokens, which needs larger memory while the graph still uses the old one."""
    with_peers, without = new_group(True), new_group(False)
    head = Head(me, "plain", BF16, (2048, 512, 8192), of)
    x = head.input.requires_grad_()
    w = head.weight.requires_grad_()

    def step() -> Tensor:
        x.grad = w.grad = None
        loss = head.loss(x, w, with_peers)
        loss.backward()
        return loss

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    used = Used()
    graph = torch.cuda.CUDAGraph()
    with used.watching(), torch.cuda.graph(graph):
        loss = step()
    assert used.peers == 1
    made = [loss, x.grad, w.grad]
    for i in range(200):
        with torch.no_grad():
            x.copy_(torch.randn(*x.shape, generator=ranks.generator(i)))
        graph.replay()
        if i % 20 == 0:
            head.input = x.detach().clone()
            same([t.detach() for t in made if t is not None], head.call(without))
            same(head.call(with_peers), head.call(without))
        if i == 100:
            larger = Head(me, "plain", BF16, (4096, 512, 8192), of)
            same(larger.call(with_peers), larger.call(without))


def gpu_capture_first(me: Rank) -> Results:
    """A group whose first backward is captured has no peer memory yet, and uses collectives."""
    group, without = new_group(True), new_group(False)
    head = Head(me, "plain", BF16, (256, 128, 2048))
    want = head.call(without)
    dist.all_reduce(torch.zeros(1), group=group)  # NCCL itself is ready
    used = Used()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with used.watching(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
        made = head.call(group)
    assert (used.peers, used.collectives) == (0, 1)
    graph.replay()
    same(made, want)
    same(head.call(group), want)
    return {}


def gpu_compiled(me: Rank) -> Results:
    """Under torch.compile, and statistics' gradients."""
    with_peers, without = new_group(True), new_group(False)

    def call(group: Any, compiled: bool) -> list[Tensor]:
        x, w = head.input.detach().requires_grad_(), head.weight.detach().requires_grad_()

        def loss(x: Tensor, w: Tensor) -> Tensor:
            split = Split(group, **head.split)
            logprob, entropy = linear_logprob(x, w, head.target, group=split, entropy=True)
            return (logprob * 0.7 - 0.1 * entropy).sum()

        of: Any = torch.compile(loss, fullgraph=True) if compiled else loss
        of(x, w).backward()
        return [t for t in (x.grad, w.grad) if t is not None]

    head = Head(me, "plain", BF16, (256, 128, 2048))
    want = call(without, False)
    same(call(with_peers, False), want)
    same(call(with_peers, True), want)

    def divergence(x: Tensor, w: Tensor) -> Tensor:
        return head.loss(x, w, with_peers)

    head, used = Head(me, "plain", BF16, (256, 128, 2048), "divergence"), Used()
    _, *want = head.call(without)
    x, w = head.input.detach().requires_grad_(), head.weight.detach().requires_grad_()
    compiled: Any = torch.compile(divergence, fullgraph=True)
    with used.watching():
        compiled(x, w).backward()
    same([t for t in (x.grad, w.grad) if t is not None], want)
    assert (used.peers, used.collectives) == (1, 0)
    return {}


def gpu_sizes_in_one_backward(me: Rank) -> Results:
    """One backward of a small and a large loss: nothing of the group is between their exchanges."""
    groups = {"peers": new_group(True), "collectives": new_group(False)}
    heads = [Head(me, "plain", BF16, sizes) for sizes in ((4096, 512, 8192), (256, 512, 8192))]

    def both(group: Any) -> list[Tensor]:
        leaves, losses = [], []
        for head in (heads[1], heads[0], heads[1]):
            x, w = head.input.detach().requires_grad_(), head.weight.detach().requires_grad_()
            split = Split(group, **head.split)
            losses.append(linear_cross_entropy(x, w, head.target, group=split))
            leaves += [x, w]
        torch.stack(losses).sum().backward()
        return [t.grad for t in leaves if t.grad is not None]

    both(groups["peers"])  # makes the memory
    want = both(groups["collectives"])
    for _ in range(20):
        same(both(groups["peers"]), want)
    return {}


def gpu_streams(me: Rank) -> Results:
    """Calls of one group on two streams that nothing else orders."""
    with_peers, without = new_group(True), new_group(False)
    heads = [Head(me, "plain", BF16, (2048, 512, 8192)) for _ in range(2)]
    heads[1].input = heads[1].input * 0.5
    want = [head.call(without) for head in heads]
    heads[0].call(with_peers)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    made: list[list[Tensor]] = []
    for i in range(20):
        with torch.cuda.stream(streams[i % 2]):
            made.append(heads[i % 2].call(with_peers))
    torch.cuda.synchronize()
    for i, found in enumerate(made):
        same(found, want[i % 2])
    return {}


def gpu_compiled_first(me: Rank) -> Results:
    """A group whose first call is compiled for CUDA graphs has no memory yet."""
    without = new_group(False)
    for of in OPS:
        group = new_group(True)
        head = Head(me, "plain", BF16, (256, 128, 2048), of)
        want = head.call(without)

        def loss(x: Tensor, w: Tensor, head: Head = head, group: Any = group) -> Tensor:
            return head.loss(x, w, group)

        compiled: Any = torch.compile(loss, mode="reduce-overhead", fullgraph=True)
        used = Used()
        with used.watching():
            for _ in range(4):
                x, w = head.input.detach().requires_grad_(), head.weight.detach().requires_grad_()
                torch.compiler.cudagraph_mark_step_begin()
                compiled(x, w).backward()
                same([t for t in (x.grad, w.grad) if t is not None], want[1:])
        assert used.peers == 0
    return {}


GPU_CASES: dict[str, Callable[..., Results]] = {
    f.__name__: f
    for f in (
        gpu_graph,
        gpu_capture_first,
        gpu_compiled,
        gpu_sizes_in_one_backward,
        gpu_streams,
        gpu_compiled_first,
    )
}


def run_gpu(me: Rank, name: str) -> Results:
    return GPU_CASES[name](me)


@pytest.mark.skipif(not GPU, reason="needs GPUs: LOGITLESS_TEST_RANKS=nccl")
@pytest.mark.parametrize("size", ranks.SIZES)
@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_losses_have_the_bits_of_collectives(
    groups: dict[int, ranks.Group], size: int, dtype: torch.dtype
) -> None:
    groups[size].call(gpu_calls, dtype)


@pytest.mark.skipif(not GPU, reason="needs GPUs: LOGITLESS_TEST_RANKS=nccl")
@pytest.mark.parametrize("size", ranks.SIZES)
@pytest.mark.parametrize("name", GPU_CASES)
def test_gpus(groups: dict[int, ranks.Group], size: int, name: str) -> None:
    groups[size].call(run_gpu, name)
