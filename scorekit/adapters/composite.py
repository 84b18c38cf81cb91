"""Composite rewards in the adapters: what a trainer's row becomes, and what an outage is."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from scorekit.adapters.rewards import RewardSettings, Samples, options_for
from scorekit.errors import ServiceUnreachable, UserError
from scorekit.rewards import RewardDefinition, RewardResult, SyncCompositeReward, load_definition
from scorekit.rewards.results import log_words
from scorekit.schemas import Info

#: Statuses of a component whose service has not answered.
_OUTAGES = ("upstream", "timeout")


class CompositeRewards:
    """Gets composite rewards from services, for code that is not async."""

    def __init__(self, settings: RewardSettings) -> None:
        self.samples = Samples(settings)
        self._reward = SyncCompositeReward(definition_of(settings))

    def score(
        self, samples: Sequence[Mapping[str, Any]], groups: Sequence[Hashable] | None = None
    ) -> list[RewardResult]:
        """Return the results of samples. See `CompositeReward.score`.

        Raises ServiceUnreachable if no sample has a reward, and each lacks a service's answer.
        """
        results = self._reward.score(samples, groups=groups)
        raise_for_outage(results)
        return results


def definition_of(settings: RewardSettings) -> RewardDefinition:
    """Return the settings' definition. Raises UserError if there is none."""
    if settings.definition is None:
        raise UserError("definition: not set. Give the path of a YAML file")
    return settings.definition


def definition_of_service(settings: RewardSettings, info: Info) -> RewardDefinition:
    """Return the definition that gives the rewards of `reward_of`: one component, the service.

    info: what runs at the settings' URLs. Raises UserError if it does not support the settings.
    """
    component: dict[str, Any] = {
        "service": settings.url,
        "task": settings.task,
        "reference": settings.ref_key is not None,
        "options": options_for(info, settings),
    }
    if not info.higher_is_better_in(settings.task):
        component |= {"offset": settings.offset, "scale": -1.0}
    return load_definition(
        {
            "components": {info.service: component},
            "timeout_s": settings.timeout_s,
            "deadline_s": settings.deadline_s,
        }
    )


def raise_for_outage(results: Sequence[RewardResult]) -> None:
    """Raise ServiceUnreachable if `is_outage`."""
    if is_outage(results):
        reason = f"none of {len(results)} samples has a reward: {log_words(results[0].reason)}"
        raise ServiceUnreachable("reward definition", reason)


def is_outage(results: Sequence[RewardResult]) -> bool:
    """Return whether no sample has a reward, and each lacks a service's answer."""
    return bool(results) and all(
        result.reward is None
        and any(c.weight and c.status in _OUTAGES for c in result.components.values())
        for result in results
    )


def component_columns(results: Sequence[RewardResult]) -> dict[str, list[float | None]]:
    """Return the numbers of `RewardResult.stats` by name, one for each result.

    Every component and gate has a column, whichever results have its value. None: no value.
    """
    if not results:
        return {}
    names = [
        *(f"component/{name}" for name in results[0].components),
        *(f"gate_closed/{name}" for name in results[0].gates),
    ]
    stats = [result.stats() for result in results]
    return {name: [values.get(name) for values in stats] for name in names}


def check_no_group_rules(definition: RewardDefinition, trainer: str) -> None:
    """Raise UserError if a rule needs the other completions of a prompt."""
    for name, config in definition.components.items():
        if config.is_group_rule:
            raise UserError(
                f"components.{name}: a rule of groups, but {trainer} sends one completion in a "
                "request. Remove it"
            )


def check_single_samples(definition: RewardDefinition, trainer: str) -> None:
    """Raise UserError if a rule needs more than a trainer's request of one completion has."""
    check_no_group_rules(definition, trainer)
    for name in truncation_rules(definition):
        raise UserError(
            f"components.{name}: reads finish_reason, which {trainer} does not send. Remove it"
        )


def truncation_rules(definition: RewardDefinition) -> list[str]:
    """Return the names of the components that read `finish_reason`."""
    return [name for name, config in definition.components.items() if config.rule == "truncated"]


def composite_rewards_for(settings: RewardSettings) -> CompositeRewards:
    """Return the client of these settings. It is reused within a process, as `rewards_for` is."""
    return _composite_rewards(settings.model_dump_json(), os.getpid())


@lru_cache(maxsize=8)
def _composite_rewards(settings_json: str, pid: int) -> CompositeRewards:
    """Return the client of these settings in this process. pid: see `rewards._rewards`."""
    return CompositeRewards(RewardSettings.model_validate_json(settings_json))


Value = TypeVar("Value")
_BY_LOOP: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Any]] = WeakKeyDictionary()


def once_per_loop(name: str, settings: Mapping[str, Any], make: Callable[[], Value]) -> Value:
    """Return what `make` returned at the first call with this name and these settings in the
    running event loop."""
    values = _BY_LOOP.setdefault(asyncio.get_running_loop(), {})
    key = f"{name} {json.dumps(settings, sort_keys=True, default=str)}"
    if key not in values:
        values[key] = make()
    value: Value = values[key]
    return value
