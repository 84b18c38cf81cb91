"""The best candidate of each source, by MetricX quality estimation: best = argmin(score)."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Any

from scorekit.errors import UserError
from synth.config import SynthConfig
from synth.context import Context
from synth.drive.clients import Clients
from synth.folder.locks import held
from synth.folder.store import Record, StageFolder
from synth.record import Kept, Rejected
from synth.stages.generate_128 import distinct_texts
from synth.stages.prefilter_score import broken_output
from synth.stages.settings import metricx_settings


class ScoreSelectBest:
    """Scores all candidates that may compete, keeps the best `store_top_k`."""

    name = "score_select_best"
    after = "generate_128"

    def uses(self, cfg: SynthConfig) -> frozenset[str]:
        """MetricX."""
        return frozenset({"metricx"})

    def settings(self, cfg: SynthConfig) -> dict[str, Any]:
        """What the choice depends on."""
        final = cfg.final_generation
        return {
            **metricx_settings(cfg),
            "store_top_k": final.store_top_k,
            "store_candidates": final.store_candidates,
            **({} if final.max_score is None else {"max_score": final.max_score}),
        }

    async def process(self, record: Record, clients: Clients) -> Kept | Rejected:
        """Candidates that are empty, cut, looping, kept back, or failed in scoring never
        compete: a failure read as 0 would win. Equal texts are scored once; of equal scores the
        first index wins."""
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
                out[f"score_{score.error}"] += 1
            else:
                index, text = candidate["index"], candidate["text"]
                scored.append({"index": index, "text": text, "score": score.value})
        counts = {
            "asked": len(record["candidates"]),
            "distinct": distinct_texts(record["candidates"]),
            "scored": len(scored),
        }
        rest = {key: value for key, value in record.items() if key != "candidates"}
        rest["candidate_counts"] = {**counts, "out": dict(sorted(out.items()))}
        if out["content_filter"] == counts["asked"]:
            return Rejected(rest, "content_filter", f"all {counts['asked']} candidates")
        if not scored:
            return Rejected(rest, "no_candidate", ", ".join(f"{k} {n}" for k, n in out.items()))
        scored.sort(key=lambda candidate: (candidate["score"], candidate["index"]))
        topk = _distinct(scored)[: final.store_top_k]
        if final.max_score is not None:
            best = topk[0]["score"]
            topk = [candidate for candidate in topk if candidate["score"] <= final.max_score]
            if not topk:
                reason = f"the best scored {best:.3f}, over {final.max_score:g}"
                return Rejected(rest, "over_max_score", reason)
        kept = {**rest, "topk": topk, "worst": scored[-1] if len(scored) > 1 else None}
        if final.store_candidates:
            kept["candidates"] = scored
        return Kept(kept)


def let_candidates_go(ctx: Context) -> None:
    """Delete the candidates of generate_128 when all of them are scored, unless they are to be
    stored: the kept answers hold their texts, too. Not while another driver reads there."""
    source = StageFolder(ctx.out_dir, ScoreSelectBest.after)
    if ctx.cfg.final_generation.store_candidates or ctx.limit is not None:
        return
    with suppress(UserError), held([(source.lock(), False)], "let candidates go"):
        for index in range(source.shards() or 0):
            source.let_go(index)


def _distinct(ranked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first of each text: two equal candidates are one choice."""
    seen: dict[str, dict[str, Any]] = {}
    for candidate in ranked:
        seen.setdefault(candidate["text"], candidate)
    return list(seen.values())
