"""Between two updates of an SFT run: log, console, evaluations, checkpoints, early ends."""

from __future__ import annotations

import time
from typing import Any

from transformers import TrainerCallback

from trainer.runs.console import Console
from trainer.runs.run_log import RunLog
from trainer.runs.shutdown import ShutdownHandler
from trainer.runs.trackers import track
from trainer.sft.config import SftConfig
from trainer.sft.stats import compute_stats


class SftCallback(TrainerCallback):
    """Writes the run's log. Decides when `CheckpointingSftTrainer` evaluates, saves and
    stops."""

    def __init__(
        self,
        cfg: SftConfig,
        runlog: RunLog,
        shutdown: ShutdownHandler,
        console: Console,
        accelerator: Any,
    ) -> None:
        self.cfg, self.log, self.shutdown, self.console = cfg, runlog, shutdown, console
        self.accelerator = accelerator
        self.started_at = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock of an update; from now on there is something to save."""
        self.shutdown.is_deferring = True
        self.started_at = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Decide whether to evaluate, save and stop after an update."""
        update, is_last = state.global_step, state.global_step >= state.max_steps
        should_stop = bool(self.shutdown.signal_number)
        eval_interval, save_interval = (
            self.cfg.eval.eval_every_n_updates,
            self.cfg.misc.save_every_n_updates,
        )
        control.should_evaluate = not should_stop and (
            is_last or (eval_interval > 0 and update % eval_interval == 0)
        )
        control.should_save = (
            should_stop or is_last or (save_interval > 0 and update % save_interval == 0)
        )
        control.should_training_stop = control.should_training_stop or should_stop

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write a line of log.jsonl."""
        logs = kwargs["logs"]
        if "loss" not in logs:  # the summary of the run
            return
        line: dict[str, Any] = {"update": state.global_step, **compute_stats(logs)}
        line["samples"] = args.per_device_train_batch_size * args.gradient_accumulation_steps
        line["update_s"] = round(time.monotonic() - self.started_at, 3)
        self.log.write_update(line)
        track(self.accelerator, "train", line, state.global_step)
        self.console.update(line)
