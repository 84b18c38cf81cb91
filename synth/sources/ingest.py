"""Read one file of the corpus and write the sources that can be in the sample.

Texts in another language are left out (`SourceLanguage`).
"""

from __future__ import annotations

import gc
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import structlog

from scorekit.languages import find_language
from scorekit.numeric import below
from scorekit.text.checks import identifier_codes, likely_others, whole_identifier
from scorekit.text.markup import normalized
from scorekit.text.rules import SOURCES
from scorekit.text.writing_scripts import LETTERS, other_variant, scripts_of
from synth.config import SynthConfig
from synth.reasons import Reason, RuleCode
from synth.record import source_id
from synth.sources.madlad import Document, SourceFile, peek_newlines, read_documents
from synth.sources.measure import category_weights, char_sums, make_measure
from synth.sources.parts import Part, PartCounts, PartWriter, open_part_writer
from synth.sources.sampling import TYPES, BottomK, bucket_of, prioritise
from synth.sources.segment import Segment, find_blobs, find_segments, mode_code, whole_text
from synth.storage.store import Record

if TYPE_CHECKING:
    import pyarrow

log = structlog.get_logger()

#: Number of documents that are segmented and measured at once.
_BATCH = 64


class _Source(NamedTuple):
    """A segment or blob that can be a source.

    kind: index of TYPES.
    """

    kind: int
    text: str
    start: int
    end: int
    segment_index: int
    segments: int
    document: Document


@contextmanager
def _rarely_collected() -> Iterator[None]:
    """Run the garbage collector rarely: there are many segments, and no cycles."""
    before = gc.get_threshold()
    gc.set_threshold(100 * before[0], *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


class Ingest:
    """Reads files of a corpus into a sample, with one config."""

    def __init__(self, cfg: SynthConfig, sample: BottomK) -> None:
        self._cfg, self._sample = cfg, sample
        self._measure = make_measure(cfg.bucketing, cfg.data.src_lang)
        self._priority = prioritise(cfg.run.seed)
        self._blobs = cfg.final_generation.blob
        self._edges = cfg.bucketing.boundaries
        margin = cfg.segmentation.language_margin
        self._language = None if margin is None else SourceLanguage(cfg.data.src_lang, margin)
        language = find_language(cfg.data.src_lang)
        self._madlad = {
            "lang": language.madlad if language else cfg.data.src_lang,
            "split": cfg.data.madlad_split,
        }

    def read(self, file: SourceFile, part: Part, max_documents: int | None) -> PartCounts:
        """Read a file and write its part.

        max_documents: from this file; None: all.
        """
        counts = PartCounts(file.name)
        documents = read_documents(file, counts.note_broken)
        newlines, documents = peek_newlines(itertools.islice(documents, max_documents))
        counts.newlines = newlines if self._cfg.data.newlines == "auto" else self._cfg.data.newlines
        with open_part_writer(part) as writer, _rarely_collected():
            while batch := list(itertools.islice(documents, _BATCH)):
                counts.documents += len(batch)
                for source, identity, length in self._measured(self._sources(batch, counts)):
                    self._offer(source, identity, length, file, counts, writer)
        if counts.broken:
            log.warning(
                "lines that cannot be read",
                file=file.name,
                lines=counts.broken_lines,
                **counts.broken[0],
            )
        part.set_counts(counts)
        return counts

    def _sources(self, batch: list[Document], counts: PartCounts) -> Iterator[_Source]:
        """Yield the segments and blobs of documents, and count rejected ones."""
        section = self._cfg.segmentation
        usable = []
        for document in batch:
            if code := mode_code(document, section.mode):
                counts.rejected[code] += 1
            else:
                usable.append(document)
        full_texts = [whole_text(document) for document in usable]
        segments_by_document = self._in_language(
            find_segments(full_texts, section, counts.newlines)
        )
        for segments, document in zip(segments_by_document, usable, strict=True):
            counts.pieces += len(segments)
            for index, segment in enumerate(segments):
                if segment.code:
                    counts.rejected[segment.code] += 1
                else:
                    yield _Source(0, segment.text, segment.start, segment.end, index, 1, document)
        if not self._blobs.enabled:
            return
        for full_text, segments, lengths, document in zip(
            full_texts,
            segments_by_document,
            self._lengths(segments_by_document),
            usable,
            strict=True,
        ):
            for blob in find_blobs(
                full_text,
                segments,
                lengths,
                max_tokens=self._blobs.blob_max_tokens,
                max_chars=section.max_chars,
            ):
                counts.pieces += 1
                yield _Source(1, *blob, document)

    def _in_language(self, segments_by_document: list[list[Segment]]) -> list[list[Segment]]:
        """Return the segments, with a code for those in another language."""
        if self._language is None:
            return segments_by_document
        accepted_texts = [
            segment.text
            for segments in segments_by_document
            for segment in segments
            if not segment.code
        ]
        other = iter(self._language.is_other(accepted_texts))
        return [
            [
                segment._replace(code=Reason.SOURCE_LANGUAGE)
                if not segment.code and next(other)
                else segment
                for segment in segments
            ]
            for segments in segments_by_document
        ]

    def _lengths(self, segments_by_document: list[list[Segment]]) -> Iterator[list[float]]:
        """Yield the length of every segment that a blob can contain; 0 for the others."""
        joinable = (None, RuleCode.TOO_SHORT)
        flat = iter(
            self._measure([p.text for ps in segments_by_document for p in ps if p.code in joinable])
        )
        for segments in segments_by_document:
            yield [next(flat) if segment.code in joinable else 0.0 for segment in segments]

    def _measured(self, sources: Iterable[_Source]) -> Iterator[tuple[_Source, str, float]]:
        """Yield sources with id and length.

        The length is that of the normalized text, so equal ids have equal lengths and buckets."""
        source_list = list(sources)
        texts = [" ".join(normalized("NFC", source.text).split()) for source in source_list]
        for source, text, length in zip(source_list, texts, self._measure(texts), strict=True):
            yield source, source_id(text), length

    def _offer(
        self,
        source: _Source,
        identity: str,
        length: float,
        file: SourceFile,
        counts: PartCounts,
        writer: PartWriter,
    ) -> None:
        bucket = bucket_of(length, self._edges)
        if source.kind == 1 and length > self._blobs.blob_max_tokens:
            # A tokenizer may count more tokens for the full blob.
            counts.rejected[Reason.BLOB_TOO_LONG] += 1
            return
        if bucket is None:
            counts.rejected[Reason.NO_BUCKET] += 1
            return
        stratum = source.kind * (len(self._edges) - 1) + bucket
        priority = self._priority(identity)
        if self._sample.offer(stratum, priority):
            record = self._record(source, identity, length, bucket, file)
            writer.write(priority, stratum, record)

    def _record(
        self, source: _Source, identity: str, length: float, bucket: int, file: SourceFile
    ) -> Record:
        document = source.document
        provenance = {
            **self._madlad,
            "doc_id": f"{file.name}:{document.line}",
            "file": file.name,
            "line": document.line,
            "span": [source.start, source.end],
            "segment_index": source.segment_index,
            "segments": source.segments,
            "url": document.url,
        }
        return {
            "source_id": identity,
            "source_text": source.text,
            "source_type": TYPES[source.kind],
            "length": length,
            "length_bucket_id": bucket,
            "source_meta": {"madlad": provenance},
        }


def record_columns() -> pyarrow.Schema:
    """Return the columns of the records as Parquet."""
    import pyarrow as pa

    madlad = {
        "lang": pa.string(),
        "split": pa.string(),
        "doc_id": pa.string(),
        "file": pa.string(),
        "line": pa.int64(),
        "span": pa.list_(pa.int64()),
        "segment_index": pa.int64(),
        "segments": pa.int64(),
        "url": pa.string(),
    }
    columns = {
        "source_id": pa.string(),
        "source_text": pa.string(),
        "source_type": pa.string(),
        "length": pa.float64(),
        "length_bucket_id": pa.int32(),
        "source_meta": pa.struct({"madlad": pa.struct(madlad)}),
    }
    return pa.schema(columns)


#: Scripts whose letters count twice.
_DENSE = ("Han", "Kana", "Hangul")
#: Number of bytes of a text that are used.
_MAX_BYTES = 480
_FIELD = 1 << 20  # two counts in one sum; a segment has fewer letters


class SourceLanguage:
    """Detects texts in another language: by their letters, then by py3langid's model.

    There are millions of segments, so many are processed at once: scripts with a vector of
    characters, and the identifier's automaton over all texts in parallel, byte by byte. This costs
    a tenth of one call per text, with identical results.

    margin: required log odds of another language.
    """

    def __init__(self, language: str, margin: float) -> None:
        self._language = language
        matched = find_language(language)
        scripts = scripts_of(language) if matched else ()
        self._weights = _letter_weights(scripts) if scripts else None
        own_codes = identifier_codes(matched) if matched else ()
        other_codes = [code for code in likely_others(language) if code not in own_codes]
        supported = whole_identifier().nb_classes
        self._odds = (
            _Odds(own_codes, other_codes)
            if other_codes and set(own_codes) <= set(supported)
            else None
        )
        self._margin = margin

    def is_other(self, texts: Sequence[str]) -> list[bool]:
        """Return, for each text, True if it is in another language, or in the other standard of
        Chinese.

        Returns False for texts that are too short, and for languages that neither
        writing_scripts.py nor the identifier supports."""
        if self._weights is None:
            return [False] * len(texts)
        sums = char_sums(texts, self._weights)
        long = [i for i, total in enumerate(sums) if total % _FIELD >= SOURCES.script_letters]
        flags = [False] * len(texts)
        undecided = []
        for i in long:
            flags[i] = below(sums[i] // _FIELD, SOURCES.min_script_share * (sums[i] % _FIELD))
            if not flags[i]:
                undecided.append(i)
        if self._odds is not None and undecided:
            margins = self._odds.margins([texts[i] for i in undecided])
            for i, margin in zip(undecided, margins, strict=True):
                flags[i] = margin > self._margin
        return [flags[i] or self._is_other_variant(text) for i, text in enumerate(texts)]

    def _is_other_variant(self, text: str) -> bool:
        match = other_variant(text, self._language)
        return match is not None and match[0] > SOURCES.max_other_variant


@lru_cache(16)
def _letter_weights(scripts: tuple[str, ...]) -> np.ndarray:
    """Return weights by code point: letters (dense ones twice), and the scripts' letters in the
    upper field."""
    letters = category_weights("L")
    for name in _DENSE:
        letters *= 1 + _members(LETTERS[name], letters)
    script_letters = np.zeros_like(letters)
    for name in scripts:
        script_letters |= _members(LETTERS[name], letters)
    return letters + script_letters * letters * _FIELD


def _members(pattern: re.Pattern[str], letters: np.ndarray) -> np.ndarray:
    """Return 1 for the letters in a class of characters."""
    flags = np.zeros_like(letters)
    text = "".join(chr(code) for code in np.flatnonzero(letters) if not 0xD800 <= code < 0xE000)
    flags[[ord(char) for char in pattern.findall(text)]] = 1
    return flags


class _Odds:
    """The identifier's log odds for a few languages, computed for many texts at once."""

    def __init__(self, own_codes: Sequence[str], other_codes: Sequence[str]) -> None:
        model = whole_identifier()
        columns = [model.nb_classes.index(code) for code in (*own_codes, *other_codes)]
        self._num_own = len(own_codes)
        self._next = np.array(model.tk_nextmove, dtype=np.int32)
        self._prior = np.asarray(model.nb_pc, dtype=np.float64)[columns]
        features = np.asarray(model.nb_ptc, dtype=np.float64)[:, columns]
        self._gain = np.zeros((len(self._next) >> 8, len(columns)))
        for state, outputs in model.tk_output.items():
            self._gain[state] = features[list(outputs)].sum(axis=0)

    def margins(self, texts: Sequence[str]) -> list[float]:
        """Return the log odds of the best other language against the source language."""
        raw = [text[:_MAX_BYTES].encode("utf-8", "surrogatepass")[:_MAX_BYTES] for text in texts]
        lengths = np.array([len(encoded) for encoded in raw])
        order = np.argsort(-lengths, kind="stable")  # longest texts first
        width = int(lengths.max(initial=0))
        table = np.zeros((len(raw), width), dtype=np.int32)
        for row, index in enumerate(order):
            table[row, : lengths[index]] = np.frombuffer(raw[index], dtype=np.uint8)
        going = np.searchsorted(-lengths[order], -np.arange(width), side="left")
        state = np.zeros(len(raw), dtype=np.int32)
        totals = np.tile(self._prior, (len(raw), 1))
        for column, count in enumerate(going):
            state = self._next[(state[:count] << 8) + table[:count, column]]
            totals[:count] += self._gain[state]
        margins = totals[:, self._num_own :].max(axis=1) - totals[:, : self._num_own].max(axis=1)
        ordered = np.empty(len(raw))
        ordered[order] = margins
        return [float(margin) for margin in ordered]
