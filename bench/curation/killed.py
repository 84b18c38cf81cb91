"""Do the commands of curation leave the same bytes, however often they are killed?

The input is a run of the search demo's small policy, some of whose questions have wrong references.
All commands run on it in order, each as a process. First each runs without interruption. Then each
is started with the same arguments and gets `kill -9` at a random moment, until all kills are used,
and then runs to its end. The results of both are compared file by file. The servers are real and
are not killed: the page index, the demo's generator, the judge, a verifier that makes errors, and a
rewriter.

    python -m bench.curation.killed [--quick]
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench.common import WORK, Measurement, run
from demo.search.generator import create_app
from demo.search.loop.verifier import NAME, Verifying
from demo.search.loop.wrong_references import write_questions
from demo.search.measured_sets import HELD_OUT, service_settings, shared_services
from scorekit.processes import end_with_parent
from testing.openai_server import FakeOpenAI
from testing.processes import child_environment, serving

FOLDER = WORK / "curation_killed"
CONFIG = "configs/search/demo_phase2.yaml"
#: Command -> its flags; {out} is the folder that holds what all of them leave.
COMMANDS = {
    "buckets": "--run {run}",
    "diagnose": "--run {run}",
    "alternatives": "--run {run}",
    "hallucinations": "--run {run}",
    "verify": "--run {run} --set verify.prompts=all --set verify.k=3",
    "focus": "--run {run} --buckets {out}/buckets --verified {out}/verify",
    "budget": "--run {run} --rows {out}/focus",
    "distill": "--run {run} --set distill.repeats=mask --set distill.ended=any",
    "rewrite": "--from {out}/distill",
}
#: Shares of a command's time between which it is killed: before, it only loads its libraries.
_MOMENTS = 0.4, 1.0
_TRIES = 3  # for each kill, at most


def questions(quick: bool) -> Iterator[Measurement]:
    """Yield all measurements."""
    kills, every = (len(COMMANDS), 20) if quick else (36, 5)
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    with _servers() as servers:
        played = _play(servers, every)
        took = {name: _undisturbed(name, played, servers) for name in COMMANDS}
        dice, landed = random.Random(1), dict.fromkeys(COMMANDS, 0)
        for name in COMMANDS:
            for _ in range(_TRIES * kills // len(COMMANDS)):
                moment = took[name] * dice.uniform(*_MOMENTS)
                if _killed(name, played, servers, moment):
                    landed[name] += 1
                else:  # with answers that are paid for it is done sooner
                    took[name] = moment
                if landed[name] >= kills / len(COMMANDS):
                    break
            _to_the_end(name, played, servers)
    for name in COMMANDS:
        expected, other = _files(FOLDER / "whole" / name), _files(FOLDER / "killed" / name)
        wrong = [
            file for file in expected.keys() | other.keys() if expected.get(file) != other.get(file)
        ]
        details = {"kills": landed[name], "files": len(expected), "differ": sorted(wrong)}
        yield Measurement(
            f"{name}: files that differ", len(wrong), "files", at_most=0, details=details
        )
    min_kills = None if quick else 30
    total = sum(landed.values())
    yield Measurement(
        "kill -9 that met a command at work", total, "", at_least=min_kills, details=landed
    )


@contextmanager
def _servers() -> Iterator[dict[str, str]]:
    """Start the servers, and yield the settings that name them."""

    def rephrase(body: dict[str, Any], seed: int | None) -> str:
        sent = json.loads(body["messages"][-1]["content"])
        turns = [{"turn": t["turn"], "thought": f"So: {t['thought']}"} for t in sent["turns"]]
        return json.dumps({"turns": turns})

    rewriter = FakeOpenAI("rewriter", respond=rephrase, records=False)
    with ExitStack() as stack:
        urls = stack.enter_context(shared_services(FOLDER, [HELD_OUT]))[HELD_OUT]
        verifier = stack.enter_context(serving(create_app(name=NAME, answerer=Verifying(seed=1))))
        yield service_settings(urls) | {
            "verify.verifier.base_url": f"{verifier}/v1",
            "verify.verifier.model": NAME,
            "rewrite.rewriter.base_url": stack.enter_context(rewriter.running()),
            "rewrite.rewriter.model": "rewriter",
        }


def _play(servers: dict[str, str], every: int) -> Path:
    """Play a run of two updates and return its folder."""
    write_questions(FOLDER / "questions.jsonl", every, 1)
    settings = {"data.train": FOLDER / "questions.jsonl", "rl.num_updates": 2, "rl.batch_size": 12}
    settings |= {"misc.run_dir": FOLDER / "run", "data.eval": "null"}
    settings |= {
        key: url for key, url in servers.items() if key.startswith(("retriever", "answering"))
    }
    flags = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "trainer", "train", "--config", CONFIG, *flags]
    subprocess.run(command, check=True, env=child_environment(), capture_output=True)
    return FOLDER / "run"


def _start(
    name: str, kind: str, played: Path, servers: dict[str, str], *more: str
) -> subprocess.Popen[bytes]:
    out = FOLDER / kind
    out.mkdir(exist_ok=True)
    flags = COMMANDS[name].format(run=played, out=out).split()
    asks = name in ("alternatives", "hallucinations", "verify", "rewrite")
    flags += [
        part for key, value in servers.items() if asks for part in ("--set", f"{key}={value}")
    ]
    command = [sys.executable, "-m", "trainer", "search", name, *flags, "--out", str(out / name)]
    with (FOLDER / f"{kind}.log").open("ab") as log:
        return subprocess.Popen(
            [*command, *more],
            stdout=log,
            stderr=log,
            env=child_environment(),
            preexec_fn=end_with_parent(),
        )


def _undisturbed(name: str, played: Path, servers: dict[str, str]) -> float:
    """Run a command without kills and return its seconds."""
    started = time.monotonic()
    _wait_for_exit(name, _start(name, "whole", played, servers))
    return time.monotonic() - started


def _killed(name: str, played: Path, servers: dict[str, str], after_s: float) -> bool:
    """Kill a command after some seconds, and return whether it was still running."""
    process = _start(name, "killed", played, servers, "--overwrite")
    try:
        process.wait(after_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return True
    _wait_for_exit(name, process)
    return False


def _to_the_end(name: str, played: Path, servers: dict[str, str]) -> None:
    _wait_for_exit(name, _start(name, "killed", played, servers, "--overwrite"))


def _wait_for_exit(name: str, process: subprocess.Popen[bytes]) -> None:
    if code := process.wait():
        raise RuntimeError(f"{name} ended with exit code {code}: see {FOLDER}/*.log")


def _files(folder: Path) -> dict[str, bytes]:
    """Return bytes by file name. The path of the folder's parent is replaced, so that folders
    compare equal.
    """
    parent, shared = str(folder.parent).encode(), b"OUT"
    return {
        str(path.relative_to(folder)): path.read_bytes().replace(parent, shared)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


if __name__ == "__main__":
    run("curation_killed", __doc__, questions)
