"""The loop: rollouts -> rewards -> advantages -> update. The one file that sees all the parts."""

from __future__ import annotations

import logging
import signal
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from scorekit.errors import UserError
from scorekit.prompts import load_postprocess, load_template
from trainer.rl.advantage import TokenAdvantages
from trainer.rl.engines.choice import open_sampler, probe_engine
from trainer.rl.policy import autocast, prepare_torch
from trainer.rl.sampler import Sampler, check_uncut
from trainer.rl.update import NO_UPDATE, TrainStats, learning_rate, set_learning_rate, update_policy
from trainer.rl.world import World
from trainer.runs.config import THE_SET
from trainer.runs.console import Console
from trainer.runs.leaving import Leaving
from trainer.runs.messages import Messages, messages
from trainer.runs.resume import checkpoint_to_resume
from trainer.runs.runlog import Clock, RunLog, SilentLog, check_run_dir, open_run_dir, read_jsonl
from trainer.runs.saver import Saver
from trainer.runs.stops import StopRules
from trainer.runs.trackers import check_trackers, track, tracking
from trainer.translation.collect import Collector
from trainer.translation.config import TrainerConfig
from trainer.translation.config_data import set_key
from trainer.translation.data import Example, in_both
from trainer.translation.dumps import training_lines
from trainer.translation.evaluation.evaluate import Report, evaluate_on_dataset, read_reports
from trainer.translation.evaluation.figures import (
    advantage_figures,
    importance_figures,
    reward_figures,
    rollout_figures,
)
from trainer.translation.learner import Learner, load_learner
from trainer.translation.outcome import Artifacts, Reports, ended_before
from trainer.translation.rewards.advantages import rollout_advantages
from trainer.translation.rewards.earned import SampleReward
from trainer.translation.rewards.guards import check_guards
from trainer.translation.rewards.screening import screen
from trainer.translation.rewards.services import Rewarder
from trainer.translation.rewards.terms import weighted
from trainer.translation.rollouts import TranslationRollout
from trainer.translation.tables import columns, evaluation_line

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
    if checkpoint and (ended := ended_before(cfg, checkpoint)):
        return replace(ended, is_main=world.is_main)
    if checkpoint is None:
        world.on_main(lambda: check_run_dir(cfg, resume or None))
    world.on_main(lambda: open_run_dir(cfg))
    rewarder = held.enter_context(
        closing(Rewarder(cfg.reward, caching=cfg.misc.caching, misc=cfg.misc))
    )
    if not isinstance(eval_examples, Mapping):
        eval_examples = {cfg.best_by: eval_examples}
    sets = {name: of[: cfg.eval.eval_limit] for name, of in eval_examples.items() if of}
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
) -> Trainer:
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
    return Trainer(cfg, rewarder, learner, sampler, world, saver, runlog, checkpoint, done)


class Trainer:
    """The loop of a run, over what `open_trainer` has loaded and opened."""

    def __init__(
        self,
        cfg: TrainerConfig,
        rewarder: Rewarder,
        learner: Learner,
        sampler: Sampler,
        world: World,
        saver: Saver,
        runlog: RunLog,
        checkpoint: Path | None,
        done: int | None,
    ) -> None:
        """done: updates behind the checkpoint that the run goes on from; None: it begins."""
        self.cfg, self.rewarder, self.learner, self.sampler = cfg, rewarder, learner, sampler
        self.world, self.saver, self.log = world, saver, runlog
        self.checkpoint, self.done, self.saved = checkpoint, done, done
        self.updates = read_jsonl(runlog.folder / "log.jsonl")
        self.stops = StopRules(cfg.stop, self.updates)
        self.reports = {name: Reports() for name in learner.sets} | read_reports(runlog.folder)
        self.leaving = Leaving(quiet=not world.is_main)
        self.collector = Collector(cfg, world, rewarder, learner, self.leaving)

    def run(self) -> Artifacts:
        """All updates, with evaluations before, between and after."""
        rl, start = self.cfg.rl, self.done or 0
        self.sampler.sync(self.learner.model, start)
        config = self.cfg.model_dump(mode="json")
        quiet, verbose = not self.world.is_main, self.cfg.misc.verbose
        leaves = 0
        with (
            self.leaving,
            tracking(self.world.accelerator, config, self.done),
            Console(*columns(), rl.num_updates, start, quiet=quiet, verbose=verbose) as console,
        ):
            for update in range(start, rl.num_updates + 1):
                if update > start:
                    self.leaving.patient = True
                    line = self.step(update)
                    if line is None:  # without rewards: the run ends behind the update before
                        leaves, _ = self.agree(last=False)
                        if update - 1 > start and self.saved != update - 1:
                            self.save(update - 1)
                        break
                    self.updates.append(line)
                    console.update(line)
                last = update == rl.num_updates or self.stops.reason is not None
                leaves, last = self.agree(last=last)
                for name in self.sets_to_evaluate(update, last) if not leaves else ():
                    self.reports[name].append((update, self.evaluate(update, name)))
                    console.say(evaluation_line(update, self.reports[name][-1][1], name))
                    leaves, last = self.agree(last=last)
                ends = last or leaves > 0
                if update and self.agree(last=ends or self.saver.is_due(update, self.deciding))[1]:
                    self.save(update)
                if ends:
                    break
        return self.artifacts(leaves)

    def agree(self, *, last: bool) -> tuple[int, bool]:
        """(number of the signal that asked any process to leave, or 0; what the main process
        decided): the same on all."""
        found = self.world.gather([(self.leaving.asked, last)])
        return max(asked for asked, _ in found), found[0][1]

    @property
    def deciding(self) -> Reports:
        """Of the set that the best checkpoint is chosen by."""
        return self.reports.get(self.cfg.best_by, [])

    def sets_to_evaluate(self, update: int, last: bool) -> list[str]:
        """Those that belong here, and that an earlier process has not evaluated."""
        every = self.cfg.eval.eval_every_n_updates
        due = update == 0 or last or (every > 0 and update % every == 0)
        return [
            name for name in self.learner.sets if due and update not in dict(self.reports[name])
        ]

    def save(self, update: int) -> None:
        """A checkpoint; every process has to call it."""
        self.log.sync()
        self.world.at(f"update {update}, checkpoint")
        report, learner = dict(self.deciding).get(update), self.learner
        self.checkpoint = self.saver.save(
            update, report, learner.model, learner.tokenizer, learner.optimizer
        )
        self.saved = update

    def artifacts(self, leaves: int) -> Artifacts:
        """What has become of the run. leaves: the signal that ended it, or 0."""
        stopped, code = self.stops.reason, 1 if self.stops.reason else 0
        if self.collector.fault is not None:
            stopped, code = self.collector.fault, 3
        elif leaves and not (stopped or self.finished):
            done = f"update {self.saved}" if self.saved else "no update yet"
            stopped = f"{signal.Signals(leaves).name} after {done}: go on with --resume"
            code = 128 + leaves
        if stopped and code > 1 and self.world.is_main:
            log.warning("the run ends: %s", stopped)
        self.world.wait()  # torchrun ends the others with the first that leaves
        return Artifacts(
            self.log.folder,
            self.checkpoint,
            self.updates,
            self.deciding,
            self.reports,
            stopped,
            self.world.is_main,
            code,
        )

    @property
    def finished(self) -> bool:
        """Whether all updates are done, and the evaluations behind the last one."""
        last = self.cfg.rl.num_updates
        evaluated = all(last in dict(self.reports[name]) for name in self.learner.sets)
        return self.saved == last and evaluated

    def step(self, update: int) -> dict[str, Any] | None:
        """One update (from 1); returns its line of the log. None where it has no rewards, and has
        not begun."""
        cfg, clock = self.cfg, Clock()
        collected = self.collector.collect(self.sampler, update, clock)
        if collected is None:
            return None
        rollouts, rewards = collected
        kept = [i for i, reward in enumerate(rewards) if reward.r_seq is not None]
        lr = learning_rate(update - 1, cfg.rl)
        line: dict[str, Any] = {"update": update, "skipped": True, "lr": lr}
        line |= rollout_figures(rollouts)
        line |= importance_figures(rollouts, cfg.rl) | reward_figures(rewards, cfg.reward)
        advantages, stats = None, NO_UPDATE
        if kept:
            advantages, stats = self.learn(
                [rollouts[i] for i in kept], [rewards[i] for i in kept], update, lr
            )
        line |= advantage_figures(advantages) | asdict(stats) | {"skipped": stats.steps == 0}
        if stats.steps == 0 and self.world.is_main:
            why = "no optimiser step could be taken" if kept else "no sample was scored"
            log.warning("update %d is skipped: %s", update, why)
        self.sampler.sync(self.learner.model, update)
        clock.lap("update_s")
        if cfg.misc.dump_every_n_updates and update % cfg.misc.dump_every_n_updates == 0:
            dump = training_lines(rollouts, rewards, kept, advantages)
            self.log.write_completions(update, dump)
        line |= clock.seconds | {"attempts": self.collector.attempts}
        line["stopped"] = self.stops.add(line)
        self.log.write_update(line)
        track(self.world.accelerator, "train", line, update)
        return line

    def learn(
        self,
        rollouts: list[TranslationRollout],
        rewards: list[SampleReward],
        update: int,
        lr: float,
    ) -> tuple[TokenAdvantages, TrainStats]:
        """Advantages and the update of the policy."""
        rl, learner = self.cfg.rl, self.learner
        self.world.at(f"update {update}, learning")
        advantages = rollout_advantages(rollouts, rewards, rl)
        set_learning_rate(learner.optimizer, lr)
        stats = update_policy(
            rollouts,
            advantages,
            learner.optimizer,
            rl,
            policy_model=learner.model,
            temperature=self.cfg.generation.temperature,
            pad_id=learner.pad_id,
            dtype=self.cfg.misc.dtype,
            seed=self.cfg.misc.seed * 1_000_003 + update,
            world=self.world,
        )
        return advantages, stats

    def evaluate(self, update: int, name: str) -> Report:
        """An evaluation of a set, logged and dumped."""
        cfg, learner = self.cfg, self.learner
        prompts = learner.sets[name]
        self.world.at(f"update {update}, evaluation")
        with autocast(self.world.device, cfg.misc.dtype):
            report = evaluate_on_dataset(
                [prompt.example for prompt in prompts],
                learner.model,
                learner.tokenizer,
                cfg.eval_generation(),
                self.rewarder,
                cfg.reward,
                self.sampler,
                self.world,
                prompts,
            )
        of = {"update": update, "set": name, "decides": name == cfg.best_by}
        self.log.write_evaluation(of | report.figures(), report.examples)
        part = "eval" if name == THE_SET else f"eval/{name}"
        track(self.world.accelerator, part, report.figures(), update)
        return report
