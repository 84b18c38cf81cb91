"""The config of the curation commands, with a description of each key."""

from __future__ import annotations

from pydantic import Field, field_validator, model_validator

from scorekit.config import Config
from scorekit.paid.answers import check_location
from trainer.search.answer.config import SEARCH, AnsweringConfig
from trainer.search.config import RetrieverConfig
from trainer.search.config_data import SearchData
from trainer.search.curation.config_sections import (
    AlternativesConfig,
    Combine,
    DiagnoseConfig,
    DistillConfig,
    HallucinationsConfig,
    Measure,
    RewriteConfig,
    Rule,
    VerifyConfig,
)


class BucketConfig(Config):
    """The bounds of the buckets: B mastered, A partly solved, 0 not solved, unscored."""

    measure: Measure = Field("ndcg", description="Mean over a prompt's episodes.")
    mastered: float = Field(0.7, description="Bucket B: a mean above this.")
    unsolved: float = Field(0.1, description="Bucket 0: a mean below this; A: between.")
    combine: Combine = Field(
        "all",
        description="A prompt that was searched for in several steps or runs: all: its mean is "
        "over every episode; last_step: of the last step that scored one; last_run: of the last "
        "run given that did.",
    )

    @model_validator(mode="after")
    def _in_order(self) -> BucketConfig:
        if self.unsolved > self.mastered:
            raise ValueError("unsolved is above mastered: no prompt would be in bucket A")
        return self


class FocusConfig(Config):
    """The rules that select the questions of the next round."""

    take: list[Rule] = Field(
        default=["hard_a", "bucket_0"],
        min_length=1,
        description="A row is taken by the first of these rules that it fits. hard_a: in bucket A, "
        "and low; bucket_0; last_round: low in the last run given; unscored: no episode has a "
        "score; all: every row (of --rows). The first round is [hard_a, bucket_0], a later one "
        "[last_round]; [all] plays the rows of an earlier `focus` again, without those that were "
        "condemned since.",
    )
    measure: Measure = Field("reward", description="What low is said of.")
    combine: Combine = Field("last_run", description="hard_a: of which episodes, as in `buckets`.")
    hard_a: float = Field(0.2, description="A row of bucket A is low with a mean of at most this.")
    last_round: float = Field(
        0.3, description="A row of the last run is low with a mean there of at most this."
    )


class BudgetConfig(Config):
    """The number of turns and episodes of a row, from its earlier episodes; none if mastered
    (bucket B of `buckets`). The defaults are those of configs/search/focused_r1.yaml and
    focused_r2.yaml."""

    measure: Measure = Field("judge", description="By what an episode succeeds.")
    combine: Combine = Field("last_run", description="Which episodes, as in `buckets`.")
    success: float = Field(0.5, description="An episode of at least this succeeded.")
    max_turns: int = Field(7, ge=1, description="Turns of a row.")
    deep_rank: int = Field(
        3,
        ge=1,
        description="The gold is deep where at least half of the episodes that searched had it at "
        "a worse place than this among the hits, or not at all.",
    )
    deep_turns: int = Field(15, ge=1, description="Turns of a row whose gold is deep.")
    n_agent: int = Field(8, ge=1, description="Episodes of a row.")
    rare: float = Field(
        0.5, description="Success is rare where a share of at most this succeeded, but not none."
    )
    rare_agents: int = Field(16, ge=1, description="Episodes of a row whose success is rare.")


class CurationConfig(Config):
    """The config of all curation commands; each also has its own section."""

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
    buckets: BucketConfig = Field(default_factory=BucketConfig, description="`buckets`.")
    diagnose: DiagnoseConfig = Field(default_factory=DiagnoseConfig, description="`diagnose`.")
    verify: VerifyConfig = Field(default_factory=VerifyConfig, description="`verify`.")
    focus: FocusConfig = Field(default_factory=FocusConfig, description="`focus`.")
    budget: BudgetConfig = Field(default_factory=BudgetConfig, description="`budget`.")
    distill: DistillConfig = Field(default_factory=DistillConfig, description="`distill`.")
    rewrite: RewriteConfig = Field(default_factory=RewriteConfig, description="`rewrite`.")
    alternatives: AlternativesConfig = Field(
        default_factory=AlternativesConfig, description="`alternatives`."
    )
    hallucinations: HallucinationsConfig = Field(
        default_factory=HallucinationsConfig, description="`hallucinations`."
    )

    @field_validator("answers")
    @classmethod
    def _check_answers(cls, location: str | None) -> str | None:
        return check_location(location, SEARCH.password)
