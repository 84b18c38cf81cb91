"""The interface of answer caches, and the format of a stored value."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

_CHECKSUM = 8  # bytes


class AnswerCache(Protocol):
    """A cache of answers. damaged: number of broken values read since it was opened."""

    damaged: int

    async def get(self, keys: Sequence[str]) -> dict[str, Any]:
        """Return the answers of those keys that have one."""

    async def put(self, answers: Mapping[str, Any]) -> None:
        """Store answers, all or none of them. Once this returns, kill -9 does not lose them."""

    async def close(self) -> None:
        """Close the file or the connections."""


def pack(key: str, answer: Any) -> tuple[bytes, bytes]:
    """Return the key's bytes, and the answer after a checksum of both."""
    raw = bytes.fromhex(key)
    text = json.dumps(answer, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    return raw, _checksum(raw, text) + text


def _checksum(key: bytes, text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=_CHECKSUM, key=key).digest()


def unpack(key: bytes, value: bytes) -> tuple[Any] | None:
    """Return the answer in a tuple, because it may be null; None if the value is damaged."""
    try:
        text = value[_CHECKSUM:]
        if value[:_CHECKSUM] != _checksum(key, text):
            return None
        return (json.loads(text),)
    except (ValueError, TypeError):
        return None
