"""Load the rows of a config with their labels, and count those that are left out."""

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
from trainer.chat.labels import LabeledConversation, label
from trainer.chat.message_check import MessageCheck, clean_rows
from trainer.chat.render import load_generation_config
from trainer.chat.rows import Conversation, conversations
from trainer.chat.template_check import (
    Finding,
    collect_conversations,
    findings_of,
    refuse_errors,
    training_template,
)
from trainer.rl.policy import read_config
from trainer.sft.config import SftConfig
from trainer.sft.curation_record import read_record
from trainer.sft.rows import SftRow, cut_to, has_ids, rows_of, rows_of_ids

log = logging.getLogger(__name__)
#: Number of conversations that the template of training is chosen with.
_TEMPLATE_SAMPLES = 50
#: Number of rows for which a progress bar is shown.
_PROGRESS_FROM = 1000
#: Checks without meaning if every token is trained on.
_LABEL_CHECKS = ("markers", "labelled text", "stop token", "other turns")


@dataclass(slots=True)
class SftPart:
    """Rows to train on, or held-out ones.

    left_out: reason -> number of rows.
    findings: of the chat template; none for rows of ids.
    template: with markers; None: the rows are ids.
    """

    rows: list[SftRow] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    template: str | None = None

    @property
    def counts(self) -> dict[str, Any]:
        """Return the counts for the log."""
        return {
            "rows": len(self.rows),
            "tokens": sum(len(row.ids) for row in self.rows),
            "learned_tokens": sum(sum(row.mask) for row in self.rows),
            "left_out": dict(self.left_out),
        }


def load_train(cfg: SftConfig, tokenizer: Any) -> SftPart:
    """Return the rows to train on. Raises UserError."""
    if cfg.data.train is None:
        raise UserError("data.train: required. Set the rows to train on")
    return _load(cfg, tokenizer, "data.train", cfg.data.train_split, cfg.data.train_limit)


def load_held_out(cfg: SftConfig, tokenizer: Any) -> SftPart:
    """Return the rows to measure the loss on; empty if the config names none. Raises UserError."""
    if cfg.data.eval is None:
        return SftPart()
    return _load(cfg, tokenizer, "data.eval", cfg.data.eval_split, cfg.eval.eval_limit)


def check_findings(cfg: SftConfig, part: SftPart) -> None:
    """Raise UserError if the chat template fails its check, or warn, as sft.template_check says."""
    hint = "--debug_label_mask prints all; sft.template_check: warn continues"
    refuse_errors(part.findings, cfg.sft.template_check, hint)


def _load(
    cfg: SftConfig, tokenizer: Any, key: str, split: str | None, limit: int | None
) -> SftPart:
    source = str(getattr(cfg.data, key.removeprefix("data.")))
    raw = rows_of(source, split, limit)
    dropped: Counter[str] = Counter()
    if key == "data.train" and cfg.data.record is not None:
        raw, dropped = _without_dropped(raw, cfg.data.record)
    bad_rows = cfg.data.bad_rows
    if any(has_ids(row) for _, row in raw):
        config = read_config(str(cfg.policy.path), cfg.policy.revision, "policy.path")
        source_dir = Path(source) if Path(source).is_dir() else Path(source).parent
        folder = Path(cfg.data.image_folder) if cfg.data.image_folder else source_dir
        part = SftPart()
        rows = rows_of_ids(source, raw, config.get_text_config().vocab_size - 1, folder, bad_rows)
        locations = {row.location for row in rows}
    else:
        check = MessageCheck(tokenizer, cfg.chat)
        read = conversations(source, raw, cfg.data.turns, bad_rows)
        conversation_rows = clean_rows(check, read, source, bad_rows)
        check.log_neutralized(key, len(conversation_rows))
        locations = {row.location for row in conversation_rows}
        part, rows = _label_rows(cfg, tokenizer, conversation_rows)
    if num_bad := len(raw) - len(locations):
        dropped["cannot be used (data.bad_rows)"] += num_bad
    part.left_out += dropped
    for row in rows:
        if not cfg.sft.assistant_only_loss:
            row = SftRow(row.location, row.ids, [1] * len(row.ids), row.images)
        _add_row(cfg, part, row)
    _log_left_out(cfg, part, key, len(rows) + dropped.total())
    return part


def _without_dropped(
    rows: Sequence[tuple[str, Any]], path: str
) -> tuple[list[tuple[str, Any]], Counter[str]]:
    """Return the rows that the record allows, and reason -> number of the others.

    Raises UserError if no row remains.
    """
    record, allowed, left_out = read_record(Path(path)), [], Counter[str]()
    for location, row in rows:
        question = str(row.get("question_id", "")) if isinstance(row, Mapping) else ""
        episode = str(row.get("id", "")) if isinstance(row, Mapping) else ""
        if reason := record.no_example(question, episode):
            left_out[reason] += 1
        else:
            allowed.append((location, row))
    if not allowed:
        raise UserError(f"data.record: {path}: leaves no row to train on. Name other rows")
    return allowed, left_out


def _label_rows(
    cfg: SftConfig, tokenizer: Any, rows: Sequence[Conversation]
) -> tuple[SftPart, list[SftRow]]:
    """Return the rows labeled with the template of training, and the findings of its check."""
    trained_turns = rows[0].trained_turns
    template_samples = [row.turns for row in rows[:_TEMPLATE_SAMPLES]]
    chosen = training_template(tokenizer, template_samples, cfg.chat, trained_turns=trained_turns)
    labeled_rows: list[SftRow] = []

    def label_all() -> Iterator[tuple[str, LabeledConversation]]:
        with progress_bar(len(rows)) if len(rows) >= _PROGRESS_FROM else nullcontext(int) as done:
            for row in rows:
                labeled = label(tokenizer, row.turns, cfg.chat, chosen.template, trained_turns)
                labeled_rows.append(SftRow(row.location, labeled.tokens.ids, _mask(row, labeled)))
                done(1)
                yield row.location, labeled
        for name, turns in collect_conversations(tokenizer, template_samples, cfg.chat)[
            len(template_samples) :
        ]:
            yield name, label(tokenizer, turns, cfg.chat, chosen.template, trained_turns)

    settings = load_generation_config(str(cfg.policy.path), cfg.policy.revision)
    findings = findings_of(tokenizer, label_all(), chosen.origin, settings)
    hidden_checks = () if cfg.sft.assistant_only_loss else _LABEL_CHECKS
    part = SftPart(
        findings=[finding for finding in findings if finding.name not in hidden_checks],
        template=chosen.template,
    )
    return part, labeled_rows


def _mask(row: Conversation, labeled: LabeledConversation) -> list[int]:
    """Return the labels, without the turns of weight 0."""
    weights = [turn.get("weight", 1) for turn in row.turns if turn["role"] == "assistant"]
    if row.trained_turns == "last":
        weights = weights[-1:]
    excluded = {number for number, weight in enumerate(weights) if not weight}
    return [int(owner >= 0 and owner not in excluded) for owner in labeled.tokens.owners]


def _add_row(cfg: SftConfig, part: SftPart, row: SftRow) -> None:
    """Add a row, or record why not."""
    limit = cfg.data.max_length
    if 1 not in row.mask:
        part.left_out["no token is learned"] += 1
    elif limit is None or len(row.ids) <= limit:
        part.rows.append(row)
    elif cfg.data.overlong == "refuse":
        raise UserError(
            f"{row.location}: {len(row.ids)} tokens are more than data.max_length {limit}. Shorten "
            "it, raise the limit, or set data.overlong"
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


def _log_left_out(cfg: SftConfig, part: SftPart, key: str, count: int) -> None:
    """Log what was left out. Raises UserError if no rows remain."""
    summary = "; ".join(
        f"{number} of {count} rows: {reason}" for reason, number in part.left_out.items()
    )
    if not part.rows:
        raise UserError(f"{key}: no rows remain: {summary}. Raise data.max_length")
    if summary:
        log.warning("%s: %s", key, summary)
