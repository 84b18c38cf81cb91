"""Check the last lines of the loop demo: they say what its run showed."""

from __future__ import annotations

import json
from pathlib import Path

from demo.search.loop.run import training_sentences


def write(folder: Path, name: str, *values: tuple[float, float | None]) -> None:
    """Write a round's evaluations: (NDCG, judge's score) before and after its training."""
    train = folder / name / "train"
    train.mkdir(parents=True)
    lines = [json.dumps({"ndcg_mean": ndcg, "judge_mean": judge}) for ndcg, judge in values]
    (train / "eval.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def test_the_last_lines_say_which_round_was_best(tmp_path):
    write(tmp_path, "01-phase1", (0.37, None), (0.304, None))
    write(tmp_path, "02-round1", (0.3, 0.143), (0.62, 0.8))
    write(tmp_path, "03-round2", (0.55, 0.657), (0.29, 0.143))
    first, second, third = training_sentences(tmp_path)
    assert "phase1: NDCG 0.37 -> 0.30; round1: right answers 0.14 -> 0.80;" in first
    assert second == "The best policy is that of round1: round2 made it worse."
    assert "one seed" in third


def test_a_last_round_that_rises_is_the_best(tmp_path):
    write(tmp_path, "01-round1", (0.3, 0.2), (0.6, 0.5))
    write(tmp_path, "02-round2", (0.5, 0.5), (0.6, 0.6))
    assert training_sentences(tmp_path)[1] == "The best policy is the last one, that of round2."


def test_without_a_judge_no_round_is_called_the_best(tmp_path):
    write(tmp_path, "01-phase1", (0.3, None), (0.6, None))
    assert len(training_sentences(tmp_path)) == 2
