"""Load the policy to train and select the questions that fit its context. Writes nothing."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scorekit.errors import UserError
from scorekit.retrieval.wire import IndexInfo
from trainer.rl.distributed import DistributedContext
from trainer.rl.policy import stop_token_ids, unwrap_peft
from trainer.runs.checkpoints.resume import prompt_origin
from trainer.runs.config import set_key
from trainer.runs.learner import Learner, load_weights
from trainer.search.config import SearchConfig
from trainer.search.records import Question
from trainer.search.rollout.episode_tokens import TurnTokenizer
from trainer.search.rollout.prompt import opening
from trainer.search.rollout.sampled import LEAST_ROOM, PolicyInputs

log = logging.getLogger(__name__)


@dataclass(slots=True)
class SearchLearner:
    """The policy to train: `learner.train` and `learner.sets` hold questions."""

    learner: Learner
    ids: TurnTokenizer
    context: int


def load_searcher(
    cfg: SearchConfig,
    policy_inputs: PolicyInputs,
    train: Sequence[Question],
    sets: Mapping[str, Sequence[Question]],
    index: IndexInfo,
    world: DistributedContext,
) -> SearchLearner:
    """Load the policy and select its questions. Raises UserError for what the user can fix."""
    learner = load_weights(cfg, world)
    learner.tokenizer, learner.banned_token_ids = (
        policy_inputs.tokenizer,
        policy_inputs.banned_token_ids,
    )
    stops = stop_token_ids(unwrap_peft(learner.model), policy_inputs.tokenizer)
    ids = policy_inputs.ids(cfg, stops)
    learner.origin["retriever.url"] = {"path": cfg.retriever.url, "revision": index.revision}

    def fitting(key: str, path: str | None, questions: Sequence[Question]) -> list[Question]:
        accepted, message = fitting_questions(key, questions, ids, policy_inputs.context, cfg)
        if message and world.is_main:
            log.warning("%s", message)
        learner.origin |= prompt_origin(
            key,
            path,
            ((q.model_dump_json(), ids.prompt(opening(q, cfg.episode))) for q in accepted),
        )
        return accepted

    learner.train = fitting("data.train", cfg.data.train, train)
    for name, questions in sets.items():
        question_set = cfg.data.held_out.get(name)
        learner.sets[name] = fitting(
            set_key(name), question_set.path if question_set else None, questions
        )
    return SearchLearner(learner, ids, policy_inputs.context)


def fitting_questions(
    key: str, questions: Sequence[Question], ids: TurnTokenizer, context: int, cfg: SearchConfig
) -> tuple[list[Question], str | None]:
    """Return the questions that are not too long, and a message about the others.

    key: config key of the questions, for messages. Raises UserError if no question remains, or if
    the config refuses overlong questions.
    """
    max_length = cfg.data.max_prompt_length
    accepted: list[Question] = []
    longest = 0
    for question in questions:
        messages = opening(question, cfg.episode)
        question_ids = ids.tokenizer(messages[-1].text, add_special_tokens=False, verbose=False)[
            "input_ids"
        ]
        longest = max(longest, len(question_ids))
        free_ids = context - len(ids.prompt(messages))
        if (max_length is None or len(question_ids) <= max_length) and free_ids >= LEAST_ROOM:
            accepted.append(question)
    if len(accepted) == len(questions):
        return accepted, None
    limits = f"data.max_prompt_length {max_length}, {context} ids of the policy"
    message = (
        f"{key}: {len(questions) - len(accepted)} of {len(questions)} questions are too long (the "
        f"longest has {longest} tokens; {limits})"
    )
    if not accepted or cfg.data.overlong_prompts == "refuse":
        raise UserError(f"{message}. Raise data.max_prompt_length, or remove them from the data.")
    return accepted, f"{message}: left out"
