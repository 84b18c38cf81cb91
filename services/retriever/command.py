"""The command `scorekit ingest`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from scorekit.command import clean_exit, print_line
from scorekit.errors import UserError
from scorekit.report.progress import progress_bar
from services.retriever.index.records import APPROXIMATE_FROM, Manifest
from services.retriever.index.sources import counted

if TYPE_CHECKING:  # `--help` works without the extra
    from services.retriever.index.ingest import IndexBuilder

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


class BackendName(StrEnum):
    """The backends that an index can be built for."""

    BM25 = "bm25"
    DENSE = "dense"
    LATE = "late"


#: Largest number of skipped files, or of pages without text, that are listed.
_MAX_LISTED = 10


_Sources = Annotated[
    list[Path],
    typer.Argument(metavar="SOURCES...", help="PDFs, pictures, and folders of them."),
]
_Index = Annotated[Path, typer.Option(help="Folder of the index.")]
_Backend = Annotated[
    list[BackendName] | None,
    typer.Option(help="What is to search it; repeat it for several. Default: bm25."),
]
_Korean = Annotated[
    Literal["morphemes", "bigrams"], typer.Option(help="bm25: how it finds Korean words.")
]
_EmbeddingsUrl = Annotated[str | None, typer.Option(help="dense: a server of /v1/embeddings.")]
_EmbeddingsModel = Annotated[
    str | None, typer.Option(help="dense: the model's name there; default: its only one.")
]
_QueryPrefix = Annotated[
    str, typer.Option(help='dense: what the model wants before a query ("query: ").')
]
_PagePrefix = Annotated[
    str, typer.Option(help='dense: what it wants before a text that is found ("passage: ").')
]
_LateUrl = Annotated[str | None, typer.Option(help="late: vLLM with a late-interaction model.")]
_LateModel = Annotated[str | None, typer.Option(help="late: the model's name.")]
_LateVectors = Annotated[
    Path | None,
    typer.Option(help="late: in place of a server, .safetensors or .npz: page id -> array (n, D)."),
]
_LateQueryPrefix = Annotated[str, typer.Option(help="late: what the model wants before a query.")]
_LatePrompt = Annotated[str, typer.Option(help="late: the text beside each picture.")]
_Approximate = Annotated[
    bool | None,
    typer.Option(
        "--approximate/--exact",
        help="late: score the pages that an approximate index finds, or all. "
        f"Default: all below {APPROXIMATE_FROM:,} pages.",
        show_default=False,
    ),
]
_Dpi = Annotated[float, typer.Option(min=18, max=1200, help="Of a PDF page's picture.")]
_MaxPixels = Annotated[
    int, typer.Option(min=10_000, max=100_000_000, help="Most pixels of a page's picture.")
]
_Ocr = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:FUNCTION",
        help="Gives the text of a page that has none: from its picture (PIL) to text boxes.",
    ),
]
_PageTimeout = Annotated[
    float, typer.Option(min=1, help="Seconds after which a page counts as hanging.")
]
_Workers = Annotated[
    int | None, typer.Option(min=1, help="Processes that read; default: one a CPU.")
]


@app.command()
def make_index(
    sources: _Sources,
    index: _Index,
    backend: _Backend = None,
    korean: _Korean = "morphemes",
    embeddings_url: _EmbeddingsUrl = None,
    embeddings_model: _EmbeddingsModel = None,
    query_prefix: _QueryPrefix = "",
    page_prefix: _PagePrefix = "",
    late_url: _LateUrl = None,
    late_model: _LateModel = None,
    late_vectors: _LateVectors = None,
    late_query_prefix: _LateQueryPrefix = "",
    late_prompt: _LatePrompt = "Describe the image.",
    approximate: _Approximate = None,
    dpi: _Dpi = 144.0,
    max_pixels: _MaxPixels = 16_000_000,
    ocr: _Ocr = None,
    page_timeout: _PageTimeout = 120.0,
    workers: _Workers = None,
) -> None:
    """Make the index of these files; what it held before and they do not is no longer in it.

    The same command goes on where it was stopped. What cannot be read is listed and skipped, and
    files of other kinds are counted.
    """
    names = list(dict.fromkeys(backend or [BackendName.BM25]))
    with clean_exit(stopped="stopped: run the same command to continue", stdout="log"):
        from services.retriever.backends.bm25 import Bm25Builder
        from services.retriever.index.ingest import ingest
        from services.retriever.index.reader import ReadingRules

        builders: dict[BackendName, Callable[[], IndexBuilder]] = {
            BackendName.BM25: lambda: Bm25Builder(korean),
            BackendName.DENSE: lambda: _dense_builder(
                embeddings_url, embeddings_model, query_prefix, page_prefix
            ),
            BackendName.LATE: lambda: _late_builder(
                late_url, late_model, late_vectors, late_query_prefix, late_prompt, approximate
            ),
        }
        if approximate is not None and BackendName.LATE not in names:
            raise UserError("--approximate, --exact: only for --backend late")
        manifest = ingest(
            sources,
            index,
            [builders[name]() for name in names],
            ReadingRules(dpi, max_pixels, ocr),
            timeout_s=page_timeout,
            workers=workers,
            bar=progress_bar,
        )
        _print_summary(manifest)


def _dense_builder(
    url: str | None, model: str | None, query_prefix: str, page_prefix: str
) -> IndexBuilder:
    from services.retriever.backends.dense import DenseBuilder

    if url is None:
        raise UserError("--backend dense: requires --embeddings-url")
    return DenseBuilder(url, model, query_prefix, page_prefix)


def _late_builder(
    url: str | None,
    model: str | None,
    vectors: Path | None,
    query_prefix: str,
    prompt: str,
    approximate: bool | None,
) -> IndexBuilder:
    from services.retriever.backends.late import LateBuilder, VectorFile

    if model is not None and vectors is not None and url is None:
        return VectorFile(vectors, model, query_prefix, approximate=approximate)
    if model is None or url is None or vectors is not None:
        raise UserError(
            "--backend late: requires --late-model, and exactly one of --late-url and "
            "--late-vectors"
        )
    return LateBuilder(
        url,
        model,
        key=os.environ.get("VLLM_API_KEY"),
        query_prefix=query_prefix,
        prompt=prompt,
        approximate=approximate,
    )


def _print_summary(manifest: Manifest) -> None:
    for skipped in manifest.skipped[:_MAX_LISTED]:
        page = f", page {skipped.page}" if skipped.page else ""
        print_line(f"skipped {skipped.source}{page}: {skipped.reason}")
    if len(manifest.skipped) > _MAX_LISTED:
        print_line(f"and {len(manifest.skipped) - _MAX_LISTED} more: index.json lists them")
    if manifest.other_files:
        number = sum(manifest.other_files.values())
        listed = counted(manifest.other_files, _MAX_LISTED)
        print_line(f"left out {number} files of other kinds: {listed}")
    _print_pages("without text", manifest.textless)
    _print_pages("without a vector", manifest.backends.get("dense", {}).get("without", []))
    backends = [
        f"{name} (approximate)" if "approximate" in settings else name
        for name, settings in manifest.backends.items()
    ]
    typer.echo(
        f"{manifest.pages} pages of {manifest.documents} documents, "
        f"{', '.join(backends)}; state {manifest.revision}"
    )


def _print_pages(problem: str, ids: Sequence[str]) -> None:
    if ids:
        listed = ", ".join(ids[:_MAX_LISTED]) + (", ..." if len(ids) > _MAX_LISTED else "")
        print_line(f"{len(ids)} pages {problem}: {listed}")
