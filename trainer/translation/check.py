"""`scorekit check`: check a run before weights are loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from torch import nn

from scorekit.errors import UserError
from scorekit.net.addresses import address_of
from scorekit.report.findings import Findings
from trainer.rl.config import PolicyConfig
from trainer.rl.engines.choice import probe_server
from trainer.rl.policy import (
    check_tokenizer,
    embedding_rows,
    load_tokenizer,
    stop_token_ids,
)
from trainer.runs.checks import check_device, check_memory, check_model, check_output_paths
from trainer.runs.config import set_key
from trainer.translation.config import GenerationConfig, TranslationConfig
from trainer.translation.data import Example, in_both, load_set, load_train
from trainer.translation.evaluation.held_out import HeldOutMetrics
from trainer.translation.prompting import fitting_prompts
from trainer.translation.rewards.reward_batch import ServiceName
from trainer.translation.rewards.screening import (
    check_guards,
    check_references,
    check_sources,
    check_spans,
    check_target_languages,
)
from trainer.translation.rewards.services import RewardClient
from trainer.translation.rewards.short_form import SERVICES, needed_services, weighted_parts
from trainer.translation.train import check_trainable, workload_of


def check_run(cfg: TranslationConfig, processes: int = 1) -> Findings:
    """Check everything that a run of this config needs, without loading weights.

    processes: how many are to share the run.
    """
    findings = Findings()
    findings.run_check("config", check_reward, cfg)
    findings.run_check("rl", _update, cfg)
    findings.run_check("processes", lambda: (None, workload_of(cfg).check(processes)))
    check_inputs(cfg, findings)
    check_output_paths(findings, cfg)
    return findings


def check_inputs(cfg: TranslationConfig, findings: Findings) -> None:
    """Check what a run samples from and is scored by: data, policy and services."""
    run_check = findings.run_check
    train = run_check("data.train", _examples, cfg, None)
    sets = {name: run_check(set_key(name), _examples, cfg, name) for name in cfg.data.held_out}
    model = run_check("policy.path", check_model, cfg.policy, cfg.policy.path, "policy.path")
    if cfg.policy.reference_path is not None:
        run_check("policy.reference_path", _reference, cfg.policy, model)
    tokenizer = None if model is None else run_check("policy.tokenizer", _tokenizer, cfg, model)
    longest = 0
    for key, examples, gen_cfg in (
        ("data.train", train, cfg.generation),
        *((set_key(name), held_out, cfg.eval_generation()) for name, held_out in sets.items()),
    ):
        if examples and tokenizer is not None:
            arguments = cfg, key, examples, model, tokenizer, gen_cfg
            longest = max(longest, run_check(f"prompts of {key}", _prompts, *arguments) or 0)
    for name, held_out in sets.items():
        if train and held_out:
            run_check("overlap", _overlap, set_key(name), train, held_out)
    device = run_check("device", check_device, cfg.misc)
    if model is not None and device is not None:
        run_check("memory", check_memory, cfg, model, longest, device, findings)
    service_results = [
        run_check(name, _service, cfg, name)
        for name, kind in SERVICES.items()
        if not kind.optional or name in needed_services(cfg.reward)
    ]
    if all(service_results) and train:
        run_check("sources", _sources, cfg, train, sets)
    if all(service_results) and cfg.eval.metrics:
        run_check("eval.metrics", _metrics, cfg, sets)
    if cfg.generation.engine == "vllm":
        run_check("vLLM", _vllm, cfg)


def check_reward(cfg: TranslationConfig) -> tuple[None, str]:
    """Return the parts of the reward with their weights. Raises UserError without any."""
    check_trainable(cfg)
    parts = weighted_parts(cfg.reward)
    return None, ", ".join(f"{name} {weight:g}" for name, weight in parts.items())


def _update(cfg: TranslationConfig) -> tuple[None, str]:
    return None, f"{cfg.rl.algorithm}; importance correction: {cfg.correction_summary}"


def _examples(cfg: TranslationConfig, set_name: str | None) -> tuple[list[Example], str]:
    examples = load_train(cfg) if set_name is None else load_set(cfg, set_name)
    pairs = Counter((e.src_lang_code, e.tgt_lang_code) for e in examples)
    if set_name is None:
        check_guards(pairs, cfg.reward.guards)
    check_target_languages(
        cfg.reward.definition, "reward.definition", sorted({tgt for _, tgt in pairs})
    )
    check_references(examples, cfg.reward, "data.train" if set_name is None else set_key(set_name))
    counts = ", ".join(f"{src}>{tgt} {count}" for (src, tgt), count in pairs.most_common())
    return examples, f"{len(examples)} rows ({counts}); first: {examples[0].src_text[:40]!r}"


def _reference(cfg: PolicyConfig, policy: nn.Module | None) -> tuple[None, str]:
    model, description = check_model(cfg, cfg.reference_path, "policy.reference_path")
    if policy is not None and embedding_rows(model) != embedding_rows(policy):
        raise UserError(
            f"policy.reference_path: {cfg.reference_path} has {embedding_rows(model)} embeddings, "
            f"the policy has {embedding_rows(policy)}. Their log-probabilities cannot be compared"
        )
    return None, description


def _tokenizer(cfg: TranslationConfig, model: nn.Module) -> tuple[Any, str]:
    tokenizer = load_tokenizer(cfg.policy)
    check_tokenizer(cfg.policy, tokenizer, model)
    chat = "with" if getattr(tokenizer, "chat_template", None) else "no"
    stops = tokenizer.convert_ids_to_tokens(stop_token_ids(model, tokenizer))
    return tokenizer, f"{len(tokenizer):,} tokens, {chat} chat template, ends at {' '.join(stops)}"


def _prompts(
    cfg: TranslationConfig,
    key: str,
    examples: Sequence[Example],
    model: nn.Module,
    tokenizer: Any,
    gen_cfg: GenerationConfig,
) -> tuple[int, str]:
    prompts, overlong_message = fitting_prompts(
        key,
        examples,
        model,
        tokenizer,
        gen_cfg,
        refuse=cfg.data.overlong_prompts == "refuse",
    )
    lengths = sorted(len(prompt.ids) for prompt in prompts)
    note = f"; {overlong_message}" if overlong_message else ""
    return lengths[-1], (
        f"{lengths[0]} to {lengths[-1]} tokens (median {lengths[len(lengths) // 2]}), and "
        f"{gen_cfg.max_new_tokens} for the translation{note}"
    )


def _overlap(key: str, train: Sequence[Example], held_out: Sequence[Example]) -> tuple[None, str]:
    return None, in_both(key, train, held_out) or f"no row of {key} is in data.train"


def _sources(
    cfg: TranslationConfig, train: Sequence[Example], sets: Mapping[str, Sequence[Example] | None]
) -> tuple[None, str]:
    refuse, num_bad = cfg.data.bad_sources == "refuse", 0
    with closing(RewardClient(cfg.reward, offer_unneeded=False, misc=cfg.misc)) as rewarder:
        named = {set_key(name): held_out or [] for name, held_out in sets.items()}
        for key, examples in ({"data.train": train} | named).items():
            num_bad += len(check_sources(examples, rewarder, key, refuse=refuse))
    return None, f"{num_bad} cannot be scored" if num_bad else "all can be scored"


def _metrics(
    cfg: TranslationConfig, sets: Mapping[str, Sequence[Example] | None]
) -> tuple[None, str]:
    with closing(RewardClient(cfg.reward, offer_unneeded=False, misc=cfg.misc)) as rewarder:
        named = {name: held_out or [] for name, held_out in sets.items()}
        return None, "; ".join(HeldOutMetrics(cfg.eval.metrics, rewarder).check(named))


def _service(cfg: TranslationConfig, name: ServiceName) -> tuple[bool, str]:
    """Check a single service, so that an error of one does not hide those of the others."""
    single_service = RewardClient(cfg.reward, offer_unneeded=False, only=name, misc=cfg.misc)
    with closing(single_service) as rewarder:
        if not rewarder.needed:
            return True, "has no weight in the reward"
        if name == "xcomet":
            check_spans(rewarder)
        better = (
            "higher" if SERVICES[name].higher_is_better else "lower"
        )  # the direction each reports
        descriptions = [
            f"{url}: {info.model}, {better} is better" for url, info in rewarder.infos.items()
        ]
        descriptions += [f"{part}: {info.model}" for part, info in rewarder.component_infos.items()]
        return True, "; ".join(descriptions) or "scores in this process"


def _vllm(cfg: TranslationConfig) -> tuple[None, str]:
    server = cfg.generation.vllm
    served = probe_server(server, adapters=cfg.policy.lora.r > 0)
    return None, f"{', '.join(map(address_of, server.urls))}: serves {served}"
