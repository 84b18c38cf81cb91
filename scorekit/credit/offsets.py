"""Locate each completion token in the completion's text.

There are three methods; the first that reproduces the decoded text is used:
bytes    the bytes of each token, known from its id (byte-level BPE, which writes each byte as a
character; sentencepiece, which writes text, with `▁` for a space and, with byte fallback, `<0xE3>`
for a byte): exact, also if a character has several tokens;
encode   the fast tokenizer's own offsets, if encoding the text gives the same ids again;
search   decode each token alone and search for it in the text: best effort, noted in the debug log.

Shapes: T completion tokens. A tokenizer is one of `transformers`, or an object with its methods
`decode`, `convert_ids_to_tokens`, `added_tokens_decoder`, `all_special_ids`, `is_fast` and
`__call__`. Positions in a text are Unicode code points, as Python counts them.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from scorekit.credit.checks import check_token_ids
from scorekit.credit.text_parts import (
    character_map,
    is_subsequence,
    position_by_marking,
    positions_of,
)
from scorekit.errors import UserError
from scorekit.prompts import postprocess_translation

log = logging.getLogger(__name__)
Offsets = list[tuple[int, int]]
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Settings for decoding a completion.

    postprocess: maps the decoded completion to completion_text, which the offsets refer to.
    """

    postprocess: Callable[[str], str] = postprocess_translation


@dataclass(frozen=True, slots=True)
class Alignment:
    """A completion's text with the position of each token.

    text: the completion after post-processing.
    offsets: [T] ranges of `text`, one for each token, end exclusive.
    unaligned: number of tokens with text whose position in `text` is unknown (zero width).
    method: `bytes`, `encode` or `search`; or how the text was found in the completion, where that
    is not certain: `subsequence` (characters were removed, and it can be found in several ways: the
    one with the fewest pieces is taken), `rewritten` (it has characters that the completion has
    not: the longest common pieces are taken), `ambiguous` (it stands in several places: no token
    has a position).
    """

    text: str
    offsets: Offsets
    unaligned: int
    method: str


def compute_token_char_offsets(
    tokenizer: Any, completion_token_ids: Sequence[int], decode_cfg: DecodeConfig | None = None
) -> Offsets:
    """Return (start, end) of each token in the post-processed completion: code points, end
    exclusive.

    A token with a part of a multi-byte character covers that character. Special tokens have zero
    width.
    """
    return align_completion(tokenizer, completion_token_ids, decode_cfg).offsets


def align_completion(
    tokenizer: Any,
    completion_token_ids: Sequence[int],
    decode_cfg: DecodeConfig | None = None,
    stop_ids: Sequence[int] = (),
) -> Alignment:
    """Decode a completion, post-process it, and locate its tokens in the result.

    completion_token_ids: [T], as sampled, with special tokens and the EOS.
    stop_ids: a last token among them is no part of the text, even if the tokenizer does not mark it
    as special (a `<|im_end|>` added as a plain token).
    """
    postprocess = (decode_cfg or DecodeConfig()).postprocess

    def part_of(raw: str) -> tuple[str, list[int]]:
        text = postprocess(raw)
        if not isinstance(text, str):
            raise UserError(
                f"postprocess: the function returned {type(text).__name__}. Return a text (in a "
                "run's config: generation.postprocess)"
            )
        if text in (raw, raw.strip()):
            return text, [raw.index(text)]
        positions = positions_of(text, raw)
        if len(positions) > 1:
            start = position_by_marking(postprocess, text, raw, positions)
            positions = positions if start is None else [start]
        return text, positions

    return _align(tokenizer, list(completion_token_ids), stop_ids, part_of)


def align_part(
    tokenizer: Any,
    completion_token_ids: Sequence[int],
    text: str,
    positions: list[int],
    stop_ids: Sequence[int] = (),
) -> Alignment:
    """Locate the tokens of a completion in a text that is a part of it.

    positions: where it may begin in the decoded completion; none: it is no part in one piece.
    """
    return _align(tokenizer, list(completion_token_ids), stop_ids, lambda raw: (text, positions))


def _align(
    tokenizer: Any,
    ids: list[int],
    stop_ids: Sequence[int],
    part_of: Callable[[str], tuple[str, list[int]]],
) -> Alignment:
    """Decode a completion, and locate its tokens in a part of it.

    part_of: returns the part of a decoded completion, and where it may begin.
    """
    if ids and ids[-1] in stop_ids:
        alignment = _align(tokenizer, ids[:-1], (), part_of)
        end = len(alignment.text)
        return replace(alignment, offsets=[*alignment.offsets, (end, end)])
    raw = decode_completion(tokenizer, ids)
    special = vocabulary_of(tokenizer).special
    text_indices = [index for index, token_id in enumerate(ids) if token_id not in special]
    text_ids = [ids[index] for index in text_indices]
    method, text_offsets = "bytes", offsets_from_bytes(tokenizer, text_ids, raw)
    if text_offsets is None:
        method, text_offsets = "encode", _from_encoding(tokenizer, text_ids, raw)
    num_unaligned = 0
    if text_offsets is None:
        log.debug("using a search for offsets: the token ids do not reproduce %r", raw)
        method, (text_offsets, num_unaligned) = "search", _by_search(tokenizer, text_ids, raw)
    offsets = _spread(text_offsets, text_indices, len(ids))
    text, positions = part_of(raw)
    return _in_part(Alignment(raw, offsets, num_unaligned, method), text, positions)


def decode_completion(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """Return the text of a completion, without special tokens and before post-processing.

    Raises ValueError for what can be no token id.
    """
    ids = list(token_ids)
    check_token_ids(ids)
    text: str = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return text


def _spread(text_offsets: Offsets, text_indices: list[int], length: int) -> Offsets:
    """Return the offsets of all tokens from those of text tokens; others get zero width."""
    offsets: Offsets = []
    position, next_text = 0, 0
    for index in range(length):
        if next_text < len(text_indices) and text_indices[next_text] == index:
            offsets.append(text_offsets[next_text])
            position = text_offsets[next_text][1]
            next_text += 1
        else:
            offsets.append((position, position))
    return offsets


def _from_encoding(tokenizer: Any, ids: list[int], raw: str) -> Offsets | None:
    if not tokenizer.is_fast:
        return None
    encoded = tokenizer(raw, add_special_tokens=False, return_offsets_mapping=True)
    if list(encoded["input_ids"]) != ids:
        return None
    return [(start, end) for start, end in encoded["offset_mapping"]]


def _by_search(tokenizer: Any, ids: list[int], raw: str) -> tuple[Offsets, int]:
    """Locate each token by its own text, after the one before; zero width if it is not there."""
    offsets: Offsets = []
    position = num_missing = 0
    for token_id in ids:
        token_text = decode_completion(tokenizer, [token_id]).strip()
        start = raw.find(token_text, position) if token_text else -1
        if start < 0:
            offsets.append((position, position))
            num_missing += bool(token_text)
        else:
            position = start + len(token_text)
            offsets.append((start, position))
    return offsets, num_missing


def _in_part(alignment: Alignment, text: str, positions: list[int]) -> Alignment:
    """Return the alignment with a part of a text, from that with the whole text."""
    raw, method = alignment.text, alignment.method
    if text == raw:
        return alignment
    if positions:
        new_index = [-1] * len(raw)
        if len(positions) > 1:
            method = "ambiguous"
        else:
            new_index[positions[0] : positions[0] + len(text)] = range(len(text))
    else:
        new_index, is_certain = character_map(text, raw)
        if not is_certain and method != "search":
            method = "subsequence" if is_subsequence(text, raw) else "rewritten"
    mapped, num_lost = _map(alignment, new_index)
    return Alignment(text, mapped, alignment.unaligned + num_lost, method)


def _map(alignment: Alignment, new_index: list[int]) -> tuple[Offsets, int]:
    """Return the new offsets, and the number of tokens with text that have no place any more."""
    mapped: Offsets = []
    position = num_lost = 0
    for start, end in alignment.offsets:
        positions = [new_index[index] for index in range(start, end) if new_index[index] >= 0]
        if positions:
            mapped.append((positions[0], positions[-1] + 1))
            position = positions[-1] + 1
        else:
            mapped.append((position, position))
            num_lost += bool(alignment.text[start:end].strip())
    return mapped, num_lost


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

    ids: [T], without special tokens.
    raw: the text that they decode to.
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
