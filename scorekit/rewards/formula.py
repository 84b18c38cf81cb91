"""The formula of a composite reward: pure functions of components and gates."""

from __future__ import annotations

import math
from collections.abc import Mapping

from scorekit.rewards.definition import ComponentConfig, GateConfig, RewardDefinition
from scorekit.rewards.results import ComponentResult, GateResult, RewardResult, Status
from scorekit.schemas import Result

_NON_FINITE = "a number that is not finite"
_MAX_FLOAT32 = (2 - 2**-23) * 2.0**127


def component_result(
    raw: float, config: ComponentConfig, answer: Result | None = None
) -> ComponentResult:
    """Return a component with its scaled value; status non_finite if either is not finite."""
    scaled = config.offset + config.scale * raw
    if not (math.isfinite(raw) and math.isfinite(scaled)):
        return missing_component(config, "non_finite", _NON_FINITE, answer=answer)
    return ComponentResult(config.weight, "ok", raw, scaled, answer=answer)


def missing_component(
    config: ComponentConfig,
    status: Status,
    message: str,
    *,
    is_transient: bool = False,
    answer: Result | None = None,
) -> ComponentResult:
    """Return a component without a value."""
    return ComponentResult(
        config.weight, status, message=message, is_transient=is_transient, answer=answer
    )


def compose(
    definition: RewardDefinition,
    components: Mapping[str, ComponentResult],
    gates: Mapping[str, GateResult],
) -> RewardResult:
    """Return the reward of one sample.

    The first rule that applies decides:
    1. a gate that refuses is closed, or a gate is unknown: no reward;
    2. a component with a weight has a bad source: no reward;
    3. a component with a weight has a refused text: the reward of `refused_text_reward`, plus the
       components with `applies_to_refused_text`, lowered by the closed gates; without one: no
       reward;
    4. a component with a weight has no value: no reward;
    5. the sum of weight * scaled, lowered by the closed gates.
    A sum that is not finite as float32, in which trainers hold rewards, is no reward.
    """
    reward, reason = _compose(definition, components, gates)
    if reward is not None and not abs(reward) <= _MAX_FLOAT32:
        reward, reason = None, f"non_finite: the sum is {_NON_FINITE}"
    return RewardResult(reward, reason, dict(components), dict(gates))


def refusing_gate(
    definition: RewardDefinition, gates: Mapping[str, GateResult]
) -> tuple[str, str] | None:
    """Return (name, reason) of the first gate that leaves the sample without a reward."""
    for name, gate in gates.items():
        config = definition.gates[name]
        is_refused = gate.status == "closed" and config.factor is None and config.reward is None
        if is_refused or gate.status == "unknown":
            return name, f"gate {name}: {gate.status}" + (
                f": {gate.message}" if gate.message else ""
            )
    return None


def _compose(
    definition: RewardDefinition,
    components: Mapping[str, ComponentResult],
    gates: Mapping[str, GateResult],
) -> tuple[float | None, str | None]:
    if refusal := refusing_gate(definition, gates):
        return None, refusal[1]
    required = {name: c for name, c in components.items() if c.weight and c.status != "ok"}
    for name, component in required.items():
        if component.status == "bad_source":
            return None, _reason(name, component)
    for error_type in ("invalid_input", "overlong"):
        for name, component in required.items():
            if component.status == error_type and error_type in definition.refused_text_reward:
                reward = definition.refused_text_reward[error_type]
                return _refused(definition, components, gates, reward, _reason(name, component))
    for name, component in required.items():
        return None, _reason(name, component)
    reward = weighted_sum(components)
    return _through_gates(reward, definition.gates, gates)


def _refused(
    definition: RewardDefinition,
    components: Mapping[str, ComponentResult],
    gates: Mapping[str, GateResult],
    reward: float,
    reason: str,
) -> tuple[float | None, str]:
    applied = {
        name: components[name]
        for name, config in definition.components.items()
        if config.applies_to_refused_text and config.weight
    }
    for name, component in applied.items():
        if component.status != "ok":
            return None, _reason(name, component)
    # Else a text that nobody can score would be worth more than a bad one.
    lowered, closed = _through_gates(reward + weighted_sum(applied), definition.gates, gates)
    return lowered, f"{reason}; {closed}" if closed else reason


def weighted_sum(components: Mapping[str, ComponentResult]) -> float:
    """Return the sum of weight * scaled of the components with a weight, which all have a value.

    NaN if it overflows."""
    addends = [
        c.weight * c.scaled for c in components.values() if c.weight and c.scaled is not None
    ]
    try:
        return math.fsum(addends)
    except (OverflowError, ValueError):  # ValueError: inf - inf
        return math.nan


def _through_gates(
    reward: float, configs: Mapping[str, GateConfig], gates: Mapping[str, GateResult]
) -> tuple[float, str | None]:
    """Return the reward after the closed gates, and their names, in any order of gates."""
    closed = [name for name, gate in gates.items() if gate.status == "closed"]
    limits = [math.inf]
    for name in closed:
        config = configs[name]
        if config.factor is not None and reward > 0:
            reward *= config.factor
        if config.reward is not None:
            limits.append(config.reward)
    reason = f"gate {', '.join(closed)}: closed" if closed else None
    return min(reward, *limits), reason


def _reason(name: str, component: ComponentResult) -> str:
    return f"{name}: {component.status}: {component.message}"
