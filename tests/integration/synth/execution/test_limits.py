"""Check that sources with too little improvement or too bad a score are left out and counted."""

from __future__ import annotations

import pytest

from scorekit.errors import UserError
from synth.report.page import write_report
from synth.run import RunOptions, run_stages
from synth.storage.stats import count_stage
from synth.storage.store import StageFolder
from tests.kits.synth.driver import STAGES, TEXTS, config, records, run, write_sources
from tests.kits.synth.output import write_stage


def rejected(folder, stage):
    return list(StageFolder(folder, stage).all_rejected())


def middle(values):
    return sorted(values)[len(values) // 2]


def test_sources_that_improved_too_little_are_not_taken(tmp_path, undisturbed, teacher, metricx):
    scored_records = records(undisturbed, "prefilter_score")
    threshold = middle([r["prefilter"]["improvement"] for r in scored_records])
    write_sources(tmp_path, TEXTS)
    cfg = config(
        tmp_path,
        teacher,
        metricx,
        data__target_examples_total=len(TEXTS),
        prefilter__min_improvement=threshold,
    )
    run(cfg)
    able = {r["source_id"] for r in scored_records if r["prefilter"]["improvement"] >= threshold}
    assert {r["source_id"] for r in records(tmp_path, "select_sources")} == able
    rejected_records = rejected(tmp_path, "select_sources")
    assert {r["reason_code"] for r in rejected_records} == {"below_min_improvement"}
    counts = count_stage(StageFolder(tmp_path, "select_sources"))
    assert counts.rejected == {"below_min_improvement": len(TEXTS) - len(able)}
    cfg.prefilter.min_improvement = threshold + 1
    with pytest.raises(UserError, match=r"min_improvement was .*, is"):
        run(cfg, resume=True)


def select(cfg):
    """Run the selection as the command does."""
    run_stages(cfg, RunOptions(("select_sources",), overwrite=True))


def test_chosen_sources_that_sampling_did_not_improve_are_counted_and_warned_of(
    tmp_path, teacher, metricx, capsys
):
    write_sources(tmp_path, TEXTS)
    cfg = config(tmp_path, teacher, metricx, data__target_examples_total=len(TEXTS))
    run(cfg, stages=STAGES[:1])
    all_improvements = [r["prefilter"]["improvement"] for r in records(tmp_path, "prefilter_score")]
    weak = [improvement for improvement in all_improvements if improvement <= 0]
    assert 0 < len(weak) < len(all_improvements)
    select(cfg)
    assert f"warning: {len(weak)} no_improvement: " in capsys.readouterr().err
    counts = count_stage(StageFolder(tmp_path, "select_sources"))
    assert counts.told == {"no_improvement": len(weak)} and counts.records_out == len(TEXTS)
    logged = (tmp_path / "logs.txt").read_text()
    assert f'"sources": {len(weak)}' in logged and str(min(weak)) in logged
    assert "<code>no_improvement</code>" in write_report(tmp_path).read_text()
    cfg.prefilter.min_improvement = 1e-9
    select(cfg)
    stderr = " ".join(capsys.readouterr().err.split())
    assert "no_improvement" not in stderr
    assert (
        f"{len(all_improvements) - len(weak)} sources are left with prefilter.min_improvement"
        in stderr
    )
    assert f"{len(weak)} fewer than data.target_examples_total" in stderr


def test_a_bucket_that_lacks_sources_is_filled_from_the_others_and_that_is_said(
    tmp_path, teacher, metricx, capsys
):
    improvements = {0: [3.0], 1: [0.5, 2.0, 1.5, 1.0, -4.0]}
    rows = [
        {
            "source_id": f"{bucket:016x}{index:016x}",
            "source_type": "sentence",
            "length_bucket_id": bucket,
            "prefilter": {
                "improvement": improvement,
                "score_greedy": 5.0,
                "score_sample": 5.0 - improvement,
            },
        }
        for bucket, bucket_improvements in improvements.items()
        for index, improvement in enumerate(bucket_improvements)
    ]
    write_stage(StageFolder(tmp_path, "prefilter_score"), [rows])
    cfg = config(tmp_path, teacher, metricx, data__target_examples_total=4)
    select(cfg)
    stderr = " ".join(capsys.readouterr().err.split())
    assert "for their share in bucket 0 (1 short): 1 of other buckets take their places" in stderr
    assert "no_improvement" not in stderr
    chosen = [r["prefilter"]["improvement"] for r in records(tmp_path, "select_sources")]
    assert sorted(chosen) == [1.0, 1.5, 2.0, 3.0]
    cfg.data.target_examples_total = 2
    select(cfg)
    assert "for their share" not in capsys.readouterr().err


def test_candidates_that_scored_too_badly_are_not_kept(tmp_path, undisturbed, teacher, metricx):
    before = records(undisturbed, "score_select_best")
    max_score = middle([r["topk"][0]["score"] for r in before])
    write_sources(tmp_path, TEXTS)
    cfg = config(tmp_path, teacher, metricx, final_generation__max_score=max_score)
    cfg.final_generation.num_candidates, cfg.final_generation.store_top_k = 6, 3
    run(cfg)
    expected_topk = {
        r["source_id"]: [c for c in r["topk"] if c["score"] <= max_score]
        for r in before
        if r["topk"][0]["score"] <= max_score
    }
    accepted = records(tmp_path, "score_select_best")
    assert {r["source_id"]: r["topk"] for r in accepted} == expected_topk
    rejected_records = rejected(tmp_path, "score_select_best")
    assert {r["reason_code"] for r in rejected_records} == {"over_max_score"}
    assert len(rejected_records) == len(before) - len(expected_topk) > 0
    cfg.final_generation.max_score = None
    with pytest.raises(UserError, match=r"max_score was .*, is None"):
        run(cfg, resume=True)
