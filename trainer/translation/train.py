"""Training a translator: what is checked, loaded and opened, in which order, and what the loop of
trainer/runs/loop.py asks of it. The one file that sees all the parts."""

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
from trainer.rl.engines.choice import open_sampler, probe_engine
from trainer.rl.policy import autocast, prepare_torch
from trainer.rl.sampler import Sampler, check_uncut
from trainer.rl.world import World
from trainer.runs.checkpoints.resume import checkpoint_to_resume
from trainer.runs.checkpoints.saver import Saver
from trainer.runs.config import set_key
from trainer.runs.console import Columns
from trainer.runs.figures import Figures
from trainer.runs.learner import Learner
from trainer.runs.leaving import Leaving
from trainer.runs.loop import Batch, Loop
from trainer.runs.messages import Messages, messages
from trainer.runs.outcome import Artifacts, Reports, ended_before
from trainer.runs.runlog import Clock, RunLog, SilentLog, check_run_dir, open_run_dir
from trainer.runs.trackers import check_trackers
from trainer.translation.collect import Collector
from trainer.translation.config import TrainerConfig
from trainer.translation.data import Example, in_both
from trainer.translation.dumps import training_lines
from trainer.translation.evaluation.evaluate import Report, evaluate_on_dataset, read_reports
from trainer.translation.evaluation.figures import reward_figures
from trainer.translation.evaluation.held_out import HeldOutMetrics
from trainer.translation.loading import load_learner
from trainer.translation.rewards.advantages import rollout_advantages
from trainer.translation.rewards.earned import SampleReward
from trainer.translation.rewards.guards import check_guards
from trainer.translation.rewards.screening import screen
from trainer.translation.rewards.services import Rewarder
from trainer.translation.rewards.terms import weighted
from trainer.translation.rewards.terms.chrf import check_references
from trainer.translation.rewards.terms.xcomet_spans import check_spans
from trainer.translation.rollouts import TranslationRollout
from trainer.translation.tables import columns, evaluation_line

TranslationBatch = Batch[TranslationRollout, SampleReward]
log = logging.getLogger(__name__)


def run_toy_rl(
    train_examples: Sequence[Example],
    eval_examples: Sequence[Example] | Mapping[str, Sequence[Example]],
    cfg: TrainerConfig,
    *,
    resume: bool = False,
) -> Artifacts:
    """Train, evaluate, log. Folder and services are checked before weights load, weights and
    prompts before what an earlier run left is replaced. Raises UserError on whatever the user can
    mend.

    eval_examples: sets by name, or the one that there is. resume: go on with the run of
    misc.run_dir from its newest whole checkpoint; one that has none yet starts anew in its place.
    """
    if not train_examples:
        raise UserError("there are no examples to learn from")
    check_trainable(cfg)
    world = World(
        prepare_torch(cfg.misc.device, cfg.misc.threads),
        cfg.misc.trackers,
        Path(cfg.misc.run_dir) / "trackers",
        patience_s=cfg.misc.patience_s,
    )
    with messages() as heard, world.together(), ExitStack() as held:
        return _run(train_examples, eval_examples, cfg, world, heard, held, resume)


def _run(
    train_examples: Sequence[Example],
    eval_examples: Sequence[Example] | Mapping[str, Sequence[Example]],
    cfg: TrainerConfig,
    world: World,
    heard: Messages,
    held: ExitStack,
    resume: bool,
) -> Artifacts:
    """`run_toy_rl` in this world; what is opened is held until its end."""
    pairs = ((example.src_lang_code, example.tgt_lang_code) for example in train_examples)
    check_guards(pairs, cfg.reward.guards)
    checkpoint = checkpoint_to_resume(cfg) if resume else None
    if checkpoint:
        sets_before = read_reports(Path(cfg.misc.run_dir))
        if ended := ended_before(cfg, checkpoint, sets_before):
            return replace(ended, is_main=world.is_main)
    if checkpoint is None:
        world.on_main(lambda: check_run_dir(cfg, resume or None))
    world.on_main(lambda: open_run_dir(cfg.misc))
    rewarder = held.enter_context(
        closing(Rewarder(cfg.reward, caching=cfg.misc.caching, misc=cfg.misc))
    )
    world.on_main(lambda: check_spans(rewarder.ask, cfg.reward))
    if not isinstance(eval_examples, Mapping):
        eval_examples = {cfg.best_by: eval_examples}
    sets = {name: of[: cfg.eval.eval_limit] for name, of in eval_examples.items() if of}
    check_references(train_examples, cfg.reward, "data.train")
    for name, held_out in sets.items():
        check_references(held_out, cfg.reward, set_key(name))
    metrics = HeldOutMetrics(cfg.eval.metrics, rewarder)
    world.on_main(lambda: metrics.check(sets))
    train_examples = screen(cfg.data, train_examples, sets, rewarder, world)
    for name, held_out in sets.items() if world.is_main else ():
        if told := in_both(set_key(name), train_examples, held_out):
            log.warning("%s", told)
    trainer = open_trainer(
        cfg,
        rewarder,
        train_examples,
        sets,
        world,
        held,
        checkpoint=checkpoint,
        overwrite=resume or None,
    )
    if world.is_main:
        heard.write_to(trainer.log.folder)
    return trainer.run()


def check_trainable(cfg: TrainerConfig) -> None:
    """Raise UserError where nothing could be learned, or something wrong."""
    check_uncut(cfg.generation, cfg.corrects_importance)
    if not weighted(cfg.reward):
        raise UserError(
            "reward: every term is 0 (its keys that begin with w_, no_eos_penalty, those of guards "
            "and of terms): there is nothing to learn; give one of them a weight"
        )
    load_template(cfg.generation.prompt_template)
    load_postprocess(cfg.generation.postprocess)
    check_trackers(cfg.misc.trackers)


def open_trainer(
    cfg: TrainerConfig,
    rewarder: Rewarder,
    train: Sequence[Example],
    sets: Mapping[str, Sequence[Example]],
    world: World,
    held: ExitStack,
    *,
    checkpoint: Path | None = None,
    overwrite: bool | None = None,
) -> Loop:
    """Load what learns, then open the folder of the run: what fails before leaves an earlier run as
    it is. The sampler is closed with `held`.

    checkpoint: go on from it. overwrite: replace a run in run_dir; default: the config's.
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
    held.enter_context(closing(sampler))
    runlog: RunLog = SilentLog(cfg)
    if world.is_main:
        runlog = RunLog(cfg, rewarder.infos, overwrite=overwrite, done=done)
    world.wait()  # nobody reads the folder while it is made
    if checkpoint is not None:
        saver.load_rest(checkpoint, learner.model, learner.optimizer)
    leaving = Leaving(quiet=not world.is_main)
    task = Translation(cfg, rewarder, learner, world, leaving)
    return Loop(cfg, task, learner, sampler, world, saver, runlog, leaving, checkpoint, done)


class Translation:
    """What the loop asks of a translator (trainer/runs/loop.py)."""

    def __init__(
        self,
        cfg: TrainerConfig,
        rewarder: Rewarder,
        learner: Learner,
        world: World,
        leaving: Leaving,
    ) -> None:
        self.cfg, self.rewarder, self.learner, self.world = cfg, rewarder, learner, world
        self.metrics = HeldOutMetrics(cfg.eval.metrics, rewarder)
        self.collector = Collector(cfg, world, rewarder, learner, leaving)

    @property
    def columns(self) -> tuple[Columns, Sequence[str]]:
        """Of the console."""
        return columns(self.cfg.reward)

    @property
    def fault(self) -> str | None:
        """Why the last batch has no rewards."""
        return self.collector.fault

    def collect(self, sampler: Sampler, update: int, clock: Clock) -> TranslationBatch | None:
        """See `Collector.collect`."""
        return self.collector.collect(sampler, update, clock)

    def figures(self, batch: TranslationBatch) -> Figures:
        """Of the rewards, and of how tokens and texts were aligned."""
        unaligned = sum(rollout.unaligned_tokens for rollout in batch.rollouts)
        return {"unaligned_tokens": unaligned} | reward_figures(batch.rewards, self.cfg.reward)

    def advantages(
        self, rollouts: list[TranslationRollout], rewards: list[SampleReward]
    ) -> TokenAdvantages:
        """Under the options of `rl`."""
        return rollout_advantages(rollouts, rewards, self.cfg.rl)

    def dump(
        self, batch: TranslationBatch, advantages: TokenAdvantages | None
    ) -> Iterable[dict[str, Any]]:
        """See trainer/translation/dumps.py."""
        return training_lines(batch.rollouts, batch.rewards, batch.kept, advantages)

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
        """Those of a run's folder, by the names of their sets."""
        return read_reports(folder)

    def told(self, update: int, report: Report, name: str) -> str:
        """What is said of an evaluation."""
        return evaluation_line(update, report, name)
