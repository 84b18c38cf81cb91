"""`python -m demo.search.policy`: the searcher without weights, as an OpenAI-compatible server.

It replaces a vision model where there is none: `trainer search ask` and `collect` call it as they
would call vLLM. Equal requests get equal turns. Two episodes of a question differ only by the seed
and the temperature.
"""

from __future__ import annotations

import hashlib
import random
from typing import Annotated, Any

import typer

from demo.search.reading import Reader
from demo.search.searching import next_turn
from scorekit.command import clean_exit
from testing.openai_server import FakeOpenAI

NAME = "demo-searcher"


def searcher(reader: Reader | None = None) -> FakeOpenAI:
    """Return the server. It knows the layout of the pages, and nothing else.

    reader: of other pages than the demo's corpus.
    """
    pages = reader or Reader()

    def respond(body: dict[str, Any], seed: int | None) -> str:
        replies = [m["content"] for m in body["messages"] if m["role"] == "assistant"]
        state = hashlib.sha256(repr((seed, replies)).encode()).digest()
        return next_turn(body["messages"], pages, random.Random(state))

    return FakeOpenAI(model=NAME, respond=respond, records=False)


def main(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8011,
) -> None:
    """Serve the demo's searcher on 127.0.0.1."""
    import uvicorn

    with clean_exit(stdout="log"):
        typer.echo(f"demo searcher: http://127.0.0.1:{port}/v1, model {NAME}")
        uvicorn.run(searcher().app, host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    typer.run(main)
