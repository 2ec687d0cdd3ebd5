# SPDX-License-Identifier: Apache-2.0
"""The page as a visitor meets it, in headless Chromium on its software adapter (SwiftShader), each
time in a browser that has compiled nothing yet: from opening the page to the first result (N = 64,
V = 8192, D = 64, f32, loss and gradients), a call after that, a training step. Prints a line of
JSON a visit and the medians; leaves screenshots of a desktop's and a phone's width in out/web.

    make bench-web          (or .venv-web/bin/python bench/web_page.py [VISITS])
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import statistics
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests/web"))

from playwright.sync_api import Page, sync_playwright  # noqa: E402
from serving import serve  # noqa: E402

from conftest import CHROMIUM  # noqa: E402

SIZES = {"desktop": (1280, 900), "phone": (390, 844)}


def number(text: str, pattern: str) -> float:
    found = re.search(pattern, text)
    if found is None:
        raise SystemExit(f"not found in: {text}")
    return float(found[1])


def visit(page: Page, address: str) -> dict[str, float]:
    page.goto(f"{address}/index.html")
    page.wait_for_function("document.getElementById('check').className !== ''", timeout=120_000)
    time = page.inner_text("#time")
    if not page.inner_text("#check").startswith("within"):
        raise SystemExit(page.inner_text("#check"))
    page.click("#start")
    page.wait_for_function("/step \\d\\d\\d/.test(document.getElementById('state').textContent)")
    page.click("#start")
    return {
        "first_result_ms": round(float(page.evaluate("document.body.dataset.firstResult"))),
        "first_call_ms": number(time, r"the first call ([\d.]+) ms"),
        "call_ms": number(time, r"^([\d.]+) ms"),
        "training_step_ms": number(page.inner_text("#state"), r"(\d+) ms a step"),
    }


def main() -> None:
    visits = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    found = []
    (ROOT / "out/web").mkdir(parents=True, exist_ok=True)
    with serve(ROOT / "build/web") as address, sync_playwright() as playwright:
        for i in range(visits):
            browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=CHROMIUM)
            name, (width, height) = list(SIZES.items())[i % len(SIZES)]
            load = os.getloadavg()[0]  # other load matters, because the adapter is the processor
            page = browser.new_page(viewport={"width": width, "height": height})
            found.append(visit(page, address))
            page.screenshot(path=ROOT / f"out/web/visit-{name}.png", full_page=True)
            about = {"visit": i + 1, "browser": browser.version, "load": round(load, 1)}
            print(json.dumps(about | found[-1]), flush=True)
            browser.close()
    medians = {key: statistics.median(one[key] for one in found) for key in found[0]}
    print(json.dumps({"median_of": visits} | medians))


if __name__ == "__main__":
    main()
