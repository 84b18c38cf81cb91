"""Plays episodes of a script."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tests.kits.trainer.searching.pages import PagesHere
from trainer.search.config import EpisodeConfig
from trainer.search.records import Question, Trajectory
from trainer.search.rollout.episode import Policy, TurnRequest, run_episodes
from trainer.search.rollout.policies import ScriptPolicy

COMPLETE = "<think>enough</think>\n<search_complete>true</search_complete>"


def search(query: str) -> str:
    """Return a turn that searches."""
    return f"<think>look</think>\n<search>{query}</search>"


def crop(*box: float) -> str:
    """Return a turn that crops."""
    return f"<think>closer</think>\n<bbox>{list(box)}</bbox>"


def ask(id: str = "q1", text: str = "How many births?", **fields: Any) -> Question:
    """Return a question whose gold page is the second of the deck."""
    return Question.model_validate(
        {"id": id, "question": text, "reference_answer": "8,100,000", "gold": ("deck_2",)} | fields
    )


def scripted(*turns: str) -> ScriptPolicy:
    """Return a policy that plays the same turns in each episode, in order; then the end."""
    return ScriptPolicy(
        lambda request: turns[request.turn - 1] if request.turn <= len(turns) else COMPLETE
    )


def by_question(turns: Mapping[str, Sequence[str]]) -> ScriptPolicy:
    """Return a policy that plays turns by the id of the question."""

    def script(request: TurnRequest) -> str:
        script_turns = turns[request.trajectory_id.partition("/")[0]]
        return script_turns[request.turn - 1] if request.turn <= len(script_turns) else COMPLETE

    return ScriptPolicy(script)


def played(
    policy: Policy,
    questions: Iterable[Question] = (),
    *,
    pages: Any = None,
    pictures: dict[str, bytes] | None = None,
    on_done: Callable[[Trajectory], None] = lambda trajectory: None,
    samples: int | None = None,
    original_pixels: int | None = None,
    **cfg: Any,
) -> list[Trajectory]:
    """Play episodes of these questions, or of one."""
    stored = {} if pictures is None else pictures

    def done(trajectory: Trajectory) -> None:
        named = [view.image for turn in trajectory.turns for view in turn.views]
        assert set(named) <= set(stored), "a picture is kept before it is referred to"
        on_done(trajectory)

    return run_episodes(
        list(questions) or [ask()],
        policy,
        PagesHere() if pages is None else pages,
        EpisodeConfig.model_validate(cfg),
        new_id=lambda question, sample: f"{question.id}/{sample}",
        on_done=done,
        save_image=stored.__setitem__,
        samples=samples,
        original_pixels=original_pixels,
        run="r",
        step=3,
    )
