"""format_filter: rules, then the judge, on the best candidate, or down the list of the best."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from synth.config import SynthConfig
from synth.filters import Pair, as_metadata, check_rules
from synth.folder.store import Record
from synth.record import Kept, Rejected
from synth.sources.decontaminate import digests, evaluation_texts

if TYPE_CHECKING:
    from synth.drive.clients import Clients


class FormatFilter:
    """A record gains `target_text`, `best` and `filters`:

    passed, failed  codes of the rules that ran on the candidate
    judge           {"pass", "reason_code", "notes"}, {"error": type}, or null where none was asked
    tried           [{"index", "reason_code"}] of the better candidates that were rejected before
    """

    name = "format_filter"
    after: str | None = "score_select_best"

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
