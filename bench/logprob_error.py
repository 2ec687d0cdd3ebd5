# SPDX-License-Identifier: Apache-2.0
"""How far log-probabilities of a trained head in bf16 are from f64, ours and others', in nats:

    OMP_NUM_THREADS=1 LOGITLESS_LIBRARY=build/release/liblogitless.so PYTHONPATH=python \
        python bench/logprob_error.py

Trains the small GPT of examples/python/train_gpt.py in f32, takes its head and its hidden states
of text held out, rounds both to bf16, and passes the same numbers to all. The reference is f64 of
those numbers, so the figures are the error of the head alone. On the CPU, in five minutes of one
core, all but a few seconds of which train."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import pathlib
import sys
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

import logitless
from logitless.torch import linear_logprob

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples/python"))
import train_gpt  # noqa: E402

# Returns log-probability and entropy.
Head = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def trained(s: train_gpt.Settings, tokens: int) -> tuple[Tensor, Tensor, Tensor, float]:
    """Hidden states [B, T, D], weight [V, D], targets [B, T] of text held out, and its loss."""
    ids = train_gpt.encode(train_gpt.read_text(s.text), s.vocab)
    kept, held = ids[: len(ids) * 9 // 10], ids[len(ids) * 9 // 10 :]
    torch.manual_seed(s.seed)
    model = train_gpt.GPT(s)
    optimizer = torch.optim.AdamW(model.parameters(), lr=s.rate)
    for _ in range(s.steps):
        at = torch.randint(len(kept) - s.context - 1, (s.batch,))
        rows = torch.stack([kept[i : i + s.context + 1] for i in at])
        optimizer.zero_grad()
        model(rows[:, :-1], rows[:, 1:]).backward()
        optimizer.step()
    states: list[Tensor] = []
    model.norm.register_forward_hook(lambda *call: states.append(call[2]))
    rows = held[: tokens + 1].unfold(0, s.context + 1, s.context)
    with torch.no_grad():
        loss = model(rows[:, :-1], rows[:, 1:]).item()
    return states[0].bfloat16(), model.head.weight.detach().bfloat16(), rows[:, 1:], loss


def of_logits(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    log_p = logits.log_softmax(-1)
    return log_p.gather(-1, target[..., None])[..., 0], -(log_p.exp() * log_p).sum(-1)


def bf16_logits(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Like Hugging Face's models and losses: logits in bf16, everything after them in f32."""
    return of_logits(functional.linear(hidden, weight).float(), target)


def f32_head(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    return of_logits(functional.linear(hidden.float(), weight.float()), target)


def trl(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    from trl.trainer.utils import _ChunkedLogProbFunction

    logprob, entropy, *_ = _ChunkedLogProbFunction.apply(
        hidden.flatten(0, 1), weight, None, target.flatten(), 1.0, 256, None, 1.0, ("entropy",)
    )
    return logprob.view(target.shape), entropy.view(target.shape)


def ours(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    logprob, entropy = linear_logprob(hidden, weight, target, entropy=True)
    return logprob, entropy


HEADS: dict[str, Head] = {
    "logits in bf16, log_softmax in f32": bf16_logits,
    "the same under torch.compile": torch.compile(bf16_logits),
    "TRL's function": trl,
    "both cast to f32, logits in f32": f32_head,
    "linear_logprob": ours,
}


def row(name: str, found: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor]) -> str:
    off, off_entropy = (a.double() - e for a, e in zip(found, exact))  # [B, T]
    rms = off.square().mean().sqrt()
    of_sums = off.sum(-1).square().mean().sqrt()
    return (
        f"{name:36}{rms:9.1e}{off.abs().max():9.1e}{of_sums:11.1e}{off_entropy.abs().max():10.1e}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=2048)
    args = parser.parse_args()
    s = train_gpt.Settings(
        device="cpu", steps=args.steps, hidden=args.hidden, vocab=args.vocab, quiet=True
    )
    hidden, weight, target, loss = trained(s, args.tokens)
    with torch.no_grad():
        logits = hidden.double() @ weight.double().T
        exact = of_logits(logits, target)
        cpu = pathlib.Path("/proc/cpuinfo").read_text().split("model name")[1].split("\n")[0]
        print(
            f"# bench/logprob_error.py, {datetime.date.today()}, {cpu.strip(': ' + chr(9))}, "
            f"{torch.get_num_threads()} thread, torch {torch.__version__}, "
            f"trl {importlib.metadata.version('trl')}, logitless {logitless.__version__}"
        )
        print(
            f"# N {target.numel()} of text held out (loss {loss:.2f} after {s.steps} steps), "
            f"D {s.hidden}, V {s.vocab}, bf16; logits up to {logits.abs().max():.1f}, "
            f"deviation within a row {logits.std(-1).mean():.1f}; {s.context} tokens a sequence"
        )
        print("# errors in nats against f64 of the same bf16 numbers: of a log-probability, of the")
        print("# sum of a sequence's, of an entropy (max)")
        print(f"{'':36}{'rms':>9}{'max':>9}{'sum, rms':>11}{'entropy':>10}")
        for name, head in HEADS.items():
            print(row(name, head(hidden, weight, target), exact), flush=True)


if __name__ == "__main__":
    main()
