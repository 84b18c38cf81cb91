"""An answer cache in a Redis or Valkey."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import structlog

from scorekit.errors import UserError
from synth.config_sections import REDIS_PASSWORD
from synth.storage.answer_cache.base import pack, unpack

log = structlog.get_logger()

_REDIS_TRIES = 12  # with pauses of 0.2 to 5 s: three quarters of a minute


class RedisAnswers:
    """Answers in a Redis or Valkey, which several machines can share.

    It waits for a server that restarts. A server that may evict is refused, because evicted answers
    are paid for again."""

    def __init__(self, url: str) -> None:
        self.damaged = 0
        try:
            import redis
            import redis.asyncio
            import redis.asyncio.retry
            import redis.backoff
        except ImportError:
            raise UserError(
                'run.answers: a Redis needs `pip install -e ".[synth]"` in the checkout'
            ) from None
        self._url = url
        self._error = redis.RedisError
        options: dict[str, Any] = {
            "password": os.environ.get(REDIS_PASSWORD),
            "socket_timeout": 30.0,
            "socket_connect_timeout": 10.0,
        }
        with redis.Redis.from_url(url, **options) as db:
            self._check(db)
        pauses = redis.backoff.ExponentialBackoff(cap=5.0, base=0.2)
        self._db = redis.asyncio.Redis.from_url(
            url,
            **options,
            retry=redis.asyncio.retry.Retry(pauses, _REDIS_TRIES),
            retry_on_error=[redis.ConnectionError, redis.TimeoutError],
        )

    def _check(self, db: Any) -> None:
        """Raise UserError if the server does not answer, or if it may evict values."""
        import redis.exceptions

        try:
            db.ping()
            memory = db.info("memory")
        except redis.exceptions.NoPermissionError:  # the operator may restrict INFO
            return
        except redis.RedisError as error:
            raise self._away(error) from None
        policy = str(memory.get("maxmemory_policy", ""))
        if memory.get("maxmemory") and policy.startswith("allkeys"):
            raise UserError(
                f"run.answers {self._url}: may evict paid answers (maxmemory-policy "
                f"{policy}). Set noeviction"
            )

    async def get(self, keys: Sequence[str]) -> dict[str, Any]:
        """Return the answers of those keys that have one. Raises UserError if the server is
        down."""
        if not keys:
            return {}
        try:
            values = await self._db.mget([_redis_key(key) for key in keys])
        except self._error as error:
            raise self._away(error) from None
        answers: dict[str, Any] = {}
        for key, value in zip(keys, values, strict=True):
            if value is None:
                continue
            answer = unpack(bytes.fromhex(key), value)
            if answer is None:
                self.damaged += 1
                log.warning("answer_damaged", server=self._url, key=key)
            else:
                answers[key] = answer[0]
        return answers

    async def put(self, answers: Mapping[str, Any]) -> None:
        """Store answers, all or none of them. Raises UserError."""
        rows = {_redis_key(key): pack(key, answer)[1] for key, answer in answers.items()}
        try:
            await self._db.mset(rows)
        except self._error as error:
            raise self._away(error) from None

    async def close(self) -> None:
        """Close the connections."""
        await self._db.aclose()

    def _away(self, error: Exception) -> UserError:
        return UserError(
            f"run.answers {self._url}: {error}. Start it, give it memory, or correct its address"
        )


def _redis_key(key: str) -> bytes:
    return b"synth:" + bytes.fromhex(key)
