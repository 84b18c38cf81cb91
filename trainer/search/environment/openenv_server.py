"""Serve search environments by OpenEnv's protocol: a session of a WebSocket plays episodes.

`scorekit search serve-openenv` starts it; `openenv_client.py` has the client.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any
from uuid import uuid4

from fastapi import FastAPI
from openenv.core.env_server import Environment, create_app
from openenv.core.env_server.types import EnvironmentMetadata

import scorekit
from trainer.search.environment.environment import SearchEnvironment
from trainer.search.environment.openenv_fields import (
    QuestionChoice,
    longest_turn_s,
    observation_fields,
)
from trainer.search.environment.openenv_types import SearchAction, SearchObservation, SearchState
from trainer.search.environment.services import EnvironmentServices
from trainer.search.records import Question


def create_search_app(
    services: EnvironmentServices,
    questions: Sequence[Question] = (),
    *,
    max_sessions: int = 256,
) -> FastAPI:
    """Return the app of a server.

    services: shared by all sessions, and open as long as the app runs.
    questions: those that a reset may choose by index, id or seed.
    max_sessions: at the same time; another one is refused.
    """
    choice = QuestionChoice(questions, services.cfg.data)
    return create_app(
        lambda: OpenEnvSearch(services, choice),
        SearchAction,
        SearchObservation,
        env_name="search",
        max_concurrent_envs=max_sessions,
        state_cls=SearchState,
        # Leaves out POST /reset and /step, which would make an environment for each request.
        mode="production",
    )


class OpenEnvSearch(Environment[SearchAction, SearchObservation, SearchState]):  # type: ignore[misc]
    """The environment of one session.

    services: shared with other sessions.
    choice: the questions that a reset may choose. An episode that the client leaves, or resets,
    before its end is counted as failed.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, services: EnvironmentServices, choice: QuestionChoice) -> None:
        super().__init__()
        self._services, self._choice = services, choice
        self._environment = SearchEnvironment(services, "openenv")
        self._state = SearchState()

    async def reset_async(
        self, seed: int | None = None, episode_id: str | None = None, **options: Any
    ) -> SearchObservation:
        """Begin an episode.

        options: `question`, a row of a file of questions; or `index` or `id` of one of
        `data.train`. Without them, seed chooses one of `data.train`. Raises UserError.
        """
        question = self._choice.choose({"seed": seed, "episode_id": episode_id, **options})
        await self._leave("the client reset it before its end")
        trajectory_id = uuid4().hex
        observation = await self._environment.reset(question, trajectory_id)
        self._state = SearchState(
            episode_id=episode_id or trajectory_id,
            trajectory_id=trajectory_id,
            question_id=question.id,
            done=False,
        )
        return SearchObservation(
            **observation_fields(observation), longest_turn_s=longest_turn_s(self._services.cfg)
        )

    async def step_async(
        self, action: SearchAction, timeout_s: float | None = None, **_: Any
    ) -> SearchObservation:
        """Take a turn of the policy.

        timeout_s: has no effect; the config's deadlines hold.

        Raises ValueError if no episode runs, and UserError if the services cannot serve any.
        """
        observation = await self._environment.step(action.text, action.tokens)
        self._state.step_count += 1
        self._state.done = observation.done
        return SearchObservation(**observation_fields(observation))

    def reset(
        self, seed: int | None = None, episode_id: str | None = None, **options: Any
    ) -> SearchObservation:
        """Begin an episode, outside of an event loop."""
        return asyncio.run(self.reset_async(seed, episode_id, **options))

    def step(
        self, action: SearchAction, timeout_s: float | None = None, **_: Any
    ) -> SearchObservation:
        """Take a turn of the policy, outside of an event loop."""
        return asyncio.run(self.step_async(action, timeout_s))

    @property
    def state(self) -> SearchState:
        """Return the state of the session, and the counts of the server."""
        return self._state.model_copy(update={"episodes": self._services.episodes.counts})

    def close(self) -> None:
        """End the session; an episode that runs is failed, which needs a thread without a loop."""
        if not self._state.done:
            asyncio.run(self._leave("the client left before its end"))

    def get_metadata(self) -> EnvironmentMetadata:
        """Return the description of the environment."""
        return EnvironmentMetadata(
            name="search",
            description="A policy looks for the evidence of a question in document pages.",
            version=scorekit.__version__,
        )

    async def _leave(self, reason: str) -> None:
        if not self._state.done:
            self._state.done = True
            with suppress(ValueError):  # it has its reward: only the step's answer failed
                await self._environment.fail(reason)
