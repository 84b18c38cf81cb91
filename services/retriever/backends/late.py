"""Late interaction: MaxSim between the vectors of page images and of query tokens.

The vectors of pages come from vLLM's `/pooling`, or from a file (.safetensors, .npz) with one array
[n, D] for each page id.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from safetensors import safe_open

from scorekit.errors import RequestError, SampleError, ServiceUnreachable, UserError
from services.retriever.backends.approximate import Candidates, build_candidates
from services.retriever.backends.dense import PROBE
from services.retriever.backends.pooling import Pooling
from services.retriever.backends.ranking import Scores
from services.retriever.backends.vectors import (
    PackedVectors,
    VectorCache,
    Vectors,
    check_same_model,
    checked_vectors,
    pack,
)
from services.retriever.index.reader import IndexPaths
from services.retriever.index.records import APPROXIMATE_FROM, PageRecord, Step, no_step
from services.retriever.settings import SERVER_DEADLINE_S

log = structlog.get_logger()

NAME = "late"
_BATCH_PAGES = 16


class LateBuilder:
    """Builds the index from a server's vectors.

    model: its name on the server. prompt: text sent with each image. query_prefix: text that the
    model expects before a query. approximate: if queries search an approximate index; None: from
    `APPROXIMATE_FROM` pages on.
    """

    name = NAME

    def __init__(
        self,
        url: str,
        model: str,
        *,
        key: str | None = None,
        query_prefix: str = "",
        prompt: str = "",
        approximate: bool | None = None,
    ) -> None:
        self._client = Pooling(url, model, key=key, prompt=prompt)
        self._model, self._query_prefix, self._prompt = model, query_prefix, prompt
        self._approximate = approximate

    def check(self) -> None:
        """Raise ServiceUnreachable or RequestError if the server does not answer."""
        (self._probe,) = self._client.texts([self._query_prefix + PROBE])

    def build(
        self, pages: Sequence[PageRecord], folder: Path, paths: IndexPaths, step: Step = no_step
    ) -> dict[str, Any]:
        """Write the vectors of each page's image; return the settings."""
        cache = VectorCache(paths.vectors, (NAME, self._model, self._prompt, self._probe.tobytes()))
        dimension = pack(self._vectors(pages, cache, paths, step), folder)
        np.save(folder / "probe.npy", self._probe, allow_pickle=False)
        return {
            "model": self._model,
            "dimension": dimension,
            "query_prefix": self._query_prefix,
            "prompt": self._prompt,
        } | _approximation(folder, len(pages), self._approximate)

    def _vectors(
        self, pages: Sequence[PageRecord], cache: VectorCache, paths: IndexPaths, step: Step
    ) -> Iterator[Vectors]:
        """Yield the vectors of each page. Only those of a few pages are in memory at once."""
        for start in range(0, len(pages), _BATCH_PAGES):
            part = pages[start : start + _BATCH_PAGES]
            vectors_by_image = {page.picture: cache.get(page.picture) for page in part}
            missing = [image for image, vectors in vectors_by_image.items() if vectors is None]
            pngs = [paths.image_path(image).read_bytes() for image in missing]
            for image, image_vectors in zip(missing, self._client.image_vectors(pngs), strict=True):
                vectors_by_image[image] = image_vectors
                cache.put(image, image_vectors)
            for page in part:
                page_vectors = vectors_by_image[page.picture]
                assert page_vectors is not None
                yield page_vectors
            step(len(part))


class VectorFile:
    """Builds the index from a file of vectors. model: the name of the model that made them.

    approximate: as for `LateBuilder`."""

    name = NAME

    def __init__(
        self, path: Path, model: str, query_prefix: str = "", *, approximate: bool | None = None
    ) -> None:
        self._path, self._model, self._query_prefix = path, model, query_prefix
        self._approximate = approximate

    def check(self) -> None:
        """Raise UserError if the file does not exist or has another format."""
        if not self._path.is_file():
            raise UserError(f"--late-vectors {self._path}: no such file")
        if self._path.suffix not in (".npz", ".safetensors"):
            raise UserError(f"--late-vectors {self._path}: expected .safetensors or .npz")

    def build(
        self, pages: Sequence[PageRecord], folder: Path, paths: IndexPaths, step: Step = no_step
    ) -> dict[str, Any]:
        """Write the vectors; return the settings.

        Raises UserError unless the file has vectors for exactly these pages."""
        ids = {page.page_id for page in pages}
        with self._reading():
            file = _opened(self._path)
        with file:
            with self._reading():
                names = set(file.keys())
            self._compare(ids - names, "no vectors for")
            self._compare(names - ids, "vectors for ids that are not pages of the index:")
            dimension = pack((self._page_vectors(file, page.page_id) for page in pages), folder)
        step(len(pages))
        return {
            "model": self._model,
            "dimension": dimension,
            "query_prefix": self._query_prefix,
        } | _approximation(folder, len(pages), self._approximate)

    def _page_vectors(self, file: Any, page_id: str) -> Vectors:
        with self._reading():
            array = file.get_tensor(page_id) if hasattr(file, "get_tensor") else file[page_id]
        try:
            return checked_vectors(array)
        except ValueError as error:
            raise UserError(f"--late-vectors {self._path}: {page_id}: {error}") from None

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Raise UserError for any error: a damaged file can make the libraries fail in any way."""
        try:
            yield
        except Exception as error:
            kind = type(error).__name__
            raise UserError(f"--late-vectors {self._path}: cannot be read ({kind})") from None

    def _compare(self, ids: set[str], problem: str) -> None:
        if ids:
            listed = ", ".join(sorted(ids)[:5]) + (", ..." if len(ids) > 5 else "")
            raise UserError(f"--late-vectors {self._path}: {problem} {listed} ({len(ids)} in all)")


def _approximation(folder: Path, pages: int, approximate: bool | None) -> dict[str, Any]:
    """Write the index of candidates if it is wanted; return the settings that it adds."""
    if not (pages >= APPROXIMATE_FROM if approximate is None else approximate):
        return {}
    return {"approximate": build_candidates(folder)}


def _opened(path: Path) -> Any:
    if path.suffix == ".npz":
        return np.load(path, allow_pickle=False)
    return safe_open(str(path), framework="numpy")


class LateSearcher:
    """Searches the index of `LateBuilder` or `VectorFile`.

    url: a server of the same model. Raises UserError for None: queries need vectors. model: its
    name on the server; None: the name in the index.
    """

    name = NAME

    def __init__(
        self,
        folder: Path,
        settings: dict[str, Any],
        url: str | None,
        model: str | None,
        key: str | None,
    ) -> None:
        if url is None:
            raise UserError(
                f"--late-url: the index uses {settings['model']}. Name a server of this model"
            )
        self._folder, self._prefix = folder, settings["query_prefix"]
        approximate = settings.get("approximate")
        self._vectors = PackedVectors(folder, is_mapped=approximate is not None)
        self._candidates = approximate and Candidates(folder, approximate, self._vectors)
        self._client = Pooling(
            url, model or settings["model"], key=key, timeout_s=20.0, deadline_s=SERVER_DEADLINE_S
        )

    def check(self) -> None:
        """Raise UserError if the server's model is not the one that built the index."""
        try:
            (probe,) = self._client.texts([self._prefix + PROBE])
        except (ServiceUnreachable, RequestError) as error:
            raise UserError(f"--late-url: {error}") from None
        if probe.shape[1] != self._vectors.dimension:
            raise UserError(
                f"--late-url: its vectors have {probe.shape[1]} numbers, those of the index "
                f"{self._vectors.dimension}. Name the server of the index's model"
            )
        stored_probe = self._folder / "probe.npy"
        if stored_probe.exists():  # vectors from a file have no probe
            check_same_model(stored_probe, probe, "--late-url")

    def read(self, query: str) -> Any:
        """Return the text to embed."""
        return self._prefix + query

    def scores(self, queries: Sequence[Any], hits: Sequence[int]) -> list[Scores | SampleError]:
        """Return the MaxSim of each query and each page, or each of its candidates.

        If the server fails, all queries fail."""
        try:
            vectors = self._client.texts(queries)
            if any(query_vectors.shape[1] != self._vectors.dimension for query_vectors in vectors):
                raise ServiceUnreachable("", "vectors of another dimension", retryable=False)
        except (ServiceUnreachable, RequestError) as error:
            log.warning("pooling_server_failed", kind=type(error).__name__)
            failure = SampleError("upstream", "the pooling server gives no vectors")
            return [failure] * len(queries)
        if self._candidates is None:
            return list(self._vectors.max_sim(vectors))
        return [
            self._candidates.max_sim(query, count)
            for query, count in zip(vectors, hits, strict=True)
        ]
