"""The search episode as an environment: a question, turns of any policy, and a reward.

It plays by `trainer/search/rollout/state.py`, as our own trainer does.
"""

from __future__ import annotations

from uuid import uuid4

from trainer.search.environment.observation import EpisodeResult, Observation
from trainer.search.environment.services import EnvironmentServices
from trainer.search.records import Question, Trajectory
from trainer.search.rollout.policies import TurnOutput
from trainer.search.rollout.state import EpisodeState, add_turn


class SearchEnvironment:
    """One episode at a time; `reset` begins the next one and forgets the last.

    services: may be shared by any number of environments. policy: name in the records of the
    episodes. Each method may be awaited in another event loop than the one before, but only one at
    a time.
    """

    def __init__(self, services: EnvironmentServices, policy: str = "external") -> None:
        self._services, self._policy = services, policy
        self._state: EpisodeState | None = None
        self._busy = False

    async def reset(self, question: Question, trajectory_id: str | None = None) -> Observation:
        """Begin an episode and return the messages before the first turn.

        trajectory_id: unique in its run; None: a random one. Raises UserError and IndexChanged if
        the services cannot serve any episode.
        """
        self._state = None
        self._services.raise_if_broken()
        trajectory = Trajectory(
            trajectory_id=trajectory_id or uuid4().hex,
            run=self._services.run,
            step=0,  # the number of the file on disk is set when it is written
            group=question.id,
            question=question,
            policy=self._policy,
            index_revision=self._services.index_revision,
        )
        self._busy = False
        self._state = EpisodeState(trajectory, self._services.cfg.episode)
        return Observation(tuple(self._state.messages))

    async def step(self, text: str, tokens: int | None = None) -> Observation:
        """Take a turn of the policy and return its observation, at the end with the result.

        text: the whole turn, of any content. tokens: their number, which counts towards
        `episode.max_response_length`; None: the turn does not count. A mistake of the policy is an
        observation. If the retriever fails, the episode ends without a reward, and the policy sees
        nothing of it. Raises ValueError if no episode runs, UserError and IndexChanged if the
        services cannot serve any episode, and BudgetExceeded.
        """
        # A lone surrogate, which JSON can have, could be neither sent nor stored.
        return await self._add(TurnOutput(text.encode(errors="replace").decode(), tokens))

    async def stop(self, reason: str) -> Observation:
        """End the episode because the trainer has no turn for it (its own limit is reached).

        It is scored as an episode that used up its context. reason: goes into its record.
        """
        return await self._add(TurnOutput(end="context", detail=reason))

    async def fail(self, reason: str) -> Observation:
        """End the episode because the trainer lost it; it gets no reward and is counted.

        Also after a turn that was cancelled. Raises ValueError if no episode runs.
        """
        state = self._state
        if state is None or (state.trajectory.end is not None and not self._busy):
            raise ValueError("no episode runs: call reset with a question first")
        # A copy, because the calls for the reward of a cancelled turn go on and read the episode.
        state.trajectory = state.trajectory.model_copy(
            update={"end": "failed", "end_detail": reason}
        )
        self._busy = False
        return Observation(done=True, result=await self._result(state.trajectory))

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
        if state.trajectory.end is None:
            observation = Observation(tuple(state.messages[num_messages:]))
        else:
            observation = Observation(done=True, result=await self._result(state.trajectory))
        self._busy = False
        return observation

    async def _result(self, trajectory: Trajectory) -> EpisodeResult:
        services = self._services
        final = await services.stream.reward(trajectory, services.cfg.rollout.deadline_s)
        services.episodes.add(final)
        return EpisodeResult.of(final)
