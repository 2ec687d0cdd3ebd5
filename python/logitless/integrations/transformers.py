# SPDX-License-Identifier: Apache-2.0
"""A patch that makes a Hugging Face causal LM compute its loss without logits.

With labels the model's own forward runs, but its lm_head computes the loss instead of the logits
(as a module call, so that hooks of FSDP, DDP and accelerate run), and its loss_function returns
this loss. Terms that the model adds to its loss are still added.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from logitless._errors import LogitlessError, invalid, not_supported, renames
from logitless.integrations import _callers, _heads, _matrix, _metrics, _rows, trl
from logitless.integrations._predicted import Predicted
from logitless.torch import linear_cross_entropy, linear_topk, workspace_size
from logitless.torch._functions import measured

# Attributes that the patch adds to a module, besides its `forward`.
_PATCH, _OWN_FORWARD, _OWN_LOSS = "_logitless_patch", "_logitless_forward", "_logitless_loss"
_REPLICATE = "_replicate_for_data_parallel"
_KINDS = ("cpu", "cuda")
_STATES = 64  # states in `seen`, at most: a model may be in a new state at every call
# accelerate's names for a module's forward, and for the one before its hooks.
_FORWARDS = ("forward", "_old_forward")
_OWN_INIT = "_logitless_init"  # the attribute that stores a patched class's own __init__
# The attribute in which transformers stores a loss_function that differs from the default of the
# model's kind.
_LOSS_FUNCTION = "_loss_function"
# Options of linear_cross_entropy that the user may set, besides those in _TRANSFORM.
_OPTIONS = (
    "weight", "reduction", "label_smoothing", "z_loss", "temperature", "token_weight", "normalizer",
    "memory", "empty_mean",
)  # fmt: skip
# What the model does to its logits. Unless the user sets these, they are read from the model or its
# configuration (vocab_size as unpadded_vocab_size, the others under the names below). The check of
# the model's calls finds out whether they are true.
_TRANSFORM = ("logit_scale", "softcap", "vocab_size")
_SCALES = ("logit_scale", "output_multiplier", "lm_head_multiplier")
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
# The logits are multiplied by this power of logits_scaling; for models that are not listed it is
# -1. MiniCPM 3 divides its hidden states before the head, so its power is 0.
_POWERS = {"hyperclovax": 1.0, "minicpm3": 0.0}


class _Calls(threading.local):
    """The forward calls that this thread is in. It is per thread, because several threads may call
    one model, and autograd's threads may rerun a checkpointed model at the same time."""

    def __init__(self) -> None:
        self.pending: dict[Any, _Pending] = {}  # by model, and by part of its head
        self.inside: tuple[_Settings, ...] = ()  # of the models whose forward is running
        self.kind: Callable[..., _Pending] | None = None  # None: _Pending, for a loss


_calls = _Calls()
_counting = threading.Lock()


class _Pending:
    """One forward call with labels: what the head needs for the loss, and the loss that it
    computed."""

    def __init__(self, settings: _Settings, labels: Tensor, kwargs: dict[str, Any]) -> None:
        self.settings = settings
        self.shift_labels = kwargs.get("shift_labels")
        self.labels: Tensor = labels if self.shift_labels is None else self.shift_labels
        self.items = kwargs.get("num_items_in_batch")
        self.ignore_index = kwargs.get("ignore_index", -100)
        self.model: Any = None
        self.key = _rows.NEW
        self.state: tuple[Any, ...] = ()  # what the call's result depends on
        self.loss: Tensor | None = None
        self.asked = False  # whether the model has asked for the loss
        self.looked = False  # whether the head's own forward has been checked
        self.sums: Tensor | None = None  # of the metrics
        self.predicts = False  # whether the Trainer wants the most likely tokens
        self.logits: Tensor | None = None  # what the Trainer gets in place of logits
        self.pairs: list[tuple[str, Tensor, Tensor]] = []  # (name, the model's, the head's)

    @renames({"target": "labels", "linear_weight": "lm_head.weight", "linear_bias": "lm_head.bias"})
    def compute(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """Computes the loss from the head's input and parameters."""
        if self.loss is not None:
            raise not_supported("the model calls its lm_head more than once in a forward")
        labels = self.labels.to(input.device)
        if labels.shape != input.shape[:-1]:
            raise invalid(
                f"labels has shape {tuple(labels.shape)}; allowed: {tuple(input.shape[:-1])}, one "
                "for every position the head is given (logits_to_keep does not go with labels)"
            )
        self.transform = self.settings.transform(self.model, weight.shape[0])
        scale, softcap, columns = self.transform
        options = {**self.settings.options, "ignore_index": self.ignore_index}
        options |= {"logit_scale": scale, "softcap": softcap}
        if (items := self.items) is not None:
            if isinstance(items, Tensor):
                # A replica of DataParallel gets a tensor [1, 1].
                items = items.to(input.device).reshape(() if items.numel() == 1 else items.shape)
            options["normalizer"] = items
        words, their_bias = weight, bias
        if columns < weight.shape[0]:
            words, their_bias = weight[:columns], None if bias is None else bias[:columns]
        self.loss = self.make(input, words, their_bias, labels, options)
        # The model may write to these before it asks for its loss.
        self.used = tuple(
            t.clone() if isinstance(t, Tensor) else t
            for t in (self.labels, self.shift_labels, self.items)
        )
        self.real = _rows.real_rows(input, weight, bias, _dtype_of_logits(input), self.key)

    def make(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor,
        options: dict[str, Any],
    ) -> Tensor:  # fmt: skip
        if self.predicts:  # not the statistic argmax, which ignored positions do not have
            made = ("softcap", "logit_scale", "memory")
            given = {name: options[name] for name in made if name in options}
            ids = linear_topk(input, weight, 1, linear_bias=bias, **given)[1][..., 0]
            self.logits = Predicted(ids, weight.shape[0], _dtype_of_logits(input))
        shifted, names = self.shift_labels is not None, self.settings.metrics
        options |= {"linear_bias": bias, "shift": not shifted}
        loss: Tensor
        if not names:
            loss = linear_cross_entropy(input, weight, labels, **options)
            return loss
        wanted = [_metrics.METRICS[name] for name in names]
        loss, statistics = measured(input, weight, labels, wanted, **options)
        target = _metrics.target_of(labels, shifted, self.ignore_index)
        self.sums = _metrics.sums_of(statistics, target, self.ignore_index, names)
        return loss

    def answer(self) -> Tensor:
        """What the head returns in place of logits. In autograd's graph it depends on the loss, and
        the loss that loss_function returns depends on it, so that the model's operations on logits
        are part of the backward pass."""
        assert self.loss is not None
        made = _rows.answer(self.real)
        if not self.loss.requires_grad:
            return made
        return _rows.answered(made, self.loss, self.real, self.transform, self.who)

    def loss_function(
        self,
        logits: Tensor,
        labels: Tensor | None,
        vocab_size: int | None = None,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Replaces ForCausalLMLoss during the call: returns the loss that the head computed, if the
        model's arguments are those of this loss."""
        if self.asked:
            raise not_supported("the model asks for its loss more than once in a forward")
        self.asked = True
        if self.loss is None:
            raise not_supported("the model asks for its loss before it calls its lm_head")
        used_labels, used_shift_labels, used_items = self.used
        for name, value, known in (
            ("labels", labels if shift_labels is None else shift_labels, used_labels),
            ("shift_labels", shift_labels, used_shift_labels),
            ("num_items_in_batch", num_items_in_batch, used_items),
            ("ignore_index", ignore_index, self.ignore_index),
        ):
            self._expect(name, value, known)
        self.made = logits
        if not self.loss.requires_grad:
            return self.loss.clone()  # the model may add to it in place
        if not logits.requires_grad:
            raise not_supported(
                f"{self.who} detaches its logits before it asks for its loss; allowed: a loss that "
                "has a gradient through them"
            )
        return _rows.asked(self.loss, logits)

    @property
    def who(self) -> str:
        return type(self.model).__name__

    def _expect(self, name: str, value: Any, known: Any) -> None:
        if value is known:
            return
        if isinstance(value, Tensor) and isinstance(known, Tensor):
            self.pairs.append((name, value, known))
        elif not bool(value == known):
            raise _rows.other(name)

    def checked(self, out: Tensor) -> Tensor:
        """The model's loss `out`, if its logits are those that our loss assumes; otherwise an error
        or NaN."""
        assert self.loss is not None
        return _rows.checked(
            out, self.loss, self.made, self.real, self.pairs, self.transform, self.who, self.key,
            self.settings.eval_logits is None,
        )  # fmt: skip


def _dtype_of_logits(input: Tensor) -> torch.dtype:
    kind = input.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype


def _check_head(part: Any, input: Tensor, pending: _Pending) -> None:
    """Raises unless the head's own forward computes the logits that the loss assumes."""
    if input.numel() == 0:
        return
    pending.looked = True
    if _heads.is_random(part):
        return
    with torch.no_grad():
        own = _alone(part, _rows.chosen(input))
    _rows.check_head(own, pending.real)


def _alone(part: Any, input: Tensor) -> Tensor:
    """The part's own forward, outside of the call that this thread is in."""
    before = _calls.pending
    _calls.pending = {}
    try:
        logits: Tensor = _own_forward(part)(input)
    finally:
        _calls.pending = before
    return logits


def _head_forward(self: Any, input: Tensor) -> Tensor:
    pending = _calls.pending.get(self)
    if pending is None:
        logits: Tensor = _own_forward(self)(input)
        return logits
    pending.compute(input, self.weight, self.bias)
    if pending.key == _rows.NEW and not torch.compiler.is_compiling():
        _check_head(self, input, pending)
    return pending.answer()


def _adapter_forward(self: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The forward of PEFT's adapter around the head. If the adapter is disabled or merged, the head
    inside it computes the loss."""
    pending = _calls.pending.get(self)
    if pending is None or _heads.is_off(self):
        logits: Tensor = _own_forward(self)(input, *args, **kwargs)
        return logits
    if args or kwargs:
        raise not_supported(
            "the adapter on the lm_head is called with more than its input (adapter_names, or what "
            "says which adapter a token has); allowed: the active adapters for all of them"
        )
    new = pending.key == _rows.NEW and not torch.compiler.is_compiling()
    before = _matrix.random_state(self) if new else {}
    pending.compute(*_matrix.joined(self, functools.partial(_alone, self), input, new))
    if new:
        with _matrix.drawing_again(before):
            _check_head(self, input, pending)
    return pending.answer()


class Scored(_Pending):
    """A forward call that computes statistics at chosen positions. Its loss is only needed for the
    check of the model's logits."""

    def __init__(
        self, length: int, rows: Tensor, positions: Tensor, target: Tensor, *call: Any
    ) -> None:
        super().__init__(*call)
        self.length = length  # T, of the caller's tokens
        self.rows, self.positions, self.target = rows, positions, target  # [M] each

    def make(
        self, input: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor,
        options: dict[str, Any],
    ) -> Tensor:  # fmt: skip
        virtual = input.shape[-2] - self.length  # positions of a learned prompt, which come first
        where = input.device  # of a model over several devices, the head's
        chosen = input[self.rows.to(where), self.positions.to(where) + virtual]  # [M, D]
        given = {
            name: options[name] for name in ("softcap", "logit_scale", "memory") if name in options
        }
        loss: Tensor
        loss, self.statistics = linear_cross_entropy(
            chosen, weight, self.target.to(where), linear_bias=bias,
            return_statistics=("logprob", "argmax"), **given,
        )  # fmt: skip
        return loss


def score(model: Any, input: Tensor, rows: Tensor, positions: Tensor, target: Tensor) -> Any:
    """(log-probability in f32, whether it is the most likely token), both [M], of target[m] after
    position positions[m] of input[rows[m]]. The patched `model` is called with input [B, T]."""
    made: list[Scored] = []

    def kind(*call: Any) -> Scored:
        made.append(Scored(input.shape[-1], rows, positions, target, *call))
        return made[-1]

    before, _calls.kind = _calls.kind, kind
    try:
        with torch.no_grad():
            model(input, labels=input)
    finally:
        _calls.kind = before
    if not made:
        raise not_supported(
            "the model is not patched, or gives logits in evaluations (eval_logits)"
        )
    of: Any = made[-1].statistics
    return of.logprob.to(target.device), of.argmax.to(target.device) == target


class _Loss(NamedTuple):
    """The loss_function that a model had before it was patched."""

    own: Any  # computes the loss of calls that the patch does not change
    in_dict: bool  # whether the model held it in its __dict__
    kind: Any  # the model's loss_type, by which transformers finds the function


def _own_loss(model: Any) -> _Loss:
    """The loss before the patch, read by the property of the base class that defines it first,
    because derived classes may override this property."""
    own = None
    for cls in reversed(type(model).__mro__):
        if isinstance(found := vars(cls).get("loss_function"), property):
            own = found.fget(model)  # type: ignore[misc]
            break
    return _Loss(own, _LOSS_FUNCTION in model.__dict__, getattr(model, "loss_type", None))


def _loss_function(self: Any, *args: Any, **kwargs: Any) -> Any:
    pending = _calls.pending.get(self)
    if pending is not None:
        return pending.loss_function(*args, **kwargs)
    _check_loss_type(self)
    return self.__dict__[_OWN_LOSS].own(*args, **kwargs)


def _check_loss_type(model: Any) -> None:
    known, kind = model.__dict__[_OWN_LOSS].kind, getattr(model, "loss_type", None)
    if kind != known:
        raise not_supported(
            f"the loss_type of {type(model).__name__} is {kind!r}; allowed: {known!r}, which it "
            "was when it was patched"
        )


def _check_loss_function(model: Any) -> None:
    name = getattr(getattr(model, "loss_function", None), "__name__", None)
    if name != "ForCausalLMLoss":
        raise not_supported(
            f"the loss_function of {type(model).__name__} is {name}; allowed: ForCausalLMLoss, "
            "that of a causal LM"
        )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator,unused-ignore]
def _names_in_forward(cls: Any) -> tuple[str, ...]:
    code = getattr(inspect.unwrap(cls.forward), "__code__", None)
    return () if code is None else code.co_names


def _check_no_loss_of_its_own(cls: Any) -> None:
    """Raises for a class whose forward calls a cross-entropy itself instead of loss_function. This
    can be seen from its code, before the first call."""
    names = _names_in_forward(cls)
    if "loss_function" not in names and {"CrossEntropyLoss", "cross_entropy"} & set(names):
        raise not_supported(
            f"{cls.__name__} makes its loss in its forward, by a cross-entropy of its own; "
            "allowed: a causal LM that makes it by its loss_function of its lm_head's logits"
        )


def _own_forward(module: Any) -> Any:
    own = module.__dict__.get(_OWN_FORWARD)
    return own if own is not None else functools.partial(type(module).forward, module)


def _model_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    settings: _Settings | None = self.__dict__.get(_PATCH)
    if settings is None:  # unpatched, but other libraries' wrappers still call this
        return _own_forward(self)(*args, **kwargs)
    names = settings.names[: len(args)]
    # Labels were passed by position; other arguments may be too.
    if "labels" in names and not set(names) & set(kwargs):
        kwargs |= dict(zip(names, args))
        args = args[len(names) :]
    labels, skips = kwargs.get("labels"), kwargs.pop("skip_logits", None)
    if labels is None:
        if skips:
            raise invalid("skip_logits is True, but labels is None; allowed: with labels")
        if self.training and torch.is_grad_enabled():
            settings.warn("it was called without labels and gives its logits")
        return _through_its_backbone(self, *args, **kwargs)
    if settings.derived_of and _is_left_alone(self, settings.derived_of):
        return _through_its_backbone(self, *args, **kwargs)
    if skips is None:
        skips = self.training or not settings.eval_logits
    if not skips and not settings.metrics:
        return _through_its_backbone(self, *args, **kwargs)
    as_tuple = kwargs.pop("return_dict", None) is False
    if skips:
        pending = (_calls.kind or _Pending)(settings, labels, kwargs)
        output = _forward_with(pending, self, *args, **kwargs, return_dict=True)
        loss = pending.checked(output.loss)
        output = dataclasses.replace(output, loss=loss, logits=pending.logits)
        settings.count(pending)
        sums = pending.sums
    else:
        output = _through_its_backbone(self, *args, **kwargs, return_dict=True)
        sums = _sums_of_logits(output.logits, settings.metrics, labels, kwargs)
    if sums is not None:
        settings.tally.add(sums)
        output = _metrics.added(output, _metrics.means_of(sums, settings.metrics))
    return output.to_tuple() if as_tuple else output


def _sums_of_logits(
    logits: Tensor, names: tuple[str, ...], labels: Tensor, kwargs: dict[str, Any]
) -> Tensor:
    shifted, ignored = kwargs.get("shift_labels"), kwargs.get("ignore_index", -100)
    target = labels if shifted is None else shifted
    target = _metrics.target_of(target, shifted is not None, ignored)
    return _metrics.of_logits(logits, target, ignored, names)


def _train(self: Any, mode: bool = True) -> Any:
    """nn.Module's train, which also tells the Trainer about the metrics. A Trainer calls it before
    its steps and its evaluations."""
    type(self).train(self, mode)
    settings: _Settings | None = self.__dict__.get(_PATCH)
    if settings is not None:
        _callers.tell(self, settings.tally)
    return self


def _through_its_backbone(model: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls the model's own forward, which may call the backbone without a warning."""
    before = _calls.inside
    _calls.inside = (*before, model.__dict__[_PATCH])
    try:
        return _own_forward(model)(*args, **kwargs)
    finally:
        _calls.inside = before


def _backbone_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The backbone's forward, which warns if it is called in training by anything but the model:
    TRL's trainers call the backbone instead of the model, and do not pass the labels."""
    settings: _Settings | None = self.__dict__.get(_PATCH)
    trained = self.training and torch.is_grad_enabled()
    if trained and settings is not None and settings not in _calls.inside:
        settings.warn("its backbone was called by itself")
    return _own_forward(self)(*args, **kwargs)


def _forward_with(pending: _Pending, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls the model's own forward, in which head and loss_function use `pending` in this
    thread."""
    _check_loss_function(model)
    if not isinstance(model.__dict__.get(_LOSS_FUNCTION), _BoundLoss):
        _install_loss(model)  # somebody has replaced the model's function since the patch
    _check_loss_type(model)
    parts = _heads.parts(model.get_output_embeddings())
    for part in parts:
        if _PATCH not in part.__dict__:  # a part that was added later, such as an adapter
            _install_part(part, pending.settings)
    pending.settings.prepare(pending, model, parts)
    before = _calls.pending
    _calls.pending = {**before, **dict.fromkeys((model, *parts), pending)}
    foreign = (
        f"{type(model).__name__} does not make its loss by its loss_function of its lm_head's "
        "logits; allowed: a causal LM that does"
    )
    try:
        output = _through_its_backbone(model, *args, **kwargs)
    except (IndexError, RuntimeError, ValueError) as error:
        ours = isinstance(error, (LogitlessError, torch.cuda.OutOfMemoryError))
        if pending.loss is None or pending.asked or ours:
            raise
        # The model calls a cross-entropy itself, and the answer's shape does not match.
        raise not_supported(foreign) from error
    finally:
        _calls.pending = before
    if not pending.asked:
        raise not_supported(foreign)
    return output


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator,unused-ignore]
def _say_of_no_use(what: str) -> bool:
    """Warns that the patch has no effect, and returns whether it warned. Compiled code warns when
    it is compiled, not when it runs."""
    if trl.is_patched():
        return False
    warnings.warn(
        f"a model patched by logitless computes no loss in training, because {what}: where a "
        "trainer computes the loss itself, the patch has no effect (for TRL's trainers use "
        "patch_trl(); with label_smoothing_factor use patch_transformers(model, "
        "label_smoothing=...))",
        stacklevel=3,
    )
    return True


_left_alone: weakref.WeakSet[type] = weakref.WeakSet()  # classes warned about


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator,unused-ignore]
def _say_of_a_derived_class(cls: type, patched: str, why: str) -> None:
    if cls not in _left_alone:
        _left_alone.add(cls)
        warnings.warn(
            f"{cls.__module__}.{cls.__qualname__} is derived from {patched}, which logitless has "
            f"patched, but is left unpatched: {why}",
            stacklevel=3,
        )


def _is_left_alone(model: Any, patched: str) -> bool:
    """Whether a model, of a class that is derived from the patched class, cannot be patched. It
    then works as without the patch, with a warning instead of an error, because the user did not
    name its class. This can be known only after the __init__ of its class."""
    try:
        _check_model(model)
    except LogitlessError as error:
        _say_of_a_derived_class(type(model), patched, str(error))
        return True
    return False


def _number(owner: Any, names: tuple[str, ...]) -> float | None:
    for name in names:
        value = getattr(owner, name, None)
        if isinstance(value, (int, float)) and value:
            return value
    return None


def _state_of(module: Any) -> tuple[Any, ...]:
    """What determines the result of a module's call, besides its parameters."""
    found = vars(module)
    hooks = [tuple(found[name]) for name in ("_forward_pre_hooks", "_forward_hooks")]
    # The functions without the module they are bound to, which would stay alive and differs between
    # replicas.
    bound = map(found.get, _FORWARDS)
    held = (f.func if isinstance(f, _Bound) else getattr(f, "__func__", f) for f in bound)
    return type(module).forward, *held, *hooks


class _Settings:
    """The options of a patched model, and how it makes logits from its head's products. Plain data,
    which is copied with the model."""

    def __init__(self, model: Any, options: dict[str, Any], derived_of: str = "") -> None:
        self.given = options
        self.told = {name: options[name] for name in _TRANSFORM if name in options}
        self.options = {name: options[name] for name in _OPTIONS if name in options}
        self.options.setdefault("empty_mean", "nan")
        self.eval_logits: bool | None = options.get("eval_logits")
        self.metrics: tuple[str, ...] = options.get("metrics", ())
        self.tally = _metrics.Tally(self.metrics)
        self.derived_of = derived_of  # the patched class, if it is a base of the model's class
        self.config = model.config.get_text_config() if hasattr(model, "config") else None
        self.seen: set[tuple[Any, ...]] = set()  # states in which a call passed the check
        self.warned = False
        self.calls = 0
        parameters = inspect.signature(model.forward).parameters.values()
        self.names = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)

    def __getstate__(self) -> dict[str, Any]:
        """A copy starts without checked states."""
        return {**self.__dict__, "seen": set()}

    def transform(self, model: Any, rows: int) -> _rows.Transform:
        """The Transform that the model and its configuration have now, for a head with `rows`
        rows."""
        config, told = self.config, self.told
        scale = _number(model, ("logit_scale",)) or _number(config, _SCALES)
        if scale is None and (scaling := _number(config, ("logits_scaling",))):
            scale = scaling ** _POWERS.get(getattr(config, "model_type", ""), -1.0)
        columns = told.get("vocab_size") or _number(config, ("unpadded_vocab_size",)) or rows
        return _rows.Transform(
            told.get("logit_scale", 1.0 if scale is None else scale),
            told.get("softcap", _number(config, _SOFTCAPS)) or 0.0,
            min(int(columns), rows),
        )

    def prepare(self, pending: _Pending, model: Any, parts: tuple[Any, ...]) -> None:
        """Prepares a call; runs before the model's own forward."""
        pending.model = model
        if torch.compiler.is_compiling():
            pending.key = _rows.new_program()
            return
        pending.state = self._state(model, parts)
        pending.key = _rows.SETTLED if pending.state in self.seen else _rows.NEW
        if pending.key == _rows.NEW:
            _callers.check_peft()
        if not (self.eval_logits or model.training):  # in each call: the Trainer may change
            pending.predicts = _callers.check(raises=self.eval_logits is None)

    def _state(self, model: Any, parts: tuple[Any, ...]) -> tuple[Any, ...]:
        """The state of a model's call: if one call in a state passed the check, others in it need
        none."""
        everywhere = torch.nn.modules.module
        hooks = everywhere._global_forward_pre_hooks, everywhere._global_forward_hooks
        heads = [
            (
                *_state_of(part),
                *_heads.state_of(part),
                weight.shape,
                weight.dtype,
                getattr(part, "bias", None) is None,
            )
            for part in parts
            if isinstance(weight := getattr(part, "weight", None), Tensor)
        ]
        modes = model.training, torch.is_grad_enabled(), *map(torch.is_autocast_enabled, _KINDS)
        transform = self.transform(model, 1 << 62)
        return *map(tuple, hooks), *modes, *transform, *_state_of(model), *heads

    def count(self, pending: _Pending) -> None:
        """Counts a loss and notes a checked state; not in compiled code, because a changing number
        would make torch recompile."""
        if not torch.compiler.is_compiling():
            with _counting:
                self.calls += 1
            if pending.key == _rows.NEW and pending.looked:
                if len(self.seen) >= _STATES:
                    self.seen.clear()
                self.seen.add(pending.state)

    def warn(self, what: str) -> None:
        """Warns once: with a trainer that does not pass the labels to the model, the patch has no
        effect."""
        if torch.compiler.is_compiling():
            _say_of_no_use(what)
        elif not self.warned:
            self.warned = _say_of_no_use(what)


class _Bound:
    """A function that is bound to one module, like a method. Unlike a method it is copied, pickled
    and replicated with the module, and it has the signature of the module's own forward, which
    trainers read."""

    def __init__(self, module: Any, function: Callable[..., Any]) -> None:
        self.module = module
        self.func = function  # the name that functools.partial uses

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.func(self.module, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(_own_forward(self.module))

    @property
    def __func__(self) -> Callable[..., Any]:
        """The unbound function, as a method has it. accelerate wraps it and binds the result to the
        module, so that in a copy of the module it calls the copy."""
        function, own = self.func, self.__signature__

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return function(self, *args, **kwargs)

        module = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        forward.__signature__ = own.replace(  # type: ignore[attr-defined]
            parameters=(module, *own.parameters.values())
        )
        return forward


class _BoundLoss(_Bound):
    """A loss_function. It has the name of the function that it replaces, which transformers looks
    up."""

    __name__ = "ForCausalLMLoss"

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.module.__dict__[_OWN_LOSS].own)


class _BoundTrain(_Bound):
    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(functools.partial(type(self.module).train, self.module))


def _replicate(self: Any) -> Any:
    """Makes a replica for DataParallel. Replicas are shallow copies, so the functions are bound to
    the replica here."""
    replica = type(self)._replicate_for_data_parallel(self)
    for name, value in self.__dict__.items():
        if isinstance(value, _Bound):
            replica.__dict__[name] = type(value)(replica, value.func)
    return replica


def _install(
    module: Any, function: Callable[..., Any], settings: _Settings, slot: str = "forward"
) -> None:
    """Replaces the forward of a module: a patched model, backbone, head or adapter."""
    # If this attribute exists, so does the patched forward, perhaps inside other libraries'
    # wrappers.
    if _OWN_FORWARD not in module.__dict__:
        # Another thread may do the same; only the first one has seen the module's own forward.
        module.__dict__.setdefault(_OWN_FORWARD, module.__dict__.get(slot))
        module.__dict__[slot] = _Bound(module, function)
        module.__dict__[_REPLICATE] = _Bound(module, _replicate)
    module.__dict__[_PATCH] = settings


def _install_part(part: Any, settings: _Settings) -> None:
    """Replaces the forward of a part of the head, inside accelerate's hooks."""
    slot = "forward" if _OWN_FORWARD in part.__dict__ else _heads.slot(part)
    _install(part, _adapter_forward if _heads.is_adapter(part) else _head_forward, settings, slot)


def _install_loss(model: Any) -> None:
    loss = _own_loss(model)
    if not isinstance(loss.own, _BoundLoss):  # otherwise another thread has done it
        model.__dict__[_OWN_LOSS] = loss
        model.__dict__[_LOSS_FUNCTION] = _BoundLoss(model, _loss_function)


def _restore_loss(module: Any) -> None:
    known: _Loss | None = module.__dict__.pop(_OWN_LOSS, None)
    if known is None or not isinstance(module.__dict__.get(_LOSS_FUNCTION), _BoundLoss):
        return  # the user has replaced the function since the patch
    if known.in_dict:
        module.__dict__[_LOSS_FUNCTION] = known.own
    else:
        del module.__dict__[_LOSS_FUNCTION]


def _restore(model: Any) -> None:
    for module in model.modules():  # adapters may have moved the head anywhere
        if module.__dict__.pop(_PATCH, None) is None:
            continue
        if isinstance(module.__dict__.get("train"), _BoundTrain):
            del module.__dict__["train"]
        _restore_loss(module)
        held = [name for name in _FORWARDS if isinstance(module.__dict__.get(name), _Bound)]
        if not held:
            continue  # inside accelerate's autocast wrapper: the forward stays, and passes calls on
        del module.__dict__[_REPLICATE]
        own = module.__dict__.pop(_OWN_FORWARD)
        if own is not None:
            module.__dict__[held[0]] = own
        elif held[0] == "forward":
            del module.__dict__["forward"]
        else:  # accelerate's hooks were added after the patch
            module.__dict__[held[0]] = types.MethodType(type(module).forward, module)


def _base_of(model: Any) -> Any:
    """The model inside PEFT's, torch.compile's or data parallelism's wrappers, or the model
    itself."""
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        return _base_of(model.get_base_model())
    if isinstance(compiled := getattr(model, "_orig_mod", None), torch.nn.Module):
        return _base_of(compiled)
    if isinstance(model, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
        return _base_of(model.module)
    return model


def _check_around(model: Any, base: Any) -> None:
    """Raises where a module around the model calls a forward that it took earlier, as PEFT's
    adaption prompt does."""
    if model is base or not isinstance(model, torch.nn.Module):
        return
    for module in model.modules():
        if module is not base and getattr(vars(module).get("forward"), "__self__", None) is base:
            raise not_supported(
                f"a {type(module).__name__} around the {type(base).__name__} has taken its forward "
                "before the patch, and would not call the patched one; allowed: the patch first, "
                "and then what is around it"
            )


class Patch:
    """A patched model, or a patched class of models. The patch lasts until `unpatch()` or the end
    of a `with` block, except the block of a second patch, which changes nothing. `calls` counts the
    losses that the patch has computed, except in compiled code."""

    def __init__(self, model: Any, **given: Any) -> None:
        self.model = model
        self.given = given  # options for a class's models
        settings = None if isinstance(model, type) else _base_of(model).__dict__.get(_PATCH)
        self._settings: list[_Settings] = [] if settings is None else [settings]
        self._made: weakref.WeakSet[Any] = weakref.WeakSet()  # the models of a patched class
        self._ends = True  # whether the end of a `with` block unpatches

    def _again(self) -> Patch:
        """A second patch of what this one has patched."""
        other = copy.copy(self)
        other._ends = False
        return other

    def __repr__(self) -> str:
        model = self.model
        given = next(iter(self._settings)).given if self._settings else self.given
        what = [model.__name__ if isinstance(model, type) else type(_base_of(model)).__name__]
        what += [f"{name}={value!r}" for name, value in given.items()]
        return f"<Patch of {', '.join([*what, f'calls={self.calls}'])}>"

    @property
    def calls(self) -> int:
        return sum(settings.calls for settings in self._settings)

    def __enter__(self) -> Any:
        return self.model

    def __exit__(self, *_: Any) -> None:
        if self._ends:
            self.unpatch()

    def unpatch(self) -> None:
        """Restores the model, or the class and its models. A second call has no effect."""
        if not isinstance(self.model, type):
            _restore(self.model)
            return
        cls: Any = self.model
        known = cls.__dict__.get(_PATCH)
        if known is None or known._made is not self._made:
            return
        own = cls.__dict__[_OWN_INIT]
        delattr(cls, _PATCH)
        delattr(cls, _OWN_INIT)
        if own is None:
            del cls.__init__
        else:
            cls.__init__ = own
        for model in self._made:
            _restore(model)


def _head_of(model: Any) -> Any:
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None:
        raise invalid(f"{type(model).__name__} has no output embeddings; allowed: a causal LM")
    return head


def _check_model(model: Any) -> tuple[Any, ...]:
    """The modules that may compute the model's logits. Raises if the model cannot be patched."""
    head = _head_of(model)
    parts = _heads.parts(head)
    for part in parts:
        _heads.check_weight(part)
    trl.check_forward(model)
    _check_loss_function(model)
    if "loss_function" not in _names_in_forward(type(model)):
        for module in model.modules():  # XLM computes its loss in the module around its head
            if module is not model and head in module.children():
                _check_no_loss_of_its_own(type(module))
    return parts


def _patch_model(model: Any, options: dict[str, Any]) -> _Settings:
    if (known := model.__dict__.get(_PATCH)) is not None:
        _check_alike(known.given, options, "model", "Patch(model).unpatch() takes the first away")
        return known  # type: ignore[no-any-return]
    parts = _check_model(model)
    _check_no_loss_of_its_own(type(model))
    for part in parts:
        _matrix.check_linear(part)
    settings = _Settings(model, options)
    _install_loss(model)
    _install_model(model, settings)
    for part in parts:
        _install_part(part, settings)
    return settings


def _check_alike(known: dict[str, Any], given: dict[str, Any], what: str, way: str) -> None:
    """Raises unless a second patch has the same options as the first. A notebook's cell that runs
    twice is allowed."""
    alike = known.keys() == given.keys() and all(
        value is known[name] or (not isinstance(value, Tensor) and bool(value == known[name]))
        for name, value in given.items()
    )
    if not alike:
        raise invalid(
            f"{what} is patched already, with other options ({known}); allowed: the same, or "
            f"others after unpatch() ({way})"
        )


def _install_model(model: Any, settings: _Settings) -> None:
    _install(model, _model_forward, settings)
    if settings.metrics:
        model.__dict__["train"] = _BoundTrain(model, _train)
    if (backbone := getattr(model, "base_model", model)) is not model:
        _install(backbone, _backbone_forward, settings)


def _patch_derived(model: Any, cls: type, options: dict[str, Any]) -> _Settings | None:
    """Patches a model of a class that is derived from the patched class `cls`. Its __init__ may
    still be running, so its head and loss_function are patched only in its first forward. None: the
    model is not patched."""
    try:
        _check_no_loss_of_its_own(type(model))
    except LogitlessError as error:
        _say_of_a_derived_class(type(model), cls.__name__, str(error))
        return None
    settings = _Settings(model, options, cls.__name__)
    _install_model(model, settings)
    return settings


def _class_patch(cls: type) -> Patch | None:
    """The patch of the class, or of its nearest patched base class."""
    found = (vars(c)[_PATCH] for c in cls.__mro__ if _PATCH in vars(c))
    return next(found, None)


def _patch_class(cls: type, options: dict[str, Any]) -> Patch:
    """Patches the class, so that every new model of it is patched at the end of __init__."""
    if not (hasattr(cls, "can_generate") and hasattr(cls, "forward") and cls.can_generate()):
        raise invalid(
            f"{cls.__name__} is no class of models that generate; allowed: that of a "
            "causal LM, as LlamaForCausalLM (AutoModelForCausalLM makes models of many)"
        )
    _check_no_loss_of_its_own(cls)
    if (known := cls.__dict__.get(_PATCH)) is not None:
        way = "the result of the first has it"
        _check_alike(known.given, options, cls.__name__, way)
        return known._again()  # type: ignore[no-any-return]
    patch, own = Patch(cls, **options), cls.__init__  # type: ignore[misc]

    @functools.wraps(own)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        own(self, *args, **kwargs)
        if _class_patch(type(self)) is not patch or _PATCH in self.__dict__:
            return  # a class in between is patched too: one patch is enough
        if type(self) is cls:
            settings: _Settings | None = _patch_model(self, options)
        else:
            settings = _patch_derived(self, cls, options)
        if settings is not None:
            patch._settings.append(settings)
            patch._made.add(self)

    setattr(cls, _OWN_INIT, cls.__dict__.get("__init__"))
    setattr(cls, _PATCH, patch)
    cls.__init__ = init  # type: ignore[misc]
    return patch


def _check_options(options: dict[str, Any], rows: int | None) -> None:
    """Plans a small call, so that bad options are an error before training starts."""
    known = (*_OPTIONS, *_TRANSFORM)
    if unknown := sorted(set(options) - set(known)):
        raise invalid(f"{unknown[0]} is no option; allowed: {', '.join(known)}")
    if (reduction := options.get("reduction", "mean")) not in ("mean", "sum"):
        raise invalid(f"reduction is {reduction!r}; allowed: 'mean', 'sum' (one loss)")
    words = options.get("vocab_size", 1)
    if not isinstance(words, int) or words < 1 or (rows is not None and words > rows):
        most = "the rows of the lm_head" if rows is None else f"{rows}, the rows of the lm_head"
        raise invalid(f"vocab_size is {words!r}; allowed: 1 to {most}")
    weight = options.get("weight")
    columns = len(weight) if isinstance(weight, Tensor) else 1
    tried = {
        name: value
        for name, value in options.items()
        if name != "vocab_size" and not isinstance(value, Tensor)
    }
    if isinstance(weight, Tensor) and not weight.is_meta:
        tried["weight"] = weight.cpu()
    zeros = [torch.zeros(shape, device="cpu") for shape in ((1, 1), (columns, 1), (1,))]
    workspace_size(zeros[0], zeros[1], zeros[2].long(), **tried)


def patch_transformers(
    model: Any, *, eval_logits: bool | None = None, metrics: Sequence[str] = (), **options: Any
) -> Patch:  # fmt: skip
    """Makes `model` (a causal LM of transformers, such as LlamaForCausalLM) compute its loss
    without logits.

    `model` may also be a PEFT model around a causal LM, or a class such as LlamaForCausalLM; then
    every model of this class that is made from now on is patched. If the model is called with
    labels, output.loss is the loss and output.logits is None (for a Trainer's
    preprocess_logits_for_metrics, an object that has argmax(-1)); without labels, results do not
    change. A call with labels and `skip_logits=False` returns logits [B, T, V] and the model's
    own loss.

    - `metrics`: some of "accuracy", "entropy", "logprob" and "rank". output.metrics is then a dict
      of these, [] f32 on the model's device. Each is a mean over the call's labels that are not
      ignored, and NaN if all are ignored; "tokens" is the number of these labels. A Trainer logs
      means over all labels since its last log, and in an evaluation over all labels of the dataset.
    - `eval_logits`: with True the model computes its logits in eval mode, for metrics that need
      them. By default it is an error if a Trainer's metrics seem to need logits; False says that
      they do not.
    - `logit_scale`, `softcap`, `vocab_size`: the scale and softcap of the logits, and the number of
      the head's rows that are tokens (further rows are padding). By default they are read from the
      model's configuration. A model that changes its logits in another way is an error.
    - `options` are passed to `linear_cross_entropy`: label_smoothing, z_loss, memory, ...

    Returns a `Patch`, whose `calls` counts the losses that the patch has computed.
    """
    given = options if eval_logits is None else {**options, "eval_logits": eval_logits}
    if names := _metrics.names_of(metrics):
        given = {**given, "metrics": names}
    if isinstance(model, type):
        _check_options(options, None)
        return _patch_class(model, given)
    base = _base_of(model)
    _check_around(model, base)
    weight = getattr(_head_of(base), "weight", None)
    _check_options(options, len(weight) if isinstance(weight, Tensor) else None)
    again = _PATCH in base.__dict__
    _patch_model(base, given)
    patch = Patch(model)
    return patch._again() if again else patch
