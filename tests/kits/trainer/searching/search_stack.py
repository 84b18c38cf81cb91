"""Runs a few updates with three services that tests can make fail."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from scorekit.config import load_config
from testing.flaky_server import FlakyServer
from testing.judge import judge_app
from testing.openai_server import FakeOpenAI
from tests.kits.retrieval.stand_in import StandInRetriever
from tests.kits.trainer.searching import learning
from trainer.runs.artifacts import Artifacts
from trainer.search.config import SearchConfig
from trainer.search.data import load_held_out, load_train
from trainer.search.records import Trajectory
from trainer.search.training.train import run_search
from trainer.search.trajectories.store import TrajectoryStore

UPDATES = 2
PATIENT = "answering.generator.deadline_s=120"
#: The endings of the request paths of each service.
ROUTES = {"generator": "completions", "judge": "score", "retriever": "search"}
#: An answer of one token costs 1.
PRICED = (
    "answering.generator.max_output_tokens=1",
    "answering.money.generator.prompt=0",
    "answering.money.generator.completion=1000000",
)


@dataclass
class SearchStack:
    """Holds three services that can be made to fail, and a run without failures."""

    config: Path
    stand_in: StandInRetriever
    fake: FakeOpenAI
    retriever: FlakyServer
    generator: FlakyServer
    judge: FlakyServer
    undisturbed: Path

    def recover(self) -> None:
        """Stop all failures, and clear the recorded requests."""
        for server in (self.retriever, self.generator, self.judge):
            server.recover()
            server.request_counts.clear()
            server.latency_s = lambda path: 0.0
        self.stand_in.revision = "r1"
        self.fake.respond = learning.answer
        self.fake.well()
        self.fake.forget()


@contextmanager
def running_search_stack(folder: Path, updates: int = UPDATES) -> Iterator[SearchStack]:
    """Start the services, and play a run without failures."""
    stand_in, fake = learning.standing_in(), learning.counting()
    retriever, generator, judge = (
        FlakyServer(stand_in.app),
        FlakyServer(fake.app),
        FlakyServer(judge_app()),
    )
    with learning.running_services(retriever, generator, judge) as services:
        config_values = learning.config_of(
            folder,
            services,
            rl={"num_updates": updates, "warmup_updates": 1},
            eval={"eval_every_n_updates": 0},
            misc={"save_every_n_updates": 0, "keep_checkpoints": updates},
        )
        config_values["answering"]["generator"] |= {"max_attempts": 1}
        # Long enough for a healthy service on a busy machine; a sick one costs it once an attempt.
        config_values["answering"]["judge"] |= {"deadline_s": 5.0}
        config_values["retriever"] |= {"deadline_s": 5.0}
        config = learning.write_config(folder / "config.yaml", config_values)
        stack = SearchStack(config, stand_in, fake, retriever, generator, judge, folder / "whole")
        assert train(stack, stack.undisturbed, "misc.save_every_n_updates=1").exit_code == 0
        yield stack
        stack.recover()


def train(stack: SearchStack, out: Path, *overrides: str, resume: bool = False) -> Artifacts:
    """Run the command in this process, without evaluations, which other tests cover."""
    settings = [f"misc.run_dir={out}", *overrides]
    cfg = load_config(SearchConfig, stack.config, settings)
    sets = load_held_out(cfg) if "data.eval" in " ".join(overrides) else {}
    return run_search(load_train(cfg), sets, cfg, resume=resume)


def lines_of(out: Path) -> list[dict[str, Any]]:
    path = out / "log.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def stored(out: Path, update: int) -> dict[str, Trajectory]:
    return {
        trajectory.trajectory_id: trajectory
        for trajectory in TrajectoryStore(out / "trajectories").read([update])
    }


def assert_same_learning(first: Path, second: Path, update: int = UPDATES) -> None:
    weights = [
        load_file(out / f"checkpoints/step-{update:06d}/model.safetensors")
        for out in (first, second)
    ]
    for name, value in weights[0].items():
        assert value.equal(weights[1][name]), name
