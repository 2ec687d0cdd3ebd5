# SPDX-License-Identifier: Apache-2.0
"""Who calls a patched model: raises early for a Trainer that will ask for logits."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from logitless._errors import not_supported

_TRAINER, _STEPS = "transformers.trainer", ("training_step", "prediction_step")


def _trainer_frame() -> FrameType | None:
    """The frame of the step of transformers' Trainer in which this thread is, if any."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in _STEPS and frame.f_globals.get("__name__") == _TRAINER:
            return frame
        frame = frame.f_back
    return None


def _wants_logits(frame: FrameType) -> bool:
    """Whether the call is an evaluation that needs logits, or training before one."""
    if frame.f_code.co_name == "prediction_step":
        return not frame.f_locals.get("prediction_loss_only", True)
    trainer: Any = frame.f_locals.get("self")
    arguments = getattr(trainer, "args", None)
    if getattr(trainer, "compute_metrics", None) is None or arguments is None:
        return False
    generates = getattr(arguments, "predict_with_generate", False)
    when = getattr(arguments, "eval_strategy", "no")
    never = getattr(when, "value", when) == "no"  # a later evaluate() raises itself
    return not (arguments.prediction_loss_only or generates or never)


def check() -> None:
    """Raises if a Trainer up the stack will use logits that are not made."""
    frame = _trainer_frame()
    if frame is not None and _wants_logits(frame):
        raise not_supported(
            "the Trainer makes predictions or compute_metrics of the logits of evaluations, of "
            "which a patched model makes none; pass eval_logits=True to patch_transformers, which "
            "leaves evaluations alone (eval_logits=False: the metrics need no logits)"
        )
