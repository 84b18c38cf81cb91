"""The loop: rollouts -> rewards -> advantages -> update. The one file that sees all the parts."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scorekit.errors import UserError
from scorekit.prompts import load_postprocess, load_template
from trainer.advantage import TokenAdvantages
from trainer.checkpoint import read_state
from trainer.config import TrainerConfig
from trainer.config_data import THE_SET
from trainer.config_rl import RLConfig
from trainer.console import Console
from trainer.data import Example, batch_indices, set_key
from trainer.engine_generate import GenerateSampler
from trainer.engine_vllm import VLLMSampler, probe_server
from trainer.evaluate import Report, evaluate_on_dataset
from trainer.figures import (
    advantage_figures,
    importance_figures,
    reward_figures,
    rollout_figures,
)
from trainer.forward import check_head
from trainer.guards import check_guards
from trainer.policy import (
    Reference,
    autocast,
    load_policy,
    pad_token_id,
    prepare_torch,
    stop_token_ids,
)
from trainer.prompting import check_prompts
from trainer.resume import (
    checkpoint_to_resume,
    prompt_origin,
    read_reports,
    service_origin,
    weight_origin,
)
from trainer.rewards import SampleReward, sample_rewards
from trainer.runlog import (
    Clock,
    RunLog,
    SilentLog,
    check_run_dir,
    open_run_dir,
    read_jsonl,
    training_lines,
)
from trainer.sampler import Rollout, Sampler, check_uncut, rollout_logprobs, stream_rollouts
from trainer.saver import Saver
from trainer.score_batch import Group
from trainer.services import Rewarder
from trainer.sources import screen
from trainer.stops import StopRules
from trainer.trackers import check_trackers, track, tracking
from trainer.update import (
    NO_UPDATE,
    TrainStats,
    learning_rate,
    rollout_advantages,
    set_learning_rate,
    update_policy,
)
from trainer.world import World

log = logging.getLogger(__name__)
Reports = list[tuple[int, Report]]


@dataclass(frozen=True, slots=True)
class Artifacts:
    """updates: lines of log.jsonl. sets: evaluation set -> (update, report), the first from before
    training; reports: those of the set that the best checkpoint is chosen by.
    stopped: why the run ended before its last update; None: it did not.
    is_main: whether this process writes the run's files."""

    run_dir: Path
    checkpoint: Path
    updates: list[dict[str, Any]]
    reports: Reports
    sets: dict[str, Reports]
    stopped: str | None = None
    is_main: bool = True


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
    misc.run_dir from its newest whole checkpoint; one that has none
    yet starts anew in its place.
    """
    if not train_examples:
        raise UserError("there are no examples to learn from")
    check_trainable(cfg)
    pairs = ((example.src_lang_code, example.tgt_lang_code) for example in train_examples)
    check_guards(pairs, cfg.reward.guards)
    world = World(prepare_torch(cfg.misc), cfg.misc.trackers, Path(cfg.misc.run_dir) / "trackers")
    checkpoint = checkpoint_to_resume(cfg) if resume else None
    if checkpoint is not None and (ended := _ended(cfg, checkpoint)):
        return replace(ended, is_main=world.is_main)
    if checkpoint is None:
        world.on_main(lambda: check_run_dir(cfg, resume or None))
    world.on_main(lambda: open_run_dir(cfg))
    with closing(Rewarder(cfg.reward, caching=cfg.misc.caching, misc=cfg.misc)) as rewarder:
        if not isinstance(eval_examples, Mapping):
            eval_examples = {cfg.best_by: eval_examples}
        sets = {name: of[: cfg.eval.eval_limit] for name, of in eval_examples.items() if of}
        train_examples = screen(cfg.data, train_examples, sets, rewarder, world)
        trainer = Trainer(
            cfg, rewarder, train_examples, sets, world,
            checkpoint=checkpoint, overwrite=resume or None,
        )  # fmt: skip
        with closing(trainer.sampler):
            return trainer.run()


def _ended(cfg: TrainerConfig, checkpoint: Path) -> Artifacts | None:
    """What a run left that has no update to do; None where it has."""
    folder, done = Path(cfg.misc.run_dir), read_state(checkpoint).update
    updates = [line for line in read_jsonl(folder / "log.jsonl") if line["update"] <= done]
    stopped = StopRules(cfg.stop, updates).reason
    if done < cfg.rl.num_updates and stopped is None:
        return None
    if stopped is None:
        log.warning("%s has its %d updates: raise rl.num_updates to go on", folder, done)
    sets = read_reports(folder)
    return Artifacts(folder, checkpoint, updates, sets.get(cfg.best_by, []), sets, stopped)


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


def check_share(rl: RLConfig, world: World) -> None:
    """Raise UserError where processes that hold the weights together could not sample side by
    side."""
    prompts = rl.batch_size * rl.grad_accum
    if world.is_sharded and prompts % world.size:
        raise UserError(
            f"rl.batch_size x rl.grad_accum: {prompts} prompts are no multiple of the {world.size} "
            "processes that share the weights"
        )


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
        self.train, self.sets = train, dict(sets)
        self.world, self.device = world, world.device
        check_share(cfg.rl, world)
        torch.manual_seed(cfg.misc.seed)  # of fresh adapters
        served = probe_server(cfg) if cfg.generation.engine == "vllm" else None
        model, self.tokenizer = load_policy(cfg.policy, self.device)
        self.reference: Reference | None = None
        if cfg.rl.kl_coef or cfg.stop.kl_ceiling is not None:
            self.reference = Reference(cfg.policy, model, self.device)
        learns = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(learns, lr=cfg.rl.lr, weight_decay=cfg.rl.weight_decay)
        check_head(model)
        origin = weight_origin(cfg.policy) | service_origin(rewarder.infos)
        paths = {name: of.path for name, of in cfg.data.held_out.items()}
        for key, path, examples, gen_cfg in (
            ("data.train", cfg.data.train, train, cfg.generation),
            *(
                (set_key(name), paths.get(name), of, cfg.eval_generation())
                for name, of in self.sets.items()
            ),
        ):
            prompts = check_prompts(examples, model, self.tokenizer, gen_cfg)
            origin |= prompt_origin(key, path, examples, prompts)
        self.pad_id = pad_token_id(model, self.tokenizer)
        self.saver = Saver(cfg, self.world, origin)
        self.done = None if checkpoint is None else self.saver.load_weights(checkpoint, model)
        self.model, self.optimizer = self.world.accelerator.prepare(model, optimizer)
        self.sampler: Sampler
        if served is None:
            self.sampler = GenerateSampler(
                self.model, self.tokenizer, many_processes=self.world.is_sharded
            )
        else:
            self.sampler = VLLMSampler(
                cfg, served, stop_token_ids(model, self.tokenizer), self.world
            )
        if world.is_main:
            self.log = RunLog(cfg, rewarder.infos, overwrite=overwrite, done=self.done)
        else:
            self.log = SilentLog(cfg)
        world.wait()  # nobody reads the folder while it is made
        self.updates = read_jsonl(self.log.folder / "log.jsonl")
        self.stops = StopRules(cfg.stop, self.updates)
        if checkpoint is not None:
            self.saver.load_rest(checkpoint, self.model, self.optimizer)

    def run(self) -> Artifacts:
        """All updates, with evaluations before, between and after."""
        rl, every = self.cfg.rl, self.cfg.eval.eval_every_n_updates
        sets = read_reports(self.log.folder)
        for name in self.sets:
            sets.setdefault(name, [])
        reports = sets.get(self.cfg.best_by, [])
        self.sampler.sync(self.model, self.done or 0)
        first = 0 if self.done is None else self.done + 1
        config = self.cfg.model_dump(mode="json")
        quiet, verbose = not self.world.is_main, self.cfg.misc.verbose
        with (
            tracking(self.world.accelerator, config, self.done),
            Console(rl.num_updates, self.done or 0, quiet=quiet, verbose=verbose) as console,
        ):
            for update in range(first, rl.num_updates + 1):
                if update > 0:
                    self.updates.append(self.step(update))
                    console.update(self.updates[-1])
                last = update == rl.num_updates or self.stops.reason is not None
                if update == 0 or last or (every and update % every == 0):
                    for name in self.sets:
                        sets[name].append((update, self.evaluate(update, name)))
                        console.evaluation(update, sets[name][-1][1], name)
                if update and (last or self.saver.is_due(update, reports)):
                    self.log.sync()
                    report = dict(reports).get(update)
                    checkpoint = self.saver.save(
                        update, report and report.reward_mean,
                        self.model, self.tokenizer, self.optimizer,
                    )  # fmt: skip
                if last:
                    break
        return Artifacts(
            self.log.folder,
            checkpoint,
            self.updates,
            reports,
            sets,
            self.stops.reason,
            self.world.is_main,
        )

    def step(self, update: int) -> dict[str, Any]:
        """One update (from 1); returns its line of the log."""
        cfg, clock = self.cfg, Clock()
        rollouts, rewards = self.collect(update, clock)
        kept = [i for i, reward in enumerate(rewards) if reward.r_seq is not None]
        lr = learning_rate(update - 1, cfg.rl)
        line = {"update": update, "skipped": True, "lr": lr, **rollout_figures(rollouts)}
        line |= importance_figures(rollouts, cfg.rl) | reward_figures(rewards, cfg.reward)
        advantages, stats = None, NO_UPDATE
        if kept:
            advantages, stats = self.learn(
                [rollouts[i] for i in kept], [rewards[i] for i in kept], update, lr
            )
        line |= advantage_figures(advantages) | asdict(stats) | {"skipped": stats.steps == 0}
        if stats.steps == 0:
            why = "no optimiser step could be taken" if kept else "no sample was scored"
            log.warning("update %d is skipped: %s", update, why)
        self.sampler.sync(self.model, update)
        clock.lap("update_s")
        if cfg.misc.dump_every_n_updates and update % cfg.misc.dump_every_n_updates == 0:
            dump = training_lines(rollouts, rewards, kept, advantages)
            self.log.write_completions(update, dump)
        line |= clock.seconds
        line["stopped"] = self.stops.add(line)
        self.log.write_update(line)
        track(self.world.accelerator, "train", line, update)
        return line

    def collect(self, update: int, clock: Clock) -> tuple[list[Rollout], list[SampleReward]]:
        """Rollouts of the whole batch with their log-probabilities and rewards.

        A prompt's samples go to the services as soon as they are there, while others are still
        generated; and while the last of them are scored, the forward passes are made. `reward_s`
        is what is left to wait for then.
        """
        cfg, rl = self.cfg, self.cfg.rl
        prompts = rl.batch_size * rl.grad_accum
        indices = batch_indices(len(self.train), prompts, update, cfg.misc.seed)
        mine = self.world.share(indices)
        groups: list[list[Rollout]] = []
        batch = self.rewarder.batch()
        asked: list[Group] = []
        with autocast(self.device, cfg.misc.dtype):
            for group in stream_rollouts(
                self.sampler, [self.train[i] for _, i in mine], self.model, self.tokenizer,
                cfg.generation, seed=self.seed(update), groups=[place for place, _ in mine],
            ):  # fmt: skip
                groups.append(group)
                asked.append(batch.submit([(r.src_text, r.completion_text) for r in group]))
            clock.lap("rollout_s")
            self.add_logprobs([rollout for group in groups for rollout in group])
        clock.lap("logprob_s")
        scored = [
            (group, sample_rewards(group, scores.result(), cfg.reward))
            for group, scores in zip(groups, asked, strict=True)
        ]
        clock.lap("reward_s")
        whole = sorted(self.world.gather(scored), key=lambda pair: pair[0][0].group)
        rollouts = [rollout for group, _ in whole for rollout in group]
        return rollouts, [reward for _, rewards in whole for reward in rewards]

    def add_logprobs(self, rollouts: list[Rollout]) -> None:
        """Those of the reference; and, where the sampler's are not the trainer's, the trainer's."""
        cfg = self.cfg

        def rows(model: nn.Module) -> list[list[float]]:
            return rollout_logprobs(
                rollouts, model, cfg.generation.temperature, self.pad_id,
                cfg.rl.micro_batch_tokens, self.world,
            )  # fmt: skip

        if self.reference is not None:
            with self.reference.active() as reference:
                for rollout, row in zip(rollouts, rows(reference), strict=True):
                    rollout.ref_logprobs = row
        if cfg.corrects_importance:
            for rollout, row in zip(rollouts, rows(self.model), strict=True):
                rollout.sampler_logprobs, rollout.old_logprobs = rollout.old_logprobs, row

    def learn(
        self,
        rollouts: list[Rollout],
        rewards: list[SampleReward],
        update: int,
        lr: float,
    ) -> tuple[TokenAdvantages, TrainStats]:
        """Advantages and the update of the policy."""
        rl = self.cfg.rl
        advantages = rollout_advantages(rollouts, rewards, rl)
        set_learning_rate(self.optimizer, lr)
        stats = update_policy(
            rollouts, advantages, self.optimizer, rl,
            policy_model=self.model, temperature=self.cfg.generation.temperature,
            pad_id=self.pad_id, dtype=self.cfg.misc.dtype,
            seed=self.cfg.misc.seed * 1_000_003 + update, world=self.world,
        )  # fmt: skip
        return advantages, stats

    def seed(self, update: int) -> int:
        """Of this process's sampling: a function of the update, so that a run can start again
        anywhere."""
        return self.cfg.misc.seed * 1_000_003 + update + self.world.rank * 999_999_937

    def evaluate(self, update: int, name: str) -> Report:
        """An evaluation of a set, logged and dumped."""
        cfg = self.cfg
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
