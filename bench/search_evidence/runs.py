"""One run: its trainings, one behind the other, and what the policy does on each set."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.search_evidence.arms import ARMS, COMMON, CONFIG, YARDSTICK, Arm, Plan
from bench.search_evidence.knowing import NAME as KNOWING
from bench.search_evidence.sets import HELD_OUT, SETS
from demo.search.generator import NAME as READING
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
    """name, seed: of the run. services: where they are changes nothing."""

    plan: Plan
    name: str
    seed: int
    services: Services

    @property
    def arm(self) -> Arm:
        """What is tried."""
        return ARMS[self.name]

    @property
    def folder(self) -> Path:
        """Of the run."""
        return self.plan.folder / f"{self.name}-{self.seed}"

    @property
    def stages(self) -> list[list[str]]:
        """All settings of each training, but places."""
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
        """Whether it stands on disk, of these settings."""
        done = self.folder / "run.json"
        return done.is_file() and json.loads(done.read_text("utf-8"))["stages"] == self.stages

    @property
    def unmeasured(self) -> list[str]:
        """The sets of which it has no measurement."""
        return [n for n in self.plan.sets if not measured_path(self.folder, n).is_file()]

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do."""
        return self.is_trained and not self.unmeasured


def measured_path(run: Path, of: str) -> Path:
    """Where a run's measurement on a set stands."""
    return run / f"measured{SETS[of].ending}.jsonl"


def start_path(folder: Path, began: str, of: str) -> Path:
    """Where the measurement stands that arms are held against, in the folder of a plan."""
    return folder / f"{began}{SETS[of].ending}.jsonl"


def begin_worker(path: Path) -> None:
    """Write what this worker prints to a file, and end it with its parent."""
    end_worker_with_parent()
    out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (1, 2):
        os.dup2(out, stream)


def start_of(plan: Plan, arm: Arm) -> Path:
    """The policy that an arm begins with."""
    return plan.policy if arm.start == "warm" else plan.folder / "random-policy"


def services_of(arm: Arm, urls: Mapping[str, Mapping[str, str]], folder: Path) -> Services:
    """urls: of each set its retriever, judge, reading and knowing generator."""
    name = READING if arm.knows == "nothing" else KNOWING
    return {
        of: (
            f"retriever.url={places['retriever']}",
            f"answering.judge.url={places['judge']}",
            f"answering.generator.base_url={places[name]}/v1",
            f"answering.generator.model={name}",
            f"answering.answers={folder / f'answers{SETS[of].ending}.sqlite'}",
        )
        for of, places in urls.items()
    }


def run_job(job: Job) -> float:
    """Train what is not trained, and measure what is not measured; the seconds of both. Raises
    UserError where a training ends early, or has left no checkpoint."""
    began, told = time.monotonic(), None
    if not job.is_trained:
        train(job)
        told = {"stages": job.stages, "train_s": time.monotonic() - began}
    policy = next(iter(checkpoints(job.folder / f"stage-{len(job.stages) - 1}/checkpoints")), None)
    if policy is None:
        raise UserError(f"{job.folder}: no checkpoint to measure; remove it to train anew")
    for of in job.unmeasured:
        measure(job.plan, job.arm, of, job.services[of], policy, measured_path(job.folder, of))
    taken = time.monotonic() - began
    if told is not None:
        write_atomic(job.folder / "run.json", json.dumps(told | {"s": taken}, indent=1))
        for state in job.folder.glob("stage-*/checkpoints/*/optimizer*"):
            state.unlink()
    return taken


def train(job: Job) -> None:
    """All stages of a run, on the documents and questions of training."""
    from bench.search_evidence.control import dealing
    from trainer.search.data import load_train
    from trainer.search.training.train import run_search

    shutil.rmtree(job.folder, ignore_errors=True)
    policy = start_of(job.plan, job.arm)
    for number, settings in enumerate(job.stages):
        place = [f"misc.run_dir={job.folder / f'stage-{number}'}", f"policy.path={policy}"]
        cfg = load_config(SearchConfig, CONFIG, [*settings, *job.services[HELD_OUT], *place])
        with dealing(job.arm.dealt):
            found = run_search(load_train(cfg), {}, cfg)
        if found.stopped or found.checkpoint is None:
            raise UserError(f"{job.name}, seed {job.seed}: {found.stopped or 'no checkpoint'}")
        policy = found.checkpoint


def measure(
    plan: Plan, arm: Arm, of: str, services: Sequence[str], policy: Path, out: Path
) -> None:
    """A greedy episode of each question of a set; a line of figures for each."""
    from trainer.search.data import load_held_out
    from trainer.search.episode_runner import EpisodeRunner
    from trainer.search.local_policy import local_policy
    from trainer.search.services import open_services as met
    from trainer.search.trajectories.store import FOLDER, TrajectoryStore

    folder = out.with_suffix("")
    shutil.rmtree(folder, ignore_errors=True)
    of_arm = [key for key in arm.settings if key.startswith("answering.")]
    place = [f"misc.run_dir={folder}", f"policy.path={policy}", "misc.threads=1"]
    place += [f"data.eval={SETS[of].questions}"]
    cfg = load_config(SearchConfig, CONFIG, [*of_arm, *YARDSTICK, *services, *place])
    (questions,) = load_held_out(cfg).values()
    store = TrajectoryStore(folder / FOLDER, f"{out.parent.name}-{out.stem}-{time.time_ns()}")
    with met(cfg, run=store.run, load_image=store.read_image) as around:
        episodes = EpisodeRunner(cfg, around.retriever, around.stream, store)
        asked = list(enumerate(questions[: plan.limit]))
        greedy = cfg.model_copy(update={"generation": cfg.eval_generation()})
        ended = episodes.run(local_policy(greedy), asked, step=0, kind="held-out-")
        final = episodes.collect_rewards(0, ended)
    store.write_step(0, list(final.values()))
    lines = [json.dumps(line_of(one), ensure_ascii=False) + "\n" for one in final.values()]
    write_atomic(out, "".join(lines))


def line_of(episode: Any) -> dict[str, Any]:
    """Of a rewarded episode: its question, its figures, and which turns were of no use."""
    from trainer.search.evaluation.episode_values import values_of

    asked = episode.question
    reasons = [turn.reason for turn in episode.turns if turn.action == "invalid"]
    return {
        "question": asked.id,
        "document": asked.file_name,
        "type": asked.question_type,
        "end": episode.end,
        "reasons": reasons,
        **values_of(episode),
    }
