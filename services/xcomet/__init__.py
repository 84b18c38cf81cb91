"""xCOMET as a service: sentence scores and error spans."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from services.xcomet.model import XCometXLScorer as XCometXLScorer

__all__ = ["XCometXLScorer"]


def __getattr__(name: str) -> Any:
    """Import the scorer when it is used: the package itself needs no torch."""
    if name != "XCometXLScorer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from services.xcomet import model

    return model.XCometXLScorer


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
