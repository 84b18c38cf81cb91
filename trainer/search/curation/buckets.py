"""The command `search buckets`: sort questions by the mean of their episodes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Final, Literal

from scorekit.numeric.thresholds import above, below
from trainer.search.curation.config import BucketConfig, CurationConfig
from trainer.search.curation.dataset import CurationResult, Decision, question_row, refs
from trainer.search.curation.pages import Section, curation_page, means_chart
from trainer.search.curation.samples import CuratedPrompt, CuratedRun, mean_of

#: B: mastered. A: partly solved. 0: not solved. unscored: no episode has a value.
Bucket = Literal["B", "A", "0", "unscored"]
BUCKETS: Final[tuple[Bucket, ...]] = ("B", "A", "0", "unscored")
_DOCUMENTS = 60  # max rows of the table
_COMBINED = {
    "all": "all of them",
    "last_step": "those of the last step that scored one",
    "last_run": "those of the last run that scored one",
}


def bucket_of(prompt: CuratedPrompt, cfg: BucketConfig) -> Bucket:
    """Return the bucket: B above `mastered`, 0 below `unsolved`, else A (also at the bounds)."""
    mean = prompt.mean(cfg.combine, cfg.measure)
    if mean is None:
        return "unscored"
    if above(mean, cfg.mastered):
        return "B"
    return "0" if below(mean, cfg.unsolved) else "A"


def make_buckets(
    prompts: Sequence[CuratedPrompt], read: Sequence[CuratedRun], cfg: CurationConfig
) -> CurationResult:
    """Return all questions with their bucket; none is dropped."""
    result = CurationResult("buckets", cfg.buckets, read)
    for prompt in prompts:
        bucket = bucket_of(prompt, cfg.buckets)
        counted = prompt.counted(cfg.buckets.combine, cfg.buckets.measure)
        stats = {
            "bucket": bucket,
            "mean": mean_of(counted, cfg.buckets.measure),
            "scored": len(counted),
            "document": prompt.question.file_name,
            "question_type": prompt.question.question_type,
        }
        result.decisions.append(Decision(prompt.question.id, True, bucket, stats, refs(prompt)))
        result.rows.append(question_row(prompt.question, bucket=bucket))
    return result


def buckets_page(result: CurationResult, prompts: Mapping[str, CuratedPrompt]) -> str:
    """Return report.html: counts, the histogram of the means, and a table of documents."""
    cfg = result.settings
    assert isinstance(cfg, BucketConfig)
    num_by_bucket = Counter(str(decision.stats["bucket"]) for decision in result.decisions)
    words = (
        f"Mean {cfg.measure} of a prompt's episodes ({_COMBINED[cfg.combine]}). B: above "
        f"{cfg.mastered:g}; 0: below {cfg.unsolved:g}; A: between; unscored: no episode has one."
    )
    counts = [[name, num_by_bucket[name]] for name in BUCKETS]
    by_document: dict[str, Counter[str]] = defaultdict(Counter)
    for decision in result.decisions:
        by_document[str(decision.stats["document"])][str(decision.stats["bucket"])] += 1
    documents = [
        [name or "–", bucket_counts.total(), *(bucket_counts[bucket] for bucket in BUCKETS)]
        for name, bucket_counts in sorted(by_document.items(), key=lambda item: -item[1].total())
    ]
    label = f"mean {cfg.measure}"
    chart = means_chart(result.decisions, "mean", label, cfg.unsolved, cfg.mastered)
    more = len(documents) > _DOCUMENTS
    note = [f"The {_DOCUMENTS} of {len(documents)} with the most prompts."] if more else []
    sections = [
        Section("Buckets", [words], ["bucket", "prompts"], counts, [chart]),
        Section("By document", note, ["document", "prompts", *BUCKETS], documents[:_DOCUMENTS]),
    ]
    return curation_page(result, "Buckets", sections, prompts)
