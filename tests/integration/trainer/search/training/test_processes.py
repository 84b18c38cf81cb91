"""Test a search policy in two processes, and samples that replace groups without spread."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from scorekit.config import load_config
from testing.openai_server import FakeOpenAI
from tests.kits import forked
from tests.kits.retrieval.stand_in import StandInRetriever
from tests.kits.trainer.searching import learning
from trainer.search.config import SearchConfig
from trainer.search.data import load_train
from trainer.search.records import Trajectory
from trainer.search.training.train import run_search
from trainer.search.trajectories.store import TrajectoryStore

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


@dataclass
class Town:
    config: Path
    stand_in: StandInRetriever
    fake: FakeOpenAI


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    folder = tmp_path_factory.mktemp("processes")
    stand_in, fake = learning.standing_in(), learning.counting()
    with learning.running_services(stand_in.app, fake.app) as services:
        settings = learning.config_of(
            folder,
            services,
            rl={"num_updates": 3, "batch_size": 4, "warmup_updates": 0},
            data={"eval": None, "train_limit": 6},
            misc={"seed": 2},  # a question occurs twice in update 2, once in each process
        )
        yield Town(learning.write_config(folder / "config.yaml", settings), stand_in, fake)


@pytest.fixture
def town(running: Town) -> Town:
    running.stand_in.revision, running.stand_in.requests = "r1", []
    running.fake.forget()
    return running


def train(town: Town, out: Path, *overrides: str, ranks: int, more: Sequence[str] = ()) -> Any:
    settings = (f"misc.run_dir={out}", "misc.patience_s=60", *overrides)
    flags = [part for setting in settings for part in ("--set", setting)]
    arguments = ("train", "--config", str(town.config), *more, *flags)
    return forked.completed("trainer", *arguments, environment=ENVIRONMENT, ranks=ranks)


def lines_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def stored(out: Path, update: int) -> list[Trajectory]:
    return list(TrajectoryStore(out / "trajectories").read([update]))


def test_two_processes_play_the_questions_of_one_and_pay_once(town: Town, tmp_path: Path) -> None:
    """Use six questions, four an update.

    The second update begins another pass, so a question may occur twice, once in each process, as
    two groups."""
    result = train(town, tmp_path, ranks=2)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    cfg = load_config(SearchConfig, town.config, [f"misc.run_dir={tmp_path / 'one'}"])
    assert run_search(load_train(cfg), {}, cfg).exit_code == 0
    for update, line in enumerate(lines_of(tmp_path), 1):
        trajectories, of_one = stored(tmp_path, update), stored(tmp_path / "one", update)
        for two_processes, one_process in zip(trajectories, of_one, strict=True):
            for name in ("trajectory_id", "group", "sample", "question", "step", "attempt"):
                assert getattr(two_processes, name) == getattr(one_process, name)
        assert len(trajectories) == line["samples"] == 16
        assert sorted(Counter(trajectory.group for trajectory in trajectories).values()) == [
            4,
            4,
            4,
            4,
        ]
        assert line["groups"] == 4 and line["reward_coverage"] == 1 and line["steps"] > 0
        store = TrajectoryStore(tmp_path / "trajectories")
        for trajectory in trajectories:
            assert all(store.read_image(image) for image in trajectory.images)
    bodies = [json.dumps(trajectory.body, sort_keys=True) for trajectory in town.fake.requests]
    two_processes = lines_of(tmp_path)[-1]["cost/generator_calls"]
    one_process = lines_of(tmp_path / "one")[-1]["cost/generator_calls"]
    assert len(bodies) == two_processes + one_process
    assert len(set(bodies[: int(two_processes)])) == two_processes
    before = load_file(town.config.parent / "policy/model.safetensors")
    after = load_file(tmp_path / "checkpoints/step-000003/model.safetensors")
    assert any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow
def test_two_processes_learn_and_resume_in_4_bits(town: Town, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    settings = ("policy.lora.r=2", "policy.load_in_4bit=true", "misc.save_every_n_updates=1")
    for updates, more in ((1, ()), (2, ("--resume",))):
        result = train(town, tmp_path, *settings, f"rl.num_updates={updates}", more=more, ranks=2)
        assert result.returncode == 0, result.stderr
    first, second = (
        load_file(tmp_path / f"checkpoints/step-{update:06d}/adapter_model.safetensors")
        for update in (1, 2)
    )
    assert any("lora_B" in name and bool(weight.any()) for name, weight in first.items())
    assert any(not torch.equal(first[name], second[name]) for name in first)
    assert [line["update"] for line in lines_of(tmp_path)] == [1, 2]


@pytest.mark.parametrize("cause", ["money", "index"])
def test_what_one_process_meets_ends_both_with_one_line(
    town: Town, tmp_path: Path, cause: str
) -> None:
    """Check a spent budget, which only the main process knows, and another index, which any may
    see."""
    overrides = []
    if cause == "money":
        prices = ["prompt=0", "completion=1000000"]
        overrides = [f"answering.money.generator.{price}" for price in prices]
        overrides += ["answering.money.cap=1", "answering.generator.max_output_tokens=1"]
    else:
        answer = town.fake.respond

        def respond(body: Any, seed: int | None) -> str | None:
            """Change the index's revision after the first answer."""
            town.stand_in.revision = "r2"
            return answer(body, seed)

        town.fake.respond = respond
    try:
        result = train(town, tmp_path, *overrides, ranks=2)
    finally:
        town.fake.respond = learning.answer
    assert result.returncode == 3, result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.count("stopped: ") == 1
    assert ("money.cap" if cause == "money" else "to r2") in result.stderr
    assert "--resume" in result.stderr


def test_groups_without_spread_are_filled_up_with_other_questions(
    town: Town, tmp_path: Path
) -> None:
    """Check that the choice is repeatable and has no question that the update already used."""
    sampled = ["misc.seed=1", "rollout.dynamic_sampling=2", "rollout.n_agent=2", "rl.batch_size=2"]
    preset = ["reward.preset=phase1", "rl.num_updates=3", "rl.minibatch_size=2"]
    runs = []
    for name in ("one", "two"):
        overrides = [f"misc.run_dir={tmp_path / name}", *sampled, *preset]
        cfg = load_config(SearchConfig, town.config, overrides)
        assert run_search(load_train(cfg), {}, cfg).exit_code == 0
        runs.append([stored(tmp_path / name, update) for update in (1, 2, 3)])
    sampled_ids = [[(t.trajectory_id, t.group, t.shown_pages) for t in step] for step in runs[0]]
    assert sampled_ids == [
        [(t.trajectory_id, t.group, t.shown_pages) for t in step] for step in runs[1]
    ]
    further = 0
    for line, step in zip(lines_of(tmp_path / "one"), runs[0], strict=True):
        rewards_by_group: dict[str, set[float | None]] = {}
        for trajectory in step:
            rewards_by_group.setdefault(trajectory.group, set()).add(
                trajectory.reward and trajectory.reward.value
            )
        assert set(Counter(trajectory.question.id for trajectory in step).values()) == {2}
        spread = sum(len(values) > 1 for values in rewards_by_group.values())
        assert line["groups"] == len(rewards_by_group) and line["samples"] == len(step)
        assert line["groups_without_spread"] == len(rewards_by_group) - spread
        assert spread == 2 or len(rewards_by_group) in (4, 5, 6)  # the attempts were used up
        further += len(rewards_by_group) - 2
    assert further > 0 and not town.fake.requests  # phase 1 pays for nothing
