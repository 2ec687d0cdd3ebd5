# SPDX-License-Identifier: Apache-2.0
"""Programs of logitless.jax for a machine of unequal GPUs, which need not be here."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("jax")
import jax
import numpy as np

import jax_support  # noqa: F401, before JAX starts
from logitless import _abi
from logitless.jax import _run, linear_cross_entropy

# A device has a least size, a wanted one and an alignment.
SIZES = {0: (1000, 5000, 256), 1: (3000, 7000, 512), 3: (2000, 9000, 128)}


@pytest.fixture
def unequal(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine of GPUs of which each wants another workspace, and the third is not served."""

    def workspace(op: Any, execution: Any, size: Any, status: Any) -> int:
        cuda = execution._obj.device_type == _abi.CUDA
        sizes = SIZES.get(execution._obj.device_index) if cuda else (1, 1, 64)
        if sizes is None:
            status._obj.message = b"too old"
            return 9  # 9 is backend_unavailable
        size._obj.minimum, size._obj.recommended, size._obj.alignment = sizes
        return 0

    def devices(**_: Any) -> Any:
        return [SimpleNamespace(local_hardware_id=i) for i in (0, 1, 2, 3)]

    _run._plan.cache_clear()
    monkeypatch.setattr(_abi, "_workspace", workspace)
    monkeypatch.setattr(jax, "local_devices", devices)
    yield monkeypatch
    _run._plan.cache_clear()


def test_the_workspace_is_enough_for_every_gpu(unequal: Any) -> None:
    x, w, t = np.ones((6, 4), np.float32), np.ones((9, 4), np.float32), np.zeros(6, np.int32)

    def planned(memory: int | None) -> tuple[int, ...]:
        step = jax.jit(lambda x: linear_cross_entropy(x, w, t, memory=memory))
        text = step.trace(x).lower(lowering_platforms=("cuda",)).as_text()
        found = [re.search(rf"\b{n} = (\d+)", text) for n in ("workspace_bytes", "alignment")]
        return tuple(int(m[1]) for m in found if m)

    assert planned(None) == (9000, 512)
    assert planned(3000) == (3000, 512)
    with pytest.raises(ValueError, match="memory is 2500 bytes; allowed: >= 3000"):
        planned(2500)
    unequal.setitem(SIZES, 0, None)  # the first device is not served either
    assert planned(None) == (9000, 512)
