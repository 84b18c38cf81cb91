"""Read answers of servers within a limit on memory."""

from __future__ import annotations

import httpx

from scorekit.errors import ServiceUnreachable

#: Largest answer in bytes, unpacked: more than any page image, vectors or candidates need.
MOST_BYTES = 128 * 2**20
#: Reason in the error about a larger one.
TOO_MUCH = f"an answer of more than {MOST_BYTES >> 20} MiB"


async def read_whole(response: httpx.Response, url: str) -> httpx.Response:
    """Read the body of an answer whose head has arrived; the caller closes the connection.

    url: of the server, for the error. Raises ServiceUnreachable over MOST_BYTES (not retryable: the
    answer would be as long again), and httpx's errors.
    """
    body = bytearray()
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) > MOST_BYTES:
            raise ServiceUnreachable(url, TOO_MUCH, retryable=False)
    # The body is unpacked now, so the headers about its encoding are dropped.
    encoding_headers = ("content-encoding", "content-length", "transfer-encoding")
    headers = [
        (name, value)
        for name, value in response.headers.multi_items()
        if name.lower() not in encoding_headers
    ]
    return httpx.Response(
        response.status_code, headers=headers, content=bytes(body), request=response.request
    )
