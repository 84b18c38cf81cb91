"""Check that several processes of a run pay for each answer once, below one cap."""

from __future__ import annotations

import json
import os
import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from scorekit.paid.store import spent_in
from testing.openai_server import FakeOpenAI
from testing.redis_process import running_redis
from testing.servers import wait_until
from tests.kits import forked
from tests.kits.trainer.searching import learning
from trainer.search.answer.config import SEARCH

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
MODULE = "tests.kits.trainer.ranks.paying_ranks"
Steps = Sequence[Sequence[Sequence[str]]]


@dataclass
class Town:
    fake: FakeOpenAI
    services: dict[str, Any]
    folder: Path

    @property
    def answers(self) -> Path:
        return self.folder / "answers.sqlite"

    def start(
        self, steps: Steps, ranks: int, machines: bool = False, **answering: Any
    ) -> forked.Command:
        """Start the processes; `answering` extends sections of the config."""
        sections = {**self.services["answering"]}
        for name, values in answering.items():
            is_section = isinstance(values, dict)
            sections[name] = sections.get(name, {}) | values if is_section else values
        config = {
            "task": "search",
            "retriever": self.services["retriever"],
            "answering": sections,
            "reward": {"preset": "focused"},
            "misc": {"run_dir": str(self.folder)},
        }
        plan = self.folder / f"plan-{ranks}.json"
        content = {"config": config, "run": "run", "steps": steps, "machines": machines}
        plan.write_text(json.dumps(content))
        return forked.Command(MODULE, str(plan), environment=ENVIRONMENT, ranks=ranks)

    def run(self, steps: Steps, ranks: int, **answering: Any) -> dict[str, Any]:
        """Return what the main process has printed."""
        command = self.start(steps, ranks, **answering)
        out, errors = command.communicate()
        assert command.returncode == 0, errors
        printed: dict[str, Any] = json.loads(out)
        return printed

    def request_counts(self) -> Counter[str]:
        """Return how often the generator got a request for each question."""
        return Counter(
            request.body["messages"][1]["content"][0]["text"] for request in self.fake.requests
        )


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakeOpenAI, dict[str, Any]]]:
    fake = FakeOpenAI("generator", respond=lambda body, seed: "12 percent")
    with learning.running_services(learning.standing_in().app, fake.app) as services:
        services["answering"]["generator"]["max_attempts"] = 1
        yield fake, services


@pytest.fixture
def town(served: tuple[FakeOpenAI, dict[str, Any]], tmp_path: Path) -> Town:
    served[0].well()
    served[0].forget()
    return Town(*served, tmp_path)


def names(*numbers: int) -> list[str]:
    return [f"number {number}" for number in numbers]


def test_what_all_processes_ask_at_once_is_paid_once(town: Town) -> None:
    questions = names(*range(12))
    town.fake.hang = True
    command = town.start([[questions] * 3], 3, generator={"max_requests": 36})
    wait_until(lambda: town.fake.in_flight == 12)
    town.fake.hang = False
    out, errors = command.communicate()
    assert command.returncode == 0, errors
    assert town.request_counts() == dict.fromkeys(questions, 1)
    stats = json.loads(out)["stats"]
    assert stats["cost/generator_calls"] == 12
    assert (stats["answers/ok"], stats["answers/cached"]) == (36, 24)
    assert stats["answers/judged_ok"] == 36
    assert spent_in(town.answers, SEARCH).calls == 12
    assert not list(town.folder.glob("answers-*"))


def test_an_answer_of_another_process_is_known_in_later_steps_and_starts(town: Town) -> None:
    ring = [[names(0, 1), names(2)], [names(2), names(0, 1)], [names(1), names(0)]]
    stats = town.run(ring, 2)["stats"]
    assert town.request_counts() == dict.fromkeys(names(0, 1, 2), 1)
    assert (stats["cost/generator_calls"], stats["answers/cached"]) == (3, 5)
    assert town.run([[names(0), names(2), names(1)]], 3)["stats"]["cost/generator_calls"] == 3
    stats = town.run([[names(0, 1, 2, 3)]], 1)["stats"]
    assert (stats["cost/generator_calls"], stats["answers/cached"]) == (4, 3)
    assert town.request_counts() == dict.fromkeys(names(0, 1, 2, 3), 1)


def test_who_waits_for_a_failed_call_pays_itself(town: Town) -> None:
    town.fake.hang = True
    town.fake.fail(400, times=1)
    command = town.start([[names(0), names(0)]], 2)
    wait_until(lambda: len(town.fake.requests) == 1)
    town.fake.hang = False
    out, errors = command.communicate()
    assert command.returncode == 0, errors
    stats = json.loads(out)["stats"]
    assert town.request_counts() == {"number 0": 2}
    assert (stats["answers/ok"], stats["answers/failed"]) == (1, 1)
    assert stats["cost/generator_calls"] == 1


def test_the_cap_is_of_all_processes(town: Town) -> None:
    price = {"generator": {"prompt": 0.0, "completion": 1_000_000.0}, "cap": 20.0}
    limits = {"money": price, "generator": {"max_output_tokens": 4}}
    questions = [names(*range(first, first + 10)) for first in (0, 10, 20)]
    printed = town.run([questions], 3, **limits)
    assert all("18.0000 of 20.0 is spent" in error for error in printed["errors"])
    assert len(town.fake.requests) == 9  # two tokens each: a tenth could have used four more
    assert printed["stats"]["cost/generator_money"] == 18
    assert "is spent" in town.run([questions[:2]], 2, **limits)["errors"][0]
    assert len(town.fake.requests) == 9


def test_calls_in_flight_are_those_of_the_run(town: Town) -> None:
    town.fake.hang = True
    questions = [names(*range(first, first + 6)) for first in (0, 6, 12)]
    command = town.start([questions], 3, generator={"max_requests": 5})
    wait_until(lambda: town.fake.in_flight == 5)
    town.fake.hang = False
    _, errors = command.communicate()
    assert command.returncode == 0, errors
    assert town.fake.peak_requests == 5 and len(town.fake.requests) == 18


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (3, 2),
        (1, 2),
        pytest.param(2, 3, marks=pytest.mark.slow),
        pytest.param(3, 1, marks=pytest.mark.slow),
    ],
)
def test_a_run_that_is_killed_goes_on_with_other_processes(
    town: Town, before: int, after: int
) -> None:
    questions = names(*range(20))
    had = set(questions[:10])
    town.fake.hang = lambda body: body["messages"][1]["content"][0]["text"] not in had
    command = town.start([[questions[rank::before] for rank in range(before)]], before)
    wait_until(lambda: spent_in(town.answers, SEARCH).calls == 10)
    command.kill()
    command.communicate()
    wait_until(lambda: town.fake.in_flight == 0)
    town.fake.hang = False
    stats = town.run([[questions[rank::after] for rank in range(after)]], after)["stats"]
    counts = town.request_counts()
    assert all(counts[question] == 1 for question in had)
    assert all(counts[question] <= 2 for question in questions)
    assert stats["cost/generator_calls"] == spent_in(town.answers, SEARCH).calls == 20
    assert stats["answers/cached"] == 10


def test_all_processes_keep_to_the_judge_that_the_run_began_with(town: Town) -> None:
    town.run([[names(0), names(1)]], 2)
    with closing(sqlite3.connect(town.answers, isolation_level=None)) as db:
        assert db.execute("SELECT run FROM judges").fetchall() == [("run",)]
        db.execute("UPDATE judges SET model = 'another@1'")
    command = town.start([[names(2), names(3)]], 2)
    _, errors = command.communicate()
    assert command.returncode == 1
    assert errors.count("error: ") == 1 and "was another@1 and is now" in errors
    assert len(town.fake.requests) == 2


def test_processes_of_several_machines_share_a_redis_below_one_cap(town: Town) -> None:
    price = {"generator": {"prompt": 0.0, "completion": 1_000_000.0}, "cap": 20.0}
    limits = {"money": price, "generator": {"max_output_tokens": 4}}
    questions = names(*range(5))
    with running_redis() as redis:
        sections = limits | {"answers": redis.url}
        stats = town.run([[questions] * 3], 3, machines=True, **sections)["stats"]
        assert town.request_counts() == dict.fromkeys(questions, 1)
        assert (stats["cost/generator_calls"], stats["answers/cached"]) == (5, 10)
        more = [names(*range(first, first + 10)) for first in (10, 20)]
        printed = town.run([more], 2, machines=True, **sections)
        assert any("18.0000 of 20.0 is spent" in error for error in printed["errors"])
        assert len(town.fake.requests) == 9
        assert spent_in(redis.url, SEARCH).calls >= 9
    assert not town.answers.exists()


def test_machines_that_would_share_a_file_are_refused(town: Town) -> None:
    command = town.start([[names(0), names(1)]], 2, machines=True)
    _, errors = command.communicate()
    assert command.returncode == 1
    assert errors.count("error: ") == 1 and "run on 2 machines, which cannot share" in errors
    assert not town.fake.requests
