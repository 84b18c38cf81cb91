"""`python -m trainer check`: everything that can be found out before weights are loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.table import Column, Table
from rich.text import Text
from torch import nn

from scorekit.errors import ScorekitError, UserError
from trainer.rl.config import PolicyConfig
from trainer.rl.engines.vllm import probe_server
from trainer.rl.policy import (
    check_4bit,
    check_tokenizer,
    check_whole,
    embedding_rows,
    load_tokenizer,
    prepare_torch,
    stop_token_ids,
    with_adapters,
)
from trainer.rl.weight_files import count_weights
from trainer.runs.checkpoints.checkpoint import model_folder, read_state
from trainer.runs.checkpoints.resume import checkpoint_to_resume
from trainer.runs.memory import GIB, estimate_memory, free_memory
from trainer.runs.runlog import check_run_dir, open_run_dir
from trainer.runs.trackers import check_trackers
from trainer.translation.config import GenerationConfig, TrainerConfig
from trainer.translation.config_data import set_key
from trainer.translation.data import Example, in_both, load_set, load_train
from trainer.translation.prompting import fitting_prompts
from trainer.translation.rewards.guards import check_guards
from trainer.translation.rewards.score_batch import ServiceName
from trainer.translation.rewards.screening import check_sources
from trainer.translation.rewards.services import Rewarder
from trainer.translation.rewards.terms import services, weighted
from trainer.translation.train import check_trainable

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at, what was found, and whether a run could start with it."""

    name: str
    found: str
    ok: bool


@dataclass(slots=True)
class Findings:
    """All checks, in order. memory: (what, bytes), of which the last two are all and free."""

    checks: list[Check] = field(default_factory=list)
    memory: list[tuple[str, float]] = field(default_factory=list)

    @property
    def failed(self) -> list[Check]:
        """Those that a run would end with."""
        return [check for check in self.checks if not check.ok]

    def look(self, name: str, work: Callable[..., tuple[T, str]], *arguments: Any) -> T | None:
        """Do `work`, which gives what is needed further on and what was found; note that, or why it
        cannot be."""
        try:
            value, found = work(*arguments)
        except (ScorekitError, OSError) as error:
            self.checks.append(Check(name, " ".join(str(error).split()), False))
            return None
        self.checks.append(Check(name, found, True))
        return value


def check_run(cfg: TrainerConfig) -> Findings:
    """Look at everything that a run of this config needs. Weights are not loaded."""
    findings = Findings()
    look = findings.look
    look("config", _config, cfg)
    train = look("data.train", _examples, cfg, None)
    sets = {name: look(set_key(name), _examples, cfg, name) for name in cfg.data.held_out}
    model = look("policy.path", _model, cfg.policy, cfg.policy.path, "policy.path")
    if cfg.policy.reference_path is not None:
        look("policy.reference_path", _reference, cfg.policy, model)
    tokenizer = None if model is None else look("policy.tokenizer", _tokenizer, cfg, model)
    longest = 0
    for key, examples, gen_cfg in (
        ("data.train", train, cfg.generation),
        *((set_key(name), held_out, cfg.eval_generation()) for name, held_out in sets.items()),
    ):
        if examples and tokenizer is not None:
            arguments = cfg, key, examples, model, tokenizer, gen_cfg
            longest = max(longest, look(f"prompts of {key}", _prompts, *arguments) or 0)
    for name, held_out in sets.items():
        if train and held_out:
            look("overlap", _overlap, set_key(name), train, held_out)
    device = look("device", _device, cfg)
    if model is not None and device is not None:
        look("memory", _memory, cfg, model, longest, device, findings)
    answer = [look(name, _service, cfg, name) for name in services()]
    if all(answer) and train:
        look("sources", _sources, cfg, train, sets)
    if cfg.generation.engine == "vllm":
        look("vLLM", _vllm, cfg)
    look("misc.trackers", _trackers, cfg)
    look("misc.run_dir", _run_dir, cfg)
    return findings


def _config(cfg: TrainerConfig) -> tuple[None, str]:
    check_trainable(cfg)
    terms = weighted(cfg.reward)
    return None, ", ".join(f"{term.name} {term.weight(cfg.reward):g}" for term in terms)


def _examples(cfg: TrainerConfig, part: str | None) -> tuple[list[Example], str]:
    examples = load_train(cfg) if part is None else load_set(cfg, part)
    pairs = Counter((e.src_lang_code, e.tgt_lang_code) for e in examples)
    if part is None:
        check_guards(pairs, cfg.reward.guards)
    counted = ", ".join(f"{src}>{tgt} {count}" for (src, tgt), count in pairs.most_common())
    return examples, f"{len(examples)} rows ({counted}); the first: {examples[0].src_text[:40]!r}"


def _model(cfg: PolicyConfig, path: str | None, key: str) -> tuple[nn.Module, str]:
    """The model without its weights, on the meta device; how many there are, in its files too."""
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    if path is None:
        raise UserError(f"{key} is not set: give the folder or hub id of a causal LM")
    check_4bit(cfg)
    check_whole(path, key)
    revision = cfg.revision if key == "policy.path" else None
    try:
        folder = model_folder(path, revision)
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config).eval()
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{key}: {path}: {str(error).strip().splitlines()[0]}") from None
    with suppress(OSError):  # there may be none
        model.generation_config = GenerationConfig.from_pretrained(folder)
    wanted = sum(parameter.numel() for parameter in model.parameters())
    there = count_weights(folder)
    if there is not None and there < wanted:
        raise UserError(f"{key}: {path}: has {there:,} weights, its config tells of {wanted:,}")
    found = f"{type(model).__name__}, {wanted:,} weights"
    if cfg.lora.r and key == "policy.path":
        model = with_adapters(model, cfg)
        learning = sum(p.numel() for p in model.parameters() if p.requires_grad)
        found += f", {learning:,} in adapters learn"
    return model, found


def _reference(cfg: PolicyConfig, policy: nn.Module | None) -> tuple[None, str]:
    model, found = _model(cfg, cfg.reference_path, "policy.reference_path")
    if policy is not None and embedding_rows(model) != embedding_rows(policy):
        raise UserError(
            f"policy.reference_path: {cfg.reference_path} has {embedding_rows(model)} embeddings, "
            f"the policy has {embedding_rows(policy)}: their log-probabilities cannot be compared"
        )
    return None, found


def _tokenizer(cfg: TrainerConfig, model: nn.Module) -> tuple[Any, str]:
    tokenizer = load_tokenizer(cfg.policy)
    check_tokenizer(cfg.policy, tokenizer, model)
    chat = "with" if getattr(tokenizer, "chat_template", None) else "no"
    stops = tokenizer.convert_ids_to_tokens(stop_token_ids(model, tokenizer))
    return tokenizer, f"{len(tokenizer):,} tokens, {chat} chat template, ends at {' '.join(stops)}"


def _prompts(
    cfg: TrainerConfig,
    key: str,
    examples: Sequence[Example],
    model: nn.Module,
    tokenizer: Any,
    gen_cfg: GenerationConfig,
) -> tuple[int, str]:
    prompts, told = fitting_prompts(
        key,
        examples,
        model,
        tokenizer,
        gen_cfg,
        refuse=cfg.data.overlong_prompts == "refuse",
    )
    lengths = sorted(len(prompt.ids) for prompt in prompts)
    return lengths[-1], (
        f"{lengths[0]} to {lengths[-1]} tokens (median {lengths[len(lengths) // 2]}), and "
        f"{gen_cfg.max_new_tokens} for the translation{'; ' + told if told else ''}"
    )


def _overlap(key: str, train: Sequence[Example], held_out: Sequence[Example]) -> tuple[None, str]:
    return None, in_both(key, train, held_out) or f"no row of {key} stands in data.train"


def _device(cfg: TrainerConfig) -> tuple[torch.device, str]:
    device = prepare_torch(cfg.misc.device, cfg.misc.threads)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU"
    return device, f"{device} ({name}), {cfg.misc.dtype}"


def _memory(
    cfg: TrainerConfig, model: nn.Module, longest: int, device: torch.device, findings: Findings
) -> tuple[None, str]:
    rows = estimate_memory(cfg, model, longest)
    total, free = sum(size for _, size in rows), free_memory(device)
    findings.memory = [*rows, ("all", total), (f"free on {device.type}", free)]
    found = f"about {total / GIB:.2f} GiB of {free / GIB:.2f} GiB that are free on {device.type}"
    if total > free:
        raise UserError(
            f"{found}: lower rl.micro_batch_tokens or generation.batch_size, set "
            "policy.gradient_checkpointing, or train adapters (policy.lora.r)"
        )
    return None, found


def _sources(
    cfg: TrainerConfig, train: Sequence[Example], sets: Mapping[str, Sequence[Example] | None]
) -> tuple[None, str]:
    refuse, bad = cfg.data.bad_sources == "refuse", 0
    with closing(Rewarder(cfg.reward, offer_unneeded=False, misc=cfg.misc)) as rewarder:
        named = {set_key(name): held_out or [] for name, held_out in sets.items()}
        for key, examples in ({"data.train": train} | named).items():
            bad += len(check_sources(examples, rewarder, key, refuse=refuse))
    return None, f"{bad} that no translation helps" if bad else "all can be scored"


def _service(cfg: TrainerConfig, name: ServiceName) -> tuple[bool, str]:
    """One service by itself, so that a fault of one hides none of the other."""
    alone = Rewarder(cfg.reward, offer_unneeded=False, only=name, misc=cfg.misc)
    with closing(alone) as rewarder:
        if not rewarder.needed:
            return True, "has no weight in the reward"
        told = [
            f"{url}: {info.model}, {'higher' if info.higher_is_better else 'lower'} is better"
            for url, info in rewarder.infos.items()
        ]
        return True, "; ".join(told) or "scores in this process"


def _vllm(cfg: TrainerConfig) -> tuple[None, str]:
    server = cfg.generation.vllm
    return None, f"{server.url}: serves {probe_server(server, adapters=cfg.policy.lora.r > 0)}"


def _trackers(cfg: TrainerConfig) -> tuple[None, str]:
    check_trackers(cfg.misc.trackers)
    return None, ", ".join(cfg.misc.trackers) or "none but log.jsonl"


def _run_dir(cfg: TrainerConfig) -> tuple[None, str]:
    """Fit for a new run, or to go on with the one that stands there."""
    folder = Path(cfg.misc.run_dir)
    open_run_dir(cfg.misc)
    if any(folder.glob("checkpoints/step-*")) and not cfg.misc.overwrite:
        checkpoint = checkpoint_to_resume(cfg)
        done = read_state(checkpoint).update if checkpoint else 0
        return None, f"{folder}: holds a run of {done} updates; go on with --resume"
    check_run_dir(cfg)
    return None, f"{folder}: can be written to"


def check_table(findings: Findings) -> Table:
    """What `python -m trainer check` found."""
    table = Table("", "check", Column("found", overflow="fold"))
    for check in findings.checks:
        mark = Text("ok", "green") if check.ok else Text("failed", "red")
        table.add_row(mark, check.name, Text(check.found))
    return table


def memory_table(findings: Findings) -> Table:
    """Where the memory goes."""
    table = Table("memory (estimate)", Column("GiB", justify="right"))
    for what, size in findings.memory:
        table.add_row(what, f"{size / 2**30:.2f}")
    return table
