# SPDX-License-Identifier: Apache-2.0
"""accelerate's device_map: layers and the head on the CPU, on disk or without memory until they are
called, and on a machine with GPUs on them too. A patched model is compared with an unpatched one.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import accelerate
import pytest
import torch
import transformers

import support
from logitless.integrations import patch_transformers
from logitless.integrations.transformers import score

MAIN: Any = "cpu" if support.ON_CPU else 0
HERE = torch.device("cpu" if support.ON_CPU else "cuda:0")
NAMES = ("model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm",
         "model.rotary_emb", "lm_head")  # fmt: skip
Placed = Callable[[Any, pathlib.Path], Any]


def offloaded(model: Any, folder: pathlib.Path) -> Any:
    """Every weight is kept elsewhere until its module is called."""
    return accelerate.cpu_offload(model, execution_device=HERE)


def on_disk(model: Any, folder: pathlib.Path) -> Any:
    return accelerate.disk_offload(model, folder / "weights", execution_device=HERE)


def of(*away: str, to: Any = "disk") -> Placed:
    """dispatch_model with these modules on disk, or where `to` says."""

    def placed(model: Any, folder: pathlib.Path) -> Any:
        device_map = {name: to if name in away else MAIN for name in NAMES}
        return accelerate.dispatch_model(
            model, device_map, main_device=MAIN, offload_dir=folder / "weights", force_hooks=True
        )

    return placed


def loaded(model: Any, folder: pathlib.Path) -> Any:
    """load_checkpoint_and_dispatch into a model without memory, the head on disk unless it is tied,
    which accelerate wants on one device with the embedding."""
    model.save_pretrained(folder / "model")
    with accelerate.init_empty_weights():
        made = transformers.LlamaForCausalLM(model.config)
    made.tie_weights()
    away = ("model.layers.1" if model.config.tie_word_embeddings else "lm_head", "model.norm")
    device_map = {name: "disk" if name in away else MAIN for name in NAMES}
    return accelerate.load_checkpoint_and_dispatch(
        made, folder / "model", device_map=device_map, offload_folder=folder / "weights",
        force_hooks=True,
    )  # fmt: skip


def automatic(model: Any, folder: pathlib.Path) -> Any:
    """from_pretrained's device_map, which names one device: the model is small."""
    model.save_pretrained(folder / "model")
    return transformers.LlamaForCausalLM.from_pretrained(folder / "model", device_map="auto")


def from_pretrained_on_disk(model: Any, folder: pathlib.Path) -> Any:
    model.save_pretrained(folder / "model")
    device_map = {"model": MAIN, "lm_head": "disk"}
    if model.config.tie_word_embeddings:
        device_map = {"model.embed_tokens": MAIN, "model.layers": "disk", "model.norm": MAIN,
                      "model.rotary_emb": MAIN, "lm_head": MAIN}  # fmt: skip
    return transformers.LlamaForCausalLM.from_pretrained(
        folder / "model", device_map=device_map, offload_folder=folder / "weights"
    )


PLACES: dict[str, Placed] = {
    "cpu_offload": offloaded,
    "disk_offload": on_disk,
    "the head on disk": of("lm_head"),
    "a layer on disk": of("model.layers.1"),
    "head and norm on disk": of("lm_head", "model.norm"),
    "load_checkpoint_and_dispatch": loaded,
    "from_pretrained, auto": automatic,
    "from_pretrained, disk": from_pretrained_on_disk,
}
if not support.ON_CPU:
    PLACES |= {"the head on the CPU": of("lm_head", to="cpu")}
if torch.cuda.device_count() > 1 and not support.ON_CPU:
    PLACES |= {
        "head and norm on the other GPU": of("lm_head", "model.norm", to=1),
        "a layer on the other GPU": of("model.layers.1", to=1),
        "layers and head on the other GPU": of("model.layers.1", "lm_head", to=1),
    }


def evaluated(model: Any) -> list[float]:
    model.eval()
    with torch.no_grad():
        return [model(**support.batch(step)).loss.item() for step in range(3)]


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("order", ["patch last", "patch first", "class"])
@pytest.mark.parametrize("name", PLACES)
def test_an_evaluation_is_the_models_own(
    name: str, order: str, tied: bool, tmp_path: pathlib.Path, calls: support.Calls
) -> None:
    place, model = PLACES[name], support.llama(tie_word_embeddings=tied)
    own = support.llama(tie_word_embeddings=tied)
    expected = evaluated(own)
    with torch.no_grad():
        logits = own(support.batch(0)["input_ids"]).logits
    made_anew = name.startswith(("from", "load"))
    if tied and name.endswith("other GPU") and "head" in name:
        pytest.skip("accelerate keeps what is tied on one device")
    if order == "patch first" and made_anew:
        pytest.skip("the model is made by this call: its class may be patched before")
    if order == "class":
        if not made_anew:
            pytest.skip("the model is there before")
        with patch_transformers(transformers.LlamaForCausalLM):
            placed = place(support.llama(tie_word_embeddings=tied), tmp_path)
            found, served = run(placed, calls)
    else:
        if order == "patch first":
            patch_transformers(model)
        placed = place(model, tmp_path)
        patch_transformers(placed)
        found, served = run(placed, calls)
    assert served[0] == 3
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-5, atol=1e-5)
    ids = support.batch(0)["input_ids"]
    target = ids[[0, 1], [4, 7]]
    logp = logits.double().log_softmax(-1)[[0, 1], [3, 6], target]
    torch.testing.assert_close(served[1].double(), logp, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(served[2], logits, rtol=1e-5, atol=1e-5)


def run(model: Any, calls: support.Calls) -> Any:
    calls.taken()
    found, count = evaluated(model), calls.taken()
    ids = support.batch(0)["input_ids"]
    rows, positions = torch.tensor([0, 1]), torch.tensor([3, 6])
    scores, _ = score(model, ids, rows, positions, ids[rows, positions + 1])
    with torch.no_grad():
        logits = model(ids).logits
    return found, (count, scores, logits)


def trained(model: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach=False)
    losses = []
    for step in range(support.STEPS):
        loss = model(**support.batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("order", ["patch last", "patch first"])
def test_a_model_with_hooks_is_trained(order: str, tied: bool, tmp_path: pathlib.Path) -> None:
    """dispatch_model with all on one device, or on two GPUs: hooks run, and parameters stay."""
    place = of() if tied or "a layer on the other GPU" not in PLACES else of("lm_head", to=1)
    own, expected = trained(place(support.llama(tie_word_embeddings=tied), tmp_path))
    model = support.llama(tie_word_embeddings=tied)
    if order == "patch first":
        patch_transformers(model)
    model = place(model, tmp_path)
    patch = patch_transformers(model)
    losses, parameters = trained(model)
    assert patch.calls == support.STEPS
    support.same_run(losses, own)
    support.same_parameters(parameters.items(), expected.items())


@pytest.mark.parametrize("patched", [False, True], ids=["", "patched"])
def test_what_is_offloaded_is_not_trained(patched: bool) -> None:
    """accelerate's own hooks leave no gradient where a weight has no memory, patched or not."""
    model = accelerate.cpu_offload(support.llama(), execution_device=HERE)
    if patched:
        patch_transformers(model)
    model(**support.batch(0)).loss.backward()
    assert all(p.is_meta and p.grad is None for p in model.parameters())
