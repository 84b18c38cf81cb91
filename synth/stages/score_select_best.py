"""Select the best candidate of each source by MetricX without reference: argmin(score)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from scorekit.errors import UserError
from scorekit.locks import hold_locks
from synth.config import SynthConfig
from synth.cost import Cost, Sizes
from synth.execution.clients import Clients, metricx_settings
from synth.execution.stage import MapStage
from synth.reasons import Reason
from synth.record import KeptRecord, RejectedRecord
from synth.stages.generate_128 import distinct_texts
from synth.stages.prefilter_score import broken_output, no_score_code
from synth.storage.distributions import Distribution, DistributionChart, Distributions, stratum
from synth.storage.store import Record, StageFolder

_CHART = ("Score of the candidates", "MetricX score (lower is better)")


class ScoreSelectBest(MapStage):
    """Scores all candidates that may compete, keeps the best `store_top_k`.

    A record gains `candidate_counts` {asked, distinct, scored, out {code: count}}, `topk`
    [{index, text, score}], `worst` {index, text, score} | null; `candidates` go, unless they are
    stored.
    """

    name = "score_select_best"
    other_names = ("score_128_select_best",)
    view = "final_candidates_topk.jsonl"
    services = frozenset({"metricx"})
    shows_rejected = True
    charts = (
        DistributionChart(_CHART[0], "score_best", "best", _CHART[1]),
        DistributionChart(_CHART[0], "score_worst", "worst", _CHART[1]),
    )

    def settings(self, cfg: SynthConfig) -> dict[str, Any]:
        """Return the settings that the selection depends on."""
        final = cfg.final_generation
        return {
            **metricx_settings(cfg),
            "store_top_k": final.store_top_k,
            "store_candidates": final.store_candidates,
            **({} if final.max_score is None else {"max_score": final.max_score}),
        }

    def cost(self, run: Sizes) -> Cost:
        """Return the cost of a score for every candidate."""
        return Cost(
            self.name,
            records=run.chosen,
            scored=run.chosen * run.cfg.final_generation.num_candidates,
            disk_bytes=int(run.chosen * run.best_bytes),
            driver_s=(0.001, 0.00011),
            view_records=run.chosen,
            view_bytes=run.line_bytes(run.text_bytes),
        )

    def distributions(self, cfg: SynthConfig, records: Iterable[Record]) -> Distributions:
        """Return the best and worst scores of the sources, and excluded candidates."""
        best, worst, margin = (Distribution(0.01) for _ in range(3))
        out: Counter[str] = Counter()
        strata: Counter[str] = Counter()
        for record in records:
            strata[stratum(record)] += 1
            out.update(record["candidate_counts"]["out"])
            score = record["topk"][0]["score"]
            best.add(score)
            if record.get("worst") is not None:
                worst.add(record["worst"]["score"])
                margin.add(record["worst"]["score"] - score)
        return {
            "score_best": best,
            "score_worst": worst,
            "margin": margin,
            "candidates_out": out,
            "strata": strata,
        }

    async def process(self, record: Record, clients: Clients) -> KeptRecord | RejectedRecord:
        """Score the valid candidates and keep the best.

        Candidates that are empty, cut, looping, filtered, or without a score are excluded: a
        failure read as 0 would win. Equal texts are scored once; for equal scores the first index
        wins."""
        final = clients.cfg.final_generation
        src = record["source_text"]
        out: Counter[str] = Counter()
        able = []
        for candidate in record["candidates"]:
            code = broken_output(src, candidate)
            if code is None:
                able.append(candidate)
            else:
                out[code] += 1
        texts = list(dict.fromkeys(candidate["text"] for candidate in able))
        scores = dict(zip(texts, await clients.score(src, texts), strict=True)) if texts else {}
        scored = []
        for candidate in able:
            score = scores[candidate["text"]]
            if score.value is None:
                out[no_score_code(score)] += 1
            else:
                index, text = candidate["index"], candidate["text"]
                scored.append({"index": index, "text": text, "score": score.value})
        counts = {
            "asked": len(record["candidates"]),
            "distinct": distinct_texts(record["candidates"]),
            "scored": len(scored),
        }
        base_record = {key: value for key, value in record.items() if key != "candidates"}
        base_record["candidate_counts"] = {**counts, "out": dict(sorted(out.items()))}
        if out[Reason.CONTENT_FILTER] == counts["asked"]:
            return RejectedRecord(
                base_record, Reason.CONTENT_FILTER, f"all {counts['asked']} candidates"
            )
        if not scored:
            return RejectedRecord(
                base_record, Reason.NO_CANDIDATE, ", ".join(f"{k} {n}" for k, n in out.items())
            )
        scored.sort(key=lambda candidate: (candidate["score"], candidate["index"]))
        topk = _distinct(scored)[: final.store_top_k]
        if final.max_score is not None:
            best = topk[0]["score"]
            topk = [candidate for candidate in topk if candidate["score"] <= final.max_score]
            if not topk:
                reason = f"the best scored {best:.3f}, over {final.max_score:g}"
                return RejectedRecord(base_record, Reason.OVER_MAX_SCORE, reason)
        result = {**base_record, "topk": topk, "worst": scored[-1] if len(scored) > 1 else None}
        if final.store_candidates:
            result["candidates"] = scored
        return KeptRecord(result)

    def finish(self, folder: StageFolder, cfg: SynthConfig, limit: int | None) -> None:
        """Delete the candidates after all are scored, unless they should be stored.

        The answer cache still has their texts. Nothing is deleted while another driver reads."""
        assert self.after is not None
        source = StageFolder(folder.out_dir, self.after.name)
        if cfg.final_generation.store_candidates or limit is not None:
            return
        with suppress(UserError), hold_locks([(source.lock(), False)], "delete candidates"):
            for index in range(source.shards() or 0):
                source.delete_records(index)


def _distinct(ranked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the first candidate of each text."""
    seen: dict[str, dict[str, Any]] = {}
    for candidate in ranked:
        seen.setdefault(candidate["text"], candidate)
    return list(seen.values())
