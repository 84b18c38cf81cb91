"""Sizes: every field at its limits, then random legal requests against each service as compose
starts it, within compose's memory. Nothing may kill it, and `/health/live` must go on answering.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from bench.common import ROOT, WORK, Measurement, redis_server, run
from bench.fuzz.texts import BOUNDARIES, Case, random_request
from bench.kit.memory_group import MemoryGroup, memory_group
from scorekit.client import SyncScoringClient
from scorekit.processes import end_with_parent
from testing.processes import free_port

GIB = 2**30
#: Service -> memory and flags, as docker-compose.yml has them.
SERVICES: dict[str, tuple[int, tuple[str, ...]]] = {
    "metricx": (2 * GIB, ("--model", "demo/models/metricx", "--device", "cpu", "--threads", "1")),
    "xcomet": (2 * GIB, ("--model", "demo/models/xcomet", "--device", "cpu", "--threads", "1")),
    "judge": (GIB, ()),
}
CALLERS = 3
#: Statuses that a legal request may have under load, and what a client retries.
EXPECTED = {200, 429, 503, 504}


@dataclass(slots=True)
class Service:
    """A running service.

    group: None if no memory cgroup can be created.
    """

    name: str
    port: int
    process: subprocess.Popen[bytes]
    group: MemoryGroup | None
    limit: int

    def post(self, body: bytes, route: str = "/v1/score") -> tuple[int, bytes]:
        """Send a request and return status and body; status 0 if the connection breaks first."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        try:
            with contextlib.suppress(ConnectionError):  # refused before all was sent: read why
                connection.request("POST", route, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (http.client.HTTPException, OSError):
            return 0, b""
        finally:
            connection.close()

    def peaks(self) -> dict[str, float]:
        """Return the peak memory so far in MB, of the group and of the process itself."""
        with open(f"/proc/{self.process.pid}/status", encoding="ascii") as status:
            line = next(line for line in status if line.startswith("VmHWM:"))
        peak_mb = {"process_mb": int(line.split()[1]) / 1024}
        if self.group is not None:
            peak_mb["group_mb"] = self.group.peak_bytes() / 2**20
        return peak_mb


def questions(quick: bool) -> Iterator[Measurement]:
    """Yield for each service: its limits, 2,000 random requests (200 of more than 5 MB), its
    peak.
    """
    count, large = (60, 6) if quick else (2000, 200)
    for name in SERVICES:
        with redis_server() as redis, running_service(name, redis) as service:
            yield from fuzz(service, count, large)


def fuzz(service: Service, count: int, large: int) -> Iterator[Measurement]:
    """Yield every measurement of one service."""
    name = service.name
    with probing(service.port) as probe:
        wrong = [case.name for case in BOUNDARIES[name]() if not answers_as_said(service, case)]
        yield Measurement(
            f"{name}: fields at 0, 1, limit, limit + 1 answered otherwise than the protocol says",
            len(wrong),
            "",
            at_most=0,
            details={"wrong": wrong, "cases": len(BOUNDARIES[name]())},
        )
        tally = storm(service, count, large)
    code = service.process.poll()
    yield Measurement(
        f"{name}: {count:,} random legal requests, {large} of more than 5 MB: killed",
        int(code is not None),
        "times",
        at_most=0,
        details={"statuses": tally, "exit_code": code},
    )
    odd = sum(n for status, n in tally.items() if int(status) not in EXPECTED)
    yield Measurement(
        "  answered with something else than 200, 429, 503 or 504", odd, "", at_most=0
    )
    report = probe.report()
    yield Measurement(
        "  longest wait for /health/live", report.pop("longest_s"), "s", at_most=1.0, details=report
    )
    peaks = service.peaks() if code is None else {}
    limited = "in a cgroup of it" if service.group else "no memory cgroup can be made here: VmHWM"
    yield Measurement(
        f"  peak memory, of {service.limit // 2**20:,} MB",
        max(peaks.values(), default=0),
        "MB",
        at_most=service.limit / 2**20,
        note=limited,
        details=peaks,
    )


@contextlib.contextmanager
def running_service(name: str, cache: str) -> Iterator[Service]:
    """Start a service as compose does, in a memory cgroup of compose's limit if possible."""
    limit, flags = SERVICES[name]
    WORK.mkdir(parents=True, exist_ok=True)
    port = free_port()
    command = [sys.executable, "-m", f"services.{name}", "--port", f"{port}", "--cache", cache]
    with memory_group(limit) as group, (WORK / f"fuzz-{name}.log").open("wb") as log:
        line = [*command, *flags]
        process = subprocess.Popen(
            group.enter_and_run(*line) if group else line,
            stdout=log,
            stderr=log,
            cwd=ROOT,
            preexec_fn=end_with_parent(),
        )
        try:
            with SyncScoringClient(f"http://127.0.0.1:{port}") as client:
                client.wait_ready(120)
            yield Service(name, port, process, group, limit)
        finally:
            process.terminate()
            try:
                process.wait(90)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def answers_as_said(service: Service, case: Case) -> bool:
    """Return whether the status and the error of the first sample are the expected ones."""
    status, answer = service.post(case.body)
    if status != case.status:
        # Nothing but an early refusal may cut a connection before its answer could be read.
        return status == 0 and case.status == 413
    if status != 200:
        return True
    first = json.loads(answer)["results"][0]
    return case.error_type == (None if first["ok"] else first["error"]["type"])


def storm(service: Service, count: int, large: int) -> dict[str, int]:
    """Send random requests from `CALLERS` callers, and return how often each status came."""
    numbers = list(range(count))
    order = random.Random(11)
    is_large = set(order.sample(numbers, large))
    statuses: Counter[str] = Counter()
    lock = threading.Lock()

    def caller() -> None:
        while service.process.poll() is None:
            with lock:
                if not numbers:
                    return
                number = numbers.pop()
            rng = random.Random(number)
            body = random_request(rng, service.name, number in is_large)
            route = "/v1/score/stream" if rng.random() < 0.2 else "/v1/score"
            status, _ = service.post(body, route)
            with lock:
                statuses[f"{status}"] += 1

    threads = [threading.Thread(target=caller) for _ in range(CALLERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return dict(statuses)


@dataclass(slots=True)
class Probe:
    """A process that requests `/health/live` again and again.

    It is a process because a thread beside the callers' threads would measure their interpreter.
    """

    process: subprocess.Popen[str]
    answer: dict[str, Any] = field(default_factory=dict)

    def report(self) -> dict[str, Any]:
        """Return what the probe measured, once it has ended."""
        return dict(self.answer)


@contextlib.contextmanager
def probing(port: int) -> Iterator[Probe]:
    """Ask until the block ends."""
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.fuzz.probe", f"{port}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        preexec_fn=end_with_parent(),
    )
    probe = Probe(process)
    try:
        yield probe
    finally:
        report, _ = process.communicate("")  # it ends with its input
        probe.answer = json.loads(report)


if __name__ == "__main__":
    run("fuzz_sizes", __doc__, questions)
