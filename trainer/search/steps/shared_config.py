"""The config keys that all curation steps share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field, field_validator

from scorekit.config import Config
from scorekit.paid.answers import check_location
from trainer.search.answer.config import SEARCH, AnsweringConfig
from trainer.search.config import RetrieverConfig, SearchData


class SharedConfig(Config):
    """The keys that all curation steps share; `CurationConfig` adds a section of each step."""

    data: SearchData = Field(
        default_factory=SearchData,
        description="data.train: the questions that the runs were given, or were to be given; "
        "without it, those of the last run's config.",
    )
    answering: AnsweringConfig = Field(
        default_factory=AnsweringConfig,
        description="Generator, judge, prices: the keys that are to differ from the last run's.",
    )
    retriever: RetrieverConfig = Field(
        default_factory=RetrieverConfig, description="The same of the pages."
    )
    answers: str | None = Field(
        None,
        description="Answers that were paid for, which commands may share: a SQLite file, or "
        "redis://. null: answers.sqlite beside --out.",
    )

    @field_validator("answers")
    @classmethod
    def _check_answers(cls, location: str | None) -> str | None:
        return check_location(location, SEARCH.password)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
