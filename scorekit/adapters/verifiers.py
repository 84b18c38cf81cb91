"""A translation task for verifiers 0.4, whose reward comes from our services.

The reward is that of one scoring service, or of a reward definition. A failure raises, so that the
trace is not ok; it is never the number 0. `trace.info["scorekit"]` holds what a trainer may need
besides: components, and error spans for `scorekit/adapters/prime_rl.py`.

This module imports verifiers: import it only where that is installed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import verifiers.v1 as vf
from pydantic import Field

from scorekit.adapters.composite import check_no_group_rules, definition_of
from scorekit.adapters.prime_rl import INFO
from scorekit.adapters.rewards import RewardSettings, reward_settings
from scorekit.adapters.verifiers_env import reward_limit_s
from scorekit.adapters.verl import DefinitionRewards, ScoredText, ServiceRewards, once_per_loop
from scorekit.errors import SampleError
from scorekit.prompts import load_postprocess
from scorekit.schemas import Scored


class TranslationData(vf.TaskData):  # type: ignore[misc]
    """A prompt, and the fields of its row: `src`, and those that the reward uses (`ref`, ...)."""

    row: dict[str, Any]


class TranslationTaskConfig(vf.TaskConfig):  # type: ignore[misc]
    """The settings of the reward."""

    reward: dict[str, Any] = Field(default_factory=dict)
    """Settings of RewardSettings (scorekit/adapters/rewards.py): `url` or `definition`, and more;
    what is not set comes from SCOREKIT_REWARD_<NAME>."""


class TranslationTask(vf.Task[TranslationData, vf.State, TranslationTaskConfig]):  # type: ignore[misc]
    """Translate one text in one turn."""

    @vf.reward
    async def translation_reward(self, trace: Any) -> float:
        """Return the reward of the last turn, and write `trace.info` and the metrics.

        Raises SampleError if there is no score before the deadline of the settings, or before most
        of verifiers' limit for scoring has passed; and the errors of the clients.
        """
        limit_s = reward_limit_s(trace)
        info: dict[str, Any] = {"status": "failed", "reward": None, "components": {}, "error": None}
        trace.info[INFO] = info
        try:
            async with asyncio.timeout(limit_s):
                scored, mt = await self._score(trace)
        except TimeoutError:
            info |= {"status": "late", "error": "no score before the limit for scoring"}
            raise SampleError("timeout", f"no score within {limit_s:g} s") from None
        except Exception as error:
            info["error"] = f"{type(error).__name__}: {error}"
            raise
        info |= {"status": "ok", "reward": scored.reward, **_details(scored, mt)}
        trace.record_metrics({k: v for k, v in info["components"].items() if v is not None})
        return scored.reward

    async def _score(self, trace: Any) -> tuple[ScoredText, str]:
        settings = translation_settings(self.config.reward)
        text = trace.assistant_messages[-1].content or "" if trace.assistant_messages else ""
        key = json.dumps(self.config.reward, sort_keys=True, default=str)
        rewards = once_per_loop(f"verifiers {key}", lambda: _client_of(settings))
        fields = {**self.data.row, "finish_reason": trace.calls[-1].finish_reason}
        scored = await rewards.score(fields, self.data.prompt_text, text)
        return scored, load_postprocess(settings.postprocess)(text)


def translation_settings(values: Mapping[str, Any]) -> RewardSettings:
    """Return the settings of a reward. Raises UserError if one is wrong."""
    settings = reward_settings(**values)
    if settings.definition is not None:
        check_no_group_rules(settings.definition, "verifiers")
    return settings


def _client_of(settings: RewardSettings) -> ServiceRewards | DefinitionRewards:
    if settings.definition is None:
        return ServiceRewards(settings)
    return DefinitionRewards(settings, definition_of(settings))


def _details(scored: ScoredText, mt: str) -> dict[str, Any]:
    """Return what `trace.info` holds of a scored translation, as JSON values.

    mt: the text that was scored. spans: by component, the error spans in it (`start`, `end` in
    characters), and `mt_covered`, the number of its characters that the service has read.
    """
    spans = {
        name: {
            "error_spans": [span.model_dump(mode="json") for span in answer.error_spans],
            "mt_covered": answer.mt_covered,
        }
        for name, answer in scored.answers.items()
        if isinstance(answer, Scored) and answer.error_spans is not None
    }
    return {
        "components": scored.numbers,
        "mt": mt,
        "spans": spans,
        "is_refused_text": scored.is_refused_text,
    }
