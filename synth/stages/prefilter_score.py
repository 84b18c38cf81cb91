"""Greedy against sampled: how much better can the teacher do than its first thought?

improvement = score_greedy - score_sample (MetricX: lower is better), as in arXiv 2601.09012, 2.1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from scorekit.text import checks
from synth.config import SynthConfig
from synth.drive.clients import Clients
from synth.drive.kinds import MapStage
from synth.folder.distributions import Drawn, Found, Spread, stratum
from synth.folder.store import Record
from synth.record import Kept, Rejected, SourceFailed, teacher_seed
from synth.stages.cost import Cost, Sizes
from synth.stages.settings import metricx_settings, teacher_settings

#: Share of a text that one loop may fill, where the source has none such, before it is broken.
MAX_LOOP = 0.5
_SCORE = "MetricX score (lower is better)"
_BOTH = "Score of the greedy and the sampled translation"


def improvement(of: str) -> Drawn:
    """The improvement of these sources, in the picture of all that have one."""
    axis = "MetricX points (above 0: the sample is better)"
    return Drawn("Improvement of the sample over greedy", "improvement", of, axis)


class PrefilterScore(MapStage):
    """Two translations of each source, and their scores.

    A record gains `prefilter`: {score_greedy, score_sample, improvement[, greedy, sample]}.
    """

    name = "prefilter_score"
    view = "prefilter_candidates.jsonl"
    shows_rejected = True
    drawn = (
        improvement("all"),
        Drawn(_BOTH, "score_greedy", "greedy", _SCORE),
        Drawn(_BOTH, "score_sample", "sample", _SCORE),
    )

    def uses(self, cfg: SynthConfig) -> frozenset[str]:
        """Teacher and MetricX."""
        return frozenset({"teacher", "metricx"})

    def settings(self, cfg: SynthConfig) -> dict[str, Any]:
        """What the scores depend on."""
        generation = cfg.teacher.generation
        return {
            **teacher_settings(cfg),
            **metricx_settings(cfg),
            "greedy_temperature": generation.greedy_temperature,
            "sample_temperature": generation.sample_temperature,
            "store_texts": cfg.prefilter.store_texts,
        }

    def cost(self, run: Sizes) -> Cost:
        """Two translations and two scores of each source of the pool."""
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

    def figures(self, cfg: SynthConfig, records: Iterable[Record]) -> Found:
        """Scores and improvement."""
        return improvements(records)

    async def process(self, record: Record, clients: Clients) -> Kept | Rejected:
        """Translate twice, score both. A source that lost either output is rejected: a broken
        greedy output must not look like a large improvement."""
        generation = clients.cfg.teacher.generation
        seed = teacher_seed(clients.seed, record["source_id"], "prefilter")
        texts: dict[str, str] = {}
        for which, temperature in (
            ("greedy", generation.greedy_temperature),
            ("sample", generation.sample_temperature),
        ):
            try:
                (choice,) = await clients.translate(record, temperature=temperature, n=1, seed=seed)
            except SourceFailed as error:
                return Rejected(record, error.code, str(error))
            code = broken_output(record["source_text"], choice)
            if code is not None:
                return Rejected(record, f"{which}_{code}", more={which: choice["text"]})
            texts[which] = choice["text"]
        greedy, sample = await clients.score(record["source_text"], list(texts.values()))
        for which, score in (("greedy", greedy), ("sample", sample)):
            if score.value is None:
                return Rejected(record, f"{which}_score_{score.error}", more=texts)
        assert greedy.value is not None and sample.value is not None
        told = {
            "score_greedy": greedy.value,
            "score_sample": sample.value,
            "improvement": greedy.value - sample.value,
        }
        if clients.cfg.prefilter.store_texts:
            told |= texts  # type: ignore[arg-type]
        return Kept({**record, "prefilter": told})


def improvements(records: Iterable[Record]) -> Found:
    """How the scores of both translations are spread, and their differences."""
    names = ("improvement", "score_greedy", "score_sample")
    found = {name: Spread(0.01) for name in names}
    strata: Counter[str] = Counter()
    for record in records:
        strata[stratum(record)] += 1
        for name in names:
            found[name].add(record["prefilter"][name])
    return {**found, "strata": strata}


def broken_output(src: str, choice: dict[str, Any]) -> str | None:
    """Why a translation is none, as a code of synth/report/reasons.py; None if it may be one.

    A choice that the server broke off ("abort", "error") never comes here: scorekit/llm/wire.py has
    it asked for again.
    """
    reason = choice["finish_reason"]
    if reason == "length":
        return "cut"
    if reason == "content_filter":
        return "content_filter"
    if not choice["text"].strip():
        return "empty"
    return "looping" if reason == "repetition" or _loops(src, choice["text"]) else None


def _loops(src: str, text: str) -> bool:
    # Where a loop fills half of a text, a third of its ten-character pieces repeat others. Asking
    # that first costs a twentieth of looking for the loops, which few texts have.
    pieces = len(text) - 9
    if pieces > 20 and len({text[i : i + 10] for i in range(pieces)}) > 0.7 * pieces:
        return False
    return checks.repetition(src, text) > MAX_LOOP
