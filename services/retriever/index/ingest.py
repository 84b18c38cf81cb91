"""From files to an index. The same command goes on where it was stopped, also by kill -9."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from scorekit.errors import UserError
from scorekit.processes import usable_cpus
from services.retriever.index.reading import Places, Reader, ReadingRules, ocr_of
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
    """Makes what a back end searches.

    name: of the back end, and of its folder.
    """

    name: str

    def check(self) -> None:
        """Refuse at once what cannot work. Raises UserError."""
        ...

    def build(
        self, pages: Sequence[PageRecord], folder: Path, places: Places, step: Step = no_step
    ) -> dict[str, Any]:
        """Write its files to an empty folder; its settings, for the manifest."""
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
    """Make `index` the index of these files: of them, and of nothing that it held before.

    builders: of the back ends it is for. timeout_s: for a page. workers: processes that read; None:
    one a CPU. bar: such as `progress_bar`: of files, then of the pages of each back end.

    Raises UserError where no page is left, OSError where the index cannot be written: it stays as
    it was. What cannot be read is in the manifest, with a reason.
    """
    rules = rules or ReadingRules()
    ocr_of(rules.ocr)
    found, skipped = find_sources(sources)
    for builder in builders:
        builder.check()
    state = Index(index)
    with state.writing():
        count = min(len(found), workers or usable_cpus())
        with bar(len(found)) as step:
            read = _read_all(found, rules, state.places, timeout_s, count, step)
        pages = []
        for source, (contents, faults) in zip(found, read, strict=True):
            skipped += faults
            pages += [_record(source, number, one) for number, one in sorted(contents.items())]
        if not pages:
            first = f"; the first: {skipped[0].source}: {skipped[0].reason}" if skipped else ""
            raise UserError(f"none of {len(found)} files could be read{first}")
        with state.new_state() as folder:
            kept = {}
            for builder in builders:
                (folder / builder.name).mkdir()
                with bar(len(pages)) as step:
                    own = folder / builder.name
                    kept[builder.name] = builder.build(pages, own, state.places, step)
            manifest = Manifest(
                id=index.absolute().name,
                revision="",
                pages=len(pages),
                documents=len({page.document for page in pages}),
                skipped=skipped,
                textless=[page.page_id for page in pages if not page.boxes],
                backends=kept,
            )
            return state.publish(folder, pages, manifest)


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
    places: Places,
    timeout_s: float,
    workers: int,
    step: Step,
) -> list[tuple[dict[int, PageContent], list[Skipped]]]:
    """What is in each file, by several processes, each with a thread that waits for it."""
    readers: list[Reader] = []
    own = threading.local()

    def begin() -> None:
        own.reader = Reader(rules, places, timeout_s)
        readers.append(own.reader)

    def read(source: Source) -> tuple[dict[int, PageContent], list[Skipped]]:
        found = own.reader.read(source)
        step(1)
        return found

    threads = ThreadPoolExecutor(workers, "read", begin)
    try:
        return list(threads.map(read, sources))
    finally:
        for reader in readers:
            reader.close()
        threads.shutdown(cancel_futures=True)
