"""The URLs of one service: which one is asked next, and which ones rest."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from scorekit.client.transport import checked_url, is_retryable
from scorekit.errors import RequestError, ServiceUnreachable, UserError
from scorekit.schemas import Info

#: Seconds that a URL which failed is used only if every other one failed too.
_REST_S = 5.0


@dataclass(slots=True)
class Endpoint:
    """One URL. Times are those of `time.monotonic`.

    resting_until: after a failure, others are asked first.
    asked_until: until when its Retry-After asks us to stay away.
    silent: whether it was not to be reached (or 502 to 504) when it was last asked.
    """

    url: str
    outstanding: int = 0
    resting_until: float = 0.0
    asked_until: float = 0.0
    silent: bool = False


class Endpoints:
    """One or more URLs behind which the same service runs."""

    def __init__(self, urls: str | Iterable[str]) -> None:
        urls = [urls] if isinstance(urls, str) else list(urls)
        if not urls:
            raise UserError("a client needs at least one URL")
        self.all = [Endpoint(checked_url(url)) for url in urls]

    @asynccontextmanager
    async def pick(self) -> AsyncIterator[Endpoint]:
        """The URL with the least outstanding requests; one that failed rests. Where all do, the one
        that has rested longest: else the same dead one would be tried over and over."""
        now = time.monotonic()
        endpoint = min(self.all, key=lambda e: (max(e.resting_until, now), e.outstanding))
        endpoint.outstanding += 1
        try:
            yield endpoint
        except (ServiceUnreachable, RequestError) as error:
            if is_retryable(error):
                endpoint.silent = isinstance(error, ServiceUnreachable) or error.status != 429
                now = time.monotonic()
                asked = getattr(error, "retry_after", None) or 0.0
                endpoint.resting_until = now + max(_REST_S, asked)
                endpoint.asked_until = now + asked
            raise
        else:
            endpoint.silent = False
        finally:
            endpoint.outstanding -= 1

    @property
    def away(self) -> bool:
        """Whether no URL answered when it was last asked."""
        return all(endpoint.silent for endpoint in self.all)

    def pause(self) -> float:
        """Seconds until the first URL may be asked again, by what each said in Retry-After."""
        return max(0.0, min(e.asked_until for e in self.all) - time.monotonic())


def check_service(key: str, url: str, info: Info, wanted: str) -> None:
    """Raise UserError where another kind of service answers at a URL. key: of the config."""
    if info.service != wanted:
        raise UserError(f"{key}: {url} is a {info.service} service, not {wanted}: mend the URL")


def check_agreement(key: str, infos: Mapping[str, Info]) -> None:
    """Raise UserError where two URLs of one service would not give the same scores."""
    (first, one), *others = infos.items()
    for url, other in others:
        for name in ("model", "revision", "dtype", "tokenizer"):
            if getattr(one, name) != getattr(other, name):
                raise UserError(
                    f"{key}: {first} has {name} {getattr(one, name)!r}, {url} has "
                    f"{getattr(other, name)!r}: scores of one run must be of one model"
                )
