# SPDX-License-Identifier: Apache-2.0
"""Our losses equal those of Megatron-Core's output layer and loss, in two processes."""

from __future__ import annotations

import contextlib
import inspect
import types
from typing import Any

import pytest
import torch
from torch import Tensor

import both
import ranks
from logitless.integrations import megatron
from ranks import Rank

core = pytest.importorskip("megatron.core")


def setup() -> Any:
    """The tensor-parallel group. Megatron-Core asks CUDA where its buffers belong."""
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
        if ranks.DEVICE == "cpu":
            torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    return parallel_state.get_tensor_model_parallel_group()


def layer_of(kind: Any, group: Any, weight: Any, **config: Any) -> Any:
    from megatron.core.model_parallel_config import ModelParallelConfig

    made = kind(
        both.HIDDEN, both.VOCAB, bias=False, skip_bias_add=False, tp_group=group,
        init_method=torch.nn.init.zeros_, skip_weight_param_allocation=True,
        config=ModelParallelConfig(
            tensor_model_parallel_size=2, use_cpu_initialization=True, **config
        ),
    )  # fmt: skip
    return made


def parts(split: bool, me: Rank) -> tuple[Any, Tensor, Tensor, Tensor]:
    group = setup()
    x, w, t = both.problem(me)
    return group, x.chunk(me.size)[me.rank] if split else x, w, t


def their_loss(layer: Any, t: Tensor, x: Tensor, w: Tensor) -> Tensor:
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    loss: Tensor = vocab_parallel_cross_entropy(layer(x, weight=w)[0].float(), t)
    return loss.T.contiguous()


def module(me: Rank, split: bool) -> dict[str, Tensor]:
    from megatron.core.tensor_parallel import ColumnParallelLinear

    group, x, w, t = parts(split, me)
    plain = layer_of(ColumnParallelLinear, group, w, sequence_parallel=split)
    ours = layer_of(megatron.LinearCrossEntropyModule, group, w, sequence_parallel=split)
    assert isinstance(ours, ColumnParallelLinear)
    both.same(
        lambda x, w: ours(x, weight=w, labels=t.T),
        lambda x, w: their_loss(plain, t, x, w), (x, w),
    )  # fmt: skip
    both.same(lambda x, w: ours(x, weight=w)[0], lambda x, w: plain(x, weight=w)[0], (x, w))
    return {}


def processor(me: Rank, split: bool) -> dict[str, Tensor]:
    """GPTModel's own postprocessing, of a model that has the output layer alone."""
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel import ColumnParallelLinear

    group, x, w, t = parts(split, me)
    layer = layer_of(ColumnParallelLinear, group, w, sequence_parallel=split)
    called: list[int] = []
    layer.register_forward_pre_hook(lambda *_: called.append(1))

    def through(w: Tensor, x: Tensor, **more: Any) -> Any:
        config = types.SimpleNamespace(
            mtp_num_layers=None, use_mup=False, cross_entropy_loss_fusion=False
        )
        model = types.SimpleNamespace(
            share_embeddings_and_output_weights=True, post_process=True, output_layer=layer,
            shared_embedding_or_output_weight=lambda: w, config=config, tp_group=group,
            training=True, _scale_logits=lambda logits: logits,
            compute_language_model_loss=lambda labels, logits: their_loss_of(logits, labels),
        )  # fmt: skip
        return GPTModel._postprocess(
            model, hidden_states=x, input_ids=None, position_ids=None, labels=t.T.contiguous(),
            rotary_pos_emb=None, rotary_pos_cos=None, rotary_pos_sin=None, **more,
        )  # fmt: skip

    both.same(
        lambda x, w: through(w, x, output_processor=megatron.output_processor),
        lambda x, w: through(w, x), (x, w),
    )  # fmt: skip
    assert len(called) == 2
    return {}


def their_loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    loss: Tensor = vocab_parallel_cross_entropy(logits.float(), labels.T.contiguous())
    return loss.T.contiguous()


def norm_of(_: Any, config: Any, hidden_size: int, eps: float = 1e-5, **__: Any) -> Any:
    """A norm whose gradients are to be added up, as Apex' and Transformer Engine's say; torch's
    does not, and Megatron refuses it under sequence parallelism."""
    made = torch.nn.LayerNorm(hidden_size, eps)
    for p in made.parameters():
        p.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return made


def model_of(tied: bool, split: bool) -> Any:
    """A GPTModel of one layer, whose random numbers are not CUDA's."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    WrappedTorchNorm.__new__ = norm_of
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer import dot_product_attention
    from megatron.core.transformer.transformer_config import TransformerConfig

    tracker = types.SimpleNamespace(fork=contextlib.nullcontext)
    dot_product_attention.tensor_parallel.get_cuda_rng_tracker = lambda: tracker
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=1, hidden_size=32, num_attention_heads=4, ffn_hidden_size=64,
        tensor_model_parallel_size=2, use_cpu_initialization=True, hidden_dropout=0.0,
        attention_dropout=0.0, pipeline_dtype=torch.float32, gradient_accumulation_fusion=False,
        bias_dropout_fusion=False, masked_softmax_fusion=False, apply_rope_fusion=False,
        sequence_parallel=split,
    )  # fmt: skip
    return GPTModel(
        config=config, transformer_layer_spec=get_gpt_layer_local_spec(), vocab_size=64,
        max_sequence_length=16, position_embedding_type="rope",
        share_embeddings_and_output_weights=tied,
    )  # fmt: skip


def trained(
    tied: bool, split: bool, **hook: Any
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """The losses of 20 steps, their gradients in the first, and the parameters in the end. Under
    sequence parallelism the gradients of what is whole on every rank are added up over the ranks,
    as Megatron's finalize_model_grads does."""
    model, losses, first = model_of(tied, split), [], []
    group = setup()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    positions, mask = torch.arange(8).expand(2, 8), torch.ones(1, 1, 8, 8).triu(1).bool()
    for step in range(20):
        ids = (torch.arange(9) * 3 + torch.tensor([[step % 4], [7 * (step % 4)]])) % 64
        loss = model(ids[:, :8], positions, mask, labels=ids[:, 1:].contiguous(), **hook)
        loss.mean().backward()
        for p in model.parameters():
            if getattr(p, "sequence_parallel", False):
                torch.distributed.all_reduce(p.grad, group=group)
        first = first or [p.grad.clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, first, [p.detach() for p in model.parameters()]


def learns(me: Rank, tied: bool, split: bool) -> dict[str, Tensor]:
    setup()
    calls: list[int] = []

    def processor(*given: Any, **more: Any) -> Any:
        calls.append(1)
        return megatron.output_processor(*given, **more)

    ours = trained(tied, split, output_processor=processor)
    theirs = trained(tied, split)
    assert len(calls) == 20
    assert theirs[0][-1].mean() < theirs[0][0].mean() - 0.5
    for mine, own in zip(ours, theirs):
        for a, e in zip(mine, own, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5)
    return {}


def needs_output_processor() -> None:
    from megatron.core.models.gpt.gpt_model import GPTModel

    if "output_processor" not in inspect.signature(GPTModel.forward).parameters:
        pytest.skip(f"Megatron-Core {core.__version__} has no output_processor; 0.18 has")


@pytest.mark.parametrize("split", [False, True], ids=["", "sequence parallel"])
def test_module(pair: ranks.Group, split: bool) -> None:
    pair.call(module, split)


@pytest.mark.parametrize("split", [False, True], ids=["", "sequence parallel"])
def test_output_processor(pair: ranks.Group, split: bool) -> None:
    needs_output_processor()
    pair.call(processor, split)


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("split", [False, True], ids=["", "sequence parallel"])
def test_a_model_learns_the_same(pair: ranks.Group, tied: bool, split: bool) -> None:
    needs_output_processor()
    pair.call(learns, tied, split)
