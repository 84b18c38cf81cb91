"""Check the export to Inspect logs with Inspect's API if it is installed."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from scorekit.errors import UserError
from tests.kits.trainer.searching.episodes import ask, crop, played, scripted, search
from trainer.search.records import EpisodeReward, GeneratedAnswer, JudgedAnswer
from trainer.search.trajectories.inspect_log import export_inspect
from trainer.search.trajectories.store import TrajectoryStore

needs_inspect = pytest.mark.skipif(find_spec("inspect_ai") is None, reason="no inspect-ai")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run with two episodes of a question, one of them without a score."""
    images: dict[str, bytes] = {}
    turns = search("Births in Europe"), "no action", crop(0, 0, 400, 200)
    good, failed = played(scripted(*turns), [ask()], pictures=images, samples=2)
    good = good.model_copy(
        update={
            "answer": GeneratedAnswer(status="ok", text="810만", evidence=good.images),
            "judged": JudgedAnswer(status="ok", score=1.0, reason="the same"),
            "reward": EpisodeReward(status="ok", value=0.9, parts={"judge": 1.0}),
        }
    )
    verdict = {"judged": JudgedAnswer(status="failed", reason="timeout")}
    store = TrajectoryStore(tmp_path / "trajectories", "r")
    for name, png in images.items():
        store.save_image(name, png)
    store.write_step(3, [good, failed.model_copy(update=verdict)])
    return tmp_path


@needs_inspect
def test_a_step_is_a_log_that_inspect_reads(run: Path) -> None:
    from inspect_ai.log import read_eval_log

    assert export_inspect(run, run / "logs") == 2
    log = read_eval_log(str(run / "logs/step-000003.eval"))
    assert (log.status, log.eval.metadata) == ("success", {"run": "r", "step": 3})
    good, failed = log.samples
    assert [(sample.id, sample.epoch) for sample in log.samples] == [("q1", 1), ("q1", 2)]
    assert good.scores["reward"].value == 0.9 and good.scores["judge"].answer == "810만"
    assert not failed.scores, "what was not judged has no score, and no 0"
    (reward,) = (score for score in log.results.scores if score.name == "reward")
    assert (reward.scored_samples, reward.unscored_samples) == (1, 1)
    roles = " ".join(message.role for message in good.messages)
    assert roles == "user assistant tool assistant user assistant tool assistant"
    searched, result = good.messages[1:3]
    assert searched.tool_calls[0].arguments == {"query": "Births in Europe"}
    assert result.tool_call_id == searched.tool_calls[0].id
    assert [part.type for part in result.content] == ["text", "image"]


@needs_inspect
def test_no_log_takes_the_place_of_another(run: Path) -> None:
    export_inspect(run, run / "logs")
    with pytest.raises(UserError, match="not empty"):
        export_inspect(run, run / "logs")


@pytest.mark.skipif(find_spec("inspect_ai") is not None, reason="inspect-ai is there")
def test_without_inspect_the_user_is_told_what_to_install(run: Path) -> None:
    with pytest.raises(UserError, match="inspect-ai: not installed"):
        export_inspect(run, run / "logs")
    assert not (run / "logs").exists()
