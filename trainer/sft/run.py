"""An SFT run: check, load and open everything, then train."""

from __future__ import annotations

import json
import logging
import math
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from scorekit.errors import UserError
from scorekit.files import write_atomic
from trainer.rl.config import LoraConfig
from trainer.rl.policy.adapters import check_adapters, with_adapters
from trainer.rl.policy.devices import prepare_torch
from trainer.rl.policy.loading import load_policy
from trainer.rl.policy.models import check_4bit
from trainer.rl.policy.tokens import load_tokenizer
from trainer.rl.policy.vision import takes_images
from trainer.runs.artifacts import Artifacts
from trainer.runs.checkpoints.checkpoint import CheckpointState, read_state
from trainer.runs.checkpoints.resume import (
    check_origin,
    checkpoint_to_resume,
    prompt_origin,
    weight_origin,
)
from trainer.runs.cli import tables
from trainer.runs.config import DEFAULT_EVAL_SET
from trainer.runs.console import Console
from trainer.runs.messages import messages
from trainer.runs.on_trl import check_alone, one_device, trackers_folder
from trainer.runs.run_log import RunLog, append_jsonl, check_run_dir, open_run_dir, read_jsonl
from trainer.runs.shutdown import ShutdownHandler
from trainer.runs.trackers import check_trackers, track, tracking
from trainer.sft.collate import Collator
from trainer.sft.config import SftConfig
from trainer.sft.held_out import held_out_stats
from trainer.sft.prepare import SftPart, check_findings, load_held_out, load_train
from trainer.sft.stats import TABLE

log = logging.getLogger(__name__)


def open_tokenizer(cfg: SftConfig) -> Any:
    """Return the policy's tokenizer. Raises UserError."""
    if cfg.policy.path is None:
        raise UserError("policy.path: required. Set the folder or hub id of a causal LM")
    return load_tokenizer(cfg.policy)


def read_parts(cfg: SftConfig, tokenizer: Any) -> tuple[SftPart, SftPart]:
    """Return checked training and held-out rows.

    Sets the template of training in the tokenizer, and so in every checkpoint. Raises UserError.
    """
    train, held_out = load_train(cfg, tokenizer), load_held_out(cfg, tokenizer)
    for part in (train, held_out):
        check_findings(cfg, part)
    if train.template is not None:
        tokenizer.chat_template = train.template
    return train, held_out


def run_sft(cfg: SftConfig, *, resume: bool = False) -> Artifacts:
    """Train, evaluate and log.

    Rows and chat template are checked before weights are loaded; an earlier run is replaced after
    that. Raises UserError for whatever the user can fix.
    resume: resume the run of misc.run_dir from its newest complete checkpoint; a run without one
    starts again in its folder.
    """
    check_alone("SFT")
    with messages() as run_messages:
        check_trackers(cfg.misc.trackers)
        check_4bit(cfg.policy)
        device = one_device(prepare_torch(cfg.misc.device, cfg.misc.threads), "SFT")
        checkpoint = checkpoint_to_resume(cfg) if resume else None
        if checkpoint is None:
            check_run_dir(cfg, resume or None)
        folder = open_run_dir(cfg.misc)
        tokenizer = open_tokenizer(cfg)
        train, held_out = read_parts(cfg, tokenizer)
        check_adapters(cfg.policy)
        run = SftRun(cfg, device, tokenizer, train, held_out, checkpoint)
        run.load()
        if checkpoint is not None and run.done >= run.total:
            log.warning("%s has its %d updates. Raise sft.max_steps", folder, run.total)
            return run.artifacts(None, 0)
        runlog = RunLog(cfg, done=run.done if checkpoint else None)
        run_messages.write_to(runlog.folder)
        counts = {"train": train.counts, "eval": held_out.counts}
        write_atomic(runlog.folder / "data.json", json.dumps(counts, indent=1) + "\n")
        return run.go(runlog)


def image_parts(cfg: SftConfig, parts: Sequence[SftPart]) -> tuple[Any, int | None]:
    """Return (image processor, id that stands for a part of an image); (None, None) without images.

    Raises UserError if the model reads no images.
    """
    if not any(row.images for part in parts for row in part.rows):
        return None, None
    from transformers import AutoConfig, AutoImageProcessor

    config = AutoConfig.from_pretrained(str(cfg.policy.path), revision=cfg.policy.revision)
    image_id = getattr(config, "image_token_id", None)
    if image_id is None:
        raise UserError(f"data.train has images, but {cfg.policy.path} reads none")
    try:
        processor = AutoImageProcessor.from_pretrained(
            cfg.policy.path, revision=cfg.policy.revision, use_fast=False
        )
    except (OSError, ValueError, ImportError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"policy.path: {cfg.policy.path}: no image processor: {reason}") from None
    return processor, image_id


class SftRun:
    """The parts of a run, opened one after another."""

    trainer: Any
    #: Updates of the run.
    total: int

    def __init__(
        self,
        cfg: SftConfig,
        device: torch.device,
        tokenizer: Any,
        train: SftPart,
        held_out: SftPart,
        checkpoint: Path | None,
    ) -> None:
        from trainer.sft.trainer import sft_arguments

        self.cfg, self.device, self.tokenizer = cfg, device, tokenizer
        self.train, self.held_out, self.checkpoint = train, held_out, checkpoint
        self.arguments = sft_arguments(cfg, device)
        self.processor, image_id = image_parts(cfg, (train, held_out))
        if cfg.sft.packing and self.processor is not None:
            raise UserError("sft.packing: rows with images cannot be packed. Set it to false")
        pad_id = tokenizer.pad_token_id
        self.collator = Collator(0 if pad_id is None else pad_id, self.processor, image_id)
        self.done = read_state(checkpoint).update if checkpoint else 0
        self.origin = weight_origin(cfg.policy)
        for key, path, part in (
            ("data.train", cfg.data.train, train),
            ("data.eval", cfg.data.eval, held_out),
        ):
            prompts = ((str(row.mask), row.ids) for row in part.rows)
            self.origin |= prompt_origin(key, path, prompts)
        if checkpoint is not None:
            check_origin(self.origin, read_state(checkpoint))
        self.reports: list[tuple[int, dict[str, Any]]] = []
        if checkpoint is not None:
            lines = read_jsonl(Path(cfg.misc.run_dir) / "eval.jsonl")
            self.reports = [(line["update"], line) for line in lines if line["update"] <= self.done]
        self.shutdown = ShutdownHandler()

    def load(self) -> None:
        """Load the policy, and create TRL's trainer."""
        from transformers.trainer_callback import PrinterCallback, ProgressCallback

        from trainer.sft.trainer import CheckpointingSftTrainer, dataset_of, folder_of

        cfg = self.cfg
        bare = cfg.policy.model_copy(update={"lora": LoraConfig(), "gradient_checkpointing": False})
        model, _ = load_policy(bare, self.device)
        if self.processor is not None and not takes_images(model):
            raise UserError(f"data.train has images, but {cfg.policy.path} reads none")
        if cfg.policy.lora.r:
            model = with_adapters(model, cfg.policy)
        self.trainer = CheckpointingSftTrainer(
            model=model,
            args=self.arguments,
            train_dataset=dataset_of(self.train.rows, with_images=self.processor is not None),
            processing_class=self.tokenizer,
            data_collator=None if cfg.sft.packing else self.collator,
            evaluate_update=self.evaluate_update,
        )
        self.trainer.keep_in(folder_of(cfg), cfg.misc.keep_checkpoints, self.state)
        for callback in (PrinterCallback, ProgressCallback):
            trainer: Any = self.trainer
            trainer.remove_callback(callback)
        sequences = len(self.trainer.train_dataset)  # packed, if packing is on
        rows_per_update = cfg.sft.per_device_train_batch_size * cfg.sft.gradient_accumulation_steps
        updates_per_epoch = math.ceil(sequences / rows_per_update)
        self.total = cfg.sft.max_steps or math.ceil(cfg.sft.num_train_epochs * updates_per_epoch)

    def go(self, runlog: RunLog) -> Artifacts:
        """Run all updates, with evaluations before, between and after."""
        from accelerate import Accelerator

        from trainer.sft.callback import SftCallback

        cfg, self.log = self.cfg, runlog
        columns, narrow_titles = tables.columns(TABLE)
        self.accelerator = Accelerator(
            log_with=cfg.misc.trackers or None, project_dir=trackers_folder(cfg)
        )
        resumed_update = self.done if self.checkpoint else None
        with (
            self.shutdown,
            tracking(self.accelerator, cfg.model_dump(mode="json"), resumed_update),
            Console(
                columns, narrow_titles, self.total, self.done, verbose=cfg.misc.verbose
            ) as self.console,
        ):
            self.trainer.add_callback(
                SftCallback(cfg, runlog, self.shutdown, self.console, self.accelerator)
            )
            if self.checkpoint is None:
                self.evaluate_update(0)
            checkpoint = str(self.checkpoint) if self.checkpoint else None
            self.trainer.train(resume_from_checkpoint=checkpoint)
        return self.finish()

    def evaluate_update(self, update: int) -> dict[str, Any]:
        """Evaluate and log; {} without held-out rows."""
        if not self.held_out.rows:
            return {}
        cfg = self.cfg
        stats = held_out_stats(
            self.trainer.model,
            self.held_out.rows,
            self.collator,
            cfg.eval.batch_size,
            cfg.misc.dtype,
        )
        line = {"update": update, "set": DEFAULT_EVAL_SET, **stats}
        append_jsonl(self.log.folder / "eval.jsonl", line)
        track(self.accelerator, "eval", stats, update)
        self.console.print_line(tables.evaluation_line(TABLE, update, stats))
        best = min(
            (report["loss"] for eval_update, report in self.reports if eval_update > 0),
            default=math.inf,
        )
        self.reports.append((update, line))
        if update and cfg.misc.save_every_n_updates and line["loss"] <= best:
            self.trainer.control.should_save = True
        return {f"eval_{key}": value for key, value in stats.items()}

    def state(self, update: int) -> CheckpointState:
        """Return the checkpoint state of the run. The best checkpoint has the lowest loss."""
        self.log.sync()
        report = dict(self.reports).get(update)
        return CheckpointState(
            update,
            config=self.cfg.model_dump(mode="json"),
            prompts_seen=update
            * self.cfg.sft.per_device_train_batch_size
            * self.cfg.sft.gradient_accumulation_steps,
            learning_rate=self.trainer.lr_scheduler.get_last_lr()[0],
            reward=-report["loss"] if report else None,
            origin=self.origin,
        )

    def finish(self) -> Artifacts:
        """Return the artifacts of a finished or stopped run."""
        update, signal_number = self.trainer.state.global_step, self.shutdown.signal_number
        if not signal_number or update >= self.trainer.state.max_steps:
            return self.artifacts(None, 0)
        stop_reason = (
            f"{signal.Signals(signal_number).name} after update {update}: resume with --resume"
        )
        log.warning("the run ends: %s", stop_reason)
        return self.artifacts(stop_reason, 128 + signal_number)

    def artifacts(self, stop_reason: str | None, code: int) -> Artifacts:
        """Return the artifacts for the command."""
        folder = Path(self.cfg.misc.run_dir)
        trainer = getattr(self, "trainer", None)
        checkpoint = trainer.saved if trainer is not None else None
        updates = read_jsonl(folder / "log.jsonl")
        sets = {DEFAULT_EVAL_SET: self.reports} if self.reports else {}
        return Artifacts(
            folder,
            checkpoint or self.checkpoint,
            updates,
            self.reports,
            sets,
            stop_reason,
            exit_code=code,
        )
