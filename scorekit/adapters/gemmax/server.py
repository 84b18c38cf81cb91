"""The two scoring routes of gemmax, answered by our services.

Its client reads a missing number as 0, and counts a translation in another language as its
`la_fail_score`. So a request has all its results, or it fails with a status that is no success.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import to_json

from scorekit.adapters.gemmax.requests import (
    LanguageRequest,
    ScoreRequest,
    error_spans,
    language_check,
)
from scorekit.adapters.remote_requests import read_body
from scorekit.client.asynchronous import ScoringClient
from scorekit.config import describe_validation_error
from scorekit.errors import RequestError, SampleError, ScorekitError, UserError
from scorekit.rewards.gates import GateRule
from scorekit.schemas import Info, JudgeScored, Scored
from scorekit.scorers import raise_for_failures

#: Seconds for an answer. The client waits 120 by default.
DEADLINE_S = 110.0

RequestT = TypeVar("RequestT", bound=BaseModel)


class Service(NamedTuple):
    """A scoring service that answers a route."""

    client: ScoringClient
    info: Info


class GemmaxServer:
    """Answers gemmax's requests.

    score: the service of POST /score. score_openlid: that of POST /score_openlid, which needs a
    language_rule, too: a gate that is open where a translation is in its target language.
    deadline_s: seconds for an answer.
    """

    def __init__(
        self,
        score: Service,
        score_openlid: Service | None = None,
        language_rule: GateRule | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._score, self._score_openlid = score, score_openlid
        self._language_rule, self._deadline_s = language_rule, deadline_s

    def health(self) -> dict[str, Any]:
        """Return the answer to GET /health: which model answers each route."""
        openlid = self._score_openlid
        models = {"score": self._score.info.model}
        models |= {} if openlid is None else {"score_openlid": openlid.info.model}
        return {"ok": True, "openlid": openlid is not None, "models": models}

    async def score(self, body: bytes) -> dict[str, Any]:
        """Return the answer to POST /score, one result for each item.

        Raises UserError if the request has another form, SampleError if an item has no score, the
        client's errors, and TimeoutError after the deadline."""
        items = _parsed(ScoreRequest, body).items
        samples = [item.model_dump(exclude_none=True) for item in items]
        async with asyncio.timeout(self._deadline_s):
            results = await _scores(self._score, samples)
        return {
            "results": [
                {"score": result.score, "error_spans": error_spans(result)} for result in results
            ]
        }

    async def score_openlid(self, body: bytes) -> dict[str, Any]:
        """Return the answer to POST /score_openlid, one result for each item.

        Raises the errors of `score`, and UserError without a service."""
        service, rule = self._score_openlid, self._language_rule
        if service is None or rule is None:
            raise UserError("no language check here. Start the adapter with --xcomet URL")
        items = _parsed(LanguageRequest, body).items
        samples = [{"src": item.src, "mt": item.mt} for item in items]
        async with asyncio.timeout(self._deadline_s):
            checks = await asyncio.to_thread(lambda: [language_check(item, rule) for item in items])
            results = await _scores(service, samples)
        return {
            "results": [
                {"qe": result.score, **check, "error_spans": error_spans(result)}
                for result, check in zip(results, checks, strict=True)
            ]
        }


def _parsed(request_type: type[RequestT], body: bytes) -> RequestT:
    try:
        return request_type.model_validate_json(body)
    except ValidationError as error:
        raise UserError(describe_validation_error(error, "body")) from None


async def _scores(service: Service, samples: list[dict[str, Any]]) -> list[Scored | JudgeScored]:
    options = {"overlong": "truncate"}
    if service.info.service == "xcomet":
        options["empty_ref"] = "text"  # as unbabel-comet in gemmax's server
    results = raise_for_failures(await service.client.score(samples, options))
    if len(results) != len(samples):
        raise SampleError("upstream", f"{len(results)} results for {len(samples)} items")
    return results


def create_app(server: GemmaxServer, keys: Sequence[str] = ()) -> Any:
    """Return the ASGI application: POST /score, POST /score_openlid, GET /health.

    keys: one of them is required of a POST, as a bearer or as the password of a URL; empty: none.
    """
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import Response
    from starlette.routing import Route

    def answer(content: Any, status: int = 200) -> Response:
        return Response(to_json(content), status, media_type="application/json")

    def failed(status: int, error: Exception) -> Response:
        message = " ".join(str(error).split())
        return answer({"error": {"type": type(error).__name__, "message": message}}, status)

    def route(path: str, handle: Callable[[bytes], Awaitable[Any]]) -> Route:
        async def respond(request: Request) -> Response:
            try:
                _check_key(request.headers.get("authorization", ""), keys)
                body = await read_body(request)
            except RequestError as error:
                return failed(error.status, error)
            except ClientDisconnect as error:
                return failed(400, error)
            try:
                return answer(await handle(body))
            except UserError as error:
                return failed(422, error)
            except TimeoutError:
                return failed(504, RequestError("timeout", "not scored before the deadline"))
            except ScorekitError as error:
                return failed(502, error)

        return Route(path, respond, methods=["POST"])

    async def health(request: Request) -> Response:
        return answer(server.health())

    application = Starlette(
        routes=[
            route("/score", server.score),
            route("/score_openlid", server.score_openlid),
            Route("/health", health),
        ]
    )
    application.router.redirect_slashes = False  # the client would send its texts a second time
    return application


def _check_key(header: str, keys: Sequence[str]) -> None:
    """Raise RequestError if a header has none of the keys. gemmax's client sends the password of
    its URL by basic authentication."""
    scheme, _, credentials = header.partition(" ")
    key_bytes = credentials.strip().encode()
    if scheme.lower() == "basic":
        try:
            key_bytes = base64.b64decode(key_bytes, validate=True).partition(b":")[2]
        except binascii.Error:
            key_bytes = b""
    is_known = [hmac.compare_digest(key_bytes, candidate.encode()) for candidate in keys]
    if keys and not any(is_known):
        raise RequestError("unauthorized", "no key, or a wrong one: put it into the URL")
