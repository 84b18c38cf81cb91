"""The lines of log.jsonl of a role-play run, and its completions."""

from __future__ import annotations

import math
from typing import Any

from trainer.roleplay.config import RoleplayConfig
from trainer.roleplay.evaluation.diagnostics import EchoWatch
from trainer.roleplay.rewards import REWARDS
from trainer.runs.stats import Stats
from trainer.runs.trl.callback import RunCallback
from trainer.runs.trl.processes import update_size
from trainer.runs.trl.run import TrlRun

#: TRL's name of a stat -> ours, if more than `_` for `/` differs.
_NAMES = {
    "reward": "reward_mean",
    "completions/mean_length": "completion_length_mean",
    "completions/clipped_ratio": "clipped_ratio",
    **{stat.key: stat.key for reward in REWARDS for stat in reward.components},
}


class RoleplayCallback(RunCallback):
    """Writes the run's log, and decides when a `RoleplayTrainer` evaluates, saves and stops.

    echo: warns if the policy learns to repeat the user.
    """

    def __init__(self, run: TrlRun[RoleplayConfig], echo: EchoWatch) -> None:
        super().__init__(run)
        self.echo = echo
        self.last = run.done  # update

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Decide whether to evaluate, save and stop after an update."""
        self.run.trainer.note_end()
        super().on_step_end(args, state, control, **kwargs)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write a line of log.jsonl, and the completions."""
        logs: dict[str, Any] = kwargs["logs"]
        if "train_runtime" in logs or state.global_step == self.last:
            return
        self.last = state.global_step
        run, trainer = self.run, self.run.trainer
        line: dict[str, Any] = {"update": self.last, **self._stats(logs)}
        every = run.cfg.misc.dump_every_n_updates
        if run.log and trainer.sampled and every and self.last % every == 0:
            run.log.write_completions(self.last, trainer.completions())
        trainer.sampled = False
        self.write(line)
        self.echo.add_update(self.last, line)

    def _stats(self, logs: dict[str, Any]) -> Stats:
        """Return TRL's stats under our names; values that are not finite are None."""
        stats: Stats = {}
        for key, value in logs.items():
            name = _NAMES.get(key) or key.removeprefix("rewards/").replace("/", "_")
            is_number = isinstance(value, int | float) and math.isfinite(value)
            stats[name] = value if is_number else None
        trainer = self.run.trainer
        seconds = trainer.take_seconds()
        total_s = stats.pop("step_time", None) or 0.0
        stats["samples"] = update_size(self.run.cfg.grpo, self.run.start.world.size)
        stats["update_s"] = round(max(0.0, total_s - sum(seconds.values())), 3)
        return stats | seconds
