"""Wrong references in a copy of the search demo's questions, planted by a seed."""

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
    """The demo's questions to learn from, as they are."""
    lines = (HERE / "questions.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def plant(
    rows: list[dict[str, Any]], reader: Reader, seed: int
) -> tuple[list[dict[str, Any]], set[str]]:
    """(rows, ids of those that are wrong now): of `SHARE` of them the reference is what one gets
    who takes another figure of the gold page for the right one. It is a mistake that a verifier
    makes, too: one that makes the same confirms the reference."""
    keys = {key.question: key for key in read_keys()}
    draw = random.Random(f"plant {seed}")
    chosen = {row["id"] for row in draw.sample(rows, round(SHARE * len(rows)))}
    made, wrong = [], set()
    for row in rows:
        others = _misread(keys[row["question"]], reader) - {row["reference_answer"]}
        if row["id"] in chosen and others:
            wrong.add(row["id"])
            row = row | {"reference_answer": draw.choice(sorted(others))}
        made.append(row)
    return made, wrong


def _misread(key: Key, reader: Reader) -> set[str]:
    """The answers of who reads one figure wrong."""
    spots = [of[0] for of in key.reads]
    read = [reader.pages[spot.page_id].text_at(spot.box) for spot in spots]
    found = set()
    for place, spot in enumerate(spots):
        for line, _ in reader.pages[spot.page_id].lines:
            if _FIGURE.fullmatch(line):
                found.add(key.answer([*read[:place], line, *read[place + 1 :]]))
    return found


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """As JSON lines."""
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")
