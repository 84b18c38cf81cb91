"""The reward's components. To add one, add a file with a subclass of `RewardComponent` here, and a
line to `_CLASSES`."""

from __future__ import annotations

from collections.abc import Iterator
from pkgutil import resolve_name

from scorekit.errors import UserError
from trainer.translation.rewards.component import RewardComponent
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.reward_batch import ServiceName, host

#: File and class of each component, in the order of summation.
_CLASSES = (
    "no_eos:NoEOS",
    "guards:Guards",
    "metricx:MetricX",
    "xcomet_seq:XCOMETSentence",
    "xcomet_spans:XCOMETSpans",
    "mqm:MQMSpans",
    "mqm:Omissions",
    "judge:JudgeVerdict",
    "composite:Composite",
    "chrf:ChrF",
)
COMPONENTS: list[RewardComponent] = [resolve_name(f"{__name__}.{path}")() for path in _CLASSES]


def displayed_components() -> list[RewardComponent]:
    """Return components in the order of tables and pages: those of models, then those of the
    text."""
    return sorted(COMPONENTS, key=lambda component: component.service is None)


def weighted(cfg: RewardConfig) -> list[RewardComponent]:
    """Return the components with a weight. Raises UserError for an unknown name in
    `reward.terms`."""
    names_without_key = [
        component.name
        for component in COMPONENTS
        if component.weight_key is None and type(component).weight is RewardComponent.weight
    ]
    for name in cfg.terms:
        if name not in names_without_key:
            valid_names = ", ".join(names_without_key) or "none: all components have separate keys"
            raise UserError(f"reward.terms: {name!r} is unknown. Choose from: {valid_names}")
    return [component for component in COMPONENTS if component.weight(cfg)]


def services() -> Iterator[ServiceName]:
    """Yield the services of all components, each once."""
    yield from dict.fromkeys(
        component.service for component in COMPONENTS if component.service is not None
    )


def needed(cfg: RewardConfig) -> tuple[ServiceName, ...]:
    """Return the services of components with a weight.

    Raises UserError for a name in `reward.urls` that is no service, or that has a separate key.
    """
    hosts = dict.fromkeys(map(host, services()))
    names_without_key = [name for name in hosts if cfg.urls_key(name) == f"reward.urls.{name}"]
    for name in cfg.urls:
        if name not in names_without_key:
            valid_names = ", ".join(names_without_key) or "none: all services have separate keys"
            raise UserError(f"reward.urls: {name!r} is unknown. Choose from: {valid_names}")
    weighted_services = {component.service for component in weighted(cfg)}
    return tuple(name for name in services() if name in weighted_services)


def is_requested_by_weight(service: ServiceName) -> bool:
    """Return True if a service is requested only with a weight: all its components are optional."""
    return all(component.optional for component in COMPONENTS if component.service == service)


def higher_is_better(service: ServiceName) -> bool:
    """Return the direction of a service's score that the formulas assume."""
    return next(
        component.higher_is_better for component in COMPONENTS if component.service == service
    )
