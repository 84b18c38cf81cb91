"""Measures an update of a searcher whose answers and verdicts are requested early or at the end."""

from __future__ import annotations

import hashlib
import itertools
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

from bench.sampling import peak_mib
from bench.search_step.sides import FOLDER, Sizes, search_config, timed_updates
from testing.flaky_server import FlakyServer
from testing.judge import judge_app
from testing.openai_server import FakeOpenAI
from testing.servers import running_app, wait_ready

#: Seconds: of an answer (it grows with what it answers, as a real one's), of a verdict; calls that
#: may be under way at each.
DELAYS = {"answer_least_s": 0.4, "answer_most_s": 1.6, "verdict_s": 0.2, "at_once": 8}


@contextmanager
def answering_servers() -> Iterator[dict[str, str]]:
    """Start a generator and a judge with these delays, and yield their URLs."""

    def answer(body: dict[str, Any], seed: int | None) -> str:
        return hashlib.sha256(str(body["messages"]).encode()).hexdigest()[:8]

    def latency(path: str) -> float:
        if not path.endswith("completions"):
            return 0.0
        return next(spread)

    def turns() -> Iterator[float]:
        min_s, max_s = DELAYS["answer_least_s"], DELAYS["answer_most_s"]
        number = 0
        while True:
            share = hashlib.sha256(str(number := number + 1).encode()).digest()[0] / 255
            yield min_s + share * (max_s - min_s)

    spread = turns()
    fake = FakeOpenAI("generator", respond=answer)
    generator = FlakyServer(fake.app, latency_s=latency)
    judge = FlakyServer(
        judge_app(), latency_s=lambda path: DELAYS["verdict_s"] * path.endswith("score")
    )
    with running_app(generator) as generator_url, running_app(judge) as judge_url:
        wait_ready(judge_url)
        yield {"generator": f"{generator_url}/v1", "judge": judge_url}


def update_with_answers(
    sizes: Sizes, retriever: str, servers: Mapping[str, str], streams: bool
) -> dict[str, Any]:
    """Run full updates with the judge's score as the reward.

    streams: whether answers are requested as each episode ends, and not after the last.
    """
    from trainer.search.data import load_train
    from trainer.search.rollout.episode_runner import EpisodeRunner
    from trainer.search.training.train import run_search

    folder = FOLDER / f"answers-{streams}"
    shutil.rmtree(folder, ignore_errors=True)  # else the answers of the last run are known
    cfg = search_config(
        sizes,
        retriever,
        folder,
        reward__preset="phase2",
        answering__generator__base_url=servers["generator"],
        answering__generator__model="generator",
        answering__generator__max_requests=DELAYS["at_once"],
        answering__judge__url=servers["judge"],
        answering__judge__max_in_flight=DELAYS["at_once"],
    )
    run_them, submit = EpisodeRunner.run, EpisodeRunner._submit

    def run_and_ask(self: Any, *args: Any, **options: Any) -> Any:
        with mock.patch.object(EpisodeRunner, "_submit", lambda self, finished: None):
            finished = run_them(self, *args, **options)
        submit(self, finished.values())
        return finished

    with timed_updates() as ends:
        if streams:
            artifacts = run_search(load_train(cfg), {}, cfg)
        else:
            with mock.patch.object(EpisodeRunner, "run", run_and_ask):
                artifacts = run_search(load_train(cfg), {}, cfg)
    lines = artifacts.updates[sizes.warm_up :]
    seconds = [later - earlier for earlier, later in itertools.pairwise(ends)]
    return {
        "updates_s": seconds[sizes.warm_up :],
        "waited_s": [line["reward_s"] for line in lines],
        "rollout_s": [line["rollout_s"] for line in lines],
        "coverage": [line["reward_coverage"] for line in lines],
        "peak_mib": peak_mib(),
    }
