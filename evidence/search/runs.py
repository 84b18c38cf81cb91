"""Runs the trainings of one run in order, and measures its policy on each set."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo.search.generator import NAME as READING
from demo.search.loop.knowing import NAME as KNOWING
from demo.search.measured_sets import HELD_OUT, SETS
from evidence.search.arms import ARMS, COMMON, CONFIG, YARDSTICK, Arm, Plan
from scorekit.config import load_config
from scorekit.errors import UserError
from scorekit.files import write_atomic
from scorekit.processes import end_worker_with_parent
from trainer.runs.checkpoints.checkpoint import checkpoints
from trainer.search.config import SearchConfig

#: Of a set -> settings that name its services.
Services = Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class Job:
    """One run to train and measure.

    name, seed: of the run.

    services: the settings that name them. Their addresses do not change the results.
    """

    plan: Plan
    name: str
    seed: int
    services: Services

    @property
    def arm(self) -> Arm:
        """Return the job's arm."""
        return ARMS[self.name]

    @property
    def folder(self) -> Path:
        """Return the folder of the run."""
        return self.plan.folder / f"{self.name}-{self.seed}"

    @property
    def stages(self) -> list[list[str]]:
        """Return all settings of each training, except paths."""
        stages = self.arm.stages
        updates = self.plan.updates // len(stages)
        return [
            [
                *COMMON,
                *self.plan.settings,
                *stage,
                f"rl.num_updates={updates}",
                f"misc.seed={self.seed + 100 * number}",  # the second has other questions first
            ]
            for number, stage in enumerate(stages)
        ]

    @property
    def is_trained(self) -> bool:
        """Return whether the trained policy is on disk with the same settings."""
        done = self.folder / "run.json"
        return done.is_file() and json.loads(done.read_text("utf-8"))["stages"] == self.stages

    @property
    def unmeasured(self) -> list[str]:
        """Return the sets that are not measured yet."""
        return [n for n in self.plan.sets if not measured_path(self.folder, n).is_file()]

    @property
    def is_done(self) -> bool:
        """Return whether training and all measurements are done."""
        return self.is_trained and not self.unmeasured


def measured_path(run: Path, set_name: str) -> Path:
    """Return the file of a run's measurement on a set."""
    return run / f"measured{SETS[set_name].ending}.jsonl"


def start_path(folder: Path, start: str, set_name: str) -> Path:
    """Return the file of a start's measurement, which arms are compared with, in a plan's
    folder.
    """
    return folder / f"{start}{SETS[set_name].ending}.jsonl"


def begin_worker(path: Path) -> None:
    """Write what this worker prints to a file, and end it with its parent."""
    end_worker_with_parent()
    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(out, stream)


def start_of(plan: Plan, arm: Arm) -> Path:
    """Return the policy that an arm begins with."""
    return plan.policy if arm.start == "warm" else plan.folder / "random-policy"


def services_of(arm: Arm, urls: Mapping[str, Mapping[str, str]], folder: Path) -> Services:
    """Return the settings that name the services of each set.

    urls: by set, the URLs of its retriever, its judge, and of both generators (reading and
    knowing).
    """
    name = READING if arm.knows == "nothing" else KNOWING
    return {
        set_name: (
            f"retriever.url={set_urls['retriever']}",
            f"answering.judge.url={set_urls['judge']}",
            f"answering.generator.base_url={set_urls[name]}/v1",
            f"answering.generator.model={name}",
            f"answering.answers={folder / f'answers{SETS[set_name].ending}.sqlite'}",
        )
        for set_name, set_urls in urls.items()
    }


def run_job(job: Job) -> float:
    """Train and measure what is missing of a run, and return the seconds of both.

    Raises UserError if a training ends early or leaves no checkpoint.
    """
    started, record = time.monotonic(), None
    if not job.is_trained:
        train(job)
        record = {"stages": job.stages, "train_s": time.monotonic() - started}
    policy = next(iter(checkpoints(job.folder / f"stage-{len(job.stages) - 1}/checkpoints")), None)
    if policy is None:
        raise UserError(f"{job.folder}: no checkpoint to measure; remove it to train anew")
    for set_name in job.unmeasured:
        measure(
            job.plan,
            job.arm,
            set_name,
            job.services[set_name],
            policy,
            measured_path(job.folder, set_name),
        )
    seconds = time.monotonic() - started
    if record is not None:
        write_atomic(job.folder / "run.json", json.dumps(record | {"s": seconds}, indent=1))
        for state in job.folder.glob("stage-*/checkpoints/*/optimizer*"):
            state.unlink()
    return seconds


def train(job: Job) -> None:
    """Train all stages of a run, on the documents and questions of training."""
    from evidence.search.control import dealing
    from trainer.search.data import load_train
    from trainer.search.training.train import run_search

    shutil.rmtree(job.folder, ignore_errors=True)
    policy = start_of(job.plan, job.arm)
    for number, settings in enumerate(job.stages):
        run_settings = [f"misc.run_dir={job.folder / f'stage-{number}'}", f"policy.path={policy}"]
        cfg = load_config(SearchConfig, CONFIG, [*settings, *job.services[HELD_OUT], *run_settings])
        with dealing(job.arm.dealt):
            artifacts = run_search(load_train(cfg), {}, cfg)
        if artifacts.stopped or artifacts.checkpoint is None:
            raise UserError(f"{job.name}, seed {job.seed}: {artifacts.stopped or 'no checkpoint'}")
        policy = artifacts.checkpoint


def measure(
    plan: Plan, arm: Arm, set_name: str, services: Sequence[str], policy: Path, out: Path
) -> None:
    """Play a greedy episode of each question of a set; write a line of stats for each."""
    of_arm = [key for key in arm.settings if key.startswith("answering.")]
    settings = [*of_arm, *YARDSTICK, *services]
    measure_policy(CONFIG, settings, policy, SETS[set_name].questions, out, plan.limit)


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
