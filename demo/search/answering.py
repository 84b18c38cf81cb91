"""Answers questions about the corpus using only what is legible in the images."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from demo.search.answer_keys import KEYS, Key, read_keys
from demo.search.reading import CORPUS, Reader, Sight

NOT_SHOWN = "The pictures do not show it."


class Answerer:
    """Answers questions from images. The same images and question always give the same answer.

    The answer is right if every number that is needed is legible in an image. Else it is the
    legible text that looks most like an answer, which is wrong. Use it in one thread.
    """

    def __init__(self, corpora: Sequence[Path] = (CORPUS,), keys: Sequence[Path] = (KEYS,)) -> None:
        self.reader = Reader(*corpora)
        self._keys = {_flat(key.question): key for path in keys for key in read_keys(path)}

    def answer(self, text: str, images: Sequence[bytes], seed: int | None = None) -> str:
        """Answer the question that is part of a request's text.

        images: PNG or JPEG.
        seed: not used here.
        """
        sights = [sight for sight in map(self.reader.locate, images) if sight is not None]
        return self.answer_from(text, sights)

    def answer_from(self, text: str, sights: Sequence[Sight]) -> str:
        """Answer from the page regions that the images show."""
        key = self.key_of(text)
        if key and (read := self.read(key, sights)):
            return key.answer(read)
        return self._guess(_flat(text), sights)

    def key_of(self, text: str) -> Key | None:
        """Return the key of the question in a text, or None if there is none."""
        flat_text = _flat(text)
        question = max((key for key in self._keys if key in flat_text), key=len, default="")
        return self._keys.get(question)

    def read(self, key: Key, sights: Sequence[Sight]) -> list[str] | None:
        """Return the text of each spot that the key names, or None if a text is not legible."""
        read = []
        for spots in key.reads:
            texts = (self.reader.text_in(sights, spot.page_id, spot.box) for spot in spots)
            text = next(filter(None, texts), None)
            if text is None:
                return None
            read.append(text)
        return read

    def _guess(self, question: str, sights: Sequence[Sight]) -> str:
        """Return the legible line with a number that has most in common with the question."""
        lines = [line for line in self.reader.legible(sights) if re.search(r"\d", line)]
        question_pairs = _pairs(question)
        return max(
            lines, key=lambda line: len(_pairs(_flat(line)) & question_pairs), default=NOT_SHOWN
        )


def _flat(text: str) -> str:
    return " ".join(text.lower().split())


def _pairs(text: str) -> set[str]:
    return {text[index : index + 2] for index in range(len(text) - 1)}
