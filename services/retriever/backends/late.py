"""Late interaction: MaxSim between the vectors of page images and of query tokens.

The vectors of pages come from vLLM's `POST /pooling`, one for each token of texts and images, or
from a file (.safetensors, .npz) with one array [n, D] for each page id.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import structlog
from pydantic_core import from_json, to_json
from safetensors import safe_open

from scorekit.client.transport import RetryingSession, without_bom
from scorekit.errors import RequestError, SampleError, ServiceUnreachable, UserError
from scorekit.net.addresses import ServerUrl, client_url, proxy_note
from scorekit.net.loops import ForkSafeClient, gather_or_cancel
from scorekit.net.retry import retry_after_s
from services.retriever.backends.approximate import Candidates, build_candidates
from services.retriever.backends.dense import PROBE
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
#: Largest number of queries in a request.
_MAX_QUERIES = 64


class LateBuilder:
    """Builds the index from a server's vectors.

    model: its name on the server.
    prompt: text sent with each image.
    query_prefix: text that the model expects before a query.
    approximate: if queries search an approximate index; None: from `APPROXIMATE_FROM` pages on.
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
    """Builds the index from a file of vectors.

    model: the name of the model that made them.

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
            file = _open(self._path)
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


def _open(path: Path) -> Any:
    if path.suffix == ".npz":
        return np.load(path, allow_pickle=False)
    return safe_open(str(path), framework="numpy")


class LateSearcher:
    """Searches the index of `LateBuilder` or `VectorFile`.

    settings: those that the builder returned for this folder.
    url: a server of the same model.
    model: its name on the server; None: the name in the index.
    key: the server's key, if any.
    Raises UserError for the URL None: queries need vectors.
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


class Pooling:
    """The client of one pooling server. It is thread-safe.

    model: its name on the server.
    key: API key, if any.
    prompt: text sent with each image.
    timeout_s, deadline_s: seconds for one attempt, and for a request with all retries.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        key: str | None = None,
        prompt: str = "",
        timeout_s: float = 120.0,
        deadline_s: float = 600.0,
        max_in_flight: int = 8,
    ) -> None:
        server = client_url(url, "the variable of its key")
        self._url = server.address.removesuffix("/v1").removesuffix("/pooling")
        self._model, self._prompt = model, prompt

        def make() -> RetryingSession:
            return RetryingSession(
                ServerUrl(self._url, server.authorization),
                key,
                "pooling server",
                timeout_s=timeout_s,
                deadline_s=deadline_s,
                max_in_flight=max_in_flight,
            )

        self._client = ForkSafeClient("pooling client", make, RetryingSession.close)

    def texts(self, texts: Sequence[str]) -> list[Vectors]:
        """Return vectors [tokens, D] of each text. Raises ServiceUnreachable, RequestError."""
        batches = [list(texts[k : k + _MAX_QUERIES]) for k in range(0, len(texts), _MAX_QUERIES)]
        answers = self._client.run(
            lambda http: self._all(http, [self._body(input=p) for p in batches])
        )
        vectors = [
            text_vectors
            for part, answer in zip(batches, answers, strict=True)
            for text_vectors in answer
        ]
        if len(vectors) != len(texts):
            raise self._bad_response(f"{len(vectors)} answers for {len(texts)} texts")
        return vectors

    def image_vectors(self, pngs: Sequence[bytes]) -> list[Vectors]:
        """Return vectors [tokens, D] of each image. Raises ServiceUnreachable, RequestError."""
        bodies = [self._body(messages=[self._message(png)]) for png in pngs]
        answers = self._client.run(lambda http: self._all(http, bodies))
        if any(len(answer) != 1 for answer in answers):
            raise self._bad_response("several answers for one image")
        return [answer[0] for answer in answers]

    def _body(self, **content: Any) -> bytes:
        fields = {"model": self._model, "task": "token_embed", "encoding_format": "float"}
        return to_json(fields | content)

    def _message(self, png: bytes) -> dict[str, Any]:
        url = "data:image/png;base64," + base64.b64encode(png).decode()
        parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}}]
        if self._prompt:
            parts.append({"type": "text", "text": self._prompt})
        return {"role": "user", "content": parts}

    async def _all(self, server: RetryingSession, bodies: Sequence[bytes]) -> list[list[Vectors]]:
        return await gather_or_cancel(
            server.request("POST", "/pooling", body, read=self._read) for body in bodies
        )

    def _read(self, response: httpx.Response) -> list[Vectors]:
        status = response.status_code
        if status == 429 or status >= 500:
            kind = "overloaded" if status == 429 else "unavailable"
            wait = retry_after_s(response.headers)
            message = f"{self._url}: HTTP {status}{proxy_note(self._url)}"
            raise RequestError(kind, message, status=status, retry_after=wait)
        if status != 200:
            raise self._bad_response(
                f"HTTP {status}: no /pooling on this server, or not for this model"
            )
        try:
            rows = from_json(without_bom(response.content), allow_inf_nan=False)["data"]
            by_index = {row["index"]: checked_vectors(row["data"]) for row in rows}
            vectors = [by_index[k] for k in range(len(rows))]
            if any(not len(vectors_of_input) for vectors_of_input in vectors):
                raise ValueError("a text or image without a vector")
        except (ValueError, KeyError, TypeError) as error:
            reason = f"unexpected response format ({type(error).__name__})"
            raise self._bad_response(reason) from None
        return vectors

    def _bad_response(self, reason: str) -> ServiceUnreachable:
        return ServiceUnreachable(self._url, reason + proxy_note(self._url), retryable=False)
