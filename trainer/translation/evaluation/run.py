"""`scorekit evaluate`: write a policy's evaluation, alone or compared with another
policy's.

misc.run_dir gets the files of trainer/runs/evaluation/files.py, with a line for each translation.
Files of an earlier call are only replaced with --overwrite. Sampling is greedy unless the `eval`
section of the config says otherwise.

Under torchrun or accelerate the processes share the sources; the main one writes and prints.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from scorekit.errors import UserError
from scorekit.prompts import load_postprocess
from trainer.rl.config import PolicyConfig
from trainer.rl.devices import autocast, prepare_torch
from trainer.rl.distributed import DistributedContext
from trainer.rl.engines.choice import open_sampler, probe_engine
from trainer.rl.forward import check_head
from trainer.rl.policy import unwrap_peft
from trainer.runs.checkpoints.adapters import load_on_base, resolve_base_model
from trainer.runs.config import set_key
from trainer.runs.evaluation.files import (
    AGAINST,
    EvaluatedPolicy,
    EvaluationFiles,
    EvaluationOutcome,
    check_folder,
    config_text,
    has_evaluation,
    policy_at,
)
from trainer.translation.config import TranslationConfig
from trainer.translation.data import Example
from trainer.translation.evaluation.compare import compare_policies
from trainer.translation.evaluation.evaluate import evaluate_on_dataset
from trainer.translation.evaluation.held_out import HeldOutMetrics
from trainer.translation.evaluation.report import write_comparison, write_evaluation
from trainer.translation.evaluation.stats import severity_counts
from trainer.translation.rewards.screening import check_references
from trainer.translation.rewards.services import RewardClient

log = logging.getLogger(__name__)
T = TypeVar("T")

Sets = Mapping[str, Sequence[Example]]


@dataclass(frozen=True, slots=True)
class EvaluatedModel:
    """A policy to evaluate.

    path: as the user named it.
    base, adapters: what is loaded (trainer/runs/checkpoints/adapters.py).
    folder: of its evaluation.
    """

    path: str
    base: PolicyConfig
    adapters: Path | None
    folder: Path


def run_evaluation(
    cfg: TranslationConfig, sets: Sets, against: str | None = None, *, overwrite: bool = False
) -> list[EvaluationOutcome]:
    """Evaluate the policy on sets of examples by name, and compare it with another policy.

    against: another policy's folder or hub id, or the folder of an earlier evaluation, whose
    translations and scores are used unchanged.
    overwrite: replace the files of an earlier call.
    A policy may be a folder of adapters, such as a run's checkpoint. Every process has to call it;
    the main one gets the outcomes. Raises UserError for whatever the user can fix, before weights
    load if possible.
    """
    world = DistributedContext(
        prepare_torch(cfg.misc.device, cfg.misc.threads), patience_s=cfg.misc.patience_s
    )
    folder = Path(cfg.misc.run_dir)
    world.on_main(lambda: load_postprocess(cfg.generation.postprocess))
    for name, examples in sets.items():
        check_references(examples, cfg.reward, set_key(name))
    world.on_main(lambda: check_folder(cfg.misc, sets, against is not None, overwrite))
    earlier = (
        {} if against is None else _main_first(world, lambda: earlier_evaluations(against, sets))
    )
    policies = {folder: cfg.policy}
    if against is not None and not earlier:
        policies[folder / AGAINST] = policy_at(cfg.policy, against)
    candidates = _main_first(
        world,
        lambda: [_candidate(cfg, policy, target_dir) for target_dir, policy in policies.items()],
    )
    evaluations = []
    with (
        world.monitored(),
        closing(_main_first(world, lambda: _open_services(cfg, sets, earlier))) as rewarder,
    ):
        for candidate in candidates:
            evaluations.append(_evaluate(cfg, candidate, sets, rewarder, world))
            if world.is_main:
                text = config_text(cfg, candidate.path)
                for name, evaluated in evaluations[-1].items():
                    files = EvaluationFiles(candidate.folder, name)
                    files.write(evaluated, evaluated.examples, text, write_evaluation)
    if not world.is_main:
        return []
    other_evaluations = evaluations[1] if len(evaluations) > 1 else earlier
    outcomes = []
    for name, evaluated in evaluations[0].items():
        other = other_evaluations.get(name)
        if other is not None:  # a service may run another model meanwhile
            _check_scorers(other, evaluated.stats["scored_by"])
        counted = {"set": name, "sources": len(evaluated.examples)}
        outcomes.append(
            EvaluationFiles(folder, name).outcome(
                evaluated, other, compare_policies, counted, write_comparison
            )
        )
    return outcomes


def _main_first(world: DistributedContext, work: Callable[[], T]) -> T:
    """Return the result of `work` on each process; if it raises a UserError, only the main one
    prints it."""
    results: list[T] = []
    world.on_main(lambda: results.append(work()))
    return results[0] if world.is_main else work()


def _candidate(cfg: TranslationConfig, policy: PolicyConfig, folder: Path) -> EvaluatedModel:
    """Return the candidate.

    Raises UserError if its base is missing, or the vLLM server is unavailable or unsuitable.
    """
    candidate = EvaluatedModel(str(policy.path), *resolve_base_model(policy), folder)
    probe_engine(cfg.generation, adapters=candidate.base.lora.r > 0)
    return candidate


def _open_services(
    cfg: TranslationConfig, sets: Sets, earlier: Mapping[str, EvaluatedPolicy]
) -> RewardClient:
    """Return the opened services.

    Raises UserError also if a held-out metric cannot be used, or if another model scored the
    earlier evaluation.
    """
    rewarder = RewardClient(cfg.reward, caching=cfg.misc.caching, misc=cfg.misc)
    try:
        metrics = HeldOutMetrics(cfg.eval.metrics, rewarder)
        metrics.check(sets)
        for evaluation in earlier.values():
            _check_scorers(evaluation, _scorers(rewarder) | metrics.models)
    except UserError:
        rewarder.close()
        raise
    return rewarder


def _evaluate(
    cfg: TranslationConfig,
    candidate: EvaluatedModel,
    sets: Sets,
    rewarder: RewardClient,
    world: DistributedContext,
) -> dict[str, EvaluatedPolicy]:
    """Load a policy, translate and score."""
    cfg = cfg.model_copy(update={"policy": candidate.base})
    model, tokenizer = load_on_base(candidate.base, candidate.adapters, world.device)
    check_head(model)
    if world.is_sharded:
        world.shard(unwrap_peft(model))  # the module that generates
    adapters = cfg.policy.lora.r > 0
    sampler = open_sampler(
        cfg.generation,
        probe_engine(cfg.generation, adapters=adapters),
        model,
        tokenizer,
        world,
        adapters=adapters,
        run_dir=cfg.misc.run_dir,
        role="evaluate",
    )
    evaluations = {}
    metrics = HeldOutMetrics(cfg.eval.metrics, rewarder)
    with closing(sampler), autocast(world.device, cfg.misc.dtype):
        sampler.sync_weights(model, 0)
        for name, examples in sets.items():
            report = evaluate_on_dataset(
                examples,
                model,
                tokenizer,
                cfg.eval_generation(),
                rewarder,
                cfg.reward,
                sampler,
                world,
                metrics=metrics,
            )
            stats = {
                "policy": candidate.path,
                "set": name,
                "scored_by": _scorers(rewarder) | metrics.models,
                **report.stats(),
                "severities": [row._asdict() for row in severity_counts(report.examples)],
            }
            evaluations[name] = EvaluatedPolicy(candidate.path, stats, report.examples)
    return evaluations


def earlier_evaluations(against: str, sets: Sets) -> dict[str, EvaluatedPolicy]:
    """Return the evaluations in a folder, by set; {} if `against` names a policy.

    Raises UserError if they are of other sources.
    """
    if not has_evaluation(against):
        return {}
    return {
        name: EvaluationFiles(Path(against), name).read(
            "translated {} sources",
            lambda line: (line.get("pair"), line["src"]),
            [(f"{e.src_lang_code}>{e.tgt_lang_code}", e.src_text) for e in examples],
        )
        for name, examples in sets.items()
    }


def _scorers(rewarder: RewardClient) -> dict[str, str]:
    return {info.service: info.model for info in rewarder.infos.values()}


def _check_scorers(earlier: EvaluatedPolicy, now: Mapping[str, str]) -> None:
    """Raise UserError if another model scored: its scores cannot be compared with these."""
    for service, model in (earlier.stats.get("scored_by") or {}).items():
        if now.get(service, model) != model:
            raise UserError(
                f"--against: scored by the {service} model {model!r}, but the service runs "
                f"{now[service]!r}. Scores of two models cannot be compared. Evaluate it again"
            )
