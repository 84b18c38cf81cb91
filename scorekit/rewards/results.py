"""The reward of a sample: its components and gates, the formula over them, and its range."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from scorekit.errors import SampleError, SampleErrorType
from scorekit.rewards.definition import ComponentConfig, GateConfig, RewardDefinition
from scorekit.schemas import Info, Result

#: Why a component has a value (`ok`) or none. The types of a failed sample of a service, then:
#: bad_source: the service refuses the source with any translation; no_value: the answer or the
#: sample lacks the field; rule_error: a local rule raised; skipped: a gate refused the sample
#: before any service was asked.
Status = Literal["ok", SampleErrorType, "bad_source", "no_value", "rule_error", "skipped"]
STATUSES: tuple[Status, ...] = get_args(Status)
#: Error type of `raise_for_missing` where a status is no type of a failed sample.
_ERROR_TYPES = {
    "bad_source": "invalid_input",
    "no_value": "invalid_input",
    "rule_error": "model_failure",
}
#: Characters of a service's own words in a log line.
_MAX_WORDS = 200


@dataclass(frozen=True, slots=True)
class ComponentResult:
    """One component of one sample.

    raw: value in the service's or the rule's own scale.
    scaled: offset + scale * raw, before the weight. Both are None unless `status` is ok.
    message: why it has no value.
    is_transient: whether a later request may give one.
    answer: the service's full result, with error spans; None without a service.
    has_token_weight: whether its error spans or omissions reward tokens.
    """

    weight: float
    status: Status
    raw: float | None = None
    scaled: float | None = None
    message: str | None = None
    is_transient: bool = False
    answer: Result | None = None
    has_token_weight: bool = False

    @property
    def is_required(self) -> bool:
        """Return whether a sample without it has no reward."""
        return bool(self.weight) or self.has_token_weight


@dataclass(frozen=True, slots=True)
class GateResult:
    """One gate of one sample.

    status: unknown: the gate cannot decide, and so the sample has no reward.
    value: what was measured; None where the gate does not apply.
    """

    status: Literal["open", "closed", "unknown"]
    value: float | None = None
    message: str | None = None


@dataclass(frozen=True, slots=True)
class RewardResult:
    """The reward of one sample.

    reward: None: there is none, which is never the same as 0. Leave the sample out.
    reason: why there is none, or why the reward is not the sum of its components.
    """

    reward: float | None
    reason: str | None = None
    components: dict[str, ComponentResult] = field(default_factory=dict)
    gates: dict[str, GateResult] = field(default_factory=dict)

    @property
    def is_transient(self) -> bool:
        """Return whether a later call may give the reward that is missing now."""
        missing = [c for c in self.components.values() if c.is_required and c.status != "ok"]
        return self.reward is None and any(component.is_transient for component in missing)

    @property
    def cause(self) -> str | None:
        """Return `reason` for a log: names and statuses alone, no word of a service or a text."""
        if self.reason is None:
            return None
        parts = [
            f"{name}: {component.status}"
            for name, component in self.components.items()
            if component.is_required and component.status not in ("ok", "skipped")
        ]
        parts += [
            f"gate {name}: {g.status}" for name, g in self.gates.items() if g.status != "open"
        ]
        return ", ".join(parts) or "non_finite"

    def wire(self) -> dict[str, Any]:
        """Return the answer as JSON has it, without the services' full results."""
        return {
            "reward": self.reward,
            "reason": self.reason,
            "components": {
                name: {
                    "raw": component.raw,
                    "scaled": component.scaled,
                    "weight": component.weight,
                    "status": component.status,
                    "message": component.message,
                }
                for name, component in self.components.items()
            },
            "gates": {
                name: {"status": gate.status, "value": gate.value, "message": gate.message}
                for name, gate in self.gates.items()
            },
        }

    def stats(self) -> dict[str, float]:
        """Return flat numbers for a trainer's log: raw values, and 1 or 0 for a closed gate.

        A component without a value is left out: it has no number."""
        values = {
            f"component/{name}": component.raw
            for name, component in self.components.items()
            if component.raw is not None
        }
        closed = {
            f"gate_closed/{name}": float(gate.status == "closed")
            for name, gate in self.gates.items()
            if gate.status != "unknown"
        }
        return values | closed


def log_words(text: object) -> str:
    """Return words of a service for a log or an error: one line without control characters, cut."""
    line = "".join(char if char.isprintable() else " " for char in str(text)[:2000])
    words = " ".join(line.split())
    return words if len(words) <= _MAX_WORDS else f"{words[:_MAX_WORDS]}…"


def raise_for_missing(results: Iterable[RewardResult]) -> list[float]:
    """Return the rewards if every sample has one.

    Raises SampleError with the first sample's index: for trainers that take an exception for a
    missing reward."""
    rewards = []
    for index, result in enumerate(results):
        if result.reward is None:
            raise _missing(index, result)
        rewards.append(result.reward)
    return rewards


def _missing(index: int, result: RewardResult) -> SampleError:
    statuses = [c.status for c in result.components.values() if c.is_required and c.status != "ok"]
    status = next((status for status in statuses if status != "skipped"), "no_value")
    return SampleError(
        _ERROR_TYPES.get(status, status),
        result.reason or "no reward",
        index=index,
        retryable=result.is_transient,
    )


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
    2. a required component (with a weight, of texts or of tokens) has a bad source: no reward;
    3. a required component has a refused text: the reward of `refused_text_reward`, plus the
       components with `applies_to_refused_text`, lowered by the closed gates; without one: no
       reward;
    4. a required component has no value: no reward;
    5. the sum of weight * scaled, lowered by the closed gates.
    A sum that is not finite as float32, in which trainers hold rewards, is no reward.
    """
    of_tokens = definition.token_rewards.weighted if definition.token_rewards else frozenset()
    components = {
        name: replace(c, has_token_weight=True) if name in of_tokens else c
        for name, c in components.items()
    }
    reward, reason = _compose(definition, components, gates)
    if reward is not None and not abs(reward) <= _MAX_FLOAT32:
        reward, reason = None, f"non_finite: the sum is {_NON_FINITE}"
    return RewardResult(reward, reason, components, dict(gates))


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
    required = {name: c for name, c in components.items() if c.is_required and c.status != "ok"}
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


#: Least and greatest value; infinite where there is no bound, or none is known.
Range = tuple[float, float]
UNKNOWN: Range = (-math.inf, math.inf)
#: Of the local rules. A function of the user's may return anything.
_RULES: dict[str, Range] = {
    **dict.fromkeys(
        ("language", "script", "copy", "length", "repetition", "truncated", "duplicates"),
        (0.0, 1.0),
    ),
    "chrf": (0.0, 100.0),
}


def reward_range(definition: RewardDefinition, infos: Mapping[str, Info]) -> Range:
    """Return the least and the greatest reward that a sample can have.

    infos: what `CompositeReward.check` returns: the service of each component.
    """
    scaled = {
        name: _scaled_range(config, infos.get(name))
        for name, config in definition.components.items()
        if config.weight
    }
    low, high = _sum(list(scaled.values()))
    applied = [
        scaled[name]
        for name, config in definition.components.items()
        if config.applies_to_refused_text and config.weight
    ]
    for reward in definition.refused_text_reward.values():
        refused_low, refused_high = _sum([(reward, reward), *applied])
        low, high = min(low, refused_low), max(high, refused_high)
    for gate in definition.gates.values():
        if gate.factor is not None and low > 0:
            low *= gate.factor
        if gate.reward is not None:
            low = min(low, gate.reward)
    return low, high


def _sum(ranges: list[Range]) -> Range:
    return sum(low for low, _ in ranges), sum(high for _, high in ranges)


def _scaled_range(config: ComponentConfig, info: Info | None) -> Range:
    """Return the range of weight * (offset + scale * raw)."""
    if not config.scale:
        return config.weight * config.offset, config.weight * config.offset
    ends = [
        config.weight * (config.offset + config.scale * raw) for raw in _raw_range(config, info)
    ]
    return min(ends), max(ends)


def _raw_range(config: ComponentConfig, info: Info | None) -> Range:
    if config.rule is not None:
        return _RULES.get(config.rule, UNKNOWN)
    if config.label is not None:
        return UNKNOWN
    if config.field == "pass":
        return 0.0, 1.0
    if config.field != "score":  # characters, or entries of a list
        weights = config.severity_weights.values()
        low = -math.inf if any(weight < 0 for weight in weights) else 0.0
        high = math.inf if not weights or any(weight > 0 for weight in weights) else 0.0
        return low, high
    if info is None:
        return UNKNOWN
    bounds = ((info.tasks or {}).get(config.task or "") or info).score_range
    return (
        -math.inf if bounds.min is None else bounds.min,
        math.inf if bounds.max is None else bounds.max,
    )
