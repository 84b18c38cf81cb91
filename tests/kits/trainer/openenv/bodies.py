"""Observations whose bodies on OpenEnv's wire are recorded, and that recording.

python -m tests.kits.trainer.openenv.bodies

writes the recording, from the package openenv in `.venv-openenv`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from scorekit.command import run_command
from trainer.search.environment.observation import EpisodeResult, Observation
from trainer.search.images.views import ShownImage
from trainer.search.records import EpisodeReward, ImageView, Question, Status, Trajectory, Turn
from trainer.search.rollout.prompt import Message

RECORDED = Path(__file__).parents[3] / "golden/openenv_bodies.json"
_VIEW = ImageView(
    kind="page",
    page_id="life_3",
    width=10,
    height=5,
    region=(0.0, 0.0, 20.0, 10.0),
    page_width=20,
    page_height=10,
    image="0" * 64,
)
_QUESTION = Question(id="q1", question="기대 수명?", reference_answer="82", gold=("life_3",))


def observations() -> dict[str, Observation]:
    """Return an observation of each kind by name."""
    image = ShownImage(_VIEW, b"a PNG")
    return {
        "begin": Observation(
            (Message("system", "Search."), Message("user", "Question: 기대 수명?"))
        ),
        "page": Observation((Message("user", "Page life_3.", (image,)),)),
        "scored": _end_of_episode("ok", 0.75, {"format": 1.0, "ndcg": 0.5, "judge": 1.0}, None),
        "zero": _end_of_episode("ok", 0.0, {"format": 1.0, "ndcg": 0.0, "judge": 0.0}, None),
        "failed": _end_of_episode("failed", None, {"format": 1.0}, "judge: unreachable"),
        "late": _end_of_episode("late", None, {"format": 1.0}, "no answer in 600 s"),
    }


def _end_of_episode(
    status: Status, value: float | None, parts: dict[str, float], error: str | None
) -> Observation:
    trajectory = Trajectory(
        trajectory_id="e1",
        run="r",
        step=0,
        group="q1",
        question=_QUESTION,
        turns=[Turn(number=1, text="t", action="search", views=[_VIEW])],
        end="complete",
        reward=EpisodeReward(status=status, value=value, parts=parts, error=error),
    )
    return Observation(done=True, result=EpisodeResult.from_trajectory(trajectory))


def main() -> int:
    """Write the recording."""
    from tests.kits.trainer.openenv.processes import running_probe

    with running_probe() as probe:
        bodies: dict[str, Any] = probe.call("bodies")
    RECORDED.write_text(
        json.dumps(bodies, indent=1, ensure_ascii=False, sort_keys=True) + "\n", encoding="utf-8"
    )
    return 0


if __name__ == "__main__":
    run_command(main)
