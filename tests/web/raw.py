# SPDX-License-Identifier: Apache-2.0
"""A pipeline made from a published binding table alone, with either compiler: what a program that
already has such a pipeline does with a shader of this repository. Default limits."""

from __future__ import annotations

import base64
import dataclasses
import functools
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import wgpu
from playwright.sync_api import Error, Page

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "src/webgpu/shaders"
# mutants.py sets this to its copies of the shaders.
SHADERS = pathlib.Path(os.environ.get("LOGITLESS_SHADERS", FOLDER))
# The folder of the shaders as they are compiled into the library.
BUILT = pathlib.Path(__file__).resolve().parents[2] / "build/web/shaders"
READ_ONLY, READ_WRITE, UNIFORM = "read-only-storage", "storage", "uniform"


@dataclasses.dataclass(frozen=True)
class Kernel:
    """An entry point and its binding table."""

    file: str
    entry: str
    table: tuple[str, ...]

    @property
    def code(self) -> str:
        return (SHADERS / self.file).read_text()


class Compiler(Protocol):
    def compile(self, code: str, entry: str, constants: Mapping[str, float]) -> str:
        """The compiler's error message, or nothing."""

    def run(
        self,
        kernel: Kernel,
        buffers: Sequence[np.ndarray],
        groups: tuple[int, int, int],
        constants: Mapping[str, float] | None = None,
    ) -> list[np.ndarray]:
        """The buffers after the dispatch, shaped and typed as they were given."""


def _like(data: bytes, like: np.ndarray) -> np.ndarray:
    return np.frombuffer(data[: like.nbytes], like.dtype).reshape(like.shape).copy()


class Naga:
    def __init__(self) -> None:
        adapter = wgpu.gpu.request_adapter_sync()
        self.device = adapter.request_device_sync()  # with the default limits
        self.pipelines: dict[tuple[Kernel, str, str], tuple[Any, Any]] = {}

    # Pipelines are cached: compiling takes longer than most dispatches.
    def _pipeline(self, kernel: Kernel, constants: Mapping[str, float]) -> tuple[Any, Any]:
        """The layout of its bindings, and the pipeline."""
        key = (kernel, kernel.code, str(sorted(constants.items())))
        if key not in self.pipelines:
            layout = self.device.create_bind_group_layout(
                entries=[
                    {
                        "binding": i,
                        "visibility": wgpu.ShaderStage.COMPUTE,
                        "buffer": {"type": type_},
                    }
                    for i, type_ in enumerate(kernel.table)
                ]
            )
            pipeline = self.device.create_compute_pipeline(
                layout=self.device.create_pipeline_layout(bind_group_layouts=[layout]),
                compute={
                    "module": self.device.create_shader_module(code=kernel.code),
                    "entry_point": kernel.entry,
                    "constants": dict(constants),
                },
            )
            self.pipelines[key] = layout, pipeline
        return self.pipelines[key]

    def compile(self, code: str, entry: str, constants: Mapping[str, float]) -> str:
        try:
            module = self.device.create_shader_module(code=code)
            self.device.create_compute_pipeline(
                layout="auto",
                compute={"module": module, "entry_point": entry, "constants": dict(constants)},
            )
        except wgpu.GPUError as error:
            return str(error)
        return ""

    def run(
        self,
        kernel: Kernel,
        buffers: Sequence[np.ndarray],
        groups: tuple[int, int, int],
        constants: Mapping[str, float] | None = None,
    ) -> list[np.ndarray]:
        device, usage = self.device, wgpu.BufferUsage
        layout, pipeline = self._pipeline(kernel, constants or {})
        made = []
        for type_, array in zip(kernel.table, buffers):
            kind = usage.UNIFORM if type_ == UNIFORM else usage.STORAGE
            buffer = device.create_buffer(
                size=max(16, array.nbytes), usage=kind | usage.COPY_DST | usage.COPY_SRC
            )
            if array.nbytes:
                device.queue.write_buffer(buffer, 0, np.ascontiguousarray(array))
            made.append(buffer)
        group = device.create_bind_group(
            layout=layout,
            entries=[
                {"binding": i, "resource": {"buffer": b, "offset": 0, "size": b.size}}
                for i, b in enumerate(made)
            ],
        )
        encoder = device.create_command_encoder()
        compute = encoder.begin_compute_pass()
        compute.set_pipeline(pipeline)
        compute.set_bind_group(0, group)
        compute.dispatch_workgroups(*groups)
        compute.end()
        device.queue.submit([encoder.finish()])
        return [_like(bytes(device.queue.read_buffer(b)), a) for b, a in zip(made, buffers)]


class Tint:
    def __init__(self, page: Page) -> None:
        self.page = page
        self._wait()

    def _wait(self) -> None:
        self.page.wait_for_function("globalThis.ready === true")

    def _ask(self, function: str, request: dict[str, Any]) -> Any:
        """The software adapter's process may stop answering. Then the request is repeated once on a
        fresh page. A second silence is an error."""
        late = "new Promise((_, fail) => setTimeout(() => fail(new Error('no answer')), 90000))"
        script = f"(request) => Promise.race([{function}(request), {late}])"
        try:
            return self.page.evaluate(script, request)
        except Error as error:
            if "no answer" not in str(error):
                raise
        self.page.reload()
        self._wait()
        return self.page.evaluate(script, request)

    def compile(self, code: str, entry: str, constants: Mapping[str, float]) -> str:
        request = {"code": code, "entry": entry, "constants": dict(constants), "table": None}
        return str(self._ask("compile", request))

    def run(
        self,
        kernel: Kernel,
        buffers: Sequence[np.ndarray],
        groups: tuple[int, int, int],
        constants: Mapping[str, float] | None = None,
    ) -> list[np.ndarray]:
        request = {
            "code": kernel.code,
            "entry": kernel.entry,
            "constants": dict(constants or {}),
            "table": list(kernel.table),
            "groups": list(groups),
            "buffers": [base64.b64encode(array.tobytes()).decode() for array in buffers],
        }
        results = self._ask("runRaw", request)
        return [_like(base64.b64decode(text), array) for text, array in zip(results, buffers)]


@functools.cache
def naga() -> Naga:
    return Naga()
