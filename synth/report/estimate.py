"""What a run will cost, from its config and the rates of those who work at it."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from scorekit.languages import find_language
from scorekit.llm.pacing import read_timeout_s
from scorekit.prompts import load_template
from synth.config import SynthConfig
from synth.drive.clients import PART
from synth.report.rates import DRIVER_S, TOKENS_PER_S, UNKNOWN, Rates

#: Tokens of the Qwen3 tokenizer that a translation takes for one of English: (1st, 99th percentile)
#: of paragraphs of the Debian installation guide. Of other languages: set by hand.
_TOKENS = {
    "en": (1.0, 1.0),
    "ko": (0.95, 2.27),
    "ja": (0.95, 2.05),
    "zh": (0.64, 1.35),
    "de": (1.03, 2.23),
    "ru": (0.98, 2.16),
}
_OTHER_TOKENS = (1.0, 2.3)
#: Tokens of the longest line that is still common in web text, and bytes of a token's text: set by
#: hand.
_LONG_SENTENCE, _TOKEN_BYTES = 200, 4.3
_TOKENS_A_CHAR = {"ko": 0.75, "zh": 0.7, "ja": 0.7, "th": 0.5}
_OTHER_TOKENS_A_CHAR = 0.25
#: Bytes of a record beside its texts, packed, and what a byte of text becomes: once, and where
#: another of the same source stands beside it. Of an exported row's `selection`, in both formats.
_RECORD_BYTES, _PACKED, _PACKED_ALIKE, _SELECTION_BYTES = 110, 0.45, 0.2, 500
_LINE_BYTES = 700  # of a view's line beside its texts
#: Bytes of a kept answer in answers.sqlite beside its text: of a candidate, a score, a verdict.
_ANSWER_BYTES, _SCORE_BYTES, _VERDICT_BYTES = 104, 110, 150
#: Sequences that keep a server busy, and beyond which they only wait: vLLM's smaller default, and
#: half more than its larger one.
_BUSY, _FULL = 256, 1536


@dataclass(frozen=True, slots=True)
class Cost:
    """What one stage needs. records: that come in."""

    stage: str
    records: int = 0
    requests: int = 0
    sequences: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    scored: int = 0
    judged: int = 0
    disk_bytes: int = 0


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
        a_record, a_candidate = DRIVER_S[cost.stage]
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


@dataclass(frozen=True, slots=True)
class _Lengths:
    """Mean tokens of a source, and of its translation: usual, and at most."""

    source: float
    ratio: float
    most_ratio: float

    @property
    def target(self) -> float:
        return self.source * self.ratio


def plan(cfg: SynthConfig, rates: Rates = UNKNOWN) -> Plan:
    """What the stages will ask and write when every source goes all the way through.

    Assumes that each length bucket gives its quota, that sentences end at 200 tokens, and that
    blobs fill up their limit. A few ten per cent off is to be expected, of the disk a factor of 2.
    """
    lengths = _lengths(cfg)
    final = cfg.final_generation
    pool = cfg.data.sample_pool_size
    chosen = min(cfg.data.target_examples_total, pool)
    prompt = len(load_template(cfg.teacher.prompt)) * _OTHER_TOKENS_A_CHAR + 30 + lengths.source
    size = 1 if final.strategy == "per_call" else min(PART, cfg.teacher.max_sequences or PART)
    parts = math.ceil(final.num_candidates / size)
    judged = chosen * (final.store_top_k if cfg.filters.on_reject == "next_best" else 1)
    judged = judged if cfg.filters.llm_judge.enabled else 0
    disk = _disk(cfg, lengths, pool, chosen)
    costs = (
        _cost("sample_sources", disk, records=pool),
        _cost(
            "prefilter_score",
            disk,
            records=pool,
            requests=2 * pool,
            sequences=2 * pool,
            tokens_in=2 * pool * prompt,
            tokens_out=2 * pool * lengths.target,
            scored=2 * pool,
        ),
        _cost("select_sources", disk, records=pool),
        _cost(
            "generate_128",
            disk,
            records=chosen,
            requests=chosen * parts,
            sequences=chosen * final.num_candidates,
            tokens_in=chosen * parts * prompt,
            tokens_out=chosen * final.num_candidates * lengths.target,
        ),
        _cost("score_select_best", disk, records=chosen, scored=chosen * final.num_candidates),
        _cost("format_filter", disk, records=chosen, judged=judged),
        _cost("export", disk, records=chosen),
    )
    text = lengths.target * _TOKEN_BYTES
    asked = 2 * pool + chosen * final.num_candidates
    answers = asked * (text + _ANSWER_BYTES + _SCORE_BYTES) + judged * _VERDICT_BYTES
    rates = replace(rates, tokens=rates.tokens or TOKENS_PER_S)
    made = Plan(costs, rates, int(answers), int(disk["views"]))
    made.warnings.extend(
        _warnings(cfg, made, lengths, int(disk["candidates"]), int(2 * pool * text * _PACKED_ALIKE))
    )
    return made


def _disk(cfg: SynthConfig, lengths: _Lengths, pool: int, chosen: int) -> dict[str, float]:
    """Bytes of each stage's folder when it is done, of the candidates until they are scored, and of
    the views."""
    final = cfg.final_generation
    source, text = lengths.source * _TOKEN_BYTES, lengths.target * _TOKEN_BYTES
    record = _RECORD_BYTES + source * _PACKED
    stored = 2 * text * _PACKED_ALIKE if cfg.prefilter.store_texts else 0
    scored = record + 60 + stored
    candidates = final.num_candidates * (text * _PACKED_ALIKE + 20)
    best = scored + (final.store_top_k + 1) * (text * _PACKED_ALIKE + 40)
    kept = candidates if final.store_candidates else 0
    lines = (
        (pool, source + _LINE_BYTES),
        (chosen, source + text + _LINE_BYTES),
        (pool - chosen, source + _LINE_BYTES),
    )
    most = cfg.run.view_records
    return {
        "sample_sources": 2 * pool * record,  # its Parquet view, too
        "prefilter_score": pool * scored,
        "select_sources": pool * scored,
        "generate_128": chosen * (scored + candidates),
        "score_select_best": chosen * (best + kept),
        "format_filter": chosen * (best + kept + text * _PACKED_ALIKE + 60),
        "export": chosen * 2 * ((source + text) * _PACKED + _SELECTION_BYTES),
        "candidates": chosen * candidates,
        "views": sum(count * size for count, size in lines if count <= most),
    }


def _cost(stage: str, disk: Mapping[str, float], **counts: float) -> Cost:
    return Cost(stage, disk_bytes=int(disk[stage]), **{key: int(n) for key, n in counts.items()})


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
            f"final_generation.store_candidates keeps about {size_text(candidate_bytes)} more"
        )
    if cfg.prefilter.store_texts:
        found.append(
            f"prefilter.store_texts keeps about {size_text(text_bytes)} more, in two stages"
        )
    folder = cfg.run.out_dir.absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if free < made.disk_bytes:
        found.append(
            f"run.out_dir: {size_text(free)} are free, about {size_text(made.disk_bytes)} needed"
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
    tokens_per_s = made.rates.tokens or TOKENS_PER_S
    bound = teacher.max_sequences
    single = min(teacher.max_concurrency, bound or teacher.max_concurrency)
    several = final.strategy != "per_call" and final.num_candidates > 1
    most = teacher.max_concurrency * min(PART, final.num_candidates) if several else single
    flight = most if bound is None else min(most, bound)
    found = []
    if single < _BUSY:
        found.append(
            f"teacher.max_concurrency {teacher.max_concurrency}: prefilter_score keeps {single} "
            f"sequences in flight; a server that makes {tokens_per_s:,.0f} tokens/s wants "
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
