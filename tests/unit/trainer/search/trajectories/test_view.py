"""Check the page of a run: its content, its limits and that foreign text is escaped."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scorekit.errors import UserError
from tests.kits.trainer.searching.episodes import ask, crop, played, scripted, search
from trainer.search.records import EpisodeReward, GeneratedAnswer, JudgedAnswer, Trajectory
from trainer.search.trajectories.layout import lay_out, mean_stats
from trainer.search.trajectories.store import TrajectoryStore
from trainer.search.trajectories.view import write_episodes, write_view

HOSTILE = "<script>alert(1)</script>\x1b[31m\u202e <b>&amp;"


def judged(trajectory: Trajectory, score: float | None) -> Trajectory:
    status = "failed" if score is None else "ok"
    answer = GeneratedAnswer(status="ok", text="8,100,000", evidence=trajectory.images)
    verdict = JudgedAnswer(status=status, score=score, reason="why")
    reward = EpisodeReward(status=status, value=score, parts={"format": 1.0})
    return trajectory.model_copy(update={"answer": answer, "judged": verdict, "reward": reward})


@pytest.fixture
def images() -> dict[str, bytes]:
    return {}


@pytest.fixture
def episode(images: dict[str, bytes]) -> Trajectory:
    """Return an episode with two pages, a crop of the second and a crop of that crop."""
    turns = search("Births in Europe"), crop(0, 0, 400, 200), crop(100, 100, 500, 300)
    (trajectory,) = played(scripted(*turns), pictures=images)
    assert [turn.action for turn in trajectory.turns] == ["search", "crop", "crop", "complete"]
    return trajectory


def store_run(folder: Path, *episodes: Trajectory, images: dict[str, bytes]) -> Path:
    store = TrajectoryStore(folder / "trajectories", "r")
    for name, png in images.items():
        store.save_image(name, png)
    for step in sorted({episode.step for episode in episodes}):
        store.write_step(step, [episode for episode in episodes if episode.step == step])
    return folder


def test_a_box_lies_on_the_picture_that_it_was_written_for(episode: Trajectory) -> None:
    page, first, second, _ = (turn.images for turn in lay_out(episode).turns)
    written = {(mark.kind, mark.turn) for mark in page[0].marks}
    assert written == {("written", 2), ("cut", 2), ("cut", 3)}
    assert {(mark.kind, mark.turn) for mark in first[0].marks} == {("written", 3)}
    assert second[0].marks == []
    view = page[0].view
    written_mark = next(mark for mark in page[0].marks if mark.kind == "written")
    assert written_mark.region == pytest.approx((0, 0, 400 / view.width, 200 / view.height))
    cut_mark = next(mark for mark in page[0].marks if (mark.kind, mark.turn) == ("cut", 2))
    inner = next(mark for mark in page[0].marks if (mark.kind, mark.turn) == ("cut", 3))
    assert cut_mark.region[0] < inner.region[0] and inner.region[2] <= cut_mark.region[2]


def test_kinds_of_episodes_are_told_apart(episode: Trajectory, images: dict) -> None:
    assert lay_out(judged(episode, 1.0)).kinds == ["all"]
    assert lay_out(judged(episode, 0.0)).kinds == ["all", "seen-wrong"]
    assert lay_out(judged(episode, None)).kinds == ["all", "unscored"]
    elsewhere = [ask(gold=("deck_3",)), ask("q2", gold=("deck_3",), max_turns=1)]
    free, forced = played(scripted(search("Rainfall"), "nothing"), elsewhere, pictures=images)
    assert lay_out(judged(free, 1.0)).kinds == ["all", "unshown-right", "invalid"]
    assert lay_out(judged(forced, 0.2)).kinds == ["all", "forced"]
    same = free.question.model_copy(update={"alternatives": {"deck_3": ("deck_4",)}})
    with_same = judged(free, 1.0).model_copy(update={"question": same})
    assert "unshown-right" not in lay_out(with_same).kinds
    unsupported = JudgedAnswer(status="ok", score=0.0)
    ungrounded = judged(episode, 1.0).model_copy(update={"grounded": unsupported})
    assert lay_out(ungrounded).kinds == ["all", "unshown-right"]


def test_no_mean_counts_what_was_not_judged(episode: Trajectory) -> None:
    row_by_name = {
        row.name: row for row in mean_stats([judged(episode, 1.0), judged(episode, None)])
    }
    assert (
        row_by_name["judge"].mean,
        row_by_name["judge"].num_known,
        row_by_name["judge"].total,
    ) == (
        1.0,
        1,
        2,
    )
    assert row_by_name["grounded"].mean is None


def test_the_page_is_one_file_that_fetches_and_runs_nothing(
    episode: Trajectory, images: dict, tmp_path: Path
) -> None:
    question = episode.question.model_copy(
        update={
            "question": HOSTILE,
            "reference_answer": HOSTILE,
            "other_answers": ("the other answer",),
        }
    )
    hostile = judged(episode, 1.0).model_copy(update={"question": question, "policy": HOSTILE})
    hostile.turns[0].text = hostile.turns[0].query = hostile.turns[0].observation = HOSTILE
    path = tmp_path / "view.html"
    write_episodes(path, [hostile, judged(episode, 0.0)], images.__getitem__, title=HOSTILE)
    page = path.read_text("utf-8")
    assert "<script" not in page and "\x1b" not in page and "\u202e" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page and "| the other answer<" in page
    assert not re.search(r"""(src|href)\s*=|url\((?!data:)|@import""", page)
    assert page.count("url(data:image/webp") == len(images), "each picture once"


def test_a_picture_that_is_lost_is_said_on_the_page(
    episode: Trajectory, images: dict, tmp_path: Path
) -> None:
    run = store_run(tmp_path, episode, images=images)
    image_path = next((run / "trajectories/images").rglob(f"{episode.images[0]}.png"))
    image_path.write_bytes(b"half")
    page = write_view(run).read_text("utf-8")
    assert page.count("picture not there") == 1
    assert page.count("url(data:image/webp") == len(episode.images) - 1


def test_a_long_run_shows_some_of_each_step(
    episode: Trajectory, images: dict, tmp_path: Path
) -> None:
    many = [
        episode.model_copy(update={"trajectory_id": f"{step}-{n}", "step": step, "sample": n})
        for step in (1, 2, 3)
        for n in range(4)
    ]
    run = store_run(tmp_path, *many, images=images)
    page = write_view(run, max_episodes=6).read_text("utf-8")
    displayed_ids = re.findall(r'class="score">(\d-\d) ', page)
    assert displayed_ids == ["1-0", "1-1", "2-0", "2-1", "3-0", "3-1"]
    assert "6 episodes of 12" in page and "r, steps 1 to 3" in page
    only = write_view(run, steps=[2]).read_text("utf-8")
    assert re.findall(r'class="score">(\d-\d) ', only) == ["2-0", "2-1", "2-2", "2-3"]


def test_what_is_not_there_is_a_line_for_the_user(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no trajectories"):
        write_view(tmp_path)
    TrajectoryStore(tmp_path / "trajectories", "r")
    with pytest.raises(UserError, match=r"has no step 4\. It has none"):
        write_view(tmp_path, steps=[4])
    with pytest.raises(UserError, match="no episodes"):
        write_view(tmp_path)


def test_an_original_is_on_the_page_once_as_what_the_policy_was_shown(tmp_path: Path) -> None:
    images: dict[str, bytes] = {}
    policy = scripted(search("Births in Europe"), crop(0, 0, 840, 400))
    (searched,) = played(policy, pictures=images, original_pixels=600_000)
    originals = [view.original for turn in searched.turns for view in turn.views]
    answer = GeneratedAnswer(status="ok", text="8,100,000", evidence=originals)
    answered = searched.model_copy(update={"answer": answer})
    page = write_view(store_run(tmp_path, answered, images=images)).read_text(encoding="utf-8")
    assert len(images) == 4 and page.count("background-image: url(") == 2
    assert "evidence: 2 pictures" in page and "picture not there" not in page
