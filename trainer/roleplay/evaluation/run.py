"""`scorekit evaluate`: write a policy's evaluation, alone or compared with another
policy's.

misc.run_dir gets the files of trainer/runs/evaluation/files.py, with a line for each reply. Files
of an earlier call are only replaced with --overwrite. Sampling is greedy unless the `eval` section
of the config says otherwise.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import torch

from scorekit.errors import UserError
from trainer.chat.message_check import MessageCheck
from trainer.rl.config import PolicyConfig
from trainer.rl.devices import prepare_torch
from trainer.roleplay.calibration import FILE, USES, Calibration
from trainer.roleplay.config import RoleplayConfig
from trainer.roleplay.data import checked_turn, load_train
from trainer.roleplay.evaluation.evaluate import evaluate_policy, open_tokenizer
from trainer.roleplay.evaluation.report import write_comparison, write_evaluation
from trainer.roleplay.evaluation.stats import table
from trainer.roleplay.reward_config import RewardConfig
from trainer.roleplay.rewards import configure, weights_of
from trainer.roleplay.similarity import OwnServer, Similarity, open_similarity
from trainer.roleplay.turn import RoleplayTurn
from trainer.runs.checkpoints.adapters import load_on_base, resolve_base_model
from trainer.runs.checkpoints.checkpoint import read_state
from trainer.runs.config import DEFAULT_EVAL_SET
from trainer.runs.evaluation.files import (
    AGAINST,
    EvaluatedPolicy,
    EvaluationFiles,
    EvaluationOutcome,
    check_folder,
    check_same_scoring,
    config_text,
    has_evaluation,
    policy_at,
)
from trainer.runs.stats import compare_lines

#: Parts of the scorer that an evaluation records, in words.
_SCORED = {
    "scored_by": "scored with the embedder",
    "anchors": "scored between the anchors",
    "weights": "summed with the weights",
    "rules": "scored by player_name_rule, corner_quotes, rules for Korean, echo_guard",
}
_ADVICE = "one reward section and calibration.json"
#: Version of the rules in trainer/roleplay/korean: scores of two versions are not comparable.
_KOREAN_RULES = 3
#: Opens an embedding server for the config's folder; None: the config has a URL.
Embedder = Callable[[Path], AbstractContextManager[OwnServer | None]]


def run_evaluation(
    cfg: RoleplayConfig,
    turns: Sequence[RoleplayTurn],
    tokenizer: Any,
    embedder: Embedder,
    against: str | None = None,
    *,
    overwrite: bool = False,
) -> EvaluationOutcome:
    """Evaluate the policy on held-out turns, and compare it with another policy.

    against: another policy's folder, or the folder of an earlier evaluation, whose replies and
    scores are used unchanged.
    tokenizer: the policy's, with the config's template; the other policy uses its own.
    overwrite: replace the files of an earlier call.
    A policy may be a folder of adapters, such as a run's checkpoint. Raises UserError for whatever
    the user can fix, before weights load if possible.
    """
    folder = Path(cfg.misc.run_dir)
    check_folder(cfg.misc, [DEFAULT_EVAL_SET], against is not None, overwrite)
    device = prepare_torch(cfg.misc.device, cfg.misc.threads)
    earlier = None if against is None else _earlier(against, turns)
    policies = {folder: cfg.policy}
    if against is not None and earlier is None:
        policies[folder / AGAINST] = policy_at(cfg.policy, against)
    bases = {target_dir: resolve_base_model(policy) for target_dir, policy in policies.items()}
    tokenizers, turns_by_dir = {folder: tokenizer}, {folder: turns}
    for target_dir in policies.keys() - {folder}:  # with its own template, unless one is set
        other_cfg = cfg.model_copy(update={"policy": policies[target_dir]})
        tokenizers[target_dir] = open_tokenizer(other_cfg)
        check = MessageCheck(tokenizers[target_dir], cfg.chat)  # it has other control tokens
        turns_by_dir[target_dir] = [checked_turn(t, f"turn {t.id}", check) for t in turns]
        check.log_neutralized(str(against), len(turns))
    evaluations = []
    with embedder(folder) as server, ExitStack() as exit_stack:
        similarity = _similarity(cfg, folder, server)
        exit_stack.enter_context(closing(similarity.embedder))
        scorer = _scorer(cfg.reward, similarity.calibration)
        if earlier is not None:
            check_same_scoring(earlier.stats, scorer, _SCORED, _ADVICE)
        special = {
            token
            for any_tokenizer in tokenizers.values()
            for token in any_tokenizer.all_special_tokens
        }
        configure(cfg.reward, similarity, special)
        for target_dir, policy in policies.items():
            base, adapters = bases[target_dir]
            inputs = turns_by_dir[target_dir], tokenizers[target_dir]
            report = _evaluate(cfg, *inputs, base, adapters, device, str(policy.path))
            stats = {"policy": str(policy.path), **scorer, **report.stats}
            evaluations.append(EvaluatedPolicy(str(policy.path), stats, report.examples))
            text = config_text(cfg, str(policy.path))
            files = EvaluationFiles(target_dir)
            files.write(evaluations[-1], report.examples, text, write_evaluation)
    return EvaluationFiles(folder).outcome(
        evaluations[0],
        evaluations[1] if len(evaluations) > 1 else earlier,
        partial(compare_lines, table()),
        {"turns": len(turns)},
        write_comparison,
    )


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
    """Return the similarity with the calibration of the policy's run, if it is a checkpoint.

    Else it is that of the config, or is fitted on data.train; then `folder` gets it.
    """
    has_no_calibration = cfg.reward.calibration is None
    candidate_dirs = [folder, *Path(str(cfg.policy.path)).resolve().parents[:2]]
    run_dir = next((run_dir for run_dir in candidate_dirs if (run_dir / FILE).is_file()), None)
    if run_dir is not None and has_no_calibration:
        return open_similarity(cfg.reward, None, run_dir, server=server)
    if has_no_calibration and cfg.data.train is None:
        raise UserError(
            "reward.calibration: name the calibration.json of a run, so that scores are "
            "comparable (or set data.train, to fit one)"
        )
    turns = load_train(cfg.data) if has_no_calibration else None
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


def _earlier(against: str, turns: Sequence[RoleplayTurn]) -> EvaluatedPolicy | None:
    """Return the evaluation in a folder; None if `against` names a policy."""
    if not has_evaluation(against):
        return None
    ids = [turn.id for turn in turns]
    return EvaluationFiles(Path(against)).read(
        "has replies to {} turns", lambda line: line["id"], ids
    )
