"""What was paid for once: an LRU in this process, then Redis/Valkey or a SQLite file.

A cache may lose values and may be slow to reach; it never makes a request fail. A value is a good
outcome in the bytes that its verb writes. In the second tier it stands behind its own
key and a tag, both checked on reading, so that a damaged value, a reply meant for another call,
or (with a secret) a value that somebody else wrote is a miss and not a wrong answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from itertools import islice
from typing import Literal

import structlog
from pydantic import SecretStr

from scorekit.server.http.metrics import Metrics
from scorekit.server.tiers import Tier

log = structlog.get_logger()

#: Keys in one call of the second tier: its time-out is for a round trip of bounded size, and the
#: event loop is held for a few milliseconds at most.
CHUNK = 500
#: Calls of the second tier at once; the rest waits here, and its time-out has not begun. Each is
#: a connection to Redis. With all of a crowd in flight, the last replies would be read too late.
READERS, WRITERS = 16, 4
#: Seconds that one `fetch` may take, waiting for its turn included: where reads come faster than a
#: slow tier answers, the rest is scored.
FETCH_S = 1.0
#: Bytes that may wait to be written; more are dropped, for a slow tier must not fill the memory.
MAX_PENDING_BYTES = 32 * 2**20
#: Seconds for which the second tier is left alone after a failure, and between probes.
REST_S = 3.0
#: A remembered value of this size counts as one item, a larger one (many error spans) as more.
ITEM_BYTES = 512
#: About what a value costs besides its own bytes while it waits: its key and the objects.
_OVERHEAD = 200
#: Whether a value could be the answer to what stands under its key.
Fits = Callable[[bytes, bytes], bool]


class Cache:
    """An LRU of `memory_items` values in front of an optional second tier.

    secret: with it, only who knows it can store a value that counts.
    All methods run on one event loop.
    """

    def __init__(
        self, memory_items: int, tier: Tier | None, metrics: Metrics, secret: SecretStr | None
    ) -> None:
        self._memory: OrderedDict[bytes, bytes] = OrderedDict()
        self._memory_items = memory_items
        self._memory_bytes = 0
        self._tier = tier
        self._seal = Seal(secret)
        self._metrics = metrics
        self._memory_hits = metrics.cache_hits.labels("memory")
        self._tier_hits = metrics.cache_hits.labels("tier")
        self._breaker = Breaker(metrics)
        self._readers = asyncio.Semaphore(READERS)
        self._writers = asyncio.Semaphore(WRITERS)
        self._pending_bytes = 0
        self._losing_writes = False
        self._probe: asyncio.Task[None] | None = None

    @property
    def has_tier(self) -> bool:
        """Whether there is a second tier."""
        return self._tier is not None

    @property
    def breaker_state(self) -> Literal["closed", "open", "half_open"]:
        """closed: the second tier is used; open: it is left alone; half_open: one call tries it."""
        return self._breaker.state

    def recall(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """What memory holds of those keys."""
        memory = self._memory
        found = {key: memory[key] for key in keys if key in memory}
        if found:
            for key in found:
                memory.move_to_end(key)
            self._memory_hits.inc(len(found))
        return found

    def remember(self, values: Mapping[bytes, bytes]) -> None:
        """Keep values in memory; the ones used longest ago make room."""
        memory = self._memory
        for key, value in values.items():
            self._memory_bytes += len(value) - len(memory.pop(key, b""))
            memory[key] = value
        most_bytes = self._memory_items * ITEM_BYTES
        while len(memory) > self._memory_items or self._memory_bytes > most_bytes:
            self._memory_bytes -= len(memory.popitem(last=False)[1])

    async def fetch(
        self, keys: Sequence[bytes], fits: Fits = lambda key, value: True
    ) -> dict[bytes, bytes]:
        """What the second tier holds of those keys, and fits; memory has it from then on."""
        found: dict[bytes, bytes] = {}
        if self._tier is None:
            return found
        with contextlib.suppress(TimeoutError), self._metrics.cache_seconds.time():
            async with asyncio.timeout(FETCH_S):
                for start in range(0, len(keys), CHUNK):
                    if not await self._fetch_part(
                        self._tier, keys[start : start + CHUNK], fits, found
                    ):
                        break
        if found:
            self.remember(found)
            self._tier_hits.inc(len(found))
        return found

    async def store(self, values: Mapping[bytes, bytes]) -> None:
        """Write values into the second tier, unless it is resting or far behind.

        A failed write does not open the breaker: a full Redis or a locked file refuses writes and
        still answers reads, and a dead one is found out by the next read.
        """
        size = sum(map(len, values.values())) + _OVERHEAD * len(values)
        if self._tier is None or self._breaker.state != "closed":
            return
        if self._pending_bytes + size > MAX_PENDING_BYTES:
            self._lost_write("behind")
            return
        self._pending_bytes += size
        try:
            items = iter(values.items())
            while part := dict(islice(items, CHUNK)):
                async with self._writers:
                    if self._breaker.state != "closed":
                        return
                    sealed = {key: self._seal.close(key, value) for key, value in part.items()}
                    async with asyncio.timeout(self._tier.timeout_s):
                        await self._tier.set(sealed)
            self._losing_writes = False
        except Exception as error:
            self._lost_write(type(error).__name__)
        finally:
            self._pending_bytes -= size

    async def close(self) -> None:
        """Close the second tier."""
        if self._probe is not None:
            self._probe.cancel()
        if self._tier is not None:
            await self._tier.close()

    async def _fetch_part(
        self, tier: Tier, keys: Sequence[bytes], fits: Fits, found: dict[bytes, bytes]
    ) -> bool:
        """Add what the tier holds to `found`; False where it is, or has just been, left alone."""
        async with self._readers:
            # Asked here, for it may open while a call waits for its turn.
            if self._breaker.state != "closed":
                self._probe_when_due(tier, keys, fits)
                return False
            try:
                found |= await self._read(tier, keys, fits)
            except Exception as error:
                self._breaker.failed(error)
                return False
        return True

    async def _read(self, tier: Tier, keys: Sequence[bytes], fits: Fits) -> dict[bytes, bytes]:
        async with self._breaker.limit(tier.timeout_s):
            values = await tier.get(keys)
        found = {}
        for key, sealed in zip(keys, values, strict=True):
            if sealed is None:
                continue
            value = self._seal.open(key, sealed)
            if value is None or not fits(key, value):
                self._metrics.cache_damaged.inc()
            else:
                found[key] = value
        return found

    def _probe_when_due(self, tier: Tier, keys: Sequence[bytes], fits: Fits) -> None:
        """After the rest, one read of these keys tries the tier; no request waits for it."""
        if self._breaker.begin_probe():
            self._probe = asyncio.create_task(self._try_tier(tier, keys, fits))

    async def _try_tier(self, tier: Tier, keys: Sequence[bytes], fits: Fits) -> None:
        try:
            self.remember(await self._read(tier, keys, fits))
        except Exception as error:
            self._breaker.failed(error)
        else:
            self._breaker.succeeded()

    def _lost_write(self, reason: str) -> None:
        self._metrics.cache_errors.inc()
        if not self._losing_writes:
            log.warning("cache_not_stored", reason=reason)
        self._losing_writes = True


class Breaker:
    """Leaves a tier alone after a failed read: closed, open for a while, half_open for one probe.

    One failure is enough. Calls fail in crowds, so counting further ones would only let more
    callers wait for their time-outs; and a probe costs no caller anything, so opening without
    need costs some hits and no time. Calls that wait when it opens are given up at once.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.state: Literal["closed", "open", "half_open"] = "closed"
        self._metrics = metrics
        self._rest_until = 0.0
        self._limits: set[asyncio.Timeout] = set()

    @contextlib.asynccontextmanager
    async def limit(self, seconds: float) -> AsyncIterator[None]:
        """A time-out for one call, which opening ends early. Raises TimeoutError."""
        async with asyncio.timeout(seconds) as limit:
            self._limits.add(limit)
            try:
                yield
            finally:
                self._limits.discard(limit)

    def begin_probe(self) -> bool:
        """Whether the caller shall try the tier now: after the rest, one at a time."""
        if self.state != "open" or time.monotonic() < self._rest_until:
            return False
        self.state = "half_open"
        return True

    def failed(self, error: Exception) -> None:
        """Open. The first failure of an outage is logged, without the error's text: it may quote
        what was sent."""
        if self.state == "open":
            return  # a call that the opening gave up
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
        """Close: the probe was answered."""
        self.state = "closed"
        self._metrics.cache_breaker_open.set(0)
        log.info("cache_available")


class Seal:
    """How a value stands in the second tier: its key, a 128-bit tag over key and value, the value.

    With a secret the tag is a MAC, without one a checksum.
    """

    _TAG = 16  # bytes

    def __init__(self, secret: SecretStr | None) -> None:
        # Of any length, while BLAKE2 takes keys of 64 bytes at most.
        given = secret.get_secret_value().encode() if secret else b""
        self._mac_key = hashlib.blake2b(given).digest() if given else b""

    def close(self, key: bytes, value: bytes) -> bytes:
        """The bytes to store under `key`."""
        return key + self._tag(key, value) + value

    def open(self, key: bytes, sealed: bytes) -> bytes | None:
        """The value; None unless it is whole and belongs to `key`."""
        start = len(key)
        tag, value = sealed[start : start + self._TAG], sealed[start + self._TAG :]
        if sealed[:start] != key or not hmac.compare_digest(tag, self._tag(key, value)):
            return None
        return value

    def _tag(self, key: bytes, value: bytes) -> bytes:
        return hashlib.blake2b(key + value, digest_size=self._TAG, key=self._mac_key).digest()
