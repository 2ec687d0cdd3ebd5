# SPDX-License-Identifier: Apache-2.0
"""A vocabulary that is split over the GPUs of one host: loss and gradients by `group=`, compared
with one GPU that has the whole weight, and with other libraries' losses of split logits.

    LOGITLESS_LIBRARY=build/device/liblogitless.so PYTHONPATH=python python bench/devices.py \
        --ranks 2 --shapes 8192x4096x128256,8192x2048x151936

Starts one process a rank. All contenders take turns in bursts between barriers, in balanced
orders; a sample is the slowest rank's, by its own clock; medians of `--rounds`.
bf16, random data, the weight split evenly. Efficiency: the time of one GPU with the whole weight,
on all P ranks at the same time, divided by P times that of the split. "split, collectives" is the
same with LOGITLESS_PEER_MEMORY=0. `--divergence KIND` measures linear_divergence instead, of a
teacher with a head of the same shape. "exchange" is the collectives and sums of one call alone,
"exchange, peer memory" what replaces those of backward. MiB: the allocator's peak on a rank beyond
the inputs, with the gradients. `--megatron FOLDER` says where megatron-core is, `--cce FOLDER`
where cut_cross_entropy with its vocab_parallel is; without them and where a contender fails there
is one line that says so. `--host`: for a head so small that only the host's time counts, a split
call's time minus one GPU's and the collectives'. `--backend gloo` tries it on a CPU, and its
figures mean nothing."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import gpu_peers
import torch
import torch.distributed as dist
import torch.nn.functional as F
from timing import in_turns, nothing

from logitless.torch import Split, linear_cross_entropy, linear_divergence
from logitless.torch._split import exchange, peers, shards

MIB = 1 << 20


class Head:
    """A rank's shard, and the whole weight for one GPU alone."""

    def __init__(self, tokens: int, hidden: int, vocab: int, device: str) -> None:
        torch.manual_seed(0)
        rank, size = dist.get_rank(), dist.get_world_size()
        self.input = torch.randn(tokens, hidden, device=device).bfloat16().requires_grad_()
        whole = (torch.randn(vocab, hidden, device=device) / hidden**0.5).bfloat16()
        rows = vocab // size
        self.start, self.vocab = rank * rows, vocab
        self.shard = whole[rank * rows : (rank + 1) * rows].clone().requires_grad_()
        self.whole = whole.requires_grad_()
        self.target = torch.randint(0, vocab, (tokens,), device=device)
        self.collectives = dist.new_group()  # without peer memory

    def fresh(self) -> None:
        for tensor in (self.input, self.shard, self.whole):
            tensor.grad = None

    def loss(self, weight: torch.Tensor, **options: Any) -> torch.Tensor:
        return linear_cross_entropy(self.input, weight, self.target, **options)

    def one(self) -> None:
        self.loss(self.whole).backward()

    def blocks(self) -> None:
        self.loss(self.whole, group=Split(blocks=8)).backward()

    def split(self, **options: Any) -> None:
        self.loss(self.shard, group=Split(dist.group.WORLD, **options)).backward()

    def split_by_collectives(self) -> None:
        before = os.environ.get("LOGITLESS_PEER_MEMORY", "1")
        os.environ["LOGITLESS_PEER_MEMORY"] = "0"  # read at the group's first call
        self.loss(self.shard, group=Split(self.collectives)).backward()
        os.environ["LOGITLESS_PEER_MEMORY"] = before

    def loss_parallel(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Replicate, Shard
        from torch.distributed.tensor.parallel import loss_parallel

        mesh = init_device_mesh(self.input.device.type, (dist.get_world_size(),))
        x = DTensor.from_local(self.input, mesh, [Replicate()], run_check=False)
        w = DTensor.from_local(self.shard, mesh, [Shard(0)], run_check=False)
        with loss_parallel():
            F.cross_entropy((x @ w.t()).float(), self.target).backward()

    def megatron(self) -> None:
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.tensor_parallel.mappings import copy_to_tensor_model_parallel_region

        if not parallel_state.is_initialized():
            parallel_state.initialize_model_parallel(dist.get_world_size())
        x = copy_to_tensor_model_parallel_region(self.input)
        losses = tensor_parallel.vocab_parallel_cross_entropy(x @ self.shard.t(), self.target)
        losses.mean().backward()

    def cce(self, exact: bool) -> None:
        from cut_cross_entropy import VocabParallelOptions

        options = VocabParallelOptions.from_vocab(self.vocab)
        loss = gpu_peers.cce(exact)
        loss(self.input, self.shard, self.target, vocab_parallel_options=options).backward()

    def exchange(self) -> None:
        """The collectives and sums of a call, on uninitialized tensors."""
        tokens, hidden = self.input.shape
        shard = shards.Shard(
            dist.group.WORLD.group_name, dist.get_rank(), dist.get_world_size(), 0, self.vocab
        )
        x = self.input.detach()
        exchange.all_gather(x.new_empty(1, tokens, dtype=torch.float32), shard)
        exchange.all_gather(x.new_empty(1, 3, tokens, dtype=torch.float32), shard)
        part = x.new_empty(tokens, hidden, dtype=torch.float32)
        exchange.reduce_grad_input(part, shard, x.shape, x.dtype)

    def exchange_by_peers(self) -> None:
        x = self.input.detach()
        rank, size, name = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
        found = x.is_cuda and peers.exchange_of(name, rank, size, x.shape, None, x, x.dtype)
        if not found:
            raise RuntimeError("no peer memory")
        found.send()
        found.add()
        found.result()


class Pair(Head):
    """The head of a student, beside that of a teacher of the same shape."""

    def __init__(self, tokens: int, hidden: int, vocab: int, device: str, kind: str) -> None:
        super().__init__(tokens, hidden, vocab, device)
        self.kind = kind
        self.teacher_input = self.input.detach() + torch.randn_like(self.input)
        self.teacher = self.whole.detach().roll(1, 0)
        stop = self.start + self.shard.shape[0]
        self.teacher_shard = self.teacher[self.start : stop].clone()

    def loss(self, weight: torch.Tensor, **options: Any) -> torch.Tensor:
        teacher = self.teacher if weight is self.whole else self.teacher_shard
        return linear_divergence(
            self.input, weight, self.teacher_input, teacher, kind=self.kind, **options
        )


class Captured:
    """A call with its collectives, captured in a CUDA graph."""

    def __init__(self, call: Callable[[], None], fresh: Callable[[], None]) -> None:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                fresh()
                call()
        torch.cuda.current_stream().wait_stream(side)
        fresh()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            call()

    def __call__(self) -> None:
        self.graph.replay()


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def slowest(value: float, device: str) -> float:
    tensor = torch.tensor(value, device=device, dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return float(tensor)


def measure(
    call: Callable[[], None], fresh: Callable[[], None], repeats: int, device: str
) -> float:
    """Milliseconds a call, on the slowest rank."""
    fresh()
    synchronize(device)
    dist.barrier()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        fresh()
        call()
    synchronize(device)
    return slowest((time.perf_counter() - start) * 1e3 / repeats, device)


def peak(call: Callable[[], None], fresh: Callable[[], None], device: str) -> float:
    if device == "cpu":
        return float("nan")
    fresh()
    call()  # so that a graph's or kernel's own memory exists
    fresh()
    synchronize(device)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    synchronize(device)
    return slowest((torch.cuda.max_memory_allocated() - before) / MIB, device)


def usable(name: str, call: Callable[[], None], fresh: Callable[[], None], device: str) -> bool:
    """Whether the call runs on every rank."""
    failure = ""
    try:
        for _ in range(2):
            fresh()
            call()
        synchronize(device)
    except Exception as e:
        failure = f"{type(e).__name__}: {str(e).splitlines()[0][:160]}"
    if slowest(float(bool(failure)), device):
        if dist.get_rank() == 0:
            print(f"  {name} left out: {failure or 'another rank fails'}", flush=True)
        return False
    return True


def profile(call: Callable[[], None], fresh: Callable[[], None], rank: int) -> None:
    """Prints the start and duration of each kernel of one call."""
    fresh()
    dist.barrier()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        call()
        torch.cuda.synchronize()
    if rank == 0:
        events = [e for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        start = events[0].time_range.start
        for e in events:
            span = e.time_range
            print(f"    {span.start - start:9.0f} us {span.elapsed_us():8.1f} us  {e.name[:90]}")


def contenders(head: Head, args: argparse.Namespace) -> dict[str, Callable[[], None]]:
    found: dict[str, Callable[[], None]] = {
        "one GPU": head.one,
        "split": head.split,
        "split, collectives": head.split_by_collectives,
        "split, blocks=8": partial(head.split, blocks=8),
        'split, reduce_dtype="input"': partial(head.split, reduce_dtype="input"),
        "one GPU, blocks=8": head.blocks,
        "exchange": head.exchange,
        "exchange, peer memory": head.exchange_by_peers,
        "torch loss_parallel": head.loss_parallel,
    }
    if args.divergence:
        found = {name: found[name] for name in ("one GPU", "split", "split, collectives")}
    elif args.megatron:
        found["Megatron-Core, vocab-parallel"] = head.megatron
    if args.cce and not args.divergence:
        found["CCE, vocab-parallel, gradients of 16 bits filtered"] = partial(head.cce, False)
        found["CCE, vocab-parallel, exact"] = partial(head.cce, True)
    return {n: c for n, c in found.items() if not args.only or n in args.only}


def host_times(head: Head, rounds: int, device: str) -> None:
    """Prints microseconds a call for a head so small that the host is the limit."""
    calls = {"one GPU": head.one, "exchange": head.exchange, "split": head.split}
    samples = in_turns(
        calls, rounds, lambda name: 1e3 * measure(calls[name], head.fresh, 50, device)
    )
    medians = {name: statistics.median(values) for name, values in samples.items()}
    if dist.get_rank() == 0:
        beyond = medians["split"] - medians["one GPU"] - medians["exchange"]
        found = ", ".join(f"{name} {us:.0f}" for name, us in medians.items())
        print(f"host's us a call: {found}; split beyond both {beyond:.0f}", flush=True)


def join(rank: int, meeting: str, args: argparse.Namespace) -> str:
    """Makes this process a rank; returns its device."""
    device = "cpu" if args.backend == "gloo" else f"cuda:{rank}"
    if device != "cpu":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        args.backend, init_method=f"file://{meeting}", rank=rank, world_size=args.ranks
    )
    return device


def start(run: Callable[..., None], args: argparse.Namespace) -> None:
    """Runs run(rank, meeting, args) in a process for each rank."""
    with tempfile.TemporaryDirectory() as folder:
        meeting = os.path.join(folder, "meeting")
        torch.multiprocessing.spawn(run, (meeting, args), nprocs=args.ranks)


def run(rank: int, meeting: str, args: argparse.Namespace) -> None:
    device = join(rank, meeting, args)
    sys.path.extend(folder for folder in (args.megatron, args.cce) if folder)
    if args.host:
        host_times(Head(64, 64, 1024, device), args.rounds, device)
    for shape in args.shapes.split(","):
        tokens, hidden, vocab = map(int, shape.split("x"))
        sizes = tokens, hidden, vocab, device
        head = Pair(*sizes, args.divergence) if args.divergence else Head(*sizes)
        calls = {
            n: c for n, c in contenders(head, args).items() if usable(n, c, head.fresh, device)
        }
        if args.graphs:
            for name in ("one GPU", "split", "split, collectives"):
                if name in calls:
                    calls[f"{name}, CUDA graph"] = Captured(calls[name], head.fresh)

        def sample(name: str, head: Head = head, calls: Any = calls) -> float:
            fresh = nothing if name.endswith("CUDA graph") else head.fresh
            return measure(calls[name], fresh, args.repeats, device)

        samples = in_turns(calls, args.rounds, sample)
        if args.profile:
            profile(calls["split"], head.fresh, rank)
        peaks = {name: peak(call, head.fresh, device) for name, call in calls.items()}
        if rank == 0:
            report(shape, samples, peaks, args)
        head.fresh()
        del head, calls, sample
    dist.barrier()
    dist.destroy_process_group()


def report(
    shape: str, samples: dict[str, list[float]], peaks: dict[str, float], args: argparse.Namespace
) -> None:
    where = torch.cuda.get_device_name() if args.backend != "gloo" else "CPU"
    print(f"{shape} bf16 on {args.ranks} x {where}, torch {torch.__version__}")
    medians = {name: statistics.median(values) for name, values in samples.items()}
    for name, ms in medians.items():
        base = medians.get("one GPU, CUDA graph" if name.endswith("graph") else "one GPU")
        share = "" if base is None else f"{base / (args.ranks * ms):10.3f}"
        spread = f"[{min(samples[name]):.3f}, {max(samples[name]):.3f}]"
        print(f"  {name:50} {ms:9.3f} ms {spread:20} {share} {peaks[name]:9.0f} MiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--shapes", default="8192x4096x128256,8192x2048x151936,2048x4096x128256")
    parser.add_argument("--divergence", default="", metavar="KIND")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--backend", default="nccl", choices=("nccl", "gloo"))
    parser.add_argument("--megatron", default="", metavar="FOLDER")
    parser.add_argument("--cce", default="", metavar="FOLDER")
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--graphs", action="store_true")
    parser.add_argument("--only", action="append", metavar="CONTENDER")
    parser.add_argument("--profile", action="store_true", help="the split's kernels on rank 0")
    start(run, parser.parse_args())


if __name__ == "__main__":
    main()
