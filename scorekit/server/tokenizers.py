"""Turn texts into ids: bounded tokenizers, sentencepiece's files, and a log of long texts.

A client may send a text a hundred times longer than the model reads. So it is cut first, at a place
where the start surely has the same ids as in the complete text. Few bytes are tokenized at once,
because an encoding takes hundreds of bytes for each.

Different versions of transformers convert a sentencepiece file differently: 4.30, 4.57 and 5 give
different ids for some texts. This module contains the conversion rules, so that ids depend on the
file only. The format is that of sentencepiece_model.proto. It is parsed here field by field,
because the classes that sentencepiece generates from it work with some versions of protobuf only.
"""

from __future__ import annotations

import re
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scorekit.errors import SampleError
from scorekit.server.backend import Encoded

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer, normalizers

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

    Two threads may use it at once (see `Backend`).
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

    scores: (piece, logarithm of its probability), in the order of ids.
    kinds: SentencePiece.Type of each piece.
    charsmap: the character table of its normalizer; empty: it changes no character.
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
    space at the end of a text has an id.
    extra_ids: number of `<extra_id_N>` after the pieces.
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
    """Return a tokenizer without special tokens.

    steps: of its normalizer.
    """
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


#: Seconds between two lines. What comes in between is in the next line.
PERIOD_S = 60.0

#: Writes a line: samples that were cut, samples that were refused, and cut samples by text.
WriteLine = Callable[[int, int, dict[str, int]], None]


class LengthLog:
    """Counts the inputs that are too long, as they are tokenized. Threads may share it.

    write: writes a line.
    count: called with the name of each text that was cut.
    clock: seconds.
    """

    def __init__(
        self,
        write: WriteLine,
        count: Callable[[str], None] = lambda name: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._write = write
        self._count = count
        self._clock = clock
        self._lock = threading.Lock()
        self._num_cut = self._num_refused = 0  # guarded by the lock
        self._cut_by_name: Counter[str] = Counter()  # guarded by the lock
        self._next_line_at: float | None = None  # guarded by the lock

    def note(self, results: Iterable[Encoded | SampleError | None]) -> None:
        """Note the outcomes of tokenizing; a line is written at once, or after the period."""
        cut_names = [cut for result in results if (cut := _cut_texts(result))]
        if not cut_names:
            return
        with self._lock:
            for names in cut_names:
                if names == _REFUSED:
                    self._num_refused += 1
                    continue
                self._num_cut += 1
                for name in names:
                    self._cut_by_name[name] += 1
                    self._count(name)
            if self._next_line_at is None or self._clock() >= self._next_line_at:
                self._write_line()

    def flush(self) -> None:
        """Write what no line has said yet."""
        with self._lock:
            if self._num_cut or self._num_refused:
                self._write_line()

    def _write_line(self) -> None:
        """Write a line and begin a period. The caller holds the lock."""
        self._write(self._num_cut, self._num_refused, dict(self._cut_by_name))
        self._num_cut = self._num_refused = 0
        self._cut_by_name.clear()
        self._next_line_at = self._clock() + PERIOD_S


_REFUSED = ("",)


def _cut_texts(result: Encoded | SampleError | None) -> tuple[str, ...]:
    """Return the names of the texts that were cut; `_REFUSED` for a sample that was too long."""
    if isinstance(result, SampleError):
        return _REFUSED if result.type == "overlong" else ()
    if result is None:  # to be split into windows
        return ()
    truncated = result.fields.get("truncated", {})
    return tuple(name for name, is_cut in truncated.items() if is_cut)
