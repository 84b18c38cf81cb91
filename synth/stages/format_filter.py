"""format_filter: rules, then the judge, on the best candidate, or down the list of the best."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from scorekit.text.rules import Pair
from synth.config import SynthConfig
from synth.drive.kinds import MapStage
from synth.filters import as_metadata, check_rules
from synth.folder.distributions import Drawn, Found, Spread, stratum
from synth.folder.store import Record
from synth.record import Kept, Rejected
from synth.sources.decontaminate import digests, evaluation_texts
from synth.sources.measure import make_measure
from synth.stages.cost import PACKED_ALIKE, Cost, Sizes

if TYPE_CHECKING:
    from synth.drive.clients import Clients

#: Records that are measured at once.
_BATCH = 1000
_CHARS, _TOKENS = "Length in characters", "Length in tokens"


class FormatFilter(MapStage):
    """A record gains `target_text`, `best` and `filters`:

    passed, failed  codes of the rules that ran on the candidate
    judge           {"pass", "reason_code", "notes"}, {"error": type}, or null where none was asked
    tried           [{"index", "reason_code"}] of the better candidates that were rejected before
    """

    name = "format_filter"
    shows_rejected = True
    drawn = (
        Drawn(_CHARS, "source_chars", "source", "characters"),
        Drawn(_CHARS, "target_chars", "target", "characters"),
        Drawn(_TOKENS, "source_tokens", "source", "tokens, nearly"),
        Drawn(_TOKENS, "target_tokens", "target", "tokens, nearly"),
    )

    def uses(self, cfg: SynthConfig) -> frozenset[str]:
        """The judge, where one is to be asked."""
        return frozenset({"judge"} if cfg.filters.llm_judge.enabled else ())

    def settings(self, cfg: SynthConfig) -> dict[str, Any]:
        """Everything about filters but where the judge is."""
        filters = cfg.filters.model_dump(mode="json", exclude={"llm_judge": {"url"}})
        if not cfg.filters.llm_judge.enabled:
            filters["llm_judge"] = {"enabled": False}
        if cfg.data.decontaminate:
            filters["decontaminate"] = digests(cfg.data.decontaminate)
        return {**filters, "src_lang": cfg.data.src_lang, "tgt_lang": cfg.data.tgt_lang}

    def cost(self, run: Sizes) -> Cost:
        """A verdict of each best candidate; at most of all that are stored, where the next best
        gets a chance."""
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

    def figures(self, cfg: SynthConfig, records: Iterable[Record]) -> Found:
        """Lengths, scores and verdicts of the pairs, and why a better candidate was refused."""
        measure = make_measure(cfg.bucketing, cfg.data.tgt_lang)
        names = ("source_chars", "source_tokens", "target_chars", "target_tokens")
        found: dict[str, Spread] = {name: Spread() for name in names}
        score = Spread(0.01)
        judge: Counter[str] = Counter()
        rescued: Counter[str] = Counter()
        strata: Counter[str] = Counter()
        for batch in _batches(records):
            lengths = measure([record["target_text"] for record in batch])
            for record, tokens in zip(batch, lengths, strict=True):
                found["source_chars"].add(len(record["source_text"]))
                found["source_tokens"].add(record["length"])
                found["target_chars"].add(len(record["target_text"]))
                found["target_tokens"].add(tokens)
                score.add(record["best"]["score"])
                judge[_judged(record["filters"].get("judge"))] += 1
                strata[stratum(record)] += 1
                if record["filters"]["tried"]:
                    rescued[record["filters"]["tried"][0]["reason_code"]] += 1
        return {**found, "score_best": score, "judge": judge, "strata": strata, "rescued": rescued}

    async def process(self, record: Record, clients: Clients) -> Kept | Rejected:
        """The first candidate that passes; else a rejection with the code of the best one."""
        tried: list[dict[str, Any]] = []
        first: Rejected | None = None
        every = clients.cfg.filters.on_reject == "next_best"
        for candidate in record["topk"] if every else record["topk"][:1]:
            filters, code, reason = await _look(record["source_text"], candidate["text"], clients)
            told = {"best": candidate, "filters": {**filters, "tried": list(tried)}}
            if code is None:
                return Kept({**record, "target_text": candidate["text"], **told})
            tried.append({"index": candidate["index"], "reason_code": code})
            first = first or Rejected(record, code, reason, told)
        if first is None:
            return Rejected(record, "no_candidates", "topk is empty")
        first.more["filters"]["tried"] = tried[1:]
        return first


def _judged(verdict: dict[str, Any] | None) -> str:
    """Of a pair that was kept: a judge that failed stands apart from one that passed it."""
    if verdict is None:
        return "not asked"
    return f"error:{verdict['error']}" if "error" in verdict else "pass"


def _batches(records: Iterable[Record]) -> Iterator[list[Record]]:
    left = iter(records)
    while batch := list(islice(left, _BATCH)):
        yield batch


async def _look(src: str, mt: str, clients: Clients) -> tuple[dict[str, Any], str | None, str]:
    """(what goes to `filters`, code of the rejection or None, why) of one candidate."""
    cfg = clients.cfg.filters
    filters: dict[str, Any] = {"passed": [], "failed": [], "judge": None}
    texts = evaluation_texts(clients.cfg.data.decontaminate)
    if texts is not None and (shared := texts.find(mt)) is not None:
        return filters, "contaminated", shared
    if cfg.rule_based:
        verdict = check_rules(Pair(src, mt, *clients.languages), cfg.rules)
        filters |= as_metadata(verdict)
        if verdict.failed:
            code, seen = next(iter(verdict.failed.items()))
            return filters, code, seen
    if not cfg.llm_judge.enabled:
        return filters, None, ""
    said = await clients.judge(src, mt)
    filters["judge"] = said
    if "error" in said:
        if cfg.llm_judge.fail_policy == "permissive":
            return filters, None, ""
        return filters, f"judge_error:{said['error']}", "the judge gave no verdict"
    if said["pass"]:
        return filters, None, ""
    word = re.sub(r"[^a-z0-9_]+", "_", str(said["reason_code"]).lower())[:40]
    return filters, f"judge:{word or 'unnamed'}", said.get("notes") or ""
