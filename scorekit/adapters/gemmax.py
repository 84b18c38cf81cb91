"""Scores for gemmax: its two scoring routes, answered by our services.

scorekit adapter gemmax --xcomet http://127.0.0.1:8002 --qe http://127.0.0.1:8006
# of gemmax:
XCOMET_URLS=http://127.0.0.1:8008/score_openlid COMETKIWI_URLS=http://127.0.0.1:8008/score

gemmax's client reads a missing number as 0, and counts a translation in another language as its
`la_fail_score`. So a request has all its results, or it fails with a status that is no success.
"""

from __future__ import annotations

from scorekit.interrupts import end_at_once

if __name__ == "__main__":
    end_at_once()  # at Ctrl-C during the imports below

import asyncio
import base64
import binascii
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from pydantic import BaseModel, Field

from scorekit.adapters.http import create_routes, parse_body
from scorekit.client.asynchronous import ScoringClient
from scorekit.command import clean_exit, run_app
from scorekit.config import check_config
from scorekit.errors import SampleError, UserError
from scorekit.net.addresses import is_loopback
from scorekit.rewards.definition import LanguageGate
from scorekit.rewards.rules import GateRule, load_gate, rule_result
from scorekit.schemas import ErrorSpan, Info, JudgeScored, Scored
from scorekit.scorers import raise_for_failures

if TYPE_CHECKING:
    from scorekit.languages import LanguageMatch
    from scorekit.server.bridge import BridgeMiddleware

#: Limits of a request. They are the defaults of our services.
MAX_ITEMS, MAX_FIELD_CHARS = 10_000, 100_000
#: Seconds for an answer. The client waits 120 by default.
DEADLINE_S = 110.0
#: Concurrent requests to a service: the client sends many small ones.
MAX_IN_FLIGHT = 256

Text = Annotated[str, Field(max_length=MAX_FIELD_CHARS)]


class Item(BaseModel):
    """A translation to score. Without `ref` it is scored by source alone."""

    src: Text
    mt: Text
    ref: Text | None = None


class LanguageItem(BaseModel):
    """A translation to score and to check for its language, which has an English name."""

    src: Text
    mt: Text
    tgt_lang: Text | None = None


class ScoreRequest(BaseModel):
    """The body of POST /score."""

    items: list[Item] = Field(max_length=MAX_ITEMS)


class LanguageRequest(BaseModel):
    """The body of POST /score_openlid."""

    items: list[LanguageItem] = Field(max_length=MAX_ITEMS)


def language_check(item: LanguageItem, rule: GateRule) -> dict[str, Any]:
    """Return the fields of a result about the language of a translation.

    `la_ok` is 1 in the target language, else 0. `la_skip` is 1 where it was not checked, which
    passes: an unknown language, or too few letters. A blank translation is in no language.
    `pred_iso` is the target's code, or empty: the rule names no other language. The word alignment
    (`wa`) is 0, as gemmax's own server has it.

    Raises SampleError if the rule fails.
    """
    target = target_language(item.tgt_lang)
    fields = {"la_ok": 1, "la_skip": 1, "pred_iso": "", "tgt_iso": ""}
    if target is not None:
        script = f"_{target.script}" if target.script else ""
        fields["tgt_iso"] = f"{target.language.iso639_3}{script}"
        sample = {"src": item.src, "mt": item.mt, "tgt_lang": target.language.tag}
        gate = rule_result(rule, sample)
        if gate.status == "unknown":
            raise SampleError("model_failure", f"the check of the language: {gate.message}")
        if gate.value is not None or not item.mt.strip():
            is_target = gate.status == "open" and bool(item.mt.strip())
            fields |= {"la_ok": int(is_target), "la_skip": 0}
            fields["pred_iso"] = fields["tgt_iso"] if is_target else ""
    return fields | {"wa": 0.0, "wa_precision": 0.0, "wa_recall": 0.0}


def target_language(name: str | None) -> LanguageMatch | None:
    """Return the language of a name ("Korean", "Chinese (Traditional)"), or None if unknown."""
    if not name:
        return None
    from scorekit.languages import look_up  # needs the extra `rewards`, as the check does

    base, _, variant = name.strip().removesuffix(")").partition("(")
    return look_up(name) or look_up(f"{variant} {base}") or look_up(base)


def error_spans(result: Scored | JudgeScored) -> list[dict[str, Any]]:
    """Return the error spans with severities in small letters, as unbabel-comet writes them."""
    spans: Sequence[ErrorSpan] = getattr(result, "error_spans", None) or ()
    return [
        {
            "text": span.text,
            "confidence": span.confidence,
            "severity": span.severity.lower(),
            "start": span.start,
            "end": span.end,
        }
        for span in spans
    ]


class Service(NamedTuple):
    """A scoring service that answers a route."""

    client: ScoringClient
    info: Info


class GemmaxServer:
    """Answers gemmax's requests.

    score: the service of POST /score.
    score_openlid: that of POST /score_openlid, which needs a language_rule, too: a gate that is
    open where a translation is in its target language.
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
    none.
    host: the address that it listens on.
    allow_host: further names of it, separated by commas.
    Raises UserError for a name that is none.
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


app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)

XComet = Annotated[
    list[str] | None,
    typer.Option(help="URL of the service for /score_openlid; repeat it for replicas."),
]
QE = Annotated[
    list[str] | None, typer.Option(help="URL of the service for /score; default: that of --xcomet.")
]
LanguageModel = Annotated[
    str, typer.Option(help="py3langid, or the path of a fastText model such as OpenLID.")
]
Keys = Annotated[
    Path | None,
    typer.Option(help="A file with a key in each line; required where others can reach --host."),
]

AllowHost = Annotated[
    str,
    typer.Option(
        help="Further names of this server, separated by commas. Without keys it answers to "
        "loopback names, addresses and these alone."
    ),
]


@app.command()
def serve(
    xcomet: XComet = None,
    qe: QE = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8008,
    api_keys_file: Keys = None,
    allow_host: AllowHost = "",
    language_model: LanguageModel = "py3langid",
    min_probability: Annotated[
        float, typer.Option(help="Least probability of the target language.")
    ] = 0.5,
    min_letters: Annotated[
        int, typer.Option(help="A translation with fewer letters is not checked.")
    ] = 40,
    deadline: Annotated[
        float, typer.Option(min=1, max=119, help="Seconds for an answer; the client waits 120.")
    ] = DEADLINE_S,
    wait: Annotated[float, typer.Option(help="Seconds to wait for the services at first.")] = 600.0,
) -> None:
    """Serve scores to gemmax."""
    with clean_exit(stdout="log"):
        if not xcomet and not qe:
            raise UserError("--xcomet and --qe: give one of them, or both")
        from scorekit.server.bridge import bridge_access

        bridge_access(host, allow_host)  # a wrong name is told at once
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
        address = _Address(host, port, keys, allow_host)
        asyncio.run(_serve(xcomet or [], qe or [], rule, address, deadline, wait))


class _Address(NamedTuple):
    """Holds where to listen, and for whom."""

    host: str
    port: int
    keys: list[str]
    allow_host: str


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
    address: _Address,
    deadline: float,
    wait: float,
) -> None:
    from scorekit.server.bridge import serve_bridge

    async with AsyncExitStack() as stack:
        checked = await _open(stack, "--xcomet", xcomet, deadline, wait) if xcomet else None
        scores = await _open(stack, "--qe", qe, deadline, wait) if qe else checked
        assert scores is not None
        server = GemmaxServer(scores, checked, rule, deadline)
        bridge = create_app(server, address.keys, address.host, address.allow_host)
        routes = "/score, /score_openlid" if checked else "/score"
        await serve_bridge(
            bridge, address.host, address.port, lambda url: f"scores for gemmax: {url}{routes}"
        )


async def _open(
    stack: AsyncExitStack, option: str, urls: list[str], deadline: float, wait: float
) -> Service:
    """Return a service that is ready and fits. Raises UserError if its scores do not fit."""
    client = ScoringClient(
        urls, timeout_s=deadline, deadline_s=deadline, max_in_flight=MAX_IN_FLIGHT
    )
    await stack.enter_async_context(client)
    await client.wait_ready(wait)
    info = await client.limits()
    if info.tasks is not None or not info.higher_is_better:
        raise UserError(
            f"{option} {urls[0]}: {info.model} is no model of the COMET family whose higher scores "
            "are better, as gemmax expects"
        )
    if option == "--xcomet" and (info.inputs or {}).get("ref") == "required":
        raise UserError(f"{option} {urls[0]}: {info.model} needs references, and there are none")
    return Service(client, info)


if __name__ == "__main__":
    run_app(app, prog_name="python -m scorekit.adapters.gemmax")
