"""Test when batches are started, and what becomes of their failures."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from testing.servers import wait_until
from trainer.rl.distributed import DistributedContext
from trainer.rl.rollout import Rollout
from trainer.runs.batches import (
    Batch,
    BatchesAhead,
    BatchesInTurn,
    RolloutBuffer,
    open_batches,
)
from trainer.runs.run_log import PhaseTimer


class Collecting:
    """A task whose batches end when the test says so.

    started: the updates whose batch was started, in order.
    blocked: those that wait for `release`.
    version: the number of updates of the sampler's weights.
    """

    def __init__(self, *, blocked: bool = False) -> None:
        self.started: list[int] = []
        self.blocked, self.version = blocked, 0
        self.ends = {update: threading.Event() for update in range(1, 20)}
        self.errors: dict[int, Exception] = {}
        self.missing: dict[int, str] = {}
        self.should_stop: Any = None
        self.num_collectors = 0

    def open_collector(self, world: Any, buffer: Any = None, should_stop: Any = None) -> Any:
        self.should_stop = should_stop
        self.num_collectors += 1
        task = self

        class Collector:
            stop_reason: str | None = None

            def collect(self, sampler: Any, update: int, clock: PhaseTimer) -> Any:
                version = task.version
                task.started.append(update)
                for _ in range(1000 if task.blocked else 0):  # then a failed test ends, too
                    if task.ends[update].wait(0.01):
                        break
                    if should_stop is not None and should_stop():
                        return None
                if update in task.errors:
                    raise task.errors[update]
                self.stop_reason = task.missing.get(update)
                if self.stop_reason is not None:
                    return None
                clock.lap("rollout_s")
                return Batch([rollout(version)], [update], [0])

        return Collector()


def rollout(version: int) -> Rollout:
    return Rollout(
        group=0,
        prompt_input_ids=[1],
        completion_token_ids=[2],
        finish_reason="eos",
        old_logprobs=[-1.0],
        weight_versions=[version],
    )


def opened(task: Collecting, tmp_path: Any, staleness: int, engine: str, done: int = 0) -> Any:
    algorithm = SimpleNamespace(makes_own_logprobs=True)
    rl = SimpleNamespace(
        max_staleness=staleness, num_updates=8, kl_in="loss", chosen_algorithm=algorithm
    )
    cfg = SimpleNamespace(
        rl=rl,
        misc=SimpleNamespace(run_dir=str(tmp_path)),
        generation=SimpleNamespace(engine=engine),
        corrects_importance=True,
    )
    run = SimpleNamespace(
        cfg=cfg,
        done=done,
        world=DistributedContext(torch.device("cpu")),
        sampler=None,
        learner=SimpleNamespace(reference=None),
        shutdown=SimpleNamespace(signal_number=0),
    )
    return open_batches(run, task, task.open_collector(run.world)), run


def test_without_staleness_a_batch_begins_with_its_update(tmp_path):
    task = Collecting()
    batches, _ = opened(task, tmp_path, 0, "vllm")
    assert isinstance(batches, BatchesInTurn)
    for update in range(1, 9):
        batch = batches.take(update, PhaseTimer())
        assert batch.rewards == [update] and task.started == list(range(1, update + 1))
        assert batch.rollouts[0].old_logprobs == [-1.0]  # the collector has set them
    assert not (tmp_path / "buffer").exists()


@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_a_batch_begins_as_soon_as_the_bound_allows_and_not_before(tmp_path, staleness):
    task = Collecting(blocked=True)
    batches, _ = opened(task, tmp_path, staleness, "vllm")
    assert isinstance(batches, BatchesAhead)
    for update in range(1, 9):
        task.version = update - 1
        task.ends[update].set()
        clock = PhaseTimer()
        batch = batches.take(update, clock)
        assert batch.rewards == [update] and {"waited_s", "rollout_s"} <= set(clock.seconds)
        started_at = batch.rollouts[0].weight_versions[0]
        assert started_at == max(0, update - 1 - staleness) and batch.dropped_stale == 0
        due = min(update + staleness, 8)
        wait_until(lambda due=due: len(task.started) == due)
        assert sorted(task.started) == list(range(1, due + 1))
        # the sampler's log-probabilities are kept for the correction
        assert batch.rollouts[0].sampler_logprobs == [-1.0]
    batches.close()


@pytest.mark.parametrize("engine", ["generate", "vllm"])
def test_rollouts_beyond_the_bound_are_not_learned_from(tmp_path, engine):
    task = Collecting()
    task.version = -3  # of a sampler that has missed weights
    batches, _ = opened(task, tmp_path, 2, engine)
    batch = batches.take(1, PhaseTimer())
    assert batch.scored_indices == [] and batch.dropped_stale == 1
    batches.close()


def test_the_batch_of_an_update_is_its_own_whichever_ends_first(tmp_path):
    task = Collecting(blocked=True)
    batches, _ = opened(task, tmp_path, 2, "vllm")
    received: list[int] = []
    reader = threading.Thread(
        target=lambda: received.extend(batches.take(1, PhaseTimer()).rewards), daemon=True
    )
    reader.start()
    task.ends[3].set()
    task.ends[2].set()
    wait_until(lambda: len(task.started) == 3)
    assert received == []
    task.ends[1].set()
    reader.join(10)
    assert received == [1]
    assert batches.take(2, PhaseTimer()).rewards == [2]
    batches.close()


def test_a_process_that_samples_and_learns_collects_in_turn_so_many_updates_early(tmp_path):
    task = Collecting()
    batches, _ = opened(task, tmp_path, 2, "generate")
    for update in range(1, 9):
        task.version = update - 1
        batch = batches.take(update, PhaseTimer())
        assert task.started == list(range(1, min(update + 2, 8) + 1))
        assert batch.rollouts[0].weight_versions == [max(0, update - 3)]


@pytest.mark.parametrize("engine", ["generate", "vllm"])
def test_a_resumed_run_goes_on_after_its_checkpoint(tmp_path, engine):
    buffer = RolloutBuffer(tmp_path, 0)
    for update in (4, 5, 6):
        buffer.append(update, {})
    task = Collecting()
    batches, _ = opened(task, tmp_path, 1, engine, done=5)
    assert [path.name for path in sorted(buffer.folder.iterdir())] == ["update-000006-0.jsonl"]
    assert batches.take(6, PhaseTimer()).rewards == [6]
    batches.saved(6)
    assert not list(buffer.folder.iterdir())
    batches.close()


def test_an_error_of_a_thread_is_raised_at_its_update(tmp_path):
    task = Collecting()
    task.errors[2] = ZeroDivisionError("of batch 2")
    batches, _ = opened(task, tmp_path, 2, "vllm")
    assert batches.take(1, PhaseTimer()).rewards == [1]
    with pytest.raises(ZeroDivisionError, match="of batch 2"):
        batches.take(2, PhaseTimer())
    batches.close()


def test_a_batch_without_rewards_ends_the_run_at_its_update_with_its_reason(tmp_path):
    task = Collecting()
    task.missing[2] = "update 2 has no rewards"
    batches, _ = opened(task, tmp_path, 2, "vllm")
    assert batches.take(1, PhaseTimer()) is not None and batches.stop_reason is None
    assert batches.take(2, PhaseTimer()) is None
    assert batches.stop_reason == "update 2 has no rewards"
    batches.close()


def test_a_signal_ends_all_batches_and_close_ends_the_threads(tmp_path):
    task = Collecting(blocked=True)
    batches, run = opened(task, tmp_path, 2, "vllm")
    run.shutdown.signal_number = 15
    assert batches.take(1, PhaseTimer()) is None and batches.stop_reason is None
    batches.close()
    task = Collecting(blocked=True)
    batches, run = opened(task, tmp_path, 2, "vllm")
    task.ends[1].set()
    assert batches.take(1, PhaseTimer()) is not None
    batches.close()  # batches 2 and 3 still wait
    assert task.should_stop() is True


def test_there_are_no_more_collectors_than_updates(tmp_path):
    task = Collecting()
    batches, _ = opened(task, tmp_path, 100, "vllm", done=5)
    assert task.num_collectors == 1 + 3  # the loop's own, and those of the updates 6 to 8
    for update in (6, 7, 8):
        assert batches.take(update, PhaseTimer()).rewards == [update]
    batches.close()


def test_a_run_whose_staleness_is_0_now_says_what_it_does_not_use(tmp_path, caplog):
    buffer = RolloutBuffer(tmp_path, 0)
    for update in (5, 6, 7):
        buffer.append(update, {})
    batches, _ = opened(Collecting(), tmp_path, 0, "vllm", done=5)
    assert "early for the updates 6, 7 is generated again" in caplog.text
    for update in (6, 7):
        assert update in buffer.updates()
        batches.take(update, PhaseTimer())
        batches.saved(update)
    assert buffer.updates() == []


def test_a_foreign_file_in_the_buffer_is_no_error(tmp_path):
    folder = RolloutBuffer(tmp_path, 0).folder
    folder.mkdir()
    (folder / "update-old.jsonl").write_text("{}\n")
    batches, _ = opened(Collecting(), tmp_path, 2, "vllm")
    batches.close()
    assert (folder / "update-old.jsonl").exists()
