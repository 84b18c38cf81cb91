"""Answers a question about the corpus from pictures, as a reader who sees nothing else would."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from demo.search.answer_keys import KEYS, Key, read_keys
from demo.search.reading import CORPUS, Reader, Sight

NOT_SHOWN = "The pictures do not show it."


class Answerer:
    """The same pictures and question give the same answer, always.

    Right where every figure that is needed is legible in a picture; else what looks most like an
    answer among what is legible, which is wrong. Use it in one thread.
    """

    def __init__(self, corpora: Sequence[Path] = (CORPUS,), keys: Sequence[Path] = (KEYS,)) -> None:
        self.reader = Reader(*corpora)
        self._keys = {_flat(key.question): key for path in keys for key in read_keys(path)}

    def answer(self, text: str, pictures: Sequence[bytes], seed: int | None = None) -> str:
        """text: of the request; the question stands in it somewhere. pictures: PNG or JPEG. seed:
        changes nothing here."""
        sights = [sight for sight in map(self.reader.locate, pictures) if sight is not None]
        return self.answer_from(text, sights)

    def answer_from(self, text: str, sights: Sequence[Sight]) -> str:
        """The same from what the pictures show."""
        key = self.key_of(text)
        if key and (read := self.read(key, sights)):
            return key.answer(read)
        return self._guess(_flat(text), sights)

    def key_of(self, text: str) -> Key | None:
        """The key to the question that stands in a text; None where none does."""
        asked = _flat(text)
        known = max((question for question in self._keys if question in asked), key=len, default="")
        return self._keys.get(known)

    def read(self, key: Key, sights: Sequence[Sight]) -> list[str] | None:
        """What the key names, one text each; None where something is not legible."""
        read = []
        for spots in key.reads:
            found = (self.reader.text_in(sights, spot.page_id, spot.box) for spot in spots)
            text = next(filter(None, found), None)
            if text is None:
                return None
            read.append(text)
        return read

    def _guess(self, asked: str, sights: Sequence[Sight]) -> str:
        """The legible line with a figure that has most in common with the question."""
        lines = [line for line in self.reader.legible(sights) if re.search(r"\d", line)]
        wanted = _pairs(asked)
        return max(lines, key=lambda line: len(_pairs(_flat(line)) & wanted), default=NOT_SHOWN)


def _flat(text: str) -> str:
    return " ".join(text.lower().split())


def _pairs(text: str) -> set[str]:
    return {text[place : place + 2] for place in range(len(text) - 1)}
