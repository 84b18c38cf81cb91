"""Writes a store of trajectories of any size, as fast as the disk allows.

The long parts of an episode (turns, hits, ids) are one of a few hundred variants, which are packed
once. Only its name, its question and its reward are its own. So a store of 200,000 episodes is
written in seconds. For a reader it is as long as a real one: seven turns of ten hits, 3,600 ids, 62
kB per episode.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import shutil
from pathlib import Path

import yaml

from bench.common import ROOT
from scorekit.retrieval.wire import PageHit
from trainer.search.data import question_row
from trainer.search.records import (
    EpisodeReward,
    GeneratedAnswer,
    ImageView,
    JudgedAnswer,
    Question,
    TokenRecord,
    Trajectory,
    Turn,
    mask_digest,
)
from trainer.search.trajectories.store import FOLDER, SCHEMA_VERSION, TrajectoryStore

DECKS, PAGES, SHAPES = 40, 30, 5
SAMPLES = 8  # episodes of a question that has any
STEP = 10_000  # episodes of a step
_SEARCHES = 6
_PICTURE = 151655  # the id that stands for a part of a picture


def write_store(folder: Path, episodes: int, questions: int) -> Path:
    """Write a run of many episodes, the same each time, and return its folder."""
    store = TrajectoryStore(folder / FOLDER, folder.name)
    for deck in range(DECKS):
        for page in range(1, PAGES + 1):
            store.save_image(_sha256(f"deck-{deck}_{page}"), _png(f"deck-{deck}_{page}"))
    middles = {
        (deck, shape): gzip.compress(_middle(_episode(deck, shape)), 3, mtime=0)
        for deck in range(DECKS)
        for shape in range(SHAPES)
    }
    for step, first in enumerate(range(0, episodes, STEP), 1):
        path = store.folder / f"step-{step:06d}.jsonl.gz"
        with path.open("wb") as file:
            for number in range(first, min(first + STEP, episodes)):
                trajectory = _individual_episode(number, step, folder.name)
                deck, shape = _deck_and_shape(number)
                head, tail = _head_and_tail(trajectory)
                file.write(gzip.compress(head, 1, mtime=0))
                file.write(middles[deck, shape])
                file.write(gzip.compress(tail, 1, mtime=0))
    data = folder / "questions.jsonl"
    with data.open("w", encoding="utf-8") as rows:
        for number in range(questions):
            rows.write(json.dumps(question_row(_question(number))) + "\n")
    config = {
        "task": "search",
        "data": {"train": str(data)},
        "policy": {"path": str(_learner(folder / "learner"))},
        "episode": {"observation": "text"},  # what `distill` renders; it asks no processor
        "misc": {"run_dir": str(folder)},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    return folder


def _learner(folder: Path) -> Path:
    """Copy the demo's small searcher, with more positions: only its ids are used."""
    shutil.copytree(ROOT / "demo/models/search_policy", folder, dirs_exist_ok=True)
    config = folder / "config.json"
    config_values = json.loads(config.read_text(encoding="utf-8")) | {
        "max_position_embeddings": 8192
    }
    config.write_text(json.dumps(config_values), encoding="utf-8")
    return folder


def _question(number: int) -> Question:
    deck = number % DECKS
    return Question(
        id=f"train_{number}",
        question=f"By how much did the sales of division {number} grow from 2022 to 2023?",
        reference_answer=f"{number / 10:.1f} %",
        file_name=f"deck-{deck}.pdf",
        reference_pages=(3,),
        gold=(f"deck-{deck}_3",),
    )


def _deck_and_shape(number: int) -> tuple[int, int]:
    """Return (deck, shape) of an episode."""
    return number // SAMPLES % DECKS, (number * 7919) % 10_007 % SHAPES


def _individual_episode(number: int, step: int, run: str) -> Trajectory:
    """Return an episode with all its individual fields.

    A tenth was not judged; success grows with the number of the question.
    """
    dice = random.Random(number)
    of_question, sample = divmod(number, SAMPLES)
    question = _question(of_question)
    judged = dice.random() > 0.1
    score = float(dice.random() < (of_question * 13 % 101) / 100)
    ndcg = round(min(1.0, dice.random() * (of_question % 11) / 7), 4)
    return Trajectory(
        trajectory_id=f"{step}-{of_question}-{sample}",
        run=run,
        step=step,
        group=question.id,
        sample=sample,
        question=question,
        end="complete",
        answer=GeneratedAnswer(status="ok", text=question.reference_answer, model="generator"),
        judged=JudgedAnswer(status="ok", score=score, model="rules") if judged else None,
        ndcg=ndcg,
        reward=EpisodeReward(status="ok", value=score) if judged else None,
    )


def _head_and_tail(trajectory: Trajectory) -> tuple[bytes, bytes]:
    """Return the episode's line before the turns, and after the ids."""
    line = trajectory.model_dump_json().encode()
    head, _, _ = line.partition(b'"turns":')
    _, _, tail = line.partition(b'"answer":')
    return head, b'"answer":' + tail[:-1] + b',"schema_version":%d}\n' % SCHEMA_VERSION


def _middle(trajectory: Trajectory) -> bytes:
    """Return the JSON of an episode from its turns up to its ids."""
    line = trajectory.model_dump_json().encode()
    return line[line.index(b'"turns":') : line.index(b'"answer":')]


def _episode(deck: int, shape: int) -> Trajectory:
    """Return an episode of six searches. Its shape decides where the gold page is in the hits."""
    dice = random.Random(deck * SHAPES + shape)
    turns = [_turn(n, deck, shape, dice) for n in range(1, _SEARCHES + 1)]
    end = (
        "<think>The sales of both years are there.</think>\n<search_complete>true</search_complete>"
    )
    turns.append(Turn(number=_SEARCHES + 1, text=end, tokens=24, action="complete"))
    ids: list[int] = []
    mask: list[bool] = []
    for _ in range(_SEARCHES):
        written = [dice.randrange(150_000) for _ in range(90)]
        seen = [dice.randrange(150_000) for _ in range(60)] + [_PICTURE] * 450
        ids += written + seen
        mask += [True] * len(written) + [False] * len(seen)
    images = [view.image for turn in turns for view in turn.views]
    tokens = TokenRecord(
        prompt_ids=[dice.randrange(150_000) for _ in range(300)],
        completion_ids=ids,
        action_mask=mask,
        mask_digest=mask_digest(mask),
        images=images,
    )
    return Trajectory(
        trajectory_id="",
        run="",
        step=0,
        group="",
        question=_question(deck),
        turns=turns,
        end="complete",
        tokens=tokens,
    )


def _turn(number: int, deck: int, shape: int, dice: random.Random) -> Turn:
    """Return a turn. The gold page is at rank 2, 4, 6 or 8 from the third search on, in the last
    shape never.

    The page that is shown is the first one that was not shown before.
    """
    pages = dice.sample(range(4, PAGES + 1), 10)
    if number >= 3 and shape < SHAPES - 1:
        pages[2 * shape + 1] = 3
    names = [f"deck-{deck}_{page}" for page in pages]
    hits = [
        PageHit(
            page_id=name,
            document=f"deck-{deck}",
            page=page,
            rank=rank,
            score=dice.random(),
            width=1440,
            height=810,
            image=f"/v1/pages/{name}/image",
        )
        for rank, (name, page) in enumerate(zip(names, pages, strict=True), 1)
    ]
    view = ImageView(
        kind="page",
        page_id=names[0],
        width=756,
        height=448,
        region=(0, 0, 1440, 810),
        page_width=1440,
        page_height=810,
        image=_sha256(names[0]),
    )
    thought = "The page tells the sales of another year; the table of the division is missing. "
    return Turn(
        number=number,
        text=f"<think>{thought * 3}</think>\n<search>sales by division {number}</search>",
        tokens=90,
        action="search",
        query=f"sales by division {number}",
        hits=hits,
        views=[view],
        rank=1,
        golden=False,
        observation=f"page {names[0]}, rank 1 of 10, 756 x 448; turns left: {7 - number}",
        policy_s=1.5,
        tool_s=0.1,
    )


def _png(name: str) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + name.encode() * 100


def _sha256(name: str) -> str:
    return hashlib.sha256(_png(name)).hexdigest()
