"""`python -m trainer check`: everything that can be found out before weights are loaded."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scorekit.report.findings import Check, Findings
from trainer.rl.policy import stop_token_ids
from trainer.roleplay.config import RoleplayConfig
from trainer.roleplay.data import in_both, load_held_out, load_train, untold
from trainer.roleplay.evaluation.evaluate import prompt_ids
from trainer.roleplay.rendering import open_tokenizer
from trainer.roleplay.rewards import configure, weights_of
from trainer.roleplay.similarity import open_similarity
from trainer.roleplay.training import before
from trainer.roleplay.training.launcher import embedder_of
from trainer.roleplay.training.options import grpo_arguments, told_options, updates_per_epoch
from trainer.roleplay.turn import RoleplayTurn
from trainer.runs.on_trl import check_alone, one_device
from trainer.runs.verbs.machine import look_at_device
from trainer.runs.verbs.places import look_at_places
from trainer.runs.verbs.weights import look_at_model


def check_run(cfg: RoleplayConfig) -> Findings:
    """Look at everything that a run of this config needs. Weights are not loaded; the embedder is
    asked, and where it is a folder, started."""
    findings = Findings()
    look = findings.look
    train = look("data.train", _turns, "data.train", cfg)
    held_out = look("data.eval", _turns, "data.eval", cfg) if cfg.data.eval else None
    model = look("policy.path", look_at_model, cfg.policy, cfg.policy.path, "policy.path")
    tokenizer = None if model is None else look("policy.tokenizer", _tokenizer, cfg, model)
    if tokenizer is not None:
        for key, turns in (("data.train", train), ("data.eval", held_out)):
            if turns:
                fitting = look(f"prompts of {key}", _prompts, cfg, key, turns, tokenizer)
                train = fitting if key == "data.train" and fitting else train
    if train and held_out:
        look("overlap", _overlap, train, held_out)
    device = look("device", _device, cfg)
    if train and model is not None and tokenizer is not None:
        _look_at_template(cfg, tokenizer, train, findings)
        if device is not None:
            look("grpo", _grpo, cfg, device, train, model, tokenizer)
        look("rewards", _rewards, cfg, train, tokenizer)
    look_at_places(findings, cfg)
    return findings


def _turns(key: str, cfg: RoleplayConfig) -> tuple[list[RoleplayTurn], str]:
    of_train = key == "data.train"
    turns = load_train(cfg.data) if of_train else load_held_out(cfg.data, cfg.eval.eval_limit)
    scenarios = len({turn.scenario for turn in turns})
    missing = ", ".join(f"{field} {count}" for field, count in untold(turns).items())
    told = f"; not told by the row: {missing}" if missing else ""
    return turns, f"{len(turns)} turns of {scenarios} scenarios{told}"


def _tokenizer(cfg: RoleplayConfig, model: nn.Module) -> tuple[Any, str]:
    tokenizer = open_tokenizer(cfg)
    stops = tokenizer.convert_ids_to_tokens(stop_token_ids(model, tokenizer))
    return tokenizer, f"{len(tokenizer):,} tokens, a reply ends at {' '.join(stops)}"


def _prompts(
    cfg: RoleplayConfig, key: str, turns: Sequence[RoleplayTurn], tokenizer: Any
) -> tuple[list[RoleplayTurn], str]:
    kept = before.fitting(key, turns, cfg, tokenizer)
    lengths = sorted(len(ids) for ids in prompt_ids(kept, tokenizer, cfg))
    left_out = f"; {len(turns) - len(kept)} left out" if len(turns) > len(kept) else ""
    return kept, (
        f"{lengths[0]} to {lengths[-1]} tokens (median {lengths[len(lengths) // 2]}), and "
        f"{cfg.grpo.max_completion_length} for the reply{left_out}"
    )


def _overlap(train: Sequence[RoleplayTurn], held_out: Sequence[RoleplayTurn]) -> tuple[None, str]:
    return None, in_both(train, held_out) or "no prompt or scenario of data.eval is in data.train"


def _device(cfg: RoleplayConfig) -> tuple[torch.device, str]:
    check_alone("role-play")
    device, found = look_at_device(cfg.misc)
    return one_device(device, "role-play"), found


def _look_at_template(
    cfg: RoleplayConfig, tokenizer: Any, turns: Sequence[RoleplayTurn], findings: Findings
) -> None:
    """A row for each fault of the chat template; one where it has none."""
    found = findings.look("chat template", _template, cfg, tokenizer, turns)
    refuses = cfg.start.template_check == "refuse"
    for fault in found or ():
        said = f"{fault.found}; {fault.remedy}"
        findings.checks.append(Check(f"chat template: {fault.name}", said, not refuses))


def _template(
    cfg: RoleplayConfig, tokenizer: Any, turns: Sequence[RoleplayTurn]
) -> tuple[list[Any], str]:
    found = before.chat_findings(cfg, tokenizer, turns)
    faults = [finding for finding in found if not finding.ok]
    return faults, f"{len(found)} checks, {len(faults)} faults"


def _grpo(
    cfg: RoleplayConfig,
    device: torch.device,
    turns: Sequence[RoleplayTurn],
    model: nn.Module,
    tokenizer: Any,
) -> tuple[None, str]:
    arguments = grpo_arguments(cfg, device, weights_of(cfg.reward), len(turns))
    stops = tokenizer.convert_ids_to_tokens(stop_token_ids(model, tokenizer))
    told = ", ".join(f"{key} {value}" for key, value in told_options(arguments, stops).items())
    prompts = arguments.generation_batch_size // arguments.num_generations
    epoch = updates_per_epoch(arguments, len(turns))
    return None, f"{prompts} prompts a sampling, {epoch} updates an epoch; {told}"


def _rewards(
    cfg: RoleplayConfig, turns: Sequence[RoleplayTurn], tokenizer: Any
) -> tuple[None, str]:
    """The embedder, its anchors, and every function on two rows."""
    with tempfile.TemporaryDirectory() as place:
        with embedder_of(cfg.reward, Path(place) / "embedder.log") as server:
            similarity = open_similarity(
                cfg.reward, turns, Path(place), server=server, seed=cfg.misc.seed
            )
            with closing(similarity.embedder):
                configure(cfg.reward, similarity, tokenizer.all_special_tokens)
                means = before.try_rewards(turns)
                model = similarity.calibration.model
    said = ", ".join(f"{name} {value:.2f}" for name, value in means.items())
    return None, f"{model}; two references earn {said}"
