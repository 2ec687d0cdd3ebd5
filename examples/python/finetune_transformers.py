# SPDX-License-Identifier: Apache-2.0
"""Fine-tunes a Hugging Face causal LM with one line changed: `patch_transformers(model)`.

    python examples/python/finetune_transformers.py

The model is a tiny Llama made on the spot, so that the example runs anywhere; with a real one put
AutoModelForCausalLM.from_pretrained(...) in its place. Needs torch, transformers and tokenizers.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import transformers
from train_gpt import encode, read_text

from logitless.integrations import patch_transformers


def tiny_llama(vocab: int) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=vocab, hidden_size=128, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def finetune(name: str, model: Any, ids: torch.Tensor, steps: int, device: str) -> list[float]:
    """A plain training loop: nothing in it knows how the loss is computed."""
    model.to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    order = torch.Generator().manual_seed(0)
    losses = []
    for step in range(steps):
        at = torch.randint(len(ids) - 64, (8,), generator=order)
        batch = torch.stack([ids[i : i + 64] for i in at]).to(device)
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % max(1, steps // 10) == 0:
            print(f"  {name:9}  step {step + 1:5} of {steps}  loss {losses[-1]:.4f}", flush=True)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    text = read_text(())
    print(f"a tokenizer learns {args.vocab} tokens of {len(text)} characters", flush=True)
    ids = encode(text, args.vocab)
    curves = {}
    for name in ("plain", "logitless"):
        torch.manual_seed(0)
        model = tiny_llama(args.vocab)
        if name == "logitless":
            patch_transformers(model)  # this line is all that Logitless needs
        start = time.perf_counter()
        curves[name] = finetune(name, model, ids, args.steps, args.device)
        seconds = time.perf_counter() - start
        print(f"{name:9}  {curves[name][0]:.4f} -> {curves[name][-1]:.4f}  {seconds:.1f} s")
    worst = max(abs(a - b) for a, b in zip(curves["plain"], curves["logitless"]))
    print(f"largest difference between the curves: {worst:.2e}")


if __name__ == "__main__":
    main()
