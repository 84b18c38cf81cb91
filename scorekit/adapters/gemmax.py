"""The two scoring routes of gemmax, answered by our services.

python -m scorekit.adapters.gemmax --xcomet http://127.0.0.1:8002 --qe http://127.0.0.1:8006
# of gemmax:
XCOMET_URLS=http://127.0.0.1:8008/score_openlid COMETKIWI_URLS=http://127.0.0.1:8008/score

Its client reads a missing number as 0, and counts a translation in another language as its
`la_fail_score`. So a request has all its results, or it fails with a status that is no success.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import typer
from pydantic import BaseModel, ValidationError
from pydantic_core import to_json

from scorekit.adapters.gemmax_requests import (
    LanguageRequest,
    ScoreRequest,
    error_spans,
    language_check,
)
from scorekit.adapters.rewards import MAX_IN_FLIGHT
from scorekit.client.asynchronous import ScoringClient
from scorekit.command import clean_exit
from scorekit.config import check_config, describe_validation_error
from scorekit.errors import RequestError, SampleError, ScorekitError, UserError
from scorekit.net.hosts import is_loopback
from scorekit.rewards.definition import LanguageGate
from scorekit.rewards.gates import GateRule, load_gate
from scorekit.schemas import Info, JudgeScored, Scored
from scorekit.scorers import raise_for_failures

#: Largest body of a request, and the seconds until it has arrived, as for our services.
MAX_BODY_BYTES, RECEIVE_TIMEOUT_S = 16 * 2**20, 30.0
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
                body = await _body_of(request)
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


async def _body_of(request: Any) -> bytes:
    """Return the body of a request. Raises RequestError if it is too large or too slow."""
    body = bytearray()
    try:
        async with asyncio.timeout(RECEIVE_TIMEOUT_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_BODY_BYTES:
                    raise RequestError("too_large", f"a body of more than {MAX_BODY_BYTES} bytes")
    except TimeoutError:
        raise RequestError("slow_request", f"no body within {RECEIVE_TIMEOUT_S:g} s") from None
    return bytes(body)


app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)

XComet = Annotated[
    list[str] | None,
    typer.Option(help="URL of the service for /score_openlid; repeat it for replicas."),
]
QE = Annotated[
    list[str] | None,
    typer.Option(help="URL of the service for /score; default: that of --xcomet."),
]
LanguageModel = Annotated[
    str, typer.Option(help="py3langid, or the path of a fastText model such as OpenLID.")
]
Keys = Annotated[
    Path | None,
    typer.Option(help="A file with a key in each line; required where others can reach --host."),
]


@app.command()
def serve(
    xcomet: XComet = None,
    qe: QE = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8008,
    api_keys_file: Keys = None,
    language_model: LanguageModel = "py3langid",
    min_probability: Annotated[
        float, typer.Option(help="Least probability of the target language.")
    ] = 0.5,
    min_letters: Annotated[
        int, typer.Option(help="A translation with fewer letters is not checked.")
    ] = 40,
    deadline: Annotated[
        float, typer.Option(min=1, help="Seconds for an answer; the client waits 120.")
    ] = DEADLINE_S,
    wait: Annotated[float, typer.Option(help="Seconds to wait for the services at first.")] = 600.0,
) -> None:
    """Serve scores to gemmax."""
    with clean_exit():
        if not xcomet and not qe:
            raise UserError("--xcomet and --qe: give one of them, or both")
        keys = _keys_of(api_keys_file)
        if not keys and not is_loopback(host):
            raise UserError(f"--host {host} can be reached by others: give --api-keys-file")
        gate = {
            "rule": "language",
            "model": language_model,
            "min_probability": min_probability,
            "min_letters": min_letters,
            "unknown": "pass",
        }
        config = check_config(LanguageGate, gate, "language check")
        rule = load_gate("language check", config) if xcomet else None
        asyncio.run(_serve(xcomet or [], qe or [], rule, keys, host, port, deadline, wait))


def _keys_of(path: Path | None) -> list[str]:
    """Return the keys of a file. Raises UserError if it cannot be read or has none."""
    if path is None:
        return []
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError:
        raise UserError(f"{path}: not UTF-8 text") from None
    if keys := [line.strip() for line in lines if line.strip()]:
        return keys
    raise UserError(f"{path}: no key in it. Put one there")


async def _serve(
    xcomet: list[str],
    qe: list[str],
    rule: GateRule | None,
    keys: list[str],
    host: str,
    port: int,
    deadline: float,
    wait: float,
) -> None:
    import uvicorn

    async with AsyncExitStack() as stack:
        checked = await _opened(stack, "--xcomet", xcomet, deadline, wait) if xcomet else None
        scores = await _opened(stack, "--qe", qe, deadline, wait) if qe else checked
        assert scores is not None
        server = GemmaxServer(scores, checked, rule, deadline)
        config = uvicorn.Config(create_app(server, keys), host=host, port=port, log_level="warning")
        routes = "/score, /score_openlid" if checked else "/score"
        typer.echo(f"scores for gemmax: http://{host}:{port}{routes}", err=True)
        await uvicorn.Server(config).serve()


async def _opened(
    stack: AsyncExitStack, option: str, urls: list[str], deadline: float, wait: float
) -> Service:
    """Return a service that is ready and fits. Raises UserError if its scores do not fit."""
    client = ScoringClient(
        urls, timeout_s=deadline, deadline_s=deadline, max_in_flight=MAX_IN_FLIGHT
    )
    await stack.enter_async_context(client)
    await client.wait_ready(wait)
    info = await client.info()
    if info.tasks is not None or not info.higher_is_better:
        raise UserError(
            f"{option} {urls[0]}: {info.model} is no model of the COMET family whose higher scores "
            "are better, as gemmax expects"
        )
    if option == "--xcomet" and (info.inputs or {}).get("ref") == "required":
        raise UserError(f"{option} {urls[0]}: {info.model} needs references, and there are none")
    return Service(client, info)


if __name__ == "__main__":
    app(prog_name="python -m scorekit.adapters.gemmax")
