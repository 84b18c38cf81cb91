"""What a run will cost, from its config alone; and how far one has come, from its folder."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from scorekit.errors import UserError
from scorekit.languages import find_language
from scorekit.llm_pacing import read_timeout_s
from scorekit.prompts import load_template
from synth.config import SynthConfig
from synth.stats import STAGES, StageCounts, duration, funnel, process_figures
from synth.store import StageFolder
from synth.tools import PART

#: Tokens of the Qwen3 tokenizer that a translation takes for one of English: (1st, 99th percentile)
#: of paragraphs of the Debian installation guide. Of other languages: set by hand.
_TOKENS = {
    "en": (1.0, 1.0), "ko": (0.95, 2.27), "ja": (0.95, 2.05), "zh": (0.64, 1.35),
    "de": (1.03, 2.23), "ru": (0.98, 2.16),
}  # fmt: skip
_OTHER_TOKENS = (1.0, 2.3)
#: Tokens of the longest line that is still common in web text, and bytes of a token's text: set by
#: hand.
_LONG_SENTENCE, _TOKEN_BYTES = 200, 4.3
_TOKENS_A_CHAR = {"ko": 0.75, "zh": 0.7, "ja": 0.7, "th": 0.5}
_OTHER_TOKENS_A_CHAR = 0.25
#: Bytes of a record beside its texts, of a candidate, of an exported row's `selection`.
_RECORD_BYTES, _CANDIDATE_BYTES, _SELECTION_BYTES = 450, 60, 1900
#: Sequences that keep a server busy, and beyond which they only wait: vLLM's smaller default, and
#: half more than its larger one.
_BUSY, _FULL = 256, 1536


@dataclass(frozen=True, slots=True)
class Cost:
    """What one stage needs."""

    stage: str
    requests: int = 0
    sequences: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    scored: int = 0
    judged: int = 0
    disk_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """The costs of a run. disk_bytes: of all stages together, as none is cleared while it runs."""

    costs: tuple[Cost, ...]
    tokens_per_s: float
    warnings: list[str] = field(default_factory=list)

    @property
    def disk_bytes(self) -> int:
        return sum(cost.disk_bytes for cost in self.costs)

    def hours(self, cost: Cost) -> float:
        """Of the teacher's output alone."""
        return cost.tokens_out / self.tokens_per_s / 3600


@dataclass(frozen=True, slots=True)
class _Lengths:
    """Mean tokens of a source, and of its translation: usual, and at most."""

    source: float
    ratio: float
    most_ratio: float

    @property
    def target(self) -> float:
        return self.source * self.ratio


def plan(cfg: SynthConfig, tokens_per_s: float) -> Plan:
    """What the stages will ask and write when every source goes all the way through.

    Assumes that each length bucket gives its quota, that sentences end at 200 tokens, and that
    blobs fill up their limit. A few ten per cent off is to be expected.
    """
    lengths = _lengths(cfg)
    final = cfg.final_generation
    pool = cfg.data.sample_pool_size
    chosen = min(cfg.data.target_examples_total, pool)
    prompt = len(load_template(cfg.teacher.prompt)) * _OTHER_TOKENS_A_CHAR + 30 + lengths.source
    size = 1 if final.strategy == "per_call" else min(PART, cfg.teacher.max_sequences or PART)
    parts = math.ceil(final.num_candidates / size)
    record = _RECORD_BYTES + lengths.source * _TOKEN_BYTES
    text = lengths.target * _TOKEN_BYTES
    scored = record + 150 + (2 * text if cfg.prefilter.store_texts else 0)
    candidates = final.num_candidates * (text + _CANDIDATE_BYTES)
    best = scored + (final.store_top_k + 1) * (text + _CANDIDATE_BYTES)
    stored = candidates if final.store_candidates else 0
    judge = cfg.filters.llm_judge.enabled
    tries = final.store_top_k if cfg.filters.on_reject == "next_best" else 1
    costs = (
        _cost("sample_sources", pool * record * 1.5),  # its Parquet view is compressed
        _cost(
            "prefilter_score", 2 * pool * scored,
            requests=2 * pool, sequences=2 * pool, tokens_in=2 * pool * prompt,
            tokens_out=2 * pool * lengths.target, scored=2 * pool,
        ),
        _cost("select_sources", (2 * pool - chosen) * scored),
        _cost(
            "generate_128", chosen * (scored + candidates),
            requests=chosen * parts, sequences=chosen * final.num_candidates,
            tokens_in=chosen * parts * prompt,
            tokens_out=chosen * final.num_candidates * lengths.target,
        ),
        _cost("score_select_best", chosen * (2 * best + stored),
              scored=chosen * final.num_candidates),
        _cost("format_filter", chosen * (best + stored + text + 300),
              judged=chosen * tries if judge else 0),
        _cost("export", chosen * (record + text + _SELECTION_BYTES) * 1.3),
    )  # fmt: skip
    made = Plan(costs, tokens_per_s)
    made.warnings.extend(_warnings(cfg, made, lengths, int(chosen * stored), int(2 * pool * text)))
    return made


def _cost(stage: str, disk: float, **counts: float) -> Cost:
    return Cost(stage, disk_bytes=int(disk), **{key: int(n) for key, n in counts.items()})


def _lengths(cfg: SynthConfig) -> _Lengths:
    low, high = _band(cfg.data.tgt_lang)
    source_middle = math.sqrt(math.prod(_band(cfg.data.src_lang)))
    blob = cfg.final_generation.blob
    share = blob.blob_ratio if blob.enabled else 0.0
    sentences = _mean_of_buckets(cfg, min(_LONG_SENTENCE, _longest_sentence(cfg)))
    mean = (1 - share) * sentences + share * _mean_of_buckets(cfg, blob.blob_max_tokens)
    return _Lengths(mean, math.sqrt(low * high) / source_middle, high / source_middle)


def _mean_of_buckets(cfg: SynthConfig, most: float) -> float:
    """Of the middles of the buckets that begin under `most`, each with its quota."""
    edges = cfg.bucketing.boundaries
    quota = cfg.bucketing.per_bucket_quota
    weights = quota if isinstance(quota, list) else [1] * (len(edges) - 1)
    middles = [
        (weight, (edge + min(end, most)) / 2)
        for weight, edge, end in zip(weights, edges[:-1], edges[1:], strict=True)
        if edge < most and weight
    ] or [(1, most)]
    return sum(w * middle for w, middle in middles) / sum(w for w, _ in middles)


def _longest_sentence(cfg: SynthConfig) -> float:
    """In tokens."""
    language = find_language(cfg.data.src_lang)
    each = _TOKENS_A_CHAR.get(language.madlad if language else "", _OTHER_TOKENS_A_CHAR)
    return cfg.segmentation.max_chars * each


def _band(code: str) -> tuple[float, float]:
    language = find_language(code)
    return _TOKENS.get(language.madlad if language else "", _OTHER_TOKENS)


def _warnings(
    cfg: SynthConfig, made: Plan, lengths: _Lengths, candidate_bytes: int, text_bytes: int
) -> list[str]:
    found = [*_length_warnings(cfg, lengths), *_pace_warnings(cfg, made)]
    if cfg.data.target_examples_total > cfg.data.sample_pool_size:
        found.append("data.target_examples_total is over data.sample_pool_size: all are selected")
    if cfg.final_generation.store_candidates:
        found.append(
            f"final_generation.store_candidates keeps about {_bytes(candidate_bytes)} more"
        )
    if cfg.prefilter.store_texts:
        found.append(f"prefilter.store_texts keeps about {_bytes(text_bytes)} more, in two stages")
    folder = cfg.run.out_dir.absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free < made.disk_bytes:
        found.append(
            f"run.out_dir: {_bytes(free)} are free, about {_bytes(made.disk_bytes)} needed"
        )
    return found


def _length_warnings(cfg: SynthConfig, lengths: _Lengths) -> list[str]:
    generation, blob = cfg.teacher.generation, cfg.final_generation.blob
    found = []
    if blob.enabled and blob.blob_ratio:
        most = blob.blob_max_tokens * lengths.most_ratio
        if most > generation.max_tokens_blob:
            found.append(
                f"teacher.generation.max_tokens_blob {generation.max_tokens_blob} cuts "
                f"translations of blobs: {blob.blob_max_tokens} tokens become up to {most:.0f}; "
                "such sources are rejected"
            )
    longest = _longest_sentence(cfg)
    if longest * lengths.most_ratio > generation.max_tokens:
        fits = generation.max_tokens / lengths.most_ratio
        found.append(
            f"teacher.generation.max_tokens {generation.max_tokens} fits every translation of "
            f"{fits:.0f} tokens; segmentation.max_chars {cfg.segmentation.max_chars} lets "
            f"sentences of about {longest:.0f} through: a cut translation is rejected"
        )
    return found


def _pace_warnings(cfg: SynthConfig, made: Plan) -> list[str]:
    teacher, final = cfg.teacher, cfg.final_generation
    bound = teacher.max_sequences
    single = min(teacher.max_concurrency, bound or teacher.max_concurrency)
    several = final.strategy != "per_call" and final.num_candidates > 1
    most = teacher.max_concurrency * min(PART, final.num_candidates) if several else single
    flight = most if bound is None else min(most, bound)
    found = []
    if single < _BUSY:
        found.append(
            f"teacher.max_concurrency {teacher.max_concurrency}: prefilter_score keeps {single} "
            f"sequences in flight; a server that makes {made.tokens_per_s:,.0f} tokens/s wants "
            f"{_BUSY} or more, so its hours will be longer"
        )
    if flight > _FULL:
        found.append(
            f"up to {flight} sequences in flight: more than vLLM decodes at once by "
            "default (1,024), the others wait; set teacher.max_sequences"
        )
    blob = final.blob.enabled and final.blob.blob_ratio > 0
    tokens = teacher.generation.max_tokens_blob if blob else teacher.generation.max_tokens
    longest = tokens * flight / made.tokens_per_s
    patience = read_timeout_s(teacher.request_timeout_s, tokens, flight)
    if longest > patience:
        found.append(
            f"teacher.request_timeout_s: a request of {tokens} tokens among {flight} sequences "
            f"takes up to {longest:,.0f} s at {made.tokens_per_s:,.0f} tokens/s and is given up "
            f"after {patience:,.0f}; raise it, or lower teacher.max_sequences"
        )
    if teacher.requests_per_minute is not None:
        hours = sum(cost.requests for cost in made.costs) / teacher.requests_per_minute / 60
        found.append(f"teacher.requests_per_minute alone makes it {hours:,.1f} hours")
    return found


def estimate(cfg: SynthConfig, tokens_per_s: float = 7500.0) -> RenderableType:
    """The plan as a table, with what is to be minded under it. tokens_per_s: of output."""
    made = plan(cfg, tokens_per_s)
    table = Table(title=f"About, at {tokens_per_s:,.0f} output tokens/s", box=box.SIMPLE_HEAD,
                  pad_edge=False, collapse_padding=True)  # fmt: skip
    table.add_column("stage", no_wrap=True)
    for name in ("requests", "sequences", "tokens\nin", "tokens\nout", "hours", "scored",
                 "judged"):  # fmt: skip
        table.add_column(name, justify="right", no_wrap=True)
    total = Cost("all", *(
        sum(getattr(cost, name) for cost in made.costs)
        for name in ("requests", "sequences", "tokens_in", "tokens_out", "scored", "judged",
                     "disk_bytes")
    ))  # fmt: skip
    for cost in (*made.costs, total):
        if cost is total:
            table.add_section()
        hours = f"{made.hours(cost):,.1f}" if cost.tokens_out else ""
        table.add_row(
            cost.stage, _count(cost.requests), _count(cost.sequences), _count(cost.tokens_in),
            _count(cost.tokens_out), hours, _count(cost.scored), _count(cost.judged),
        )  # fmt: skip
    largest = sorted(made.costs, key=lambda cost: -cost.disk_bytes)[:3]
    parts = ", ".join(f"{cost.stage} {_bytes(cost.disk_bytes)}" for cost in largest)
    disk = Text(f"disk: about {_bytes(total.disk_bytes)} (most of it: {parts})")
    return Group(table, disk, *(Text(f"! {line}", style="yellow") for line in made.warnings))


def status(out_dir: Path) -> RenderableType:
    """How far the stages of a run have come. Raises UserError where none was begun."""
    counts = {c.stage: c for c in funnel(out_dir)}
    if not counts:
        raise UserError(f"{out_dir}: no run here (no stage was begun)")
    table = Table(title=str(out_dir))
    table.add_column("stage")
    for name in ("shards", "in", "out", "rejected", "records/s", "time left"):
        table.add_column(name, justify="right")
    for name in STAGES:
        if name not in counts:
            table.add_row(name, "–", "", "", "", "", "", style="dim")
            continue
        told = counts[name]
        figures = process_figures(StageFolder(out_dir, name))
        rate = figures["records_per_s"]
        left = _time_left(told, counts, rate)
        table.add_row(
            name, f"{told.done} of {told.shards}",
            _count(told.records_in), _count(told.records_out),
            _count(told.records_in - told.records_out), "" if rate is None else f"{rate:,.1f}",
            "done" if told.done == told.shards else "?" if left is None else duration(left),
        )  # fmt: skip
    return table


def _time_left(
    told: StageCounts, counts: dict[str, StageCounts], rate: float | None
) -> float | None:
    """Seconds; None where nothing is known yet. Other machines' processes count as they did."""
    place = STAGES.index(told.stage)
    before = counts.get(STAGES[place - 1]) if place else None
    if not rate or before is None:
        return None
    return max(0, before.records_out - told.records_in) / rate


def _count(number: int) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6)):
        if number >= size:
            value = number / size
            return f"{value:,.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"
    return f"{number:,}" if number else ""


def _bytes(number: int) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if number >= size:
            return f"{number / size:,.{0 if unit == 'MB' else 1}f} {unit}"
    return f"{number / 1e3:,.0f} kB"
