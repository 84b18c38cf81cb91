"""Make rows of ids of scripted episodes on the demo's own index.

The policy is trained on its own ids in them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from demo.search.reading import CORPUS
from demo.search.run import ingest
from demo.train.search.scripts import Scripts
from scorekit.retrieval.client import Retriever
from testing.processes import running_service
from trainer.chat.config import ChatConfig
from trainer.search.config import EpisodeConfig
from trainer.search.records import Question, Trajectory
from trainer.search.rollout.episode import run_episodes
from trainer.search.rollout.episode_tokens import TurnTokenizer
from trainer.search.rollout.policies import ScriptPolicy
from trainer.search.rollout.prompt import Message, conversation

#: Ids of a row, and which of them are learned.
Row = tuple[list[int], list[bool]]
_SIDE_BY_SIDE = 256


@contextmanager
def served_corpus() -> Iterator[Retriever]:
    """Serve the demo's decks with a retriever; yield its URL."""
    with tempfile.TemporaryDirectory() as folder:
        work_dir = Path(folder)
        ingest(work_dir / "index", CORPUS)
        with running_service("retriever", work_dir, "--index", str(work_dir / "index")) as url:
            yield Retriever(url)


def scripted(
    questions: Sequence[str], retriever: Retriever, cfg: EpisodeConfig, seed: int
) -> list[Trajectory]:
    """Play a scripted episode of each question."""
    requests = [
        Question(id=f"{number}", question=question, reference_answer="-", gold=())
        for number, question in enumerate(questions)
    ]
    done: list[Trajectory] = []
    for first in range(0, len(requests), _SIDE_BY_SIDE):
        done += run_episodes(
            requests[first : first + _SIDE_BY_SIDE],
            ScriptPolicy(Scripts(seed + first)),
            retriever,
            cfg,
            new_id=lambda question, sample: question.id,
            on_done=lambda trajectory: None,
            save_image=lambda name, png: None,
        )
    return done


def messages_of(trajectory: Trajectory, cfg: EpisodeConfig) -> list[Message]:
    """Return all messages of an episode. There are no images: the policy reads only text."""
    return conversation(trajectory, cfg, lambda name: b"")


def rows_of(trajectories: Sequence[Trajectory], cfg: EpisodeConfig, tokenizer: Any) -> list[Row]:
    """Return token rows as the trainer joins them: prompt, turns with their end, observations."""
    ids = TurnTokenizer(tokenizer, ChatConfig(), None, [tokenizer.eos_token_id])
    rows = []
    for trajectory in trajectories:
        messages = messages_of(trajectory, cfg)
        row = ids.prompt(messages[:2])
        is_trained = [False] * len(row)
        for message in messages[2:]:
            if message.role == "assistant":
                more = tokenizer(message.text, add_special_tokens=False)["input_ids"]
                more.append(tokenizer.eos_token_id)
            else:
                more = ids.observation(message)[1:]
            row += more
            is_trained += [message.role == "assistant"] * len(more)
        rows.append((row, is_trained))
    return rows
