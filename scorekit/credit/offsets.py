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

import difflib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from scorekit.credit.checks import check_token_ids
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
    method: `bytes`, `encode` or `search`.
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
    ids = list(completion_token_ids)
    if ids and ids[-1] in stop_ids:
        alignment = align_completion(tokenizer, ids[:-1], decode_cfg)
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
    offsets = (
        _spread(text_offsets, text_indices, len(ids))
        if len(text_indices) < len(ids)
        else text_offsets
    )
    text = (decode_cfg or DecodeConfig()).postprocess(raw)
    if not isinstance(text, str):
        raise UserError(
            f"postprocess: the function returned {type(text).__name__}. Return a text (in a run's "
            "config: generation.postprocess)"
        )
    offsets, removed = _after_postprocess(raw, text, offsets)
    return Alignment(text, offsets, num_unaligned + removed, method)


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


def _after_postprocess(raw: str, text: str, offsets: Offsets) -> tuple[Offsets, int]:
    """Return offsets in `text` for those in `raw`, and the number of tokens with text that are
    lost."""
    if text == raw:
        return offsets, 0
    if text == raw.strip():
        return _clipped(offsets, len(raw) - len(raw.lstrip()), len(text)), 0
    new_index = _char_map(raw, text)
    mapped: Offsets = []
    position = num_lost = 0
    for start, end in offsets:
        positions = [new_index[index] for index in range(start, end) if new_index[index] >= 0]
        if positions:
            mapped.append((positions[0], positions[-1] + 1))
            position = positions[-1] + 1
        else:
            mapped.append((position, position))
            num_lost += bool(raw[start:end].strip())
    return mapped, num_lost


def _clipped(offsets: Offsets, lead: int, length: int) -> Offsets:
    """Return the offsets within the `length` characters of a text from `lead` on."""
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
    """Return for each character of `raw` its index in `text`, or -1."""
    new_index = [-1] * len(raw)
    matcher = difflib.SequenceMatcher(None, raw, text, autojunk=False)
    for start, target, size in matcher.get_matching_blocks():
        new_index[start : start + size] = range(target, target + size)
    return new_index
