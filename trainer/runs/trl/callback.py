"""Between two updates of a run on TRL: log, console, evaluations, checkpoints, early ends."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from trainer.rl.policy import unwrap_peft
from trainer.runs.trackers import track
from trainer.runs.trl.run import TrlRun


class RunCallback(TrainerCallback):
    """Writes the run's log. Decides when its trainer evaluates, saves and stops."""

    def __init__(self, run: TrlRun[Any]) -> None:
        self.run = run

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin when weights and states of a checkpoint are loaded."""
        if self.run.start.world.is_sharded:
            # transformers: processes then sample until all have ended. accelerate does not say so
            unwrap_peft(self.run.trainer.model)._is_fsdp_managed_module = True
        self.run.begin()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note that there is something to save from now on."""
        self.run.shutdown.is_deferring = True
        self.run.start.world.set_phase(f"update {state.global_step + 1}")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Decide whether to evaluate, save and stop after an update."""
        run, update, is_last = self.run, state.global_step, state.global_step >= state.max_steps
        run.start.world.set_phase(f"update {update}, end")
        should_stop = run.sync_signal() != 0 and update % run.plan.span == 0
        eval_interval = run.cfg.eval.eval_every_n_updates
        save_interval = run.cfg.misc.save_every_n_updates
        control.should_evaluate = not should_stop and (
            is_last or (eval_interval > 0 and update % eval_interval == 0)
        )
        control.should_save = (
            should_stop or is_last or (save_interval > 0 and update % save_interval == 0)
        )
        control.should_training_stop = control.should_training_stop or should_stop

    def write(self, line: dict[str, Any]) -> None:
        """Write a line of log.jsonl."""
        if self.run.log:
            self.run.log.write_update(line)
        track(self.run.accelerator, "train", line, line["update"])
        self.run.console.update(line)
