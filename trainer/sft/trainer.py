"""TRL's SFTTrainer on rows with our ids and labels, and what it writes to log.jsonl.

The overridden methods are those of TRL 1.16 and transformers.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from trl.trainer.sft_trainer import SFTTrainer

from trainer.runs.memory import peak_gpu_memory
from trainer.runs.trl.arguments import OURS, learn_in_float32, trl_arguments
from trainer.runs.trl.callback import RunCallback
from trainer.runs.trl.checkpoints import TrlCheckpointMixin
from trainer.runs.trl.processes import update_size
from trainer.runs.trl.run import TrlRun
from trainer.sft.config import SftConfig
from trainer.sft.rows import SftRow
from trainer.sft.stats import compute_stats

#: Options of TRL that must not be set, and what to set instead; some would cut, mask or render our
#: rows again.
_OWN_OPTIONS = OURS | {
    "chat_template_path": "chat.template",
    "max_length": "data.max_length",
    "truncation_mode": "data.overlong",
    "completion_only_loss": "sft.assistant_only_loss",
    "packing_strategy": "sft.packing, which does not cut rows",
    "eval_packing": "sft.packing, which applies to training rows",
    "padding_free": "sft.packing",
    "dataset_kwargs": "data",
    "dataset_text_field": "data",
    "dataset_num_proc": "data",
    "remove_unused_columns": "data",
    "eos_token": "the template, and the model's generation_config.json",
    "pad_token": "policy.tokenizer",
    "shuffle_dataset": "misc.seed: rows are shuffled in each pass",
}


class CheckpointingSftTrainer(TrlCheckpointMixin, SFTTrainer):
    """SFTTrainer for a run directory. It evaluates with equal weight for every labeled token."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        network: Any = self.model
        learn_in_float32(network)


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


def sft_arguments(cfg: SftConfig, device: torch.device) -> Any:
    """Return TRL's `SFTConfig`. Raises UserError."""
    from trl.trainer.sft_config import SFTConfig

    packs = cfg.sft.packing
    return trl_arguments(
        SFTConfig,
        "sft",
        cfg.sft,
        cfg,
        device,
        left_out=("assistant_only_loss", "template_check"),
        reserved=_OWN_OPTIONS,
        per_device_eval_batch_size=cfg.eval.batch_size,
        # Labels, lengths and order of the rows are set by us
        packing_strategy="bfd",
        eval_packing=False,
        max_length=cfg.data.max_length if packs else None,
        dataset_kwargs=None if packs else {"skip_prepare_dataset": True},
    )


def dataset_of(rows: Sequence[SftRow], *, with_images: bool) -> Any:
    """Return the trainer's data set. TRL would render a column with the name `images`."""
    from datasets import Dataset

    columns: dict[str, list[Any]] = {
        "input_ids": [row.ids for row in rows],
        "labels": [row.labels for row in rows],
    }
    if with_images:
        columns["pictures"] = [list(row.images) for row in rows]
        columns["where"] = [row.location for row in rows]
    return Dataset.from_dict(columns)
