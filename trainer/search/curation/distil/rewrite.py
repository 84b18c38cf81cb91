"""`search rewrite`: the thoughts of distilled rows in better words, and nothing else of them."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

from PIL import Image

from scorekit.errors import UserError
from trainer.search.answer.answers import PaidAnswers
from trainer.search.config import SearchConfig
from trainer.search.curation.config import CurationConfig
from trainer.search.curation.dataset import Curated, Decision, read_decisions
from trainer.search.curation.distil.config import RewriteConfig
from trainer.search.curation.distil.distill import digest_of
from trainer.search.curation.distil.guarantees import (
    row_breach,
    thought_breach,
    with_thought,
)
from trainer.search.curation.distil.rewriter import (
    Rewriter,
    ThoughtOf,
    asked_text,
    reckoned_calls,
)
from trainer.search.curation.distil.spool import RowSpool
from trainer.search.curation.distil.targets import has_tag, thoughts
from trainer.search.curation.pages import Section, curation_page
from trainer.search.curation.spool import in_groups
from trainer.search.records import View
from trainer.search.sight.views import Shown
from trainer.search.training.sft_rows import EpisodeRows, id_columns
from trainer.search.turns.prompt import Message
from trainer.sft.curation_record import CurationRecord

log = logging.getLogger(__name__)
T = TypeVar("T")
REWRITTEN, UNCHANGED, TAGGED = "rewritten", "unchanged", "a tag in the original's thought"
NOT_ASKED = "not asked: no answer was got"
NO_RECORD = CurationRecord()
_SHOWN = 20  # thoughts before and after, on the page
_NEEDED = ("id", "question_id", "run", "messages", "input_ids", "action_mask")


class Distilled:
    """A folder that `search distill` has left. record: what was decided about its rows. Raises
    UserError where it is none, or its rows are damaged."""

    def __init__(self, folder: Path, record: CurationRecord = NO_RECORD) -> None:
        self.folder, self.record = folder, record
        self.manifest, _ = read_decisions(folder, "distill")
        self.rows_file = folder / "rows.jsonl"
        if not self.rows_file.is_file():
            raise UserError(f"{self.rows_file}: not there: distil the runs again")
        self._learners: dict[str, EpisodeRows] = {}

    def rows(self) -> Iterator[dict[str, Any]]:
        """Its rows, one in memory at a time."""
        with self.rows_file.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                try:
                    row = json.loads(line)
                except ValueError:
                    row = None
                if not isinstance(row, dict) or any(name not in row for name in _NEEDED):
                    raise UserError(f"{self.rows_file}, line {number}: is no row of `distill`")
                yield row

    def picture(self, sha256: str) -> bytes:
        """The PNG of that hash. Raises UserError."""
        path = self.folder / "images" / f"{sha256}.png"
        try:
            return path.read_bytes()
        except OSError as error:
            raise UserError(f"{path}: {error.strerror or error}: distil the runs again") from None

    def learner(self, run: str) -> EpisodeRows:
        """The model that learns, as it reads this run's episodes. Raises UserError."""
        if run not in self._learners:
            try:
                cfg = SearchConfig.model_validate(self.manifest["learner"][run])
            except (KeyError, TypeError, ValueError):
                where = self.folder / "manifest.json"
                raise UserError(f"{where}: says nothing of the run {run!r}") from None
            self._learners[run] = EpisodeRows(cfg)
        return self._learners[run]


@dataclass(frozen=True, slots=True)
class _Became:
    """Of one row: what it becomes (None: it goes) and why. changed: thoughts before and after.
    doubted: why a new thought was doubted -> how many; their originals stay."""

    row: dict[str, Any] | None
    why: str
    asked: int = 0
    changed: Sequence[tuple[str, str]] = ()
    doubted: Mapping[str, int] = field(default_factory=dict)


def make_rewritten(
    distilled: Distilled, cfg: CurationConfig, answers: Path, out: Path, spool: RowSpool
) -> Curated:
    """The rows with their thoughts rewritten, in the spool, and a decision for each.

    answers: the file of what was paid for. Raises UserError where the rewriter is not there, the
    model that learns has changed, or a picture is missing; MoneySpent. What was paid for is kept.
    """
    made = Curated("rewrite", cfg.rewrite, (), {"rows.jsonl": digest_of(distilled.rows_file)})
    shown: list[tuple[str, str]] = []
    doubted: Counter[str] = Counter()

    def done(row: Mapping[str, Any], became: _Became) -> None:
        figures = {
            "question_id": row["question_id"],
            "thoughts": became.asked,
            "changed": len(became.changed),
            "doubted": dict(became.doubted),
        }
        kept = became.row is not None
        made.decisions.append(Decision(row["id"], kept, became.why, figures, [row["id"]]))
        if became.row is not None:
            spool.put(became.row)
        if became.why == REWRITTEN:
            shown.extend(became.changed[: _SHOWN - len(shown)])
        doubted.update(became.doubted)

    asyncio.run(_rewrite_all(distilled, cfg.rewrite, answers, out, done))
    longest = spool.longest(one.row_id for one in made.decisions if one.kept)
    made.told = {
        "longest_row": longest,
        "learner": distilled.manifest["learner"],
        "doubted": dict(sorted(doubted.items())),
        "examples": [list(pair) for pair in shown],
    }
    return made


async def _rewrite_all(
    distilled: Distilled,
    cfg: RewriteConfig,
    answers: Path,
    out: Path,
    done: Callable[[Mapping[str, Any], _Became], None],
) -> None:
    """Each row in their order, and what it becomes; as many at once as there may be calls."""
    kept = PaidAnswers(answers, f"rewrite {out.absolute()}")
    try:
        rewriter = Rewriter(cfg, kept)
        try:
            await rewriter.check()
            for rows in in_groups(distilled.rows(), cfg.rewriter.max_requests):
                tasks = [_rewritten(row, distilled, rewriter, cfg) for row in rows]
                for row, became in zip(rows, await _all(tasks), strict=True):
                    done(row, became)
                log.info("rewritten up to %s; %s", rows[-1]["id"], rewriter.spent())
        finally:
            await rewriter.close()
    finally:
        kept.close()


async def _all(jobs: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """What each gives; where one raises, the others are given up."""
    tasks = [asyncio.create_task(job) for job in jobs]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _rewritten(
    row: dict[str, Any], distilled: Distilled, rewriter: Rewriter, cfg: RewriteConfig
) -> _Became:
    """What becomes of a row."""
    if why := _removed(row, distilled):
        return _Became(None, why)
    asked = _asked(row)
    calls = in_groups(asked, cfg.messages_per_call)
    answers = await _all([rewriter.rewritten(_question(row), call) for call in calls])
    fallen = row if cfg.broken == "original" else None
    if any(answer is None for answer in answers):
        return _Became(fallen, NOT_ASKED, len(asked))
    new = {turn: thought for answer in answers if answer for turn, thought in answer.items()}
    if set(new) != {one.turn for one in asked}:
        return _Became(fallen, "other structure", len(asked))
    new, doubted = _without_doubtful(asked, new, cfg)
    if doubted and cfg.broken == "drop":
        return _Became(None, next(iter(doubted)), len(asked), (), doubted)
    messages, changed = _with_thoughts(row["messages"], asked, new)
    if not changed:
        return _Became(row, next(iter(doubted), UNCHANGED), len(asked), (), doubted)
    if fault := row_breach(row["messages"], messages, cfg.longer_at_most):
        return _Became(fallen, fault, len(asked), changed, doubted)
    columns = _ids(row, messages, distilled)
    if isinstance(columns, str):
        return _Became(fallen, columns, len(asked), changed, doubted)
    made = {**row, "messages": messages, **columns}
    return _Became(made, REWRITTEN, len(asked), changed, doubted)


def _removed(row: Mapping[str, Any], distilled: Distilled) -> str | None:
    """Why a row goes before anybody is asked: it was condemned since, or a thought has a tag."""
    if why := distilled.record.no_example(row["question_id"], row["id"]):
        return why
    texts = (message["content"] for message in row["messages"] if message["role"] == "assistant")
    if any(has_tag(thought) for text in texts for thought in thoughts(text, unclosed=True)):
        return TAGGED
    return None


def _without_doubtful(
    asked: Sequence[ThoughtOf], new: Mapping[int, str], cfg: RewriteConfig
) -> tuple[dict[int, str], dict[str, int]]:
    """(turn -> its new thought, or the original where the new one is doubtful; why -> how many)."""
    trusted, doubted = dict(new), Counter[str]()
    for one in asked:
        thought = new[one.turn].strip()
        if thought == one.thought:
            continue
        if fault := thought_breach(one.thought, thought, cfg.longer_at_most):
            trusted[one.turn] = one.thought
            doubted[fault] += 1
    return trusted, dict(doubted)


def _asked(row: Mapping[str, Any]) -> list[ThoughtOf]:
    """The thoughts of the turns that are learned, those that say something."""
    replies = [n for n, message in enumerate(row["messages"]) if message["role"] == "assistant"]
    learned = [n for turn, n in enumerate(replies) if turn not in row.get("leave_out", ())]
    found = []
    for n in learned:
        text = row["messages"][n]["content"]
        action = text.rpartition("</think>")[2].strip()
        found += [ThoughtOf(n, action, of.strip()) for of in thoughts(text) if of.strip()]
    return found


def _question(row: Mapping[str, Any]) -> str:
    asked = next(message for message in row["messages"] if message["role"] == "user")
    return str(asked["content"]).removeprefix("Question: ")


def _with_thoughts(
    messages: Sequence[Mapping[str, Any]], asked: Sequence[ThoughtOf], new: Mapping[int, str]
) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
    """The messages with other thoughts, the blanks around each as they were; and what changed."""
    made, changed = [dict(message) for message in messages], []
    for one in asked:
        text, thought = made[one.turn]["content"], new[one.turn].strip()
        if thought != one.thought:
            changed.append((one.thought, thought))
            (before,) = thoughts(text)
            made[one.turn]["content"] = with_thought(text, before.replace(one.thought, thought, 1))
    return made, changed


def _ids(
    row: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], distilled: Distilled
) -> dict[str, list[int]] | str:
    """Ids and mask of a conversation, made by the code that makes those of an episode; or why it
    has none. Raises UserError where the model that learns is not the one that it was."""
    episode = distilled.learner(row["run"]).joined(_read_messages(messages, row, distilled))
    if isinstance(episode, str):
        return episode
    if row["input_ids"][: len(episode.prompt_ids)] != episode.prompt_ids:
        raise UserError(
            f"{distilled.folder}: {row['id']}: the model that learns, or its chat template, is "
            "another than when it was distilled: distil the runs again"
        )
    return id_columns(episode)


def _read_messages(
    messages: Sequence[Mapping[str, Any]], row: Mapping[str, Any], distilled: Distilled
) -> list[Message]:
    """As they were before `template_messages`."""
    images = iter(row.get("images", ()))
    found = []
    for message in messages:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        texts = [part["text"] for part in parts if part["type"] == "text"]
        shown = [
            _shown(distilled.picture(Path(next(images)).stem))
            for part in parts
            if part["type"] == "image"
        ]
        found.append(Message(message["role"], "".join(texts), tuple(shown)))
    return found


def _shown(png: bytes) -> Shown:
    """A picture, of which a reader asks no more than its size."""
    with Image.open(BytesIO(png)) as picture:
        width, height = picture.size
    view = View(
        kind="page",
        page_id="",
        width=width,
        height=height,
        region=(0.0, 0.0, float(width), float(height)),
        page_width=width,
        page_height=height,
        image="",
    )
    return Shown(view, png)


def estimated(distilled: Distilled, cfg: RewriteConfig) -> list[str]:
    """What rewriting asks for at most, in words; nobody is asked."""
    texts: list[str] = []
    for row in distilled.rows():
        if _removed(row, distilled) is None:
            asked = _asked(row)
            calls = in_groups(asked, cfg.messages_per_call)
            texts += [asked_text(_question(row), call) for call in calls]
    return reckoned_calls(texts, cfg)


def rewritten_rows(
    made: Curated, spool: RowSpool, distilled: Distilled
) -> Iterator[tuple[dict[str, Any], Callable[[str], bytes]]]:
    """The rows that are kept, in their order, each with what gives its pictures."""
    for one in made.decisions:
        if one.kept:
            yield spool.get(one.row_id), distilled.picture


def rewrite_page(made: Curated, prompts: Mapping[str, Any]) -> str:
    """report.html: what became of the rows, and some thoughts before and after."""
    counts: dict[str, int] = {}
    for one in made.decisions:
        counts[one.reason] = counts.get(one.reason, 0) + 1
    sections = [
        Section("Rows", [], ["what became of them", "rows"], [list(of) for of in counts.items()]),
        Section(
            "Thoughts in doubt",
            ["The original stays."],
            ["why the new one is doubtful", "thoughts"],
            [list(of) for of in made.told["doubted"].items()],
        ),
        Section("Thoughts", [], ["before", "after"], made.told["examples"]),
    ]
    return curation_page(made, "Rewritten thoughts", sections, prompts)
