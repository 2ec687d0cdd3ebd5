# SPDX-License-Identifier: Apache-2.0
"""torchtitan's Trainer with a small llama3 in two processes learns the same with our loss as with
its ChunkedLossWrapper. torchtitan supports no CPU, so for gloo the test gives it a stub of a device
module, and chooses the attention that runs without a GPU."""

from __future__ import annotations

import dataclasses
import itertools
import os
import pathlib
import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "integrations"))

import ranks

utils = pytest.importorskip("torchtitan.tools.utils")
if ranks.DEVICE == "cpu":
    utils.device_type = "cpu"
    utils.device_module = types.SimpleNamespace(
        set_device=lambda device: None,
        current_device=lambda: 0,
        synchronize=lambda: None,
        get_device_name=lambda device: "CPU",
        get_device_properties=lambda device: types.SimpleNamespace(total_memory=1),
        memory_stats=lambda device: {},
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
    )

from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.distributed import utils as distributed  # noqa: E402
from torchtitan.models import llama3  # noqa: E402
from torchtitan.models.common.attention import ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

import support  # noqa: E402
from logitless.integrations.torchtitan import LinearCrossEntropyLoss  # noqa: E402
from ranks import Rank  # noqa: E402

if not hasattr(torch.distributed, "set_timeout"):  # torch 2.13 cannot change it
    distributed.set_pg_timeouts = lambda timeout, parallel_dims: None

LENGTH, VOCAB = support.LENGTH, 64


class Case(NamedTuple):
    """With `tp` 1 the two processes split data and parameters (FSDP), with 2 the tensors."""

    tp: int = 1
    accumulated: int = 1
    bf16: bool = False


CASES = {
    "fsdp": Case(),
    "fsdp, accumulated": Case(accumulated=2),
    "fsdp, bf16": Case(bf16=True),
    "tensor parallel": Case(tp=2),
}
_calls: list[support.Calls] = []  # in this process


def model() -> Any:
    """A llama3 of two layers, 32 wide. The attention of torchtitan's own flavours needs a GPU."""
    made = llama3.llama3_configs["debugmodel"](attn_backend="flex")
    dim, rope = 32, made.layers[0].attention.rope
    made.dim, made.vocab_size = dim, VOCAB
    made.tok_embeddings.num_embeddings, made.tok_embeddings.embedding_dim = VOCAB, dim
    made.norm.normalized_shape = made.lm_head.in_features = dim
    made.lm_head.out_features = VOCAB
    made.layers = llama3._build_llama3_layers(
        n_layers=2, dim=dim, n_heads=2, hidden_dim=48, attn_backend="flex",
        rope=dataclasses.replace(rope, dim=dim // 2),
    )  # fmt: skip
    for layer in made.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return made


class Tokenizer(BaseTokenizer):
    """A stub, because the data are token ids already."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Any, *, tokenizer_path: str) -> None:
        super().__init__()

    def encode(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    decode = get_vocab_size = encode


class Sequences(BaseDataLoader):
    """Sequences of which something can be learnt, in memory; some have ignored labels."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Any, *, dp_rank: int, dp_world_size: int, **_: Any) -> None:
        self.rank, self.world = dp_rank, dp_world_size

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        for step in itertools.count():
            rows = support.batch(step * self.world + self.rank)
            ids, labels = rows["input_ids"], rows["labels"]
            positions = torch.arange(LENGTH).expand(len(ids), -1)
            following = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
            yield {"input": ids, "positions": positions}, following

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


def train(me: Rank, case: Case, ours: bool, folder: str) -> dict[str, Tensor]:
    """Losses of all ranks, our calls, and the parameters in the end."""
    os.environ["LOCAL_RANK"] = str(me.rank)
    config = llama3_debugmodel()
    config.model_spec.model = model()
    config.loss.loss_fn.global_vocab_size = VOCAB
    config.dump_folder = folder
    config.tokenizer, config.dataloader = Tokenizer.Config(), Sequences.Config()
    config.metrics.log_freq = 1
    config.checkpoint.enable = config.validator.enable = False
    config.lr_scheduler.warmup_steps = 1
    config.debug.seed = 7
    config.parallelism.tensor_parallel_degree = case.tp
    config.parallelism.spmd_backend = "partial_dtensor"
    training = config.training
    training.steps, training.seq_len, training.local_batch_size = support.STEPS, LENGTH, 4
    training.global_batch_size = 4 * case.accumulated * me.size // case.tp
    training.disable_cuda_graphs = True
    training.mixed_precision_param = "bfloat16" if case.bf16 else "float32"
    config.loss.num_chunks = 2
    if ours:
        config.loss = LinearCrossEntropyLoss.Config(loss_fn=config.loss.loss_fn)
    if not _calls:
        _calls.append(support.Calls())
    _calls[0].taken()
    made = Trainer(config)
    for module in made.model_parts[0].modules():
        if isinstance(module, FSDPModule):  # gloo cannot multiply before it sums
            module.set_force_sum_reduction_for_comms(True)
    losses: list[float] = []
    made.metrics_processor.log = lambda step, loss, *_, **__: losses.append(float(loss))
    made.train()
    found = {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().float().clone()
        for name, p in made.model_parts[0].named_parameters()
    }
    made.close()
    calls = torch.tensor(_calls[0].taken())
    return {"losses": torch.tensor(losses), "calls": calls, **found}


def both(me: Rank, case: Case, folder: str) -> dict[str, Tensor]:
    theirs, ours = (train(me, case, which, folder) for which in (False, True))
    assert theirs.pop("calls") == 0
    # With a split vocabulary each loss is two calls: the labels' logits come first.
    assert ours.pop("calls") == support.STEPS * case.accumulated * case.tp
    losses = ours.pop("losses")
    support.same_run(losses.tolist(), theirs.pop("losses").tolist(), case.bf16)
    support.same_parameters(ours.items(), theirs.items(), 2e-3 if case.bf16 else 2e-5)
    return {"losses": losses}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_trainer_learns_the_same(pair: ranks.Group, case: Case, tmp_path: pathlib.Path) -> None:
    pair.call(both, case, str(tmp_path))
