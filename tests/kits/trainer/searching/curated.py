"""Runs on disk as curation reads them: trajectories of a script in a store, and their questions."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.kits.trainer.searching.finished import episode, png_of
from trainer.search.curation.dataset import question_row
from trainer.search.curation.disk_spool import DiskSpool
from trainer.search.curation.samples import CuratedPrompt, EpisodeSummary, sample_of
from trainer.search.data import gold_pages
from trainer.search.records import (
    EpisodeReward,
    GeneratedAnswer,
    JudgedAnswer,
    Question,
    Trajectory,
)
from trainer.search.trajectories.store import FOLDER, TrajectoryStore


def asked(id: str, *pages: int, deck: str = "deck", **more: Any) -> Question:
    """A question whose gold pages are these of a deck; as `load_questions` reads it back."""
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
    """An episode with these figures; None: that one was not had. more: see `finished.episode`."""
    said = answer if answer is not None else "said" if judge is not None else None
    fields: dict[str, Any] = {
        "run": "",
        "step": step,
        "group": question.id,
        "sample": sample,
        "question": question,
        "tokens": None,
        "ndcg": ndcg,
        "judged": None if judge is None else JudgedAnswer(status="ok", score=judge),
        "answer": None if said is None else GeneratedAnswer(status="ok", text=said),
        "reward": None if reward is None else EpisodeReward(status="ok", value=reward),
    }
    return episode(f"{step}-{question.id}-{sample}", shown, **(fields | more))


def prompt_of(**scores: Sequence[float]) -> CuratedPrompt:
    """A prompt of the episodes that have these `judge`, `ndcg`, `reward`; in memory alone."""
    question, spool = asked("q", 1), DiskSpool(EpisodeSummary)
    for n, values in enumerate(zip(*scores.values(), strict=True)):
        found = searched(question, n, **dict(zip(scores, values, strict=True)))
        spool.append(sample_of(found, 0, "run"), question.id)
    return CuratedPrompt(question, spool)


def write_run(
    folder: Path,
    trajectories: Sequence[Trajectory],
    questions: Sequence[Question] = (),
    pictures: Mapping[str, bytes] | None = None,
) -> Path:
    """A run's folder: its store, and a config that names its questions.

    questions: those that it was given; without any, those of its episodes. pictures: by SHA-256,
    beside those of the pages that `finished` shows.
    """
    store = TrajectoryStore(folder / FOLDER, folder.name)
    for sha256, png in (pictures or {}).items():
        store.save_image(sha256, png)
    for step in sorted({one.step for one in trajectories}):
        of_step = [
            one.model_copy(update={"run": folder.name}) for one in trajectories if one.step == step
        ]
        for one in of_step:
            for turn in one.turns:
                for view in turn.views:
                    if view.image not in (pictures or {}):
                        store.save_image(view.image, png_of(view.page_id))
        store.write_step(step, of_step)
    given = list(questions) or list(
        {one.question.id: one.question for one in trajectories}.values()
    )
    path = write_rows(folder / "questions.jsonl", given)
    told = {"task": "search", "data": {"train": str(path)}, "misc": {"run_dir": str(folder)}}
    (folder / "config.yaml").write_text(yaml.safe_dump(told), encoding="utf-8")
    return folder


def write_rows(path: Path, questions: Sequence[Question]) -> Path:
    """As a file that `data.train` names."""
    lines = [json.dumps(question_row(one), ensure_ascii=False) + "\n" for one in questions]
    path.write_text("".join(lines), encoding="utf-8")
    return path


def decided(folder: Path) -> dict[str, dict[str, Any]]:
    """id -> line of what a command has decided."""
    lines = (folder / "decisions.jsonl").read_text(encoding="utf-8").splitlines()
    return {row["id"]: row for row in map(json.loads, lines)}


def kept(folder: Path) -> list[dict[str, Any]]:
    """The rows that it has kept."""
    lines = (folder / "rows.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def everything(folder: Path) -> dict[str, bytes]:
    """Name -> bytes of all that lies there."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
