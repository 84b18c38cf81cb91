"""Kill the synthesis driver at random moments with a teacher that fails at times, and resume it.

The export must be the same as without kills, and no answer that was given may be requested again.
The teacher records every request. A run without kills gives the bytes to compare with.

    python -m bench.chaos.synth [--quick]
"""

from __future__ import annotations

import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from bench.common import ROOT, WORK, Measurement, quiet_logs, run, service
from scorekit.processes import end_with_parent
from synth.execution.clients import EASY
from testing.corpus import export_bytes, write_corpus
from testing.openai_server import FakeOpenAI

CONCURRENCY = 8
#: Exit codes of a run whose teacher failed: stopped after ten failures in a row, or left open.
FAILED = (1, 3)
WORDS = ("문장은", "번역된", "하나의", "오늘", "매우", "작은", "좋은", "말뭉치", "숫자", "그리고")


def questions(quick: bool) -> Iterator[Measurement]:
    """Yield all measurements of this script."""
    yield from driver_killed(kills=4 if quick else 100, sources=30 if quick else 300)


def driver_killed(kills: int, sources: int, folder: Path | None = None) -> Iterator[Measurement]:
    """Compare the export after many kills with the undisturbed one, and count repeated
    requests.
    """
    folder = folder or WORK / "chaos-synth"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_corpus(folder / "corpus.jsonl.gz", sources)
    teacher = FakeOpenAI(respond=_slowly_translate)
    with ExitStack() as stack:
        teacher_url = stack.enter_context(teacher.running())
        flags = ("--cache", "memory", "--log-level", "error")
        _, metricx = stack.enter_context(service("scorekit.server.fake", *flags))
        _, judge = stack.enter_context(service("services.judge", *flags))
        configs = {
            name: write_config(folder, name, sources, teacher_url, teacher.model, metricx, judge)
            for name in ("undisturbed", "killed")
        }
        started = time.monotonic()
        _finish(configs["undisturbed"])
        seconds = time.monotonic() - started
        asked_once = len(teacher.requests)
        teacher.forget()
        stages, runs = kill_many(configs["killed"], kills, seconds, teacher)
    repeated = sum(count - 1 for count_by_request in runs for count in count_by_request.values())
    outputs = [export_bytes(folder / name) for name in ("undisturbed", "killed")]
    different = [n for n in outputs[0] if outputs[0][n] != outputs[1].get(n)]
    details = {
        "stages_killed_in": dict(stages),
        "seconds_undisturbed": seconds,
        "requests_undisturbed": asked_once,
        "requests_killed": [sum(count_by_request.values()) for count_by_request in runs],
    }
    yield Measurement(
        f"files of the export that differ after {kills} kill -9 of the driver",
        len(different) + (set(outputs[0]) != set(outputs[1])),
        "files",
        at_most=0,
        details=details | {"files": sorted(outputs[0])},
    )
    yield Measurement(
        "teacher requests on their way at a kill that were answered and sent again",
        repeated / kills,
        "requests",
        at_most=CONCURRENCY,
        details={"sent_again": repeated, "in_flight_budget": CONCURRENCY},
    )


def kill_many(
    config: Path, kills: int, seconds: float, teacher: FakeOpenAI
) -> tuple[Counter[str], list[Counter[str]]]:
    """Start, wait, kill -9, start again; at last let it finish.

    Returns the stages that were hit, and for each run from its beginning to its end how often each
    request was answered (several runs, where one came through before all kills were done).
    """
    rng = random.Random(kills)
    hit: Counter[str] = Counter()
    runs: list[Counter[str]] = []
    done = 0
    while done < kills:
        if done % 3 == 2:
            teacher.well()  # or what earlier runs have not used up would pile up
            teacher.fail(500, times=rng.randint(1, 30))
        process = subprocess.Popen(
            _command(config),
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            preexec_fn=end_with_parent(),
        )
        # By turns after so many seconds, and after so many requests: starting takes most seconds.
        if done % 2:
            min_requests = len(teacher.requests) + rng.randint(1, 40)
            _wait(process, partial(_has_asked, teacher, min_requests))
        else:
            ends = time.monotonic() + rng.uniform(0.5, seconds)
            _wait(process, partial(_is_past, ends))
        if process.poll() is not None:
            _, output = process.communicate()
            if process.returncode in FAILED:
                continue
            assert process.returncode == 0, output.decode()[-2000:]
            shutil.rmtree(_out_dir(config))  # it came through: the rest hits a new run
            runs.append(_answer(teacher))
            teacher.forget()
            continue
        process.send_signal(signal.SIGKILL)
        process.wait()
        done += 1
        hit[_stage_in_work(_out_dir(config))] += 1
    teacher.well()
    _finish(config)
    runs.append(_answer(teacher))
    return hit, runs


def _has_asked(teacher: FakeOpenAI, min_requests: int) -> bool:
    return len(teacher.requests) >= min_requests


def _is_past(ends: float) -> bool:
    return time.monotonic() > ends


def _answer(teacher: FakeOpenAI) -> Counter[str]:
    """Return how often each request was answered, without health checks."""
    return Counter(
        r.id
        for r in teacher.requests
        if r.status == 200 and not r.body["messages"][-1]["content"].endswith(EASY)
    )


def _wait(process: subprocess.Popen[bytes], until: Callable[[], bool]) -> None:
    while process.poll() is None and not until():
        time.sleep(0.005)


def _finish(config: Path) -> None:
    for _ in range(20):
        done = subprocess.run(
            _command(config), cwd=ROOT, capture_output=True, text=True, timeout=1200
        )
        if done.returncode not in FAILED:
            break
    assert done.returncode == 0, done.stderr[-2000:]


def _command(config: Path) -> list[str]:
    return [
        sys.executable,
        "-m",
        "synth",
        "run",
        "--config",
        str(config),
        "--stage",
        "all",
        "--resume",
    ]


def _out_dir(config: Path) -> Path:
    return Path(yaml.safe_load(config.read_text())["run"]["out_dir"])


def _stage_in_work(out_dir: Path) -> str:
    folders = sorted(out_dir.glob("stages/*"), key=lambda f: f.stat().st_mtime)
    return folders[-1].name if folders else "before the first"


def write_config(
    folder: Path, name: str, sources: int, teacher: str, model: str, metricx: str, judge: str
) -> Path:
    """Return a config of all seven stages."""
    config: dict[str, Any] = {
        "run": {"out_dir": str(folder / name), "shard_records": max(5, sources // 4)},
        "data": {
            "files": [str(folder / "corpus.jsonl.gz")],
            "src_lang": "eng",
            "tgt_lang": "kor",
            "sample_pool_size": sources,
            "target_examples_total": sources // 2,
        },
        "teacher": {
            "base_url": teacher,
            "model": model,
            "max_concurrency": CONCURRENCY,
            "retry": {"max_attempts": 2, "backoff_s": [0.1]},
        },
        "final_generation": {
            "num_candidates": 8,
            "store_top_k": 3,
            "blob": {"enabled": True, "blob_ratio": 0.3},
        },
        "metricx": {"url": metricx, "checkpoint": "fake-metricx"},
        "filters": {
            "llm_judge": {"url": judge, "fail_policy": "permissive"},
            "on_reject": "next_best",
        },
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def _slowly_translate(body: dict[str, Any], seed: int | None) -> str:
    """Return Korean-looking words as a function of the request.

    The text has the numbers and about the length of the source. The call is slow enough to be
    killed before its end.
    """
    time.sleep(0.003)
    source = body["messages"][-1]["content"].split("Text:\n")[-1]
    rng = random.Random(f"{source}|{body['temperature']}|{seed}")
    lines = []
    for line in source.split("\n"):
        words = rng.sample(WORDS, 8) + re.findall(r"\d+", line)
        rng.shuffle(words)
        lines.append(" ".join(words) + " 끝난다." if line.strip() else line)
    return "\n".join(lines)


if __name__ == "__main__":
    quiet_logs()
    run("chaos_synth", __doc__, questions)
