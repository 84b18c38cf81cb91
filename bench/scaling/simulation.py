"""Simulate a training run event by event (with SimPy).

The steps are those of the project: update u (from 1) has its own prompts. Its generation may start
when the weights have version >= u - 1 - max_staleness. Each episode alternates between a sampler
and tools, then its reward is requested. The learner takes the batches in order. After an update it
writes the weights, and all samplers load them.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

import simpy

from bench.scaling.settings import (
    RunSettings,
    SamplerSettings,
    ServiceSettings,
    SimulatedRun,
    Usage,
)

Process = Generator[simpy.Event, Any, Any]


@dataclass(frozen=True, slots=True)
class _Turn:
    """One request: tokens of its prompt that are not cached, and tokens to generate."""

    prefill_tokens: int
    completion_tokens: int
    done: simpy.Event


class _Server:
    """A sampler server with continuous batching.

    All running requests get one token in each step. The seconds of a step depend on their number.
    So the progress of every request is one shared count of steps, and the next request to end is
    the one with the smallest count at its end.
    """

    def __init__(
        self, env: simpy.Environment, cfg: SamplerSettings, note_load: Callable[[_Server], None]
    ) -> None:
        """Start the server.

        note_load: is called when `load` has changed.
        """
        self.env, self.cfg, self.usage, self._note_load = env, cfg, Usage(), note_load
        self.steps = 0.0
        self.is_loading = False
        self._coming = 0
        self._waiting: deque[_Turn] = deque()
        self._running: list[tuple[float, int, _Turn]] = []
        self._prefill_s = 0.0
        self._count = 0
        self._changed = env.event()
        self._cached: dict[tuple[int, ...], int] = {}
        env.process(self._serve())

    @property
    def load(self) -> int:
        """Return the number of requests that run, wait or are on their way."""
        return len(self._running) + len(self._waiting) + self._coming

    def expect(self) -> None:
        """Count a request that is on its way."""
        self._coming += 1
        self._note_load(self)

    def generate(
        self, prompt_tokens: int, completion_tokens: int, group: tuple[int, int], position: int
    ) -> tuple[simpy.Event, int]:
        """Return the event of the end of a turn, and the prompt tokens that were not cached.

        The episodes of a group share their first prompt; each one's later turns are its own.
        """
        episode = (*group, position)
        cached_tokens = self._cached.get(episode, self._cached.get(group, 0))
        prefill_tokens = max(0, prompt_tokens - cached_tokens)
        self._cached.setdefault(group, prompt_tokens)
        self._cached[episode] = prompt_tokens + completion_tokens
        turn = _Turn(prefill_tokens, completion_tokens, self.env.event())
        self._waiting.append(turn)
        self.usage.calls += 1
        self._coming -= 1
        self._wake()
        return turn.done, prefill_tokens

    def load_weights(self, seconds: float) -> Process:
        """Stop generation for `seconds`; cached prompts are of the old weights and are dropped."""
        self.is_loading = True
        self._wake()
        yield self.env.timeout(seconds)
        self.is_loading = False
        self._cached.clear()
        self._wake()

    def _wake(self) -> None:
        if not self._changed.triggered:
            self._changed.succeed()

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.cfg.max_requests:
            turn = self._waiting.popleft()
            self._prefill_s += turn.prefill_tokens * self.cfg.prefill_s_per_token
            self._count += 1
            end = self.steps + turn.completion_tokens
            heapq.heappush(self._running, (end, self._count, turn))

    def _serve(self) -> Process:
        env, cfg = self.env, self.cfg
        while True:
            self._admit()
            self._changed = env.event()
            if self.is_loading or not self._running:
                yield self._changed
                continue
            step_s = cfg.step_s + cfg.step_s_per_request * (len(self._running) - 1)
            end_s = self._prefill_s + (self._running[0][0] - self.steps) * step_s
            started = env.now
            yield env.timeout(end_s) | self._changed
            seconds = env.now - started
            self.usage.busy_s += seconds
            self.usage.request_s += seconds * len(self._running)
            prefill_s = min(seconds, self._prefill_s)
            self._prefill_s -= prefill_s
            if seconds >= end_s * (1 - 1e-12):  # the first request has ended
                self.steps = self._running[0][0]
            else:
                self.steps += (seconds - prefill_s) / step_s
            while self._running and self._running[0][0] <= self.steps + 1e-9:
                heapq.heappop(self._running)[2].done.succeed()
                self._note_load(self)


class _Run:
    """The processes of a simulated run."""

    def __init__(self, cfg: RunSettings) -> None:
        self.cfg, self.env = cfg, simpy.Environment()
        self.result = SimulatedRun(cfg)
        self._by_load: list[tuple[int, int, _Server]] = []
        self._load_count = 0
        self.servers = [
            _Server(self.env, cfg.samplers, self._note_load) for _ in range(cfg.samplers.servers)
        ]
        for server in self.servers:
            self._note_load(server)
        self.result.samplers = [server.usage for server in self.servers]
        self.resources = {
            service.name: simpy.Resource(self.env, service.parallel)
            for service in (*cfg.tools, *cfg.scorers)
        }
        self.result.services = {name: Usage() for name in self.resources}
        self.slots = simpy.Resource(self.env, cfg.max_episodes)
        self.version = 0
        self.new_version = self.env.event()
        self.complete = [self.env.event() for _ in range(cfg.updates)]
        self.driver = simpy.Resource(self.env)

    def run(self) -> SimulatedRun:
        """Run to the end of the last update."""
        self.env.process(self._collect())
        self.env.run(self.env.process(self._learn()))
        return self.result

    def _collect(self) -> Process:
        """Start the batches in order, as the weights allow."""
        cfg = self.cfg
        for update in range(1, cfg.updates + 1):
            while self.version < update - 1 - cfg.max_staleness:
                yield self.new_version
            self.result.starts.append(self.env.now)
            self.result.ages.append([])
            processes = []
            for position in range(cfg.batch_episodes):
                slot = self.slots.request()
                yield slot
                processes.append(self.env.process(self._episode(update, position, slot)))
            batch = self.env.process(self._finish(update, processes))
            if cfg.batches == "ordered":
                yield batch

    def _finish(self, update: int, processes: list[simpy.Process]) -> Process:
        lengths = yield self.env.all_of(processes)
        self.complete[update - 1].succeed(sum(lengths.values()))

    def _episode(self, update: int, position: int, slot: Any) -> Process:
        """Run one episode; return its number of tokens."""
        cfg, version = self.cfg, self.version
        plan = cfg.episode(update, position)
        server, prompt = None, plan.prompt_tokens
        for number, turn in enumerate(plan.turns, 1):
            with self.driver.request() as request:
                yield request
                yield self.env.timeout(cfg.driver_s)
            server = self._choose(server)
            server.expect()
            yield self.env.timeout(cfg.samplers.overhead_s)
            done, prefill = server.generate(
                prompt, turn.completion_tokens, (update, position // cfg.group), position
            )
            self.result.prefill_tokens += prefill
            self.result.completion_tokens += turn.completion_tokens
            yield done
            prompt += turn.completion_tokens
            if number < len(plan.turns):
                for tool in cfg.tools:
                    yield from self._call(tool)
                prompt += turn.observation_tokens
        self.slots.release(slot)
        for scorer in self.cfg.scorers:
            yield from self._call(scorer)
        self.result.ages[update - 1].append(update - 1 - version)
        served = self.result.served
        served[update, position] = served.get((update, position), 0) + 1
        return prompt

    def _choose(self, server: _Server | None) -> _Server:
        if server is not None and self.cfg.samplers.prefix_affinity:
            return server
        while self._by_load[0][0] != self._by_load[0][2].load:
            heapq.heappop(self._by_load)  # its load has changed, and it has a newer entry
        return self._by_load[0][2]

    def _note_load(self, server: _Server) -> None:
        """Sort a server by its new load; of equal ones the first that got it is taken."""
        self._load_count += 1
        heapq.heappush(self._by_load, (server.load, self._load_count, server))

    def _call(self, service: ServiceSettings) -> Process:
        usage = self.result.services[service.name]
        with self.resources[service.name].request() as request:
            yield request
            yield self.env.timeout(service.latency_s)
        usage.calls += 1
        usage.request_s += service.latency_s

    def _learn(self) -> Process:
        cfg = self.cfg.learner
        for update in range(1, self.cfg.updates + 1):
            tokens = yield self.complete[update - 1]
            self.result.ends.append(self.env.now)
            self.result.learn_starts.append(self.env.now)
            seconds = cfg.s_per_update + tokens * cfg.s_per_token
            seconds += cfg.s_per_sequence * self.cfg.batch_episodes
            yield self.env.timeout(seconds + cfg.write_s)
            loads = [self.env.process(s.load_weights(cfg.load_s)) for s in self.servers]
            yield self.env.all_of(loads)
            self.result.learner.busy_s += seconds
            self.result.update_ends.append(self.env.now)
            self.version = update
            self.new_version.succeed()
            self.new_version = self.env.event()


def simulate(cfg: RunSettings) -> SimulatedRun:
    """Return the result of a run with these settings."""
    return _Run(cfg).run()
