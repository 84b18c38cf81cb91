"""Damage true translations in known places: text plus error spans with severities.

Every function takes the true translation and returns ``(text, spans)``; a span is
``(start, end, severity)`` in characters of the new text, end exclusive. What is left out leaves
no span, because there is no place in the text to mark.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

Span = tuple[int, int, str]


@dataclass
class Pool:
    """Holds the sources of wrong words: other targets, and German translations by source."""

    targets: list[str]
    german: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Collect the words for substitutions."""
        self.words = [word for text in self.targets for word in text.split()]
        self.foreign_words = [word for text in self.german.values() for word in text.split()]


def join(parts: list[tuple[str, str | None]]) -> tuple[str, list[Span]]:
    """Join words with optional severities to a text and spans; adjacent words of equal severity
    make one span.
    """
    text = ""
    spans: list[Span] = []
    for word, severity in parts:
        start = len(text) + (1 if text else 0)
        text = f"{text} {word}" if text else word
        if severity is None:
            continue
        if spans and spans[-1][2] == severity and spans[-1][1] + 1 == start:
            spans[-1] = (spans[-1][0], len(text), severity)
        else:
            spans.append((start, len(text), severity))
    return text, spans


def drop(src: str, ref: str, pool: Pool, rng: random.Random) -> tuple[str, list[Span]]:
    """Leave out a run of words."""
    words = ref.split()
    count = rng.randint(1, max(1, len(words) // 2))
    start = rng.randint(0, len(words) - count)
    return " ".join(words[:start] + words[start + count :]), []


def truncate(src: str, ref: str, pool: Pool, rng: random.Random) -> tuple[str, list[Span]]:
    """Keep only the beginning."""
    words = ref.split()
    return " ".join(words[: rng.randint(1, max(1, len(words) * 2 // 3))]), []


def swap(src: str, ref: str, pool: Pool, rng: random.Random) -> tuple[str, list[Span]]:
    """Swap two words: minor."""
    parts: list[tuple[str, str | None]] = [(word, None) for word in ref.split()]
    if len(parts) > 1:
        i, j = sorted(rng.sample(range(len(parts)), 2))
        parts[i], parts[j] = (parts[j][0], "minor"), (parts[i][0], "minor")
    return join(parts)


def stutter(src: str, ref: str, pool: Pool, rng: random.Random) -> tuple[str, list[Span]]:
    """Repeat a word or a pair of words two or three times: the copies are major."""
    words = ref.split()
    width = rng.randint(1, min(2, len(words)))
    start = rng.randint(0, len(words) - width)
    parts: list[tuple[str, str | None]] = [(word, None) for word in words]
    duplicates = [(word, "major") for word in words[start : start + width]]
    return join(parts[: start + width] + duplicates * rng.randint(1, 2) + parts[start + width :])


def repeat(src: str, ref: str, pool: Pool, rng: random.Random) -> tuple[str, list[Span]]:
    """Repeat the full text two or three times: the copies are critical."""
    copies = rng.choice([1, 2, 2])
    words = ref.split()
    return join([(w, None) for w in words] + [(w, "critical") for w in words * copies])


def untranslated(src: str, ref: str, pool: Pool, rng: random.Random) -> tuple[str, list[Span]]:
    """Put words of the English source in place of Korean words: critical."""
    words, english = ref.split(), src.split()
    count = rng.randint(1, max(1, len(words) // 2))
    start = rng.randint(0, len(words) - count)
    size = min(len(english), max(1, round(count * len(english) / len(words))))
    first = rng.randint(0, len(english) - size)
    parts: list[tuple[str, str | None]] = [(word, None) for word in words]
    parts[start : start + count] = [(word, "critical") for word in english[first : first + size]]
    return join(parts)


def wrong_words(src: str, ref: str, pool: Pool, rng: random.Random) -> tuple[str, list[Span]]:
    """Replace some words by words of other translations, or insert one: major."""
    parts: list[tuple[str, str | None]] = [(word, None) for word in ref.split()]
    for _ in range(rng.randint(1, max(1, len(parts) // 2))):
        index = rng.randrange(len(parts))
        wrong = (rng.choice(pool.words), "major")
        if rng.random() < 0.75:
            parts[index] = wrong
        else:
            parts.insert(index, wrong)
    return join(parts)


def endings(src: str, ref: str, pool: Pool, rng: random.Random) -> tuple[str, list[Span]]:
    """Change the last syllable of a word (a particle or an ending), which is a minor error."""
    parts: list[tuple[str, str | None]] = [(word, None) for word in ref.split()]
    index = rng.randrange(len(parts))
    word = parts[index][0]
    other = rng.choice(pool.words)[-1]
    if len(word) > 1 and other != word[-1]:
        parts[index] = (word[:-1] + other, "minor")
    return join(parts)


def foreign_words(src: str, ref: str, pool: Pool, rng: random.Random) -> tuple[str, list[Span]]:
    """Replace some words by German ones: critical."""
    parts: list[tuple[str, str | None]] = [(word, None) for word in ref.split()]
    for _ in range(rng.randint(1, max(1, len(parts) // 2))):
        parts[rng.randrange(len(parts))] = (rng.choice(pool.foreign_words), "critical")
    return join(parts)


def unrelated(src: str, ref: str, pool: Pool, rng: random.Random) -> tuple[str, list[Span]]:
    """Return the translation of another source: all of it is critical."""
    text = rng.choice(pool.targets)
    return text, [(0, len(text), "critical")] if text != ref else []


def copy(src: str, ref: str, pool: Pool, rng: random.Random) -> tuple[str, list[Span]]:
    """Return the English source: all of it is critical."""
    return src, [(0, len(src), "critical")] if src != ref else []


def german(src: str, ref: str, pool: Pool, rng: random.Random) -> tuple[str, list[Span]]:
    """Return the German translation: all of it is critical."""
    text = pool.german.get(src, src)
    return text, [(0, len(text), "critical")] if text != ref else []


def empty(src: str, ref: str, pool: Pool, rng: random.Random) -> tuple[str, list[Span]]:
    """Return an empty text."""
    return "", []


# Errors inside a translation (the span test uses these) and whole-text failures, with weights.
INSIDE = {
    swap: 2,
    stutter: 2,
    untranslated: 4,
    wrong_words: 6,
    endings: 2,
    foreign_words: 2,
    drop: 3,
    truncate: 4,
}
WHOLE = {repeat: 3, unrelated: 4, copy: 4, german: 1, empty: 1}


def draw(kinds: dict, rng: random.Random) -> Any:
    """Draw a corruption function by weight."""
    return rng.choices(list(kinds), weights=list(kinds.values()))[0]
