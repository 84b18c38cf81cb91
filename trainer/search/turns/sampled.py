"""A policy that learns: its turns are drawn by a sampler of trainer/rl, from ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from scorekit.errors import UserError
from scorekit.seeds import stream_seed
from trainer.rl.config import SamplingConfig
from trainer.rl.sampler import Sampled, Sampler
from trainer.rl.world import World
from trainer.search.records import TokenRecord
from trainer.search.turns.config import EpisodeConfig
from trainer.search.turns.joined import JoinedEpisode, TurnIds
from trainer.search.turns.policies import PolicyTurn, TurnAsked

#: With less room in the context than for an action, a turn is not begun.
LEAST_ROOM = 16


@dataclass(frozen=True, slots=True, order=True)
class _Call:
    """What the turns of one call of the sampler share."""

    temperature: float
    max_new_tokens: int


@dataclass(slots=True)
class _State:
    """joined: the ids so far. messages: that are in them, or were sampled."""

    joined: JoinedEpisode
    messages: int


class SampledPolicy:
    """gen_cfg: how a turn is sampled; its max_new_tokens is one turn's. context: ids that the model
    reads at most. world: of a run whose processes share the weights, so that all of them take the
    same steps. with_logprobs: the sampler's are kept, for training. seed: of all that is drawn,
    until `begin`; None: the random state goes on. ended: what the last batch's episodes are trained
    on, by their ids."""

    def __init__(
        self,
        sampler: Sampler,
        ids: TurnIds,
        gen_cfg: SamplingConfig,
        *,
        name: str,
        context: int,
        world: World | None = None,
        with_logprobs: bool = True,
        seed: int | None = None,
    ) -> None:
        self.name, self.ids = name, ids
        self._sampler, self._context, self._with_logprobs = sampler, context, with_logprobs
        self._gen_cfg = gen_cfg.model_copy(update={"num_samples_per_prompt": 1})
        self._world = world if world is not None and world.is_sharded else None
        self._states: dict[str, _State] = {}
        self.ended: dict[str, JoinedEpisode] = {}
        self.begin(seed)

    def begin(self, seed: int | None) -> None:
        """A batch of episodes: forget those that have ended, draw by this seed from here on."""
        self._seed, self._calls = seed, count()
        self.ended = {}

    def goes_on(self, running: int) -> bool:
        """While any process has one, where they share the weights."""
        return (running if self._world is None else self._world.most(running)) > 0

    def act(self, asked: Sequence[TurnAsked]) -> list[PolicyTurn]:
        """A turn of each that has room for one."""
        turns: list[PolicyTurn | None] = [None] * len(asked)
        calls: dict[_Call, list[int]] = {}
        for i, one in enumerate(asked):
            room = self._take(one)
            if room < LEAST_ROOM:
                told = f"{self._context} ids: {max(room, 0)} are left"
                turns[i] = PolicyTurn(end="context", detail=told)
            else:
                calls.setdefault(self._call(one, room), []).append(i)
        for call in self._all_calls(list(calls)):
            places = calls.get(call, [])
            drawn = self._draw([asked[i] for i in places], call)
            for i, sampled in zip(places, drawn, strict=True):
                turns[i] = self._note(asked[i], sampled)
        return [turn for turn in turns if turn is not None]

    def finish(self, trajectory_id: str) -> TokenRecord | None:
        """Its ids; what is trained on is in `ended` until the next `begin`."""
        state = self._states.pop(trajectory_id, None)
        if state is None:
            return None
        self.ended[trajectory_id] = state.joined
        return state.joined.record()

    def _take(self, one: TurnAsked) -> int:
        """Add what was said to it since its last turn, if that leaves room for another; the ids
        that are left of the context."""
        state = self._states.get(one.trajectory_id)
        if state is None:
            state = _State(JoinedEpisode(self.ids.prompt(one.messages)), len(one.messages))
            self._states[one.trajectory_id] = state
        said = [m for m in one.messages[state.messages :] if m.role != "assistant"]
        heard = [self.ids.observation(message) for message in said]
        room = self._context - len(state.joined.ids) - sum(map(len, heard))
        if room >= LEAST_ROOM:
            for message, ids in zip(said, heard, strict=True):
                state.joined.add_observation(ids)
                state.joined.show(message.images, self.ids.reader)
            state.messages = len(one.messages)
        return room

    def _call(self, one: TurnAsked, room: int) -> _Call:
        own = self._gen_cfg
        temperature = own.temperature if one.temperature is None else one.temperature
        return _Call(temperature, min(own.max_new_tokens, room))

    def _all_calls(self, mine: list[_Call]) -> list[_Call]:
        return sorted(set(mine if self._world is None else self._world.gather(mine)))

    def _draw(self, asked: Sequence[TurnAsked], call: _Call) -> list[Sampled]:
        """What an episode may not write any more is cut off: ids stay those that were sampled."""
        states = [self._states[one.trajectory_id] for one in asked]
        most = min(call.max_new_tokens, max((one.tokens_left for one in asked), default=1))
        update = {"temperature": call.temperature, "max_new_tokens": most}
        seed = None if self._seed is None else stream_seed("turns", self._seed, next(self._calls))
        images = [state.joined.images for state in states]
        drawn = dict(
            self._sampler.sample(
                [state.joined.ids for state in states],
                self._gen_cfg.model_copy(update=update),
                images=images if self.ids.reader is not None else None,
                seed=seed,
                with_logprobs=self._with_logprobs,
            )
        )
        return [_cut(drawn[i][0], one.tokens_left) for i, one in enumerate(asked)]

    def _note(self, one: TurnAsked, sampled: Sampled) -> PolicyTurn:
        self._states[one.trajectory_id].joined.add_turn(sampled)
        return PolicyTurn(self.ids.text(sampled.token_ids), len(sampled.token_ids))


def _cut(sampled: Sampled, most: int) -> Sampled:
    logprobs = sampled.logprobs
    return Sampled(sampled.token_ids[:most], None if logprobs is None else logprobs[:most])


def context_of(model_config: Any, cfg: EpisodeConfig) -> int:
    """Ids that the policy reads at most. Raises UserError where `cfg` asks for more."""
    own = int(model_config.get_text_config().max_position_embeddings)
    if cfg.context_length is not None and cfg.context_length > own:
        raise UserError(
            f"episode.context_length is {cfg.context_length}, but the policy reads {own} ids"
        )
    return cfg.context_length or own


def check_sight(ids: TurnIds, cfg: EpisodeConfig) -> None:
    """Raise UserError where pictures would be shown to a policy that reads text alone."""
    if cfg.observation == "image" and ids.reader is None:
        raise UserError(
            "episode.observation is image, but the policy reads text alone: set text, or take a "
            "policy that sees"
        )
