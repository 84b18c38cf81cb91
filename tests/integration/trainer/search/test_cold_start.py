"""Test a cold start: scripted episodes, their rows, fine-tuning, and a run of the tuned policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.kits.trainer.searching.cold import READING, SEEING, save_model
from tests.kits.trainer.searching.episodes import ask, played, scripted, search
from tests.kits.trainer.sft import sft_config
from trainer.runs.run_log import read_jsonl
from trainer.search.cli import app
from trainer.search.config import SearchConfig
from trainer.search.records import EpisodeReward
from trainer.search.rollout.sampled import local_policy
from trainer.search.steps.sft_rows import ROWS
from trainer.search.trajectories.store import TrajectoryStore
from trainer.sft.run import run_sft

TURNS = search("births"), search("rainfall")


def save_run(folder: Path, episode: dict[str, Any]) -> Path:
    """Store episodes as `collect` does: three right ones and a wrong one."""
    cfg = SearchConfig.model_validate({"episode": episode, "misc": {"run_dir": str(folder)}})
    image_by_hash: dict[str, bytes] = {}
    rows = [ask(f"q{n}") for n in range(4)]
    done = played(scripted(*TURNS), rows, pictures=image_by_hash, **episode)
    store = TrajectoryStore(folder / "trajectories", "r")
    for name, png in image_by_hash.items():
        store.save_image(name, png)
    for trajectory, value in zip(done, (1.0, 1.0, 0.0, 1.0), strict=True):
        trajectory.reward = EpisodeReward(status="ok", value=value)
    store.write_step(3, done)
    (folder / "config.yaml").write_text(json.dumps(cfg.model_dump(mode="json")))
    return folder


@pytest.mark.parametrize("episode", [READING, SEEING], ids=["text", "image"])
def test_a_policy_is_tuned_on_collected_episodes_and_searches(
    episode: dict[str, Any], tmp_path: Path
) -> None:
    model = save_model(tmp_path / "model", episode)
    run = save_run(tmp_path / "run", episode)
    rows = tmp_path / "rows"
    arguments = ["export", run, rows, "--format", "sft", "--model", model, "--least-reward", 1]
    result = CliRunner().invoke(app, [str(word) for word in arguments])
    assert result.exit_code == 0, result.output
    assert "episodes: 3 in" in result.output and "left out: 1 episodes" in result.output
    cfg = sft_config(
        model,
        rows / ROWS,
        tmp_path / "sft",
        data={"train": str(rows / ROWS), "eval": str(rows / ROWS), "max_length": None},
        sft={"num_train_epochs": 4, "per_device_train_batch_size": 1, "learning_rate": 3e-3},
    )
    artifacts = run_sft(cfg)
    before, after = read_jsonl(tmp_path / "sft/eval.jsonl")
    assert after["loss"] < 0.8 * before["loss"]
    assert artifacts.checkpoint is not None
    settings = {"policy": {"path": str(artifacts.checkpoint)}, "episode": episode}
    policy = local_policy(
        SearchConfig.model_validate(
            settings | {"generation": {"max_new_tokens": 24}, "misc": {"device": "cpu"}}
        )
    )
    (searched,) = played(policy, max_turns=2, **episode)
    assert searched.tokens is not None and searched.turns[0].tokens
