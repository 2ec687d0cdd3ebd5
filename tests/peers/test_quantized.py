# SPDX-License-Identifier: Apache-2.0
"""Quantized heads, with torchao, bitsandbytes and transformers' own layers: refused by the patch,
and one that is left out is served."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

torchao = pytest.importorskip("torchao.quantization")
bitsandbytes = pytest.importorskip("bitsandbytes")
peft = pytest.importorskip("peft")

import transformers  # noqa: E402

from logitless.integrations import patch_transformers  # noqa: E402

HIDDEN, VOCAB = 64, 96
WAY = 'llm_int8_skip_modules=\\["lm_head"\\]|modules_to_not_convert|leave the head unquantized'


def llama(dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).to(dtype)


def with_ao(config: str, on: str = "lm_head", **options: Any) -> Any:
    model = llama()
    made = getattr(torchao, config)(**options)
    torchao.quantize_(model, made, lambda module, name: name.endswith(on))
    return model


def with_head(kind: str, parameter: str, **options: Any) -> Any:
    """bitsandbytes quantizes a weight when it is moved."""
    model = llama()
    head = getattr(bitsandbytes.nn, kind)(HIDDEN, VOCAB, bias=False, **options)
    given = {k: v for k, v in options.items() if k in ("quant_storage", "has_fp16_weights")}
    weight = model.lm_head.weight.data
    head.weight = getattr(bitsandbytes.nn, parameter)(weight, requires_grad=False, **given)
    model.lm_head = head.to("cpu")
    return model


def in_a_plain_linear(model: Any) -> Any:
    """The quantized parameter in a layer of torch's."""
    weight = model.lm_head.weight
    model.lm_head = torch.nn.Linear(HIDDEN, VOCAB, bias=False, device="meta")
    model.lm_head.weight = weight
    return model


def of_transformers(module: str, kind: str, *more: Any) -> Any:
    model = llama()
    cls = getattr(importlib.import_module(f"transformers.integrations.{module}"), kind)
    model.lm_head = cls(HIDDEN, VOCAB, *more)
    return model


def with_lora(model: Any) -> Any:
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["lm_head"])
    return peft.get_peft_model(model, config)


def in_float8() -> Any:
    model = llama()
    weight = model.lm_head.weight.data.to(torch.float8_e4m3fn)
    model.lm_head.weight = torch.nn.Parameter(weight, requires_grad=False)
    return model


def in_4_bits(**options: Any) -> Any:
    return with_head("Linear4bit", "Params4bit", **options)


def in_8_bits(**options: Any) -> Any:
    return with_head("Linear8bitLt", "Int8Params", has_fp16_weights=False, **options)


BF16 = {"quant_storage": torch.bfloat16}
HEADS: dict[str, tuple[Callable[[], Any], str]] = {
    "torchao int8": (lambda: with_ao("Int8WeightOnlyConfig"), "Int8Tensor"),
    "torchao int8, dynamic": (
        lambda: with_ao("Int8DynamicActivationInt8WeightConfig"), "Int8Tensor"
    ),
    "torchao float8": (lambda: with_ao("Float8WeightOnlyConfig"), "Float8Tensor"),
    "torchao intx": (lambda: with_ao("IntxWeightOnlyConfig"), "IntxUnpackedToInt8Tensor"),
    "torchao within LoRA": (lambda: with_lora(with_ao("Int8WeightOnlyConfig")), "lm_head"),
    "bitsandbytes 8": (in_8_bits, "Linear8bitLt"),
    "bitsandbytes 4": (in_4_bits, "Linear4bit"),
    "bitsandbytes 4, stored in bf16": (lambda: in_4_bits(**BF16), "Linear4bit"),
    "8 bits in a plain layer": (lambda: in_a_plain_linear(in_8_bits()), "lm_head.weight is int8"),
    "4 bits in a plain layer": (lambda: in_a_plain_linear(in_4_bits()), "lm_head.weight is uint8"),
    "4 bits in a plain layer, in bf16": (
        lambda: in_a_plain_linear(in_4_bits(**BF16)), "lm_head.weight is a bitsandbytes"
    ),
    "bitsandbytes 8 within LoRA": (lambda: with_lora(in_8_bits()), "Linear8bitLt"),
    "bitsandbytes 4 within LoRA": (lambda: with_lora(in_4_bits()), "Linear4bit"),
    "float8": (in_float8, "lm_head.weight is float8_e4m3fn"),
    "FP8Linear": (lambda: of_transformers("finegrained_fp8", "FP8Linear"), "FP8Linear"),
    "FbgemmFp8Linear": (
        lambda: of_transformers("fbgemm_fp8", "FbgemmFp8Linear", False), "FbgemmFp8"
    ),
    "BitLinear": (lambda: of_transformers("bitnet", "BitLinear", False), "BitLinear"),
    "AutoBitLinear": (lambda: of_transformers("bitnet", "AutoBitLinear", False), "AutoBitLinear"),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADS)
def test_a_quantized_head_is_refused_by_the_patch(name: str) -> None:
    make, kind = HEADS[name]
    model = make()
    with pytest.raises((NotImplementedError, TypeError), match=f"(?s){kind}.*({WAY})"):
        patch_transformers(model)


@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_a_head_that_is_left_out_is_served(config: str) -> None:
    model, ids = with_ao(config, on="down_proj"), torch.randint(1, VOCAB, (2, 9))
    batch = {"input_ids": ids, "labels": ids}
    expected = model(**batch).loss
    with patch_transformers(model) as patched:
        output = patched(**batch)
    assert output.logits is None
    torch.testing.assert_close(output.loss, expected.float(), rtol=1e-2, atol=1e-2)
