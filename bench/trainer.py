# SPDX-License-Identifier: Apache-2.0
"""Steps of transformers' Trainer on one GPU, as users have them: forward, backward and optimizer of
a Llama, unpatched, under torch.compile, with Liger's fused head, and patched by Logitless.

    LOGITLESS_LIBRARY=build/device/liblogitless.so PYTHONPATH=python:build/trainer-site \
        python bench/trainer.py --out bench/results/trainer-DATE
    python bench/trainer.py --draw bench/results/trainer-DATE/trainer.json   # needs no GPU

Needs transformers, accelerate, Liger, and PyTorch with CUDA; `bench/setup-trainer` makes a
folder of them, build/trainer-site. Weights are random, in bf16, of Llama-3.2-1B's shape and of
Llama-3-8B's with `--layers` (5) of its 32 layers; training is in bf16 with gradient checkpointing
and fused AdamW, whose state is bf16 as the weights are: 9 and 16 GiB of weights, gradients and
state. All ways share one set of weights, drawn anew from a seed before every `train()`, and see the
same tokens. Turns and their seconds, with compilation, are printed on stderr.

One process. In each of `--rounds` every way takes its turn, in an order that is reversed every
round: a `train()` of `--warmup` steps that are not timed and `--steps` that are. A step is timed
between the ends of steps, waited for; figures are medians. GiB: the allocator's peak in the timed
steps, all there is in it. "off": the largest difference of a step's loss from the first way's.
"heads": how many times ours or Liger's loss was called in all steps; a way whose loss was not
called once a step is an error. What does not fit the memory says so. `--device cpu --tiny` tries
it anywhere, and its figures mean nothing."""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import gc
import importlib.metadata
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")  # the Trainer would use all GPUs
os.environ.setdefault("HF_HUB_OFFLINE", "1")

SEED = 7
GIB = 1 << 30
PACKAGES = ("torch", "transformers", "accelerate", "liger-kernel", "triton")
FIELDS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "vocab_size",
)  # fmt: skip
SHAPES = {
    "Llama-3.2-1B": (2048, 8192, 16, 32, 8, 128256),
    "8B-like": (4096, 14336, 5, 32, 8, 128256),
}
TINY = {"tiny, tied": (64, 96, 2, 4, 2, 1003), "tiny": (64, 96, 2, 4, 2, 1003)}
TIED = ("Llama-3.2-1B", "tiny, tied")
BATCHES = ("8x2048", "2x32768")
TINY_BATCHES = ("4x32", "1x64")


class Way(NamedTuple):
    title: str
    settings: dict[str, Any]  # of TrainingArguments
    patch: Callable[[Any], None]
    head: str  # "ours", "liger" or "": whose calls are counted


def unpatched(model: Any) -> None:
    del model


def liger(model: Any) -> None:
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama(
        rope=False, rms_norm=False, swiglu=False, fused_linear_cross_entropy=True, model=model
    )


def ours(model: Any, **options: Any) -> None:
    from logitless.integrations import patch_transformers

    patch_transformers(model, **options)


COMPILE = {"torch_compile": True}
WAYS = {
    "unpatched": Way("transformers", {}, unpatched, ""),
    "compile": Way("transformers, torch_compile", COMPILE, unpatched, ""),
    "liger": Way("Liger's fused head", {}, liger, "liger"),
    "ours": Way("Logitless", {}, ours, "ours"),
    "ours-512": Way(
        'Logitless, memory="512MiB"', {}, functools.partial(ours, memory="512MiB"), "ours"
    ),
    "ours-1g": Way('Logitless, memory="1GiB"', {}, functools.partial(ours, memory="1GiB"), "ours"),
    "ours-metrics": Way(
        "Logitless, accuracy and entropy",
        {},
        functools.partial(ours, metrics=("accuracy", "entropy")),
        "ours",
    ),
    "ours-compile": Way("Logitless, torch_compile", COMPILE, ours, "ours"),
}
DEFAULT_WAYS = ("unpatched", "compile", "liger", "ours", "ours-512")


class Heads:
    """Counts the losses that were made by a fused head, ours or Liger's."""

    def __init__(self) -> None:
        self.counts = {"ours": 0, "liger": 0}
        self._count_ours()
        with contextlib.suppress(ImportError):
            self._count_liger()

    def _count_ours(self) -> None:
        from logitless import _abi
        from logitless.torch import _run

        kinds = (_abi.LINEAR_CROSS_ENTROPY_FORWARD, _abi.LINEAR_CROSS_ENTROPY_FORWARD_BACKWARD)
        launch = _run.launch

        def counted(kind: int, *rest: Any, **more: Any) -> Any:
            self.counts["ours"] += kind in kinds
            return launch(kind, *rest, **more)

        _run.launch = counted

    def _count_liger(self) -> None:
        from liger_kernel.transformers import functional

        loss = functional.liger_fused_linear_cross_entropy

        @functools.wraps(loss)  # the Trainer inspects its signature
        def counted(*tensors: Any, **options: Any) -> Any:
            self.counts["liger"] += 1
            return loss(*tensors, **options)

        functional.liger_fused_linear_cross_entropy = counted


class Batch(NamedTuple):
    sequences: int
    length: int

    @classmethod
    def of(cls, text: str) -> Batch:
        try:
            sequences, length = (int(extent) for extent in text.split("x"))
        except ValueError:
            raise SystemExit(f"trainer: --batches: {text!r}; allowed: 8x2048, ...") from None
        return cls(sequences, length)


class Rows:
    """The sequences of one batch, repeated: a step's loss falls by what the steps before
    have learnt, so that losses show whether gradients are right."""

    def __init__(self, batch: Batch, vocab: int, steps: int) -> None:
        import torch

        draw = torch.Generator().manual_seed(SEED)
        self.tokens = torch.randint(0, vocab, batch, generator=draw)
        self.count = batch.sequences * steps

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.tokens[index % len(self.tokens)]
        return {"input_ids": row, "labels": row}


class Case:
    """A model's weights and its batches, and what the ways share of both."""

    def __init__(self, name: str, shape: tuple[int, ...], batch: Batch, device: str) -> None:
        import torch
        import transformers

        self.name, self.batch, self.device = name, batch, device
        config = transformers.LlamaConfig(
            **dict(zip(FIELDS, shape)), max_position_embeddings=batch.length,
            tie_word_embeddings=name in TIED, use_cache=False, pad_token_id=None,
        )  # fmt: skip
        self.vocab = config.vocab_size
        with torch.device(device):
            self.model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)

    def draw(self) -> None:
        """The weights that every `train()` begins with."""
        import torch

        torch.manual_seed(SEED)
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.normal_(0, 0.02) if weight.dim() > 1 else weight.fill_(1)
                weight.grad = None

    def of_a_way(self) -> Any:
        """A copy of the model that shares its weights."""
        return copy.deepcopy(self.model, {id(p): p for p in self.model.parameters()})


class Turn(NamedTuple):
    ms: list[float]
    losses: list[float]
    peak: int
    held: int  # allocated bytes before the turn
    seconds: float  # of the whole turn, with compilation


class Runner:
    """One way on one case. Its Trainer, and what it compiled, are kept from its first turn on."""

    def __init__(self, key: str, case: Case, given: argparse.Namespace, heads: Heads) -> None:
        self.key, self.way, self.case, self.given, self.heads = key, WAYS[key], case, given, heads
        self.trainer: Any = None
        self.turns: list[Turn] = []
        self.called = 0
        self.failed = ""

    def make(self, folder: str) -> None:
        import transformers

        model = self.case.of_a_way()
        # Set here, because TrainingArguments would set it in every turn and recompile the model.
        model.gradient_checkpointing_enable({"use_reentrant": False})
        self.way.patch(model)
        steps = self.given.warmup + self.given.steps
        settings = transformers.TrainingArguments(
            output_dir=folder, max_steps=steps, seed=SEED, learning_rate=3e-4,
            lr_scheduler_type="constant", optim="adamw_torch_fused", bf16=True,
            per_device_train_batch_size=self.case.batch.sequences, logging_strategy="no",
            save_strategy="no", report_to="none", disable_tqdm=True,
            use_cpu=self.case.device == "cpu", **self.way.settings,
        )  # fmt: skip
        self.trainer = trainer_class()(
            model=model, args=settings, train_dataset=Rows(self.case.batch, self.case.vocab, steps)
        )
        self.trainer.remove_callback(transformers.PrinterCallback)
        self.trainer.add_callback(callback(self.trainer, self.given.warmup))

    def turn(self, folder: str) -> None:
        import torch
        import transformers

        cuda = self.case.device == "cuda"
        self.case.draw()
        held, start = torch.cuda.memory_allocated() if cuda else 0, time.perf_counter()
        before = dict(self.heads.counts)
        try:
            if self.trainer is None:
                self.make(folder)
            self.trainer.marks, self.trainer.losses = [], []
            transformers.set_seed(SEED)  # for the sampler's draws
            self.trainer.train()
            self.check(before)
            losses = [float(loss) for loss in self.trainer.losses]
            marks = self.trainer.marks[self.given.warmup - 1 :]
            ms = [(b - a) * 1e3 for a, b in itertools.pairwise(marks)]
            peak = torch.cuda.max_memory_allocated() if cuda else 0
            self.turns.append(Turn(ms, losses, peak, held, time.perf_counter() - start))
        except torch.OutOfMemoryError:
            self.failed = "out of memory"
        except Exception as error:  # a peer may fail in any way; the others go on
            text = (str(error).strip() or "no message").splitlines()[0]
            self.failed = f"{type(error).__name__}: {text[:160]}"
        self.release(cuda)

    def check(self, before: dict[str, int]) -> None:
        from torch._dynamo.eval_frame import OptimizedModule

        steps = self.given.warmup + self.given.steps
        called = {name: count - before[name] for name, count in self.heads.counts.items()}
        if called != {name: steps * (name == self.way.head) for name in called}:
            raise RuntimeError(f"in {steps} steps fused heads were called {called} times")
        self.called += called.get(self.way.head, 0)
        compiled = isinstance(self.trainer.model_wrapped, OptimizedModule)
        if compiled != bool(self.way.settings.get("torch_compile")):
            raise RuntimeError(
                f"the model that was trained is{'' if compiled else ' not'} compiled"
            )

    def release(self, cuda: bool) -> None:
        """Frees what a turn holds, except compiled code."""
        import torch

        if self.trainer is not None:
            self.trainer.optimizer = self.trainer.lr_scheduler = None
            self.trainer.callback_handler.optimizer = None
            self.trainer.callback_handler.lr_scheduler = None
            self.trainer.accelerator.free_memory()
        if self.failed:
            self.trainer = None
        for weight in self.case.model.parameters():
            weight.grad = None
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()

    def record(self, base: Runner | None) -> dict[str, Any]:
        case = self.case
        told: dict[str, Any] = {
            "model": case.name, "batch": f"{case.batch.sequences}x{case.batch.length}",
            "way": self.key, "title": self.way.title,
        }  # fmt: skip
        if self.failed or not self.turns:
            return {**told, "failed": self.failed or "left out for time"}
        samples = [ms for turn in self.turns for ms in turn.ms]
        told |= {
            "ms": statistics.median(samples), "samples": samples,
            "gib": max(turn.peak for turn in self.turns) / GIB,
            "held_gib": [turn.held / GIB for turn in self.turns],
            "turn_s": [turn.seconds for turn in self.turns],
            "losses": [turn.losses for turn in self.turns], "heads": self.called,
        }  # fmt: skip
        if base and base.turns:
            pairs = zip(base.turns[0].losses, self.turns[0].losses)
            told |= {"off": max(abs(a - b) for a, b in pairs), "off_from": base.key}
        return told


@functools.cache
def trainer_class() -> Any:
    import transformers

    class Measured(transformers.Trainer):
        """Appends the loss of each step to `losses`."""

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            self.losses.append(loss)
            return loss

    return Measured


def callback(trainer: Any, warmup: int) -> Any:
    import torch
    import transformers

    class Marks(transformers.TrainerCallback):
        """The time at every step's end; the peak counts from the last one that is not timed."""

        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            cuda = torch.cuda.is_available()
            if cuda:
                torch.cuda.synchronize()
            trainer.marks.append(time.perf_counter())
            if cuda and len(trainer.marks) == warmup:
                torch.cuda.reset_peak_memory_stats()

    return Marks()


def say(text: str) -> None:
    """Prints to stderr, so that a run that is killed has said which way it was in."""
    print(text, end="", file=sys.stderr, flush=True)


def measure(case: Case, given: argparse.Namespace, heads: Heads, end: float) -> list[dict]:
    import torch

    torch._dynamo.reset()  # else a second length compiles with dynamic shapes, and is slower
    runners = [Runner(key, case, given, heads) for key in given.ways]
    with tempfile.TemporaryDirectory() as folder:
        for i in range(given.rounds):
            for runner in runners[:: 1 if i % 2 == 0 else -1]:
                if not runner.failed and (i == 0 or time.perf_counter() < end):
                    start = time.perf_counter()
                    say(f"  round {i + 1}, {runner.way.title}:")
                    runner.turn(folder)
                    say(f" {time.perf_counter() - start:.0f} s\n")
    base = next((runner for runner in runners if runner.turns), None)
    return [runner.record(base) for runner in runners]


HEADER = (
    f"  {'':28s} {'ms/step':>8s} {'x first':>8s} {'x Liger':>8s} {'GiB':>7s} {'losses':>16s} "
    f"{'off':>8s} {'heads':>5s}"
)


def lines(records: list[dict[str, Any]]) -> Iterator[str]:
    """A case as a table; ratios are to the first way that ran and to Liger's head."""
    ran = {r["way"]: r for r in records if "ms" in r}
    first = next(iter(ran.values()), None)
    for r in records:
        if "failed" in r:
            yield f"  {r['title']:28s} {r['failed']}"
            continue
        assert first is not None
        x_liger = f"{r['ms'] / ran['liger']['ms']:8.3f}" if "liger" in ran else f"{'-':>8s}"
        one = r["losses"][0]
        yield (
            f"  {r['title']:28s} {r['ms']:8.1f} {r['ms'] / first['ms']:8.3f} {x_liger} "
            f"{r['gib']:7.2f} {one[0]:7.3f} to {one[-1]:5.3f} {r['off']:8.1e} {r['heads']:5d}"
        )


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def machine(device: str) -> dict[str, str]:
    import torch

    name = torch.cuda.get_device_name() if device == "cuda" else "cpu, where figures mean nothing"
    return {
        "device": name, "date": time.strftime("%Y-%m-%d"), "command": " ".join(sys.argv),
        **{package: version(package) for package in PACKAGES},
    }  # fmt: skip


def shapes(given: argparse.Namespace) -> dict[str, tuple[int, ...]]:
    known = dict(TINY if given.tiny else SHAPES)
    if "8B-like" in known:
        known["8B-like"] = (*known["8B-like"][:2], given.layers, *known["8B-like"][3:])
    chosen = given.models.split(";") if given.models else list(known)
    if unknown := [name for name in chosen if name not in known]:
        raise SystemExit(f"trainer: --models: {unknown[0]!r}; allowed: {'; '.join(known)}")
    return {name: known[name] for name in chosen}


def run(given: argparse.Namespace) -> None:
    import torch

    if given.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("trainer: no CUDA device; --device cpu --tiny tries it without one")
    warnings.filterwarnings("ignore", module="torch.utils.checkpoint|transformers")
    chosen, start = shapes(given), time.perf_counter()
    facts = machine(given.device)
    text = [", ".join(f"{name} {value}" for name, value in facts.items())]
    text.append(f"{given.rounds} rounds of {given.warmup} + {given.steps} steps")
    print(*text, sep="\n", flush=True)
    heads, records = Heads(), []
    for batch in given.batches:
        for name, shape in chosen.items():
            said = [f"\n{name}, {batch.sequences} x {batch.length} tokens"]
            if time.perf_counter() - start > given.limit:
                said.append(f"  left out: {given.limit:.0f} s are over")
            else:
                case = Case(name, shape, batch, given.device)
                records += (made := measure(case, given, heads, start + given.limit))
                said += [HEADER, *lines(made)]
                del case
                gc.collect()
            print(*said, sep="\n", flush=True)
            text += said
            save(given.out, facts, records, text)
    print(f"\n{time.perf_counter() - start:.0f} s", flush=True)
    if given.out and any("ms" in record for record in records):
        draw([given.out / "trainer.json"])


def save(folder: Path | None, facts: dict, records: list[dict], text: list[str]) -> None:
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    whole = {"machine": facts, "records": records}
    (folder / "trainer.json").write_text(json.dumps(whole, indent=1) + "\n")
    (folder / "trainer.txt").write_text("\n".join(text) + "\n")


def draw(paths: list[Path]) -> None:
    """Time and peak memory as bars, a row of panels for each model and batch."""
    try:
        import picture
    except ImportError as absent:
        print(f"no picture: {absent}")
        return
    from matplotlib import pyplot

    runs = [json.loads(path.read_text()) for path in paths]
    cases: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in runs:
        for record in run["records"]:
            cases.setdefault((record["model"], record["batch"]), []).append(record)

    def figure(theme: picture.Theme) -> Any:
        rows = [len(records) for records in cases.values()]
        height = 1.2 + sum(0.38 * count + 0.95 for count in rows)
        made, panels = pyplot.subplots(
            len(cases), 2, figsize=(10, height), squeeze=False, layout="constrained",
            gridspec_kw={"height_ratios": [count + 1.2 for count in rows]},
        )  # fmt: skip
        for (left, right), ((model, batch), records) in zip(panels, cases.items()):
            bars(left, records, "ms", "{:,.0f} ms", theme)
            bars(right, records, "gib", "{:.1f} GiB", theme)
            left.set_yticks(range(len(records)), [record["title"] for record in records])
            right.set_yticks([])
            sequences, length = batch.split("x")
            left.set_title(f"{model}, {sequences} x {length} tokens", loc="left", weight="bold")
        facts = runs[0]["machine"]
        made.suptitle(
            f"A step of transformers' Trainer: time, and memory at its peak\n{facts['device']}, "
            f"bf16, gradient checkpointing, AdamW; {facts['date']}", fontsize=13,
        )  # fmt: skip
        return made

    for path in picture.both(paths[0].with_suffix(""), figure):
        print(f"wrote {path}")


def bars(axes: Any, records: list[dict], key: str, text: str, theme: Any) -> None:
    most = max([record[key] for record in records if key in record], default=1.0) or 1.0
    for place, record in enumerate(records):
        value = record.get(key, 0.0)
        colour = theme.ours if record["way"].startswith("ours") else theme.faint
        axes.barh(place, value, color=colour, height=0.7)
        words = text.format(value) if key in record else record["failed"][:34]
        axes.text(value + most * 0.02, place, words, va="center")
    axes.set_xlim(0, most * 1.3)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.invert_yaxis()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--tiny", action="store_true", help="two tiny models, to try the program")
    add("--models", default="", help=f"separated by ';', of: {'; '.join(SHAPES)}")
    add("--layers", type=int, default=5, help="of the 8B-like model (5)")
    add("--batches", default="", help=f"sequences x length, separated by ',' ({','.join(BATCHES)})")
    add("--ways", default=",".join(DEFAULT_WAYS), help=f"of: {','.join(WAYS)}")
    add("--rounds", type=int, default=3)
    add("--warmup", type=int, default=2, help="steps of a turn that are not timed (2)")
    add("--steps", type=int, default=2, help="steps of a turn that are timed (2)")
    add("--limit", type=float, default=540, help="seconds, after which no turn begins (540)")
    add("--out", type=Path, help="a folder for trainer.json, trainer.txt and the pictures")
    add("--draw", type=Path, nargs="+", help="trainer.json of runs: their picture, and no run")
    given = parser.parse_args()
    given.ways = given.ways.split(",")
    if unknown := [way for way in given.ways if way not in WAYS]:
        parser.error(f"--ways: {unknown[0]!r}; allowed: {', '.join(WAYS)}")
    for name in ("layers", "rounds", "warmup", "steps"):
        if getattr(given, name) < 1:
            parser.error(f"--{name}: {getattr(given, name)}; allowed: 1 or more")
    texts = given.batches.split(",") if given.batches else TINY_BATCHES if given.tiny else BATCHES
    given.batches = [Batch.of(text) for text in texts]
    if given.draw:
        draw(given.draw)
    else:
        run(given)


if __name__ == "__main__":
    main()
