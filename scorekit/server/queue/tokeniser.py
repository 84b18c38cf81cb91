"""Texts to ids, no further than a model reads them, in memory that is bounded by bytes.

A text may be a hundred times longer than what the model reads, and whoever sends it decides by how
much. So its start is cut off first where that start surely has the same ids as the whole text;
and few bytes are tokenised at once, since an encoding takes hundreds of bytes for each of them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

#: Bytes of text that are tokenised at once; a single text may be longer.
SLICE_BYTES = 64 * 1024
#: Characters that are looked at for each id that is wanted. Some texts need more (a run of spaces
#: may be one id): these are tokenised as a whole.
_CHARS_AN_ID = 8
#: Characters behind them in which a place to cut is looked for.
_SEARCH = 4096
# A space between two characters that no normalisation and no grapheme joins with it.
_PLAIN = (
    "0-9A-Za-z,.;:!?\u00c0-\u00d6\u00d8-\u00f6\u03b1-\u03c9\u0410-\u044f\u05d0-\u05ea\u0641-\u064a"
    "\u0905-\u0939\u0e01-\u0e2e\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fff\uac00-\ud7a3"
)
_CUT = re.compile(f"(?<=[{_PLAIN}]) (?=[{_PLAIN}])")
_BYTE = re.compile("<0x[0-9A-F]{2}>")
_PROBE = "ab cd, ef 가나 다라. 一二 三四 1 2"


@dataclass(slots=True)
class Read:
    """The ids of a text that a model reads, special ones left out.

    offsets: the characters of each id, as the tokenizer says. Several ids of one run of bytes all
        have the whole run there; in `own_offsets` each has its own character.
    covered: characters from the start on of which every id is read.
    total: ids of the whole text. Where `is_cut` it may be less: no more were counted.

    Owner: tokeniser.
    """

    ids: list[int]
    offsets: list[tuple[int, int]]
    own_offsets: list[tuple[int, int]]
    covered: int
    total: int

    @property
    def is_cut(self) -> bool:
        """Whether the text has more ids than are read."""
        return self.total > len(self.ids)


class Tokeniser:
    """A fast tokenizer (`tokenizers.Tokenizer`) that is asked for the starts of texts.

    closing: ids that it adds behind every text, which are dropped; None: it is told to add none.

    Owner: tokeniser.
    """

    def __init__(self, tokenizer: Any, closing: int | None = None) -> None:
        tokenizer.no_truncation()  # cut here, to know what was cut
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._closing = closing or 0
        self._adds = closing is not None
        self._may_cut = splits_at_spaces(tokenizer)
        self._is_byte: dict[int, bool] = {}

    def read(
        self, texts: Sequence[str], most: int, *, count: bool = False
    ) -> Iterator[Read | Exception]:
        """At most `most` ids of each text, in order; in the place of a text that the tokenizer
        cannot read, what it raised.

        count: every text is tokenised to its end, so that `total` is right.
        """
        starts = texts if count else [self._start(text, most) for text in texts]
        for first, stop in slices([_bytes_at_most(start) for start in starts], SLICE_BYTES):
            encodings = self._encode(starts[first:stop])
            for k, encoding in enumerate(encodings, first):
                found, text = encoding, texts[k]
                is_start = len(starts[k]) < len(text)
                if is_start and _is_encoding(found) and len(found) - self._closing <= most:
                    (found,) = self._encode([text])
                encodings[k - first] = None  # of many large ones, one is held at a time
                yield self._read(text, found, most) if _is_encoding(found) else found

    def _start(self, text: str, most: int) -> str:
        at = most * _CHARS_AN_ID
        if not self._may_cut or len(text) <= at:
            return text
        found = _CUT.search(text, at, at + _SEARCH)
        return text if found is None else text[: found.start()]

    def _encode(self, texts: Sequence[str]) -> list[Any]:
        """Encodings; in the place of a text that cannot be encoded, why."""
        try:
            return list(self._tokenizer.encode_batch(texts, add_special_tokens=self._adds))
        except Exception as error:
            if len(texts) == 1:
                return [error]
            return [part for text in texts for part in self._encode([text])]

    def _read(self, text: str, encoding: Any, most: int) -> Read:
        total = len(encoding) - self._closing
        if total <= most:
            ids, offsets = encoding.ids[:total], encoding.offsets[:total]
            return Read(ids, offsets, self._own(text, ids, offsets), len(text), total)
        # One by one: `truncate`, or a list of all offsets, would hold the interpreter for long.
        ids = encoding.ids[: most + 1]
        offsets = [encoding.token_to_chars(k) for k in range(most + 1)]
        own = self._own(text, ids, offsets)
        # An id that is not read may share its character with the last one that is.
        covered = min(own[most][0], own[most - 1][1])
        return Read(ids[:most], offsets[:most], own[:most], covered, total)

    def _own(
        self, text: str, ids: Sequence[int], offsets: list[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """The offsets with those of bytes repaired: the tokenizer joins unknown characters to a
        run, writes that in bytes, and gives each byte the range of the whole run."""
        own = offsets
        at = 0
        while at < len(ids):
            start, end = offsets[at]
            stop = at + 1
            if end - start > 1 and self._is_of_bytes(ids[at]):
                while stop < len(ids) and offsets[stop] == (start, end):
                    stop += 1
                if own is offsets:
                    own = offsets.copy()
                own[at:stop] = self._of_bytes(text[start:end], start, stop - at)
            at = stop
        return own

    def _is_of_bytes(self, id: int) -> bool:
        known = self._is_byte.get(id)
        if known is None:
            token = self._tokenizer.id_to_token(id)
            known = self._is_byte[id] = bool(token and _BYTE.fullmatch(token))
        return known

    def _of_bytes(self, run: str, start: int, count: int) -> list[tuple[int, int]]:
        """The character range of each of a run's first `count` bytes, as it is normalised.

        start: of the run in its text.
        """
        from tokenizers import NormalizedString

        written = NormalizedString(run[:count])  # every character gives a byte at least
        if self._tokenizer.normalizer is not None:
            self._tokenizer.normalizer.normalize(written)
        shown = written.normalized
        added = shown.startswith("▁") and run[0] not in " ▁"  # what begins a word
        ranges: list[tuple[int, int]] = []
        span = (start, start)
        for k in range(added, len(shown)):
            read = written[0 : k + 1]
            assert read is not None  # the range lies within
            end = start + len(read.original)
            if end > span[1]:  # else one character became several
                span = (span[1], end)
            ranges += [span] * len(shown[k].encode())
            if len(ranges) >= count:
                break
        return (ranges + [span] * count)[:count]


def splits_at_spaces(tokenizer: Any) -> bool:
    """Whether no id can depend on characters on both sides of a space: words are told apart before
    the model of the tokenizer sees them, and no added token spans several words."""
    if tokenizer.pre_tokenizer is None:
        return False
    if any(" " in token.content for token in tokenizer.get_added_tokens_decoder().values()):
        return False
    text = _PROBE
    if tokenizer.normalizer is not None:
        text = tokenizer.normalizer.normalize_str(text)
    words = [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    return not any(" " in re.sub("[▁Ġ]", " ", word).strip() for word in words)


def slices(
    sizes: Sequence[int], most: int, most_items: int | None = None
) -> Iterator[tuple[int, int]]:
    """Neighbours as (first, stop), of at most `most` together and at least one each."""
    first = held = 0
    for k, size in enumerate(sizes):
        if k > first and (held + size > most or k - first == most_items):
            yield first, k
            first, held = k, 0
        held += size
    if first < len(sizes):
        yield first, len(sizes)


def _bytes_at_most(text: str) -> int:
    return len(text) if text.isascii() else 4 * len(text)


def _is_encoding(found: Any) -> bool:
    return not isinstance(found, Exception)
