"""Check a failing retriever, from the questions to the stored rewards.

A failed search is not a zero, and finished episodes are not lost."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from scorekit.errors import ScorekitError
from scorekit.retrieval.client import Retriever
from testing.flaky_server import FAULTS, Fault, FlakyServer
from testing.servers import running_app
from tests.kits.retrieval.stand_in import StandInRetriever
from tests.kits.trainer.searching.episodes import COMPLETE, search
from tests.kits.trainer.searching.finished import question
from trainer.search.config import EpisodeConfig, SearchRewardConfig
from trainer.search.records import Question, Trajectory
from trainer.search.reward import RewardStream
from trainer.search.rollout.episode import TurnRequest, run_episodes
from trainer.search.rollout.policies import ScriptPolicy
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
            new_id=lambda question, sample: f"{question.id}-{sample}",
            on_done=self.stream.submit,
            save_image=self.store.save_image,
            samples=2,
            run="run-a",
            step=1,
        )

    def collect_rewards(self, episodes: list[Trajectory]) -> dict[str, Trajectory]:
        group_by_id = {trajectory.trajectory_id: trajectory.group for trajectory in episodes}
        trajectory = self.stream.collect(1, group_by_id, PATIENCE_S)
        self.store.write_step(1, list(trajectory.values()))
        return {stored.trajectory_id: stored for stored in self.store.read()}

    def close(self) -> None:
        self.retriever.close()
        self.stream.close()


@pytest.fixture
def stand_in() -> StandInRetriever:
    return StandInRetriever(PAGES)


@pytest.fixture
def moody(stand_in: StandInRetriever) -> Iterator[FlakyServer]:
    moody = FlakyServer(stand_in.app)
    yield moody
    moody.recover()


def search_policy(**queries: str) -> ScriptPolicy:
    """Search with each question's query until its gold page was shown, then end."""

    def script(turn_request: TurnRequest) -> str:
        name = turn_request.trajectory_id.partition("-")[0]
        return search(queries[name]) if turn_request.turn <= 2 else COMPLETE

    return ScriptPolicy(script)


def test_one_search_that_fails_fails_its_episodes_alone(
    stand_in: StandInRetriever, tmp_path: Path
) -> None:
    stand_in.failing["births sick"] = ("model_failure", 10**6)
    with running_app(stand_in.app) as url, closing(Run(url, tmp_path)) as run:
        policy = search_policy(well="births", sick="births sick")
        done = run.episodes(policy, [question("well"), question("sick")])
        rewarded = run.collect_rewards(done)
        assert (run.stream.stats["reward_coverage"], run.stream.stats["reward_failed"]) == (
            0.5,
            2,
        )
    for id, trajectory in rewarded.items():
        assert trajectory.reward is not None
        if id.startswith("sick"):
            assert (trajectory.end, trajectory.reward.status, trajectory.reward.value) == (
                "failed",
                "failed",
                None,
            )
        else:
            assert trajectory.shown_pages == ["deck_1", "deck_2"]
            assert trajectory.reward.value == pytest.approx(0.1 + 0.9 * 0.6309, abs=1e-3)


def test_a_retriever_that_finds_nothing_is_no_failure(
    stand_in: StandInRetriever, tmp_path: Path
) -> None:
    with running_app(stand_in.app) as url, closing(Run(url, tmp_path)) as run:
        rewarded = run.collect_rewards(run.episodes(search_policy(q="zebra"), [question("q")]))
        assert run.stream.stats["reward_coverage"] == 1
    assert {trajectory.reward.value for trajectory in rewarded.values() if trajectory.reward} == {
        0.1
    }


@pytest.mark.parametrize("failure", FAULTS)
def test_one_that_is_away_for_all_is_a_typed_error_and_keeps_what_was_done(
    failure: Fault, moody: FlakyServer, tmp_path: Path
) -> None:
    ended_ids: set[str] = set()

    def script(turn_request: TurnRequest) -> str:
        if turn_request.trajectory_id.startswith("second"):
            return search("rainfall")
        if turn_request.turn == 1:
            return search("births")
        ended_ids.add(turn_request.trajectory_id)
        return COMPLETE

    def mood(path: str, body: str) -> Fault | None:
        """Answer the second question only when the first one's episodes have ended, and badly."""
        if "rainfall" not in body:
            return None
        return failure if len(ended_ids) == 2 else "hang"

    moody.mood = mood
    with running_app(moody) as url, closing(Run(url, tmp_path, deadline_s=3.0)) as run:
        with pytest.raises(ScorekitError):
            run.episodes(ScriptPolicy(script), [question("first"), question("second")])
        assert moody.request_counts[failure] >= 1
        finished = run.stream.so_far(1)
        finished.sort(key=lambda trajectory: trajectory.sample)
        assert [trajectory.trajectory_id for trajectory in finished] == ["first-0", "first-1"]
        assert all(
            trajectory.reward and trajectory.reward.status == "ok" for trajectory in finished
        )
        run.store.write_step(1, finished)
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

        def script(turn_request: TurnRequest) -> str:
            if (turn_request.trajectory_id, turn_request.turn) == ("q-0", 2):
                first.close()
                port = int(url.rpartition(":")[2])
                threading.Thread(target=start_again, args=[port], daemon=True).start()
            return search("births") if turn_request.turn <= 2 else COMPLETE

        with closing(Run(url, tmp_path)) as run:
            rewarded = run.collect_rewards(run.episodes(ScriptPolicy(script), [question("q")]))
            over.set()
            assert run.stream.stats["reward_coverage"] == 1
    assert all(trajectory.shown_pages == ["deck_1", "deck_2"] for trajectory in rewarded.values())
