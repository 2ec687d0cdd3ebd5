# SPDX-License-Identifier: Apache-2.0
"""linear_divergence of logitless.jax with tokens split over devices of the host: values and
gradients against f64, the program's text, bits, state that another program has kept; and the error
for a split vocabulary."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

pytest.importorskip("jax")
import jax
import jax.numpy as jnp
import numpy as np
import torch

from jax_support import host_mesh, platform, same, to_jax  # noqa: F401
from logitless.jax import _partition, linear_divergence
from test_divergence import BACKWARD, BOTH, FORWARD, KINDS, STATISTICS, Heads, expected, heads
from test_jax_devices import mesh_of
from test_jax_divergence import as_jax, equal, upstream
from test_jax_jit import MUTANTS, Mutant, alike, calls, collectives, elements, kept, on_hosts  # noqa: F401
from test_jax_moved_state import without_shardy

P = jax.sharding.PartitionSpec
SHAPE, VOCAB = (8, 4), 48


class Layout(NamedTuple):
    mesh: dict[str, int]
    tokens: tuple[Any, ...] = ()
    weight: Any = None  # axes of the rows of both weights

    def put(self, x: Any, *spec: Any) -> Any:
        return jax.device_put(x, jax.sharding.NamedSharding(mesh_of(**self.mesh), P(*spec)))

    def put_all(self, h: Heads) -> tuple[Any, ...]:
        """Input and weight, those of the teacher, both biases and the target."""
        x, w, y, v, b, c, t = map(to_jax, h)
        return (
            self.put(x, *self.tokens), self.put(w, self.weight), self.put(y, *self.tokens),
            self.put(v, self.weight), self.put(b), self.put(c), self.put(t, *self.tokens),
        )  # fmt: skip

    def put_tokens(self, options: dict[str, Any], shape: tuple[int, ...]) -> dict[str, Any]:
        split = lambda o: hasattr(o, "shape") and o.shape[: len(shape)] == shape  # noqa: E731
        return {n: self.put(o, *self.tokens) if split(o) else o for n, o in options.items()}


LAYOUTS = {
    "tokens": Layout({"dp": 4}, ("dp",)),
    "of two axes": Layout({"dp": 2, "fsdp": 4}, (("dp", "fsdp"),)),
    "sequences": Layout({"dp": 2, "sp": 4}, ("dp", "sp")),
    "fsdp": Layout({"fsdp": 4}, ("fsdp",), "fsdp"),
    "fsdp of two axes": Layout({"dp": 2, "fsdp": 4}, (("dp", "fsdp"),), "fsdp"),
    "an idle axis": Layout({"dp": 4, "tp": 2}, ("dp",)),
    "replicated": Layout({"dp": 2, "tp": 2}),
}


def torch_options(shape: tuple[int, ...], vocab: int) -> dict[str, dict[str, Any]]:
    random = lambda seed: torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.5  # noqa: E731
    return {
        "mean": {"kind": "forward_kl"},
        "targets": {"kind": "jsd", "label_weight": 0.3, "target": None},
        "none": {
            "kind": "reverse_kl", "reduction": "none", "temperature": random(1),
            "teacher_temperature": random(2), "token_weight": random(3),
        },
        "sum": {"kind": "skew_kl", "beta": 0.3, "reduction": "sum", "softcap": 3.0},
        "normalizer": {"kind": "jsd", "normalizer": 5.5, "target": None},
        "tv": {"kind": "tv", "target": None},
        "logits": {
            "teacher_logits": torch.randn(*shape, vocab), "kind": "jsd", "beta": 0.1,
            "reduction": "none",
        },
    }  # fmt: skip


def step_of(
    scale: Any, teacher: bool = True, target: bool = False, names: Any = (), **options: Any
) -> Any:
    """A scaled divergence and statistics, and the gradients of x, w and b."""

    def loss(x: Any, w: Any, b: Any, y: Any, v: Any, c: Any, t: Any) -> Any:
        heads_of = (y, v) if teacher else (None, None)
        more = {"teacher_bias": c} if teacher else {}
        more |= {"target": t} if target else {}
        made = linear_divergence(
            x, w, *heads_of, linear_bias=b, **more, return_statistics=names, **options
        )
        made, statistics = made if names else (made, None)
        return (scale * made).sum(), statistics

    def step(x: Any, w: Any, y: Any, v: Any, b: Any, c: Any, t: Any) -> Any:
        (value, statistics), grads = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(
            x, w, b, y, v, c, t
        )
        return value, grads, statistics

    return step


def exact(h: Heads, scale: Any, **options: Any) -> tuple[Any, Any, Any]:
    """The results of step_of in f64."""
    given = {"linear_bias": h.bias, **options}
    if "teacher_logits" not in options:
        given["teacher_bias"] = h.teacher_bias
    theirs, statistics = expected(h, **given)
    total = (torch.as_tensor(scale) * theirs).sum()
    return total.detach(), torch.autograd.grad(total, h.leaves), statistics


def check(layout: Layout, h: Heads, options: dict[str, Any], dtype: Any = jnp.float32) -> str:
    """The program's results are those of f64. Returns its text."""
    shape = tuple(h.target.shape)
    target = "target" in options
    options = {**options, "target": h.target} if target else options
    names = STATISTICS if target else STATISTICS[:3]
    scale: Any = 3.0
    if options.get("reduction") == "none":
        scale = 3 * upstream(shape, 8)
    held = {n: as_jax(o) for n, o in options.items() if n != "target"}
    step = step_of(
        as_jax(scale), "teacher_logits" not in options, target, names,
        **layout.put_tokens(held, shape),
    )  # fmt: skip
    program = jax.jit(step).lower(*layout.put_all(h)).compile()
    made = program(*layout.put_all(h))
    alike(made)
    value, grads, statistics = made
    total, theirs, known = exact(h, scale, **options)
    same(value, total, dtype)
    for grad, e in zip(grads, theirs, strict=True):
        same(grad, e, dtype)
    for name in names:
        same(getattr(statistics, name), known[name], dtype)
    text: str = program.as_text()
    return text


OPTIONS = tuple(torch_options(SHAPE, VOCAB))


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        *(("tokens", name) for name in OPTIONS),
        *((layout, name) for layout in LAYOUTS if layout != "tokens" for name in ("mean", "none")),
        ("sequences", "targets"),
        ("fsdp", "targets"),
    ],
)
def test_loss_and_gradients_are_those_of_f64(layout: str, name: str) -> None:
    h = heads(shape=SHAPE, vocab=VOCAB)
    check(LAYOUTS[layout], h, torch_options(SHAPE, VOCAB)[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["mean", "targets", "none"])
def test_in_16_bits(name: str, dtype: torch.dtype) -> None:
    h = heads(dtype=dtype, shape=SHAPE, vocab=VOCAB)
    of_jax = jnp.bfloat16 if dtype is torch.bfloat16 else jnp.float16
    check(LAYOUTS["tokens"], h, torch_options(SHAPE, VOCAB)[name], of_jax)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["tokens", "fsdp"])
def test_outside_of_jit(layout: str, kind: str) -> None:
    h = heads(shape=SHAPE, vocab=VOCAB)
    for reduction in ("mean", "none"):
        options = {**KINDS[kind], "reduction": reduction}
        value, grads, _ = step_of(1.0, **options)(*LAYOUTS[layout].put_all(h))
        total, theirs, _ = exact(h, 1.0, **options)
        same(value, total)
        for grad, e in zip(grads, theirs):
            same(grad, e)


def test_a_split_changes_no_bit_of_a_token() -> None:
    """A token's loss and statistics keep their bits; the loss of equal heads stays exactly 0."""
    h = heads(shape=SHAPE, vocab=VOCAB)

    def forward(x: Any, w: Any, y: Any, v: Any, b: Any, c: Any, t: Any) -> Any:
        return linear_divergence(
            x, w, y, v, kind="jsd", target=t, reduction="none", return_statistics=STATISTICS
        )

    whole = jax.jit(forward)(*map(to_jax, h))
    for layout in ("tokens", "sequences", "fsdp"):
        assert equal(jax.jit(forward)(*LAYOUTS[layout].put_all(h)), whole)

    def twice(x: Any, w: Any, *_: Any) -> Any:
        return linear_divergence(x, w, x, w, kind="jsd")

    for made in jax.tree.leaves(
        jax.jit(jax.value_and_grad(twice, (0, 1)))(*LAYOUTS["tokens"].put_all(h))
    ):
        assert not np.asarray(made).any()


@pytest.mark.parametrize("name", ["mean", "targets", "none"])
def test_sizes_that_the_axes_do_not_divide(name: str) -> None:
    """Ignored tokens are appended, even if the call has no target."""
    layout = LAYOUTS["tokens"]
    for tokens in (13, 5, 3):
        h = heads(shape=(tokens,), vocab=VOCAB)
        options = torch_options((tokens,), VOCAB)[name]
        target = "target" in options
        given = {**options, "target": h.target} if target else options
        scale = 3 * upstream((tokens,)) if name == "none" else 3.0
        held = {n: as_jax(o) for n, o in options.items() if n != "target"}
        rows = layout.put(jnp.zeros(16), "dp").sharding

        def step(*arrays: Any) -> Any:
            spread = lambda a: jax.lax.with_sharding_constraint(a[:tokens], rows)  # noqa: B023, E731
            x, w, y, v, b, c, t = arrays
            return step_of(as_jax(scale), target=target, **held)(  # noqa: B023
                spread(x), w, spread(y), v, b, c, spread(t)
            )

        pad = lambda t: torch.cat([t, t[:1].expand(16 - tokens, *t.shape[1:])])  # noqa: B023, E731
        padded = Heads(
            pad(h.input), h.weight, pad(h.teacher_input), h.teacher_weight, h.bias,
            h.teacher_bias, pad(h.target),
        )  # fmt: skip
        value, (grad_x, *grads), _ = jax.jit(step)(*layout.put_all(padded))
        total, (of_x, *theirs), _ = exact(h, scale, **given)
        same(value, total)
        same(grad_x[:tokens], of_x)
        assert not np.asarray(grad_x[tokens:]).any()
        for grad, e in zip(grads, theirs):
            same(grad, e)


@pytest.mark.parametrize("empty", ["zero", "nan"])
def test_tokens_that_do_not_count(empty: Any) -> None:
    h = heads(shape=SHAPE, vocab=VOCAB)
    h.target[2:] = -100  # none on the last devices
    h.target[0, 0] = 5
    check(LAYOUTS["tokens"], h, {"target": None, "kind": "jsd"})
    h.target[:] = -100
    step = jax.jit(step_of(1.0, target=True, empty_mean=empty))
    value, grads, _ = step(*LAYOUTS["tokens"].put_all(h))
    assert value == 0 if empty == "zero" else np.isnan(value)
    assert not any(np.asarray(g).any() for g in grads)


def test_a_wrong_target_is_an_error_of_every_device() -> None:
    """No device waits for one that has failed, also in Backward, which may be the only op of a call
    that a program has."""
    h = heads(shape=SHAPE, vocab=VOCAB)
    h.target[7, 3] = VOCAB
    for reduction in ("mean", "none"):
        step = step_of(1.0, target=True, reduction=reduction)
        for run in (step, lambda *given, step=step: step(*given)[1]):
            with pytest.raises(Exception, match=rf"target\[\d+\] is {VOCAB}; allowed: 0 to"):
                jax.block_until_ready(jax.jit(run)(*LAYOUTS["tokens"].put_all(h)))


# --- the compiled program ---


def kinds_of(text: str) -> list[int]:
    return [int(part.split()[0]) for part in text.split(" kind = ")[1:]]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tokens", "of two axes", "sequences"])
def test_no_logits_are_exchanged_and_dz_is_kept(layout: str) -> None:
    """A mean is one call. Per-token losses keep dz of a device's own tokens; it is not copied, and
    with it Backward needs no teacher."""
    shape, vocab = (8, 64), 320
    h = heads(shape=shape, vocab=vocab)
    where = LAYOUTS[layout]
    devices = int(np.prod([*where.mesh.values()]))
    for options in ({}, {"reduction": "none"}):
        text = check(where, h, {"kind": "jsd", **options})
        found = collectives(text)
        most = vocab * 8  # elements of grad_weight
        assert all(elements(t) <= most for of in found.values() for t in of)
        assert not [t for t in found.get("all-gather", []) if elements(t) > devices]
        if not options:
            assert kinds_of(text) == [BOTH]
            continue
        assert kinds_of(text) == [FORWARD, BACKWARD] and kept(text) == [True, True]
        assert "conditional" not in text and "teacher" not in calls(text)[1]
        rows = 512 * vocab // devices // 64
        assert f"[{rows},64]" in text, "a device keeps that of its own tokens"
        assert not [
            line for line in text.splitlines() if f"[{rows},64]" in line and "copy(" in line
        ]
    uneven = check(where, heads(shape=(8, 24), vocab=vocab), {"reduction": "none"})
    assert kept(uneven) == [False, False] and "teacher" in calls(uneven)[1]


def test_without_a_target_nothing_is_counted() -> None:
    """The divisor of a mean is known before the program runs."""
    h = heads(shape=SHAPE, vocab=VOCAB)
    found = {}
    for target in (False, True):
        step = step_of(1.0, target=target)
        text = jax.jit(step).lower(*LAYOUTS["tokens"].put_all(h)).compile().as_text()
        found[target] = len(collectives(text).get("all-gather", []))
    assert found[False] < found[True]


def test_gradients_are_sharded_as_what_they_are_of() -> None:
    h = heads(shape=SHAPE, vocab=VOCAB)
    placed = LAYOUTS["sequences"].put_all(h)
    _, grads, _ = jax.jit(step_of(1.0))(*placed)
    for grad, x in zip(grads, (placed[0], placed[1], placed[4])):
        assert grad.sharding.is_equivalent_to(x.sharding, x.ndim)


# --- state that another program has kept ---

STATE = (512,)


def pulled(layout: Layout | None, h: Heads, wrap: Any = jax.jit) -> Any:
    """jax.vjp's function from a program on this layout or, with None, on one device."""
    x, w, y, v, *_ = map(to_jax, h) if layout is None else layout.put_all(h)

    def forward(x: Any, w: Any, y: Any, v: Any) -> Any:
        return jax.vjp(lambda x, w: linear_divergence(x, w, y, v, reduction="none"), x, w)[1]

    return wrap(forward)(x, w, y, v)


@pytest.mark.parametrize(
    "used", ["tokens", "of two axes", "replicated", "one device", "not Shardy"]
)
@pytest.mark.parametrize("made", ["tokens", "of two axes", "one device"])
def test_kept_state_of_another_split_is_not_used(made: str, used: str) -> None:
    """Backward then computes the logits of both heads again."""
    h = heads(shape=STATE, vocab=256)
    up = upstream(STATE)
    theirs, _ = expected(h, reduction="none")
    wanted = torch.autograd.grad(theirs, h.leaves[:2], up.double())
    leaves, tree = jax.tree.flatten(pulled(LAYOUTS.get(made), h))
    assert [leaf.shape for leaf in leaves if leaf.shape[-1:] == (64,)] == [(512, 4, 64)]
    layout = LAYOUTS.get(used, LAYOUTS["tokens"] if used == "not Shardy" else None)

    def placed(leaf: Any) -> Any:
        leaf = np.asarray(leaf)
        if layout is None:
            return jax.device_put(leaf, jax.devices("cpu")[0])
        # Kept state has three dimensions and no sharding of its own.
        split = leaf.ndim < 3 and leaf.shape[0] == STATE[0]
        return layout.put(leaf, *(layout.tokens if split else ()))

    moved = list(map(placed, leaves))

    def run(leaves: Any) -> Any:
        pull = lambda leaves, up: jax.tree.unflatten(tree, leaves)(up)  # noqa: E731
        return jax.jit(pull)(leaves, placed(up.numpy()))

    if used == "not Shardy":
        with without_shardy():
            ours = run(moved)
    else:
        ours = run(moved)
    for grad, e in zip(ours, wanted):
        same(grad, e)
    if made == used:  # with equal layouts Backward reads the kept state
        emptied = [0 * x if x.shape[-1:] == (64,) else x for x in moved]
        assert not np.asarray(run(emptied)[0]).any()


# --- transforms ---


def test_vmap_and_checkpoint_of_split_sequences() -> None:
    h = heads(shape=SHAPE, vocab=VOCAB)
    where = LAYOUTS["tokens"]

    def one(x: Any, w: Any, y: Any, v: Any, t: Any) -> Any:
        return linear_divergence(x, w, y, v, target=t, kind="jsd")

    def mapped(x: Any, w: Any, y: Any, v: Any, b: Any, c: Any, t: Any) -> Any:
        return jax.vmap(jax.checkpoint(one), (0, None, 0, None, 0))(x, w, y, v, t).sum()

    value, grads = jax.jit(jax.value_and_grad(mapped, (0, 1)))(*where.put_all(h))
    theirs = sum(
        expected(
            Heads(h.input[i], h.weight, h.teacher_input[i], h.teacher_weight, *h[4:]),
            target=h.target[i], kind="jsd",
        )[0]
        for i in range(8)
    )  # fmt: skip
    same(value, theirs.detach())  # type: ignore[union-attr]
    for grad, e in zip(grads, torch.autograd.grad(theirs, h.leaves[:2])):  # type: ignore[arg-type]
        same(grad, e)


def test_shard_map_over_tokens() -> None:
    """Tokens split by jax.shard_map, with and without its check of types."""
    h = heads(shape=SHAPE, vocab=VOCAB)
    where = LAYOUTS["tokens"]

    def of(checked: bool) -> Any:
        def local(x: Any, w: Any, y: Any, v: Any) -> Any:
            return jax.lax.psum(linear_divergence(x, w, y, v, reduction="sum"), "dp") / 32

        return jax.shard_map(
            local, mesh=mesh_of(dp=4), in_specs=(P("dp"), P(), P("dp"), P()), out_specs=P(),
            check_vma=checked,
        )  # fmt: skip

    given = where.put_all(h)[:4]
    value, grads = jax.jit(jax.value_and_grad(of(False), (0, 1)))(*given)
    theirs, _ = expected(h)
    same(value, theirs)
    for grad, e in zip(grads, torch.autograd.grad(theirs, h.leaves[:2])):
        same(grad, e)
    with pytest.raises(NotImplementedError, match="check_vma=False"):
        jax.jit(of(True))(*given)


@pytest.mark.skipif(not hasattr(jax, "set_mesh"), reason="an older JAX")
@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_mesh_of_explicit_axes(reduction: str, shift: bool) -> None:
    h = heads(shape=SHAPE, vocab=VOCAB)
    mesh = host_mesh((2, 2), ("dp", "sp"))
    put = lambda a, *spec: jax.device_put(a, jax.sharding.NamedSharding(mesh, P(*spec)))  # noqa: E731
    x, w, y, v, b, c, t = map(to_jax, h)
    temperature = as_jax(torch.rand(SHAPE) + 0.5)
    options: dict[str, Any] = {"reduction": reduction, "shift": shift, "target": True}
    whole = step_of(1.0, temperature=temperature, **options)(x, w, y, v, b, c, t)
    with jax.set_mesh(mesh):
        spec = ("dp", "sp")
        step = step_of(1.0, temperature=put(temperature, *spec), **options)
        given = (
            put(x, *spec), put(w), put(y, *spec), put(v), put(b), put(c), put(t, *spec),
        )  # fmt: skip
        for made in (step(*given), jax.jit(step)(*given)):
            for a, e in zip(jax.tree.leaves(made), jax.tree.leaves(whole), strict=True):
                same(a, torch.from_numpy(np.array(e)).double())


@pytest.mark.skipif(not hasattr(jax, "set_mesh"), reason="an older JAX")
@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(
    "of", [((), (), ("dp",)), ((), (None, "sp"), ()), ((None, None, "sp"), (), ("dp",))], ids=str
)
def test_a_gradient_has_its_own_sharding_on_explicit_axes(
    of: Any, reduction: str, jitted: bool
) -> None:
    """A gradient is sharded as its array, whatever the other arrays are. `of`: the axes of the
    student's input and weight, and of the teacher's input."""
    h = heads(shape=SHAPE, vocab=VOCAB)
    mesh = host_mesh((2, 2), ("dp", "sp"))
    put = lambda a, *spec: jax.device_put(a, jax.sharding.NamedSharding(mesh, P(*spec)))  # noqa: E731
    x, w, y, v, b, c, t = map(to_jax, h)
    step = step_of(1.0, reduction=reduction, target=True)
    whole = step(x, w, y, v, b, c, t)
    with jax.set_mesh(mesh):
        given = put(x, *of[0]), put(w, *of[1]), put(y, *of[2]), put(v), put(b), put(c), put(t)
        made = (jax.jit(step) if jitted else step)(*given)
    for a, e in zip(jax.tree.leaves(made), jax.tree.leaves(whole), strict=True):
        same(a, torch.from_numpy(np.array(e)).double())
    for gradient, primal in zip(made[1], (*given[:2], given[4])):
        assert gradient.sharding.is_equivalent_to(primal.sharding, gradient.ndim)


# --- a vocabulary that is split ---

SPLIT: dict[str, tuple[dict[str, tuple[Any, ...]], str]] = {
    "both heads": ({"w": ("tp",), "v": ("tp",)}, "linear_weight"),
    "the student's": ({"w": ("tp",)}, "linear_weight"),
    "the teacher's": ({"v": ("tp",)}, "teacher_weight"),
    "the biases": ({"b": ("tp",)}, "linear_bias"),
    "the teacher's bias": ({"c": ("tp",)}, "teacher_bias"),
    "beside tokens": ({"x": ("dp",), "y": ("dp",), "w": ("tp",)}, "linear_weight"),
    "by both axes": ({"x": ("dp",), "y": ("dp",), "w": (("dp", "tp"),)}, "linear_weight"),
}


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("name", SPLIT)
def test_a_split_vocabulary_is_an_error(name: str, reduction: str, jitted: bool) -> None:
    specs, argument = SPLIT[name]
    h = heads(shape=SHAPE, vocab=VOCAB)
    where = Layout({"dp": 2, "tp": 4})
    given = [where.put(to_jax(a), *specs.get(n, ())) for n, a in zip("xwyvbct", h)]
    step = step_of(1.0, reduction=reduction)
    with pytest.raises(
        Exception,
        match=rf"{argument} is split over the mesh axes \['tp'\] by its vocabulary; allowed in "
        r"linear_divergence: a vocabulary that is whole .*with_sharding_constraint makes it so",
    ):
        (jax.jit(step) if jitted else step)(*given)


def test_split_logits_of_a_teacher_are_an_error() -> None:
    h = heads(shape=SHAPE, vocab=VOCAB)
    where = Layout({"dp": 2, "tp": 4})
    x, w = (where.put(to_jax(a)) for a in h[:2])
    logits = where.put(jnp.ones((*SHAPE, VOCAB)), "dp", None, "tp")
    with pytest.raises(Exception, match=r"teacher_logits is split over the mesh axes \['tp'\]"):
        jax.jit(lambda x, w, z: linear_divergence(x, w, teacher_logits=z))(x, w, logits)


def test_the_way_that_the_error_names() -> None:
    """The constraint that the error names gathers the heads within the program."""
    h = heads(shape=SHAPE, vocab=VOCAB)
    where = Layout({"dp": 2, "tp": 4}, ("dp",), "tp")
    x, w, y, v, *_ = where.put_all(h)
    whole = jax.sharding.NamedSharding(mesh_of(**where.mesh), P())

    def loss(x: Any, w: Any, y: Any, v: Any) -> Any:
        w, v = (jax.lax.with_sharding_constraint(a, whole) for a in (w, v))
        return linear_divergence(x, w, y, v)

    value, grads = jax.jit(jax.value_and_grad(loss, (0, 1)))(x, w, y, v)
    theirs, _ = expected(h)
    same(value, theirs)
    for grad, e in zip(grads, torch.autograd.grad(theirs, h.leaves[:2])):
        same(grad, e)


# --- mutants: known bugs ---

BUGS: dict[str, tuple[Mutant, str]] = {
    "grad_weight": (MUTANTS["grad_weight of a device's own tokens"], "mean"),
    "normalizer": (MUTANTS["normalizer of a device's own tokens"], "mean"),
    "normalizer of targets": (MUTANTS["normalizer of a device's own tokens"], "targets"),
    "loss": (MUTANTS["loss of a device's own tokens"], "sum"),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_known_bug_makes_a_check_fail(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (where, attribute, make, *_), options = BUGS[name]
    monkeypatch.setattr(where, attribute, make(getattr(where, attribute)))
    h = heads(shape=SHAPE, vocab=VOCAB)
    h.target[0] = -100  # devices have unequal numbers of tokens that count
    with pytest.raises(AssertionError):
        check(LAYOUTS["tokens"], h, torch_options(SHAPE, VOCAB)[options])


def test_padding_that_counts_makes_a_check_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_partition, "_padded", lambda target, split, options: target)
    with pytest.raises(AssertionError):
        test_sizes_that_the_axes_do_not_divide("mean")


def test_foreign_state_makes_a_check_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    real = _partition._with_kept

    def trusting(parts: Any, operands: Any, made: Any) -> Any:
        if _partition._PARTS in operands and parts is not None:
            operands = operands | {_partition._PARTS: jnp.array(parts, jnp.int32)}
        return real(parts, operands, made)

    monkeypatch.setattr(_partition, "_with_kept", trusting)
    with pytest.raises(AssertionError):
        test_kept_state_of_another_split_is_not_used("tokens", "replicated")
