"""The reward's components. To add one: a file here with a subclass of `Term`, and its line in
TERMS."""

from __future__ import annotations

from collections.abc import Iterator

from scorekit.errors import UserError
from trainer.translation.rewards.component import RewardComponent
from trainer.translation.rewards.components.chrf import ChrF
from trainer.translation.rewards.components.guards import Guards
from trainer.translation.rewards.components.judge import JudgeVerdict
from trainer.translation.rewards.components.metricx import MetricX
from trainer.translation.rewards.components.mqm import MQMSpans, Omissions
from trainer.translation.rewards.components.no_eos import NoEOS
from trainer.translation.rewards.components.xcomet_seq import XCOMETSentence
from trainer.translation.rewards.components.xcomet_spans import XCOMETSpans
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.reward_batch import ServiceName, host

#: In the order in which they are added up.
TERMS: list[RewardComponent] = [
    NoEOS(),
    Guards(),
    MetricX(),
    XCOMETSentence(),
    XCOMETSpans(),
    MQMSpans(),
    Omissions(),
    JudgeVerdict(),
    ChrF(),
]


def shown_terms() -> list[RewardComponent]:
    """Return components in the order of tables and pages: those of models, then those of the
    text."""
    return sorted(TERMS, key=lambda term: term.service is None)


def weighted(cfg: RewardConfig) -> list[RewardComponent]:
    """Return the components with a weight. Raises UserError for an unknown name in
    `reward.terms`."""
    further = [term.name for term in TERMS if type(term).weight is RewardComponent.weight]
    for name in cfg.terms:
        if name not in further:
            valid_names = ", ".join(further) or "none: all components have separate keys"
            raise UserError(f"reward.terms: {name!r} is unknown. Choose from: {valid_names}")
    return [term for term in TERMS if term.weight(cfg)]


def services() -> Iterator[ServiceName]:
    """Yield the services of all components, each once."""
    yield from dict.fromkeys(term.service for term in TERMS if term.service is not None)


def needed(cfg: RewardConfig) -> tuple[ServiceName, ...]:
    """Return the services of components with a weight.

    Raises UserError for a name in `reward.urls` that is no service, or that has a separate key.
    """
    hosts = dict.fromkeys(map(host, services()))
    further = [name for name in hosts if cfg.urls_key(name) == f"reward.urls.{name}"]
    for name in cfg.urls:
        if name not in further:
            valid_names = ", ".join(further) or "none: all services have separate keys"
            raise UserError(f"reward.urls: {name!r} is unknown. Choose from: {valid_names}")
    weighted_services = {term.service for term in weighted(cfg)}
    return tuple(name for name in services() if name in weighted_services)


def only_paid(service: ServiceName) -> bool:
    """Return whether a service is only asked for the reward: all its components are optional."""
    return all(term.optional for term in TERMS if term.service == service)


def higher_is_better(service: ServiceName) -> bool:
    """Return the direction of a service's score that the formulas assume."""
    return next(term.higher_is_better for term in TERMS if term.service == service)
