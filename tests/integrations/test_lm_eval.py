# SPDX-License-Identifier: Apache-2.0
"""lm-evaluation-harness: our model class gives the same as its own, for tasks and requests."""

from __future__ import annotations

import json
import pathlib
import random
from typing import Any

import peft
import pytest
import tokenizers
import torch
import transformers
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM

import support
from logitless import LogitlessError
from logitless.integrations.lm_eval import LogitlessLM
from support import Calls

WORDS = [f"w{i}" for i in range(support.VOCAB - 3)]
TOLERANCE = 1e-4
LENGTH = 32  # the model's maximum length


def tokenizer() -> Any:
    words = {word: i for i, word in enumerate(["<pad>", "<s>", "<unk>", *WORDS])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="<s>",
        unk_token="<unk>",
    )


def gemma() -> Any:
    """A model whose logits have a softcap."""
    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        vocab_size=support.VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=LENGTH,
        final_logit_softcapping=2.0, initializer_range=0.5, pad_token_id=0, bos_token_id=1,
        eos_token_id=1,
    )  # fmt: skip
    return transformers.Gemma2ForCausalLM(config)


def prompted() -> Any:
    """A model with a learned prompt of three tokens before every sequence."""
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    return peft.get_peft_model(support.llama(), config)


MODELS = {"llama": support.llama, "gemma": gemma, "prompt": prompted}


def pair(make: Any = support.llama, **options: Any) -> tuple[Any, Any]:
    """Ours and theirs, of equal models."""
    models = make().eval(), make().eval()
    ours = LogitlessLM(models[0], tokenizer=tokenizer(), **options)
    return ours, HFLM(models[1], backend="causal", tokenizer=tokenizer(), **options)


def text(words: int, seed: int = 0) -> str:
    numbers = random.Random(seed)
    return " ".join(numbers.choice(WORDS) for _ in range(words))


def asked(kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
    return [
        Instance(request_type=kind, doc={}, arguments=given, idx=i, metadata=("tiny", i, 1))
        for i, given in enumerate(arguments)
    ]


def pairs() -> list[tuple[str, str]]:
    """Choices that share a context, empty contexts, and more tokens than the model's maximum."""
    made = [(text(5, i), f" {text(n, 40 + i)}") for i, n in enumerate((1, 2, 3, 7))]
    made += [("w1 w2 w3", f" {word}") for word in WORDS]  # one of WORDS is the most likely
    made += [("w1 w2 w3", " w4 w5"), ("w1 w2 w3 w4", " w5"), ("w1 w2 w3 w4", " w6")]
    made += [("", "w3 w4"), ("", "w9"), ("w5 ", "w6")]
    made += [(text(LENGTH - 1, 7), f" {text(n, 8)}") for n in (1, 2, 3, 20)]
    return [*made, made[0]]


def same(ours: list[Any], theirs: list[Any]) -> None:
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs):
        assert mine[0] == pytest.approx(other[0], abs=TOLERANCE)
        assert mine[1] is other[1] and isinstance(mine[0], float)
    assert len({round(value, 3) for value, _ in ours}) > len(ours) // 2


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("batch_size", [1, 4, "auto"])
def test_loglikelihood(make: Any, batch_size: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pair(make, batch_size=batch_size, max_batch_size=4)
    requests = asked("loglikelihood", *pairs())
    # With this cache, lm-eval 0.4.13 gives a shorter continuation of a shared input the logits of
    # another position.
    theirs.logits_cache = False
    want = theirs.loglikelihood(requests, disable_tqdm=True)
    monkeypatch.setattr(HFLM, "_model_call", None)  # ours must not compute logits
    got = ours.loglikelihood(requests, disable_tqdm=True)
    same(got, want)
    assert sum(greedy for _, greedy in got) in range(1, len(got) // 4)


def test_one_input_serves_the_choices_of_a_context(calls: Calls) -> None:
    requests = asked("loglikelihood", *(("w1 w2 w3", f" {word}") for word in WORDS))
    for cached, passes in ((True, 1), (False, len(WORDS))):
        ours, theirs = pair(logits_cache=cached)
        calls.taken()
        same(
            ours.loglikelihood(requests, disable_tqdm=True),
            theirs.loglikelihood(requests, disable_tqdm=True),
        )
        assert calls.taken() == passes


def test_greedy_is_of_every_token() -> None:
    ours, theirs = pair()
    (likeliest,) = theirs.generate_until(
        asked("generate_until", ("w1 w2", {"until": ["<"], "max_gen_toks": 1})), disable_tqdm=True
    )
    other = next(word for word in WORDS if word != likeliest)
    for first in (likeliest, other):
        requests = asked("loglikelihood", *(("w1 w2", f" {first} {word}") for word in WORDS))
        got = ours.loglikelihood(requests, disable_tqdm=True)
        same(got, theirs.loglikelihood(requests, disable_tqdm=True))
        assert sum(greedy for _, greedy in got) == (first == likeliest)


@pytest.mark.parametrize("batch_size", [1, 3, "auto"])
def test_loglikelihood_rolling(batch_size: Any) -> None:
    ours, theirs = pair(batch_size=batch_size, max_batch_size=3)
    texts = asked("loglikelihood_rolling", *((text(n, n),) for n in (1, 5, LENGTH, 75, 75)))
    got = ours.loglikelihood_rolling(texts, disable_tqdm=True)
    want = theirs.loglikelihood_rolling(texts, disable_tqdm=True)
    assert got == pytest.approx(want, abs=TOLERANCE)
    assert got[3] == pytest.approx(got[4]) and got[3] < got[1] < 0


def test_generate_until_is_the_models_own() -> None:
    ours, theirs = pair(batch_size=2)
    until = {"until": ["w7"], "max_gen_toks": 8, "do_sample": False}
    requests = asked("generate_until", *((text(n, n), until) for n in (3, 4, 9)))
    got = ours.generate_until(requests, disable_tqdm=True)
    assert got == theirs.generate_until(requests, disable_tqdm=True) and any(got)


def test_mixed_precision() -> None:
    ours, theirs = pair(mixed_precision_dtype="bfloat16")
    requests = asked("loglikelihood", *pairs()[:8])
    got = ours.loglikelihood(requests, disable_tqdm=True)
    want = theirs.loglikelihood(requests, disable_tqdm=True)
    # lm-eval rounds its logits and their log-softmax to bf16
    for mine, other in zip(got, want):
        assert mine[0] == pytest.approx(other[0], abs=0.05 * abs(other[0]) + 0.05)


def test_memory_is_that_of_the_head() -> None:
    ours, _ = pair()
    bounded = LogitlessLM(support.llama().eval(), tokenizer=tokenizer(), memory="1MiB")
    requests = asked("loglikelihood", *pairs()[:6])
    want = ours.loglikelihood(requests, disable_tqdm=True)
    same(bounded.loglikelihood(requests, disable_tqdm=True), want)
    with pytest.raises(LogitlessError, match="memory"):
        LogitlessLM(support.llama().eval(), tokenizer=tokenizer(), memory="64XB")


def tasks(folder: pathlib.Path) -> list[dict[str, Any]]:
    rows = [
        {"text": text(6, i), "choices": [f"w{i % 50}", f"w{i % 50 + 1} w3", "w2"], "right": i % 3}
        for i in range(12)
    ]
    path = folder / "rows.json"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    common = {
        "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(path)}},
        "test_split": "test",
    }  # fmt: skip
    chosen = {
        "task": "tiny_choice", "output_type": "multiple_choice", "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}", "doc_to_target": "{{right}}", **common,
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    }  # fmt: skip
    rolling = {
        "task": "tiny_perplexity", "output_type": "loglikelihood_rolling", "doc_to_text": "",
        "doc_to_target": "{{text}}", "metric_list": [{"metric": "word_perplexity"}], **common,
    }  # fmt: skip
    return [chosen, rolling]


def test_a_task_has_the_same_results(tmp_path: pathlib.Path, monkeypatch: Any) -> None:
    """The model is read from a folder and selected by its name, as by lm-eval's command line."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    support.llama().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    assert get_model("logitless") is LogitlessLM
    results, samples = [], []
    for name in ("logitless", "hf"):
        found = simple_evaluate(
            model=name, model_args=f"pretrained={folder},dtype=float32", device="cpu",
            batch_size=4, tasks=tasks(tmp_path), bootstrap_iters=0,
        )  # fmt: skip
        results.append(found["results"])
        samples.append(
            [s["resps"] for task in sorted(found["samples"]) for s in found["samples"][task]]
        )
    numbers = [
        [v for task in sorted(r) for v in r[task].values() if isinstance(v, float)] for r in results
    ]
    assert len(numbers[0]) >= 3 and numbers[0] == pytest.approx(numbers[1], abs=TOLERANCE)
    assert len(samples[0]) == len(samples[1]) == 24


def test_what_is_refused() -> None:
    with pytest.raises(LogitlessError, match="backend is 'seq2seq'; allowed: 'causal'"):
        LogitlessLM(support.llama(), "seq2seq", tokenizer=tokenizer())
    with pytest.raises(LogitlessError, match="softmax_dtype is bfloat16; allowed: None, float32"):
        LogitlessLM(support.llama(), tokenizer=tokenizer(), softmax_dtype="bfloat16")
    ours, _ = pair()
    for continuation in ([], [3] * (LENGTH + 1)):
        with pytest.raises(LogitlessError, match=f"{len(continuation)} of continuation; allowed"):
            ours._loglikelihood_tokens([(None, [1], continuation)])
