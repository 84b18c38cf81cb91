"""Our environments for verifiers 0.4, and a translation task whose reward comes from services.

The reward is that of one scoring service, or of a reward definition. A failure raises, so that the
trace is not ok; it is never the number 0. `trace.info["scorekit"]` holds what a trainer may need
besides: components, and error spans for `scorekit/adapters/prime_rl.py`.

This module imports verifiers: import it only where that is installed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI
from pydantic import Field
from verifiers.v1.dialects.chat import message_to_wire

from scorekit.adapters.prime_rl import INFO
from scorekit.adapters.shared import (
    RewardSettings,
    Sent,
    TrainerReward,
    TrainerRow,
    check_definition,
    once_per_loop,
    reward_settings,
)
from scorekit.credit.text_parts import position_by_marking, positions_of
from scorekit.errors import TEXT_ERROR_TYPES, SampleError
from scorekit.prompts import load_postprocess
from scorekit.rewards import RewardResult

#: What a trace gives beside its row. The rewards of tokens are for prime-rl.
SENDS: tuple[Sent, ...] = ("finish_reason", "tokens")
#: A reward ends after this part of verifiers' time limit for scoring, which is no error there.
SHARE_OF_LIMIT = 0.8


class ChatHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    """Requests one completion for each turn, inside the process of the environment.

    verifiers' own harness `null` starts a program for each turn, and adds tools to the request.
    """

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> Any:
        """Request the next turn of the conversation `data.prompt`; verifiers records it.

        Raises an error of the openai package if there is none.
        """
        system, prompt = self.resolve_prompt(data)
        messages = [vf.UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt)
        if system is not None:
            messages.insert(0, vf.SystemMessage(content=system))
        client = once_per_loop("verifiers chat", {}, _client)
        await client.with_options(base_url=endpoint, api_key=secret).chat.completions.create(
            model=ctx.model, messages=[message_to_wire(message) for message in messages]
        )
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


def _client() -> AsyncOpenAI:
    """Return a client of the running event loop. Each turn has an address and a key of its own."""
    return AsyncOpenAI(base_url="http://127.0.0.1", api_key="unused", timeout=None)


class ScoredEnvConfig(vf.EnvConfig):  # type: ignore[misc]
    """The settings of `ScoredEnv`: one agent, which needs no sandbox."""

    agent: vf.AgentConfig = vf.AgentConfig(runtime={"type": "subprocess"})


class ScoredEnv(vf.Env[ScoredEnvConfig]):  # type: ignore[misc]
    """Runs one agent on a task. A trace without its reward is an error."""

    async def run(self, task: Any, agents: Any) -> None:
        """Run the agent on the task's prompt."""
        await agents.agent.run(task)

    async def finalize(self, task: Any, episode: Any) -> None:
        """Record an error on each trace whose scoring ended without a reward.

        verifiers takes its time limit for scoring as a stop: the trace stays ok, and a reward that
        is missing counts 0.
        """
        for trace in episode.traces:
            missing = [name for name, reward in trace.rewards.items() if reward is None]
            if trace.ok and (missing or not trace.rewards):
                names = ", ".join(missing) or "no reward function ran"
                trace.record_error(SampleError("timeout", f"{names}: scoring ended without it"))


def reward_limit_s(trace: Any) -> float | None:
    """Return the seconds that a reward may take, less than verifiers' limit for scoring.

    None: there is no limit.
    """
    limit: float | None = trace.agent.config.timeout.scoring
    limit = trace.task.data.timeout.scoring if limit is None else limit
    return None if limit is None else SHARE_OF_LIMIT * limit


class TranslationData(vf.TaskData):  # type: ignore[misc]
    """A prompt, and the fields of its row: `src`, and those that the reward uses (`ref`, ...)."""

    row: dict[str, Any]


class TranslationTaskConfig(vf.TaskConfig):  # type: ignore[misc]
    """The settings of the reward."""

    reward: dict[str, Any] = Field(default_factory=dict)
    """Settings of RewardSettings (scorekit/adapters/shared.py): `url` or `definition`, and more;
    what is not set comes from SCOREKIT_REWARD_<NAME>."""


class TranslationRowTask(vf.Task[TranslationData, vf.State, TranslationTaskConfig]):  # type: ignore[misc]
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
                reward, result, text = await self._score(trace)
        except TimeoutError:
            info |= {"status": "late", "error": "no score before the limit for scoring"}
            raise SampleError("timeout", f"no score within {limit_s:g} s") from None
        except Exception as error:
            info["error"] = f"{type(error).__name__}: {error}"
            raise
        info |= {"status": "ok", "reward": result.reward, **_details(reward, result)}
        info |= _scored_part(
            load_postprocess(translation_settings(self.config.reward).postprocess), text
        )
        trace.record_metrics({k: v for k, v in info["components"].items() if v is not None})
        assert result.reward is not None
        return result.reward

    async def _score(self, trace: Any) -> tuple[TrainerReward, RewardResult, str]:
        settings = translation_settings(self.config.reward)
        if not trace.assistant_messages:  # verifiers scores what its limits have stopped, too
            message = f"no answer of the policy before {trace.stop_condition or 'the end'}"
            raise SampleError("upstream", message)
        text = trace.assistant_messages[-1].content or ""
        reward = once_per_loop(
            "verifiers",
            self.config.reward,
            lambda: TrainerReward(settings, "verifiers", sends=SENDS),
        )
        fields = {**self.data.row, "finish_reason": trace.calls[-1].finish_reason}
        row = TrainerRow(fields, self.data.prompt_text, text)
        return reward, await reward.score_one(row), text


def translation_settings(values: Mapping[str, Any]) -> RewardSettings:
    """Return the settings of a reward. Raises UserError if one is wrong."""
    settings = reward_settings(**values)
    if settings.definition is not None:
        check_definition(settings.definition, "verifiers", SENDS)
    return settings


def _scored_part(postprocess: Callable[[str], str], text: str) -> dict[str, Any]:
    """Return the text that was scored, `mt`, of an answer; and how often it stands there again.

    mt_repeats: the number of places after the one that `mt` was cut from; None: not known.
    """
    mt = postprocess(text)
    positions = positions_of(mt, text)
    repeats: int | None = 0
    if len(positions) > 1:
        start = position_by_marking(postprocess, mt, text, positions)
        repeats = None if start is None else len(positions) - 1 - positions.index(start)
    return {"mt": mt, "mt_repeats": repeats}


def _details(reward: TrainerReward, result: RewardResult) -> dict[str, Any]:
    """Return what `trace.info` holds of a scored translation, as JSON values.

    spans: by component, the error spans in `mt` (`start`, `end` in characters), and `mt_covered`,
    the number of its characters that the service has read. token_rewards: the section of the
    definition, if it has one; then `spans` has `omissions`, too.
    """
    definition = reward.settings.definition
    config = None if definition is None else definition.token_rewards
    names = ("error_spans", "omissions") if config is not None else ("error_spans",)
    spans = {}
    for name, component in result.components.items():
        answer: Any = component.answer
        if getattr(answer, "error_spans", None) is not None:
            marked = answer.model_dump(mode="json", include={*names, "mt_covered"})
            spans[name] = {key: marked[key] for key in (*names, "mt_covered")}
    is_refused = any(
        c.is_required and c.status in TEXT_ERROR_TYPES for c in result.components.values()
    )
    details = {
        "components": reward.numbers(result),
        "spans": spans,
        "is_refused_text": is_refused,
    }
    if config is not None:
        details["token_rewards"] = config.model_dump(mode="json")
    return details
