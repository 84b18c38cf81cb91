"""Tokenize texts up to the model's limit, in memory that is bounded by bytes.

A client may send a text a hundred times longer than the model reads. So it is cut first, at a place
where the start surely has the same ids as in the complete text. Few bytes are tokenized at once,
because an encoding takes hundreds of bytes for each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

#: Bytes of text that are tokenized at once; a single text may be longer.
SLICE_BYTES = 64 * 1024
#: Characters kept for each id. Some texts need more (a run of spaces may be one id): these are
#: tokenized completely.
_CHARS_AN_ID = 8
#: Characters after them in which a place to cut is searched.
_SEARCH = 4096
# A space between two characters that no normalization and no grapheme joins with it.
_PLAIN = (
    "0-9A-Za-z,.;:!?\u00c0-\u00d6\u00d8-\u00f6\u03b1-\u03c9\u0410-\u044f\u05d0-\u05ea\u0641-\u064a"
    "\u0905-\u0939\u0e01-\u0e2e\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fff\uac00-\ud7a3"
)
_CUT = re.compile(f"(?<=[{_PLAIN}]) (?=[{_PLAIN}])")
_BYTE = re.compile("<0x[0-9A-F]{2}>")
_PROBE = "ab cd, ef 가나 다라. 一二 三四 1 2"


@dataclass(slots=True)
class TokenizedText:
    """The ids of a text that a model reads, without special ones.

    offsets: the characters of each id, as the tokenizer reports them. Several ids of one run of
    bytes all have the whole run; in `own_offsets` each has its own character.
    covered: number of characters from the start whose ids are all read.
    total: ids of the complete text. If `is_cut` it may be too small: counting stopped early.

    Owner: tokenizer.
    """

    ids: list[int]
    offsets: list[tuple[int, int]]
    own_offsets: list[tuple[int, int]]
    covered: int
    total: int

    @property
    def is_cut(self) -> bool:
        """Return True if the text has more ids than are read."""
        return self.total > len(self.ids)


class BoundedTokenizer:
    """A fast tokenizer (`tokenizers.Tokenizer`) for the starts of texts.

    closing: number of ids that it adds after every text, which are dropped; None: it adds none.

    Owner: tokenizer.
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
        self, texts: Sequence[str], max_ids: int, *, count: bool = False
    ) -> Iterator[TokenizedText | Exception]:
        """Yield at most `max_ids` ids of each text, in order; for a text that fails, the exception.

        count: tokenize every text to its end, so that `total` is exact.
        """
        starts = texts if count else [self._start(text, max_ids) for text in texts]
        for first, stop in slices([_max_bytes(start) for start in starts], SLICE_BYTES):
            encodings = self._encode(starts[first:stop])
            for k, batch_encoding in enumerate(encodings, first):
                encoding, text = batch_encoding, texts[k]
                is_start = len(starts[k]) < len(text)
                if is_start and _is_encoding(encoding) and len(encoding) - self._closing <= max_ids:
                    (encoding,) = self._encode([text])
                encodings[k - first] = None  # free each one: they may be large
                yield self._read(text, encoding, max_ids) if _is_encoding(encoding) else encoding

    def _start(self, text: str, max_ids: int) -> str:
        limit = max_ids * _CHARS_AN_ID
        if not self._may_cut or len(text) <= limit:
            return text
        space = _CUT.search(text, limit, limit + _SEARCH)
        return text if space is None else text[: space.start()]

    def _encode(self, texts: Sequence[str]) -> list[Any]:
        """Return encodings; for a text that cannot be encoded, the exception."""
        try:
            return list(self._tokenizer.encode_batch(texts, add_special_tokens=self._adds))
        except Exception as error:
            if len(texts) == 1:
                return [error]
            return [part for text in texts for part in self._encode([text])]

    def _read(self, text: str, encoding: Any, max_ids: int) -> TokenizedText:
        total = len(encoding) - self._closing
        if total <= max_ids:
            ids, offsets = encoding.ids[:total], encoding.offsets[:total]
            return TokenizedText(
                ids, offsets, self._repair_offsets(text, ids, offsets), len(text), total
            )
        # One by one: `truncate`, or a list of all offsets, would hold the GIL for long.
        ids = encoding.ids[: max_ids + 1]
        offsets = [encoding.token_to_chars(k) for k in range(max_ids + 1)]
        own_offsets = self._repair_offsets(text, ids, offsets)
        # The first unread id may share its character with the last one that is read.
        covered = min(own_offsets[max_ids][0], own_offsets[max_ids - 1][1])
        return TokenizedText(
            ids[:max_ids], offsets[:max_ids], own_offsets[:max_ids], covered, total
        )

    def _repair_offsets(
        self, text: str, ids: Sequence[int], offsets: list[tuple[int, int]]
    ) -> list[tuple[int, int]]:
        """Return the offsets, with those of byte ids repaired.

        The tokenizer joins unknown characters to a run, writes it in bytes, and gives each byte the
        range of the whole run."""
        repaired = offsets
        position = 0
        while position < len(ids):
            start, end = offsets[position]
            stop = position + 1
            if end - start > 1 and self._is_byte_id(ids[position]):
                while stop < len(ids) and offsets[stop] == (start, end):
                    stop += 1
                if repaired is offsets:
                    repaired = offsets.copy()
                repaired[position:stop] = self._ranges_of_bytes(
                    text[start:end], start, stop - position
                )
            position = stop
        return repaired

    def _is_byte_id(self, id: int) -> bool:
        is_byte = self._is_byte.get(id)
        if is_byte is None:
            token = self._tokenizer.id_to_token(id)
            is_byte = self._is_byte[id] = bool(token and _BYTE.fullmatch(token))
        return is_byte

    def _ranges_of_bytes(self, run: str, start: int, count: int) -> list[tuple[int, int]]:
        """Return the character range of each of a run's first `count` bytes, as it is normalized.

        start: of the run in its text.
        """
        from tokenizers import NormalizedString

        normalized = NormalizedString(run[:count])  # every character gives at least one byte
        if self._tokenizer.normalizer is not None:
            self._tokenizer.normalizer.normalize(normalized)
        text = normalized.normalized
        has_prefix = text.startswith("▁") and run[0] not in " ▁"  # what begins a word
        ranges: list[tuple[int, int]] = []
        span = (start, start)
        for k in range(has_prefix, len(text)):
            prefix = normalized[0 : k + 1]
            assert prefix is not None  # the range lies within
            end = start + len(prefix.original)
            if end > span[1]:  # otherwise one character became several
                span = (span[1], end)
            ranges += [span] * len(text[k].encode())
            if len(ranges) >= count:
                break
        return (ranges + [span] * count)[:count]


def splits_at_spaces(tokenizer: Any) -> bool:
    """Return True if no id can depend on characters on both sides of a space.

    That is so if words are split before the tokenizer's model sees them, and no added token spans
    several words."""
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
    sizes: Sequence[int], max_total: int, most_items: int | None = None
) -> Iterator[tuple[int, int]]:
    """Yield ranges (first, stop) of neighbors whose sizes add to at most `max_total`, or of one."""
    first = total = 0
    for k, size in enumerate(sizes):
        if k > first and (total + size > max_total or k - first == most_items):
            yield first, k
            first, total = k, 0
        total += size
    if first < len(sizes):
        yield first, len(sizes)


def _max_bytes(text: str) -> int:
    return len(text) if text.isascii() else 4 * len(text)


def _is_encoding(result: Any) -> bool:
    return not isinstance(result, Exception)
