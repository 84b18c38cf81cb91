"""Locate each completion token in the completion's text.

There are three methods; the first that reproduces the decoded text is used:
bytes    the bytes of each token, known from its id (byte-level BPE; sentencepiece with or without
byte fallback): exact, also if a character has several tokens;
encode   the fast tokenizer's own offsets, if encoding the text gives the same ids again;
search   decode each token alone and search for it in the text: best effort, noted in the debug log.

Shapes: T completion tokens. A tokenizer is one of `transformers`, or an object with its methods
`decode`, `convert_ids_to_tokens`, `added_tokens_decoder`, `all_special_ids`, `is_fast` and
`__call__`. Positions in a text are Unicode code points, as Python counts them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from scorekit.credit.checks import check_token_ids
from scorekit.credit.text_parts import (
    character_map,
    is_subsequence,
    position_by_marking,
    positions_of,
)
from scorekit.credit.token_bytes import Offsets, offsets_from_bytes, vocabulary_of
from scorekit.errors import UserError
from scorekit.prompts import postprocess_translation

log = logging.getLogger(__name__)


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
    mapped, num_lost = _mapped(alignment, new_index)
    return Alignment(text, mapped, alignment.unaligned + num_lost, method)


def _mapped(alignment: Alignment, new_index: list[int]) -> tuple[Offsets, int]:
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
