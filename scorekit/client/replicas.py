"""The URLs of one service: which one is used next, and which ones are avoided after a failure."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from scorekit.client.transport import is_retryable, service_url
from scorekit.errors import RequestError, ServiceUnreachable, UserError
from scorekit.net.addresses import address_of
from scorekit.schemas import Info

#: Seconds that a failed URL is used only if every other one failed too.
_REST_S = 5.0


@dataclass(slots=True)
class Replica:
    """The state of one URL. Times are those of `time.monotonic`.

    url: without user name and password.
    authorization: the header of its requests.
    resting_until: until then other URLs are preferred, after a failure.
    asked_until: end of the pause that its Retry-After asks for.
    silent: whether the last request could not reach it (or got 502 to 504).
    """

    url: str
    authorization: dict[str, str] = field(default_factory=dict, repr=False)
    outstanding: int = 0
    resting_until: float = 0.0
    asked_until: float = 0.0
    silent: bool = False


class ReplicaPool:
    """The URLs of the replicas of one service.

    key: sent to those whose URL has no password.
    """

    def __init__(self, urls: str | Iterable[str], key: str | None = None) -> None:
        urls = [urls] if isinstance(urls, str) else list(urls)
        if not urls:
            raise UserError("a client needs at least one URL")
        servers = [service_url(url) for url in urls]
        self.all = [Replica(s.address, s.authorization_header(key)) for s in servers]

    @asynccontextmanager
    async def pick(self) -> AsyncIterator[Replica]:
        """Yield the URL with the fewest outstanding requests; failed ones are avoided.

        If all failed, take the one that failed longest ago, so that a dead one is not used over and
        over."""
        now = time.monotonic()
        endpoint = min(self.all, key=lambda e: (max(e.resting_until, now), e.outstanding))
        async with self.use(endpoint):
            yield endpoint

    @asynccontextmanager
    async def use(self, endpoint: Replica) -> AsyncIterator[Replica]:
        """Yield this URL, and note whether its request succeeds."""
        endpoint.outstanding += 1
        try:
            yield endpoint
        except (ServiceUnreachable, RequestError) as error:
            if is_retryable(error):
                endpoint.silent = isinstance(error, ServiceUnreachable) or error.status != 429
                now = time.monotonic()
                retry_after_s = getattr(error, "retry_after", None) or 0.0
                endpoint.resting_until = now + max(_REST_S, retry_after_s)
                endpoint.asked_until = now + retry_after_s
            raise
        else:
            endpoint.silent = False
        finally:
            endpoint.outstanding -= 1

    @property
    def mark_down(self) -> bool:
        """Return True if the last request to every URL failed."""
        return all(endpoint.silent for endpoint in self.all)

    def pause(self) -> float:
        """Return the seconds until the first URL may be used again, by each one's Retry-After."""
        return max(0.0, min(e.asked_until for e in self.all) - time.monotonic())


def check_service(key: str, url: str, info: Info, expected: str) -> None:
    """Raise UserError if another kind of service answers at a URL.

    key: of the config.
    """
    if info.service != expected:
        raise UserError(
            f"{key}: {address_of(url)} is a {info.service} service, not {expected}: correct the URL"
        )


#: Fields of /v1/info on which the scores depend.
_SCORE_FIELDS = ("service", "model", "revision", "dtype", "tokenizer")


def check_agreement(
    key: str, infos: Mapping[str, Info], names: Sequence[str] = _SCORE_FIELDS
) -> None:
    """Raise UserError if two URLs of one service would give different scores.

    key: of the config.
    names: the fields of /v1/info to compare.
    """
    (first_url, first_info), *other_infos = infos.items()
    for url, info in other_infos:
        for name in names:
            if getattr(first_info, name) != getattr(info, name):
                raise UserError(
                    f"{key}: {address_of(first_url)} has {name} {getattr(first_info, name)!r}, "
                    f"{address_of(url)} has {getattr(info, name)!r}: scores of one run must be of "
                    "one model"
                )
