"""What a stage did, in numbers."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class CallStats:
    """Calls of one service."""

    requests: int = 0
    samples: int = 0
    failed: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class StageStats:
    """Counts of one process in one stage."""

    started: float = field(default_factory=time.monotonic)
    records_in: int = 0
    records_out: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    teacher: dict[str, int] = field(default_factory=dict)
    metricx: CallStats = field(default_factory=CallStats)
    judge: CallStats = field(default_factory=CallStats)
