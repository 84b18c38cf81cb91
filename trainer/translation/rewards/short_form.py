"""The reward keys of a translation config: a short form of a reward definition.

`formula_of` is what the trainer computes, over the services by their names. `definition_of` is the
same with their URLs, which every trainer can use.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from scorekit.client.sync import scorer_class
from scorekit.config import split_commas
from scorekit.errors import UserError
from scorekit.rewards import RewardDefinition, load_definition
from scorekit.rewards.definition import ComponentConfig
from scorekit.rewards.services import fields_of_request
from scorekit.rewards.violations import VIOLATIONS
from trainer.translation.rewards.config import GuardConfig, RewardConfig
from trainer.translation.rewards.reward_batch import COMPOSITE, MQM, VERDICT, ServiceName, host


class ServiceKind(NamedTuple):
    """A service that the keys of a config can ask.

    higher_is_better: the direction of its score that the formula assumes.
    optional: it may charge for each request, and is requested only with a weight.
    """

    higher_is_better: bool
    optional: bool


#: By name, in the order of logs and pages.
SERVICES: dict[ServiceName, ServiceKind] = {
    "metricx": ServiceKind(higher_is_better=False, optional=False),
    "xcomet": ServiceKind(higher_is_better=True, optional=False),
    MQM: ServiceKind(higher_is_better=False, optional=True),
    VERDICT: ServiceKind(higher_is_better=True, optional=True),
    COMPOSITE: ServiceKind(higher_is_better=True, optional=True),
}


#: Names that a config may require of the model of a service.
NAMES = ("model_name", "tokenizer_name")


def formula_of(cfg: RewardConfig) -> RewardDefinition | None:
    """Return the definition that the trainer computes; None if every weight is 0.

    The `service` of a component is its name in SERVICES. `definition`, if it has a weight, is one
    component: its value is the reward that reward.definition gives.
    """
    components = _rules(cfg) | {
        name: part | {"service": [name]} for name, part in _services(cfg).items()
    }
    if cfg.definition is not None:
        components[COMPOSITE] = {"service": [COMPOSITE], "weight": cfg.w_definition}
    tokens = _token_rewards(cfg)
    if not tokens and not any(part["weight"] for part in components.values()):
        return None
    return _load(cfg, components, tokens)


def rules_of(cfg: RewardConfig) -> dict[str, ComponentConfig]:
    """Return the components that are computed from the text, with a weight or to be shown."""
    return {name: ComponentConfig(**part) for name, part in _rules(cfg).items()}


def definition_of(cfg: RewardConfig) -> RewardDefinition | None:
    """Return the definition that gives the rewards of texts and tokens in any trainer.

    They are equal up to the rounding of a sum. A sample needs `src`, `mt`, `src_lang`, `tgt_lang`,
    with no_eos_penalty `finish_reason`, with w_chrf `ref`. Where the trainer leaves a sample out,
    the definition gives no reward. What it lacks is said by `missing_parts`. None: there is nothing
    else. Raises UserError for a part without a service.
    """
    formula, nested = formula_of(cfg), nested_definition(cfg)
    if formula is None:
        return None
    components = _rules(cfg) | {
        name: part | _source(cfg, name)
        for name, part in _services(cfg).items()
        if name in formula.required
    }
    tokens = _token_rewards(cfg)
    if nested is None or not _is_exact(cfg):
        return _load(cfg, components, tokens) if components else None
    if clash := components.keys() & nested.components.keys():
        raise UserError(
            f"reward.definition.components.{min(clash)}: the reward has another part of this name. "
            "Give it another one"
        )
    weight, keys = cfg.w_definition, nested.model_dump(exclude_defaults=True)
    for name, part in keys["components"].items():
        components[name] = part | {"weight": weight * nested.components[name].weight}
    for gate in keys.get("gates", {}).values():
        if "reward" in gate:
            gate["reward"] *= weight
    refused = {name: weight * reward for name, reward in nested.refused_text_reward.items()}
    changes = {"refused_text_reward": refused, "deadline_s": nested.deadline_s}
    return _load(cfg, components, tokens, keys | changes)


def missing_parts(cfg: RewardConfig) -> Iterator[str]:
    """Yield a line for each part of the reward that `definition_of` leaves out."""
    if nested_definition(cfg) is not None and not _is_exact(cfg):
        yield (
            f"w_definition {cfg.w_definition:g}: times the reward of reward.definition, whose "
            "refused_text_reward is of its own part alone"
        )


def nested_definition(cfg: RewardConfig) -> RewardDefinition | None:
    """Return reward.definition with the weights of reward.terms; None without one or its weight.

    Raises UserError for a name in reward.terms that is no component of it, for what a run does not
    give a definition, and for gates that lower its reward beside other parts, which they would not
    lower here, and would in any other trainer.
    """
    definition = cfg.definition
    for name in cfg.terms:
        if definition is None or name not in definition.components:
            raise UserError(
                f"reward.terms: {name!r} is no component of reward.definition. Write it there, as "
                "a function and a line of YAML: docs/how-to/add-a-reward.md, 'Write a function'"
            )
    if definition is None or not cfg.w_definition:
        return None
    if cfg.terms:
        components = {
            name: component.model_copy(update={"weight": cfg.terms.get(name, component.weight)})
            for name, component in definition.components.items()
        }
        changed = definition.model_copy(update={"components": components})
        definition = load_definition(changed.model_dump(exclude_defaults=True))
    _check_inputs(definition)
    for name, gate in definition.gates.items():
        is_lowering = gate.factor is not None or gate.reward is not None
        if is_lowering and _has_other_weights(cfg):
            raise UserError(
                f"reward.definition.gates.{name}: it lowers a reward, and the reward has other "
                "parts (w_metricx, ...), which it would not lower. Move them into the definition, "
                "or set their weights to 0"
            )
    return definition


def weighted_parts(cfg: RewardConfig) -> dict[str, float]:
    """Return the parts of the reward that have a weight, by their names in a log."""
    nested_definition(cfg)
    weights = {
        "no_eos": cfg.no_eos_penalty,
        "guards": max(guard_weight(name, cfg.guards) for name in VIOLATIONS),
        "metricx": cfg.w_metricx,
        "xcomet_seq": cfg.w_xcomet_seq * cfg.xcomet_seq_scale,
        "xcomet_spans": cfg.weight_of_spans(cfg.w_xcomet_span),
        "mqm_spans": cfg.weight_of_spans(cfg.w_mqm_span),
        "omissions": cfg.weight_of_spans(cfg.w_omission),
        "judge": cfg.w_judge,
        "composite": 0.0 if cfg.definition is None else cfg.w_definition,
        "chrf_reward": cfg.w_chrf,
    }
    return {name: weight for name, weight in weights.items() if weight}


def needed_services(cfg: RewardConfig) -> tuple[ServiceName, ...]:
    """Return the services with a weight, in the order of SERVICES.

    Raises UserError for a name in `reward.urls` that is no service, or that has a separate key.
    """
    hosts = dict.fromkeys(map(host, SERVICES))
    names_without_key = [name for name in hosts if cfg.urls_key(name) == f"reward.urls.{name}"]
    for name in cfg.urls:
        if name not in names_without_key:
            raise UserError(
                f"reward.urls: {name!r} is unknown. Choose from: {', '.join(names_without_key)}"
            )
    formula = formula_of(cfg)
    return tuple(name for name in SERVICES if formula is not None and name in formula.required)


def configured_urls(cfg: RewardConfig, name: ServiceName) -> list[str]:
    """Return the URLs of the config, or else of the environment.

    Those of a composite reward may be none: its rules may all be local."""
    if name == COMPOSITE:
        components = cfg.definition.components.values() if cfg.definition else ()
        return [url for component in components for url in component.service or ()]
    variable = f"{host(name).upper()}_URL"
    return cfg.urls_of(host(name)) or split_commas(os.environ.get(variable, ""))


def guard_weight(name: str, cfg: GuardConfig) -> float:
    """Return `w_{name}` of the config."""
    weight: float = getattr(cfg, f"w_{name}")
    return weight


def _load(
    cfg: RewardConfig,
    components: dict[str, dict[str, Any]],
    tokens: dict[str, Any],
    further: Mapping[str, Any] = MappingProxyType({}),
) -> RewardDefinition:
    """Return the definition of these parts.

    further: keys of the definition. Its `refused_text_reward` goes before that of the config."""
    refused = {"invalid_input": cfg.text_error_reward}
    if cfg.overlong != "skip":
        refused["overlong"] = cfg.text_error_reward
    keys = {"deadline_s": cfg.deadline_s, **further, "components": components}
    keys["refused_text_reward"] = refused | further.get("refused_text_reward", {})
    return load_definition(keys | ({"token_rewards": tokens} if tokens else {}))


def _has_other_weights(cfg: RewardConfig) -> bool:
    """Return whether a text has a reward beside that of reward.definition."""
    components = {} if (formula := formula_of(cfg)) is None else formula.components
    return any(part.weight for name, part in components.items() if name != COMPOSITE)


def _is_exact(cfg: RewardConfig) -> bool:
    """Return whether the parts of reward.definition may stand beside other parts in one sum."""
    return cfg.definition is None or not (
        cfg.definition.refused_text_reward and _has_other_weights(cfg)
    )


def _check_inputs(definition: RewardDefinition) -> None:
    """Raise UserError if reward.definition needs what a run does not give it."""
    if definition.token_rewards is not None:
        raise UserError(
            "reward.definition.token_rewards: tokens are rewarded by the keys of a run's reward in "
            "this trainer. Use reward.w_xcomet_span or reward.w_mqm_span"
        )
    for name, part in definition.components.items():
        if part.rule is None and "ref" in fields_of_request(part.request).values():
            key = "variables" if part.variables else "reference"
            raise UserError(
                f"reward.definition.components.{name}.{key}: services get no reference in this "
                "trainer. Remove it, or use the rule `chrf`"
            )


def request_of(cfg: RewardConfig, name: ServiceName) -> dict[str, Any]:
    """Return what a component of this service asks for, without its options and its weight.

    As if it had a weight: the direction of its scale is that of a reward."""
    keys = ("offset", "scale", "task", "variables")
    part = {key: value for key, value in _services(cfg)[name].items() if key in keys}
    return part if SERVICES[name].higher_is_better else part | {"scale": -1.0}


def expected_name(cfg: RewardConfig, name: ServiceName, key: str) -> str | None:
    """Return the name in NAMES that the config requires of a service; None: any."""
    return getattr(cfg, f"{host(name)}_{key}", None)


def scorer_of(
    cfg: RewardConfig, name: ServiceName, target: str, offered: Mapping[str, Any]
) -> tuple[dict[str, Any], set[str]]:
    """Return the keys of a component that a `module:Class` scores, and the NAMES that it does not
    take as an argument, so that they have to be those of its description.

    offered: arguments that it gets if it has a parameter of that name and the user gives none.
    Raises UserError if the class cannot be loaded.
    """
    module, colon, class_name = target.partition(":")
    if not colon or not all(part.isidentifier() for part in [*module.split("."), class_name]):
        raise UserError(
            f"{cfg.urls_key(host(name))}: {target!r}: expected a URL with http:// or https://, or "
            "a scorer in this process as module:Class"
        )
    arguments: dict[str, Any] = getattr(cfg, f"{name}_scorer_args", {})
    names = {f"{name}_{key}": expected_name(cfg, name, key) for key in NAMES}
    try:
        parameters = inspect.signature(scorer_class(target)).parameters
    except UserError as error:
        raise UserError(f"{cfg.urls_key(name)}, reward.{name}_scorer_args: {error}") from None
    accepted = {
        key: value
        for key, value in {**names, **offered}.items()
        if key in parameters and key not in arguments and value is not None
    }
    missing = {key for key in NAMES if names[f"{name}_{key}"] and f"{name}_{key}" not in accepted}
    return {"scorer": target, "arguments": accepted | arguments}, missing


def _source(cfg: RewardConfig, name: ServiceName) -> dict[str, Any]:
    """Return the keys that say what scores a component: the URLs of a service, or a class."""
    urls, key = configured_urls(cfg, name), cfg.urls_key(host(name))
    if not urls:
        raise UserError(f"{key}: not set, nor {host(name).upper()}_URL in the environment")
    if all(url.startswith(("http://", "https://")) for url in urls):
        return {"service": urls}
    source, missing = scorer_of(cfg, name, urls[0], {})
    not_said = {"model": None, "tokenizer": None}
    return source | {k: v for k, v in not_said.items() if f"{k}_name" not in missing}


def _rules(cfg: RewardConfig) -> dict[str, dict[str, Any]]:
    """Return the components that are computed from the text, with a weight or to be shown."""
    no_eos = {"rule": "truncated", "weight": -cfg.no_eos_penalty, "applies_to_refused_text": True}
    parts = {"no_eos": no_eos} if cfg.no_eos_penalty else {}
    for name in VIOLATIONS:
        weight = guard_weight(name, cfg.guards)
        if weight or cfg.guards.shown:
            parts[f"guard_{name}"] = {"rule": name, "weight": -weight or 0.0}
    if cfg.w_chrf:
        parts["chrf"] = {"rule": "chrf", "weight": cfg.w_chrf}
    return parts


def _services(cfg: RewardConfig) -> dict[ServiceName, dict[str, Any]]:
    """Return the components of services, without their URLs. Raises UserError for a rubric that is
    none."""
    if cfg.w_judge and cfg.judge_rubric == MQM:
        raise UserError(
            "reward.judge_rubric: a judge gives no verdict for 'mqm'. Name another rubric, or use "
            "reward.w_mqm_span"
        )
    options: dict[str, Any] = {
        "overlong": "error" if cfg.overlong in ("skip", "penalty") else cfg.overlong
    }
    if cfg.max_input_length is not None:
        options["max_input_length"] = cfg.max_input_length
    return {
        "metricx": {
            "model": cfg.metricx_model_name,
            "tokenizer": cfg.metricx_tokenizer_name,
            "offset": cfg.metricx_offset,
            "scale": -1.0,
            "weight": cfg.w_metricx,
            "options": options,
        },
        "xcomet": {
            "model": cfg.xcomet_model_name,
            "weight": cfg.w_xcomet_seq * cfg.xcomet_seq_scale,
            "options": options,
        },
        MQM: {"model": cfg.judge_model_name, "task": MQM, "weight": 0.0},
        VERDICT: {
            "model": cfg.judge_model_name,
            "task": cfg.judge_rubric,
            "variables": cfg.judge_variables,
            "weight": cfg.w_judge,
        },
    }


def _token_rewards(cfg: RewardConfig) -> dict[str, Any]:
    """Return `token_rewards` of the definition; {} without a weight of tokens."""
    spans = {"xcomet": cfg.weight_of_spans(cfg.w_xcomet_span)}
    spans[MQM] = cfg.weight_of_spans(cfg.w_mqm_span)
    omission = cfg.weight_of_spans(cfg.w_omission)
    if not any([*spans.values(), omission]):
        return {}
    return {
        "spans": {name: weight for name, weight in spans.items() if weight},
        "omissions": {MQM: omission} if omission else {},
        "severity_weights": cfg.severity_weights.model_dump(),
        "overlap_policy": cfg.overlap_policy,
        "overlap_threshold": cfg.overlap_threshold,
        "combine": cfg.span_combine,
        "sources_combine": cfg.span_sources_combine,
        "use_confidence": cfg.use_confidence,
        "uncovered": cfg.uncovered,
    }
