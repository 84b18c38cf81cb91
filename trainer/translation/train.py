"""Train a translation policy: check, load and open everything, then run the training loop.

This is the one file that imports all the parts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any

from scorekit.errors import UserError
from scorekit.prompts import load_postprocess, load_template
from trainer.rl.advantage import TokenAdvantages
from trainer.rl.devices import autocast
from trainer.rl.distributed import DistributedContext
from trainer.rl.sampler import Sampler, check_untruncated
from trainer.rl.workload import Workload
from trainer.runs.artifacts import Artifacts
from trainer.runs.batches import Batch, RolloutBuffer
from trainer.runs.config import set_key
from trainer.runs.loop import TrainingLoop
from trainer.runs.open import OpenRun, RunStart, start_run
from trainer.runs.stats import Stats
from trainer.runs.trackers import check_trackers
from trainer.translation.collect import Collector
from trainer.translation.config import TranslationConfig
from trainer.translation.data import Example, in_both
from trainer.translation.dumps import training_lines
from trainer.translation.evaluation.evaluate import (
    Report,
    columns,
    evaluate_on_dataset,
    evaluation_line,
    read_reports,
)
from trainer.translation.evaluation.held_out import HeldOutMetrics
from trainer.translation.evaluation.stats import reward_stats
from trainer.translation.loading import load_learner
from trainer.translation.rewards.sample_reward import SampleReward, rollout_advantages
from trainer.translation.rewards.screening import (
    check_guards,
    check_references,
    check_spans,
    check_target_languages,
    screen,
)
from trainer.translation.rewards.services import RewardClient
from trainer.translation.rewards.short_form import weighted_parts
from trainer.translation.rollouts import TranslationRollout

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
    with start_run(cfg, read_reports, workload_of(cfg), resume=resume) as start:
        if start.finished is not None:
            return start.finished
        pairs = {(example.src_lang_code, example.tgt_lang_code) for example in train_examples}
        check_guards(pairs, cfg.reward.guards)
        languages = sorted({tgt_lang for _, tgt_lang in pairs})
        check_target_languages(cfg.reward.definition, "reward.definition", languages)
        client = RewardClient(cfg.reward, caching=cfg.misc.caching, misc=cfg.misc)
        rewarder = start.exit_stack.enter_context(closing(client))
        sets = eval_examples
        if not isinstance(sets, Mapping):
            sets = {cfg.best_by: sets}
        sets = {
            name: examples[: cfg.eval.eval_limit] for name, examples in sets.items() if examples
        }
        train_examples = _scorable(train_examples, sets, cfg, rewarder, start.world)
        return open_trainer(start, rewarder, train_examples, sets).run()


#: The earlier name. It stays because users call it.
run_toy_rl = train_translation


def _scorable(
    train: Sequence[Example],
    sets: Mapping[str, Sequence[Example]],
    cfg: TranslationConfig,
    rewarder: RewardClient,
    world: DistributedContext,
) -> Sequence[Example]:
    """Return the training examples that the services can score; check services and references."""
    world.on_main(lambda: check_spans(rewarder))
    check_references(train, cfg.reward, "data.train")
    for name, held_out in sets.items():
        check_references(held_out, cfg.reward, set_key(name))
    metrics = HeldOutMetrics(cfg.eval.metrics, rewarder)
    world.on_main(lambda: metrics.check(sets))
    train = screen(cfg.data, train, sets, rewarder, world)
    for name, held_out in sets.items() if world.is_main else ():
        if overlap := in_both(set_key(name), train, held_out):
            log.warning("%s", overlap)
    return train


def check_trainable(cfg: TranslationConfig) -> None:
    """Raise UserError if nothing could be trained, or with wrong results."""
    check_untruncated(cfg.generation, cfg.corrects_importance)
    if not weighted_parts(cfg.reward):
        raise UserError(
            "reward: every weight is 0 (the keys w_*, no_eos_penalty, guards, definition). "
            "Set one of them above 0, so that there is something to train on"
        )
    load_template(cfg.generation.prompt_template)
    load_postprocess(cfg.generation.postprocess)
    check_trackers(cfg.misc.trackers)


def workload_of(cfg: TranslationConfig) -> Workload:
    """Return the sizes of an update."""
    samples = cfg.generation.num_samples_per_prompt
    return Workload(
        cfg.rl,
        (samples, samples),
        "generation.num_samples_per_prompt",
        drops_sequences=cfg.rl.mask_truncated,
    )


def open_trainer(
    start: RunStart[TranslationConfig],
    rewarder: RewardClient,
    train: Sequence[Example],
    sets: Mapping[str, Sequence[Example]],
) -> TrainingLoop:
    """Load the policy, then open the run directory: an error before that leaves an earlier run as
    it is."""
    served = start.probe_engine()
    learner = load_learner(start.cfg, train, sets, rewarder.infos, start.world)
    run = start.open(learner, served, rewarder.infos)
    return TrainingLoop(run, TranslationTask(run, rewarder))


class TranslationTask:
    """The translation task of the training loop (trainer/runs/loop.py)."""

    def __init__(self, run: OpenRun[TranslationConfig], rewarder: RewardClient) -> None:
        self.cfg, self.learner, self.world = run.cfg, run.learner, run.world
        self.rewarder = rewarder
        self.metrics = HeldOutMetrics(run.cfg.eval.metrics, rewarder)
        self._run = run
        self.collector = self.open_collector(run.world)
        self.columns = columns(run.cfg.reward)

    def open_collector(
        self,
        world: DistributedContext,
        buffer: RolloutBuffer | None = None,
        should_stop: Callable[[], bool] | None = None,
    ) -> Collector:
        """Return a collector, as `OpensCollectors` says."""
        return Collector(self._run, self.rewarder, world, buffer, should_stop)

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

    def eval_summary(self, update: int, report: Report, name: str) -> str:
        """Return the console line of an evaluation."""
        return evaluation_line(update, report, name)
