"""Serve gemmax's two scoring routes.

scorekit adapter gemmax --xcomet http://127.0.0.1:8002 --qe http://127.0.0.1:8006
# of gemmax:
XCOMET_URLS=http://127.0.0.1:8008/score_openlid COMETKIWI_URLS=http://127.0.0.1:8008/score
"""

from __future__ import annotations

from scorekit.interrupts import end_at_once

if __name__ == "__main__":
    end_at_once()  # at Ctrl-C during the imports below

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from scorekit.adapters.gemmax.server import DEADLINE_S, GemmaxServer, Service, create_app
from scorekit.adapters.rewards import MAX_IN_FLIGHT
from scorekit.client.asynchronous import ScoringClient
from scorekit.command import clean_exit, run_app
from scorekit.config import check_config
from scorekit.errors import UserError
from scorekit.net.hosts import is_loopback
from scorekit.rewards.definition import LanguageGate
from scorekit.rewards.rules import GateRule, load_gate

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
        checked = await _opened(stack, "--xcomet", xcomet, deadline, wait) if xcomet else None
        scores = await _opened(stack, "--qe", qe, deadline, wait) if qe else checked
        assert scores is not None
        server = GemmaxServer(scores, checked, rule, deadline)
        bridge = create_app(server, address.keys, address.host, address.allow_host)
        routes = "/score, /score_openlid" if checked else "/score"
        await serve_bridge(
            bridge, address.host, address.port, lambda url: f"scores for gemmax: {url}{routes}"
        )


async def _opened(
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
