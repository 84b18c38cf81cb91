"""`python -m services.judge`."""

from __future__ import annotations

from scorekit.server.run import main
from services.judge.model import OpenAIBackend, RulesBackend
from services.judge.rubrics import load_rubrics
from services.judge.settings import JudgeSettings, UpstreamSecrets


def make_backend(settings: JudgeSettings) -> RulesBackend | OpenAIBackend:
    """The back end that the settings describe; its rubrics are checked."""
    rubrics = load_rubrics(settings.rubrics)
    if settings.backend == "rules":
        return RulesBackend(rubrics, settings.max_input_length)
    return OpenAIBackend(rubrics, settings, UpstreamSecrets().key)


if __name__ == "__main__":
    main(JudgeSettings, make_backend)
