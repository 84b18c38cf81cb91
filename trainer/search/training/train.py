"""Training a searcher: what is checked, loaded and opened, in which order, and what the loop of
trainer/runs/loop.py asks of it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from scorekit.errors import IndexChanged, UserError
from scorekit.files import write_atomic
from trainer.rl.advantage import TokenAdvantages
from trainer.rl.engines.choice import open_sampler, probe_engine
from trainer.rl.policy import autocast, prepare_torch
from trainer.rl.rollout import Rollout
from trainer.rl.sampler import Sampler, check_uncut
from trainer.rl.world import World
from trainer.runs.checkpoints.resume import checkpoint_to_resume
from trainer.runs.checkpoints.saver import Saver
from trainer.runs.config import set_key
from trainer.runs.console import Columns
from trainer.runs.figures import Figures
from trainer.runs.leaving import Leaving
from trainer.runs.loop import Batch, Loop
from trainer.runs.messages import Messages, messages
from trainer.runs.outcome import Artifacts, Reports, ended_before
from trainer.runs.runlog import Clock, RunLog, SilentLog, check_run_dir, open_run_dir
from trainer.runs.trackers import check_trackers
from trainer.runs.verbs import tables
from trainer.search.config import SearchConfig
from trainer.search.data import check_gold, hold_against_index, in_both
from trainer.search.episodes import Episodes
from trainer.search.evaluation.evaluate import SearchReport, evaluate_questions, read_reports
from trainer.search.evaluation.figures import table
from trainer.search.local import look_at_policy
from trainer.search.neighbours import Around, has_page, services
from trainer.search.records import Question, Trajectory
from trainer.search.reward.stream import Hurried
from trainer.search.training.advantages import episode_advantages
from trainer.search.training.collector import EpisodeCollector, SearchBatch, to_mend
from trainer.search.training.figures import update_figures
from trainer.search.training.loading import SearchLearner, load_searcher
from trainer.search.trajectories.store import FOLDER, TrajectoryStore

log = logging.getLogger(__name__)
_SEED = 0  # of an evaluation


def run_search(
    train: Sequence[Question],
    sets: Mapping[str, Sequence[Question]],
    cfg: SearchConfig,
    *,
    resume: bool = False,
) -> Artifacts:
    """Train, evaluate, log. Folder and services are checked before weights load, weights and
    questions before what an earlier run left is replaced. Raises UserError on whatever the user can
    mend.

    sets: of evaluations, by name. resume: go on with the run of misc.run_dir from its newest whole
    checkpoint; one that has none yet starts anew in its place.
    """
    if not train:
        raise UserError("there are no questions to learn from")
    check_trainable(cfg, train)
    world = World(
        prepare_torch(cfg.misc.device, cfg.misc.threads),
        cfg.misc.trackers,
        Path(cfg.misc.run_dir) / "trackers",
        patience_s=cfg.misc.patience_s,
    )
    with messages() as heard, world.together(), ExitStack() as held:
        return _run(train, sets, cfg, world, heard, held, resume)


def check_trainable(cfg: SearchConfig, train: Sequence[Question]) -> None:
    """Raise UserError where nothing could be learned, or something wrong."""
    if cfg.policy.path is None or cfg.server.url is not None:
        raise UserError(
            "policy.path: give the folder or hub id of the policy that learns (a server.url has "
            "weights of its own; to sample by vLLM, set generation.engine)"
        )
    check_uncut(cfg.generation, cfg.corrects_importance)
    check_gold(train, cfg.reward.weights["ndcg"])
    own = [q.id for q in train if q.temperature not in (None, cfg.generation.temperature)]
    if own:
        raise UserError(
            f"data.train: {len(own)} questions have a temperature of their own ({own[0]} first): "
            "log-probabilities of an update are at one, generation.temperature; take theirs away"
        )
    if cfg.rl.advantage_norm == "grpo":
        _check_groups(train, cfg.rollout.n_agent)
    check_trackers(cfg.misc.trackers)


def _check_groups(train: Sequence[Question], n_agent: int) -> None:
    alone = [question for question in train if question.samples(n_agent) < 2]
    if not alone:
        return
    where = "rollout.n_agent"
    if own := [question.id for question in alone if question.n_agent is not None]:
        where = f"data.train: n_agent of {len(own)} questions ({own[0]} first)"
    raise UserError(
        f"{where}: 1 episode has nothing to be compared with: set 2 or more, or rl.advantage_norm "
        "to batch"
    )


def _run(
    train: Sequence[Question],
    sets: Mapping[str, Sequence[Question]],
    cfg: SearchConfig,
    world: World,
    heard: Messages,
    held: ExitStack,
    resume: bool,
) -> Artifacts:
    """`run_search` in this world; what is opened is held until its end."""
    folder = Path(cfg.misc.run_dir)
    checkpoint = checkpoint_to_resume(cfg) if resume else None
    if checkpoint:
        ended = ended_before(_counted(cfg, train), checkpoint, read_reports(folder))
        if ended:
            return replace(ended, is_main=world.is_main)
    if checkpoint is None:
        world.on_main(lambda: check_run_dir(cfg, resume or None))
    world.on_main(lambda: open_run_dir(cfg.misc))
    reads = look_at_policy(cfg)
    run = world.gather([_name_of_run(folder, resume)])[0]
    stores: list[TrajectoryStore] = []  # opened when an earlier run may be replaced
    around = held.enter_context(
        services(cfg, run=run, pictures=lambda name: stores[0].picture(name), is_main=world.is_main)
    )
    train, sets = _held_against(around, train, sets, cfg, world)
    adapters = cfg.policy.lora.r > 0
    served = probe_engine(cfg.generation, adapters=adapters, images=reads.reader is not None)
    searcher = load_searcher(cfg, reads, train, sets, around.index, world)
    learner, saver = searcher.learner, Saver(cfg, world, searcher.learner.origin)
    done = None if checkpoint is None else saver.load_weights(checkpoint, learner.model)
    learner.share(world)
    sampler = open_sampler(
        cfg.generation,
        served,
        learner.model,
        learner.tokenizer,
        world,
        adapters=adapters,
        run_dir=cfg.misc.run_dir,
        never=learner.never,
    )
    held.enter_context(closing(sampler))
    runlog = _begun(cfg, run, around, world, heard, resume, done)
    stores.append(TrajectoryStore(folder / FOLDER, run))
    if checkpoint is not None:
        saver.load_rest(checkpoint, learner.model, learner.optimizer)
    leaving = Leaving(quiet=not world.is_main)
    episodes = Episodes(
        cfg,
        around.retriever,
        around.stream,
        stores[0],
        world,
        patient=True,
        hurry=lambda: bool(leaving.asked),
    )
    task = Searching(cfg, around, episodes, searcher, world, leaving)
    cfg = _counted(cfg, learner.train)
    return Loop(cfg, task, learner, sampler, world, saver, runlog, leaving, checkpoint, done).run()


def _begun(
    cfg: SearchConfig,
    run: str,
    around: Around,
    world: World,
    heard: Messages,
    resume: bool,
    done: int | None,
) -> RunLog:
    """The run's log, in a folder that has all that a run begins with."""
    runlog: RunLog = SilentLog(cfg)
    if world.is_main:
        folder = Path(cfg.misc.run_dir)
        runlog = RunLog(cfg, overwrite=resume or None, done=done)
        write_atomic(folder / "index.json", around.index.model_dump_json(indent=1))
        TrajectoryStore(folder / FOLDER, run).cut(done or 0)
        heard.write_to(folder)
    world.wait()  # nobody reads the folder while it is made
    return runlog


def _counted(cfg: SearchConfig, train: Sequence[Question]) -> SearchConfig:
    """With the updates of its epochs over these questions."""
    return cfg.model_copy(update={"rl": cfg.rl.over(len(train))})


def _name_of_run(folder: Path, resume: bool) -> str:
    """That of the run that goes on, so that what it has spent counts; else a new one."""
    if resume and (folder / FOLDER / "store.json").is_file():
        return TrajectoryStore(folder / FOLDER).run
    return f"{folder.name}-{uuid4().hex[:8]}"


def _held_against(
    around: Around,
    train: Sequence[Question],
    sets: Mapping[str, Sequence[Question]],
    cfg: SearchConfig,
    world: World,
) -> tuple[list[Question], dict[str, list[Question]]]:
    """The questions whose pages the index has; and a word on documents that stand in both."""

    def known(questions: Sequence[Question]) -> list[Question]:
        return hold_against_index(
            questions, lambda page: has_page(around.retriever, page), cfg.data
        )

    held_out = {
        name: known(questions)[: cfg.eval.eval_limit]
        for name, questions in sets.items()
        if questions
    }
    train = known(train)
    for name, questions in held_out.items() if world.is_main else ():
        if told := in_both(set_key(name), train, questions):
            log.warning("%s", told)
    return train, held_out


class Searching:
    """What the loop asks of a searcher (trainer/runs/loop.py)."""

    def __init__(
        self,
        cfg: SearchConfig,
        around: Around,
        episodes: Episodes,
        searcher: SearchLearner,
        world: World,
        leaving: Leaving,
    ) -> None:
        self.cfg, self.around, self.episodes = cfg, around, episodes
        self.searcher, self.world = searcher, world
        self.collector = EpisodeCollector(cfg, world, episodes, searcher, leaving)

    @property
    def columns(self) -> tuple[Columns, Sequence[str]]:
        """Of the console."""
        return tables.columns(table())

    @property
    def fault(self) -> str | None:
        """Why the last update has no rewards, or an evaluation could not be done."""
        return self.collector.fault

    def collect(self, sampler: Sampler, update: int, clock: Clock) -> SearchBatch | None:
        """See `EpisodeCollector.collect`."""
        return self.collector.collect(sampler, update, clock)

    def figures(self, batch: Batch[Rollout, Trajectory]) -> Figures:
        """Of rewards and groups, of how the policy searched, and of what was paid."""
        assert isinstance(batch, SearchBatch)
        found = update_figures(batch.final) | batch.waited
        if self.around.answering is not None:
            found |= self.around.answering.figures()
        return found

    def advantages(self, rollouts: list[Rollout], rewards: list[Trajectory]) -> TokenAdvantages:
        """Under the options of `rl`."""
        return episode_advantages(rollouts, rewards, self.cfg.rl)

    def dump(
        self, batch: Batch[Rollout, Trajectory], advantages: TokenAdvantages | None
    ) -> Iterable[dict[str, Any]]:
        """What the store of trajectories does not say of an episode."""
        rows = {index: row for row, index in enumerate(batch.kept)}
        for index, (rollout, one) in enumerate(zip(batch.rollouts, batch.rewards, strict=True)):
            learned, advantage = False, None
            if advantages is not None and index in rows:
                mask = advantages.mask[rows[index]]
                learned = bool(mask.any())
                advantage = float(advantages.values[rows[index]][mask][0]) if learned else 0.0
            yield {
                "trajectory_id": one.trajectory_id,
                "question": one.question.id,
                "reward": None if one.reward is None else one.reward.value,
                "advantage": advantage,
                "learned": learned,
                "tokens": sum(rollout.actions),
                "finish_reason": rollout.finish_reason,
            }

    def evaluate(self, sampler: Sampler, name: str) -> SearchReport | None:
        """Let the policy search for the questions of a set. None where somebody has to mend
        something before (`fault`), or the run was asked to end while it waited."""
        policy = self.searcher.policy(
            sampler, self.cfg.eval_generation(), self.world, seed=_SEED, with_logprobs=False
        )
        questions = self.searcher.learner.sets[name]
        try:
            with autocast(self.world.device, self.cfg.misc.dtype):
                return evaluate_questions(
                    self.episodes, policy, questions, self.world, step=0, name=name
                )
        except Hurried:
            return None
        except (UserError, IndexChanged) as error:
            self.collector.fault = to_mend(f"the evaluation of {set_key(name)}", error)
            return None

    def read_reports(self, folder: Path) -> Mapping[str, Reports]:
        """Those of a run's folder, by the names of their sets."""
        return read_reports(folder)

    def told(self, update: int, report: SearchReport, name: str) -> str:
        """What is said of an evaluation."""
        return tables.evaluation_line(table(), update, report.figures(), name)
