# SPDX-License-Identifier: Apache-2.0
"""The CPU backend against PyTorch and against the machine, in one process and one run.

Random data, the same threads for all, contenders interleaved in balanced order, medians. On the
terminal are a table of each group and one of all groups. Files are a JSON with the samples and its
picture (cpu_picture.py). It reports; it does not judge: exit code 0 as long as it could
measure. `make bench-cpu` builds and installs what it needs."""

from __future__ import annotations

import argparse
import ctypes
import datetime
import gc
import json
import os
import platform
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SHAPES = "1024x768x50257,2048x1024x32000,256x4096x128256,8x4096x128256"
QUICK_SHAPES = "96x64x3001,8x64x4096"
Shape = tuple[int, int, int]  # (N, D, V)


def shapes_of(text: str) -> list[Shape]:
    out = []
    for part in text.split(","):
        sizes = re.fullmatch(r"(\d+)x(\d+)x(\d+)", part.strip())
        if sizes is None or "0" in sizes.groups():
            raise argparse.ArgumentTypeError(f'"{part}" is not NxDxV, such as 1024x768x50257')
        out.append((int(sizes[1]), int(sizes[2]), int(sizes[3])))
    return out


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="tiny shapes, two rounds: does it run?"
    )
    parser.add_argument("--shapes", type=shapes_of, help=f"NxDxV,... (default {SHAPES})")
    parser.add_argument("--dtypes", default="f32,bf16", help="of f32, bf16 (default both)")
    parser.add_argument("--rounds", type=int, help="at most (default 7); at least 3 run")
    parser.add_argument("--budget", type=float, default=30, help="seconds a group may take (30)")
    parser.add_argument("--cap", type=float, default=20, help="seconds one call may take (20)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--no-peers", action="store_true", help="ours alone")
    parser.add_argument("--out", type=Path, help="default bench/results/cpu-DATE.json")
    parser.add_argument("--build", type=Path, default=ROOT / "build/release")
    arguments = parser.parse_args()
    arguments.shapes = arguments.shapes or shapes_of(QUICK_SHAPES if arguments.quick else SHAPES)
    arguments.rounds = arguments.rounds or (2 if arguments.quick else 7)
    arguments.dtypes = arguments.dtypes.split(",")
    for dtype in arguments.dtypes:
        if dtype not in ("f32", "bf16"):
            parser.error(f'--dtypes: "{dtype}"; allowed: f32, bf16')
    name = "cpu-quick" if arguments.quick else f"cpu-{datetime.date.today()}"
    default = ROOT / ("out" if arguments.quick else "bench/results") / f"{name}.json"
    arguments.out = arguments.out or default
    return arguments


def say(text: str) -> None:
    print(f"[{datetime.datetime.now():%H:%M:%S}] {text}", file=sys.stderr, flush=True)


def machine(library_text: str, load: tuple[float, ...]) -> dict[str, Any]:
    info = Path("/proc/cpuinfo").read_text()
    model = re.search(r"model name\s*:\s*(.*)", info)
    flags = re.search(r"flags\s*:\s*(.*)", info)
    wanted = ("avx2", "fma", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16")
    pages = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "cpu": model[1] if model else platform.processor(),
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "isa": [f for f in wanted if flags and f in flags[1].split()],
        "library": library_text,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "transparent_huge_pages": pages.read_text().strip() if pages.is_file() else None,
        "load_average_at_start": load,
        "load_average_at_end": os.getloadavg(),
    }


class Run:
    def __init__(self, arguments: argparse.Namespace) -> None:
        # Imported late, so that --help and bad arguments answer at once.
        import contenders
        import native
        import report
        import rss
        import timing
        import torch

        self.c, self.report, self.timing, self.rss_of = contenders, report, timing, rss
        self.arguments = arguments
        torch.set_num_threads(arguments.threads)
        torch._inductor.config.compile_threads = 1  # no worker processes run during the timing
        self.path = str(arguments.build / "liblogitless.so")
        self.library = native.Library(self.path, arguments.threads)
        self.scratch = contenders.Scratch()
        self.groups: list[Any] = []
        self.probes: list[dict[str, Any]] = []
        self.rss: list[dict[str, Any]] = []
        self.torch = torch

    def probe(self) -> dict[str, Any]:
        a = self.arguments
        tokens, vocab = self.logits_shape()
        read = 1 << (24 if a.quick else 30)
        command = [a.build / "bench/logitless_probe", "--threads", a.threads, "--read-bytes", read,
                   "--repetitions", 3 if a.quick else 7, "--copy-bytes"]  # fmt: skip
        command += [tokens * vocab * 4, tokens * vocab * 2]
        out = subprocess.run([str(c) for c in command], check=True, capture_output=True, text=True)
        self.probes.append(json.loads(out.stdout))
        return self.probes[-1]

    def logits_shape(self) -> tuple[int, int]:
        return (64, 3001) if self.arguments.quick else (1024, 50257)

    def measure(self, group: Any) -> None:
        a = self.arguments
        say(f"{group.title}: {len(group.contenders)} contenders")
        group.rounds = self.timing.measure(group.contenders, a.rounds, a.budget, a.cap)
        for contender in group.contenders:
            if contender.ok and contender.name in self.c.PEERS:
                contender.facts["growth_bytes"] = self.growth(contender)
        self.report.print_group(group)
        sys.stdout.flush()
        self.warn_of_losses(group)
        for contender in group.contenders:  # an idle contender frees its tensors
            contender.call = contender.prepare = contender.release = self.timing.nothing
        self.groups.append(group)
        gc.collect()

    def growth(self, contender: Any) -> int:
        """The most memory that one more call holds beyond its gradients."""
        gc.collect()
        contender.prepare()
        # Memory that malloc keeps from earlier calls would hide this call's peak.
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = self.rss_of.status_bytes("VmRSS")
        contender.call()
        peak = self.rss_of.status_bytes("VmHWM") - before
        gradients = contender.facts.get("gradient_bytes", 0)
        contender.release()
        return max(peak - gradients, 0)

    def warn_of_losses(self, group: Any) -> None:
        """Warns if contenders that compute the same loss have different values."""
        same = [c for c in group.contenders if c.ok and c.loss is not None]
        same = [c for c in same if "options" not in c.name and "ignored" not in c.name]
        for c in same:
            if abs(c.loss - same[0].loss) > (1e-4 if group.dtype == "f32" else 2e-2) * abs(c.loss):
                say(f"WARNING: the loss of {c.name} is {c.loss}, of {same[0].name} {same[0].loss}")

    def gradients(self, head: Any, dtype: str) -> None:
        c, a = self.c, self.arguments
        outputs = c.Gradients(head, self.torch.float32)

        def ours(name: str, outputs: Any = outputs, **how: Any) -> Any:
            return c.ours(self.library, self.scratch, head, name, outputs, **how)

        contenders = [
            ours("ours"),
            ours("ours, quarter workspace", which="quarter"),
            ours("ours, minimum workspace", which="minimum"),
            ours("ours, all options", all_options=True),
            ours("ours, half ignored", half_ignored=True),
        ]
        for name, kept in (("ours, gradient later", 0), ("ours, gradient later, kept", 1 << 62)):
            contenders.append(c.ours_later(self.library, self.scratch, head, name, outputs, kept))
        if dtype == "bf16":
            contenders.append(ours("ours, bf16 gradients", c.Gradients(head, self.torch.bfloat16)))
        if not a.no_peers:
            contenders += c.peers(head, True, a.cap)
        shape = (head.tokens, head.hidden, head.vocab)
        self.measure(self.report.Group("gradients", *shape, dtype, contenders))

    def loss_only(self, head: Any, dtype: str) -> None:
        c = self.c
        contenders = [
            c.ours(self.library, self.scratch, head, "ours", None),
            c.ours(self.library, self.scratch, head, "ours, all options", None, all_options=True),
            c.ours(self.library, self.scratch, head, "ours, half ignored", None, half_ignored=True),
        ]
        if not self.arguments.no_peers:
            contenders += c.peers(head, False, self.arguments.cap)
        shape = (head.tokens, head.hidden, head.vocab)
        self.measure(self.report.Group("loss", *shape, dtype, contenders))

    def logits(self, dtype: str) -> None:
        tokens, vocab = self.logits_shape()
        group = self.report.Group("logits", tokens, 0, vocab, dtype, [])
        probe = self.probe()
        group.copy_ms = probe["copy"][0 if dtype == "f32" else 1]["ms_median"]
        group.contenders = self.c.logits_contenders(
            self.library, self.scratch, tokens, vocab, self.c.DTYPES[dtype]
        )
        if self.arguments.no_peers:
            group.contenders = [group.contenders[0], group.contenders[-1]]
        self.measure(group)

    def resident(self, shape: Shape, *flags: str) -> None:
        case = f"{'x'.join(map(str, shape))} {' '.join(flags)}".strip()
        say(f"resident growth: {case}")
        command = [sys.executable, str(ROOT / "bench/rss.py"), self.path]
        command += [str(self.arguments.threads), *map(str, shape), *flags]
        try:
            out = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
            if out.returncode == 0:
                self.rss.append({"case": case, **json.loads(out.stdout)})
                return
            status = "failed: " + (out.stderr.strip().splitlines() or ["no message"])[-1]
        except subprocess.TimeoutExpired:
            status = "too slow: more than 120 s"
        self.rss.append({"case": case, "status": status})

    def all(self) -> None:
        a = self.arguments
        for dtype in a.dtypes:
            self.logits(dtype)
        # One weight at a time: shapes with equal D and V are grouped.
        for hidden, vocab in dict.fromkeys((d, v) for _, d, v in a.shapes):
            tokens = [n for n, d, v in a.shapes if (d, v) == (hidden, vocab)]
            for dtype in a.dtypes:
                say(f"weight {vocab} x {hidden}, {dtype}")
                self.probe()
                weight = self.c.random_weight(vocab, hidden, self.c.DTYPES[dtype])
                for n in tokens:
                    self.gradients(self.c.Head(n, weight), dtype)
                    self.loss_only(self.c.Head(n, weight), dtype)
                if any(n <= 8 for n in tokens) and 1 not in tokens:
                    self.loss_only(self.c.Head(1, weight), dtype)
                del weight
                gc.collect()
        self.scratch = None
        for shape in a.shapes:
            self.resident(shape)
            self.resident(shape, "--dtype", "bf16")
        self.resident(a.shapes[0], "--minimum")
        self.resident(a.shapes[0], "--loss-only")
        self.probe()

    def document(self, load: tuple[float, ...]) -> dict[str, Any]:
        peak = self.report.peaks(self.probes)
        held = self.report.bounds(self.groups, peak, self.rss)
        self.report.print_summary(peak, self.rss, held)
        self.report.print_table(self.groups)
        commit = subprocess.run(["git", "-C", str(ROOT), "describe", "--always", "--dirty"],
                                check=False, capture_output=True, text=True)  # fmt: skip
        a = self.arguments
        return {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": "make bench-cpu" + (f' BENCH="{" ".join(sys.argv[1:])}"' if sys.argv[1:] else ""),
            "machine": machine(self.library.describe(), load),
            "versions": {
                "logitless": self.library.version,
                "commit": commit.stdout.strip(),
                "torch": self.torch.__version__,
                "python": platform.python_version(),
            },
            "settings": {"threads": self.library.threads, "torch_threads": self.torch.get_num_threads(),
                         "rounds": a.rounds, "budget_s": a.budget, "cap_s": a.cap},
            "peaks": peak,
            "bounds": [asdict(b) for b in held],
            "groups": [self.report.group_json(g, peak) for g in self.groups],
            "resident_growth": self.rss,
            "probes": self.probes,
        }  # fmt: skip


def main() -> None:
    arguments = parse()
    run = Run(arguments)
    load = os.getloadavg()
    if load[0] > 0.5:
        say(f"WARNING: the load average is {load[0]:.1f}: other work will be in these figures")
    run.all()
    document = run.document(load)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    part = arguments.out.with_suffix(".part")
    part.write_text(json.dumps(document, indent=1) + "\n")
    part.replace(arguments.out)
    say(f"wrote {arguments.out}")
    import cpu_picture

    for path in cpu_picture.draw_run(document, arguments.out.with_suffix("")):
        say(f"wrote {path}")


if __name__ == "__main__":
    main()
