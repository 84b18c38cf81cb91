"""The HTTP service that OpenRLHF and slime ask for rewards: /get_reward and /remote_rm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from scorekit.adapters.composite import component_columns
from scorekit.adapters.remote_requests import (
    RewardRequest,
    SlimeRequest,
    completion_of,
    create_routes,
    fields_of,
    parse_body,
)
from scorekit.adapters.rewards import RewardSettings, Samples, message_text, options_for, reward_of
from scorekit.client.asynchronous import ScoringClient
from scorekit.errors import UserError
from scorekit.rewards import CompositeReward, raise_for_missing
from scorekit.scorers import raise_for_failures
from scorekit.text.end_marks import without_end_marks

if TYPE_CHECKING:
    from scorekit.server.bridge import BridgeMiddleware


class RewardServer:
    """Answers the requests of OpenRLHF and slime with scores of a service, or composite rewards.

    client: a CompositeReward if the settings have a definition. clip_range: of OpenRLHF, if rewards
    may be outside: then each answer to it says whether its reward is, and `metrics` counts them.
    """

    def __init__(
        self,
        client: ScoringClient | CompositeReward,
        settings: RewardSettings,
        end_marks: Sequence[str] | None = None,
        turn_mark: str | None = None,
        clip_range: tuple[float, float] | None = None,
    ) -> None:
        self._client = client
        self._settings = settings
        self._samples = Samples(settings)
        self._end_marks = end_marks
        self._turn_mark = turn_mark
        self._clip_range = clip_range
        self._num_rewards = self._num_outside = 0

    async def get_reward(self, body: bytes) -> dict[str, Any]:
        """Return the answer to OpenRLHF.

        Raises UserError if the request has another form, SampleError if a sample failed, and the
        client's errors."""
        rewards, logs = await self._score(self._parse_samples(body))
        if self._clip_range is not None:
            low, high = self._clip_range
            is_outside = [float(not low <= reward <= high) for reward in rewards]
            logs = logs | {"outside_clip_range": is_outside}
            self._num_rewards += len(rewards)
            self._num_outside += int(sum(is_outside))
        return {"rewards": rewards, "scores": rewards, "extra_logs": logs}

    def metrics(self) -> str:
        """Return the counters for Prometheus."""
        counters = {
            "scorekit_clip_checked_rewards_total": self._num_rewards,
            "scorekit_outside_clip_range_total": self._num_outside,
        }
        lines = [f"# TYPE {name} counter\n{name} {value}\n" for name, value in counters.items()]
        return "".join(lines)

    async def remote_rm(self, body: bytes) -> float:
        """Return the answer to slime, which uses it unchanged. Raises as `get_reward`."""
        request = parse_body(SlimeRequest, body)
        mt = without_end_marks(request.response, self._end_marks)
        sample = self._samples.sample(fields_of(request.label), message_text(request.prompt), mt)
        (reward,), _ = await self._score([sample])
        return reward

    async def _score(
        self, samples: list[dict[str, Any]]
    ) -> tuple[list[float], dict[str, list[float]]]:
        """Return the rewards, and the numbers for OpenRLHF's log by name.

        OpenRLHF 0.11.2 ends a run if samples have different names in it, or None. So each sample
        has all names of a definition, and NaN where it has no value.
        """
        if isinstance(self._client, CompositeReward):
            composite_results = await self._client.score(samples)
            rewards = raise_for_missing(composite_results)
            columns = component_columns(composite_results)
            return rewards, {
                name: [math.nan if value is None else value for value in values]
                for name, values in columns.items()
            }
        info = await self._client.limits()
        results = await self._client.score(samples, options_for(info, self._settings))
        scored = raise_for_failures(results)
        logs = {f"{info.service}_score": [result.score for result in scored]}
        return [reward_of(result, info, self._settings) for result in scored], logs

    def _parse_samples(self, body: bytes) -> list[dict[str, Any]]:
        request = parse_body(RewardRequest, body)
        labels = request.labels or [None] * len(request.query)
        if not len(request.query) == len(request.prompts) == len(labels):
            raise UserError("query, prompts and labels have different lengths")
        samples = []
        for index, query in enumerate(request.query):
            prompt = request.prompts[index]
            try:
                mt = completion_of(query, prompt, self._end_marks, self._turn_mark)
                samples.append(self._samples.sample(fields_of(labels[index]), prompt, mt))
            except UserError as error:
                raise UserError(f"sample {index}: {error}") from None
        return samples


def create_app(
    server: RewardServer, host: str = "127.0.0.1", allow_host: str = ""
) -> BridgeMiddleware:
    """Return the ASGI application: POST /get_reward and /remote_rm, GET /health and /metrics.

    host: the address that it listens on. allow_host: further names of it, separated by commas.
    Raises UserError for a name that is none.
    """
    from scorekit.server.bridge import bridge_access

    return create_routes(
        posts={"/get_reward": server.get_reward, "/remote_rm": server.remote_rm},
        gets={"/health": lambda: {"live": True}, "/metrics": server.metrics},
        access=bridge_access(host, allow_host),
    )
