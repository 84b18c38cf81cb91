"""Where each completion token stands in the completion's text.

Three ways, the first that reproduces the decoded text wins:
bytes    the bytes of each token, known from its id (byte-level BPE; sentencepiece with or without
         byte fallback): exact, also where a character is spread over several tokens;
encode   the fast tokenizer's own offsets, if encoding the text gives the same ids again;
search   each token decoded alone and looked for in the text: best effort, said in the debug log.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from scorekit.errors import UserError
from trainer.translation.data import postprocess_translation

log = logging.getLogger(__name__)

Offsets = list[tuple[int, int]]
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_REPLACEMENT = "\ufffd"


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """postprocess: decoded completion -> completion_text, to which the offsets refer."""

    postprocess: Callable[[str], str] = postprocess_translation


@dataclass(frozen=True, slots=True)
class Alignment:
    """text: the completion after post-processing. offsets: one range of `text` for each token.

    unaligned: tokens that hold text but whose place in `text` is not known (zero width).
    method: `bytes`, `encode` or `search`.
    """

    text: str
    offsets: Offsets
    unaligned: int
    method: str


def compute_token_char_offsets(
    tokenizer: Any, completion_token_ids: Sequence[int], decode_cfg: DecodeConfig | None = None
) -> Offsets:
    """(start, end) of each token in the post-processed completion: code points, end exclusive.

    A token that holds part of a multi-byte character covers that character. Special tokens have
    zero width.
    """
    return align_completion(tokenizer, completion_token_ids, decode_cfg).offsets


def align_completion(
    tokenizer: Any,
    completion_token_ids: Sequence[int],
    decode_cfg: DecodeConfig | None = None,
    stop_ids: Sequence[int] = (),
) -> Alignment:
    """Decode a completion, post-process it, and find its tokens in the result.

    stop_ids: a last token among them is no part of the text, also where the tokenizer does not
    know that it is special (a `<|im_end|>` added as a plain token).
    """
    ids = list(completion_token_ids)
    if ids and ids[-1] in stop_ids:
        found = align_completion(tokenizer, ids[:-1], decode_cfg)
        end = len(found.text)
        return replace(found, offsets=[*found.offsets, (end, end)])
    raw = decode_completion(tokenizer, ids)
    special = _vocabulary(tokenizer).special
    kept = [index for index, token_id in enumerate(ids) if token_id not in special]
    kept_ids = [ids[index] for index in kept]
    method, kept_offsets = "bytes", _from_bytes(tokenizer, kept_ids, raw)
    if kept_offsets is None:
        method, kept_offsets = "encode", _from_encoding(tokenizer, kept_ids, raw)
    lost = 0
    if kept_offsets is None:
        log.debug("offsets by search: %r is not reproduced by its token ids", raw)
        method, (kept_offsets, lost) = "search", _by_search(tokenizer, kept_ids, raw)
    offsets = _spread(kept_offsets, kept, len(ids)) if len(kept) < len(ids) else kept_offsets
    text = (decode_cfg or DecodeConfig()).postprocess(raw)
    if not isinstance(text, str):
        raise UserError(f"generation.postprocess gave {type(text).__name__}, a text is wanted")
    offsets, removed = _after_postprocess(raw, text, offsets)
    return Alignment(text, offsets, lost + removed, method)


def decode_completion(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """The text of a completion as it is, without special tokens and before post-processing."""
    text: str = tokenizer.decode(
        list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return text


class _Piece(NamedTuple):
    """data: a token's bytes. begun: characters whose first byte is among them. continues: 1 if it
    starts inside a character that a token before it began, else 0."""

    data: bytes
    begun: int
    continues: int


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """What a tokenizer said of the ids met so far: asking once more takes longer than all the rest
    (`len` of one with 150,000 tokens: 0.1 s). special: ids that decoding leaves out."""

    special: frozenset[int]
    tokens: dict[int, str]
    byte_level: dict[int, _Piece]
    byte_fallback: dict[int, _Piece]

    def learn(self, tokenizer: Any, ids: Sequence[int]) -> None:
        """Look up the ids that were not met before."""
        new = list(set(ids) - self.tokens.keys())
        if not new:
            return
        for token_id, token in zip(new, tokenizer.convert_ids_to_tokens(new), strict=True):
            self.tokens[token_id] = token or ""  # None where the tokenizer has no such id
            self.byte_level[token_id] = _piece(_byte_level(token or ""))
            self.byte_fallback[token_id] = _piece(_byte_fallback(token or ""))


_vocabularies: WeakKeyDictionary[Any, _Vocabulary] = WeakKeyDictionary()


def _vocabulary(tokenizer: Any) -> _Vocabulary:
    """Of a tokenizer, which must not change after its first completion."""
    found = _vocabularies.get(tokenizer)
    if found is None:
        added = tokenizer.added_tokens_decoder
        flagged = {token_id for token_id, token in added.items() if token.special}
        special = frozenset(flagged | set(tokenizer.all_special_ids))
        found = _vocabularies[tokenizer] = _Vocabulary(special, {}, {}, {})
    return found


def _spread(kept_offsets: Offsets, kept: list[int], length: int) -> Offsets:
    """Offsets of the kept tokens -> of all; the others get zero width where they stand."""
    offsets: Offsets = []
    position, at = 0, 0
    for index in range(length):
        if at < len(kept) and kept[at] == index:
            offsets.append(kept_offsets[at])
            position = kept_offsets[at][1]
            at += 1
        else:
            offsets.append((position, position))
    return offsets


# ---- exact: from the bytes of the tokens


def _from_bytes(tokenizer: Any, ids: list[int], raw: str) -> Offsets | None:
    vocabulary = _vocabulary(tokenizer)
    vocabulary.learn(tokenizer, ids)
    tokens = [vocabulary.tokens[token_id] for token_id in ids]
    readings: list[tuple[dict[int, _Piece], Callable[[list[bytes]], tuple[str, Offsets]]]] = [
        (vocabulary.byte_level, _lossy),
        (vocabulary.byte_fallback, partial(_lossy_runs, tokens)),
    ]
    if any(token.startswith("▁") for token in tokens):  # the likelier one first
        readings.reverse()
    for table, read_broken in readings:
        pieces = [table[token_id] for token_id in ids]
        try:
            text = b"".join([piece.data for piece in pieces]).decode()
            offsets = _ranges(pieces)
        except UnicodeDecodeError:
            text, offsets = read_broken([piece.data for piece in pieces])
        if text == raw:
            return offsets
        if text == " " + raw:  # decoders of the Llama family drop the first space
            return [(max(0, start - 1), max(0, end - 1)) for start, end in offsets]
    return None


def _piece(data: bytes) -> _Piece:
    begun = sum(byte & 0xC0 != 0x80 for byte in data)  # UTF-8: 0b10xxxxxx goes on
    return _Piece(data, begun, int(data[:1] != b"" and data[0] & 0xC0 == 0x80))


def _ranges(pieces: Sequence[_Piece]) -> Offsets:
    """Of tokens whose bytes together are UTF-8: the range of characters that each has a byte of."""
    offsets: Offsets = []
    position = 0
    for _, begun, continues in pieces:
        offsets.append((position - continues, position + begun))
        position += begun
    return offsets


@cache
def _byte_of_character() -> dict[str, int]:
    """The alphabet of byte-level BPE: printable bytes stand for themselves, others are moved up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(hidden)}


def _byte_level(token: str) -> bytes:
    """GPT-2's form: each character of a token stands for a byte."""
    alphabet = _byte_of_character()
    try:
        return bytes([alphabet[character] for character in token])
    except KeyError:  # an added token stands for itself
        return token.encode(errors="replace")


def _byte_fallback(token: str) -> bytes:
    """Sentencepiece's form: `▁` is a space, `<0xE3>` a byte."""
    if len(token) == 6 and _BYTE_TOKEN.fullmatch(token):
        return bytes.fromhex(token[3:5])
    return token.replace("▁", " ").encode(errors="replace")


def _lossy(pieces: Sequence[bytes]) -> tuple[str, Offsets]:
    """Bytes of the tokens -> the text (bytes that are not UTF-8 become U+FFFD) and the range of
    characters that each token has a byte of."""
    bounds = [0, *accumulate(map(len, pieces))]
    text, char_of_byte = _decode_lossy(b"".join(pieces))
    offsets: Offsets = []
    for start, end in pairwise(bounds):
        first = char_of_byte[start]
        offsets.append((first, char_of_byte[end - 1] + 1 if end > start else first))
    return text, offsets


def _decode_lossy(data: bytes) -> tuple[str, list[int]]:
    """UTF-8 text with U+FFFD for each invalid part, and the character that each byte belongs to
    (one entry more than bytes: the text's length)."""
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


def _lossy_runs(tokens: Sequence[str], pieces: Sequence[bytes]) -> tuple[str, Offsets]:
    """The same for sentencepiece's form. As in the `tokenizers` library, a run of `<0xE3>` tokens
    that is not UTF-8 gives one U+FFFD for each of them."""
    parts: list[str] = []
    offsets: Offsets = []
    length = 0
    for _, group in groupby(
        zip(tokens, pieces, strict=True), lambda pair: bool(_BYTE_TOKEN.fullmatch(pair[0]))
    ):
        data = [piece for _, piece in group]
        try:
            b"".join(data).decode()
            text, ranges = _lossy(data)
        except UnicodeDecodeError:
            text, ranges = _REPLACEMENT * len(data), [(n, n + 1) for n in range(len(data))]
        parts.append(text)
        offsets += [(length + start, length + end) for start, end in ranges]
        length += len(text)
    return "".join(parts), offsets


# ---- fallbacks


def _from_encoding(tokenizer: Any, ids: list[int], raw: str) -> Offsets | None:
    if not tokenizer.is_fast:
        return None
    encoded = tokenizer(raw, add_special_tokens=False, return_offsets_mapping=True)
    if list(encoded["input_ids"]) != ids:
        return None
    return [(start, end) for start, end in encoded["offset_mapping"]]


def _by_search(tokenizer: Any, ids: list[int], raw: str) -> tuple[Offsets, int]:
    """Each token decoded alone and found after the one before it, else of zero width."""
    offsets: Offsets = []
    position = lost = 0
    for token_id in ids:
        piece = decode_completion(tokenizer, [token_id]).strip()
        found = raw.find(piece, position) if piece else -1
        if found < 0:
            offsets.append((position, position))
            lost += bool(piece)
        else:
            position = found + len(piece)
            offsets.append((found, position))
    return offsets, lost


def _after_postprocess(raw: str, text: str, offsets: Offsets) -> tuple[Offsets, int]:
    """Offsets in `raw` -> offsets in `text`, and how many tokens that hold text are lost."""
    if text == raw:
        return offsets, 0
    if text == raw.strip():
        return _clipped(offsets, len(raw) - len(raw.lstrip()), len(text)), 0
    place = _char_map(raw, text)
    mapped: Offsets = []
    position = lost = 0
    for start, end in offsets:
        kept = [place[index] for index in range(start, end) if place[index] >= 0]
        if kept:
            mapped.append((kept[0], kept[-1] + 1))
            position = kept[-1] + 1
        else:
            mapped.append((position, position))
            lost += bool(raw[start:end].strip())
    return mapped, lost


def _clipped(offsets: Offsets, lead: int, length: int) -> Offsets:
    """Offsets in a text -> in its `length` characters from `lead` on."""
    clipped: Offsets = []
    position = 0
    for start, end in offsets:
        start, end = max(start - lead, 0), min(end - lead, length)
        if start < end:
            position = end
            clipped.append((start, end))
        else:
            clipped.append((position, position))
    return clipped


def _char_map(raw: str, text: str) -> list[int]:
    """For each character of `raw` its index in `text`, or -1."""
    place = [-1] * len(raw)
    matcher = difflib.SequenceMatcher(None, raw, text, autojunk=False)
    for start, target, size in matcher.get_matching_blocks():
        place[start : start + size] = range(target, target + size)
    return place
