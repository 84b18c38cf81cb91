"""Check the filter stage: when it calls the judge and what it records."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

from synth.config import SynthConfig
from synth.filters import RULES
from synth.record import KeptRecord, RejectedRecord
from synth.stages.format_filter import FormatFilter

EN = "The committee published its report on the safety of the new bridge in March 2019."
KO = "위원회는 2019년 3월에 새 다리의 안전에 관한 보고서를 발표했다."


def clients(verdicts=(), **filters):
    """Return a stage context whose judge returns these verdicts in order."""
    cfg = SynthConfig.model_validate(
        {
            "run": {"out_dir": "unused"},
            "data": {"src_lang": "eng", "tgt_lang": "kor"},
            "final_generation": {"store_top_k": 3},
            "filters": filters,
        }
    )
    judged = []

    async def judge(src, candidate, doubt):
        judged.append(candidate)
        return verdicts[len(judged) - 1]

    values = {"cfg": cfg, "languages": ("en-US", "ko-KR"), "judge": judge, "judged": judged}
    return SimpleNamespace(**values, judge_understands=cfg.filters.llm_judge.enabled)


def record(*texts):
    topk = [{"index": 7 - i, "text": text, "score": 1.0 + i} for i, text in enumerate(texts)]
    return {"source_id": "a", "source_text": EN, "topk": topk, "worst": None}


def process(source, clients):
    return asyncio.run(FormatFilter().process(source, clients))


PASS = {"pass": True, "reason_code": "ok", "notes": ""}
FAIL = {"pass": False, "reason_code": "omission", "notes": "the date is gone"}


def test_rules_come_before_the_judge_and_both_are_told_of():
    context = clients([PASS])
    result = process(record(KO), context)
    assert isinstance(result, KeptRecord)
    assert result.record["target_text"] == KO
    assert result.record["best"] == {"index": 7, "text": KO, "score": 1.0}
    assert result.record["filters"] == {
        "passed": list(RULES),
        "failed": [],
        "judge": PASS,
        "tried": [],
    }
    context = clients([PASS])
    rejected = process(record(f"번역: {KO}"), context)
    assert isinstance(rejected, RejectedRecord)
    assert (rejected.reason_code, rejected.reason) == ("meta_phrase", "번역:")
    assert rejected.more["filters"]["failed"] == ["meta_phrase"]
    assert context.judged == []


def test_a_judge_that_fails_is_no_verdict():
    failing = {"error": "upstream"}
    rejected = process(record(KO), clients([failing]))
    assert rejected.reason_code == "judge_error:upstream"
    result = process(record(KO), clients([failing], llm_judge={"fail_policy": "permissive"}))
    assert result.record["filters"]["judge"] == failing
    rejected = process(record(KO), clients([FAIL], llm_judge={"fail_policy": "permissive"}))
    assert (rejected.reason_code, rejected.reason) == ("judge:omission", FAIL["notes"])


def test_a_reason_of_the_judge_is_a_code_whatever_it_wrote():
    loud = {"pass": False, "reason_code": "Not | a\ncode! " + "x" * 100, "notes": ""}
    code = process(record(KO), clients([loud])).reason_code
    assert code.startswith("judge:not_a_code_x") and len(code) < 50


def test_without_judge_and_rules_nobody_is_asked():
    context = clients(llm_judge={"enabled": False})
    assert process(record(KO), context).record["filters"]["judge"] is None
    context = clients(llm_judge={"enabled": False}, rule_based=False)
    result = process(record(f"번역: {KO}"), context)
    assert result.record["filters"] == {"passed": [], "failed": [], "judge": None, "tried": []}
    assert FormatFilter().uses(context.cfg) == frozenset()
    assert FormatFilter().uses(clients().cfg) == {"judge"}


def test_the_next_best_is_tried_where_the_config_says_so():
    texts = (f"번역: {KO}", KO + " 그렇다.", KO)
    result = process(record(*texts), clients([FAIL, PASS], on_reject="next_best"))
    assert result.record["best"] == {"index": 5, "text": KO, "score": 3.0}
    assert result.record["filters"]["tried"] == [
        {"index": 7, "reason_code": "meta_phrase"},
        {"index": 6, "reason_code": "judge:omission"},
    ]
    assert process(record(*texts), clients([PASS])).reason_code == "meta_phrase"
    rejected = process(record(*texts[:2]), clients([FAIL], on_reject="next_best"))
    assert rejected.reason_code == "meta_phrase"
    assert rejected.more["best"]["index"] == 7
    assert rejected.more["filters"]["tried"] == [{"index": 6, "reason_code": "judge:omission"}]


def test_settings_hold_every_threshold_and_no_url():
    stage = FormatFilter()
    plain, moved = clients(), clients(llm_judge={"url": "http://elsewhere:1"})
    assert stage.settings(plain.cfg) == stage.settings(moved.cfg)
    stricter = clients(rules={"min_chars": 3})
    assert stage.settings(plain.cfg) != stage.settings(stricter.cfg)
