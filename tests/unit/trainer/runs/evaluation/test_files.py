"""Check the files of an evaluation: their names, what is read back, and what is refused."""

from __future__ import annotations

import json
from functools import partial

import pytest

from scorekit.errors import UserError
from trainer.runs.evaluation.files import (
    EvaluatedPolicy,
    EvaluationFiles,
    check_same_scoring,
    has_evaluation,
)
from trainer.runs.stats import StatSpec, compare_lines

TABLE = (StatSpec(key="score", title="score", value_of_row=lambda line: line["score"]),)


def evaluated(policy: str, scores: list[float]) -> EvaluatedPolicy:
    lines = [{"id": str(number), "score": score} for number, score in enumerate(scores)]
    return EvaluatedPolicy(policy, {"policy": policy, "score": 0.5}, lines)


def write_page(path, *values) -> None:
    path.write_text(f"{len(values)} values")


def write(files: EvaluationFiles, evaluation: EvaluatedPolicy) -> None:
    files.write(evaluation, evaluation.examples, "a: config", write_page)


def test_an_evaluation_is_read_back_by_set(tmp_path):
    evaluation = evaluated("models/a", [0.0, 1.0])
    for name in ("eval", "menus"):
        files = EvaluationFiles(tmp_path, name)
        write(files, evaluation)
        assert files.read("has {} lines", lambda line: line["id"], ["0", "1"]) == evaluation
    names = {f"evaluation{name}.{end}" for name in ("", "-menus") for end in ("json", "jsonl")}
    assert {path.name for path in tmp_path.glob("*.json*")} == names
    assert (tmp_path / "evaluation-menus.html").read_text() == "4 values"


def test_an_evaluation_of_other_samples_is_refused(tmp_path):
    files = EvaluationFiles(tmp_path)
    read = partial(files.read, "translated {} sources", lambda line: line["id"])
    with pytest.raises(UserError, match=r"has no evaluation\.jsonl"):
        read(["0"])
    write(files, evaluated("a", [0.0, 1.0]))
    with pytest.raises(UserError, match="translated 2 sources that are not these 1 in this order"):
        read(["0"])


def test_a_new_evaluation_removes_the_comparison_with_the_one_before(tmp_path):
    files, (first, second) = EvaluationFiles(tmp_path), (evaluated("a", [0.0]), evaluated("b", [1]))
    write(files, second)
    compare = partial(compare_lines, TABLE)
    alone = files.outcome(second, None, compare, {"turns": 1}, write_page)
    assert (alone.page, alone.groups) == (tmp_path / "evaluation.html", None)
    outcome = files.outcome(second, first, compare, {"turns": 1}, write_page)
    assert outcome.groups is not None and outcome.groups["all"][0].difference == 1.0
    comparison = json.loads((tmp_path / "comparison.json").read_text())
    assert (comparison["first"], comparison["second"], comparison["turns"]) == ("a", "b", 1)
    assert outcome.comparison is not None and outcome.comparison.is_file()
    write(files, first)
    assert not list(tmp_path.glob("comparison*"))


def test_a_folder_with_neither_evaluation_nor_policy_is_told(tmp_path):
    with pytest.raises(UserError, match=r"neither evaluation\.jsonl"):
        has_evaluation(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert not has_evaluation(str(tmp_path)) and not has_evaluation("owner/model")
    (tmp_path / "evaluation-menus.jsonl").write_text("")
    assert has_evaluation(str(tmp_path))


def test_scores_of_two_kinds_are_not_compared():
    words = {"index": "searched in the index"}
    check_same_scoring({}, {"index": "a"}, words, "one config")  # an evaluation before the key
    with pytest.raises(UserError, match=r"searched in the index b, here a.* with one config"):
        check_same_scoring({"index": "b"}, {"index": "a"}, words, "one config")
