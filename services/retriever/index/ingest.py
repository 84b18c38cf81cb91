"""Build an index from files. After a stop, even by kill -9, the same command continues."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from scorekit.errors import UserError
from scorekit.processes import usable_cpus
from services.retriever.index.reader import IndexPaths, PageReader, ReadingRules, ocr_of
from services.retriever.index.records import (
    Manifest,
    PageContent,
    PageRecord,
    Skipped,
    Step,
    no_step,
)
from services.retriever.index.sources import Source, find_sources
from services.retriever.index.store import Index


class IndexBuilder(Protocol):
    """Builds the files that a backend searches.

    name: the backend's name and that of its folder.
    """

    name: str

    def check(self) -> None:
        """Raise UserError if the settings cannot work."""
        ...

    def build(
        self, pages: Sequence[PageRecord], folder: Path, paths: IndexPaths, step: Step = no_step
    ) -> dict[str, Any]:
        """Write the files to an empty folder; return the settings for the manifest."""
        ...


def ingest(
    sources: Sequence[Path],
    index: Path,
    builders: Sequence[IndexBuilder],
    rules: ReadingRules | None = None,
    *,
    timeout_s: float = 120.0,
    workers: int | None = None,
    bar: Callable[[int], AbstractContextManager[Step]] = lambda total: nullcontext(no_step),
) -> Manifest:
    """Make `index` the index of exactly these files, and drop its earlier content.

    builders: one for each backend.
    timeout_s: seconds for a page.
    workers: reading processes; None: one per CPU.
    bar: for example `progress_bar`; it counts files, then the pages of each backend.

    Raises UserError if no page could be read, OSError if the index cannot be written; the old index
    stays. The manifest lists unreadable files and pages with a reason.
    """
    rules = rules or ReadingRules()
    ocr_of(rules.ocr)
    state = Index(index)
    files, skipped, other_files = find_sources(sources, state.own_folders())
    for builder in builders:
        builder.check()
    with state.writing():
        count = min(len(files), workers or usable_cpus())
        with bar(len(files)) as step:
            read = _read_all(files, rules, state.paths, timeout_s, count, step)
        pages = []
        for source, (contents, errors) in zip(files, read, strict=True):
            skipped += errors
            pages += [
                _record(source, number, content) for number, content in sorted(contents.items())
            ]
        if not pages:
            first = f"; the first: {skipped[0].source}: {skipped[0].reason}" if skipped else ""
            raise UserError(f"none of {len(files)} files could be read{first}")
        with state.new_state() as folder:
            backend_settings = {}
            for builder in builders:
                (folder / builder.name).mkdir()
                with bar(len(pages)) as step:
                    backend_folder = folder / builder.name
                    backend_settings[builder.name] = builder.build(
                        pages, backend_folder, state.paths, step
                    )
            manifest = Manifest(
                id=index.absolute().name,
                revision="",
                pages=len(pages),
                documents=len({page.document for page in pages}),
                skipped=skipped,
                other_files=other_files,
                textless=[page.page_id for page in pages if not _has_words(page)],
                backends=backend_settings,
            )
            return state.publish(folder, pages, manifest)


def _has_words(page: PageRecord) -> bool:
    """Return True if a page can be found by its text. The ticks of a scanned form are no words."""
    return any(map(str.isalnum, page.text))


def _record(source: Source, number: int, content: PageContent) -> PageRecord:
    return PageRecord(
        page_id=f"{source.document}_{number}",
        document=source.document,
        page=number,
        **content.model_dump(),
    )


def _read_all(
    sources: Sequence[Source],
    rules: ReadingRules,
    paths: IndexPaths,
    timeout_s: float,
    workers: int,
    step: Step,
) -> list[tuple[dict[int, PageContent], list[Skipped]]]:
    """Read the content of each file in several processes, with one thread for each."""
    readers: list[PageReader] = []
    thread_local = threading.local()

    def start_reader() -> None:
        thread_local.reader = PageReader(rules, paths, timeout_s)
        readers.append(thread_local.reader)

    def read(source: Source) -> tuple[dict[int, PageContent], list[Skipped]]:
        result = thread_local.reader.read(source)
        step(1)
        return result

    threads = ThreadPoolExecutor(workers, "read", start_reader)
    try:
        return list(threads.map(read, sources))
    finally:
        for reader in readers:
            reader.close()
        threads.shutdown(cancel_futures=True)
