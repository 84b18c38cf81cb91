"""Late interaction: vectors of a page's picture and of a query's tokens, compared by MaxSim.

A page's vectors come from vLLM's `/pooling`, or from a file (.safetensors, .npz) that holds an
array [n, D] under each page's id.
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
    KeptVectors,
    PackedVectors,
    Vectors,
    check_same_model,
    checked_vectors,
    pack,
)
from services.retriever.index.reading import Places
from services.retriever.index.records import PageRecord, Step, no_step

log = structlog.get_logger()

NAME = "late"
_TOGETHER = 16


class LateBuilder:
    """Makes its index from a server's vectors.

    model: its name there. prompt: the text beside each picture. query_prefix: what the model wants
    before a query.
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
        """Raises ServiceUnreachable, RequestError where no such server answers."""
        (self._probe,) = self._client.texts([self._query_prefix + PROBE])

    def build(
        self, pages: Sequence[PageRecord], folder: Path, places: Places, step: Step = no_step
    ) -> dict[str, Any]:
        """Of each page's picture."""
        kept = KeptVectors(places.vectors, (NAME, self._model, self._prompt, self._probe.tobytes()))
        vectors: list[Vectors] = []
        for start in range(0, len(pages), _TOGETHER):
            part = pages[start : start + _TOGETHER]
            found = {page.picture: kept.get(page.picture) for page in part}
            wanted = [picture for picture, one in found.items() if one is None]
            pngs = [places.picture(picture).read_bytes() for picture in wanted]
            for picture, made in zip(wanted, self._client.pictures(pngs), strict=True):
                found[picture] = made
                kept.put(picture, made)
            vectors += [one for page in part if (one := found[page.picture]) is not None]
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
    """Makes its index from a file of vectors. model: the name of what has made them."""

    name = NAME

    def __init__(self, path: Path, model: str, query_prefix: str = "") -> None:
        self._path, self._model, self._query_prefix = path, model, query_prefix

    def check(self) -> None:
        """Raises UserError for a file of another kind."""
        if not self._path.is_file():
            raise UserError(f"--late-vectors {self._path}: no such file")
        if self._path.suffix not in (".npz", ".safetensors"):
            raise UserError(f"--late-vectors {self._path}: .safetensors or .npz")

    def build(
        self, pages: Sequence[PageRecord], folder: Path, places: Places, step: Step = no_step
    ) -> dict[str, Any]:
        """Raises UserError unless the file has vectors for just these pages."""
        ids = {page.page_id for page in pages}
        try:
            with _opened(self._path) as file:
                names = set(file.keys())
                self._compare(ids - names, "no vectors for")
                self._compare(names - ids, "vectors for what is no page of the index:")
                vectors = [self._one(file, page.page_id) for page in pages]
        except UserError:
            raise
        except Exception as error:  # whatever the two libraries make of a damaged file
            kind = type(error).__name__
            raise UserError(f"--late-vectors {self._path}: cannot be read ({kind})") from None
        step(len(pages))
        return {
            "model": self._model,
            "dimension": pack(vectors, folder),
            "query_prefix": self._query_prefix,
        }

    def _one(self, file: Any, page_id: str) -> Vectors:
        array = file.get_tensor(page_id) if hasattr(file, "get_tensor") else file[page_id]
        try:
            return checked_vectors(array)
        except ValueError as error:
            raise UserError(f"--late-vectors {self._path}: {page_id}: {error}") from None

    def _compare(self, ids: set[str], what: str) -> None:
        if ids:
            named = ", ".join(sorted(ids)[:5]) + (", ..." if len(ids) > 5 else "")
            raise UserError(f"--late-vectors {self._path}: {what} {named} ({len(ids)} in all)")


def _opened(path: Path) -> Any:
    if path.suffix == ".npz":
        return np.load(path, allow_pickle=False)
    from safetensors import safe_open

    return safe_open(str(path), framework="numpy")


class LateSearcher:
    """Searches what `LateBuilder` or `VectorFile` has made.

    url: of a server of the same model; None: raises UserError, for without one no query has
    vectors. model: its name there; None: as it was when the index was made.
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
            raise UserError(f"--late-url: the index is {settings['model']}'s: name a server of it")
        self._folder, self._prefix = folder, settings["query_prefix"]
        self._vectors = PackedVectors(folder)
        self._client = Pooling(
            url, model or settings["model"], key=key, timeout_s=20.0, deadline_s=SERVER_DEADLINE_S
        )

    def check(self) -> None:
        """Raises UserError where another model answers than has made the index."""
        try:
            (probe,) = self._client.texts([self._prefix + PROBE])
        except (ServiceUnreachable, RequestError) as error:
            raise UserError(f"--late-url: {error}") from None
        if probe.shape[1] != self._vectors.dimension:
            raise UserError(
                f"--late-url: its vectors have {probe.shape[1]} numbers, those of the index "
                f"{self._vectors.dimension}: name the server of its model"
            )
        kept = self._folder / "probe.npy"
        if kept.exists():  # not of vectors from a file
            check_same_model(kept, probe, "--late-url")

    def read(self, query: str) -> Any:
        """What the server is to embed."""
        return self._prefix + query

    def scores(self, queries: Sequence[Any]) -> list[Scores | SampleError]:
        """MaxSim of each query and each page; they fail together with the server."""
        try:
            vectors = self._client.texts(queries)
            if any(one.shape[1] != self._vectors.dimension for one in vectors):
                raise ServiceUnreachable("", "vectors of another dimension", retryable=False)
        except (ServiceUnreachable, RequestError) as error:
            log.warning("pooling_server_failed", kind=type(error).__name__)
            fault = SampleError("upstream", "the pooling server gives no vectors")
            return [fault] * len(queries)
        return list(self._vectors.max_sim(vectors))
