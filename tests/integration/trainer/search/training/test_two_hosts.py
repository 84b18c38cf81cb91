"""Train a search policy on two hosts, with all services on a third.

The hosts are network namespaces with addresses, each a machine of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kits.hosts import missing_permission
from tests.kits.trainer.searching import learning
from tests.kits.trainer.services_host import KEY
from tests.kits.trainer.two_hosts import TwoHosts, check_same, run_on_one_host, stats, two_hosts
from trainer.search.records import Trajectory
from trainer.search.trajectories.store import TrajectoryStore

REASON = missing_permission()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
]
UPDATES = 3


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoHosts]:
    folder = tmp_path_factory.mktemp("hosts")
    (folder / "data").mkdir()
    index = learning.make_index(folder)
    with two_hosts(folder) as trio:
        trio.values = learning.config_of(
            folder / "data",
            trio.serve(search=str(index)),
            rl={"num_updates": UPDATES, "batch_size": 4, "warmup_updates": 0},
            data={"train_limit": 6},
            misc={"patience_s": 60, "save_every_n_updates": 1},
        )
        yield trio


@pytest.fixture(scope="module")
def on_one(trio: TwoHosts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run whose two processes are on one host."""
    return run_on_one_host(trio, tmp_path_factory.mktemp("one") / "run", UPDATES)


def played(run_dir: Path) -> list[tuple[Any, ...]]:
    """Return what the episodes of a run were, and their rewards."""
    store = TrajectoryStore(run_dir / "trajectories")

    def key(trajectory: Trajectory) -> tuple[Any, ...]:
        images = [store.read_image(image) for image in trajectory.images]
        assert trajectory.reward is not None
        return trajectory.step, trajectory.group, trajectory.question.id, images, trajectory.reward

    return [key(trajectory) for trajectory in store.read(range(1, UPDATES + 1))]


def test_two_hosts_learn_as_one_with_services_elsewhere(
    trio: TwoHosts, on_one: Path, tmp_path: Path
) -> None:
    """Check all episodes and images of a shared folder, and a wrong key on one host."""
    codes, texts = trio.finish(trio.config(tmp_path / "shared"))
    assert codes == [0, 0], texts
    check_same(on_one, tmp_path / "shared", UPDATES, "train-*")
    assert played(tmp_path / "shared") == played(on_one)

    codes, texts = trio.finish(trio.config(tmp_path / "wrong"), keys=(KEY, "another"))
    assert codes[0] and codes[1] == 2, texts
    assert "SCOREKIT_API_KEY" in texts[1] and "Traceback" not in "".join(texts)
    assert "process 1 is at" in texts[0]


def test_what_a_host_does_not_see_is_one_line(trio: TwoHosts, on_one: Path, tmp_path: Path) -> None:
    """Check the questions, a new run's folder, the checkpoints, and answers in a local file."""
    resumed = trio.config(on_one, rl={"num_updates": UPDATES + 1})
    local = trio.config(tmp_path / "local")
    local["answering"] = {k: v for k, v in local["answering"].items() if k != "answers"}
    for config, flags, hidden, line in (
        (trio.config(tmp_path / "data"), (), [trio.folder / "data"], "process 1 of 2: "),
        (
            trio.config(tmp_path / "new"),
            (),
            [tmp_path],
            "misc.run_dir: process 1 does not see ",
        ),
        (resumed, ("--resume",), [on_one.parent], "misc.run_dir: process 1 has no checkpoint in "),
        (local, (), (), "answering.answers: the processes run on 2 machines"),
    ):
        codes, texts = trio.finish(config, *flags, hidden=hidden)
        assert codes == [2, 0], texts
        assert texts[0].count("error: ") == 1 and f"error: {line}" in texts[0], texts
        assert "Traceback" not in "".join(texts) and "error: " not in texts[1]


def test_a_host_that_dies_is_named_and_the_run_resumes(
    trio: TwoHosts, on_one: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    text = trio.lose_one(trio.config(run_dir, rl={"num_updates": 10_000}))
    assert "process 0 of 2 " in text and "process 1 is at 'update" in text, text
    saved = sorted((run_dir / "checkpoints").iterdir())
    done = int(saved[-1].name.removeprefix("step-"))
    codes, texts = trio.finish(trio.config(run_dir, rl={"num_updates": done + 2}), "--resume")
    assert codes == [0, 0], texts
    assert [line["update"] for line in stats(run_dir)] == list(range(1, done + 3))
    assert stats(run_dir)[0]["reward_mean"] == stats(on_one)[0]["reward_mean"]


def test_a_rough_link_changes_no_number(trio: TwoHosts, on_one: Path, tmp_path: Path) -> None:
    """Check services whose replies come late, and of which some are cut."""
    served = trio.serve(search=str(trio.folder / "index"), is_rough=True)
    codes, texts = trio.finish(trio.config(tmp_path / "run", **served))
    assert codes == [0, 0], texts
    check_same(on_one, tmp_path / "run", UPDATES, "train-*")
    assert played(tmp_path / "run") == played(on_one)
