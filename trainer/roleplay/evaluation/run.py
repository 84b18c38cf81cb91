"""`python -m trainer evaluate`: write a policy's evaluation, alone or compared with another
policy's.

misc.run_dir gets evaluation.json (stats), evaluation.jsonl (a line for each reply) and
evaluation.html; against another policy, also comparison.json and comparison.html, and the other's
evaluation in `against/`. Files of an earlier call are only replaced with --overwrite. Sampling is
greedy unless the `eval` section of the config says otherwise.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from scorekit.errors import UserError
from trainer.rl.config import PolicyConfig
from trainer.rl.policy.devices import prepare_torch
from trainer.roleplay.calibration.anchors import FILE, USES, Calibration
from trainer.roleplay.config import RoleplayConfig
from trainer.roleplay.data import load_train
from trainer.roleplay.evaluation.evaluate import evaluate_policy
from trainer.roleplay.evaluation.report import write_comparison, write_evaluation
from trainer.roleplay.evaluation.stats import table
from trainer.roleplay.rendering import open_tokenizer
from trainer.roleplay.reward_config import RewardConfig
from trainer.roleplay.rewards import configure, weights_of
from trainer.roleplay.similarity import OwnServer, Similarity, open_similarity
from trainer.roleplay.turn import RoleplayTurn
from trainer.runs.checkpoints.adapters import load_on_base, resolve_base_model
from trainer.runs.checkpoints.checkpoint import read_state
from trainer.runs.cli.paired import PairedStat, compare_lines, comparison_values
from trainer.runs.run_log import open_run_dir, read_jsonl, write_json, write_jsonl

#: Parts of the scorer that an evaluation records, in words.
_SCORED = {
    "scored_by": "scored with the embedder",
    "anchors": "scored between the anchors",
    "weights": "summed with the weights",
    "rules": "scored by player_name_rule, corner_quotes, rules for Korean, echo_guard",
}
#: Version of the rules in trainer/roleplay/korean: scores of two versions are not comparable.
_KOREAN_RULES = 2
#: Opens an embedding server for the config's folder; None: the config has a URL.
Embedder = Callable[[Path], AbstractContextManager[OwnServer | None]]


@dataclass(frozen=True, slots=True)
class EvaluatedPolicy:
    """An evaluation of a policy.

    policy: its path.
    stats: means, and what scored them (`_scorer`).
    lines: of its dump.
    """

    policy: str
    stats: Mapping[str, Any]
    lines: Sequence[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class RoleplayOutcome:
    """The results of an evaluation.

    page, comparison: files.
    earlier: the other policy's.
    paired: the stats of both.
    """

    evaluation: EvaluatedPolicy
    page: Path
    earlier: EvaluatedPolicy | None = None
    paired: Sequence[PairedStat] | None = None
    comparison: Path | None = None


def run_evaluation(
    cfg: RoleplayConfig,
    turns: Sequence[RoleplayTurn],
    tokenizer: Any,
    embedder: Embedder,
    against: str | None = None,
    *,
    overwrite: bool = False,
) -> RoleplayOutcome:
    """Evaluate the policy on held-out turns, and compare it with another policy.

    against: another policy's folder, or the folder of an earlier evaluation, whose replies and
    scores are used unchanged.
    tokenizer: the policy's, with the config's template; the other policy uses its own.
    overwrite: replace the files of an earlier call.
    A policy may be a folder of adapters, such as a run's checkpoint. Raises UserError for whatever
    the user can fix, before weights load if possible.
    """
    folder = open_run_dir(cfg.misc)
    _check_folder(folder, against is not None, overwrite)
    device = prepare_torch(cfg.misc.device, cfg.misc.threads)
    earlier = None if against is None else _earlier(against, turns)
    policies = {folder: cfg.policy}
    if against is not None and earlier is None:
        policies[folder / "against"] = cfg.policy.model_copy(
            update={"path": against, "tokenizer": None, "revision": None}
        )
    bases = {target_dir: resolve_base_model(policy) for target_dir, policy in policies.items()}
    tokenizers = {folder: tokenizer}
    for target_dir in policies.keys() - {folder}:  # with its own template, unless one is set
        tokenizers[target_dir] = open_tokenizer(
            cfg.model_copy(update={"policy": policies[target_dir]})
        )
    evaluations = []
    with embedder(folder) as server, ExitStack() as exit_stack:
        similarity = _similarity(cfg, folder, server)
        exit_stack.enter_context(closing(similarity.embedder))
        scorer = _scorer(cfg.reward, similarity.calibration)
        if earlier is not None:
            _check_scorer(earlier, scorer)
        special = {
            token
            for any_tokenizer in tokenizers.values()
            for token in any_tokenizer.all_special_tokens
        }
        configure(cfg.reward, similarity, special)
        for target_dir, policy in policies.items():
            base, adapters = bases[target_dir]
            report = _evaluate(
                cfg, turns, tokenizers[target_dir], base, adapters, device, str(policy.path)
            )
            stats = {"policy": str(policy.path), **scorer, **report.stats}
            evaluations.append(EvaluatedPolicy(str(policy.path), stats, report.examples))
            _write(cfg, target_dir, evaluations[-1])
    outcome = RoleplayOutcome(evaluations[0], folder / "evaluation.html")
    other = evaluations[1] if len(evaluations) > 1 else earlier
    return outcome if other is None else _compared(folder, outcome, other)


def _evaluate(
    cfg: RoleplayConfig,
    turns: Sequence[RoleplayTurn],
    tokenizer: Any,
    base: PolicyConfig,
    adapters: Path | None,
    device: torch.device,
    path: str,
) -> Any:
    model, _ = load_on_base(base, adapters, device)
    start = base if adapters is not None else _start_of(path)
    start_cfg = cfg.model_copy(update={"policy": start or base})
    kl = cfg.eval.kl and start is not None
    return evaluate_policy(turns, model, tokenizer, start_cfg, device, kl=kl)


def _start_of(path: str) -> PolicyConfig | None:
    """Return the policy section of the run of a checkpoint with a full model; else None."""
    if not (Path(path) / "state.json").is_file():
        return None
    return PolicyConfig.model_validate(read_state(Path(path)).config["policy"])


def _similarity(cfg: RoleplayConfig, folder: Path, server: OwnServer | None) -> Similarity:
    """Return the similarity with the anchors of the policy's run, if it is a checkpoint.

    Else they are those of the config, or fitted on data.train.
    """
    fitted = cfg.reward.calibration is None
    candidate_dirs = [folder, *Path(str(cfg.policy.path)).resolve().parents[:2]]
    run_dir = next((run_dir for run_dir in candidate_dirs if (run_dir / FILE).is_file()), None)
    if run_dir is not None and fitted:
        return open_similarity(cfg.reward, None, run_dir, server=server)
    if fitted and cfg.data.train is None:
        raise UserError(
            "reward.calibration: name the calibration.json of a run, so that scores are "
            "comparable (or set data.train, to fit one)"
        )
    turns = load_train(cfg.data) if fitted else None
    with tempfile.TemporaryDirectory() as empty:
        seed = cfg.misc.seed
        similarity = open_similarity(cfg.reward, turns, Path(empty), server=server, seed=seed)
        similarity.calibration.write(folder / FILE)
    return similarity


def _scorer(reward: RewardConfig, calibration: Calibration) -> dict[str, Any]:
    """Return the settings of the scores: two evaluations are comparable if they are equal."""
    return {
        "scored_by": calibration.model,
        "anchors": {
            use: [anchors.low, anchors.high]
            for use in USES
            for anchors in [calibration.anchors(use)]
        },
        "weights": weights_of(reward),
        "rules": [
            reward.player_name_rule,
            reward.corner_quotes,
            _KOREAN_RULES,
            *(["echo_guard"] if reward.echo_guard else []),
        ],
    }


def _check_scorer(earlier: EvaluatedPolicy, scorer: Mapping[str, Any]) -> None:
    """Raise UserError if an earlier evaluation was scored differently."""
    for key, now in scorer.items():
        then = earlier.stats.get(key, now)
        if then != now:
            raise UserError(
                f"--against: {_SCORED[key]} {then}, here {now}. Such scores are not comparable. "
                "Evaluate both policies with one reward section and calibration.json"
            )


def _check_folder(folder: Path, compares: bool, overwrite: bool) -> None:
    """Raise UserError if an evaluation would be replaced."""
    folders = [folder, folder / "against"] if compares else [folder]
    names = [f"evaluation.{ending}" for ending in ("json", "jsonl", "html")]
    existing = next((f / n for f in folders for n in names if (f / n).exists()), None)
    if existing is not None and not overwrite:
        raise UserError(
            f"{existing} exists. Choose another misc.run_dir, or replace it (--overwrite)"
        )


def _earlier(against: str, turns: Sequence[RoleplayTurn]) -> EvaluatedPolicy | None:
    """Return the evaluation in a folder; None if `against` names a policy."""
    folder = Path(against)
    if not (folder / "evaluation.jsonl").is_file():
        is_path = folder.exists() or against.startswith((".", "/", "~"))
        names = ("config.json", "adapter_config.json")
        if is_path and not any((folder / name).is_file() for name in names):
            raise UserError(
                f"--against: {against} has neither evaluation.jsonl (of an earlier evaluation) nor "
                "config.json (of a policy) nor adapter_config.json (of adapters)"
            )
        return None
    lines = read_jsonl(folder / "evaluation.jsonl")
    if [line["id"] for line in lines] != [turn.id for turn in turns]:
        raise UserError(
            f"--against: {folder} has replies to {len(lines)} turns that are not these "
            f"{len(turns)} in this order. Evaluate it with the same data.eval and eval_limit"
        )
    stats = json.loads((folder / "evaluation.json").read_text(encoding="utf-8"))
    return EvaluatedPolicy(str(stats.get("policy", folder)), stats, lines)


def _write(cfg: RoleplayConfig, folder: Path, evaluated: EvaluatedPolicy) -> None:
    """Write the files of an evaluation, and remove earlier comparisons."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("comparison.json", "comparison.html"):
        (folder / name).unlink(missing_ok=True)
    policy = cfg.policy.model_copy(update={"path": evaluated.policy})
    resolved = cfg.model_copy(update={"policy": policy}).model_dump(mode="json")
    text = yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True)
    write_jsonl(folder / "evaluation.jsonl", evaluated.lines)
    write_evaluation(
        folder / "evaluation.html", evaluated.policy, evaluated.stats, evaluated.lines, text
    )
    write_json(folder / "evaluation.json", evaluated.stats)


def _compared(folder: Path, outcome: RoleplayOutcome, earlier: EvaluatedPolicy) -> RoleplayOutcome:
    now = outcome.evaluation
    paired = compare_lines(table(), earlier.lines, now.lines)
    counted = {"turns": len(now.lines)}
    values = comparison_values((earlier.policy, now.policy), counted, paired)
    write_json(folder / "comparison.json", values)
    page = folder / "comparison.html"
    write_comparison(page, (earlier.policy, now.policy), paired, earlier.lines, now.lines)
    return RoleplayOutcome(now, outcome.page, earlier, paired, page)
