"""Check what a kill -9 costs: the calls in flight of the killed process, and no more."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from scorekit.errors import UserError
from scorekit.paid.account import ApiUsage
from scorekit.paid.store import spent_in
from testing.redis_process import running_redis
from testing.servers import wait_until
from tests.kits import forked
from tests.kits.paid.paying import IN_FLIGHT, LIMIT, SPACE, key_of, open_quick

COUNT, NO_CAP = 120, 10_000
SERVER = ("--appendonly", "yes", "--appendfsync", "always")


@pytest.fixture(params=["sqlite", "redis"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "sqlite":
        yield str(tmp_path / "answers.sqlite")
        return
    with running_redis(*SERVER) as redis:
        yield redis.url


def start(location: str, rank: int, log: Path, cap: int = NO_CAP) -> forked.Popen:
    command = [sys.executable, "-m", "tests.kits.paid.paying", location, str(rank), str(COUNT)]
    process = forked.Popen(
        [*command, str(cap), str(log)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "open\n"
    return process


def calls(log: Path) -> Counter[int]:
    """Return how often the server was asked for each answer."""
    return Counter(int(line.split()[1]) for line in log.read_text().splitlines())


def started(location: str, log: Path, cap: int = NO_CAP, ranks: int = 3) -> list[forked.Popen]:
    """Start the processes of a run, the first before the others."""
    log.touch()
    processes = [start(location, rank, log, cap) for rank in range(ranks)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("ask\n")
        process.stdin.flush()
    return processes


def answers_of(processes: list[forked.Popen]) -> list[set[int]]:
    """Return the answers that each process has printed."""
    printed = []
    for process in processes:
        out, _ = process.communicate()
        printed.append({int(line) for line in out.splitlines(keepends=True) if line.endswith("\n")})
    return printed


def stored(location: str) -> dict[bytes, int]:
    async def read() -> dict[bytes, int]:
        store = open_quick(location, "reader")
        answers = await store.get([key_of(number) for number in range(COUNT)])
        await store.close()
        return answers

    return asyncio.run(read())


def test_the_others_go_on_when_one_process_is_killed(location: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    processes = started(location, log)
    wait_until(lambda: len(log.read_text().splitlines()) >= 40)
    processes[1].kill()
    printed = answers_of(processes)
    assert printed[0] == printed[2] == set(range(COUNT))
    counts = calls(log)
    assert set(counts) == set(range(COUNT))
    assert sum(counts.values()) - COUNT <= IN_FLIGHT
    assert all(counts[number] == 1 for number in printed[1])
    assert spent_in(location, SPACE) == ApiUsage(calls=COUNT, prompt_tokens=COUNT)


def test_a_run_that_is_killed_repeats_its_calls_in_flight_alone(
    location: str, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    processes = started(location, log)
    wait_until(lambda: len(log.read_text().splitlines()) >= 40)
    for process in processes:
        process.kill()
    had = set.union(*answers_of(processes))
    printed = answers_of(started(location, log, ranks=2))
    assert printed == [set(range(COUNT))] * 2
    counts = calls(log)
    assert all(counts[number] == 1 for number in had)
    assert sum(counts.values()) - COUNT <= 3 * IN_FLIGHT
    assert spent_in(location, SPACE).calls == len(stored(location)) == COUNT


def test_the_cap_holds_when_a_process_is_killed(location: str, tmp_path: Path) -> None:
    log, cap = tmp_path / "log", 41
    processes = started(location, log, cap)
    wait_until(lambda: len(log.read_text().splitlines()) >= 15)
    processes[1].kill()
    answers_of(processes)
    spent = spent_in(location, SPACE).prompt_tokens
    # The money of the killed process's calls is free again; what it had paid stays unknown.
    assert cap - LIMIT < spent <= cap
    assert sum(calls(log).values()) <= spent + IN_FLIGHT
    answers_of(started_again := started(location, log, cap, ranks=1))
    assert started_again[0].returncode == 0
    assert spent_in(location, SPACE).prompt_tokens == spent


def test_a_full_disk_ends_a_run_and_loses_no_stored_answer(tmp_path: Path) -> None:
    location, log = str(tmp_path / "answers.sqlite"), tmp_path / "log"
    command = [sys.executable, "-m", "tests.kits.disk.full", "400000", "tests.kits.paid.paying"]
    process = forked.Popen(
        [*command, location, "0", str(COUNT), str(NO_CAP), str(log)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    out, errors = process.communicate()
    assert process.returncode and "Free disk space, or name another file" in errors
    had = {key_of(int(line)) for line in out.split()[1:]}
    assert had and had <= stored(location).keys()
    answers_of(started(location, log, ranks=1))
    counts = calls(log)
    assert len(stored(location)) == COUNT
    assert sum(counts.values()) - COUNT <= 2 * IN_FLIGHT + 1
    assert all(counts[number] == 1 for number in range(COUNT) if key_of(number) in had)


def test_a_network_file_system_without_locks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fcntl.flock", lambda *_: None)  # every lock is free
    with pytest.raises(UserError, match=r"locks have no effect .* or name a Redis"):
        open_quick(str(tmp_path / "answers.sqlite"), "run")
