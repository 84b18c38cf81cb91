"""format_filter: rules, then the judge, on the best candidate, or down the list of the best.

What a rule is not sure of, an LLM judge decides. Without one (none is asked, it is the back end
`rules`, or it failed and may fail) the rule rejects what it would reject alone, and lets pass the
rest of its doubts, which are counted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from scorekit.text.rules import Pair
from synth.config import SynthConfig
from synth.drive.kinds import MapStage
from synth.filters import RuleVerdict, as_metadata, check_rules
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
    doubtful        {code: what was seen} of rules that were not sure; left out where none was
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
        elif cfg.filters.llm_judge.doubt_task is None:
            del filters["llm_judge"]["doubt_task"]  # runs that were begun before it go on
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
            seen = await _look(record["source_text"], candidate["text"], clients)
            told = {"best": candidate, "filters": {**seen.filters, "tried": list(tried)}}
            code, reason = seen.code, seen.reason
            if code is None:
                kept = {**record, "target_text": candidate["text"], **told}
                return Kept(kept, seen.note_code)
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


class _Look(NamedTuple):
    """One candidate: what goes to `filters`, the code of its rejection or None, why; and what is to
    be known of it where it passes."""

    filters: dict[str, Any]
    code: str | None = None
    reason: str = ""
    note_code: str = ""


async def _look(src: str, mt: str, clients: Clients) -> _Look:
    """Put one candidate to evaluation sets, rules and judge."""
    cfg = clients.cfg.filters
    filters: dict[str, Any] = {"passed": [], "failed": [], "judge": None}
    texts = evaluation_texts(clients.cfg.data.decontaminate)
    if texts is not None and (shared := texts.find(mt)) is not None:
        return _Look(filters, "contaminated", shared)
    verdict = RuleVerdict()
    pair = Pair(src, mt, *clients.languages)
    if cfg.rule_based:
        verdict = check_rules(pair, cfg.rules, clients.judge_understands)
        filters |= as_metadata(verdict)
    if verdict.failed:
        return _Look(filters, *next(iter(verdict.failed.items())))
    doubt = next(iter(verdict.doubtful), None)
    if not cfg.llm_judge.enabled:
        return _Look(filters, note_code=_unjudged_code(doubt))
    said = await clients.judge(src, mt, "; ".join(verdict.doubtful.values()))
    filters["judge"] = said
    if "error" not in said:
        return _judged_look(filters, said, doubt, clients.judge_understands)
    if cfg.llm_judge.fail_policy != "permissive":
        return _Look(filters, f"judge_error:{said['error']}", "the judge gave no verdict")
    alone = check_rules(pair, cfg.rules).failed if doubt else {}
    if alone:
        return _Look(filters, *next(iter(alone.items())))
    return _Look(filters, note_code=_unjudged_code(doubt))


def _judged_look(
    filters: dict[str, Any], said: dict[str, Any], doubt: str | None, understands: bool
) -> _Look:
    """What follows of a verdict. doubt: the rule that is not sure; the verdict of a judge that
    understands texts settles it."""
    if doubt and not understands and said["pass"]:
        return _Look(filters, note_code=_unjudged_code(doubt))
    if said["pass"]:
        return _Look(filters, note_code=f"doubt_passed:{doubt}" if doubt else "")
    word = re.sub(r"[^a-z0-9_]+", "_", str(said["reason_code"]).lower())[:40] or "unnamed"
    notes = said.get("notes") or ""
    if doubt and understands:
        return _Look(filters, f"doubt_refused:{doubt}", f"{word}: {notes}")
    return _Look(filters, f"judge:{word}", notes)


def _unjudged_code(doubt: str | None) -> str:
    return f"doubt_unjudged:{doubt}" if doubt else ""
