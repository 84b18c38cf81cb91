"""A TCP proxy that delays or cuts replies, like a distant, busy or overloaded server."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any


@contextlib.contextmanager
def delaying_proxy(
    port: int,
    delay: Callable[[], float],
    *,
    host: str = "127.0.0.1",
    cuts: Callable[[], bool] = lambda: False,
) -> Iterator[int]:
    """Forward connections to 127.0.0.1:`port` in a thread, and yield the proxy's own port.

    delay: called for each chunk of a reply, which waits so many seconds. The order stays the same.
    host: the address that the proxy listens on.
    cuts: called for each chunk of a reply; True: half of it is sent, and the connection is reset.
    """
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def run(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(30)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            writer.close()
            return
        with contextlib.suppress(asyncio.CancelledError):  # the proxy is being closed
            await asyncio.gather(
                _forward(reader, far_writer, lambda: 0.0, lambda: False),
                _forward(far_reader, writer, delay, cuts),
            )

    server = run(asyncio.start_server(serve, host, 0))
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        run(_stop(server))
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _forward(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    delay: Callable[[], float],
    cuts: Callable[[], bool],
) -> None:
    """Forward data until one side closes; then close the other side, too."""
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            if pause := delay():
                await asyncio.sleep(pause)
            if cuts():
                writer.write(data[: len(data) // 2])
                await writer.drain()
                writer.transport.abort()
                return
            writer.write(data)
            await writer.drain()
    writer.close()


async def _stop(server: asyncio.Server) -> None:
    server.close()
    other_tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in other_tasks:
        task.cancel()
    await asyncio.gather(*other_tasks, return_exceptions=True)
