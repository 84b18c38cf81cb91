"""A limit on the bytes of all requests that are received or processed, for the whole process.

The limit of a single request is not enough: sixty bodies of the largest size are too much. Bytes
count as they arrive, so an announced length costs nothing, and until the request is answered. When
the budget is used up, slow senders are cancelled first: a client that sends a byte now and then
must not block others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sized
from contextlib import asynccontextmanager
from typing import Any, Self

from scorekit.errors import RequestError, UserError

#: Approximate bytes of a sample besides its texts: the objects of the service.
SAMPLE_BYTES = 1024
#: Requests beyond this size leave a quarter of the budget to smaller ones.
_LARGE = 2**20
#: Bytes that a sender has to send in `_STRETCH_S`, or it is slow.
_STRETCH, _STRETCH_S = 64 * 1024, 1.0
_RETRY_AFTER_S = 2.0


async def read_body(
    chunks: AsyncIterator[bytes],
    headers: Mapping[str, str],
    max_bytes: int,
    share: MemoryReservation,
) -> bytes:
    """Return the body of a request, whose bytes `share` then holds.

    chunks: of the body, as they arrive. Raises RequestError if it is too large, or if the budget is
    used up."""
    too_large = RequestError("too_large", f"body: more than {max_bytes} bytes")
    if int(headers.get("content-length", "0")) > max_bytes:
        raise too_large
    body = bytearray()
    async with share.receiving():
        async for chunk in chunks:
            if len(body) + len(chunk) > max_bytes:
                raise too_large
            share.reserve(len(chunk))
            body += chunk
    return bytes(body)


class MemoryBudget:
    """Limits the bytes in use to `max_bytes`. Raises UserError if the largest body would never fit.

    Owner: loop.
    """

    def __init__(self, max_bytes: int, max_body_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.max_large_bytes = max_bytes * 3 // 4
        if max_body_bytes > self.max_large_bytes:
            raise UserError(
                f"--max-inflight-bytes {max_bytes}: a body may have {max_body_bytes} bytes "
                "(--max-body-bytes), which must be three quarters of it at most"
            )
        self.reserved = 0
        self.parsing = asyncio.Lock()  # large bodies are parsed one at a time
        self.receiving: set[MemoryReservation] = set()

    def share(self) -> MemoryReservation:
        """Return a reservation for one request; the caller closes it."""
        return MemoryReservation(self)

    def has_capacity(self, size: int, limit: int, asker: MemoryReservation) -> bool:
        """Return True if `size` more bytes fit below `limit`, after slow senders are cancelled."""
        if self.reserved + size <= limit:
            return True
        now = time.monotonic()
        slow_senders = [
            share
            for share in self.receiving
            if share is not asker and now - share.moved > _STRETCH_S
        ]
        for share in sorted(slow_senders, key=lambda share: share.moved):
            share.cancel()
            if self.reserved + size <= limit:
                return True
        return False


class MemoryReservation:
    """The bytes reserved for one request. moved: when its sender last completed a stretch of bytes.

    Owner: loop.
    """

    def __init__(self, budget: MemoryBudget) -> None:
        self.budget = budget
        self._limit: asyncio.Timeout | None = None
        self._stretch = 0
        self.moved = time.monotonic()
        self.size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def reserve(self, size: int) -> None:
        """Reserve bytes. Raises RequestError: `overloaded`, or `too_large` if they never fit."""
        budget = self.budget
        limit = budget.max_large_bytes if self.size + size > _LARGE else budget.max_bytes
        if self.size + size > limit:
            raise RequestError(
                "too_large",
                f"more than {limit} bytes, samples counted as {SAMPLE_BYTES} bytes and their texts",
            )
        if not budget.has_capacity(size, limit, self):
            message = "too many bytes are in flight"
            raise RequestError("overloaded", message, retry_after=_RETRY_AFTER_S)
        self.size += size
        budget.reserved += size
        self._stretch += size
        if self._stretch >= _STRETCH:
            self._stretch = 0
            self.moved = time.monotonic()

    def count(self, samples: Sized) -> None:
        """Reserve what the samples cost besides their texts."""
        self.reserve(len(samples) * SAMPLE_BYTES)

    @asynccontextmanager
    async def receiving(self) -> AsyncIterator[None]:
        """Mark the body as being received within the block.

        Raises RequestError `overloaded` if it is cancelled in favor of faster senders."""
        self.moved = time.monotonic()
        self.budget.receiving.add(self)
        try:
            async with asyncio.timeout(None) as self._limit:
                yield
        except TimeoutError:
            if self._limit is None or not self._limit.expired():
                raise
            message = "too many bytes are in flight, and this request arrived slowly"
            raise RequestError("overloaded", message, retry_after=_RETRY_AFTER_S) from None
        finally:
            self.budget.receiving.discard(self)

    def cancel(self) -> None:
        """Cancel the reservation: its receiving ends, and its bytes are released."""
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(0.0)
        self.budget.receiving.discard(self)
        self.close()

    def close(self) -> None:
        """Release all bytes; a second call does nothing."""
        self.budget.reserved -= self.size
        self.size = 0
