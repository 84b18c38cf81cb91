"""An SFT run: check, load and open everything, then train."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from scorekit.errors import UserError
from scorekit.files import write_atomic
from trainer.rl.policy import (
    check_4bit,
    check_adapters,
    load_tokenizer,
    read_config,
    takes_images,
    with_adapters,
)
from trainer.runs.artifacts import Artifacts
from trainer.runs.config import DEFAULT_EVAL_SET
from trainer.runs.run_log import RunLog, append_jsonl
from trainer.runs.trl.arguments import remove_printers
from trainer.runs.trl.processes import shares_text, update_size
from trainer.runs.trl.run import TrlPlan, TrlRun
from trainer.runs.trl.start import TrlStart, start_trl_run
from trainer.sft.collate import Collator, held_out_stats
from trainer.sft.config import SftConfig
from trainer.sft.prepare import SftPart, check_findings, load_held_out, load_train
from trainer.sft.rows import SftRow
from trainer.sft.stats import TABLE

log = logging.getLogger(__name__)


def open_tokenizer(cfg: SftConfig) -> Any:
    """Return the policy's tokenizer. Raises UserError."""
    if cfg.policy.path is None:
        raise UserError("policy.path: required. Set the folder or hub id of a causal LM")
    return load_tokenizer(cfg.policy)


def run_sft(cfg: SftConfig, *, resume: bool = False) -> Artifacts:
    """Train, evaluate and log.

    Rows and chat template are checked before weights are loaded; an earlier run is replaced after
    that. Raises UserError for whatever the user can fix.
    resume: resume the folder's run from its newest complete checkpoint, or start it again.
    """
    with start_trl_run(cfg, "SFT", resume=resume) as start:
        tokenizer, train, held_out, collator = start.world.on_all(lambda: _inputs(cfg))
        start.world.on_main(lambda: _check_template(cfg, (train, held_out)))
        if train.template is not None:  # every checkpoint has it, too
            tokenizer.chat_template = train.template
        origin = start.origin(
            {
                key: ((str(row.mask), row.ids) for row in part.rows)
                for key, part in (("data.train", train), ("data.eval", held_out))
            }
        )
        trainer = start.world.on_all(lambda: load_trainer(start, tokenizer, train, collator))
        num_rows = update_size(cfg.sft, start.world.size)
        # Rows are packed into sequences, if packing is on
        updates_per_epoch = math.ceil(len(trainer.train_dataset) / num_rows)
        total = cfg.sft.max_steps or math.ceil(cfg.sft.num_train_epochs * updates_per_epoch)
        plan = TrlPlan(origin, TABLE, total, 1, num_rows, is_evaluated=bool(held_out.rows))
        reports = start.reports
        if start.checkpoint is not None and plan.is_done(start.done, reports):
            hint = "For more, start another run with policy.path of its checkpoint"
            log.warning("%s has its %d updates. %s", start.folder, total, hint)
            return start.artifacts(reports)
        runlog = start.open_log()
        if runlog:
            counts = {"train": train.counts, "eval": held_out.counts}
            write_atomic(runlog.folder / "data.json", json.dumps(counts, indent=1) + "\n")
        return SftRun(start, trainer, runlog, plan, held_out.rows, collator).go()


def update_text(cfg: SftConfig, num_rows: int, processes: int) -> str:
    """Return the sizes of an update, and of a pass over so many rows."""
    unit = "sequences of packed rows" if cfg.sft.packing else "rows"
    text = shares_text(cfg.sft, processes, unit)
    if cfg.sft.packing:
        return text
    updates = math.ceil(num_rows / update_size(cfg.sft, processes))
    text += f"; a pass over {num_rows} rows has {updates} updates"
    size = cfg.sft.per_device_train_batch_size * processes
    if processes > 1 and num_rows % size:
        text += f", and begins again with {size - num_rows % size} rows to fill its last passes"
    return text


def _inputs(cfg: SftConfig) -> tuple[Any, SftPart, SftPart, Collator]:
    """Return tokenizer, rows to train on, held-out rows and their collate function.

    Raises UserError.
    """
    check_4bit(cfg.policy)
    tokenizer = open_tokenizer(cfg)
    train, held_out = load_train(cfg, tokenizer), load_held_out(cfg, tokenizer)
    return tokenizer, train, held_out, _collator(cfg, tokenizer, (train, held_out))


def _check_template(cfg: SftConfig, parts: Sequence[SftPart]) -> None:
    """Raise UserError if the chat template fails its check, or adapters do not fit."""
    for part in parts:
        check_findings(cfg, part)
    check_adapters(cfg.policy, trl=True)


def _collator(cfg: SftConfig, tokenizer: Any, parts: Sequence[SftPart]) -> Collator:
    """Return the collate function of the rows. Raises UserError if they cannot be packed."""
    processor, image_id = image_parts(cfg, parts)
    if cfg.sft.packing and processor is not None:
        raise UserError("sft.packing: rows with images cannot be packed. Set it to false")
    pad_id = tokenizer.pad_token_id
    return Collator(0 if pad_id is None else pad_id, processor, image_id)


def image_parts(cfg: SftConfig, parts: Sequence[SftPart]) -> tuple[Any, int | None]:
    """Return (image processor, id that stands for a part of an image); (None, None) without images.

    Raises UserError if the model reads no images.
    """
    if not any(row.images for part in parts for row in part.rows):
        return None, None
    from transformers import AutoImageProcessor

    config = read_config(str(cfg.policy.path), cfg.policy.revision, "policy.path")
    image_id = getattr(config, "image_token_id", None)
    if image_id is None:
        raise UserError(f"data.train has images, but {cfg.policy.path} reads none")
    try:
        processor = AutoImageProcessor.from_pretrained(
            cfg.policy.path, revision=cfg.policy.revision, use_fast=False
        )
    except Exception as error:  # transformers raises many types
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UserError(f"policy.path: {cfg.policy.path}: no image processor: {reason}") from None
    return processor, image_id


def load_trainer(
    start: TrlStart[SftConfig], tokenizer: Any, train: SftPart, collator: Collator
) -> Any:
    """Load the policy, and return TRL's trainer. Raises UserError."""
    from trainer.sft.trainer import CheckpointingSftTrainer, dataset_of, sft_arguments

    cfg, reads_images = start.cfg, collator.processor is not None
    arguments = sft_arguments(cfg, start.device)
    model = start.load_policy()
    if reads_images and not takes_images(model):
        raise UserError(f"data.train has images, but {cfg.policy.path} reads none")
    if cfg.policy.lora.r:
        model = with_adapters(model, cfg.policy, trl=True)
    trainer = CheckpointingSftTrainer(
        model=model,
        args=arguments,
        train_dataset=dataset_of(train.rows, with_images=reads_images),
        processing_class=tokenizer,
        data_collator=None if cfg.sft.packing else collator,
    )
    remove_printers(trainer)
    return trainer


class SftRun(TrlRun[SftConfig]):
    """A run of SFT."""

    def __init__(
        self,
        start: TrlStart[SftConfig],
        trainer: Any,
        runlog: RunLog | None,
        plan: TrlPlan,
        held_out: Sequence[SftRow],
        collator: Collator,
    ) -> None:
        from trainer.sft.trainer import SftCallback

        super().__init__(start, trainer, runlog, plan)
        self.held_out, self.collator = held_out, collator
        trainer.add_callback(SftCallback(self))

    def evaluate(self, update: int) -> dict[str, Any]:
        """Measure the loss on the held-out rows, and log it."""
        cfg = self.cfg
        stats = held_out_stats(
            self.trainer.model,
            self.held_out,
            self.collator,
            cfg.eval.batch_size,
            cfg.misc.dtype,
            self.start.world,
        )
        if self.log:
            line = {"update": update, "set": DEFAULT_EVAL_SET, **stats}
            append_jsonl(self.log.folder / "eval.jsonl", line)
        return stats

    def rating(self, stats: Mapping[str, Any]) -> float:
        """Return the value by which the best checkpoint is chosen: it has the lowest loss."""
        return float(-stats["loss"])
