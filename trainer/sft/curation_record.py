"""The record of curation's decisions about questions and their episodes.

All commands that decide write this one format, and later commands read it:

FOLDER/record.jsonl
    {"question": "q1", "episode": null, "step": "verify", "verdict": "drop", "reason": "GT_ERROR"}

A record has the newest entry of each step about a question or an episode.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import Field, TypeAdapter, ValidationError

from scorekit.errors import UserError

FILE: Final = "record.jsonl"
#: drop: condemned. doubt: suspected; `verify` may clear it. open: a call failed, so nothing was
#: decided. keep: examined and right.
Verdict = Literal["drop", "doubt", "open", "keep"]
#: The step whose `keep` clears what others only suspect.
VERIFY: Final = "verify"
EXCLUDE: Final = "exclude"
_WORDS: Final = {VERIFY: "verified", "diagnose": "diagnosed"}


@dataclass(frozen=True, slots=True)
class RecordEntry:
    """One decision.

    episode: run/trajectory; None: the decision is about the whole question.
    """

    question_id: Annotated[str, Field(validation_alias="question")]
    step: str
    verdict: Verdict
    reason: str
    episode: str | None = None

    @property
    def text(self) -> str:
        """Return the decision as commands show and count it."""
        if self.step == EXCLUDE:
            return "excluded by hand"
        return f"{_WORDS.get(self.step, self.step)}: {self.reason}"


class CurationRecord:
    """Decisions about questions and episodes, each looked up by its id."""

    def __init__(self, entries: Iterable[RecordEntry] = ()) -> None:
        self._questions: dict[str, dict[str, RecordEntry]] = {}
        self._episodes: dict[str, dict[str, RecordEntry]] = {}
        self.update(entries)

    def update(self, entries: Iterable[RecordEntry]) -> None:
        """Add newer entries. One that is `open` replaces no decision of the same step."""
        for entry in entries:
            table = self._questions if entry.episode is None else self._episodes
            steps = table.setdefault(entry.episode or entry.question_id, {})
            if entry.verdict != "open" or entry.step not in steps:
                steps[entry.step] = entry

    def __iter__(self) -> Iterator[RecordEntry]:
        for table in (self._questions, self._episodes):
            for steps in table.values():
                yield from steps.values()

    def question(self, question_id: str, step: str) -> RecordEntry | None:
        """Return what a step has decided about a question."""
        return self._questions.get(question_id, {}).get(step)

    def dropped(self, question_id: str) -> RecordEntry | None:
        """Return the entry that condemns a question; None if no step does."""
        steps = self._questions.get(question_id, {})
        return next((entry for entry in steps.values() if entry.verdict == "drop"), None)

    def doubted(self, question_id: str) -> RecordEntry | None:
        """Return the entry that leaves a question in doubt, unless `verify` has cleared it."""
        steps = self._questions.get(question_id, {})
        verified = steps.get(VERIFY)
        if verified is not None and verified.verdict == "keep":
            return None
        return next((entry for entry in steps.values() if entry.verdict in ("doubt", "open")), None)

    def episode(self, episode: str) -> RecordEntry | None:
        """Return the strictest decision about one episode."""
        entries = self._episodes.get(episode, {}).values()
        return min(entries, key=lambda entry: _VERDICTS.index(entry.verdict), default=None)

    def no_example(self, question_id: str, episode: str | None) -> str | None:
        """Return why nothing may be learned from an episode of a question; None if it may be."""
        entry = self.dropped(question_id) or self.doubted(question_id)
        if entry is None and episode is not None:
            entry = self.episode(episode)
            entry = None if entry is None or entry.verdict == "keep" else entry
        return None if entry is None else entry.text

    def write(self, path: Path) -> None:
        """Write the record as JSON lines."""
        with path.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(_line(entry), ensure_ascii=False) + "\n" for entry in self)


_VERDICTS: Final[tuple[Verdict, ...]] = get_args(Verdict)
_ENTRY: Final = TypeAdapter(RecordEntry)


def read_record(path: Path) -> CurationRecord:
    """Return the record in a file, or in a folder that has one. Raises UserError."""
    path = path / FILE if path.is_dir() else path
    try:
        # Not `splitlines`: an id may have U+2028.
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path}: cannot be read ({error}). Name a folder of `search diagnose`, "
            "`hallucinations` or `verify`, or its record.jsonl."
        ) from None
    return CurationRecord(
        _entry(line, f"{path}, line {n}") for n, line in enumerate(lines, 1) if line
    )


def _line(entry: RecordEntry) -> dict[str, Any]:
    return {
        "question": entry.question_id,
        "episode": entry.episode,
        "step": entry.step,
        "verdict": entry.verdict,
        "reason": entry.reason,
    }


def _entry(line: str, location: str) -> RecordEntry:
    try:
        return _ENTRY.validate_json(line, strict=True)
    except ValidationError:
        raise UserError(
            f"{location}: is no decision. Let the command write the record again."
        ) from None
