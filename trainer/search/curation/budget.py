"""`search budget`: turns and episodes of each row, by what earlier rounds showed of it.

A row costs its episodes times their turns, at most: that is what is added up here, and held against
budgets that are the same for all.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median_high
from typing import Any

from scorekit.numeric.thresholds import above, below
from scorekit.report.page import picture
from trainer.search.curation.buckets import bucket_of
from trainer.search.curation.config import BudgetConfig, CurationConfig
from trainer.search.curation.dataset import Curated, Decision, question_row, refs
from trainer.search.curation.pages import Section, curation_page
from trainer.search.curation.samples import CuratedPrompt, CuratedRun
from trainer.sft.curation_record import CurationRecord


@dataclass(frozen=True, slots=True)
class BudgetPlan:
    """rows; episodes, turns: of all of them together, the turns at most."""

    name: str
    rows: int
    episodes: int
    turns: int

    def line(self) -> str:
        """For people."""
        return f"{self.name}: {self.rows:,} rows, {self.episodes:,} episodes, {self.turns:,} turns"


def make_budget(
    prompts: Sequence[CuratedPrompt],
    read: Sequence[CuratedRun],
    cfg: CurationConfig,
    inputs: Mapping[str, str] | None = None,
    record: CurationRecord | None = None,
) -> Curated:
    """Each row with `max_turns` and `n_agent` of its own; those that are mastered, and those that
    the record condemns, are dropped."""
    of = cfg.budget
    made = Curated("budget", of, read, inputs or {})
    episodes = turns = 0
    for prompt in prompts:
        figures = _figures(prompt, of)
        against = record.dropped(prompt.question.id) if record else None
        mastered = bucket_of(prompt, cfg.buckets) == "B"
        nothing = mastered or against is not None
        deep, rare = figures["deep"], figures["rare"]
        names = [name for name, there in (("gold deep", deep), ("success rare", rare)) if there]
        reason = "mastered" if mastered else ", ".join(names) or "neither deep nor rare"
        reason = against.text if against else reason
        n_agent = 0 if nothing else of.rare_agents if rare else of.n_agent
        max_turns = 0 if nothing else of.deep_turns if deep else of.max_turns
        figures |= {"n_agent": n_agent, "max_turns": max_turns}
        made.decisions.append(
            Decision(prompt.question.id, not nothing, reason, figures, refs(prompt))
        )
        if not nothing:
            episodes, turns = episodes + n_agent, turns + n_agent * max_turns
            made.rows.append(question_row(prompt.question, n_agent=n_agent, max_turns=max_turns))
    rows = len(made.rows)
    plans = [
        BudgetPlan("this budget", rows, episodes, turns),
        _equal(f"{of.n_agent} episodes of {of.max_turns} turns for each of these", rows, of),
        _equal("the same for the mastered ones, too", len(prompts), of),
    ]
    told: dict[str, Any] = {
        "plans": [
            {"plan": one.name, "rows": one.rows, "episodes": one.episodes, "turns": one.turns}
            for one in plans
        ],
        "lines": [one.line() for one in plans],
    }
    if rows:
        same = turns / (rows * of.max_turns)
        told["equal_n_agent"] = round(same, 3)
        told["lines"].append(
            f"the turns of this budget are those of {same:.1f} episodes of {of.max_turns} turns "
            "for each of its rows"
        )
    made.told = told
    return made


def _equal(name: str, rows: int, of: BudgetConfig) -> BudgetPlan:
    return BudgetPlan(name, rows, rows * of.n_agent, rows * of.n_agent * of.max_turns)


def _figures(prompt: CuratedPrompt, of: BudgetConfig) -> dict[str, Any]:
    """scored, succeeded: episodes that count. searched, found: of them all, those that searched,
    and those among whose hits was a page that carries the fact. rank: the better half's worst place
    of it; None: half have not found it, or none searched."""
    values = [one.value(of.measure) for one in prompt.counted(of.combine, of.measure)]
    succeeded = sum(value is not None and not below(value, of.success) for value in values)
    searched = [one for one in prompt.samples if one.searches]
    places = [math.inf if one.rank is None else one.rank for one in searched]
    middle = median_high(places) if places else None
    known = bool(prompt.question.gold)
    return {
        "scored": len(values),
        "succeeded": succeeded,
        "rare": succeeded > 0 and not above(succeeded / len(values), of.rare),
        "searched": len(searched),
        "found": sum(one.rank is not None for one in searched),
        "rank": int(middle) if middle is not None and math.isfinite(middle) else None,
        "deep": known and middle is not None and middle > of.deep_rank,
    }


def budget_page(made: Curated, prompts: Mapping[str, CuratedPrompt]) -> str:
    """report.html: what each kind of row gets, and the whole beside equal budgets."""
    rows: Counter[str] = Counter()
    episodes: Counter[str] = Counter()
    turns: Counter[str] = Counter()
    gets: dict[str, tuple[int, int]] = {}
    for one in made.decisions:
        n_agent, max_turns = int(one.figures["n_agent"]), int(one.figures["max_turns"])
        gets[one.reason] = (n_agent, max_turns)
        rows[one.reason] += 1
        episodes[one.reason] += n_agent
        turns[one.reason] += n_agent * max_turns
    kinds = sorted(gets, key=lambda name: (gets[name][0] * gets[name][1], name))
    table = [[name, rows[name], *gets[name], episodes[name], turns[name]] for name in kinds]
    plans = [[at["plan"], at["rows"], at["episodes"], at["turns"]] for at in made.told["plans"]]
    head = ["rows that are", "rows", "n_agent", "max_turns", "episodes", "turns at most"]
    drawn = picture("where the turns go", "turns at most", partial(_bars, kinds, turns))
    sections = [
        Section("Rows", [], head, table, [drawn]),
        Section(
            "Beside equal budgets",
            made.told["lines"][3:],
            ["budget", "rows", "episodes", "turns at most"],
            plans,
        ),
    ]
    return curation_page(made, "Budget", sections, prompts)


def _bars(kinds: Sequence[str], turns: Mapping[str, int], axes: Any) -> int:
    axes.barh(list(kinds), [turns[name] for name in kinds], color="C0")
    return 1 if any(turns.values()) else 0
