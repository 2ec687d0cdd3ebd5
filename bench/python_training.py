# SPDX-License-Identifier: Apache-2.0
"""Training from one seed: how far the losses of logitless are from plain PyTorch's, and how far
PyTorch's are from its own with another number of threads; and the held-out losses in bf16.

    python bench/python_training.py [--steps 300] [--device cuda]
"""

from __future__ import annotations

import argparse
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "examples/python"))
from train_gpt import Settings, encode, read_text, train


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    common = {"steps": args.steps, "device": args.device, "quiet": True}
    ids = encode(read_text(()), Settings.vocab)

    def curve(loss: str, threads: int, dtype: str = "float32") -> list[float]:
        s = Settings(loss=loss, threads=threads, dtype=dtype, **common)
        losses: list[float] = train(s, ids)["losses"]
        return losses

    plain1, plain2 = curve("plain", 1), curve("plain", 2)
    ours1, ours2 = curve("logitless", 1), curve("logitless", 2)

    def distance(a: list[float], b: list[float], steps: int = args.steps) -> float:
        return max(abs(p - q) for p, q in zip(a[:steps], b[:steps]))

    own = distance(plain1, plain2)
    print(f"f32, {args.steps} steps, largest difference of the loss")
    print(f"plain, 1 and 2 threads             {own:.2e}")
    print(f"logitless and plain, 1 thread      {distance(ours1, plain1):.2e}")
    print(f"logitless and plain, 2 threads     {distance(ours2, plain2):.2e}")
    print(f"logitless and plain, first 50      {distance(ours2, plain2, 50):.2e} (target: <= 1e-3)")
    worst = max(distance(ours1, plain1), distance(ours2, plain2))
    print(f"ratio to plain's own               {worst / own:.2f} (target: <= 2)")
    exact = curve("plain", 2, "float64")
    print(f"plain and the same in f64          {distance(plain2, exact):.2e}")
    print(f"logitless and plain in f64         {distance(ours2, exact):.2e}")
    for loss in ("plain", "logitless"):
        s = Settings(loss=loss, dtype="bfloat16", **common)
        print(f"bf16 held out, {loss:9}           {train(s, ids)['held_out']:.4f}")


if __name__ == "__main__":
    main()
