"""The search episode as an environment: a question, turns of any policy, and a reward.

It plays by `trainer/search/rollout/episode.py`, as our own trainer does.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any
from uuid import uuid4

from trainer.search.environment.observation import EpisodeResult, Observation
from trainer.search.environment.services import EnvironmentServices
from trainer.search.records import Question, Trajectory
from trainer.search.reward import skip_reward, with_reward
from trainer.search.rollout.episode import EpisodeState, TurnOutput, add_turn


class SearchEnvironment:
    """One episode at a time; `reset` begins the next one and forgets the last.

    services: may be shared by any number of environments.
    policy: name in the records of the episodes. Each method may be awaited in another event loop
    than the one before, but only one at a time; `result` may be awaited beside the next episode.
    """

    def __init__(self, services: EnvironmentServices, policy: str = "external") -> None:
        self._services, self._policy = services, policy
        self._state: EpisodeState | None = None
        self._busy = False

    async def reset(self, question: Question, trajectory_id: str | None = None) -> Observation:
        """Begin an episode and return the messages before the first turn.

        trajectory_id: unique in its run; None: a random one. Raises UserError and IndexChanged if
        the services cannot serve any episode, and ValueError for a lone surrogate in the question.
        """
        return self.begin(question, trajectory_id)

    def begin(self, question: Question, trajectory_id: str | None = None) -> Observation:
        """Do what `reset` does, for code that is not async.

        An episode that has not ended is counted as failed.
        """
        self._abandon()
        self._services.raise_if_broken()
        trajectory = Trajectory(
            trajectory_id=trajectory_id or uuid4().hex,
            run=self._services.run,
            step=0,  # the number of the file on disk is set when it is written
            group=question.id,
            question=question,
            policy=self._policy,
            index_revision=self._services.tools.index_revision(),
        )
        trajectory.model_dump_json()  # before it begins: one that cannot be stored is refused
        self._busy = False
        form = self._services.tools.form
        self._state = EpisodeState(trajectory, self._services.cfg.episode, form)
        return Observation(tuple(self._state.messages))

    async def step(self, text: str, tokens: int | None = None) -> Observation:
        """Take a turn of the policy and return its observation, at the end with the result.

        text: the whole turn, of any content.
        tokens: their number, which counts towards `episode.max_response_length`; None: the turn
        does not count. A mistake of the policy is an observation. If the retriever fails, the
        episode ends without a reward, and the policy sees nothing of it.
        Raises ValueError if no episode runs, UserError and IndexChanged if the services cannot
        serve any episode, and BudgetExceeded.
        """
        return await self._with_result(await self.advance(text, tokens))

    async def stop(self, reason: str) -> Observation:
        """End the episode because the trainer has no turn for it (its own limit is reached).

        It is scored as an episode that used up its context.
        reason: goes into its record.
        """
        return await self._with_result(
            await self._add(TurnOutput(end="context", detail=_storable(reason)))
        )

    async def fail(self, reason: str) -> Observation:
        """End the episode because the trainer lost it; it gets no reward and is counted.

        Also after a turn, or a wait for the result, that was cancelled. Raises ValueError if no
        episode runs, or if it has its result.
        """
        state = self._state
        if state is None or state.trajectory.reward is not None:
            raise ValueError("no episode runs: call reset with a question first")
        # A copy, because the calls for a reward that was waited for go on and read the episode.
        state.trajectory = state.trajectory.model_copy(
            update={"end": "failed", "end_detail": _storable(reason)}
        )
        self._busy = False
        return await self._with_result(Observation(done=True))

    async def advance(self, text: str, tokens: int | None = None) -> Observation:
        """Do what `step` does, without waiting for the result at the end: `result` gives it."""
        return await self._add(TurnOutput(_storable(text), tokens))

    def result(self) -> Coroutine[Any, Any, EpisodeResult]:
        """Return the result of the episode that has ended, once; await it, also after a `reset`.

        Raises ValueError if the episode runs, and when awaited BudgetExceeded.
        """
        state = self._state
        if state is None or state.trajectory.end is None:
            raise ValueError("the episode has not ended")
        return self._result_of(state)

    async def _result_of(self, state: EpisodeState) -> EpisodeResult:
        services = self._services
        final = await services.stream.reward(state.trajectory, services.cfg.rollout.deadline_s)
        state.trajectory = final
        services.episodes.add(final)
        return EpisodeResult.from_trajectory(final)

    async def _with_result(self, observation: Observation) -> Observation:
        if not observation.done:
            return observation
        return Observation(done=True, result=await self.result())

    def _abandon(self) -> None:
        """Forget the episode. One that has not ended is counted and stored as failed."""
        state, self._state = self._state, None
        if state is None or state.trajectory.end is not None:
            return
        update = {"end": "failed", "end_detail": "it was left for another question"}
        reward_cfg = self._services.cfg.reward
        skipped = skip_reward(state.trajectory.model_copy(update=update), reward_cfg)
        assert skipped is not None  # of a failed episode there is no reward
        self._services.episodes.add(with_reward(skipped, reward_cfg))

    async def _add(self, turn: TurnOutput) -> Observation:
        state = self._state
        if state is None or state.trajectory.end is not None:
            raise ValueError("no episode runs: call reset with a question first")
        if self._busy:
            raise ValueError("the turn before has not ended, or was cancelled: call reset")
        self._busy = True  # stays so after a cancelled turn, whose result is unknown
        services = self._services
        num_messages = len(state.messages) + 1  # with the turn of the policy
        await add_turn(state, turn, 0.0, services.tools, services.threads)
        services.raise_if_broken()
        self._busy = False
        if state.trajectory.end is not None:
            return Observation(done=True)
        return Observation(tuple(state.messages[num_messages:]))


def _storable(text: str) -> str:
    """Replace lone surrogates, which JSON can have: they could be neither sent nor stored."""
    return text.encode(errors="replace").decode()
