"""The sequence rewards of a translation run as a reward definition, to compare the two."""

from __future__ import annotations

from typing import Any

from scorekit.rewards import RewardDefinition, load_definition
from trainer.translation.rewards.components.guards import GUARDS, guard_weight
from trainer.translation.rewards.config import RewardConfig


def sequence_definition(cfg: RewardConfig) -> RewardDefinition:
    """Return the definition that gives the sequence rewards, up to the rounding of a sum.

    A sample needs `src`, `mt`, `src_lang`, `tgt_lang`, with no_eos_penalty `finish_reason`, with
    w_chrf `ref`. Where the trainer leaves a sample out, the definition gives no reward. It has no
    spans, omissions and further components.
    """
    text_error = {"invalid_input": cfg.text_error_reward}
    if cfg.overlong != "skip":
        text_error["overlong"] = cfg.text_error_reward
    components = _local_components(cfg) | _service_components(cfg)
    return load_definition(
        {
            "components": {name: part for name, part in components.items() if part["weight"]},
            "refused_text_reward": text_error,
            "deadline_s": cfg.deadline_s,
        }
    )


def _local_components(cfg: RewardConfig) -> dict[str, dict[str, Any]]:
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


def _service_components(cfg: RewardConfig) -> dict[str, dict[str, Any]]:
    options = {
        "overlong": "error" if cfg.overlong in ("skip", "penalty") else cfg.overlong,
        "max_input_length": cfg.max_input_length,
    }
    return {
        "metricx": {
            "service": cfg.metricx_urls,
            "offset": cfg.metricx_offset,
            "scale": -1.0,
            "weight": cfg.w_metricx,
            "options": options,
        },
        "xcomet_seq": {
            "service": cfg.xcomet_urls,
            "weight": cfg.w_xcomet_seq * cfg.xcomet_seq_scale,
            "options": options,
        },
        "judge": {
            "service": cfg.urls.get("judge", []),
            "task": cfg.judge_rubric,
            "variables": cfg.judge_variables,
            "weight": cfg.w_judge,
        },
    }
