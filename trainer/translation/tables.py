"""What stands in the terminal: the columns of an update, and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Column, Table
from rich.text import Text

from trainer.runs.config import THE_SET
from trainer.translation.evaluation.compare import PairedFigure, as_row
from trainer.translation.evaluation.evaluate import Report
from trainer.translation.evaluation.figures import compare

#: Column title -> (key of the log line, format). `±` is the deviation of what stands before it.
COLUMNS = {
    "update": ("update", "6d"),
    "length": ("completion_length_mean", "6.1f"),
    "r_seq": ("r_seq_mean", "7.3f"),
    "metricx": ("metricx_score_mean", "7.3f"),
    "± mx": ("metricx_score_std", "6.3f"),
    "mx_rew": ("metricx_reward_mean", "7.3f"),
    "± mx_r": ("metricx_reward_std", "6.3f"),
    "xcomet": ("xcomet_score_mean", "7.3f"),
    "± xc": ("xcomet_score_std", "6.3f"),
    "tokens": ("token_rewards_mean", "7.3f"),
    "± tok": ("token_rewards_std", "6.3f"),
    "not 0": ("token_rewards_nonzero_frac", "6.3f"),
    "spans": ("spans_mean", "6.2f"),
    "minor": ("spans_MINOR_mean", "6.2f"),
    "major": ("spans_MAJOR_mean", "6.2f"),
    "crit": ("spans_CRITICAL_mean", "6.2f"),
    "other": ("spans_UNKNOWN_mean", "6.2f"),
    "cover": ("reward_coverage", "6.2f"),
    "A_raw": ("A_raw_mean", "7.3f"),
    "± raw": ("A_raw_std", "6.3f"),
    "A_norm": ("A_norm_mean", "7.3f"),
    "± norm": ("A_norm_std", "6.3f"),
    "loss": ("policy_loss", "8.4f"),
    "approx_kl": ("approx_kl", "9.2e"),
    "kl_ref": ("kl_ref", "7.4f"),
    "clip": ("clip_frac", "6.3f"),
    "roll_s": ("rollout_s", "6.1f"),
    "logp_s": ("logprob_s", "6.1f"),
    "rew_s": ("reward_s", "6.1f"),
    "upd_s": ("update_s", "6.1f"),
}
#: The columns where not all have room.
FEW = (
    "update",
    "r_seq",
    "metricx",
    "xcomet",
    "spans",
    "length",
    "cover",
    "loss",
    "kl_ref",
    "clip",
    "roll_s",
    "logp_s",
    "rew_s",
    "upd_s",
)
_VERDICTS = {"better": "green", "worse": "red", "": ""}


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _share(report: Report, key: str) -> str:
    """Of how many samples a mean is, where it is not of all that were asked for."""
    service = {"metricx_score_mean": "metricx", "xcomet_score_mean": "xcomet"}.get(key)
    coverage = getattr(report, f"{service}_coverage") if service else None
    return "" if coverage in (None, 1.0) else f" (of {coverage:.0%})"


def evaluation_line(update: int, report: Report, name: str = THE_SET) -> str:
    """What is said of an evaluation of a set."""
    shown = ("metricx_score_mean", "xcomet_score_mean", "spans_mean", "chrf", "bleu")
    values = (
        f"{key.removesuffix('_mean')} {_number(getattr(report, key))}{_share(report, key)}"
        for key in shown
    )
    of = "" if name == THE_SET else f" ({name})"
    return f"held out{of}, after update {update}: {', '.join(values)}"


def comparison_table(before: Report, after: Report) -> Table:
    """Two reports side by side, with the change."""
    table = Table("", *(Column(title, justify="right") for title in ("before", "after", "change")))
    for row in compare(before.figures(), after.figures()):
        table.add_row(row.title, row.before, row.after, Text(row.change, _VERDICTS[row.verdict]))
    return table


def paired_table(figures: Sequence[PairedFigure]) -> Table:
    """Two policies side by side, with the interval of the difference."""
    titles = ("sources", "A", "B", "B - A", "95 % interval", "p(worse)")
    columns = (Column(title, justify="right", no_wrap=True) for title in titles)
    table = Table("", *columns, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))  # in 80 columns
    for row in (as_row(figure) for figure in figures):
        difference = Text(row.difference, _VERDICTS[row.verdict])
        table.add_row(
            row.title, row.sources, row.first, row.second, difference, row.interval, row.worse
        )
    return table


def report_table(figures: Mapping[str, Any]) -> Table:
    """The figures of one report."""
    table = Table("", Column("value", justify="right"))
    for row in compare(figures, {}):
        table.add_row(row.title, row.before)
    return table
