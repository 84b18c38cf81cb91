"""Trains and measures the runs of a plan, one after another. What is done is not done again."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.common import machine, write_json
from demo.search.generator import NAME as READING
from demo.search.loop.knowing import NAME as KNOWING
from demo.search.measured_sets import HELD_OUT, SETS, services_of_set
from evidence.gain.runs import processor_seconds, run_checked
from evidence.search.arms import (
    ARMS,
    CONFIG,
    MEASURED,
    POLICY,
    YARDSTICK,
    Plan,
    settings_of,
)
from evidence.search.summary import curves, stats_of
from scorekit.config import load_config
from scorekit.digest import digest_files
from scorekit.errors import UserError
from scorekit.files import write_atomic
from testing.processes import running_service
from trainer.runs.checkpoints.checkpoint import checkpoints
from trainer.runs.run_log import read_jsonl
from trainer.search.config import SearchConfig

#: Of a set -> settings that name its services.
Services = Mapping[str, Sequence[str]]
console = Console(stderr=True, highlight=False)


def services_of(
    urls: Mapping[str, Mapping[str, str]], folder: Path, *, knows: bool = False
) -> Services:
    """Return the settings that name the services of each set.

    urls: by set, the URLs of its retriever, its judge, and of both generators.
    knows: take the generator that knows half of the answers by heart.
    """
    name = KNOWING if knows else READING
    endings = {name: measured.ending for name, measured in (SETS | MEASURED).items()}
    return {
        set_name: (
            f"retriever.url={set_urls['retriever']}",
            f"answering.judge.url={set_urls['judge']}",
            f"answering.generator.base_url={set_urls[name]}/v1",
            f"answering.generator.model={name}",
            f"answering.answers={folder / f'answers{endings[set_name]}.sqlite'}",
        )
        for set_name, set_urls in urls.items()
    }


@contextmanager
def open_services(plan: Plan) -> Iterator[Services]:
    """Start the index of each measured set and of training, the judge, and the generators."""
    folder = plan.folder
    with ExitStack() as running:
        judge = running.enter_context(running_service("judge", folder))
        urls = {
            name: {"judge": judge, **services_of_set(folder, MEASURED[name], running)}
            for name in dict.fromkeys((*plan.sets, HELD_OUT))
        }
        yield services_of(urls, folder)


def start_digest() -> str:
    """Return a digest of the weights that all runs start from."""
    return digest_files([POLICY / "model.safetensors"])


def result_path(plan: Plan, name: str, seed: int) -> Path:
    """Return the file of a run's result."""
    return plan.results / f"{name}-{seed}.json"


def is_done(plan: Plan, name: str, seed: int) -> bool:
    """Return whether a run has a result with these settings.

    Raises UserError if the result is of another start: they cannot stand in one table.
    """
    path = result_path(plan, name, seed)
    if not path.is_file():
        return False
    recorded = json.loads(path.read_text(encoding="utf-8"))
    if recorded["start"] != start_digest():
        raise UserError(f"{path}: is of another start than {POLICY}. Move {plan.results} away")
    return bool(recorded["settings"] == settings_of(plan, name, seed))


def run_plan(plan: Plan) -> None:
    """Run all that is missing; a run that was interrupted begins anew."""
    plan.folder.mkdir(parents=True, exist_ok=True)
    missing = [run for run in plan.runs if not is_done(plan, *run)]
    if not missing:
        return
    with open_services(plan) as services:
        for name, seed in missing:
            started = time.monotonic()
            run_one(plan, name, seed, services)
            seconds = time.monotonic() - started
            console.print(f"{ARMS[name].title}, seed {seed}: {seconds:.0f} s")


def run_one(plan: Plan, name: str, seed: int, services: Services) -> None:
    """Train what is missing of a run, measure it, and write its result."""
    folder, settings = plan.folder / f"{name}-{seed}", settings_of(plan, name, seed)
    done, before = folder / "run.json", machine()
    trained: dict[str, Any] = {"settings": [], "processor_seconds": 0.0}
    if ARMS[name].kind != "none":
        if done.is_file():
            trained = json.loads(done.read_text("utf-8"))
        if trained["settings"] != settings:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            spent = processor_seconds()
            train(name, settings, folder, services[HELD_OUT])
            trained = {"settings": settings, "processor_seconds": processor_seconds() - spent}
            write_atomic(done, json.dumps(trained))
    spent, sets = processor_seconds(), {}
    for set_name in plan.sets:
        out = folder / f"measured{MEASURED[set_name].ending}.jsonl"
        measured = [*YARDSTICK, "rollout.deterministic=true", *services[set_name]]
        questions = MEASURED[set_name].questions
        measure_policy(CONFIG, measured, policy_of(folder, name), questions, out, plan.limit)
        sets[set_name] = stats_of(read_jsonl(out))
        shutil.rmtree(out.with_suffix(""))
    log = folder / "train/log.jsonl"
    write_json(
        result_path(plan, name, seed),
        {
            "arm": name,
            "seed": seed,
            "start": start_digest(),
            "settings": settings,
            "commit": before["commit"],
            "processor_seconds": round(trained["processor_seconds"], 1),
            "measuring_seconds": round(processor_seconds() - spent, 1),
            "sets": sets,
            "by_update": curves(read_jsonl(log)) if log.is_file() else {},
        },
    )


def policy_of(folder: Path, name: str) -> Path:
    """Return the policy that a run left. Raises UserError if there is none."""
    if ARMS[name].kind == "none":
        return POLICY
    policy = next(iter(checkpoints(folder / "train/checkpoints")), None)
    if ARMS[name].kind == "sft":
        policy = folder / "policy" if (folder / "policy").is_dir() else None
    if policy is None:
        raise UserError(f"{folder}: no policy to measure; remove it to train anew")
    return policy


def train(name: str, settings: Sequence[str], folder: Path, services: Sequence[str]) -> None:
    """Train an arm on the documents and questions of training, by RL or as its start was."""
    if ARMS[name].kind == "sft":
        command = ["demo.train.search.policy", "--start", str(POLICY), "--query-steps=20"]
        command += ["--rate=1e-3", f"--out={folder / 'policy'}", *settings]
        run_checked(command, folder / "sft.log", {})
        return
    from evidence.search.control import dealing
    from trainer.search.data import load_train
    from trainer.search.training.train import run_search

    paths = [f"misc.run_dir={folder / 'train'}", f"policy.path={POLICY}"]
    cfg = load_config(SearchConfig, CONFIG, [*settings, *services, *paths])
    with dealing(ARMS[name].dealt):
        artifacts = run_search(load_train(cfg), {}, cfg)
    if artifacts.stopped or artifacts.checkpoint is None:
        raise UserError(f"{folder}: {artifacts.stopped or 'no checkpoint'}")
    for state in folder.glob("train/checkpoints/*/optimizer*"):
        state.unlink()
    shutil.rmtree(folder / "train/trajectories", ignore_errors=True)


def measure_policy(
    config: Path,
    settings: Sequence[str],
    policy: Path,
    questions: Path,
    out: Path,
    limit: int | None = None,
) -> None:
    """Play an episode of each question, as `eval` says; write a line of stats for each.

    limit: of the questions. The episodes themselves are kept in a folder beside `out`.
    """
    from trainer.search.data import load_held_out
    from trainer.search.rollout.episode_runner import EpisodeRunner
    from trainer.search.rollout.sampled import local_policy
    from trainer.search.services import open_services as met
    from trainer.search.trajectories.store import FOLDER, TrajectoryStore

    folder = out.with_suffix("")
    shutil.rmtree(folder, ignore_errors=True)
    run_settings = [f"misc.run_dir={folder}", f"policy.path={policy}", "misc.threads=1"]
    run_settings += [f"data.eval={questions}"]
    cfg = load_config(SearchConfig, config, [*settings, *run_settings])
    (held_out,) = load_held_out(cfg).values()
    store = TrajectoryStore(folder / FOLDER, f"{out.parent.name}-{out.stem}-{time.time_ns()}")
    with met(cfg, run=store.run, load_image=store.read_image) as services_open:
        episodes = EpisodeRunner(cfg, services_open.retriever, services_open.stream, store)
        greedy = cfg.model_copy(update={"generation": cfg.eval_generation()})
        episodes_ended = episodes.run(
            local_policy(greedy), list(enumerate(held_out[:limit])), step=0, kind="held-out-"
        )
        final = episodes.collect_rewards(0, episodes_ended)
    store.write_step(0, list(final.values()))
    lines = [json.dumps(line_of(episode), ensure_ascii=False) + "\n" for episode in final.values()]
    write_atomic(out, "".join(lines))


def line_of(episode: Any) -> dict[str, Any]:
    """Return the stats of a rewarded episode: its question, its results, and which turns were
    of no use.
    """
    from trainer.search.evaluation.stats import values_of

    question = episode.question
    reasons = [turn.reason for turn in episode.turns if turn.action == "invalid"]
    return {
        "question": question.id,
        "document": question.file_name,
        "type": question.question_type,
        "end": episode.end,
        "reasons": reasons,
        **values_of(episode),
    }
