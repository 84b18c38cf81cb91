"""Train a translation policy: check, load and open everything, then run the training loop.

This is the one file that imports all the parts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from scorekit.errors import UserError
from scorekit.prompts import load_postprocess, load_template
from trainer.rl.advantage import TokenAdvantages
from trainer.rl.distributed import DistributedContext
from trainer.rl.engines.choice import open_sampler, probe_engine
from trainer.rl.policy.devices import autocast, prepare_torch
from trainer.rl.sampler import Sampler, check_untruncated
from trainer.runs.artifacts import Artifacts, Reports, finished_artifacts
from trainer.runs.checkpoints.resume import checkpoint_to_resume
from trainer.runs.checkpoints.saver import Saver
from trainer.runs.config import set_key
from trainer.runs.console import Columns
from trainer.runs.learner import Learner
from trainer.runs.loop import Batch, TrainingLoop
from trainer.runs.messages import Messages, messages
from trainer.runs.run_log import PhaseTimer, RunLog, SilentLog, check_run_dir, open_run_dir
from trainer.runs.shutdown import ShutdownHandler
from trainer.runs.stats import Stats
from trainer.runs.trackers import check_trackers
from trainer.translation.collect import Collector
from trainer.translation.config import TranslationConfig
from trainer.translation.data import Example, in_both
from trainer.translation.dumps import training_lines
from trainer.translation.evaluation.evaluate import Report, evaluate_on_dataset, read_reports
from trainer.translation.evaluation.held_out import HeldOutMetrics
from trainer.translation.evaluation.stats import reward_stats
from trainer.translation.loading import load_learner
from trainer.translation.rewards.advantages import rollout_advantages
from trainer.translation.rewards.components import weighted
from trainer.translation.rewards.components.chrf import check_references
from trainer.translation.rewards.components.xcomet_spans import check_spans
from trainer.translation.rewards.guards import check_guards
from trainer.translation.rewards.sample_reward import SampleReward
from trainer.translation.rewards.screening import screen
from trainer.translation.rewards.services import RewardClient
from trainer.translation.rollouts import TranslationRollout
from trainer.translation.tables import columns, evaluation_line

TranslationBatch = Batch[TranslationRollout, SampleReward]
log = logging.getLogger(__name__)


def train_translation(
    train_examples: Sequence[Example],
    eval_examples: Sequence[Example] | Mapping[str, Sequence[Example]],
    cfg: TranslationConfig,
    *,
    resume: bool = False,
) -> Artifacts:
    """Train, evaluate and log a translation policy.

    Folder and services are checked before weights are loaded, weights and prompts before an earlier
    run is replaced. Raises UserError for whatever the user can fix.

    eval_examples: sets by name, or a single one.
    resume: resume the run of misc.run_dir from its newest complete checkpoint; a run without one
    starts again in its folder.
    """
    if not train_examples:
        raise UserError("data.train: has no examples to train on")
    check_trainable(cfg)
    world = DistributedContext(
        prepare_torch(cfg.misc.device, cfg.misc.threads),
        cfg.misc.trackers,
        Path(cfg.misc.run_dir) / "trackers",
        patience_s=cfg.misc.patience_s,
    )
    with messages() as run_messages, world.monitored(), ExitStack() as exit_stack:
        return _run(train_examples, eval_examples, cfg, world, run_messages, exit_stack, resume)


#: The earlier name. It stays because users call it.
run_toy_rl = train_translation


def _run(
    train_examples: Sequence[Example],
    eval_examples: Sequence[Example] | Mapping[str, Sequence[Example]],
    cfg: TranslationConfig,
    world: DistributedContext,
    run_messages: Messages,
    exit_stack: ExitStack,
    resume: bool,
) -> Artifacts:
    """Run `train_translation` with these processes; `exit_stack` closes everything at the end."""
    pairs = ((example.src_lang_code, example.tgt_lang_code) for example in train_examples)
    check_guards(pairs, cfg.reward.guards)
    checkpoint = checkpoint_to_resume(cfg) if resume else None
    if checkpoint:
        sets_before = read_reports(Path(cfg.misc.run_dir))
        if artifacts := finished_artifacts(cfg, checkpoint, sets_before):
            return replace(artifacts, is_main=world.is_main)
    if checkpoint is None:
        world.on_main(lambda: check_run_dir(cfg, resume or None))
    world.on_main(lambda: open_run_dir(cfg.misc))
    rewarder = exit_stack.enter_context(
        closing(RewardClient(cfg.reward, caching=cfg.misc.caching, misc=cfg.misc))
    )
    world.on_main(lambda: check_spans(rewarder.ask, cfg.reward))
    if not isinstance(eval_examples, Mapping):
        eval_examples = {cfg.best_by: eval_examples}
    sets = {
        name: examples[: cfg.eval.eval_limit]
        for name, examples in eval_examples.items()
        if examples
    }
    check_references(train_examples, cfg.reward, "data.train")
    for name, held_out in sets.items():
        check_references(held_out, cfg.reward, set_key(name))
    metrics = HeldOutMetrics(cfg.eval.metrics, rewarder)
    world.on_main(lambda: metrics.check(sets))
    train_examples = screen(cfg.data, train_examples, sets, rewarder, world)
    for name, held_out in sets.items() if world.is_main else ():
        if overlap := in_both(set_key(name), train_examples, held_out):
            log.warning("%s", overlap)
    trainer = open_trainer(
        cfg,
        rewarder,
        train_examples,
        sets,
        world,
        exit_stack,
        checkpoint=checkpoint,
        overwrite=resume or None,
    )
    if world.is_main:
        run_messages.write_to(trainer.log.folder)
    return trainer.run()


def check_trainable(cfg: TranslationConfig) -> None:
    """Raise UserError if nothing could be trained, or with wrong results."""
    check_untruncated(cfg.generation, cfg.corrects_importance)
    if not weighted(cfg.reward):
        raise UserError(
            "reward: every weight is 0 (the keys w_*, no_eos_penalty, guards, terms). "
            "Set one of them above 0, so that there is something to train on"
        )
    load_template(cfg.generation.prompt_template)
    load_postprocess(cfg.generation.postprocess)
    check_trackers(cfg.misc.trackers)


def open_trainer(
    cfg: TranslationConfig,
    rewarder: RewardClient,
    train: Sequence[Example],
    sets: Mapping[str, Sequence[Example]],
    world: DistributedContext,
    exit_stack: ExitStack,
    *,
    checkpoint: Path | None = None,
    overwrite: bool | None = None,
) -> TrainingLoop:
    """Load the policy, then open the run directory: an error before that leaves an earlier run as
    it is.

    exit_stack: closes the sampler.
    checkpoint: resume from it.
    overwrite: replace a run in run_dir; default: the config's.
    """
    adapters = cfg.policy.lora.r > 0
    served = probe_engine(cfg.generation, adapters=adapters)
    learner = load_learner(cfg, train, sets, rewarder.infos, world)
    saver = Saver(cfg, world, learner.origin)
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
    )
    exit_stack.enter_context(closing(sampler))
    runlog: RunLog = SilentLog(cfg)
    if world.is_main:
        runlog = RunLog(cfg, rewarder.infos, overwrite=overwrite, done=done)
    world.wait()  # no process reads the folder while it is created
    if checkpoint is not None:
        saver.load_rest(checkpoint, learner.model, learner.optimizer)
    shutdown = ShutdownHandler(quiet=not world.is_main)
    task = TranslationTask(cfg, rewarder, learner, world, shutdown)
    return TrainingLoop(
        cfg, task, learner, sampler, world, saver, runlog, shutdown, checkpoint, done
    )


class TranslationTask:
    """The translation task of the training loop (trainer/runs/loop.py)."""

    def __init__(
        self,
        cfg: TranslationConfig,
        rewarder: RewardClient,
        learner: Learner,
        world: DistributedContext,
        shutdown: ShutdownHandler,
    ) -> None:
        self.cfg, self.rewarder, self.learner, self.world = cfg, rewarder, learner, world
        self.metrics = HeldOutMetrics(cfg.eval.metrics, rewarder)
        self.collector = Collector(cfg, world, rewarder, learner, shutdown)

    @property
    def columns(self) -> tuple[Columns, Sequence[str]]:
        """Return the columns of the console."""
        return columns(self.cfg.reward)

    @property
    def stop_reason(self) -> str | None:
        """Return the reason why the last batch has no rewards."""
        return self.collector.stop_reason

    def collect(self, sampler: Sampler, update: int, clock: PhaseTimer) -> TranslationBatch | None:
        """Return the batch of an update, see `Collector.collect`."""
        return self.collector.collect(sampler, update, clock)

    def stats(self, batch: TranslationBatch) -> Stats:
        """Return stats of the rewards, and of the alignment of tokens."""
        unaligned = sum(rollout.unaligned_tokens for rollout in batch.rollouts)
        return {"unaligned_tokens": unaligned} | reward_stats(batch.rewards, self.cfg.reward)

    def advantages(
        self, rollouts: list[TranslationRollout], rewards: list[SampleReward]
    ) -> TokenAdvantages:
        """Return the advantages, with the options of `rl`."""
        return rollout_advantages(rollouts, rewards, self.cfg.rl)

    def dump(
        self, batch: TranslationBatch, advantages: TokenAdvantages | None
    ) -> Iterable[dict[str, Any]]:
        """Yield the lines of trainer/translation/dumps.py."""
        return training_lines(batch.rollouts, batch.rewards, batch.scored_indices, advantages)

    def evaluate(self, sampler: Sampler, name: str) -> Report:
        """Translate a set and score it."""
        cfg, learner = self.cfg, self.learner
        prompts = learner.sets[name]
        with autocast(self.world.device, cfg.misc.dtype):
            return evaluate_on_dataset(
                [prompt.example for prompt in prompts],
                learner.model,
                learner.tokenizer,
                cfg.eval_generation(),
                self.rewarder,
                cfg.reward,
                sampler,
                self.world,
                prompts,
                self.metrics,
            )

    def read_reports(self, folder: Path) -> Mapping[str, Reports]:
        """Return the reports of a run's folder, by the names of their sets."""
        return read_reports(folder)

    def eval_summary(self, update: int, report: Report, name: str) -> str:
        """Return the console line of an evaluation."""
        return evaluation_line(update, report, name)
