"""Check before the first update: in a run, and in `scorekit check` without weights.

A run checks its turns, chat template, rewards, and the ends of replies; `check_run` also the model,
options and memory.
"""

from __future__ import annotations

import logging
import math
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scorekit.errors import UserError
from scorekit.report.findings import Check, Findings
from trainer.chat.message_check import MessageCheck
from trainer.chat.render import load_generation_config
from trainer.chat.template_check import Finding, findings_of, label_samples, refuse_errors
from trainer.rl.devices import autocast
from trainer.rl.policy import stop_token_ids
from trainer.rl.sampler import preserve_rng_state
from trainer.roleplay.config import RoleplayConfig
from trainer.roleplay.data import columns_of, in_both, load_held_out, load_train, missing_facts
from trainer.roleplay.evaluation.evaluate import open_tokenizer, prompt_ids, sample_replies
from trainer.roleplay.rewards import REWARDS, configure, weights_of
from trainer.roleplay.similarity import embedder_of, open_similarity
from trainer.roleplay.training.options import grpo_arguments, printed_options, updates_per_epoch
from trainer.roleplay.turn import RoleplayTurn
from trainer.runs.checks import check_device, check_model, check_output_paths
from trainer.runs.launch import started_processes
from trainer.runs.memory import estimate_trl_memory, free_memory, memory_text
from trainer.runs.trl.arguments import one_device
from trainer.runs.trl.processes import shares_text, update_size
from trainer.runs.work import update_work

log = logging.getLogger(__name__)


# -- scorekit check --------------------------------------------------------------------------------


def check_run(cfg: RoleplayConfig, processes: int = 1) -> Findings:
    """Check everything that a run of this config needs, without loading weights.

    The embedder is asked, and started if it is a folder.

    processes: how many are to be started.
    """
    findings = Findings()
    run_check = findings.run_check
    train = run_check("data.train", _turns, "data.train", cfg)
    held_out = run_check("data.eval", _turns, "data.eval", cfg) if cfg.data.eval else None
    model = run_check("policy.path", _model, cfg)
    tokenizer = None if model is None else run_check("policy.tokenizer", _tokenizer, cfg, model)
    if tokenizer is not None:
        for key, turns in (("data.train", train), ("data.eval", held_out)):
            checked = turns and run_check(f"messages of {key}", _messages, cfg, key, tokenizer)
            if checked:
                fitting = run_check(f"prompts of {key}", _prompts, cfg, key, checked, tokenizer)
                train = (fitting or checked) if key == "data.train" else train
    if train and held_out:
        run_check("overlap", _overlap, train, held_out)
    device = run_check("device", _device, cfg, processes)
    if train and model is not None and tokenizer is not None:
        _check_template(cfg, tokenizer, train, findings)
        if device is not None:
            run_check("grpo", _grpo, cfg, device, train, model, tokenizer, processes)
            run_check("memory", _memory, cfg, device, train, model, tokenizer, processes, findings)
            run_check("time", _time, cfg, train, model, tokenizer)
        run_check("rewards", _rewards, cfg, train, tokenizer)
    check_output_paths(findings, cfg)
    return findings


def _turns(key: str, cfg: RoleplayConfig) -> tuple[list[RoleplayTurn], str]:
    is_train = key == "data.train"
    turns = load_train(cfg.data) if is_train else load_held_out(cfg.data, cfg.eval.eval_limit)
    scenarios = len({turn.scenario for turn in turns})
    missing = missing_facts(turns)
    missing_note = f"; without a value: {missing}" if missing else ""
    return turns, f"{len(turns)} turns of {scenarios} scenarios{missing_note}"


def _model(cfg: RoleplayConfig) -> tuple[nn.Module, str]:
    return check_model(cfg.policy, cfg.policy.path, "policy.path", trl=True)


def _tokenizer(cfg: RoleplayConfig, model: nn.Module) -> tuple[Any, str]:
    tokenizer = open_tokenizer(cfg)
    stops = tokenizer.convert_ids_to_tokens(stop_token_ids(model, tokenizer))
    return tokenizer, f"{len(tokenizer):,} tokens, a reply ends at {' '.join(stops)}"


def _messages(cfg: RoleplayConfig, key: str, tokenizer: Any) -> tuple[list[RoleplayTurn], str]:
    is_train = key == "data.train"
    turns = (checked_train if is_train else checked_held_out)(cfg, tokenizer)
    return turns, (
        f"control tokens: {cfg.chat.control_tokens}, placeholders: {cfg.chat.placeholders}"
    )


def _prompts(
    cfg: RoleplayConfig, key: str, turns: Sequence[RoleplayTurn], tokenizer: Any
) -> tuple[list[RoleplayTurn], str]:
    accepted = drop_overlong(key, turns, cfg, tokenizer)
    lengths = sorted(len(ids) for ids in prompt_ids(accepted, tokenizer, cfg))
    left_out = f"; {len(turns) - len(accepted)} left out" if len(turns) > len(accepted) else ""
    return accepted, (
        f"{lengths[0]} to {lengths[-1]} tokens (median {lengths[len(lengths) // 2]}), and "
        f"{cfg.grpo.max_completion_length} for the reply{left_out}"
    )


def _overlap(train: Sequence[RoleplayTurn], held_out: Sequence[RoleplayTurn]) -> tuple[None, str]:
    return None, in_both(train, held_out) or "no prompt or scenario of data.eval is in data.train"


def _device(cfg: RoleplayConfig, processes: int) -> tuple[torch.device, str]:
    device, description = check_device(cfg.misc)
    return one_device(device, "role-play", processes), description


def _check_template(
    cfg: RoleplayConfig, tokenizer: Any, turns: Sequence[RoleplayTurn], findings: Findings
) -> None:
    """Add a line for each failed check of the chat template, or one if all pass."""
    failures = findings.run_check("chat template", _template, cfg, tokenizer, turns)
    is_refused = cfg.start.template_check == "refuse"
    for failure in failures or ():
        message = f"{failure.result}; {failure.remedy}"
        findings.checks.append(Check(f"chat template: {failure.name}", message, not is_refused))


def _template(
    cfg: RoleplayConfig, tokenizer: Any, turns: Sequence[RoleplayTurn]
) -> tuple[list[Any], str]:
    all_findings = chat_findings(cfg, tokenizer, turns)
    failures = [finding for finding in all_findings if not finding.ok]
    return failures, f"{len(all_findings)} checks, {len(failures)} failed"


def _grpo(
    cfg: RoleplayConfig,
    device: torch.device,
    turns: Sequence[RoleplayTurn],
    model: nn.Module,
    tokenizer: Any,
    processes: int,
) -> tuple[None, str]:
    factor = max(1, processes // started_processes())
    arguments = grpo_arguments(cfg, device, weights_of(cfg.reward), len(turns), factor=factor)
    stops = tokenizer.convert_ids_to_tokens(stop_token_ids(model, tokenizer))
    settings = ", ".join(
        f"{key} {value}" for key, value in printed_options(arguments, stops).items()
    )
    prompts = arguments.generation_batch_size // arguments.num_generations
    epoch = updates_per_epoch(arguments, len(turns))
    shares = shares_text(cfg.grpo, processes, "completions")
    return None, f"{shares}; {prompts} prompts a sampling, {epoch} updates an epoch; {settings}"


def _memory(
    cfg: RoleplayConfig,
    device: torch.device,
    turns: Sequence[RoleplayTurn],
    model: nn.Module,
    tokenizer: Any,
    processes: int,
    findings: Findings,
) -> tuple[None, str]:
    longest = max(len(ids) for ids in prompt_ids(turns, tokenizer, cfg))
    grpo, length = cfg.grpo, longest + cfg.grpo.max_completion_length
    passes = grpo.steps_per_generation or grpo.gradient_accumulation_steps
    tokens = grpo.per_device_train_batch_size * length
    rows, sharded = (
        estimate_trl_memory(
            cfg,
            model,
            tokens,
            sampled_tokens=0 if grpo.options.get("use_vllm") else tokens * passes,
            has_reference=grpo.beta > 0 and not cfg.policy.lora.r,
            shards=shards,
        )
        for shards in (1, processes)
    )
    findings.memory = [
        *rows,
        ("all", sum(size for _, size in rows)),
        (f"free on {device.type}", free_memory(device)),
    ]
    return None, memory_text(rows, sharded, device, processes)


def _time(
    cfg: RoleplayConfig, turns: Sequence[RoleplayTurn], model: nn.Module, tokenizer: Any
) -> tuple[None, str]:
    """Return the work of an update whose completions all have their full length, in words."""
    grpo = cfg.grpo
    passes = grpo.steps_per_generation or grpo.gradient_accumulation_steps
    samplings = grpo.gradient_accumulation_steps / (passes * grpo.num_iterations)
    steps = math.ceil(samplings * grpo.max_completion_length)
    lengths = [len(ids) + grpo.max_completion_length for ids in prompt_ids(turns, tokenizer, cfg)]
    work = update_work(
        cfg,
        model,
        lengths,
        update_size(grpo, 1),
        steps=0 if grpo.options.get("use_vllm") else steps,
        has_reference=grpo.beta > 0,
    )
    return None, work.text()


def _rewards(
    cfg: RoleplayConfig, turns: Sequence[RoleplayTurn], tokenizer: Any
) -> tuple[None, str]:
    """Check the embedder, its anchors, and every function on two rows."""
    with tempfile.TemporaryDirectory() as temporary_dir:
        with embedder_of(cfg.reward, Path(temporary_dir) / "embedder.log") as server:
            similarity = open_similarity(
                cfg.reward, turns, Path(temporary_dir), server=server, seed=cfg.misc.seed
            )
            with closing(similarity.embedder):
                configure(cfg.reward, similarity, tokenizer.all_special_tokens)
                means = try_rewards(turns)
                model = similarity.calibration.model
    values = ", ".join(f"{name} {value:.2f}" for name, value in means.items())
    return None, f"{model}; two references score {values}"


# -- the checks of a run ---------------------------------------------------------------------------


#: Number of turns in the template check.
_MAX_CONVERSATIONS = 50


def read_turns(
    cfg: RoleplayConfig, tokenizer: Any
) -> tuple[list[RoleplayTurn], list[RoleplayTurn]]:
    """Return (training turns, held-out turns) whose prompt fits. Raises UserError."""
    train = drop_overlong("data.train", checked_train(cfg, tokenizer), cfg, tokenizer)
    held_out = held_out_turns(cfg, tokenizer)
    if overlap := in_both(train, held_out):
        log.warning("%s", overlap)
    if missing := missing_facts(train):
        log.warning(
            "data.train: of %d turns some have no value for these fields, whose rewards are then "
            "neutral: %s",
            len(train),
            missing,
        )
    return train, held_out


def held_out_turns(cfg: RoleplayConfig, tokenizer: Any) -> list[RoleplayTurn]:
    """Return the turns to evaluate on, whose prompt fits; none if the config names none."""
    turns = checked_held_out(cfg, tokenizer)
    return drop_overlong("data.eval", turns, cfg, tokenizer)


def checked_train(cfg: RoleplayConfig, tokenizer: Any) -> list[RoleplayTurn]:
    """Return the training turns with messages that are checked for the policy. Raises
    UserError."""
    check = MessageCheck(tokenizer, cfg.chat)
    turns = load_train(cfg.data, check)
    check.log_neutralized("data.train", len(turns))
    return turns


def checked_held_out(cfg: RoleplayConfig, tokenizer: Any) -> list[RoleplayTurn]:
    """Return the held-out turns with messages that are checked for the policy. Raises
    UserError."""
    check = MessageCheck(tokenizer, cfg.chat)
    turns = load_held_out(cfg.data, cfg.eval.eval_limit, check)
    check.log_neutralized("data.eval", len(turns))
    return turns


def drop_overlong(
    key: str, turns: Sequence[RoleplayTurn], cfg: RoleplayConfig, tokenizer: Any
) -> list[RoleplayTurn]:
    """Return the turns whose prompt has at most data.max_prompt_length tokens.

    Raises UserError if none of them remains, or if the config refuses the others.
    """
    if not turns:
        return []
    lengths = [len(ids) for ids in prompt_ids(turns, tokenizer, cfg)]
    limit = cfg.data.max_prompt_length or max(lengths)
    accepted = [turn for turn, length in zip(turns, lengths, strict=True) if length <= limit]
    if len(accepted) < len(turns):
        message = (
            f"{key}: {len(turns) - len(accepted)} of {len(turns)} prompts have more than "
            f"data.max_prompt_length {limit} tokens (up to {max(lengths)})"
        )
        if cfg.data.overlong_prompts == "refuse" or not accepted:
            raise UserError(
                f"{message}. Shorten their context (prepare --context), or raise the limit"
            )
        log.warning("%s, and are left out", message)
    return accepted


def chat_findings(
    cfg: RoleplayConfig, tokenizer: Any, turns: Sequence[RoleplayTurn]
) -> list[Finding]:
    """Return the findings of the template check on the first turns with a reference.

    They are checked as they are trained on by SFT, and sampled here.
    """
    conversations = [
        [*turn.prompt, {"role": "assistant", "content": turn.reference}]
        for turn in turns
        if turn.reference
    ][:_MAX_CONVERSATIONS]
    settings = load_generation_config(str(cfg.policy.path), cfg.policy.revision)
    origin, labeled = label_samples(tokenizer, conversations, cfg.chat, "last")
    return findings_of(tokenizer, labeled, origin, settings)


def check_chat(cfg: RoleplayConfig, tokenizer: Any, turns: Sequence[RoleplayTurn]) -> None:
    """Raise UserError if the chat template fails its check, or warn, as start.template_check
    says."""
    hint = "scorekit template-check prints all; start.template_check: warn continues"
    refuse_errors(chat_findings(cfg, tokenizer, turns), cfg.start.template_check, hint)


def try_rewards(turns: Sequence[RoleplayTurn]) -> dict[str, float]:
    """Run every reward function on two rows, before anything is loaded, and return the means.

    Raises what they raise, and UserError if one does not return a number for each row.
    """
    rows = list(turns[:2])
    columns = columns_of(rows)
    prompts = columns.pop("prompt")
    texts = [turn.reference or turn.user_turn for turn in rows]
    completions = [[{"role": "assistant", "content": text}] for text in texts]
    means = {}
    for reward in REWARDS:
        values = reward.function(prompts=prompts, completions=completions, **columns)
        if len(values) != len(rows) or not all(map(math.isfinite, values)):
            raise UserError(f"{reward.name}: {values} is not a number for each of {len(rows)} rows")
        means[reward.name] = sum(values) / len(values)
    return means


def sampled_ratio(
    turns: Sequence[RoleplayTurn],
    model: nn.Module,
    tokenizer: Any,
    cfg: RoleplayConfig,
    device: torch.device,
) -> float | None:
    """Return the share of sampled replies that are truncated; log a warning if all are.

    They are sampled as in training for the first start.sample_prompts turns.
    """
    chosen = list(turns[: cfg.start.sample_prompts])
    if not chosen:
        return None
    with preserve_rng_state(model, cfg.misc.seed), autocast(device, cfg.misc.dtype):
        replies = sample_replies(
            prompt_ids(chosen, tokenizer, cfg), model, tokenizer, cfg, evaluation=False
        )
    ratio = sum(not reply.is_complete for reply in replies) / len(replies)
    if ratio == 1.0:
        log.warning(
            "all of %d sampled replies are truncated by grpo.max_completion_length %d "
            "(clipped_ratio 1.0): the policy does not end its turns. Check with: scorekit "
            "template-check --model %s --data %s",
            len(replies),
            cfg.grpo.max_completion_length,
            cfg.policy.path,
            cfg.data.train,
        )
    return ratio
