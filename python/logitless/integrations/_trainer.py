# SPDX-License-Identifier: Apache-2.0
"""Makes transformers' Trainer log the metrics of a patched model.

The Trainer is found when it calls the model's train() or eval(), before the model's forward. It
then gets a callback, and a prediction_step that does not mistake the metrics for logits.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from logitless.integrations import _callers

_RUNTIME = "_runtime"  # the end of a name in the logs of every evaluation
_OF_TRAINING = "total_flos"  # in the last log of a training, which has a runtime too
# The outputs that transformers ignores if a configuration does not name others.
_IGNORED = ("cache",)


class Watcher(TrainerCallback):  # type: ignore[misc,unused-ignore]
    """Adds up the sums of a model's calls, and adds their means to what the Trainer logs. It is the
    first of the Trainer's callbacks, so that callbacks that report logs see the means."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.training = False
        self.tally: Any = None
        self.trained: Tensor | None = None  # [1 + K] sums since the last log, of this process
        self.evaluated: Tensor | None = None  # of all processes
        self.means: dict[str, float] = {}  # of the evaluation that was logged last

    def follow(self, tally: Any, evaluates: bool) -> None:
        """Watches the calls of the Trainer's model, which may have changed."""
        if tally is not self.tally:
            self.tally, self.trained = tally, None
        tally.watched = True
        tally.take()  # drops the sums of calls that were not the Trainer's
        if evaluates:
            self.evaluated, self.means = None, {}

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.training = True
        self.trained, self.evaluated, self.means = None, None, {}

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.training = False
        self._rest()

    def _rest(self) -> None:
        """Stops watching the model's calls, except during training."""
        if not self.training and self.tally is not None:
            self.tally.watched = False
            self.tally.take()

    def on_substep_end(self, *_: Any, **__: Any) -> None:
        for sums in self.tally.take():
            total = sums.sum(0)  # on its replica's device under DataParallel
            self.trained = (
                total if self.trained is None else self.trained + total.to(self.trained.device)
            )

    on_step_end = on_substep_end

    def on_prediction_step(self, *_: Any, **__: Any) -> None:
        """Gathers rows as the Trainer gathers losses. Rows that the sampler repeated in the last
        batch, to give every process the same number, are dropped."""
        made = self.tally.take()
        if not made:
            return
        rows = torch.cat([sums.to(made[0].device) for sums in made])  # of all replicas
        total = self.trainer.accelerator.gather_for_metrics(rows).sum(0)
        self.evaluated = total if self.evaluated is None else self.evaluated + total

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        found: dict[str, float] = {}
        prefix = _prefix_of(logs)
        if prefix is not None and self.evaluated is not None:
            self._end_evaluation(prefix)
            found = self.means
        elif "loss" in logs and self.tally is not None and _callers.logs_steps():
            found = self._of_all_processes()
        _add(logs, found)
        _add(state.log_history[-1], found)

    def _of_all_processes(self) -> dict[str, float]:
        """The means since the last log. Every process calls this, even one without sums."""
        sums, self.trained = self.trained, None
        if sums is None:
            sums = torch.zeros(
                1 + len(self.tally.names), dtype=torch.float64, device=self.trainer.args.device
            )
        return self._means(self.trainer.accelerator.gather(sums[None]).sum(0))

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any
    ) -> None:
        """For a Trainer whose log() copies its argument, so that on_log's additions are lost."""
        _add(metrics, self.means)
        self.means = {}
        self._rest()

    def on_predict(self, args: Any, state: Any, control: Any, metrics: Any, **_: Any) -> None:
        """A prediction is not logged, so on_log is not called."""
        prefix = _prefix_of(metrics)
        if prefix is not None and self.evaluated is not None:
            self._end_evaluation(prefix)
            self.on_evaluate(args, state, control, metrics)

    def _end_evaluation(self, prefix: str) -> None:
        assert self.evaluated is not None
        made = self._means(self.evaluated)
        self.evaluated, self.means = None, {f"{prefix}_{k}": v for k, v in made.items()}

    def _means(self, sums: Tensor) -> dict[str, float]:
        """The means by name; empty if no token counts."""
        count, *totals = sums.tolist()
        return {name: total / count for name, total in zip(self.tally.names, totals) if count}


def _add(logs: Any, means: dict[str, float]) -> None:
    """Adds the means to the logs. Names that the Trainer or its compute_metrics has set are not
    overwritten."""
    logs.update({name: mean for name, mean in means.items() if name not in logs})


def _prefix_of(logs: Any) -> str | None:
    """The prefix of an evaluation's names, such as "eval"; None if these are not the logs of an
    evaluation."""
    if _OF_TRAINING in logs:
        return None
    found = (name for name in logs if name.endswith(_RUNTIME))
    return next((name[: -len(_RUNTIME)] for name in found), None)


def watch(trainer: Any, model: Any, tally: Any, evaluates: bool) -> None:
    """Lets the Trainer log what the model's calls add to `tally`, if the model is the one that the
    Trainer trains, or a part of it."""
    callbacks = trainer.callback_handler.callbacks
    watcher = next((c for c in callbacks if isinstance(c, Watcher)), None)
    known = watcher is not None and watcher.tally is tally
    if not known and not any(module is model for module in trainer.model.modules()):
        return
    if watcher is None:
        watcher = Watcher(trainer)
        callbacks.insert(0, watcher)
        trainer.prediction_step = functools.partial(
            _prediction_step, trainer, trainer.prediction_step
        )
    watcher.follow(tally, evaluates)


def _prediction_step(
    trainer: Any, own: Any, model: Any, inputs: Any, prediction_loss_only: Any,
    ignore_keys: Any = None, **options: Any,
) -> Any:  # fmt: skip
    if ignore_keys is None:
        config = getattr(trainer.model, "config", None)
        ignore_keys = getattr(config, "keys_to_ignore_at_inference", _IGNORED)
    ignore_keys = [*ignore_keys, "metrics"]
    return own(model, inputs, prediction_loss_only, ignore_keys=ignore_keys, **options)
