"""Scores that were paid for once: an LRU in this process, then Redis/Valkey or a SQLite file.

A cache may lose values and may be slow to reach; it never makes a request fail. Failed samples
are never stored. Each stored value starts with its own key and a checksum, checked on reading, so
that a damaged value, or a reply meant for another call, is a miss and not a wrong score.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import structlog
from platformdirs import user_cache_path
from pydantic import SecretStr
from pydantic_core import from_json, to_json

from scorekit.errors import UserError
from scorekit.server.metrics import Metrics

log = structlog.get_logger()

#: Seconds that the second tier may take for one call.
TIER_TIMEOUT_S = 1.0
_CHECKSUM = 8  # bytes

#: Seconds for which the second tier is left alone after a failure.
REST_S = 5.0


class Tier(Protocol):
    """The second tier: bytes by key. May raise anything; may lose anything."""

    async def get(self, keys: Sequence[bytes]) -> list[bytes | None]: ...

    async def set(self, values: Mapping[bytes, bytes]) -> None: ...

    async def close(self) -> None: ...


class Cache:
    """An LRU of `memory_items` results in front of an optional second tier."""

    def __init__(
        self, memory_items: int, tier: Tier | None, metrics: Metrics, secret: SecretStr | None
    ) -> None:
        self._memory: OrderedDict[bytes, bytes] = OrderedDict()
        self._memory_items = memory_items
        self._tier = tier
        self._metrics = metrics
        self._resting_until = 0.0
        self.has_tier = tier is not None

    def recall(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        memory = self._memory
        found = {key: memory[key] for key in keys if key in memory}
        for key in found:
            memory.move_to_end(key)
        if found:
            self._metrics.cache_hits.labels("memory").inc(len(found))
        return found

    async def fetch(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        if not self._tier_ready():
            return {}
        found = {k: to_json(v) for k, v in (await self._get_from_tier(list(keys))).items()}
        self._metrics.cache_hits.labels("tier").inc(len(found))
        self.remember(found)
        return found

    async def store(self, values: Mapping[bytes, bytes]) -> None:
        if self._tier is not None and self._tier_ready():
            try:
                async with asyncio.timeout(TIER_TIMEOUT_S):
                    await self._tier.set({k: _pack(k, from_json(v)) for k, v in values.items()})
            except Exception as error:
                self._rest(error)

    async def close(self) -> None:
        """Close the second tier."""
        if self._tier is not None:
            await self._tier.close()

    async def _get_from_tier(self, keys: list[bytes]) -> dict[bytes, dict[str, Any]]:
        assert self._tier is not None
        try:
            async with asyncio.timeout(TIER_TIMEOUT_S):
                values = await self._tier.get(keys)
        except Exception as error:
            self._rest(error)
            return {}
        stored = {}
        for key, value in zip(keys, values, strict=True):
            if value is None:
                continue
            result = _unpack(key, value)
            if result is not None:
                stored[key] = result
            else:
                self._metrics.cache_damaged.inc()
        return stored

    def remember(self, results: Mapping[bytes, bytes]) -> None:
        self._memory.update(results)
        while len(self._memory) > self._memory_items:
            self._memory.popitem(last=False)

    def _tier_ready(self) -> bool:
        return self._tier is not None and time.monotonic() >= self._resting_until

    def _rest(self, error: Exception) -> None:
        self._resting_until = time.monotonic() + REST_S
        self._metrics.cache_errors.inc()
        log.warning("cache_unavailable", error=type(error).__name__, rest_s=REST_S)


def _pack(key: bytes, result: dict[str, Any]) -> bytes:
    """key, checksum, JSON."""
    payload = to_json(result)
    return key + _checksum(payload) + payload


def _unpack(key: bytes, value: bytes) -> dict[str, Any] | None:
    """The stored result; None unless the value is whole, belongs to the key and holds a score."""
    start = len(key) + _CHECKSUM
    payload = value[start:]
    if value[:start] != key + _checksum(payload):
        return None
    result = from_json(payload)
    good = isinstance(result, dict) and isinstance(result.get("score"), float)
    return result if good and math.isfinite(result["score"]) else None


def _checksum(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=_CHECKSUM).digest()


class SQLiteTier:
    """A SQLite file, touched by one thread only.

    Over `max_bytes` the oldest tenth is dropped. The write-ahead log is bounded.
    """

    _LOOKUP = 500  # keys a SELECT; SQLite allows 999 variables at least

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sqlite")
        try:
            self._db = self._thread.submit(self._open, path).result()
        except (sqlite3.Error, OSError) as error:
            raise UserError(
                f"--cache {path}: {error}; name another file or delete this one"
            ) from None

    def _open(self, path: Path) -> sqlite3.Connection:
        path.parent.mkdir(parents=True, exist_ok=True)
        db = sqlite3.connect(path, timeout=0.1)
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        db.execute(f"PRAGMA journal_size_limit={16 * 2**20}")
        db.execute("CREATE TABLE IF NOT EXISTS scores (key BLOB PRIMARY KEY, value BLOB NOT NULL)")
        return db

    async def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Values in the order of the keys."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._get, keys)

    async def set(self, values: Mapping[bytes, bytes]) -> None:
        """Write all in one transaction."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._set, values)

    async def close(self) -> None:
        """Close the file."""
        self._thread.submit(self._db.close).result()
        self._thread.shutdown()

    def _get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        found: dict[bytes, bytes] = {}
        for start in range(0, len(keys), self._LOOKUP):
            part = keys[start : start + self._LOOKUP]
            marks = ",".join("?" * len(part))
            found.update(
                self._db.execute(f"SELECT key, value FROM scores WHERE key IN ({marks})", part)
            )
        return [found.get(key) for key in keys]

    def _set(self, values: Mapping[bytes, bytes]) -> None:
        with self._db:
            self._db.executemany("INSERT OR REPLACE INTO scores VALUES (?, ?)", values.items())
            if self._used_bytes() > self._max_bytes:
                self._db.execute(
                    "DELETE FROM scores WHERE rowid IN (SELECT rowid FROM scores ORDER BY rowid "
                    "LIMIT (SELECT count(*) / 10 + 1 FROM scores))"
                )

    def _used_bytes(self) -> int:
        pages, free, size = (
            self._db.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * size)


class RedisTier:
    """A Redis or Valkey server; give it `maxmemory` and `maxmemory-policy allkeys-lru`."""

    #: A local server answers in a fraction of a millisecond; longer than this, scoring is cheaper.
    TIMEOUT_S = 0.1

    def __init__(self, url: str, password: SecretStr | None) -> None:
        import redis.asyncio as redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        secret = {"password": password.get_secret_value()} if password else {}
        try:
            # The client's own defaults stall a request for seconds when the server is gone.
            self._redis: Any = redis.Redis.from_url(
                url,
                socket_timeout=self.TIMEOUT_S,
                socket_connect_timeout=self.TIMEOUT_S,
                retry=Retry(NoBackoff(), 0),
                **secret,
            )
        except ValueError as error:
            raise UserError(f"--cache: {error}") from None

    async def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """One MGET."""
        values: list[bytes | None] = await self._redis.mget([b"scorekit:" + k for k in keys])
        return values

    async def set(self, values: Mapping[bytes, bytes]) -> None:
        """One MSET."""
        await self._redis.mset({b"scorekit:" + k: v for k, v in values.items()})

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.aclose()


def open_tier(
    target: str, *, name: str, max_bytes: int, redis_password: SecretStr | None
) -> Tier | None:
    """The second tier that `--cache` names; `name` is the file name of the default one."""
    scheme, _, rest = target.partition("://")
    match scheme:
        case "memory":
            return None
        case "sqlite":
            path = Path(rest) if rest else user_cache_path("scorekit") / f"{name}.sqlite"
            return SQLiteTier(path, max_bytes)
        case "redis" | "rediss" | "unix":
            return RedisTier(target, redis_password)
    raise UserError(f"--cache {target!r}: give memory, sqlite, sqlite:///PATH or redis://HOST:PORT")
