"""New weights while turns are in flight: no turn is lost, and each token has its version."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from scorekit.errors import UserError
from testing.servers import PATIENCE_S, wait_until
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
from tests.kits.vllm_stub import VLLMStub
from trainer.rl.engines import vllm_sync
from trainer.rl.sampler import SampledCompletion, SeededPrompt

EACH_MODE = pytest.mark.parametrize("mode", MODES)


def prompt_of(run: ServedRun) -> SeededPrompt:
    """Return a prompt whose first completion has the full length."""
    prompts = (seeded([3, 4, 2], seed) for seed in range(1000))
    return next(p for p in prompts if len(run.expected_ids(p, 0)) == p.max_new_tokens)


def complete(run: ServedRun) -> SampledCompletion:
    return asyncio.run(run.sampler.complete(prompt_of(run), GEN_CFG, with_logprobs=True))


@contextmanager
def in_flight(run: ServedRun, stub: VLLMStub, token: int = 1) -> Iterator[list[Any]]:
    """Complete a prompt beside the block, which runs while it waits before this token.

    Yield the list that has the completion afterwards.
    """
    stub.blocked_prompts, stub.blocked_token = {3}, token
    completions: list[SampledCompletion] = []
    thread = threading.Thread(target=lambda: completions.append(complete(run)))
    thread.start()
    try:
        wait_until(lambda: stub.entered == 1)
        stub.blocked_prompts = set()
        yield completions
    finally:
        stub.release.set()
        thread.join()


def during(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_a_turn_goes_on_with_new_weights_where_servers_label_tokens(
    policy: Path, tmp_path: Path
) -> None:
    (stub,) = make_stubs(policy, "labels", 1)
    with serving([stub], policy, tmp_path, "labels") as run:
        with in_flight(run, stub, 2) as completions:
            run.update()
            run.update()
        (completion,) = completions
        assert completion.versions is not None
        assert completion.versions[:2] == [0, 0] and set(completion.versions[2:]) == {2}
        run.check(prompt_of(run), completion)
        assert complete(run).versions == [2] * len(complete(run).token_ids)
        assert not stub.is_paused


def test_a_turn_keeps_its_adapter_which_is_removed_only_behind_it(
    policy: Path, tmp_path: Path
) -> None:
    (stub,) = make_stubs(policy, "adapters", 1)
    with serving([stub], policy, tmp_path, "adapters") as run:
        with in_flight(run, stub) as completions:
            run.update()
            run.update()
            assert sorted(name[-6:] for name in stub.adapters) == ["000000", "000002"]
            folders = {path.name[:13] for path in run.sampler.folder.iterdir()}
            assert folders == {"update-000000", "update-000002"}
            new = complete(run)
            assert new.versions == [2] * len(new.token_ids)
        (completion,) = completions
        assert completion.versions == [0] * len(completion.token_ids)
        run.check(prompt_of(run), completion)
        wait_until(lambda: [name[-6:] for name in stub.adapters] == ["000002"])
        wait_until(lambda: len(list(run.sampler.folder.iterdir())) == 1)


def test_new_weights_wait_for_turns_where_servers_do_not_label_tokens(
    policy: Path, tmp_path: Path
) -> None:
    (stub,) = make_stubs(policy, "drained", 1)
    with serving([stub], policy, tmp_path, "drained") as run:
        reloads = stub.calls["/collective_rpc"]
        with in_flight(run, stub) as completions:
            syncing = during(run.update)
            wait_until(lambda: run.sampler._pool.servers[0].is_changing)
            later: list[SampledCompletion] = []
            waiting = during(lambda: later.append(complete(run)))
            wait_until(lambda: run.sampler._pool._unowned)
            assert stub.calls["/collective_rpc"] == reloads and syncing.is_alive()
        syncing.join()
        waiting.join()
        (completion,) = completions
        assert completion.versions == [0] * len(completion.token_ids)
        assert later[0].versions == [1] * len(later[0].token_ids)
        run.check(prompt_of(run), completion)
        run.check(prompt_of(run), later[0])


def test_a_turn_whose_adapter_is_gone_is_made_anew_with_the_current_one(
    policy: Path, tmp_path: Path
) -> None:
    (stub,) = make_stubs(policy, "adapters", 1)
    with serving([stub], policy, tmp_path, "adapters") as run:
        with in_flight(run, stub) as completions:
            run.update()
            stub.restart()
        (completion,) = completions
        assert completion.versions == [1] * len(completion.token_ids)
        run.check(prompt_of(run), completion)


def test_a_reload_that_fails_half_way_leaves_no_token_with_a_wrong_version(
    policy: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stubs = make_stubs(policy, "labels")
    with serving(stubs, policy, tmp_path, "labels") as run:

        def fail() -> None:
            raise RuntimeError("out of memory")

        with in_flight(run, stubs[0], 2) as completions:
            stubs[0].mid_reload = fail
            run.update()
            wait_until(lambda: not stubs[0].is_paused)
        (completion,) = completions  # sampled again by the other one, and with its weights
        assert completion.versions == [1] * len(completion.token_ids)
        run.check(prompt_of(run), completion)
        assert f"{run.urls[0]} is left out: /collective_rpc: HTTP 500" in caplog.text
        stubs[0].mid_reload = lambda: None
        wait_until(lambda: len(run.sampler._pool.up) == 2)
        assert stubs[0].version == stubs[1].version


@EACH_MODE
def test_a_server_that_does_not_take_weights_gets_the_current_ones_when_it_returns(
    policy: Path, tmp_path: Path, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    stubs = make_stubs(policy, mode)
    with serving(stubs, policy, tmp_path, mode) as run:
        stubs[1].refuses_weights = 503
        run.update()
        assert f"{run.urls[1]} is left out: " in caplog.text and "HTTP 503" in caplog.text
        run.update()
        for _ in range(3):
            run.check(prompt_of(run), complete(run))
        assert complete(run).versions == [2] * len(complete(run).token_ids)
        stubs[1].refuses_weights = None
        wait_until(lambda: len(run.sampler._pool.up) == 2)
        stubs[0].kill()
        assert complete(run).versions == [2] * len(complete(run).token_ids)
        run.check(prompt_of(run), complete(run))


@EACH_MODE
def test_weights_that_no_server_takes_are_an_error_in_time(
    policy: Path, tmp_path: Path, mode: str
) -> None:
    stubs = make_stubs(policy, mode)
    with serving(stubs, policy, tmp_path, mode) as run:
        for stub in stubs:
            stub.refuses_weights = 400
        with pytest.raises(UserError, match="no weights now"):
            run.update()
        for stub in stubs:
            stub.refuses_weights = 503
        run.sampler.cfg = run.sampler.cfg.model_copy(update={"timeout_s": 1.0})
        with pytest.raises(UserError, match="timeout_s = 1 second"):
            run.update()


def test_a_server_that_is_slow_to_take_weights_is_left_out(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(vllm_sync, "CHECK_S", 2.0)
    stubs = make_stubs(policy, "labels")
    with serving(stubs, policy, tmp_path, "labels") as run:
        go = threading.Event()

        def be_slow() -> None:
            go.wait(PATIENCE_S)

        stubs[0].mid_reload = be_slow
        run.update()
        assert f"{run.urls[0]} is left out: it did not take new weights" in caplog.text
        run.check(prompt_of(run), complete(run))
        go.set()
        wait_until(lambda: len(run.sampler._pool.up) == 2)
        assert not stubs[0].is_paused and stubs[0].version == stubs[1].version


@pytest.mark.parametrize("times", [2, pytest.param(5, marks=pytest.mark.slow)])
@EACH_MODE
def test_weights_change_all_the_time_while_episodes_run(
    policy: Path, tmp_path: Path, mode: str, times: int
) -> None:
    stubs = make_stubs(policy, mode)
    done = threading.Event()
    with serving(stubs, policy, tmp_path, mode, concurrency=4) as run:
        prompts = [seeded([3, 4 + n % 5, 4 + n // 5, 2], n) for n in range(20)]

        async def work() -> list[SampledCompletion]:
            return await asyncio.gather(
                *(run.sampler.complete(p, GEN_CFG, with_logprobs=True) for p in prompts * times)
            )

        completions: list[SampledCompletion] = []

        def sample() -> None:
            try:
                completions.extend(asyncio.run(work()))
            finally:
                done.set()

        thread = during(sample)
        while not done.is_set():
            run.update()
        thread.join()
        assert len(completions) == 20 * times
        for prompt, completion in zip(prompts * times, completions, strict=True):
            run.check(prompt, completion)
        assert len({v for c in completions for v in c.versions or ()}) > 1
        assert run.sampler.stats() == {"sampler_servers": 2, "sampler_moved": 0} | NO_FAULTS
    assert not any(stub.adapters for stub in stubs)
    assert not list((tmp_path / "sync").iterdir())
