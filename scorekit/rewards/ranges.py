"""The values that a composite reward can take, as far as services and rules say."""

from __future__ import annotations

import math
from collections.abc import Mapping

from scorekit.rewards.definition import ComponentConfig, RewardDefinition
from scorekit.schemas import Info

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
