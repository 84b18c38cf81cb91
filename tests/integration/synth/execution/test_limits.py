"""What improved too little, or scored too badly, is left out and counted."""

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
    found = records(undisturbed, "prefilter_score")
    least = middle([r["prefilter"]["improvement"] for r in found])
    write_sources(tmp_path, TEXTS)
    cfg = config(
        tmp_path,
        teacher,
        metricx,
        data__target_examples_total=len(TEXTS),
        prefilter__min_improvement=least,
    )
    run(cfg)
    able = {r["source_id"] for r in found if r["prefilter"]["improvement"] >= least}
    assert {r["source_id"] for r in records(tmp_path, "select_sources")} == able
    lost = rejected(tmp_path, "select_sources")
    assert {r["reason_code"] for r in lost} == {"below_min_improvement"}
    counts = count_stage(StageFolder(tmp_path, "select_sources"))
    assert counts.rejected == {"below_min_improvement": len(TEXTS) - len(able)}
    cfg.prefilter.min_improvement = least + 1
    with pytest.raises(UserError, match=r"min_improvement was .*, is"):
        run(cfg, resume=True)


def select(cfg):
    """Run the choice as the command does."""
    run_stages(cfg, RunOptions(("select_sources",), overwrite=True))


def test_chosen_sources_that_sampling_did_not_improve_are_counted_and_warned_of(
    tmp_path, teacher, metricx, capsys
):
    write_sources(tmp_path, TEXTS)
    cfg = config(tmp_path, teacher, metricx, data__target_examples_total=len(TEXTS))
    run(cfg, stages=STAGES[:1])
    found = [r["prefilter"]["improvement"] for r in records(tmp_path, "prefilter_score")]
    weak = [improvement for improvement in found if improvement <= 0]
    assert 0 < len(weak) < len(found)
    select(cfg)
    assert f"warning: {len(weak)} no_improvement: " in capsys.readouterr().err
    counts = count_stage(StageFolder(tmp_path, "select_sources"))
    assert counts.told == {"no_improvement": len(weak)} and counts.records_out == len(TEXTS)
    logged = (tmp_path / "logs.txt").read_text()
    assert f'"sources": {len(weak)}' in logged and str(min(weak)) in logged
    assert "<code>no_improvement</code>" in write_report(tmp_path).read_text()
    cfg.prefilter.min_improvement = 1e-9
    select(cfg)
    told = " ".join(capsys.readouterr().err.split())
    assert "no_improvement" not in told
    assert f"{len(found) - len(weak)} sources are left with prefilter.min_improvement" in told
    assert f"{len(weak)} fewer than data.target_examples_total" in told


def test_a_bucket_that_lacks_sources_is_filled_from_the_others_and_that_is_said(
    tmp_path, teacher, metricx, capsys
):
    improvements = {0: [3.0], 1: [0.5, 2.0, 1.5, 1.0, -4.0]}
    rows = [
        {
            "source_id": f"{bucket:016x}{place:016x}",
            "source_type": "sentence",
            "length_bucket_id": bucket,
            "prefilter": {"improvement": one, "score_greedy": 5.0, "score_sample": 5.0 - one},
        }
        for bucket, of in improvements.items()
        for place, one in enumerate(of)
    ]
    write_stage(StageFolder(tmp_path, "prefilter_score"), [rows])
    cfg = config(tmp_path, teacher, metricx, data__target_examples_total=4)
    select(cfg)
    told = " ".join(capsys.readouterr().err.split())
    assert "for their share in bucket 0 (1 short): 1 of other buckets take their places" in told
    assert "no_improvement" not in told
    chosen = [r["prefilter"]["improvement"] for r in records(tmp_path, "select_sources")]
    assert sorted(chosen) == [1.0, 1.5, 2.0, 3.0]
    cfg.data.target_examples_total = 2
    select(cfg)
    assert "for their share" not in capsys.readouterr().err


def test_candidates_that_scored_too_badly_are_not_kept(tmp_path, undisturbed, teacher, metricx):
    before = records(undisturbed, "score_select_best")
    most = middle([r["topk"][0]["score"] for r in before])
    write_sources(tmp_path, TEXTS)
    cfg = config(tmp_path, teacher, metricx, final_generation__max_score=most)
    cfg.final_generation.num_candidates, cfg.final_generation.store_top_k = 6, 3
    run(cfg)
    wanted = {
        r["source_id"]: [c for c in r["topk"] if c["score"] <= most]
        for r in before
        if r["topk"][0]["score"] <= most
    }
    kept = records(tmp_path, "score_select_best")
    assert {r["source_id"]: r["topk"] for r in kept} == wanted
    lost = rejected(tmp_path, "score_select_best")
    assert {r["reason_code"] for r in lost} == {"over_max_score"}
    assert len(lost) == len(before) - len(wanted) > 0
    cfg.final_generation.max_score = None
    with pytest.raises(UserError, match=r"max_score was .*, is None"):
        run(cfg, resume=True)
