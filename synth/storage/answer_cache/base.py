"""The format of a stored answer."""

from __future__ import annotations

import hashlib
import json
from typing import Any

_CHECKSUM = 8  # bytes


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
