"""The answer keys of the questions: where an answer is on the pages, and how it is computed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

KEYS = Path(__file__).parent / "keys.json"
FINAL_KEYS = Path(__file__).parent / "final_test/keys.json"


class Spot(BaseModel):
    """A box on a page: x1, y1, x2, y2 in points, origin top left."""

    model_config = ConfigDict(extra="forbid")

    page_id: str
    box: tuple[float, float, float, float]


class Key(BaseModel):
    """Lists what must be read on the pages to answer a question.

    reads: for each value to read, the spots that show it; any one of them is enough.
    how: value: what was read, with the unit. difference: of the two figures. largest, smallest: the
    label of that figure.
    """

    model_config = ConfigDict(extra="forbid")

    question: str
    how: Literal["value", "difference", "largest", "smallest"]
    unit: str = ""
    labels: tuple[str, ...] = ()
    reads: list[list[Spot]]

    def answer(self, read: Sequence[str]) -> str:
        """Return the answer for what was read: one text for each of `reads`."""
        if self.how == "value":
            return read[0] + self.unit
        numbers = [Decimal(text.replace(",", "")) for text in read]
        if self.how == "difference":
            return f"{abs(numbers[0] - numbers[1]):,}{self.unit}"
        chosen = (max if self.how == "largest" else min)(numbers)
        return self.labels[numbers.index(chosen)]


def read_keys(path: Path = KEYS) -> list[Key]:
    """Return the keys of all questions of a corpus."""
    return [Key.model_validate(row) for row in json.loads(path.read_text(encoding="utf-8"))]
