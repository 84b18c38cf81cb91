"""Train a search policy: check, load and open everything, and give the loop its task.

The loop is in trainer/runs/loop.py. The advantages of a batch are at the end.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from scorekit.errors import IndexChanged, UserError
from scorekit.files import write_atomic
from trainer.rl.advantage import TokenAdvantages
from trainer.rl.batch_advantages import batch_advantages
from trainer.rl.config import RLConfig
from trainer.rl.devices import autocast
from trainer.rl.distributed import DistributedContext
from trainer.rl.rollout import Rollout, action_masks
from trainer.rl.sampler import Sampler, check_untruncated
from trainer.rl.workload import Workload
from trainer.runs import results
from trainer.runs.artifacts import Artifacts
from trainer.runs.batches import Batch, RolloutBuffer
from trainer.runs.config import set_key
from trainer.runs.loop import TrainingLoop
from trainer.runs.open import OpenRun, RunStart, start_run
from trainer.runs.stats import Stats
from trainer.runs.trackers import check_trackers
from trainer.search.answer.pipeline import merge_step_stats
from trainer.search.config import SearchConfig
from trainer.search.data import check_gold, hold_against_index, in_both
from trainer.search.evaluation.run import SearchReport, evaluate_questions, read_reports
from trainer.search.evaluation.stats import compute_stats, table
from trainer.search.records import Question, Trajectory
from trainer.search.reward import WaitAborted, answer_stats, step_stats, without_spread
from trainer.search.rollout.episode_runner import EpisodeRunner
from trainer.search.rollout.sampled import SampledPolicy, inspect_policy
from trainer.search.services import SearchServices, has_page, open_services, run_name
from trainer.search.training.collector import EpisodeCollector, SearchBatch, blocking_reason
from trainer.search.training.loading import SearchLearner, load_searcher
from trainer.search.training.online_budget import LEAST, OnlineBudget, check_online_budget
from trainer.search.trajectories.store import FOLDER, TrajectoryStore

log = logging.getLogger(__name__)
_SEED = 0  # of evaluations
#: Of a question's own sampling; vLLM would raise a smaller one to this, and the trainer would not.
LEAST_TEMPERATURE = 0.01


def run_search(
    train: Sequence[Question],
    sets: Mapping[str, Sequence[Question]],
    cfg: SearchConfig,
    *,
    resume: bool = False,
) -> Artifacts:
    """Train, evaluate and log.

    Folder and services are checked before weights are loaded; weights and questions before files of
    an earlier run are replaced.
    sets: evaluation sets by name.
    resume: continue the run in misc.run_dir from its newest complete checkpoint; a run without one
    starts again.
    Raises UserError for what the user can fix.
    """
    if not train:
        raise UserError("data.train: there are no questions")
    check_trainable(cfg, train)
    num_updates = cfg.rl.over(len(train)).num_updates
    workload = workload_of(cfg, train)
    with start_run(
        cfg, read_reports, workload, resume=resume, num_updates=num_updates, shares_folder=True
    ) as start:
        return start.finished or _open_loop(start, train, sets).run()


def check_trainable(cfg: SearchConfig, train: Sequence[Question]) -> None:
    """Raise UserError if the config cannot train, or would train wrongly."""
    if cfg.policy.path is None or cfg.server.url is not None:
        raise UserError(
            "policy.path: required, a folder or hub id of the policy to train (server.url names a "
            "policy with other weights; to sample with vLLM, set generation.engine)"
        )
    check_untruncated(cfg.generation, cfg.corrects_importance)
    check_gold(train, cfg.reward.weights["ndcg"])
    if greedy := [question.id for question in train if _is_greedy(question)]:
        raise UserError(
            f"data.train: temperature of {len(greedy)} questions ({greedy[0]} first): less than "
            f"{LEAST_TEMPERATURE} is greedy, but training needs samples. Raise it, or remove it."
        )
    if cfg.rl.advantage_norm == "grpo":
        _check_groups(train, cfg.rollout.n_agent)
    check_online_budget(cfg, train)
    check_trackers(cfg.misc.trackers)


def _is_greedy(question: Question) -> bool:
    return question.temperature is not None and question.temperature < LEAST_TEMPERATURE


def _check_groups(train: Sequence[Question], n_agent: int) -> None:
    single = [question for question in train if question.samples(n_agent) < 2]
    if not single:
        return
    key = "rollout.n_agent"
    if own_sizes := [question.id for question in single if question.n_agent is not None]:
        key = f"data.train: n_agent of {len(own_sizes)} questions ({own_sizes[0]} first)"
    raise UserError(
        f"{key}: a group of 1 episode has no comparison. Set 2 or more, or set "
        "rl.advantage_norm to batch."
    )


def workload_of(cfg: SearchConfig, train: Sequence[Question]) -> Workload:
    """Return the sizes of an update; episodes of a group with equal rewards are not in the loss."""
    n_agent = cfg.rollout.n_agent
    sizes = [question.samples(n_agent) for question in train] or [n_agent]
    if cfg.rollout.online_budget.n_max is not None and cfg.answering.money.cap is not None:
        sizes.append(LEAST)  # the mean of an update that the money has shrunk
    return Workload(
        cfg.rl,
        (min(sizes), max(sizes)),
        "rollout.n_agent",
        unit="episodes",
        shares_sequences=True,
        drops_sequences=True,
    )


def _open_loop(
    start: RunStart[SearchConfig], train: Sequence[Question], sets: Mapping[str, Sequence[Question]]
) -> TrainingLoop:
    """Open the services, load the policy and open the run directory."""
    cfg, world, folder = start.cfg, start.world, Path(start.cfg.misc.run_dir)
    inputs = inspect_policy(cfg)
    name = world.gather([run_name(folder, start.resume)])[0]
    stores: list[TrajectoryStore] = []  # opened when an earlier run may be replaced
    opening = open_services(
        cfg, run=name, load_image=lambda name: stores[0].read_image(name), world=world
    )
    connections = start.exit_stack.enter_context(opening)
    train, sets = _indexed_questions(connections, train, sets, cfg, world)
    served = start.probe_engine(images=inputs.reader is not None)
    searcher = load_searcher(cfg, inputs, train, sets, connections.index, world)
    run = start.open(searcher.learner, served)
    if world.is_main:
        write_atomic(folder / "index.json", connections.index.model_dump_json(indent=1))
        TrajectoryStore(folder / FOLDER, name).cut(run.done or 0)
    world.wait()  # no process reads the folder before it is complete
    stores.append(TrajectoryStore(folder / FOLDER, name))
    task = SearchTask(run, connections, stores[0], searcher)
    rl = cfg.rl.over(len(searcher.learner.train))  # counts the updates of its epochs
    return TrainingLoop(replace(run, cfg=cfg.model_copy(update={"rl": rl})), task)


def _indexed_questions(
    connections: SearchServices,
    train: Sequence[Question],
    sets: Mapping[str, Sequence[Question]],
    cfg: SearchConfig,
    world: DistributedContext,
) -> tuple[list[Question], dict[str, list[Question]]]:
    """Return the questions whose pages are in the index, and warn of shared documents."""
    is_indexed = partial(has_page, connections.retriever)
    held_out = {
        name: hold_against_index(questions, is_indexed, cfg.data)[: cfg.eval.eval_limit]
        for name, questions in sets.items()
        if questions
    }
    train = hold_against_index(train, is_indexed, cfg.data)
    for name, questions in held_out.items() if world.is_main else ():
        if warning := in_both(set_key(name), train, questions):
            log.warning("%s", warning)
    return train, held_out


class SearchTask:
    """The search task for the loop (trainer/runs/loop.py)."""

    def __init__(
        self,
        run: OpenRun[SearchConfig],
        connections: SearchServices,
        store: TrajectoryStore,
        searcher: SearchLearner,
    ) -> None:
        self.cfg, self.world, self._run, self._store = run.cfg, run.world, run, store
        self.services, self.searcher = connections, searcher
        self.collector = self.open_collector(run.world)
        self.episodes = self.collector.episodes
        self.columns = results.columns(table())

    def open_collector(
        self,
        world: DistributedContext,
        buffer: RolloutBuffer | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> EpisodeCollector:
        """Return a collector, as `OpensCollectors` says."""
        shutdown = self._run.shutdown
        episodes = EpisodeRunner(
            self.cfg,
            self.services.retriever,
            self.services.stream,
            self._store,
            world,
            tolerates_outage=True,
            should_stop=should_stop or (lambda: bool(shutdown.signal_number)),
        )
        budget, learner = None, self.searcher.learner
        if self.cfg.rollout.online_budget.n_max is not None:
            evaluated = sum(map(len, learner.sets.values()))
            answering = self.services.answering
            budget = OnlineBudget(self.cfg, learner.train, evaluated, self._store, answering, world)
        return EpisodeCollector(self._run, episodes, self.searcher, world, buffer, budget)

    def stats(self, batch: Batch[Rollout, Trajectory]) -> Stats:
        """Return the stats of rewards, groups, search behavior and cost, of all processes."""
        assert isinstance(batch, SearchBatch)
        answering = self.services.answering
        own_stats = batch.waited | ({} if answering is None else answering.stats())
        stats: Stats = {
            **step_stats(batch.final),
            **compute_stats(list(batch.final.values())),
            "groups_without_spread": len(without_spread(batch.final)),
            **({} if answering is None else answer_stats(batch.final.values())),
            **merge_step_stats(self.world.gather([own_stats])),
        }
        if self.collector.budget is not None:
            stats |= self.collector.budget.stats(batch.decisions, batch.final)
        return stats

    def advantages(self, rollouts: list[Rollout], rewards: list[Trajectory]) -> TokenAdvantages:
        """Return the advantages with the options of `rl`."""
        return episode_advantages(rollouts, rewards, self.cfg.rl)

    def dump(
        self, batch: Batch[Rollout, Trajectory], advantages: TokenAdvantages | None
    ) -> Iterable[dict[str, Any]]:
        """Yield the fields of an episode that the store of trajectories does not have."""
        rows = {index: row for row, index in enumerate(batch.scored_indices)}
        for index, (rollout, trajectory) in enumerate(
            zip(batch.rollouts, batch.rewards, strict=True)
        ):
            is_trained, advantage = False, None
            if advantages is not None and index in rows:
                mask = advantages.mask[rows[index]]
                is_trained = bool(mask.any())
                advantage = float(advantages.values[rows[index]][mask][0]) if is_trained else 0.0
            yield {
                "trajectory_id": trajectory.trajectory_id,
                "question": trajectory.question.id,
                "reward": trajectory.reward_value,
                "advantage": advantage,
                "learned": is_trained,
                "tokens": sum(rollout.actions),
                "finish_reason": rollout.finish_reason,
            }

    def evaluate(self, sampler: Sampler, name: str) -> SearchReport | None:
        """Evaluate the policy on the questions of a set.

        None if the user must fix something first (`stop_reason`), or if the run is stopping.
        """
        policy = SampledPolicy(
            sampler,
            self.searcher.ids,
            self.cfg.eval_generation(),
            context=self.searcher.context,
            world=self.world,
            with_logprobs=False,
            seed=_SEED,
            deterministic=self.cfg.rollout.deterministic,
        )
        questions = self.searcher.learner.sets[name]
        try:
            with autocast(self.world.device, self.cfg.misc.dtype):
                return evaluate_questions(self.episodes, policy, questions, step=0, name=name)
        except WaitAborted:
            return None
        except (UserError, IndexChanged) as error:
            self.collector.stop_reason = blocking_reason(
                f"the evaluation of {set_key(name)}", error
            )
            return None

    def eval_summary(self, update: int, report: SearchReport, name: str) -> str:
        """Return the console line of an evaluation."""
        return results.evaluation_line(table(), update, report.stats(), name)


def episode_advantages(
    rollouts: Sequence[Rollout], episodes: Sequence[Trajectory], rl: RLConfig
) -> TokenAdvantages:
    """Return the advantages of episodes that all have a reward.

    Each token that the policy wrote gets the advantage of its episode. An episode whose group has
    equal rewards is masked: it would give no gradient, but count in the means of the loss and cost
    a forward pass (veRL keeps it).
    """
    values = [episode.reward_value for episode in episodes if episode.reward_value is not None]
    group_values: dict[int, set[float]] = defaultdict(set)
    for rollout, value in zip(rollouts, values, strict=True):
        group_values[rollout.group].add(value)
    differs_B = torch.tensor([len(group_values[rollout.group]) > 1 for rollout in rollouts])
    mask_BT = action_masks(rollouts) & differs_B[:, None]
    return batch_advantages(
        rollouts,
        torch.tensor(values, dtype=torch.float64),
        torch.zeros(mask_BT.shape, dtype=torch.float64),
        mask_BT,
        rl,
    )
