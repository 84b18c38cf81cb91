"""Runs on disk as curation reads them: stores with scripted trajectories, and their questions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.kits.trainer.searching.finished import episode, png_of
from trainer.search.data import gold_pages, question_row
from trainer.search.records import (
    EpisodeReward,
    GeneratedAnswer,
    JudgedAnswer,
    Question,
    Trajectory,
)
from trainer.search.steps.config import CurationConfig
from trainer.search.steps.engine import open_work
from trainer.search.steps.episodes import CuratedPrompt, sample_of
from trainer.search.steps.options import CurationOptions
from trainer.search.steps.step import Outcome
from trainer.search.steps.table import step as step_of
from trainer.search.trajectories.store import FOLDER, TrajectoryStore


def make_question(id: str, *pages: int, deck: str = "deck", **more: Any) -> Question:
    """Return a question whose gold pages are these of a deck, as `load_questions` would read
    it.
    """
    fields = {
        "question": f"What does {id} ask?",
        "reference_answer": f"the answer of {id}",
        "file_name": f"{deck}.pdf" if pages else "",
        "reference_pages": pages,
        "gold": gold_pages(f"{deck}.pdf", pages),
    }
    return Question.model_validate({"id": id} | fields | more)


def searched(
    question: Question,
    sample: int = 0,
    *,
    judge: float | None = None,
    ndcg: float | None = None,
    reward: float | None = None,
    answer: str | None = None,
    shown: tuple[str, ...] = (),
    step: int = 1,
    **more: Any,
) -> Trajectory:
    """Return an episode with these stats. None: it has no such stat.

    more: see `finished.episode`."""
    answer_text = answer if answer is not None else "said" if judge is not None else None
    fields: dict[str, Any] = {
        "run": "",
        "step": step,
        "group": question.id,
        "sample": sample,
        "question": question,
        "tokens": None,
        "ndcg": ndcg,
        "judged": None if judge is None else JudgedAnswer(status="ok", score=judge),
        "answer": None if answer_text is None else GeneratedAnswer(status="ok", text=answer_text),
        "reward": None if reward is None else EpisodeReward(status="ok", value=reward),
    }
    return episode(f"{step}-{question.id}-{sample}", shown, **(fields | more))


def prompt_of(**scores: Sequence[float]) -> CuratedPrompt:
    """Return a prompt with episodes that have these `judge`, `ndcg`, `reward`; in memory only."""
    prompt = CuratedPrompt(make_question("q", 1))
    for n, values in enumerate(zip(*scores.values(), strict=True)):
        played_episode = searched(prompt.question, n, **dict(zip(scores, values, strict=True)))
        prompt.samples.append(sample_of(played_episode, 0, "run"))
    return prompt


def write_run(
    folder: Path,
    trajectories: Sequence[Trajectory],
    questions: Sequence[Question] = (),
    pictures: Mapping[str, bytes] | None = None,
) -> Path:
    """Write a run's folder: its store, and a config that names its questions.

    questions: defaults to those of the episodes.
    pictures: by SHA-256, beside those of the pages that `finished` shows.
    """
    store = TrajectoryStore(folder / FOLDER, folder.name)
    for sha256, png in (pictures or {}).items():
        store.save_image(sha256, png)
    for step in sorted({trajectory.step for trajectory in trajectories}):
        of_step = [
            trajectory.model_copy(update={"run": folder.name})
            for trajectory in trajectories
            if trajectory.step == step
        ]
        for trajectory in of_step:
            for turn in trajectory.turns:
                for view in turn.views:
                    if view.image not in (pictures or {}):
                        store.save_image(view.image, png_of(view.page_id))
        store.write_step(step, of_step)
    all_questions = list(questions) or list(
        {trajectory.question.id: trajectory.question for trajectory in trajectories}.values()
    )
    path = write_rows(folder / "questions.jsonl", all_questions)
    config = {"task": "search", "data": {"train": str(path)}, "misc": {"run_dir": str(folder)}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return folder


def outcome_of(name: str, *runs: Path, cfg: CurationConfig | None = None) -> Outcome:
    """Return what a step decides about runs, without a folder; it asks nobody."""
    curation_step = step_of(name)
    options = CurationOptions(out=Path("out"), run=list(runs))
    work = open_work(curation_step, options, cfg or CurationConfig())
    with curation_step.resources(work) as work.resources:
        return curation_step.decide(work, {})


def write_rows(path: Path, questions: Sequence[Question]) -> Path:
    """Write questions as a file for `data.train`."""
    lines = [
        json.dumps(question_row(question), ensure_ascii=False) + "\n" for question in questions
    ]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def decisions_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what a command has decided: id -> line."""
    lines = (folder / "decisions.jsonl").read_text(encoding="utf-8").splitlines()
    return {row["id"]: row for row in map(json.loads, lines)}


def kept_rows(folder: Path) -> list[dict[str, Any]]:
    """Return the rows that a command has kept."""
    lines = (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def everything(folder: Path) -> dict[str, bytes]:
    """Return name -> bytes of all files in a folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
