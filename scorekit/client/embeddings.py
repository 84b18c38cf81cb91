"""Vectors of texts from any server with OpenAI's `POST /v1/embeddings`: ours, TEI, vLLM, OpenAI.

with Embeddings("http://127.0.0.1:8004") as embedder:
    vectors = embedder.embed(["Hello.", "안녕하세요."])

One request fails as a whole there. So where a server refuses one, its texts are looked at: those
that our service names are set apart, else the request is cut in halves until the culprit is alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import httpx
from pydantic_core import from_json, to_json

from scorekit.client.embedding_answers import (
    RefusedTexts,
    fault_of,
    raise_failure,
    vectors_in_order,
)
from scorekit.client.transport import OneServer, checked_url, own_key
from scorekit.errors import (
    RequestError,
    SampleError,
    ServerEnded,
    ServiceUnreachable,
    UserError,
)
from scorekit.net.own_loop import OwnLoop
from scorekit.numeric.vectors import vector_fault

#: A vector, or why a text has none.
Embedded = list[float] | SampleError

#: What a server that refuses every request refuses, too.
_PLAIN = "text"


@dataclass(frozen=True, slots=True)
class EmbeddingModel:
    """Which model answers. None: the server does not say.

    model: its name. revision: the hub's sha, or a digest of its files. pooling: cls, mean, ...
    dimension: numbers of a vector. max_input_length: tokens of the longest text.
    """

    model: str
    revision: str | None
    pooling: str | None
    dimension: int
    max_input_length: int | None


@dataclass(frozen=True, slots=True)
class Canary:
    """A text that travels with every request, and what its vector has to be.

    fault: of a vector that the server gave it, why that is not the model that is meant; "" where it
    is.
    """

    text: str
    fault: Callable[[Sequence[float]], str]


class Embeddings:
    """The client of one embedding server, for code that is not async; threads may share it. In a
    forked child it makes its connections anew.

    url: of the server, with or without `/v1`. model: its name there; None: the only one that the
    server has. api_key: default from SCOREKIT_API_KEY. batch_size: texts of one request; where the
    server takes fewer (TEI: 32), fewer. timeout_s: seconds for one request. deadline_s: for one
    request with its second tries (no connection, 424, 429, 5xx) and the pauses between them.
    max_in_flight: requests at once. ended: asked where nobody answers: why the server will not come
    back (its process was the caller's, and has ended); then ServerEnded is raised at once. Raises
    UserError for what is no http URL.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        batch_size: int = 256,
        timeout_s: float = 600.0,
        deadline_s: float = 900.0,
        max_in_flight: int = 4,
        ended: Callable[[], str | None] = lambda: None,
    ) -> None:
        base = checked_url(url).removesuffix("/v1")
        key = own_key(api_key)

        def make() -> _Client:
            bounds = (batch_size, timeout_s, deadline_s, max_in_flight)
            return _Client(base, model, key, *bounds, ended)

        self._own = OwnLoop("embeddings client", make, _Client.close)

    def info(self) -> EmbeddingModel:
        """Which model answers, as the server said when it was first asked. Of a server that does
        not tell its dimension a plain text's vector tells it.

        Raises ServiceUnreachable, RequestError; UserError where the server has several models and
        none was named.
        """
        return self._own.run(lambda client: client.info())

    def embed(self, texts: Sequence[str], canary: Canary | None = None) -> list[Embedded]:
        """The vector of each text, in order; equal texts are asked about once.

        A text that the server cannot take (empty, NUL, not Unicode, too long) has a SampleError in
        its place. Raises ServiceUnreachable where the server gives no answer until the deadline, or
        one that is none: another shape, another model or dimension than before, a number that is
        not finite, a vector of zeros, another vector than the canary's. Raises RequestError where
        it refuses a plain text, too.
        """
        return self._own.run(lambda client: client.embed(list(texts), canary))

    def close(self) -> None:
        """Close the connections; a second call does nothing."""
        self._own.close()

    def __enter__(self) -> Embeddings:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Client:
    """What `Embeddings` does, on its event loop."""

    def __init__(
        self,
        base: str,
        model: str | None,
        key: str | None,
        batch_size: int,
        timeout_s: float,
        deadline_s: float,
        max_in_flight: int,
        ended: Callable[[], str | None],
    ) -> None:
        self._base = base
        self._model = model
        self._most = batch_size
        self._known: EmbeddingModel | None = None
        self._asking = asyncio.Lock()
        self._dimension: int | None = None
        self._answers_as: Any = None  # the `model` of its first answer
        self._takes_plain = False
        self._server = OneServer(
            base,
            key,
            "embedding server",
            timeout_s=timeout_s,
            deadline_s=deadline_s,
            max_in_flight=max_in_flight,
            may_help=lambda error: getattr(error, "retryable", False),
            ended=ended,
        )

    async def close(self) -> None:
        await self._server.close()

    # -- which model ------------------------------------------------------------------------------

    async def info(self) -> EmbeddingModel:
        async with self._asking:
            if self._known is None:
                self._known = await self._ask_who()
        return self._known

    async def _ask_who(self) -> EmbeddingModel:
        """By what there is: our /v1/info, TEI's /info, else /v1/models and a vector."""
        ours = await self._get("/v1/info")
        if {"model", "revision", "pooling", "dimension"} <= ours.keys():
            self._most = min(self._most, ours["max_samples"])
            self._model = self._model or ours["model"]
            self._dimension = ours["dimension"]
            names = [field.name for field in fields(EmbeddingModel)]
            return EmbeddingModel(**{name: ours[name] for name in names})
        told = await self._get("/info")
        revision = pooling = longest = None
        if "model_id" in told:
            self._model = self._model or told["model_id"]
            self._most = min(self._most, told.get("max_client_batch_size") or self._most)
            revision, longest = told.get("model_sha"), told.get("max_input_length")
            kind = told.get("model_type")
            pooling = kind.get("embedding", {}).get("pooling") if isinstance(kind, dict) else None
        elif self._model is None:
            self._model, longest = await self._only_model()
        await self._check_plain()
        assert self._dimension is not None and self._model is not None
        return EmbeddingModel(self._model, revision, pooling, self._dimension, longest)

    async def _only_model(self) -> tuple[str, int | None]:
        listed = (await self._get("/v1/models")).get("data")
        models = [m for m in listed if "id" in m] if isinstance(listed, list) else []
        if not models:
            raise UserError(
                f"{self._base} tells of no model (/v1/info, /info, /v1/models): no embedding "
                "server, or another address of it; else say which model is meant (model=)"
            )
        if len(models) > 1:
            raise UserError(
                f"{self._base} names {len(models)} models: say which one is meant (model=)"
            )
        return models[0]["id"], models[0].get("max_model_len")

    async def _get(self, path: str) -> dict[str, Any]:
        """A JSON object; empty where there is none under that path."""
        try:
            found = from_json((await self._asked("GET", path)).content)
        except (ServiceUnreachable, RequestError) as error:
            has_ended = isinstance(error, ServerEnded)
            if error.retryable or has_ended or getattr(error, "status", 0) == 401:
                raise
            return {}
        except (RefusedTexts, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    # -- vectors ----------------------------------------------------------------------------------

    async def embed(self, texts: list[str], canary: Canary | None) -> list[Embedded]:
        await self.info()
        self._takes_plain = False  # asked anew where something is refused: it may have changed
        found: dict[str, Embedded | None] = {text: fault_of(text) for text in texts}
        wanted = [text for text, fault in found.items() if fault is None]
        size = max(1, self._most - (canary is not None))
        parts = [wanted[k : k + size] for k in range(0, len(wanted), size)]
        tasks = [asyncio.create_task(self._outcomes(part, canary)) for part in parts]
        try:
            for part, outcomes in zip(parts, await asyncio.gather(*tasks), strict=True):
                found.update(zip(part, outcomes, strict=True))
        finally:
            for task in tasks:
                task.cancel()
        return [found[text] for text in texts]  # type: ignore[misc]  # None was replaced

    async def _outcomes(self, texts: list[str], canary: Canary | None) -> list[Embedded]:
        """Of one request, and of what it is cut into."""
        if not texts:
            return []
        try:
            return [*await self._vectors(texts, canary)]
        except RefusedTexts as refused:
            fault = refused
        await self._check_plain()
        if len(texts) == 1:
            if canary is None:
                return [fault.of_text()]
            await self._vectors([], canary)  # two texts may be one too many
            return await self._outcomes(texts, None)
        if named := fault.named(len(texts)):
            others = [text for k, text in enumerate(texts) if k not in named]
            rest = iter(await self._outcomes(others, canary))
            return [named[k] if k in named else next(rest) for k in range(len(texts))]
        half = min((len(texts) + 1) // 2, self._most)
        outcomes: list[Embedded] = []
        for k in range(0, len(texts), half):
            outcomes += await self._outcomes(texts[k : k + half], canary)
        if not any(isinstance(outcome, SampleError) for outcome in outcomes):
            self._most = min(self._most, half)  # not a text was at fault, but their number
        return outcomes

    async def _check_plain(self) -> None:
        """Raises RequestError where a plain text is refused, too: no other is to blame then."""
        if not self._takes_plain:
            try:
                await self._vectors([_PLAIN])
            except RefusedTexts as refused:
                raise refused.error from None
            self._takes_plain = True

    async def _vectors(self, texts: list[str], canary: Canary | None = None) -> list[list[float]]:
        sent = [*texts, canary.text] if canary else texts  # at the end: faults are told by index
        body = to_json({"model": self._model, "input": sent, "encoding_format": "base64"})
        response = await self._asked("POST", "/v1/embeddings", body)
        try:
            answer = from_json(response.content)
            vectors = vectors_in_order(answer["data"], len(sent))
            model = answer.get("model")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            kind = type(error).__name__
            raise self._unwanted(f"an answer of another shape ({kind}): no embeddings?") from None
        self._answers_as = model if self._answers_as is None else self._answers_as
        if model != self._answers_as:
            raise self._unwanted("another model answers than before")
        for vector in vectors:
            self._dimension = self._dimension or len(vector)
            if len(vector) != self._dimension:
                what = f"a vector of {len(vector)} numbers, others have {self._dimension}"
                raise self._unwanted(what)
            if fault := vector_fault(vector):
                raise self._unwanted(fault)
        if canary and (fault := canary.fault(vectors.pop())):
            raise self._unwanted(fault)
        return vectors

    def _unwanted(self, reason: str) -> ServiceUnreachable:
        return ServiceUnreachable(self._base, reason, retryable=False)

    # -- requests ---------------------------------------------------------------------------------

    async def _asked(self, method: str, path: str, body: bytes | None = None) -> httpx.Response:
        """The answer, with second tries. Raises RefusedTexts, RequestError, ServiceUnreachable."""
        return await self._server.asked(method, path, body, read=self._accepted)

    def _accepted(self, response: httpx.Response) -> httpx.Response:
        if response.status_code != 200:
            raise_failure(self._base, response)
        return response
