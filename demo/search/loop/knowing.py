"""A generator that knows a part of the answers by heart, as a large model knows public data."""

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


def is_known(question: str, one_in: int = 2) -> bool:
    """Return whether the answer is known: of one in so many questions, always the same ones."""
    return hashlib.sha256(question.encode()).digest()[0] % one_in == 0


def flat(text: str) -> str:
    """Return a text in lower case on one line."""
    return " ".join(text.lower().split())


class KnowingAnswerer(Answerer):
    """Answers known questions rightly without images, and other questions as the demo does.

    one_in: of the questions in `files` one in so many is known.
    distracted: the share of the sets of pages that make it answer from them alone, although it
    knows the answer.
    """

    def __init__(
        self,
        files: Sequence[Path] = (TRAIN, HELDOUT),
        corpora: Sequence[Path] = (CORPUS,),
        keys: Sequence[Path] = (KEYS,),
        *,
        one_in: int = 2,
        distracted: float = 0.0,
    ) -> None:
        super().__init__(corpora, keys)
        self._distracted = distracted
        lines = [line for path in files for line in path.read_text("utf-8").splitlines()]
        rows = list(map(json.loads, lines))
        self._questions = [flat(row["question"]) for row in rows]
        self._by_heart = {
            flat(row["question"]): row["reference_answer"]
            for row in rows
            if is_known(row["question"], one_in)
        }

    def answer_from(self, text: str, sights: Sequence[Sight]) -> str:
        """Answer the question that a request contains, from memory if it is known.

        text: of the request, which contains the question.
        """
        flat_text = flat(text)
        matched = max(
            (question for question in self._questions if question in flat_text), key=len, default=""
        )
        memorized_answer = self._by_heart.get(matched)
        if memorized_answer is None or self._is_distracted(matched, sights):
            return super().answer_from(text, sights)
        return memorized_answer

    def _is_distracted(self, question: str, sights: Sequence[Sight]) -> bool:
        """Return whether these pages make it forget what it knows; without pages it never does."""
        page_ids = sorted({sight.page.page_id for sight in sights})
        digest = hashlib.sha256(" ".join([question, *page_ids]).encode()).digest()
        return bool(page_ids) and digest[0] < 256 * self._distracted
