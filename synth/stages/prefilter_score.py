"""Score a greedy and a sampled translation of each source.

improvement = score_greedy - score_sample (MetricX: lower is better), as in arXiv 2601.09012, 2.1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from scorekit.llm.wire import unfinished_reason
from scorekit.text import checks
from synth.config import SynthConfig
from synth.cost import Cost, Sizes
from synth.execution.clients import Clients, Score, metricx_settings, teacher_settings
from synth.execution.stage import MapStage
from synth.reasons import Family, FamilyCode, Reason, RuleCode
from synth.record import KeptRecord, RejectedRecord, SourceFailed, teacher_seed
from synth.storage.distributions import Distribution, DistributionChart, Distributions, stratum
from synth.storage.store import Record

#: Largest share of a text in loops, beyond the source's, before it counts as broken.
MAX_LOOP = 0.5
_SCORE = "MetricX score (lower is better)"
_BOTH = "Score of the greedy and the sampled translation"


def improvement(label: str) -> DistributionChart:
    """Return the chart of the improvement for these sources."""
    axis = "MetricX points (above 0: the sample is better)"
    return DistributionChart("Improvement of the sample over greedy", "improvement", label, axis)


class PrefilterScore(MapStage):
    """Translates each source twice, and scores both translations.

    A record gains `prefilter`: {score_greedy, score_sample, improvement[, greedy, sample]}.
    """

    name = "prefilter_score"
    view = "prefilter_candidates.jsonl"
    services = frozenset({"teacher", "metricx"})
    shows_rejected = True
    charts = (
        improvement("all"),
        DistributionChart(_BOTH, "score_greedy", "greedy", _SCORE),
        DistributionChart(_BOTH, "score_sample", "sample", _SCORE),
    )

    def settings(self, cfg: SynthConfig) -> dict[str, Any]:
        """Return the settings that the scores depend on."""
        generation = cfg.teacher.generation
        return {
            **teacher_settings(cfg),
            **metricx_settings(cfg),
            "greedy_temperature": generation.greedy_temperature,
            "sample_temperature": generation.sample_temperature,
            "store_texts": cfg.prefilter.store_texts,
        }

    def cost(self, run: Sizes) -> Cost:
        """Return the cost of two translations and two scores for each source of the pool."""
        return Cost(
            self.name,
            records=run.pool,
            requests=2 * run.pool,
            sequences=2 * run.pool,
            tokens_in=int(2 * run.pool * run.prompt_tokens),
            tokens_out=int(2 * run.pool * run.target_tokens),
            scored=2 * run.pool,
            disk_bytes=int(run.pool * run.scored_bytes),
            driver_s=(0.0022, 0.0),
            view_records=run.pool,
            view_bytes=run.line_bytes(),
        )

    def distributions(self, cfg: SynthConfig, records: Iterable[Record]) -> Distributions:
        """Return the distributions of scores and improvement."""
        return improvements(records)

    async def process(self, record: Record, clients: Clients) -> KeptRecord | RejectedRecord:
        """Translate twice and score both. If either output is broken, the source is rejected: a
        broken greedy output must not look like a large improvement."""
        generation = clients.cfg.teacher.generation
        seed = teacher_seed(clients.seed, record["source_id"], "prefilter")
        texts: dict[str, str] = {}
        for which, family, temperature in (
            ("greedy", Family.GREEDY, generation.greedy_temperature),
            ("sample", Family.SAMPLE, generation.sample_temperature),
        ):
            try:
                (choice,) = await clients.translate(record, temperature=temperature, n=1, seed=seed)
            except SourceFailed as error:
                return RejectedRecord(record, error.code, str(error))
            code = broken_output(record["source_text"], choice)
            if code is not None:
                return RejectedRecord(record, family.code(code), more={which: choice["text"]})
            texts[which] = choice["text"]
        greedy, sample = await clients.score(record["source_text"], list(texts.values()))
        for family, score in ((Family.GREEDY, greedy), (Family.SAMPLE, sample)):
            if score.value is None:
                return RejectedRecord(record, family.code(no_score_code(score)), more=texts)
        assert greedy.value is not None and sample.value is not None
        scores = {
            "score_greedy": greedy.value,
            "score_sample": sample.value,
            "improvement": greedy.value - sample.value,
        }
        if clients.cfg.prefilter.store_texts:
            scores |= texts  # type: ignore[arg-type]
        return KeptRecord({**record, "prefilter": scores})


def no_score_code(score: Score) -> FamilyCode:
    """Return the reason code of a translation without a score."""
    return Family.SCORE.code(str(score.error))


def improvements(records: Iterable[Record]) -> Distributions:
    """Return the distributions of both scores and of their differences."""
    names = ("improvement", "score_greedy", "score_sample")
    spreads = {name: Distribution(0.01) for name in names}
    strata: Counter[str] = Counter()
    for record in records:
        strata[stratum(record)] += 1
        for name in names:
            spreads[name].add(record["prefilter"][name])
    return {**spreads, "strata": strata}


#: Reasons of outputs that are not whole, by `unfinished_reason`.
_UNFINISHED = {
    "length": Reason.CUT,
    "refused": Reason.CONTENT_FILTER,
    "malformed": Reason.UNFINISHED,
}


def broken_output(src: str, choice: dict[str, Any]) -> Reason | RuleCode | None:
    """Return the reason code of a broken translation; None if it may be valid.

    Choices that the server aborted ("abort", "error") are retried in scorekit/llm/wire.py.
    """
    reason = choice["finish_reason"]
    if reason != "repetition" and (problem := unfinished_reason(reason)) is not None:
        return _UNFINISHED[problem]
    if not choice["text"].strip():
        return RuleCode.EMPTY
    is_looping = reason == "repetition" or _loops(src, choice["text"])
    return Reason.LOOPING if is_looping else None


def _loops(src: str, text: str) -> bool:
    # If loops fill half of a text, a third of its ten-character windows repeat. Testing this first
    # costs a twentieth of searching for loops, which are rare.
    num_windows = len(text) - 9
    if num_windows > 20 and len({text[i : i + 10] for i in range(num_windows)}) > 0.7 * num_windows:
        return False
    return checks.repetition(src, text) > MAX_LOOP
