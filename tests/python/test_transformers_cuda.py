# SPDX-License-Identifier: Apache-2.0
"""A patched model on a GPU, where only the first call waits for its check."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from logitless.integrations import patch_transformers
from test_transformers_rows import ToyForCausalLM, batch

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def given() -> dict[str, Any]:
    return {name: tensor.cuda() for name, tensor in batch().items()}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_right_model_trains_as_its_own(compiled: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(1)
    own, model = ToyForCausalLM().cuda(), ToyForCausalLM().cuda()
    model.load_state_dict(own.state_dict())
    patch_transformers(model)
    called = torch.compile(model, backend="aot_eager") if compiled else model
    for _ in range(3):
        expected, loss = own(**given()).loss, called(**given()).loss
        torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
        grads = torch.autograd.grad(loss, list(model.parameters()))
        for a, e in zip(grads, torch.autograd.grad(expected, list(own.parameters()))):
            torch.testing.assert_close(a, e, rtol=1e-3, atol=1e-5)


def test_a_model_that_is_wrong_at_first_is_an_error_at_once() -> None:
    model = ToyForCausalLM(lambda z, *_: z * 0.5).cuda()
    patch_transformers(model)
    with pytest.raises(NotImplementedError, match="changes its logits"):
        model(**given())


def test_a_model_that_turns_wrong_has_a_loss_of_nan_and_an_error_later() -> None:
    model = ToyForCausalLM(lambda z, _, step: z * 2 if step else z).cuda()
    patch_transformers(model)
    for _ in range(2):
        assert model(**given()).loss.isfinite()
    model.step = 1
    loss = model(**given()).loss
    assert loss.isnan()
    loss.backward()
    assert model.lm_head.weight.grad.isnan().any()
    model.step = 0
    for _ in range(2):  # of the forward pass, and of the backward pass
        torch.cuda.synchronize()
        with pytest.raises(NotImplementedError, match="in an earlier call"):
            model(**given())
    assert model(**given()).loss.isfinite()


def test_more_made_of_the_logits_makes_gradients_nan_and_an_error_later() -> None:
    model = ToyForCausalLM(extra=lambda z: 1e-2 * z.logsumexp(-1).square().nanmean()).cuda()
    patch_transformers(model)
    model(**given()).loss.backward()
    assert model.lm_head.weight.grad.isnan().any()
    torch.cuda.synchronize()
    with pytest.raises(NotImplementedError, match=r"in an earlier call .* makes of its logits"):
        model(**given())


@pytest.mark.parametrize("metrics", [(), ("accuracy", "entropy", "logprob", "rank")])
def test_a_step_can_be_captured(metrics: tuple[str, ...]) -> None:
    """Nothing in a step waits for the device, not even metrics."""
    model, tensors = ToyForCausalLM().cuda(), given()
    patch_transformers(model, metrics=metrics)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model.zero_grad(set_to_none=False)
            model(**tensors).loss.backward()
    torch.cuda.current_stream().wait_stream(side)
    expected = model.lm_head.weight.grad.clone()
    found = dict(getattr(model(**tensors), "metrics", {}))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model.zero_grad(set_to_none=False)
        output = model(**tensors)
        loss = output.loss
        loss.backward()
    for _ in range(5):
        graph.replay()
    torch.cuda.synchronize()
    assert loss.isfinite()
    torch.testing.assert_close(model.lm_head.weight.grad, expected, rtol=0, atol=0)
    assert len(found) == len(metrics) + bool(metrics)
    for name, value in found.items():
        torch.testing.assert_close(output.metrics[name], value, rtol=0, atol=0)
