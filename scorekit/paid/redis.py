"""A store of paid answers in a Redis or Valkey, which several machines can share.

It waits for a server that restarts. A server that may evict is refused, because evicted answers are
paid for again. A process renews its claims, and a claim ends when it was not renewed for a minute:
a process that sleeps longer may repeat its calls in flight, and no more.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar
from uuid import uuid4

from scorekit.errors import UserError
from scorekit.extras import install_command
from scorekit.paid.account import Account, ApiUsage, sum_charges, wait_for_event
from scorekit.paid.answers import NO_ANSWER, Claim, ClaimState, Space, Store, pack, unpack

log = logging.getLogger(__name__)
T = TypeVar("T")
_TRIES = 12  # with pauses of 0.2 to 5 s: three quarters of a minute
#: Seconds that a claim lives after it was renewed, and the part of them between two renewals.
_CLAIM_S, _RENEWALS = 60.0, 3
_FIELDS = ("calls", "prompt_tokens", "completion_tokens")
_USAGE_SEP = "\t"

#: Functions of all scripts. Keys of a run: `calls` (key of an answer -> its end in ms), `details`
#: (key -> server, tokens), `charges` (server and field -> sum), `processes` (token -> its end).
_COMMON = """
local function now()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end
local function drop_ended(calls, details, claim)
  for _, key in ipairs(redis.call('ZRANGEBYSCORE', calls, '-inf', now())) do
    redis.call('ZREM', calls, key)
    redis.call('HDEL', details, key)
  end
end
"""
#: KEYS: answer, claim, calls, details, charges. ARGV: key, owner, life in ms, server, prompt,
#: completion, cap or '', then server, price of the prompt, price of the completion, each.
_BEGIN = (
    _COMMON
    + """
local answer = redis.call('GET', KEYS[1])
if answer then return {'answer', answer} end
local owner = redis.call('GET', KEYS[2])
if owner and owner ~= ARGV[2] then return {'wait'} end
drop_ended(KEYS[3], KEYS[4])
if ARGV[7] ~= '' then
  local prices = {}
  for i = 8, #ARGV, 3 do prices[ARGV[i]] = {tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2])} end
  local function cost(server, prompt, completion)
    local price = prices[server]
    if not price then return 0 end
    return (price[1] * prompt + price[2] * completion) / 1e6
  end
  local total = cost(ARGV[4], tonumber(ARGV[5]), tonumber(ARGV[6]))
  local charges = redis.call('HGETALL', KEYS[5])
  for i = 1, #charges, 2 do
    local server, field = string.match(charges[i], '^(.*)\\t(.*)$')
    if field == 'prompt_tokens' then total = total + cost(server, tonumber(charges[i + 1]), 0) end
    if field == 'completion_tokens' then
      total = total + cost(server, 0, tonumber(charges[i + 1]))
    end
  end
  local details = redis.call('HGETALL', KEYS[4])
  for i = 1, #details, 2 do
    if details[i] ~= ARGV[1] then
      local server, prompt, completion = string.match(details[i + 1], '^(.*)\\t(.*)\\t(.*)$')
      total = total + cost(server, tonumber(prompt), tonumber(completion))
    end
  end
  local cap = tonumber(ARGV[7])
  if total > cap + 1e-12 * math.max(1, cap) then
    if #details > 0 then return {'wait'} end
    return {'refused', charges}
  end
end
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
redis.call('ZADD', KEYS[3], now() + ARGV[3], ARGV[1])
redis.call('HSET', KEYS[4], ARGV[1], ARGV[4] .. '\\t' .. ARGV[5] .. '\\t' .. ARGV[6])
return {'ours'}
"""
)
#: KEYS: answer, claim, calls, details, charges, done. ARGV: key, owner, server, calls, prompt,
#: completion, answer if there is one. `done` lives longer than the client tries again.
_FINISH = (
    _COMMON
    + """
if redis.call('SET', KEYS[6], '', 'NX', 'PX', 600000) then
  if ARGV[7] then redis.call('SET', KEYS[1], ARGV[7]) end
  if ARGV[4] ~= '0' then
    redis.call('HINCRBY', KEYS[5], ARGV[3] .. '\\tcalls', ARGV[4])
    redis.call('HINCRBY', KEYS[5], ARGV[3] .. '\\tprompt_tokens', ARGV[5])
    redis.call('HINCRBY', KEYS[5], ARGV[3] .. '\\tcompletion_tokens', ARGV[6])
  end
  if redis.call('GET', KEYS[2]) == ARGV[2] then
    redis.call('DEL', KEYS[2])
    redis.call('ZREM', KEYS[3], ARGV[1])
    redis.call('HDEL', KEYS[4], ARGV[1])
  end
end
return redis.call('HGETALL', KEYS[5])
"""
)
#: KEYS: calls, processes, then the claims. ARGV: owner, life in ms, then the keys of the answers.
_RENEW = (
    _COMMON
    + """
redis.call('ZADD', KEYS[2], now() + ARGV[2], ARGV[1])
for i = 3, #KEYS do
  if redis.call('GET', KEYS[i]) == ARGV[1] then
    redis.call('PEXPIRE', KEYS[i], ARGV[2])
    redis.call('ZADD', KEYS[1], now() + ARGV[2], ARGV[i])
  end
end
"""
)
#: KEYS: calls, details, charges, processes. ARGV: owner, life in ms, prefix of claims.
#: Returns the end of the last process that is alive, or details and charges of the run.
_OPEN = (
    _COMMON
    + """
redis.call('ZREMRANGEBYSCORE', KEYS[4], '-inf', now())
redis.call('ZREM', KEYS[4], ARGV[1])
local last = redis.call('ZREVRANGE', KEYS[4], 0, 0, 'WITHSCORES')
if #last > 0 then return {last[2]} end
local details = redis.call('HGETALL', KEYS[2])
for i = 1, #details, 2 do redis.call('DEL', ARGV[3] .. details[i]) end
redis.call('DEL', KEYS[1], KEYS[2])
redis.call('ZADD', KEYS[4], now() + ARGV[2], ARGV[1])
return {false, details, redis.call('HGETALL', KEYS[3])}
"""
)


class RedisStore(Store):
    """A store in a Redis.

    claim_s: seconds that a claim lives without being renewed.
    """

    def __init__(
        self,
        url: str,
        space: Space,
        run: str | None = None,
        rank: int = 0,
        claim_s: float = _CLAIM_S,
    ) -> None:
        super().__init__()
        redis = _module(space)
        self._url, self._space, self._run = url, space, run
        self._claim_s, self._owner = claim_s, f"{rank}-{uuid4().hex}"
        self._claims: set[bytes] = set()
        self._renewing: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._error = redis.RedisError
        options = _options(space)
        with redis.Redis.from_url(url, **options) as db:
            _check(db, url, space)
            if run is not None and not rank:
                self._take_run(db)
        pauses = redis.backoff.ExponentialBackoff(cap=5.0, base=0.2)
        self._db = redis.asyncio.Redis.from_url(
            url,
            **options,
            retry=redis.asyncio.retry.Retry(pauses, _TRIES),
            retry_on_error=[redis.ConnectionError, redis.TimeoutError],
        )
        self._begin_script = self._db.register_script(_BEGIN)
        self._finish_script = self._db.register_script(_FINISH)
        self._renew_script = self._db.register_script(_RENEW)
        if run is not None:
            with suppress(RuntimeError):  # no loop runs yet: the first claim begins it
                asyncio.get_running_loop()
                self._renew_claims()

    async def get(self, keys: Sequence[bytes]) -> dict[bytes, Any]:
        """Return the answers of those keys that have one. Raises UserError."""
        if not keys:
            return {}
        values = await self._answer(self._db.mget([self._answer_key(key) for key in keys]))
        answers: dict[bytes, Any] = {}
        for key, value in zip(keys, values, strict=True):
            answer = NO_ANSWER if value is None else unpack(key, value)
            if answer is not NO_ANSWER:
                answers[key] = answer
            elif value is not None:
                self.damaged += 1
                log.warning("%s: the answer %s is damaged", self._url, key.hex())
        return answers

    async def put(self, answers: Mapping[bytes, Any]) -> None:
        """Store answers, all or none of them. Raises UserError."""
        rows = {self._answer_key(key): pack(key, answer) for key, answer in answers.items()}
        await self._answer(self._db.mset(rows))

    async def begin(self, key: bytes, server: str, limit: ApiUsage, account: Account) -> Claim:
        """Claim a key for a call of at most this usage. Raises UserError."""
        self._renew_claims()
        prices = [
            part
            for name, price in account.prices.items()
            if price is not None
            for part in (name, price.prompt, price.completion)
        ]
        cap = "" if account.cap is None else account.cap
        tokens = limit.prompt_tokens, limit.completion_tokens
        keys = [self._answer_key(key), self._claim_key(key), *self._keys("calls", "details")]
        keys += self._keys("charges")
        life = [self._owner, int(self._claim_s * 1000)]
        arguments = [key, *life, server, *tokens, cap, *prices]
        state, *values = await self._answer(self._begin_script(keys, arguments))
        outcome = ClaimState[state.decode().upper()]
        if outcome is ClaimState.OURS:
            self._claims.add(key)
        if outcome is ClaimState.ANSWER:
            answer = unpack(key, values[0])
            if answer is NO_ANSWER:  # damaged: the next claim finds none
                self.damaged += 1
                await self._answer(self._db.delete(self._answer_key(key)))
                return await self.begin(key, server, limit, account)
            return Claim(outcome, answer)
        return Claim(outcome, spent=_usages(values[0]) if values else {})

    async def finish(
        self, key: bytes, server: str, usage: ApiUsage, answer: Any = NO_ANSWER
    ) -> dict[str, ApiUsage]:
        """Store answer and usage and end the claim, all or nothing. Raises UserError."""
        self._claims.discard(key)
        keys = [self._answer_key(key), self._claim_key(key), *self._keys("calls", "details")]
        keys += [*self._keys("charges"), self._name(f"done:{uuid4().hex}")]
        used = usage.calls, usage.prompt_tokens, usage.completion_tokens
        value = [] if answer is NO_ANSWER else [pack(key, answer)]
        arguments = [key, self._owner, server, *used, *value]
        return _usages(await self._answer(self._finish_script(keys, arguments)))

    async def first_judge(self, model: str) -> str:
        """Return the first judge of the run: `model`, unless another one is stored."""
        (key,) = self._keys("judge")
        await self._answer(self._db.set(key, model, nx=True))
        return str((await self._answer(self._db.get(key))).decode())

    async def close(self) -> None:
        """End the claims of this process, and close the connections."""
        self._closing.set()
        if self._renewing is not None:
            # Not cancelled: a renewal may not come after the end. The loop may have cancelled it.
            await asyncio.wait([self._renewing])
        with suppress(UserError):
            for key in tuple(self._claims):
                await self.finish(key, "", ApiUsage())
            if self._run is not None:
                await self._answer(self._db.zrem(*self._keys("processes"), self._owner))
        await self._db.aclose()

    def _take_run(self, db: Any) -> None:
        """Begin a run: forget what processes have left that a kill has ended. Raises UserError.

        Whether a process still runs, only its renewal says, so this may take as long as a claim
        lives.
        """
        script = db.register_script(_OPEN)
        keys = self._keys("calls", "details", "charges", "processes")
        arguments = [self._owner, int(self._claim_s * 1000), self._claim_key(b"")]
        first_end: float | None = None
        while (reply := script(keys, arguments))[0] is not None:
            end = float(reply[0])
            if first_end is not None and end > first_end:
                raise UserError(
                    f"{self._space.setting} {self._url}: another process of the run {self._run!r} "
                    "has it open. End that process, or give this run another name."
                )
            if first_end is None:
                log.info(
                    "%s: waits up to %g s until the processes of an earlier start of the run are "
                    "known to have ended",
                    self._url,
                    self._claim_s,
                )
            first_end = end
            time.sleep(min(1.0, self._claim_s / 10))
        details, charges = reply[1], reply[2]
        for text in details[1::2]:
            server, prompt, completion = text.decode().split(_USAGE_SEP)
            call = ApiUsage(calls=1, prompt_tokens=int(prompt), completion_tokens=int(completion))
            self.unfinished[server] = sum_charges([self.unfinished.get(server, ApiUsage()), call])
        self.spent = _usages(charges)

    def _renew_claims(self) -> None:
        if self._renewing is None:
            self._renewing = asyncio.create_task(self._renew())

    async def _renew(self) -> None:
        while not self._closing.is_set():
            claims = tuple(self._claims)
            keys = [*self._keys("calls", "processes"), *map(self._claim_key, claims)]
            arguments = [self._owner, int(self._claim_s * 1000), *claims]
            with suppress(UserError):  # the next call says so
                await self._answer(self._renew_script(keys, arguments))
            await wait_for_event(self._closing, self._claim_s / _RENEWALS)

    async def _answer(self, command: Awaitable[Any]) -> Any:
        try:
            return await command
        except self._error as error:
            raise _away(self._url, self._space, error) from None

    def _answer_key(self, key: bytes) -> bytes:
        return f"{self._space.name}:".encode() + key

    def _claim_key(self, key: bytes) -> bytes:
        return f"{self._space.name}-claim:".encode() + key

    def _keys(self, *names: str) -> list[str]:
        return [self._name(f"{name}:{self._run}") for name in names]

    def _name(self, name: str) -> str:
        return f"{self._space.name}-{name}"


def spent_in_redis(url: str, space: Space) -> ApiUsage:
    """Return the usage of all runs. Raises UserError if the server is down."""
    redis = _module(space)
    try:
        with redis.Redis.from_url(url, **_options(space)) as db:
            runs = list(db.scan_iter(f"{space.name}-charges:*"))
            return sum_charges(usage for run in runs for usage in _usages(db.hgetall(run)).values())
    except redis.RedisError as error:
        raise _away(url, space, error) from None


def judge_in_redis(url: str, space: Space, run: str) -> str | None:
    """Return the first judge of a run, or None. Raises UserError if the server is down."""
    redis = _module(space)
    try:
        with redis.Redis.from_url(url, **_options(space)) as db:
            model = db.get(f"{space.name}-judge:{run}")
    except redis.RedisError as error:
        raise _away(url, space, error) from None
    return None if model is None else str(model.decode())


def _module(space: Space) -> Any:
    try:
        import redis
        import redis.asyncio
        import redis.asyncio.retry
        import redis.backoff
    except ImportError:
        raise UserError(f"{space.setting}: a Redis needs {install_command(space.extra)}") from None
    return redis


def _options(space: Space) -> dict[str, Any]:
    return {
        "password": os.environ.get(space.password),
        "socket_timeout": 30.0,
        "socket_connect_timeout": 10.0,
    }


def _check(db: Any, url: str, space: Space) -> None:
    """Raise UserError if the server does not answer, or if it may evict values."""
    import redis.exceptions

    try:
        db.ping()
        memory = db.info("memory")
    except redis.exceptions.NoPermissionError:  # the operator may restrict INFO
        return
    except redis.RedisError as error:
        raise _away(url, space, error) from None
    policy = str(memory.get("maxmemory_policy", ""))
    if memory.get("maxmemory") and policy.startswith("allkeys"):
        raise UserError(
            f"{space.setting} {url}: may evict paid answers (maxmemory-policy {policy}). "
            "Set noeviction"
        )


def _away(url: str, space: Space, error: Exception) -> UserError:
    return UserError(
        f"{space.setting} {url}: {error}. Start it, give it memory, or correct its address"
    )


def _usages(charges: Any) -> dict[str, ApiUsage]:
    """Return the usage by server of a hash, which is a dict or a list of names and values."""
    if not isinstance(charges, Mapping):
        charges = dict(zip(charges[::2], charges[1::2], strict=True))
    fields: dict[str, dict[str, int]] = {}
    for name, value in charges.items():
        server, field = name.decode().split(_USAGE_SEP)
        fields.setdefault(server, {})[field] = int(value)
    return {server: ApiUsage(**values) for server, values in fields.items()}
