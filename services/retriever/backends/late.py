"""Late interaction: MaxSim between the vectors of page images and of query tokens.

The vectors of pages come from vLLM's `/pooling`, or from a file (.safetensors, .npz) with one array
[n, D] for each page id.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from scorekit.errors import RequestError, SampleError, ServiceUnreachable, UserError
from services.retriever.backends.dense import PROBE
from services.retriever.backends.pooling import Pooling
from services.retriever.backends.ranking import Scores
from services.retriever.backends.vectors import (
    SERVER_DEADLINE_S,
    PackedVectors,
    VectorCache,
    Vectors,
    check_same_model,
    checked_vectors,
    pack,
)
from services.retriever.index.reader import IndexPaths
from services.retriever.index.records import PageRecord, Step, no_step

log = structlog.get_logger()

NAME = "late"
_BATCH_PAGES = 16


class LateBuilder:
    """Builds the index from a server's vectors.

    model: its name on the server. prompt: text sent with each image. query_prefix: text that the
    model expects before a query.
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
    ) -> None:
        self._client = Pooling(url, model, key=key, prompt=prompt)
        self._model, self._query_prefix, self._prompt = model, query_prefix, prompt

    def check(self) -> None:
        """Raise ServiceUnreachable or RequestError if the server does not answer."""
        (self._probe,) = self._client.texts([self._query_prefix + PROBE])

    def build(
        self, pages: Sequence[PageRecord], folder: Path, paths: IndexPaths, step: Step = no_step
    ) -> dict[str, Any]:
        """Write the vectors of each page's image; return the settings."""
        cache = VectorCache(paths.vectors, (NAME, self._model, self._prompt, self._probe.tobytes()))
        vectors: list[Vectors] = []
        for start in range(0, len(pages), _BATCH_PAGES):
            part = pages[start : start + _BATCH_PAGES]
            vectors_by_image = {page.picture: cache.get(page.picture) for page in part}
            missing = [
                image for image, page_vectors in vectors_by_image.items() if page_vectors is None
            ]
            pngs = [paths.image_path(image).read_bytes() for image in missing]
            for image, image_vectors in zip(missing, self._client.image_vectors(pngs), strict=True):
                vectors_by_image[image] = image_vectors
                cache.put(image, image_vectors)
            vectors += [
                page_vectors
                for page in part
                if (page_vectors := vectors_by_image[page.picture]) is not None
            ]
            step(len(part))
        dimension = pack(vectors, folder)
        np.save(folder / "probe.npy", self._probe, allow_pickle=False)
        return {
            "model": self._model,
            "dimension": dimension,
            "query_prefix": self._query_prefix,
            "prompt": self._prompt,
        }


class VectorFile:
    """Builds the index from a file of vectors. model: the name of the model that made them."""

    name = NAME

    def __init__(self, path: Path, model: str, query_prefix: str = "") -> None:
        self._path, self._model, self._query_prefix = path, model, query_prefix

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
        try:
            with _opened(self._path) as file:
                names = set(file.keys())
                self._compare(ids - names, "no vectors for")
                self._compare(names - ids, "vectors for ids that are not pages of the index:")
                vectors = [self._page_vectors(file, page.page_id) for page in pages]
        except UserError:
            raise
        except Exception as error:  # a damaged file can make the libraries fail in any way
            kind = type(error).__name__
            raise UserError(f"--late-vectors {self._path}: cannot be read ({kind})") from None
        step(len(pages))
        return {
            "model": self._model,
            "dimension": pack(vectors, folder),
            "query_prefix": self._query_prefix,
        }

    def _page_vectors(self, file: Any, page_id: str) -> Vectors:
        array = file.get_tensor(page_id) if hasattr(file, "get_tensor") else file[page_id]
        try:
            return checked_vectors(array)
        except ValueError as error:
            raise UserError(f"--late-vectors {self._path}: {page_id}: {error}") from None

    def _compare(self, ids: set[str], problem: str) -> None:
        if ids:
            listed = ", ".join(sorted(ids)[:5]) + (", ..." if len(ids) > 5 else "")
            raise UserError(f"--late-vectors {self._path}: {problem} {listed} ({len(ids)} in all)")


def _opened(path: Path) -> Any:
    if path.suffix == ".npz":
        return np.load(path, allow_pickle=False)
    from safetensors import safe_open

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
        self._vectors = PackedVectors(folder)
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

    def scores(self, queries: Sequence[Any]) -> list[Scores | SampleError]:
        """Return the MaxSim of each query and each page. If the server fails, all queries fail."""
        try:
            vectors = self._client.texts(queries)
            if any(query_vectors.shape[1] != self._vectors.dimension for query_vectors in vectors):
                raise ServiceUnreachable("", "vectors of another dimension", retryable=False)
        except (ServiceUnreachable, RequestError) as error:
            log.warning("pooling_server_failed", kind=type(error).__name__)
            failure = SampleError("upstream", "the pooling server gives no vectors")
            return [failure] * len(queries)
        return list(self._vectors.max_sim(vectors))
