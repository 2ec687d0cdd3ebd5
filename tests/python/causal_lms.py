# SPDX-License-Identifier: Apache-2.0
"""Every causal LM class of transformers as a tiny model: patched against unpatched.

`python tests/python/causal_lms.py [--compiled] [KIND ...]` prints the state of each.
"""

from __future__ import annotations

import copy
import inspect
import sys
import warnings
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from logitless import LogitlessError
from logitless.integrations import patch_transformers

# Small sizes; a configuration takes those whose names it has.
SMALL: dict[str, Any] = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 40,
    "n_positions": 64, "d_model": 32, "n_layers": 2, "n_heads": 4, "ffn_dim": 40, "num_layers": 2,
    "num_heads": 4, "d_ff": 40, "d_kv": 8, "num_local_experts": 4, "num_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24, "n_group": 1, "topk_group": 1, "q_lora_rank": 16,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "first_k_dense_replace": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "word_embed_proj_dim": 32, "sliding_window": 16, "rotary_dim": 8, "state_size": 8,
    "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1,
    "mamba_d_ssm": 64, "mamba_expand": 2, "time_step_rank": 4, "attention_window": 8,
    "lru_width": 32, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 99,
    "num_kv_shared_layers": 0, "laurel_rank": 4, "decoder_layers": 2, "decoder_attention_heads": 4,
    "decoder_ffn_dim": 40, "encoder_layers": 2, "max_target_positions": 64, "image_size": 16,
    "patch_size": 8, "depth": 1, "embed_dim": 32, "out_hidden_size": 32, "projection_dim": 32,
}  # fmt: skip
# Values for single models; they replace SMALL's, and None removes a name. Scales whose default is 1
# get another value, so that ignoring them shows.
VISION = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4,
    "image_size": 16, "patch_size": 8, "output_channels": 32, "mlp_dim": 40, "window_size": 2,
    "global_attn_indexes": [0], "d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 4,
    "encoder_ffn_dim": 40,
}  # fmt: skip
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
SPECIAL: dict[str, dict[str, Any]] = {
    "bailing_hybrid": HYBRID,
    "bamba": {"z_loss_coefficient": 1e-2, "attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "cohere": {"logit_scale": 0.3}, "cohere2": {"logit_scale": 0.3},
    "cohere_compass_text": {"logit_scale": 0.3, "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 1e4},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "kv_n_heads": 2}},
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": {"num_key_value_heads": 4},
    "falcon_h1": {"lm_head_multiplier": 0.25},
    "gemma3": {"vision_config": VISION},
    "git": {"vision_config": VISION},
    "got_ocr2": {"vision_config": VISION},
    "gpt_neo": {"attention_types": [[["global"], 2]]},
    "granite": {"logits_scaling": 3.0}, "granitemoe": {"logits_scaling": 3.0},
    "granitemoehybrid": HYBRID,
    "hyperclovax": {"logits_scaling": 0.25},
    "inkling_text": {"unpadded_vocab_size": 90},
    "inkling2_text": {"unpadded_vocab_size": 90}, "inkling2_loop_text": {"unpadded_vocab_size": 90},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": HYBRID,
    "lfm2_moe": {"layer_types": ["full_attention", "conv"]},
    "longcat_flash": {"ffn_hidden_size": 40, "expert_ffn_hidden_size": 24, "zero_expert_num": 2,
                      "moe_topk": 2},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1},
    "moshi": {"audio_vocab_size": 64},
    "moss_transcribe_diarize": {"audio_config": VISION},
    "qwen3_5_text": HYBRID, "qwen3_5_moe_text": HYBRID, "qwen3_next": HYBRID,
    "qwen4_exp_text": HYBRID,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"is_decoder": True, "axial_pos_shape": (1, 11), "axial_pos_embds_dim": (16, 16),
                 "attn_layers": ["local"], "feed_forward_size": 40, "attention_head_size": 8,
                 "hidden_dropout_prob": 0.0, "local_attention_probs_dropout_prob": 0.0},
    "roc_bert": {"pronunciation_vocab_size": 99, "shape_vocab_size": 99,
                 "pronunciation_embed_dim": 8, "shape_embed_dim": 8},
    "xlm": {"emb_dim": 32},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
MOST = 16e6  # parameters of a model, at most
DROPPED = ((), ("sliding_window",), ("head_dim",), ("num_key_value_heads",))


def kinds() -> dict[str, str]:
    """The model types, each with the name of its class."""
    found = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
    return {kind: cls if isinstance(cls, str) else cls[0] for kind, cls in sorted(found)}


def _small(cls: Any, special: dict[str, Any]) -> dict[str, Any]:
    names = {*inspect.signature(cls.__init__).parameters, *getattr(cls, "__dataclass_fields__", {})}
    given = {name: value for name, value in SMALL.items() if name in names}
    if "kv_lora_rank" in names:
        given["num_key_value_heads"] = 4
    for name, part in getattr(cls, "sub_configs", {}).items():
        if inspect.isclass(part) and part is not transformers.AutoConfig:
            given[name] = _small(part, SPECIAL.get(getattr(part, "model_type", ""), {}))
    given |= {name: value for name, value in special.items() if name in names or value is None}
    return {name: value for name, value in given.items() if value is not None}


def configuration(kind: str) -> Any:
    cls = CONFIG_MAPPING[kind]
    special = SPECIAL.get(kind, {})
    error: Exception = ValueError(kind)
    for dropped in DROPPED:
        try:
            config = cls(**_small(cls, {**special, **dict.fromkeys(dropped)}))
        except Exception as found:
            error = found
            continue
        wanted = getattr(transformers, kinds()[kind]).config_class
        parts = [getattr(config, name) for name in getattr(config, "sub_configs", {})]
        for found in (config, *parts):
            if isinstance(found, wanted) or not parts:
                return found
    raise error


def make(kind: str) -> Any:
    """The model in f32, with weights that make unequal logits."""
    cls = getattr(transformers, kinds()[kind])
    config = configuration(kind)
    with torch.device("meta"):
        size = sum(p.numel() for p in cls(copy.deepcopy(config)).parameters())
    if size > MOST:
        raise ValueError(f"it has {size} parameters")
    torch.manual_seed(0)
    config.use_cache = False
    model = cls(config).train(kind == "reformer")
    for parameter in model.parameters():
        if parameter.dim() > 1 and parameter.std() < 0.1:
            torch.nn.init.normal_(parameter, std=0.15)
    return model


def batch(model: Any) -> dict[str, Any]:
    rows = model.get_output_embeddings().weight.shape[0] if model.get_output_embeddings() else 90
    ids = torch.randint(3, min(rows, 90), (2, 11), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :4] = -100
    given = {"input_ids": ids, "labels": labels}
    if model.config.model_type == "git":
        given["pixel_values"] = torch.zeros(2, 3, 16, 16)
    return given


def _run(called: Any, model: Any, given: dict[str, Any]) -> list[Any]:
    loss = called(**given).loss
    wanted = [p for p in model.parameters() if p.requires_grad]
    return [loss, *torch.autograd.grad(loss, wanted, allow_unused=True)]


def _apart(found: list[Any], expected: list[Any]) -> str:
    """What differs, or nothing."""
    if abs(float(found[0] - expected[0])) > 1e-4:
        return f"the loss is {float(found[0])} for {float(expected[0])}"
    most = max([1.0, *(float(e.abs().max()) for e in expected[1:] if e is not None)])
    for a, e in zip(found[1:], expected[1:], strict=True):
        a = torch.zeros_like(e) if a is None and e is not None else a
        e = torch.zeros_like(a) if e is None and a is not None else e
        if a is not None and not float((a - e).abs().max()) <= 2e-4 * most:
            return f"a gradient is off by {float((a - e).abs().max())}"
    return ""


def _backbones(model: Any) -> list[Any]:
    """The parts that take most of the time to compile. What a model does to its logits is outside
    of them. Some models (ProphetNet) call only a part of their base model."""
    head = model.get_output_embeddings()
    found = {id(part): part for part in (model.base_model, model.get_decoder())}
    return [part for part in found.values() if all(m not in (model, head) for m in part.modules())]


def state(kind: str, compiled: bool) -> str:
    """One of "served", "refused: WHY", "not built: WHY" and "WRONG: WHAT"."""
    try:
        model = make(kind)
    except Exception as error:
        return f"not built: {type(error).__name__}: {' '.join(str(error).split())[:90]}"
    try:
        patch_transformers(model).unpatch()
    except LogitlessError as error:
        return f"refused: {str(error)[:120]}"
    try:
        given = batch(model)
        expected = _run(model, model, given)
    except Exception as error:
        return f"not built: {type(error).__name__}: {' '.join(str(error).split())[:90]}"
    if compiled:
        for backbone in _backbones(model):
            backbone.forward = torch._dynamo.disable(backbone.forward)
    try:
        patch_transformers(model)
        torch._dynamo.reset()
        called = torch.compile(model, backend="aot_eager") if compiled else model
        found = [_run(called, model, given) for _ in range(2)]
    except LogitlessError as error:
        return f"refused: {str(error)[:120]}"
    except Exception as error:
        return f"WRONG: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    apart = [what for what in (_apart(each, expected) for each in found) if what]
    return f"WRONG: {apart[0]}" if apart else "served"


def main() -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    compiled = "--compiled" in sys.argv
    asked = [kind for kind in sys.argv[1:] if not kind.startswith("--")]
    for kind in asked or kinds():
        print(f'    "{kind}": "{state(kind, compiled)}",', flush=True)


if __name__ == "__main__":
    main()
