"""`scorekit serve reward-model`. torch is imported after the settings are checked."""

from __future__ import annotations

from scorekit.interrupts import end_at_once

if __name__ == "__main__":
    end_at_once()  # at Ctrl-C during the imports below

import os
from pathlib import Path
from typing import NoReturn

from scorekit.command import clean_exit, clean_imports

with clean_imports():  # a package that is not installed is named in one line
    from scorekit.config import refuse_password
    from scorekit.errors import UserError
    from scorekit.server.run import main
    from services.reward_model.model import RewardModelBackend, parse_weights
    from services.reward_model.prompts import find_prompt
    from services.reward_model.settings import RewardModelSettings, RewardUpstreamSecrets
    from services.reward_model.upstream import UpstreamBackend, default_prompt


def make_backend(settings: RewardModelSettings) -> RewardModelBackend | UpstreamBackend:
    """Return the backend that the settings describe. Raises UserError if they cannot work."""
    if settings.upstream is None:
        return RewardModelBackend.from_settings(settings)
    if settings.upstream != os.environ.get("REWARD_MODEL_UPSTREAM"):
        instead = "put the address into the environment variable REWARD_MODEL_UPSTREAM"
        refuse_password(settings.upstream, "--upstream", instead)
    for name, value in (("chat-template", settings.chat_template), ("revision", settings.revision)):
        if value is not None:
            raise UserError(
                f"--{name}: with --upstream it is the other server's: start that one with it"
            )
    prompt = settings.prompt or default_prompt(settings.upstream_api)
    weights = {"reward": 1.0} if settings.weights is None else parse_weights(settings.weights)
    return UpstreamBackend(
        settings.upstream,
        settings.model,
        weights,
        settings.upstream_api,
        (Path(prompt).name, find_prompt(prompt)),
        key=RewardUpstreamSecrets().key,
        max_input_length=settings.max_input_length,
        max_concurrency=settings.max_concurrency,
        max_attempts=settings.max_attempts,
        request_timeout_s=settings.request_timeout_s,
        connect_timeout_s=settings.connect_timeout_s,
    )


def run(args: list[str] | None = None, program: str | None = None) -> NoReturn:
    """Serve until a signal stops it.

    args, program: see `parse_settings`.
    """
    with clean_exit(stdout="log"):
        main(RewardModelSettings, make_backend, args, program)


if __name__ == "__main__":
    run()
