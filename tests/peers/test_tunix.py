# SPDX-License-Identifier: Apache-2.0
"""Our functions give Tunix' log-probabilities, entropies, GRPO and PPO losses, on tiny models."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Two devices, and programs that are compiled in a fraction of the time.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true"
)

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx


def without_its_trainers() -> Any:
    """tunix.rl.common; the package itself imports orbax and much else."""
    if "tunix" not in sys.modules:
        spec = importlib.util.find_spec("tunix")
        if spec is None or spec.submodule_search_locations is None:
            pytest.skip("tunix is not installed", allow_module_level=True)
        package = types.ModuleType("tunix")
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules["tunix"] = package
    return importlib.import_module("tunix.rl.common")


theirs = without_its_trainers()

from tunix.rl import algo_core  # noqa: E402

from both import takes_what  # noqa: E402
from logitless.integrations import tunix as ours  # noqa: E402

B, PROMPT, LENGTH, V = 4, 3, 5, 67


def sizes(**more: Any) -> dict[str, Any]:
    return {
        "num_layers": 1, "vocab_size": V, "embed_dim": 16, "hidden_dim": 24, "num_heads": 2,
        "head_dim": 8, "num_kv_heads": 1, "norm_eps": 1e-5, "rope_theta": 10_000, **more,
    }  # fmt: skip


def gemma() -> Any:
    from tunix.models.gemma import model

    config = model.ModelConfig(
        num_layers=1, num_embed=V, embed_dim=16, hidden_dim=24, num_heads=2, head_dim=8,
        num_kv_heads=1, final_logit_softcap=1.5, use_post_attn_norm=False, use_post_ffw_norm=False,
        attention_types=(model.AttentionType.GLOBAL,),
    )  # fmt: skip
    return model.Gemma(config, rngs=nnx.Rngs(0))


def llama(tied: bool = False) -> Any:
    from tunix.models.llama3 import model

    return model.Llama3(model.ModelConfig(**sizes(weight_tying=tied)), rngs=nnx.Rngs(0))


def qwen(dtype: Any = jnp.float32) -> Any:
    from tunix.models.qwen3 import model

    config = model.ModelConfig(**sizes(use_tied_embedding=False, dtype=dtype, param_dtype=dtype))
    return model.Qwen3(config, rngs=nnx.Rngs(0))


MODELS = {
    "llama": llama,
    "llama, tied": lambda: llama(True),
    "qwen": qwen,
    "qwen, bf16": lambda: qwen(jnp.bfloat16),
    "gemma, softcap": gemma,
}


def batch() -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(1), 2)
    prompt = jax.random.randint(keys[0], (B, PROMPT), 2, V).at[0, 0].set(0)
    completion = jax.random.randint(keys[1], (B, LENGTH), 2, V).at[1, -2:].set(0)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "pad_id": 0, "eos_id": 1}


def packed() -> dict[str, Any]:
    given = batch()
    return {
        **given, "prompt_tokens": given["prompt_tokens"][:, :0],
        "segment_ids": jnp.array([[1, 1, 1, 2, 2]] * B),
        "segment_positions": jnp.array([[0, 1, 2, 0, 1]] * B),
    }  # fmt: skip


def larger(model: Any) -> Any:
    """With weights that make logits of several sizes."""
    graphdef, state = nnx.split(model)
    state = jax.tree.map(lambda p: p * 4 if p.ndim > 1 else p, state)
    return graphdef, state


def close(found: Any, expected: Any, dtype: Any = jnp.float32) -> None:
    rtol, atol = (1e-5, 2e-5) if dtype == jnp.float32 else (3e-2, 6e-2)
    for a, e in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, e = np.asarray(a, np.float64), np.asarray(e, np.float64)
        scale = max(1.0, float(np.abs(e).max(initial=0)))
        np.testing.assert_allclose(a, e, rtol=rtol, atol=atol * scale)


def makes_logits(function: Any, *arguments: Any) -> bool:
    """Whether the compiled program, without unused computations, has an array of V columns for
    each token."""
    program = jax.jit(function).lower(*arguments).compile().as_text()
    rows = (B * LENGTH, B * (PROMPT + LENGTH))
    shapes = [f"{B},{n},{V}]" for n in (LENGTH, PROMPT + LENGTH)] + [f"{n},{V}]" for n in rows]
    return any(shape in program for shape in shapes)


@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities_entropies_and_gradients(name: str) -> None:
    graphdef, state = larger(MODELS[name]())
    upstream = jax.random.normal(jax.random.key(2), (2, B, LENGTH))

    def total(module: Any, entropy: Any, state: Any) -> Any:
        logps, logits = module.compute_per_token_logps(
            graphdef, state, **batch(), stop_gradient=False, return_logits=True,
            temperature=0.7,
        )  # fmt: skip
        made = jnp.stack((logps, entropy(logits)))
        return (made * upstream).sum(), made

    runs = [
        (lambda s: total(theirs, algo_core.compute_entropy_from_logits, s)),
        (lambda s: total(ours, ours.compute_entropy_from_logits, s)),
    ]
    (_, expected), grads = jax.jit(jax.value_and_grad(runs[0], has_aux=True))(state)
    (_, found), made = jax.jit(jax.value_and_grad(runs[1], has_aux=True))(state)
    dtype = jnp.bfloat16 if "bf16" in name else jnp.float32
    close(found, expected, dtype)
    close(made, grads, dtype)
    if name == "gemma, softcap":
        assert makes_logits(runs[0], state) and not makes_logits(runs[1], state)


def test_outside_of_jit_and_without_a_gradient() -> None:
    graphdef, state = larger(llama())
    for given in (batch(), packed()):
        found = ours.compute_per_token_logps(graphdef, state, **given)
        close(found, theirs.compute_per_token_logps(graphdef, state, **given))
    gradient = jax.grad(
        lambda s: ours.compute_per_token_logps(graphdef, s, **batch()).sum(), allow_int=True
    )
    assert not any(g.any() for g in jax.tree.leaves(gradient(state)))


@pytest.mark.parametrize("given", [batch, packed])
def test_logits_are_made_where_they_are_used(given: Any) -> None:
    for make in (llama, qwen if given is packed else gemma):
        graphdef, state = larger(make())
        call = {**given(), "return_logits": True, "temperature": 0.7}
        logps, logits = ours.compute_per_token_logps(graphdef, state, **call)
        expected, full = theirs.compute_per_token_logps(graphdef, state, **call)
        close((logps, jnp.asarray(logits)), (expected, full))
        close(ours.compute_entropy_from_logits(logits), algo_core.compute_entropy_from_logits(full))
        close(ours.compute_entropy_from_logits(full), algo_core.compute_entropy_from_logits(full))


@pytest.mark.parametrize("name", ["llama", "gemma, softcap"])
def test_of_a_module(name: str) -> None:
    model = nnx.merge(*larger(MODELS[name]()))
    before = set(vars(model)), set(vars(model.embedder)), type(getattr(model, "lm_head", None))
    given = batch()
    tokens, positions, mask, _ = theirs.process_ids(**given)

    def total(module: Any, model: Any) -> Any:
        return module.get_per_token_logps(model, tokens, positions, mask, LENGTH).sum()

    for a, e in zip(
        nnx.value_and_grad(lambda m: total(ours, m))(model),
        nnx.value_and_grad(lambda m: total(theirs, m))(model),
    ):
        close(a, e)
    after = set(vars(model)), set(vars(model.embedder)), type(getattr(model, "lm_head", None))
    assert after == before


def test_two_devices() -> None:
    graphdef, state = larger(llama())
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.NamedSharding(mesh, jax.P("data"))
    given = batch()
    placed = {k: jax.device_put(given[k], rows) for k in ("prompt_tokens", "completion_tokens")}
    everywhere = jax.device_put(state, jax.NamedSharding(mesh, jax.P()))

    def total(module: Any, state: Any, placed: Any) -> Any:
        made = module.compute_per_token_logps(
            graphdef, state, **placed, pad_id=0, eos_id=1, stop_gradient=False
        )
        return (made * jnp.arange(B * LENGTH).reshape(B, LENGTH)).sum()

    found = jax.jit(jax.value_and_grad(lambda s, p: total(ours, s, p)))(everywhere, placed)
    close(found, jax.value_and_grad(lambda s: total(theirs, s, placed))(state))


@pytest.mark.parametrize("kind", ["grpo", "ppo"])
def test_losses_of_tunix(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tunix' losses of a model, with our functions in place of Tunix' own."""
    model = nnx.merge(*larger(llama()))
    given = batch()
    ids = given["completion_tokens"]
    example = theirs.TrainExample(
        prompt_ids=given["prompt_tokens"], prompt_mask=given["prompt_tokens"] != 0,
        completion_ids=ids, completion_mask=ids != 0,
        advantages=jnp.arange(1.0, B + 1) if kind == "grpo" else jnp.ones((B, LENGTH)),
        ref_per_token_logps=jnp.full((B, LENGTH), -4.0),
        old_per_token_logps=jnp.full((B, LENGTH), -4.1),
    )  # fmt: skip
    config = types.SimpleNamespace(
        epsilon=0.2, epsilon_low=0.2, epsilon_high=0.2, entropy_coef=0.01, beta=0.04, kl_coef=0.1,
        loss_algo="grpo", temperature=0.9, loss_agg_mode="sequence-mean-token-mean",
        kl_loss_mode="kl", epsilon_c=None, kl_clamp_value=None,
    )  # fmt: skip
    function = algo_core.grpo_loss_fn if kind == "grpo" else algo_core.ppo_policy_loss_fn

    def loss(model: Any) -> Any:
        return function(model, example, config, pad_id=0, eos_id=1)

    expected = nnx.value_and_grad(loss, has_aux=True)(model)
    monkeypatch.setattr(theirs, "compute_per_token_logps", ours.compute_per_token_logps)
    monkeypatch.setattr(algo_core, "compute_entropy_from_logits", ours.compute_entropy_from_logits)
    split = nnx.split(model)
    close(nnx.value_and_grad(loss, has_aux=True)(model), expected)
    assert not makes_logits(lambda s: loss(nnx.merge(split[0], s))[0], split[1])


def changed(name: str) -> Any:
    model = llama()
    if name == "scale":
        kind: Any = type(model)

        def scaled(
            self: Any, tokens: Any, positions: Any, cache: Any, attention_mask: Any
        ) -> tuple[Any, None]:
            return kind.__call__(self, tokens, positions, cache, attention_mask)[0] * 2, None

        made = type("Scaled", (kind,), {"__call__": scaled})
        model.__class__ = made
    if name == "adapter":
        own = type(model.lm_head)
        model.lm_head.__class__ = type("Lora", (own,), {
            "__call__": lambda self, x: own.__call__(self, x) + own.__call__(self, x)
        })  # fmt: skip
    return model


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("scale", "makes .* of logits .* a softcap of 0.0 would be"),
        ("adapter", "has a head of 2 products, add"),
    ],
)
def test_a_model_of_another_formula_is_an_error(name: str, message: str) -> None:
    graphdef, state = nnx.split(changed(name))
    with pytest.raises(NotImplementedError, match=message):
        ours.compute_per_token_logps(graphdef, state, **batch())


def test_signatures() -> None:
    for name in ("compute_per_token_logps", "get_per_token_logps"):
        takes_what(getattr(ours, name), getattr(theirs, name))
    takes_what(ours.compute_entropy_from_logits, algo_core.compute_entropy_from_logits)
