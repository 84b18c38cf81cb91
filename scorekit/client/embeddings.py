"""Vectors of texts from any server with OpenAI's `POST /v1/embeddings`: scorekit, TEI, vLLM,
OpenAI.

with Embeddings("http://127.0.0.1:8004") as embedder:
    vectors = embedder.embed(["Hello.", "안녕하세요."])

Such a server refuses a whole request for one bad text. Texts that scorekit's embedder names are
then set apart. For another server the request is halved until the bad text is alone. Below the
client stands what reads the answers and refusals of these servers.
"""

from __future__ import annotations

import asyncio
import base64
import re
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from typing import Any

import httpx
from pydantic_core import to_json

from scorekit.client.transport import (
    RetryingSession,
    json_of,
    key_hint,
    resolve_api_key,
    service_url,
)
from scorekit.errors import RequestError, SampleError, ServerEnded, ServiceUnreachable, UserError
from scorekit.net.addresses import ServerUrl, proxy_note
from scorekit.net.loops import ForkSafeClient, gather_or_cancel
from scorekit.net.masking import server_words
from scorekit.net.retry import first_answer_limit_s, retry_after_s
from scorekit.numeric import vector_error
from scorekit.scorers import check_is_list

#: A vector, or the reason why a text has none.
Embedded = list[float] | SampleError

#: A text that only a server that refuses everything refuses.
_PLAIN = "text"


@dataclass(frozen=True, slots=True)
class EmbeddingModel:
    """The model that answers. None: the server does not say.

    model: its name.
    revision: the hub's sha, or a digest of its files.
    pooling: cls, mean, ...
    dimension: numbers of a vector.
    max_input_length: tokens of the longest text.
    """

    model: str
    revision: str | None
    pooling: str | None
    dimension: int
    max_input_length: int | None


@dataclass(frozen=True, slots=True)
class Canary:
    """A text that is sent with every request, and a check of its vector.

    find_error: returns why the vector cannot be from the expected model, or "" if it can.
    """

    text: str
    find_error: Callable[[Sequence[float]], str]


class Embeddings(ForkSafeClient["_Client"]):
    """The client of one embedding server, for code that is not async. Threads may share it.

    A forked child creates its own connections.

    url: of the server, with or without `/v1`.
    model: its name there; None: the only one of the server.
    api_key: default from SCOREKIT_API_KEY.
    batch_size: texts of one request, reduced if the server takes fewer (TEI: 32).
    timeout_s: seconds for one request.
    deadline_s: seconds for one request with its retries (no connection, 424, 429, 5xx) and the
    pauses between them.
    max_in_flight: concurrent requests.
    exit_reason: called if nothing answers; returns why the server will not come back, if the caller
    started its process and it has ended; then ServerEnded is raised at once.
    first_answer_s: seconds to wait for a server that has never answered; None: 10 s in a notebook
    or at a prompt, else until the deadline.

    Raises UserError if the URL is not http.
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
        exit_reason: Callable[[], str | None] = lambda: None,
        first_answer_s: float | None = None,
    ) -> None:
        server_parts = service_url(url)
        base = server_parts.address.removesuffix("/v1")
        key = resolve_api_key(api_key)
        limit_s = first_answer_limit_s(first_answer_s)

        def make() -> _Client:
            server = RetryingSession(
                ServerUrl(base, server_parts.authorization),
                key,
                "embedding server",
                timeout_s=timeout_s,
                deadline_s=deadline_s,
                max_in_flight=max_in_flight,
                may_help=lambda error: getattr(error, "retryable", False),
                end_reason=exit_reason,
                first_answer_s=limit_s,
            )
            return _Client(base, model, batch_size, server)

        super().__init__("embeddings client", make, _Client.close)

    def info(self) -> EmbeddingModel:
        """Return the model that answers, as the server described it at the first request.

        If the server does not state its dimension, it is that of a plain text's vector.

        Raises ServiceUnreachable, RequestError; UserError if the server has several models and none
        was named.
        """
        return self.run(lambda client: client.info())

    def embed(self, texts: Sequence[str], canary: Canary | None = None) -> list[Embedded]:
        """Return the vector of each text, in order; equal texts are sent once.

        A text that the server cannot take (empty, NUL, not Unicode, too long) has a SampleError in
        its place. Raises ServiceUnreachable if there is no answer until the deadline, or an invalid
        one: another form, another model or dimension than before, a number that is not finite, a
        vector of zeros, another vector than the canary's. Raises RequestError if the server refuses
        a plain text, too; UserError for what is no list of texts.
        """
        check_is_list("texts", texts)
        return self.run(lambda client: client.embed(list(texts), canary))


class _Client:
    """The async part of `Embeddings`, on its event loop."""

    def __init__(
        self, base: str, model: str | None, batch_size: int, server: RetryingSession
    ) -> None:
        self._base, self._server = base, server
        self._model = model
        self._max_texts = batch_size
        self._model_info: EmbeddingModel | None = None
        self._info_lock = asyncio.Lock()
        self._dimension: int | None = None
        self._answered_model: Any = None  # the `model` field of its first answer
        self._takes_plain = False

    async def close(self) -> None:
        await self._server.close()

    # -- which model ------------------------------------------------------------------------------

    async def info(self) -> EmbeddingModel:
        async with self._info_lock:
            if self._model_info is None:
                self._model_info = await self._request_model()
        return self._model_info

    async def _request_model(self) -> EmbeddingModel:
        """Ask scorekit's /v1/info, then TEI's /info, then /v1/models and a vector."""
        scorekit_info = await self._get("/v1/info")
        if {"model", "revision", "pooling", "dimension"} <= scorekit_info.keys():
            self._max_texts = min(self._max_texts, scorekit_info["max_samples"])
            self._model = self._model or scorekit_info["model"]
            self._dimension = scorekit_info["dimension"]
            names = [field.name for field in fields(EmbeddingModel)]
            return EmbeddingModel(**{name: scorekit_info[name] for name in names})
        tei_info = await self._get("/info")
        revision = pooling = max_input_length = None
        if "model_id" in tei_info:
            self._model = self._model or tei_info["model_id"]
            self._max_texts = min(
                self._max_texts, tei_info.get("max_client_batch_size") or self._max_texts
            )
            revision, max_input_length = tei_info.get("model_sha"), tei_info.get("max_input_length")
            model_type = tei_info.get("model_type")
            if isinstance(model_type, dict):
                pooling = model_type.get("embedding", {}).get("pooling")
        elif self._model is None:
            self._model, max_input_length = await self._only_model()
        await self._check_plain()
        assert self._dimension is not None and self._model is not None
        return EmbeddingModel(self._model, revision, pooling, self._dimension, max_input_length)

    async def _only_model(self) -> tuple[str, int | None]:
        listed = (await self._get("/v1/models")).get("data")
        models = [m for m in listed if "id" in m] if isinstance(listed, list) else []
        if not models:
            raise UserError(
                f"{self._base} tells of no model (/v1/info, /info, /v1/models): no embedding "
                "server, or another address of it. Otherwise name the model (model=)"
            )
        if len(models) > 1:
            raise UserError(
                f"{self._base} names {len(models)} models: say which one is meant (model=)"
            )
        return models[0]["id"], models[0].get("max_model_len")

    async def _get(self, path: str) -> dict[str, Any]:
        """Return a JSON object; empty if the path has none."""
        try:
            answer = json_of((await self._request("GET", path)).content)
        except (ServiceUnreachable, RequestError) as error:
            has_ended = isinstance(error, ServerEnded)
            if error.retryable or has_ended or getattr(error, "status", 0) == 401:
                raise
            return {}
        except (RefusedTexts, ValueError):
            return {}
        return answer if isinstance(answer, dict) else {}

    # -- vectors ----------------------------------------------------------------------------------

    async def embed(self, texts: list[str], canary: Canary | None) -> list[Embedded]:
        await self.info()
        self._takes_plain = False  # checked again after a refusal: it may have changed
        outcome_by_text: dict[str, Embedded | None] = {
            text: find_text_error(text) for text in texts
        }
        sendable = [text for text, error in outcome_by_text.items() if error is None]
        size = max(1, self._max_texts - (canary is not None))
        batches = [sendable[k : k + size] for k in range(0, len(sendable), size)]
        outcomes = await gather_or_cancel(self._outcomes(batch, canary) for batch in batches)
        outcome_by_text.update(zip(sendable, chain.from_iterable(outcomes), strict=True))
        return [outcome_by_text[text] for text in texts]  # type: ignore[misc]  # None was replaced

    async def _outcomes(self, texts: list[str], canary: Canary | None) -> list[Embedded]:
        """Return the outcomes of one request, which is split if it is refused."""
        if not texts:
            return []
        try:
            return [*await self._vectors(texts, canary)]
        except RefusedTexts as error:
            refusal = error
        await self._check_plain()
        if len(texts) == 1:
            if canary is None:
                return [refusal.of_text()]
            await self._vectors([], canary)  # two texts may be too many for the server
            return await self._outcomes(texts, None)
        if error_by_index := refusal.named(len(texts)):
            unnamed = [text for k, text in enumerate(texts) if k not in error_by_index]
            other_outcomes = iter(await self._outcomes(unnamed, canary))
            return [
                error_by_index[k] if k in error_by_index else next(other_outcomes)
                for k in range(len(texts))
            ]
        half = min((len(texts) + 1) // 2, self._max_texts)
        outcomes: list[Embedded] = []
        for k in range(0, len(texts), half):
            outcomes += await self._outcomes(texts[k : k + half], canary)
        if not any(isinstance(outcome, SampleError) for outcome in outcomes):
            self._max_texts = min(self._max_texts, half)  # the number of texts was the cause
        return outcomes

    async def _check_plain(self) -> None:
        """Raise RequestError if a plain text is refused, too: then no other text is the cause."""
        if not self._takes_plain:
            try:
                await self._vectors([_PLAIN])
            except RefusedTexts as refused:
                raise refused.error from None
            self._takes_plain = True

    async def _vectors(self, texts: list[str], canary: Canary | None = None) -> list[list[float]]:
        # The canary is last, because errors name texts by index.
        sent = [*texts, canary.text] if canary else texts
        body = to_json({"model": self._model, "input": sent, "encoding_format": "base64"})
        response = await self._request("POST", "/v1/embeddings", body)
        try:
            answer = json_of(response.content)
            vectors = vectors_in_order(answer["data"], len(sent))
            model = answer.get("model")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            kind = type(error).__name__
            raise self._bad_answer(f"an answer of another shape ({kind}): no embeddings?") from None
        self._answered_model = model if self._answered_model is None else self._answered_model
        if model != self._answered_model:
            raise self._bad_answer("another model answers than before")
        for vector in vectors:
            self._dimension = self._dimension or len(vector)
            if len(vector) != self._dimension:
                reason = f"a vector of {len(vector)} numbers, others have {self._dimension}"
                raise self._bad_answer(reason)
            if reason := vector_error(vector):
                raise self._bad_answer(reason)
        if canary and (reason := canary.find_error(vectors.pop())):
            raise self._bad_answer(reason)
        return vectors

    def _bad_answer(self, reason: str) -> ServiceUnreachable:
        return ServiceUnreachable(self._base, reason, retryable=False)

    # -- requests ---------------------------------------------------------------------------------

    async def _request(self, method: str, path: str, body: bytes | None = None) -> httpx.Response:
        """Return the answer. Raises RefusedTexts, RequestError, ServiceUnreachable."""
        return await self._server.request(method, path, body, read=self._check_status)

    def _check_status(self, response: httpx.Response) -> httpx.Response:
        if response.status_code != 200:
            raise_failure(self._base, response)
        return response


#: Statuses that a text, or the number of texts, may cause.
_TEXT_STATUSES = frozenset({400, 413, 422})
#: Longest words of a refusal in an error: scorekit's embedder names several texts in it.
_MAX_MESSAGE_CHARS = 2000
#: The form in which scorekit's embedder names a refused text.
_NAMED_TEXT = re.compile(r"\binput\.(\d{1,9}): (invalid_input|overlong): ")
#: Words of other servers' errors about a text that is too long.
_TOO_LONG = re.compile(r"token|too long|context length|context_length|max(imum)?[ _]length")


class RefusedTexts(Exception):
    """A refusal that a text may have caused.

    message: the server's, which may quote the text.
    """

    def __init__(self, error: RequestError, message: str) -> None:
        super().__init__(error, message)
        self.error, self._message = error, message

    def of_text(self) -> SampleError:
        """Return the error of the only text of the request."""
        too_long = self.error.status == 413 or _TOO_LONG.search(self._message.lower())
        return _refusal("overlong" if too_long else "invalid_input", f"HTTP {self.error.status}")

    def named(self, num_texts: int) -> dict[int, SampleError]:
        """Return errors by index, if the service named the texts."""
        type_by_index = {int(index): type for index, type in _NAMED_TEXT.findall(self._message)}
        return {
            index: _refusal(type, "named in its refusal")
            for index, type in type_by_index.items()
            if index < num_texts
        }


def raise_failure(base: str, response: httpx.Response) -> None:
    """Raise the typed error of an answer that is not 200, from any kind of server."""
    status, (type, message) = response.status_code, _type_and_message(response)
    authorization = response.request.headers.get("authorization", "")
    message = server_words(message, authorization=authorization, max_chars=_MAX_MESSAGE_CHARS)
    description = f"{base}: HTTP {status}" + (f": {message}" if message else proxy_note(base))
    if status in _TEXT_STATUSES:
        error_type = "too_large" if status == 413 else "invalid_request"
        raise RefusedTexts(RequestError(error_type, description, status=status), message)
    if status in (401, 403):
        hint = f"{key_hint(authorization)} SCOREKIT_API_KEY (or api_key=)"
        raise RequestError("unauthorized", f"{description}; {hint}")
    if status < 500 and status not in (408, 424, 429):
        raise ServiceUnreachable(
            base,
            f"HTTP {status}: {message or 'no embeddings' + proxy_note(base)}",
            retryable=False,
        )
    if type == "internal":  # of scorekit's embedder: it would fail again
        raise RequestError("internal", description)
    error_type = "overloaded" if status == 429 else "unavailable"
    retry_after = retry_after_s(response.headers)
    raise RequestError(error_type, description, status=status, retry_after=retry_after)


def _type_and_message(response: httpx.Response) -> tuple[str, str]:
    """Return type and message of a refusal by scorekit, OpenAI, TEI or vLLM."""
    try:
        body = json_of(response.content)
    except ValueError:
        return "", ""
    inner = body.get("error") if isinstance(body, dict) else None
    if isinstance(inner, dict):
        body = inner
    if not isinstance(body, dict):
        return "", ""
    message = body.get("message") or body.get("error") or body.get("detail") or ""
    return str(body.get("type")), str(message)


def vectors_in_order(rows: list[dict[str, Any]], count: int) -> list[list[float]]:
    """Return vectors in the order of their index.

    Raises ValueError, KeyError, TypeError unless there is exactly one for each text."""
    vector_by_index = {row["index"]: row["embedding"] for row in rows}
    if len(rows) != count:
        raise ValueError(f"{len(rows)} vectors for {count} texts")
    return [_numbers(vector_by_index[k]) for k in range(count)]


def _numbers(raw: Any) -> list[float]:
    """Return a vector from a list of numbers, or from the base64 of its float32 bytes."""
    if isinstance(raw, str):
        floats = array("f", base64.b64decode(raw, validate=True))
        if sys.byteorder == "big":
            floats.byteswap()
        return floats.tolist()
    try:
        numbers = [float(number) for number in raw]
    except OverflowError:
        raise ValueError("a whole number of 309 digits or more") from None
    if not numbers:
        raise ValueError("an empty vector")
    return numbers


def find_text_error(text: str) -> SampleError | None:
    """Return the error of a text that no server should get, or None."""
    if not text:
        return SampleError("invalid_input", "an empty text has no vector")
    if "\0" in text:
        return SampleError("invalid_input", f"NUL character at position {text.index(chr(0))}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return SampleError("invalid_input", f"lone surrogate at position {error.start}")
    return None


def _refusal(type: str, detail: str) -> SampleError:
    """Return the error of a refused text, without the server's words: they may quote the text."""
    return SampleError(type, f"the embedding server refused the text ({detail})")
