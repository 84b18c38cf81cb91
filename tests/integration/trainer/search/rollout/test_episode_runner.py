"""Check what processes that share their episodes do when one of them has an error."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from scorekit.errors import ScorekitError, UserError
from testing.servers import PATIENCE_S
from tests.kits.trainer.searching.episodes import COMPLETE, ask, search
from tests.kits.trainer.searching.pages import PagesHere
from trainer.search.config import SearchConfig
from trainer.search.reward import RewardStream
from trainer.search.rollout.episode import TurnRequest
from trainer.search.rollout.episode_runner import EpisodeRunner
from trainer.search.rollout.policies import ScriptPolicy
from trainer.search.trajectories.store import TrajectoryStore


class Together:
    """Joins the items of two processes, which are threads here."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=PATIENCE_S)
        self._parts: list[list[Any]] = [[], []]

    def gather(self, rank: int, items: list[Any]) -> list[Any]:
        self._parts[rank] = items
        self._barrier.wait()
        joined = [*self._parts[0], *self._parts[1]]
        self._barrier.wait()
        return joined


class Rank:
    """One of two processes."""

    size = 2

    def __init__(self, rank: int, meeting: Together) -> None:
        self.rank, self.is_main = rank, rank == 0
        self._meeting = meeting

    def gather(self, items: list[Any]) -> list[Any]:
        return self._meeting.gather(self.rank, items)

    def own_block(self, items: Sequence[Any]) -> Sequence[Any]:
        half = len(items) // 2
        return items[half:] if self.rank else items[:half]


class Noting(ScriptPolicy):
    """Plays a script, and notes that this process has no more turns."""

    has_ended = False

    def end(self) -> None:
        self.has_ended = True


def test_an_error_of_one_process_is_raised_on_all_when_their_episodes_have_ended(
    tmp_path: Path,
) -> None:
    cfg = SearchConfig.model_validate({"reward": {"preset": "phase1", "w_judge": 0}})
    meeting = Together()

    def script(request: TurnRequest) -> str:
        if request.trajectory_id == "1-3-0":
            raise UserError("the server reads images as other ids")
        return search("births") if request.turn == 1 else COMPLETE

    def run(rank: int) -> tuple[ScorekitError, bool]:
        store = TrajectoryStore(tmp_path / str(rank), "run-a")
        stream = RewardStream(cfg.reward, None, store.read_image)
        world: Any = Rank(rank, meeting)
        policy = Noting(script)
        runner = EpisodeRunner(cfg, PagesHere(), stream, store, world, tolerates_outage=True)
        questions = [(i, ask(f"q{i}")) for i in range(4)]
        with pytest.raises(ScorekitError) as raised:
            runner.run(policy, questions, step=1)
        return raised.value, policy.has_ended

    with ThreadPoolExecutor(2) as threads:
        outcomes = list(threads.map(run, range(2)))
    assert [str(error) for error, _ in outcomes] == ["the server reads images as other ids"] * 2
    assert [has_ended for _, has_ended in outcomes] == [True, True]
