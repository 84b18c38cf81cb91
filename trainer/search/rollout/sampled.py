"""The policy that is trained: a sampler of trainer/rl samples its turns from ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from scorekit.errors import UserError
from scorekit.seeds import stream_seed
from trainer.rl.config import SamplingConfig
from trainer.rl.distributed import DistributedContext
from trainer.rl.engines.generate import GenerateSampler
from trainer.rl.sampler import CompletionFailed, SampledCompletion, SeededPrompt
from trainer.search.config import EpisodeConfig
from trainer.search.records import TokenRecord
from trainer.search.rollout.episode import Policy, TurnOutput, TurnRequest
from trainer.search.rollout.episode_tokens import EpisodeTokens, TurnTokenizer
from trainer.search.rollout.fixed_batches import FixedBatches
from trainer.search.rollout.policies import LONGEST_DETAIL


class TurnSampler(Protocol):
    """The part of a `Sampler` that writes turns."""

    async def complete(
        self, prompt: SeededPrompt, gen_cfg: SamplingConfig, *, with_logprobs: bool
    ) -> SampledCompletion:
        """Return one completion, as `Sampler.complete` says."""


#: Min free ids of the context for a turn: fewer are too few for an action.
LEAST_ROOM = 16


@dataclass(slots=True)
class _State:
    """The state of an episode. joined: the ids so far. messages: how many the ids contain."""

    joined: EpisodeTokens
    messages: int


class SampledPolicy(Policy):
    """The policy that is trained.

    gen_cfg: sampling settings; max_new_tokens is for one turn. context: max ids that the model
    reads. world: of a run whose processes share the weights. with_logprobs: keep the sampler's
    log-probabilities for training. seed: each turn has a random stream of its own, made from this
    seed, the episode's id and the number of the turn; None: a random seed. deterministic: sample in
    fixed batches, if this process samples. ended_episodes: the ids of the finished episodes, by
    trajectory id.
    """

    def __init__(
        self,
        sampler: TurnSampler,
        ids: TurnTokenizer,
        gen_cfg: SamplingConfig,
        *,
        name: str = "policy",
        context: int,
        world: DistributedContext | None = None,
        with_logprobs: bool = True,
        seed: int | None = None,
        deterministic: bool = False,
    ) -> None:
        self.name, self.ids = name, ids
        self._sampler, self._context, self._with_logprobs = sampler, context, with_logprobs
        self._gen_cfg = gen_cfg.model_copy(update={"num_samples_per_prompt": 1})
        self._seed = int(torch.randint(2**62, ())) if seed is None else seed
        self._states: dict[str, _State] = {}
        self.ended_episodes: dict[str, EpisodeTokens] = {}
        sharded_world = world if world is not None and world.is_sharded else None
        self._batches: FixedBatches | None = None
        if isinstance(sampler, GenerateSampler) and (deterministic or sharded_world is not None):
            self._batches = FixedBatches(
                sampler, self._gen_cfg, with_logprobs=with_logprobs, world=sharded_world
            )

    def start(self, trajectory_ids: Sequence[str]) -> None:
        """Prepare for episodes that now run at the same time."""
        if self._batches is not None:
            self._batches.start(trajectory_ids)

    async def turn(self, request: TurnRequest) -> TurnOutput:
        """Return a turn; an end if no context is left, or if the sampler has no completion."""
        free_ids = self._take(request)
        if free_ids < LEAST_ROOM:
            message = f"{self._context} ids: {max(free_ids, 0)} are left"
            return TurnOutput(end="context", detail=message)
        prompt = self._prompt(request, free_ids)
        if self._batches is not None:
            sampled = await self._batches.complete(request.trajectory_id, prompt)
        else:
            try:
                sampled = await self._sampler.complete(
                    prompt, self._gen_cfg, with_logprobs=self._with_logprobs
                )
            except CompletionFailed as error:
                return TurnOutput(end="failed", detail=f"policy: {error}"[:LONGEST_DETAIL])
        self._states[request.trajectory_id].joined.add_turn(sampled)
        return TurnOutput(self.ids.text(sampled.token_ids), len(sampled.token_ids))

    def finish(self, trajectory_id: str) -> TokenRecord | None:
        """Return the ids of an episode; its rollout is in `ended_episodes`."""
        state = self._states.pop(trajectory_id, None)
        if self._batches is not None:
            self._batches.finish(trajectory_id)
        if state is None:
            return None
        self.ended_episodes[trajectory_id] = state.joined
        return state.joined.record()

    def end(self) -> None:
        """Make the passes that other processes still make."""
        if self._batches is not None:
            self._batches.end()

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

    def _prompt(self, request: TurnRequest, free_ids: int) -> SeededPrompt:
        """Return the prompt of a turn, which ends within the tokens and the context that are
        left."""
        defaults, joined = self._gen_cfg, self._states[request.trajectory_id].joined
        return SeededPrompt(
            ids=joined.ids,
            images=list(joined.images),
            temperature=defaults.temperature
            if request.temperature is None
            else request.temperature,
            max_new_tokens=min(defaults.max_new_tokens, free_ids, request.tokens_left),
            seed=stream_seed("turns", self._seed, request.trajectory_id, request.turn),
            affinity=request.trajectory_id,
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
