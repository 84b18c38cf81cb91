"""Terminal tables of a translation run: the shared results, with its stats."""

from __future__ import annotations

from rich.table import Table

from trainer.runs import results
from trainer.runs.config import DEFAULT_EVAL_SET
from trainer.translation.evaluation.evaluate import Report
from trainer.translation.evaluation.stats import table
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.stats import hidden_keys


def columns(cfg: RewardConfig) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """Return the columns of an update: stats of components with a weight, and those always
    shown."""
    hidden = hidden_keys(cfg)
    return results.columns([stat for stat in table() if stat.key not in hidden])


def evaluation_line(update: int, report: Report, name: str = DEFAULT_EVAL_SET) -> str:
    """Return the console line of an evaluation of a set."""
    values = report.stats()
    visible_stats = [stat for stat in table(values) if values.get(stat.key) not in stat.hidden_at]
    return results.evaluation_line(visible_stats, update, values, name)


def comparison_table(before: Report, after: Report) -> Table:
    """Return two reports side by side, with the change."""
    first, last = before.stats(), after.stats()
    return results.comparison_table(table(first, last), first, last)
