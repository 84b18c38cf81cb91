"""Client of vLLM's `POST /pooling`: one vector for each token of texts and images."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import httpx
from pydantic_core import from_json, to_json

from scorekit.client.transport import RetryingSession, without_bom
from scorekit.errors import RequestError, ServiceUnreachable
from scorekit.net.addresses import ServerUrl, client_url, proxy_note
from scorekit.net.loops import ForkSafeClient, gather_or_cancel
from scorekit.net.retry import retry_after_s
from services.retriever.backends.vectors import Vectors, checked_vectors

#: Largest number of queries in a request.
_MAX_QUERIES = 64


class Pooling:
    """The client of one pooling server. It is thread-safe.

    model: its name on the server. key: API key, if any. prompt: text sent with each image.
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
