"""What a person sees of a run: a progress bar with the time left, and one line for each update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich import console as rich_console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table
from rich.text import Text

from trainer.translation.evaluation.compare import PairedFigure, as_row
from trainer.translation.config_data import THE_SET
from trainer.translation.evaluation.evaluate import Report
from trainer.translation.evaluation.figures import compare

if TYPE_CHECKING:
    from trainer.translation.check import Findings

#: Column title -> (key of the log line, format). `±` is the deviation of what stands before it.
_COLUMNS = {
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
_FEW = (
    "update", "r_seq", "metricx", "xcomet", "spans", "length", "cover", "loss", "kl_ref", "clip",
    "roll_s", "logp_s", "rew_s", "upd_s",
)  # fmt: skip
_VERDICTS = {"better": "green", "worse": "red", "": ""}


class Console:
    """A context manager around a run of `num_updates` updates, `done` of them done before."""

    def __init__(
        self, num_updates: int, done: int = 0, *, quiet: bool = False, verbose: bool = False
    ) -> None:
        """quiet: say nothing, for a process beside the main one. verbose: every figure, on several
        lines where the terminal is too narrow for one."""
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=rich_console.Console(stderr=True, quiet=quiet),
            redirect_stdout=False,
        )
        self._task: TaskID = self._progress.add_task(
            "training", total=num_updates, completed=done, rate=""
        )
        self._lines = _layout(self._progress.console.width, verbose)
        self._headed = False

    def __enter__(self) -> Console:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def update(self, line: dict[str, Any]) -> None:
        """An update is done: its line of the log."""
        if not self._headed:
            for titles in self._lines:
                self._say(" ".join(_cell(title, _COLUMNS[title][1]) for title in titles))
            self._headed = True
        for titles in self._lines:
            cells = (_COLUMNS[title] for title in titles)
            self._say(" ".join(_cell(line.get(key), form) for key, form in cells))
        seconds = sum(line[key] for key in ("rollout_s", "logprob_s", "reward_s", "update_s"))
        rate = f"{seconds:.1f} s/update, {line['samples'] / max(seconds, 1e-9):.0f} samples/s"
        self._progress.update(self._task, advance=1, rate=rate)

    def evaluation(self, update: int, report: Report, name: str = THE_SET) -> None:
        """An evaluation of a set is done."""
        shown = ("metricx_score_mean", "xcomet_score_mean", "spans_mean", "chrf", "bleu")
        values = (
            f"{key.removesuffix('_mean')} {_number(getattr(report, key))}{_share(report, key)}"
            for key in shown
        )
        of = "" if name == THE_SET else f" ({name})"
        self._say(f"held out{of}, after update {update}: {', '.join(values)}")

    def _say(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)


def _layout(width: int, verbose: bool) -> list[list[str]]:
    """Titles of the columns, by line: all on one where that has room, on as many as it takes where
    all are asked for, else a few on one."""
    lines: list[list[str]] = [[]]
    left = width
    for title, (_, form) in _COLUMNS.items():
        needed = _width(form) + 1  # the space before it
        if lines[-1] and needed > left:
            lines.append([])
            left = width
        lines[-1].append(title)
        left -= needed
    return lines if verbose or len(lines) == 1 else [list(_FEW)]


def _width(form: str) -> int:
    return int(form.split(".")[0].rstrip("d"))


def _cell(value: Any, form: str) -> str:
    if value is None:
        return "-".rjust(_width(form))
    return value.rjust(_width(form)) if isinstance(value, str) else format(value, form)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _share(report: Report, key: str) -> str:
    """Of how many samples a mean is, where it is not of all that were asked for."""
    service = {"metricx_score_mean": "metricx", "xcomet_score_mean": "xcomet"}.get(key)
    coverage = getattr(report, f"{service}_coverage") if service else None
    return "" if coverage in (None, 1.0) else f" (of {coverage:.0%})"


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


def check_table(findings: Findings) -> Table:
    """What `python -m trainer check` found."""
    table = Table("", "check", Column("found", overflow="fold"))
    for check in findings.checks:
        mark = Text("ok", "green") if check.ok else Text("failed", "red")
        table.add_row(mark, check.name, Text(check.found))
    return table


def memory_table(findings: Findings) -> Table:
    """Where the memory goes."""
    table = Table("memory (estimate)", Column("GiB", justify="right"))
    for what, size in findings.memory:
        table.add_row(what, f"{size / 2**30:.2f}")
    return table
