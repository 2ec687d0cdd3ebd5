# SPDX-License-Identifier: Apache-2.0
"""An error of WebGPU or of the module reaches the call of logitless.js that caused it, with its own
message. It leaves no error scope open and no buffer in use."""

# ruff: noqa: E501
from __future__ import annotations

import pytest
from playwright.sync_api import Page

# A small problem on its own device; `told` returns [code, message] of a promise or a function.
OWN = """
  const own = await module.Logitless.create();
  const {bias, shapes, ...arrays} = problem(4, 8, 20);
  const tensors = upload(own, {shapes, ...arrays});
  const told = async (f) => {
    try { await f(); } catch (error) { return [error.code ?? error.name, error.message]; }
    return ['none', ''];
  };
  const pause = () => new Promise((resolve) => setTimeout(resolve, 50));
"""


def evaluate(page: Page, script: str) -> list:
    return page.evaluate(f"async () => {{ {OWN} {script} }}")


def test_webgpus_own_message_reaches_the_caller(page: Page) -> None:
    """A buffer that is destroyed is found out by WebGPU when the work is submitted."""
    code, message = evaluate(
        page,
        """tensors.weight.buffer.destroy();
           const {loss} = own.linearCrossEntropy(tensors);
           return told(() => loss.item());""",
    )
    assert code == "device_error"
    assert "destroyed" in message


@pytest.mark.parametrize("order", ["bad, good", "good, bad"])
def test_an_error_is_told_to_its_own_call_alone(page: Page, order: str) -> None:
    """Also where the page yields between the calls, and whichever is read first."""
    good, bad, later = evaluate(
        page,
        f"""const weight = own.tensor(arrays.weight, [20, 8]);
           weight.buffer.destroy();
           const bad = own.linearCrossEntropy({{...tensors, weight}}).loss;
           await pause();
           const good = own.linearCrossEntropy(tensors).loss;
           await pause();
           const told_of = {{bad: () => told(() => bad.item()), good: () => good.item()}};
           const answers = {{}};
           for (const name of '{order}'.split(', ')) answers[name] = await told_of[name]();
           return [answers.good, answers.bad, await told(() => own.linearCrossEntropy(tensors).loss.item())];""",
    )
    assert isinstance(good, float)
    assert good > 0
    assert bad[0] == "device_error"
    assert "destroyed" in bad[1]
    assert later == ["none", ""]


def test_what_is_made_of_a_failed_result_fails_too(page: Page) -> None:
    first, second, written = evaluate(
        page,
        """const weight = own.tensor(arrays.weight, [20, 8]);
           weight.buffer.destroy();
           const {gradInput} = own.linearCrossEntropy({...tensors, weight, gradients: ['input']});
           await pause();
           const {loss} = own.linearCrossEntropy({...tensors, input: gradInput});
           const answers = [await told(() => gradInput.read()), await told(() => loss.item())];
           gradInput.write(arrays.input);  // as good as new
           return [...answers, await told(() => own.linearCrossEntropy({...tensors, input: gradInput}).loss.item())];""",
    )
    assert first[0] == "device_error"
    assert second == first
    assert written == ["none", ""]


def test_a_refused_call_leaves_an_earlier_error_where_it_was(page: Page) -> None:
    failed, refused, still = evaluate(
        page,
        """const weight = own.tensor(arrays.weight, [20, 8]);
           weight.buffer.destroy();
           const {gradInput} = own.linearCrossEntropy({...tensors, weight, gradients: ['input']});
           const failed = await told(() => gradInput.read());
           const loss = own.wrap(tensors.input.buffer, []);
           const refused = await told(() => own.linearCrossEntropy({...tensors, gradients: ['input'], gradInput, loss}));
           return [failed, refused, await told(() => gradInput.read())];""",
    )
    assert failed[0] == "device_error"
    assert refused[0] == "invalid_argument"
    assert "in one buffer" in refused[1]
    assert still == failed


def test_done_tells_of_everything_since_it_last_did(page: Page) -> None:
    bad, good = evaluate(
        page,
        """const weight = own.tensor(arrays.weight, [20, 8]);
           weight.buffer.destroy();
           own.linearCrossEntropy({...tensors, weight});
           await pause();
           own.linearCrossEntropy(tensors);
           return [await told(() => own.done()), await told(() => own.done())];""",
    )
    assert bad[0] == "device_error"
    assert "destroyed" in bad[1]
    assert good == ["none", ""]


def test_a_refused_workspace_is_made_anew_by_the_next_call(page: Page) -> None:
    """The planner is given larger limits than the device has, so the device refuses a buffer."""
    tensor, refused, after = evaluate(
        page,
        """const small = await module.Logitless.create({limits: 'default'});
           const {bias: unused, shapes: s, ...a} = problem(2048, 8, 80000);
           const large = upload(small, {shapes: s, ...a});
           const giant = await told(() => small.empty([2 ** 27]).read());
           small.core.exports.set_limits(2 ** 34, 2 ** 30, 8, 256, 16384, 256, 65535);
           const refused = await told(() => small.linearCrossEntropy({...large, gradients: ['input'], budget: 2 ** 32}).loss.item());
           small.core.exports.set_limits(2 ** 28, 2 ** 27, 8, 256, 16384, 256, 65535);
           const tiny = upload(small, {shapes, ...arrays});
           return [giant, refused, await told(() => small.linearCrossEntropy({...tiny, budget: 2 ** 32}).loss.item())];""",
    )
    for code, message in (tensor, refused):
        assert code == "device_error"
        assert "bytes" in message
        assert "exceed" in message
    assert after == ["none", ""]


def test_a_pipeline_that_cannot_be_made_is_told_and_made_anew_by_the_next_call(page: Page) -> None:
    """What the pipeline lacked, such as memory, may be there at the next call."""
    broken, again, mended = evaluate(
        page,
        """const make = own.device.createShaderModule.bind(own.device);
           own.device.createShaderModule = ({code, label}) => make({label, code: label.startsWith('tokens') ? code + 'broken' : code});
           const broken = await told(() => own.linearCrossEntropy(tensors).loss.item());
           const again = await told(() => own.linearCrossEntropy(tensors).loss.item());
           own.device.createShaderModule = make;
           return [broken, again, await told(() => own.linearCrossEntropy(tensors).loss.item())];""",
    )
    for code, message in (broken, again):
        assert code == "device_error"
        assert "tokens.wgsl" in message
    assert mended == ["none", ""]


def test_calls_made_at_once_are_told_of_the_same_pipeline(page: Page) -> None:
    """The second call takes the pipeline of the first, before its failure is known."""
    both = evaluate(
        page,
        """const make = own.device.createShaderModule.bind(own.device);
           own.device.createShaderModule = ({code, label}) => make({label, code: label.startsWith('tokens') ? code + 'broken' : code});
           const call = () => told(() => own.linearCrossEntropy(tensors).loss.item());
           return Promise.all([call(), call()]);""",
    )
    for code, message in both:
        assert code == "device_error"
        assert message.startswith("tokens.wgsl, ")


def test_the_pages_own_error_scopes_are_left_alone(page: Page) -> None:
    caught = evaluate(
        page,
        """own.device.pushErrorScope('validation');
           tensors.weight.buffer.destroy();
           const {loss} = own.linearCrossEntropy(tensors);
           await told(() => loss.item());
           own.device.createBuffer({size: 4, usage: 0});
           const caught = await own.device.popErrorScope();
           return [caught.message];""",
    )
    assert "usage" in caught[0].lower()


def test_a_lost_device_is_an_error_and_no_hang(page: Page) -> None:
    before, during, after, done, lost, anew = evaluate(
        page,
        """const {loss} = own.linearCrossEntropy(tensors);
           const first = await told(() => loss.item());
           const under_way = own.linearCrossEntropy(tensors).loss;
           const read = told(() => under_way.read());
           own.device.destroy();
           const during = await read;
           const after = await told(() => own.linearCrossEntropy(tensors));
           const done = await told(() => own.done());
           const another = await module.Logitless.create();
           const again = upload(another, {shapes, ...arrays});
           return [first, during, after, done, await own.lost, await told(() => another.linearCrossEntropy(again).loss.item())];""",
    )
    assert before == ["none", ""]
    for code, message in (during, after, done):
        assert code == "device_error"
        assert message.startswith("the GPU device was lost: ")
    assert lost == after[1]
    assert anew == ["none", ""]


def test_done_tells_of_a_loss_behind_what_was_accepted(page: Page) -> None:
    before, after = evaluate(
        page,
        """own.linearCrossEntropy(tensors);
           const before = await told(() => own.done());
           own.device.destroy();
           await own.lost;
           return [before, await told(() => own.done())];""",
    )
    assert before == ["none", ""]
    assert after[0] == "device_error"
    assert after[1].startswith("the GPU device was lost: ")


def test_memory_that_the_module_has_not_is_a_status(page: Page) -> None:
    answers = evaluate(
        page,
        """if (own.core.exports.allocate(2 ** 32 - 64) !== 0) throw new Error('so much memory');
           own.core.exports = {...own.core.exports, allocate: () => 0};
           return [
             await told(() => own.linearCrossEntropy(tensors)), await told(() => own.plan({tokens: 4, hidden: 8, vocab: 20})),
             await told(() => own.evaluate({tensors: arrays, shapes, outputs: {loss: []}})),
           ];""",
    )
    for code, message in answers:
        assert code == "internal"
        assert "out of memory" in message


def test_a_module_that_stops_is_a_status(page: Page) -> None:
    """The call and its outputs report it. Recorded work is dropped, with its error scopes."""
    (code, message), output, caught, left_open, after, unhandled = evaluate(
        page,
        """const unhandled = [];
           addEventListener('unhandledrejection', ({reason}) => unhandled.push(String(reason)));
           const {run, forget} = own.core.exports;
           const stop = () => { throw new WebAssembly.RuntimeError('unreachable'); };
           const gradInput = own.empty([4, 8]);
           own.core.exports = {...own.core.exports, forget: stop, run: () => {
             const number = own.side.adopt(gradInput.buffer);
             own.side.imports().copy(number, 0, number, 64, 64);  // something recorded, and its scopes open
             stop();
           }};
           own.device.pushErrorScope('validation');
           const stopped = await told(() => own.linearCrossEntropy({...tensors, gradients: ['input'], gradInput}));
           own.device.createBuffer({size: 4, usage: 0});
           const caught = await own.device.popErrorScope();
           const left_open = await own.device.popErrorScope().then(() => true, () => false);
           const output = await told(() => gradInput.read());
           own.core.exports = {...own.core.exports, run, forget};
           await pause();
           return [stopped, output, caught?.message ?? '', left_open, await told(() => own.linearCrossEntropy(tensors).loss.item()), unhandled];""",
    )
    assert code == "internal"
    assert "unreachable" in message
    assert output[0] == "device_error"
    assert "unreachable" in output[1]
    assert "usage" in caught.lower()
    assert not left_open
    assert after == ["none", ""]
    assert unhandled == []


def test_a_buffers_verdict_is_not_one_wraps(page: Page) -> None:
    """If one tensor of a buffer is destroyed, others still work, and a failed one still fails."""
    before, after, numbers = evaluate(
        page,
        """const weight = own.tensor(arrays.weight, [20, 8]);
           weight.buffer.destroy();
           const usage = GPUBufferUsage.STORAGE | GPUBufferUsage.COPY_SRC | GPUBufferUsage.COPY_DST;
           const buffer = own.device.createBuffer({size: 128, usage});
           const gradInput = own.wrap(buffer, [4, 8]);
           own.linearCrossEntropy({...tensors, weight, gradients: ['input'], gradInput});
           const before = await told(() => gradInput.read());
           gradInput.destroy();
           const after = await told(() => own.wrap(buffer, [4, 8]).read());
           const counts = [];
           for (let i = 0; i < 4; i++) {
             const made = own.device.createBuffer({size: 128, usage});
             own.linearCrossEntropy({...tensors, gradients: ['input'], gradInput: own.wrap(made, [4, 8])});
             counts.push(own.side.buffers.size);
           }
           return [before, after, counts];""",
    )
    assert before[0] == "device_error"
    assert "destroyed" in before[1]
    assert after == before
    assert len(set(numbers)) == 1  # no wrapped buffer is held after its call


def test_a_refused_call_keeps_no_buffer(page: Page) -> None:
    codes, made, destroyed = evaluate(
        page,
        """let [made, destroyed] = [0, 0];
           const create = own.device.createBuffer.bind(own.device);
           own.device.createBuffer = (descriptor) => {
             const buffer = create(descriptor);
             const destroy = buffer.destroy.bind(buffer);
             buffer.destroy = () => (destroyed++, destroy());
             made++;
             return buffer;
           };
           const refused = [
             () => own.linearCrossEntropy({...tensors, gradients: true, labelSmoothing: 2, statistics: ['lse', 'argmax']}),
             () => own.linearCrossEntropy({...tensors, gradients: true, reduction: 'average'}),
             () => own.linearCrossEntropy({...tensors, gradients: true, statistics: ['lsd']}),
             () => own.linearCrossEntropy({...tensors, gradients: ['bias']}),
             () => own.crossEntropy({logits: tensors.weight, target: tensors.target, gradients: true}),
             () => own.softmax(tensors.target),
           ];
           const codes = [];
           for (const call of refused) codes.push((await told(call))[0]);
           return [codes, made, destroyed];""",
    )
    assert "none" not in codes
    assert made > 5
    assert destroyed == made


def test_a_write_leaves_the_other_half_of_a_word_alone(page: Page) -> None:
    whole, view, part, left = evaluate(
        page,
        """const three = own.tensor(new Uint16Array([1, 2, 3]));
           const four = own.tensor(new Uint16Array([4, 5, 6, 7]));
           const view = await told(() => own.wrap(four.buffer, [3], 'f16').write(new Uint16Array([8, 9, 10])));
           const part = await told(() => four.write(new Uint16Array([11])));
           own.wrap(four.buffer, [2], 'f16', {byteOffset: 4}).write(new Uint16Array([12, 13]));
           return [[...(await three.read())], view, part, [...(await four.read())]];""",
    )
    assert whole == [1, 2, 3]
    for code, message in (view, part):
        assert code == "misaligned"
        assert "multiples of 4" in message
    assert left == [4, 5, 12, 13]


def test_more_data_than_a_tensor_holds_is_refused(page: Page) -> None:
    long, strided = evaluate(
        page,
        """const view = own.wrap(tensors.weight.buffer, [8, 20], 'f32', {stride: [1, 8]});
           return [await told(() => tensors.target.write(new Int32Array(5))), await told(() => view.read())];""",
    )
    assert long[0] == "wrong_shape"
    assert strided[0] == "invalid_argument"
    assert "contiguous" in strided[1]


F32 = "allowed: 0, or 1.4e-45 to 3.4e+38 in size (f32)"
INTEGERS = "allowed: integers from -(2^53 - 1) to 2^53 - 1"


NUMBERS = [
    *(
        (f"{name}: {value}", f"{snake} is {float(value):g}; {F32}")
        for name, snake in (
            ("softcap", "softcap"), ("zLoss", "z_loss"), ("logitScale", "logit_scale"),
            ("temperature", "temperature"), ("labelSmoothing", "label_smoothing"),
        )
        for value in ("1e-46", "-7e-46", "1e39")
    ),
    *(
        (f"ignoreIndex: {value}", f"ignore_index is {said}; {INTEGERS}")
        for value, said in (
            ("NaN", "nan"), ("1e300", "1e+300"), ("-Infinity", "-inf"), ("0.5", "0.5"),
            ("2 ** 53 + 1", "9.0072e+15"), ("-(2 ** 53)", "-9.0072e+15"),
        )
    ),
    ("softcap: NaN", "softcap is nan; allowed: 0 (none), or finite, positive and not subnormal"),
    ("zLoss: Infinity", "z_loss is inf; allowed: finite, >= 0"),
    ("normalizer: NaN", "options.normalizer is nan; allowed: finite, >= 0 (0: counted)"),
    ("softcap: null", "softcap is null; allowed: a number"),
    ("softcap: '3'", "softcap is 3; allowed: a number"),
    ("budget: NaN", "budget is nan; allowed: 0 to 2^53 - 1 bytes"),
    ("budget: 2 ** 53", "budget is 9.0072e+15; allowed: 0 to 2^53 - 1 bytes"),
    ("budget: 1e300", "budget is 1e+300; allowed: 0 to 2^53 - 1 bytes"),
]  # fmt: skip


def test_a_number_is_the_one_that_was_given_or_an_error(page: Page) -> None:
    calls = ", ".join(
        f"await told(() => own.linearCrossEntropy({{...tensors, {options}}}))"
        for options, _ in NUMBERS
    )
    for (options, message), found in zip(
        NUMBERS, evaluate(page, f"return [{calls}];"), strict=True
    ):
        assert found == ["invalid_argument", message], options


def test_a_size_is_an_integer(page: Page) -> None:
    sizes = {"NaN": "nan", "1e300": "1e+300", "1.5": "1.5", "2 ** 53": "9.0072e+15"}
    calls = ", ".join(
        f"await told(() => own.plan({{tokens: {size}, hidden: 8, vocab: 20}}))" for size in sizes
    )
    assert evaluate(page, f"return [{calls}];") == [
        ["invalid_argument", f"input has a size or a stride of {said}; {INTEGERS}"]
        for said in sizes.values()
    ]


def test_numbers_that_are_held_are_taken(page: Page) -> None:
    calls = ", ".join(
        f"await own.linearCrossEntropy({{...tensors, {options}}}).loss.item()"
        for options in (
            "", "zLoss: 1.5e-45", "softcap: 1e30", "ignoreIndex: 2 ** 53 - 1",
            "ignoreIndex: -(2 ** 53 - 1)",
        )
    )  # fmt: skip
    losses = evaluate(page, f"return [{calls}];")
    assert losses == pytest.approx([losses[0]] * len(losses))
