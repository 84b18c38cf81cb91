"""Samples over which a connection broke, remembered between calls.

Trainers retry failed samples, and a sample that crashes servers comes back in every epoch: each
time it would crash servers again.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from pydantic_core import to_json

#: Seconds that a sample is remembered, because servers may be repaired; and the maximum number.
_REMEMBERED_S = 3600.0
_MAX_SAMPLES = 10_000


class CrashSuspects:
    """Counts how often the connection broke when a sample was sent alone, earlier breaks in larger
    requests included."""

    def __init__(self) -> None:
        self._breaks: OrderedDict[bytes, tuple[int, float]] = OrderedDict()

    def crash_count(self, body: bytes, options: Mapping[str, Any]) -> int:
        """Return the number of breaks; 0 for a sample that is not suspect."""
        if not self._breaks:
            return 0
        breaks, since = self._breaks.get(_key(body, options), (0, 0.0))
        return breaks if time.monotonic() - since < _REMEMBERED_S else 0

    def note(self, body: bytes, options: Mapping[str, Any], breaks: int) -> None:
        """Store the number of breaks of a sample; 0: it was answered."""
        key = _key(body, options)
        self._breaks.pop(key, None)
        if breaks:
            self._breaks[key] = breaks, time.monotonic()
        if len(self._breaks) > _MAX_SAMPLES:
            self._breaks.popitem(last=False)


def _key(body: bytes, options: Mapping[str, Any]) -> bytes:
    salt = hashlib.blake2b(to_json(sorted(options.items())), digest_size=16).digest()
    return hashlib.blake2b(body, digest_size=16, key=salt).digest()
