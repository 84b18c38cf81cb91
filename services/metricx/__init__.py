"""The MetricX service: `scorekit serve metricx`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from services.metricx.model import MetricXQEScorer as MetricXQEScorer

__all__ = ["MetricXQEScorer"]


def __getattr__(name: str) -> Any:
    """Import the scorer when it is used: the package itself needs no torch."""
    if name != "MetricXQEScorer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from services.metricx import model

    return model.MetricXQEScorer


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
