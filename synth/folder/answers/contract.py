"""What a place of kept answers does, and how a value stands in it, wherever that is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

_CHECKSUM = 8  # bytes


class Answers(Protocol):
    """Where answers are kept. damaged: values that were found broken since it was opened."""

    damaged: int

    async def get(self, keys: Sequence[str]) -> dict[str, Any]:
        """The answers of those keys that have one."""

    async def put(self, answers: Mapping[str, Any]) -> None:
        """Keep answers: all of them when this returns, or none. kill -9 does not lose them."""

    async def close(self) -> None:
        """Let go of the file or the connections."""


def pack(key: str, answer: Any) -> tuple[bytes, bytes]:
    """The key's bytes, and the answer behind a checksum of both."""
    raw = bytes.fromhex(key)
    text = json.dumps(answer, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    return raw, _checksum(raw, text) + text


def _checksum(key: bytes, text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=_CHECKSUM, key=key).digest()


def unpack(key: bytes, value: bytes) -> tuple[Any] | None:
    """The answer, in a tuple since it may be null; None where the value is damaged."""
    try:
        text = value[_CHECKSUM:]
        if value[:_CHECKSUM] != _checksum(key, text):
            return None
        return (json.loads(text),)
    except (ValueError, TypeError):
        return None
