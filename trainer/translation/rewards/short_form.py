"""The reward keys of a translation config as a reward definition, which every trainer can use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from scorekit.errors import UserError
from scorekit.rewards import RewardDefinition, load_definition
from trainer.translation.rewards.components.guards import GUARDS, guard_weight
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.services import configured_urls


def definition_of(cfg: RewardConfig) -> RewardDefinition | None:
    """Return the definition that gives the sequence rewards, up to the rounding of a sum.

    A sample needs `src`, `mt`, `src_lang`, `tgt_lang`, with no_eos_penalty `finish_reason`, with
    w_chrf `ref`. Where the trainer leaves a sample out, the definition gives no reward. None: no
    part of the reward is of a whole translation. What it lacks is said by `missing_parts`. Raises
    UserError for a part without a service.
    """
    text_error = {"invalid_input": cfg.text_error_reward}
    if cfg.overlong != "skip":
        text_error["overlong"] = cfg.text_error_reward
    parts = _local_parts(cfg) | _service_parts(cfg)
    components = {name: part for name, part in parts.items() if part["weight"]}
    if not components:
        return cfg.definition if cfg.definition is not None and cfg.w_definition == 1 else None
    for name, part in components.items():
        if "service" in part:
            part["service"] = _services(cfg, "xcomet" if name == "xcomet_seq" else name)
    return load_definition(
        {
            "components": components,
            "refused_text_reward": text_error,
            "deadline_s": cfg.deadline_s,
        }
    )


def missing_parts(cfg: RewardConfig) -> Iterator[str]:
    """Yield a line for each part of the reward that `definition_of` leaves out."""
    severities = {k: v for k, v in cfg.severity_weights.model_dump().items() if v is not None}
    weights = ", ".join(f"{name} {weight:g}" for name, weight in severities.items())
    for key, source in (("w_xcomet_span", "xCOMET"), ("w_mqm_span", "the judge's mqm")):
        if weight := cfg.weight_of_spans(getattr(cfg, key)):
            yield f"{key} {weight:g}: times the severity, on each token in a span of {source}"
    if weight := cfg.weight_of_spans(cfg.w_omission):
        yield f"w_omission {weight:g}: times the severity, on the last token for each omission"
    if any(cfg.weight_of_spans(w) for w in (cfg.w_xcomet_span, cfg.w_mqm_span, cfg.w_omission)):
        yield f"severity_weights: {weights}"
    for name, weight in cfg.terms.items():
        yield f"terms.{name} {weight:g}: a component of trainer/translation/rewards/components"
    if cfg.definition is not None and cfg.w_definition and definition_of(cfg) != cfg.definition:
        yield f"w_definition {cfg.w_definition:g}: times the reward of reward.definition"


def _services(cfg: RewardConfig, service: Any) -> list[str]:
    urls, key = configured_urls(cfg, service), cfg.urls_key(service)
    if not urls:
        raise UserError(f"{key}: not set, nor {service.upper()}_URL in the environment")
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise UserError(
                f"{key}: {url}: a definition has services, no class of this process. Set the URL "
                "of a service"
            )
    return urls


def _local_parts(cfg: RewardConfig) -> dict[str, dict[str, Any]]:
    guards = {
        f"guard_{name}": {"rule": name, "weight": -guard_weight(name, cfg.guards)}
        for name in GUARDS
    }
    no_eos = {
        "rule": "truncated",
        "weight": -cfg.no_eos_penalty,
        "applies_to_refused_text": True,
    }
    return {"no_eos": no_eos, **guards, "chrf": {"rule": "chrf", "weight": cfg.w_chrf}}


def _service_parts(cfg: RewardConfig) -> dict[str, dict[str, Any]]:
    options: dict[str, Any] = {
        "overlong": "error" if cfg.overlong in ("skip", "penalty") else cfg.overlong
    }
    if cfg.max_input_length is not None:
        options["max_input_length"] = cfg.max_input_length
    return {
        "metricx": {
            "service": None,
            "model": cfg.metricx_model_name,
            "offset": cfg.metricx_offset,
            "scale": -1.0,
            "weight": cfg.w_metricx,
            "options": options,
        },
        "xcomet_seq": {
            "service": None,
            "model": cfg.xcomet_model_name,
            "weight": cfg.w_xcomet_seq * cfg.xcomet_seq_scale,
            "options": options,
        },
        "judge": {
            "service": None,
            "model": cfg.judge_model_name,
            "task": cfg.judge_rubric,
            "variables": cfg.judge_variables,
            "weight": cfg.w_judge,
        },
    }
