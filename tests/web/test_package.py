# SPDX-License-Identifier: Apache-2.0
"""The npm-shaped package in build/web: its files, and types that are those of logitless.js."""

# ruff: noqa: E501
from __future__ import annotations

import json
import math
import re

import pytest
from playwright.sync_api import Page

from conftest import ROOT

FOLDER = ROOT / "build/web"
TYPES = (FOLDER / "logitless.d.ts").read_text() if FOLDER.is_dir() else ""
# Public in JavaScript, because a tensor calls its owner, but internal.
INSIDE = {"constructor", "write", "read", "release"}


def members(name: str) -> set[str]:
    """What logitless.d.ts gives a class or interface."""
    body = re.search(rf"export (?:class|interface) {name}\b.*?\{{\n(.*?)\n\}}", TYPES, re.DOTALL)
    assert body is not None, name
    found = re.findall(r"^  (?:static |readonly )*(\w+)\??(?:<[^(]*>)?[:(]", body[1], re.MULTILINE)
    return set(found)


def texts(name: str) -> set[str]:
    """The strings that a type allows."""
    body = re.search(rf"export type {name} =(.*?);", TYPES, re.DOTALL)
    assert body is not None, name
    return set(re.findall(r"'(\w+)'", body[1]))


def test_its_files_are_there() -> None:
    package = json.loads((FOLDER / "package.json").read_text())
    assert package["type"] == "module"
    named = {*package["files"], package["main"], package["types"]}
    named |= {*package["exports"]["."].values(), package["exports"]["./logitless.wasm"]}
    for name in named:
        assert (FOLDER / name).is_file(), name
    for file in package["files"]:
        if file.endswith(".js"):
            imported = re.findall(r"from '\./(.*?)'", (FOLDER / file).read_text())
            assert set(imported) <= set(package["files"])


@pytest.mark.parametrize(("name", "inside"), [("Logitless", INSIDE), ("Tensor", {"constructor"})])
def test_the_types_have_every_public_member(page: Page, name: str, inside: set[str]) -> None:
    real, static, own = page.evaluate(
        f"""() => {{
          const own = module.{name} === module.Tensor ? logitless.empty([1]) : logitless;
          const statics = Object.getOwnPropertyNames(module.{name});
          return [Object.getOwnPropertyNames(module.{name}.prototype), statics, Object.keys(own)];
        }}"""
    )
    statics = set(static) - {"length", "name", "prototype"}
    assert set(real) - (inside if name == "Logitless" else {"constructor"}) <= members(name)
    assert members(name) <= {*real, *statics, *own}


def test_every_option_that_the_types_have_is_taken(page: Page) -> None:
    values = {"reduction": "sum", "outOfRange": "ignore", "emptyMean": "nan"}
    options = {name: values.get(name, 1) for name in members("LossOptions")}
    options |= {"vocabStart": 0, "vocabTotal": 20, "labelSmoothing": 0.5}
    options.pop("normalizer")  # only a mean has a normalizer
    assert len(options) > 10
    loss = page.evaluate(
        """async ([options]) => {
          const {bias, ...rest} = problem(4, 8, 20);
          const {shapes, ...tensors} = {...rest, ...upload(logitless, rest)};
          delete tensors.bias;
          return await logitless.linearCrossEntropy({...tensors, ...options}).loss.item();
        }""",
        [options],
    )
    assert loss > 0


def test_every_option_of_a_divergence_that_the_types_have_is_taken(page: Page) -> None:
    options = {name: 0.5 for name in members("DivergenceOptions")} | {"divergence": "jsd"}
    assert len(options) == 5
    statistics = sorted(texts("DivergenceStatistic"))
    assert set(statistics) - texts("Statistic") <= members("DivergenceCall")
    loss, got = page.evaluate(
        """async ([options, statistics]) => {
          const {bias, ...rest} = problem(4, 8, 20);
          const {shapes, ...tensors} = {...rest, ...upload(logitless, rest)};
          delete tensors.bias;
          const teacher = {teacherLogits: logitless.tensor(fill(80), [4, 20]), teacherTemperature: 2};
          const result = logitless.linearDivergence({...tensors, ...teacher, statistics, ...options});
          return [await result.loss.item(), await Promise.all(statistics.map(async (name) => [...(await result[name].read())]))];
        }""",
        [options, statistics],
    )
    assert loss > 0
    assert all(len(values) == 4 and all(values) for values in got)


def test_every_statistic_that_the_types_have_is_written(page: Page) -> None:
    names = sorted(texts("Statistic"))
    assert len(names) == 13
    got = page.evaluate(
        """async ([statistics]) => {
          const {bias, ...rest} = problem(4, 8, 20);
          const {shapes, ...tensors} = {...rest, ...upload(logitless, rest)};
          const result = logitless.linearCrossEntropy({...tensors, statistics});
          return Promise.all(statistics.map(async (name) => [...(await result[name].read())]));
        }""",
        [names],
    )
    assert all(len(values) == 4 and any(values) for values in got)


def test_a_call_takes_and_gives_what_its_types_have(page: Page) -> None:
    names = sorted(members("Statistics"))
    assert set(names) == texts("Statistic")
    assert re.search(r"interface CallOptions extends [^{]*\bStatistics\b", TYPES)
    assert re.search(r"type Result = \{[^}]*\bfault\?.*?\} & Statistics;", TYPES, re.DOTALL)
    same, given = page.evaluate(
        """async ([names]) => {
          const {bias, ...rest} = problem(4, 8, 20);
          const {shapes, ...tensors} = {...rest, ...upload(logitless, rest)};
          delete tensors.bias;
          const given = Object.fromEntries(names.map((name) => [name, logitless.empty([4], ['argmax', 'rank'].includes(name) ? 'i32' : 'f32')]));
          given.fault = logitless.tensor(new Int32Array(1));
          const result = logitless.linearCrossEntropy({...tensors, ...given});
          const read = await Promise.all(names.map(async (name) => [...(await result[name].read())]));
          return [Object.keys(given).every((name) => result[name] === given[name]), read];
        }""",
        [names],
    )
    assert same
    assert all(len(values) == 4 and any(values) for values in given)


def test_evaluate_takes_the_options_of_its_types(page: Page) -> None:
    assert {"inputKind", "probabilityFloor", "accumulate"} <= members("EvaluateCall")
    loss, before, plain, added = page.evaluate(
        """() => {
          const {loss} = logitless.evaluate({kind: 'crossEntropyForward', inputKind: 'probabilities', probabilityFloor: 0.25,
            tensors: {logits: new Float32Array([0.5, 0.5, 0]), target: new Int32Array([2])}, shapes: {logits: [1, 3]}, outputs: {loss: []}});
          const {bias, shapes, ...tensors} = problem(4, 8, 20);
          const gradWeight = fill(160);
          const outputs = {gradWeight: [20, 8], gradInput: [4, 8]};
          const plain = logitless.evaluate({tensors, shapes, outputs: {loss: [], ...outputs}});
          const added = logitless.evaluate({tensors: {...tensors, gradWeight}, shapes: {...shapes, gradWeight: [20, 8]},
            outputs: {loss: [], ...outputs}, accumulate: true});
          return [loss.value[0], [...gradWeight], [...plain.gradWeight.value], [...added.gradWeight.value]];
        }"""
    )
    assert loss == pytest.approx(math.log(4))
    assert added == pytest.approx([a + b for a, b in zip(before, plain, strict=True)])


def test_the_status_codes_are_the_types() -> None:
    source = (FOLDER / "core.js").read_text()
    codes = re.search(r"const CODES = \[(.*?)\];", source, re.DOTALL)
    assert codes is not None
    assert set(re.findall(r"'(\w+)'", codes[1])) - {"ok"} == texts("StatusCode")
