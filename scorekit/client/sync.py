"""The client of every scoring service for code that is not async: scripts, notebooks, data frames.

with SyncScoringClient("http://127.0.0.1:8001") as client:
    results = client.score([{"src": "Hello.", "mt": "안녕하세요."}], progress=True)
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from scorekit.client.asynchronous import ScoringClient
from scorekit.client.distinct import Sample
from scorekit.client.frames import samples_of_frame, with_results
from scorekit.net.loop_thread import LoopThread
from scorekit.report.progress import progress_bar
from scorekit.schemas import Info, Result

if TYPE_CHECKING:
    from pandas import DataFrame


#: What a forked child has of its parent: kept, since to collect it could close what is not its own.
_INHERITED: list[Any] = []


class SyncScoringClient:
    """ScoringClient for code that is not async. The arguments are the same.

    In a forked child it makes its connections, its thread and its cache anew.
    """

    def __init__(self, urls: str | Iterable[str], **kwargs: Any) -> None:
        self._urls = [urls] if isinstance(urls, str) else list(urls)
        self._kwargs = kwargs
        self._forked = threading.Lock()
        self._start()

    def _start(self) -> None:
        thread = LoopThread("client")

        async def make() -> ScoringClient:
            return ScoringClient(self._urls, **self._kwargs)

        try:
            client = thread.run(make())
        except BaseException:
            thread.stop()
            raise
        self._thread, self._client = thread, client
        self._pid = os.getpid()

    def _own(self) -> tuple[LoopThread, ScoringClient]:
        """Thread and client of this process: threads do not live on in a forked child, and its
        parent's connections are not its to use, nor to close."""
        if self._pid != os.getpid():
            with self._forked:
                if self._pid != os.getpid():
                    if self._thread.stopped:
                        raise RuntimeError("the client is closed")
                    _INHERITED.append((self._thread, self._client))
                    self._start()
        return self._thread, self._client

    def info(self) -> Info:
        """See ScoringClient.info."""
        thread, client = self._own()
        return thread.run(client.info())

    def limits(self) -> Info:
        """See ScoringClient.limits."""
        thread, client = self._own()
        return thread.run(client.limits())

    def wait_ready(self, timeout_s: float = 600.0) -> None:
        """See ScoringClient.wait_ready."""
        thread, client = self._own()
        thread.run(client.wait_ready(timeout_s))

    def score(
        self, samples: Sequence[Sample], *args: Any, progress: bool = False, **kwargs: Any
    ) -> list[Result]:
        """See ScoringClient.score. progress: show a bar with rate and time left."""
        thread, client = self._own()
        if not progress:
            return thread.run(client.score(samples, *args, **kwargs))
        with progress_bar(len(samples)) as advance:
            work = client.score(samples, *args, on_progress=advance, **kwargs)
            return thread.run(work)

    def score_frame(self, frame: DataFrame, **kwargs: Any) -> DataFrame:
        """A copy of a pandas data frame with the columns `score` (NaN where it failed), `ok`,
        `error` (None where it did not) and, from services that mark them, `error_spans`.

        It has text columns `src` and `mt`, and may have `ref` (NaN, None or "": no reference);
        other columns stay as they are. `kwargs` as for `score`. Raises UserError that names a
        column, or a row, which is not so.
        """
        return with_results(frame, self.score(samples_of_frame(frame), **kwargs))

    def close(self) -> None:
        """Close the connections and end the thread; a second call does nothing. A call that
        another thread waits in raises RuntimeError."""
        if self._pid == os.getpid():  # a child leaves its parent's open
            self._thread.stop(self._client.close)

    def __enter__(self) -> SyncScoringClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
