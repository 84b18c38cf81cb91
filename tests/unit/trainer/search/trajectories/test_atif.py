"""Check that the ATIF export fits Harbor's schema, with ids and images in their steps."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import jsonschema
import pytest

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
from trainer.search.trajectories.atif import as_atif, export_atif
from trainer.search.trajectories.atif_schema import AtifStep
from trainer.search.trajectories.store import TrajectoryStore

SCHEMA = json.loads((Path(__file__).parents[4] / "data/atif/v1.8.schema.json").read_text("utf-8"))


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


def exported_dict(trajectory: Trajectory) -> dict:
    return json.loads(as_atif(trajectory).model_dump_json(exclude_none=True))


def test_what_is_written_fits_the_published_schema(episode: Trajectory) -> None:
    bare = episode.model_copy(
        update=dict.fromkeys(("tokens", "answer", "judged", "reward", "ndcg")) | {"turns": []}
    )
    for trajectory in (episode, bare):
        jsonschema.validate(exported_dict(trajectory), SCHEMA)


def test_each_turn_is_a_step_with_its_call_and_what_came_of_it(episode: Trajectory) -> None:
    question_step, searched, invalid, cropped, forced = exported_dict(episode)["steps"]
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
    metrics = [step.get("metrics", {}) for step in exported_dict(episode)["steps"][1:]]
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
    unknown = exported_dict(episode.model_copy(update={"tokens": one_stretch}))
    assert not any("completion_token_ids" in step.get("metrics", {}) for step in unknown["steps"])


def test_the_reward_and_what_has_no_place_stand_under_extra(episode: Trajectory) -> None:
    exported = exported_dict(episode)
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


@pytest.mark.parametrize(
    "wrong",
    [
        {"source": "user", "reasoning_content": "hm"},
        {"source": "agent", "llm_call_count": 0, "metrics": {"completion_tokens": 1}},
        {"source": "agent", "observation": {"results": [{"source_call_id": "x", "content": []}]}},
    ],
)
def test_what_a_reader_would_refuse_is_not_written(wrong: dict) -> None:
    with pytest.raises(ValueError):
        AtifStep.model_validate({"step_id": 2, "message": ""} | wrong)
