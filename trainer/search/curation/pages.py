"""Write report.html of a curation command: settings, counts, tables, charts and examples.

A page is one file without scripts, and it loads nothing; all text in it is escaped.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scorekit.report.page import chart_image, render_html
from trainer.search.curation.dataset import CurationResult, Decision
from trainer.search.curation.samples import CuratedPrompt

_EXAMPLES = 8  # of each reason
_EPISODES = 6  # max ids for a row


@dataclass(frozen=True, slots=True)
class Section:
    """A section of a page. head: titles of the table. images: charts (SVG); None: no data."""

    title: str
    words: Sequence[str] = ()
    head: Sequence[str] = ()
    rows: Sequence[Sequence[Any]] = ()
    images: Sequence[str | None] = ()


def curation_page(
    result: CurationResult,
    title: str,
    sections: Sequence[Section],
    prompts: Mapping[str, CuratedPrompt],
) -> str:
    """Return the page. prompts: id -> prompt, for the examples."""
    return render_html(
        "trainer/search/curation/page.html",
        title=title,
        manifest=result.manifest(),
        sections=sections,
        examples=_examples(result.decisions, prompts),
        cell=as_cell,
        is_number=_is_number,
    )


def means_chart(decisions: Iterable[Decision], key: str, label: str, *bounds: float) -> str | None:
    """Return a histogram of the means that decisions have under a key, with lines at the bounds."""
    means = [value for decision in decisions if (value := decision.stats[key]) is not None]

    def draw(axes: Any) -> int:
        axes.hist(means, bins=[step / 20 for step in range(21)], color="C0")
        for bound in bounds:
            axes.axvline(bound, color="C3", linewidth=1)
        axes.set_ylabel("prompts")
        return 1 if means else 0

    return chart_image(f"prompts by {label}", label, draw)


def as_cell(value: Any) -> str:
    """Return the text of a table cell; `–` for a missing value."""
    if value is None:
        return "–"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {as_cell(item)}" for name, item in value.items()) or "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _examples(
    decisions: Iterable[Decision], prompts: Mapping[str, CuratedPrompt]
) -> list[tuple[str, int, list[dict[str, Any]]]]:
    """Return (reason, count, first examples) of each reason, first of kept rows."""
    counts: Counter[tuple[bool, str]] = Counter()
    examples: dict[tuple[bool, str], list[dict[str, Any]]] = defaultdict(list)
    for decision in decisions:
        key = (not decision.is_kept, decision.reason)
        counts[key] += 1
        if counts[key] <= _EXAMPLES:
            examples[key].append(_example(decision, prompts))
    return [
        (f"{'dropped' if dropped else 'kept'}: {reason}", count, examples[dropped, reason])
        for (dropped, reason), count in sorted(counts.items())
    ]


def _example(decision: Decision, prompts: Mapping[str, CuratedPrompt]) -> dict[str, Any]:
    prompt = prompts.get(str(decision.stats.get("question_id", decision.row_id)))
    question = prompt.question if prompt else None
    more = len(decision.episodes) - _EPISODES
    return {
        "id": decision.row_id,
        "question": question.question if question else "",
        "reference": question.reference_text if question else "",
        "gold": ", ".join(question.gold) if question else "",
        "figures": [
            (name, as_cell(value)) for name, value in decision.stats.items() if value != ""
        ],
        "episodes": ", ".join(decision.episodes[:_EPISODES])
        + (f" and {more} more" if more > 0 else ""),
    }
