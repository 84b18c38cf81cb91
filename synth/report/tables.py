"""An estimate, and how far a run has come, as tables for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from scorekit.errors import UserError
from synth.config import SynthConfig
from synth.context import Stage
from synth.folder.stats import StageCounts, duration, funnel, process_figures
from synth.folder.store import StageFolder
from synth.report.estimate import PARTS, Plan, plan, size_text
from synth.report.rates import UNKNOWN, Rates, measured_rates
from synth.stages.table import ORDER


def estimate(
    cfg: SynthConfig, told: Rates = UNKNOWN, stages: Sequence[Stage] = ORDER
) -> RenderableType:
    """The plan as two tables, with what is to be minded under them. told: rates that are known;
    what they leave open a finished stage of the run, or of its dry run, tells."""
    out_dir = cfg.run.out_dir
    dry = out_dir.with_name(out_dir.name + "-dry-run")
    made = plan(cfg, told.over(measured_rates((out_dir, dry), stages)), stages)
    return Group(
        _counts_table(made),
        _hours_table(made),
        *_summary(cfg, made),
        *(Text(f"! {line}", style="yellow") for line in made.warnings),
    )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("stage", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _counts_table(made: Plan) -> Table:
    names = ("requests", "sequences", "tokens_in", "tokens_out", "scored", "judged")
    table = _table(
        "About", "requests", "sequences", "tokens\nin", "tokens\nout", "scored", "judged", "disk"
    )
    for cost in made.costs:
        table.add_row(
            cost.stage, *(_count(getattr(cost, name)) for name in names), size_text(cost.disk_bytes)
        )
    table.add_row("answers.sqlite", *[""] * len(names), size_text(made.answers_bytes))
    if made.views_bytes:
        table.add_row("views", *[""] * len(names), size_text(made.views_bytes))
    table.add_section()
    sums = (sum(getattr(cost, name) for cost in made.costs) for name in names)
    table.add_row("all", *map(_count, sums), size_text(made.disk_bytes))
    return table


def _hours_table(made: Plan) -> Table:
    rates = made.rates
    each = (
        (rates.tokens, "tokens"),
        (rates.scores, "scores"),
        (rates.verdicts, "verdicts"),
    )
    told = [f"{f'{rate:,.0f}' if rate else '?'} {what}/s" for rate, what in each]
    table = _table(f"Hours, at {', '.join(told)}", *PARTS, "binds")
    whole = dict.fromkeys(PARTS, 0.0)
    unknown: set[str] = set()
    for cost in made.costs:
        hours = made.hours(cost)
        for part, value in hours.items():
            whole[part] += value or 0.0
            unknown |= {part} if value is None else set()
        cells = (_time(hours[part]) if part in hours else "" for part in PARTS)
        table.add_row(cost.stage, *cells, "?" if None in hours.values() else made.binds(cost)[0])
    table.add_section()
    table.add_row("all", *(_time(None if part in unknown else whole[part]) for part in PARTS), "")
    return table


def _time(hours: float | None) -> str:
    """In hours; what takes less than minutes in seconds."""
    if hours is None:
        return "?"
    return f"{hours:,.1f}" if hours >= 0.05 else f"{3600 * hours:,.0f} s"


def _summary(cfg: SynthConfig, made: Plan) -> list[Text]:
    """How long in all, what binds, and where the rates are from."""
    longest: dict[str, float] = {}
    for cost in made.costs:
        part, hours = made.binds(cost)
        longest[part] = longest.get(part, 0.0) + hours
    total = sum(longest.values())
    binds = max(longest, key=lambda part: longest[part])
    asked = {part for cost in made.costs for part, h in made.hours(cost).items() if h is None}
    least = "at least " if asked else ""
    lines = [
        f"{least}{_time(total)} (hours) with one driver, of which the {binds} binds "
        f"{_time(longest[binds])}; disk: about {size_text(made.disk_bytes)}, within a factor of 2"
    ]
    if made.rates.measured:
        lines.append(f"rates that were not given were measured: {', '.join(made.rates.measured)}")
    flags = {"MetricX": "--scores-per-s", "judge": "--verdicts-per-s"}
    lines += [
        f"! nobody knows how fast the {part} is: give {flags[part]}, or finish a dry run first"
        for part in PARTS
        if part in asked
    ]
    if cfg.metricx.url and isinstance(cfg.metricx.url, list) and made.rates.measured:
        lines.append(f"MetricX's rate is that of all {len(cfg.metricx.url)} services together")
    return [Text(line) for line in lines]


def status(out_dir: Path, stages: Sequence[Stage] = ORDER) -> RenderableType:
    """How far the stages of a run have come. Raises UserError where none was begun."""
    counts = {c.stage: c for c in funnel((stage.name for stage in stages), out_dir)}
    if not counts:
        raise UserError(f"{out_dir}: no run here (no stage was begun)")
    table = Table(title=str(out_dir))
    table.add_column("stage")
    for name in ("shards", "in", "out", "rejected", "records/s", "time left"):
        table.add_column(name, justify="right")
    for stage in stages:
        told = counts.get(stage.name)
        if told is None:
            table.add_row(stage.name, "–", "", "", "", "", "", style="dim")
            continue
        rate = process_figures(StageFolder(out_dir, stage.name))["records_per_s"]
        before = counts.get(stage.after.name) if stage.after else None
        left = _time_left(told, before, rate)
        table.add_row(
            stage.name,
            f"{told.done} of {told.shards}",
            _count(told.records_in),
            _count(told.records_out),
            _count(told.records_in - told.records_out),
            "" if rate is None else f"{rate:,.1f}",
            "done" if told.done == told.shards else "?" if left is None else duration(left),
        )
    return Group(table, *(Text(line) for line in map(_left_open, counts.values()) if line))


def _left_open(told: StageCounts) -> str:
    """What is said of a stage that has left records open, or nothing."""
    if not told.open:
        return ""
    codes = ", ".join(f"{code} {count:,}" for code, count in told.open.items())
    return f"{told.stage}: {sum(told.open.values()):,} left open ({codes}): --resume asks again"


def _time_left(told: StageCounts, before: StageCounts | None, rate: float | None) -> float | None:
    """Seconds; None where nothing is known yet. Other machines' processes count as they did.

    before: of the stage before it."""
    if not rate or before is None:
        return None
    return max(0, before.records_out - told.records_in) / rate


def _count(number: int) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6)):
        if number >= size:
            value = number / size
            return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"
    return f"{number:,}" if number else ""
