# SPDX-License-Identifier: Apache-2.0
"""A head whose weight is sharded over the data-parallel ranks of one host: `parallelize(tokens=
"sharded")`, which moves the tokens, compared with FSDP2, which gathers the weight, around our loss
and other libraries'.

    LOGITLESS_LIBRARY=build/device/liblogitless.so PYTHONPATH=python python bench/data_parallel.py \
        --ranks 4 --heads 2048x4096x128256,8192x4096x128256

One process a rank, each with its own tokens (the first number of a head). The weight is f32, the
products bf16, gradients are reduced in f32. A sample is a burst of forwards and backwards between
barriers, the slowest rank's; contenders take turns in balanced orders; medians of `--rounds`. MiB:
the allocator's peak on a rank beyond the input, the shard of the weight and that of its gradient;
peer memory (docs/devices.md) is not the allocator's, and is told apart. There is no trunk: FSDP2
can gather a head's weight while a trunk computes. "FSDP2's collectives" is the gather and the
reduction of the gradient alone. `--backend gloo` tries it on a CPU; its figures mean nothing."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import gpu_peers
import torch
import torch.distributed as dist
import torch.nn.functional as F
from devices import MIB, join, measure, peak, start, synchronize, usable
from timing import in_turns
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from logitless.torch import LinearCrossEntropyHead
from logitless.torch._split import peers

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class OtherHead(torch.nn.Linear):
    """A head that returns another library's loss, inside of the forward that FSDP2 hooks."""

    def __init__(self, hidden: int, vocab: int, device: str, loss: Any) -> None:
        super().__init__(hidden, vocab, bias=False, device=device)
        self.loss = loss

    def forward(self, input: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        made: Tensor = self.loss(input, self.weight, target)
        return made


class Model:
    """A sharded head, and a rank's tokens."""

    def __init__(self, head: Any, input: Tensor, target: Tensor) -> None:
        self.head, self.input, self.target = head, input, target

    def fresh(self) -> None:
        self.input.grad = None
        self.head.zero_grad()

    def step(self) -> None:
        self.head(self.input, self.target).backward()


def contenders(
    input: Tensor, target: Tensor, vocab: int, device: str
) -> dict[str, Callable[[], Model]]:
    hidden = input.shape[1]
    mesh = init_device_mesh(torch.device(device).type, (dist.get_world_size(),))

    def ours() -> Any:
        torch.manual_seed(0)
        return LinearCrossEntropyHead(hidden, vocab, bias=False, device=device)

    def tokens_move() -> Model:
        head = ours().parallelize(mesh, tokens="sharded", param_dtype=torch.bfloat16)
        return Model(head, input, target)

    def with_fsdp(head: Any) -> Model:
        return Model(fully_shard(head, mesh=mesh, mp_policy=POLICY), input, target)

    def other(loss: Any) -> Callable[[], Model]:
        return lambda: with_fsdp(OtherHead(hidden, vocab, device, loss()))

    return {
        "tokens move": tokens_move,
        "FSDP2, our loss": lambda: with_fsdp(ours()),
        "FSDP2, F.cross_entropy of logits": other(gpu_peers.eager),
        "FSDP2, CCE, gradients filtered": other(lambda: gpu_peers.cce(False)),
        "FSDP2, Liger, f32 sums": other(lambda: gpu_peers._liger_triton(True)),
        "FSDP2's collectives": lambda: with_fsdp(OtherHead(hidden, vocab, device, _of_one_column)),
    }


def _of_one_column(input: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Hardly any work, with a gradient of the whole weight's size."""
    return F.linear(input[:8], weight).float().mean()


def run(rank: int, meeting: str, args: argparse.Namespace) -> None:
    device = join(rank, meeting, args)
    for shape in args.heads.split(","):
        tokens, hidden, vocab = map(int, shape.split("x"))
        torch.manual_seed(rank)
        input = torch.randn(tokens, hidden, device=device).bfloat16().requires_grad_()
        target = torch.randint(0, vocab, (tokens,), device=device)
        peaks: dict[str, float] = {}
        models = {}
        for name, make in contenders(input, target, vocab, device).items():
            try:
                models[name] = make()
            except ImportError as e:  # on every rank
                if rank == 0:
                    print(f"  {name} left out: {e}", flush=True)
                continue
            if not usable(name, models[name].step, models[name].fresh, device):
                del models[name]

        def sample(name: str, models: Any = models) -> float:
            return measure(models[name].step, models[name].fresh, args.repeats, device)

        samples = in_turns(models, args.rounds, sample)
        for name, model in models.items():
            model.fresh()
            shard = next(iter(model.head.parameters())).to_local().numel() * 4 / MIB
            peaks[name] = peak(model.step, model.fresh, device) - shard
        if rank == 0:
            report(shape, samples, peaks, args)
        del models, sample
        synchronize(device)
    dist.barrier()
    dist.destroy_process_group()


def report(
    shape: str, samples: dict[str, list[float]], peaks: dict[str, float], args: argparse.Namespace
) -> None:
    where = torch.cuda.get_device_name() if args.backend != "gloo" else "CPU"
    print(f"{shape} (a rank's tokens) on {args.ranks} x {where}, torch {torch.__version__}")
    held = [
        sum(of.memory.room) / MIB
        for devices in peers._memories.values()
        for of in devices.values()
        if of.memory is not None
    ]
    ours = statistics.median(samples["tokens move"]) if "tokens move" in samples else float("nan")
    for name, values in samples.items():
        ms = statistics.median(values)
        spread = f"[{min(values):.2f}, {max(values):.2f}]"
        more = f" + {max(held):.0f} MiB of peer memory" if name == "tokens move" and held else ""
        print(
            f"  {name:36} {ms:8.2f} ms {spread:18} {ours / ms:6.3f} {peaks[name]:7.0f} MiB{more}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--heads", default="2048x4096x128256,8192x4096x128256")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--backend", default="nccl", choices=("nccl", "gloo"))
    start(run, parser.parse_args())


if __name__ == "__main__":
    main()
