"""Composite rewards for `verify` of NeMo Gym: from its request to its answer.

`scorekit.adapters.nemo_gym.server` is the resources server; this module needs no NeMo Gym.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from scorekit.adapters.shared import (
    RewardSettings,
    Sent,
    TrainerReward,
    TrainerRow,
    completion_text,
    message_text,
)
from scorekit.errors import SampleError, UserError
from scorekit.rewards import RewardResult

if TYPE_CHECKING:
    from fastapi import FastAPI

#: What a response says where the token limit cut it -> `finish_reason` of a sample.
_FINISH_REASONS = {"max_output_tokens": "length", "content_filter": "content_filter"}
#: What NeMo Gym gives beside single rows.
_SENDS: tuple[Sent, ...] = ("finish_reason",)
#: Fields of a request that are no fields of the dataset's row.
_NOT_OF_ROW = ("responses_create_params", "response")


class Verifier:
    """Scores responses by a reward definition. Use it in one event loop.

    Raises UserError if the settings or the definition do not fit NeMo Gym.
    """

    def __init__(self, settings: RewardSettings) -> None:
        definition = settings.definition
        if definition is None:
            raise UserError("definition: not set. Give the path of a YAML file")
        if definition.refused_text_reward:
            raise UserError(
                "refused_text_reward: NeMo Gym wants every component of every response, and a "
                "refused text has none. Remove it"
            )
        if "gates" in definition.components:
            raise UserError("components.gates: this is the part of the gates. Choose another name")
        self._reward = TrainerReward(settings, "NeMo Gym", sends=_SENDS)

    async def check(self, wait_s: float) -> None:
        """Wait until all services are ready, and check that they fit the definition.

        Raises UserError if one does not fit, ServiceUnreachable after `wait_s` seconds."""
        await self._reward.check(wait_s)

    async def close(self) -> None:
        """Close the connections."""
        await self._reward.close()

    async def verify(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields that the answer has besides those of the request.

        request: the body of POST /verify. Each field of the row may be read by the definition;
        `finish_reason` comes from the response.

        Raises SampleError if the response failed or has no reward, UserError if a field is missing,
        and the errors of TrainerReward.score.
        """
        row = {name: value for name, value in request.items() if name not in _NOT_OF_ROW}
        response = request["response"]
        if response.get("error") or response.get("status") in ("failed", "cancelled"):
            raise SampleError("upstream", f"no text: the policy's response is {_failure(response)}")
        row["finish_reason"] = finish_reason(response)
        prompt = message_text(request["responses_create_params"].get("input") or "")
        result = await self._reward.score_one(TrainerRow(row, prompt, response_text(response)))
        return {
            **result.stats(),
            "reward": result.reward,
            "reward_components": reward_components(result),
        }


def refuse_foreign_requests(app: FastAPI, host: str, allow_host: str) -> None:
    """Let an application refuse requests of web pages of other sites, and of foreign hosts.

    host: the address that it listens on.
    allow_host: further names of it, separated by commas. Bodies are not limited: NeMo Gym sends as
    many at once as it has rollouts.
    Raises UserError for a name that is none.
    """
    from scorekit.server.bridge import BridgeMiddleware, bridge_access

    access = bridge_access(host, allow_host)
    app.add_middleware(BridgeMiddleware, access=access, reads_bodies=False)


def _failure(response: Mapping[str, Any]) -> str:
    message = (response.get("error") or {}).get("message")
    return f"failed: {message}" if message else str(response.get("status"))


def response_text(response: Mapping[str, Any]) -> str:
    """Return the policy's last text in a response of OpenAI's Responses API; "" if it has none.

    Reasoning and calls of tools are no texts."""
    return completion_text(
        [item for item in response["output"] if item.get("type", "message") == "message"]
    )


def finish_reason(response: Mapping[str, Any]) -> str | None:
    """Return why a response ended, as the rule `truncated` reads it; None if it is not said."""
    details = response.get("incomplete_details") or {}
    if reason := details.get("reason"):
        return _FINISH_REASONS.get(reason, reason)
    return "stop" if response.get("status") == "completed" else None


def reward_components(result: RewardResult) -> dict[str, float]:
    """Return the addends of a reward by component; all samples of a definition have the same names.

    An addend is weight * scaled. `gates` is what the gates have changed, if there are any.
    """
    assert result.reward is not None
    addends = {
        name: component.weight * component.scaled + 0.0  # no -0.0
        for name, component in result.components.items()
        if component.weight and component.scaled is not None
    }
    if result.gates:
        addends["gates"] = result.reward - math.fsum(addends.values())
    return addends
