"""`scorekit serve retriever --index DIR` serves; `... ingest SOURCES... --index DIR` makes."""

from __future__ import annotations

from scorekit.interrupts import end_at_once

if __name__ == "__main__":
    end_at_once()  # at Ctrl-C during the imports below

import os
import sys
from typing import NoReturn

from scorekit.command import clean_exit, clean_imports, run_app

if __name__ == "__main__" and sys.argv[1:2] == ["ingest"]:
    from services.retriever.command import app

    run_app(app, args=sys.argv[2:], prog_name="python -m services.retriever ingest")

with clean_imports():  # a package that is not installed is named in one line
    from scorekit.config import refuse_password
    from scorekit.server.run import main
    from services.retriever.backends.opening import Servers
    from services.retriever.model import RetrieverBackend
    from services.retriever.settings import RetrieverSettings


def make_backend(settings: RetrieverSettings) -> RetrieverBackend:
    """Return the backend that the settings describe. Its index is checked, but not loaded yet."""
    for url, flag, name in (
        (settings.embeddings_url, "--embeddings-url", "RETRIEVER_EMBEDDINGS_URL"),
        (settings.late_url, "--late-url", "RETRIEVER_LATE_URL"),
    ):
        if url != os.environ.get(name):
            refuse_password(url or "", flag, f"put the address into the variable {name}")
    servers = Servers(
        settings.embeddings_url,
        settings.embeddings_model,
        settings.late_url,
        settings.late_model,
        os.environ.get("VLLM_API_KEY"),
    )
    backend = RetrieverBackend(
        settings.index, settings.backend, servers, max_query_chars=settings.max_field_chars
    )
    backend.check()
    return backend


def run(args: list[str] | None = None, program: str | None = None) -> NoReturn:
    """Serve until a signal stops it.

    args, program: see `parse_settings`.
    """
    with clean_exit(stdout="log"):
        main(RetrieverSettings, make_backend, args, program)


if __name__ == "__main__":
    run()
