"""Answers of servers, of which none takes our memory."""

from __future__ import annotations

import httpx

from scorekit.errors import ServiceUnreachable

#: Bytes of one answer, unpacked: more than any page's picture, vectors or candidates are.
MOST_BYTES = 128 * 2**20
#: What is said of one that has more.
TOO_MUCH = f"an answer of more than {MOST_BYTES >> 20} MiB"


async def read_whole(response: httpx.Response, url: str) -> httpx.Response:
    """An answer with its body, of one whose head has come; the caller closes that. Raises
    ServiceUnreachable (not retryable: it would be as long again) over MOST_BYTES, httpx's errors.

    url: of the server, for the error.
    """
    body = bytearray()
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > MOST_BYTES:
            raise ServiceUnreachable(url, TOO_MUCH, retryable=False)
    # What came packed is unpacked: nobody is to do that again.
    packed = ("content-encoding", "content-length", "transfer-encoding")
    headers = [(k, v) for k, v in response.headers.multi_items() if k.lower() not in packed]
    return httpx.Response(
        response.status_code, headers=headers, content=bytes(body), request=response.request
    )
