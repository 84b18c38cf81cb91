"""A score cache of the client: a SQLite file that outlives services and runs.

It may drop values, but it never makes a request fail. Only good results are stored. Several
processes may share a file.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pydantic_core import from_json, to_json

from scorekit.errors import UserError
from scorekit.schemas import SCHEMA_VERSION, Info, Scored
from scorekit.score_database import ScoreDatabase

log = logging.getLogger(__name__)

_CHECKSUM = 8  # bytes
#: Temporary errors: another process has locked the file.
_PASSING = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
#: Seconds to wait for another writing process, and to avoid the file after a failure.
_BUSY_S = 1.0
_REST_S = 5.0


def score_keys(info: Info, options: Mapping[str, Any], bodies: Sequence[bytes]) -> list[bytes]:
    """Return 128-bit keys over all that a score depends on: model, engine, options, exact texts."""
    context = [
        SCHEMA_VERSION,
        info.service,
        info.model,
        info.revision,
        info.tokenizer,
        info.dtype,
        info.device.split(":")[0],
        sorted(info.versions.items()),
        sorted((name, value) for name, value in options.items() if name != "cache"),
    ]
    salt = hashlib.blake2b(to_json(context), digest_size=32).digest()
    return [hashlib.blake2b(body, digest_size=16, key=salt).digest() for body in bodies]


class ClientCache:
    """Scores by key in a SQLite file, which one thread of this process uses.

    A damaged file is renamed. A file that another process locks is used again later. Raises
    UserError if the file cannot be opened.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._resting_until = 0.0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scorekit-cache")
        self._file = ScoreDatabase(self._path, _BUSY_S, self._log_damage)
        try:
            self._thread.submit(self._file.open).result()
        except (sqlite3.Error, OSError) as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF in _PASSING:
                self._pause(error)
                return
            self._thread.shutdown()
            raise UserError(f"cache_db {self._path}: {error}; name another file") from None

    async def get(self, keys: Sequence[bytes]) -> dict[bytes, Scored]:
        """Return the stored results of those keys that have one; empty after any error."""
        return await self._run(self._get, keys) or {}

    async def set(self, results: Mapping[bytes, Scored]) -> None:
        """Store good results; after any error they are dropped."""
        if results:
            await self._run(self._file.set, {key: _pack(key, r) for key, r in results.items()})

    def close(self) -> None:
        """Close the file."""
        self._thread.submit(self._file.close).result()
        self._thread.shutdown()

    async def _run(self, work: Callable[[Any], Any], argument: Any) -> Any:
        """Return the result of `work`; None after a failure, and for some seconds after one."""
        if time.monotonic() < self._resting_until:
            return None
        try:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._thread, work, argument)
        except (sqlite3.Error, OSError) as error:
            self._pause(error)
            return None

    def _pause(self, error: Exception) -> None:
        self._resting_until = time.monotonic() + _REST_S
        log.warning("cache_db %s is not used for %g s: %s", self._path, _REST_S, error)

    def _log_damage(self, aside: Path) -> None:
        log.warning(
            "cache_db %s is damaged: renamed to %s and replaced by a new file", self._path, aside
        )

    def _get(self, keys: Sequence[bytes]) -> dict[bytes, Scored]:
        return {
            key: result
            for key, value in self._file.get(keys).items()
            if (result := _unpack(key, value)) is not None
        }


def _checksum(key: bytes, payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=_CHECKSUM, key=key).digest()


def _pack(key: bytes, result: Scored) -> bytes:
    payload = to_json(result.model_dump(exclude={"id", "cached"}))
    return _checksum(key, payload) + payload


def _unpack(key: bytes, value: bytes) -> Scored | None:
    """Return the stored result, or None unless it is complete, has this key and a finite score."""
    try:
        payload = value[_CHECKSUM:]
        if value[:_CHECKSUM] != _checksum(key, payload):
            return None
        result = Scored.model_validate(from_json(payload) | {"id": None, "cached": True})
    except (ValueError, TypeError):
        return None
    return result if math.isfinite(result.score) else None
