"""A generator and a judge of fixed latency, on real ports."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from testing.flaky_server import FlakyServer
from testing.judge import judge_app
from testing.openai_server import FakeOpenAI
from testing.servers import running_app, wait_ready

GENERATOR_S, JUDGE_S, AT_ONCE = 0.5, 0.25, 8


def deserved(trajectory_id: str) -> float:
    """Return the reward of an episode: the generator answers every third question right."""
    return float(int(trajectory_id.removeprefix("t")) % 3 == 0)


@contextmanager
def answering_servers() -> Iterator[dict[str, Any]]:
    """Start a generator and a judge of fixed latency, and yield the config that names them."""

    def answer(body: dict[str, Any], seed: int | None) -> str:
        number = re.findall(r"What is number (\d+)\?", str(body["messages"]))[-1]
        return number if deserved(f"t{number}") else "something else"

    fake = FakeOpenAI("generator", respond=answer)
    generator = FlakyServer(
        fake.app, latency_s=lambda path: GENERATOR_S * path.endswith("completions")
    )
    judge = FlakyServer(judge_app(), latency_s=lambda path: JUDGE_S * path.endswith("score"))
    with running_app(generator) as generator_url, running_app(judge) as judge_url:
        wait_ready(judge_url)
        yield {
            "generator": {
                "base_url": f"{generator_url}/v1",
                "model": "generator",
                "images": "shown",  # these episodes have no originals
                "max_requests": AT_ONCE,
            },
            "judge": {"url": judge_url, "max_in_flight": AT_ONCE},
        }
