"""A server with vLLM's routes whose turns are scripted and take the time that its settings say.

It loads no model: each turn's text and number of tokens are in a script, by its request's seed. Its
log-probabilities are those of a policy whose head is zero, so that a trainer with that policy
agrees with them. Time passes as in bench/scaling/simulation.py, but on the real clock: all running
requests get a token in each step, and the seconds of a step depend on their number.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI

from bench.scaling.settings import SamplerSettings

MODEL = "scripted"


@dataclass(frozen=True, slots=True)
class ScriptedTurn:
    """The ids that the server returns for a seed, and the tokens whose time it takes."""

    token_ids: list[int]
    tokens: int


class TimedBatch:
    """Continuous batching on the real clock.

    busy_s: seconds with at least one running request.
    """

    def __init__(self, cfg: SamplerSettings) -> None:
        self.cfg = cfg
        self.busy_s = 0.0
        self._waiting: deque[list[Any]] = deque()
        self._running: list[list[Any]] = []
        self._work = asyncio.Event()
        self._can_run = asyncio.Event()
        self._can_run.set()
        self._task: asyncio.Task[None] | None = None

    async def generate(self, tokens: int) -> None:
        """Return when a request of so many tokens is done."""
        self._task = self._task or asyncio.create_task(self._run())
        done = asyncio.get_running_loop().create_future()
        self._waiting.append([tokens, done])
        self._work.set()
        await done

    async def load_weights(self, seconds: float) -> None:
        """Stop all requests for so many seconds."""
        self._can_run.clear()
        await asyncio.sleep(seconds)
        self._can_run.set()

    async def _run(self) -> None:
        loop, cfg = asyncio.get_running_loop(), self.cfg
        next_step = loop.time()
        while True:
            if not self._running and not self._waiting:
                self._work.clear()
                await self._work.wait()
                next_step = loop.time()
            if not self._can_run.is_set():
                await self._can_run.wait()
                next_step = loop.time()
            while self._waiting and len(self._running) < cfg.max_requests:
                self._running.append(self._waiting.popleft())
            step_s = cfg.step_s + cfg.step_s_per_request * (len(self._running) - 1)
            next_step += step_s  # a late step does not delay those after it
            self.busy_s += step_s
            await asyncio.sleep(max(0.0, next_step - loop.time()))
            for request in self._running:
                request[0] -= 1
                if request[0] <= 0 and not request[1].done():
                    request[1].set_result(None)
            self._running = [request for request in self._running if request[0] > 0]


def timed_app(
    cfg: SamplerSettings, script: Mapping[int, ScriptedTurn], vocabulary: int, load_s: float
) -> FastAPI:
    """Return a server.

    script: turns by the seed of their request. Other requests are answered at once.
    vocabulary: ids of the policy.
    load_s: seconds to load weights.
    """
    app, batch, state = FastAPI(), TimedBatch(cfg), {"version": "default"}
    calls: Counter[int] = Counter()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"data": [{"id": MODEL, "parent": None}]}

    @app.get("/weight_info")
    async def weight_info() -> dict[str, Any]:
        return {"weight_version": state["version"]}

    @app.post("/update_weight_version")
    async def update_weight_version(body: dict[str, Any]) -> dict[str, bool]:
        state["version"] = body["new_version"]
        return {"success": True}

    @app.post("/collective_rpc")
    async def collective_rpc(body: dict[str, Any]) -> dict[str, Any]:
        assert body["method"] == "reload_weights"
        await batch.load_weights(load_s)
        return {"results": [None]}

    @app.post("/reset_{cache}_cache")
    async def reset(cache: str) -> dict[str, Any]:
        return {}

    @app.get("/usage")
    async def usage() -> dict[str, float]:
        max_calls = max(calls.values(), default=0)
        return {"busy_s": batch.busy_s, "turns": len(calls), "calls_of_a_turn": max_calls}

    @app.post("/v1/completions")
    async def completions(body: dict[str, Any]) -> dict[str, Any]:
        turn = script.get(body["seed"])
        if turn is not None:
            calls[body["seed"]] += 1
            await batch.generate(turn.tokens)
            return {"choices": [_choice(body, turn.token_ids, vocabulary, 0)]}
        ids = [3 + position % 8 for position in range(body["max_tokens"])]
        return {"choices": [_choice(body, ids, vocabulary, n) for n in range(body.get("n", 1))]}

    return app


def _choice(
    body: Mapping[str, Any], token_ids: Sequence[int], vocabulary: int, index: int
) -> dict[str, Any]:
    """Return a completion whose ids are all equally likely."""
    num_ids = vocabulary - len(body.get("logit_bias") or ())
    logprob = 0.0 if body["top_k"] == 1 else -math.log(num_ids)
    logprobs = None if body["logprobs"] is None else {"token_logprobs": [logprob] * len(token_ids)}
    is_stopped = token_ids[-1] in body.get("stop_token_ids", ())
    return {
        "index": index,
        "token_ids": list(token_ids),
        "logprobs": logprobs,
        "finish_reason": "stop" if is_stopped else "length",
    }
