"""The step `buckets`: sort questions by the mean of their episodes."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any, Final, Literal

from pydantic import Field, model_validator

from scorekit.config import Config
from scorekit.numeric import above, below
from trainer.search.data import question_row
from trainer.search.steps.episodes import (
    Combine,
    CuratedPrompt,
    Measure,
    mean_of,
    refs,
)
from trainer.search.steps.output import means_chart
from trainer.search.steps.step import Decision, Outcome, Section, Step, Work

#: B: mastered. A: partly solved. 0: not solved. unscored: no episode has a value.
Bucket = Literal["B", "A", "0", "unscored"]
BUCKETS: Final[tuple[Bucket, ...]] = ("B", "A", "0", "unscored")


_DOCUMENTS = 60  # max rows of the table


_COMBINED = {
    "all": "all of them",
    "last_step": "those of the last step that scored one",
    "last_run": "those of the last run that scored one",
}


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


def bucket_of(prompt: CuratedPrompt, cfg: BucketConfig) -> Bucket:
    """Return the bucket: B above `mastered`, 0 below `unsolved`, else A (also at the bounds)."""
    mean = prompt.mean(cfg.combine, cfg.measure)
    if mean is None:
        return "unscored"
    if above(mean, cfg.mastered):
        return "B"
    return "0" if below(mean, cfg.unsolved) else "A"


class Buckets(Step[BucketConfig]):
    """Sort questions: B mastered, A partly solved, 0 unsolved, or unscored."""

    name = "buckets"
    title = "Buckets"
    config = BucketConfig
    options = ("run", "out", "config", "set_", "overwrite")
    moves = ("buckets",)

    def decide_one(self, prompt: CuratedPrompt, work: Work[BucketConfig], answer: Any) -> Decision:
        """Return the decision about a question, which is kept, with its bucket."""
        question, cfg = prompt.question, work.settings
        bucket = bucket_of(prompt, cfg)
        counted = prompt.counted_episodes(cfg.combine, cfg.measure)
        stats = {
            "bucket": bucket,
            "mean": mean_of(counted, cfg.measure),
            "scored": len(counted),
            "document": question.file_name,
            "question_type": question.question_type,
        }
        row = question_row(question, bucket=bucket)
        return Decision(question.id, True, bucket, stats, refs(prompt), row)

    def sections(self, work: Work[BucketConfig], outcome: Outcome) -> list[Section]:
        """Return counts, the histogram of the means, and a table of documents."""
        cfg = work.settings
        num_by_bucket = Counter(str(decision.stats["bucket"]) for decision in outcome.decisions)
        words = (
            f"Mean {cfg.measure} of a prompt's episodes ({_COMBINED[cfg.combine]}). B: above "
            f"{cfg.mastered:g}; 0: below {cfg.unsolved:g}; A: between; unscored: no episode "
            "has one."
        )
        counts = [[name, num_by_bucket[name]] for name in BUCKETS]
        by_document: dict[str, Counter[str]] = defaultdict(Counter)
        for decision in outcome.decisions:
            by_document[str(decision.stats["document"])][str(decision.stats["bucket"])] += 1
        documents = [
            [name or "–", bucket_counts.total(), *(bucket_counts[bucket] for bucket in BUCKETS)]
            for name, bucket_counts in sorted(
                by_document.items(), key=lambda item: -item[1].total()
            )
        ]
        label = f"mean {cfg.measure}"
        chart = means_chart(outcome.decisions, "mean", label, cfg.unsolved, cfg.mastered)
        more = len(documents) > _DOCUMENTS
        note = [f"The {_DOCUMENTS} of {len(documents)} with the most prompts."] if more else []
        return [
            Section("Buckets", [words], ["bucket", "prompts"], counts, [chart]),
            Section("By document", note, ["document", "prompts", *BUCKETS], documents[:_DOCUMENTS]),
        ]
