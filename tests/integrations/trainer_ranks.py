# SPDX-License-Identifier: Apache-2.0
"""transformers' Trainer in two processes, patched and not: what tests/integrations runs on gloo,
and this file as a program on two GPUs, which needs transformers, accelerate and this folder alone:

    LOGITLESS_LIBRARY=build/device/liblogitless.so PYTHONPATH=python:build/trainer-site \\
        python tests/integrations/trainer_ranks.py

It prints a line a way of training: how far losses and parameters lie from the unpatched run's. Then
a step's median time and the larger peak of both GPUs, for a Llama as wide as Llama-3.2-1B with 8
layers, patched and not."""

from __future__ import annotations

import itertools
import os
import pathlib
import socket
import statistics
import tempfile
import time
import traceback
from typing import Any

import torch
import transformers

import support
from logitless.integrations import patch_transformers

WORLD = 2
FSDP = {"fsdp_version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
# Cases for the CPU and GPUs: DDP unless another is named. The Trainer shards on GPUs only.
ON_ANY: dict[str, dict[str, Any]] = {
    "f32": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "checkpointing": {"gradient_checkpointing": True},
    "bf16": {"bf16": True},
}
ON_GPUS: dict[str, dict[str, Any]] = ON_ANY | {
    "FSDP 2": {"fsdp": "full_shard auto_wrap", "fsdp_config": FSDP},
    "FSDP 2, bf16": {"fsdp": "full_shard auto_wrap", "fsdp_config": FSDP, "bf16": True},
}
LARGE = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 8,
         "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
         "head_dim": 64, "max_position_embeddings": 2048}  # fmt: skip


def arguments(cuda: bool, **settings: Any) -> transformers.TrainingArguments:
    where: dict[str, Any] = {} if cuda else {"use_cpu": True, "ddp_backend": "gloo"}
    return transformers.TrainingArguments(
        seed=7, logging_steps=1, save_strategy="no", report_to="none", disable_tqdm=True,
        **where, **settings,
    )  # fmt: skip


def train(patched: bool, cuda: bool, calls: support.Calls, settings: dict[str, Any]) -> Any:
    """Losses, parameters (of FSDP this rank's part) and our calls of 20 steps of a tiny Llama."""
    model = support.llama()
    if patched:
        patch_transformers(model)
    accumulated = settings.get("gradient_accumulation_steps", 1)
    rows = 4 * WORLD * accumulated * support.STEPS
    with tempfile.TemporaryDirectory() as folder:
        made = arguments(
            cuda, output_dir=folder, max_steps=support.STEPS, per_device_train_batch_size=4,
            learning_rate=3e-3, **settings,
        )  # fmt: skip
        data: Any = [support.example(i) for i in range(rows)]
        trainer = transformers.Trainer(model=model, args=made, train_dataset=data)
        trainer.remove_callback(transformers.PrinterCallback)
        calls.taken()
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    parts = {
        name: (p.to_local() if hasattr(p, "to_local") else p).detach().float().cpu()
        for name, p in trainer.model.named_parameters()
    }
    return {"losses": losses, "parameters": parts, "calls": calls.taken()}


def measure(patched: bool) -> dict[str, float]:
    """A step's median time in ms and this GPU's peak in GiB: DDP in bf16, 4 x 2048 tokens each."""
    torch.manual_seed(7)
    with torch.device("cuda"):
        config = transformers.LlamaConfig(**LARGE, use_cache=False, pad_token_id=None)
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if patched:
        patch_transformers(model)
    marks: list[float] = []

    class Marks(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            torch.cuda.synchronize()
            marks.append(time.perf_counter())

    ids = torch.randint(0, config.vocab_size, (256, 2048), generator=torch.Generator())
    with tempfile.TemporaryDirectory() as folder:
        made = arguments(
            True, output_dir=folder, max_steps=16, per_device_train_batch_size=4, bf16=True,
            optim="adamw_torch_fused", gradient_checkpointing=True,
        )  # fmt: skip
        data: Any = [{"input_ids": row, "labels": row} for row in ids]
        trainer = transformers.Trainer(
            model=model, args=made, train_dataset=data, callbacks=[Marks()]
        )
        trainer.remove_callback(transformers.PrinterCallback)
        torch.cuda.reset_peak_memory_stats()
        trainer.train()
    steps = [(b - a) * 1e3 for a, b in itertools.pairwise(marks[4:])]
    return {"ms": statistics.median(steps), "gib": torch.cuda.max_memory_allocated() / (1 << 30)}


def work(rank: int, folder: str, port: int, cuda: bool) -> None:
    """Every way, patched and not; what each gave, or how it failed, is in the file of the rank."""
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD),
        "LOCAL_WORLD_SIZE": str(WORLD), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port),
    }  # fmt: skip
    calls = support.Calls()
    results: dict[str, Any] = {}
    for name, settings in (ON_GPUS if cuda else ON_ANY).items():
        for patched in (False, True):
            try:
                results[name, patched] = train(patched, cuda, calls, settings)
            except Exception:  # the other process may wait for this one
                results[name, patched] = {"failed": traceback.format_exc()}
                torch.save(results, pathlib.Path(folder) / f"rank{rank}.pt")
                return
    if cuda:
        for patched in (False, True):
            results["large", patched] = measure(patched)
    torch.save(results, pathlib.Path(folder) / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()


def run(folder: str, cuda: bool) -> list[dict[Any, Any]]:
    """What each process gave."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(work, (folder, port, cuda), nprocs=WORLD)
    return [torch.load(pathlib.Path(folder) / f"rank{rank}.pt") for rank in range(WORLD)]


def check(rank: dict[Any, Any], name: str) -> None:
    """Asserts that a process has learnt the same with the patch as without."""
    own, ours = (rank.get((name, patched), {}) for patched in (False, True))
    assert "failed" not in own | ours, (own | ours)["failed"]
    assert own["calls"] == 0
    settings = ON_GPUS[name]
    assert ours["calls"] == support.STEPS * settings.get("gradient_accumulation_steps", 1)
    bf16 = "bf16" in settings
    support.same_run(ours["losses"], own["losses"], bf16)
    support.same_parameters(
        ours["parameters"].items(), own["parameters"].items(), 2e-2 if bf16 else 2e-5
    )


def main() -> None:
    if torch.cuda.device_count() < WORLD:
        print(f"trainer_ranks: skipped, {torch.cuda.device_count()} GPUs of {WORLD}")
        return
    with tempfile.TemporaryDirectory() as folder:
        ranks = run(folder, True)
    for name in ON_GPUS:
        for rank in ranks:
            check(rank, name)
        own, ours = (ranks[0][name, patched] for patched in (False, True))
        loss = max(abs(a - b) for a, b in zip(ours["losses"], own["losses"]))
        off = max(
            float((p - own["parameters"][n]).abs().max()) for n, p in ours["parameters"].items()
        )
        print(f"{name}: losses {ours['losses'][0]:.4f} to {ours['losses'][-1]:.4f}, off by "
              f"{loss:.1e}, parameters by {off:.1e}, {ours['calls']} calls")  # fmt: skip
    for patched in (False, True):
        ms, gib = ranks[0]["large", patched]["ms"], max(r["large", patched]["gib"] for r in ranks)
        print(f"large, {'patched' if patched else 'unpatched'}: {ms:.1f} ms, {gib:.2f} GiB")


if __name__ == "__main__":
    main()
