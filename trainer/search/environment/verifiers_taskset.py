"""The search task for verifiers 0.4: questions, an environment that plays them, and their reward.

A search is a tag in the text of a turn, not a tool call. So the environment is the user of the
conversation: each turn goes to `SearchEnvironment.step`, and the observation comes back as the next
user message. verifiers' tools would show the text of a tool's error to the policy.

This module imports verifiers: import it only where that is installed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import verifiers.v1 as vf
from pydantic import Field

from scorekit.adapters.prime_rl import INFO
from scorekit.adapters.verifiers import ScoredEnv
from scorekit.config import load_config
from scorekit.errors import SampleError, UserError
from trainer.search.config import SearchConfig
from trainer.search.data import load_set, load_train
from trainer.search.environment.environment import SearchEnvironment
from trainer.search.environment.observation import Observation
from trainer.search.environment.services import EnvironmentServices, open_environment_services
from trainer.search.records import Question
from trainer.search.rollout.policies import full_text
from trainer.search.rollout.prompt import chat_messages


class QuestionData(vf.TaskData):  # type: ignore[misc]
    """A question, with the fields of `trainer.search.records.Question`."""

    question: dict[str, Any]


class QuestionTask(vf.Task[QuestionData]):  # type: ignore[misc]
    """Find the evidence for one question. `SearchEnv` plays and scores it."""

    @vf.reward
    async def search_reward(self, trace: Any) -> float:
        """Return the episode's reward. Raises SampleError if it has none: it is never 0 then."""
        info = trace.info.get(INFO)
        if info is None:
            raise SampleError("upstream", "SearchEnv did not play this trace. Leave env.id unset")
        if info["reward"] is None:
            type_ = "timeout" if info["status"] == "late" else "upstream"
            raise SampleError(type_, info["error"] or "the episode has no reward")
        return float(info["reward"])


class SearchTasksetConfig(vf.TasksetConfig):  # type: ignore[misc]
    """The config of the search, and which of its questions are the tasks."""

    config: str = ""
    """The config file of a search run."""
    overrides: list[str] = Field(default_factory=list)
    """Keys of that file with other values, such as `episode.max_turns=4`."""
    questions: str = "train"
    """`train`: those of `data.train`; else the name of an evaluation set."""


class SearchTaskset(vf.Taskset[QuestionTask, SearchTasksetConfig]):  # type: ignore[misc]
    """One task for each question of a search config."""

    def __init__(self, config: SearchTasksetConfig) -> None:
        """Read the config file. Raises UserError."""
        super().__init__(config)
        if not config.config:
            raise UserError("env.taskset.config: not set. Give a config file of trainer.search")
        if self.system_prompt is not None:
            raise UserError(
                "env.taskset.system_prompt: has no effect. Set episode.instructions in "
                f"{config.config}"
            )
        self.search_config = load_config(SearchConfig, config.config, config.overrides)

    def load(self) -> Iterator[Any]:
        """Read the questions. Raises UserError."""
        cfg, name = self.search_config, self.config.questions
        if name != "train" and name not in cfg.data.held_out:
            names = ", ".join(("train", *cfg.data.held_out))
            raise UserError(f"env.taskset.questions: {name!r} does not exist. Set one of {names}")
        for question in load_train(cfg) if name == "train" else load_set(cfg, name):
            yield QuestionTask(
                QuestionData(id=question.id, question=question.model_dump(mode="json")),
                self.config.task,
            )


class SearchEnv(ScoredEnv):
    """Plays episodes of the search. All episodes of a process share the services."""

    _services: EnvironmentServices

    async def start(self) -> None:
        """Open the services. Raises UserError, ServiceUnreachable."""
        self._stack = ExitStack()
        opening = open_environment_services(self.taskset.search_config)
        self._services = await asyncio.to_thread(self._stack.enter_context, opening)

    async def stop(self) -> None:
        """Close the services, and write the last episodes."""
        await asyncio.to_thread(self._stack.close)

    async def run(self, task: Any, agents: Any) -> None:
        """Play one episode, and write its result to `trace.info` and the trace's metrics."""
        environment = SearchEnvironment(self._services, agents.agent.config.model)
        observation = await environment.reset(Question.model_validate(task.data.question))
        async with agents.agent.interaction(task) as interaction:
            while not observation.done:
                observation = await _next_observation(environment, interaction, observation)
            assert observation.result is not None
            result, trace = observation.result, interaction.trace
            trace.info[INFO] = {
                **result.fields(),
                "trajectory_id": result.trajectory.trajectory_id,
            }
            trace.record_metrics({f"component/{k}": v for k, v in result.components.items()})


async def _next_observation(
    environment: SearchEnvironment, interaction: Any, observation: Observation
) -> Observation:
    """Return the observation of the policy's next turn, or the end of the episode."""
    segment = await interaction.turn(chat_messages(observation.messages))
    trace = interaction.trace
    if segment.terminated:
        if trace.last_error is not None:
            return await environment.fail(f"verifiers: {trace.last_error.message}"[:300])
        if not trace.assistant_messages:  # the policy has done nothing that has a reward
            return await environment.fail(f"verifiers: {trace.stop_condition}, no turn was played")
        return await environment.stop(f"verifiers: {trace.stop_condition}")
    if len(segment.messages) != 1:
        raise UserError(
            f"env.agent.harness: {len(segment.messages)} messages in one turn. Leave it unset: "
            "tools are tags in this task"
        )
    call = trace.calls[-1]
    node = trace.nodes[call.node]
    tokens = sum(node.mask) or (call.usage.completion_tokens if call.usage else None)
    message = node.message
    return await environment.step(
        full_text(message.content or "", message.reasoning_content), tokens
    )
