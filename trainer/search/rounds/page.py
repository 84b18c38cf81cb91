"""rounds.html: all rounds of a loop on one page.

One file, with no script and nothing fetched from elsewhere; every text in it is escaped.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape
from markupsafe import Markup

from scorekit.files import write_atomic
from scorekit.report.page import STYLE, picture
from scorekit.report.render import visible
from trainer.search.curation.pages import as_cell
from trainer.search.rounds.plan import LoopPlan
from trainer.search.rounds.told import SHOWN, RoundTold, figures_shown, rounds_table, told

PAGE = "rounds.html"


def rounds_of(plan: LoopPlan) -> list[RoundTold]:
    """All of them, begun or not."""
    return [told(of, plan.folder(of), plan.training(of).reward) for of in plan.cfg.rounds]


def write_page(plan: LoopPlan) -> Path:
    """Write the page of what there is so far; its path."""
    rounds = rounds_of(plan)
    head, lines = rounds_table(plan.cfg, rounds)
    env = Environment(
        loader=PackageLoader("trainer.search.rounds", "."),
        autoescape=select_autoescape(default=True),
        trim_blocks=True,
    )
    env.filters["visible"] = visible
    text = env.get_template("page.html").render(
        style=Markup(STYLE),
        head=head,
        lines=lines,
        pictures=[Markup(drawn) for drawn in _pictures(rounds)],
        rounds=[(of, _pages(of, plan.out)) for of in rounds],
        shown=SHOWN,
        cell=as_cell,
    )
    path = plan.out / PAGE
    write_atomic(path, text)
    return path


def _pages(of: RoundTold, out: Path) -> dict[str, str]:
    """step -> its report, from the page."""
    found = {}
    for step in of.steps:
        path = of.folder / step / "report.html"
        if path.is_file():
            found[step] = os.path.relpath(path, out)
    return found


def _pictures(rounds: Sequence[RoundTold]) -> list[str]:
    """The held-out figures, and the rows that each round has kept."""
    sets = dict.fromkeys(name for of in rounds for name in of.held_out)
    drawn = [
        picture(f"{title} ({name})", "round", partial(_curve, rounds, compared, name, key))
        for name in sets
        for key, title, compared in figures_shown(rounds)
        if key != "turns_mean"
    ]
    drawn.append(picture("rows kept, by command", "rows", partial(_funnel, rounds)))
    return [one for one in drawn if one is not None]


def _curve(
    rounds: Sequence[RoundTold], compared: Sequence[RoundTold], name: str, key: str, axes: Any
) -> int:
    """Before and behind each training that is compared; what lies between two is dashed: SFT, if
    any."""
    places, values = [], []
    for number, of in enumerate(rounds):
        if of not in compared:
            continue
        for place, figures in zip((number, number + 0.6), of.held_out.get(name, ()), strict=False):
            if figures.get(key) is not None:
                places.append(place)
                values.append(figures[key])
    if not places:
        return 0
    axes.plot(places, values, ":", color="C7", linewidth=1)
    for number in range(len(rounds)):
        of_round = [n for n, place in enumerate(places) if number <= place < number + 1]
        axes.plot([places[n] for n in of_round], [values[n] for n in of_round], "o-", color="C0")
    axes.set_xticks([n + 0.3 for n in range(len(rounds))], [of.name for of in rounds])
    return 1


def _funnel(rounds: Sequence[RoundTold], axes: Any) -> int:
    bars = [
        (f"{of.name}: {command}", kept, rows)
        for of in rounds
        for command, (kept, rows) in of.rows.items()
    ]
    if not bars:
        return 0
    names, kept, rows = zip(*bars, strict=True)
    axes.barh(names, rows, color="0.85", label="of")
    axes.barh(names, kept, color="C0", label="kept")
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=7)
    return 2
