"""The bytes of tokens: what each token adds to a text, known from its id.

Byte-level BPE writes each byte as a character. Sentencepiece writes text, with `▁` for a space and
`<0xE3>` for a byte.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

Offsets = list[tuple[int, int]]
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_REPLACEMENT = "\ufffd"


class _Piece(NamedTuple):
    """The bytes of a token.

    num_started: number of characters whose first byte is among them.
    continues: 1 if it starts inside a character that an earlier token started, else 0.
    """

    data: bytes
    num_started: int
    continues: int


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A cache of a tokenizer's tokens: asking it again takes longer than all the rest.

    `len` of a tokenizer with 150,000 tokens takes 0.1 s.
    special: ids that decoding leaves out.
    """

    special: frozenset[int]
    tokens: dict[int, str]
    byte_level: dict[int, _Piece]
    byte_fallback: dict[int, _Piece]

    def learn(self, tokenizer: Any, ids: Sequence[int]) -> None:
        """Look up the ids that are not cached yet."""
        new = list(set(ids) - self.tokens.keys())
        if not new:
            return
        for token_id, token in zip(new, tokenizer.convert_ids_to_tokens(new), strict=True):
            self.tokens[token_id] = token or ""  # None if the tokenizer has no such id
            self.byte_level[token_id] = _as_piece(_byte_level(token or ""))
            self.byte_fallback[token_id] = _as_piece(_byte_fallback(token or ""))


_vocabularies: WeakKeyDictionary[Any, Vocabulary] = WeakKeyDictionary()


def vocabulary_of(tokenizer: Any) -> Vocabulary:
    """Return a tokenizer's cached vocabulary; it must not change after the first completion."""
    vocabulary = _vocabularies.get(tokenizer)
    if vocabulary is None:
        added = tokenizer.added_tokens_decoder
        flagged = {token_id for token_id, token in added.items() if token.special}
        special = frozenset(flagged | set(tokenizer.all_special_ids))
        vocabulary = _vocabularies[tokenizer] = Vocabulary(special, {}, {}, {})
    return vocabulary


def offsets_from_bytes(tokenizer: Any, ids: list[int], raw: str) -> Offsets | None:
    """Return the range of characters that each token has a byte of, [T].

    ids: [T], without special tokens. raw: the text that they decode to.
    Returns None if the bytes of the tokens are not this text, in neither form.
    """
    vocabulary = vocabulary_of(tokenizer)
    vocabulary.learn(tokenizer, ids)
    tokens = [vocabulary.tokens[token_id] for token_id in ids]
    readings: list[tuple[dict[int, _Piece], Callable[[list[bytes]], tuple[str, Offsets]]]] = [
        (vocabulary.byte_level, _lossy),
        (vocabulary.byte_fallback, partial(_lossy_runs, tokens)),
    ]
    if any(token.startswith("▁") for token in tokens):  # try sentencepiece first
        readings.reverse()
    for table, read_broken in readings:
        token_bytes = [table[token_id] for token_id in ids]
        try:
            text = b"".join([one_token.data for one_token in token_bytes]).decode()
            offsets = _ranges(token_bytes)
        except UnicodeDecodeError:
            text, offsets = read_broken([one_token.data for one_token in token_bytes])
        if text == raw:
            return offsets
        if text == " " + raw:  # decoders of the Llama family drop the first space
            return [(max(0, start - 1), max(0, end - 1)) for start, end in offsets]
    return None


def _as_piece(data: bytes) -> _Piece:
    num_started = sum(byte & 0xC0 != 0x80 for byte in data)  # UTF-8: 0b10xxxxxx goes on
    return _Piece(data, num_started, int(data[:1] != b"" and data[0] & 0xC0 == 0x80))


def _ranges(token_bytes: Sequence[_Piece]) -> Offsets:
    """Return the range of characters that each token has a byte of. The bytes are UTF-8."""
    offsets: Offsets = []
    position = 0
    for _, num_started, continues in token_bytes:
        offsets.append((position - continues, position + num_started))
        position += num_started
    return offsets


@cache
def _byte_of_character() -> dict[str, int]:
    """Return the alphabet of byte-level BPE: printable bytes are themselves, others are shifted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(hidden)}


def _byte_level(token: str) -> bytes:
    """Decode GPT-2's form: each character of a token stands for a byte."""
    alphabet = _byte_of_character()
    try:
        return bytes([alphabet[character] for character in token])
    except KeyError:  # an added token, which is plain text
        return token.encode(errors="replace")


def _byte_fallback(token: str) -> bytes:
    """Decode sentencepiece's form: `▁` is a space, `<0xE3>` a byte."""
    if len(token) == 6 and _BYTE_TOKEN.fullmatch(token):
        return bytes.fromhex(token[3:5])
    return token.replace("▁", " ").encode(errors="replace")


def _lossy(token_bytes: Sequence[bytes]) -> tuple[str, Offsets]:
    """Return the text of the tokens' bytes, and the range of characters that each token has a byte
    of.

    Bytes that are not UTF-8 become U+FFFD.
    """
    bounds = [0, *accumulate(map(len, token_bytes))]
    text, char_of_byte = _decode_lossy(b"".join(token_bytes))
    offsets: Offsets = []
    for start, end in pairwise(bounds):
        first = char_of_byte[start]
        offsets.append((first, char_of_byte[end - 1] + 1 if end > start else first))
    return text, offsets


def _decode_lossy(data: bytes) -> tuple[str, list[int]]:
    """Return UTF-8 text with U+FFFD for each invalid part, and the character index of each byte.

    The list has one entry more than there are bytes: the text's length.
    """
    parts: list[str] = []
    char_of_byte: list[int] = []
    position = characters = 0
    while position < len(data):
        bad = b""
        try:
            good = data[position:].decode()
        except UnicodeDecodeError as error:
            good = data[position : position + error.start].decode()
            bad = data[position + error.start : position + error.end]
        for character in good:
            char_of_byte += [characters] * len(character.encode())
            characters += 1
        parts.append(good)
        position += len(good.encode()) + len(bad)
        if bad:
            parts.append(_REPLACEMENT)
            char_of_byte += [characters] * len(bad)
            characters += 1
    return "".join(parts), [*char_of_byte, characters]


def _lossy_runs(tokens: Sequence[str], token_bytes: Sequence[bytes]) -> tuple[str, Offsets]:
    """Return text and ranges as `_lossy`, for sentencepiece's form.

    As in the `tokenizers` library, a run of `<0xE3>` tokens that is not UTF-8 gives one U+FFFD for
    each of them.
    """
    parts: list[str] = []
    offsets: Offsets = []
    length = 0
    for _, group in groupby(
        zip(tokens, token_bytes, strict=True), lambda pair: bool(_BYTE_TOKEN.fullmatch(pair[0]))
    ):
        data = [data_of_token for _, data_of_token in group]
        try:
            b"".join(data).decode()
            text, ranges = _lossy(data)
        except UnicodeDecodeError:
            text, ranges = _REPLACEMENT * len(data), [(n, n + 1) for n in range(len(data))]
        parts.append(text)
        offsets += [(length + start, length + end) for start, end in ranges]
        length += len(text)
    return "".join(parts), offsets
