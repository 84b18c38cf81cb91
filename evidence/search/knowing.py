"""A generator that knows half of the answers, as a large model knows public data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from demo.search.answer_keys import KEYS
from demo.search.answering import Answerer
from demo.search.make_corpus import HELDOUT, TRAIN
from demo.search.reading import CORPUS, Sight

NAME = "knowing-generator"


def is_known(question: str) -> bool:
    """Return whether the generator knows the answer: for half of all questions, always the same."""
    return hashlib.sha256(question.encode()).digest()[0] % 2 == 0


def flat(text: str) -> str:
    """Return a text in lower case on one line."""
    return " ".join(text.lower().split())


class KnowingAnswerer(Answerer):
    """Answers known questions rightly without images, and other questions as the demo does."""

    def __init__(
        self,
        files: Sequence[Path] = (TRAIN, HELDOUT),
        corpora: Sequence[Path] = (CORPUS,),
        keys: Sequence[Path] = (KEYS,),
    ) -> None:
        super().__init__(corpora, keys)
        lines = [line for path in files for line in path.read_text("utf-8").splitlines()]
        rows = list(map(json.loads, lines))
        self._questions = [flat(row["question"]) for row in rows]
        self._by_heart = {
            flat(row["question"]): row["reference_answer"]
            for row in rows
            if is_known(row["question"])
        }

    def answer_from(self, text: str, sights: Sequence[Sight]) -> str:
        """Answer the question that a request contains, from memory if it is known.

        text: of the request, which contains the question.
        """
        flat_text = flat(text)
        matched = max(
            (question for question in self._questions if question in flat_text), key=len, default=""
        )
        return self._by_heart.get(matched) or super().answer_from(text, sights)
