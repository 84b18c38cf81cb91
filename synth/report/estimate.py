"""Tables for the terminal: what a run will cost, and how far it is.

The cost follows from the config and the rates of the services: given by the user, measured in a
finished stage, or defaults.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from scorekit.errors import UserError
from scorekit.llm.limits import read_timeout_s
from scorekit.report.render import at_full_width
from synth.config import PART, SynthConfig
from synth.cost import PACKED_ALIKE, Cost, Sizes
from synth.execution.stage import Stage
from synth.stages.prefilter_score import PrefilterScore
from synth.stages.table import ORDER
from synth.storage.stats import StageCounts, duration, funnel, process_stats
from synth.storage.store import StageFolder

#: Approximate published rate of Qwen3-235B in FP8 on eight H100: docs/how-to/synthesis.md.
TOKENS_PER_S = 7500.0
#: Smallest number of records, and largest share of cached answers, for a measured rate.
_ENOUGH, _MAX_CACHED_SHARE = 50, 0.2


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates per second.

    tokens: of the teacher's output.
    scores, verdicts: of MetricX and the judge; None: unknown.
    driver: measured CPU seconds per record, by stage.
    measured: stages with measured rates."""

    tokens: float | None = None
    scores: float | None = None
    verdicts: float | None = None
    driver: tuple[tuple[str, float], ...] = ()
    measured: tuple[str, ...] = ()

    def over(self, other: Rates) -> Rates:
        """Return these rates, with the other's where they are unknown."""
        names = [entry.name for entry in fields(self)]
        return Rates(**{name: getattr(self, name) or getattr(other, name) for name in names})


#: No rate is known.
UNKNOWN = Rates()


def measured_rates(folders: Iterable[Path], stages: Sequence[Stage] = ORDER) -> Rates:
    """Return the rates measured in the first run folder that has them.

    Stages that mostly used cached answers are ignored."""
    rates = UNKNOWN
    for folder in folders:
        rates = rates.over(_rates_of(folder, stages))
    return rates


def _rates_of(out_dir: Path, stages: Sequence[Stage]) -> Rates:
    stats_by_stage = {}
    for stage in stages:
        folder = StageFolder(out_dir, stage.name)
        if folder.done():
            stage_stats = process_stats(folder)
            num_calls = sum(
                stage_stats[service].get(count_key, 0)
                for service, count_key in (
                    ("teacher", "choices"),
                    ("metricx", "samples"),
                    ("judge", "samples"),
                )
            )
            if (
                stage_stats["seconds"]
                and stage_stats["answers"].get("kept", 0) <= _MAX_CACHED_SHARE * num_calls
            ):
                stats_by_stage[stage.name] = stage_stats
    tokens = _rate(stats_by_stage, "teacher", "completion_tokens")
    scores = _rate(stats_by_stage, "metricx", "samples")
    verdicts = _rate(stats_by_stage, "judge", "samples")
    driver = tuple(
        (name, stage_stats["driver_cpu_s"] / stage_stats["records_done"])
        for name, stage_stats in stats_by_stage.items()
        if stage_stats["driver_cpu_s"] and stage_stats["records_done"] >= _ENOUGH
    )
    return Rates(tokens, scores, verdicts, driver, tuple(stats_by_stage))


def _rate(stats_by_stage: dict[str, dict[str, Any]], service: str, count_key: str) -> float | None:
    """Return the rate of the last stage with enough records: later stages are more parallel."""
    for stage_stats in reversed(stats_by_stage.values()):
        count = stage_stats[service].get(count_key, 0)
        if count >= _ENOUGH:
            return float(count / stage_stats["seconds"])
    return None


#: Bytes in answers.sqlite, except texts, of a candidate, a score and a verdict.
_ANSWER_BYTES, _SCORE_BYTES, _VERDICT_BYTES = 104, 110, 150
#: Number of sequences that keep a server busy, and above which sequences only wait: vLLM's smaller
#: default, and 1.5 times its larger one.
_BUSY, _FULL = 256, 1536
#: The parts that work on a stage; the slowest one is the bottleneck.
PARTS = ("teacher", "MetricX", "judge", "driver")


@dataclass(frozen=True, slots=True)
class RunEstimate:
    """The costs of a run.

    answers_bytes: of answers.sqlite.
    views_bytes: of the views.
    disk_bytes: of everything, because nothing is deleted during the run."""

    costs: tuple[Cost, ...]
    rates: Rates
    answers_bytes: int = 0
    views_bytes: int = 0
    warnings: list[str] = field(default_factory=list)

    @property
    def disk_bytes(self) -> int:
        return sum(c.disk_bytes for c in self.costs) + self.answers_bytes + self.views_bytes

    def hours(self, cost: Cost) -> dict[str, float | None]:
        """Return the hours of each part of a stage; None if its rate is unknown."""
        measured = dict(self.rates.driver).get(cost.stage)
        a_record, a_candidate = cost.driver_s
        cpu = cost.records * (measured if measured is not None else a_record)
        if measured is None and cost.records:
            cpu += a_candidate * max(cost.sequences, cost.scored)
        work = (
            ("teacher", cost.tokens_out, self.rates.tokens),
            ("MetricX", cost.scored, self.rates.scores),
            ("judge", cost.judged, self.rates.verdicts),
        )
        hours_by_part = {part: n / rate / 3600 if rate else None for part, n, rate in work if n}
        return {**hours_by_part, "driver": cpu / 3600}

    def binds(self, cost: Cost) -> tuple[str, float]:
        """Return the slowest part with a known rate, and its hours."""
        hours_by_part = {
            part: hours for part, hours in self.hours(cost).items() if hours is not None
        }
        part = max(hours_by_part, key=lambda name: hours_by_part[name])
        return part, hours_by_part[part]


def plan(cfg: SynthConfig, rates: Rates = UNKNOWN, stages: Sequence[Stage] = ORDER) -> RunEstimate:
    """Estimate calls and disk space of the stages if every source passes all of them.

    Expect errors of tens of percent; for disk space up to a factor of 2."""
    run = Sizes(cfg)
    costs = tuple(stage.cost(run) for stage in stages)
    answers = sum(
        cost.sequences * (run.text_bytes + _ANSWER_BYTES)
        + cost.scored * _SCORE_BYTES
        + cost.judged * _VERDICT_BYTES
        for cost in costs
    )
    rates = replace(rates, tokens=rates.tokens or TOKENS_PER_S)
    run_plan = RunEstimate(costs, rates, int(answers), int(_views_bytes(run, costs)))
    run_plan.warnings.extend(_warnings(cfg, run_plan, run))
    return run_plan


def _views_bytes(run: Sizes, costs: Sequence[Cost]) -> float:
    """Return the bytes of the views that are short enough to be written."""
    max_records = run.cfg.run.view_records
    views = [(cost.view_records, cost.view_bytes) for cost in costs]
    views.append((sum(cost.left_out for cost in costs), run.line_bytes()))
    return sum(count * size for count, size in views if count <= max_records)


def _warnings(cfg: SynthConfig, run_plan: RunEstimate, run: Sizes) -> list[str]:
    messages = [*_length_warnings(cfg, run), *_timing_warnings(cfg, run_plan)]
    if cfg.data.target_examples_total > cfg.data.sample_pool_size:
        messages.append(
            "data.target_examples_total is over data.sample_pool_size: all are selected"
        )
    if cfg.final_generation.store_candidates:
        more = size_text(int(run.chosen * run.candidates_bytes))
        messages.append(f"final_generation.store_candidates keeps about {more} more")
    if cfg.prefilter.store_texts:
        more = size_text(int(2 * run.pool * run.text_bytes * PACKED_ALIKE))
        messages.append(f"prefilter.store_texts keeps about {more} more, in two stages")
    folder = cfg.run.out_dir.absolute()
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if free < run_plan.disk_bytes:
        messages.append(
            f"run.out_dir: {size_text(free)} are free, "
            f"about {size_text(run_plan.disk_bytes)} needed"
        )
    return messages


def _length_warnings(cfg: SynthConfig, run: Sizes) -> list[str]:
    generation, blob = cfg.teacher.generation, cfg.final_generation.blob
    messages = []
    if blob.enabled and blob.blob_ratio:
        longest_blob = blob.blob_max_tokens * run.most_ratio
        if longest_blob > generation.max_tokens_blob:
            messages.append(
                f"teacher.generation.max_tokens_blob {generation.max_tokens_blob} cuts "
                f"translations of blobs: {blob.blob_max_tokens} tokens become up to "
                f"{longest_blob:.0f}; such sources are rejected"
            )
    longest = run.longest_sentence
    if longest * run.most_ratio > generation.max_tokens:
        fits = generation.max_tokens / run.most_ratio
        messages.append(
            f"teacher.generation.max_tokens {generation.max_tokens} fits every translation of "
            f"{fits:.0f} tokens; segmentation.max_chars {cfg.segmentation.max_chars} lets "
            f"sentences of about {longest:.0f} through: a cut translation is rejected"
        )
    return messages


def _timing_warnings(cfg: SynthConfig, run_plan: RunEstimate) -> list[str]:
    teacher, final = cfg.teacher, cfg.final_generation
    tokens_per_s = run_plan.rates.tokens or TOKENS_PER_S
    bound = teacher.max_sequences
    single = min(teacher.max_concurrency, bound or teacher.max_concurrency)
    several = final.strategy != "per_call" and final.num_candidates > 1
    max_in_flight = teacher.max_concurrency * min(PART, final.num_candidates) if several else single
    flight = max_in_flight if bound is None else min(max_in_flight, bound)
    messages = []
    if single < _BUSY:
        messages.append(
            f"teacher.max_concurrency {teacher.max_concurrency}: {PrefilterScore.name} keeps "
            f"{single} sequences in flight; a server that makes {tokens_per_s:,.0f} tokens/s wants "
            f"{_BUSY} or more, so its hours will be longer"
        )
    if flight > _FULL:
        messages.append(
            f"up to {flight} sequences in flight: more than vLLM decodes at once by "
            "default (1,024), the others wait; set teacher.max_sequences"
        )
    blob = final.blob.enabled and final.blob.blob_ratio > 0
    tokens = teacher.generation.max_tokens_blob if blob else teacher.generation.max_tokens
    longest = tokens * flight / tokens_per_s
    patience = read_timeout_s(teacher.request_timeout_s, tokens, flight)
    if longest > patience:
        messages.append(
            f"teacher.request_timeout_s: a request of {tokens} tokens among {flight} sequences "
            f"takes up to {longest:,.0f} s at {tokens_per_s:,.0f} tokens/s and is given up "
            f"after {patience:,.0f}; raise it, or lower teacher.max_sequences"
        )
    if teacher.requests_per_minute is not None:
        hours = sum(cost.requests for cost in run_plan.costs) / teacher.requests_per_minute / 60
        messages.append(f"teacher.requests_per_minute alone makes it {hours:,.1f} hours")
    return messages


def size_text(number: int) -> str:
    """Return a number of bytes as readable text."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if number >= size:
            return f"{number / size:,.{0 if unit == 'MB' else 1}f} {unit}"
    return f"{number / 1e3:,.0f} kB"


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
