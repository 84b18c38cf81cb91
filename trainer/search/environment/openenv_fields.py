"""Read resets and write observations for the OpenEnv server, without the package openenv."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from scorekit.config import describe_validation_error
from scorekit.errors import UserError
from trainer.search.config import SearchConfig, SearchData
from trainer.search.data import question_from_row
from trainer.search.environment.observation import Observation
from trainer.search.records import Question
from trainer.search.rollout.prompt import chat_messages


class ResetOptions(BaseModel):
    """The fields of a reset: at most one of `question`, `index` and `id`."""

    model_config = ConfigDict(extra="forbid", strict=True)
    seed: int | None = None
    episode_id: str | None = Field(None, max_length=255)
    question: dict[str, Any] | None = None
    index: int | None = Field(None, ge=0)
    id: str | None = None


class QuestionChoice:
    """The questions that a reset may choose.

    questions: of `data.train`.
    data: names the columns of a row that a reset brings.
    """

    def __init__(self, questions: Sequence[Question], data: SearchData) -> None:
        self._questions, self._data = questions, data
        self._by_id = {question.id: question for question in questions}

    def choose(self, values: Mapping[str, Any]) -> Question:
        """Return the question of a reset; `seed` chooses one if nothing else does.

        Raises UserError, which says what is wrong.
        """
        try:
            options = ResetOptions.model_validate(values)
        except ValidationError as error:
            raise UserError(f"reset: {describe_validation_error(error, 'reset')}") from None
        choices = [
            name for name in ("question", "index", "id") if getattr(options, name) is not None
        ]
        if len(choices) > 1:
            raise UserError(
                f"reset: {choices[0]} and {choices[1]} both choose a question. Give one"
            )
        if options.question is not None:
            return question_from_row(options.question, self._data)
        num_questions = len(self._questions)
        if not num_questions:
            raise UserError("reset: this server has no data.train. Give a question")
        if options.id is not None and options.id not in self._by_id:
            raise UserError(f"reset: no question of data.train has the id {options.id[:80]!r}")
        if options.id is not None:
            return self._by_id[options.id]
        index = options.index
        if index is None:
            index = random.Random(options.seed).randrange(num_questions)
        if index >= num_questions:
            raise UserError(f"reset: index {index}: data.train has {num_questions} questions")
        return self._questions[index]


def longest_turn_s(cfg: SearchConfig) -> float:
    """Return the seconds that a turn may take by the deadlines of a config.

    A turn searches, gets the image and the text of each page that it shows, and waits for the
    reward if the episode ends with it.
    """
    num_requests = 1 + 2 * cfg.episode.pages_per_search
    return num_requests * cfg.retriever.deadline_s + cfg.rollout.deadline_s


def observation_fields(observation: Observation) -> dict[str, Any]:
    """Return the fields of a `SearchObservation`. The reward of an unscored episode is None."""
    fields = {"messages": chat_messages(observation.messages), "done": observation.done}
    return fields if observation.result is None else fields | observation.result.fields()
