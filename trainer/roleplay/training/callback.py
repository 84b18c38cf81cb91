"""What happens between two updates: the log, the console, evaluations, checkpoints, leaving."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

from trainer.roleplay.config import RoleplayConfig
from trainer.roleplay.rewards import REWARDS
from trainer.roleplay.training.echo import EchoWatch
from trainer.roleplay.training.grpo import RoleplayTrainer
from trainer.runs.console import Console
from trainer.runs.figures import Figures
from trainer.runs.leaving import Leaving
from trainer.runs.runlog import RunLog
from trainer.runs.trackers import track

#: TRL's name of a figure -> ours, where it is not the same with `_` for `/`.
_NAMES = {
    "reward": "reward_mean",
    "completions/mean_length": "completion_length_mean",
    "completions/clipped_ratio": "clipped_ratio",
    **{figure.key: figure.key for reward in REWARDS for figure in reward.components},
}


class RunCallback(TrainerCallback):
    """Beside a `RoleplayTrainer`, in the house's form of a run."""

    def __init__(
        self,
        cfg: RoleplayConfig,
        runlog: RunLog,
        leaving: Leaving,
        console: Console,
        span: int,
        begin: Callable[[], None],
        echo: EchoWatch,
    ) -> None:
        """span: updates that one sampling serves. begin: what is to be done first. echo: warns if
        the policy learns to repeat the user."""
        self.cfg, self.log, self.leaving, self.console = cfg, runlog, leaving, console
        self.span, self.begin, self.echo = span, begin, echo
        self.accelerator: Any = None  # which has the trackers, and is made behind the trainer's
        self.trainer: RoleplayTrainer | None = None  # which is made with its callbacks
        self.last = 0  # update

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Weights and states are in place."""
        self.begin()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """An update begins: from now on there is something to save."""
        self.leaving.patient = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """An update is done: what comes of it."""
        assert self.trainer is not None
        self.trainer.note_end()
        update, last = state.global_step, state.global_step >= state.max_steps
        leaves = self.leaving.asked != 0 and update % self.span == 0
        every = self.cfg.eval.eval_every_n_updates
        control.should_evaluate = not leaves and (last or (every > 0 and update % every == 0))
        save = self.cfg.misc.save_every_n_updates
        control.should_save = leaves or last or (save > 0 and update % save == 0)
        control.should_training_stop = control.should_training_stop or leaves

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A line of log.jsonl, and the completions."""
        logs: dict[str, Any] = kwargs["logs"]
        if "train_runtime" in logs or state.global_step == self.last:
            return
        assert self.trainer is not None
        self.last = state.global_step
        line: dict[str, Any] = {"update": self.last, **self._figures(logs)}
        every = self.cfg.misc.dump_every_n_updates
        if self.trainer.sampled and every and self.last % every == 0:
            self.log.write_completions(self.last, self.trainer.completions())
        self.trainer.sampled = False
        self.log.write_update(line)
        track(self.accelerator, "train", line, self.last)
        self.console.update(line)
        self.echo.add_update(self.last, line)

    def _figures(self, logs: dict[str, Any]) -> Figures:
        """TRL's, under our names; what is not finite is unknown."""
        assert self.trainer is not None
        found: Figures = {}
        for key, value in logs.items():
            name = _NAMES.get(key) or key.removeprefix("rewards/").replace("/", "_")
            known = isinstance(value, int | float) and math.isfinite(value)
            found[name] = value if known else None
        seconds = self.trainer.take_seconds()
        whole = found.pop("step_time", None) or 0.0
        args = self.trainer.args
        found["samples"] = args.per_device_train_batch_size * args.gradient_accumulation_steps
        found["update_s"] = round(max(0.0, whole - sum(seconds.values())), 3)
        return found | seconds
