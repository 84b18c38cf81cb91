"""A client for search environments behind OpenEnv's protocol.

    async with SearchEnvClient("http://127.0.0.1:8012") as env:
        result = await env.reset(index=0)
        while not result.done:
            result = await env.step(SearchAction(text=policy(result.observation.messages)))
        print(result.reward, result.observation.status)  # None and the reason, if it is not scored

`SearchEnvClient(url).sync()` has the same methods without `await`.
"""

from __future__ import annotations

import os
from typing import Any

from openenv.core.client_types import StepResult
from openenv.core.env_client import EnvClient

from trainer.search.environment.openenv_types import SearchAction, SearchObservation, SearchState

#: Seconds that a client waits longer than the server's longest turn.
MARGIN_S = 30.0


class SearchEnvClient(EnvClient[SearchAction, SearchObservation, SearchState]):  # type: ignore[misc]
    """One session with a search environment: one episode at a time.

    base_url: of the server.
    message_timeout_s: seconds to wait for an answer; None: 60 for the first reset, and then longer
    than the longest turn that the server names. A client that gives up loses its session, and the
    server counts the episode as failed.
    api_key: of the server; default from SCOREKIT_API_KEY.
    options: of `EnvClient`.

    `reset(question=ROW)`, `reset(index=N)` or `reset(id="...")` choose the question, else `seed`
    does. Errors of the server raise RuntimeError. After an error of `step`, reset.
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        message_timeout_s: float | None = None,
        api_key: str | None = None,
        **options: Any,
    ) -> None:
        key = api_key or os.environ.get("SCOREKIT_API_KEY")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        headers |= options.pop("headers", None) or {}
        # A policy that samples in the event loop answers no ping meanwhile.
        options.setdefault("websocket_ping_timeout_s", None)
        super().__init__(
            base_url,
            message_timeout_s=60.0 if message_timeout_s is None else message_timeout_s,
            headers=headers,
            **options,
        )
        self._follows_server = message_timeout_s is None

    def _step_payload(self, action: SearchAction) -> dict[str, Any]:
        return action.model_dump()

    def _parse_result(self, payload: dict[str, Any]) -> StepResult[SearchObservation]:
        reward, done = payload.get("reward"), payload.get("done", False)
        observation = SearchObservation(**payload["observation"], reward=reward, done=done)
        if self._follows_server and observation.longest_turn_s is not None:
            self._message_timeout = observation.longest_turn_s + MARGIN_S
        return StepResult(observation, reward, done)

    def _parse_state(self, payload: dict[str, Any]) -> SearchState:
        return SearchState.model_validate(payload)
