# SPDX-License-Identifier: Apache-2.0
"""Models that change their logits: each gets the right loss or an error, compiled or not, also if
the change begins in a later call."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from logitless import LogitlessError
from logitless.integrations import _rows, patch_transformers

transformers = pytest.importorskip("transformers")

V, D = 61, 16
NEAR: dict[str, Any] = {"rtol": 2e-6, "atol": 1e-6}


class ToyForCausalLM(transformers.PreTrainedModel):  # type: ignore[misc]
    """An embedding and a head; `change` is what it does to its logits."""

    config_class = transformers.PretrainedConfig

    def __init__(
        self,
        change: Callable[..., Tensor] | None = None,
        relabel: Callable[..., Any] | None = None,
        extra: Callable[..., Tensor] | None = None,
    ) -> None:
        super().__init__(transformers.PretrainedConfig(vocab_size=V))
        self.embed = torch.nn.Embedding(V, D)
        self.norm = torch.nn.LayerNorm(D)
        self.lm_head = torch.nn.Linear(D, V, bias=False)
        self.change, self.relabel, self.extra = change, relabel, extra
        self.step = 0

    def get_output_embeddings(self) -> Any:
        return self.lm_head

    def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
        hidden = self.norm(self.embed(input_ids))
        logits = self.lm_head(hidden)
        if self.change is not None:
            logits = self.change(logits, hidden, self.step)
        loss = None
        if labels is not None:
            if self.relabel is not None:
                labels = self.relabel(labels, self.step)
            loss = self.loss_function(logits, labels, logits.shape[-1], **kwargs)
        if self.extra is not None:
            loss = loss + self.extra(logits)
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)


def masked(columns: Any, value: float) -> Callable[..., Tensor]:
    def change(z: Tensor, *_: Any) -> Tensor:
        dead = torch.zeros(V, dtype=torch.bool)
        dead[columns] = True
        return z.masked_fill(dead, value)

    return change


def swapped(z: Tensor, *_: Any) -> Tensor:
    order = torch.arange(V)
    order[[58, 59]] = order[[59, 58]]
    return z[..., order]


def halved_in_place(z: Tensor, *_: Any) -> Tensor:
    z *= 0.5
    return z


def one_biased(z: Tensor, *_: Any) -> Tensor:
    return z + 0.01 * (torch.arange(V) == V - 1)


# What the model does to its logits, what the patch is told, and at which call it is refused (None:
# never).
CHANGES: dict[str, tuple[Callable[..., Tensor], dict[str, Any], int | None]] = {
    "nothing": (lambda z, *_: z, {}, None),
    "f32": (lambda z, *_: z.float(), {}, None),
    "cut": (lambda z, *_: z[..., :50], {}, 0),
    "cut, told": (lambda z, *_: z[..., :50], {"vocab_size": 50}, None),
    "cut, told wrong": (lambda z, *_: z[..., :50], {"vocab_size": 49}, 0),
    "cut in front": (lambda z, *_: z[..., 11:], {"vocab_size": 50}, 0),
    "masked": (masked(slice(50, V), -torch.inf), {}, 0),
    "masked, told": (masked(slice(50, V), -torch.inf), {"vocab_size": 50}, None),
    "masked by the least number, told":
        (masked(slice(50, V), torch.finfo(torch.float32).min), {"vocab_size": 50}, None),
    "not masked, told": (lambda z, *_: z, {"vocab_size": 50}, 0),
    "masked in the middle": (masked(slice(10, 12), -torch.inf), {}, 0),
    "masked in the middle and behind":
        (masked([10, *range(50, V)], -torch.inf), {"vocab_size": 50}, 0),
    "moved": (lambda z, *_: z.roll(1, -1), {}, 0),
    "two swapped": (swapped, {}, 0),
    "turned around": (lambda z, *_: z.flip(-1), {}, 0),
    "the last one biased": (one_biased, {}, 0),
    "biased later": (lambda z, _, step: z + 0.01 if step else z, {}, 1),
    "the last one biased later": (lambda z, _, s: one_biased(z) if s else z, {}, 1),
    "scaled": (lambda z, *_: z * 0.5, {}, 0),
    "scaled in place": (halved_in_place, {}, 0),
    "scaled in place, told": (halved_in_place, {"logit_scale": 0.5}, None),
    "scaled later": (lambda z, _, step: z * 0.5 if step else z, {}, 1),
    "scaled until later, told": (lambda z, _, step: z if step else z * 2, {"logit_scale": 2}, 1),
    "clamped": (lambda z, *_: z.clamp(min=-50), {}, 0),
    "clamped above": (lambda z, *_: z.clamp(max=1000), {}, 0),
    "capped": (lambda z, *_: 30 * torch.tanh(z / 30), {}, 0),
    "capped, told": (lambda z, *_: 30 * torch.tanh(z / 30), {"softcap": 30.0}, None),
    "with the mean of the states": (lambda z, h, _: z + h.square().mean(), {}, 0),
    "with a state's mean": (lambda z, h, _: z + h.mean(-1, keepdim=True), {}, 0),
    "with the states of one row": (lambda z, h, _: z + h[:1, :1, :1], {}, 0),
    "of some tokens": (lambda z, *_: z[:, 1:], {}, 0),
}  # fmt: skip


def batch() -> dict[str, Tensor]:
    ids = torch.randint(0, 50, (2, 7), generator=torch.Generator().manual_seed(3))
    ids[1, 3] = 2
    labels = ids.clone()
    labels[0, :2] = -100
    return {"input_ids": ids, "labels": labels}


def gradients(model: Any, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def hold(
    model: Any, refused: int | None, compiled: bool, options: dict[str, Any],
    later: Callable[[Any], Any] | None = None, grad: bool = True,
) -> str:  # fmt: skip
    """Checks that calls give the loss and gradients of the unpatched model, and from call `refused`
    on an error of ours. Returns the last error's text."""
    # A wrong shape is dynamo's own error while it traces.
    errors = (LogitlessError, torch._dynamo.exc.TorchRuntimeError) if compiled else LogitlessError
    torch._dynamo.reset()
    own, said = copy.deepcopy(model), ""
    patch_transformers(model, **options)
    called = torch.compile(model, backend="aot_eager") if compiled else model
    for step in range(2 if compiled else 3):
        own.step = model.step = step
        if step and later is not None:
            later(own), later(model)
        given = batch()
        with torch.set_grad_enabled(grad):
            if refused is not None and step >= refused:
                for _ in range(1 if compiled else 2):  # a second call gives the same
                    with pytest.raises(errors) as error:
                        called(**given)
                    said = str(error.value)
                continue
            try:
                expected = own(**given)
            except RuntimeError:
                pytest.fail("the unpatched model fails")
            output = called(**given)
        assert output.logits is None
        torch.testing.assert_close(output.loss, expected.loss, **NEAR)
        if not grad:
            continue
        for a, e in zip(gradients(model, output.loss), gradients(own, expected.loss), strict=True):
            torch.testing.assert_close(a, e, rtol=1e-4, atol=2e-6)
    return said


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", CHANGES)
def test_changed_logits_are_served_right_or_refused(name: str, compiled: bool) -> None:
    change, options, refused = CHANGES[name]
    hold(ToyForCausalLM(change), refused, compiled, options)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("cut", "makes 50 columns of the head's 61, where 61 are known; pass vocab_size=50 to"),
        ("masked", r"11 of 61 columns differ, the first is column 50 \(-inf .* vocab_size=50 t"),
        ("masked in the middle", r"2 of 61 columns differ, the first is column 10 \(-inf where"),
        ("scaled", r"61 of 61 columns .*; they are 0\.5 times what is known; pass logit_scale= or"),
        ("the last one biased", r"1 of 61 columns differ, the first is column 60 \("),
        ("two swapped", r"2 of 61 columns differ, the first is column 58 \("),
        ("of some tokens", r"of \[1, 11, 61\] it makes \[1, 10, 61\], where \[1, 11, V\] is known"),
    ],
)  # fmt: skip
def test_the_error_says_what_differs_and_the_way_out(name: str, said: str) -> None:
    model = ToyForCausalLM(CHANGES[name][0])
    patch_transformers(model)
    with pytest.raises(NotImplementedError, match=f"^ToyForCausalLM changes its logits.*{said}"):
        model(**batch())


def test_padding_that_is_not_masked_is_said() -> None:
    """With vocab_size= the loss leaves columns out that the model's own loss has."""
    model = ToyForCausalLM(lambda z, *_: z)
    patch_transformers(model, vocab_size=50)
    said = (
        r"^ToyForCausalLM keeps its logits from column 50 on \(\d.*\), and vocab_size is 50: .*; "
        r"pass vocab_size=61 to patch_transformers .*, or mask these logits"
    )
    with pytest.raises(NotImplementedError, match=said):
        model(**batch())


EXTRAS: dict[str, Callable[[Tensor], Tensor]] = {
    "all rows": lambda z: 1e-4 * z.logsumexp(-1).square().mean(),
    "all but the last": lambda z: 1e-2 * z[:, :-1].logsumexp(-1).square().mean(),
    "the first": lambda z: 1e-4 * z[:, 0].logsumexp(-1).mean(),
    "but the first and the last": lambda z: 1e-4 * z[:, 1:-1].square().mean(),
}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("extra", EXTRAS)
def test_a_model_that_makes_more_of_its_logits_is_refused(
    extra: str, grad: bool, compiled: bool
) -> None:
    model = ToyForCausalLM(extra=EXTRAS[extra])
    said = hold(model, 0, compiled, {}, grad=grad)
    assert "makes more of its logits than the loss" in said


# The loss looks right, so only gradients reveal the change.
GRADIENTS: dict[str, dict[str, Any]] = {
    "a part detached": {"change": lambda z, *_: z * 0.1 + (z * 0.9).detach()},
    "one column detached": {
        "change": lambda z, *_: torch.cat([z[..., :9].detach(), z[..., 9:]], -1)
    },
    "more where it is a number": {"extra": lambda z: 1e-2 * z.logsumexp(-1).square().nanmean()},
    "more of the largest": {"extra": lambda z: 1e-2 * z.nan_to_num().amax(-1).mean()},
}


def hooked(z: Tensor, *_: Any) -> Tensor:
    if z.requires_grad:
        z.register_hook(lambda g: g * 0.1)
    return z


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", GRADIENTS)
def test_a_gradient_that_is_not_the_losss_is_refused(name: str, compiled: bool) -> None:
    torch._dynamo.reset()
    model = ToyForCausalLM(**GRADIENTS[name])
    patch_transformers(model)
    called = torch.compile(model, backend="aot_eager") if compiled else model
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="ToyForCausalLM makes of its logits, or of"):
            called(**batch()).loss.backward()


def test_a_hook_on_the_logits_and_detached_ones_are_refused() -> None:
    model = ToyForCausalLM(hooked)
    patch_transformers(model)
    with pytest.raises(NotImplementedError, match="has a hook on them"):
        model(**batch()).loss.backward()
    model = ToyForCausalLM(lambda z, *_: z.detach())
    patch_transformers(model)
    with pytest.raises(NotImplementedError, match="ToyForCausalLM detaches its logits"):
        model(**batch())
    with torch.no_grad():
        assert model(**batch()).loss.isfinite()


def test_under_a_search_for_nan_the_gradient_tells_what_more_is_made() -> None:
    model = ToyForCausalLM(extra=lambda z: 1e-2 * z.logsumexp(-1).square().mean())
    patch_transformers(model)
    with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(True):
        warnings.simplefilter("ignore")
        with pytest.raises(NotImplementedError, match="makes of its logits, or of"):
            model(**batch()).loss.backward()


def test_a_second_loss_is_refused() -> None:
    class Twice(ToyForCausalLM):
        def forward(self, input_ids: Any = None, labels: Any = None, **kwargs: Any) -> Any:
            logits = self.lm_head(self.norm(self.embed(input_ids)))
            loss = self.loss_function(logits * 0.5, labels, V)
            loss = loss + self.loss_function(logits, labels, V)
            return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)

    model = Twice()
    patch_transformers(model)
    with pytest.raises(NotImplementedError, match="asks for its loss more than once"):
        model(**batch())


def test_labels_that_are_rewritten_in_place_are_refused() -> None:
    def rewrite(labels: Tensor, _: int) -> Tensor:
        labels[labels == 2] = -100
        return labels

    model = ToyForCausalLM(relabel=rewrite)
    patch_transformers(model)
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="gives its loss another labels than"):
            model(**batch())


def test_an_empty_batch_shows_nothing(monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.nn.Linear, "forward", lambda self, x: x @ self.weight.T * 2)
    model = ToyForCausalLM()
    patch_transformers(model)
    empty = torch.zeros(2, 0, dtype=torch.long)
    for _ in range(2):
        model(input_ids=empty, labels=empty)
    with pytest.raises(NotImplementedError, match="own forward makes other logits than its weight"):
        model(**batch())


def test_replicas_are_looked_at_once_and_are_not_kept() -> None:
    model, alive = ToyForCausalLM(), []
    patch = patch_transformers(model)
    for _ in range(4):
        replica = model._replicate_for_data_parallel()
        for name, child in model._modules.items():
            replica._modules[name] = child._replicate_for_data_parallel()
            for key, value in child._parameters.items():
                replica._modules[name]._parameters[key] = value
        replica(**batch())
        alive.append(weakref.ref(replica))
    del replica
    gc.collect()
    assert [ref() for ref in alive] == [None] * 4
    assert len(patch._settings[0].seen) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("scale", "softcap"),
    [(1, c) for c in (5, 10, 20, 30, 40, 50, 80)] + [(0.7, 20), (16, 0), (0.05, 0)],
)
def test_16_bits_that_are_right_are_served(
    dtype: torch.dtype, scale: float, softcap: float
) -> None:
    def change(z: Tensor, *_: Any) -> Tensor:
        z = z * scale if scale != 1 else z
        return torch.tanh(z / softcap) * softcap if softcap else z.float()

    model = ToyForCausalLM(change).to(dtype)
    patch_transformers(model, logit_scale=scale, softcap=softcap)
    for _ in range(2):
        assert model(**batch()).loss.isfinite()
        model(**batch()).loss.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_scale_that_is_off_by_a_hundredth_is_refused(dtype: torch.dtype) -> None:
    model = ToyForCausalLM(lambda z, *_: z.float() * 1.01).to(dtype)
    model.lm_head = torch.nn.Linear(D, 70, bias=False, dtype=dtype)
    patch_transformers(model)
    with pytest.raises(NotImplementedError, match=r"they are 1\.0\d* times what is known"):
        model(**batch())


RELABELS: dict[str, tuple[Callable[..., Any], int | None]] = {
    "a copy": (lambda labels, _: labels.clone(), None),
    "other ones": (lambda labels, _: labels.roll(1, -1), 0),
    "others later": (
        lambda labels, step: labels.masked_fill(labels == 2, -100) if step else labels, 1,
    ),
    "one other later": (
        lambda labels, step: labels.where(torch.arange(7) != 5, 3) if step else labels.clone(), 1,
    ),
    "shorter ones": (lambda labels, _: labels[:, 1:], 0),
}  # fmt: skip


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", RELABELS)
def test_labels_that_the_model_rewrites_are_refused(name: str, compiled: bool) -> None:
    relabel, refused = RELABELS[name]
    said = hold(ToyForCausalLM(relabel=relabel), refused, compiled, {})
    assert (refused is None) == (said == "") and (not said or "gives its loss another lab" in said)


def doubled(_: Any, __: Any, output: Any) -> Any:
    return output * 2


LATER: dict[str, tuple[Callable[[Any], Any], int | None]] = {
    "a hook on the head": (lambda model: model.lm_head.register_forward_hook(doubled), 1),
    "a hook before the head": (
        lambda model: model.lm_head.register_forward_pre_hook(lambda _, given: (given[0] * 0.5,)),
        None,
    ),
    "a bias of the head": (lambda model: setattr(model.lm_head, "bias", BIAS), None),
    "another head": (lambda model: setattr(model, "lm_head", HEAD), None),
    "another forward of the head": (
        lambda m: setattr(m.lm_head, "forward", lambda x: x @ m.lm_head.weight.T * 2), 1,
    ),
    "another forward of Linear": (
        lambda _: setattr(torch.nn.Linear, "forward", lambda self, x: x @ self.weight.T * 2), 1,
    ),
    "a configured softcap": (
        lambda model: setattr(model.config, "final_logit_softcapping", 3.0), 1,
    ),
    "weight norm": (lambda model: torch.nn.utils.parametrizations.weight_norm(model.lm_head), None),
}  # fmt: skip
BIAS = torch.nn.Parameter(torch.linspace(-1, 1, V))
HEAD = torch.nn.Linear(D, V)


@pytest.mark.parametrize("name", LATER)
def test_what_comes_later_is_served_right_or_refused(name: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.nn.Linear, "forward", torch.nn.Linear.forward)  # restored at the end
    done: set[int] = set()

    def once(model: Any) -> None:
        if id(model) not in done:
            done.add(id(model))
            later(model)

    later, refused = LATER[name]
    hold(ToyForCausalLM(), refused, False, {}, later=once)


def test_a_hook_on_all_modules_is_seen() -> None:
    model = ToyForCausalLM()
    patch_transformers(model)
    model(**batch())
    added = torch.nn.modules.module.register_module_forward_hook(
        lambda module, _, output: output * 2 if module is model.lm_head else None
    )
    try:
        with pytest.raises(NotImplementedError, match="they are 2 times what is known"):
            model(**batch())
    finally:
        added.remove()
    model(**batch())


def test_a_head_that_is_no_product_is_refused() -> None:
    class Normalised(torch.nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return input @ torch.nn.functional.normalize(self.weight, dim=-1).T

    model = ToyForCausalLM()
    model.lm_head = Normalised(D, V, bias=False)
    with pytest.raises(
        NotImplementedError, match=r"the lm_head is a .*Normalised; allowed: a plain"
    ):
        patch_transformers(model)
    model = ToyForCausalLM()
    model.lm_head.forward = lambda x: x @ model.lm_head.weight.T * 2
    with pytest.raises(
        NotImplementedError, match=r"the forward of the lm_head was replaced, by .*lam"
    ):
        patch_transformers(model)
    assert not any("logitless" in key for key in vars(model.lm_head))


@pytest.mark.parametrize("columns", [1, 63, 64, 65, 257, 70000, 256 * 1024 + 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_two_columns_of_the_answer_are_alike(columns: int, dtype: torch.dtype) -> None:
    rows = _rows.answer(torch.zeros(3, columns, dtype=dtype))[0]
    made_up = rows[[4, 5, 7, 8]].double()
    exact = _rows.answer(torch.zeros(3, columns, dtype=torch.float64))[0, [4, 5, 7, 8]]
    assert rows.dtype == dtype and torch.equal(made_up, exact)
    assert made_up.abs().amax() <= 8192 and rows[[0, 6, 10]].isnan().all() and not rows[9].any()
    assert len(made_up.T.unique(dim=0)) == columns


def test_a_device_that_is_not_waited_for_makes_the_loss_nan_and_the_next_call_an_error(
    monkeypatch: Any,
) -> None:
    """As on a GPU, whose report arrives after the call."""

    class Event:
        done = False

        def query(self) -> bool:
            return self.done

    told: list[tuple[Any, Tensor, str]] = []
    monkeypatch.setattr(_rows, "_waits", lambda device, key: key == _rows.NEW)
    monkeypatch.setattr(_rows, "_late", told := _rows.deque())
    monkeypatch.setattr(
        _rows, "_tell_later", lambda report, who: told.append((Event(), report.clone(), who))
    )
    model = ToyForCausalLM(lambda z, _, step: z * 2 if step else z)
    patch_transformers(model)
    first = model(**batch()).loss
    assert first.isfinite() and not told
    assert torch.equal(model(**batch()).loss, first) and len(told) == 1
    model.step = 1
    loss = model(**batch()).loss
    assert loss.isnan() and all(g.isnan().any() for g in gradients(model, loss))
    model.step = 0
    assert model(**batch()).loss.isfinite(), "the report has not arrived"
    for event, *_ in told:
        event.done = True  # type: ignore[attr-defined]
    for said in ("changes its logits", "makes of its logits"):  # forward, backward
        with pytest.raises(NotImplementedError, match=f"^in an earlier call ToyForCausalLM {said}"):
            model(**batch())
    assert model(**batch()).loss.isfinite()


class Waits(torch.utils._python_dispatch.TorchDispatchMode):
    """Fails at ops for which the host would wait for a GPU."""

    def __torch_dispatch__(self, op: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        assert op not in (
            torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default,
            torch.ops.aten.is_nonzero.default, torch.ops.aten.index.Tensor,
            torch.ops.aten.nonzero.default, torch.ops.aten.masked_select.default,
        ), op  # fmt: skip
        return op(*given, **(named or {}))


@pytest.mark.parametrize("softcap", [0.0, 30.0])
def test_a_call_that_is_settled_waits_for_nothing(softcap: float, monkeypatch: Any) -> None:
    """The ops of a GPU's call, run on the CPU, include none that waits."""
    monkeypatch.setattr(_rows, "_waits", lambda *_: False)
    monkeypatch.setattr(_rows, "_tell_later", lambda *_: None)
    real, loss = torch.randn(3, V), torch.tensor(1.0)
    labels = torch.arange(7)
    with Waits():
        rows = _rows._answer(real)
        made = torch.tanh(rows * 0.5 / softcap) * softcap if softcap else rows * 0.5
        out, factor = _rows._checked(
            loss, loss, made, real, [labels], [labels.clone()], 0.5, softcap, V, "labels", "it",
            _rows.SETTLED, False,
        )  # fmt: skip
    assert out == 1 and factor == 1


def test_a_search_for_nan_finds_none_of_ours() -> None:
    model = ToyForCausalLM(lambda z, *_: 30 * torch.tanh(z / 30))
    patch_transformers(model, softcap=30.0)
    with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(True):
        warnings.simplefilter("ignore")
        for _ in range(2):
            model(**batch()).loss.backward()
