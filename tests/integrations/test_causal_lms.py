# SPDX-License-Identifier: Apache-2.0
"""Every causal LM class of transformers: what the patch makes of it.

A class whose state changes fails here, and so does one that comes or goes. The models are
those of tests/python/causal_lms.py, which prints the lines of a table too.
"""

from __future__ import annotations

import gc

import pytest

import causal_lms

SERVED = """
afmoe apertus apertus1p5_text arcee aria_text axk1 axk2 bailing_hybrid beam bert bert-generation
big_bird biogpt bitnet bloom camembert codegen cohere cohere2 cohere2_moe cohere_compass_text ctrl
cwm data2vec-text deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 diffllama doge dots1
dots3_note_text electra emu3 ernie ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe falcon
falcon_h1 falcon_mamba flex_olmo flint gemma gemma2 gemma3 gemma3_text gemma3n_text gemma4
gemma4_text gemma4_unified gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt-sw3
gpt2 gpt_bigcode gpt_neo gpt_neox gpt_neox_japanese gpt_oss gptj granite granite_swa granitemoe
granitemoe_swa granitemoehybrid granitemoeshared helium hrm_text hunyuan_v1_dense hunyuan_v1_moe
hy_v3 hy_v4 hyperclovax inkling2_loop_text inkling2_text inkling_text internlm3 iquestcoder jais2
jamba jetmoe kimi_linear kolibri1 laguna lara_mini lfm2 lfm2_moe lfm3 llama llama4 llama4_text
longcat_flash mamba mamba2 megatron-bert mellum mimo_v2_flash minicpm3 minimax minimax_m2
minimax_m3_vl_text ministral ministral3 mistral mixtral mllama modernbert-decoder moshi mpt
nanochat nemotron nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe openai-gpt opt persimmon phi phi3
phi4_multimodal phimoe qwen2 qwen2_moe qwen3 qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text
qwen3_moe qwen3_next recurrent_gemma reformer rembert roberta roberta-prelayernorm roc_bert
roformer rwkv sarvam_mla sarvam_moe seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma
xglm xlm-roberta xlm-roberta-xl xlstm xmod youtu zamba zamba2 zaya
""".split()
OWN_CROSS_ENTROPY = """
bart bigbird_pegasus blenderbot blenderbot-small cpmant marian mbart mvp pegasus plbart trocr
whisper xlm xlnet
""".split()
# The others that are not served, each with the beginning of what `state` says.
OTHERS = {
    "dbrx": "not built: RuntimeError: torch.clamp",
    "gemma3n": "not built: ImportError: TimmWrapperModel requires",
    "gemma4_unified_assistant": "not built: ValueError: it has 2872140800",
    "gemma4_assistant": "not built: StrictDataclassClassValidationError: Class validation error ",
    "qwen4_exp": "not built: TypeError: unsupported operand",
    "qwen4_exp_text": "not built: TypeError: unsupported operand",
    "dots3_note": "not built: ValueError: `per_layer_config` keys",
    "blt": "not built: RuntimeError: mat1 and mat2 shapes",
    "got_ocr2": "not built: ValueError: it has 465591448",
    "moss_transcribe_diarize": "not built: ValueError: it has 597299496",
    "fuyu": "not built: ValueError: it has 9397965824",
    "bamba": "refused: BambaForCausalLM makes more of its logits",
    "git": "refused: labels has shape (2, 11); allowed: (2, 16)",
    "prophetnet": "refused: labels has shape (2, 11); allowed: (2, 2, 11), one ",
    "musicgen": "refused: the lm_head is a torch.nn.modules.container.ModuleL",
    "musicgen_melody": "refused: the lm_head is a torch.nn.modules.container.ModuleL",
    "dory": "refused: the lm_head is a transformers.models.dory.modeling_",
}
TABLE = {
    **dict.fromkeys(SERVED, "served"),
    **dict.fromkeys(OWN_CROSS_ENTROPY, "refused: "),
    **OTHERS,
}


def test_the_table_has_every_class() -> None:
    assert sorted(TABLE) == sorted(causal_lms.kinds())


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("kind", sorted(TABLE))
def test_a_class_is_served_right_or_refused(kind: str, compiled: bool) -> None:
    if compiled and TABLE[kind].startswith("not built"):
        pytest.skip(TABLE[kind])
    found = causal_lms.state(kind, compiled)
    gc.collect()
    assert found.startswith(TABLE[kind]), found
    if kind in OWN_CROSS_ENTROPY:
        assert "cross-entropy of its own" in found or "does not make its loss by its" in found
