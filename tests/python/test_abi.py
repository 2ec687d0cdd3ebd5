# SPDX-License-Identifier: Apache-2.0
"""The ctypes structs are those that a C compiler finds in include/logitless/c.h; so are enums."""

from __future__ import annotations

import ctypes
import pathlib
import re
import subprocess

import pytest

from logitless import _abi
from logitless._errors import _STATUS

HEADER = pathlib.Path(__file__).resolve().parents[2] / "include/logitless/c.h"
STRUCTS = {
    "logitless_status": _abi.Status,
    "logitless_tensor": _abi.Tensor,
    "logitless_loss_options": _abi.LossOptions,
    "logitless_divergence_options": _abi.DivergenceOptions,
    "logitless_op": _abi.Op,
    "logitless_execution": _abi.Execution,
    "logitless_workspace_size": _abi.WorkspaceSize,
    "logitless_workspace_buffer": _abi.WorkspaceBuffer,
    "logitless_kept": _abi.Kept,
    "logitless_plan_arguments": _abi.PlanArguments,
}
ENUMS = (
    "F32 F16 BF16 I32 I64 CPU CUDA WEBGPU REFERENCE REDUCTION_NONE REDUCTION_SUM REDUCTION_MEAN "
    "EMPTY_MEAN_ZERO EMPTY_MEAN_NAN INPUT_LOGITS INPUT_PROBABILITIES SOFTMAX CROSS_ENTROPY_FORWARD "
    "CROSS_ENTROPY_BACKWARD CROSS_ENTROPY_FORWARD_BACKWARD LINEAR_CROSS_ENTROPY_FORWARD "
    "LINEAR_CROSS_ENTROPY_BACKWARD LINEAR_CROSS_ENTROPY_FORWARD_BACKWARD COMBINE "
    "LINEAR_DIVERGENCE_FORWARD LINEAR_DIVERGENCE_BACKWARD LINEAR_DIVERGENCE_FORWARD_BACKWARD "
    "FORWARD_KL REVERSE_KL JSD SKEW_KL TV"
).split()


def ask_compiler(folder: pathlib.Path, header: pathlib.Path = HEADER) -> dict[str, int]:
    """Sizes, offsets and enumerators as the C compiler has them."""
    lines = []
    for name, struct in STRUCTS.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        for field, *_ in struct._fields_:
            lines.append(f'printf("{name}.{field} %zu\\n", offsetof({name}, {field}));')
            lines.append(f'printf("{name}.{field}! %zu\\n", sizeof((({name}*)0)->{field}));')
    for enum in (*ENUMS, *(n.upper() for n, _ in _STATUS.values())):
        lines.append(f'printf("{enum} %d\\n", LOGITLESS_{enum});')
    lines.append('printf("VERSION %d\\n", LOGITLESS_VERSION);')
    source = folder / "layout.c"
    source.write_text(
        f'#include <stdio.h>\n#include "{header}"\nint main(void) {{\n' + "\n".join(lines) + "\n}\n"
    )
    program = folder / "layout"
    subprocess.run(["cc", "-std=c11", "-o", program, source], check=True)
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    return {name: int(value) for name, value in map(str.split, printed.splitlines())}


def differences(seen: dict[str, int]) -> list[str]:
    found = []
    for name, struct in STRUCTS.items():
        if ctypes.sizeof(struct) != seen[name]:
            found.append(name)
        for field, *_ in struct._fields_:
            place = getattr(struct, field)
            if place.offset != seen[f"{name}.{field}"] or place.size != seen[f"{name}.{field}!"]:
                found.append(f"{name}.{field}")
    found += [enum for enum in ENUMS if getattr(_abi, enum) != seen[enum]]
    found += [n for code, (n, _) in _STATUS.items() if seen[n.upper()] != code]
    major, minor, patch = _abi.VERSION
    if seen["VERSION"] != major * 10000 + minor * 100 + patch:
        found.append("VERSION")
    return found


def test_structs_and_enumerators_are_the_headers(tmp_path: pathlib.Path) -> None:
    assert differences(ask_compiler(tmp_path)) == []


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("float label_smoothing, z_loss,", "float z_loss, label_smoothing,", "label_smoothing"),
        ("const logitless_tensor* fault;", "const logitless_tensor *fault, *more;", "logitless_op"),
        ("int32_t device_type, device_index;", "int64_t device_type, device_index;", "device_type"),
        ("LOGITLESS_BF16 = 2", "LOGITLESS_BF16 = 5", "BF16"),
    ],
)
def test_a_changed_header_is_noticed(
    tmp_path: pathlib.Path, old: str, new: str, expected: str
) -> None:
    changed = tmp_path / "c.h"
    text = HEADER.read_text()
    assert old in text
    changed.write_text(text.replace(old, new))
    assert any(expected in d for d in differences(ask_compiler(tmp_path, changed)))


def test_every_struct_and_field_of_the_header_is_here() -> None:
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.S)
    structs = re.findall(r"typedef struct (\w+) \{(.*?)\} \w+;", text, flags=re.S)
    assert {name for name, _ in structs} - {"logitless_executor"} == set(STRUCTS)
    for name, body in structs:
        if name not in STRUCTS:
            continue
        fields = []
        for line in body.split(";"):
            line = re.sub(r"\[\d+\]", "", line)
            words = line.replace("const", "").replace("*", " ").split()
            fields += [word.strip(",") for word in words[1:]]
        assert fields == [field for field, *_ in STRUCTS[name]._fields_], name


@pytest.mark.parametrize(
    ("struct", "ours"),
    [
        ("loss_options", _abi._options_struct(_abi.Options())),
        ("loss_options", _abi._options_struct(_abi.Divergence())),
        ("divergence_options", _abi._divergence_struct(_abi.Divergence())),
    ],
    ids=["loss", "loss of a divergence", "divergence"],
)
def test_options_defaults_are_the_cores(
    tmp_path: pathlib.Path, struct: str, ours: ctypes.Structure
) -> None:
    names = [field for field, *_ in ours._fields_]
    source = tmp_path / "defaults.c"
    prints = "".join(f'printf("{n} %.17g\\n", (double)o.{n});' for n in names)
    source.write_text(
        f'#include <stdio.h>\n#include "{HEADER}"\nint main(void) {{'
        f"logitless_{struct} o = LOGITLESS_{struct.upper()}_INIT;{prints}}}\n"
    )
    subprocess.run(["cc", "-std=c11", "-o", tmp_path / "defaults", source], check=True)
    out = subprocess.run([tmp_path / "defaults"], check=True, capture_output=True, text=True).stdout
    for line in out.splitlines():
        name, value = line.split()
        assert getattr(ours, name) == float(value), name


def test_scale_is_for_devices() -> None:
    """Without CUDA tensors logitless_scale is not supported; wrong arguments are reported first."""
    values, factor = _abi.Tensor(rank=1, dtype=_abi.F32), _abi.Tensor(rank=0, dtype=_abi.F32)
    memory = (ctypes.c_float * 4)(1, 2, 3, 4)
    values.data = factor.data = ctypes.addressof(memory)
    values.shape[0], values.stride[0] = 4, 1
    execution, status = _abi.Execution(), _abi.Status()

    def call() -> int:
        arguments = map(ctypes.byref, (values, factor, execution, status))
        return int(_abi.library.logitless_scale(*arguments))

    assert call() == 10 and b"allowed: cuda" in status.message
    for place, field, value, code, message in (
        (values, "rank", 2, 2, b"values has rank 2; allowed: 1"),
        (factor, "rank", 1, 2, b"factor has rank 1; allowed: 0"),
        (values, "dtype", _abi.I32, 3, b"allowed: f32, f16, bf16"),
        (factor, "dtype", _abi.F16, 3, b"factor is f16; allowed: f32"),
        (values, "data", 0, 1, b"values has NULL data"),
        (values, "data", values.data + 2, 5, b"values is at address"),
        (factor, "device_type", _abi.CUDA, 4, b"factor is on cuda:0; allowed: cpu:0"),
    ):
        before = getattr(place, field)
        setattr(place, field, value)
        assert call() == code and message in status.message, status.message
        setattr(place, field, before)
    values.stride[0] = 2
    assert call() == 2 and b"stride 2" in status.message
    values.shape[0] = 0
    assert call() == 0 and list(memory) == [1, 2, 3, 4]
    values.shape[0], values.stride[0] = 4, 1
    each = (ctypes.POINTER(_abi.Tensor) * 2)(ctypes.pointer(values), ctypes.pointer(values))

    def call_each(count: int, given: object = each) -> int:
        rest = map(ctypes.byref, (factor, execution, status))
        return int(_abi.library.logitless_scale_each(given, count, *rest))

    assert call_each(2) == 10 and call_each(0) == 0 and call_each(0, None) == 0
    assert call_each(1, None) == 1 and b"values is NULL" in status.message
    for count in (-1, 5):
        assert call_each(count) == 1 and b"count is %d; allowed: 0 to 4" % count in status.message
