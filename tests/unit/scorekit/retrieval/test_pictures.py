"""Check the client's image cache."""

from __future__ import annotations

import asyncio
import pickle

import pytest

from scorekit.errors import IndexChanged
from scorekit.retrieval.client import PageImageCache


def test_the_ones_used_longest_ago_go_first():
    fetched = []

    async def fetch(page_id):
        fetched.append(page_id)
        return page_id.encode() * 10

    async def scenario():
        cache = PageImageCache(fetch, most_bytes=25)
        for page_id in "ababcacb":
            assert await cache.get(page_id) == page_id.encode() * 10
        assert fetched == ["a", "b", "c", "a", "b"]
        await cache.get("xxxx")  # above the cache's limit: returned but not cached
        await cache.get("b")
        assert fetched == ["a", "b", "c", "a", "b", "xxxx"]

    asyncio.run(scenario())


def test_who_gives_up_does_not_end_it_for_the_others():
    async def scenario():
        go = asyncio.Event()

        async def fetch(page_id):
            await go.wait()
            return b"png"

        cache = PageImageCache(fetch, most_bytes=100)
        hasty, waiting = (asyncio.create_task(cache.get("a")) for _ in range(2))
        await asyncio.sleep(0)
        hasty.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hasty
        go.set()
        assert await waiting == b"png"

    asyncio.run(scenario())


def test_a_failure_goes_to_all_who_wait_and_is_not_kept():
    async def scenario():
        errors = [OSError("gone")]

        async def fetch(page_id):
            await asyncio.sleep(0)
            if errors:
                raise errors.pop()
            return b"png"

        cache = PageImageCache(fetch, most_bytes=100)
        outcomes = await asyncio.gather(cache.get("a"), cache.get("a"), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [OSError, OSError]
        assert await cache.get("a") == b"png"

    asyncio.run(scenario())


def test_a_changed_index_travels_between_processes():
    error = pickle.loads(pickle.dumps(IndexChanged("http://a", "r1", "r2")))
    assert (error.expected, error.current, error.exit_code) == ("r1", "r2", 2)
