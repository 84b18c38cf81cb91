"""A policy of this process: a sampler of trainer/rl samples its turns from ids.

It is the policy that is trained. `FixedBatches` samples the turns of all episodes together, which
is the deterministic mode. `inspect_policy` checks its files before weights are loaded, and
`local_policy` loads one that is not trained.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from scorekit.errors import UserError
from scorekit.seeds import stream_seed
from trainer.chat.render import end_ids, load_generation_config, use_template
from trainer.rl.config import SamplingConfig
from trainer.rl.devices import prepare_torch
from trainer.rl.distributed import DistributedContext
from trainer.rl.engines.generate import GenerateSampler
from trainer.rl.policy import load_policy, load_tokenizer, read_config, stop_token_ids, unwrap_peft
from trainer.rl.sampler import CompletionFailed, SampledCompletion, SeededPrompt
from trainer.search.config import EpisodeConfig, SearchConfig
from trainer.search.images.processor import ImageProcessor, load_reader
from trainer.search.records import TokenRecord
from trainer.search.rollout.episode import Policy, TurnOutput, TurnRequest
from trainer.search.rollout.episode_tokens import EpisodeTokens, TurnTokenizer
from trainer.search.rollout.policies import LONGEST_DETAIL

log = logging.getLogger(__name__)
#: Min free ids of the context for a turn: fewer are too few for an action.
LEAST_ROOM = 16


class FixedBatches:
    """The turns of all running episodes of one process, sampled together.

    So batches do not depend on time: this is the deterministic mode. An episode waits before each
    turn until every running episode of the process waits, too. Then all turns are sampled in the
    order of the episodes. With weights that the processes share (FSDP) this is the only mode, since
    all of them must make the same passes.

    world: of processes that share the weights: all of them make the same calls; None: this process
    alone. Use it in one event loop.
    """

    def __init__(
        self,
        sampler: GenerateSampler,
        gen_cfg: SamplingConfig,
        *,
        with_logprobs: bool,
        world: DistributedContext | None,
    ) -> None:
        self._sampler, self._gen_cfg = sampler, gen_cfg
        self._with_logprobs, self._world = with_logprobs, world
        self._running: dict[str, None] = {}  # in the order of `start`
        self._waiting: dict[str, tuple[SeededPrompt, asyncio.Future[SampledCompletion]]] = {}

    def start(self, trajectory_ids: Sequence[str]) -> None:
        """Wait for these episodes from now on."""
        self._running = dict.fromkeys(trajectory_ids)
        self._waiting = {}

    async def complete(self, trajectory_id: str, prompt: SeededPrompt) -> SampledCompletion:
        """Return the completion of an episode's turn when all running episodes wait for theirs."""
        turn: asyncio.Future[SampledCompletion] = asyncio.get_running_loop().create_future()
        self._waiting[trajectory_id] = prompt, turn
        self._sample_if_all_wait()
        return await turn

    def finish(self, trajectory_id: str) -> None:
        """Do not wait for this episode any more; its caller goes on before the next batch."""
        self._running.pop(trajectory_id, None)
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._sample_if_all_wait)

    def end(self) -> None:
        """Make the calls that other processes still make, without turns of this process."""
        while self._world is not None and self._world.max_passes(0):
            self._sampler.complete_turns([], self._gen_cfg, with_logprobs=self._with_logprobs)

    def _sample_if_all_wait(self) -> None:
        if not self._waiting or len(self._waiting) < len(self._running):
            return
        waiting = [self._waiting.pop(id) for id in self._running]
        try:
            if self._world is not None:
                self._world.max_passes(len(waiting))
            completions = self._sampler.complete_turns(
                [prompt for prompt, _ in waiting], self._gen_cfg, with_logprobs=self._with_logprobs
            )
        except Exception as error:  # for those who wait: `finish` has no caller any more
            for _, turn in waiting:
                if not turn.done():
                    turn.set_exception(error)
            return
        for (_, turn), completion in zip(waiting, completions, strict=True):
            if not turn.done():
                turn.set_result(completion)


class TurnSampler(Protocol):
    """The part of a `Sampler` that writes turns."""

    async def complete(
        self, prompt: SeededPrompt, gen_cfg: SamplingConfig, *, with_logprobs: bool
    ) -> SampledCompletion:
        """Return one completion, as `Sampler.complete` says."""


@dataclass(slots=True)
class _State:
    """The state of an episode.

    joined: the ids so far.
    messages: how many messages the ids contain.
    """

    joined: EpisodeTokens
    messages: int


class SampledPolicy(Policy):
    """The policy that is trained.

    gen_cfg: sampling settings; max_new_tokens is for one turn.
    context: max ids that the model reads.
    world: of a run whose processes share the weights.
    with_logprobs: keep the sampler's log-probabilities for training.
    seed: each turn has a random stream of its own, made from this seed, the episode's id and the
        number of the turn; None: a random seed.
    deterministic: sample the turns of all episodes together, if this process samples.
    ended_episodes: the ids of the finished episodes, by trajectory id.
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
        if isinstance(self._sampler, GenerateSampler):
            self._sampler.forget(trajectory_id)
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


@dataclass(frozen=True, slots=True)
class PolicyInputs:
    """The inputs that a policy reads, and its limits.

    tokenizer: with the run's chat template.
    reader: processor of images; None if the policy gets none.
    banned_token_ids: ids that must not be sampled.
    context: max ids that it reads.
    stops: ids at which its turns end, from its files.
    """

    tokenizer: Any
    reader: ImageProcessor | None
    banned_token_ids: Sequence[int]
    context: int
    stops: Sequence[int]

    def ids(self, cfg: SearchConfig, stops: Sequence[int]) -> TurnTokenizer:
        """Return the tokenizer of turns. Raises UserError if turns cannot be joined."""
        return TurnTokenizer(self.tokenizer, cfg.chat, self.reader, stops)


def inspect_policy(cfg: SearchConfig) -> PolicyInputs:
    """Read and check the files of `policy.path` except the weights.

    Raises UserError for all that does not match the config.
    """
    path = str(cfg.policy.path)
    tokenizer = use_template(load_tokenizer(cfg.policy), cfg.chat)
    model_config = read_config(path, cfg.policy.revision, "policy.path")
    reader = load_reader(path, model_config, cfg.episode.sight, cfg.policy.revision)
    banned_token_ids = reader.banned_token_ids if reader is not None else ()
    if cfg.episode.observation == "text":
        reader = None
    settings = load_generation_config(path, cfg.policy.revision)
    stops = sorted({tokenizer.eos_token_id, *end_ids(tokenizer, settings)} - {None})
    policy_inputs = PolicyInputs(
        tokenizer, reader, banned_token_ids, context_of(model_config, cfg.episode), stops
    )
    check_sight(policy_inputs.ids(cfg, stops), cfg.episode)
    return policy_inputs


def local_policy(cfg: SearchConfig) -> SampledPolicy:
    """Load `policy.path`. Raises UserError."""
    if cfg.generation.engine != "generate":
        raise UserError(
            "generation.engine: this command samples in its own process. Set generate, or name a "
            "server in server.url (--policy URL)."
        )
    policy_inputs = inspect_policy(cfg)
    model, tokenizer = load_policy(cfg.policy, prepare_torch(cfg.misc.device, cfg.misc.threads))
    ids = policy_inputs.ids(cfg, stop_token_ids(unwrap_peft(model), tokenizer))
    if note := ids.serving_note():
        log.warning("%s", note)
    return SampledPolicy(
        GenerateSampler(model, tokenizer, banned_token_ids=policy_inputs.banned_token_ids),
        ids,
        cfg.generation,
        name=str(cfg.policy.path),
        context=policy_inputs.context,
        with_logprobs=False,
        seed=cfg.misc.seed,
        deterministic=cfg.rollout.deterministic,
    )
