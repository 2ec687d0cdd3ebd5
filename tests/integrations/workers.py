# SPDX-License-Identifier: Apache-2.0
"""What two processes do with DDP and FSDP2, accelerate's too, on gloo, and one process alone: 20
steps of a tiny Llama with its head inside."""

from __future__ import annotations

import dataclasses
import datetime
import os
import pathlib
import traceback
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import support
from logitless.integrations import patch_transformers
from logitless.torch import LinearCrossEntropyHead, linear_cross_entropy
from test_peft import with_adapter

WORLD = 2


@dataclasses.dataclass(frozen=True)
class Case:
    """How a model is trained: by DDP, FSDP2, accelerate's DDP or FSDP2, or none; its loss made by
    the model's own head ("plain"), by ours in its place ("head") or by the patch ("patched")."""

    loss: str
    wrapped: str = ""
    tied: bool = False
    head_apart: bool = True  # FSDP wraps the head alone, or with the root
    bf16: bool = False
    accumulated: int = 1
    adapter: str = ""  # an adapter of test_peft

    def __str__(self) -> str:
        flags = {
            "tied": self.tied,
            "in the root": not self.head_apart,
            "bf16": self.bf16,
            "accumulated": self.accumulated > 1,
        }
        words = filter(None, (self.wrapped, self.loss, self.adapter))
        return " ".join([*words, *(name for name, on in flags.items() if on)])


CASES = [
    Case("head", "ddp"),
    Case("head", "ddp", tied=True),
    Case("head", "ddp", accumulated=2),
    Case("patched", "ddp"),
    Case("head", "fsdp"),
    Case("head", "fsdp", head_apart=False, tied=True),
    Case("head", "fsdp", bf16=True),
    Case("head", "fsdp", accumulated=2),
    Case("patched", "fsdp"),
    Case("patched", "fsdp", head_apart=False, tied=True),
    Case("patched", "accelerate", bf16=True),
    Case("patched", "accelerate fsdp"),
    Case("patched", "accelerate fsdp", tied=True),
    Case("patched", "accelerate fsdp", bf16=True),
    Case("head", "accelerate fsdp"),
    Case("patched", "ddp", adapter="head"),
    Case("patched", "ddp", adapter="saved head"),
    Case("patched", "fsdp", adapter="head"),
    Case("patched", "fsdp", adapter="saved head"),
]


class Module(torch.nn.Module):
    """A causal LM that gives the sum of its tokens' losses over `normalizer`."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.loss = case.loss
        if case.adapter:
            made = with_adapter(case.adapter, True if case.loss == "patched" else None)
            self.model = made.get_base_model()
            return
        self.model = support.llama(tie_word_embeddings=case.tied)
        if case.loss == "head":
            self.model.lm_head = LinearCrossEntropyHead.from_linear(self.model.lm_head, shift=True)
        if case.loss == "patched":
            patch_transformers(self.model)

    def forward(self, input_ids: Tensor, labels: Tensor, normalizer: Tensor) -> Tensor:
        if self.loss != "head":
            return self.model(
                input_ids=input_ids, labels=labels, num_items_in_batch=normalizer
            ).loss
        hidden = self.model.model(input_ids).last_hidden_state
        return self.model.lm_head(hidden, labels, normalizer=normalizer)


def adamw(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=3e-3, foreach=False)


def with_accelerate(case: Case, module: Module) -> tuple[Any, Any]:
    """The model and its optimizer, prepared by accelerate. accelerate enables FSDP only on GPUs and
    the like, so its state is set here by hand; all else is accelerate's own code."""
    accelerate.state.AcceleratorState._reset_state(True)
    precision = "bf16" if case.bf16 else "no"
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision)
    if case.wrapped == "accelerate fsdp":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        )  # fmt: skip
        if case.bf16:
            plugin.set_mixed_precision(precision)
        accelerator.state.distributed_type = accelerate.DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    prepared: tuple[Any, Any] = accelerator.prepare(module, adamw(module))
    sharded = all(isinstance(p, DTensor) for p in module.parameters())
    assert sharded == (case.wrapped == "accelerate fsdp")
    return prepared


def wrap(case: Case, module: Module) -> tuple[Any, Any]:
    """The model and its optimizer."""
    model: Any = module
    if case.wrapped.startswith("accelerate"):
        return with_accelerate(case, module)
    if case.wrapped == "ddp":
        model = DistributedDataParallel(module)
    if case.wrapped == "fsdp":
        kinds = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if case.bf16 else {}
        policy = MixedPrecisionPolicy(**kinds)
        within = [*module.model.model.layers, *[module.model.lm_head] * case.head_apart]
        for part in (*within, module):
            fully_shard(part, mp_policy=policy)
    return model, adamw(model)


def full(tensor: Any) -> Tensor:
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().clone()


def train(case: Case, calls: support.Calls) -> dict[str, Any]:
    """Losses of the whole batch, the first gradients, the parameters in the end, our calls."""
    rank, world = (dist.get_rank(), WORLD) if case.wrapped else (0, 1)
    module = Module(case)
    model, optimizer = wrap(case, module)
    losses, gradients = [], {}
    calls.taken()
    for step in range(support.STEPS):
        batches = [support.batch(step * case.accumulated + i) for i in range(case.accumulated)]
        tokens = sum((batch["labels"][:, 1:] != -100).sum() for batch in batches)
        total = torch.zeros(())
        for batch in batches:  # every second sequence, and unequal numbers of tokens
            mine = {name: value[rank::world] for name, value in batch.items()}
            loss = model(**mine, normalizer=tokens / world)
            loss.backward()
            total += loss.detach() / world
        if world > 1:
            dist.all_reduce(total)
        if not gradients:
            named = module.named_parameters()
            gradients = {name: full(p.grad) for name, p in named if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
    count = calls.taken()
    parameters = {name: full(p) for name, p in module.named_parameters()}
    return {
        "losses": losses, "gradients": gradients, "parameters": parameters, "calls": count
    }  # fmt: skip


def sharded_weight(calls: support.Calls) -> dict[str, Any]:
    """What the function says to a weight that FSDP has not gathered."""
    case = Case("plain", "fsdp")
    module = Module(case)
    wrap(case, module)
    try:
        linear_cross_entropy(
            torch.zeros(3, support.HIDDEN), module.model.lm_head.weight, torch.zeros(3).long()
        )
    except NotImplementedError as error:
        return {"error": str(error)}
    return {"error": None}


MEASURED = [Case("patched", "ddp"), Case("patched", "fsdp"), Case("patched", "accelerate fsdp")]
METRICS = ("accuracy", "entropy", "logprob", "rank")


class Whole(torch.nn.Module):
    """A patched model that gives its metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.model = support.llama()
        patch_transformers(self.model, metrics=METRICS)

    def forward(self, **batch: Tensor) -> Any:
        return self.model(**batch)


def metrics_of(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """The metrics by their definitions, in f64."""
    z, target = logits[:, :-1].double(), labels[:, 1:]
    counts = target != -100
    z, target = z[counts], target[counts]
    logp = z.log_softmax(-1)
    of_target = z.gather(-1, target[:, None])
    made = (
        z.argmax(-1) == target, -(logp.exp() * logp).sum(-1), logp.gather(-1, target[:, None]),
        (z > of_target).sum(-1),
    )  # fmt: skip
    return {name: value.double().mean().item() for name, value in zip(METRICS, made)}


def measured(case: Case) -> dict[str, Any]:
    """The metrics of four steps, and those of the logits of an unpatched model with the same
    parameters."""
    model, optimizer = wrap(case, Whole())
    own, found, expected = support.llama(), [], []
    for step in range(4):
        mine = {
            name: value[dist.get_rank() :: WORLD] for name, value in support.batch(step).items()
        }
        parts = {name.partition("model.")[2]: full(p) for name, p in model.named_parameters()}
        own.load_state_dict(parts)
        output = model(**mine)
        with torch.no_grad():
            expected.append(metrics_of(own(mine["input_ids"]).logits, mine["labels"]))
        found.append({name: output.metrics[name].item() for name in METRICS})
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"found": found, "expected": expected}


def work(rank: int, folder: str) -> None:
    """Every case; what each gave, or how it failed, is in the file of the rank."""
    torch.set_num_threads(1)
    os.environ |= {  # tells accelerate that the processes exist already
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD),
        "LOCAL_WORLD_SIZE": str(WORLD), "MASTER_ADDR": "localhost", "MASTER_PORT": "0",
    }  # fmt: skip
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=WORLD,
        timeout=datetime.timedelta(seconds=120),
    )  # fmt: skip
    calls = support.Calls()
    results: dict[str, Any] = {}
    for name, run in (
        *((str(case), lambda case=case: train(case, calls)) for case in CASES),
        *((f"{case} metrics", lambda case=case: measured(case)) for case in MEASURED),
        ("sharded weight", lambda: sharded_weight(calls)),
    ):
        try:
            results[name] = run()
        except Exception:  # reported at once: the other process may wait for this one
            results[name] = {"failed": traceback.format_exc()}
            break
    torch.save(results, pathlib.Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()
