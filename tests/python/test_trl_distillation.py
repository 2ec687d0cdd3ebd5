# SPDX-License-Identifier: Apache-2.0
"""TRL patched: its divergence of two heads, and DistillationTrainer."""

from __future__ import annotations

import pathlib
import sys
import types
from typing import Any

import pytest
import torch
import trl
from torch import Tensor
from trl.kernels import chunked_divergence
from trl.trainer import distillation_trainer, utils

import test_transformers
from logitless.integrations import patch_trl
from logitless.integrations import trl as ours
from logitless.torch import default_memory
from reference import close
from test_divergence import BF16, F16, F32, Heads, expected, heads
from test_transformers import transformers
from test_trl import WORDS, text, tokenizer

OPTIONS: dict[str, dict[str, float]] = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "student": {"logit_scale": 0.3, "softcap": 3.0},
    "teacher": {"teacher_logit_scale": 2.0, "teacher_softcap": 1.5},
    "all": {
        "temperature": 1.3, "logit_scale": 0.5, "softcap": 3.0, "teacher_logit_scale": 1.7,
        "teacher_softcap": 2.0,
    },
}  # fmt: skip
BETAS = [0.0, 0.1, 0.5, 1.0]


def fused(h: Heads, beta: float, bias: bool = True, **o: float) -> Any:
    """The divergence and entropy of the function that DistillationTrainer calls, patched or not."""
    return distillation_trainer.ChunkedDivergenceFunction.apply(
        h.input, h.weight, h.bias if bias else None, h.teacher_input, h.teacher_weight,
        h.teacher_bias if bias else None, beta, o.get("temperature", 1.0),
        o.get("logit_scale", 1.0), o.get("softcap"), o.get("teacher_logit_scale", 1.0),
        o.get("teacher_softcap"),
    )  # fmt: skip


def known(h: Heads, beta: float, bias: bool = True, **o: float) -> tuple[Tensor, Tensor]:
    with_bias = h.options("linear_bias", "teacher_bias") if bias else {}
    kind = {0.0: "forward_kl", 1.0: "reverse_kl"}.get(beta, "jsd")
    loss, statistics = expected(h, kind=kind, beta=beta, reduction="none", **with_bias, **o)
    return loss, statistics["entropy"]


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("name", OPTIONS)
def test_divergence_entropy_and_gradients_are_those_of_f64(
    device: str, name: str, beta: float, dtype: torch.dtype
) -> None:
    bias = name != "temperature"
    h = heads(device, dtype, (23,))
    leaves = h.leaves if bias else h.leaves[:2]
    theirs, entropy = known(h, beta, bias, **OPTIONS[name])
    upstream = torch.randn(23, device=device)
    with patch_trl() as patch:
        results = [fused(h, beta, bias, **OPTIONS[name])]
        assert patch.calls == 1
    if dtype is F32:  # shows that the formulas are TRL's
        results.append(fused(h, beta, bias, **OPTIONS[name]))
    grads = torch.autograd.grad(theirs, leaves, upstream.double())
    for made, of_student in results:
        close(made, theirs)
        close(of_student, entropy)
        assert made.dtype is F32 and of_student.dtype is F32 and not of_student.requires_grad
        for a, e, leaf in zip(torch.autograd.grad(made, leaves, upstream), grads, leaves):
            assert a.dtype is leaf.dtype
            close(a, e, dtype)


def converted(h: Heads, student: torch.dtype, head: torch.dtype, teacher: torch.dtype) -> Heads:
    """The heads cast to these dtypes, with values that bf16 can represent."""
    dtypes = (student, head, teacher, teacher, F32, F32)
    made = [t.detach().bfloat16().to(dtype) for t, dtype in zip(h[:6], dtypes)]
    leaves = {
        name: made[i].requires_grad_() for i, name in ((0, "input"), (1, "weight"), (4, "bias"))
    }
    rest = dict(zip(("teacher_input", "teacher_weight"), made[2:4]))
    return h._replace(**leaves, **rest, teacher_bias=made[5])


@pytest.mark.parametrize(
    "dtypes, products",
    [
        ((F32, F32, BF16), F32),
        ((BF16, BF16, F32), F32),
        ((BF16, BF16, F16), F32),
        ((F32, BF16, F32), F32),
        ((BF16, F32, BF16), BF16),
        ((BF16, F32, F32), F32),
    ],
    ids=str,
)
def test_heads_of_several_dtypes(dtypes: Any, products: torch.dtype) -> None:
    """A teacher in 16 bits beside a student in f32, or the other way about, and a head that is kept
    in f32: TRL multiplies in the dtype of the hidden states, each head in its own."""
    h = converted(heads(shape=(23,)), *dtypes)
    theirs, entropy = known(h, 0.5)
    upstream = torch.randn(23)
    with patch_trl():
        made, of_student = fused(h, 0.5)
    close(made, theirs)
    close(of_student, entropy)
    grads = torch.autograd.grad(theirs, h.leaves, upstream.double())
    for a, e, leaf in zip(torch.autograd.grad(made, h.leaves, upstream), grads, h.leaves):
        assert a.dtype is leaf.dtype
        # dz has the dtype of the products
        close(a, e, products if leaf.dtype is F32 else leaf.dtype)
        if leaf.dtype is F32:
            assert not torch.equal(a, a.bfloat16().float()), "it is not rounded on its way"


@pytest.mark.parametrize("wider", ["the student's weight", "the teacher's weight"])
def test_each_head_is_rounded_to_its_own_hidden_states(wider: str) -> None:
    """As TRL does with a weight in f32 beside hidden states in 16 bits, though the other head is
    multiplied in f32. The weight's own gradient is not rounded."""
    h = heads(shape=(23,))
    student = wider == "the student's weight"
    x, y = (h.input.detach(), h.teacher_input.detach())
    x, y = (x.bfloat16(), y) if student else (x, y.bfloat16())
    w = h.weight.detach().requires_grad_()
    h = h._replace(input=x, teacher_input=y, weight=w)
    rounded = (w, h.teacher_weight)[not student].detach().bfloat16().float().requires_grad_()
    alike = h._replace(**{"weight" if student else "teacher_weight": rounded})
    theirs, entropy = known(alike, 0.5)
    (of_theirs,) = torch.autograd.grad(theirs.sum(), alike.weight)
    trls, _ = fused(h, 0.5)
    with patch_trl():
        made, of_student = fused(h, 0.5)
    for a in (trls, made):  # shows that TRL rounds like this
        close(a, theirs)
    close(of_student, entropy)
    (grad,) = torch.autograd.grad(made.sum(), w)
    assert grad.dtype is F32
    close(grad, of_theirs)


def test_autocast() -> None:
    h = heads(shape=(23,))
    rounded = [t.detach().bfloat16() for t in h[:4]]
    theirs, entropy = known(h._replace(**dict(zip(Heads._fields, rounded))), 0.5)
    with patch_trl(), torch.autocast("cpu", BF16):
        made, of_student = fused(h, 0.5)
    close(made, theirs)
    close(of_student, entropy)
    assert all(g.dtype is F32 for g in torch.autograd.grad(made.sum(), h.leaves))


def test_a_token_without_an_upstream_gradient_gives_none() -> None:
    """TRL masks tokens that do not count, unless it leaves them out beforehand."""
    h = heads(shape=(9,))
    keep = torch.arange(9) % 3 > 0
    with patch_trl():
        made, _ = fused(h, 0.5)
    (grad,) = torch.autograd.grad(made.masked_fill(~keep, 0).sum(), h.input)
    assert not grad[~keep].any() and grad[keep].any(-1).all()


@pytest.mark.parametrize("beta", BETAS)
def test_no_token_at_all(beta: float) -> None:
    """All completions of a rank may be masked."""
    h = heads(shape=(0,))
    with patch_trl():
        made, entropy = fused(h, beta)
    assert made.shape == entropy.shape == (0,)
    made.sum().backward()
    assert h.weight.grad is not None and not h.weight.grad.any()


def test_equal_heads_give_exactly_nothing() -> None:
    h = heads(shape=(9,))
    same = h._replace(teacher_input=h.input, teacher_weight=h.weight, teacher_bias=h.bias)
    with patch_trl():
        made, _ = fused(same, 0.5)
    assert not made.any()
    assert not any(g.any() for g in torch.autograd.grad(made.sum(), h.leaves))


def test_compiled() -> None:
    h = heads(shape=(9,))
    with patch_trl() as patch:
        compiled = torch.compile(fused, fullgraph=True, backend="eager")(h, 0.5, softcap=3.0)
        assert patch.calls == 0  # compiled calls are not counted
        for actual, eager in zip(compiled, fused(h, 0.5, softcap=3.0)):
            assert torch.equal(actual, eager)
        assert patch.calls == 1


def test_memory_is_handed_on() -> None:
    h = heads(shape=(9,))
    with patch_trl(memory=0), pytest.raises(ValueError, match=r"^memory is 0 bytes"):
        fused(h, 0.5)


def test_what_is_not_known_raises() -> None:
    h = heads(shape=(9,))
    with patch_trl():
        for name in ("softcap", "teacher_softcap"):
            full = "teacher" if name.startswith("teacher") else "student"
            with pytest.raises(ValueError, match=f"{full}_final_logit_softcapping is 0; allowed"):
                fused(h, 0.5, **{name: 0.0})
        with pytest.raises(ValueError, match=r"^beta is 1.5"):
            fused(h, 1.5)
        with pytest.raises(ValueError, match=r"^teacher_hidden has shape \(8, 6\)"):
            fused(h._replace(teacher_input=h.teacher_input[1:]), 0.5)
        with pytest.raises(ValueError, match="student_bias"):
            fused(h._replace(bias=h.bias[1:]), 0.5)


class Gathered:
    """Stands for deepspeed.zero.GatheredParameters: parameters are whole inside of it."""

    def __init__(self, parameters: list[Any]) -> None:
        assert len({id(p) for p in parameters}) == len(parameters)
        self.parameters = parameters

    def __enter__(self) -> None:
        for p in self.parameters:
            assert p.ds_status.name == "NOT_AVAILABLE"
            p.data, p.ds_status = p.whole, types.SimpleNamespace(name="AVAILABLE")

    def __exit__(self, *_: Any) -> None:
        apart(self.parameters)


def apart(parameters: list[Any]) -> None:
    for p in parameters:
        p.data, p.ds_status = torch.empty(0), types.SimpleNamespace(name="NOT_AVAILABLE")


@pytest.mark.parametrize("beta", BETAS)
def test_parameters_that_deepspeed_takes_apart_are_gathered(beta: float, monkeypatch: Any) -> None:
    stand_in = types.SimpleNamespace(zero=types.SimpleNamespace(GatheredParameters=Gathered))
    monkeypatch.setitem(sys.modules, "deepspeed", stand_in)
    h = heads(shape=(9,))
    with patch_trl():
        made, entropy = fused(h, beta)
        expected = torch.autograd.grad(made.square().sum(), h.leaves)
        names = ("weight", "bias", "teacher_weight", "teacher_bias")
        split: list[Any] = [torch.nn.Parameter(getattr(h, name).detach()) for name in names]
        for p in split:
            p.whole = p.data.clone()
        h = h._replace(**dict(zip(names, split)))
        leaves = [h.input, *split[:2]]
        apart(split)
        found, of_student = fused(h, beta)
        assert torch.equal(found, made) and torch.equal(of_student, entropy)
        assert {p.ds_status.name for p in split} == {"NOT_AVAILABLE"}
        for a, e in zip(torch.autograd.grad(found.square().sum(), leaves), expected):
            assert torch.equal(a, e)


PLACES = (
    (utils, "_ChunkedLogProbFunction"),
    (distillation_trainer, "ChunkedDivergenceFunction"),
    (chunked_divergence, "ChunkedDivergenceFunction"),
)


def test_the_patch_replaces_both_functions_and_gives_them_back() -> None:
    def now() -> list[Any]:
        return [getattr(module, name) for module, name in PLACES]

    own = now()
    with patch_trl() as patch:
        assert now() == [patch, patch.divergence, patch.divergence]
        with pytest.raises(ValueError, match="patched already"):
            patch_trl()
        assert now() == [patch, patch.divergence, patch.divergence]
        h = heads(shape=(9,))
        chunked_divergence.ChunkedDivergenceFunction.apply(*h[:2], None, *h[2:4], None, 0.5)
        assert patch.calls == 1
    assert now() == own
    patch.unpatch()  # a second time does nothing
    assert now() == own


def forward_of_two(ctx: Any, student_hidden: Any, student_weight: Any) -> None: ...


@pytest.mark.parametrize(
    "function, message",
    [
        (None, "has no trl.trainer.distillation_trainer.ChunkedDivergenceFunction"),
        (
            types.SimpleNamespace(forward=forward_of_two),
            "of student_hidden, student_weight instead",
        ),
    ],
    ids=["none", "arguments"],
)
def test_another_trl_is_an_error_that_names_it(
    function: Any, message: str, monkeypatch: Any
) -> None:
    before = utils._ChunkedLogProbFunction
    for module, name in PLACES[1:]:
        monkeypatch.setattr(module, name, function)
    with pytest.raises(NotImplementedError, match=f"TRL {trl.__version__} .*{message}"):
        patch_trl()
    assert utils._ChunkedLogProbFunction is before, "nothing is replaced then"


def test_a_trainer_that_has_another_function_is_an_error(monkeypatch: Any) -> None:
    other = types.SimpleNamespace(forward=chunked_divergence.ChunkedDivergenceFunction.forward)
    monkeypatch.setattr(chunked_divergence, "ChunkedDivergenceFunction", other)
    with pytest.raises(NotImplementedError, match="has another ChunkedDivergenceFunction in"):
        patch_trl()


def test_a_trainer_that_does_not_call_it_is_an_error(monkeypatch: Any) -> None:
    sources = {utils: " _ChunkedLogProbFunction.apply("}
    monkeypatch.setattr("inspect.getsource", lambda module: sources.get(module, ""))
    with pytest.raises(NotImplementedError, match="does not call ChunkedDivergenceFunction"):
        patch_trl()


def no_more(*_: Any) -> Any:
    raise RuntimeError("gone")


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda apply, *a: apply(*a[:6], 1 - a[6], *a[7:]), "computes something else"),
        (lambda apply, *a: apply(*a[:7], 1.0, *a[8:]), "computes something else"),
        (lambda apply, *a: apply(*a[:11], None), "computes something else"),
        (lambda apply, *a: (apply(*a)[0], apply(*a)[1] * 1.001), "computes something else"),
        (no_more, r"does not run as known \(gone\)"),
    ],
    ids=["beta", "temperature", "softcap", "entropy", "error"],
)
def test_a_trl_of_another_formula_is_an_error(change: Any, message: str, monkeypatch: Any) -> None:
    """The function has the known name and arguments but another formula."""
    theirs = distillation_trainer.ChunkedDivergenceFunction
    other = types.SimpleNamespace(forward=theirs.forward, apply=lambda *a: change(theirs.apply, *a))
    for module, name in PLACES[1:]:
        monkeypatch.setattr(module, name, other)
    with pytest.raises(NotImplementedError, match=f"TRL {trl.__version__} .*{message}"):
        patch_trl()
    assert distillation_trainer.ChunkedDivergenceFunction is other, "nothing is replaced then"


def test_looking_at_trls_formulas_leaves_no_trace() -> None:
    """patch_trl checks TRL's formulas: no random state or count of calls changes, in any mode."""
    state = torch.get_rng_state()
    modes = torch.inference_mode(), torch.autocast("cpu", BF16), torch.device("meta")
    with default_memory("1B"), modes[0], modes[1], modes[2], patch_trl() as patch:
        assert patch.calls == 0
    assert torch.equal(state, torch.get_rng_state())


def test_a_trl_without_the_trainer_is_an_error(monkeypatch: Any) -> None:
    monkeypatch.setattr(
        ours, "_DIVERGENCE", ours._DIVERGENCE._replace(module="trl.trainer.no_such_trainer")
    )
    with pytest.raises(NotImplementedError, match=r"has no trl.trainer.no_such_trainer"):
        patch_trl()


STEPS = 8


def models(**of_student: Any) -> tuple[Any, Any]:
    sizes = {**test_transformers.SIZES, "vocab_size": len(set(WORDS)) + 3}
    torch.manual_seed(11)
    teacher = {**sizes, "hidden_size": 24, "head_dim": 12}
    return tuple(
        transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**s, final_logit_softcapping=3.0))
        if of_student.get("softcap") and s is sizes
        else transformers.LlamaForCausalLM(transformers.LlamaConfig(**s))
        for s in (sizes, teacher)
    )


def train(
    folder: pathlib.Path, device: str, softcap: bool = False, peft_config: Any = None,
    **options: Any,
) -> Any:  # fmt: skip
    """The model after its steps, and what was logged at each."""
    import datasets

    student, teacher = models(softcap=softcap)
    rows = datasets.Dataset.from_list([{"prompt": text(i, 2 + i % 4)} for i in range(24)])
    config = trl.DistillationConfig(
        output_dir=str(folder), use_cpu=device == "cpu", bf16=False, seed=7, max_steps=STEPS,
        logging_steps=1, per_device_train_batch_size=4, learning_rate=3e-3, save_strategy="no",
        report_to="none", gradient_checkpointing=False, disable_tqdm=True,
        max_completion_length=12, **options,
    )  # fmt: skip
    trainer = trl.DistillationTrainer(
        model=student, teacher_model=teacher, args=config, processing_class=tokenizer(),
        train_dataset=rows, peft_config=peft_config,
    )  # fmt: skip
    trainer.train()
    return trainer.model, [entry for entry in trainer.state.log_history if "loss" in entry]


CASES: dict[str, dict[str, Any]] = {
    "forward kl": {"beta": 0.0},
    "jsd": {"beta": 0.5, "temperature": 0.8},
    "reverse kl": {"beta": 1.0},
    "softcap": {"beta": 0.3, "softcap": True},
    "accumulated": {"beta": 0.5, "gradient_accumulation_steps": 2},
}


@pytest.mark.parametrize(
    "name, compact", [*((name, False) for name in CASES), ("jsd", True)], ids=str
)
def test_a_student_learns_the_same_without_logits(
    name: str, compact: bool, device: str, tmp_path: pathlib.Path, monkeypatch: Any
) -> None:
    """`compact`: tokens that do not count are left out beforehand, as TRL does on a GPU."""
    if compact:
        monkeypatch.setattr(distillation_trainer, "_use_triton", lambda _: True)
    masked = []
    of_losses = distillation_trainer._chunked_divergence_loss

    def spy(*args: Any, **kwargs: Any) -> Any:
        masked.append(int((args[4] == 0).sum()))
        return of_losses(*args, **kwargs)

    monkeypatch.setattr(distillation_trainer, "_chunked_divergence_loss", spy)
    own, expected = train(tmp_path, device, **CASES[name])
    assert sum(masked) > STEPS, "else no token is ignored and the case shows less"
    with patch_trl() as patch:
        made, actual = train(tmp_path, device, **CASES[name])
    assert patch.calls == STEPS * CASES[name].get("gradient_accumulation_steps", 1)
    assert len(actual) == len(expected) == STEPS
    for a, e in zip(actual, expected):  # losses, entropies, norms, lengths of completions, ...
        assert {**a, "step_time": 0} == pytest.approx({**e, "step_time": 0}, rel=1e-4, abs=1e-5)
    start = models(softcap=CASES[name].get("softcap", False))[0].to(device)
    for a, e, s in zip(made.parameters(), own.parameters(), start.parameters()):
        torch.testing.assert_close(a, e, rtol=0, atol=2e-5)
        assert not torch.allclose(a, s, rtol=0, atol=1e-4)


def test_an_evaluation_comes_here_too(tmp_path: pathlib.Path) -> None:
    import datasets

    student, teacher = models()
    config = trl.DistillationConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, seed=7, per_device_eval_batch_size=4,
        report_to="none", disable_tqdm=True, max_completion_length=6,
    )  # fmt: skip
    rows = datasets.Dataset.from_list([{"prompt": text(i, 3)} for i in range(8)])
    found = []
    for patched in (False, True):
        trainer = trl.DistillationTrainer(
            model=student, teacher_model=teacher, args=config, processing_class=tokenizer(),
            train_dataset=rows, eval_dataset=rows,
        )  # fmt: skip
        torch.manual_seed(5)
        if not patched:
            found.append(trainer.evaluate()["eval_loss"])
            continue
        with patch_trl() as patch:
            found.append(trainer.evaluate()["eval_loss"])
            assert patch.calls == 2
    assert found[1] == pytest.approx(found[0], rel=1e-4)
