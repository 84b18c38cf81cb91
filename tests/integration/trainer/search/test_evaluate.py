"""Test `trainer evaluate` of a search policy against the demo's services."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from testing.processes import free_port
from tests.kits.trainer.searching.demo_stack import Stack, demo_stack, hanging_generator
from trainer.__main__ import app
from trainer.runs.run_log import read_jsonl
from trainer.search.evaluation.stats import episodes_of
from trainer.search.trajectories.store import TrajectoryStore


@pytest.fixture(scope="module")
def stack(tmp_path_factory, demo_index):
    with demo_stack(tmp_path_factory.mktemp("stack"), demo_index) as running:
        yield running


def evaluating(stack: Stack, folder: Path, *flags: str) -> tuple[int, str, str]:
    """Return exit code, output and errors of an evaluation of the demo's search policy."""
    keys = ["--set", f"data.eval={stack.questions}", "--set", f"misc.run_dir={folder}"]
    url, name = stack.policy[1], stack.policy[3]
    policy = ["--set", f"server.url={url}", "--set", f"server.model={name}"]
    arguments = ["evaluate", *stack.settings, *policy, *keys, *flags]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "160"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(scope="module")
def evaluated(stack, tmp_path_factory):
    """Evaluate two sets: one of five questions, and a named one of two."""
    folder = tmp_path_factory.mktemp("evaluated") / "run"
    rows = stack.questions.read_text(encoding="utf-8").splitlines()[:2]
    small_set = folder.parent / "few.jsonl"
    small_set.write_text("".join(row + "\n" for row in rows), encoding="utf-8")
    code, out, errors = evaluating(stack, folder, "--set", f"data.eval_sets={{few: {small_set}}}")
    assert code == 0, errors
    return folder, small_set, out


def test_an_evaluation_is_written_by_set_with_its_pictures(evaluated):
    folder, _, out = evaluated
    assert "set: eval" in out and "set: few" in out and "NDCG" in out
    stats = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    episodes = episodes_of(read_jsonl(folder / "evaluation.jsonl"))
    assert stats["samples"] == len(episodes) == 5
    assert stats["reward_coverage"] == stats["judge_coverage"] == 1
    rewards = [trajectory.reward.value for trajectory in episodes]
    assert stats["reward_mean"] == pytest.approx(sum(rewards) / 5, abs=1e-12)
    assert 0 < stats["success_share"] < 1 and stats["success_without_evidence_share"] == 0
    assert len({row["document"] for row in stats["by_document"]}) > 1
    assert sum(row["samples"] for row in stats["by_document"]) == 5
    assert json.loads((folder / "evaluation-few.json").read_text())["samples"] == 2
    store = TrajectoryStore(folder / "evaluation/trajectories")
    assert store.steps() == [1, 2]
    for trajectory in store.read():
        assert all(store.read_image(name).startswith(b"\x89PNG") for name in trajectory.images)
    page = (folder / "evaluation.html").read_text(encoding="utf-8")
    assert episodes[0].question.question in page and 'href="evaluation/view.html"' in page
    assert (folder / "evaluation/view.html").is_file() and (folder / "answers.sqlite").is_file()


def test_against_an_earlier_evaluation_and_what_was_paid_for_is_not_paid_again(
    stack, evaluated, tmp_path
):
    folder, small_set, _ = evaluated
    sets = ("--set", f"data.eval_sets={{few: {small_set}}}")
    answer_cache = ("--set", f"answering.answers={folder / 'answers.sqlite'}")
    short = ("--set", "episode.max_turns=1")
    code, out, errors = evaluating(
        stack, tmp_path / "run", *sets, *answer_cache, *short, "--against", str(folder)
    )
    assert code == 0, errors
    assert "all questions" in out and "comparison-few.html" in out
    comparison = json.loads((tmp_path / "run/comparison.json").read_text(encoding="utf-8"))
    by_key = {stat["key"]: stat for stat in comparison["groups"]["all"]}
    assert by_key["turns_mean"]["difference"] < 0 and by_key["forced_share"]["second"] == 1
    assert any(name.startswith("document ") for name in comparison["groups"])
    assert comparison["questions"] == 5 and (tmp_path / "run/comparison.html").is_file()
    stats = json.loads((tmp_path / "run/evaluation.json").read_text(encoding="utf-8"))
    assert stats["generator_calls"] + stats["answers_known"] <= 5


def test_against_another_server_and_again_in_the_same_folder(stack, evaluated, tmp_path):
    _, small_set, _ = evaluated
    url, name = stack.policy[1], stack.policy[3]
    data = ("--set", f"data.eval={small_set}")
    code, _, errors = evaluating(stack, tmp_path / "run", *data, "--against", f"{url}#{name}")
    assert code == 0, errors
    comparison = json.loads((tmp_path / "run/comparison.json").read_text(encoding="utf-8"))
    assert {stat["difference"] for stat in comparison["groups"]["all"]} <= {0.0, None}
    paid = json.loads((tmp_path / "run/evaluation.json").read_text())["generator_calls"]
    second_stats = json.loads((tmp_path / "run/against/evaluation.json").read_text())
    assert paid == 2 and (second_stats["generator_calls"], second_stats["answers_known"]) == (0, 2)
    code, _, errors = evaluating(stack, tmp_path / "run", *data)
    assert code == 2 and "--overwrite" in errors
    code, _, errors = evaluating(stack, tmp_path / "run", *data, "--overwrite")
    assert code == 0, errors
    anew = json.loads((tmp_path / "run/evaluation.json").read_text())
    assert (anew["generator_calls"], anew["answers_known"]) == (0, 2)
    assert not (tmp_path / "run/comparison.json").exists()


def test_a_mistake_is_told_in_a_line(stack, evaluated, tmp_path):
    folder, small_set, _ = evaluated
    (tmp_path / "empty").mkdir()
    weights = ("--set", "reward.preset=focused", "--against", str(folder))
    nobody = f"http://127.0.0.1:{free_port()}/v1"
    for flags, message in (
        (("--set", "data.eval=null"), "data.eval: not set"),
        (("--set", "server.url=null"), "policy.path: not set"),
        (("--set", f"server.url={nobody}"), "cannot connect to"),
        (("--set", f"data.eval={small_set}", "--against", str(folder)), "searched for 5 questions"),
        (("--against", str(tmp_path / "empty")), "has neither evaluation.jsonl"),
        (
            ("--set", f"data.eval_sets={{other: {small_set}}}", "--against", str(folder)),
            "has no eval",
        ),
        (weights, "Such scores are not comparable"),
    ):
        code, _, errors = evaluating(stack, tmp_path / "run", *flags)
        assert code == 2 and message in errors and "Traceback" not in errors, (flags, errors)
    assert not (tmp_path / "run/evaluation.json").exists()


def test_whom_nobody_answers_has_no_number(stack, evaluated, tmp_path):
    with hanging_generator() as hangs:
        flags = (*hangs, "--set", f"data.eval={evaluated[1]}")
        code, _, errors = evaluating(stack, tmp_path / "run", *flags)
    assert code == 3 and "no episode has a reward: eval" in errors
    stats = json.loads((tmp_path / "run/evaluation.json").read_text())
    assert (stats["reward_mean"], stats["answers_failed"]) == (None, 2)


def test_money_that_is_spent_ends_an_evaluation_that_is_done_again_with_more(stack, tmp_path):
    price = ("--set", "answering.money.generator={prompt: 1, completion: 1}")
    code, _, errors = evaluating(
        stack, tmp_path / "run", *price, "--set", "answering.money.cap=0.000001"
    )
    assert code == 2 and "Traceback" not in errors
    message = errors.splitlines()[-1]
    assert "money.cap" in message and "evaluate again with --overwrite" in message
    assert "--resume" not in errors
    code, _, errors = evaluating(stack, tmp_path / "run", *price, "--overwrite")
    assert code == 0, errors
