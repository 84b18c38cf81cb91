"""Play scripted turns by our own trainer, and by the environment; start the services of both."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml

from demo.search.run import HERE
from scorekit.server.app import create_app
from scorekit.server.settings import ServiceSettings
from services.retriever.model import RetrieverBackend
from testing.flaky_server import FlakyServer
from testing.judge import judge_app
from testing.openai_server import FakeOpenAI
from testing.servers import PATIENCE_S, running_app, wait_ready
from tests.kits.trainer.search_environment.script import (
    episode_record,
    observed_message,
    read_inputs,
)
from tests.kits.trainer.searching.demo_index import DECKS
from trainer.search.config import SearchConfig
from trainer.search.environment.environment import SearchEnvironment
from trainer.search.environment.observation import EpisodeResult
from trainer.search.environment.services import EnvironmentServices
from trainer.search.records import Question
from trainer.search.rollout.episode import TurnRequest, run_episodes
from trainer.search.rollout.policies import ScriptPolicy
from trainer.search.services import open_services
from trainer.search.trajectories.store import FOLDER, TrajectoryStore

QUESTIONS = 50


class DemoServices:
    """The running services of the demo, each of which can be made to fail, and a config file."""

    def __init__(self, config: Path, servers: dict[str, FlakyServer]) -> None:
        self.config, self.servers = config, servers
        self.cfg, self.questions = read_inputs(config)

    def recover(self) -> None:
        """Stop all failures."""
        for server in self.servers.values():
            server.recover()


@contextmanager
def demo_services(folder: Path, index: Path) -> Iterator[DemoServices]:
    """Serve three documents of the demo, a generator and a judge, for 50 of its questions.

    index: see `make_demo_index`. The generator answers half of all requests right, by a hash of
    every byte that it gets.
    """
    rows = _demo_rows()
    folder.mkdir(exist_ok=True)
    with ExitStack() as stack:
        settings = ServiceSettings(cache="memory", stall_after=PATIENCE_S)
        retriever = create_app(RetrieverBackend(index), settings, None)
        servers = {
            "retriever": FlakyServer(retriever),
            "generator": FlakyServer(FakeOpenAI("generator", respond=_answer_from(rows)).app),
            "judge": FlakyServer(judge_app()),
        }
        urls = {name: stack.enter_context(running_app(app)) for name, app in servers.items()}
        wait_ready(urls["retriever"])
        wait_ready(urls["judge"])
        config = folder / "config.yaml"
        config.write_text(yaml.safe_dump(_config(folder, urls, rows)), encoding="utf-8")
        yield DemoServices(config, servers)


def played_by_trainer(
    cfg: SearchConfig, folder: Path, turns: Sequence[tuple[Question, Sequence[str]]]
) -> list[dict[str, Any]]:
    """Return the records of the episodes of our own trainer: of a question and its turns each."""
    store = TrajectoryStore(folder / FOLDER, "reference")
    messages: dict[str, list[Any]] = {f"e{n}": [] for n in range(len(turns))}

    def turn_of(request: TurnRequest) -> str:
        seen = [observed_message(m) for m in request.messages if m.role != "assistant"]
        messages[request.trajectory_id] = seen
        return turns[int(request.trajectory_id[1:])][1][request.turn - 1]

    numbers = iter(range(len(turns)))
    with open_services(cfg, run="reference", load_image=store.read_image) as opened:
        played = run_episodes(
            [question for question, _ in turns],
            ScriptPolicy(turn_of),
            opened.retriever,
            cfg.episode,
            new_id=lambda question, sample: f"e{next(numbers)}",
            on_done=opened.stream.submit,
            save_image=store.save_image,
            original_pixels=cfg.original_pixels,
            run="reference",
        )
        groups = {episode.trajectory_id: episode.group for episode in played}
        final = opened.stream.collect(0, groups, cfg.rollout.deadline_s)
    return [episode_record(messages[id], EpisodeResult.from_trajectory(final[id])) for id in groups]


async def play(
    environment: SearchEnvironment, question: Question, turns: Sequence[str]
) -> dict[str, Any]:
    """Return the record of an episode of these turns."""
    observation = await environment.reset(question)
    messages = [observed_message(message) for message in observation.messages]
    for turn in turns:
        observation = await environment.step(turn)
        messages += [observed_message(message) for message in observation.messages]
        if observation.done:
            break
    assert observation.result is not None, "the turns end no episode"
    return episode_record(messages, observation.result)


def played_by_environment(
    opened: EnvironmentServices, turns: Sequence[tuple[Question, Sequence[str]]]
) -> list[dict[str, Any]]:
    """Return the records of these episodes, which are played at the same time."""

    async def play_all() -> list[dict[str, Any]]:
        return await asyncio.gather(
            *(play(SearchEnvironment(opened), question, texts) for question, texts in turns)
        )

    return asyncio.run(play_all())


def _demo_rows() -> list[dict[str, Any]]:
    rows = [
        json.loads(line) | {"alternatives": {}}
        for name in ("heldout.jsonl", "questions.jsonl")
        for line in (HERE / name).read_text(encoding="utf-8").splitlines()
    ]
    return [row for row in rows if row["file_name"].removesuffix(".pdf") in DECKS][:QUESTIONS]


def _answer_from(rows: Sequence[dict[str, Any]]) -> Callable[[dict[str, Any], int | None], str]:
    def answer(body: dict[str, Any], seed: int | None) -> str:
        sent = json.dumps(body["messages"], ensure_ascii=False, sort_keys=True)
        right = hashlib.sha256(sent.encode()).digest()[0] % 2
        references = [row["reference_answer"] for row in rows if row["question"] in sent]
        return references[0] if right and references else "something else"

    return answer


def _config(folder: Path, urls: dict[str, str], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    questions = folder / "questions.jsonl"
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    questions.write_text("".join(lines), encoding="utf-8")
    return {
        "task": "search",
        "data": {"train": str(questions)},
        "retriever": {"url": urls["retriever"], "timeout_s": 20.0, "deadline_s": 30.0},
        "episode": {"max_turns": 6, "sight": {"min_pixels": 30_000, "max_pixels": 90_000}},
        "answering": {
            "generator": {
                "base_url": f"{urls['generator']}/v1",
                "model": "generator",
                "max_output_tokens": 64,
                "max_attempts": 1,
                "request_timeout_s": 20.0,
                "deadline_s": 30.0,
            },
            "judge": {"url": urls["judge"], "timeout_s": 20.0, "deadline_s": 30.0},
        },
        "reward": {"preset": "unified", "gate": False},
        "misc": {"run_dir": str(folder / "run")},
    }
