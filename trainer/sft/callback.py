"""What happens between two updates: the log, the console, evaluations, checkpoints, leaving."""

from __future__ import annotations

import time
from typing import Any

from transformers import TrainerCallback

from trainer.runs.console import Console
from trainer.runs.leaving import Leaving
from trainer.runs.runlog import RunLog
from trainer.runs.trackers import track
from trainer.sft.config import SftConfig
from trainer.sft.figures import figures_of


class SftCallback(TrainerCallback):
    """Beside a `SealedSftTrainer`, in the house's form of a run."""

    def __init__(
        self,
        cfg: SftConfig,
        runlog: RunLog,
        leaving: Leaving,
        console: Console,
        accelerator: Any,
    ) -> None:
        self.cfg, self.log, self.leaving, self.console = cfg, runlog, leaving, console
        self.accelerator = accelerator
        self.begun = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """An update begins: from now on there is something to save."""
        self.leaving.patient = True
        self.begun = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """An update is done: what comes of it."""
        update, last = state.global_step, state.global_step >= state.max_steps
        leaves = bool(self.leaving.asked)
        every, save = self.cfg.eval.eval_every_n_updates, self.cfg.misc.save_every_n_updates
        control.should_evaluate = not leaves and (last or (every > 0 and update % every == 0))
        control.should_save = leaves or last or (save > 0 and update % save == 0)
        control.should_training_stop = control.should_training_stop or leaves

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """A line of log.jsonl."""
        logs = kwargs["logs"]
        if "loss" not in logs:  # of the whole run
            return
        line: dict[str, Any] = {"update": state.global_step, **figures_of(logs)}
        line["samples"] = args.per_device_train_batch_size * args.gradient_accumulation_steps
        line["update_s"] = round(time.monotonic() - self.begun, 3)
        self.log.write_update(line)
        track(self.accelerator, "train", line, state.global_step)
        self.console.update(line)
