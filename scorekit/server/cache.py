"""The answer cache: an LRU in this process, then Redis/Valkey or a SQLite file.

A cache may drop values and may be slow; it never makes a request fail. A value is a good outcome as
its endpoint serialized it. The second tier stores it after its own key and a tag, both checked on
reading. So a damaged value, a reply to another call, or (with a secret) a value that another
program wrote is a miss and not a wrong answer.

The second tier raises the errors of a dead server, a full disk or a locked file unchanged. `Cache`
sets the timeouts and treats every error as a miss.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import random
import sqlite3
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import parse_qs, urlsplit

import structlog
from platformdirs import user_cache_path
from pydantic import SecretStr

from scorekit.errors import UserError
from scorekit.score_database import ScoreDatabase
from scorekit.server.metrics import Metrics

log = structlog.get_logger()


class CacheTier(Protocol):
    """Stores bytes by key. A call may raise any error, and any value may be lost.

    timeout_s: the caller cancels a `get` or `set` after so many seconds.
    A call may be cancelled at any time; the next call must not receive its reply.
    """

    timeout_s: float

    async def get(self, keys: Sequence[bytes]) -> list[bytes | None]: ...

    async def set(self, values: Mapping[bytes, bytes]) -> None: ...

    async def close(self) -> None: ...


class SQLiteTier:
    """A SQLite file with one writer thread and one reader thread: no read waits for a write.

    Above `max_bytes` each write deletes twice as many of the oldest values as it adds. The
    write-ahead log is bounded.
    """

    #: A page that is not in memory costs milliseconds on a slow disk, and a batch reads many pages.
    timeout_s = 0.5
    _BUSY_S = 0.1  # max wait for a lock of another process

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._write_file = ScoreDatabase(path, self._BUSY_S, self._log_damage, max_bytes)
        self._read_file = ScoreDatabase(path, self._BUSY_S, self._log_damage)
        try:
            self._write_file.open()
            self._read_file.open()
        except (sqlite3.Error, OSError) as error:
            self._write_file.close()
            raise UserError(
                f"--cache {path}: {error}; name another file or delete this one"
            ) from None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="sqlite-write")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="sqlite-read")

    def _log_damage(self, aside: Path) -> None:
        log.warning("cache_file_damaged", path=f"{self._path}", moved_to=f"{aside}")

    async def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the values in the order of the keys."""
        loop = asyncio.get_running_loop()
        value_by_key = await loop.run_in_executor(self._reader, self._read_file.get, keys)
        return [value_by_key.get(key) for key in keys]

    async def set(self, values: Mapping[bytes, bytes]) -> None:
        """Write all values in one transaction."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._writer, self._write_file.set, values)

    async def close(self) -> None:
        """Close the file; writes that have not started are dropped."""
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        for thread, file in ((self._reader, self._read_file), (self._writer, self._write_file)):
            thread.shutdown(cancel_futures=True)
            file.close()


class RedisTier:
    """A Redis or Valkey server; give it `maxmemory` and `maxmemory-policy allkeys-lru`.

    redis-py closes the connection of a call that is cancelled or times out between its command
    and the reply; `tests/integration/scorekit/server/test_redis.py` checks that.
    """

    #: A local server answers in a fraction of a millisecond; above this limit scoring is cheaper.
    timeout_s = 0.1
    #: Scores of an old model revision are never read again, and a server without `maxmemory` would
    #: keep them forever. The random part keeps the scores of one job from expiring at once.
    _KEEP_S = 30 * 24 * 3600
    _SPREAD_S = 3 * 24 * 3600

    def __init__(self, url: str, password: SecretStr | None) -> None:
        import redis.asyncio as redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        secret = {"password": password.get_secret_value()} if password else {}
        try:
            _refuse_password(url)
            # The client's retries and timeouts would stall a request for seconds if the server is
            # down. The caller's timeout covers the full round trip, including the connection.
            self._redis: Any = redis.Redis.from_url(
                url,
                protocol=2,
                socket_timeout=None,
                socket_connect_timeout=self.timeout_s,
                retry=Retry(NoBackoff(), 0),
                **secret,
            )
        except ValueError as error:
            raise UserError(f"--cache: {error}") from None
        self._policy_check: asyncio.Task[None] | None = None

    async def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the values with one MGET."""
        if self._policy_check is None:
            self._policy_check = asyncio.create_task(self._check_policy())
        values: list[bytes | None] = await self._redis.execute_command("MGET", *map(_name, keys))
        return values

    async def set(self, values: Mapping[bytes, bytes]) -> None:
        """Write all values in one round trip."""
        pipeline = self._redis.pipeline(transaction=False)
        for key, value in values.items():
            seconds = self._KEEP_S + random.randrange(self._SPREAD_S)
            pipeline.execute_command("SET", _name(key), value, "EX", seconds)
        await pipeline.execute()

    async def close(self) -> None:
        """Close the connections."""
        if self._policy_check is not None:
            self._policy_check.cancel()
        await self._redis.aclose()

    async def _check_policy(self) -> None:
        """Warn once if a full server will refuse new scores. Errors are ignored, for example if the
        server does not support the command."""
        with contextlib.suppress(Exception):
            async with asyncio.timeout(self.timeout_s):
                memory = await self._redis.info("memory")
            if memory["maxmemory"] and memory["maxmemory_policy"] == "noeviction":
                log.warning(
                    "redis_will_refuse_when_full",
                    maxmemory=memory["maxmemory"],
                    advice="set maxmemory-policy to allkeys-lru",
                )


def _name(key: bytes) -> bytes:
    return b"scorekit:" + key


def _refuse_password(url: str) -> None:
    parts = urlsplit(url)
    if parts.password or "password" in parse_qs(parts.query):
        raise ValueError(
            "a password in the address can be read in `ps` and in logs; "
            "set SCOREKIT_REDIS_PASSWORD instead"
        )


def _file_in(path_text: str) -> Path:
    """Return the path after `sqlite://`.

    Raises UserError if its first folder does not exist: other programs read three slashes as a path
    in the current folder, but here it is a path from the root."""
    path = Path(path_text)
    if path.is_absolute() and not (len(path.parts) > 2 and Path(*path.parts[:2]).is_dir()):
        relative = path.relative_to(path.anchor)
        raise UserError(
            f"--cache sqlite://{path_text}: this is {path}, under the root, where no such folder "
            f"is; in the current folder it is sqlite://{relative}"
        )
    return path


def open_tier(
    target: str, *, name: str, max_bytes: int, redis_password: SecretStr | None
) -> CacheTier | None:
    """Return the second tier that `--cache` selects.

    name: file name of the default SQLite file.
    """
    scheme, _, path_text = target.partition("://")
    match scheme:
        case "memory":
            return None
        case "sqlite":
            path = (
                _file_in(path_text) if path_text else user_cache_path("scorekit") / f"{name}.sqlite"
            )
            return SQLiteTier(path, max_bytes)
        case "redis" | "rediss" | "unix":
            return RedisTier(target, redis_password)
    raise UserError(
        f"--cache {scheme!r}: give memory, sqlite, sqlite:///PATH, sqlite://RELATIVE or redis://HOST:PORT"
    )


#: Keys in one call of the second tier: its timeout is for a bounded size, and the event loop is
#: blocked for a few milliseconds at most.
CHUNK = 500
#: Concurrent calls of the second tier; others wait here, before their timeout starts. Each is a
#: connection to Redis. With all calls at once, the last replies would be read too late.
READERS, WRITERS = 16, 4
#: Seconds for one `fetch`, its wait for a slot included: if reads arrive faster than a slow tier
#: answers, the other samples are scored.
FETCH_S = 1.0
#: Bytes that may wait to be written; more are dropped, so that a slow tier does not fill the
#: memory.
MAX_PENDING_BYTES = 32 * 2**20
#: Seconds that the second tier is not used after a failure, and between probes.
REST_S = 3.0
#: A value in memory up to this size counts as one item, a larger one (many error spans) as more.
ITEM_BYTES = 512
#: Approximate bytes of a waiting value besides its own: its key and the objects.
_OVERHEAD = 200
#: Returns True if a value could be the answer for its key.
Fits = Callable[[bytes, bytes], bool]


class Cache:
    """An LRU of `memory_items` values in front of an optional second tier.

    secret: with it, only values stored by a holder of the secret are accepted.
    All methods run on one event loop.
    """

    def __init__(
        self, memory_items: int, tier: CacheTier | None, metrics: Metrics, secret: SecretStr | None
    ) -> None:
        self._memory: OrderedDict[bytes, bytes] = OrderedDict()
        self._memory_items = memory_items
        self._memory_bytes = 0
        self._tier = tier
        self._seal = CacheEnvelope(secret)
        self._metrics = metrics
        self._memory_hits = metrics.cache_hits.labels("memory")
        self._tier_hits = metrics.cache_hits.labels("tier")
        self.breaker = CircuitBreaker(metrics)
        self._readers = asyncio.Semaphore(READERS)
        self._writers = asyncio.Semaphore(WRITERS)
        self._pending_bytes = 0
        self._losing_writes = False
        self._probe: asyncio.Task[None] | None = None

    @property
    def has_tier(self) -> bool:
        """Return True if there is a second tier."""
        return self._tier is not None

    def get_memory(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """Return the values of those keys that memory has."""
        memory = self._memory
        hits = {key: memory[key] for key in keys if key in memory}
        if hits:
            for key in hits:
                memory.move_to_end(key)
            self._memory_hits.inc(len(hits))
        return hits

    def put_memory(self, values: Mapping[bytes, bytes]) -> None:
        """Store values in memory; the least recently used ones are dropped."""
        memory = self._memory
        for key, value in values.items():
            self._memory_bytes += len(value) - len(memory.pop(key, b""))
            memory[key] = value
        max_bytes = self._memory_items * ITEM_BYTES
        while len(memory) > self._memory_items or self._memory_bytes > max_bytes:
            self._memory_bytes -= len(memory.popitem(last=False)[1])

    async def fetch(
        self, keys: Sequence[bytes], fits: Fits = lambda key, value: True
    ) -> dict[bytes, bytes]:
        """Return the values of those keys that the second tier has and that fit; memory stores
        them."""
        values_by_key: dict[bytes, bytes] = {}
        if self._tier is None:
            return values_by_key
        with contextlib.suppress(TimeoutError), self._metrics.cache_seconds.time():
            async with asyncio.timeout(FETCH_S):
                for start in range(0, len(keys), CHUNK):
                    if not await self._fetch_part(
                        self._tier, keys[start : start + CHUNK], fits, values_by_key
                    ):
                        break
        if values_by_key:
            self.put_memory(values_by_key)
            self._tier_hits.inc(len(values_by_key))
        return values_by_key

    async def store(self, values: Mapping[bytes, bytes]) -> None:
        """Write values to the second tier, unless the breaker is open or writes are far behind.

        A failed write does not open the breaker: a full Redis or a locked file refuses writes and
        still answers reads, and the next read notices a dead one.
        """
        size = sum(map(len, values.values())) + _OVERHEAD * len(values)
        if self._tier is None or self.breaker.state != "closed":
            return
        if self._pending_bytes + size > MAX_PENDING_BYTES:
            self._note_lost_write("behind")
            return
        self._pending_bytes += size
        try:
            items = iter(values.items())
            while part := dict(islice(items, CHUNK)):
                async with self._writers:
                    if self.breaker.state != "closed":
                        return
                    sealed = {key: self._seal.close(key, value) for key, value in part.items()}
                    async with asyncio.timeout(self._tier.timeout_s):
                        await self._tier.set(sealed)
            self._losing_writes = False
        except Exception as error:
            self._note_lost_write(type(error).__name__)
        finally:
            self._pending_bytes -= size

    async def close(self) -> None:
        """Close the second tier."""
        if self._probe is not None:
            self._probe.cancel()
        if self._tier is not None:
            await self._tier.close()

    async def _fetch_part(
        self, tier: CacheTier, keys: Sequence[bytes], fits: Fits, values_by_key: dict[bytes, bytes]
    ) -> bool:
        """Add the tier's values to `values_by_key`; return False if the breaker is open."""
        async with self._readers:
            # Checked here, because it may open while a call waits for its slot.
            if self.breaker.state != "closed":
                if self.breaker.begin_probe():  # no request waits for the probe
                    self._probe = asyncio.create_task(self._try_tier(tier, keys, fits))
                return False
            try:
                values_by_key |= await self._read(tier, keys, fits)
            except Exception as error:
                self.breaker.failed(error)
                return False
        return True

    async def _read(self, tier: CacheTier, keys: Sequence[bytes], fits: Fits) -> dict[bytes, bytes]:
        async with self.breaker.limit(tier.timeout_s):
            values = await tier.get(keys)
        values_by_key = {}
        for key, sealed in zip(keys, values, strict=True):
            if sealed is None:
                continue
            value = self._seal.open(key, sealed)
            if value is None or not fits(key, value):
                self._metrics.cache_damaged.inc()
            else:
                values_by_key[key] = value
        return values_by_key

    async def _try_tier(self, tier: CacheTier, keys: Sequence[bytes], fits: Fits) -> None:
        try:
            self.put_memory(await self._read(tier, keys, fits))
        except Exception as error:
            self.breaker.failed(error)
        else:
            self.breaker.succeeded()

    def _note_lost_write(self, reason: str) -> None:
        self._metrics.cache_errors.inc()
        if not self._losing_writes:
            log.warning("cache_not_stored", reason=reason)
        self._losing_writes = True


class CircuitBreaker:
    """Stops using a tier after a failed read: closed, open for a while, half_open for one probe.

    One failure is enough. Calls fail together, so counting more would only let more callers wait
    for their timeouts. A probe delays no caller, so opening without need costs some hits and no
    time. Calls that wait when it opens are cancelled at once.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.state: Literal["closed", "open", "half_open"] = "closed"
        self._metrics = metrics
        self._rest_until = 0.0
        self._limits: set[asyncio.Timeout] = set()

    @contextlib.asynccontextmanager
    async def limit(self, seconds: float) -> AsyncIterator[None]:
        """Limit the time of one call; opening the breaker ends it early. Raises TimeoutError."""
        async with asyncio.timeout(seconds) as limit:
            self._limits.add(limit)
            try:
                yield
            finally:
                self._limits.discard(limit)

    def begin_probe(self) -> bool:
        """Return True if the caller should probe the tier now: after the pause, one at a time."""
        if self.state != "open" or time.monotonic() < self._rest_until:
            return False
        self.state = "half_open"
        return True

    def failed(self, error: Exception) -> None:
        """Open. The first failure of an outage is logged, without the error's text, which may quote
        what was sent."""
        if self.state == "open":
            return  # a call that was cancelled by the opening
        if self.state == "closed":
            log.warning("cache_unavailable", error=type(error).__name__, rest_s=REST_S)
        self.state = "open"
        self._rest_until = time.monotonic() + REST_S
        self._metrics.cache_errors.inc()
        self._metrics.cache_breaker_open.set(1)
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(0.0)

    def succeeded(self) -> None:
        """Close the breaker, because the probe succeeded."""
        self.state = "closed"
        self._metrics.cache_breaker_open.set(0)
        log.info("cache_available")


class CacheEnvelope:
    """The form of a value in the second tier: its key, a 128-bit tag over key and value, the value.

    With a secret the tag is a MAC, without one a checksum.
    """

    _TAG = 16  # bytes

    def __init__(self, secret: SecretStr | None) -> None:
        # Hashed, because BLAKE2 takes keys of 64 bytes at most.
        secret_bytes = secret.get_secret_value().encode() if secret else b""
        self._mac_key = hashlib.blake2b(secret_bytes).digest() if secret_bytes else b""

    def close(self, key: bytes, value: bytes) -> bytes:
        """Return the bytes to store under `key`."""
        return key + self._tag(key, value) + value

    def open(self, key: bytes, sealed: bytes) -> bytes | None:
        """Return the value, or None unless it is complete and belongs to `key`."""
        start = len(key)
        tag, value = sealed[start : start + self._TAG], sealed[start + self._TAG :]
        if sealed[:start] != key or not hmac.compare_digest(tag, self._tag(key, value)):
            return None
        return value

    def _tag(self, key: bytes, value: bytes) -> bytes:
        return hashlib.blake2b(key + value, digest_size=self._TAG, key=self._mac_key).digest()
