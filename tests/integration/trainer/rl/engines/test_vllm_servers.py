"""Several vLLM servers: which one gets which turn, and what happens when some of them fail."""

from __future__ import annotations

import asyncio
import logging
import random
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from scorekit.errors import UserError
from testing.servers import free_port, running_app, wait_until
from tests.kits.trainer.vllm_servers import (
    GEN_CFG,
    MODES,
    NO_FAULTS,
    ServedRun,
    make_stubs,
    seeded,
    serving,
)
from tests.kits.trainer.vllm_servers import key as key
from tests.kits.trainer.vllm_servers import policy as policy
from tests.kits.vllm_stub import NAME, VLLMStub
from trainer.rl.config import VLLMConfig
from trainer.rl.engines import vllm_sync
from trainer.rl.engines.choice import probe_server
from trainer.rl.sampler import CompletionFailed, SampledCompletion, SeededPrompt

EACH_MODE = pytest.mark.parametrize("mode", MODES)


async def complete(run: ServedRun, prompt: SeededPrompt) -> SampledCompletion:
    return await run.sampler.complete(prompt, GEN_CFG, with_logprobs=True)


def in_thread(work: Coroutine[Any, Any, Any]) -> tuple[threading.Thread, list[Any]]:
    """Run a coroutine in another thread, and return the thread and the list of its result."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(asyncio.run(work)))
    thread.start()
    return thread, results


def prompts_of(stub: VLLMStub) -> list[list[int]]:
    """Return the prompts that a server was asked to complete, without those of checks."""
    prompts = [body["prompt"] if "prompt" in body else body["token_ids"] for body in stub.bodies]
    return [prompt for prompt in prompts if prompt[0] == 3]


async def episode(run: ServedRun, number: int, turns: int = 3) -> list[tuple[Any, Any]]:
    """Return (prompt, completion) of each turn; each continues the one before."""
    ids = [3, 4 + number % 5, 4 + number // 5, 2]
    pairs = []
    for turn in range(turns):
        prompt = seeded(ids, 100 * number + turn, f"episode {number}")
        completion = await complete(run, prompt)
        pairs.append((prompt, completion))
        ids = [*ids, *completion.token_ids, 5]
    return pairs


# -- before the run --------------------------------------------------------------------------------


def test_all_servers_are_checked_and_each_error_names_its_url(policy: Path) -> None:
    good, raw = VLLMStub(policy), VLLMStub(policy, mode="raw_logprobs")
    with running_app(good.app) as first, running_app(raw.app) as second:
        assert probe_server(VLLMConfig(url=first), adapters=False)
        dead = f"http://127.0.0.1:{free_port()}"
        with pytest.raises(UserError) as error:
            probe_server(VLLMConfig(url=[first, second, dead]), adapters=False)
    assert f"{second} returns log-probabilities of another distribution" in str(error.value)
    assert f"cannot connect to {dead}" in str(error.value)
    assert f"{first} " not in str(error.value) and "\n" not in str(error.value)


def test_servers_with_different_names_are_refused(policy: Path) -> None:
    class Renamed(VLLMStub):
        def models(self) -> dict[str, Any]:
            return {"data": [{"id": "other", "parent": None}]}

        def completions(self, body: dict[str, Any]) -> Any:
            return super().completions(body | {"model": NAME})

    with running_app(VLLMStub(policy).app) as first, running_app(Renamed(policy).app) as second:
        with pytest.raises(UserError, match=f"{first} serves '{NAME}' and {second} 'other'"):
            probe_server(VLLMConfig(url=f"{first},{second}"), adapters=False)


@pytest.mark.parametrize("status", [0, 429, 503])
def test_a_failure_that_passes_while_a_server_is_checked_does_not_end_the_run(
    policy: Path, status: int
) -> None:
    """Check an answer that is cut (0), and statuses of a server that is busy."""
    stub = VLLMStub(policy)
    with running_app(stub.app) as url:
        stub.failures = [status] * (vllm_sync.ATTEMPTS - 1)
        assert probe_server(VLLMConfig(url=url), adapters=False) == NAME
        stub.failures = [status] * vllm_sync.ATTEMPTS
        with pytest.raises(UserError, match=url):
            probe_server(VLLMConfig(url=url), adapters=False)
    assert len(stub.bodies) == 2 * vllm_sync.ATTEMPTS and not stub.failures


@pytest.mark.parametrize(
    ("path", "answer", "words"),
    [
        ("/v1/models", {"models": ["llama"]}, "/v1/models: HTTP 200: no list of models: .*llama"),
        ("/v1/models", {"data": ["llama"]}, "/v1/models: HTTP 200: no list of models"),
        ("/v1/models", ["llama"], "/v1/models: HTTP 200: no list of models"),
        ("/weight_info", {"status": "ok"}, "/weight_info: HTTP 200: no version: .*ok"),
    ],
)
def test_a_server_that_is_no_vllm_is_one_line(
    policy: Path, path: str, answer: Any, words: str
) -> None:
    stub = VLLMStub(policy)
    app = FastAPI()
    app.add_api_route(path, lambda: answer)
    app.mount("/", stub.app)
    with running_app(app) as url, pytest.raises(UserError, match=f"{url}: {words}"):
        probe_server(VLLMConfig(url=url), adapters=False)


def test_a_server_that_never_answers_is_named_before_the_run(policy: Path) -> None:
    stub = VLLMStub(policy)
    stub.is_hanging = True
    with running_app(stub.app) as url:
        with pytest.raises(UserError, match=rf"{url} gave no answer in timeout_s = 0\.3 seconds"):
            probe_server(VLLMConfig(url=url, timeout_s=0.3), adapters=False)
        stub.is_hanging = False


def test_a_server_that_a_killed_run_left_paused_is_resumed(policy: Path) -> None:
    stub = VLLMStub(policy)
    stub.pause("keep")
    with running_app(stub.app) as url:
        assert probe_server(VLLMConfig(url=url), adapters=False) == NAME
    assert not stub.is_paused


# -- which server ----------------------------------------------------------------------------------


@EACH_MODE
def test_turns_of_an_episode_stay_on_one_server_and_episodes_are_spread(
    policy: Path, tmp_path: Path, mode: str
) -> None:
    stubs = make_stubs(policy, mode, 3)
    with serving(stubs, policy, tmp_path, mode) as run:
        for stub in stubs:
            stub.blocked_prompts = {3}

        async def episodes() -> list[Any]:
            return await asyncio.gather(*(episode(run, number) for number in range(12)))

        thread, results = in_thread(episodes())
        wait_until(lambda: all(stub.entered == 4 for stub in stubs))
        for stub in stubs:
            stub.release.set()
        thread.join()
        for prompt, completion in (pair for pairs in results[0] for pair in pairs):
            run.check(prompt, completion)
        servers: dict[tuple[int, ...], set[int]] = {}
        for index, stub in enumerate(stubs):
            for ids in prompts_of(stub):
                servers.setdefault(tuple(ids[:4]), set()).add(index)
        assert len(servers) == 12 and all(len(used) == 1 for used in servers.values())
        assert sorted(len(prompts_of(stub)) for stub in stubs) == [12, 12, 12]
        assert run.sampler.stats() == {"sampler_servers": 3, "sampler_moved": 0} | NO_FAULTS


def test_many_prompts_are_spread_over_all_servers_within_their_concurrency(
    policy: Path, tmp_path: Path
) -> None:
    stubs = make_stubs(policy, "labels")
    with serving(stubs, policy, tmp_path, "labels", concurrency=2) as run:
        for stub in stubs:
            stub.blocked_prompts = {3}
        groups = run.sampler.sample([[3, 4, 2]] * 10, GEN_CFG, seed=1)
        results: dict[int, Any] = {}
        thread = threading.Thread(target=lambda: results.update(groups))
        thread.start()
        wait_until(lambda: all(stub.entered == 2 for stub in stubs))
        assert [len(prompts_of(stub)) for stub in stubs] == [2, 2]
        for stub in stubs:
            stub.release.set()
        thread.join()
        assert sorted(results) == list(range(10))


# -- servers that fail -----------------------------------------------------------------------------


@EACH_MODE
def test_turns_of_a_dead_server_go_to_the_others_and_it_returns_with_the_weights(
    policy: Path, tmp_path: Path, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    stubs = make_stubs(policy, mode)
    with serving(stubs, policy, tmp_path, mode) as run:
        for stub in stubs:
            stub.blocked_prompts = {3}

        async def episodes() -> list[Any]:
            return await asyncio.gather(*(episode(run, number) for number in range(6)))

        thread, results = in_thread(episodes())
        wait_until(lambda: all(stub.entered == 3 for stub in stubs))
        stubs[0].kill()
        for stub in stubs:
            stub.release.set()
        thread.join()
        for prompt, completion in (pair for pairs in results[0] for pair in pairs):
            run.check(prompt, completion)
        assert f"{run.urls[0]} is left out: the connection broke" in caplog.text
        assert run.sampler.stats() == {"sampler_servers": 1, "sampler_moved": 3} | NO_FAULTS
        run.update()
        stubs[0].restart()
        wait_until(lambda: len(run.sampler._pool.up) == 2)
        note = f"{run.urls[0]} takes part again, with the weights of update 1"
        wait_until(lambda: note in caplog.text)
        before = len(prompts_of(stubs[0]))
        for prompt, completion in (pair for pairs in asyncio.run(episodes()) for pair in pairs):
            run.check(prompt, completion)
            assert completion.versions == [1] * len(completion.token_ids)
        assert len(prompts_of(stubs[0])) > before
        assert run.sampler.stats()["sampler_moved"] == 0


def test_a_server_whose_port_is_closed_is_left_out_and_returns(
    policy: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stubs, port = make_stubs(policy, "labels"), free_port()
    with running_app(stubs[1].app) as second:
        first = f"http://127.0.0.1:{port}"
        with serving(stubs[:0], policy, tmp_path, "labels", url=[first, second]) as run:
            assert f"{first} is left out: it does not accept connections" in caplog.text
            with running_app(stubs[0].app, port=port):
                wait_until(lambda: len(run.sampler._pool.up) == 2)
                run.update()
            for prompt, completion in asyncio.run(episode(run, 1)):
                run.check(prompt, completion)
                assert completion.versions == [1] * len(completion.token_ids)


def test_turns_of_a_silent_server_go_to_the_others(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(vllm_sync, "CHECK_S", 1.0)
    stubs = make_stubs(policy, "labels")
    with serving(stubs, policy, tmp_path, "labels") as run:
        stubs[0].is_hanging = True

        async def prompts() -> list[Any]:
            return await asyncio.gather(*(episode(run, number, 1) for number in range(4)))

        for ((prompt, completion),) in asyncio.run(prompts()):
            run.check(prompt, completion)
        assert f"{run.urls[0]} is left out: it " in caplog.text
        stubs[0].is_hanging = False
        wait_until(lambda: len(run.sampler._pool.up) == 2)


def test_a_server_that_answers_but_completes_nothing_is_left_out(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(vllm_sync, "CHECK_S", 5.0)
    stubs = make_stubs(policy, "labels")
    with serving(stubs, policy, tmp_path, "labels") as run:
        stubs[0].blocked_prompts = {3}
        thread, results = in_thread(episode(run, 1, 1))
        wait_until(lambda: stubs[0].entered == 1)
        run.sampler._pool.timeout_s = 8.0  # of which it has had half at the next check
        thread.join()
        ((prompt, completion),) = results[0]
        run.check(prompt, completion)
        assert f"{run.urls[0]} is left out: it has completed nothing in " in caplog.text
        stubs[0].release.set()


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_server_that_answers_with_errors_is_left_out_after_a_few_attempts(
    policy: Path, tmp_path: Path, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    stubs = make_stubs(policy, "labels")
    with serving(stubs, policy, tmp_path, "labels") as run:
        stubs[0].failures = [status] * vllm_sync.ATTEMPTS
        pairs = asyncio.run(episode(run, 1))
        for prompt, completion in pairs:
            run.check(prompt, completion)
        assert f"{run.urls[0]} is left out" in caplog.text and f"HTTP {status}" in caplog.text
        wait_until(lambda: len(run.sampler._pool.up) == 2)


def test_a_prompt_that_no_server_completes_delays_no_other(policy: Path, tmp_path: Path) -> None:
    class Picky(VLLMStub):
        def generate(self, body: dict[str, Any]) -> Any:
            if body["token_ids"][:2] == [7, 7]:
                raise RuntimeError("this prompt is too much")
            return super().generate(body)

    stubs = [Picky(policy, routes=("dev", "ids")) for _ in range(2)]
    with serving(stubs, policy, tmp_path, "labels") as run:

        async def work() -> list[Any]:
            bad = asyncio.create_task(complete(run, seeded([7, 7, 2], 1)))
            episodes = await asyncio.gather(*(episode(run, number) for number in range(8)))
            assert not bad.done()  # it is asked for until its time ends
            bad.cancel()
            return episodes

        for prompt, completion in (pair for pairs in asyncio.run(work()) for pair in pairs):
            run.check(prompt, completion)


def test_without_any_server_a_turn_waits_and_then_fails(policy: Path, tmp_path: Path) -> None:
    stubs = make_stubs(policy, "adapters")
    with serving(stubs, policy, tmp_path, "adapters") as run:
        for stub in stubs:
            stub.kill()
        run.sampler._pool.timeout_s = 3.0
        with pytest.raises(CompletionFailed, match=r"gave no answer in timeout_s = 3 seconds"):
            asyncio.run(complete(run, seeded([3, 4, 2], 1)))
        run.sampler._pool.timeout_s = 60.0
        for stub in stubs:
            stub.restart()
        wait_until(lambda: len(run.sampler._pool.up) == 2)
        run.check(seeded([3, 4, 2], 1), asyncio.run(complete(run, seeded([3, 4, 2], 1))))


def test_what_a_server_refuses_is_told_at_once(policy: Path, tmp_path: Path) -> None:
    with serving(make_stubs(policy, "adapters"), policy, tmp_path, "adapters") as run:
        with pytest.raises(UserError, match="maximum context length is 64"):
            asyncio.run(complete(run, seeded([3] * 60, 1)))
        assert run.sampler.stats() == {"sampler_servers": 2, "sampler_moved": 0} | NO_FAULTS


# -- everything at random moments ------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["adapters", "labels"])
@pytest.mark.parametrize(
    ("seed", "count", "turns"),
    [(0, 9, 3), *(pytest.param(n, 15, 5, marks=pytest.mark.slow) for n in range(4))],
)
def test_servers_die_at_random_moments_and_every_turn_has_exactly_one_completion(
    policy: Path,
    tmp_path: Path,
    mode: str,
    seed: int,
    count: int,
    turns: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Kill and restart servers, and change the weights, while episodes run.

    Seeds and weights decide each completion: what `check` computes is compared with what came.
    Without labels, a server that restarts faster than any real one could not be recognized.
    """
    caplog.set_level(logging.WARNING)
    rng = random.Random(seed)
    stubs = make_stubs(policy, mode, 3)
    done = threading.Event()
    with serving(stubs, policy, tmp_path, mode) as run:

        async def episodes() -> list[Any]:
            try:
                return await asyncio.gather(*(episode(run, n, turns) for n in range(count)))
            finally:
                done.set()

        def at_random() -> None:
            while not done.is_set():
                stub = rng.choice(stubs)
                if stub.is_dead:
                    stub.restart()
                elif sum(stub.is_dead for stub in stubs) < 2:
                    stub.kill()
                if rng.random() < 0.3:
                    run.update()
                done.wait(rng.random() * 0.04 * turns)

        thread, results = in_thread(episodes())
        at_random()
        thread.join()
        (pairs_of_episodes,) = results
        pairs = [pair for pairs in pairs_of_episodes for pair in pairs]
        assert len(pairs) == count * turns
        for prompt, completion in pairs:
            run.check(prompt, completion)
        seeds = [prompt.seed for prompt, _ in pairs]
        assert len(set(seeds)) == len(seeds)
        sent_seeds = {
            body.get("seed", body.get("sampling_params", {}).get("seed"))
            for stub in stubs
            for body in stub.bodies
        }
        assert set(seeds) <= sent_seeds
        # A server that is back before anything is sent to it is missed by its weights alone.
        assert "is left out" in caplog.text or "has lost the policy" in caplog.text
