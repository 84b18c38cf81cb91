"""The config sections of diagnose, alternatives and hallucinations."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from scorekit.config import Config
from trainer.config_base import may_change
from trainer.search.curation.measures import Combine, Measure
from trainer.search.records import SUCCESS

#: Sources of a right answer without its gold evidence (`hallucinations`).
Kind = Literal[
    "no_search", "undecided", "own_knowledge", "partial", "same_document", "same_data", "luck"
]


class DiagnoseConfig(Config):
    """The rules for why a prompt scores low; docs/curation.md has their order."""

    measure: Measure = Field("judge", description="Mean over a prompt's episodes.")
    combine: Combine = Field("all", description="Which episodes count, as of `buckets`.")
    low: float = Field(0.5, description="A prompt is looked into whose mean is below this.")
    right: float = Field(SUCCESS, description="An answer is right from this judge's score on.")
    found: float = Field(
        0.0, ge=0, lt=1, description="NDCG against judge: found is an NDCG above this."
    )
    agree_least: int = Field(
        2, ge=2, description="Suspected reference: answers from the gold pages, at least."
    )
    agree_share: float = Field(
        0.6, gt=0, le=1, description="Of them, the share that says one and the same other thing."
    )
    invalid_share: float = Field(
        0.5, gt=0, le=1, description="`invalid`: malformed turns among an episode's own, at least."
    )
    early_searches: int = Field(
        1, ge=0, description="`ended_early`: the policy ended by itself after so many searches."
    )
    examples: int = Field(8, ge=0, description="Episodes of each corner on the page.")


class AlternativesConfig(Config):
    """Pages that carry the same fact as a gold page: proposed, then confirmed by the generator."""

    pool: int = Field(
        100, ge=1, le=1000, description="Hits of each search from which pages are proposed."
    )
    most: int = Field(
        5, ge=1, description="Pages proposed for a question by text overlap; as many by embedding."
    )
    least_overlap: float = Field(
        0.1, ge=0, le=1, description="Text overlap of a page that is proposed, at least."
    )
    embeddings_url: str | None = may_change(
        None, description="An embedding server, with or without /v1; null: text overlap alone."
    )
    embeddings_model: str | None = Field(
        None, description="Its model; null: the only one that the server has."
    )
    embeddings_chars: int = Field(2000, ge=1, description="Of a page's text, so much is embedded.")
    least_cosine: float = Field(
        0.3, ge=-1, le=1, description="Cosine of a page that is proposed by embedding, at least."
    )
    times: int = Field(1, ge=1, description="Answers that are asked for from each page.")
    right: float = Field(SUCCESS, description="An answer is right from this judge's score on.")
    share: float = Field(
        1.0, gt=0, le=1, description="Of them, so many must be right for a page to be confirmed."
    )
    control: bool = Field(
        True,
        description="Ask without the page, too: what is answered right all the same confirms "
        "nothing.",
    )


class HallucinationsConfig(Config):
    """The rules for right answers without gold evidence; docs/curation.md has their order."""

    right: float = Field(SUCCESS, description="An answer is right from this judge's score on.")
    times: int = Field(1, ge=1, description="Answers that are asked for, of each kind.")
    share: float = Field(
        0.5, gt=0, le=1, description="Of them, so many right say that it was no accident."
    )
    drop: tuple[Kind, ...] = Field(
        ("own_knowledge",), description="Prompts of these classes are dropped."
    )
