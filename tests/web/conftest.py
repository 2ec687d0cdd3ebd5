# SPDX-License-Identifier: Apache-2.0
"""Both compilers at hand: every test that takes `compiler` runs with naga (wgpu-native, on a
software Vulkan adapter) and with Tint (headless Chromium, on SwiftShader)."""

# ruff: noqa: E501
from __future__ import annotations

import os
import pathlib
import tempfile
from collections.abc import Iterator

import pytest
import raw
from playwright.sync_api import BrowserContext, Page, sync_playwright
from serving import serve

import rotation

# --enable-unsafe-webgpu makes Chromium offer an adapter without a GPU.
CHROMIUM = ["--no-sandbox", "--disable-quic", "--no-first-run", "--disable-background-networking"]
CHROMIUM += ["--disable-component-update", "--disable-sync", "--enable-unsafe-webgpu"]
# libwgpu_native complains without this variable.
os.environ.setdefault("XDG_RUNTIME_DIR", tempfile.gettempdir())


ROOT = pathlib.Path(__file__).resolve().parents[2]

# For scripts in the page: numbers, a problem, its upload; and `worst`, which returns the largest
# error of each output relative to its bound.
HELPERS = """
globalThis.fill = (size, spread = 1) => {
  let seed = size * 7919 + 12345;
  const next = () => ((seed = (Math.imul(seed, 1664525) + 1013904223) >>> 0) / 2 ** 32 - 0.5) * 2 * spread;
  return Float32Array.from({length: size}, next);
};
globalThis.worst = async (result, expected) => {
  const shares = {};
  for (const [name, {value, bound}] of Object.entries(expected)) {
    const got = await result[name].read();
    if (got.length !== value.length) throw new Error(`${name} has ${got.length} elements, not ${value.length}`);
    shares[name] = got.reduce((most, x, i) => {
      const error = Math.abs(x - value[i]);
      return error === 0 ? most : Math.max(most, Number.isNaN(error) ? Infinity : error / bound[i]);
    }, 0);
  }
  return shares;
};
globalThis.problem = (N, D, V, {ignored = 0, half = false} = {}) => {
  const convert = half ? halves : (x) => x;
  return {
    input: convert(fill(N * D, 2)), weight: convert(fill(V * D, 2 / Math.sqrt(D))), bias: convert(fill(V, 1.5)),
    target: Int32Array.from({length: N}, (_, i) => (i < ignored ? -100 : (i * 37) % V)),
    shapes: {input: [N, D], weight: [V, D], bias: [V], target: [N]},
  };
};
globalThis.upload = (logitless, {shapes, ...arrays}) => Object.fromEntries(
  Object.entries(arrays).map(([name, data]) => [name, logitless.tensor(data, shapes[name])]));
"""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    rotation.rotate(config, items)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    rotation.report(terminalreporter)


@pytest.fixture(scope="session")
def origin() -> Iterator[str]:
    """Where this checkout is served; WebGPU wants a secure origin, which localhost is."""
    with serve(ROOT) as address:
        yield address


@pytest.fixture(scope="session")
def web_origin() -> Iterator[str]:
    """Where build/web is served (scripts/build-web), or a mutant of it (mutants.py)."""
    folder = pathlib.Path(os.environ.get("LOGITLESS_WEB", ROOT / "build/web"))
    assert (folder / "logitless.wasm").is_file(), "scripts/build-web makes it"
    with serve(folder) as address:
        yield address


@pytest.fixture(scope="session")
def browser() -> Iterator[BrowserContext]:
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as profile:
        context = playwright.chromium.launch_persistent_context(
            profile, executable_path="/usr/bin/chromium", headless=True, args=CHROMIUM
        )
        context.set_default_timeout(120_000)  # a software adapter is slow while other tests run
        yield context
        context.close()


@pytest.fixture(scope="session")
def suite(browser: BrowserContext, origin: str) -> Page:
    """A page with the conformance suite (tests/web/suite.js), on a device at the default limits."""
    assert (ROOT / "build/web/suite/suite.wasm").is_file(), "scripts/test-web makes it"
    page = browser.new_page()
    page.set_default_timeout(300_000)
    page.goto(f"{origin}/tests/web/suite.html")
    page.wait_for_function("globalThis.ready === true")
    return page


@pytest.fixture(scope="session")
def planned(suite: Page) -> list[str]:
    """Every pipeline that the planner can ask for: "file, entry, constants"."""
    return suite.evaluate("everyPipeline()")


@pytest.fixture(scope="session")
def raw_page(browser: BrowserContext, origin: str) -> Page:
    page = browser.new_page()
    page.goto(f"{origin}/tests/web/raw.html")
    return page


@pytest.fixture(scope="module")
def page(browser: BrowserContext, web_origin: str) -> Page:
    """A page with logitless.js, the helpers above, and an instance at the default limits."""
    page = browser.new_page()
    page.goto(f"{web_origin}/package.json")
    page.evaluate(
        """async () => {
          globalThis.halves = (await import('/halves.js')).halves;
          globalThis.module = await import('/logitless.js');
          // Every instance is kept: Chromium's renderer sometimes hangs, on a lock that is never
          // released, if one device is collected as garbage during the calls of another.
          const create = module.Logitless.create.bind(module.Logitless);
          globalThis.kept = [];
          module.Logitless.create = async (options) => {
            kept.push(await create(options));
            return kept.at(-1);
          };
          globalThis.logitless = await module.Logitless.create({limits: 'default'});
        }"""
    )
    page.evaluate(f"() => {{{HELPERS}}}")
    return page


@pytest.fixture(params=["naga", "tint"])
def compiler(request: pytest.FixtureRequest) -> raw.Compiler:
    if request.param == "naga":
        return raw.naga()
    return raw.Tint(request.getfixturevalue("raw_page"))
