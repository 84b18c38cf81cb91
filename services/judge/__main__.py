"""`python -m services.judge`."""

from __future__ import annotations

import os

from scorekit.command import clean_exit

with clean_exit():  # a package that is not installed is named in one line
    from scorekit.config import refuse_password
    from scorekit.errors import UserError
    from scorekit.server.http.run import main
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


if __name__ == "__main__":
    with clean_exit():
        main(JudgeSettings, make_backend)
