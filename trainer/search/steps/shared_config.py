"""The config keys that all curation steps share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from scorekit.config import Config
from trainer.search.answer.config import AnsweringConfig
from trainer.search.config import RetrieverConfig
from trainer.search.config_data import SearchData


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
        description="File of answers that were paid for (SQLite), which commands may share. null: "
        "answers.sqlite beside --out.",
    )

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
