"""Turns that a script writes, the same through each binding. It needs neither torch nor numpy."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scorekit.config import load_config
from trainer.search.config import SearchConfig
from trainer.search.data import load_questions
from trainer.search.records import Question

COMPLETE = "<think>enough</think>\n<search_complete>true</search_complete>"
_PARTS = (
    "<think>",
    "</think>",
    "<search>",
    "</search>",
    "<bbox>",
    "</bbox>",
    "<search_complete>",
    "</search_complete>",
    "<answer>42</answer>",
    "true",
    "[10, 10, 200, 150]",
    "[0.1, 0.1, 0.2, 1e999]",
    "population",
    "기대 수명",
    "人口",
    "\x00",
    "<|im_end|>",
    "\u202e",
    "👩‍👩‍👧",
    "\n",
    " " * 50,
)


def read_inputs(config: Path) -> tuple[SearchConfig, list[Question]]:
    """Return a config and the questions of its `data.train`."""
    cfg = load_config(SearchConfig, config)
    return cfg, load_questions(str(cfg.data.train), cfg.data)


def scripted_turns(question: Question) -> list[str]:
    """Return the turns of an episode: a search, a crop and the end, some with mistakes between."""
    number = sum(question.question.encode())
    turns = [
        f"<think>look</think>\n<search>{question.question}</search>",
        "<think>closer</think>\n<bbox>[20, 20, 300, 200]</bbox>",
    ]
    if number % 3 == 0:
        turns.insert(0, "a turn without any tag")
    if number % 3 == 1:
        turns.append(f"<think>more</think>\n<search>{question.file_name} total</search>")
    if number % 5 == 0:  # the environment ends it
        return [*turns, *["<think>on</think>\n<search>page</search>"] * 9]
    if number % 7 == 0:
        return [*turns, COMPLETE.replace("true", "false")]
    return [*turns, COMPLETE]


def fuzzed_turns(seed: int, num_turns: int) -> list[str]:
    """Return turns of random parts: some are valid, most are not."""
    rng = random.Random(seed)
    return [_fuzzed(rng) for _ in range(num_turns)]


def _fuzzed(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.25:
        query = " ".join(
            rng.choices(("life", "income", "인구", "total", "1977"), k=rng.randint(1, 4))
        )
        return f"<think>x</think><search>{query}</search>"
    if kind < 0.5:
        box = [rng.randint(-20, 900) for _ in range(4)]
        if rng.random() < 0.5:
            box = [
                min(box[0], box[2]),
                min(box[1], box[3]),
                max(box[0], box[2]),
                max(box[1], box[3]),
            ]
        return f"<think>x</think>\n<bbox>{box}</bbox>"
    return "".join(rng.choices(_PARTS, k=rng.randint(0, 9)))


def observed_message(message: Any) -> list[Any]:
    """Return what the policy sees of a message: role, text, and the hashes of its images."""
    return [message.role, message.text, [image.view.image for image in message.images]]


def episode_record(messages: Sequence[Any], result: Any) -> dict[str, Any]:
    """Return what an episode showed and gave, as JSON values.

    messages: from `observed_message`, in order.
    result: an `EpisodeResult`.
    """
    return {
        "messages": list(messages),
        "end": result.trajectory.end,
        "pages": result.trajectory.shown_pages,
        "status": result.status,
        "reward": result.reward,
        "components": result.components,
        "error": result.error,
    }
