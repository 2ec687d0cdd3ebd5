# SPDX-License-Identifier: Apache-2.0
"""document_names.py PAGE runs the Python of a document, block by block in one namespace, as a
reader pastes it. Tensors, models and a framework's objects that a block assumes come from here,
tiny and on the CPU; names of logitless must be imported by the block or an earlier one.
A block whose framework is not installed is not run but named in the output."""

from __future__ import annotations

import ast
import importlib.util
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import code_blocks  # noqa: E402

Names = dict[str, Any]
B, T, D, V = 2, 4, 8, 24


class Absent(Exception):
    """A framework that is not installed."""


def needs(*modules: str) -> None:
    for module in modules:
        try:
            found = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:
            found = False
        if not found:
            raise Absent(module)


def torch_tensors() -> Names:
    import torch

    torch.manual_seed(0)
    labels = torch.randint(0, V, (B, T))
    labels[0, 1] = -100
    head = torch.nn.Linear(D, V, bias=False)
    return {
        "hidden": torch.randn(B, T, D, requires_grad=True), "lm_head": head, "labels": labels,
        "linear_weight": head.weight, "target": labels, "temperature": torch.full((B, 1), 1.5),
    }  # fmt: skip


def a_teacher() -> Names:
    import torch

    wider = 2 * D
    teacher = torch.nn.Linear(wider, V, bias=False)
    return {
        **torch_tensors(), "teacher_hidden": torch.randn(B, T, wider), "teacher_head": teacher,
    }  # fmt: skip


def a_head() -> Names:
    """The sizes of a head, and hidden states and labels for it."""
    tensors = torch_tensors()
    return {"hidden": D, "vocab": V, "x": tensors["hidden"], "labels": tensors["labels"]}


def a_trainer() -> Names:
    """A trainer whose train() is one loss and backward in the default memory."""
    import types

    from logitless.torch import linear_cross_entropy

    t = torch_tensors()
    loss = lambda: linear_cross_entropy(t["hidden"], t["lm_head"].weight, t["labels"]).backward()  # noqa: E731
    return {"trainer": types.SimpleNamespace(train=loss)}


def jax_arrays() -> Names:
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    needs("jax")
    import jax
    import numpy as np

    keys = jax.random.split(jax.random.key(0), 3)
    labels = np.array(jax.random.randint(keys[2], (B, T), 0, V))
    labels[0, 1] = -100
    return {
        "hidden": jax.random.normal(keys[0], (B, T, D)),
        "head": jax.random.normal(keys[1], (V, D)),
        "labels": jax.numpy.asarray(labels),
    }


def numpy_arrays() -> Names:
    import numpy as np

    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape, dtype=np.float32)  # noqa: E731
    return {"x": normal(B, D), "w": normal(V, D), "b": normal(V), "target": np.array([3, -100])}


def a_llama() -> Names:
    needs("transformers")
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=V, hidden_size=D, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=32,
    )  # fmt: skip
    return {
        "model": transformers.LlamaForCausalLM(config),
        "LlamaForCausalLM": transformers.LlamaForCausalLM,
    }


def a_transformers_trainer() -> Names:
    """The arguments of a transformers.Trainer."""
    needs("transformers", "accelerate")
    import torch
    import transformers

    arguments = transformers.TrainingArguments(
        tempfile.mkdtemp(), use_cpu=True, max_steps=1, report_to="none", save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    tokens = torch.randint(0, V, (B, T))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    return {
        **a_llama(), "arguments": arguments, "rows": rows, "held_out": rows,
        "batch": {"input_ids": tokens, "labels": tokens},
    }  # fmt: skip


def a_corpus() -> Names:
    needs("safetensors")
    import torch

    return {**a_llama(), "tokens": torch.randint(0, V, (B, T))}


def a_prompt() -> Names:
    import types

    import torch

    names, ids = torch_tensors(), [3, 1, 4, 1]
    return {
        **names, "hidden": names["hidden"][0], "prompt_token_ids": ids, "tokens": torch.tensor(ids),
        "tokenizer": types.SimpleNamespace(decode=str),
    }  # fmt: skip


def a_model_of_the_hub() -> Names:
    raise Absent("download of models and data")


def a_trl_trainer() -> Names:
    needs("trl", "datasets", "tokenizers")
    import datasets
    import trl

    import test_trl

    folder = tempfile.mkdtemp()
    config = trl.SFTConfig(
        output_dir=folder, use_cpu=True, bf16=False, max_steps=1, per_device_train_batch_size=2,
        save_strategy="no", report_to="none", gradient_checkpointing=False, disable_tqdm=True,
    )  # fmt: skip
    rows = datasets.Dataset.from_list([test_trl.ROWS["sft"](i) for i in range(4)])
    trainer = trl.SFTTrainer(
        model=a_llama()["model"], args=config, processing_class=test_trl.tokenizer(),
        train_dataset=rows,
    )  # fmt: skip
    return {"trainer": trainer}


def a_trl_distiller() -> Names:
    needs("trl", "datasets", "tokenizers")
    import datasets
    import trl

    import test_trl
    import test_trl_distillation

    student, teacher = test_trl_distillation.models()
    config = trl.DistillationConfig(
        output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, max_steps=1, save_strategy="no",
        per_device_train_batch_size=2, report_to="none", gradient_checkpointing=False,
        disable_tqdm=True, max_completion_length=6,
    )  # fmt: skip
    rows = datasets.Dataset.from_list([{"prompt": test_trl.text(i, 3)} for i in range(4)])
    trainer = trl.DistillationTrainer(
        model=student, teacher_model=teacher, args=config, train_dataset=rows,
        processing_class=test_trl.tokenizer(),
    )  # fmt: skip
    return {"trainer": trainer}


def join() -> Any:
    """The group of the processes that run this page."""
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group(
            "gloo", init_method=f"file://{os.environ['DOCUMENT_MEETING']}",
            rank=int(os.environ["DOCUMENT_RANK"]), world_size=int(os.environ["DOCUMENT_RANKS"]),
        )  # fmt: skip
    return dist.group.WORLD


def a_group() -> Names:
    return {"tp_group": join()}


def a_split_vocabulary() -> Names:
    import torch
    import torch.distributed as dist

    group = join()
    torch.manual_seed(0)
    columns = 128256 // dist.get_world_size()
    return {
        "tp_group": group, "start": columns * dist.get_rank(), "target": torch.tensor([7, 100000]),
        "hidden": torch.randn(2, 4, requires_grad=True),
        "weight_shard": torch.nn.Parameter(torch.randn(columns, 4)),
    }  # fmt: skip


def a_split_vocabulary_of_cce() -> Names:
    import torch

    from logitless.integrations import cce

    names = a_split_vocabulary()
    weight = torch.nn.Parameter(torch.randn(128256, 4))
    return {**names, "cce": cce, "weight": weight, "labels": names["target"]}


def a_model_over_ranks() -> Names:
    import torch
    import torch.distributed as dist
    from torch.distributed import device_mesh

    from logitless.torch import LinearCrossEntropyHead

    join()
    real, size = device_mesh.init_device_mesh, dist.get_world_size()
    device_mesh.init_device_mesh = lambda _, shape, **options: real("cpu", (size,), **options)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(V, D)
            self.blocks = torch.nn.ModuleList([torch.nn.Linear(D, D)])
            self.lm_head = LinearCrossEntropyHead(D, V)

        def forward(self, ids: Any, labels: Any, normalizer: Any) -> Any:
            states = self.embedding(ids)
            for block in self.blocks:
                states = block(states)
            return self.lm_head(states, labels, normalizer=normalizer)

    batch = (torch.randint(0, V, (B, T)), torch.randint(0, V, (B, T)))
    return {"model": Model(), "loader": [[batch, batch]] * 2, "valid_tokens": 2.0 * B * T * size}


# Names given to the code blocks of a page: to the first block with the text and to later ones.
GIVEN: dict[str, list[tuple[str, Callable[[], Names]]]] = {
    "README.md": [
        ("from logitless.torch import linear_cross_entropy", torch_tensors),
        ("patch_transformers(model)", a_llama),
        ("from logitless.jax import linear_cross_entropy", jax_arrays),
        ("logitless.numpy.linear_cross_entropy(", numpy_arrays),
    ],
    "docs/cli.md": [("save_file(", a_corpus)],
    "docs/distillation.md": [
        ("import linear_divergence", a_teacher),
        ("patch_trl(", a_trl_distiller),
        ("group=tp_group", a_group),
        ("logitless_jax", jax_arrays),
    ],
    "docs/python.md": [
        ("from logitless.torch import linear_cross_entropy", torch_tensors),
        ("set_default_memory(", a_trainer),
        ("import linear_logprobs_at", a_teacher),
        ("LinearCrossEntropyHead(hidden, vocab)", a_head),
        ("from logitless.jax import linear_cross_entropy", jax_arrays),
        ("import logitless.numpy", numpy_arrays),
    ],
    "docs/devices.md": [
        ("group=tp_group", a_split_vocabulary),
        ("init_device_mesh(", a_model_over_ranks),
    ],
    "docs/first-ten-minutes.md": [("import patch_trl", lambda: needs("trl") or {})],
    "docs/integrations.md": [
        ("patch_transformers(model)", a_llama),
        ("metrics=(", a_transformers_trainer),
        ("patch_trl(", a_trl_trainer),
        ("integrations.lm_eval", a_model_of_the_hub),
        ("from tunix", lambda: needs("tunix") or {}),
        ("levanter.models", lambda: needs("levanter") or {}),
        ("cce.VocabParallelOptions", a_split_vocabulary_of_cce),
        ("integrations import vllm", a_prompt),
        ("megatron.output_processor", lambda: needs("megatron.core") or {}),
        ("integrations.torchtitan", lambda: needs("torchtitan") or {}),
    ],
}
RANKS = {"docs/devices.md": 2}  # processes; other pages run in one


def python_blocks(page: str) -> Iterator[code_blocks.Block]:
    for block in code_blocks.scan((ROOT / page).read_text())[0]:
        if block.language == "python":
            yield block


def run(block: code_blocks.Block, page: str, namespace: Names) -> None:
    """Runs a block statement by statement. A patch that is the value of a statement is taken away
    after it: a document shows several, and a program would have one."""
    lines = "\n" * (block.line - 1)
    for statement in ast.parse(lines + block.text, page).body:
        if isinstance(statement, ast.Expr):
            value = eval(
                compile(ast.Expression(statement.value), page, "eval", dont_inherit=True), namespace
            )
            if hasattr(value, "unpatch"):
                value.unpatch()
        else:
            exec(compile(ast.Module([statement], []), page, "exec", dont_inherit=True), namespace)


def main(page: str) -> None:
    namespace: Names = {"__name__": "document"}
    waiting = list(GIVEN.get(page, []))
    for block in python_blocks(page):
        try:
            while waiting and waiting[0][0] in block.text:
                namespace.update(waiting.pop(0)[1]())
        except Absent as absent:
            print(f"{page}:{block.line}: not run, for there is no {absent}")
            continue
        run(block, page, namespace)
        print(f"{page}:{block.line}: ran")
    if waiting:
        raise SystemExit(f"{page}: no block has {waiting[0][0]!r}; document_names.py gives to it")


if __name__ == "__main__":
    main(sys.argv[1])
