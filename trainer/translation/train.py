"""The loop: rollouts -> rewards -> advantages -> update. The one file that sees all the parts."""

from __future__ import annotations

import logging
import signal
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scorekit.errors import UserError
from scorekit.prompts import load_postprocess, load_template
from trainer.rl.advantage import TokenAdvantages
from trainer.rl.engine_generate import GenerateSampler
from trainer.rl.engine_vllm import VLLMSampler, probe_server
from trainer.rl.forward import check_head
from trainer.rl.policy import (
    Reference,
    autocast,
    load_policy,
    pad_token_id,
    prepare_torch,
    stop_token_ids,
)
from trainer.rl.sampler import Sampler, check_uncut
from trainer.rl.update import NO_UPDATE, TrainStats, learning_rate, set_learning_rate, update_policy
from trainer.rl.world import World
from trainer.runs.config import THE_SET
from trainer.runs.console import Console
from trainer.runs.leaving import Leaving
from trainer.runs.messages import Messages, messages
from trainer.runs.resume import (
    Origin,
    checkpoint_to_resume,
    prompt_origin,
    service_origin,
    weight_origin,
)
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
from trainer.translation.outcome import Artifacts, Reports, ended_before
from trainer.translation.prompting import fitting_prompts
from trainer.translation.rewards.advantages import rollout_advantages
from trainer.translation.rewards.formula import SampleReward
from trainer.translation.rewards.guards import check_guards
from trainer.translation.rewards.services import Rewarder
from trainer.translation.rollouts import TranslationRollout
from trainer.translation.screening import screen
from trainer.translation.tables import COLUMNS, FEW, evaluation_line

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
        prepare_torch(cfg.misc.device, cfg.misc.threads), cfg.misc.trackers,
        Path(cfg.misc.run_dir) / "trackers", patience_s=cfg.misc.patience_s,
    )  # fmt: skip
    with messages() as heard, world.together():
        return _run(train_examples, eval_examples, cfg, world, heard, resume)


def _run(
    train_examples: Sequence[Example],
    eval_examples: Sequence[Example] | Mapping[str, Sequence[Example]],
    cfg: TrainerConfig,
    world: World,
    heard: Messages,
    resume: bool,
) -> Artifacts:
    """`run_toy_rl` in this world."""
    pairs = ((example.src_lang_code, example.tgt_lang_code) for example in train_examples)
    check_guards(pairs, cfg.reward.guards)
    checkpoint = checkpoint_to_resume(cfg) if resume else None
    if checkpoint and (ended := ended_before(cfg, checkpoint)):
        return replace(ended, is_main=world.is_main)
    if checkpoint is None:
        world.on_main(lambda: check_run_dir(cfg, resume or None))
    world.on_main(lambda: open_run_dir(cfg))
    with closing(Rewarder(cfg.reward, caching=cfg.misc.caching, misc=cfg.misc)) as rewarder:
        if not isinstance(eval_examples, Mapping):
            eval_examples = {cfg.best_by: eval_examples}
        sets = {name: of[: cfg.eval.eval_limit] for name, of in eval_examples.items() if of}
        train_examples = screen(cfg.data, train_examples, sets, rewarder, world)
        for name, held_out in sets.items() if world.is_main else ():
            if told := in_both(set_key(name), train_examples, held_out):
                log.warning("%s", told)
        trainer = Trainer(
            cfg, rewarder, train_examples, sets, world,
            checkpoint=checkpoint, overwrite=resume or None,
        )  # fmt: skip
        if world.is_main:
            heard.write_to(trainer.log.folder)
        with closing(trainer.sampler):
            return trainer.run()


def check_trainable(cfg: TrainerConfig) -> None:
    """Raise UserError where nothing could be learned, or something wrong."""
    check_uncut(cfg.generation, cfg.corrects_importance)
    if not cfg.reward.has_terms:
        raise UserError(
            "reward: every term is 0 (w_metricx, w_xcomet_seq, w_xcomet_span, no_eos_penalty, "
            "guards.w_*): there is nothing to learn; give one of them a weight"
        )
    load_template(cfg.generation.prompt_template)
    load_postprocess(cfg.generation.postprocess)
    check_trackers(cfg.misc.trackers)


class Trainer:
    """Models, optimiser, prompts and log of a run."""

    def __init__(
        self,
        cfg: TrainerConfig,
        rewarder: Rewarder,
        train: Sequence[Example],
        sets: Mapping[str, Sequence[Example]],
        world: World,
        *,
        checkpoint: Path | None = None,
        overwrite: bool | None = None,
    ) -> None:
        """checkpoint: go on from it. overwrite: replace a run in run_dir; default: the config's."""
        self.cfg, self.rewarder = cfg, rewarder
        self.world, self.device = world, world.device
        torch.manual_seed(cfg.misc.seed)  # of fresh adapters
        adapters, served = cfg.policy.lora.r > 0, None
        if cfg.generation.engine == "vllm":
            served = probe_server(cfg.generation.vllm, adapters=adapters)
        # Weights that are shared go to their device in parts, so that none has to hold them all.
        in_parts = world.is_sharded and not cfg.policy.load_in_4bit
        place = torch.device("cpu") if in_parts else self.device
        model, self.tokenizer = load_policy(cfg.policy, place)
        self.reference: Reference | None = None
        if cfg.rl.kl_coef or cfg.stop.kl_ceiling is not None:
            shard = world.shard if world.is_sharded else None
            self.reference = Reference(cfg.policy, model, place, shard)
        learns = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(learns, lr=cfg.rl.lr, weight_decay=cfg.rl.weight_decay)
        check_head(model)
        origin = weight_origin(cfg.policy) | service_origin(rewarder.infos)
        origin |= self._fit(train, sets, model)
        self.pad_id = pad_token_id(model, self.tokenizer)
        self.saver = Saver(cfg, self.world, origin)
        self.done = None if checkpoint is None else self.saver.load_weights(checkpoint, model)
        self.model, self.optimizer = self.world.prepare(model, optimizer)
        self.sampler: Sampler
        if served is None:
            self.sampler = GenerateSampler(self.model, self.tokenizer, self.world)
        else:
            self.sampler = VLLMSampler(
                cfg.generation.vllm, served, stop_token_ids(model, self.tokenizer), self.world,
                adapters=adapters, run_dir=cfg.misc.run_dir,
            )  # fmt: skip
        if world.is_main:
            self.log = RunLog(cfg, rewarder.infos, overwrite=overwrite, done=self.done)
        else:
            self.log = SilentLog(cfg)
        world.wait()  # nobody reads the folder while it is made
        self.updates = read_jsonl(self.log.folder / "log.jsonl")
        self.stops = StopRules(cfg.stop, self.updates)
        self.reports = {name: Reports() for name in self.sets} | read_reports(self.log.folder)
        self.leaving = Leaving(quiet=not world.is_main)
        self.collector = Collector(
            cfg, world, rewarder, self.model, self.tokenizer, self.pad_id, self.reference,
            self.leaving,
        )  # fmt: skip
        self.checkpoint, self.saved = checkpoint, self.done
        if checkpoint is not None:
            self.saver.load_rest(checkpoint, self.model, self.optimizer)

    def _fit(
        self, train: Sequence[Example], sets: Mapping[str, Sequence[Example]], model: nn.Module
    ) -> Origin:
        """Take the examples whose prompts fit; says of the others. Raises UserError."""
        cfg, origin = self.cfg, Origin()
        fit: dict[str, list[Example]] = {}
        paths = {name: of.path for name, of in cfg.data.held_out.items()}
        for key, path, examples, gen_cfg in (
            ("data.train", cfg.data.train, train, cfg.generation),
            *(
                (set_key(name), paths.get(name), of, cfg.eval_generation())
                for name, of in sets.items()
            ),
        ):
            fit[key], prompts, told = fitting_prompts(
                key, examples, model, self.tokenizer, gen_cfg,
                refuse=cfg.data.overlong_prompts == "refuse",
            )  # fmt: skip
            if told and self.world.is_main:
                log.warning("%s", told)
            texts = [example.src_text for example in fit[key]]
            origin |= prompt_origin(key, path, texts, [ids for _, ids in prompts])
        self.train = fit["data.train"]
        self.sets = {name: fit[set_key(name)] for name in sets}
        return origin

    def run(self) -> Artifacts:
        """All updates, with evaluations before, between and after."""
        rl, start = self.cfg.rl, self.done or 0
        self.sampler.sync(self.model, start)
        config = self.cfg.model_dump(mode="json")
        quiet, verbose = not self.world.is_main, self.cfg.misc.verbose
        leaves = 0
        with (
            self.leaving,
            tracking(self.world.accelerator, config, self.done),
            Console(COLUMNS, FEW, rl.num_updates, start, quiet=quiet, verbose=verbose) as console,
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
        return [name for name in self.sets if due and update not in dict(self.reports[name])]

    def save(self, update: int) -> None:
        """A checkpoint; every process has to call it."""
        self.log.sync()
        self.world.at(f"update {update}, checkpoint")
        report = dict(self.deciding).get(update)
        self.checkpoint = self.saver.save(
            update, report, self.model, self.tokenizer, self.optimizer
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
            self.log.folder, self.checkpoint, self.updates, self.deciding, self.reports, stopped,
            self.world.is_main, code,
        )  # fmt: skip

    @property
    def finished(self) -> bool:
        """Whether all updates are done, and the evaluations behind the last one."""
        last = self.cfg.rl.num_updates
        evaluated = all(last in dict(self.reports[name]) for name in self.sets)
        return self.saved == last and evaluated

    def step(self, update: int) -> dict[str, Any] | None:
        """One update (from 1); returns its line of the log. None where it has no rewards, and has
        not begun."""
        cfg, clock = self.cfg, Clock()
        collected = self.collector.collect(self.train, self.sampler, update, clock)
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
        self.sampler.sync(self.model, update)
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
        rl = self.cfg.rl
        self.world.at(f"update {update}, learning")
        advantages = rollout_advantages(rollouts, rewards, rl)
        set_learning_rate(self.optimizer, lr)
        stats = update_policy(
            rollouts, advantages, self.optimizer, rl,
            policy_model=self.model, temperature=self.cfg.generation.temperature,
            pad_id=self.pad_id, dtype=self.cfg.misc.dtype,
            seed=self.cfg.misc.seed * 1_000_003 + update, world=self.world,
        )  # fmt: skip
        return advantages, stats

    def evaluate(self, update: int, name: str) -> Report:
        """An evaluation of a set, logged and dumped."""
        cfg = self.cfg
        self.world.at(f"update {update}, evaluation")
        with autocast(self.device, cfg.misc.dtype):
            report = evaluate_on_dataset(
                self.sets[name], self.model, self.tokenizer, cfg.eval_generation(), self.rewarder,
                cfg.reward, self.sampler, self.world,
            )  # fmt: skip
        of = {"update": update, "set": name, "decides": name == cfg.best_by}
        self.log.write_evaluation(of | report.figures(), report.examples)
        part = "eval" if name == THE_SET else f"eval/{name}"
        track(self.world.accelerator, part, report.figures(), update)
        return report
