"""Adds to true pairs what a chat model adds to a translation: tests/data/chatter."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from bench.common import ROOT
from scorekit.text.rules import Pair

FOLDER = ROOT / "tests/data/chatter"
#: The rules were made with the first; the second was read when they were done.
HALVES = ("work", "unseen")
#: Target language -> source language of the pairs.
SOURCES = {"ko": "en", "en": "ko", "de": "en", "zh": "en"}


class Template(NamedTuple):
    """An answer of a chat model.

    text: <mt>, <alt>, <src> are replaced by a translation, another wording of it, and the source.
    """

    kind: str
    lang: str
    text: str

    def filled(self, src: str, mt: str, alt: str = "") -> str:
        return self.text.replace("<mt>", mt).replace("<alt>", alt).replace("<src>", src)


def templates(half: str) -> list[Template]:
    """Return the templates of a half, in file order."""
    lines = (FOLDER / f"{half}.txt").read_text(encoding="utf-8").splitlines()
    rows = (line.split("\t") for line in lines if not line.startswith("#"))
    escapes = {r"\n": "\n", r"\t": "\t", r"\s": " "}
    matches = []
    for kind, lang, text in rows:
        for escaped, char in escapes.items():
            text = text.replace(escaped, char)
        matches.append(Template(kind, lang, text))
    return matches


def chatter(
    half: str, prose: Mapping[str, Sequence[tuple[str, str]]], num_pairs: int = 10
) -> Iterator[tuple[str, Pair]]:
    """Yield (kind, pair): each template with the four pairs of its language that have another
    wording.

    A template that needs none gets `num_pairs` more of `prose` (target language -> true pairs).
    """
    lines = (FOLDER / "pairs.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    for number, template in enumerate(templates(half)):
        lang = template.lang
        pairs = [(row["src"], row["mt"], row["alt"]) for row in rows if row["lang"] == lang]
        if "<alt>" not in template.text:
            more = prose[lang][3 * number :: len(prose[lang]) // num_pairs][:num_pairs]
            pairs += [(src, mt, "") for src, mt in more]
        for src, mt, alt in pairs:
            yield template.kind, Pair(src, template.filled(src, mt, alt), SOURCES[lang], lang)
