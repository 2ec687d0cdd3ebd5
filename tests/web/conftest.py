# SPDX-License-Identifier: Apache-2.0
"""Both compilers at hand: every test that takes `compiler` runs with naga (wgpu-native, on a
software Vulkan adapter) and with Tint (headless Chromium, on SwiftShader)."""

from __future__ import annotations

import os
import pathlib
import tempfile
from collections.abc import Iterator

import pytest
import raw
from playwright.sync_api import BrowserContext, Page, sync_playwright
from serving import serve

# --enable-unsafe-webgpu alone gives an adapter without a GPU.
CHROMIUM = ["--no-sandbox", "--disable-quic", "--no-first-run", "--disable-background-networking"]
CHROMIUM += ["--disable-component-update", "--disable-sync", "--enable-unsafe-webgpu"]
os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.gettempdir())  # libwgpu_native complains else


ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def origin() -> Iterator[str]:
    """Where this checkout is served; WebGPU wants a secure origin, which localhost is."""
    with serve(ROOT) as address:
        yield address


@pytest.fixture(scope="session")
def web_origin() -> Iterator[str]:
    """Where build/web is served (scripts/build-web)."""
    assert (ROOT / "build/web/logitless.wasm").is_file(), "scripts/build-web makes it"
    with serve(ROOT / "build/web") as address:
        yield address


@pytest.fixture(scope="session")
def browser() -> Iterator[BrowserContext]:
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as profile:
        context = playwright.chromium.launch_persistent_context(
            profile, executable_path="/usr/bin/chromium", headless=True, args=CHROMIUM
        )
        yield context
        context.close()


@pytest.fixture(scope="session")
def raw_page(browser: BrowserContext, origin: str) -> Page:
    page = browser.new_page()
    page.goto(f"{origin}/tests/web/raw.html")
    return page


@pytest.fixture(params=["naga", "tint"])
def compiler(request: pytest.FixtureRequest) -> raw.Compiler:
    if request.param == "naga":
        return raw.naga()
    return raw.Tint(request.getfixturevalue("raw_page"))
