"""What improved too little, or scored too badly, is left out and counted."""

from __future__ import annotations

import pytest

from scorekit.errors import UserError
from synth.folder.stats import count_stage
from synth.folder.store import StageFolder
from tests.kits.synth.driver import TEXTS, config, records, run, write_sources


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
