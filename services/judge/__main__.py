"""`scorekit serve judge`."""

from __future__ import annotations

from scorekit.interrupts import end_at_once

if __name__ == "__main__":
    end_at_once()  # at Ctrl-C during the imports below

import os
from typing import NoReturn

from scorekit.command import clean_exit, clean_imports

with clean_imports():  # a package that is not installed is named in one line
    from scorekit.config import refuse_password
    from scorekit.errors import UserError
    from scorekit.server.run import main
    from services.judge.model import OpenAIBackend, RulesBackend
    from services.judge.rubrics import load_rubrics
    from services.judge.settings import JudgeSettings, UpstreamSecrets


def make_backend(settings: JudgeSettings) -> RulesBackend | OpenAIBackend:
    """Return the backend that the settings describe. Its rubrics are checked."""
    if settings.base_url != os.environ.get("JUDGE_BASE_URL"):
        instead = "put the address into the environment variable JUDGE_BASE_URL"
        refuse_password(settings.base_url or "", "--base-url", instead)
    rubrics = load_rubrics(settings.rubrics)
    if settings.backend == "rules":
        if settings.mqm_examples is not None or settings.mqm_votes > 1:
            raise UserError("--mqm-examples, --mqm-votes: the task mqm requires --backend openai")
        return RulesBackend(rubrics, settings.max_input_length)
    return OpenAIBackend(rubrics, settings, UpstreamSecrets().key)


def run(args: list[str] | None = None, program: str | None = None) -> NoReturn:
    """Serve until a signal stops it.

    args, program: see `parse_settings`.
    """
    with clean_exit(stdout="log"):
        main(JudgeSettings, make_backend, args, program)


if __name__ == "__main__":
    run()
