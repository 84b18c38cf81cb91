"""Tables for the terminal: the estimate and the status of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from scorekit.errors import UserError
from scorekit.report.render import at_full_width
from synth.config import SynthConfig
from synth.context import Stage
from synth.report.estimate import PARTS, RunEstimate, plan, size_text
from synth.report.rates import UNKNOWN, Rates, measured_rates
from synth.stages.table import ORDER
from synth.storage.stats import StageCounts, duration, funnel, process_stats
from synth.storage.store import StageFolder


def estimate(
    cfg: SynthConfig, user_rates: Rates = UNKNOWN, stages: Sequence[Stage] = ORDER
) -> RenderableType:
    """Return the estimate as two tables with warnings below.

    user_rates: missing ones come from finished stages of the run or its dry run."""
    out_dir = cfg.run.out_dir
    dry = out_dir.with_name(out_dir.name + "-dry-run")
    run_plan = plan(cfg, user_rates.over(measured_rates((out_dir, dry), stages)), stages)
    return Group(
        at_full_width(_counts_table(run_plan)),
        at_full_width(_hours_table(run_plan)),
        *_summary(cfg, run_plan),
        *(Text(f"! {line}", style="yellow") for line in run_plan.warnings),
    )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("stage", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _counts_table(run_plan: RunEstimate) -> Table:
    names = ("requests", "sequences", "tokens_in", "tokens_out", "scored", "judged")
    table = _table(
        "About", "requests", "sequences", "tokens\nin", "tokens\nout", "scored", "judged", "disk"
    )
    for cost in run_plan.costs:
        table.add_row(
            cost.stage, *(_count(getattr(cost, name)) for name in names), size_text(cost.disk_bytes)
        )
    table.add_row("answers.sqlite", *[""] * len(names), size_text(run_plan.answers_bytes))
    if run_plan.views_bytes:
        table.add_row("views", *[""] * len(names), size_text(run_plan.views_bytes))
    table.add_section()
    sums = (sum(getattr(cost, name) for cost in run_plan.costs) for name in names)
    table.add_row("all", *map(_count, sums), size_text(run_plan.disk_bytes))
    return table


def _hours_table(run_plan: RunEstimate) -> Table:
    rates = run_plan.rates
    rate_units = (
        (rates.tokens, "tokens"),
        (rates.scores, "scores"),
        (rates.verdicts, "verdicts"),
    )
    rate_texts = [f"{f'{rate:,.0f}' if rate else '?'} {unit}/s" for rate, unit in rate_units]
    table = _table(f"Hours, at {', '.join(rate_texts)}", *PARTS, "binds")
    totals = dict.fromkeys(PARTS, 0.0)
    unknown: set[str] = set()
    for cost in run_plan.costs:
        hours = run_plan.hours(cost)
        for part, value in hours.items():
            totals[part] += value or 0.0
            unknown |= {part} if value is None else set()
        cells = (_time(hours[part]) if part in hours else "" for part in PARTS)
        table.add_row(
            cost.stage, *cells, "?" if None in hours.values() else run_plan.binds(cost)[0]
        )
    table.add_section()
    table.add_row("all", *(_time(None if part in unknown else totals[part]) for part in PARTS), "")
    return table


def _time(hours: float | None) -> str:
    """Return hours as text; short times in seconds."""
    if hours is None:
        return "?"
    return f"{hours:,.1f}" if hours >= 0.05 else f"{3600 * hours:,.0f} s"


def _summary(cfg: SynthConfig, run_plan: RunEstimate) -> list[Text]:
    """Return lines with the total time, the bottleneck, and the origin of the rates."""
    longest: dict[str, float] = {}
    for cost in run_plan.costs:
        part, hours = run_plan.binds(cost)
        longest[part] = longest.get(part, 0.0) + hours
    total = sum(longest.values())
    binds = max(longest, key=lambda part: longest[part])
    unknown_parts = {
        part for cost in run_plan.costs for part, h in run_plan.hours(cost).items() if h is None
    }
    qualifier = "at least " if unknown_parts else ""
    lines = [
        f"{qualifier}{_time(total)} (hours) with one driver, of which the {binds} binds "
        f"{_time(longest[binds])}; disk: about "
        f"{size_text(run_plan.disk_bytes)}, within a factor of 2"
    ]
    if run_plan.rates.measured:
        lines.append(
            f"rates that were not given were measured: {', '.join(run_plan.rates.measured)}"
        )
    flags = {"MetricX": "--scores-per-s", "judge": "--verdicts-per-s"}
    lines += [
        f"! nobody knows how fast the {part} is: give {flags[part]}, or finish a dry run first"
        for part in PARTS
        if part in unknown_parts
    ]
    if cfg.metricx.url and isinstance(cfg.metricx.url, list) and run_plan.rates.measured:
        lines.append(f"MetricX's rate is that of all {len(cfg.metricx.url)} services together")
    return [Text(line) for line in lines]


def status(out_dir: Path, stages: Sequence[Stage] = ORDER) -> RenderableType:
    """Return the progress of a run's stages. Raises UserError if none was started."""
    counts = {c.stage: c for c in funnel((stage.name for stage in stages), out_dir)}
    if not counts:
        raise UserError(f"{out_dir}: no run here (no stage was started)")
    table = Table(title=str(out_dir))
    table.add_column("stage")
    for name in ("shards", "in", "out", "rejected", "records/s", "time left"):
        table.add_column(name, justify="right")
    for stage in stages:
        stage_counts = counts.get(stage.name)
        if stage_counts is None:
            table.add_row(stage.name, "–", "", "", "", "", "", style="dim")
            continue
        rate = process_stats(StageFolder(out_dir, stage.name))["records_per_s"]
        before = counts.get(stage.after.name) if stage.after else None
        left = _time_left(stage_counts, before, rate)
        table.add_row(
            stage.name,
            f"{stage_counts.done} of {stage_counts.shards}",
            _count(stage_counts.records_in),
            _count(stage_counts.records_out),
            _count(stage_counts.records_in - stage_counts.records_out),
            "" if rate is None else f"{rate:,.1f}",
            "done"
            if stage_counts.done == stage_counts.shards
            else "?"
            if left is None
            else duration(left),
        )
    return Group(table, *(Text(line) for line in map(_left_open, counts.values()) if line))


def _left_open(stage_counts: StageCounts) -> str:
    """Return a line about a stage with open records, or an empty text."""
    if not stage_counts.open:
        return ""
    codes = ", ".join(f"{code} {count:,}" for code, count in stage_counts.open.items())
    return (
        f"{stage_counts.stage}: {sum(stage_counts.open.values()):,} left open "
        f"({codes}): --resume asks again"
    )


def _time_left(
    stage_counts: StageCounts, before: StageCounts | None, rate: float | None
) -> float | None:
    """Return the remaining seconds; None while unknown. Other machines are assumed to continue.

    before: counts of the previous stage."""
    if not rate or before is None:
        return None
    return max(0, before.records_out - stage_counts.records_in) / rate


def _count(number: int) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6)):
        if number >= size:
            value = number / size
            return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"
    return f"{number:,}" if number else ""
