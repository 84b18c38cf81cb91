"""Kept answers in a Redis or Valkey."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import structlog

from scorekit.errors import UserError
from synth.folder.answers.contract import pack, unpack

log = structlog.get_logger()

#: Environment variable with the password of a Redis: a URL stands in configs and process lists.
REDIS_PASSWORD = "SYNTH_REDIS_PASSWORD"
_REDIS_TRIES = 12  # with pauses of 0.2 to 5 s: three quarters of a minute


class RedisAnswers:
    """Answers in a Redis or Valkey, which several machines share. One that is restarted is waited
    for; one that may evict is refused, since a value that goes is paid for again."""

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
        told: dict[str, Any] = {
            "password": os.environ.get(REDIS_PASSWORD),
            "socket_timeout": 30.0,
            "socket_connect_timeout": 10.0,
        }
        with redis.Redis.from_url(url, **told) as db:
            self._check(db)
        pauses = redis.backoff.ExponentialBackoff(cap=5.0, base=0.2)
        self._db = redis.asyncio.Redis.from_url(
            url,
            **told,
            retry=redis.asyncio.retry.Retry(pauses, _REDIS_TRIES),
            retry_on_error=[redis.ConnectionError, redis.TimeoutError],
        )

    def _check(self, db: Any) -> None:
        """Raises UserError where nobody answers, and for a server that may evict."""
        import redis.exceptions

        try:
            db.ping()
            memory = db.info("memory")
        except redis.exceptions.NoPermissionError:  # whoever runs it may keep that to himself
            return
        except redis.RedisError as error:
            raise self._away(error) from None
        policy = str(memory.get("maxmemory_policy", ""))
        if memory.get("maxmemory") and policy.startswith("allkeys"):
            raise UserError(
                f"run.answers {self._url}: may evict answers that were paid for (maxmemory-policy "
                f"{policy}): set noeviction"
            )

    async def get(self, keys: Sequence[str]) -> dict[str, Any]:
        """The answers of those keys that have one. Raises UserError where nobody answers."""
        if not keys:
            return {}
        try:
            values = await self._db.mget([_redis_key(key) for key in keys])
        except self._error as error:
            raise self._away(error) from None
        found: dict[str, Any] = {}
        for key, value in zip(keys, values, strict=True):
            if value is None:
                continue
            answer = unpack(bytes.fromhex(key), value)
            if answer is None:
                self.damaged += 1
                log.warning("answer_damaged", server=self._url, key=key)
            else:
                found[key] = answer[0]
        return found

    async def put(self, answers: Mapping[str, Any]) -> None:
        """Keep answers: all of them when this returns, or none. Raises UserError."""
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
            f"run.answers {self._url}: {error}; start it, give it room, or mend its address"
        )


def _redis_key(key: str) -> bytes:
    return b"synth:" + bytes.fromhex(key)
