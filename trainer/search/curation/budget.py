"""The command `search budget`: set turns and episodes of each row from its earlier episodes.

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

from scorekit.numeric.thresholds import above, below
from scorekit.report.page import chart_image
from trainer.search.curation.buckets import bucket_of
from trainer.search.curation.config import BudgetConfig, CurationConfig
from trainer.search.curation.dataset import CurationResult, Decision, question_row, refs
from trainer.search.curation.pages import Section, curation_page
from trainer.search.curation.prior_decisions import PriorDecisions
from trainer.search.curation.samples import CuratedPrompt, CuratedRun


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


def make_budget(
    prompts: Sequence[CuratedPrompt],
    read: Sequence[CuratedRun],
    cfg: CurationConfig,
    decided: PriorDecisions,
) -> CurationResult:
    """Return the rows with their own `max_turns` and `n_agent`.

    Mastered rows and rows that earlier decisions drop are dropped.
    """
    budget_cfg = cfg.budget
    result = CurationResult("budget", budget_cfg, read, decided.inputs)
    episodes = turns = 0
    for prompt in prompts:
        stats = _stats(prompt, budget_cfg)
        dropped_by = decided.record.dropped(prompt.question.id)
        is_mastered = bucket_of(prompt, cfg.buckets) == "B"
        is_dropped = is_mastered or dropped_by is not None
        deep, rare = stats["deep"], stats["rare"]
        names = [name for name, applies in (("gold deep", deep), ("success rare", rare)) if applies]
        reason = "mastered" if is_mastered else ", ".join(names) or "neither deep nor rare"
        reason = dropped_by.text if dropped_by else reason
        n_agent = 0 if is_dropped else budget_cfg.rare_agents if rare else budget_cfg.n_agent
        max_turns = 0 if is_dropped else budget_cfg.deep_turns if deep else budget_cfg.max_turns
        stats |= {"n_agent": n_agent, "max_turns": max_turns}
        result.decisions.append(
            Decision(prompt.question.id, not is_dropped, reason, stats, refs(prompt))
        )
        if not is_dropped:
            episodes, turns = episodes + n_agent, turns + n_agent * max_turns
            result.rows.append(question_row(prompt.question, n_agent=n_agent, max_turns=max_turns))
    rows = len(result.rows)
    budget_text = f"{budget_cfg.n_agent} episodes of {budget_cfg.max_turns} turns for each of these"
    plans = [
        BudgetPlan("this budget", rows, episodes, turns),
        _equal(budget_text, rows, budget_cfg),
        _equal("the same for the mastered ones, too", len(prompts), budget_cfg),
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
    result.manifest_extra = extra
    return result


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
        for sample in prompt.counted(budget_cfg.combine, budget_cfg.measure)
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


def budget_page(result: CurationResult, prompts: Mapping[str, CuratedPrompt]) -> str:
    """Return report.html: the budget of each kind of row, and equal budgets for comparison."""
    # All rows of a reason have the same budget.
    rows = Counter(
        (decision.reason, int(decision.stats["n_agent"]), int(decision.stats["max_turns"]))
        for decision in result.decisions
    )
    table = [
        [reason, count, n_agent, max_turns, count * n_agent, count * n_agent * max_turns]
        for (reason, n_agent, max_turns), count in sorted(
            rows.items(), key=lambda item: (item[0][1] * item[0][2], item[0][0])
        )
    ]
    plans = [list(plan.values()) for plan in result.manifest_extra["plans"]]
    head = ["rows that are", "rows", "n_agent", "max_turns", "episodes", "turns at most"]
    chart = chart_image("where the turns go", "turns at most", partial(_bars, table))
    sections = [
        Section("Rows", [], head, table, [chart]),
        Section(
            "Beside equal budgets",
            result.manifest_extra["lines"][3:],
            ["budget", "rows", "episodes", "turns at most"],
            plans,
        ),
    ]
    return curation_page(result, "Budget", sections, prompts)


def _bars(table: Sequence[Sequence[Any]], axes: Any) -> int:
    turns = [row[-1] for row in table]
    axes.barh([row[0] for row in table], turns, color="C0")
    return 1 if any(turns) else 0
