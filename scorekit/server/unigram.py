"""Tokenizers made from sentencepiece's own model files.

Different versions of transformers convert such a file differently: 4.30, 4.57 and 5 give different
ids for some texts. This module contains the conversion rules, so that ids depend on the file only.
The format is that of sentencepiece_model.proto. It is parsed here field by field, because the
classes that sentencepiece generates from it work with some versions of protobuf only.
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
    """The contents of a sentencepiece file of the unigram type.

    scores: (piece, logarithm of its probability), in the order of ids. kinds: SentencePiece.Type of
    each piece. charsmap: the character table of its normalizer; empty: it changes no character.
    """

    scores: list[tuple[str, float]]
    kinds: list[int]
    unk_id: int
    charsmap: bytes


def read_unigram_file(file: Path) -> UnigramFile:
    """Read a sentencepiece file.

    Raises OSError if it cannot be read, ValueError if it is not a unigram model.
    """
    scores: list[tuple[str, float]] = []
    kinds: list[int] = []
    specs: dict[int, dict[int, int | memoryview]] = {}
    for number, value in _fields(memoryview(file.read_bytes())):
        if number == _PIECES:
            piece_fields = dict(_fields(_message(value)))
            text = str(_message(piece_fields.get(_TEXT, memoryview(b""))), "utf-8")
            (score,) = struct.unpack("<f", _message(piece_fields.get(_SCORE, memoryview(bytes(4)))))
            scores.append((text, score))
            kinds.append(_number(piece_fields.get(_KIND, _NORMAL)))
        elif number in (_TRAINER, _NORMALIZER):
            specs[number] = dict(_fields(_message(value)))
    if not scores or len(specs) != 2:
        raise ValueError("it is no whole sentencepiece model")
    if specs[_TRAINER].get(_MODEL_TYPE, _UNIGRAM) != _UNIGRAM:
        raise ValueError("its sentencepiece model is not of the unigram kind")
    charsmap = bytes(_message(specs[_NORMALIZER].get(_CHARSMAP, memoryview(b""))))
    return UnigramFile(scores, kinds, _number(specs[_TRAINER].get(_UNK_ID, 0)), charsmap)


def t5_tokenizer(
    model_file: UnigramFile, extra_ids: int, special: Sequence[AddedToken]
) -> Tokenizer:
    """Return the tokenizer of T5 and mT5, equal to that of transformers 4.30.2, which MetricX uses.

    Text that the file cannot encode becomes the unknown id, even if the file has byte pieces. A
    space at the end of a text has an id. extra_ids: number of `<extra_id_N>` after the pieces.
    special: tokens that are matched literally in a text.
    """
    from tokenizers import processors

    extra = [(f"<extra_id_{n}>", 0.0) for n in reversed(range(extra_ids))]
    steps = [*_charsmap(model_file), _one_space()]
    tokenizer = _unigram(model_file.scores + extra, model_file.unk_id, steps)
    tokenizer.add_special_tokens(list(special))
    end = tokenizer.token_to_id("</s>")
    if end is None:
        raise ValueError("it has no piece </s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", end)]
    )
    return tokenizer


def xlm_roberta_tokenizer(model_file: UnigramFile) -> Tokenizer:
    """Return the tokenizer of XLM-R, as transformers 4.57 makes it of `sentencepiece.bpe.model`.

    The ids are those of fairseq: four special tokens, then the pieces after the file's first three.
    """
    from tokenizers import AddedToken, normalizers, processors

    marks = ["<s>", "<pad>", "</s>", "<unk>"]
    vocabulary = [(mark, 0.0) for mark in marks] + model_file.scores[3:] + [("<mask>", 0.0)]
    strip = normalizers.Strip(left=False, right=True)
    steps = [*_charsmap(model_file), strip, _one_space(_SPACE)]
    tokenizer = _unigram(vocabulary, marks.index("<unk>"), steps)
    tokenizer.add_tokens(_special_tokens(model_file))
    # A mask takes the space before it.
    tokenizer.add_special_tokens([*marks, AddedToken("<mask>", lstrip=True, normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    return tokenizer


def deberta_tokenizer(model_file: UnigramFile) -> Tokenizer:
    """Return the tokenizer of DeBERTa-v3, as transformers 4.57 makes it of `spm.model`.

    `[MASK]` gets the id after the pieces, unless it is one of them.
    """
    from tokenizers import AddedToken, normalizers, processors

    steps = [normalizers.Strip(), *_charsmap(model_file), _one_space()]
    tokenizer = _unigram(model_file.scores, model_file.unk_id, steps)
    tokenizer.add_tokens(_special_tokens(model_file))
    unknown = AddedToken("[UNK]", normalized=True)  # matched in the normalized text
    tokenizer.add_special_tokens(["[CLS]", "[SEP]", unknown, "[PAD]", "[MASK]"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[(mark, tokenizer.token_to_id(mark)) for mark in ("[CLS]", "[SEP]")],
    )
    return tokenizer


def _unigram(
    vocabulary: list[tuple[str, float]], unk_id: int, steps: list[normalizers.Normalizer]
) -> Tokenizer:
    """Return a tokenizer without special tokens. steps: of its normalizer."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id, byte_fallback=False))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(_SPACE, prepend_scheme="always")
    return tokenizer


def _one_space(space: str = " ") -> normalizers.Normalizer:
    """Return the step that replaces several spaces by one."""
    from tokenizers import Regex, normalizers

    return normalizers.Replace(Regex(" {2,}"), space)


def _charsmap(model_file: UnigramFile) -> list[normalizers.Normalizer]:
    from tokenizers import normalizers

    return [normalizers.Precompiled(model_file.charsmap)] if model_file.charsmap else []


def _special_tokens(model_file: UnigramFile) -> list[AddedToken]:
    """Return the pieces that are never part of a longer piece: control and user-defined ones."""
    from tokenizers import AddedToken

    return [
        AddedToken(text, normalized=False, special=kind == _CONTROL)
        for (text, _), kind in zip(model_file.scores, model_file.kinds, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield (number, value) of the fields of a message. value: an int for a varint, else bytes.

    Source: protobuf.dev/programming-guides/encoding. Raises ValueError if it is not a message.
    """
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        kind = key & 7
        if kind == 0:
            value, position = _varint(data, position)
            yield key >> 3, value
            continue
        if kind == 2:
            size, position = _varint(data, position)
        else:
            size = {1: 8, 5: 4}.get(kind, len(data) + 1)
        if position + size > len(data):
            raise ValueError("it is no sentencepiece model, or its end is missing")
        yield key >> 3, data[position : position + size]
        position += size


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    """Return the number at `position`, seven bits per byte, and the position after it."""
    value = shift = 0
    while True:
        if position >= len(data) or shift > 63:
            raise ValueError("it is no sentencepiece model, or its end is missing")
        byte = data[position]
        position += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
        shift += 7


def _message(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise ValueError("it is no sentencepiece model")
    return value


def _number(value: int | memoryview) -> int:
    if not isinstance(value, int):
        raise ValueError("it is no sentencepiece model")
    return value
