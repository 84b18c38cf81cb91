"""Plants wrong references in a copy of the search demo's questions, by a seed."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

from demo.search.answer_keys import Key, read_keys
from demo.search.reading import Reader
from demo.search.run import HERE

SHARE = 0.15
_FIGURE = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def read_rows() -> list[dict[str, Any]]:
    """Read the demo's training questions."""
    lines = (HERE / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def plant(
    rows: list[dict[str, Any]], reader: Reader, seed: int
) -> tuple[list[dict[str, Any]], set[str]]:
    """Return (rows, ids of the wrong ones) with wrong references planted in `SHARE` of the rows.

    A wrong reference is what a reader answers who takes another number of the gold page for the
    right one. A verifier can make the same mistake: it then confirms the reference.
    """
    keys = {key.question: key for key in read_keys()}
    draw = random.Random(f"plant {seed}")
    chosen = {row["id"] for row in draw.sample(rows, round(SHARE * len(rows)))}
    planted_rows, wrong = [], set()
    for row in rows:
        wrong_answers = _misread(keys[row["question"]], reader) - {row["reference_answer"]}
        if row["id"] in chosen and wrong_answers:
            wrong.add(row["id"])
            row = row | {"reference_answer": draw.choice(sorted(wrong_answers))}
        planted_rows.append(row)
    return planted_rows, wrong


def _misread(key: Key, reader: Reader) -> set[str]:
    """Return the answers of a reader who misreads one number."""
    spots = [candidate_spots[0] for candidate_spots in key.reads]
    read = [reader.pages[spot.page_id].text_at(spot.box) for spot in spots]
    answers = set()
    for index, spot in enumerate(spots):
        for line, _ in reader.pages[spot.page_id].lines:
            if _FIGURE.fullmatch(line):
                answers.add(key.answer([*read[:index], line, *read[index + 1 :]]))
    return answers


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as JSON lines."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")


def write_questions(path: Path, every: int, seed: int) -> set[str]:
    """Write every n-th of the demo's questions, 15 % with a wrong reference; return the ids of
    those.
    """
    planted_rows, wrong = plant(read_rows()[::every], Reader(), seed)
    write_rows(path, [row | {"alternatives": {}} for row in planted_rows])
    return wrong
