"""Measure which share of the possible saving of wait for answers and verdicts streaming reaches.

The generator answers after 0.5 s and the judge after 0.25 s, on real ports, with 8 concurrent calls
each. 64 episodes end within 8 s: one by one, or at the ends of seven rounds of turns, a third of
them with the last round. Three times are compared, each from the first episode to the last reward:
each episode is submitted when it ends; all are submitted when the last one has ended; and the
minimum of any schedule, computed from the same ends and the servers' seconds. The results are
collected in another order than the episodes ended in, to check that each reward belongs to its own
episode.

Then real episodes are run against a policy server that is sometimes slow, all with all their turns
(bench/search_stream/independent.py).

    python -m bench.search_stream [--quick]
"""

from __future__ import annotations

import hashlib
import heapq
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from bench.common import Measurement, quiet_logs, run
from bench.search_stream.independent import independent
from bench.search_stream.servers import (
    AT_ONCE,
    GENERATOR_S,
    JUDGE_S,
    answering_servers,
    deserved,
)
from trainer.search.answer.config import AnsweringConfig
from trainer.search.answer.pipeline import AnswerPipeline
from trainer.search.config import SearchRewardConfig
from trainer.search.records import ImageView, Question, Trajectory, Turn
from trainer.search.reward import RewardStream

PATIENCE_S = 120.0


def questions(quick: bool) -> Iterator[Measurement]:
    """Yield all measurements of this script."""
    quiet_logs()
    count, seconds, repeats = (16, 1.0, 1) if quick else (64, 8.0, 3)
    with answering_servers() as answering:
        for name, ends in _schedules(count, seconds).items():
            perfect = _ideal_seconds(ends)
            ways: dict[str, list[float]] = {"streamed": [], "batch": []}
            num_right = 0
            for repeat in range(repeats):
                for way, durations in ways.items():
                    result = _step(answering, ends, f"{name}-{way}-{repeat}", way == "streamed")
                    durations.append(result[0])
                    num_right += result[1]
            streamed, batch = (statistics.median(durations) for durations in ways.values())
            yield Measurement(f"{name}: batch at the end", batch, "s", details=ways)
            yield Measurement(f"{name}: streamed", streamed, "s")
            yield Measurement(f"{name}: perfect overlap, reckoned", perfect, "s")
            saved = (batch - streamed) / (batch - perfect)
            yield Measurement("  share of what perfect overlap saves", saved, "", at_least=0.9)
            share = num_right / (count * repeats * len(ways))
            yield Measurement(
                "  share of rewards that are their episode's", share, "", at_least=1.0
            )
    yield from independent(_ideal_seconds, quick)


def _schedules(count: int, seconds: float) -> dict[str, list[float]]:
    """Return the times at which the episodes end, in ascending order, for each schedule.

    In the first schedule they end one by one; in the second at the ends of rounds.
    """
    dice = random.Random(5)
    one_by_one = [seconds * (n + 1) / count for n in range(count)]
    rounds = [dice.choice(range(1, 7)) if n % 3 else 7 for n in range(count)]
    return {
        "ends one by one": one_by_one,
        "ends by rounds": sorted(seconds * number / 7 for number in rounds),
    }


def _ideal_seconds(ends: Sequence[float], at_once: int = AT_ONCE) -> float:
    """Return the time of the last verdict if the servers are never idle while they have work."""
    done = list(ends)
    for seconds in (GENERATOR_S, JUDGE_S):
        free = [0.0] * at_once
        for index, ready in enumerate(done):
            done[index] = max(ready, heapq.heappop(free)) + seconds
            heapq.heappush(free, done[index])
    return max(done)


def _step(
    answering: Mapping[str, Any], ends: Sequence[float], name: str, stream_them: bool
) -> tuple[float, int]:
    """Return the seconds of a step from its first episode to its last reward, and the number of
    correct rewards.
    """
    episodes = [_episode(n, name) for n in range(len(ends))]
    images = {_sha256(n): _png(n) for n in range(len(ends))}
    pending = {
        episode.trajectory_id: episode.group
        for episode in random.Random(1).sample(episodes, len(episodes))
    }
    with tempfile.TemporaryDirectory() as folder:  # else the answers of the last step are known
        pipeline = AnswerPipeline(AnsweringConfig(**answering), run=name, folder=Path(folder))
        stream = RewardStream(SearchRewardConfig(preset="focused"), pipeline, images.__getitem__)
        with closing(stream):
            stream.check()
            started = time.monotonic()
            for episode, end in zip(episodes, ends, strict=True):
                time.sleep(max(0.0, started + end - time.monotonic()))
                if stream_them:
                    stream.submit(episode)
            if not stream_them:
                for episode in episodes:
                    stream.submit(episode)
            collected = stream.collect(1, pending, PATIENCE_S)
            seconds = time.monotonic() - started
    assert stream.stats["reward_coverage"] == 1, stream.stats
    return seconds, sum(
        episode.reward is not None and episode.reward.value == deserved(id)
        for id, episode in collected.items()
    )


def _episode(number: int, run: str) -> Trajectory:
    """Return an episode. Its generator answers right or wrong by the episode's number."""
    question = Question(
        id=f"q{number}", question=f"What is number {number}?", reference_answer=str(number)
    )
    view = ImageView(
        kind="page",
        page_id=f"deck_{number + 1}",
        width=8,
        height=8,
        region=(0, 0, 8, 8),
        page_width=8,
        page_height=8,
        image=_sha256(number),
    )
    turn = Turn(number=1, text="", action="search", query="number", views=[view])
    last = Turn(number=2, text="", action="complete")
    return Trajectory(
        trajectory_id=f"t{number}",
        run=run,
        step=1,
        group=f"g{number // 8}",
        sample=number % 8,
        question=question,
        turns=[turn, last],
        end="complete",
    )


def _png(number: int) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + f"page {number} ".encode() * 2000


def _sha256(number: int) -> str:
    return hashlib.sha256(_png(number)).hexdigest()


if __name__ == "__main__":
    run("search_stream", __doc__, questions)
