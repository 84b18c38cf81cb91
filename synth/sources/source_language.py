"""Find segments in another language: by their letters, then by py3langid's model.

There are millions of segments, so many are processed at once: scripts with a vector of characters,
and the identifier's automaton over all texts in parallel, byte by byte. This costs a tenth of one
call per text, with identical results.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from scorekit.languages import find_language
from scorekit.numeric import below
from scorekit.text.checks import identifier_codes, likely_others, whole_identifier
from scorekit.text.rules import SOURCES
from scorekit.text.variants import other_variant
from scorekit.text.writing_scripts import LETTERS, scripts_of
from synth.sources.measure import category_weights, char_sums

#: Scripts whose letters count twice.
_DENSE = ("Han", "Kana", "Hangul")
#: Number of bytes of a text that are used.
_MAX_BYTES = 480
_FIELD = 1 << 20  # two counts in one sum; a segment has fewer letters


class SourceLanguage:
    """Detects texts in another language. margin: required log odds of another language."""

    def __init__(self, language: str, margin: float) -> None:
        self._language = language
        matched = find_language(language)
        scripts = scripts_of(language) if matched else ()
        self._weights = _letter_weights(scripts) if scripts else None
        own_codes = identifier_codes(matched) if matched else ()
        other_codes = [code for code in likely_others(language) if code not in own_codes]
        supported = whole_identifier().nb_classes
        self._odds = (
            _Odds(own_codes, other_codes)
            if other_codes and set(own_codes) <= set(supported)
            else None
        )
        self._margin = margin

    def is_other(self, texts: Sequence[str]) -> list[bool]:
        """Return, for each text, True if it is in another language, or in the other standard of
        Chinese.

        Returns False for texts that are too short, and for languages that neither
        writing_scripts.py nor the identifier supports."""
        if self._weights is None:
            return [False] * len(texts)
        sums = char_sums(texts, self._weights)
        long = [i for i, total in enumerate(sums) if total % _FIELD >= SOURCES.script_letters]
        flags = [False] * len(texts)
        undecided = []
        for i in long:
            flags[i] = below(sums[i] // _FIELD, SOURCES.min_script_share * (sums[i] % _FIELD))
            if not flags[i]:
                undecided.append(i)
        if self._odds is not None and undecided:
            margins = self._odds.margins([texts[i] for i in undecided])
            for i, margin in zip(undecided, margins, strict=True):
                flags[i] = margin > self._margin
        return [flags[i] or self._is_other_variant(text) for i, text in enumerate(texts)]

    def _is_other_variant(self, text: str) -> bool:
        match = other_variant(text, self._language)
        return match is not None and match[0] > SOURCES.max_other_variant


@lru_cache(16)
def _letter_weights(scripts: tuple[str, ...]) -> np.ndarray:
    """Return weights by code point: letters (dense ones twice), and the scripts' letters in the
    upper field."""
    letters = category_weights("L")
    for name in _DENSE:
        letters *= 1 + _members(LETTERS[name], letters)
    script_letters = np.zeros_like(letters)
    for name in scripts:
        script_letters |= _members(LETTERS[name], letters)
    return letters + script_letters * letters * _FIELD


def _members(pattern: re.Pattern[str], letters: np.ndarray) -> np.ndarray:
    """Return 1 for the letters in a class of characters."""
    flags = np.zeros_like(letters)
    text = "".join(chr(code) for code in np.flatnonzero(letters) if not 0xD800 <= code < 0xE000)
    flags[[ord(char) for char in pattern.findall(text)]] = 1
    return flags


class _Odds:
    """The identifier's log odds for a few languages, computed for many texts at once."""

    def __init__(self, own_codes: Sequence[str], other_codes: Sequence[str]) -> None:
        model = whole_identifier()
        columns = [model.nb_classes.index(code) for code in (*own_codes, *other_codes)]
        self._num_own = len(own_codes)
        self._next = np.array(model.tk_nextmove, dtype=np.int32)
        self._prior = np.asarray(model.nb_pc, dtype=np.float64)[columns]
        features = np.asarray(model.nb_ptc, dtype=np.float64)[:, columns]
        self._gain = np.zeros((len(self._next) >> 8, len(columns)))
        for state, outputs in model.tk_output.items():
            self._gain[state] = features[list(outputs)].sum(axis=0)

    def margins(self, texts: Sequence[str]) -> list[float]:
        """Return the log odds of the best other language against the source language."""
        raw = [text[:_MAX_BYTES].encode("utf-8", "surrogatepass")[:_MAX_BYTES] for text in texts]
        lengths = np.array([len(encoded) for encoded in raw])
        order = np.argsort(-lengths, kind="stable")  # longest texts first
        width = int(lengths.max(initial=0))
        table = np.zeros((len(raw), width), dtype=np.int32)
        for row, index in enumerate(order):
            table[row, : lengths[index]] = np.frombuffer(raw[index], dtype=np.uint8)
        going = np.searchsorted(-lengths[order], -np.arange(width), side="left")
        state = np.zeros(len(raw), dtype=np.int32)
        totals = np.tile(self._prior, (len(raw), 1))
        for column, count in enumerate(going):
            state = self._next[(state[:count] << 8) + table[:count, column]]
            totals[:count] += self._gain[state]
        margins = totals[:, self._num_own :].max(axis=1) - totals[:, : self._num_own].max(axis=1)
        ordered = np.empty(len(raw))
        ordered[order] = margins
        return [float(margin) for margin in ordered]
