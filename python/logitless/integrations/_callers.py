# SPDX-License-Identifier: Apache-2.0
"""Finds the transformers Trainer that calls a patched model: raises early if it will ask for
logits, and lets it log metrics."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from logitless._errors import not_supported

_TRAINER, _STEPS = "transformers.trainer", ("training_step", "prediction_step")
_MODES = ("training_step", "evaluation_loop")  # where a Trainer calls train() and eval()
# Packages and modules whose frames may be between the Trainer's call and the model's train().
_WRAPPERS = ("torch", "accelerate", "deepspeed", "peft", "logitless", "transformers.modeling_utils")


def _frames() -> Iterator[FrameType]:
    """The frames of this thread, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _trainer_frame(names: tuple[str, ...] = _STEPS) -> FrameType | None:
    """The innermost frame of this thread that is in one of these methods of transformers' Trainer,
    if any."""
    found = (f for f in _frames() if f.f_code.co_name in names and _module_of(f) == _TRAINER)
    return next(found, None)


def _wants_logits(frame: FrameType) -> bool:
    """Whether the call is an evaluation that needs logits, or training before such an
    evaluation."""
    if frame.f_code.co_name == "prediction_step":
        return not frame.f_locals.get("prediction_loss_only", True)
    trainer: Any = frame.f_locals.get("self")
    arguments = getattr(trainer, "args", None)
    if getattr(trainer, "compute_metrics", None) is None or arguments is None:
        return False
    generates = getattr(arguments, "predict_with_generate", False)
    when = getattr(arguments, "eval_strategy", "no")
    never = getattr(when, "value", when) == "no"  # if evaluate() is called, prediction_step raises
    return not (arguments.prediction_loss_only or generates or never)


def check(raises: bool = True, compiled: bool = False) -> bool:
    """Raises if a Trainer up the stack will use logits, which are not made. Returns whether this
    call's logits go to the Trainer's preprocess_logits_for_metrics, for which their argmax may be
    enough; in `compiled` code, which does not compute the argmax, this case raises too. With
    `raises` False it never raises."""
    frame = _trainer_frame()
    if frame is None or not _wants_logits(frame):
        return False
    served = getattr(frame.f_locals.get("self"), "preprocess_logits_for_metrics", None) is not None
    predicts = frame.f_code.co_name == "prediction_step"
    if served and not (predicts and compiled):
        return predicts
    if raises:
        raise not_supported(
            "the Trainer makes predictions or compute_metrics of the logits of evaluations, of "
            "which a patched model makes none; pass eval_logits=True to patch_transformers, which "
            "leaves evaluations alone (eval_logits=False: the metrics need no logits), or give the "
            "Trainer preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1)"
        )
    return False


def check_peft() -> None:
    """Raises if PEFT's CPT calls the model: it computes a loss of its own from the logits."""
    if any(f.f_code.co_name == "_cpt_forward" and "peft" in _module_of(f) for f in _frames()):
        raise not_supported(
            "PEFT's CPT makes its own loss of the logits, of which a patched model makes none; "
            "allowed: skip_logits=False in the call, or a model that is not patched"
        )


def logs_steps() -> bool:
    """Whether the Trainer is logging its steps, which it does in every process."""
    return _trainer_frame(("_maybe_log_save_evaluate",)) is not None


def _is_wrapper(module: str) -> bool:
    return module in _WRAPPERS or module.partition(".")[0] in _WRAPPERS


def tell(model: Any, tally: Any) -> None:
    """If a Trainer begins a step or an evaluation, lets it log what is added to the tally from now
    on. This is so if the Trainer itself has called the model's train() or eval(); calls by other
    functions (a compute_loss that samples, compute_metrics) do not count."""
    frame = next((f for f in _frames() if not _is_wrapper(_module_of(f))), None)
    if frame is None or frame.f_code.co_name not in _MODES:
        return
    if _module_of(frame) == _TRAINER and (trainer := frame.f_locals.get("self")):
        from logitless.integrations import _trainer  # imports transformers

        _trainer.watch(trainer, model, tally, frame.f_code.co_name == "evaluation_loop")
