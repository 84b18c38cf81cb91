"""The step `budget`: set turns and episodes of each row from its earlier episodes.

A row costs at most its episodes times their turns. The sum is compared with equal budgets for all
rows.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from statistics import median_high
from typing import Any

from pydantic import Field

from scorekit.config import Config
from scorekit.numeric import above, below
from trainer.search.data import question_row
from trainer.search.steps.buckets import bucket_of
from trainer.search.steps.episodes import (
    Combine,
    CuratedPrompt,
    Measure,
    refs,
)
from trainer.search.steps.step import Decision, Outcome, Section, Step, Work


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


@dataclass(frozen=True, slots=True)
class BudgetPlan:
    """The size of a budget: rows, all their episodes, and max turns of all episodes."""

    plan: str
    rows: int
    episodes: int
    turns: int

    def line(self) -> str:
        """Return the budget as a line of text."""
        return f"{self.plan}: {self.rows:,} rows, {self.episodes:,} episodes, {self.turns:,} turns"


class Budget(Step[BudgetConfig]):
    """Set max_turns and n_agent of each row from its earlier episodes."""

    name = "budget"
    title = "Budget"
    config = BudgetConfig
    options = (
        *("run", "out", "rows", "verified", "exclude", "record", "config", "set_", "overwrite"),
    )
    also = ("buckets",)
    moves = ("rows",)
    drops = True

    def decide(self, work: Work[BudgetConfig], answers: Mapping[str, Any]) -> Outcome:
        """Return the rows with their own `max_turns` and `n_agent`.

        Mastered rows and rows that earlier decisions drop are dropped.
        """
        budget_cfg = work.settings
        outcome = self.outcome(work)
        rows = episodes = turns = 0
        for prompt in work.prompts:
            stats = _stats(prompt, budget_cfg)
            dropped_by = work.prior.record.dropped(prompt.question.id)
            is_mastered = bucket_of(prompt, work.cfg.buckets) == "B"
            is_dropped = is_mastered or dropped_by is not None
            deep, rare = stats["deep"], stats["rare"]
            names = [
                name for name, applies in (("gold deep", deep), ("success rare", rare)) if applies
            ]
            reason = "mastered" if is_mastered else ", ".join(names) or "neither deep nor rare"
            reason = dropped_by.text if dropped_by else reason
            n_agent = 0 if is_dropped else budget_cfg.rare_agents if rare else budget_cfg.n_agent
            max_turns = 0 if is_dropped else budget_cfg.deep_turns if deep else budget_cfg.max_turns
            stats |= {"n_agent": n_agent, "max_turns": max_turns}
            row = None
            if not is_dropped:
                rows, episodes, turns = rows + 1, episodes + n_agent, turns + n_agent * max_turns
                row = question_row(prompt.question, n_agent=n_agent, max_turns=max_turns)
            decision = Decision(
                prompt.question.id, not is_dropped, reason, stats, refs(prompt), row
            )
            outcome.decisions.append(decision)
        budget_text = (
            f"{budget_cfg.n_agent} episodes of {budget_cfg.max_turns} turns for each of these"
        )
        plans = [
            BudgetPlan("this budget", rows, episodes, turns),
            _equal(budget_text, rows, budget_cfg),
            _equal("the same for the mastered ones, too", len(work.prompts), budget_cfg),
        ]
        extra: dict[str, Any] = {
            "plans": [asdict(plan) for plan in plans],
            "lines": [plan.line() for plan in plans],
        }
        if rows:
            equal_n_agent = turns / (rows * budget_cfg.max_turns)
            extra["equal_n_agent"] = round(equal_n_agent, 3)
            extra["lines"].append(
                f"the turns of this budget are those of {equal_n_agent:.1f} episodes of "
                f"{budget_cfg.max_turns} turns for each of its rows"
            )
        outcome.extra = extra
        return outcome

    def sections(self, work: Work[BudgetConfig], outcome: Outcome) -> list[Section]:
        """Return the budget of each kind of row, and equal budgets for comparison."""
        from scorekit.report.page import chart_image

        # All rows of a reason have the same budget.
        rows = Counter(
            (decision.reason, int(decision.stats["n_agent"]), int(decision.stats["max_turns"]))
            for decision in outcome.decisions
        )
        table = [
            [reason, count, n_agent, max_turns, count * n_agent, count * n_agent * max_turns]
            for (reason, n_agent, max_turns), count in sorted(
                rows.items(), key=lambda item: (item[0][1] * item[0][2], item[0][0])
            )
        ]
        plans = [list(plan.values()) for plan in outcome.extra["plans"]]
        head = ["rows that are", "rows", "n_agent", "max_turns", "episodes", "turns at most"]
        chart = chart_image("where the turns go", "turns at most", partial(_bars, table))
        return [
            Section("Rows", [], head, table, [chart]),
            Section(
                "Beside equal budgets",
                outcome.extra["lines"][3:],
                ["budget", "rows", "episodes", "turns at most"],
                plans,
            ),
        ]

    def lines(self, work: Work[BudgetConfig], outcome: Outcome) -> list[str]:
        """Return the budgets as lines of text."""
        return list(outcome.extra["lines"])


def _equal(name: str, rows: int, budget_cfg: BudgetConfig) -> BudgetPlan:
    episodes = rows * budget_cfg.n_agent
    return BudgetPlan(name, rows, episodes, episodes * budget_cfg.max_turns)


def _stats(prompt: CuratedPrompt, budget_cfg: BudgetConfig) -> dict[str, Any]:
    """Return the values of a decision.

    scored, succeeded: of the episodes that count. searched, found: of all episodes, those that
    searched, and those with a page with the fact among the hits. rank: the median of its best
    ranks; None: half have not found it, or none searched.
    """
    values = [
        sample.value(budget_cfg.measure)
        for sample in prompt.counted_episodes(budget_cfg.combine, budget_cfg.measure)
    ]
    succeeded = sum(value is not None and not below(value, budget_cfg.success) for value in values)
    searched = [sample for sample in prompt.samples if sample.searches]
    ranks = [math.inf if sample.rank is None else sample.rank for sample in searched]
    median = median_high(ranks) if ranks else None
    has_gold = bool(prompt.question.gold)
    return {
        "scored": len(values),
        "succeeded": succeeded,
        "rare": succeeded > 0 and not above(succeeded / len(values), budget_cfg.rare),
        "searched": len(searched),
        "found": sum(sample.rank is not None for sample in searched),
        "rank": int(median) if median is not None and math.isfinite(median) else None,
        "deep": has_gold and median is not None and median > budget_cfg.deep_rank,
    }


def _bars(table: Sequence[Sequence[Any]], axes: Any) -> int:
    turns = [row[-1] for row in table]
    axes.barh([row[0] for row in table], turns, color="C0")
    return 1 if any(turns) else 0
