"""Rows of the config -> what is learned, and what was left out of it, and why."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from scorekit.errors import UserError
from scorekit.report.progress import progress_bar
from trainer.chat.boundaries import (
    Finding,
    findings_of,
    looked_at,
    refuse_faults,
    training_template,
)
from trainer.chat.labelling import Labelled, label
from trainer.chat.rows import Conversation, conversations
from trainer.chat.stops import load_generation_config
from trainer.sft.config import SftConfig
from trainer.sft.curation_record import read_record
from trainer.sft.rows import SftRow, cut_to, has_ids, rows_of, rows_of_ids

log = logging.getLogger(__name__)
#: Conversations that the template of training is chosen by.
_CHOSEN_BY = 50
#: Rows that take so long that a bar shows how far it is.
_MANY = 1000
#: Checks that say nothing where every token is learned.
_OF_LABELS = ("markers", "labelled text", "stop token", "other turns")


@dataclass(slots=True)
class SftPart:
    """Rows to learn from, or held-out ones. left_out: why -> how many. findings: of the chat
    template; none of rows of ids. template: with markers; None: the rows are ids."""

    rows: list[SftRow] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    template: str | None = None

    @property
    def counts(self) -> dict[str, Any]:
        """For the log."""
        return {
            "rows": len(self.rows),
            "tokens": sum(len(row.ids) for row in self.rows),
            "learned_tokens": sum(sum(row.mask) for row in self.rows),
            "left_out": dict(self.left_out),
        }


def load_train(cfg: SftConfig, tokenizer: Any) -> SftPart:
    """The rows to learn from. Raises UserError."""
    if cfg.data.train is None:
        raise UserError("data.train is not set: give the rows to learn from")
    return _load(cfg, tokenizer, "data.train", cfg.data.train_split, cfg.data.train_limit)


def load_held_out(cfg: SftConfig, tokenizer: Any) -> SftPart:
    """Those to measure the loss on; none where the config names none. Raises UserError."""
    if cfg.data.eval is None:
        return SftPart()
    return _load(cfg, tokenizer, "data.eval", cfg.data.eval_split, cfg.eval.eval_limit)


def check_findings(cfg: SftConfig, part: SftPart) -> None:
    """Raise UserError at a fault of the chat template, or warn, as sft.template_check says."""
    hint = "--debug_label_mask shows all; sft.template_check: warn goes on"
    refuse_faults(part.findings, cfg.sft.template_check, hint)


def _load(
    cfg: SftConfig, tokenizer: Any, key: str, split: str | None, limit: int | None
) -> SftPart:
    source = str(getattr(cfg.data, key.removeprefix("data.")))
    raw = rows_of(source, split, limit)
    condemned: Counter[str] = Counter()
    if key == "data.train" and cfg.data.record is not None:
        raw, condemned = _without_condemned(raw, cfg.data.record)
    if has_ids(raw[0][1]):
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(str(cfg.policy.path), revision=cfg.policy.revision)
        place = Path(source) if Path(source).is_dir() else Path(source).parent
        folder = Path(cfg.data.image_folder) if cfg.data.image_folder else place
        part = SftPart()
        found = rows_of_ids(raw, config.get_text_config().vocab_size - 1, folder)
    else:
        part, found = _labelled(cfg, tokenizer, conversations(raw, cfg.data.turns))
    part.left_out += condemned
    for row in found:
        if not cfg.sft.assistant_only_loss:
            row = SftRow(row.where, row.ids, [1] * len(row.ids), row.images)
        _keep(cfg, part, row)
    _tell(cfg, part, key, len(found) + condemned.total())
    return part


def _without_condemned(
    rows: Sequence[tuple[str, Any]], path: str
) -> tuple[list[tuple[str, Any]], Counter[str]]:
    """(the rows of which the record lets one learn, why -> how many of the others). Raises
    UserError where none is left."""
    record, allowed, left_out = read_record(Path(path)), [], Counter[str]()
    for where, row in rows:
        question = str(row.get("question_id", "")) if isinstance(row, Mapping) else ""
        episode = str(row.get("id", "")) if isinstance(row, Mapping) else ""
        if why := record.no_example(question, episode):
            left_out[why] += 1
        else:
            allowed.append((where, row))
    if not allowed:
        raise UserError(f"data.record: {path}: leaves no row to learn from. Give other rows.")
    return allowed, left_out


def _labelled(
    cfg: SftConfig, tokenizer: Any, rows: Sequence[Conversation]
) -> tuple[SftPart, list[SftRow]]:
    """The rows by the template of training, and what its check finds in all of them."""
    learned = rows[0].learned
    some = [row.turns for row in rows[:_CHOSEN_BY]]
    chosen = training_template(tokenizer, some, cfg.chat, learned=learned)
    found: list[SftRow] = []

    def each() -> Iterator[tuple[str, Labelled]]:
        with progress_bar(len(rows)) if len(rows) >= _MANY else nullcontext(int) as done:
            for row in rows:
                labelled = label(tokenizer, row.turns, cfg.chat, chosen.template, learned)
                found.append(SftRow(row.where, labelled.tokens.ids, _mask(row, labelled)))
                done(1)
                yield row.where, labelled
        for where, turns in looked_at(tokenizer, some, cfg.chat)[len(some) :]:
            yield where, label(tokenizer, turns, cfg.chat, chosen.template, learned)

    settings = load_generation_config(str(cfg.policy.path), cfg.policy.revision)
    findings = findings_of(tokenizer, each(), chosen.how, settings)
    told = () if cfg.sft.assistant_only_loss else _OF_LABELS
    part = SftPart(
        findings=[finding for finding in findings if finding.name not in told],
        template=chosen.template,
    )
    return part, found


def _mask(row: Conversation, labelled: Labelled) -> list[int]:
    """What is learned, without the turns of weight 0."""
    weights = [turn.get("weight", 1) for turn in row.turns if turn["role"] == "assistant"]
    if row.learned == "last":
        weights = weights[-1:]
    out = {number for number, weight in enumerate(weights) if not weight}
    return [int(owner >= 0 and owner not in out) for owner in labelled.tokens.owners]


def _keep(cfg: SftConfig, part: SftPart, row: SftRow) -> None:
    """Add a row, or note why not."""
    limit = cfg.data.max_length
    if 1 not in row.mask:
        part.left_out["no token is learned"] += 1
    elif limit is None or len(row.ids) <= limit:
        part.rows.append(row)
    elif cfg.data.overlong == "refuse":
        raise UserError(
            f"{row.where}: {len(row.ids)} tokens are more than data.max_length {limit}: shorten "
            "it, raise that, or set data.overlong"
        )
    elif cfg.data.overlong == "leave_out":
        part.left_out[f"more than {limit} tokens"] += 1
    else:
        short = cut_to(row, limit, through_turns=cfg.data.overlong == "cut")
        if short is None:
            part.left_out[f"no turn ends within {limit} tokens, or it has images"] += 1
        else:
            part.left_out[f"cut to {limit} tokens, and kept"] += 1
            part.rows.append(short)


def _tell(cfg: SftConfig, part: SftPart, key: str, count: int) -> None:
    """Warn of what was left out. Raises UserError where nothing else is there."""
    told = "; ".join(f"{number} of {count} rows: {why}" for why, number in part.left_out.items())
    if not part.rows:
        raise UserError(f"{key}: nothing is left to learn: {told}: raise data.max_length")
    if told:
        log.warning("%s: %s", key, told)
