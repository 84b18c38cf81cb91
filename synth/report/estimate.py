"""Estimate the cost of a run from its config and the rates of its services."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from scorekit.llm.limits import read_timeout_s
from synth.config import PART, SynthConfig
from synth.context import Stage
from synth.cost import PACKED_ALIKE, Cost, Sizes
from synth.report.rates import TOKENS_PER_S, UNKNOWN, Rates
from synth.stages.prefilter_score import PrefilterScore
from synth.stages.table import ORDER

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

    answers_bytes: of answers.sqlite. views_bytes: of the views. disk_bytes: of everything, because
    nothing is deleted during the run."""

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
