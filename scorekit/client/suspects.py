"""The samples over which a connection broke, remembered from call to call.

Trainers ask again for what failed, and a poisonous source comes back in every epoch: each time it
would cost servers their life anew.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from pydantic_core import to_json

#: Seconds that a sample is remembered: servers are mended meanwhile. And at most so many.
_REMEMBERED_S = 3600.0
_MOST = 10_000


class Suspects:
    """How often the connection broke when a sample was asked for alone, its earlier breaks in
    company included."""

    def __init__(self) -> None:
        self._breaks: OrderedDict[bytes, tuple[int, float]] = OrderedDict()

    def breaks(self, body: bytes, options: Mapping[str, Any]) -> int:
        """0 for a sample that is not suspect."""
        if not self._breaks:
            return 0
        breaks, since = self._breaks.get(_key(body, options), (0, 0.0))
        return breaks if time.monotonic() - since < _REMEMBERED_S else 0

    def note(self, body: bytes, options: Mapping[str, Any], breaks: int) -> None:
        """Remember a sample; 0: it was answered."""
        key = _key(body, options)
        self._breaks.pop(key, None)
        if breaks:
            self._breaks[key] = breaks, time.monotonic()
        if len(self._breaks) > _MOST:
            self._breaks.popitem(last=False)


def _key(body: bytes, options: Mapping[str, Any]) -> bytes:
    salt = hashlib.blake2b(to_json(sorted(options.items())), digest_size=16).digest()
    return hashlib.blake2b(body, digest_size=16, key=salt).digest()
