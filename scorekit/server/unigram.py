"""Tokenizers made from sentencepiece's own model files.

transformers turns such a file into a tokenizer anew in each of its versions: 4.30, 4.57 and 5 give
different ids to some texts. Here the rules stand in the code, so that ids depend on the file only.
The format is that of sentencepiece_model.proto. It is read field by field: the classes that
sentencepiece generates from it work with some versions of protobuf only.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer, normalizers

#: Numbers of the fields that are read, of ModelProto, SentencePiece, TrainerSpec, NormalizerSpec.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _KIND = 1, 2, 3
_MODEL_TYPE, _UNK_ID = 3, 40
_CHARSMAP = 2
#: Values of SentencePiece.Type and of TrainerSpec.ModelType.
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_UNIGRAM = 1
_SPACE = "▁"


@dataclass(frozen=True, slots=True)
class UnigramFile:
    """What a sentencepiece file of the unigram kind says.

    scores: (piece, logarithm of its probability), in the order of ids. kinds: SentencePiece.Type of
    each. charsmap: its normaliser's table of characters; empty: it changes none.
    """

    scores: list[tuple[str, float]]
    kinds: list[int]
    unk_id: int
    charsmap: bytes


def read_pieces(file: Path) -> UnigramFile:
    """Return what a sentencepiece file says.

    Raises OSError where it cannot be read, ValueError where it is no unigram model.
    """
    scores: list[tuple[str, float]] = []
    kinds: list[int] = []
    specs: dict[int, dict[int, int | memoryview]] = {}
    for number, value in _fields(memoryview(file.read_bytes())):
        if number == _PIECES:
            piece = dict(_fields(_message(value)))
            text = str(_message(piece.get(_TEXT, memoryview(b""))), "utf-8")
            (score,) = struct.unpack("<f", _message(piece.get(_SCORE, memoryview(bytes(4)))))
            scores.append((text, score))
            kinds.append(_number(piece.get(_KIND, _NORMAL)))
        elif number in (_TRAINER, _NORMALIZER):
            specs[number] = dict(_fields(_message(value)))
    if not scores or len(specs) != 2:
        raise ValueError("it is no whole sentencepiece model")
    if specs[_TRAINER].get(_MODEL_TYPE, _UNIGRAM) != _UNIGRAM:
        raise ValueError("its sentencepiece model is not of the unigram kind")
    charsmap = bytes(_message(specs[_NORMALIZER].get(_CHARSMAP, memoryview(b""))))
    return UnigramFile(scores, kinds, _number(specs[_TRAINER].get(_UNK_ID, 0)), charsmap)


def t5_tokenizer(pieces: UnigramFile, extra_ids: int, special: Sequence[AddedToken]) -> Tokenizer:
    """Return the tokenizer of T5 and mT5, as transformers 4.30.2 makes it: MetricX's upstream.

    What the file cannot spell is the unknown id, though it may have bytes among its pieces; a space
    at the end of a text is an id. extra_ids: how many `<extra_id_N>` stand behind the pieces.
    special: tokens that are found in a text as they are written.
    """
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

    extra = [(f"<extra_id_{n}>", 0.0) for n in reversed(range(extra_ids))]
    tokenizer = Tokenizer(models.Unigram(pieces.scores + extra, pieces.unk_id, byte_fallback=False))
    tokenizer.normalizer = normalizers.Sequence(
        [*_charsmap(pieces), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme="always")
    tokenizer.add_special_tokens(list(special))
    end = tokenizer.token_to_id("</s>")
    if end is None:
        raise ValueError("it has no piece </s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", end)]
    )
    return tokenizer


def xlm_roberta_tokenizer(pieces: UnigramFile) -> Tokenizer:
    """Return the tokenizer of XLM-R, as transformers 4.57 makes it of `sentencepiece.bpe.model`.

    Ids are fairseq's: four marks of its own, then the pieces behind the file's first three.
    """
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        models,
        normalizers,
        pre_tokenizers,
        processors,
    )

    marks = ["<s>", "<pad>", "</s>", "<unk>"]
    vocabulary = [(mark, 0.0) for mark in marks] + pieces.scores[3:] + [("<mask>", 0.0)]
    tokenizer = Tokenizer(models.Unigram(vocabulary, marks.index("<unk>"), byte_fallback=False))
    tokenizer.normalizer = normalizers.Sequence(
        [
            *_charsmap(pieces),
            normalizers.Strip(left=False, right=True),
            normalizers.Replace(Regex(" {2,}"), _SPACE),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme="always")
    tokenizer.add_tokens(_written(pieces))
    # A mask takes the space before it.
    tokenizer.add_special_tokens([*marks, AddedToken("<mask>", lstrip=True, normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    return tokenizer


def deberta_tokenizer(pieces: UnigramFile) -> Tokenizer:
    """Return the tokenizer of DeBERTa-v3, as transformers 4.57 makes it of `spm.model`.

    `[MASK]` gets the id behind the pieces, unless it is one of them.
    """
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        models,
        normalizers,
        pre_tokenizers,
        processors,
    )

    tokenizer = Tokenizer(models.Unigram(pieces.scores, pieces.unk_id, byte_fallback=False))
    tokenizer.normalizer = normalizers.Sequence(
        [
            normalizers.Strip(),
            *_charsmap(pieces),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme="always")
    tokenizer.add_tokens(_written(pieces))
    unknown = AddedToken("[UNK]", normalized=True)  # found in what the normaliser leaves of a text
    tokenizer.add_special_tokens(["[CLS]", "[SEP]", unknown, "[PAD]", "[MASK]"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[(mark, tokenizer.token_to_id(mark)) for mark in ("[CLS]", "[SEP]")],
    )
    return tokenizer


def _charsmap(pieces: UnigramFile) -> list[normalizers.Normalizer]:
    from tokenizers import normalizers

    return [normalizers.Precompiled(pieces.charsmap)] if pieces.charsmap else []


def _written(pieces: UnigramFile) -> list[AddedToken]:
    """The pieces that are never part of a longer one: control pieces and the user's own."""
    from tokenizers import AddedToken

    return [
        AddedToken(text, normalized=False, special=kind == _CONTROL)
        for (text, _), kind in zip(pieces.scores, pieces.kinds, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """(number, value) of a message's fields: a varint's number, else the bytes.

    Source: protobuf.dev/programming-guides/encoding. Raises ValueError where it is no message.
    """
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(data, at)
            yield key >> 3, value
            continue
        if kind == 2:
            size, at = _varint(data, at)
        else:
            size = {1: 8, 5: 4}.get(kind, len(data) + 1)
        if at + size > len(data):
            raise ValueError("it is no sentencepiece model, or its end is missing")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """The number that begins at `at`, seven bits a byte, and where it ends."""
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ValueError("it is no sentencepiece model, or its end is missing")
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7


def _message(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise ValueError("it is no sentencepiece model")
    return value


def _number(value: int | memoryview) -> int:
    if not isinstance(value, int):
        raise ValueError("it is no sentencepiece model")
    return value
