# SPDX-License-Identifier: Apache-2.0
"""The page and the example as a visitor sees them, in headless Chromium: a call that agrees with
double precision, its memory, what every figure means, a model that learns, a text that it scores,
a sentence for what is impossible, one screen in light and dark, a phone's width, a browser without
WebGPU. Screenshots are left in out/web."""

from __future__ import annotations

import itertools
import json
import math
import os
import pathlib
import re
import subprocess
import sys
from collections.abc import Iterator
from operator import mul

import pytest
from playwright.sync_api import BrowserContext, Page, Route

SCREENSHOTS = pathlib.Path(__file__).resolve().parents[2] / "out/web"


# A call of the page's default size takes a software adapter seconds, so most tests start with a
# small one.
SMALL = 'name="vocab" type="number" min="1" max="1000000" value="512"'


FIGURES = ("loss", "check", "time", "memory")


@pytest.fixture
def small(browser: BrowserContext, web_origin: str) -> Iterator[None]:
    """The page as it is, but for the vocabulary that it begins with."""

    def shrink(route: Route) -> None:
        text = route.fetch().text()
        assert SMALL.replace("512", "8192") in text
        route.fulfill(
            body=text.replace(SMALL.replace("512", "8192"), SMALL), content_type="text/html"
        )

    browser.route("**/index.html*", shrink)
    yield
    browser.unroute("**/index.html*")


# The page draws its models, and what they write, by Math.random.
SEEDED = """{
  let seed = 1;
  Math.random = () => (seed = (Math.imul(seed, 1664525) + 1013904223) >>> 0) / 2 ** 32;
}"""


@pytest.fixture
def large_page(browser: BrowserContext, web_origin: str) -> Iterator[Page]:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page = browser.new_page()
    page.add_init_script(SEEDED)
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda m: errors.append(m.text) if m.type in ("error", "warning") else None)
    page.goto(f"{web_origin}/index.html?limits=default")
    yield page
    page.close()
    assert errors == []


@pytest.fixture
def page(small: None, large_page: Page) -> Page:
    return large_page


def judged(page: Page) -> str:
    """The verdict of the call that runs."""
    page.wait_for_function("document.getElementById('progress').textContent === ''")
    page.wait_for_function("document.getElementById('check').className !== ''")
    return page.inner_text("#check")


def run(page: Page, **fields: str | bool) -> str:
    page.evaluate("document.querySelector('details').open = true")
    for name, value in fields.items():
        field = page.locator(f"[name={name}]")
        if isinstance(value, bool):
            field.set_checked(value)
        elif field.evaluate("e => e.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.fill(value)
    page.evaluate("document.getElementById('check').className = ''")
    page.click("#run")
    return judged(page)


def test_the_first_call_agrees_with_double_precision(large_page: Page) -> None:
    page = large_page
    assert judged(page).startswith("within the contract's bound: loss ")
    assert "nats" in page.inner_text("#loss")
    # log 8192 is 9.01, the loss before any training
    assert float(re.findall(r"[\d.]+", page.inner_text("#loss"))[0]) > 9
    assert page.inner_text("#memory") == "512 KiB of workspace instead of 2 MiB of logits"
    assert "swiftshader" in page.inner_text("#adapter")
    page.set_viewport_size({"width": 1280, "height": 900})
    page.screenshot(path=SCREENSHOTS / "desktop.png", full_page=True)
    # everything fits on one screen
    assert page.evaluate("document.documentElement.scrollHeight") <= 900


def test_a_software_adapter_is_called_so_and_given_no_rate(page: Page) -> None:
    judged(page)
    assert page.inner_text("#adapter").startswith("No GPU, but a software adapter")
    assert page.inner_text("h1") == "Cross-entropy without the logits, on a software adapter"
    assert "software" in page.inner_text("#time-meaning")
    assert "FLOP" not in page.inner_text("body")


def test_a_gpu_begins_with_a_larger_call_and_gets_a_rate(
    browser: BrowserContext, web_origin: str, small: None
) -> None:
    """This adapter calls itself a GPU; the larger call, which would take it minutes, is made
    small."""
    large = "{tokens: 1024, vocab: 32768}"

    def shrink(route: Route) -> None:
        text = route.fetch().text()
        assert text.count(large) == 1
        body = text.replace(large, "{tokens: 96, vocab: 640}")
        route.fulfill(body=body, content_type="text/javascript")

    page = browser.new_page()
    page.route("**/page.js", shrink)
    page.add_init_script(
        """for (const [name, value] of [['architecture', 'some'], ['description', 'GPU'], ['isFallbackAdapter', false]]) {
             Object.defineProperty(GPUAdapterInfo.prototype, name, {get: () => value});
           }"""  # noqa: E501
    )
    page.goto(f"{web_origin}/index.html")
    assert judged(page).startswith("within")
    assert page.input_value("[name=tokens]") == "96"
    assert page.input_value("[name=vocab]") == "640"
    assert page.inner_text("#adapter").startswith("GPU: ")
    assert page.inner_text("h1") == "Cross-entropy without the logits, on this machine's GPU"
    assert "GFLOP/s" in page.inner_text("#time-meaning")
    assert "software" not in page.inner_text("#time-meaning")
    assert run(page, tokens="20").startswith("within")
    page.evaluate("document.getElementById('run').click()")
    judged(page)
    assert page.input_value("[name=tokens]") == "20"  # the visitor's choice is kept
    plan = page.evaluate(
        """async () => {
          const {Logitless} = await import('/logitless.js');
          globalThis.kept = await Logitless.create();
          return kept.plan({tokens: 1024, hidden: 64, vocab: 32768});
        }"""
    )
    assert plan["recommended"] <= 1024 * 32768  # a quarter of the logits
    page.close()


def test_every_figure_has_its_meaning(page: Page) -> None:
    judged(page)
    said = {name: page.inner_text(f"#{name}-meaning") for name in FIGURES}
    assert said["loss"].startswith("The mean over the tokens of \u2212log p(target)")
    assert "ln 512 = 6.24" in said["loss"]
    assert "in % of what rounding may cost; greatest gradient error" in said["check"]
    assert "best of 3" in said["time"]
    assert "beside inputs and gradients; f32 logits and their gradient are" in said["memory"]
    for name, sentence in said.items():
        assert sentence.endswith("."), name
    run(page, reduction="sum")
    assert page.inner_text("#loss-meaning").startswith("The sum over the tokens")


def test_the_shaders_that_are_compiled_are_counted(
    browser: BrowserContext, web_origin: str, small: None
) -> None:
    """Every verdict of WebGPU comes a little later than the one before."""
    page = browser.new_page()
    page.add_init_script(
        """const pop = GPUDevice.prototype.popErrorScope;
           let n = 0;
           GPUDevice.prototype.popErrorScope = function () {
             const wait = 15 * n++;
             return pop.call(this).then((verdict) => new Promise((told) => setTimeout(told, wait, verdict)));
           };
           globalThis.said = [];
           addEventListener('DOMContentLoaded', () => {
             const element = document.getElementById('progress');
             new MutationObserver(() => said.push(element.textContent)).observe(element, {childList: true});
           });"""  # noqa: E501
    )
    page.goto(f"{web_origin}/index.html")
    judged(page)
    said = "\n".join(page.evaluate("said"))
    assert said.startswith("making the inputs…\ncompiling shaders: 0 of ")
    found = re.findall(r"compiling shaders: (\d+) of (\d+)… (\d+\.\d) s", said)
    counted = [int(ready) for ready, _, _ in found]
    assert counted == sorted(counted)
    assert len(set(counted)) >= 3
    assert len({asked for _, asked, _ in found}) == 1
    assert re.search(r"running… \d+\.\d s\n", said)
    assert "double precision" in said
    page.close()


def places(page: Page, selector: str) -> list[list[tuple[float, float]]]:
    curves = page.eval_on_selector_all(selector, "all => all.map((e) => e.getAttribute('points'))")
    return [[tuple(map(float, point.split(","))) for point in c.split()] for c in curves]


def test_the_chart_shows_what_a_training_step_saves(large_page: Page) -> None:
    page = large_page
    judged(page)
    assert page.locator("#memory-chart").get_attribute("aria-label").startswith("Memory beside")
    labels = page.locator("#memory-chart text.axis").all_text_contents()
    assert labels == ["memory, log scale", "tokens N (V = 8192, D = 64), log scale"]
    texts = page.locator("#memory-chart text").all_text_contents()
    assert {"64 MiB", "1 GiB", "a training step", "this call", "f32 logits [N, V]"} <= {*texts}
    logits, recommended, minimum = places(page, "#memory-chart polyline")
    sizes = [2**power for power in range(4, 17)]
    step, call = sizes.index(4096), sizes.index(64)
    octave = (logits[0][1] - logits[-1][1]) / 12
    # at 4096 tokens the recommended workspace is less than a quarter of the logits, the minimum
    # less than 1/64
    assert recommended[step][1] - logits[step][1] > 2 * octave
    assert minimum[step][1] - logits[step][1] > 6 * octave
    mark = page.locator("#memory-chart line.at")
    assert float(mark.get_attribute("x1")) == pytest.approx(logits[step][0], abs=0.1)
    dot = page.locator("#memory-chart circle.dot")
    assert float(dot.get_attribute("cx")) == pytest.approx(logits[call][0], abs=0.1)
    below = float(dot.get_attribute("cy")) - logits[call][1]
    assert below == pytest.approx(2 * octave, abs=0.2)  # a quarter of the logits


def test_every_link_leads_somewhere(page: Page, web_origin: str) -> None:
    judged(page)
    links = page.eval_on_selector_all("a", "all => all.map((a) => a.getAttribute('href'))")
    assert len(links) >= 7
    for link in links:
        assert page.request.get(f"{web_origin}/{link}").ok, link
    footer = page.inner_text("footer")
    makefile = (SCREENSHOTS.parents[1] / "Makefile").read_text()
    for command in page.locator("footer code").all_inner_texts():
        known = command.removeprefix("make ")
        assert command == "pip install ." or f"\n{known}:" in makefile
    assert "pip install ." in footer
    page.click("#check a")
    page.wait_for_url("**/document.html?docs/semantics.md*")
    section = page.locator("h2:has-text('Accuracy, promised and tested per element')")
    section.wait_for()
    assert abs(section.evaluate("e => e.getBoundingClientRect().top")) < 900  # scrolled to


DOCUMENTS = ("README.md", "docs/semantics.md", "docs/web.md", "docs/results.md")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_document_can_be_read(browser: BrowserContext, web_origin: str, document: str) -> None:
    """Every section, table, block and list is shown as HTML, and every link leads somewhere."""
    page = browser.new_page()
    page.goto(f"{web_origin}/document.html?{document}")
    page.wait_for_selector("h1")
    source = (SCREENSHOTS.parents[1] / document).read_text()
    prose = re.sub(r"^```.*?^```$", "", source, flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)", prose, re.M)
    assert page.locator("h1, h2, h3, h4").count() == len(headings)
    assert page.locator("pre").count() == source.count("\n```") / 2
    assert page.locator("table").count() == len(re.findall(r"^\|(?:-+\|)+$", prose, re.M))
    assert page.locator("li").count() == len(re.findall(r"^(?:-|\d+\.) ", prose, re.M))
    shown = page.evaluate(
        """() => {
          const copy = document.getElementById('document').cloneNode(true);
          copy.querySelectorAll('code').forEach((e) => e.remove());
          return copy.textContent;
        }"""
    )
    assert not re.search(r"```|\]\(|\*\*|\|--|<img|`", shown)
    assert page.title().endswith("· Logitless")
    for link in page.eval_on_selector_all("main a", "all => all.map((a) => a.href)"):
        file, _, section = link.partition("#")
        if file.split("#")[0] == page.url.split("#")[0]:
            assert page.locator(f"[id='{section}']").count() == 1, link
        elif link.startswith(web_origin):
            assert file.rpartition("?")[2] in DOCUMENTS, link
    page.close()


def test_a_document_that_is_not_here_is_said_so(browser: BrowserContext, web_origin: str) -> None:
    page = browser.new_page()
    for wrong in ("docs/cpp.md", "<b>", ""):
        page.goto(f"{web_origin}/document.html?{wrong}")
        page.wait_for_function("/no document/.test(document.body.textContent)")
        assert page.locator("#document b").count() == 0
    page.close()


CONTRASTS = """(selectors) => {
  const canvas = new OffscreenCanvas(1, 1).getContext('2d', {willReadFrequently: true});
  const luminance = (colour) => {
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b] = [...canvas.getImageData(0, 0, 1, 1).data].map((x) => {
      const s = x / 255;
      return s <= 0.04045 ? s / 12.92 : ((s + 0.055) / 1.055) ** 2.4;
    });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const paper = (e) => {
    const colour = getComputedStyle(e).backgroundColor;
    return colour === 'rgba(0, 0, 0, 0)' ? paper(e.parentElement) : colour;
  };
  const found = {paper: luminance(getComputedStyle(document.body).backgroundColor)};
  for (const selector of selectors) {
    for (const e of document.querySelectorAll(selector)) {
      const style = getComputedStyle(e);
      const ink = luminance(e instanceof SVGElement ? style.fill : style.color);
      const ground = luminance(paper(e));
      const contrast = (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05);
      found[selector] = Math.min(found[selector] ?? 21, contrast);
    }
  }
  return found;
}"""


def test_light_and_dark_can_be_read(page: Page) -> None:
    judged(page)
    page.click("#start")
    page.wait_for_selector("#written:not([hidden])")
    page.click("#start")
    page.wait_for_function("document.getElementById('start').textContent === 'Train'")
    page.set_viewport_size({"width": 1280, "height": 900})
    selectors = ["h1", "p", "label", "input", "select", "textarea", "button.main", "dt", "dd span"]
    selectors += ["dd small", "a", "svg text", "#sample", "summary", "code", "#words span", "td"]
    selectors += ["th", "#perplexity", *(f".p{shade}" for shade in range(5)), ".unknown"]
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        contrasts = page.evaluate(CONTRASTS, selectors)
        paper = contrasts.pop("paper")
        assert paper > 0.9 if scheme == "light" else paper < 0.05
        assert contrasts.keys() == {*selectors}
        # WCAG AA requires a contrast of 4.5
        assert min(contrasts.values()) >= 4.5, (scheme, contrasts)
        page.screenshot(path=SCREENSHOTS / f"{scheme}.png", full_page=True)
    page.fill("[name=tokens]", "0")
    page.fill("#score-text", "")
    page.click("#run")
    page.wait_for_selector("#wrong")
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        contrasts = page.evaluate(CONTRASTS, ["#wrong", "#score-state.bad"])
        assert contrasts["#wrong"] >= 4.5 and contrasts["#score-state.bad"] >= 4.5, scheme


def test_what_the_model_writes_appears_as_it_trains(page: Page) -> None:
    judged(page)
    assert page.is_hidden("#written")
    page.evaluate(
        """() => {
          globalThis.seen = [];
          const text = (id) => document.getElementById(id).textContent;
          const note = () => seen.push([text('written-after'), text('sample'), text('start')]);
          new MutationObserver(note).observe(document.getElementById('sample'), {childList: true});
        }"""
    )
    page.click("#start")
    page.wait_for_function("seen.length >= 3")
    page.click("#start")
    seen = page.evaluate("seen")
    assert [after for after, _, _ in seen[:3]] == ["1 step", "25 steps", "50 steps"]
    assert {button for _, _, button in seen[:3]} == {"Stop"}
    assert all(len(sample) > 100 for _, sample, _ in seen)

    def learned(sample: str) -> float:  # the share of its pairs of words that are the text's
        pairs = list(itertools.pairwise(re.findall(r"\w+", sample.lower())))
        return sum(pair in known for pair in pairs) / len(pairs)

    known = {*itertools.pairwise(re.findall(r"\w+", page.input_value("#text").lower()))}
    first, second, _ = (learned(sample) for _, sample, _ in seen[:3])
    assert first < 0.3 and second > first + 0.2, (first, second)


def test_every_option_of_the_page(page: Page) -> None:
    judged(page)
    verdict = run(page, tokens="37", hidden="20", vocab="1100", labelSmoothing="0.1", zLoss="0.01")
    assert verdict.startswith("within")
    verdict = run(page, softcap="4", logitScale="0.5", temperature="1.5", ignored="40", bias=True)
    assert verdict.startswith("within")
    assert "gradBias" in verdict
    verdict = run(page, reduction="sum", dtype="f16", workspace="minimum")
    assert verdict.startswith("within")
    verdict = run(page, gradients=False, workspace="recommended")
    assert verdict.startswith("within")
    assert "gradInput" not in verdict


def test_memory_is_shown_as_far_as_the_limits_go(page: Page) -> None:
    """The chart goes to 64k tokens and its note to V = 128k. One of these heads passes the default
    limits before that."""
    judged(page)
    for dtype, hidden, passes in [("f16", "512", 0), ("f32", "510", 0), ("f32", "1030", 1)]:
        verdict = run(page, tokens="8", hidden=hidden, vocab="1024", dtype=dtype)
        assert verdict.startswith("within"), (dtype, hidden)
        assert "of workspace" in page.inner_text("#memory"), (dtype, hidden)
        note = page.inner_text("#memory-note")
        assert note.count("at least") == 2 - passes, (dtype, hidden)
        assert note.count("passes this device's limits") == passes, (dtype, hidden)
        curves = page.locator("#memory-chart polyline").all()
        points = [len(curve.get_attribute("points").split()) for curve in curves]
        assert points == [13, 13, 13], (dtype, hidden)


def test_a_refused_option_is_told(page: Page) -> None:
    judged(page)
    run(page, temperature="2")
    page.evaluate("document.querySelector('details').open = false")
    page.evaluate("document.querySelector('[name=temperature]').value = '-1'")
    page.click("#run")  # shows the field that the browser rejects
    page.wait_for_selector("[name=temperature]:invalid")
    page.evaluate("document.querySelector('[name=temperature]').removeAttribute('min')")
    page.click("#run")
    page.wait_for_function(
        "/^temperature is -1;/.test(document.getElementById('wrong')?.textContent)"
    )


REFUSED: list[tuple[dict[str, str], str]] = [
    ({"tokens": "65536", "hidden": "16384", "vocab": "1000000"},
     r"^This call is too large: its hidden states \[65536, 16384\] take 4 GiB, and a buffer of "
     r"this device holds [\d.]+ \wiB\. Choose a smaller N or D\.$"),
    ({"hidden": "16384", "vocab": "1000000"},
     r"its vocabulary \[1000000, 16384\] take 61.0 GiB, .* Choose a smaller V or D\.$"),
    ({"softcap": "-3"}, r"^softcap \(0: none\) is -3; allowed: 0 or more\.$"),
    ({"labelSmoothing": "2"}, r"^label smoothing is 2; allowed: 0 to 1\.$"),
    ({"tokens": "1.5"}, r"^tokens N is 1.5; allowed: whole numbers, 1 to 65536\.$"),
    ({"logitScale": ""}, r"^logit scale is not a number; allowed: a number\.$"),
    ({"softcap": "1e-46"}, r"^softcap is 1e-46; allowed: 0, or 1.4e-45 to "),
]  # fmt: skip


def test_what_is_refused_is_said_and_leaves_no_results(page: Page) -> None:
    judged(page)
    page.evaluate("document.querySelector('details').open = true")
    for fields, said in REFUSED:
        before = {name: page.input_value(f"[name={name}]") for name in fields}
        for name, value in fields.items():
            page.fill(f"[name={name}]", value)
        page.click("#run")
        page.wait_for_selector("#wrong")
        assert re.search(said, page.inner_text("#wrong")), page.inner_text("#wrong")
        assert not page.is_visible("#results")
        page.set_viewport_size({"width": 1000, "height": 900})  # redraws charts that stand
        page.set_viewport_size({"width": 1280, "height": 900})
        page.evaluate("new Promise((drawn) => requestAnimationFrame(() => setTimeout(drawn)))")
        assert page.locator("#memory-chart *").count() == 0
        assert page.inner_text("#memory-note") == ""
        assert run(page, **before).startswith("within")
        assert page.is_visible("#results") and page.inner_text("#memory-note")
        assert page.locator("#wrong").count() == 0


# Every number of the form, and what it must not be; besides nothing, and what is no number.
IMPOSSIBLE = {
    "tokens": ["0", "-3", "65537", "1.5", "1e400"],
    "hidden": ["0", "-64", "16385", "0.1"],
    "vocab": ["0", "-1", "1000001", "8192.5"],
    "labelSmoothing": ["-0.1", "1.1", "1e-50"],
    "zLoss": ["-1", "1e39", "1e-46"],
    "softcap": ["-3", "1e39", "1e-40"],
    "logitScale": ["1e39", "1e-46"],
    "temperature": ["0", "-1", "1e39"],
    "ignored": ["-1", "101", "0.5"],
}


def test_every_impossible_number_gets_a_sentence_at_its_field(page: Page) -> None:
    judged(page)
    numbers = page.eval_on_selector_all("input[type=number]", "all => all.map((e) => e.name)")
    assert [*numbers] == [*IMPOSSIBLE]
    for name, values in IMPOSSIBLE.items():
        page.evaluate("document.querySelector('details').open = true")
        field = page.locator(f"[name={name}]")
        before = field.input_value()
        label = field.evaluate("e => e.labels[0].firstChild.textContent.trim()")
        for value in ["", "-e", *values]:
            field.fill("" if value == "-e" else value)
            if value == "-e":
                field.press_sequentially(value)
            page.evaluate("document.querySelector('details').open = false")
            page.click("#run")
            page.wait_for_selector("#wrong")
            said = page.inner_text("#wrong")
            snake = re.sub("[A-Z]", lambda c: f"_{c[0].lower()}", name)
            assert re.match(f"({re.escape(label)}|{snake}) is .*; allowed: ", said), said
            described = field.get_attribute("aria-describedby")
            assert page.locator("#wrong").evaluate(
                "(e, name) => e.previousElementSibling.querySelector('input').name === name", name
            )
            assert described == "wrong" and field.get_attribute("aria-invalid") == "true"
            assert field.evaluate("e => document.activeElement === e") and field.is_visible()
            assert page.inner_text("#progress") == "" and page.is_hidden("#results")
        field.fill(before)
        assert page.locator("#wrong").count() == 0  # the complaint goes as the field is changed
        assert field.get_attribute("aria-invalid") is None


def test_numbers_beyond_f32_are_told(page: Page) -> None:
    judged(page)
    for option, usual in (("logitScale", "1"), ("zLoss", "0")):
        page.evaluate("document.querySelector('details').open = true")
        page.fill(f"[name={option}]", "1e38")
        page.click("#run")
        page.wait_for_function("document.getElementById('progress').className === 'bad'")
        assert page.inner_text("#progress").startswith("The numbers of this call pass f32's larg")
        assert page.is_hidden("#results")
        assert re.fullmatch(r"[\d.]+ nats", page.text_content("#loss"))  # nothing else was shown
        assert run(page, **{option: usual}).startswith("within")
    # a loss in f32 with a gradient beyond: lse is 0.61, the weight 1.1
    page.evaluate("Math.random = () => 0.8")
    for name, value in {"tokens": "1", "hidden": "1", "vocab": "1", "zLoss": "3e38"}.items():
        page.fill(f"[name={name}]", value)
    page.click("#run")
    page.wait_for_function("document.getElementById('progress').className === 'bad'")
    assert page.text_content("#loss").endswith("e+38 nats")
    assert page.is_hidden("#results")


def test_a_loss_of_no_token_is_told(page: Page) -> None:
    judged(page)
    run(page, ignored="100")
    assert page.inner_text("#loss-meaning") == "Every token is ignored, so the loss is 0."


def test_results_of_other_fields_are_marked(page: Page) -> None:
    judged(page)
    page.evaluate("document.querySelector('details').open = true")
    for field, other, own in (("[name=vocab]", "300", "512"), ("[name=reduction]", "sum", "mean")):
        assert page.is_hidden("#changed")
        for value, is_marked in ((other, True), (own, False), (other, True)):
            if "reduction" in field:
                page.select_option(field, value)
            else:
                page.fill(field, value)
            assert page.is_visible("#changed") == is_marked
        run(page)
    assert page.is_hidden("#changed")
    page.fill("[name=vocab]", "0")
    assert page.is_visible("#changed")
    page.click("#run")
    page.wait_for_selector("#wrong")
    assert page.is_hidden("#changed")  # nothing stands that could be marked


# What makes a call fail, and what the visitor reads then.
TOO_LARGE = [
    ("Float32Array.from = () => { throw new RangeError('Array buffer allocation failed'); }",
     r"^This call is too large for this browser's memory \(Array buffer allocation failed\)\.$"),
    ("GPUDevice.prototype.createBuffer = () => { throw new Error('out of memory'); }",
     r"^The device did not run this call: a tensor \[\d+,\d+\] of \d+ bytes: out of memory$"),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "said"), TOO_LARGE, ids=["browser", "device"])
def test_a_call_that_memory_does_not_hold(page: Page, fault: str, said: str) -> None:
    judged(page)
    page.evaluate(f"() => {{ {fault} }}")
    page.click("#run")
    page.wait_for_function("document.getElementById('progress').className === 'bad'")
    assert re.search(said, page.inner_text("#progress")), page.inner_text("#progress")
    assert page.is_hidden("#results")


def test_a_call_too_large_for_double_precision_is_not_checked(page: Page) -> None:
    judged(page)
    page.evaluate(
        """async () => {
          const {Logitless, LogitlessError} = await import('/logitless.js');
          Logitless.prototype.evaluate = () => {
            throw new LogitlessError('internal', window.why);
          };
        }"""
    )
    for why in (
        "out of memory: the module has no 9 bytes left",
        "it stopped, out of memory perhaps",
    ):
        page.evaluate("why => { window.why = why; }", why)
        assert run(page) == "not checked"
        assert "more memory than WebAssembly has" in page.inner_text("#check-meaning")
        assert "nats" in page.inner_text("#loss")
    page.evaluate("window.why = 'the module stopped'")
    page.click("#run")
    page.wait_for_function("document.getElementById('progress').textContent.includes('stopped')")
    assert not page.is_visible("#results")


def test_a_loss_that_is_not_a_number_is_judged(page: Page) -> None:
    judged(page)
    page.evaluate(
        """async () => {
          const {Logitless} = await import('/logitless.js');
          const own = Logitless.prototype.linearCrossEntropy;
          Logitless.prototype.linearCrossEntropy = function (call) {
            const made = own.call(this, call);
            made.loss.read = async () => new Float32Array([NaN]);
            return made;
          };
        }"""
    )
    assert "BEYOND" in run(page)
    page.evaluate(
        """async () => {
          const {Logitless, LogitlessError} = await import('/logitless.js');
          Logitless.prototype.evaluate = () => {
            throw new LogitlessError('internal', 'out of memory: the module has no 9 bytes left');
          };
        }"""
    )
    page.click("#run")
    page.wait_for_function("document.getElementById('progress').className === 'bad'")
    assert page.inner_text("#progress").startswith("The numbers of this call pass f32's larg")
    assert not page.is_visible("#results")


def test_where_nothing_is_saved_that_is_said(page: Page) -> None:
    judged(page)
    run(page, tokens="16", vocab="1000", gradients=True)
    memory, meaning = page.inner_text("#memory"), page.inner_text("#memory-meaning")
    assert re.fullmatch(r"\d+ KiB of workspace: nothing is saved at this size", memory)
    assert "f32 logits and their gradient are 125 KiB" in meaning and meaning.endswith(".")
    run(page, tokens="64", vocab="4096")
    assert " of workspace instead of 1 MiB of logits" in page.inner_text("#memory")


def test_a_model_learns_the_visitors_text(page: Page) -> None:
    judged(page)
    text = "one two three four five six seven eight nine ten eleven twelve. " * 8
    page.fill("#text", text)
    for letters in (False, True):
        page.set_checked("#letters", letters)
        page.click("#start")
        vocabulary = len(set(text)) if letters else 13  # the stop is part of the vocabulary
        of_this = f"/^step (\\d+),.* vocabulary {vocabulary}$/"
        state = "document.getElementById('state').textContent"
        page.wait_for_function(f"Number({state}.match({of_this})?.[1]) >= 60")
        loss = float(re.findall(r"loss ([\d.]+)", page.inner_text("#state"))[0])
        assert loss < 0.7, letters  # without training it is log 13 = 2.6 nats
        assert page.locator("#loss-chart polyline").count() == 2
        if not letters:
            page.wait_for_function("document.getElementById('sample').textContent.length > 40")
            assert "seven eight nine" in page.inner_text("#sample")
        page.click("#start")
        page.wait_for_function("document.getElementById('start').textContent === 'Train'")


def test_a_lost_device_is_told_and_the_next_run_takes_a_new_one(
    browser: BrowserContext, web_origin: str, small: None
) -> None:
    page = browser.new_page()
    page.add_init_script(
        """const request = GPUAdapter.prototype.requestDevice;
           globalThis.devices = [];
           GPUAdapter.prototype.requestDevice = async function (...given) {
             const device = await request.apply(this, given);
             devices.push(device);
             return device;
           };"""
    )
    page.goto(f"{web_origin}/index.html")
    judged(page)
    page.evaluate("devices[0].destroy()")
    page.wait_for_selector("#lost:not([hidden])")
    assert "The GPU device was lost" in page.inner_text("#lost")
    page.screenshot(path=SCREENSHOTS / "lost.png")
    assert run(page).startswith("within")
    assert page.is_hidden("#lost")
    assert page.evaluate("devices.length") == 2
    page.evaluate("devices[1].destroy()")
    page.click("#start")  # training, too, gets a new device
    page.wait_for_function("/^step \\d/.test(document.getElementById('state').textContent)")
    page.wait_for_selector("#scored:not([hidden])")
    page.evaluate("devices[2].destroy()")  # while it trains
    page.wait_for_function("document.getElementById('state').className === 'bad'")
    assert page.is_hidden("#scored") and page.is_hidden("#written")
    trained(page)
    page.evaluate("devices[3].destroy()")  # when it is trained
    page.wait_for_selector("#lost:not([hidden])")
    put(page, "score-text", "the loss")
    page.wait_for_function("document.getElementById('score-state').className === 'bad'")
    assert page.inner_text("#score-state").endswith("Train the model again.")
    assert page.is_hidden("#scored")
    page.close()


def test_a_refused_run_keeps_no_tensor(page: Page) -> None:
    judged(page)
    page.evaluate(
        """() => {
          globalThis.alive = 0;
          const create = GPUDevice.prototype.createBuffer;
          GPUDevice.prototype.createBuffer = function (descriptor) {
            if (!(descriptor.usage & GPUBufferUsage.UNIFORM)) alive++;  // else a workspace's
            return create.call(this, descriptor);
          };
          const destroy = GPUBuffer.prototype.destroy;
          GPUBuffer.prototype.destroy = function () {
            if (!(this.usage & GPUBufferUsage.UNIFORM)) alive--;
            destroy.call(this);
          };
        }"""
    )
    run(page, tokens="20", vocab="300")
    assert page.evaluate("alive") == 0
    page.evaluate("document.querySelector('[name=labelSmoothing]').removeAttribute('max')")
    page.fill("[name=labelSmoothing]", "3")
    page.click("#run")
    page.wait_for_function("/label_smoothing/.test(document.getElementById('wrong')?.textContent)")
    assert page.evaluate("alive") == 0


def trained(page: Page, steps: int = 1) -> None:
    """Trains the model for that many steps or a few more."""
    # An earlier model's sentence would end this one's training before its first step.
    page.evaluate("document.getElementById('perplexity').textContent = ''")
    page.click("#start")
    said = "document.getElementById('perplexity').textContent.match(/after ([\\d,]+) step/)"
    page.wait_for_function(f"Number({said}?.[1].replace(',', '')) >= {steps}")
    page.click("#start")
    page.wait_for_function("document.getElementById('start').textContent === 'Train'")


def put(page: Page, field: str, text: str) -> None:
    """Pastes a text, however long."""
    page.evaluate(
        """([id, text]) => {
          document.getElementById(id).value = text;
          document.getElementById(id).dispatchEvent(new Event('input', {bubbles: true}));
        }""",
        [field, text],
    )


NOT_TRAINED = [
    ("", False, r"^The text has 0 words; training takes at least 10 words\.$"),
    (" \n ", True, r"^The text has 1 letter; training takes at least 10 letters\.$"),
    ("word", False, r"^The text has 1 word; "),
    ("two words", False, r"^The text has 2 words; "),
    ("two words", True, r"^The text has 9 letters; "),
    ("the " * 20, False, r"^The text repeats one word; training takes at least two different ones"),
    ("a" * 20, True, r"^The text repeats one letter; "),
    ("a " * 1_000_001, False, r"^The text has 2,000,002 characters; at most 2,000,000 characters "),
]


def test_a_text_that_cannot_be_trained_on(page: Page) -> None:
    judged(page)
    good = page.input_value("#text")
    trained(page)
    for text, letters, said in NOT_TRAINED:
        if page.is_hidden("#scored"):
            page.set_checked("#letters", False)
            put(page, "text", good)
            trained(page)
        assert page.is_visible("#written") and page.locator("#loss-chart *").count() > 0
        page.set_checked("#letters", letters)
        put(page, "text", text)
        page.click("#start")
        page.wait_for_function("document.getElementById('state').className === 'bad'")
        assert re.search(said, page.inner_text("#state")), page.inner_text("#state")
        page.set_viewport_size({"width": 1000, "height": 900})  # redraws charts that stand
        page.set_viewport_size({"width": 1280, "height": 900})
        page.evaluate("new Promise((drawn) => requestAnimationFrame(() => setTimeout(drawn)))")
        assert page.locator("#loss-chart *").count() == 0
        assert page.is_hidden("#written") and page.is_hidden("#scored")
        assert page.is_hidden("#text-changed")
        assert page.inner_text("#score-state").startswith("Train a model above first")


def test_a_model_of_another_text_is_marked(page: Page) -> None:
    judged(page)
    put(page, "text", page.input_value("#text") + " More.")
    assert page.is_hidden("#text-changed")  # there is no model yet
    trained(page)
    text = page.input_value("#text")
    for change, restore in (
        (lambda: page.fill("#text", "another"), lambda: page.fill("#text", text)),
        (lambda: page.check("#letters"), lambda: page.uncheck("#letters")),
    ):
        assert page.is_hidden("#text-changed")
        change()
        assert page.is_visible("#text-changed")
        restore()
    assert page.is_hidden("#text-changed")


@pytest.fixture
def open_model(browser: BrowserContext, small: None) -> Iterator[None]:
    """The page's model in a global variable, for the tests to compute its scores themselves."""

    def expose(route: Route) -> None:
        text = route.fetch().text()
        assert text.count("    this.steps = 0;\n") == 1
        body = text.replace(
            "    this.steps = 0;\n", "    this.steps = 0; globalThis.model = this;\n"
        )
        route.fulfill(body=body, content_type="text/javascript")

    browser.route("**/model.js", expose)
    yield
    browser.unroute("**/model.js")


class Exact:
    """The page's model in double precision, by plain loops, from its tables and weights."""

    def __init__(self, page: Page) -> None:
        numbers = json.loads(
            page.evaluate(
                """async () => JSON.stringify({
                  vocabulary: model.vocabulary, tables: model.tables.map((t) => [...t]),
                  weight: [...await model.weight.read()], bias: [...await model.bias.read()],
                })"""
            )
        )
        self.vocabulary: list[str] = numbers["vocabulary"]
        self.tables, self.weight, self.bias = (numbers[k] for k in ("tables", "weight", "bias"))
        self.hidden = len(self.weight) // len(self.bias)

    def logits(self, before: list[str]) -> list[float]:
        """Of the word that follows."""
        known = self.vocabulary
        rows = [(c, known.index(w)) for c, w in enumerate(before[::-1][:3]) if w in known]
        size = self.hidden
        h = [math.tanh(sum(self.tables[c][t * size + d] for c, t in rows)) for d in range(size)]
        heads = (self.weight[j * size : (j + 1) * size] for j in range(len(known)))
        return [b + sum(map(mul, h, w)) for b, w in zip(self.bias, heads, strict=True)]


def table_of(page: Page) -> list[list[str]]:
    rows = "all => all.map((row) => [...row.cells].map((cell) => cell.textContent))"
    return page.eval_on_selector_all("#scores tr", rows)


def scored(page: Page, text: str) -> list[list[str]]:
    """The table of a text, once it is scored."""
    put(page, "score-text", text)
    page.wait_for_function(
        """(text) => document.getElementById('words').textContent === text &&
          document.getElementById('scored').className === ''""",
        arg=text,
    )
    return table_of(page)


TEXTS = {
    False: "The loss needs a GIRAFFE, and the model learns\n the cat's table.  Nobody needs it",
    True: "The loss needs Ümläuts, 17 of them.",
}


@pytest.mark.parametrize("letters", [False, True])
def test_a_score_is_that_of_the_exact_model(open_model: None, page: Page, letters: bool) -> None:
    judged(page)
    page.set_checked("#letters", letters)
    trained(page, 25)
    text = TEXTS[letters]
    rows = scored(page, text)
    exact = Exact(page)
    pieces = [w.lower() for w in (text if letters else re.findall(r"[\w']+|[^\w\s]", text))]
    spans = page.locator("#words span").all()
    assert [row[0] for row in rows] == [w.replace(" ", "␣") for w in pieces]
    losses = []
    for i, (piece, row, span) in enumerate(zip(pieces, rows, spans, strict=True)):
        if piece not in exact.vocabulary:
            assert row[1:] == ["unknown", *3 * ["\u2013"]]
            assert span.get_attribute("class") == "unknown"
            continue
        z = exact.logits(pieces[:i])
        at = exact.vocabulary.index(piece)
        lse = max(z) + math.log(sum(math.exp(x - max(z)) for x in z))
        losses.append(lse - z[at])
        assert float(row[2]) == pytest.approx(z[at] - lse, abs=2e-3), (i, piece)
        p = math.exp(z[at] - lse)
        assert float(row[1].split()[0]) == pytest.approx(100 * p, rel=0.06, abs=0.51 * (p > 0.09))
        above = [sum(x > z[at] + margin for x in z) for margin in (1e-4, -1e-4)]
        assert above[0] + 1 <= int(row[3]) <= max(1, above[1]), (i, piece)
        assert z[exact.vocabulary.index(row[4].replace("␣", " "))] >= max(z) - 1e-4
        assert span.get_attribute("title") == f"{row[1]}, rank {row[3]} of {len(z)}"
        shade = sum(p < level for level in (0.5, 0.1, 0.01, 0.001))
        near = min(abs(math.log(p / level)) for level in (0.5, 0.1, 0.01, 0.001)) < 1e-3
        assert near or span.get_attribute("class") == f"p{shade}"
    assert 5 < len(losses) < len(pieces)
    said = page.inner_text("#perplexity")
    noun = "letters" if letters else "words"
    found = re.match(
        rf"Perplexity ([\d.e+]+) over {len(losses)} {noun}, after (\d+) steps of", said
    )
    assert found is not None, said
    assert float(found[1]) == pytest.approx(math.exp(sum(losses) / len(losses)), rel=0.01)
    assert f"step {found[2]}, " in page.inner_text("#state")
    assert said.endswith(f"A blind guess among the {len(z)} {noun} it knows would have {len(z)}.")
    unknown = ", ".join(dict.fromkeys(w for w in pieces if w not in exact.vocabulary))
    assert page.inner_text("#unknown").startswith(f"Unknown to the model: {unknown}. What is unkn")


NOT_SCORED = [
    ("", r"^There is no word to score: type or paste a text\.$"),
    (" \n\t ", r"^There is no word to score"),
    ("giraffes eat acacias", r"^The model knows no word of this text, so nothing can be scored: "),
    ("word " * 4097, r"^The text has 4,097 words; at most 4,096 words are scored at once\.$"),
    ("a " * 1_000_001, r"^The text has 2,000,002 characters; at most 2,000,000 characters can "),
]


def test_a_text_that_cannot_be_scored(page: Page) -> None:
    judged(page)
    state = "document.getElementById('score-state')"
    assert page.inner_text("#score-state") == (
        "Train a model above first: then every word here gets its probability."
    )
    put(page, "score-text", "")
    assert page.inner_text("#score-state").startswith("Train a model above first")
    assert page.is_hidden("#scored")
    put(page, "score-text", "the")
    trained(page)
    for text, said in NOT_SCORED:
        assert len(scored(page, "the")) == 1  # one word is enough
        assert "over 1 word, " in page.inner_text("#perplexity")
        assert page.is_visible("#scored") and page.is_hidden("#unknown")
        put(page, "score-text", text)
        page.wait_for_function(f"{state}.className === 'bad'")
        assert re.search(said, page.inner_text("#score-state")), page.inner_text("#score-state")
        assert page.is_hidden("#scored")
    rows = scored(page, " ".join(f"the unknown{i}" for i in range(10)))
    assert len(rows) == 20
    assert "unknown6, unknown7 and 2 more. What is" in page.inner_text("#unknown")


def test_no_score_outlives_its_text_or_its_model(page: Page) -> None:
    judged(page)
    trained(page)
    scored(page, "the model reads the table")
    seen = """(() => {
      const shown = getComputedStyle(document.getElementById('words'));
      return document.getElementById('scored').hidden || shown.visibility === 'hidden';
    })()"""
    # as soon as the text is another, and through a text that is replaced while it is scored
    page.evaluate(
        """() => {
          globalThis.shown = [];
          const words = document.getElementById('words');
          const note = () => shown.push(words.textContent);
          new MutationObserver(note).observe(words, {childList: true});
        }"""
    )
    put(page, "score-text", "the loss")
    assert page.evaluate(seen) or page.inner_text("#words") == "the loss"
    hidden = f"""() => {{
      const field = document.getElementById('score-text');
      const put = (text) => {{ field.value = text; field.dispatchEvent(new Event('input')); return {seen}; }};
      return [put('a window'), put('the gradient'), put('every position')];
    }}"""  # noqa: E501
    assert page.evaluate(hidden) == [True, True, True]
    scored(page, "the last word")
    shown = page.evaluate("shown")
    assert "a window" not in shown and "the gradient" not in shown
    # it follows the model as it trains, and goes with it
    page.evaluate("document.getElementById('perplexity').textContent = ''")
    assert page.evaluate(f"() => {{ document.getElementById('start').click(); return {seen}; }}")
    steps = "document.getElementById('perplexity').textContent.match(/after (\\d+) step/)?.[1]"
    for after in ("1", "25", "50"):
        page.wait_for_function(f"{steps} === '{after}'")
    page.click("#start")
    page.wait_for_function("document.getElementById('start').textContent === 'Train'")
    last = page.evaluate(steps)
    assert page.inner_text("#state").startswith(f"step {last}, ")
    assert page.inner_text("#words") == "the last word"


def test_words_of_every_script_are_read(page: Page) -> None:
    """Accents that are characters of their own belong to their word; upper case is lower case."""
    judged(page)
    put(page, "text", "नमस्ते दुनिया, cafe\u0301 İSTANBUL! " * 4)
    trained(page)
    rows = scored(page, "CAFE\u0301 istanbul <b>नमस्ते</b> İstanbul")
    words = ["cafe\u0301", "istanbul", "<", "b", ">", "नमस्ते", "<", "/", "b", ">", "i̇stanbul"]
    assert [row[0] for row in rows] == words
    known = [row[0] for row in rows if row[1] != "unknown"]
    assert known == ["cafe\u0301", "नमस्ते", "i̇stanbul"]


@pytest.mark.parametrize("width", [1280, 390, 320])
def test_no_width_scrolls_sideways(page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    judged(page)
    trained(page)
    scored(page, "the " + 300 * "w" + " table " * 40)
    page.evaluate("for (const e of document.querySelectorAll('details')) e.open = true")
    fits = "document.documentElement.scrollWidth <= innerWidth"
    assert page.evaluate(fits)
    named = page.inner_text("#unknown")
    assert named.startswith(f"Unknown to the model: {30 * 'w'}…. What is unknown")
    inside = page.eval_on_selector_all(
        "section *:not(.wide *)",
        """all => all.filter((e) => e.getBoundingClientRect().right > innerWidth)
          .map((e) => e.outerHTML.slice(0, 80))""",
    )
    assert inside == []
    page.screenshot(path=SCREENSHOTS / f"score{width}.png", full_page=True)
    page.fill("[name=hidden]", "16384")
    page.fill("[name=vocab]", "1000000")
    page.click("#run")
    page.wait_for_selector("#wrong")
    assert page.evaluate(fits)


def test_a_phones_width(page: Page, web_origin: str) -> None:
    page.set_viewport_size({"width": 360, "height": 780})
    page.reload()
    judged(page)
    page.click("#start")
    page.wait_for_function("document.querySelectorAll('#loss-chart polyline').length === 2")
    page.wait_for_function("/step \\d\\d/.test(document.getElementById('state').textContent)")
    page.click("#start")
    page.wait_for_function("document.getElementById('start').textContent === 'Train'")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    size = "getComputedStyle(document.querySelector('#memory-chart text')).fontSize"
    shown = page.evaluate(
        "(e => e.getBoundingClientRect().width / e.viewBox.baseVal.width)"
        "(document.getElementById('memory-chart'))"
    )
    # text below 10 px would not be legible
    assert shown * float(page.evaluate(size).removesuffix("px")) >= 10
    page.set_viewport_size({"width": 390, "height": 844})
    for chart in ("memory-chart", "loss-chart"):  # redrawn
        page.wait_for_function(
            f"(e => e.viewBox.baseVal.width === e.clientWidth)(document.getElementById('{chart}'))"
        )
    page.screenshot(path=SCREENSHOTS / "phone.png", full_page=True)


def test_the_example_trains(browser: BrowserContext, web_origin: str) -> None:
    page = browser.new_page()
    page.goto(f"{web_origin}/example.html")
    page.wait_for_function("/done/.test(document.getElementById('log').textContent)")
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", page.inner_text("#log"))]
    assert losses[0] > 6  # log 500 is 6.2, the loss before any training
    assert losses[-1] < 1
    page.close()


def told_off(page: Page, address: str) -> str:
    """What the page says in a browser where it can run nothing."""
    page.goto(address)
    page.wait_for_selector("#absent:not([hidden])")
    assert page.is_disabled("#run")
    assert page.is_disabled("#start")
    return page.inner_text("#absent")


def test_a_browser_without_webgpu_is_told(browser: BrowserContext, web_origin: str) -> None:
    address = f"{web_origin}/index.html"
    page = browser.new_page()
    page.add_init_script("GPU.prototype.requestAdapter = async () => null")
    assert "no adapter" in told_off(page, address)
    page.screenshot(path=SCREENSHOTS / "absent.png")
    page.add_init_script("delete Navigator.prototype.gpu")
    assert "has no WebGPU" in told_off(page, address)
    page.close()


@pytest.mark.skipif(os.environ.get("LOGITLESS_TEST_FULL") != "1", reason="another browser")
def test_a_browser_whose_webgpu_is_off_is_told(web_origin: str) -> None:
    """In a new process, because a process cannot run two of Playwright's synchronous instances."""
    script = f"""
from playwright.sync_api import sync_playwright
with sync_playwright() as p:
    browser = p.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
    page = browser.new_page()
    page.set_default_timeout(120_000)
    page.goto("{web_origin}/index.html")
    page.wait_for_selector("#absent:not([hidden])")
    print(page.inner_text("#absent"))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "no adapter" in done.stdout
