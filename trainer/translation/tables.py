"""What stands in the terminal of a translator: the shared tables, over its own figures."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from trainer.runs.config import THE_SET
from trainer.runs.verbs import tables
from trainer.translation.evaluation.evaluate import Report
from trainer.translation.evaluation.figures import table
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.terms import needed, shown_terms


def columns(cfg: RewardConfig) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """Of the line of an update: what each term shows that the reward has, or always shows."""
    asked = needed(cfg)
    absent = {
        figure.key
        for term in shown_terms()
        if term.optional and not term.weight(cfg) and term.service not in asked
        for figure in term.table
    }
    return tables.columns([figure for figure in table() if figure.key not in absent])


def evaluation_line(update: int, report: Report, name: str = THE_SET) -> str:
    """What is said of an evaluation of a set."""
    figures = report.figures()
    shown = [f for f in table(figures) if figures.get(f.key) not in f.hidden_at]
    return tables.evaluation_line(shown, update, figures, name)


def comparison_table(before: Report, after: Report) -> Table:
    """Two reports side by side, with the change."""
    first, last = before.figures(), after.figures()
    return tables.comparison_table(table(first, last), first, last)


def report_table(figures: Mapping[str, Any]) -> Table:
    """The figures of one report."""
    return tables.report_table(table(figures), figures)
