"""A searcher in two processes, and what is drawn in place of groups without spread."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bench.kit.openai_server import FakeOpenAI
from scorekit.config import load_config
from tests.kits.retrieval.stand_in import StandInRetriever
from tests.kits.trainer import forked_trainer
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
    with learning.around(stand_in.app, fake.app) as services:
        told = learning.config_of(
            folder,
            services,
            rl={"num_updates": 3, "batch_size": 4, "warmup_updates": 0},
            data={"eval": None, "train_limit": 6},
            misc={"seed": 2},  # a question comes twice in update 2, once on each process
        )
        yield Town(learning.write_config(folder / "config.yaml", told), stand_in, fake)


@pytest.fixture
def town(running: Town) -> Town:
    running.stand_in.revision, running.stand_in.asked = "r1", []
    running.fake.forget()
    return running


def train(town: Town, out: Path, *overrides: str, ranks: int) -> Any:
    settings = (f"misc.run_dir={out}", "misc.patience_s=60", *overrides)
    flags = [part for setting in settings for part in ("--set", setting)]
    told = ("train", "--config", str(town.config), *flags)
    return forked_trainer.completed("trainer", *told, environment=ENVIRONMENT, ranks=ranks)


def lines_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def stored(out: Path, update: int) -> list[Trajectory]:
    return list(TrajectoryStore(out / "trajectories").read([update]))


def test_two_processes_play_the_questions_of_one_and_pay_once(town: Town, tmp_path: Path) -> None:
    """Six questions, four an update: in the second the pass begins anew, so that a question may
    come twice, once on each process, as two groups."""
    done = train(town, tmp_path, ranks=2)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    cfg = load_config(SearchConfig, town.config, [f"misc.run_dir={tmp_path / 'one'}"])
    assert run_search(load_train(cfg), {}, cfg).exit_code == 0
    for update, line in enumerate(lines_of(tmp_path), 1):
        found, of_one = stored(tmp_path, update), stored(tmp_path / "one", update)
        for ours, theirs in zip(found, of_one, strict=True):
            for name in ("trajectory_id", "group", "sample", "question", "step", "attempt"):
                assert getattr(ours, name) == getattr(theirs, name)
        assert len(found) == line["samples"] == 16
        assert sorted(Counter(one.group for one in found).values()) == [4, 4, 4, 4]
        assert line["groups"] == 4 and line["reward_coverage"] == 1 and line["steps"] > 0
        store = TrajectoryStore(tmp_path / "trajectories")
        for one in found:
            assert all(store.read_image(image) for image in one.images)
    asked = [json.dumps(one.body, sort_keys=True) for one in town.fake.requests]
    ours = lines_of(tmp_path)[-1]["cost/generator_calls"]
    theirs = lines_of(tmp_path / "one")[-1]["cost/generator_calls"]
    assert len(asked) == ours + theirs
    assert len(set(asked[: int(ours)])) == ours
    before = load_file(town.config.parent / "policy/model.safetensors")
    after = load_file(tmp_path / "checkpoints/step-000003/model.safetensors")
    assert any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("what", ["money", "index"])
def test_what_one_process_meets_ends_both_with_one_line(
    town: Town, tmp_path: Path, what: str
) -> None:
    """Money is spent on the main one alone; another index may answer any of them first."""
    overrides = []
    if what == "money":
        prices = ["prompt=0", "completion=1000000"]
        overrides = [f"answering.money.generator.{price}" for price in prices]
        overrides += ["answering.money.cap=1", "answering.generator.max_output_tokens=1"]
    else:
        answer = town.fake.respond

        def respond(body: Any, seed: int | None) -> str | None:
            """Behind the first answer another index is there."""
            town.stand_in.revision = "r2"
            return answer(body, seed)

        town.fake.respond = respond
    try:
        done = train(town, tmp_path, *overrides, ranks=2)
    finally:
        town.fake.respond = learning.answer
    assert done.returncode == 3, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("stopped: ") == 1
    assert ("money.cap" if what == "money" else "to r2") in done.stderr
    assert "--resume" in done.stderr


def test_groups_without_spread_are_filled_up_with_other_questions(
    town: Town, tmp_path: Path
) -> None:
    """The same ones each time, and none of those that the update has had."""
    sampled = ["misc.seed=0", "rollout.dynamic_sampling=2", "rollout.n_agent=2", "rl.batch_size=2"]
    preset = ["reward.preset=phase1", "rl.num_updates=3", "rl.minibatch_size=2"]
    runs = []
    for name in ("one", "two"):
        told = [f"misc.run_dir={tmp_path / name}", *sampled, *preset]
        cfg = load_config(SearchConfig, town.config, told)
        assert run_search(load_train(cfg), {}, cfg).exit_code == 0
        runs.append([stored(tmp_path / name, update) for update in (1, 2, 3)])
    drawn = [[(t.trajectory_id, t.group, t.shown_pages) for t in step] for step in runs[0]]
    assert drawn == [[(t.trajectory_id, t.group, t.shown_pages) for t in step] for step in runs[1]]
    further = 0
    for line, step in zip(lines_of(tmp_path / "one"), runs[0], strict=True):
        earned: dict[str, set[float | None]] = {}
        for one in step:
            earned.setdefault(one.group, set()).add(one.reward and one.reward.value)
        assert set(Counter(one.question.id for one in step).values()) == {2}
        spread = sum(len(values) > 1 for values in earned.values())
        assert line["groups"] == len(earned) and line["samples"] == len(step)
        assert line["groups_without_spread"] == len(earned) - spread
        assert spread == 2 or len(earned) in (4, 5, 6)  # tried as often as it may be
        further += len(earned) - 2
    assert further > 0 and not town.fake.requests  # phase 1 pays for nothing
