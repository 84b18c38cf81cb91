"""Trains and measures the runs of a plan, one after another. What is done is not done again."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.common import ROOT, machine, write_json
from evidence.gain.arms import (
    ARMS,
    COMMON,
    COOLER,
    END_BIAS,
    LONGER,
    PPO_CONFIG,
    ROUND,
    SFT_CONFIG,
    START,
    Plan,
    overrides,
)
from evidence.gain.data import write_sets
from scorekit.digest import digest_files
from scorekit.errors import UserError
from testing.processes import run_module, running_services
from trainer.runs.checkpoints.checkpoint import newest_checkpoint

console = Console(stderr=True, highlight=False)


def processor_seconds() -> float:
    """Return the processor seconds of this process and of all that it started, ended or not."""
    import psutil

    this_process = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    children = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    running = 0.0
    for child in psutil.Process(os.getpid()).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            times = child.cpu_times()
            running += times.user + times.system + times.children_user + times.children_system
    return this_process + children + running


def result_path(plan: Plan, name: str, seed: int) -> Path:
    """Return the file of a run's result."""
    return plan.results / f"{name}-{seed}.json"


def start_digest(start: Path) -> str:
    """Return a digest of the weights of the policy and of the two metrics that all runs share."""
    parts = ("policy", "metricx", "xcomet")
    files = [file for part in parts for file in sorted((start / part).rglob("*"))]
    return digest_files(file for file in files if file.suffix in (".safetensors", ".ckpt"))


def prepare(plan: Plan) -> None:
    """Write the sets and the pairs."""
    write_sets(plan.folder / "sets", plan.direction, plan.size.prompts, plan.size.limit)
    plan.results.mkdir(parents=True, exist_ok=True)


def run_plan(plan: Plan) -> None:
    """Run all that is missing. Raises UserError if the start is not there, or a run fails."""
    if not (plan.start / "policy").is_dir():
        raise UserError(
            f"{plan.start}: no start. Make it: python -m evidence.gain.start policy "
            f"--direction {plan.direction.name}"
        )
    prepare(plan)
    start = start_digest(plan.start)
    missing = [run for run in plan.runs if not is_done(plan, *run, start)]
    if not missing:
        return
    from evidence.gain.measure import Measure

    with contextlib.ExitStack() as stack:
        flags = {name: ("--model", str(plan.start / name)) for name in ("metricx", "xcomet")}
        urls = stack.enter_context(running_services(plan.folder, flags))
        if plan.has_headroom:
            measure_headroom(plan, urls)
        measure = Measure(plan, urls, COMMON)
        stack.callback(measure.close)
        for name, seed in missing:
            run_one(plan, name, seed, start, urls, measure)


def measure_headroom(plan: Plan, urls: dict[str, str]) -> None:
    """Measure what there is to gain from the start; keep how the start was made."""
    for name in ("start", "metrics"):
        if (result := plan.start / f"{name}.json").is_file():
            shutil.copy(result, plan.results)
    out = plan.results / "headroom.json"
    if out.is_file():
        return
    folder = plan.folder / "headroom"
    settings = [*COMMON[1:], f"data.eval={plan.folder}/sets/development.jsonl"]
    settings += [f"policy.path={plan.start / 'policy'}", f"misc.run_dir={folder}", "misc.seed=1"]
    command = ["scorekit", "headroom", "--config", str(PPO_CONFIG)]
    command += ["--samples", str(plan.size.several)]
    for setting in settings:
        command += ["--set", setting]
    run_checked(command, plan.folder / "headroom.log", urls)
    values = json.loads((folder / "headroom.json").read_text(encoding="utf-8"))
    write_json(out, values | {"policy": Path(values["policy"]).name})


def run_checked(command: Sequence[str], log: Path, urls: dict[str, str]) -> None:
    """Run `python -m COMMAND` with the services. Raises UserError with the end of its log."""
    code = run_module(*command, log=log, env={f"{n.upper()}_URL": u for n, u in urls.items()})
    if code:
        tail = log.read_text(encoding="utf-8", errors="replace")[-2000:]
        raise UserError(f"{log.stem}: exit code {code}; the end of {log}:\n{tail}")


def settings_of(plan: Plan, name: str, seed: int) -> list[str]:
    """Return the settings of a run."""
    return overrides(name, seed, plan, policy_of(plan, ARMS[name].start or START, seed))


def is_done(plan: Plan, name: str, seed: int, start: str) -> bool:
    """Return whether the run has a result with these settings.

    start: digest of what all runs start from. Raises UserError if the result is of another start:
    runs of two starts cannot stand in one table.
    """
    path = result_path(plan, name, seed)
    if not path.is_file():
        return False
    recorded: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if recorded.get("start") != start:
        raise UserError(
            f"{path}: is of another start than {plan.start}. "
            f"Move {plan.results} away to run all arms from this one"
        )
    return recorded["settings"] == relative(settings_of(plan, name, seed))


def relative(settings: Sequence[str]) -> list[str]:
    """Return the settings without the path of this checkout."""
    return [setting.replace(f"{ROOT}/", "") for setting in settings]


def policy_of(plan: Plan, name: str, seed: int) -> Path:
    """Return the folder of an arm's policy; where it will be, if it was not trained yet."""
    if name in (START, COOLER, LONGER):
        return plan.start / "policy"
    if name == ROUND:
        stages: list[dict[str, Any]] = json.loads((plan.start / "start.json").read_text())["curve"]
        return plan.start / "sft" / str(stages[-1]["stage"])
    return plan.folder / f"{name}-{seed}" / "policy"


def run_one(
    plan: Plan, name: str, seed: int, start: str, urls: dict[str, str], measure: Any
) -> None:
    """Train and measure a run, and write its result. start: digest of what all runs start from."""
    arm, trained = ARMS[name], plan.folder / f"{name}-{seed}.trained.json"
    settings = settings_of(plan, name, seed)
    spent = {"seconds": 0.0, "processor_seconds": 0.0}
    if arm.kind != "none":
        recorded = json.loads(trained.read_text()) if trained.is_file() else {}
        if (recorded.get("settings"), recorded.get("start")) != (settings, start):
            console.print(f"{arm.title}, seed {seed}")
            recorded = {"settings": settings, "start": start}
            recorded |= train(plan, name, seed, urls, measure)
            write_json(trained, recorded)
        spent = {key: recorded[key] for key in spent}
    started = time.monotonic()
    end_bias = END_BIAS[plan.direction.name] if arm.ends_later else 0.0
    stats = measure.policy(policy_of(plan, name, seed), arm.temperature, end_bias)
    line = {
        "arm": name,
        "seed": seed,
        "start": start,
        "settings": relative(settings),
        "commit": machine()["commit"],
        **spent,
        "measured_in": time.monotonic() - started,
        "sets": stats,
    }
    write_json(result_path(plan, name, seed), line)
    first = stats[plan.sets[0]]
    chrf = sum(first["greedy"]) / first["sources"]
    console.print(
        f"  trained in {spent['seconds']:.0f} s ({spent['processor_seconds']:.0f} processor "
        f"seconds), measured in {line['measured_in']:.0f} s: {plan.sets[0]} chrF {chrf:.2f}, "
        f"BLEU {first['bleu']:.2f}, length {first['length']:.2f}, reward {first['reward']:.3f}"
    )


def train(plan: Plan, name: str, seed: int, urls: dict[str, str], measure: Any) -> dict[str, float]:
    """Train a run in its own process; return its seconds, and processor seconds with services."""
    arm, folder = ARMS[name], plan.folder / f"{name}-{seed}"
    config = PPO_CONFIG if arm.kind == "ppo" else SFT_CONFIG
    command = ["trainer", "train", "--config", str(config)]
    for setting in settings_of(plan, name, seed):
        command += ["--set", setting]
    is_begun = (folder / "config.yaml").is_file()
    if is_begun and arm.kind == "best_of_n":
        command.append("--resume")
    log = plan.folder / f"{name}-{seed}.log"
    with _urls(plan, name, seed, urls, measure) as service_urls:
        started, spent = time.monotonic(), processor_seconds()
        run_checked(command, log, service_urls)
        seconds = {
            "seconds": time.monotonic() - started,
            "processor_seconds": processor_seconds() - spent,
        }
    take_policy(folder if arm.kind == "ppo" else folder / "sft", policy_of(plan, name, seed))
    return seconds


def take_policy(run: Path, to: Path) -> None:
    """Copy the newest policy of a run to a folder, and remove its checkpoints."""
    checkpoint = newest_checkpoint(run / "checkpoints")
    if checkpoint is None:
        raise UserError(f"{run}: has no checkpoint")
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(checkpoint, to, ignore=shutil.ignore_patterns("optimizer*", "*.pt"))
    shutil.rmtree(run / "checkpoints")


@contextlib.contextmanager
def _urls(
    plan: Plan, name: str, seed: int, urls: dict[str, str], measure: Any
) -> Iterator[dict[str, str]]:
    """Yield the addresses of the services; for the control, of those that shuffle."""
    if not ARMS[name].shuffled:
        yield urls
        return
    from evidence.translation.control import shuffled

    with shuffled(urls, measure.pool(plan.start / "policy"), seed) as service_urls:
        yield service_urls
