"""Define a store of paid answers: answers by key, claims on keys, and charges.

Several runs may share a store, and so may the processes of a run. A claim on a key is both: the
right to ask for its answer, which one process has at a time, and the money that is reserved for it.
An answer, its charge and the end of its claim are written at once, so a run that is killed (-9, or
by a power cut) pays for no stored answer twice, and knows what it has spent. Only the calls in
flight are repeated.

A value is stored with a checksum of its key and bytes. A damaged value is counted, and its answer
requested again.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from pydantic_core import to_json

from scorekit.paid.account import Account, ApiUsage

_CHECKSUM = 8  # bytes


class _NoAnswer(Enum):
    NO_ANSWER = 0


#: In place of an answer, which may be null.
NO_ANSWER: Final = _NoAnswer.NO_ANSWER


@dataclass(frozen=True, slots=True)
class Space:
    """A user of stores.

    name: begins its keys in a Redis.
    setting: config key of the location.
    password: environment variable of a Redis's password.
    extra: installs the client of a Redis.
    repair: command that repairs a damaged file."""

    name: str
    setting: str
    password: str
    extra: str
    repair: str


class ClaimState(Enum):
    """The outcome of a claim on a key.

    ANSWER: it has an answer.
    OURS: the caller asks for it.
    WAIT: another process asks for it, or calls in flight have reserved the money.
    REFUSED: the call could exceed the cap.
    """

    ANSWER = 0
    OURS = 1
    WAIT = 2
    REFUSED = 3


@dataclass(frozen=True, slots=True)
class Claim:
    """A claim.

    answer: of ANSWER.
    spent: usage of the run by server, of REFUSED.
    """

    state: ClaimState
    answer: Any = NO_ANSWER
    spent: Mapping[str, ApiUsage] = field(default_factory=dict)


class Store(ABC):
    """A store of paid answers. Use it in one event loop.

    With a run, money is counted: an answer is on the disk before a caller gets it. Without one, a
    power cut may lose the last answers, and a damaged page of a file costs only its own answers.

    damaged: number of damaged values that were met.
    spent: usage of the run before, by server, without its price; nothing on a further process.
    unfinished: the reserved usage of calls that a kill of the run has cut off.
    """

    def __init__(self) -> None:
        self.damaged = 0
        self.spent: dict[str, ApiUsage] = {}
        self.unfinished: dict[str, ApiUsage] = {}

    @abstractmethod
    async def get(self, keys: Sequence[bytes]) -> dict[bytes, Any]:
        """Return the answers of those keys that have one. Raises UserError."""

    @abstractmethod
    async def put(self, answers: Mapping[bytes, Any]) -> None:
        """Store answers, all or none of them; kill -9 does not lose them. Raises UserError."""

    @abstractmethod
    async def begin(self, key: bytes, server: str, limit: ApiUsage, account: Account) -> Claim:
        """Claim a key for a call of at most this usage. Raises UserError."""

    @abstractmethod
    async def finish(
        self, key: bytes, server: str, usage: ApiUsage, answer: Any = NO_ANSWER
    ) -> dict[str, ApiUsage]:
        """Store answer and usage and end the claim, all or nothing.

        Without an answer a call of no usage only ends its claim. Returns the usage of the run by
        server. Raises UserError.
        """

    @abstractmethod
    async def first_judge(self, model: str) -> str:
        """Return the first judge of the run: `model`, unless another one is stored."""

    @abstractmethod
    async def close(self) -> None:
        """End the claims of this process, and close file or connections."""


def check_location(location: str | None, password: str) -> str | None:
    """Return the location of a store. Raises ValueError for an unsupported URL or a password in it.

    password: environment variable that the password belongs to.
    """
    if location is None or "://" not in location:
        return location
    try:
        parts = urlsplit(location)
        has_password = parts.password is not None or "password" in parse_qs(parts.query)
        is_supported = parts.scheme in ("redis", "rediss", "unix") and (parts.port or True)
    except ValueError:
        has_password, is_supported = False, False
    if has_password:  # it would be in the saved config and in logs
        raise ValueError(f"a URL must not contain a password. Put it into {password}")
    if not is_supported:
        raise ValueError("give a path, redis://HOST:PORT/0, rediss://HOST:PORT/0 or unix://PATH")
    return location


def paid_key(server: str, content: Any) -> bytes:
    """Return a hash of 128 bits of all that an answer of a server depends on (JSON values)."""
    return hashlib.blake2b(to_json([server, content]), digest_size=16, person=b"paid 1").digest()


def pack(key: bytes, answer: Any) -> bytes:
    """Return the stored form of an answer, after a checksum of it and its key."""
    text = json.dumps(answer, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    return _checksum(key, text) + text


def unpack(key: bytes, value: bytes) -> Any:
    """Return a stored answer; NO_ANSWER if it is damaged or belongs to another key."""
    try:
        text = value[_CHECKSUM:]
        if value[:_CHECKSUM] != _checksum(key, text):
            return NO_ANSWER
        return json.loads(text)
    except (ValueError, TypeError):
        return NO_ANSWER


def _checksum(key: bytes, text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=_CHECKSUM, key=key).digest()
