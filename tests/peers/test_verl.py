# SPDX-License-Identifier: Apache-2.0
"""verl's kernel is Triton's and runs on GPUs alone: its signature, read of its file, for the
package itself imports Ray."""

from __future__ import annotations

import importlib.util
import pathlib

import pytest

import both
from logitless.integrations import verl


def test_signature() -> None:
    found = importlib.util.find_spec("verl")
    if found is None or found.origin is None:
        pytest.skip("verl is not installed")
    file = pathlib.Path(found.origin).parent / "utils/kernel/linear_cross_entropy.py"
    spec = importlib.util.spec_from_file_location("verls", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    both.takes_what(verl.linear_cross_entropy, module.LinearCrossEntropy.forward, skip=1)
