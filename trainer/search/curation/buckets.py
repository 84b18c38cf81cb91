"""`search buckets`: how well each prompt goes already, from its episodes' mean."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal

from scorekit.numeric.thresholds import above, below
from scorekit.report.page import picture
from trainer.search.curation.config import BucketConfig, CurationConfig
from trainer.search.curation.dataset import Curated, Decision, question_row, refs
from trainer.search.curation.pages import Section, curation_page
from trainer.search.curation.samples import CuratedPrompt, CuratedRun, mean_of

#: B: mastered. A: at the edge of what it can. 0: not solved. unscored: no episode has a value.
Bucket = Literal["B", "A", "0", "unscored"]
BUCKETS: Final[tuple[Bucket, ...]] = ("B", "A", "0", "unscored")
_DOCUMENTS = 60  # in a table
_COMBINED = {
    "all": "all of them",
    "last_step": "those of the last step that scored one",
    "last_run": "those of the last run that scored one",
}


def bucket_of(prompt: CuratedPrompt, cfg: BucketConfig) -> Bucket:
    """A mean on a border is A's: B is above `mastered`, 0 below `unsolved`."""
    mean = prompt.mean(cfg.combine, cfg.measure)
    if mean is None:
        return "unscored"
    if above(mean, cfg.mastered):
        return "B"
    return "0" if below(mean, cfg.unsolved) else "A"


def make_buckets(
    prompts: Sequence[CuratedPrompt], read: Sequence[CuratedRun], cfg: CurationConfig
) -> Curated:
    """All prompts of the data with their bucket; none is dropped."""
    made = Curated("buckets", cfg.buckets, read)
    for prompt in prompts:
        bucket = bucket_of(prompt, cfg.buckets)
        counted = prompt.counted(cfg.buckets.combine, cfg.buckets.measure)
        figures = {
            "bucket": bucket,
            "mean": mean_of(counted, cfg.buckets.measure),
            "scored": len(counted),
            "document": prompt.question.file_name,
            "question_type": prompt.question.question_type,
        }
        made.decisions.append(Decision(prompt.question.id, True, bucket, figures, refs(prompt)))
        made.rows.append(question_row(prompt.question, bucket=bucket))
    return made


def buckets_page(made: Curated, prompts: Mapping[str, CuratedPrompt]) -> str:
    """report.html: how many, the histogram of the means, and each document."""
    cfg = made.settings
    assert isinstance(cfg, BucketConfig)
    of = Counter(str(one.figures["bucket"]) for one in made.decisions)
    means = [one.figures["mean"] for one in made.decisions if one.figures["mean"] is not None]
    words = (
        f"Mean {cfg.measure} of a prompt's episodes ({_COMBINED[cfg.combine]}). B: above "
        f"{cfg.mastered:g}; 0: below {cfg.unsolved:g}; A: between; unscored: no episode has one."
    )
    counts = [[name, of[name]] for name in BUCKETS]
    by_document: dict[str, Counter[str]] = defaultdict(Counter)
    for one in made.decisions:
        by_document[str(one.figures["document"])][str(one.figures["bucket"])] += 1
    documents = [
        [name or "–", found.total(), *(found[of] for of in BUCKETS)]
        for name, found in sorted(by_document.items(), key=lambda of: -of[1].total())
    ]
    label = f"mean {cfg.measure}"
    drawn = picture(f"prompts by {label}", label, partial(_bars, means, cfg))
    sections = [
        Section("Buckets", [words], ["bucket", "prompts"], counts, [drawn]),
        Section(
            "By document",
            _shown(len(documents)),
            ["document", "prompts", *BUCKETS],
            documents[:_DOCUMENTS],
        ),
    ]
    return curation_page(made, "Buckets", sections, prompts)


def _shown(documents: int) -> list[str]:
    more = documents > _DOCUMENTS
    return [f"The {_DOCUMENTS} of {documents} with the most prompts."] if more else []


def _bars(means: Sequence[float], cfg: BucketConfig, axes: Any) -> int:
    axes.hist(means, bins=[place / 20 for place in range(21)], color="C0")
    for border in (cfg.unsolved, cfg.mastered):
        axes.axvline(border, color="C3", linewidth=1)
    axes.set_ylabel("prompts")
    return 1 if means else 0
