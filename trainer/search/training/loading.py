"""Loads the policy that learns, and looks which questions fit it. Writes nothing."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scorekit.errors import UserError
from scorekit.retrieval.wire import IndexInfo
from trainer.rl.policy import stop_token_ids, without_wrappers
from trainer.rl.sampler import Sampler
from trainer.rl.world import World
from trainer.runs.checkpoints.resume import prompt_origin
from trainer.runs.config import set_key
from trainer.runs.learner import Learner, load_weights
from trainer.search.config import SearchConfig
from trainer.search.local import Reads
from trainer.search.records import Question
from trainer.search.turns.config import TurnSamplingConfig
from trainer.search.turns.joined import TurnIds
from trainer.search.turns.prompt import opening
from trainer.search.turns.sampled import LEAST_ROOM, SampledPolicy

log = logging.getLogger(__name__)


@dataclass(slots=True)
class SearchLearner:
    """A policy that learns to search: `learner.train` and `learner.sets` hold questions."""

    learner: Learner
    ids: TurnIds
    context: int

    def policy(
        self,
        sampler: Sampler,
        gen_cfg: TurnSamplingConfig,
        world: World,
        *,
        seed: int,
        with_logprobs: bool,
    ) -> SampledPolicy:
        """It as it takes turns, for one batch of episodes."""
        return SampledPolicy(
            sampler,
            self.ids,
            gen_cfg,
            name="policy",
            context=self.context,
            world=world,
            with_logprobs=with_logprobs,
            seed=seed,
        )


def load_searcher(
    cfg: SearchConfig,
    reads: Reads,
    train: Sequence[Question],
    sets: Mapping[str, Sequence[Question]],
    index: IndexInfo,
    world: World,
) -> SearchLearner:
    """Raises UserError on whatever the user can mend."""
    learner = load_weights(cfg, world)
    learner.tokenizer, learner.never = reads.tokenizer, reads.never
    ids = reads.ids(cfg, stop_token_ids(without_wrappers(learner.model), reads.tokenizer))
    learner.origin["retriever.url"] = {"path": cfg.retriever.url, "revision": index.revision}

    def fitting(key: str, path: str | None, questions: Sequence[Question]) -> list[Question]:
        kept, told = fitting_questions(key, questions, ids, reads.context, cfg)
        if told and world.is_main:
            log.warning("%s", told)
        learner.origin |= prompt_origin(
            key, path, ((q.model_dump_json(), ids.prompt(opening(q, cfg.episode))) for q in kept)
        )
        return kept

    learner.train = fitting("data.train", cfg.data.train, train)
    for name, questions in sets.items():
        of = cfg.data.held_out.get(name)
        learner.sets[name] = fitting(set_key(name), of.path if of else None, questions)
    return SearchLearner(learner, ids, reads.context)


def fitting_questions(
    key: str, questions: Sequence[Question], ids: TurnIds, context: int, cfg: SearchConfig
) -> tuple[list[Question], str | None]:
    """The questions that are not too long, and what is to be told of the others. key: of the
    config, for messages. Raises UserError where none is left, or the config says so."""
    most = cfg.data.max_prompt_length
    kept: list[Question] = []
    longest = 0
    for question in questions:
        messages = opening(question, cfg.episode)
        own = ids.tokenizer(messages[-1].text, add_special_tokens=False, verbose=False)["input_ids"]
        longest = max(longest, len(own))
        room = context - len(ids.prompt(messages))
        if (most is None or len(own) <= most) and room >= LEAST_ROOM:
            kept.append(question)
    if len(kept) == len(questions):
        return kept, None
    limits = f"data.max_prompt_length {most}, {context} ids of the policy"
    told = (
        f"{key}: {len(questions) - len(kept)} of {len(questions)} questions are too long (the "
        f"longest has {longest} tokens; {limits})"
    )
    if not kept or cfg.data.overlong_prompts == "refuse":
        raise UserError(f"{told}: raise data.max_prompt_length, or take them out of the data")
    return kept, f"{told}: left out"
