"""Check that the ATIF export fits Harbor's schema, and that Inspect's API reads its logs."""

from __future__ import annotations

import hashlib
import json
from importlib.util import find_spec
from pathlib import Path

import jsonschema
import pytest
import typer
from typer.testing import CliRunner

from examples.export_trajectories import as_atif, export_atif, export_inspect, main
from scorekit.errors import UserError
from tests.kits.trainer.searching.episodes import ask, crop, played, scripted, search
from trainer.search.records import (
    EpisodeReward,
    GeneratedAnswer,
    JudgedAnswer,
    TokenRecord,
    Trajectory,
    mask_digest,
)
from trainer.search.trajectories.store import TrajectoryStore

SCHEMA = json.loads((Path(__file__).parents[2] / "data/atif/v1.8.schema.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def images() -> dict[str, bytes]:
    return {}


@pytest.fixture(scope="module")
def episode(images: dict[str, bytes]) -> Trajectory:
    """Return an episode: search, invalid turn, crop and forced end; three runs of sampled ids."""
    turns = search("출생 Births in Europe"), "no action", crop(0, 0, 400, 200)
    (played_episode,) = played(scripted(*turns), [ask(max_turns=3)], pictures=images)
    mask = [True, True, False, True, False, False, True, True]
    ids = TokenRecord(
        prompt_ids=[1, 2],
        completion_ids=[10, 11, 90, 12, 91, 92, 13, 14],
        action_mask=mask,
        mask_digest=mask_digest(mask),
        images=played_episode.images,
    )
    return played_episode.model_copy(
        update={
            "tokens": ids,
            "answer": GeneratedAnswer(
                status="ok", text="8,100,000", evidence=played_episode.images
            ),
            "judged": JudgedAnswer(status="ok", score=1.0),
            "reward": EpisodeReward(status="ok", value=0.9, parts={"judge": 1.0, "ndcg": 0.5}),
            "ndcg": 0.5,
        }
    )


def test_what_is_written_fits_the_published_schema(episode: Trajectory) -> None:
    bare = episode.model_copy(
        update=dict.fromkeys(("tokens", "answer", "judged", "reward", "ndcg")) | {"turns": []}
    )
    for trajectory in (episode, bare):
        jsonschema.validate(as_atif(trajectory), SCHEMA)


def test_each_turn_is_a_step_with_its_call_and_what_came_of_it(episode: Trajectory) -> None:
    question_step, searched, invalid, cropped, forced = as_atif(episode)["steps"]
    assert (question_step["source"], question_step["message"]) == (
        "user",
        episode.question.question,
    )
    (call,) = searched["tool_calls"]
    assert (call["function_name"], call["arguments"]) == (
        "search",
        {"query": "출생 Births in Europe"},
    )
    assert searched["reasoning_content"] == "look"
    assert searched["message"] == "<search>출생 Births in Europe</search>"
    (result,) = searched["observation"]["results"]
    assert result["source_call_id"] == call["tool_call_id"]
    assert [part["type"] for part in result["content"]] == ["text", "image"]
    assert result["extra"]["rank"] == 1 and result["extra"]["golden"] is True
    assert "tool_calls" not in invalid and invalid["extra"]["reason"] == "no_think"
    assert "source_call_id" not in invalid["observation"]["results"][0]
    assert cropped["tool_calls"][0]["arguments"] == {"box": [0, 0, 400, 200], "convention": "pixel"}
    assert forced["llm_call_count"] == 0
    assert "metrics" not in forced and "reasoning_content" not in forced


def test_sampled_ids_go_to_their_turn(episode: Trajectory) -> None:
    metrics = [step.get("metrics", {}) for step in as_atif(episode)["steps"][1:]]
    assert [step_metrics.get("completion_token_ids") for step_metrics in metrics] == [
        [10, 11],
        [12],
        [13, 14],
        None,
    ]
    assert metrics[0]["prompt_token_ids"] == [1, 2]
    assert metrics[2]["prompt_token_ids"] == [1, 2, 10, 11, 90, 12, 91, 92]
    mask = [True] * 8
    one_stretch = episode.tokens.model_copy(  # type: ignore[union-attr]
        update={"action_mask": mask, "mask_digest": mask_digest(mask)}
    )
    unknown = as_atif(episode.model_copy(update={"tokens": one_stretch}))
    assert not any("completion_token_ids" in step.get("metrics", {}) for step in unknown["steps"])


def test_the_reward_and_what_has_no_place_stand_under_extra(episode: Trajectory) -> None:
    exported = as_atif(episode)
    assert exported["final_metrics"]["extra"]["reward"]["value"] == 0.9
    assert exported["final_metrics"]["extra"]["ndcg"] == 0.5
    assert exported["extra"]["question"]["gold"] == ["deck_2"]
    assert exported["extra"]["answer"]["text"] == "8,100,000"
    assert exported["extra"]["end"] == "forced"


def test_a_folder_of_episodes_holds_their_pictures(
    episode: Trajectory, images: dict[str, bytes], tmp_path: Path
) -> None:
    store = TrajectoryStore(tmp_path / "run/trajectories", "r")
    for name, png in images.items():
        store.save_image(name, png)
    long = episode.model_copy(update={"trajectory_id": "../긴" * 60})
    store.write_step(3, [episode, long])
    target = tmp_path / "atif"
    assert export_atif(tmp_path / "run", target) == 2
    files = sorted(target.glob("*.json"))
    assert [file.name for file in files] == ["000003-000002.json", "000003-q1%2F0.json"]
    for file in files:
        exported = json.loads(file.read_text("utf-8"))
        for step in exported["steps"]:
            for result in step.get("observation", {}).get("results", []):
                for part in result["content"]:
                    if part["type"] == "image":
                        png = (target / part["source"]["path"]).read_bytes()
                        assert hashlib.sha256(png).hexdigest() in images
    assert len(list((target / "images").iterdir())) == len(episode.images)
    with pytest.raises(UserError, match="not empty"):
        export_atif(tmp_path / "run", target)


def test_an_export_that_fails_leaves_nothing(
    episode: Trajectory, images: dict[str, bytes], tmp_path: Path
) -> None:
    store = TrajectoryStore(tmp_path / "trajectories", "r")
    for name, png in images.items():
        store.save_image(name, png)
    store.write_step(3, [episode])
    next((tmp_path / "trajectories/images").rglob("*.png")).unlink()
    with pytest.raises(UserError, match=r"\.png"):
        export_atif(tmp_path, tmp_path / "atif")
    assert [path.name for path in tmp_path.iterdir()] == ["trajectories"]


def test_a_run_without_episodes_is_not_exported(tmp_path: Path) -> None:
    TrajectoryStore(tmp_path / "trajectories", "r")
    with pytest.raises(UserError, match="no episodes"):
        export_atif(tmp_path, tmp_path / "atif")
    assert not (tmp_path / "atif").exists()


def test_the_script_exports_the_steps_that_were_named(
    episode: Trajectory, images: dict[str, bytes], tmp_path: Path
) -> None:
    store = TrajectoryStore(tmp_path / "run/trajectories", "r")
    for name, png in images.items():
        store.save_image(name, png)
    for step in (3, 4):
        changes = {"step": step, "trajectory_id": f"{step}-0"}
        store.write_step(step, [episode.model_copy(update=changes)])
    app = typer.Typer()
    app.command()(main)

    def start(*args: object) -> tuple[int, str]:
        result = CliRunner().invoke(app, [str(tmp_path / "run"), *map(str, args)])
        return result.exit_code, result.output

    code, out = start(tmp_path / "atif", "--step", 3)
    assert code == 0 and out.startswith("episodes: 1")
    (file,) = (tmp_path / "atif").glob("*.json")
    assert json.loads(file.read_text("utf-8"))["trajectory_id"] == "3-0"
    assert start(tmp_path / "x", "--step", 9)[0] == 2
    assert not (tmp_path / "x").exists()


# -- Inspect --------------------------------------------------------------------------------------

needs_inspect = pytest.mark.skipif(find_spec("inspect_ai") is None, reason="no inspect-ai")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run with two episodes of a question, one of them without a score."""
    images: dict[str, bytes] = {}
    turns = search("Births in Europe"), "no action", crop(0, 0, 400, 200)
    good, failed = played(scripted(*turns), [ask()], pictures=images, samples=2)
    good = good.model_copy(
        update={
            "answer": GeneratedAnswer(status="ok", text="810만", evidence=good.images),
            "judged": JudgedAnswer(status="ok", score=1.0, reason="the same"),
            "reward": EpisodeReward(status="ok", value=0.9, parts={"judge": 1.0}),
        }
    )
    verdict = {"judged": JudgedAnswer(status="failed", reason="timeout")}
    store = TrajectoryStore(tmp_path / "trajectories", "r")
    for name, png in images.items():
        store.save_image(name, png)
    store.write_step(3, [good, failed.model_copy(update=verdict)])
    return tmp_path


@needs_inspect
def test_a_step_is_a_log_that_inspect_reads(run: Path) -> None:
    from inspect_ai.log import read_eval_log

    assert export_inspect(run, run / "logs") == 2
    log = read_eval_log(str(run / "logs/step-000003.eval"))
    assert (log.status, log.eval.metadata) == ("success", {"run": "r", "step": 3})
    good, failed = log.samples
    assert [(sample.id, sample.epoch) for sample in log.samples] == [("q1", 1), ("q1", 2)]
    assert good.scores["reward"].value == 0.9 and good.scores["judge"].answer == "810만"
    assert not failed.scores, "what was not judged has no score, and no 0"
    (reward,) = (score for score in log.results.scores if score.name == "reward")
    assert (reward.scored_samples, reward.unscored_samples) == (1, 1)
    roles = " ".join(message.role for message in good.messages)
    assert roles == "user assistant tool assistant user assistant tool assistant"
    searched, result = good.messages[1:3]
    assert searched.tool_calls[0].arguments == {"query": "Births in Europe"}
    assert result.tool_call_id == searched.tool_calls[0].id
    assert [part.type for part in result.content] == ["text", "image"]


@needs_inspect
def test_no_log_takes_the_place_of_another(run: Path) -> None:
    export_inspect(run, run / "logs")
    with pytest.raises(UserError, match="not empty"):
        export_inspect(run, run / "logs")


@pytest.mark.skipif(find_spec("inspect_ai") is not None, reason="inspect-ai is there")
def test_without_inspect_the_user_is_told_what_to_install(run: Path) -> None:
    with pytest.raises(UserError, match="inspect-ai: not installed"):
        export_inspect(run, run / "logs")
    assert not (run / "logs").exists()
