"""The reward of a sample, with the components and gates that it comes from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from scorekit.errors import SampleError, SampleErrorType
from scorekit.schemas import Result

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

    raw: value in the service's or the rule's own scale. scaled: offset + scale * raw, before the
    weight. Both are None unless `status` is ok.
    message: why it has no value. is_transient: whether a later request may give one.
    answer: the service's full result, with error spans; None without a service.
    """

    weight: float
    status: Status
    raw: float | None = None
    scaled: float | None = None
    message: str | None = None
    is_transient: bool = False
    answer: Result | None = None


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
        weighted = [c for c in self.components.values() if c.weight and c.status != "ok"]
        return self.reward is None and any(component.is_transient for component in weighted)

    @property
    def cause(self) -> str | None:
        """Return `reason` for a log: names and statuses alone, no word of a service or a text."""
        if self.reason is None:
            return None
        parts = [
            f"{name}: {component.status}"
            for name, component in self.components.items()
            if component.weight and component.status not in ("ok", "skipped")
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
    statuses = [c.status for c in result.components.values() if c.weight and c.status != "ok"]
    status = next((status for status in statuses if status != "skipped"), "no_value")
    return SampleError(
        _ERROR_TYPES.get(status, status),
        result.reason or "no reward",
        index=index,
        retryable=result.is_transient,
    )
