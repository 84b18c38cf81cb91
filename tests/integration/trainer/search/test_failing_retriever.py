"""A retriever on a bad day, from the questions to the stored rewards: what it fails to give is no
zero, and what was done before is not lost."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from bench.kit.flaky_server import FAULTS, Fault, Moody
from bench.kit.servers import running_app
from scorekit.errors import ScorekitError
from scorekit.retrieval.client import Retriever
from tests.kits.retrieval.stand_in import StandInRetriever
from tests.kits.trainer.searching.episodes import COMPLETE, search
from tests.kits.trainer.searching.finished import question
from trainer.search.records import Question, Trajectory
from trainer.search.reward.config import SearchRewardConfig
from trainer.search.reward.stream import RewardStream
from trainer.search.rollout.config import EpisodeConfig
from trainer.search.rollout.episode import run_episodes
from trainer.search.rollout.policies import ScriptPolicy, TurnRequest
from trainer.search.trajectories.store import TrajectoryStore

PATIENCE_S = 120.0
PAGES = {"deck_1": "births in korea", "deck_2": "births in europe", "deck_3": "rainfall"}


class Run:
    """A step of a run with a retriever at `url`: its episodes, their rewards, and its store."""

    def __init__(self, url: str, folder: Path, *, deadline_s: float = PATIENCE_S) -> None:
        self.retriever = Retriever(url, timeout_s=deadline_s, deadline_s=deadline_s)
        self.store = TrajectoryStore(folder / "trajectories", "run-a")
        rewards = SearchRewardConfig(preset="phase1", w_judge=0, w_ndcg=0.9, w_format=0.1)
        self.stream = RewardStream(rewards, None, self.store.read_image)

    def episodes(self, policy: ScriptPolicy, questions: list[Question]) -> list[Trajectory]:
        return run_episodes(
            questions,
            policy,
            self.retriever,
            EpisodeConfig(),
            new_id=lambda asked, sample: f"{asked.id}-{sample}",
            on_done=self.stream.submit,
            save_image=self.store.save_image,
            samples=2,
            run="run-a",
            step=1,
        )

    def rewarded(self, episodes: list[Trajectory]) -> dict[str, Trajectory]:
        wanted = {found.trajectory_id: found.group for found in episodes}
        found = self.stream.collect(1, wanted, PATIENCE_S)
        self.store.write_step(1, list(found.values()))
        return {kept.trajectory_id: kept for kept in self.store.read()}

    def close(self) -> None:
        self.retriever.close()
        self.stream.close()


@pytest.fixture
def stand_in() -> StandInRetriever:
    return StandInRetriever(PAGES)


@pytest.fixture
def moody(stand_in: StandInRetriever) -> Iterator[Moody]:
    moody = Moody(stand_in.app)
    yield moody
    moody.recover()


def searching(**queries: str) -> ScriptPolicy:
    """Each question's query until its gold page was shown, and then the end."""

    def script(one: TurnRequest) -> str:
        name = one.trajectory_id.partition("-")[0]
        return search(queries[name]) if one.turn <= 2 else COMPLETE

    return ScriptPolicy(script)


def test_one_search_that_fails_fails_its_episodes_alone(
    stand_in: StandInRetriever, tmp_path: Path
) -> None:
    stand_in.failing["births sick"] = ("model_failure", 10**6)
    with running_app(stand_in.app) as url, closing(Run(url, tmp_path)) as run:
        policy = searching(well="births", sick="births sick")
        done = run.episodes(policy, [question("well"), question("sick")])
        kept = run.rewarded(done)
        assert (run.stream.stats["reward_coverage"], run.stream.stats["reward_failed"]) == (
            0.5,
            2,
        )
    for id, found in kept.items():
        assert found.reward is not None
        if id.startswith("sick"):
            assert (found.end, found.reward.status, found.reward.value) == (
                "failed",
                "failed",
                None,
            )
        else:
            assert found.shown_pages == ["deck_1", "deck_2"]
            assert found.reward.value == pytest.approx(0.1 + 0.9 * 0.6309, abs=1e-3)


def test_a_retriever_that_finds_nothing_is_no_failure(
    stand_in: StandInRetriever, tmp_path: Path
) -> None:
    with running_app(stand_in.app) as url, closing(Run(url, tmp_path)) as run:
        kept = run.rewarded(run.episodes(searching(q="zebra"), [question("q")]))
        assert run.stream.stats["reward_coverage"] == 1
    assert {found.reward.value for found in kept.values() if found.reward} == {0.1}


@pytest.mark.parametrize("fault", FAULTS)
def test_one_that_is_away_for_all_is_a_typed_error_and_keeps_what_was_done(
    fault: Fault, moody: Moody, tmp_path: Path
) -> None:
    def script(one: TurnRequest) -> str:
        """The first question's episodes end before the retriever falls ill."""
        if one.turn == 2:
            moody.mood = lambda path, body: fault
        name = one.trajectory_id.partition("-")[0]
        return COMPLETE if name == "first" and one.turn == 2 else search("births")

    with running_app(moody) as url, closing(Run(url, tmp_path, deadline_s=3.0)) as run:
        with pytest.raises(ScorekitError):
            run.episodes(ScriptPolicy(script), [question("first"), question("second")])
        assert moody.asked[fault] >= 1
        kept = run.stream.so_far(1)
        assert [found.trajectory_id for found in kept] == ["first-0", "first-1"]
        assert all(found.reward and found.reward.status == "ok" for found in kept)
        run.store.write_step(1, kept)
        moody.recover()


def test_one_that_is_stopped_and_started_again_is_waited_for(
    stand_in: StandInRetriever, tmp_path: Path
) -> None:
    over = threading.Event()

    def start_again(port: int) -> None:
        with socket.create_server(("127.0.0.1", port)) as nobody:
            nobody.accept()[0].close()
        with running_app(stand_in.app, port=port):
            assert over.wait(PATIENCE_S)

    with ExitStack() as first:
        url = first.enter_context(running_app(stand_in.app))

        def script(one: TurnRequest) -> str:
            if (one.trajectory_id, one.turn) == ("q-0", 2):
                first.close()
                port = int(url.rpartition(":")[2])
                threading.Thread(target=start_again, args=[port], daemon=True).start()
            return search("births") if one.turn <= 2 else COMPLETE

        with closing(Run(url, tmp_path)) as run:
            kept = run.rewarded(run.episodes(ScriptPolicy(script), [question("q")]))
            over.set()
            assert run.stream.stats["reward_coverage"] == 1
    assert all(found.shown_pages == ["deck_1", "deck_2"] for found in kept.values())
