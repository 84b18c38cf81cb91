"""What a run will cost, from its config and the rates of those who work at it."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from scorekit.llm.pacing import read_timeout_s
from synth.config import SynthConfig
from synth.context import Stage
from synth.drive.clients import PART
from synth.report.rates import TOKENS_PER_S, UNKNOWN, Rates
from synth.stages.cost import PACKED_ALIKE, Cost, Sizes
from synth.stages.prefilter_score import PrefilterScore
from synth.stages.table import ORDER

#: Bytes of a kept answer in answers.sqlite beside its text: of a candidate, a score, a verdict.
_ANSWER_BYTES, _SCORE_BYTES, _VERDICT_BYTES = 104, 110, 150
#: Sequences that keep a server busy, and beyond which they only wait: vLLM's smaller default, and
#: half more than its larger one.
_BUSY, _FULL = 256, 1536


#: Who works at a stage: what bounds it is whoever takes longest.
PARTS = ("teacher", "MetricX", "judge", "driver")


@dataclass(frozen=True, slots=True)
class Plan:
    """The costs of a run. answers_bytes: of answers.sqlite; views_bytes: of the views that are
    made; disk_bytes: of all together, as none is cleared while it runs."""

    costs: tuple[Cost, ...]
    rates: Rates
    answers_bytes: int = 0
    views_bytes: int = 0
    warnings: list[str] = field(default_factory=list)

    @property
    def disk_bytes(self) -> int:
        return sum(c.disk_bytes for c in self.costs) + self.answers_bytes + self.views_bytes

    def hours(self, cost: Cost) -> dict[str, float | None]:
        """Of each part that works at the stage; None where its rate is not known."""
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
        found = {part: n / rate / 3600 if rate else None for part, n, rate in work if n}
        return {**found, "driver": cpu / 3600}

    def binds(self, cost: Cost) -> tuple[str, float]:
        """The part that takes longest, of those whose rates are known, and its hours."""
        known = {part: hours for part, hours in self.hours(cost).items() if hours is not None}
        part = max(known, key=lambda name: known[name])
        return part, known[part]


def plan(cfg: SynthConfig, rates: Rates = UNKNOWN, stages: Sequence[Stage] = ORDER) -> Plan:
    """What the stages will ask and write when every source goes all the way through. A few ten per
    cent off is to be expected, of the disk a factor of 2."""
    run = Sizes(cfg)
    costs = tuple(stage.cost(run) for stage in stages)
    answers = sum(
        cost.sequences * (run.text_bytes + _ANSWER_BYTES)
        + cost.scored * _SCORE_BYTES
        + cost.judged * _VERDICT_BYTES
        for cost in costs
    )
    rates = replace(rates, tokens=rates.tokens or TOKENS_PER_S)
    made = Plan(costs, rates, int(answers), int(_views_bytes(run, costs)))
    made.warnings.extend(_warnings(cfg, made, run))
    return made


def _views_bytes(run: Sizes, costs: Sequence[Cost]) -> float:
    """Of the stages' views, and of what is left out, as far as they are not too long to be made."""
    most = run.cfg.run.view_records
    views = [(cost.view_records, cost.view_bytes) for cost in costs]
    views.append((sum(cost.left_out for cost in costs), run.line_bytes()))
    return sum(count * size for count, size in views if count <= most)


def _warnings(cfg: SynthConfig, made: Plan, run: Sizes) -> list[str]:
    found = [*_length_warnings(cfg, run), *_pace_warnings(cfg, made)]
    if cfg.data.target_examples_total > cfg.data.sample_pool_size:
        found.append("data.target_examples_total is over data.sample_pool_size: all are selected")
    if cfg.final_generation.store_candidates:
        more = size_text(int(run.chosen * run.candidates_bytes))
        found.append(f"final_generation.store_candidates keeps about {more} more")
    if cfg.prefilter.store_texts:
        more = size_text(int(2 * run.pool * run.text_bytes * PACKED_ALIKE))
        found.append(f"prefilter.store_texts keeps about {more} more, in two stages")
    folder = cfg.run.out_dir.absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free < made.disk_bytes:
        found.append(
            f"run.out_dir: {size_text(free)} are free, about {size_text(made.disk_bytes)} needed"
        )
    return found


def _length_warnings(cfg: SynthConfig, run: Sizes) -> list[str]:
    generation, blob = cfg.teacher.generation, cfg.final_generation.blob
    found = []
    if blob.enabled and blob.blob_ratio:
        most = blob.blob_max_tokens * run.most_ratio
        if most > generation.max_tokens_blob:
            found.append(
                f"teacher.generation.max_tokens_blob {generation.max_tokens_blob} cuts "
                f"translations of blobs: {blob.blob_max_tokens} tokens become up to {most:.0f}; "
                "such sources are rejected"
            )
    longest = run.longest_sentence
    if longest * run.most_ratio > generation.max_tokens:
        fits = generation.max_tokens / run.most_ratio
        found.append(
            f"teacher.generation.max_tokens {generation.max_tokens} fits every translation of "
            f"{fits:.0f} tokens; segmentation.max_chars {cfg.segmentation.max_chars} lets "
            f"sentences of about {longest:.0f} through: a cut translation is rejected"
        )
    return found


def _pace_warnings(cfg: SynthConfig, made: Plan) -> list[str]:
    teacher, final = cfg.teacher, cfg.final_generation
    tokens_per_s = made.rates.tokens or TOKENS_PER_S
    bound = teacher.max_sequences
    single = min(teacher.max_concurrency, bound or teacher.max_concurrency)
    several = final.strategy != "per_call" and final.num_candidates > 1
    most = teacher.max_concurrency * min(PART, final.num_candidates) if several else single
    flight = most if bound is None else min(most, bound)
    found = []
    if single < _BUSY:
        found.append(
            f"teacher.max_concurrency {teacher.max_concurrency}: {PrefilterScore.name} keeps "
            f"{single} sequences in flight; a server that makes {tokens_per_s:,.0f} tokens/s wants "
            f"{_BUSY} or more, so its hours will be longer"
        )
    if flight > _FULL:
        found.append(
            f"up to {flight} sequences in flight: more than vLLM decodes at once by "
            "default (1,024), the others wait; set teacher.max_sequences"
        )
    blob = final.blob.enabled and final.blob.blob_ratio > 0
    tokens = teacher.generation.max_tokens_blob if blob else teacher.generation.max_tokens
    longest = tokens * flight / tokens_per_s
    patience = read_timeout_s(teacher.request_timeout_s, tokens, flight)
    if longest > patience:
        found.append(
            f"teacher.request_timeout_s: a request of {tokens} tokens among {flight} sequences "
            f"takes up to {longest:,.0f} s at {tokens_per_s:,.0f} tokens/s and is given up "
            f"after {patience:,.0f}; raise it, or lower teacher.max_sequences"
        )
    if teacher.requests_per_minute is not None:
        hours = sum(cost.requests for cost in made.costs) / teacher.requests_per_minute / 60
        found.append(f"teacher.requests_per_minute alone makes it {hours:,.1f} hours")
    return found


def size_text(number: int) -> str:
    """Bytes, readable."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if number >= size:
            return f"{number / size:,.{0 if unit == 'MB' else 1}f} {unit}"
    return f"{number / 1e3:,.0f} kB"
