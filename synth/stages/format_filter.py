"""format_filter: check the best candidate, or the best ones in turn, by rules and the judge.

An LLM judge decides if a rule is uncertain. Without one (disabled, backend `rules`, or failed with
a permissive policy) the rule rejects its strong doubts, and passes the others, which are counted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from scorekit.text.rules import Pair
from synth.config import SynthConfig
from synth.cost import PACKED_ALIKE, Cost, Sizes
from synth.execution.clients import Clients
from synth.execution.stage import MapStage
from synth.filters import RuleVerdict, as_metadata, check_rules
from synth.reasons import Code, Family, FamilyCode, Reason, RuleCode
from synth.record import KeptRecord, RejectedRecord
from synth.sources.measure import make_measure
from synth.sources.screen import digests, evaluation_texts
from synth.storage.distributions import Distribution, DistributionChart, Distributions, stratum
from synth.storage.store import Record

#: Number of records measured at once.
_BATCH = 1000
_CHARS, _TOKENS = "Length in characters", "Length in tokens"


class FormatFilter(MapStage):
    """Checks candidates. A record gains `target_text`, `best` and `filters`:

    passed, failed  codes of the rules that ran on the candidate
    doubtful        {code: what was seen} of rules that were not sure; left out where none was
    judge           {"pass", "reason_code", "notes"}, {"error": type}, or null where none was asked
    tried           [{"index", "reason_code"}] of the better candidates that were rejected before
    """

    name = "format_filter"
    shows_rejected = True
    charts = (
        DistributionChart(_CHARS, "source_chars", "source", "characters"),
        DistributionChart(_CHARS, "target_chars", "target", "characters"),
        DistributionChart(_TOKENS, "source_tokens", "source", "tokens, nearly"),
        DistributionChart(_TOKENS, "target_tokens", "target", "tokens, nearly"),
    )

    def uses(self, cfg: SynthConfig) -> frozenset[str]:
        """Return the judge if it is enabled."""
        return frozenset({"judge"} if cfg.filters.llm_judge.enabled else ())

    def settings(self, cfg: SynthConfig) -> dict[str, Any]:
        """Return all settings of filters except the judge's URL."""
        filters = cfg.filters.model_dump(mode="json", exclude={"llm_judge": {"url"}})
        if not cfg.filters.llm_judge.enabled:
            filters["llm_judge"] = {"enabled": False}
        elif cfg.filters.llm_judge.doubt_task is None:
            del filters["llm_judge"]["doubt_task"]  # runs from before this key can continue
        if cfg.data.decontaminate:
            filters["decontaminate"] = digests(cfg.data.decontaminate)
        return {**filters, "src_lang": cfg.data.src_lang, "tgt_lang": cfg.data.tgt_lang}

    def cost(self, run: Sizes) -> Cost:
        """Return the cost of a verdict for each best candidate, or for all stored ones with
        next_best."""
        filters = run.cfg.filters
        several = filters.on_reject == "next_best"
        looked_at = run.chosen * (run.cfg.final_generation.store_top_k if several else 1)
        record = run.best_bytes + run.text_bytes * PACKED_ALIKE + 60
        return Cost(
            self.name,
            records=run.chosen,
            judged=looked_at if filters.llm_judge.enabled else 0,
            disk_bytes=int(run.chosen * record),
            driver_s=(0.006, 0.0),
        )

    def distributions(self, cfg: SynthConfig, records: Iterable[Record]) -> Distributions:
        """Return lengths, scores and verdicts of the pairs, and why better candidates were
        rejected."""
        measure = make_measure(cfg.bucketing, cfg.data.tgt_lang)
        names = ("source_chars", "source_tokens", "target_chars", "target_tokens")
        spreads: dict[str, Distribution] = {name: Distribution() for name in names}
        score = Distribution(0.01)
        judge: Counter[str] = Counter()
        rescued: Counter[str] = Counter()
        strata: Counter[str] = Counter()
        for batch in _batches(records):
            lengths = measure([record["target_text"] for record in batch])
            for record, tokens in zip(batch, lengths, strict=True):
                spreads["source_chars"].add(len(record["source_text"]))
                spreads["source_tokens"].add(record["length"])
                spreads["target_chars"].add(len(record["target_text"]))
                spreads["target_tokens"].add(tokens)
                score.add(record["best"]["score"])
                judge[_outcome(record["filters"].get("judge"))] += 1
                strata[stratum(record)] += 1
                if record["filters"]["tried"]:
                    rescued[record["filters"]["tried"][0]["reason_code"]] += 1
        return {
            **spreads,
            "score_best": score,
            "judge": judge,
            "strata": strata,
            "rescued": rescued,
        }

    async def process(self, record: Record, clients: Clients) -> KeptRecord | RejectedRecord:
        """Return the first candidate that passes, else a rejection with the best one's code."""
        tried: list[dict[str, Any]] = []
        first: RejectedRecord | None = None
        is_next_best = clients.cfg.filters.on_reject == "next_best"
        for candidate in record["topk"] if is_next_best else record["topk"][:1]:
            seen = await _check_candidate(record["source_text"], candidate["text"], clients)
            result_fields = {"best": candidate, "filters": {**seen.filters, "tried": list(tried)}}
            code, reason = seen.code, seen.reason
            if code is None:
                accepted = {**record, "target_text": candidate["text"], **result_fields}
                return KeptRecord(accepted, seen.note_code)
            tried.append({"index": candidate["index"], "reason_code": code})
            first = first or RejectedRecord(record, code, reason, result_fields)
        if first is None:
            return RejectedRecord(record, Reason.NO_CANDIDATES, "topk is empty")
        first.more["filters"]["tried"] = tried[1:]
        return first


def _outcome(verdict: dict[str, Any] | None) -> str:
    """Return the judge's outcome for an accepted pair: pass, error or not asked."""
    if verdict is None:
        return "not asked"
    return f"error:{verdict['error']}" if "error" in verdict else "pass"


def _batches(records: Iterable[Record]) -> Iterator[list[Record]]:
    remaining = iter(records)
    while batch := list(islice(remaining, _BATCH)):
        yield batch


class _CandidateCheck(NamedTuple):
    """The check of one candidate: its `filters`, rejection code or None, reason, and note."""

    filters: dict[str, Any]
    code: Code | None = None
    reason: str = ""
    note_code: Code | None = None


async def _check_candidate(src: str, mt: str, clients: Clients) -> _CandidateCheck:
    """Check one candidate against evaluation sets, rules and judge."""
    cfg = clients.cfg.filters
    filters: dict[str, Any] = {"passed": [], "failed": [], "judge": None}
    texts = evaluation_texts(clients.cfg.data.decontaminate)
    if texts is not None and (shared := texts.find(mt)) is not None:
        return _CandidateCheck(filters, Reason.CONTAMINATED, shared)
    verdict = RuleVerdict()
    pair = Pair(src, mt, *clients.languages)
    if cfg.rule_based:
        verdict = check_rules(pair, cfg.rules, clients.judge_understands)
        filters |= as_metadata(verdict)
    if verdict.failed:
        return _CandidateCheck(filters, *next(iter(verdict.failed.items())))
    doubt = next(iter(verdict.doubtful), None)
    if not cfg.llm_judge.enabled:
        return _CandidateCheck(filters, note_code=_unjudged_code(doubt))
    judgement = await clients.judge(src, mt, "; ".join(verdict.doubtful.values()))
    filters["judge"] = judgement
    if "error" not in judgement:
        return _judged_check(filters, judgement, doubt, clients.judge_understands)
    if cfg.llm_judge.fail_policy != "permissive":
        code = Family.JUDGE_ERROR.code(judgement["error"])
        return _CandidateCheck(filters, code, "the judge gave no verdict")
    own_failures = check_rules(pair, cfg.rules).failed if doubt else {}
    if own_failures:
        return _CandidateCheck(filters, *next(iter(own_failures.items())))
    return _CandidateCheck(filters, note_code=_unjudged_code(doubt))


def _judged_check(
    filters: dict[str, Any], judgement: dict[str, Any], doubt: RuleCode | None, understands: bool
) -> _CandidateCheck:
    """Return the check that follows from a verdict.

    doubt: the uncertain rule, for which an LLM judge's verdict decides."""
    if doubt and not understands and judgement["pass"]:
        return _CandidateCheck(filters, note_code=_unjudged_code(doubt))
    if judgement["pass"]:
        note = Family.DOUBT_PASSED.code(doubt) if doubt else None
        return _CandidateCheck(filters, note_code=note)
    word = re.sub(r"[^a-z0-9_]+", "_", str(judgement["reason_code"]).lower())[:40] or "unnamed"
    notes = judgement.get("notes") or ""
    if doubt and understands:
        return _CandidateCheck(filters, Family.DOUBT_REFUSED.code(doubt), f"{word}: {notes}")
    return _CandidateCheck(filters, Family.JUDGE_VERDICT.code(word), notes)


def _unjudged_code(doubt: RuleCode | None) -> FamilyCode | None:
    return Family.DOUBT_UNJUDGED.code(doubt) if doubt else None
