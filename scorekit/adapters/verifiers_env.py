"""Parts of our environments for verifiers 0.4: a chat harness, and traces without a reward.

This module imports verifiers: import it only where that is installed.
"""

from __future__ import annotations

from typing import Any

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.dialects.chat import message_to_wire

from scorekit.adapters.verl import once_per_loop
from scorekit.errors import SampleError

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
        client = once_per_loop("verifiers chat", _client)
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
