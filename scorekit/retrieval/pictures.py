"""Pictures of pages that were fetched, as many as fit."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable


class KeptPictures:
    """Pictures by page id. Who asks for one that is just being fetched waits for it; the ones used
    longest ago go first. Of one event loop.

    fetch: gets one; what it raises goes to all who wait, and is not kept. most_bytes: of all that
    are kept; one that is larger alone is given and not kept.
    """

    def __init__(self, fetch: Callable[[str], Awaitable[bytes]], most_bytes: int) -> None:
        self._fetch = fetch
        self._most_bytes = most_bytes
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0
        self._coming: dict[str, asyncio.Task[bytes]] = {}

    async def get(self, page_id: str) -> bytes:
        """The picture; raises what `fetch` raises."""
        if page_id in self._kept:
            self._kept.move_to_end(page_id)
            return self._kept[page_id]
        if page_id not in self._coming:
            task = asyncio.create_task(self._bring(page_id))
            self._coming[page_id] = task
            task.add_done_callback(lambda _: self._coming.pop(page_id))
        # One who gives up does not end it for the others.
        return await asyncio.shield(self._coming[page_id])

    async def _bring(self, page_id: str) -> bytes:
        picture = await self._fetch(page_id)
        if len(picture) <= self._most_bytes:
            self._kept[page_id] = picture
            self._bytes += len(picture)
        while self._bytes > self._most_bytes:
            _, gone = self._kept.popitem(last=False)
            self._bytes -= len(gone)
        return picture
