"""The paid calls that the processes of a run share, so that no answer is paid for twice.

A process claims the key of a request in the store of the processes (trainer/rl/process_store.py)
before it pays. Who comes later waits for the owner's news: the answer, or that it gave up. Each
process writes every answer to its own file, so the store holds an answer only until all processes
have read it, and a claim is free again only then.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pydantic_core import from_json, to_json

from trainer.rl.process_store import ProcessStore
from trainer.search.answer.answer_cache import PaidAnswerCache
from trainer.search.answer.rank_files import opened_copy
from trainer.search.records import ApiUsage

T = TypeVar("T")
#: Seconds between two looks for news: while a caller waits for another process, and else.
_PAUSE_S = (0.02, 0.25)
#: News that are read at once, and the most characters of an answer that is passed on.
_BATCH, _LONGEST = 64, 1_000_000


class SharedCalls:
    """The access of one process to what it shares with the others. Threads may share it.

    It runs in a thread of its own, in the order in which it is called.
    """

    def __init__(self, store: ProcessStore) -> None:
        self.store, self.rank, self.size = store, store.rank, store.size
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shared-calls")

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Start work without waiting for it."""
        return self._thread.submit(work)

    async def run(self, work: Callable[[], T], undo: Callable[[T], None] | None = None) -> T:
        """Return the result of work.

        undo: is called with the result if the caller was cancelled meanwhile.
        """
        started = self.submit(work)
        try:
            return await asyncio.shield(asyncio.wrap_future(started))
        except asyncio.CancelledError:
            if undo is not None:
                self.submit(lambda: undo(started.result()))
            raise

    def part(self, limit: int) -> int:
        """Return this process's part of a limit of the run, at least 1."""
        return max(1, limit // self.size + (self.rank < limit % self.size))

    def close(self) -> None:
        """Finish the work that was started."""
        self._thread.shutdown()


class SharedAnswerCache(PaidAnswerCache):
    """The file of paid answers of one of several processes.

    path: of its own file. known_file: the copy of the answers that the main file had at
    the start; None for the main process, whose file has them.
    """

    def __init__(self, path: Path, run: str, calls: SharedCalls, known_file: Path | None) -> None:
        self._known_answers = None if known_file is None else opened_copy(known_file)
        super().__init__(path, run)
        self._calls = calls
        self._news: dict[bytes, list[asyncio.Event]] = defaultdict(list)
        self._paid: set[bytes] = set()  # answers within `claimed`
        self._reader: asyncio.Task[None] | None = None
        self._error: Exception | None = None
        self._is_closed = False

    async def get(self, key: bytes) -> dict[str, Any] | None:
        """Return the answer of a key, or None."""
        answer, known_answers = await super().get(key), self._known_answers
        if answer is not None or known_answers is None:
            return answer
        query = "SELECT value FROM answers WHERE key = ?"
        row = await self._execute(lambda _: known_answers.execute(query, (key,)).fetchone())
        return self._unpacked(key, row)

    @asynccontextmanager
    async def claimed(self, key: bytes) -> AsyncIterator[dict[str, Any] | None]:
        """Yield the answer of a key; None: the caller pays for it, within this block.

        If another process pays for it now, wait until it has the answer or has given up.
        """
        self._listen()
        news = asyncio.Event()
        self._news[key].append(news)  # before the look-up, so that no news is missed
        try:
            while (stored := await self.get(key)) is None and not await self._claim(key):
                if self._error is not None:
                    raise self._error
                await news.wait()
                news.clear()
        finally:
            self._news[key].remove(news)
            if not self._news[key]:
                del self._news[key]
        if stored is not None:
            yield stored
            return
        try:
            # Answered, and the claim freed, between the look-up and the claim?
            yield await self.get(key) if news.is_set() else None
        finally:
            if key in self._paid:
                self._paid.discard(key)
            else:
                self._calls.submit(lambda: self._release(key))

    async def put(
        self, key: bytes, answer: Mapping[str, Any], server: str, charge: ApiUsage
    ) -> None:
        """Store an answer and its usage, and pass the answer on. Raises UserError."""
        await super().put(key, answer, server, charge)
        text = to_json([key.hex(), self._calls.rank, dict(answer)]).decode()
        if len(text) <= _LONGEST:
            self._paid.add(key)
            await self._calls.run(lambda: self._append(text))

    async def first_judge(self, model: str) -> str:
        """Return the first judge of the run, the same in all processes."""
        self._listen()  # a process that never pays reads the news as well
        store = self._calls.store
        first = await self._calls.run(lambda: store.replace("judge", "", model))
        await super().first_judge(first)
        return first

    def close(self) -> None:
        """Close the file and release the lock of the run. A second call does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._reader is not None:
            self._reader.cancel()
        super().close()
        if self._known_answers is not None:
            self._known_answers.close()

    def _listen(self) -> None:
        if self._reader is None:
            self._reader = asyncio.create_task(self._read_news())

    async def _claim(self, key: bytes) -> bool:
        """Claim a key, and return whether this process has it now."""
        name, own_rank = f"claim {key.hex()}", str(self._calls.rank)
        owner = await self._calls.run(
            lambda: self._calls.store.replace(name, "", own_rank),
            lambda owner: self._release(key) if owner == own_rank else None,
        )
        return owner == own_rank

    def _release(self, key: bytes) -> None:
        """Free a claim without an answer, and tell those who wait."""
        self._calls.store.delete(f"claim {key.hex()}")
        self._append(to_json([key.hex(), self._calls.rank, None]).decode())

    def _append(self, text: str) -> None:
        number = self._calls.store.add("news", 1)
        self._calls.store.set(f"news {number}", text)

    async def _read_news(self) -> None:
        """Store the answers of the other processes, and wake who waits for them."""
        first = 1  # of those that were not read yet
        try:
            while True:
                await asyncio.sleep(_PAUSE_S[0 if self._news else 1])
                while texts := await self._calls.run(partial(self._next, first)):
                    await self._take([from_json(text) for text in texts])
                    await self._calls.run(partial(self._acknowledge, first, texts))
                    first += len(texts)
        except Exception as error:
            self._error = error
            for events in self._news.values():
                for event in events:
                    event.set()

    def _next(self, first: int) -> list[str]:
        """Return the next news; another process may still be writing the last of them."""
        store, texts = self._calls.store, list[str]()
        for number in range(first, min(first + _BATCH, store.add("news", 0) + 1)):
            text = store.get(f"news {number}")
            if text is None:
                break
            texts.append(text)
        return texts

    async def _take(self, news: list[tuple[str, int, dict[str, Any] | None]]) -> None:
        answers = [
            (bytes.fromhex(key), answer)
            for key, rank, answer in news
            if answer is not None and rank != self._calls.rank
        ]
        if answers:
            await self.put_known(answers)
        for key, _, _ in news:
            for event in self._news.get(bytes.fromhex(key), ()):
                event.set()

    def _acknowledge(self, first: int, texts: list[str]) -> None:
        """Count this process as a reader of news; the last reader deletes them."""
        store = self._calls.store
        for number, text in enumerate(texts, first):
            if store.add(f"read {number}", 1) == store.size:
                key, _, answer = from_json(text)
                for name in (f"news {number}", f"read {number}"):
                    store.delete(name)
                if answer is not None:
                    store.delete(f"claim {key}")
