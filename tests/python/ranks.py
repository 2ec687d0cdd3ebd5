# SPDX-License-Identifier: Apache-2.0
"""Processes that are the ranks of one group: a test calls a function on all of them. The processes
of each size are reused, and start anew after one has failed, died or hung. With
LOGITLESS_TEST_RANKS=nccl each has a GPU, on which tensors are then made by default."""

from __future__ import annotations

import datetime
import hashlib
import multiprocessing
import os
import pathlib
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

BACKEND = os.environ.get("LOGITLESS_TEST_RANKS", "gloo")
DEVICE = "cpu" if BACKEND == "gloo" else "cuda"
SIZES = [s for s in (2, 3, 4) if BACKEND == "gloo" or s <= torch.cuda.device_count()]
COLLECTIVE_S = 75  # how long a rank waits for another
CASE_S = 150
START_S = 120

Case = Callable[..., Mapping[str, Tensor]]


class Rank(NamedTuple):
    """The first argument of a case."""

    rank: int
    size: int


def generator(seed: int) -> torch.Generator:
    """A random generator of the device on which tensors are made by default."""
    return torch.Generator(DEVICE).manual_seed(seed)


def join(rank: int, size: int, meeting: str, seconds: float) -> None:
    """Makes this process a rank, with a GPU of its own under NCCL."""
    torch.set_num_threads(1)
    if BACKEND == "nccl":
        torch.cuda.set_device(rank)
        torch.set_default_device(f"cuda:{rank}")
    dist.init_process_group(
        BACKEND, init_method=f"file://{meeting}", rank=rank, world_size=size,
        timeout=datetime.timedelta(seconds=seconds),
    )  # fmt: skip


def comparing() -> Any:
    """A backend of torch.compile, with inductor's decompositions. If the ranks' graphs exchange in
    different ways, it raises on every rank before they run, where they would hang."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    def compiler(graph: Any, _: Any) -> Any:
        calls = [str(node.target) for node in graph.graph.nodes]
        # On GPUs a backward exchanges inside of the library's ops.
        own = [call for call in calls if "_c10d_functional" in call or "_over_ranks" in call]

        def run(*args: Any) -> Any:
            every: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(every, own)
            assert own and every.count(own) == len(every), every
            return graph.forward(*args)

        return make_boxed_func(run)

    return aot_autograd(  # type: ignore[no-untyped-call]
        fw_compiler=compiler, bw_compiler=compiler, decompositions=select_decomp_table(),
        partition_fn=min_cut_rematerialization_partition,
    )  # fmt: skip


class Reply(NamedTuple):
    bits: dict[str, tuple[Any, ...]]  # each result's dtype, shape, sum and hash
    error: str = ""


def bits_of(value: Tensor) -> tuple[Any, ...]:
    value = value.detach().cpu().contiguous()
    memory = value.reshape(-1).view(torch.uint8).numpy().tobytes() if value.numel() else b""
    digest = hashlib.sha256(memory).hexdigest()
    shown = f"{value.double().nan_to_num().sum().item():.9g}"
    return str(value.dtype), tuple(value.shape), shown, digest


def serve(rank: int, size: int, meeting: str, pipe: Any) -> None:
    """A rank's main function: runs each case that arrives on `pipe` and sends its Reply."""
    join(rank, size, meeting, COLLECTIVE_S)
    pipe.send("ready")
    while True:
        call = pipe.recv()
        if call is None:
            break
        case, args = call
        torch.manual_seed(0)
        try:
            results = case(Rank(rank, size), *args)
            pipe.send(Reply({name: bits_of(value) for name, value in results.items()}))
        except BaseException:
            pipe.send(Reply({}, traceback.format_exc()))
    dist.destroy_process_group()


class Group:
    """`size` ranks, which start with the first case."""

    def __init__(self, size: int, folder: pathlib.Path) -> None:
        self.size = size
        self.folder = folder
        self.started = 0
        self.processes: list[Any] = []
        self.pipes: list[Any] = []

    def start(self) -> None:
        self.started += 1
        meeting = str(self.folder / f"meeting-{self.size}-{self.started}")
        context = multiprocessing.get_context("spawn")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve, args=(rank, self.size, meeting, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self.processes.append(process)
            self.pipes.append(ours)
        for answer in self._answers(START_S):
            assert answer == "ready", answer

    def _answers(self, seconds: float) -> list[Any]:
        """The answer of each rank; None if it hangs or has died."""
        end = time.monotonic() + seconds
        answers: list[Any] = []
        for pipe in self.pipes:
            answer = None
            try:
                if pipe.poll(max(0.0, end - time.monotonic())):
                    answer = pipe.recv()
            except (EOFError, OSError):
                pass
            answers.append(answer)
        return answers

    def call(self, case: Case, *args: Any) -> None:
        """Runs the case on all ranks. Fails if one rank fails, or if two ranks have different bits
        of a result of one name."""
        __tracebackhide__ = True
        if not self.processes:
            self.start()
        for pipe in self.pipes:
            pipe.send((case, args))
        replies = self._answers(CASE_S)
        errors = [
            f"rank {rank} of {self.size}: {reply.error if reply else 'hangs or died'}"
            for rank, reply in enumerate(replies)
            if reply is None or reply.error
        ]
        if errors:  # ranks that waited for the failed one are out of step
            self.stop(kill=True)
            raise AssertionError("\n".join(errors))
        first: dict[str, tuple[int, Any]] = {}
        for rank, reply in enumerate(replies):
            for name, bits in reply.bits.items():
                other, same = first.setdefault(name, (rank, bits))
                assert bits == same, f"{name}: {same} on rank {other}, {bits} on rank {rank}"

    def stop(self, kill: bool = False) -> None:
        for process, pipe in zip(self.processes, self.pipes):
            if kill:
                process.kill()
            elif process.is_alive():
                pipe.send(None)
        for process, pipe in zip(self.processes, self.pipes):
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
            pipe.close()
        self.processes, self.pipes = [], []
