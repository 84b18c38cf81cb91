"""The policy that is trained: a sampler of trainer/rl samples its turns from ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from scorekit.errors import UserError
from scorekit.seeds import stream_seed
from trainer.rl.config import SamplingConfig
from trainer.rl.distributed import DistributedContext
from trainer.rl.sampler import SampledCompletion, Sampler
from trainer.search.records import TokenRecord
from trainer.search.rollout.config import EpisodeConfig
from trainer.search.rollout.episode_tokens import EpisodeTokens, TurnTokenizer
from trainer.search.rollout.policies import TurnOutput, TurnRequest

#: Min free ids of the context for a turn: fewer are too few for an action.
LEAST_ROOM = 16


@dataclass(frozen=True, slots=True, order=True)
class _Call:
    """The settings that the turns of one call of the sampler share."""

    temperature: float
    max_new_tokens: int


@dataclass(slots=True)
class _State:
    """The state of an episode. joined: the ids so far. messages: how many the ids contain."""

    joined: EpisodeTokens
    messages: int


class SampledPolicy:
    """The policy that is trained.

    gen_cfg: sampling settings; max_new_tokens is for one turn. context: max ids that the model
    reads. world: of a run whose processes share the weights, so all of them make the same calls.
    with_logprobs: keep the sampler's log-probabilities for training. seed: of all samples until
    `begin`; None: the random state continues. ended_episodes: the ids of the batch's finished
    episodes, by trajectory id.
    """

    def __init__(
        self,
        sampler: Sampler,
        ids: TurnTokenizer,
        gen_cfg: SamplingConfig,
        *,
        name: str,
        context: int,
        world: DistributedContext | None = None,
        with_logprobs: bool = True,
        seed: int | None = None,
    ) -> None:
        self.name, self.ids = name, ids
        self._sampler, self._context, self._with_logprobs = sampler, context, with_logprobs
        self._gen_cfg = gen_cfg.model_copy(update={"num_samples_per_prompt": 1})
        self._world = world if world is not None and world.is_sharded else None
        self._states: dict[str, _State] = {}
        self.ended_episodes: dict[str, EpisodeTokens] = {}
        self.begin(seed)

    def begin(self, seed: int | None) -> None:
        """Start a batch of episodes with a seed, and forget the finished ones."""
        self._seed, self._calls = seed, count()
        self.ended_episodes = {}

    def goes_on(self, running: int) -> bool:
        """Return whether any episode runs, on any process if they share the weights."""
        return (running if self._world is None else self._world.max_passes(running)) > 0

    def act(self, requests: Sequence[TurnRequest]) -> list[TurnOutput]:
        """Return a turn for each request; one without context left gets an end."""
        turns: list[TurnOutput | None] = [None] * len(requests)
        calls: dict[_Call, list[int]] = {}
        for i, request in enumerate(requests):
            free_ids = self._take(request)
            if free_ids < LEAST_ROOM:
                message = f"{self._context} ids: {max(free_ids, 0)} are left"
                turns[i] = TurnOutput(end="context", detail=message)
            else:
                calls.setdefault(self._call(request, free_ids), []).append(i)
        for call in self._all_calls(list(calls)):
            indices = calls.get(call, [])
            completions = self._draw([requests[i] for i in indices], call)
            for i, sampled in zip(indices, completions, strict=True):
                turns[i] = self._note(requests[i], sampled)
        return [turn for turn in turns if turn is not None]

    def finish(self, trajectory_id: str) -> TokenRecord | None:
        """Return the ids of an episode; its rollout is in `ended_episodes` until the next
        `begin`."""
        state = self._states.pop(trajectory_id, None)
        if state is None:
            return None
        self.ended_episodes[trajectory_id] = state.joined
        return state.joined.record()

    def _take(self, request: TurnRequest) -> int:
        """Add the observations since the last turn, if a turn still fits.

        Return the number of ids that are left of the context.
        """
        state = self._states.get(request.trajectory_id)
        if state is None:
            state = _State(EpisodeTokens(self.ids.prompt(request.messages)), len(request.messages))
            self._states[request.trajectory_id] = state
        new_messages = [m for m in request.messages[state.messages :] if m.role != "assistant"]
        observations = [self.ids.observation(message) for message in new_messages]
        free_ids = self._context - len(state.joined.ids) - sum(map(len, observations))
        if free_ids >= LEAST_ROOM:
            for message, ids in zip(new_messages, observations, strict=True):
                state.joined.add_observation(ids)
                state.joined.show(message.images, self.ids.reader)
            state.messages = len(request.messages)
        return free_ids

    def _call(self, request: TurnRequest, free_ids: int) -> _Call:
        defaults = self._gen_cfg
        temperature = defaults.temperature if request.temperature is None else request.temperature
        return _Call(temperature, min(defaults.max_new_tokens, free_ids))

    def _all_calls(self, local_calls: list[_Call]) -> list[_Call]:
        return sorted(set(local_calls if self._world is None else self._world.gather(local_calls)))

    def _draw(self, requests: Sequence[TurnRequest], call: _Call) -> list[SampledCompletion]:
        """Sample a turn for each request, truncated to its tokens left."""
        states = [self._states[request.trajectory_id] for request in requests]
        max_tokens = min(
            call.max_new_tokens, max((request.tokens_left for request in requests), default=1)
        )
        update = {"temperature": call.temperature, "max_new_tokens": max_tokens}
        seed = None if self._seed is None else stream_seed("turns", self._seed, next(self._calls))
        images = [state.joined.images for state in states]
        completions = dict(
            self._sampler.sample(
                [state.joined.ids for state in states],
                self._gen_cfg.model_copy(update=update),
                images=images if self.ids.reader is not None else None,
                seed=seed,
                with_logprobs=self._with_logprobs,
            )
        )
        return [_cut(completions[i][0], request.tokens_left) for i, request in enumerate(requests)]

    def _note(self, request: TurnRequest, sampled: SampledCompletion) -> TurnOutput:
        self._states[request.trajectory_id].joined.add_turn(sampled)
        return TurnOutput(self.ids.text(sampled.token_ids), len(sampled.token_ids))


def _cut(sampled: SampledCompletion, max_tokens: int) -> SampledCompletion:
    logprobs = sampled.logprobs
    return SampledCompletion(
        sampled.token_ids[:max_tokens], None if logprobs is None else logprobs[:max_tokens]
    )


def context_of(model_config: Any, cfg: EpisodeConfig) -> int:
    """Return the max ids that the policy reads. Raises UserError if `cfg` asks for more."""
    max_positions = int(model_config.get_text_config().max_position_embeddings)
    if cfg.context_length is not None and cfg.context_length > max_positions:
        raise UserError(
            f"episode.context_length: {cfg.context_length}, but the policy reads "
            f"{max_positions} ids"
        )
    return cfg.context_length or max_positions


def check_sight(ids: TurnTokenizer, cfg: EpisodeConfig) -> None:
    """Raise UserError if observations are images and the policy reads only text."""
    if cfg.observation == "image" and ids.reader is None:
        raise UserError(
            "episode.observation: it is image, but the policy reads only text. Set text, or use a "
            "policy that reads images."
        )
