"""`python -m scorekit score`: a file of samples -> a file of results, resumable.

The output has one JSON line for each sample, in order. Beside it, OUT.meta.json says what it was
made from: only the same job may go on with it. Lines are appended whole; after a crash the last
one may be torn, and is cut.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import math
import os
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from pydantic_core import from_json, to_json

from scorekit.async_client import ScoringClient
from scorekit.errors import RequestError, ServiceUnreachable, UserError
from scorekit.samplefile import Contents, Line, SampleFile
from scorekit.schemas import Info, Priority, Result, Scored

#: A result's fields that depend on what was scored before, not on the sample.
_PASSING = {"id", "cached"}


@dataclass(slots=True)
class Tally:
    """What an output holds so far. last_line: the number of the input line it ends with."""

    ok: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    score_sum: float = 0.0
    last_line: int = 0

    @property
    def done(self) -> int:
        """Samples with a result, good or not."""
        return self.ok + self.failed.total()

    @property
    def mean(self) -> float:
        """Mean score of the good ones; NaN where there is none."""
        return self.score_sum / self.ok if self.ok else math.nan

    def add(self, result: Mapping[str, Any]) -> None:
        """Count one line of the output."""
        self.last_line = result["line"]
        if result["ok"]:
            self.ok += 1
            self.score_sum += result["score"]
        else:
            self.failed[result["error"]["type"]] += 1


@dataclass(frozen=True)
class ScoreJob:
    """A file to score, and how."""

    samples: SampleFile
    out: Path
    options: dict[str, Any]
    priority: Priority = "bulk"
    batch_size: int = 256
    max_in_flight: int = 8
    overwrite: bool = False

    @property
    def meta(self) -> Path:
        """The file that says what the output was made from."""
        return self.out.with_name(self.out.name + ".meta.json")

    def check(self) -> Contents:
        """Read the whole input. Raises UserError for a fault in it."""
        paths = self.out, self.samples.path
        if all(path.exists() for path in paths) and self.out.samefile(self.samples.path):
            raise UserError(f"{self.out}: the input cannot be the output")
        return self.samples.check()

    async def run(
        self,
        client: ScoringClient,
        info: Info,
        contents: Contents,
        on_start: Callable[[Tally], Callable[[int], None]],
    ) -> Tally:
        """Score what is missing of the checked `contents`. `on_start` gets what is there already,
        and gives the function that is told of progress.

        Raises UserError for an output of another job, and what the client raises.
        """
        about = self._about(contents.digest, info)
        try:
            with self.out.open("ab+") as out:
                _lock(out, self.out)
                tally = self._resume(out, about)
                advance = on_start(tally)
                await self._score_rest(client, out, tally, advance)
        except OSError as error:
            raise UserError(f"{error.filename or self.out}: {error.strerror}") from None
        return tally

    def _about(self, digest: str, info: Info) -> dict[str, Any]:
        """Everything that the output is a function of."""
        return {
            "input": digest,
            "format": self.samples.format,
            "fields": asdict(self.samples.fields),
            "options": self.options,
            "model": info.model_dump(include={"service", "model", "revision", "dtype"}),
        }

    def _resume(self, out: BinaryIO, about: dict[str, Any]) -> Tally:
        """What the output holds already; it ends with a whole line then."""
        if self.overwrite:
            out.truncate(0)
        out.seek(0)
        if out.read(1) == b"":
            _write_whole(self.meta, json.dumps(about, indent=1, ensure_ascii=False))
            return Tally()
        try:
            before = json.loads(self.meta.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            raise UserError(
                f"{self.out} is there, and no {self.meta.name} says what it was made from: "
                "name another file, or say --overwrite"
            ) from None
        changed = [name for name in about if before.get(name) != about[name]]
        if changed:
            raise UserError(
                f"{self.out} was made from something else ({', '.join(changed)}): "
                "name another file, or say --overwrite"
            )
        out.seek(0)
        tally = Tally()
        whole = 0
        for raw in out:
            if not raw.endswith(b"\n"):
                break
            try:
                tally.add(from_json(raw))
            except (ValueError, KeyError, TypeError):
                raise UserError(
                    f"{self.out}: line {tally.done + 1} is no result: say --overwrite"
                ) from None
            whole += len(raw)
        out.truncate(whole)
        return tally

    async def _score_rest(
        self, client: ScoringClient, out: BinaryIO, tally: Tally, advance: Callable[[int], None]
    ) -> None:
        """Keep `max_in_flight` requests going; write their results in order. At most twice as
        many batches are in memory."""
        batches = _batches(self.samples.lines(after=tally.last_line), self.batch_size)
        waiting: deque[tuple[list[Line], asyncio.Task[list[Result]]]] = deque()
        try:
            while True:
                for batch in islice(batches, 2 * self.max_in_flight - len(waiting)):
                    waiting.append((batch, asyncio.create_task(self._score(client, batch))))
                if not waiting:
                    return
                batch, task = waiting.popleft()
                _append(out, batch, await task, tally)
                advance(len(batch))
        finally:
            for _, task in waiting:
                task.cancel()
            await asyncio.gather(*(task for _, task in waiting), return_exceptions=True)

    async def _score(self, client: ScoringClient, batch: list[Line]) -> list[Result]:
        samples = [line.sample for line in batch]
        return await client.score(
            samples, self.options, priority=self.priority, batch_size=self.batch_size
        )


async def first_info(client: ScoringClient, urls: int) -> Info:
    """`/v1/info`. Where nothing listens at any URL, that is told at once, not after the deadline;
    a service that is loading is waited for. Raises ServiceUnreachable, RequestError."""
    for left in reversed(range(urls)):
        try:
            return await client.info()
        except ServiceUnreachable:
            if not left:
                raise
        except RequestError as error:
            if not error.retryable:
                raise
            break
    return await client.limits()


def _batches(lines: Iterator[Line], size: int) -> Iterator[list[Line]]:
    while batch := list(islice(lines, size)):
        yield batch


def _append(out: BinaryIO, batch: list[Line], results: list[Result], tally: Tally) -> None:
    written = []
    for line, result in zip(batch, results, strict=True):
        record = {"line": line.number, "id": line.id}
        record |= result.model_dump(exclude=_PASSING)
        if isinstance(result, Scored) and result.error_spans is None:
            del record["error_spans"]
        written.append(to_json(record) + b"\n")
        tally.add(record)
    out.write(b"".join(written))
    out.flush()


def _lock(out: BinaryIO, path: Path) -> None:
    try:
        fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{path}: another process writes it") from None


def _write_whole(path: Path, text: str) -> None:
    """Under another name first: a crash leaves either the old file or the new one."""
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8")
    os.replace(new, path)
