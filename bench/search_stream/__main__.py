"""How much of the wait for answers and verdicts does streaming save, of what could be saved?

A generator that answers 0.5 s after it was asked and a judge that does after 0.25 s, on real ports,
8 calls at a time each. 64 episodes end within 8 s: one by one, or at the ends of seven rounds of
turns, a third of them with the last. From the first episode to the last reward: each submitted as
it ends; all submitted when the last has ended; and, reckoned from the same ends and the servers'
seconds, what no schedule could beat. All are collected in another order than they ended in: is
each reward its own episode's?

    python -m bench.search_stream [--quick]
"""

from __future__ import annotations

import hashlib
import heapq
import random
import re
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from bench.common import Figure, quiet_logs, run
from bench.kit.flaky_server import Moody
from bench.kit.judge import judge_app
from bench.kit.openai_server import FakeOpenAI
from bench.kit.servers import running_app, wait_ready
from trainer.search.answer.config import AnsweringConfig
from trainer.search.answer.pipeline import AnswerPipeline
from trainer.search.records import ImageView, Question, Trajectory, Turn
from trainer.search.reward.config import SearchRewardConfig
from trainer.search.reward.stream import RewardStream

GENERATOR_S, JUDGE_S, AT_ONCE = 0.5, 0.25, 8
PATIENCE_S = 120.0


def questions(quick: bool) -> Iterator[Figure]:
    """All figures of this script."""
    quiet_logs()
    count, seconds, repeats = (16, 1.0, 1) if quick else (64, 8.0, 3)
    with _servers() as answering:
        for name, ends in _schedules(count, seconds).items():
            perfect = _reckoned(ends)
            ways: dict[str, list[float]] = {"streamed": [], "batch": []}
            own = 0
            for repeat in range(repeats):
                for way, taken in ways.items():
                    found = _step(answering, ends, f"{name}-{way}-{repeat}", way == "streamed")
                    taken.append(found[0])
                    own += found[1]
            streamed, batch = (statistics.median(taken) for taken in ways.values())
            yield Figure(f"{name}: batch at the end", batch, "s", details=ways)
            yield Figure(f"{name}: streamed", streamed, "s")
            yield Figure(f"{name}: perfect overlap, reckoned", perfect, "s")
            saved = (batch - streamed) / (batch - perfect)
            yield Figure("  share of what perfect overlap saves", saved, "", at_least=0.9)
            share = own / (count * repeats * len(ways))
            yield Figure("  share of rewards that are their episode's", share, "", at_least=1.0)


def _schedules(count: int, seconds: float) -> dict[str, list[float]]:
    """When each episode ends, ascending: the first one by one, the last with the last round."""
    dice = random.Random(5)
    one_by_one = [seconds * (n + 1) / count for n in range(count)]
    rounds = [dice.choice(range(1, 7)) if n % 3 else 7 for n in range(count)]
    return {
        "ends one by one": one_by_one,
        "ends by rounds": sorted(seconds * number / 7 for number in rounds),
    }


def _reckoned(ends: Sequence[float]) -> float:
    """When the last verdict is there, of servers that take their seconds and lose none between."""
    done = list(ends)
    for seconds in (GENERATOR_S, JUDGE_S):
        free = [0.0] * AT_ONCE
        for place, ready in enumerate(done):
            done[place] = max(ready, heapq.heappop(free)) + seconds
            heapq.heappush(free, done[place])
    return max(done)


def _step(
    answering: Mapping[str, Any], ends: Sequence[float], name: str, stream_them: bool
) -> tuple[float, int]:
    """Seconds of a step from its first episode to its last reward, and how many rewards are their
    own episode's."""
    episodes = [_episode(n, name) for n in range(len(ends))]
    pictures = {_sha256(n): _png(n) for n in range(len(ends))}
    wanted = {
        found.trajectory_id: found.group
        for found in random.Random(1).sample(episodes, len(episodes))
    }
    with tempfile.TemporaryDirectory() as folder:  # else the answers of the last step are known
        asked = AnswerPipeline(AnsweringConfig(**answering), run=name, folder=Path(folder))
        stream = RewardStream(SearchRewardConfig(preset="focused"), asked, pictures.__getitem__)
        with closing(stream):
            stream.check()
            began = time.monotonic()
            for found, end in zip(episodes, ends, strict=True):
                time.sleep(max(0.0, began + end - time.monotonic()))
                if stream_them:
                    stream.submit(found)
            if not stream_them:
                for found in episodes:
                    stream.submit(found)
            collected = stream.collect(1, wanted, PATIENCE_S)
            taken = time.monotonic() - began
    assert stream.stats["reward_coverage"] == 1, stream.stats
    return taken, sum(
        found.reward is not None and found.reward.value == _deserved(id)
        for id, found in collected.items()
    )


def _deserved(trajectory_id: str) -> float:
    return float(int(trajectory_id.removeprefix("t")) % 3 == 0)


def _episode(number: int, run: str) -> Trajectory:
    """Which its generator answers right or wrong by its number."""
    asked = Question(
        id=f"q{number}", question=f"What is number {number}?", reference_answer=str(number)
    )
    shown = ImageView(
        kind="page",
        page_id=f"deck_{number + 1}",
        width=8,
        height=8,
        region=(0, 0, 8, 8),
        page_width=8,
        page_height=8,
        image=_sha256(number),
    )
    turn = Turn(number=1, text="", action="search", query="number", views=[shown])
    last = Turn(number=2, text="", action="complete")
    return Trajectory(
        trajectory_id=f"t{number}",
        run=run,
        step=1,
        group=f"g{number // 8}",
        sample=number % 8,
        question=asked,
        turns=[turn, last],
        end="complete",
    )


def _png(number: int) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + f"page {number} ".encode() * 2000


def _sha256(number: int) -> str:
    return hashlib.sha256(_png(number)).hexdigest()


@contextmanager
def _servers() -> Iterator[dict[str, Any]]:
    """Generator and judge of fixed latency; gives the config of an Answering that asks them."""

    def answer(body: dict[str, Any], seed: int | None) -> str:
        number = re.findall(r"What is number (\d+)\?", str(body["messages"]))[-1]
        return number if _deserved(f"t{number}") else "something else"

    fake = FakeOpenAI("generator", respond=answer)
    generator = Moody(fake.app, latency_s=lambda path: GENERATOR_S * path.endswith("completions"))
    judge = Moody(judge_app(), latency_s=lambda path: JUDGE_S * path.endswith("score"))
    with running_app(generator) as generator_url, running_app(judge) as judge_url:
        wait_ready(judge_url)
        yield {
            "generator": {
                "base_url": f"{generator_url}/v1",
                "model": "generator",
                "max_requests": AT_ONCE,
            },
            "judge": {"url": judge_url, "max_in_flight": AT_ONCE},
        }


if __name__ == "__main__":
    run("search_stream", __doc__, questions)
