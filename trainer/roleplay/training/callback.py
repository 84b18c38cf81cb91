"""Between two updates of a role-play run: log, console, evaluations, checkpoints, early ends."""

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
from trainer.runs.run_log import RunLog
from trainer.runs.shutdown import ShutdownHandler
from trainer.runs.stats import Stats
from trainer.runs.trackers import track

#: TRL's name of a stat -> ours, if more than `_` for `/` differs.
_NAMES = {
    "reward": "reward_mean",
    "completions/mean_length": "completion_length_mean",
    "completions/clipped_ratio": "clipped_ratio",
    **{stat.key: stat.key for reward in REWARDS for stat in reward.components},
}


class RunCallback(TrainerCallback):
    """Writes the run's log, and decides when a `RoleplayTrainer` evaluates, saves and stops."""

    def __init__(
        self,
        cfg: RoleplayConfig,
        runlog: RunLog,
        shutdown: ShutdownHandler,
        console: Console,
        span: int,
        begin: Callable[[], None],
        echo: EchoWatch,
    ) -> None:
        """Keep what the callback works with.

        span: updates for one sampling.
        begin: called first.
        echo: warns if the policy learns to repeat the user.
        """
        self.cfg, self.log, self.shutdown, self.console = cfg, runlog, shutdown, console
        self.span, self.begin, self.echo = span, begin, echo
        self.accelerator: Any = None  # has the trackers; set after the trainer's own is created
        self.trainer: RoleplayTrainer | None = None  # set later: it is created with its callbacks
        self.last = 0  # update

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Run `begin` when weights and states are loaded."""
        self.begin()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note that there is something to save from now on."""
        self.shutdown.is_deferring = True

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Decide whether to evaluate, save and stop after an update."""
        assert self.trainer is not None
        self.trainer.note_end()
        update, is_last = state.global_step, state.global_step >= state.max_steps
        should_stop = self.shutdown.signal_number != 0 and update % self.span == 0
        eval_interval = self.cfg.eval.eval_every_n_updates
        control.should_evaluate = not should_stop and (
            is_last or (eval_interval > 0 and update % eval_interval == 0)
        )
        save_interval = self.cfg.misc.save_every_n_updates
        control.should_save = (
            should_stop or is_last or (save_interval > 0 and update % save_interval == 0)
        )
        control.should_training_stop = control.should_training_stop or should_stop

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write a line of log.jsonl, and the completions."""
        logs: dict[str, Any] = kwargs["logs"]
        if "train_runtime" in logs or state.global_step == self.last:
            return
        assert self.trainer is not None
        self.last = state.global_step
        line: dict[str, Any] = {"update": self.last, **self._stats(logs)}
        every = self.cfg.misc.dump_every_n_updates
        if self.trainer.sampled and every and self.last % every == 0:
            self.log.write_completions(self.last, self.trainer.completions())
        self.trainer.sampled = False
        self.log.write_update(line)
        track(self.accelerator, "train", line, self.last)
        self.console.update(line)
        self.echo.add_update(self.last, line)

    def _stats(self, logs: dict[str, Any]) -> Stats:
        """Return TRL's stats under our names; values that are not finite are None."""
        assert self.trainer is not None
        stats: Stats = {}
        for key, value in logs.items():
            name = _NAMES.get(key) or key.removeprefix("rewards/").replace("/", "_")
            is_number = isinstance(value, int | float) and math.isfinite(value)
            stats[name] = value if is_number else None
        seconds = self.trainer.take_seconds()
        total_s = stats.pop("step_time", None) or 0.0
        args = self.trainer.args
        stats["samples"] = args.per_device_train_batch_size * args.gradient_accumulation_steps
        stats["update_s"] = round(max(0.0, total_s - sum(seconds.values())), 3)
        return stats | seconds
