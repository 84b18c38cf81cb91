"""`python -m trainer evaluate`: write a policy's evaluation, alone or compared with another
policy's.

misc.run_dir gets evaluation.json (stats), evaluation.jsonl (a line for each translation) and
evaluation.html; against another policy, also comparison.json and comparison.html, and the other's
evaluation in `against/`. For a set with a name (`data.eval_sets`), the files are
evaluation-NAME.json and so on. Files of an earlier call are only replaced with --overwrite.
Sampling is greedy unless the `eval` section of the config says otherwise.

Under torchrun or accelerate the processes share the sources; the main one writes and prints.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import yaml

from scorekit.errors import UserError
from scorekit.prompts import load_postprocess
from trainer.rl.config import PolicyConfig
from trainer.rl.distributed import DistributedContext
from trainer.rl.engines.choice import open_sampler, probe_engine
from trainer.rl.forward import check_head
from trainer.rl.policy.devices import autocast, prepare_torch
from trainer.rl.policy.wrappers import unwrap_peft
from trainer.runs.checkpoints.adapters import load_on_base, resolve_base_model
from trainer.runs.cli.paired import PairedStat, comparison_values
from trainer.runs.config import DEFAULT_EVAL_SET, set_key
from trainer.runs.run_log import open_run_dir, read_jsonl, write_json, write_jsonl
from trainer.translation.config import TranslationConfig
from trainer.translation.data import Example
from trainer.translation.evaluation.compare import compare_policies
from trainer.translation.evaluation.evaluate import evaluate_on_dataset
from trainer.translation.evaluation.held_out import HeldOutMetrics
from trainer.translation.evaluation.report import write_comparison, write_evaluation
from trainer.translation.evaluation.stats import severity_counts
from trainer.translation.rewards.components.chrf import check_references
from trainer.translation.rewards.services import RewardClient

log = logging.getLogger(__name__)
T = TypeVar("T")

Sets = Mapping[str, Sequence[Example]]


@dataclass(frozen=True, slots=True)
class EvaluatedSet:
    """An evaluation of a policy on a set.

    policy: its path.
    stats: those of `Report`, and `scored_by`: the model of each service.
    lines: of its dump.
    """

    policy: str
    stats: Mapping[str, Any]
    lines: Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class SetComparison:
    """The results for one set of examples.

    earlier: the other policy's evaluation.
    groups: the result of `compare_policies` for it and `evaluation`.
    page, comparison: files.
    """

    name: str
    evaluation: EvaluatedSet
    page: Path
    earlier: EvaluatedSet | None = None
    groups: Mapping[str, Sequence[PairedStat]] | None = None
    comparison: Path | None = None


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
) -> list[SetComparison]:
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
    world.on_main(lambda: _check_folder(cfg, sets, against is not None, overwrite))
    earlier = {} if against is None else _main_first(world, lambda: _earlier(against, sets))
    policies = {folder: cfg.policy}
    if against is not None and not earlier:
        policies[folder / "against"] = cfg.policy.model_copy(
            update={"path": against, "tokenizer": None, "revision": None}
        )
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
                _write(cfg, candidate, evaluations[-1])
    if not world.is_main:
        return []
    outcomes = [
        SetComparison(name, evaluations[0][name], folder / _file(name, "html")) for name in sets
    ]
    other_evaluation = evaluations[1] if len(evaluations) > 1 else earlier
    return [
        _compare(folder, outcome, other_evaluation[outcome.name]) if other_evaluation else outcome
        for outcome in outcomes
    ]


def _main_first(world: DistributedContext, work: Callable[[], T]) -> T:
    """Return the result of `work` on each process; if it raises a UserError, only the main one
    prints it."""
    results: list[T] = []
    world.on_main(lambda: results.append(work()))
    return results[0] if world.is_main else work()


def _file(name: str, ending: str, kind: str = "evaluation") -> str:
    return f"{kind}.{ending}" if name == DEFAULT_EVAL_SET else f"{kind}-{name}.{ending}"


def _check_folder(cfg: TranslationConfig, sets: Sets, compares: bool, overwrite: bool) -> None:
    """Raise UserError if run_dir is not writable, or an evaluation would be replaced."""
    folder = open_run_dir(cfg.misc)
    folders = [folder, folder / "against"] if compares else [folder]
    names = [_file(name, ending) for name in sets for ending in ("json", "jsonl", "html")]
    paths = (target_dir / name for target_dir in folders for name in names)
    existing = next((path for path in paths if path.exists()), None)
    if existing is not None and not overwrite:
        raise UserError(
            f"misc.run_dir: {existing} exists from an earlier evaluation. Choose another folder "
            "(--set misc.run_dir=...), or replace it with --overwrite"
        )


def _candidate(cfg: TranslationConfig, policy: PolicyConfig, folder: Path) -> EvaluatedModel:
    """Return the candidate.

    Raises UserError if its base is missing, or the vLLM server is unavailable or unsuitable.
    """
    candidate = EvaluatedModel(str(policy.path), *resolve_base_model(policy), folder)
    probe_engine(cfg.generation, adapters=candidate.base.lora.r > 0)
    return candidate


def _open_services(
    cfg: TranslationConfig, sets: Sets, earlier: Mapping[str, EvaluatedSet]
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
) -> dict[str, EvaluatedSet]:
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
            evaluations[name] = EvaluatedSet(candidate.path, stats, report.examples)
    return evaluations


def _write(
    cfg: TranslationConfig, candidate: EvaluatedModel, evaluations: Mapping[str, EvaluatedSet]
) -> None:
    """Write the files of each set, and remove earlier comparisons."""
    folder = candidate.folder
    folder.mkdir(parents=True, exist_ok=True)
    policy = cfg.policy.model_copy(update={"path": candidate.path})
    resolved = cfg.model_copy(update={"policy": policy}).model_dump(mode="json")
    text = yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True)
    for name, evaluation in evaluations.items():
        for ending in ("json", "html"):
            (folder / _file(name, ending, "comparison")).unlink(missing_ok=True)
        write_jsonl(folder / _file(name, "jsonl"), evaluation.lines)
        write_evaluation(
            folder / _file(name, "html"),
            candidate.path,
            evaluation.stats,
            evaluation.lines,
            text,
        )
        write_json(folder / _file(name, "json"), evaluation.stats)


def _earlier(against: str, sets: Sets) -> dict[str, EvaluatedSet]:
    """Return the evaluations in a folder, by set; {} if `against` names a policy."""
    folder = Path(against)
    if not any(folder.glob("evaluation*.jsonl")):
        is_path = folder.exists() or against.startswith((".", "/", "~"))
        names = ("config.json", "adapter_config.json")
        if is_path and not any((folder / name).is_file() for name in names):
            raise UserError(
                f"--against: {against} has neither evaluation.jsonl (of an earlier evaluation) nor "
                "config.json (of a policy) nor adapter_config.json (of adapters)"
            )
        return {}
    return {name: _earlier_set(folder, name, examples) for name, examples in sets.items()}


def _earlier_set(folder: Path, name: str, examples: Sequence[Example]) -> EvaluatedSet:
    path = folder / _file(name, "jsonl")
    if not path.is_file():
        raise UserError(f"--against: {folder} has no {path.name}. Evaluate that set there, too")
    lines = read_jsonl(path)
    expected = [(f"{e.src_lang_code}>{e.tgt_lang_code}", e.src_text) for e in examples]
    if [(line.get("pair"), line["src"]) for line in lines] != expected:
        raise UserError(
            f"--against: {folder} translated {len(lines)} sources that are not these "
            f"{len(examples)} in this order. Evaluate it with the same data.eval and eval_limit"
        )
    stats = {}
    if (folder / _file(name, "json")).is_file():
        stats = json.loads((folder / _file(name, "json")).read_text(encoding="utf-8"))
    return EvaluatedSet(str(stats.get("policy", folder)), stats, lines)


def _scorers(rewarder: RewardClient) -> dict[str, str]:
    return {info.service: info.model for info in rewarder.infos.values()}


def _check_scorers(earlier: EvaluatedSet, now: Mapping[str, str]) -> None:
    """Raise UserError if another model scored: its scores cannot be compared with these."""
    for service, model in (earlier.stats.get("scored_by") or {}).items():
        if now.get(service, model) != model:
            raise UserError(
                f"--against: scored by the {service} model {model!r}, but the service runs "
                f"{now[service]!r}. Scores of two models cannot be compared. Evaluate it again"
            )


def _compare(folder: Path, outcome: SetComparison, earlier: EvaluatedSet) -> SetComparison:
    """Return the comparison of one set, and write its files.

    Raises UserError if a service runs another model meanwhile.
    """
    name, now = outcome.name, outcome.evaluation
    _check_scorers(earlier, now.stats["scored_by"])
    groups = compare_policies(earlier.lines, now.lines)
    counted = {"set": name, "sources": len(earlier.lines)}
    values = comparison_values((earlier.policy, now.policy), counted, groups)
    write_json(folder / _file(name, "json", "comparison"), values)
    page = folder / _file(name, "html", "comparison")
    write_comparison(page, (earlier.policy, now.policy), groups, earlier.lines, now.lines)
    return replace(outcome, earlier=earlier, groups=groups, comparison=page)
