"""Does a run of several samplers lose or pay for anything when one of them is killed midway?

A searcher is really trained, by one process and by two, with generation that runs ahead
(`max_staleness` 2). Its two samplers are servers in processes of their own. One gets `kill -9`
while it generates, and a new one starts on its port some updates later. Then everything is counted:
episodes, rewards, the generator's calls, and what the log says.

    python -m bench.scaling.killed [--quick]
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from bench.common import Measurement, quiet_logs, run
from bench.scaling.real_run import (
    CONFIG,
    FOLDER,
    GENERATOR,
    JUDGE,
    RETRIEVER,
    EpisodeLengths,
    answer_half_right,
    config_values,
    make_index,
    make_script,
    make_tokenizer,
    services,
    without_plan,
)
from bench.scaling.settings import LearnerSettings, RunSettings, SamplerSettings
from bench.scaling.timed_server import timed_app
from scorekit.processes import end_with_parent, end_worker_with_parent
from scorekit.server.app import create_app
from scorekit.server.settings import ServiceSettings as HttpSettings
from services.retriever.model import RetrieverBackend
from testing.judge import judge_app
from testing.openai_server import FakeOpenAI
from testing.processes import child_environment, free_port
from testing.servers import running_app, wait_ready, wait_until
from trainer.search.trajectories.store import TrajectoryStore

#: Updates after which the sampler is killed, and after which it is started again.
KILLED_AFTER, BACK_AFTER = 3, 6
_PATIENCE_S = 300.0


def questions(quick: bool) -> Iterator[Measurement]:
    """Yield the counts of a run of one process, and of one of two."""
    quiet_logs()
    for ranks in (1, 2):
        yield from _measure(ranks, 9 if quick else 12)


def _measure(ranks: int, updates: int) -> Iterator[Measurement]:
    """Run once, and yield what was lost, what was paid twice, and what the log says."""
    cfg = RunSettings(
        samplers=SamplerSettings(servers=2, step_s=0.02),
        learner=LearnerSettings(load_s=0.05),
        episode=EpisodeLengths().plan,
        **services(0.05, 0.1, 0.05),
        batch_size=4,
        group=4,
        updates=updates,
        max_staleness=2,
    )
    run_dir = FOLDER / f"killed-{ranks}"
    shutil.rmtree(run_dir, ignore_errors=True)
    generator = FakeOpenAI("generator", respond=answer_half_right)
    with _services(generator) as urls, _samplers(cfg) as samplers:
        urls["samplers"] = [url for url, _, _ in samplers]
        errors = _train(cfg, urls, run_dir, ranks, samplers)
    lines = [json.loads(line) for line in (run_dir / "log.jsonl").read_text().splitlines()]
    store = TrajectoryStore(run_dir / "trajectories")
    episodes = list(store.read())
    expected = updates * cfg.batch_episodes
    ids = {(episode.step, episode.trajectory_id) for episode in episodes}
    rewarded = sum(e.reward is not None and e.reward.status == "ok" for e in episodes)
    bodies = Counter(json.dumps(r.body, sort_keys=True) for r in generator.requests)
    name = f"{ranks} process{'es' if ranks > 1 else ''}"
    yield Measurement(
        f"{name}: episodes lost, of {expected}", expected - len(ids), "episodes", at_most=0
    )
    yield Measurement(f"{name}: episodes without a reward", expected - rewarded, "", at_most=0)
    paid = sum(bodies.values()) - len(bodies)
    details = {"calls": sum(bodies.values())}
    yield Measurement(
        f"{name}: generator calls paid twice", paid, "calls", at_most=0, details=details
    )
    oldest = max(line["staleness_max"] for line in lines)
    yield Measurement(f"{name}: oldest token", oldest, "updates", at_most=cfg.max_staleness)
    moved = sum(line["sampler_moved"] for line in lines)
    servers = [line["sampler_servers"] for line in lines]
    yield Measurement(
        f"{name}: turns that the other sampler took over",
        moved,
        "turns",
        details={"sampler_servers": servers},
    )
    loss_lines = [
        line.split(": ", 1)[-1]
        for line in errors.splitlines()
        if "left out" in line or "takes part again" in line
    ]
    yield Measurement(
        f"{name}: lines of the log about the loss and the return",
        len(loss_lines),
        "lines",
        at_least=2,
        details={"lines": loss_lines},
    )


@contextmanager
def _services(generator: FakeOpenAI) -> Iterator[dict[str, Any]]:
    """Start the page retriever, the generator and the judge."""
    service = create_app(RetrieverBackend(make_index()), HttpSettings(cache="memory"), None)
    with ExitStack() as stack:
        apps: list[Any] = [service, generator.app, judge_app()]
        urls = [stack.enter_context(running_app(app)) for app in apps]
        wait_ready(urls[0])
        wait_ready(urls[2])
        yield {RETRIEVER: urls[0], GENERATOR: f"{urls[1]}/v1", JUDGE: urls[2]}


@contextmanager
def _samplers(cfg: RunSettings) -> Iterator[list[Any]]:
    """Start the samplers; yield their URLs, processes, and functions that start them again."""
    script, vocabulary = make_script(cfg), len(make_tokenizer())
    samplers: list[Any] = []

    def start(port: int) -> Any:
        args = (port, without_plan(cfg), script, vocabulary)
        process = get_context("spawn").Process(target=serve_sampler, args=args)
        process.start()
        return process

    try:
        for _ in range(cfg.samplers.servers):
            port = free_port()
            samplers.append(
                [f"http://127.0.0.1:{port}", start(port), lambda port=port: start(port)]
            )
        yield samplers
    finally:
        for _, process, _ in samplers:
            process.kill()
            process.join()


def serve_sampler(port: int, cfg: RunSettings, script: Any, vocabulary: int) -> None:
    """Serve one sampler until this process is killed."""
    import uvicorn

    end_worker_with_parent()
    app = timed_app(cfg.samplers, script, vocabulary, cfg.learner.load_s)
    uvicorn.run(app, port=port, log_level="error")


def _train(
    cfg: RunSettings, urls: dict[str, Any], run_dir: Path, ranks: int, samplers: list[Any]
) -> str:
    """Train, kill a sampler in the middle, start it again, and return what the trainer printed."""
    values = config_values(cfg, urls, run_dir)
    values["generation.vllm.url"] = ",".join(urls["samplers"])
    flags = [part for key, value in values.items() for part in ("--set", f"{key}={value}")]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    arguments = ["-m", "trainer", "train", "--config", str(CONFIG), *flags]
    errors_path = FOLDER / f"killed-{ranks}.txt"
    with errors_path.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *(launch if ranks > 1 else ()), *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=child_environment(),
            preexec_fn=end_with_parent(),
        )
        log = run_dir / "log.jsonl"

        def num_updates() -> int:
            return log.read_bytes().count(b"\n") if log.exists() else 0

        wait_until(lambda: num_updates() >= KILLED_AFTER or process.poll() is not None, _PATIENCE_S)
        samplers[0][1].kill()
        samplers[0][1].join()
        wait_until(lambda: num_updates() >= BACK_AFTER or process.poll() is not None, _PATIENCE_S)
        samplers[0][1] = samplers[0][2]()
        code = process.wait(_PATIENCE_S)
    text = errors_path.read_text(encoding="utf-8", errors="replace")
    assert code == 0, text[-3000:]
    return text


if __name__ == "__main__":
    run("killed_sampler", __doc__, questions)
