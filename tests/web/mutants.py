# SPDX-License-Identifier: Apache-2.0
"""Bugs put into the shaders with published bindings, into logitless.js and into the page on purpose;
the tests must catch every one.

    make mutants-web [ONLY="PART OF A NAME"]

A mutant is an exact piece of text, its replacement, and the tests that must fail. Only copies of
the shaders and of build/web in out/web-mutants are changed. Shaders run with naga alone, because
these bugs do not depend on the compiler. Exit code 0: all caught."""

# ruff: noqa: E501
from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRATCH = ROOT / "out/web-mutants"
LOSS, CAST = "test_cross_entropy.py", "test_softmax_cast.py"
ERRORS, MODULE, STOPS = "test_errors.py", "test_module.py", "test_stops.py"
PAGE, DIVERGENCE = "test_page.py", "test_divergence.py"

# Each mutant: name, shader or file of build/web, text, replacement, tests. Two bugs are left out.
# cross_entropy.wgsl without its third barrier: lavapipe runs a workgroup's first threads first, and
# these write what the others read. And without the mark of a masked column under smoothing, which
# is for compilers that assume finite values; the others sum to an infinite loss anyway.
MUTANTS = [
    ("drop the last column", "cross_entropy", "if (column.w < dims.y) {\n    x.w", "if (column.w + 1u < dims.y) {\n    x.w", LOSS),
    ("store no last column", "cross_entropy", "if (column.w < dims.y) {\n    logits", "if (column.w + 1u < dims.y) {\n    logits", LOSS),
    ("smoothing without its pass", "cross_entropy", "below = reduce_depth(tid, shift, depth(row, lane, shift, part.x));", "", LOSS),
    ("smoothing of padding", "cross_entropy", "total(select(vec4<f32>(0.0), m - x, four(v, shift) < vec4<u32>(dims.y)))", "total(m - x)", LOSS),
    ("smoothing of half the threads", "cross_entropy", "parts[tid] = summed(tid, 17u, 16u);", "parts[tid] = summed(tid, 17u, 8u);", LOSS),
    ("a stale maximum", "cross_entropy", "own.y * weigh_one(own.x, m) + sum_of", "own.y + sum_of", LOSS),
    ("a stale maximum among threads", "cross_entropy", "s += other.y * weigh_one(other.x, m);", "s += other.y;", LOSS),
    ("a maximum of its own for every thread", "cross_entropy", "known.scale * weigh_one(m, known.m);", "known.scale;", LOSS),
    ("a thread's part left out", "cross_entropy", "parts[tid] = merged(tid, 17u, 16u);", "parts[tid] = merged(tid, 17u, 15u);", LOSS),
    ("the last of 16 threads left out", "cross_entropy", "k < 16u; k++) {\n    sum", "k < 15u; k++) {\n    sum", LOSS),
    ("the maxima of 16 threads left out", "cross_entropy", "m = max(m, maxima[cell + k]);", "", LOSS),
    ("64 threads are 48", "cross_entropy", "merged((tid >> 6u) * 4u, 1u, 4u)", "merged((tid >> 6u) * 4u, 1u, 3u)", LOSS),
    ("no barrier before 16 threads' maxima are read", "cross_entropy", "maxima[cell + lane] = seen(max(largest(x), LOWEST), x);\n  workgroupBarrier();", "maxima[cell + lane] = seen(max(largest(x), LOWEST), x);", LOSS),
    ("no barrier before the parts are read", "cross_entropy", "tid / 16u] = own;\n  workgroupBarrier();\n  if (tid < 16u) {\n    parts[tid] = merged", "tid / 16u] = own;\n  if (tid < 16u) {\n    parts[tid] = merged", LOSS),
    ("z-loss without its gradient", "cross_entropy", "(1.0 + 2.0 * params.z * lse)", "1.0", LOSS),
    ("z-loss without its loss", "cross_entropy", "params.z * lse * lse;", "0.0;", LOSS),
    ("inv_norm forgotten at the target", "cross_entropy", ".x - params.x * (1.0 - params.y);", ".x - (1.0 - params.y);", LOSS),
    ("a target beyond the vocabulary counts", "cross_entropy", "tgts[min(s, rows - 1u)] >= dims.y", "tgts[min(s, rows - 1u)] > dims.y", LOSS),
    ("an ignored row keeps its logits", "cross_entropy", "fill_columns(row, lane, shift, known.filling);", "", LOSS),
    ("a long ignored row keeps its logits", "cross_entropy", "fill_columns(row, v, 8u, known.filling);", "", LOSS),
    ("a fold of the grid lost", "cross_entropy", "let s = group.x + group.y * groups.x;", "let s = group.x;", LOSS),
    ("a row too many", "cross_entropy", "let rows = min(dims.x, groups.x * groups.y);", "let rows = groups.x * groups.y;", LOSS),
    ("rows that no workgroup takes", "cross_entropy", "select(3u, 15u, dims.y <= 256u)", "select(7u, 15u, dims.y <= 256u)", LOSS),
    ("NaN not seen", "cross_entropy", "magnitude(x) > INFINITE", "false", LOSS),
    ("a masked logit is NaN", "cross_entropy", "magnitude(x) > INFINITE", "magnitude(x) >= INFINITE", LOSS),
    ("a whole masked row is a number", "cross_entropy", " || part.y < 0.5", "", LOSS),
    ("the row's end weighs as the lowest number", "cross_entropy", "  if (m == LOWEST) {", "  if (false) {", LOSS),
    ("registers mixed up", "cross_entropy", "load(row, v + 2u * next, shift),", "load(row, v + next, shift),", LOSS),
    ("the target's column of another thread", "cross_entropy", "tid == (t + before) % WG", "tid == t % WG", LOSS),
    ("the first columns are those before again", "cross_entropy", "v - TURN, k > 1u)", "v, k > 1u)", LOSS),
    ("short rows that no workgroup takes", "cross_entropy", "select(3u, 15u, dims.y <= 256u)", "select(3u, 31u, dims.y <= 256u)", LOSS),
    ("NaN not seen in a long row", "cross_entropy", "worst = max(worst, magnitude(x));", "", LOSS),
    ("the aligned columns end too early", "cross_entropy", "(dims.y + before + TURN", "(dims.y + TURN", LOSS),
    ("large rows stay in registers", "cross_entropy", "  if (dims.y > TURN) {", "  if (dims.y > TURN + 1u) {", LOSS),
    ("the last loss left out", "sum_losses", "first + k * WG < n", "first + k * WG + 1u < n", LOSS),
    ("one long sum", "sum_losses", "first += 4u * BLOCK * WG", "first += 3u * BLOCK * WG", LOSS),
    ("no maximum", "softmax", "return exp(max(x - reference, -200.0));", "return exp(x);", CAST),
    ("rows and columns swapped", "softmax", "row_major == over_rows", "row_major != over_rows", CAST),
    ("the offset forgotten", "softmax", "return shape.offset + i + j * shape.stride;", "return i + j * shape.stride;", CAST),
    ("a column too many", "softmax", "if (j >= vectors) {", "if (j > vectors) {", CAST),
    ("half a workgroup's sums", "softmax", "workgroup_size / 2u; step", "workgroup_size / 4u; step", CAST),
    ("NaN taken for a number", "softmax", "(state.sight & POISON) != 0u", "false", CAST),
    ("-inf weighs as the lowest number", "softmax", "0.0, bitcast<u32>(x) == MINUS_INFINITY_BITS", "0.0, false", CAST),
    ("ties away from even", "cast", "(rest == middle && (kept & 1u) == 1u)", "rest == middle", CAST),
    ("truncated", "cast", "kept + select(0u, 1u, up)", "kept", CAST),
    ("subnormals flushed", "cast", "if (magnitude < 0x33000000u) {", "if (magnitude < 0x38800000u) {", CAST),
    ("100000 is no infinity", "cast", "if (magnitude >= 0x47800000u) {", "if (magnitude >= 0x48000000u) {", CAST),
    ("f16 subnormals read as normal", "cast", "if (exponent > 0u) {", "if (exponent >= 0u) {", CAST),
    ("the odd element forgotten", "cast", "if (2u * word < n) {\n    var", "if (2u * word + 1u < n) {\n    var", CAST),
    ("a teacher's temperature of each token is an option", "logitless.js", "/^(t|teacherT)emperature$/", "/^temperature$/", DIVERGENCE),
    ("a teacher is an output", "logitless.js", "'gradLoss', ...TEACHER]);", "'gradLoss']);", DIVERGENCE),
    ("another order of the kinds", "core.js", "['forward_kl', 'reverse_kl',", "['reverse_kl', 'forward_kl',", DIVERGENCE),
    ("a plan without the teacher", "logitless.js", "const op = teacherLogits || teacherHidden ?", "const op = teacherLogits ?", DIVERGENCE),
    ("a call's verdict is not its outputs'", "logitless.js", "known(name).written = verdict;", "known(name).written = null;", ERRORS),
    ("an input's verdict is forgotten", "logitless.js", "first([...before, this.side.end(), ", "first([this.side.end(), ", ERRORS),
    ("every call's verdict is everybody's", "device.js", "    this.verdicts = new Set();\n", "    this.verdicts ??= new Set();\n", ERRORS),
    ("a submission has no verdict", "device.js", "this.verdicts.add(this.#closeScopes('what was submitted'));", "this.#closeScopes('what was submitted');", ERRORS),
    ("a pipeline's verdict is its first call's", "device.js", "    this.verdicts.add(verdict);\n    this.pass", "    this.pass", ERRORS),
    ("a refused workspace stays", "logitless.js", "failure && this.core.forget()", "null", ERRORS),
    ("what a stopped module left is as good as new", "logitless.js", ", refusal?.message])", "])", ERRORS),
    ("a stopped module's scopes stay open", "logitless.js", "this.side.abandon();", "", ERRORS),
    ("a recording's scopes stay open", "device.js", "this.isRecording = true;", "", STOPS),
    ("what an import throws goes through the module", "device.js", "this.refusal ??= `${name}: ${error?.message ?? error}`;\n        return 0;", "throw error;", STOPS),
    ("half a call is submitted", "device.js", "if (this.refusal) {\n          this.abandon();\n          return 0;\n        }", "", STOPS),
    ("a refused pipeline is kept", "device.js", "failed: message !== null", "failed: false", ERRORS),
    ("the stack of what stopped is lost", "core.js", "stack.value = before;", "", STOPS),
    ("a high address is negative", "core.js", "return this.#enter(call) >>> 0;", "return this.#enter(call);", STOPS),
    ("anything is a buffer", "logitless.js", "if (brand !== 'GPUBuffer') throw", "if (false) throw", STOPS),
    ("a stopped module is asked to forget", "core.js", "} catch {\n      // The module has", "} finally {\n      // The module has", ERRORS),
    ("a wrap's end is the buffer's", "logitless.js", "    if (tensor.owned) tensor.buffer.destroy();", "    this.buffers.delete(tensor.buffer);\n    if (tensor.owned) tensor.buffer.destroy();", ERRORS),
    ("the module's numbers stay", "logitless.js", "numbers.forEach((number) => this.side.forget(number));", "", ERRORS),
    ("done() hears nothing of a lost device", "logitless.js", "const failure = await pending;\n    this.#refuseIfLost();", "const failure = await pending;", ERRORS),
    ("a refused call keeps its outputs", "logitless.js", "for (const tensor of made) tensor.destroy();", "", ERRORS),
    ("no memory is an address", "core.js", "if (address === 0) throw", "if (address < 0) throw", ERRORS),
    ("a lost device takes calls", "logitless.js", "if (this.isLost) throw", "if (false) throw", ERRORS),
    ("scopes left open", "device.js", "FILTERS.map(async () => this.device.popErrorScope()", "FILTERS.slice(1).map(async () => this.device.popErrorScope()", ERRORS),
    ("byte offsets forgotten", "core.js", "text, data, byteOffset, code", "text, data, 0, code", MODULE),
    ("no pipeline is ever ready", "device.js", "failed: message !== null, ready: true", "failed: message !== null", MODULE),
    ("a visitor waits and is told nothing", "page.js", "timed(() => showing(at('progress'), logitless, run))", "timed(run)", PAGE + "::test_the_shaders_that_are_compiled_are_counted"),
    ("compiling is called running", "progress.js", "ready < asked ?", "false ?", PAGE + "::test_the_shaders_that_are_compiled_are_counted"),
    ("a software adapter has a rate", "page.js", "(isSoftware(logitless.device.adapterInfo) ?", "(false ?", PAGE + "::test_a_software_adapter_is_called_so_and_given_no_rate"),
    ("a GPU begins with the small call", "page.js", "    fitToDevice(instance);\n", "", PAGE + "::test_a_gpu_begins_with_a_larger_call_and_gets_a_rate"),
    ("a figure without its meaning", "page.js", "  at('check-meaning').textContent =\n    ", "  const unsaid =\n    ", PAGE + "::test_every_figure_has_its_meaning"),
    ("a log axis that does not say so", "chart.js", "log ? `${label}, log scale` : label", "label", PAGE + "::test_the_chart_shows_what_a_training_step_saves"),
    ("the chart stops at the call's own tokens", "page.js", "power <= 16; power++", "power <= 6; power++", PAGE + "::test_the_chart_shows_what_a_training_step_saves"),
    ("the dot lies on the logits", "page.js", "y: Math.max(1, used), name", "y: 4 * tokens * vocab, name", PAGE + "::test_the_chart_shows_what_a_training_step_saves"),
    ("the bound's link leads nowhere", "page.js", "document.html?docs/semantics.md#", "document.html?semantics.md#", PAGE + "::test_every_link_leads_somewhere"),
    ("the bound's section has another name", "page.js", "#accuracy-promised-and", "#accuracy-and", PAGE + "::test_every_link_leads_somewhere"),
    ("light in the dark", "style.css", "color-scheme: light dark;", "color-scheme: light;", PAGE + "::test_light_and_dark_can_be_read"),
    ("pale letters", "style.css", "--soft: light-dark(#5b626b,", "--soft: light-dark(#9ba2ab,", PAGE + "::test_light_and_dark_can_be_read"),
    ("one column on a wide screen", "style.css", "main { grid-template-columns: 5fr 4fr; }", "", PAGE + "::test_the_first_call_agrees_with_double_precision"),
    ("nothing is written after the first step", "train.js", "losses.length === 1 || losses.length % 25", "losses.length % 25", PAGE + "::test_what_the_model_writes_appears_as_it_trains"),
    ("a chart keeps its old width", "chart.js", "if (svg.clientWidth !== width) drawChart(svg, chart);", "", PAGE + "::test_a_phones_width"),
    ("what was refused leaves the old results", "page.js", "      clearResults();\n", "", PAGE + "::test_what_is_refused_is_said_and_leaves_no_results"),
    ("null is 0", "core.js", "if (typeof value !== 'number') throw", "if (false) throw", ERRORS),
    ("a software adapter is this machine's GPU", "page.js", "isSoftware(info) ? 'on a software adapter'", "false ? ''", PAGE + "::test_a_software_adapter_is_called_so_and_given_no_rate"),
    ("a field that is wrong stays folded away", "page.js", "if (folded) folded.open = true;", "", PAGE + "::test_a_refused_option_is_told"),
    ("a fault is told beside the button only", "page.js", "if (!field) return;\n  const told", "return;\n  const told", PAGE + "::test_every_impossible_number_gets_a_sentence_at_its_field"),
    ("a complaint outlives its fault", "page.js", "    dropComplaint(form);\n    fields.look();", "    fields.look();", PAGE + "::test_every_impossible_number_gets_a_sentence_at_its_field"),
    ("infinity is a loss", "page.js", "if (!early && !Number.isFinite(loss)) throw new Error(NOT_FINITE);", "", PAGE + "::test_a_loss_that_is_not_a_number_is_judged"),
    ("a fault of the loss is too large a number", "page.js", "Number.isFinite(loss) ? null : await verdict()", "null", PAGE + "::test_a_loss_that_is_not_a_number_is_judged"),
    ("every trap is a lack of memory", "page.js", "/out of memory/.test(error.message)", "true", PAGE + "::test_a_call_too_large_for_double_precision_is_not_checked"),
    ("an infinite gradient is the library's error", "page.js", "if (!(Math.abs(value[i]) <= 3.4e38)) throw", "if (false) throw", PAGE + "::test_numbers_beyond_f32_are_told"),
    ("other fields' results look like these", "page.js", "    fields.keep(asIs);\n", "", PAGE + "::test_results_of_other_fields_are_marked"),
    ("no memory for the check is no call", "page.js", "if (!/out of memory/.test(error.message)) throw error;", "throw error;", PAGE + "::test_a_call_too_large_for_double_precision_is_not_checked"),
    ("a cleared chart comes back", "chart.js", "  charts.delete(svg);\n", "", PAGE + "::test_what_is_refused_is_said_and_leaves_no_results"),
    ("another text's model looks like this one's", "train.js", "      fields.keep();\n", "", PAGE + "::test_a_model_of_another_text_is_marked"),
    ("a text too short leaves the model before", "train.js", "    score(null);\n", "", PAGE + "::test_a_text_that_cannot_be_trained_on"),
    ("a score without what comes before", "model.js", "Array.from(tokens.keys());", "Array.from(tokens, () => 0);", PAGE + "::test_a_score_is_that_of_the_exact_model"),
    ("an unknown word is the commonest", "model.js", "?? -100", "?? 0", PAGE + "::test_a_score_is_that_of_the_exact_model"),
    ("the second place is the first", "score.js", "String(rank[i] + 1)", "String(Math.max(rank[i], 1))", PAGE + "::test_a_score_is_that_of_the_exact_model"),
    ("the score of an earlier text is shown", "score.js", "      if (!isLatest()) return;\n", "", PAGE + "::test_no_score_outlives_its_text_or_its_model"),
    ("a score stands while its text changes", "score.js", "    scored.className = 'stale';\n", "", PAGE + "::test_no_score_outlives_its_text_or_its_model"),
    ("a score stands without its model", "score.js", "    scored.hidden = true;\n", "", PAGE + "::test_no_score_outlives_its_text_or_its_model"),
    ("the score of the last step is not made", "train.js", "  tell();\n  await score(model);\n}", "  tell();\n}", PAGE + "::test_no_score_outlives_its_text_or_its_model"),
    ("accents are words", "model.js", "const WORD = /[\\p{L}\\p{M}", "const WORD = /[\\p{L}", PAGE + "::test_words_of_every_script_are_read"),
    ("a long word scrolls the page", "style.css", " overflow-wrap: anywhere; }\na {", " }\na {", PAGE + "::test_no_width_scrolls_sideways"),
    ("surprise too dark to read", "style.css", "var(--orange) 48%", "var(--orange) 90%", PAGE + "::test_light_and_dark_can_be_read"),
]  # fmt: skip


def passes(tests: str) -> bool:
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    environment |= {
        "LOGITLESS_SHADERS": str(SCRATCH / "shaders"),
        "LOGITLESS_WEB": str(SCRATCH / "web"),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-x"]
    if tests in (LOSS, CAST):
        command += ["-k", "naga or holds"]
    command += ["-c", str(ROOT / "tests/web/pytest.ini"), str(ROOT / "tests/web" / tests)]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=300)
    # The browser hangs on rare occasions, so it gets a second try.
    except subprocess.TimeoutExpired:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=300)
    if done.returncode not in (0, 1):
        raise SystemExit(done.stdout.decode() + done.stderr.decode())
    return done.returncode == 0


def main() -> int:
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    survivors = []
    for name, shader, text, replacement, tests in MUTANTS:
        if wanted not in name:
            continue
        shutil.rmtree(SCRATCH, ignore_errors=True)
        shutil.copytree(ROOT / "src/webgpu/shaders", SCRATCH / "shaders")
        shutil.copytree(
            ROOT / "build/web", SCRATCH / "web", ignore=shutil.ignore_patterns("CMake*", "suite")
        )
        file = SCRATCH / (f"web/{shader}" if "." in shader else f"shaders/{shader}.wgsl")
        before = file.read_text()
        if text not in before:
            raise SystemExit(f"{name}: its text is not in {file.name}")
        file.write_text(before.replace(text, replacement, 1))
        survived = passes(tests)
        print(f"{'SURVIVED' if survived else 'caught  '}  {shader}: {name}", flush=True)
        if survived:
            survivors.append(name)
    print(f"{len(survivors)} survived")
    return 1 if survivors else 0


if __name__ == "__main__":
    raise SystemExit(main())
