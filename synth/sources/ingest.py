"""One file of the corpus -> the sources in it that may be of the sample."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import structlog

from scorekit.languages import find_language
from scorekit.text.markup import normalised
from synth.config import SynthConfig
from synth.folder.store import Record
from synth.record import source_id
from synth.sources.madlad import Document, SourceFile, peek_newlines, read_documents
from synth.sources.measure import make_measure
from synth.sources.parts import Part, PartCounts, PartWriter
from synth.sources.sampling import TYPES, BottomK, bucket_of, prioritise
from synth.sources.segment import Segment, find_blobs, find_segments, mode_code, whole_text
from synth.sources.source_language import SourceLanguage

log = structlog.get_logger()

#: Documents that are cut and measured at once.
_BATCH = 64


class _Source(NamedTuple):
    """A segment or blob that may stand alone. kind: index of TYPES."""

    kind: int
    text: str
    start: int
    end: int
    place: int
    segments: int
    document: Document


@contextmanager
def _rarely_collected() -> Iterator[None]:
    """Look for cycles of objects less often: segments are many, and in none of them."""
    before = gc.get_threshold()
    gc.set_threshold(100 * before[0], *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


class Ingest:
    """Reads files under one config, into one sample."""

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
        """Read a file and write its part. max_documents: of this file, null for all."""
        counts = PartCounts(file.name)
        documents = read_documents(file, counts.note_broken)
        newlines, documents = peek_newlines(itertools.islice(documents, max_documents))
        counts.newlines = newlines if self._cfg.data.newlines == "auto" else self._cfg.data.newlines
        with PartWriter(part) as writer, _rarely_collected():
            while batch := list(itertools.islice(documents, _BATCH)):
                counts.documents += len(batch)
                for source, identity, length in self._measured(self._sources(batch, counts)):
                    self._offer(source, identity, length, file, counts, writer)
            writer.commit()
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
        """The segments and blobs of documents, those left out counted."""
        cut = self._cfg.segmentation
        usable = []
        for document in batch:
            if code := mode_code(document, cut.mode):
                counts.rejected[code] += 1
            else:
                usable.append(document)
        wholes = [whole_text(document) for document in usable]
        found = self._in_language(find_segments(wholes, cut, counts.newlines))
        for pieces, document in zip(found, usable, strict=True):
            counts.pieces += len(pieces)
            for index, piece in enumerate(pieces):
                if piece.code:
                    counts.rejected[piece.code] += 1
                else:
                    yield _Source(0, piece.text, piece.start, piece.end, index, 1, document)
        if not self._blobs.enabled:
            return
        for whole, pieces, lengths, document in zip(
            wholes, found, self._lengths(found), usable, strict=True
        ):
            for blob in find_blobs(
                whole,
                pieces,
                lengths,
                max_tokens=self._blobs.blob_max_tokens,
                max_chars=cut.max_chars,
            ):
                counts.pieces += 1
                yield _Source(1, *blob, document)

    def _in_language(self, found: list[list[Segment]]) -> list[list[Segment]]:
        """The segments, with a code for those that are in another language."""
        if self._language is None:
            return found
        good = [piece.text for pieces in found for piece in pieces if not piece.code]
        other = iter(self._language.is_other(good))
        return [
            [
                piece._replace(code="source_language") if not piece.code and next(other) else piece
                for piece in pieces
            ]
            for pieces in found
        ]

    def _lengths(self, found: list[list[Segment]]) -> Iterator[list[float]]:
        """The length of every segment that a blob may hold; 0 for the others."""
        joinable = ("", "too_short")
        flat = iter(self._measure([p.text for ps in found for p in ps if p.code in joinable]))
        for pieces in found:
            yield [next(flat) if piece.code in joinable else 0.0 for piece in pieces]

    def _measured(self, sources: Iterable[_Source]) -> Iterator[tuple[_Source, str, float]]:
        """Sources with their id and length. Equal ids have equal lengths, and so one bucket: the
        length is that of the text as the id has it."""
        held = list(sources)
        texts = [" ".join(normalised("NFC", source.text).split()) for source in held]
        for source, text, length in zip(held, texts, self._measure(texts), strict=True):
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
            counts.rejected["blob_too_long"] += 1  # a tokenizer may count more for the whole
            return
        if bucket is None:
            counts.rejected["no_bucket"] += 1
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
        place = {
            **self._madlad,
            "doc_id": f"{file.name}:{document.line}",
            "file": file.name,
            "line": document.line,
            "span": [source.start, source.end],
            "segment_index": source.place,
            "segments": source.segments,
            "url": document.url,
        }
        return {
            "source_id": identity,
            "source_text": source.text,
            "source_type": TYPES[source.kind],
            "length": length,
            "length_bucket_id": bucket,
            "source_meta": {"madlad": place},
        }
