"""Check the turns, searches, crops and ends of episodes."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from typing import Any

import pytest

from scorekit.errors import RequestError, SampleError, ServiceUnreachable, UserError
from testing.servers import PATIENCE_S, wait_until
from tests.kits.trainer.searching.episodes import (
    COMPLETE,
    ask,
    by_question,
    crop,
    played,
    scripted,
    search,
)
from tests.kits.trainer.searching.pages import PagesHere
from trainer.search.images.image_data import image_hash, read_image
from trainer.search.records import Trajectory
from trainer.search.rollout.episode import TurnOutput, TurnRequest
from trainer.search.rollout.policies import ScriptPolicy


def only(trajectories: list[Trajectory]) -> Trajectory:
    (trajectory,) = trajectories
    return trajectory


def test_an_episode_goes_from_its_question_to_its_end() -> None:
    images: dict[str, bytes] = {}
    done = only(played(scripted(search("births 1990"), crop(50, 150, 400, 300)), pictures=images))
    assert done.end == "complete" and [turn.action for turn in done.turns] == [
        "search",
        "crop",
        "complete",
    ]
    searched, cut, _ = done.turns
    assert searched.query == "births 1990" and searched.rank == 1 and searched.golden is False
    assert [hit.page_id for hit in searched.hits] == ["deck_1", "deck_2", "deck_3"]
    assert searched.observation == "Page deck_1, rank 1 of 3, 840 wide and 448 high.\n6 turns left."
    assert cut.box == (50, 150, 400, 300) and cut.convention == "pixel" and cut.golden is None
    assert cut.observation.startswith("A part of page deck_1, ")
    assert cut.views[0].kind == "crop" and done.shown_pages == ["deck_1"]
    for turn in done.turns[:2]:
        png = images[turn.views[0].image]
        assert image_hash(png) == turn.views[0].image
        assert read_image(png).size == (turn.views[0].width, turn.views[0].height)
    assert (done.run, done.step, done.group, done.policy) == ("r", 3, "q1", "script")
    assert done.index_revision == "r1"


def test_a_box_is_of_the_picture_last_shown_a_crop_or_a_newer_page() -> None:
    """Check a crop of a crop, which the original cut from the wrong position."""
    turns = [search("births"), crop(400, 200, 800, 400), crop(0, 0, 300, 200), search("rainfall")]
    done = only(played(scripted(*turns, crop(0, 0, 300, 200)), sight={"crop_padding": 0}))
    views = [view for turn in done.turns for view in turn.views]
    _, first, second, _, last = (view.region for view in views)
    assert first == (609, 321, 1220, 643)  # of 1280 x 720, displayed as 840 x 448
    assert second[:2] == first[:2] and second[2] < first[2] and second[3] < first[3]
    assert [view.page_id for view in views] == ["deck_1"] * 3 + ["deck_4"] * 2
    assert last == (0, 0, 458, 322)


def test_each_search_shows_the_first_page_not_shown_yet() -> None:
    done = only(played(scripted(*[search("births")] * 4), max_turns=9))
    assert done.shown_pages == ["deck_1", "deck_2", "deck_3"]
    assert [turn.rank for turn in done.turns[:4]] == [1, 2, 3, None]
    assert [turn.golden for turn in done.turns[:4]] == [False, True, False, None]
    assert "all shown before" in done.turns[3].observation and not done.turns[3].views


def test_several_pages_a_search_are_shown_in_their_order() -> None:
    done = only(played(scripted(search("births"), crop(0, 0, 100, 100)), pages_per_search=2))
    assert [view.page_id for view in done.turns[0].views] == ["deck_1", "deck_2"]
    assert done.turns[0].golden is True and done.turns[0].rank == 1
    assert done.turns[1].views[0].page_id == "deck_2"  # the image displayed last


def test_nothing_found_is_an_observation() -> None:
    """Check an empty result, where the original failed and lost the batch."""
    done = only(played(scripted(search("zebra"))))
    assert done.end == "complete" and done.turns[0].hits == [] and not done.turns[0].views
    assert done.turns[0].observation.startswith("No page was found")


def test_a_slow_search_delays_no_other_episode() -> None:
    """Let one search last until all other episodes have ended, with all of their turns."""
    others_ended, ended_ids = threading.Event(), list[str]()

    class SlowOnce(PagesHere):
        def search(self, queries: Any, top_k: int = 10) -> Any:
            if queries == ["month"]:
                assert others_ended.wait(60), "the other episodes waited"
            return super().search(queries, top_k)

    def note(trajectory: Trajectory) -> None:
        ended_ids.append(trajectory.trajectory_id)
        if len(ended_ids) == 8:
            others_ended.set()

    policy = by_question({"slow": [search("month")], "quick": [search("births")] * 3})
    done = played(
        policy, [ask("slow"), ask("quick", n_agent=8)], pages=SlowOnce(), samples=1, on_done=note
    )
    assert ended_ids[-1] == "slow/0" and sorted(ended_ids[:8]) == [f"quick/{n}" for n in range(8)]
    assert [len(trajectory.turns) for trajectory in done] == [2] + [4] * 8


def test_a_slow_turn_of_the_policy_delays_no_other_episode() -> None:
    class SlowOnce(ScriptPolicy):
        async def turn(self, request: TurnRequest) -> TurnOutput:
            if request.trajectory_id == "slow/0":
                await asyncio.wait_for(others_ended.wait(), 60)
            return await super().turn(request)

    others_ended, ended_ids = asyncio.Event(), list[str]()

    def note(trajectory: Trajectory) -> None:
        ended_ids.append(trajectory.trajectory_id)
        if len(ended_ids) == 3:
            others_ended.set()

    policy = SlowOnce(lambda request: search("births") if request.turn < 4 else COMPLETE)
    played(policy, [ask("slow"), ask("quick", n_agent=3)], samples=1, on_done=note)
    assert ended_ids[-1] == "slow/0"


def test_an_error_of_one_episode_cancels_the_others() -> None:
    class Cancelled(ScriptPolicy):
        async def turn(self, request: TurnRequest) -> TurnOutput:
            if request.trajectory_id == "waits/0":
                await asyncio.Event().wait()
            raise UserError("no key")

    with pytest.raises(UserError, match="no key"):
        played(Cancelled(lambda request: COMPLETE), [ask("waits"), ask("fails")])


def test_episodes_run_within_a_running_loop_too() -> None:
    """Check a notebook, whose cells run in an event loop."""

    async def cell() -> list[Trajectory]:
        return played(scripted(search("births")))

    assert only(asyncio.run(cell())).end == "complete"


def test_an_interrupt_within_a_running_loop_cancels_the_episodes() -> None:
    """Check a notebook's stop button, which sends SIGINT to the kernel."""
    cancelled: list[str] = []

    class Interrupted(ScriptPolicy):
        async def turn(self, request: TurnRequest) -> TurnOutput:
            os.kill(os.getpid(), signal.SIGINT)
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(request.trajectory_id)
                raise
            raise AssertionError

    async def cell() -> None:
        played(Interrupted(lambda request: COMPLETE))

    loop = asyncio.new_event_loop()
    try:
        with pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(cell())
    finally:
        loop.close()
    assert len(cancelled) == 1


def test_a_page_is_rendered_once_for_all_that_wait_for_it() -> None:
    fetched: list[str] = []

    class Counting(PagesHere):
        def image(self, page_id: str) -> bytes:
            fetched.append(page_id)
            return super().image(page_id)

    played(scripted(search("births 1990")), [ask(n_agent=16)], pages=Counting(), samples=1)
    assert fetched == ["deck_1"]


def test_a_page_that_fails_fails_once_for_all_that_wait_for_it() -> None:
    """Check that they do not wait for the same hanging request one after another."""
    fetched: list[str] = []

    class Hanging(PagesHere):
        def image(self, page_id: str) -> bytes:
            fetched.append(page_id)
            wait_until(lambda: len(self.requests) == 8)
            raise RequestError("unavailable", "no answer by the deadline")

    done = played(scripted(search("births 1990")), [ask(n_agent=8)], pages=Hanging(), samples=1)
    assert [trajectory.end for trajectory in done] == ["failed"] * 8
    assert len(fetched) < 8


def test_an_invalid_turn_is_told_what_was_wrong_and_costs_a_turn() -> None:
    turns = ["garbage", "<think>a</think><search>births", crop(0, 0, 9, 9), search("births")]
    turns += [crop(0, 0, 900, 100), "<think>b</think><bbox>[1, 2]</bbox>"]
    done = only(played(scripted(*turns)))
    assert [turn.action for turn in done.turns] == [
        "invalid",
        "invalid",
        "invalid",
        "search",
        "invalid",
        "invalid",
        "complete",
    ]
    assert [turn.reason for turn in done.turns if turn.action == "invalid"] == [
        "no_think",
        "unclosed_tag",
        "no_picture",
        "box_outside",
        "box_form",
    ]
    for turn in done.turns[:3]:
        assert turn.detail in turn.observation and "<search_complete>true" in turn.observation
    assert "search first" in done.turns[2].observation
    for turn in done.turns[4:6]:
        assert "0 <= x1 < x2 <= 840 and 0 <= y1 < y2 <= 448" in turn.observation
    assert done.turns[4].box == (0, 0, 900, 100)
    assert done.turns[0].observation.endswith("6 turns left.")
    assert done.end == "complete"


@pytest.mark.parametrize("max_turns", [1, 3])
def test_the_policy_has_exactly_its_turns_and_the_last_ones_page_counts(max_turns) -> None:
    """Check the last turn, for which the original did not call the policy."""
    requested_turns: list[int] = []

    def script(request: TurnRequest) -> str:
        requested_turns.append(request.turn)
        return search("births")

    done = only(played(ScriptPolicy(script), max_turns=max_turns))
    assert requested_turns == list(range(1, max_turns + 1)) and done.end == "forced" and done.forced
    assert done.end_detail == "max_turns" and len(done.shown_pages) == max_turns
    assert [turn.forced for turn in done.turns] == [False] * max_turns + [True]
    assert done.turns[-2].observation.endswith("0 turns left.")
    completed = only(played(scripted(*[search("births")] * (max_turns - 1)), max_turns=max_turns))
    assert completed.end == "complete" and not any(turn.forced for turn in completed.turns)


def test_a_row_has_turns_and_a_temperature_of_its_own() -> None:
    temperatures: list[float | None] = []

    def script(request: TurnRequest) -> str:
        temperatures.append(request.temperature)
        return search("births")

    rows = [ask("a", max_turns=2, temperature=0.5), ask("b")]
    done = played(ScriptPolicy(script), rows, max_turns=1)
    assert [len(trajectory.turns) for trajectory in done] == [3, 2]
    assert sorted(temperatures, key=str) == [0.5, 0.5, None]


def test_another_body_than_true_declines() -> None:
    done = only(played(scripted("<think>no</think><search_complete>false</search_complete>")))
    assert done.end == "declined" and not done.turns[0].forced


def test_samples_of_a_question_are_a_group_and_a_question_that_comes_twice_is_two() -> None:
    done = played(scripted(), [ask("a"), ask("b"), ask("a")], samples=2)
    assert [trajectory.group for trajectory in done] == ["a", "a", "b", "b", "a#2", "a#2"]
    assert [trajectory.sample for trajectory in done] == [0, 1] * 3


def test_a_question_may_have_a_group_of_its_own_size() -> None:
    """Check group sizes, which do not apply where one episode per question is requested."""
    questions = [ask("a", n_agent=3), ask("b"), ask("c", n_agent=1)]
    for samples, sizes in ((2, [3, 2, 1]), (None, [1, 1, 1])):
        done = played(scripted(), questions, samples=samples)
        expected = [
            (entry.id, n) for entry, size in zip(questions, sizes, strict=True) for n in range(size)
        ]
        assert [(entry.group, entry.sample) for entry in done] == expected


class Failing(PagesHere):
    """Fails for one query and one page."""

    def search(self, queries: Any, top_k: int = 10) -> Any:
        results = super().search(queries, top_k)
        error_by_query = {
            "bad": SampleError("upstream", "vectors are away"),
            "wrong": SampleError("invalid_input", "refused"),
        }
        return [
            error_by_query.get(query, hits) for query, hits in zip(queries, results, strict=True)
        ]

    def image(self, page_id: str) -> bytes:
        if page_id == "deck_4":
            raise RequestError("internal", "damaged")
        return b"half a picture" if page_id == "deck_3" else super().image(page_id)


def test_what_fails_for_one_episode_ends_it_as_failed_and_no_other() -> None:
    policy = by_question(
        {
            "a": [search("bad")],
            "b": [search("rainfall")],
            "c": [search("month")],
            "d": [search("births"), search("wrong")],
        }
    )
    done = played(policy, [ask(name) for name in "abcd"], pages=Failing())
    assert [trajectory.end for trajectory in done] == ["failed", "failed", "failed", "complete"]
    assert [trajectory.end_detail for trajectory in done[:2]] == [
        "retriever: upstream",
        "retriever: internal",
    ]
    assert "image cannot be read" in done[2].end_detail
    assert done[3].turns[1].reason == "query_refused" and done[3].turns[1].query == "wrong"


def test_a_retriever_that_is_away_for_all_is_a_typed_error() -> None:
    class Away(PagesHere):
        def search(self, queries: Any, top_k: int = 10) -> Any:
            raise ServiceUnreachable("http://here", "refused")

    finished_ids: list[str] = []
    policy = by_question({"a": [], "b": [search("births")]})
    with pytest.raises(ServiceUnreachable):
        played(
            policy,
            [ask("a"), ask("b")],
            pages=Away(),
            on_done=lambda trajectory: finished_ids.append(trajectory.trajectory_id),
        )
    assert finished_ids == ["a/0"]


def test_the_lines_parts_can_be_turned_off() -> None:
    turn = only(played(scripted(search("births")), observation_line=[])).turns[0]
    assert turn.observation == "" and turn.views
    turn = only(played(scripted(search("births")), observation_line=["rank"])).turns[0]
    assert turn.observation == "Rank 1 of 3."


def test_text_shows_what_is_large_enough_and_a_crop_more_of_it() -> None:
    images: dict[str, bytes] = {}
    seen: list[str] = []

    def script(request: TurnRequest) -> str:
        assert not any(message.images for message in request.messages)
        seen.append(request.messages[-1].text)
        if request.turn == 1:
            return search("births korea 1991")
        if request.turn == 2:
            small = next(line for line in seen[-1].split("\n") if "too small" in line)
            return f"<think>small</think><bbox>{small.partition(']')[0]}]</bbox>"
        return COMPLETE

    done = only(played(ScriptPolicy(script), observation="text", pictures=images))
    assert "Births in Korea" in seen[1] and "649,738" not in seen[1]
    assert "1990: 649,738" in seen[2] and done.end == "complete"
    assert len(images) == 2  # the generator receives images nevertheless


def test_a_turn_says_the_convention_of_its_box_and_no_gold_where_none_is_known() -> None:
    turns = [search("births"), crop(100, 100, 500, 500)]
    done = only(played(scripted(*turns), [ask(gold=())], sight={"box_convention": "thousand"}))
    assert done.turns[0].views and done.turns[0].golden is None
    assert (done.turns[1].convention, done.turns[1].views[0].kind) == ("thousand", "crop")
