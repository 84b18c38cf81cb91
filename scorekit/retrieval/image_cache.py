"""A cache of page images with a limit on its bytes."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable


class PageImageCache:
    """Images by page id, for one event loop. The least recently used ones are dropped first.

    A call for an image that is already being fetched waits for it.

    fetch: fetches one image; its error goes to all waiting calls and is not cached. most_bytes:
    limit of the cache; an image over it is returned but not cached.
    """

    def __init__(self, fetch: Callable[[str], Awaitable[bytes]], most_bytes: int) -> None:
        self._fetch = fetch
        self._most_bytes = most_bytes
        self._images: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0
        self._fetches: dict[str, asyncio.Task[bytes]] = {}

    async def get(self, page_id: str) -> bytes:
        """Return the image. Raises what `fetch` raises."""
        if page_id in self._images:
            self._images.move_to_end(page_id)
            return self._images[page_id]
        if page_id not in self._fetches:
            task = asyncio.create_task(self._fetch_and_cache(page_id))
            self._fetches[page_id] = task
            task.add_done_callback(lambda _: self._fetches.pop(page_id))
        # A cancelled call does not end the fetch for the others.
        return await asyncio.shield(self._fetches[page_id])

    async def _fetch_and_cache(self, page_id: str) -> bytes:
        image = await self._fetch(page_id)
        if len(image) <= self._most_bytes:
            self._images[page_id] = image
            self._bytes += len(image)
        while self._bytes > self._most_bytes:
            _, dropped = self._images.popitem(last=False)
            self._bytes -= len(dropped)
        return image
