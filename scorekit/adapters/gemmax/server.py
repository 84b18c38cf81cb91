"""The two scoring routes of gemmax, answered by our services.

Its client reads a missing number as 0, and counts a translation in another language as its
`la_fail_score`. So a request has all its results, or it fails with a status that is no success.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from scorekit.adapters.gemmax.requests import (
    LanguageRequest,
    ScoreRequest,
    error_spans,
    language_check,
)
from scorekit.adapters.remote_requests import create_routes, parse_body
from scorekit.client.asynchronous import ScoringClient
from scorekit.errors import SampleError, UserError
from scorekit.rewards.rules import GateRule
from scorekit.schemas import Info, JudgeScored, Scored
from scorekit.scorers import raise_for_failures

if TYPE_CHECKING:
    from scorekit.server.bridge import BridgeMiddleware

#: Seconds for an answer. The client waits 120 by default.
DEADLINE_S = 110.0


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
        items = parse_body(ScoreRequest, body).items
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
        items = parse_body(LanguageRequest, body).items
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


async def _scores(service: Service, samples: list[dict[str, Any]]) -> list[Scored | JudgeScored]:
    options = {"overlong": "truncate"}
    if service.info.service == "xcomet":
        options["empty_ref"] = "text"  # as unbabel-comet in gemmax's server
    results = raise_for_failures(await service.client.score(samples, options))
    if len(results) != len(samples):
        raise SampleError("upstream", f"{len(results)} results for {len(samples)} items")
    return results


def create_app(
    server: GemmaxServer, keys: Sequence[str] = (), host: str = "127.0.0.1", allow_host: str = ""
) -> BridgeMiddleware:
    """Return the ASGI application: POST /score, POST /score_openlid, GET /health.

    keys: one of them is required, as a bearer or as the password of a URL, but for /health; empty:
    none. host: the address that it listens on. allow_host: further names of it, separated by
    commas. Raises UserError for a name that is none.
    """
    from scorekit.server.bridge import bridge_access

    return create_routes(
        posts={"/score": server.score, "/score_openlid": server.score_openlid},
        gets={"/health": server.health},
        access=bridge_access(
            host, allow_host, [key.encode() for key in keys], key_hint="put it into the URL"
        ),
        token=_token_in,
    )


def _token_in(headers: dict[bytes, bytes]) -> bytes:
    """Return the key of a request. gemmax's client sends the password of its URL by basic
    authentication."""
    scheme, _, credentials = headers.get(b"authorization", b"").partition(b" ")
    if scheme.lower() == b"bearer":
        return credentials.strip()
    if scheme.lower() != b"basic":
        return b""
    try:
        return base64.b64decode(credentials.strip(), validate=True).partition(b":")[2]
    except binascii.Error:
        return b""
