"""The sequence reward of a run's config as a reward definition, for other trainers and scripts."""

from __future__ import annotations

from typing import Any

from scorekit.errors import UserError
from scorekit.rewards import RewardDefinition, load_definition
from trainer.translation.rewards.components.guards import GUARDS, guard_weight
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.services import configured_urls, scoring_config


def sequence_definition(cfg: RewardConfig) -> RewardDefinition:
    """Return the definition that gives the same sequence rewards, up to the rounding of a sum.

    A sample needs `src`, `mt`, `src_lang`, `tgt_lang`, with no_eos_penalty `finish_reason`, with
    w_chrf `ref`. Where the trainer leaves a sample out, the definition gives no reward.
    `on_failure: fail` has no counterpart: raise where a reward is missing.

    Raises UserError that names the keys that a definition cannot express: token rewards of spans
    and omissions, scorers in this process, tokenizer names, further components.
    """
    if keys := _inexpressible_keys(cfg):
        raise UserError(
            f"{', '.join(keys)}: a reward definition cannot express these. Set the weights to 0 "
            "and the names to null, or use the trainer"
        )
    services = _service_components(cfg)
    for name, component in services.items():
        if not component["service"]:
            raise UserError(f"{cfg.urls_key(_HOSTS[name])}: required. Give the URL of a service")
    text_error = {"invalid_input": cfg.text_error_reward}
    if cfg.overlong != "skip":
        text_error["overlong"] = cfg.text_error_reward
    return load_definition(
        {
            "components": _local_components(cfg) | services,
            "refused_text_reward": text_error,
            "deadline_s": cfg.deadline_s,
            "timeout_s": cfg.timeout_s,
            "batch_size": cfg.batch_size,
        }
    )


#: Component -> the service that it uses.
_HOSTS = {"metricx": "metricx", "xcomet_seq": "xcomet", "judge": "judge"}


def _inexpressible_keys(cfg: RewardConfig) -> list[str]:
    keys = [
        f"reward.{key}"
        for key in ("w_xcomet_span", "w_mqm_span", "w_omission")
        if cfg.weight_of_spans(getattr(cfg, key))
    ]
    keys += [f"reward.terms.{name}" for name, weight in cfg.terms.items() if weight]
    if cfg.metricx_tokenizer_name is not None:
        keys.append("reward.metricx_tokenizer_name")
    for name, component in _service_components(cfg).items():
        if any(not url.startswith(("http://", "https://")) for url in component["service"]):
            keys.append(cfg.urls_key(_HOSTS[name]))
    return keys


def _local_components(cfg: RewardConfig) -> dict[str, dict[str, Any]]:
    components: dict[str, dict[str, Any]] = {}
    if cfg.no_eos_penalty:
        components["no_eos"] = {
            "rule": "truncated",
            "weight": -cfg.no_eos_penalty,
            "applies_to_refused_text": True,
        }
    for name in GUARDS:
        weight = guard_weight(name, cfg.guards)
        if weight or cfg.guards.shown:
            components[f"guard_{name}"] = {"rule": name, "weight": -weight}
    if cfg.w_chrf:
        components["chrf"] = {"rule": "chrf", "weight": cfg.w_chrf}
    return components


def _service_components(cfg: RewardConfig) -> dict[str, dict[str, Any]]:
    options = scoring_config(cfg).options()
    metricx = {
        "model": cfg.metricx_model_name,
        "offset": cfg.metricx_offset,
        "scale": -1.0,
        "weight": cfg.w_metricx,
        "options": options,
    }
    xcomet = {
        "model": cfg.xcomet_model_name,
        "weight": cfg.w_xcomet_seq * cfg.xcomet_seq_scale,
        "options": options,
    }
    judge = {
        "model": cfg.judge_model_name,
        "task": cfg.judge_rubric,
        "variables": cfg.judge_variables,
        "weight": cfg.w_judge,
        "options": {"cache": options["cache"]},
    }
    components = {"metricx": metricx, "xcomet_seq": xcomet, "judge": judge}
    return {
        name: component | {"service": configured_urls(cfg, _HOSTS[name])}
        for name, component in components.items()
        if component["weight"]
    }
