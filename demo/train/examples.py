"""Labelled examples for the two metrics, as token ids of the shared vocabulary.

Score label: 25 x (1 - sentence chrF / 100) against the true translation (0 best, 25 worst).
Tag labels (0 none, 1 minor, 2 major, 3 critical), one a candidate token: for policy samples from
the edit operations against the true translation, for corrupted translations from the spans that
the corruption reports.
"""

from __future__ import annotations

import difflib
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from demo.train import corrupt
from demo.train.common import sentence_chrf
from demo.train.data import DATA, read_jsonl

SEVERITIES = {"minor": 1, "major": 2, "critical": 3}
LATIN = re.compile(r"[A-Za-z]")


@dataclass
class Example:
    """One candidate with its labels.

    It has the ids of source, candidate and reference, the score and tag labels, and for every
    candidate token the true token that should be in its place (-1 if it is right or unclear).
    """

    src: list[int]
    mt: list[int]
    ref: list[int]
    score: float
    tags: list[int]
    fixes: list[int]
    kind: str


class Labeller:
    """Turns texts into examples."""

    def __init__(
        self,
        tokenizer: Any,
        untranslated: re.Pattern[str] = LATIN,
        quality: Callable[[str, str], float] = sentence_chrf,
    ) -> None:
        """Keep the texts of all tokens.

        untranslated: matches letters of the source's script.
        quality: of (sample, reference), 0 to 100: what the score of a sample says.
        """
        self.tokenizer, self.untranslated, self.quality = tokenizer, untranslated, quality
        self.token_texts = tokenizer.convert_ids_to_tokens(range(len(tokenizer)))
        self.cache: dict[str, list[int]] = {}

    def ids(self, text: str) -> list[int]:
        """Return token ids without special tokens, remembered (sources and references recur)."""
        if text not in self.cache:
            self.cache[text] = self.tokenizer.encode(text, add_special_tokens=False)[:80]
        return self.cache[text]

    def sample(self, src: str, mt: str, ref: str) -> Example:
        """Return a policy sample, tagged by its edit operations."""
        score = 25 * (1 - self.quality(mt, ref) / 100)
        tags, fixes = self.edits(self.ids(mt), self.ids(ref))
        return Example(self.ids(src), self.ids(mt), self.ids(ref), score, tags, fixes, "sample")

    def edits(self, mt: list[int], ref: list[int]) -> tuple[list[int], list[int]]:
        """Return tags and fixes.

        Tags: 0 for kept tokens; substituted or extra ones by their distance from the truth. Fixes:
        the true tokens of a substitution, in order.
        """
        tags, fixes = [0] * len(mt), [-1] * len(mt)
        in_ref = set(ref)
        matcher = difflib.SequenceMatcher(None, mt, ref, autojunk=False)
        for op, i1, i2, j1, j2 in matcher.get_opcodes():
            if op not in ("replace", "delete"):
                continue
            reference_text = "".join(self.token_texts[t] for t in ref[j1:j2])
            for i in range(i1, i2):
                if op == "replace":
                    fixes[i] = ref[min(j1 + i - i1, j2 - 1)]
                token_text = self.token_texts[mt[i]].strip("▁")
                if mt[i] in in_ref or (token_text and token_text in reference_text):
                    tags[i] = 1  # right word in the wrong place, or with another ending
                elif self.untranslated.search(token_text) and not token_text.startswith("<0x"):
                    tags[i] = 3  # untranslated
                else:
                    tags[i] = 2
        return tags, fixes

    def corrupted(self, src: str, ref: str, kind: Any, pool: Any, rng: random.Random) -> Example:
        """Return a damaged true translation, tagged by its spans."""
        text, spans = kind(src, ref, pool, rng)
        score = 25 * (1 - sentence_chrf(text, ref) / 100)
        if kind is corrupt.repeat:
            score = max(score, 20.0)  # chrF forgives repetition, readers do not
        encoding = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        tags = span_tags(text, encoding["offset_mapping"], spans)[:80]
        ids = encoding["input_ids"][:80]
        fixes = self.edits(ids, self.ids(ref))[1]
        return Example(self.ids(src), ids, self.ids(ref), score, tags, fixes, kind.__name__)


def span_tags(text: str, offsets: list[tuple[int, int]], spans: list[corrupt.Span]) -> list[int]:
    """Return the worst severity of the spans that a token overlaps, its leading space not
    counted.
    """
    tags = []
    for start, end in offsets:
        while start < end and text[start] == " ":
            start += 1
        hits = [SEVERITIES[s] for a, b, s in spans if a < max(end, start + 1) and start < b]
        tags.append(max(hits, default=0))
    return tags


def pool_of(rows: list[dict]) -> corrupt.Pool:
    """Return the pool of wrong words from these rows' targets and from the German file."""
    german = {row["src_text"]: row["text"] for row in read_jsonl(DATA / "foreign_de.jsonl")}
    return corrupt.Pool([row["ref_text"] for row in rows], german)


def synthetic(
    labeller: Labeller, rows: list[dict], inside: int, num_full: int, truth: int, seed: int
) -> list[Example]:
    """Return corruptions and unchanged true translations of the rows.

    inside, num_full: corruptions of each row, within the text and of the full text.
    truth: unchanged translations of each row.
    """
    rng, pool, out = random.Random(seed), pool_of(rows), []
    for row in rows:
        src, ref = row["src_text"], row["ref_text"]
        for _ in range(inside):
            kind = corrupt.draw(corrupt.INSIDE, rng)
            out.append(labeller.corrupted(src, ref, kind, pool, rng))
        for _ in range(num_full):
            kind = corrupt.draw(corrupt.WHOLE, rng)
            out.append(labeller.corrupted(src, ref, kind, pool, rng))
        out += [labeller.sample(src, ref, ref) for _ in range(truth)]
    return out


def samples(labeller: Labeller, files: Iterable) -> list[Example]:
    """Return examples of the candidate files, without duplicates of one source in a file."""
    out = []
    for path in files:
        seen = set()
        for row in read_jsonl(path):
            key = (row["src"], row["mt"])
            if key not in seen:
                seen.add(key)
                out.append(labeller.sample(row["src"], row["mt"], row["ref"]))
    return out
