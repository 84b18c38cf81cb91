"""The lines of log.jsonl of an SFT run."""

from __future__ import annotations

import time
from typing import Any

from trainer.runs.memory import peak_gpu_memory
from trainer.runs.trl.callback import RunCallback
from trainer.runs.trl.processes import update_size
from trainer.runs.trl.run import TrlRun
from trainer.sft.config import SftConfig
from trainer.sft.stats import compute_stats


class SftCallback(RunCallback):
    """Writes the log of a run, and decides when its trainer evaluates, saves and stops."""

    def __init__(self, run: TrlRun[SftConfig]) -> None:
        super().__init__(run)
        self.started_at = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock of an update; from now on there is something to save."""
        super().on_step_begin(args, state, control, **kwargs)
        self.started_at = time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write a line of log.jsonl."""
        logs = kwargs["logs"]
        if "loss" not in logs:  # the summary of the run
            return
        line: dict[str, Any] = {"update": state.global_step, **compute_stats(logs)}
        line["samples"] = update_size(self.run.cfg.sft, self.run.start.world.size)
        line["update_s"] = round(time.monotonic() - self.started_at, 3)
        line |= peak_gpu_memory(args.device)
        self.write(line)
