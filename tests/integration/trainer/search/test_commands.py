"""Test `trainer search ask` and `collect` against the demo's services: their files and exits."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from scorekit.config import load_config
from testing.processes import free_port
from tests.kits.service_process import wait_until
from tests.kits.trainer.searching.demo_stack import Stack, demo_stack, hanging_generator
from trainer.search.cli import app
from trainer.search.config import SearchConfig
from trainer.search.reward import with_reward
from trainer.search.trajectories.store import TrajectoryStore

#: One episode of each question.
ONE_EACH = ("--set", "rollout.n_agent=1")
QUESTION = "What was the average lifespan in Rwanda in 1997?"


@pytest.fixture(scope="module")
def stack(tmp_path_factory, demo_index):
    with demo_stack(tmp_path_factory.mktemp("stack"), demo_index) as running:
        yield running


def refusal(command_name: str, *flags: str) -> str:
    """Run a command in this process, which refuses it. Return its message."""
    result = CliRunner().invoke(app, [command_name, *flags], env={"COLUMNS": "160"})
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.output
    return result.stderr


def collecting(stack: Stack, folder: Path, *flags: str) -> tuple[str, ...]:
    keys = {
        "data.train": stack.questions,
        "misc.run_dir": folder,
        "rl.batch_size": 2,
        "rollout.n_agent": 2,
    }
    return (
        *stack.policy,
        *(flag for key, value in keys.items() for flag in ("--set", f"{key}={value}")),
        *flags,
    )


def stored(folder: Path):
    """Yield the stored episodes without times and without who paid for an answer."""
    for trajectory in TrajectoryStore(folder / "trajectories").read():
        for turn in trajectory.turns:
            turn.policy_s = turn.tool_s = 0.0
        fields = trajectory.model_dump(exclude={"run", "attempt", "answer", "judged"})
        assert trajectory.answer is not None and trajectory.judged is not None
        answer = (trajectory.answer.text, trajectory.answer.evidence, trajectory.judged.score)
        yield fields | {"answer": answer}


@pytest.fixture(scope="module")
def run(stack, tmp_path_factory):
    """Return the folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("run") / "collect"
    code, out, errors = stack.run("collect", *collecting(stack, folder))
    assert code == 0, errors
    return folder, out


def test_collect_stores_every_episode_with_its_reward(stack, run):
    folder, out = run
    store = TrajectoryStore(folder / "trajectories")
    assert store.steps() == [1, 2, 3]
    episodes = list(store.read())
    assert len(episodes) == 10 and len({e.trajectory_id for e in episodes}) == 10
    cfg = load_config(SearchConfig, folder / "config.yaml")
    for episode in episodes:
        assert episode.end == "complete" and episode.reward is not None
        assert with_reward(episode, cfg.reward) == episode
        for name in episode.images:
            assert store.read_image(name).startswith(b"\x89PNG")
    assert {0.0, 1.0} < {e.reward.value for e in episodes}  # some find all, some nothing
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [line["update"] for line in lines] == [1, 2, 3]
    stats = json.loads((folder / "figures.json").read_text())
    assert stats["samples"] == 10 and stats["reward_coverage"] == 1
    mean = sum(e.reward.value for e in episodes) / 10
    assert stats["reward_mean"] == pytest.approx(mean, abs=1e-12)
    assert f"{mean:.3f}" in out and "view.html" in out
    assert episodes[0].question.question in (folder / "view.html").read_text(encoding="utf-8")


def test_two_episodes_of_a_question_are_a_group_of_two(run):
    groups: dict[str, set[int]] = {}
    for episode in TrajectoryStore(run[0] / "trajectories").read():
        groups.setdefault(episode.group, set()).add(episode.sample)
    assert len(groups) == 5 and set(map(frozenset, groups.values())) == {frozenset({0, 1})}


def test_a_run_that_was_killed_goes_on_to_the_same_episodes(stack, run, tmp_path):
    folder = tmp_path / "collect"
    command = stack.begin("collect", *collecting(stack, folder))
    first = folder / "trajectories/step-000001.jsonl.gz"
    wait_until(lambda: first.exists() or command.poll() is not None)
    command.kill()
    command.communicate()
    code, _, errors = stack.run("collect", *collecting(stack, folder, "--resume"))
    assert code == 0, errors
    assert list(stored(folder)) == list(stored(run[0]))
    lines = (folder / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["update"] for line in lines] == [1, 2, 3]


def test_sigterm_ends_a_run_behind_the_step_under_way(stack, tmp_path):
    folder = tmp_path / "collect"
    command = stack.begin("collect", *collecting(stack, folder))
    wait_until(lambda: (folder / "trajectories/images").exists())  # the first step has started
    command.send_signal(signal.SIGTERM)
    _, errors = command.communicate()
    assert command.returncode == 128 + signal.SIGTERM, errors
    steps = TrajectoryStore(folder / "trajectories").steps()
    assert steps == [1] and "ontinue with --resume" in errors


def test_a_run_goes_on_with_its_own_config_and_index_alone(stack, run):
    folder, _ = run
    flags = collecting(stack, folder, "--resume", "--set", "episode.max_turns=3")
    errors = refusal("collect", *stack.settings, *flags)
    assert "episode.max_turns: 7 then, 3 now" in errors
    index_info = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps(index_info | {"revision": "another"}))
    errors = refusal("collect", *stack.settings, *collecting(stack, folder, "--resume"))
    (folder / "index.json").write_text(json.dumps(index_info))
    assert "the run started with" in errors
    errors = refusal("collect", *stack.settings, *collecting(stack, folder))
    assert "has a run" in errors
    assert len(list(stored(folder))) == 10


def test_money_that_is_spent_ends_a_run_which_goes_on_with_more(stack, tmp_path):
    folder = tmp_path / "collect"
    price = ("--set", "answering.money.generator={prompt: 1, completion: 1}")
    flags = collecting(stack, folder, *price, *ONE_EACH)
    code, _, errors = stack.run("collect", *flags, "--set", "answering.money.cap=0.000001")
    assert code == 2 and "cap" in errors and "ontinue with --resume" in errors
    code, _, errors = stack.run("collect", *flags, "--resume")
    assert code == 0, errors
    assert len(list(stored(folder))) == 5


def test_a_run_that_nobody_answers_ends_and_is_done_again(stack, tmp_path):
    folder = tmp_path / "collect"
    with hanging_generator() as hangs:
        flags = collecting(stack, folder, *ONE_EACH, *hangs, "--set", "stop.skipped_updates=2")
        code, _, errors = stack.run("collect", *flags)
    assert code == 3 and "no episode of 2 steps in a row has a reward" in errors
    store = TrajectoryStore(folder / "trajectories")
    unanswered = list(store.read(store.steps()[-2:]))
    assert unanswered and {trajectory.reward.value for trajectory in unanswered} == {None}
    code, _, errors = stack.run("collect", *collecting(stack, folder, *ONE_EACH, "--resume"))
    assert code == 0, errors
    assert [trajectory["answer"] for trajectory in stored(folder)].count(None) == 0
    assert len(list(stored(folder))) == 5


def test_a_mistake_is_told_in_a_line_before_anything_is_asked(stack, tmp_path):
    folder = tmp_path / "collect"
    nobody = f"http://127.0.0.1:{free_port()}/v1"
    rows = [json.loads(stack.questions.read_text(encoding="utf-8").splitlines()[0])]
    (tmp_path / "wrong.jsonl").write_text(json.dumps(rows[0] | {"reference_page": [99]}))
    for flags, message in (
        (("--policy", str(tmp_path)), "policy."),
        (("--model", "another"), "'another'"),
        (("--policy", nobody), "cannot connect to"),
        (("--set", f"answering.generator.base_url={nobody}"), "cannot connect to"),
        (("--set", f"retriever.url={nobody}"), "retriever.url: no page retriever answers"),
        (("--set", f"data.train={tmp_path / 'wrong.jsonl'}"), "the index has no page"),
        (("--set", "data.train=null"), "data.train: not set"),
        (("--set", "episode.max_turn=3"), "episode.max_turn"),
        (("--set", "generation.engine=vllm"), "vllm.url"),
    ):
        errors = refusal("collect", *stack.settings, *collecting(stack, folder), *flags)
        assert message in errors and "Traceback" not in errors, (flags, errors)
    assert not (folder / "trajectories").exists()
    code, _, errors = stack.run("collect", "--set", f"misc.run_dir={folder}")
    assert code == 2 and "policy.path: not set" in errors and "Traceback" not in errors


# -- ask ------------------------------------------------------------------------------------------


def test_ask_shows_every_turn_and_leaves_a_page(stack, tmp_path):
    options = ("--question", QUESTION, "--reference", "36.1 years", "--gold", "life-expectancy_2")
    code, out, errors = stack.run("ask", *stack.policy, *options, "--out", str(tmp_path / "ask"))
    assert code == 0, errors
    (episode,) = TrajectoryStore(tmp_path / "ask/trajectories").read()
    assert f"turn {len(episode.turns)}" in out and "life-expectancy_2" in out
    assert episode.reward.status == "ok" and episode.ndcg is not None
    assert QUESTION in (tmp_path / "ask/view.html").read_text(encoding="utf-8")
    same_folder = (*stack.policy, *options, "--out", str(tmp_path / "ask"))
    assert "Choose another folder" in refusal("ask", *stack.settings, *same_folder)


def test_a_question_without_a_reference_is_answered_and_not_judged(stack, tmp_path):
    code, _, errors = stack.run(
        "ask", *stack.policy, "--question", QUESTION, "--out", str(tmp_path / "ask")
    )
    assert code == 0, errors
    (episode,) = TrajectoryStore(tmp_path / "ask/trajectories").read()
    assert episode.answer.text and episode.judged.status == "skipped"
    assert episode.reward.value is None  # not a 0


def test_without_an_answer_nobody_is_paid(stack, tmp_path):
    nobody = f"http://127.0.0.1:{free_port()}"
    away = [
        *("--set", f"answering.generator.base_url={nobody}/v1"),
        *("--set", f"answering.judge.url={nobody}"),
    ]
    options = ("--question", QUESTION, "--no-answer", "--out", str(tmp_path / "ask"))
    code, _, errors = stack.run("ask", *stack.policy, *options, *away)
    assert code == 0, errors
    (episode,) = TrajectoryStore(tmp_path / "ask/trajectories").read()
    assert episode.answer.status == "skipped" and episode.shown_pages


def test_a_page_that_is_gold_and_not_there_is_told(stack, tmp_path):
    options = ("--question", QUESTION, "--gold", "nothing_1", "--out", str(tmp_path / "ask"))
    errors = refusal("ask", *stack.settings, *stack.policy, *options)
    assert "--gold nothing_1: the index has no such page" in errors


def test_the_demos_config_names_what_the_code_knows():
    config = Path(__file__).parents[4] / "configs/search/demo.yaml"
    assert load_config(SearchConfig, config).answering.generator.model == "demo-generator"
    assert yaml.safe_load(config.read_text())["task"] == "search"
