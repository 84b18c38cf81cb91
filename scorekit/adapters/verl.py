"""A reward function for verl 0.9.1.

    reward.custom_reward_function.path=pkg://scorekit.adapters.verl
    reward.custom_reward_function.name=compute_score
    +reward.custom_reward_function.reward_kwargs.url=http://127.0.0.1:8001
    +reward.custom_reward_function.reward_kwargs.reward_manager='${reward.reward_manager.name}'

Start the trainer with `python -m scorekit.adapters.verl_run`, which checks these keys before Ray
starts. Settings are those of RewardSettings, as `reward_kwargs` or from SCOREKIT_REWARD_<NAME>. A
sample's fields are those of `extra_info`, and `ground_truth`. A failure raises, so verl drops the
completion from its group.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from scorekit.adapters.rewards import (
    MAX_IN_FLIGHT,
    RewardSettings,
    Samples,
    message_text,
    options_for,
    reward_of,
    reward_settings,
)
from scorekit.client import ScoringClient
from scorekit.errors import SampleError
from scorekit.schemas import JudgeScored, Scored
from scorekit.scorers import raise_for_failures

#: Reward managers of verl 0.9.1 that let an exception of an async function pass.
RAISING_MANAGERS = ("naive", "dapo", "gdpo")


class UnsafeRewardManager(BaseException):
    """A reward manager that may turn a failure into reward 0.

    It is no Exception on purpose: the manager `rate_limited` answers every Exception with reward 0.
    """


@dataclass(frozen=True, slots=True)
class ScoredText:
    """Holds the reward of one completion, its components, and the service's result."""

    reward: float
    components: dict[str, float]
    result: Scored | JudgeScored


class AsyncRewards:
    """Gets rewards from a scoring service within one event loop."""

    def __init__(self, settings: RewardSettings) -> None:
        self.settings = settings
        self.samples = Samples(settings)
        self._client = ScoringClient(
            settings.url,
            timeout_s=settings.timeout_s,
            deadline_s=settings.deadline_s,
            max_in_flight=MAX_IN_FLIGHT,
        )

    async def score(self, fields: Mapping[str, Any], prompt: str | None, mt: str) -> ScoredText:
        """Return the reward of one completion.

        Raises SampleError, RequestError, ServiceUnreachable or UserError; never returns a number
        for a failure."""
        sample = self.samples.sample(fields, prompt, mt)
        info = await self._client.limits()
        results = await self._client.score([sample], options_for(info, self.settings))
        (result,) = raise_for_failures(results)
        reward = reward_of(result, info, self.settings)
        if not (math.isfinite(reward) and math.isfinite(result.score)):
            message = f"the score is {result.score}, the reward {reward}"
            raise SampleError("non_finite", message, id=result.id, index=0)
        return ScoredText(reward, {info.service: result.score}, result)


_BY_LOOP: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[RewardSettings, AsyncRewards]] = (
    WeakKeyDictionary()
)


def async_rewards(settings: RewardSettings) -> AsyncRewards:
    """Return the client of these settings for the running event loop, made once."""
    by_settings = _BY_LOOP.setdefault(asyncio.get_running_loop(), {})
    if settings not in by_settings:
        by_settings[settings] = AsyncRewards(settings)
    return by_settings[settings]


def plain_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with a list of URLs (OmegaConf's, too) as a tuple."""
    url = values.get("url")
    if url is None or isinstance(url, str):
        return dict(values)
    return {**values, "url": tuple(url)}


async def compute_score(
    data_source: Any,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    reward_manager: str | None = None,
    reward_router_address: Any = None,
    reward_model_tokenizer: Any = None,
    **settings: Any,
) -> dict[str, float]:
    """Return `score`, the reward of one completion, and the service's score under its name.

    reward_manager: the reward manager's name in verl's config. Without it nothing says what the
    manager makes of a failure.
    reward_router_address, reward_model_tokenizer: verl passes them if it runs a reward model.

    Raises UnsafeRewardManager if the manager is not known to let exceptions pass, and else the
    errors of `AsyncRewards.score`.
    """
    if reward_manager not in RAISING_MANAGERS:
        raise UnsafeRewardManager(
            f"reward_kwargs.reward_manager: {reward_manager!r} may turn a failed score into reward "
            f"0. Choose one of {', '.join(RAISING_MANAGERS)} and pass its name"
        )
    rewards = async_rewards(reward_settings(**plain_settings(settings)))
    fields = {**(extra_info or {}), "ground_truth": ground_truth}
    prompt = fields.get("prompt")
    text = None if prompt is None else message_text(prompt)
    scored = await rewards.score(fields, text, solution_str)
    return {"score": scored.reward, **scored.components}
