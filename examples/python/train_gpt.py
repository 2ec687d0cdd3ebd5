# SPDX-License-Identifier: Apache-2.0
"""Trains a small GPT on real text twice from the same seed, with torch's cross_entropy of the
logits and with logitless, and draws both loss curves with peak memory and time beside them.

    python examples/python/train_gpt.py                  # CPU or GPU, a few minutes
    python examples/python/train_gpt.py --text *.txt --vocab 32000 --steps 1000

The text is Python's own language reference (pydoc's topics) unless files are given; the tokenizer
is trained on it on the spot. Needs torch and tokenizers; matplotlib for the picture.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import pathlib
import resource
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from logitless.torch import LinearCrossEntropyHead


@dataclasses.dataclass
class Settings:
    loss: str = "logitless"  # or "plain"
    device: str = "cuda" if torch.cuda.is_available() else "cpu"
    dtype: str = "float32"  # or "bfloat16", under autocast, or "float64", plain only
    threads: int = 0  # 0 leaves it to torch
    seed: int = 0
    steps: int = 300
    batch: int = 16
    context: int = 64
    vocab: int = 8192
    hidden: int = 128
    layers: int = 2
    rate: float = 2e-3
    text: tuple[str, ...] = ()
    quiet: bool = False


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.mlp = nn.Sequential(
            nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """All that differs is in `forward`: the head with targets, or logits and a loss."""

    def __init__(self, s: Settings) -> None:
        super().__init__()
        self.tokens = nn.Embedding(s.vocab, s.hidden)
        self.positions = nn.Embedding(s.context, s.hidden)
        self.blocks = nn.Sequential(*(Block(s.hidden, s.hidden // 32) for _ in range(s.layers)))
        self.norm = nn.LayerNorm(s.hidden)
        self.head = LinearCrossEntropyHead(s.hidden, s.vocab)
        self.plain = s.loss == "plain"

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        place = torch.arange(ids.shape[1], device=ids.device)
        x = self.norm(self.blocks(self.tokens(ids) + self.positions(place)))  # [B, T, D]
        if self.plain:
            logits = self.head(x)  # [B, T, V]
            if logits.dtype is torch.bfloat16:
                logits = logits.float()
            return functional.cross_entropy(logits.flatten(0, 1), target.flatten())
        loss: Tensor = self.head(x, target)
        return loss


def read_text(files: tuple[str, ...]) -> str:
    if files:
        return "\n".join(pathlib.Path(f).read_text(errors="replace") for f in files)
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def encode(text: str, vocab: int) -> Tensor:
    """Token ids of the text, of a byte-pair tokenizer trained on it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab, show_progress=False)
    tokenizer.train_from_iterator([text], trainer)
    return torch.tensor(tokenizer.encode(text).ids)


def train(s: Settings, ids: Tensor | None = None) -> dict[str, Any]:
    """Loss of every step, loss on text held out, seconds, and peak memory in MiB."""
    if s.threads:
        torch.set_num_threads(s.threads)
    if ids is None:
        ids = encode(read_text(s.text), s.vocab)
    cut = len(ids) * 9 // 10
    kept, held = ids[:cut], ids[cut:]
    torch.manual_seed(s.seed)
    model = GPT(s).to(s.device)
    if s.dtype == "float64":
        model.double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=s.rate)
    order = torch.Generator().manual_seed(s.seed)

    def loss_of(source: Tensor) -> Tensor:
        at = torch.randint(len(source) - s.context - 1, (s.batch,), generator=order)
        rows = torch.stack([source[i : i + s.context + 1] for i in at]).to(s.device)
        enabled = s.dtype == "bfloat16"
        with torch.autocast(s.device, dtype=torch.bfloat16, enabled=enabled):
            loss: Tensor = model(rows[:, :-1], rows[:, 1:])
        return loss

    losses = []
    start = time.perf_counter()
    for step in range(s.steps):
        loss = loss_of(kept)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if not s.quiet and (step + 1) % max(1, s.steps // 10) == 0:
            print(
                f"  {s.loss:9}  step {step + 1:5} of {s.steps}  loss {losses[-1]:.4f}", flush=True
            )
    seconds = time.perf_counter() - start
    order.manual_seed(1)
    with torch.no_grad():
        held_out = sum(loss_of(held).item() for _ in range(16)) / 16
    if s.device == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**20
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    return {"losses": losses, "held_out": held_out, "seconds": seconds, "peak_mib": peak}


def draw(results: dict[str, dict[str, Any]], s: Settings, file: str) -> bool:
    try:
        from matplotlib import pyplot
    except ImportError:
        return False
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    for (name, r), style in zip(results.items(), ("-", "--")):
        label = f"{name}: {r['seconds']:.1f} s, peak {r['peak_mib']:.0f} MiB"
        axes.plot(r["losses"], style, label=label, linewidth=1.5)
    axes.set(
        xlabel="step", ylabel="loss", title=f"GPT, vocabulary {s.vocab}, {s.device}, {s.dtype}"
    )
    axes.legend()
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    for field in dataclasses.fields(Settings):
        if field.name in ("loss", "text", "quiet"):
            continue
        kind = type(field.default)
        parser.add_argument(f"--{field.name}", type=kind, default=field.default)
    parser.add_argument("--text", nargs="*", default=(), help="files to train on")
    parser.add_argument("--output", default="train_gpt.png", help="the picture")
    arguments = vars(parser.parse_args())
    output = arguments.pop("output")
    s = Settings(**{**arguments, "text": tuple(arguments["text"])})
    results = {}
    # Each runs in a separate process, so that each has its own peak memory.
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for name in ("plain", "logitless"):
            results[name] = pool.apply(train, (dataclasses.replace(s, loss=name),))
    for name, r in results.items():
        print(
            f"{name:9}  last loss {r['losses'][-1]:.4f}  held out {r['held_out']:.4f}  "
            f"{r['seconds']:.1f} s  peak {r['peak_mib']:.0f} MiB"
        )
    worst = max(abs(a - b) for a, b in zip(*(r["losses"] for r in results.values())))
    print(f"largest difference between the curves: {worst:.2e}")
    pathlib.Path(output).with_suffix(".json").write_text(json.dumps(results))
    print(f"curves in {output}" if draw(results, s, output) else "no matplotlib: no picture")


if __name__ == "__main__":
    main()
