"""Which segments are not in the source language: by their letters, then by py3langid's model.

Segments come by the million, so many are looked at together: a vector of characters for the
scripts, and the identifier's automaton over all texts in step, byte by byte. That costs a tenth of
asking it for one text after the other, and gives its numbers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from scorekit.languages import find_language
from scorekit.numeric.thresholds import below
from scorekit.text.checks import identifier_codes, likely_others, whole_identifier
from scorekit.text.rules import SOURCES
from scorekit.text.variants import other_variant
from scorekit.text.writing_scripts import LETTERS, scripts_of
from synth.sources.measure import category_weights, char_sums

if TYPE_CHECKING:
    import numpy as np

#: Letters of these count twice.
_DENSE = ("Han", "Kana", "Hangul")
#: Bytes of a text that are looked at.
_MOST_BYTES = 480
_FIELD = 1 << 20  # two counts in one sum; a segment has fewer letters


class SourceLanguage:
    """Tells what is not in a language. margin: natural logarithm of how much likelier another one
    must be."""

    def __init__(self, language: str, margin: float) -> None:
        self._language = language
        found = find_language(language)
        scripts = scripts_of(language) if found else ()
        self._weights = _letter_weights(scripts) if scripts else None
        own = identifier_codes(found) if found else ()
        others = [code for code in likely_others(language) if code not in own]
        known = whole_identifier().nb_classes
        self._odds = _Odds(own, others) if others and set(own) <= set(known) else None
        self._margin = margin

    def is_other(self, texts: Sequence[str]) -> list[bool]:
        """Of each text, whether it is in another language, or in the standard of Chinese that the
        tag does not name. False for what is too short to say, and
        of a language that neither writing_scripts.py nor the identifier knows."""
        if self._weights is None:
            return [False] * len(texts)
        sums = char_sums(texts, self._weights)
        long = [i for i, total in enumerate(sums) if total % _FIELD >= SOURCES.script_letters]
        told = [False] * len(texts)
        asked = []
        for i in long:
            told[i] = below(sums[i] // _FIELD, SOURCES.min_script_share * (sums[i] % _FIELD))
            if not told[i]:
                asked.append(i)
        if self._odds is not None and asked:
            margins = self._odds.of([texts[i] for i in asked])
            for i, margin in zip(asked, margins, strict=True):
                told[i] = margin > self._margin
        return [told[i] or self._is_other_variant(text) for i, text in enumerate(texts)]

    def _is_other_variant(self, text: str) -> bool:
        found = other_variant(text, self._language)
        return found is not None and found[0] > SOURCES.max_other_variant


def _letter_weights(scripts: Sequence[str]) -> np.ndarray:
    """By code point: letters, dense ones twice, and in the upper field those of the scripts."""
    import numpy as np

    letters = category_weights("L")
    for name in _DENSE:
        letters *= 1 + _members(LETTERS[name], letters)
    own = np.zeros_like(letters)
    for name in scripts:
        own |= _members(LETTERS[name], letters)
    return letters + own * letters * _FIELD


def _members(pattern: re.Pattern[str], letters: np.ndarray) -> np.ndarray:
    """1 for the letters in a class of characters."""
    import numpy as np

    found = np.zeros_like(letters)
    text = "".join(chr(code) for code in np.flatnonzero(letters) if not 0xD800 <= code < 0xE000)
    found[[ord(char) for char in pattern.findall(text)]] = 1
    return found


class _Odds:
    """The identifier's own numbers for a few languages, of many texts at once."""

    def __init__(self, own: Sequence[str], others: Sequence[str]) -> None:
        import numpy as np

        model = whole_identifier()
        columns = [model.nb_classes.index(code) for code in (*own, *others)]
        self._own = len(own)
        self._next = np.array(model.tk_nextmove, dtype=np.int32)
        self._prior = np.asarray(model.nb_pc, dtype=np.float64)[columns]
        features = np.asarray(model.nb_ptc, dtype=np.float64)[:, columns]
        self._gain = np.zeros((len(self._next) >> 8, len(columns)))
        for state, found in model.tk_output.items():
            self._gain[state] = features[list(found)].sum(axis=0)

    def of(self, texts: Sequence[str]) -> list[float]:
        """How much likelier (natural logarithm) the best other language is than the own one."""
        import numpy as np

        raw = [text[:_MOST_BYTES].encode("utf-8", "surrogatepass")[:_MOST_BYTES] for text in texts]
        lengths = np.array([len(each) for each in raw])
        order = np.argsort(-lengths, kind="stable")  # those that go on stand first
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
        margins = totals[:, self._own :].max(axis=1) - totals[:, : self._own].max(axis=1)
        found = np.empty(len(raw))
        found[order] = margins
        return [float(margin) for margin in found]
