"""The command `search rewrite`: rewrite only the thoughts of distilled rows."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from scorekit.documents import parse_json
from scorekit.errors import UserError
from scorekit.net.tasks import gather_or_cancel
from scorekit.paid.account import (
    STORED_ARE_FREE,
    format_totals,
    max_usage,
    planned_charges,
)
from scorekit.paid.store import open_store
from trainer.search.answer.config import SEARCH
from trainer.search.answer.models import estimated_words
from trainer.search.config import SearchConfig
from trainer.search.curation.config import CurationConfig
from trainer.search.curation.config_sections import RewriteConfig
from trainer.search.curation.dataset import CurationResult, Decision, read_decisions
from trainer.search.curation.disk_spool import in_groups
from trainer.search.curation.pages import Section, curation_page
from trainer.search.curation.samples import digest_of
from trainer.search.distillation.guarantees import (
    row_breach,
    thought_breach,
    with_thought,
)
from trainer.search.distillation.rewriter import NAME, OriginalThought, Rewriter, thoughts_prompt
from trainer.search.distillation.spool import RowSpool
from trainer.search.distillation.targets import has_tag, thoughts
from trainer.search.images.views import ShownImage
from trainer.search.records import ImageView
from trainer.search.rollout.prompt import Message
from trainer.search.training.sft_rows import EpisodeRows, id_columns
from trainer.sft.curation_record import CurationRecord

log = logging.getLogger(__name__)
REWRITTEN, UNCHANGED, TAGGED = "rewritten", "unchanged", "a tag in the original's thought"
NOT_ASKED = "not asked: no answer was got"
_SHOWN = 20  # max examples on the page
_NEEDED = ("id", "question_id", "run", "messages", "input_ids", "action_mask")


class Distilled:
    """An output folder of `search distill`. record: decisions about its rows.

    Raises UserError if it is another folder or its rows are damaged.
    """

    def __init__(self, folder: Path, record: CurationRecord) -> None:
        self.folder, self.record = folder, record
        self.manifest, _ = read_decisions(folder, "distill")
        self.rows_file = folder / "rows.jsonl"
        if not self.rows_file.is_file():
            raise UserError(f"{self.rows_file}: does not exist. Run `search distill` again.")
        self._learners: dict[str, EpisodeRows] = {}

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield its rows, with one in memory at a time."""
        with self.rows_file.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    row = parse_json(line)
                except ValueError:
                    row = None
                if not isinstance(row, dict) or any(name not in row for name in _NEEDED):
                    raise UserError(f"{self.rows_file}, line {number}: not a row of `distill`")
                yield row

    def read_image(self, sha256: str) -> bytes:
        """Return the PNG of a hash. Raises UserError."""
        path = self.folder / "images" / f"{sha256}.png"
        try:
            return path.read_bytes()
        except OSError as error:
            raise UserError(
                f"{path}: {error.strerror or error}. Run `search distill` again."
            ) from None

    def learner(self, run: str) -> EpisodeRows:
        """Return the row builder of a run for the model to train. Raises UserError."""
        if run not in self._learners:
            try:
                cfg = SearchConfig.model_validate(self.manifest["learner"][run])
            except (KeyError, TypeError, ValueError):
                path = self.folder / "manifest.json"
                raise UserError(f"{path}: has no entry of the run {run!r}") from None
            self._learners[run] = EpisodeRows(cfg)
        return self._learners[run]


@dataclass(frozen=True, slots=True)
class _RowOutcome:
    """The outcome of a row: the new row (None: dropped) and the reason.

    changed: thoughts before and after. doubted: reason -> number of rejected new thoughts, whose
    originals are kept.
    """

    row: dict[str, Any] | None
    reason: str
    num_requests: int = 0
    changed: Sequence[tuple[str, str]] = ()
    doubted: Mapping[str, int] = field(default_factory=dict)


def make_rewritten(
    distilled: Distilled, cfg: CurationConfig, answers: str, out: Path, spool: RowSpool
) -> CurationResult:
    """Put the rows with rewritten thoughts into the spool and return a decision for each.

    answers: file or Redis of paid answers. Raises UserError if the rewriter is unavailable, the
    model to train has changed, or an image is missing; BudgetExceeded. Paid answers stay stored.
    """
    curated = CurationResult(
        "rewrite", cfg.rewrite, (), {"rows.jsonl": digest_of(distilled.rows_file)}
    )
    examples: list[tuple[str, str]] = []
    doubted: Counter[str] = Counter()

    def add_outcome(row: Mapping[str, Any], outcome: _RowOutcome) -> None:
        stats = {
            "question_id": row["question_id"],
            "thoughts": outcome.num_requests,
            "changed": len(outcome.changed),
            "doubted": dict(outcome.doubted),
        }
        is_kept = outcome.row is not None
        curated.decisions.append(Decision(row["id"], is_kept, outcome.reason, stats, [row["id"]]))
        if outcome.row is not None:
            spool.put(outcome.row)
        if outcome.reason == REWRITTEN:
            examples.extend(outcome.changed[: _SHOWN - len(examples)])
        doubted.update(outcome.doubted)

    asyncio.run(_rewrite_all(distilled, cfg.rewrite, answers, out, add_outcome))
    longest = spool.longest(decision.row_id for decision in curated.decisions if decision.is_kept)
    curated.manifest_extra = {
        "longest_row": longest,
        "learner": distilled.manifest["learner"],
        "doubted": dict(sorted(doubted.items())),
        "examples": [list(pair) for pair in examples],
    }
    return curated


async def _rewrite_all(
    distilled: Distilled,
    cfg: RewriteConfig,
    answers: str,
    out: Path,
    done: Callable[[Mapping[str, Any], _RowOutcome], None],
) -> None:
    """Rewrite all rows in order, as many concurrently as calls are allowed."""
    store = open_store(answers, SEARCH, f"rewrite {out.absolute()}")
    try:
        rewriter = Rewriter(cfg, store)
        try:
            await rewriter.chat.check()
            for rows in in_groups(distilled.rows(), cfg.rewriter.max_requests):
                tasks = [_rewritten(row, distilled, rewriter, cfg) for row in rows]
                for row, outcome in zip(rows, await gather_or_cancel(tasks), strict=True):
                    done(row, outcome)
                log.info("rewritten up to %s; %s", rows[-1]["id"], rewriter.spent())
        finally:
            await rewriter.chat.close()
    finally:
        await store.close()


async def _rewritten(
    row: dict[str, Any], distilled: Distilled, rewriter: Rewriter, cfg: RewriteConfig
) -> _RowOutcome:
    """Return the outcome of a row."""
    if reason := _removed(row, distilled):
        return _RowOutcome(None, reason)
    originals = _thoughts_to_rewrite(row)
    calls = in_groups(originals, cfg.messages_per_call)
    answers = await gather_or_cancel([rewriter.rewritten(_question(row), call) for call in calls])
    fallback = row if cfg.broken == "original" else None
    if any(answer is None for answer in answers):
        return _RowOutcome(fallback, NOT_ASKED, len(originals))
    new = {turn: thought for answer in answers if answer for turn, thought in answer.items()}
    if set(new) != {original.turn for original in originals}:
        return _RowOutcome(fallback, "other structure", len(originals))
    new, doubted = _without_doubtful(originals, new, cfg)
    if doubted and cfg.broken == "drop":
        return _RowOutcome(None, next(iter(doubted)), len(originals), (), doubted)
    messages, changed = _with_thoughts(row["messages"], originals, new)
    if not changed:
        return _RowOutcome(row, next(iter(doubted), UNCHANGED), len(originals), (), doubted)
    if breach := row_breach(row["messages"], messages, cfg.longer_at_most):
        return _RowOutcome(fallback, breach, len(originals), changed, doubted)
    columns = _ids(row, messages, distilled)
    if isinstance(columns, str):
        return _RowOutcome(fallback, columns, len(originals), changed, doubted)
    new_row = {**row, "messages": messages, **columns}
    return _RowOutcome(new_row, REWRITTEN, len(originals), changed, doubted)


def _removed(row: Mapping[str, Any], distilled: Distilled) -> str | None:
    """Return why a row is dropped without a call (a decision, or a tag in a thought), or None."""
    if reason := distilled.record.no_example(row["question_id"], row["id"]):
        return reason
    texts = (message["content"] for message in row["messages"] if message["role"] == "assistant")
    if any(has_tag(thought) for text in texts for thought in thoughts(text, unclosed=True)):
        return TAGGED
    return None


def _without_doubtful(
    originals: Sequence[OriginalThought], new: Mapping[int, str], cfg: RewriteConfig
) -> tuple[dict[int, str], dict[str, int]]:
    """Return (turn -> new thought, or the original for an invalid one; reason -> count)."""
    trusted, doubted = dict(new), Counter[str]()
    for original in originals:
        thought = new[original.turn].strip()
        if thought == original.thought:
            continue
        if breach := thought_breach(original.thought, thought, cfg.longer_at_most):
            trusted[original.turn] = original.thought
            doubted[breach] += 1
    return trusted, dict(doubted)


def _thoughts_to_rewrite(row: Mapping[str, Any]) -> list[OriginalThought]:
    """Return the thoughts that are not empty of all turns with loss."""
    replies = [n for n, message in enumerate(row["messages"]) if message["role"] == "assistant"]
    indices = [n for turn, n in enumerate(replies) if turn not in row.get("leave_out", ())]
    items = []
    for n in indices:
        text = row["messages"][n]["content"]
        action = text.rpartition("</think>")[2].strip()
        items += [
            OriginalThought(n, action, thought.strip())
            for thought in thoughts(text)
            if thought.strip()
        ]
    return items


def _question(row: Mapping[str, Any]) -> str:
    message_ = next(message for message in row["messages"] if message["role"] == "user")
    return str(message_["content"]).removeprefix("Question: ")


def _with_thoughts(
    messages: Sequence[Mapping[str, Any]],
    originals: Sequence[OriginalThought],
    new: Mapping[int, str],
) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
    """Return the messages with new thoughts, with unchanged blanks, and the changed pairs."""
    new_messages, changed = [dict(message) for message in messages], []
    for original in originals:
        text, thought = new_messages[original.turn]["content"], new[original.turn].strip()
        if thought != original.thought:
            changed.append((original.thought, thought))
            (before,) = thoughts(text)
            new_messages[original.turn]["content"] = with_thought(
                text, before.replace(original.thought, thought, 1)
            )
    return new_messages, changed


def _ids(
    row: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], distilled: Distilled
) -> dict[str, list[int]] | str:
    """Return ids and mask of a conversation, or the reason why there are none.

    They come from the code for episodes. Raises UserError if the model to train has changed.
    """
    episode = distilled.learner(row["run"]).joined(_read_messages(messages, row, distilled))
    if isinstance(episode, str):
        return episode
    if row["input_ids"][: len(episode.prompt_ids)] != episode.prompt_ids:
        raise UserError(
            f"{distilled.folder}: {row['id']}: the model to train, or its chat template, has "
            "changed since the row was distilled. Run `search distill` again."
        )
    return id_columns(episode)


def _read_messages(
    messages: Sequence[Mapping[str, Any]], row: Mapping[str, Any], distilled: Distilled
) -> list[Message]:
    """Return the messages in the form before `template_messages`."""
    images = iter(row.get("images", ()))
    result = []
    for message in messages:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        texts = [part["text"] for part in parts if part["type"] == "text"]
        images_of_message = [
            _image(distilled.read_image(Path(next(images)).stem))
            for part in parts
            if part["type"] == "image"
        ]
        result.append(Message(message["role"], "".join(texts), tuple(images_of_message)))
    return result


def _image(png: bytes) -> ShownImage:
    """Return an image; the processor needs only its size."""
    with Image.open(BytesIO(png)) as opened:
        width, height = opened.size
    view = ImageView(
        kind="page",
        page_id="",
        width=width,
        height=height,
        region=(0.0, 0.0, float(width), float(height)),
        page_width=width,
        page_height=height,
        image="",
    )
    return ShownImage(view, png)


def estimated(distilled: Distilled, cfg: RewriteConfig) -> list[str]:
    """Return lines about the max calls, tokens and cost of rewriting, without a call.

    Stored answers cost nothing.
    """
    usages = []
    for row in distilled.rows():
        if _removed(row, distilled) is None:
            for call in in_groups(_thoughts_to_rewrite(row), cfg.messages_per_call):
                text = thoughts_prompt(_question(row), call)
                usages.append(max_usage(cfg.rewriter, estimated_words(cfg.rewriter.system, text)))
    charges = planned_charges({NAME: usages}, {NAME: cfg.price})
    return [f"at most: {format_totals(charges)}", STORED_ARE_FREE]


def rewrite_page(curated: CurationResult, prompts: Mapping[str, Any]) -> str:
    """Return report.html: outcomes of rows, and examples of thoughts before and after."""
    counts = Counter(decision.reason for decision in curated.decisions)
    sections = [
        Section("Rows", [], ["what became of them", "rows"], list(counts.items())),
        Section(
            "Thoughts in doubt",
            ["The original stays."],
            ["why the new one is doubtful", "thoughts"],
            list(curated.manifest_extra["doubted"].items()),
        ),
        Section("Thoughts", [], ["before", "after"], curated.manifest_extra["examples"]),
    ]
    return curation_page(curated, "Rewritten thoughts", sections, prompts)
