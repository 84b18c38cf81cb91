"""`python -m scorekit score`: a file of samples -> a file of results, resumable.

The output has one JSON line for each sample, in order. Beside it, OUT.meta.json says what it was
made from: only the same job may go on with it. Lines are appended whole; after a crash the last
one may be torn, and is cut. OUT.early has the results that came before their turn (early.py).
Samples that failed for the moment are asked for again by the next run, which writes OUT.again with
the new results in their place, and then puts it where OUT is.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import math
import os
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from pydantic_core import from_json

from scorekit.client.asynchronous import ScoringClient
from scorekit.client.files.early import EarlyResults
from scorekit.client.files.samplefile import Contents, JudgeFields, Line, SampleFile
from scorekit.errors import RequestError, ServiceUnreachable, UserError, may_pass_later
from scorekit.files import put, write_atomic
from scorekit.schemas import Info, JudgeScored, Priority, Result

#: Endings of an output that would promise what it is not.
_OTHER_ENDINGS = frozenset({".gz", ".csv", ".tsv", ".parquet"})
#: A batch holds so many times its size of lines that have their result already.
_MOST_ITEMS = 16
#: How a format was read: a TSV was once read as if nothing in it were quoted.
_READ_AS = {"tsv": "tsv, quoted", "tsv-unquoted": "tsv"}
#: A result's fields that depend on what was scored before, not on the sample.
_PASSING = {"id", "cached"}
#: What many services do not tell is not written.
_MAY_LACK = frozenset(
    {"error_spans", "omissions", "unplaced", "windows", "usage", "upstream_calls"}
)


@dataclass(slots=True)
class Tally:
    """What an output holds so far.

    retryable: how many another run asks for again. judged: results with a verdict, of which
    `passed` pass. last_line: the number of the input line it ends with. early: results that are
    saved, too, before their turn.
    """

    ok: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    retryable: int = 0
    judged: int = 0
    passed: int = 0
    score_sum: float = 0.0
    last_line: int = 0
    early: int = 0

    @property
    def done(self) -> int:
        """Samples with a result, good or not."""
        return self.ok + self.failed.total()

    @property
    def mean(self) -> float:
        """Mean score of the good ones; NaN where there is none."""
        return self.score_sum / self.ok if self.ok else math.nan

    def add(self, result: Mapping[str, Any], times: int = 1) -> None:
        """Count one line of the output; `times` -1 takes it back."""
        if result["ok"]:
            self.ok += times
            self.score_sum += times * result["score"]
            self.judged += times * ("verdict" in result)
            self.passed += times * result.get("verdict", {}).get("pass", False)
        else:
            self.failed[result["error"]["type"]] += times
            self.retryable += times * _may_pass(result)
        self.last_line = max(self.last_line, result["line"])


class _Item(NamedTuple):
    """A line of the input; before: the result that stands for it, and raw: as it stands there."""

    line: Line
    before: dict[str, Any] | None = None
    raw: bytes = b""

    @property
    def is_asked(self) -> bool:
        return self.before is None or _may_pass(self.before)


@dataclass(frozen=True)
class ScoreJob:
    """A file to score, and how. out: None for stdout, which cannot be gone on with. remedy: what to
    do about an output of something else."""

    samples: SampleFile
    out: Path | None
    options: dict[str, Any]
    priority: Priority = "bulk"
    batch_size: int = 256
    max_in_flight: int = 8
    overwrite: bool = False
    remedy: str = "name another file, or say --overwrite"

    def check(self) -> Contents:
        """Read the whole input. Raises UserError for a fault in it, and for an ending of the output
        that promises another format."""
        if self.out is not None:
            if self.out.suffix.lower() in _OTHER_ENDINGS:
                raise UserError(f"{self.out}: results are JSON lines: name it .jsonl")
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
        """Score what is missing of the checked `contents`, and what failed for the moment in an
        earlier run. `on_start` gets what is there already, and gives the function that is told of
        progress.

        Raises UserError for an output of another job, and what the client raises.
        """
        self._check_kind(info)
        early = EarlyResults(self.out and _beside(self.out, "early"))
        if self.out is None:
            tally = Tally()
            try:
                await self._score_rest(client, sys.stdout.buffer, early, tally, on_start(tally))
            except BrokenPipeError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what Python flushes at its end
                raise UserError("stdout: its reader has left") from None
            return tally
        try:
            with ExitStack() as files:
                out = _opened(files, self.out)
                about = self._about(contents.digest, info)
                if self.overwrite:  # at the first result: the service may yet refuse what is asked
                    early.when_first(partial(self._begin, out, self.out, about))
                    tally = Tally()
                else:
                    tally = self._resume(out, self.out, about, early)
                advance = on_start(tally)
                if tally.retryable:
                    again = _opened(files, _beside(self.out, "again"))
                    await self._ask_again(client, out, again, early, tally, advance)
                    put(_beside(self.out, "again"), self.out)
                    out = again
                await self._score_rest(client, out, early, tally, advance)
                early.finish()
        except OSError as error:
            raise UserError(f"{error.filename or self.out}: {error.strerror}") from None
        return tally

    def _check_kind(self, info: Info) -> None:
        judged = isinstance(self.samples.fields, JudgeFields)
        if judged != (info.service == "judge"):
            what = "no judge: leave out --task" if judged else "a judge: name its rubric by --task"
            raise UserError(f"the service is {what}")

    def _about(self, digest: str, info: Info) -> dict[str, Any]:
        """Everything that the output is a function of."""
        return {
            "input": digest,
            "format": _READ_AS.get(self.samples.file.format, self.samples.file.format),
            "fields": asdict(self.samples.fields),
            "options": self.options,
            "model": info.model_dump(include={"service", "model", "revision", "dtype"}),
        }

    def _resume(
        self, out: BinaryIO, path: Path, about: dict[str, Any], early: EarlyResults
    ) -> Tally:
        """What the output holds already; it ends with a whole line then. `early` gets what an
        earlier run saved beside it."""
        meta = _beside(path, "meta.json")
        out.seek(0)
        if out.read(1) == b"":
            if _made_from(meta) == about:
                early.load(after=0)
            else:
                self._begin(out, path, about)
            return Tally(early=len(early))
        before = _made_from(meta)
        if before is None:
            raise UserError(
                f"{path} is there, and no {meta.name} says what it was made from: {self.remedy}"
            )
        changed = [name for name in about if before.get(name) != about[name]]
        if changed:
            raise UserError(
                f"{path} was made from something else ({', '.join(changed)}): {self.remedy}"
            )
        tally = Tally()
        for _, result in _results(out, path):
            tally.add(result)
        early.load(after=0 if tally.retryable else tally.last_line)
        tally.early = len(early)
        return tally

    def _begin(self, out: BinaryIO, path: Path, about: dict[str, Any]) -> None:
        """Make the output an empty one of this job."""
        out.truncate(0)
        for ending in ("again", "early"):
            _beside(path, ending).unlink(missing_ok=True)
        meta = json.dumps(about, indent=1, ensure_ascii=False)
        write_atomic(_beside(path, "meta.json"), meta, alone=True)

    async def _ask_again(
        self,
        client: ScoringClient,
        out: BinaryIO,
        again: BinaryIO,
        early: EarlyResults,
        tally: Tally,
        advance: Callable[[int], None],
    ) -> None:
        """Write into `again` what stands in `out`, with new results for what failed for the moment.
        An earlier run that was interrupted may have begun with it."""
        standing = _results(out, Path(out.name))
        last = 0
        for (_, new), (_, old) in zip(_results(again, Path(again.name)), standing, strict=False):
            tally.add(old, -1)
            tally.add(new)
            last = new["line"]
        items = (
            _Item(line, old, raw)
            for (raw, old), line in zip(standing, self.samples.lines(last), strict=False)
        )
        await self._score_items(client, items, again, early, tally, advance)

    async def _score_rest(
        self,
        client: ScoringClient,
        out: BinaryIO,
        early: EarlyResults,
        tally: Tally,
        advance: Callable[[int], None],
    ) -> None:
        items = map(_Item, self.samples.lines(after=tally.last_line))
        await self._score_items(client, items, out, early, tally, advance)

    async def _score_items(
        self,
        client: ScoringClient,
        items: Iterator[_Item],
        out: BinaryIO,
        early: EarlyResults,
        tally: Tally,
        advance: Callable[[int], None],
    ) -> None:
        """Keep `max_in_flight` requests going; write their results in order. At most twice as
        many batches are in memory."""
        batches = _batches(items, self.batch_size)
        waiting: deque[tuple[list[_Item], asyncio.Task[None]]] = deque()
        async with early.saving():
            try:
                while True:
                    for batch in islice(batches, 2 * self.max_in_flight - len(waiting)):
                        task = asyncio.create_task(self._score(client, batch, early))
                        waiting.append((batch, task))
                    if not waiting:
                        return
                    batch, task = waiting[0]
                    await task
                    waiting.popleft()
                    _append(out, batch, early, tally)
                    advance(sum(item.is_asked for item in batch))
            finally:
                for _, task in waiting:
                    task.cancel()
                await asyncio.gather(*(task for _, task in waiting), return_exceptions=True)
                tally.early = len(early)

    async def _score(self, client: ScoringClient, batch: list[_Item], early: EarlyResults) -> None:
        lines = [i.line for i in batch if i.is_asked and i.line.number not in early]
        await client.score(
            [line.sample for line in lines],
            self.options,
            priority=self.priority,
            batch_size=self.batch_size,
            on_result=lambda index, result: early.put(_record(lines[index], result)),
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


def _batches(items: Iterator[_Item], size: int) -> Iterator[list[_Item]]:
    """Lists with `size` items that are asked for, and not many more that are not."""
    batch: list[_Item] = []
    asked = 0
    for item in items:
        batch.append(item)
        asked += item.is_asked
        if asked == size or len(batch) == _MOST_ITEMS * size:
            yield batch
            batch, asked = [], 0
    if batch:
        yield batch


def _record(line: Line, result: Result) -> dict[str, Any]:
    """A line of the output."""
    record = {"line": line.number, "id": line.id, **result.model_dump(exclude=_PASSING)}
    may_lack = {"upstream_calls"} if isinstance(result, JudgeScored) else _MAY_LACK
    record = {n: v for n, v in record.items() if v is not None or n not in may_lack}
    return record


def _append(out: BinaryIO, batch: list[_Item], early: EarlyResults, tally: Tally) -> None:
    written = []
    for item in batch:
        if not item.is_asked:
            written.append(item.raw)
            continue
        fields, raw = early.take(item.line.number)
        written.append(raw)
        if item.before is not None:
            tally.add(item.before, -1)
        tally.add(fields)
    out.write(b"".join(written))
    out.flush()


def _results(file: BinaryIO, path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """(line, result) of each whole line; a torn last one is cut. Raises UserError."""
    file.seek(0)
    whole = 0
    for number, raw in enumerate(file, 1):
        if not raw.endswith(b"\n"):
            break
        try:
            result = from_json(raw)
            Tally().add(result)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{path}: line {number} is no result: say --overwrite") from None
        whole += len(raw)
        yield raw, result
    file.truncate(whole)


def _made_from(meta: Path) -> dict[str, Any] | None:
    """What an output was made from; None where nothing says so."""
    try:
        return dict(json.loads(meta.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def _may_pass(result: Mapping[str, Any]) -> bool:
    return not result["ok"] and may_pass_later(result["error"])


def _beside(path: Path, ending: str) -> Path:
    return path.with_name(f"{path.name}.{ending}")


def _opened(files: ExitStack, path: Path) -> BinaryIO:
    """The file, to read and append; only this process has it."""
    file = files.enter_context(path.open("ab+"))
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{path}: another process writes it") from None
    return file
