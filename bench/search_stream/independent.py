"""Measure episodes of a policy server that is sometimes slow, with all turns of all episodes used.

128 episodes have 7 turns each. The policy server answers a turn after 0.1 s, and after 4 s for 6 %
of them. Each turn searches, the last one completes. Generator and judge are those of the other
measurements. Times are compared with the slowest episode's own turns, which no schedule can
shorten.
"""

from __future__ import annotations

import asyncio
import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request

from bench.common import Measurement, quiet_logs
from bench.search_episodes.__main__ import COMPLETE, KnownPages
from bench.search_stream.servers import answering_servers
from scorekit.llm import LLMClient, Sampling
from testing.servers import running_app
from trainer.search.answer.config import AnsweringConfig
from trainer.search.answer.pipeline import AnswerPipeline
from trainer.search.config import EpisodeConfig, SearchRewardConfig
from trainer.search.records import Question, Trajectory
from trainer.search.reward import RewardStream
from trainer.search.rollout.episode import run_trajectories
from trainer.search.rollout.policies import ChatPolicy
from trainer.search.rollout.tools import SearchTools

EPISODES, TURNS = 128, 7
QUICK_S, SLOW_S, SLOW_SHARE = 0.1, 4.0, 0.06
#: Concurrent calls of the generator, and of the judge.
AT_ONCE = 32
PATIENCE_S = 120.0


def independent(
    ideal_s: Callable[[Sequence[float], int], float], quick: bool
) -> Iterator[Measurement]:
    """Yield the measurements.

    ideal_s: times at which episodes end, concurrent calls of a server -> time of the last verdict
    if the servers are never idle while they have work.
    """
    count = 16 if quick else EPISODES
    own_s = [sum(_turn_s(n, turn) for turn in range(1, TURNS + 1)) for n in range(count)]
    slowest_s = max(own_s)
    with _in_another_process() as (policy_url, answering):
        client = partial(LLMClient, f"{policy_url}/v1", "searcher", max_concurrency=2 * EPISODES)
        with closing(ChatPolicy(client, Sampling(max_tokens=64))) as policy:
            policy.check()
            steps = _Steps(policy, answering)
            steps.run(16, "warm-up", stream_them=True)  # connections, and rendered pages
            ends, streamed_s = steps.run(count, "streamed", stream_them=True)
            batch_ends, batch_s = steps.run(count, "batch", stream_them=False)
    perfect_s = ideal_s(ends, AT_ONCE)
    yield Measurement(
        f"{count} episodes of {TURNS} turns, {SLOW_SHARE:.0%} of them slow: the last has ended",
        ends[-1],
        "s",
        note=f"the slowest one's own turns: {slowest_s:.1f} s, the median's: "
        f"{statistics.median(own_s):.1f} s",
        details={"ends": ends, "own_turns_s": own_s},
    )
    yield Measurement(
        "  of the slowest episode's own turns", ends[-1] / slowest_s, "", at_most=1.15
    )
    yield Measurement(
        "  of this time, when the first is handed over", ends[0] / ends[-1], "", at_most=0.15
    )
    yield Measurement("  last verdict, all requested after the last end", batch_s, "s")
    yield Measurement("  last verdict, each requested at its end", streamed_s, "s")
    yield Measurement("  last verdict, perfect overlap, reckoned", perfect_s, "s")
    waits = [batch_s - batch_ends[-1], streamed_s - ends[-1], perfect_s - ends[-1]]
    yield Measurement(
        "  share of what perfect overlap saves",
        (waits[0] - waits[1]) / (waits[0] - waits[2]),
        "",
        at_least=0.9,
    )


@contextmanager
def _in_another_process() -> Iterator[tuple[str, dict[str, Any]]]:
    """Start the three servers in a process of their own; yield the policy's URL, and the config of
    generator and judge. In this process they would take the episodes' processor time."""
    pipe, child_pipe = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=_serve, args=(child_pipe,))
    process.start()
    child_pipe.close()  # else the end of the child would not be seen here
    try:
        yield pipe.recv()
    finally:
        pipe.close()
        process.join()


def _serve(pipe: Connection) -> None:
    quiet_logs()
    with answering_servers() as answering, running_app(_policy_app()) as url:
        pipe.send((url, answering))
        with suppress(EOFError):
            pipe.recv()


def _turn_s(episode: int, turn: int) -> float:
    """Return the seconds that the policy server takes for a turn."""
    return SLOW_S if random.Random(f"{episode} {turn}").random() < SLOW_SHARE else QUICK_S


def _policy_app() -> FastAPI:
    """Return a chat server that searches on each turn, and completes on the last one."""
    app = FastAPI()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "searcher", "object": "model"}]}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> dict[str, Any]:
        messages = (await request.json())["messages"]
        turn = 1 + sum(message["role"] == "assistant" for message in messages)
        (episode,) = re.findall(r"What is number (\d+)\?", str(messages))
        await asyncio.sleep(_turn_s(int(episode), turn))
        search = f"<think>go on</think>\n<search>{int(episode) + turn}</search>"
        content = COMPLETE if turn == TURNS else search
        message = {"role": "assistant", "content": content}
        return {
            "id": "x",
            "object": "chat.completion",
            "created": 0,
            "model": "searcher",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 9, "completion_tokens": 9, "total_tokens": 18},
        }

    return app


class _Steps:
    """Steps of one run: they share the rendered pages, as the steps of a training run do."""

    def __init__(self, policy: ChatPolicy, answering: Mapping[str, Any]) -> None:
        self._policy = policy
        generator = answering["generator"] | {"max_requests": AT_ONCE}
        judge = answering["judge"] | {"max_in_flight": AT_ONCE}
        self._answering = AnsweringConfig(generator=generator, judge=judge)
        self._images: dict[str, bytes] = {}
        self._cfg = EpisodeConfig(max_turns=TURNS, observation="text")
        self._tools = SearchTools(KnownPages(), self._cfg, self._images.__setitem__)

    def run(self, count: int, name: str, *, stream_them: bool) -> tuple[list[float], float]:
        """Run episodes; return the seconds to each end, ascending, and to the last reward."""
        running = [_episode(number, name) for number in range(count)]
        ends: list[float] = []
        with tempfile.TemporaryDirectory() as folder:
            pipeline = AnswerPipeline(self._answering, run=name, folder=Path(folder))
            reward = SearchRewardConfig(preset="focused")
            stream = RewardStream(reward, pipeline, self._images.__getitem__)
            with closing(stream):
                stream.check()
                started = time.monotonic()

                def note_end(trajectory: Trajectory) -> None:
                    ends.append(time.monotonic() - started)
                    if stream_them:
                        stream.submit(trajectory)

                finished = run_trajectories(
                    running, self._policy, self._tools, self._cfg, on_done=note_end
                )
                for trajectory in () if stream_them else finished:
                    stream.submit(trajectory)
                stream.collect(1, {t.trajectory_id: t.group for t in finished}, PATIENCE_S)
                seconds = time.monotonic() - started
        assert all(len(trajectory.turns) == TURNS for trajectory in finished), "a turn is missing"
        assert stream.stats["reward_coverage"] == 1, stream.stats
        return ends, seconds


def _episode(number: int, run: str) -> Trajectory:
    text = f"What is number {number}?"
    question = Question(id=f"q{number}", question=text, reference_answer=str(number))
    return Trajectory(
        trajectory_id=question.id, run=run, step=1, group=question.id, question=question
    )
