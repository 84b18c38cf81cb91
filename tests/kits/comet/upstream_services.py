"""Runs services of unbabel-comet one after another, each in a fork that has loaded it already.

    .venv-oracle/bin/python -W ignore -m tests.kits.comet.upstream_services

A line of stdin is the flags of a service, in JSON; the next line, or the end, ends it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys

import comet  # noqa: F401 # loaded once: it takes seconds

from scorekit.processes import end_with_parent
from scorekit.server.run import main
from services.xcomet.model import XCometBackend
from services.xcomet.settings import XCometSettings


def serve(flags: list[str]) -> None:
    """Serve in a fork until the next line is read."""
    end_too = end_with_parent()
    child = os.fork()
    if child == 0:
        if end_too:
            end_too()
        sys.argv = ["services.xcomet", *flags]
        main(XCometSettings, XCometBackend.from_settings)
    try:
        sys.stdin.readline()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGTERM)
        os.waitpid(child, 0)


if __name__ == "__main__":
    while line := sys.stdin.readline():
        serve(json.loads(line))
