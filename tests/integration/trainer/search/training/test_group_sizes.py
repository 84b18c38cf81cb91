"""Check updates whose questions have groups of different sizes: sampled, trained, and filled up."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from scorekit.config import load_config
from scorekit.errors import UserError
from tests.integration.trainer.search.training.test_processes import ENVIRONMENT
from tests.kits import forked
from tests.kits.trainer.searching import learning
from trainer.search.check import check_run
from trainer.search.config import SearchConfig
from trainer.search.data import load_held_out, load_train
from trainer.search.records import Trajectory
from trainer.search.training.train import run_search
from trainer.search.trajectories.store import TrajectoryStore

#: Group sizes by the position of the question.
SIZES = (2, 5, 3)
#: Sampling temperatures in turn; None: the run's.
TEMPERATURES = (0.5, None, 2.0, 1.5)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("sizes")
    with learning.running_services(learning.standing_in().app, learning.counting().app) as services:
        settings = learning.config_of(
            folder,
            services,
            rl={"num_updates": 2, "batch_size": 4, "minibatch_size": 4, "warmup_updates": 0},
            eval={"eval_every_n_updates": 0},
        )
        for name, numbers in (("train", range(9)), ("heldout", range(9, 12))):
            learning.write_questions(folder / f"{name}.jsonl", numbers, SIZES)
        yield learning.write_config(folder / "config.yaml", settings)


def stored(out: Path, update: int) -> list[Trajectory]:
    return list(TrajectoryStore(out / "trajectories").read([update]))


def lines_of(out: Path, name: str = "log.jsonl") -> list[dict[str, object]]:
    return [json.loads(line) for line in (out / name).read_text().splitlines()]


def size_of(trajectory: Trajectory) -> int:
    return SIZES[int(trajectory.question.id[1:]) % 3]


def test_each_group_has_its_own_size_and_is_compared_within_itself(
    config: Path, tmp_path: Path
) -> None:
    cfg = load_config(SearchConfig, config, [f"misc.run_dir={tmp_path}"])
    assert run_search(load_train(cfg), load_held_out(cfg), cfg).exit_code == 0
    for update, line in enumerate(lines_of(tmp_path), 1):
        trajectories = stored(tmp_path, update)
        groups = Counter(trajectory.group for trajectory in trajectories)
        assert len(groups) == 4 and line["groups"] == 4
        assert all(groups[trajectory.group] == size_of(trajectory) for trajectory in trajectories)
        assert line["samples"] == sum(groups.values()) == len(trajectories)
        assert len(set(groups.values())) > 1, "the batch is of groups that differ"
        dumped = {
            row["trajectory_id"]: row
            for row in lines_of(tmp_path, f"completions/train-{update:06d}.jsonl")
        }
        num_trained = sum(bool(row["learned"]) for row in dumped.values())
        assert line["steps"] == -(-num_trained // 4)
        for group in groups:
            group_rows = [
                dumped[trajectory.trajectory_id]
                for trajectory in trajectories
                if trajectory.group == group
            ]
            rewards = [float(str(row["reward"])) for row in group_rows]
            assert all(row["learned"] for row in group_rows) == (len(set(rewards)) > 1)
            mean = sum(rewards) / len(rewards)
            for row, reward in zip(group_rows, rewards, strict=True):
                assert float(str(row["advantage"])) * (reward - mean) >= 0
    evaluated = json.loads((tmp_path / "eval.jsonl").read_text().splitlines()[0])
    assert evaluated["samples"] == 3, "of a held-out question one is played, whatever it says"


def test_two_processes_share_them(config: Path, tmp_path: Path) -> None:
    data = learning.write_questions(tmp_path / "t.jsonl", range(9), SIZES, TEMPERATURES)
    settings = (
        f"misc.run_dir={tmp_path}/out",
        f"data.train={data}",
        "misc.patience_s=60",
        "rl.importance_correction=on",
    )
    flags = [part for setting in settings for part in ("--set", setting)]
    arguments = ("train", "--config", str(config), *flags)
    result = forked.completed("trainer", *arguments, environment=ENVIRONMENT, ranks=2)
    assert result.returncode == 0, result.stderr
    for update, line in enumerate(lines_of(tmp_path / "out"), 1):
        assert float(str(line["sampler_gap_max"])) < 1e-4, "at the temperature of each question"
        trajectories = stored(tmp_path / "out", update)
        assert len({trajectory.question.temperature for trajectory in trajectories}) > 1
        assert len({trajectory.group for trajectory in trajectories}) == 4
        assert Counter(
            Counter(trajectory.group for trajectory in trajectories).values()
        ) == Counter(
            size_of(trajectory)
            for trajectory in {trajectory.group: trajectory for trajectory in trajectories}.values()
        )


def test_what_is_drawn_in_place_of_others_has_its_own_size_too(
    config: Path, tmp_path: Path
) -> None:
    overrides = ["rollout.dynamic_sampling=3", "rl.batch_size=2", "rl.num_updates=3", "misc.seed=1"]
    runs = []
    for name in ("one", "two"):
        run_dir = f"misc.run_dir={tmp_path / name}"
        cfg = load_config(SearchConfig, config, [*overrides, run_dir, "reward.preset=phase1"])
        assert run_search(load_train(cfg), {}, cfg).exit_code == 0
        runs.append(
            [trajectory for update in (1, 2, 3) for trajectory in stored(tmp_path / name, update)]
        )
    groups = Counter((trajectory.step, trajectory.group) for trajectory in runs[0])
    assert len(groups) > 6, "none was drawn in place of another"
    assert all(
        groups[trajectory.step, trajectory.group] == size_of(trajectory) for trajectory in runs[0]
    )
    sampled_pages = [
        [(trajectory.trajectory_id, trajectory.shown_pages) for trajectory in run] for run in runs
    ]
    assert sampled_pages[0] == sampled_pages[1]


def test_a_group_of_one_is_refused_before_anything_is_loaded(config: Path, tmp_path: Path) -> None:
    data = learning.write_questions(tmp_path / "t.jsonl", range(9), (4, 1))
    cfg = load_config(SearchConfig, config, [f"data.train={data}", f"misc.run_dir={tmp_path}/out"])
    with pytest.raises(UserError, match=r"n_agent of 4 questions \(q1 first\)"):
        run_search(load_train(cfg), {}, cfg)


def test_check_tells_of_them_and_of_the_most_they_cost(config: Path, tmp_path: Path) -> None:
    findings = check_run(load_config(SearchConfig, config, [f"misc.run_dir={tmp_path}"]))
    assert not findings.failed, findings.failed
    message_by_check = {check.name: check.result for check in findings.checks}
    assert message_by_check["updates"].startswith(
        "2 of 4 questions x 2 to 5 episodes (9 questions have an n_agent of their own), "
        "2 to 5 steps each"
    )
    # 2 x 4 of nine questions: the three of 5 episodes, the three of 3, two of 2
    assert message_by_check["money"].startswith(f"{3 * 5 + 3 * 3 + 2 * 2} episodes of training")
