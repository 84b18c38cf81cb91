"""report.html of a curation command: what was asked, what became of the rows, tables, pictures, and
examples of each reason.

A page is one file, with no script and nothing fetched from elsewhere; every text in it is escaped.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape
from markupsafe import Markup

from scorekit.report.page import STYLE
from scorekit.report.render import visible
from trainer.search.curation.dataset import Curated, Decision
from trainer.search.curation.samples import CuratedPrompt

_EXAMPLES = 8  # of each reason
_EPISODES = 6  # named of one row


@dataclass(frozen=True, slots=True)
class Section:
    """A heading with what stands under it. head: of the table; numbers stand to the right.
    pictures: SVG; None: nothing was to be drawn."""

    title: str
    words: Sequence[str] = ()
    head: Sequence[str] = ()
    rows: Sequence[Sequence[Any]] = ()
    pictures: Sequence[str | None] = ()


def curation_page(
    made: Curated, title: str, sections: Sequence[Section], prompts: Mapping[str, CuratedPrompt]
) -> str:
    """The page. prompts: id -> prompt, for the examples' words."""
    env = Environment(
        loader=PackageLoader("trainer.search.curation", "."),
        autoescape=select_autoescape(default=True),
        trim_blocks=True,
    )
    env.filters["visible"] = visible
    manifest = made.manifest()
    return env.get_template("page.html").render(
        style=Markup(STYLE),
        title=title,
        manifest=manifest,
        sections=[
            (of, [Markup(drawn) for drawn in of.pictures if drawn is not None]) for of in sections
        ],
        examples=_examples(made.decisions, prompts),
        cell=as_cell,
        is_number=_is_number,
    )


def as_cell(value: Any) -> str:
    """A number or word of a table; `–` for what is not there."""
    if value is None:
        return "–"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {as_cell(of)}" for name, of in value.items()) or "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _examples(
    decisions: Iterable[Decision], prompts: Mapping[str, CuratedPrompt]
) -> list[tuple[str, int, list[dict[str, Any]]]]:
    """(reason, rows, the first few) of each reason, those kept first."""
    counts: Counter[tuple[bool, str]] = Counter()
    shown: dict[tuple[bool, str], list[dict[str, Any]]] = defaultdict(list)
    for one in decisions:
        of = (not one.kept, one.reason)
        counts[of] += 1
        if counts[of] <= _EXAMPLES:
            shown[of].append(_example(one, prompts))
    return [
        (f"{'dropped' if dropped else 'kept'}: {reason}", count, shown[dropped, reason])
        for (dropped, reason), count in sorted(counts.items())
    ]


def _example(one: Decision, prompts: Mapping[str, CuratedPrompt]) -> dict[str, Any]:
    prompt = prompts.get(str(one.figures.get("question_id", one.row_id)))
    question = prompt.question if prompt else None
    more = len(one.episodes) - _EPISODES
    return {
        "id": one.row_id,
        "question": question.question if question else "",
        "reference": question.reference_answer if question else "",
        "gold": ", ".join(question.gold) if question else "",
        "figures": [(name, as_cell(value)) for name, value in one.figures.items() if value != ""],
        "episodes": ", ".join(one.episodes[:_EPISODES]) + (f" and {more} more" if more > 0 else ""),
    }
