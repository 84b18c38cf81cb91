"""Test that the processes of a barrier all pass it, or none."""

from __future__ import annotations

import random
import threading
import time

import pytest
from torch.distributed import HashStore, distributed_c10d

from trainer.rl.barrier import MonitoredBarrier, ProcessStalled


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> HashStore:
    shared = HashStore()
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: shared)
    return shared


def barriers(size: int, name: str = "thread 0", patience_s: float = 5) -> list[MonitoredBarrier]:
    """Return the barriers of all processes, each with counts of its own."""
    processes: list[MonitoredBarrier] = []
    for rank in range(size):
        of_process = type(f"OfProcess{rank}", (MonitoredBarrier,), {"_numbers": {}})
        processes.append(of_process(rank, size, patience_s, name))
    return processes


def outcomes(processes: list[MonitoredBarrier], delays: list[float]) -> list[bool]:
    """Let all processes come, each after a delay, and return whether they passed."""
    passed = [False] * len(processes)

    def come(rank: int) -> None:
        time.sleep(delays[rank])
        try:
            processes[rank].wait()
            passed[rank] = True
        except ProcessStalled:
            pass

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(len(processes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return passed


@pytest.mark.parametrize("size", [2, 3])
def test_all_pass_again_and_again(size):
    processes, moments = barriers(size), random.Random(0)
    for _ in range(30):
        assert (
            outcomes(processes, [moments.uniform(0, 0.002) for _ in range(size)]) == [True] * size
        )


@pytest.mark.parametrize("size", [2, 3])
def test_if_one_gives_up_all_do_or_none(size):
    moments = random.Random(1)
    for number in range(60):
        processes = barriers(size, f"thread {number}")
        closing = threading.Timer(moments.uniform(0, 0.003), processes[number % size].close)
        closing.start()
        passed = outcomes(processes, [moments.uniform(0, 0.003) for _ in range(size)])
        closing.join()
        # Which of the two happens depends on the machine; a mixture never does.
        assert len(set(passed)) == 1, passed


@pytest.mark.parametrize("size", [2, 3])
def test_one_that_gives_up_before_the_others_come_stops_all(size):
    processes = barriers(size)
    processes[0].close()
    assert outcomes(processes, [0.0] * size) == [False] * size


def test_one_that_comes_after_another_gave_up_gives_up_at_once():
    first, second = barriers(2)
    closing = threading.Timer(0.05, first.close)
    closing.start()
    for process in (first, second):
        with pytest.raises(ProcessStalled, match="of 2 has waited for 0 s"):
            process.wait()
    closing.join()


def test_patience_ends_the_wait_of_all():
    first, second = barriers(2, patience_s=0.05)
    with pytest.raises(ProcessStalled, match=r"process 0 of 2 .* \(process 1 is at 'the start'"):
        first.wait()
    with pytest.raises(ProcessStalled):
        second.wait()
