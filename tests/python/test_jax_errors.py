# SPDX-License-Identifier: Apache-2.0
"""Errors of logitless.jax; and the layout of XLA's structs."""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("jax")
import jax
import jax.numpy as jnp
import numpy as np

from jax_support import platform, problem  # noqa: F401
from logitless.jax import cross_entropy, linear_cross_entropy, linear_logprob, softmax

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Layer:
    """A layer with its kernel, like flax's."""

    kernel = np.ones((5, 9), np.float32)


ERRORS: dict[str, tuple[dict[str, Any], type, str]] = {
    "input of integers": ({"x": np.ones((4, 5), np.int32)}, TypeError, "input is i(nt)?32"),
    "input a list": ({"x": [[1.0]]}, TypeError, "input is a list"),
    "input None": ({"x": None}, TypeError, "^input is a NoneType; allowed: an array"),
    "weight None": ({"w": None}, TypeError, "^linear_weight is a NoneType; allowed: an array"),
    "target None": ({"t": None}, TypeError, "^target is a NoneType; allowed: an array"),
    "weight a layer": (
        {"w": Layer()}, TypeError,
        r"linear_weight is a Layer; allowed: an array, as its kernel\[\.\.\.\]\.T",
    ),
    "input a scalar": ({"x": np.float32(1) + np.zeros((), np.float32)}, TypeError, "input"),
    "input of rank 0": ({"x": np.zeros((), np.float32)}, ValueError, r"input has shape \(\)"),
    "weight of another dtype": (
        {"w": np.ones((9, 5), np.float16)}, TypeError,
        r"^linear_weight is f\w*16; allowed: f\w*32, .*; use linear_weight\.astype\(",
    ),
    "weight of another hidden size": ({"w": np.ones((9, 6), np.float32)}, ValueError, "weight"),
    "weight a vector": (
        {"w": np.ones(45, np.float32)}, ValueError,
        r"^linear_weight has shape \(45,\); allowed: \[V, D\]",
    ),
    "weight of rank 0": (
        {"w": np.ones((), np.float32)}, ValueError,
        r"^linear_weight has shape \(\); allowed: \[V, D\]",
    ),
    "weight empty": ({"w": np.ones((0, 5), np.float32), "b": None}, ValueError, "weight"),
    "bias of another size": ({"b": np.ones(8, np.float32)}, ValueError, "bias"),
    "target of another shape": ({"t": np.zeros(5, np.int32)}, ValueError, "target has shape"),
    "target of i16": (
        {"t": np.zeros(4, np.int16)}, TypeError, r"target is int16; .*; use \.astype\(jnp\.int32\)"
    ),
    "target of u8, shifted": (
        {"t": np.zeros(4, np.uint8), "shift": 1}, TypeError, "target is uint8; allowed: int32"
    ),
    "soft targets": ({"t": np.zeros((4, 9), np.float32)}, NotImplementedError, "soft targets"),
    "class weights of another size": ({"weight": np.ones(8)}, ValueError, "^weight has"),
    "token weights of another shape": ({"token_weight": np.ones(5)}, ValueError, "token_weight"),
    "normalizer a vector": ({"normalizer": np.ones(2)}, ValueError, "normalizer has shape"),
    "normalizer a text": ({"normalizer": "5"}, TypeError, "normalizer is a str"),
    "reduction": ({"reduction": "average"}, ValueError, "reduction is 'average'; allowed: 'none'"),
    "empty_mean": ({"empty_mean": 0}, ValueError, "empty_mean"),
    "statistics": ({"return_statistics": "variance"}, ValueError, "return_statistics"),
    "smoothing": ({"label_smoothing": 1.5}, ValueError, "label_smoothing is 1.5; allowed"),
    "temperature": ({"temperature": 0}, ValueError, "temperature"),
    "temperatures of another shape": ({"temperature": np.ones(5)}, ValueError, "temperature has s"),
    "temperatures below f32": (
        {"temperature": np.full(4, 1e-46)}, ValueError, r"temperature\[0\] is 1e-46"
    ),
    "ignore_index": ({"ignore_index": 1 << 70}, ValueError, "ignore_index"),
    "ignore_index a float": ({"ignore_index": 1.5}, TypeError, "ignore_index is a float"),
    "shift": ({"shift": -1}, ValueError, r"shift is -1 of targets \(4,\); allowed: False, True,"),
    "shift of every target": ({"shift": 4}, ValueError, "shift is 4 of targets .* 0 to 3"),
    "shift a float": ({"shift": 1.0}, TypeError, "shift is a float"),
    "target masked": ({"t": np.ma.masked_array([0, 1, 2, 3], [0, 1, 0, 0])}, TypeError, "masked"),
    "target beyond int32": ({"t": np.array([0, 1, (1 << 32) + 5, 0])}, ValueError, r"target\[2\]"),
    "class weights complex": ({"weight": np.ones(9) * 1j}, TypeError, "weight is complex128"),
    "class weights below f32": ({"weight": np.full(9, 1e-46)}, ValueError, r"weight\[0\] is 1e-46"),
    "token weights beyond f32": (
        {"token_weight": np.array([1, 1, -1e39, 1])}, ValueError, r"token_weight\[2\] is -1e\+39"
    ),
    "token weights masked": (
        {"token_weight": np.ma.masked_array(np.ones(4), [0, 1, 0, 0])}, TypeError, "a masked"
    ),
    "normalizer beyond f32": ({"normalizer": np.array(1e39)}, ValueError, r"normalizer is 1e\+39"),
    "normalizer complex": ({"normalizer": np.complex64(2)}, TypeError, "normalizer is a complex64"),
    "normalizer huge": ({"normalizer": 10**400}, ValueError, "normalizer is an int beyond"),
    "temperature complex": ({"temperature": np.complex64(1)}, TypeError, "temperature is a c"),
    "softcap below f32": ({"softcap": 1e-46}, ValueError, "softcap is 1e-46; allowed"),
    "softcap beyond f32": ({"softcap": 10**39}, ValueError, r"softcap is 1e\+39; allowed"),
    "memory": ({"memory": "many"}, ValueError, "memory"),
    "memory too small": ({"memory": 1}, ValueError, "memory is 1 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("how", ["eager", "jit", "grad"])
def test_what_is_wrong_is_said(name: str, how: str) -> None:
    change, kind, message = ERRORS[name]
    given: dict[str, Any] = {
        "x": np.ones((4, 5), np.float32), "w": np.ones((9, 5), np.float32),
        "b": np.ones(9, np.float32), "t": np.zeros(4, np.int32), **change,
    }  # fmt: skip
    x, w, b, t = (given.pop(k) for k in "xwbt")

    def call(v: Any) -> Any:
        return linear_cross_entropy(x, w, t, linear_bias=None if b is None else b * v, **given)

    step = {"eager": call, "jit": jax.jit(call), "grad": jax.grad(call)}[how]
    with pytest.raises(kind, match=message):
        step(jnp.float32(1))


def test_a_target_out_of_range(platform: str) -> None:  # noqa: F811
    x, w, _, t = problem((4, 9), 21, 8, ignored=0)
    t = t.at[1, 2].set(21)
    step = jax.jit(lambda x, t: linear_cross_entropy(x, w, t, reduction="none"))
    if platform == "cuda":  # the call does not wait for the device's answer
        assert np.argwhere(np.isnan(step(x, t))).tolist() == [[1, 2]]
        return
    error = jax.errors.JaxRuntimeError
    with pytest.raises(error, match=r"target\[11\] is 21; allowed: 0 to 20, or ignore_index"):
        jax.block_until_ready(step(x, t))
    assert jnp.isfinite(step(x, t % 21)).all(), "the next call is as ever"


def test_eagerly_the_host_names_the_callers_own_target(platform: str) -> None:  # noqa: F811
    """A target on the CPU that is not traced can be read before the call."""
    if platform == "cuda":
        return
    x, w, _, t = problem((2, 5), 21, 8, ignored=0)
    t = t.at[1, 3].set(99).at[0, 2].set(-7)
    wrong = r"^target\[1, 3\] \(flat: target\[8\]\) is 99; allowed: 0 to 20, or ignore_index -7"

    def loss(x: Any, w: Any, t: Any, shift: Any) -> Any:
        return linear_cross_entropy(x, w, t, ignore_index=-7, shift=shift)

    for given in (t, np.asarray(t), np.asarray(t, np.int64)):
        for shift in (False, True, 3):

            def step(x: Any, t: Any = given, shift: Any = shift) -> Any:
                return loss(x, w, t, shift)

            for call in (step, jax.grad(step), jax.jit(lambda x, step=step: step(x))):
                with pytest.raises(ValueError, match=wrong) as raised:
                    call(x)
                assert raised.value.status == "target_out_of_range"
    early = t.at[1, 3].set(1).at[0, 0].set(99)
    for shift in (1, 4):  # with the shift, no position has the wrong label
        assert np.isfinite(loss(x, w, early, shift))
    with pytest.raises(ValueError, match=r"^target\[4\] is 99; allowed: 0 to 20"):
        cross_entropy(x[0] @ w.T, t[1].at[4].set(99).at[3].set(0))
    lone = jnp.int32(99)
    with pytest.raises(ValueError, match=r"^target is 99; allowed"):
        linear_cross_entropy(x[0, 0], w, lone)


def test_numbers_that_f32_cannot_hold_with_64_bits(platform: str) -> None:  # noqa: F811
    """Such numbers are refused if the host can read the array: not if it is traced or on a GPU."""
    x, w, _, t = problem((4,), 9, 5, ignored=0)
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        ones = {"weight": jnp.ones(9, jnp.float64), "token_weight": jnp.ones(4, jnp.float64)}
        ones |= {"temperature": jnp.ones(4, jnp.float64), "normalizer": jnp.ones((), jnp.float64)}
        for name, value in ones.items():
            assert np.isfinite(linear_cross_entropy(x, w, t, **{name: value}))
            for number in (1e-46, 1e39, -1e39):
                bad = value.at[(-1,) * value.ndim].set(number) if value.ndim else value * number
                where = rf"^{name}(\[\d\])? is {re.escape(str(number))}; allowed: 0, or 1.4e-45"
                for call in (
                    lambda x, n=name, b=bad: linear_cross_entropy(x, w, t, **{n: b}),
                    jax.grad(lambda x, n=name, b=bad: linear_cross_entropy(x, w, t, **{n: b})),
                ):
                    if platform == "cpu":
                        with pytest.raises(ValueError, match=where):
                            call(x)
                    else:
                        call(x)


class Variable:
    """An object around an array, like flax's nnx.Param."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __jax_array__(self) -> Any:
        return self.value


jax.tree_util.register_pytree_node(
    Variable, lambda v: ((v.value,), None), lambda _, c: Variable(*c)
)


def test_a_variable_stands_for_its_array() -> None:
    x, w, b, t = problem((4, 9), 21, 8, bias=True)
    rest = {
        "linear_bias": b, "weight": jnp.linspace(1, 2, 21), "token_weight": jnp.ones((4, 9)),
        "temperature": jnp.full((4, 1), 0.7), "normalizer": jnp.float32(5),
    }  # fmt: skip

    def loss(x: Any, w: Any, t: Any, rest: Any) -> Any:
        return linear_cross_entropy(x, w, t, shift=True, **rest)

    boxed = Variable(x), Variable(w), Variable(t), {n: Variable(v) for n, v in rest.items()}
    for step in (loss, jax.jit(loss), jax.grad(loss, (0, 1)), jax.jit(jax.grad(loss, (0, 1)))):
        for ours, theirs in zip(
            jax.tree.leaves(step(*boxed)), jax.tree.leaves(step(x, w, t, rest))
        ):
            assert np.array_equal(ours, theirs)
    assert isinstance(jax.grad(loss, 1)(*boxed), Variable)
    logits = x @ w.T
    assert cross_entropy(Variable(logits), Variable(t)) == cross_entropy(logits, t)
    assert jnp.array_equal(softmax(Variable(logits)), softmax(logits))
    of_host = Variable(np.asarray(t))
    assert linear_cross_entropy(x, w, of_host) == linear_cross_entropy(x, w, t)
    with pytest.raises(ValueError, match=r"weight\[0\] is 1e-46"):
        linear_cross_entropy(x, w, t, weight=Variable(np.full(21, 1e-46)))


def test_traced_options_and_differentiated_constants() -> None:
    x, w, _, t = problem((4, 9), 21, 8, ignored=0)
    with pytest.raises(TypeError, match=r"softcap is a .*Tracer; allowed: a Python number"):
        jax.jit(lambda c: linear_cross_entropy(x, w, t, softcap=c))(1.0)
    for name, shape in (
        ("token_weight", t.shape), ("weight", (21,)), ("normalizer", ()), ("temperature", ()),
    ):  # fmt: skip
        value = jnp.ones(shape)

        def step(v: Any, name: str = name) -> Any:
            return linear_cross_entropy(x, w, t, **{name: v})

        with pytest.raises(ValueError, match=f"{name} is differentiated.*stop_gradient"):
            jax.grad(step)(value)
        stopped = jax.grad(lambda v, s=step: s(jax.lax.stop_gradient(v)))(value)  # type: ignore[misc]
        assert not stopped.any()


def test_second_derivatives_and_forward_mode_are_refused() -> None:
    x, w, _, t = problem((4, 9), 21, 8, ignored=0)

    def step(x: Any) -> Any:
        return linear_cross_entropy(x, w, t)

    for second in (
        lambda: jax.grad(lambda x: jax.grad(step)(x).sum())(x),
        lambda: jax.grad(lambda x: jax.grad(lambda x: linear_logprob(x, w, t).sum())(x).sum())(x),
        lambda: jax.hessian(step)(x),
    ):
        with pytest.raises(Exception, match=r"differentiated once only|custom_vjp"):
            second()
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(step, (x,), (x,))


def test_without_jax_the_error_is_clear_and_jax_needs_no_torch() -> None:
    code = "import sys; sys.modules['jax'] = None; import logitless.jax"
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True)
    assert b"ImportError: logitless.jax needs JAX 0.6.1 or newer: pip install jax" in done.stderr
    code = "import sys, logitless, logitless.numpy; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env=environment())
    code = "import sys, logitless.jax; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env=environment())


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


LAYOUT = {
    "Extension": ("decltype(XLA_FFI_Metadata_Extension::extension_base)", "type next"),
    "Version": ("XLA_FFI_Api_Version", "major:major_version minor:minor_version"),
    "Metadata": ("XLA_FFI_Metadata", "version:api_version traits"),
    "MetadataExtension": ("XLA_FFI_Metadata_Extension", "base:extension_base metadata"),
    "Buffer": ("XLA_FFI_Buffer", "dtype data rank shape:dims"),
    "Text": ("XLA_FFI_ByteSpan", "data:ptr size:len"),
    "Scalar": ("XLA_FFI_Scalar", "dtype value"),
    "Values": ("XLA_FFI_Args", "size kinds:types values:args"),
    "Attributes": ("XLA_FFI_Attrs", "size kinds:types names values:attrs"),
    "ErrorCreate": ("XLA_FFI_Error_Create_Args", "message code:errc"),
    "StreamGet": ("XLA_FFI_Stream_Get_Args", "context:ctx stream"),
    "DeviceOrdinalGet": ("XLA_FFI_DeviceOrdinal_Get_Args", "context:ctx ordinal:device_ordinal"),
    "Api": (
        "XLA_FFI_Api",
        "version:api_version error_create:XLA_FFI_Error_Create stream_get:XLA_FFI_Stream_Get "
        "device_ordinal_get:XLA_FFI_DeviceOrdinal_Get",
    ),
    "CallFrame": (
        "XLA_FFI_CallFrame", "api context:ctx stage arguments:args results:rets attributes:attrs",
    ),
}  # fmt: skip
VALUES = {
    "extension_metadata": "XLA_FFI_Extension_Metadata",
    "stage_execute": "XLA_FFI_ExecutionStage_EXECUTE",
    "kind_buffer": "XLA_FFI_ArgType_BUFFER",
    "attribute_scalar": "XLA_FFI_AttrType_SCALAR",
    "attribute_text": "XLA_FFI_AttrType_STRING",
    "error_invalid_argument": "XLA_FFI_Error_Code_INVALID_ARGUMENT",
    "error_out_of_range": "XLA_FFI_Error_Code_OUT_OF_RANGE",
    "error_unimplemented": "XLA_FFI_Error_Code_UNIMPLEMENTED",
    "error_internal": "XLA_FFI_Error_Code_INTERNAL",
    "error_unavailable": "XLA_FFI_Error_Code_UNAVAILABLE",
    **{f"type_{t.lower()}": f"XLA_FFI_DataType_{t}" for t in "S32 S64 U8 F16 F32 F64 BF16".split()},
}


def test_the_layout_is_that_of_xlas_header(tmp_path: pathlib.Path, platform: str) -> None:  # noqa: F811
    """src/xla/ffi.h against the header of the installed JAX."""
    compiler = shutil.which("c++")
    if platform != "cpu" or compiler is None:
        return
    lines = [
        f'static_assert(x::{ours} == int({theirs}), "{ours}");' for ours, theirs in VALUES.items()
    ]
    for ours, (theirs, names) in LAYOUT.items():
        for name in names.split():
            mine, _, its = name.partition(":")
            lines.append(
                f"static_assert(offsetof(x::{ours}, {mine}) == offsetof({theirs}, {its or mine}) "
                f"&& sizeof(x::{ours}::{mine}) <= sizeof({theirs}::{its or mine}), "
                f'"{ours}.{mine}");'
            )
    source = tmp_path / "layout.cpp"
    head = (
        '#include "src/xla/ffi.h"\n#include <xla/ffi/api/c_api.h>\nnamespace x = logitless::xla;\n'
    )
    source.write_text(head + "\n".join(lines) + "\nint main() {}\n")
    command = [
        compiler,
        "-std=c++20",
        "-fsyntax-only",
        f"-I{ROOT}",
        "-isystem",
        jax.ffi.include_dir(),
    ]
    done = subprocess.run([*command, source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
