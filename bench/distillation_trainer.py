# SPDX-License-Identifier: Apache-2.0
"""Steps of TRL's DistillationTrainer on the CPU, patched and unpatched: seconds of a step
without the student's sampling, which is the same, and the growth of the resident set.

    LOGITLESS_LIBRARY=build/release/liblogitless.so PYTHONPATH=python \\
        python bench/distillation_trainer.py --shape 1024x256x49152x512

A shape is the tokens of a step x the student's width x the vocabulary x the teacher's width. Both
are Llamas of two layers with random weights, in f32; completions are sampled from the student, and
a quarter of their tokens does not count. Every way has a process of its own, one after the other,
in `--rounds` rounds. Seconds are the median of all steps but each process's first. MiB is the
median over the rounds of the growth of the resident set during training, at its peak; it includes
gradients, the optimizer's state and the first step. `--memory` is that of patch_trl.
Needs transformers, trl, datasets and tokenizers besides PyTorch."""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import rss


def model(vocab: int, width: int) -> Any:
    import transformers

    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=vocab, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=4, pad_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip


def tokenizer(vocab: int) -> Any:
    import tokenizers
    import transformers

    words = {"<pad>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, vocab)}}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>"
    )


def trainer_of(given: argparse.Namespace, folder: str) -> Any:
    import datasets
    import torch
    import trl

    tokens, width, vocab, wide = (int(n) for n in given.shape.split("x"))
    torch.manual_seed(0)
    student, teacher = model(vocab, width), model(vocab, wide)
    rows = [{"prompt": " ".join(f"w{2 + (i * 7 + k) % 997}" for k in range(8))} for i in range(64)]
    config = trl.DistillationConfig(
        output_dir=folder, use_cpu=True, bf16=False, seed=7, max_steps=1 + given.steps,
        per_device_train_batch_size=given.batch, max_completion_length=tokens // given.batch,
        learning_rate=1e-4, logging_steps=1, save_strategy="no", report_to="none", beta=given.beta,
        gradient_checkpointing=False, disable_tqdm=True,
    )  # fmt: skip
    return trl.DistillationTrainer(
        model=student, teacher_model=teacher, args=config, processing_class=tokenizer(vocab),
        train_dataset=datasets.Dataset.from_list(rows),
    )  # fmt: skip


class Clock:
    """Seconds of a trainer's steps without their sampling."""

    def __init__(self, trainer: Any) -> None:
        self.steps: list[float] = []
        step, prepare = trainer.training_step, trainer._prepare_inputs
        sampling = 0.0

        def prepared(*args: Any) -> Any:
            nonlocal sampling
            start = time.perf_counter()
            made = prepare(*args)
            made["completion_mask"][:, ::4] = 0  # like tool output, which does not count
            sampling = time.perf_counter() - start
            return made

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            made = step(*args, **kwargs)
            self.steps.append(time.perf_counter() - start - sampling)
            return made

        trainer.training_step, trainer._prepare_inputs = timed, prepared


def run(given: argparse.Namespace) -> None:
    from logitless.integrations import patch_trl

    context: Any = contextlib.nullcontext()
    if given.way == "patched":
        context = patch_trl(memory=given.memory)
    with tempfile.TemporaryDirectory() as folder, context as patch:
        trainer = trainer_of(given, folder)
        clock = Clock(trainer)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = rss.status_bytes("VmRSS")
        trainer.train()
        losses = [e["loss"] for e in trainer.state.log_history if "loss" in e]
        grown = rss.status_bytes("VmHWM") - before
    calls = patch.calls if patch is not None else 0
    print(json.dumps({"steps": clock.steps[1:], "grown": grown, "losses": losses, "calls": calls}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="1024x256x49152x512")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--beta", type=float, default=0.5)
    parser.add_argument("--steps", type=int, default=3, help="that are timed")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--memory", help="of patch_trl")
    parser.add_argument("--way", choices=("patched", "unpatched"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.way:
        run(given)
        return
    found: dict[str, list[Any]] = {"unpatched": [], "patched": []}
    for _ in range(given.rounds):
        for way, runs in found.items():
            command = [sys.executable, __file__, *sys.argv[1:], "--way", way]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            runs.append(json.loads(done.stdout.splitlines()[-1]))
    for way, runs in found.items():
        step = statistics.median(s for run in runs for s in run["steps"])
        grown = statistics.median(run["grown"] for run in runs) / (1 << 20)
        print(f"{way:10s} {step:6.2f} s {grown:6.0f} MiB {runs[0]['calls']:3d} calls here")
    losses = zip(*(runs[0]["losses"] for runs in found.values()))
    off = max(abs(ours / theirs - 1) for theirs, ours in losses)
    print(f"losses of all steps agree within {off:.1e} of themselves")


if __name__ == "__main__":
    main()
