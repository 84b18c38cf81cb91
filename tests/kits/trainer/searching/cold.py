"""Small models of random weights that learn to search, runs of right episodes, and a server that
rewrites their thoughts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from testing.openai_server import FakeOpenAI
from tests.kits.trainer.images import PROCESSOR, tiny
from tests.kits.trainer.runs import tiny_llama
from tests.kits.trainer.searching.curated import searched, write_run
from tests.kits.trainer.searching.finished import page
from tests.kits.trainer.searching.policies import TINY_SIGHT, template, tiny_tokenizer
from trainer.rl.model_files import save_tokenizer
from trainer.search.records import Question, Trajectory, Turn
from trainer.search.rollout.actions import Complete, Crop, Invalid, Search, parse

SEEING: dict[str, Any] = {"sight": TINY_SIGHT}
READING: dict[str, Any] = {"observation": "text"}
Says = Callable[[str], str]


def save_model(folder: Path, episode: dict[str, Any], **changes: Any) -> Path:
    """Save a random model whose tokens are letters; it sees images or reads text."""
    tokenizer = deepcopy(tiny_tokenizer())
    model_options = {"max_position_embeddings": 4096} | changes
    if episode is SEEING:
        model: Any = tiny("qwen2_5_vl").float()
        model.config.text_config.max_position_embeddings = model_options["max_position_embeddings"]
        PROCESSOR.save_pretrained(folder)
    else:
        model = tiny_llama(tokenizer, **model_options)
        tokenizer.chat_template = template("qwen2_5")
    model.save_pretrained(folder)
    save_tokenizer(tokenizer, folder)
    return folder


def text_episode(question: Question, *texts: str, sample: int = 0, **more: Any) -> Trajectory:
    """Return an episode of these turns, each with a text observation.

    It is judged right unless `more` (see `curated.searched`) says otherwise.
    """
    turns = [_turn(number, text) for number, text in enumerate(texts, 1)]
    fields: dict[str, Any] = {"judge": 1.0, "ndcg": 0.5, "turns": turns}
    return searched(question, sample, **(fields | more))


def _turn(number: int, text: str) -> Turn:
    action = parse(text)
    fields: dict[str, Any] = {"number": number, "text": text}
    match action:
        case Search():
            fields |= {"action": "search", "query": action.query, "observation": "births: 5"}
            fields |= {"views": [page("deck_1")]}
        case Crop():
            fields |= {"action": "crop", "box": action.box, "convention": "pixel"}
        case Complete():
            fields |= {"action": "complete"}
        case Invalid():
            fields |= {"action": "invalid", "reason": action.reason, "observation": "no"}
    return Turn.model_validate(fields)


def text_run(folder: Path, episodes: list[Trajectory], *questions: Question, **config: Any) -> Path:
    """Write a run of a text policy.

    questions: all of the run's;
    config: more sections.
    """
    write_run(folder, episodes, questions)
    path = folder / "config.yaml"
    config_values = yaml.safe_load(path.read_text(encoding="utf-8")) | {"episode": READING} | config
    path.write_text(json.dumps(config_values), encoding="utf-8")
    return folder


def rephrase(thought: str) -> str:
    """Return a thought in other words."""
    return f"well, {thought} again"


@contextmanager
def rewriter(says: Says = rephrase) -> Iterator[tuple[FakeOpenAI, list[str]]]:
    """Yield a server that answers each thought with `says`, and the settings that name it."""

    def respond(body: dict[str, Any], seed: int | None) -> str:
        sent = json.loads(body["messages"][-1]["content"])
        turns = [{"turn": t["turn"], "thought": says(t["thought"])} for t in sent["turns"]]
        return json.dumps({"turns": turns})

    fake = FakeOpenAI("rewriter", respond=respond)
    with fake.running() as url:
        settings = {"base_url": url, "model": "rewriter", "max_attempts": 1, "max_requests": 2}
        yield fake, [f"rewrite.rewriter.{key}={value}" for key, value in settings.items()]
