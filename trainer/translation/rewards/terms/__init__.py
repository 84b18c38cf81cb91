"""The reward's terms. To add one: a file here with a subclass of `Term`, and its line in TERMS."""

from __future__ import annotations

from collections.abc import Iterator

from scorekit.errors import UserError
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.score_batch import ServiceName, host
from trainer.translation.rewards.term import Term
from trainer.translation.rewards.terms.chrf import ChrF
from trainer.translation.rewards.terms.guards import Guards
from trainer.translation.rewards.terms.judge import JudgeVerdict
from trainer.translation.rewards.terms.metricx import MetricX
from trainer.translation.rewards.terms.mqm import MQMSpans, Omissions
from trainer.translation.rewards.terms.no_eos import NoEOS
from trainer.translation.rewards.terms.xcomet_seq import XCOMETSentence
from trainer.translation.rewards.terms.xcomet_spans import XCOMETSpans

#: In the order in which they are added up.
TERMS: list[Term] = [
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


def shown_terms() -> list[Term]:
    """In the order of tables and pages: what models say, then what the text shows."""
    return sorted(TERMS, key=lambda term: term.service is None)


def weighted(cfg: RewardConfig) -> list[Term]:
    """The terms that the reward has. Raises UserError at a name in `reward.terms` that is none."""
    further = [term.name for term in TERMS if type(term).weight is Term.weight]
    for name in cfg.terms:
        if name not in further:
            known = ", ".join(further) or "none here: the others have keys of their own"
            raise UserError(f"reward.terms: {name!r} is not among those that it weighs ({known})")
    return [term for term in TERMS if term.weight(cfg)]


def services() -> Iterator[ServiceName]:
    """The services that terms are made of, each once."""
    yield from dict.fromkeys(term.service for term in TERMS if term.service is not None)


def needed(cfg: RewardConfig) -> tuple[ServiceName, ...]:
    """Those that a term with a weight is made of. Raises UserError at a name in `reward.urls` that
    is no service, or one whose URLs have a key of their own."""
    hosts = dict.fromkeys(map(host, services()))
    further = [name for name in hosts if cfg.urls_key(name) == f"reward.urls.{name}"]
    for name in cfg.urls:
        if name not in further:
            known = ", ".join(further) or "none here: the others have keys of their own"
            raise UserError(f"reward.urls: {name!r} is no service of a further term ({known})")
    asked = {term.service for term in weighted(cfg)}
    return tuple(name for name in services() if name in asked)


def only_paid(service: ServiceName) -> bool:
    """Whether it is asked for nothing but the reward: all its terms are optional."""
    return all(term.optional for term in TERMS if term.service == service)


def higher_is_better(service: ServiceName) -> bool:
    """The direction of its score that the formulas take for granted."""
    return next(term.higher_is_better for term in TERMS if term.service == service)
