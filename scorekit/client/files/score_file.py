"""`scorekit score`: a file of samples -> a file of results, resumable.

The output has one JSON line for each sample, in order. OUT.meta.json beside it says what it was
made from: only the same job may resume it. Complete lines are appended; after a crash the last
one may be torn, and is removed. OUT.early has results that arrived early (`EarlyResults`).
The next run retries samples with transient errors: it writes OUT.again, and replaces OUT by it.
"""

from __future__ import annotations

import asyncio
import fcntl
import math
import sys
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from pydantic_core import from_json, to_json

from scorekit.client.asynchronous import ScoringClient
from scorekit.client.deduplication import failure
from scorekit.client.files.scored_file import (
    check_description,
    described_format,
    read_description,
    write_description,
)
from scorekit.client.replicas import check_agreement
from scorekit.errors import RequestError, UserError, is_transient
from scorekit.files import replace_file, write_atomic
from scorekit.net.loops import cancel_all
from scorekit.report.progress import Bar, progress_bar
from scorekit.rows.samples import Contents, JudgeColumns, Line, SampleFile
from scorekit.schemas import Info, JudgeScored, Priority, Result

#: Endings of an output that would claim another format.
_OTHER_ENDINGS = frozenset({".gz", ".csv", ".tsv", ".parquet"})
#: A batch may have so many times its size of lines that have their result already.
_MAX_ITEMS_FACTOR = 16
#: Fields of a result that depend on earlier requests, not on the sample.
_EXCLUDED_FIELDS = {"id", "cached"}
#: Fields that are left out if they are null, because many services lack them.
_OPTIONAL_FIELDS = frozenset(
    {"error_spans", "omissions", "unplaced", "windows", "usage", "upstream_calls"}
)


@dataclass(slots=True)
class ResultCounts:
    """Counts of the results in an output so far.

    retryable: results that another run retries.
    judged: results with a verdict, of which `passed` pass.
    last_line: number of the last input line in the output.
    early: results that are saved before their turn.
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
        """Return the number of samples with a result, good or not."""
        return self.ok + self.failed.total()

    @property
    def mean(self) -> float:
        """Return the mean score of the good results; NaN if there are none."""
        return self.score_sum / self.ok if self.ok else math.nan

    def add(self, result: Mapping[str, Any], times: int = 1) -> None:
        """Count one line of the output; `times` -1 subtracts it."""
        if result["ok"]:
            self.ok += times
            self.score_sum += times * result["score"]
            self.judged += times * ("verdict" in result)
            self.passed += times * result.get("verdict", {}).get("pass", False)
        else:
            self.failed[result["error"]["type"]] += times
            self.retryable += times * _is_transient(result)
        self.last_line = max(self.last_line, result["line"])


class _Item(NamedTuple):
    """A line of the input.

    before: its existing result, and raw: that result's bytes.
    """

    line: Line
    before: dict[str, Any] | None = None
    raw: bytes = b""

    @property
    def is_pending(self) -> bool:
        return self.before is None or _is_transient(self.before)


@dataclass(frozen=True)
class ScoreJob:
    """A file to score.

    out: None for stdout.
    remedy: what to do about an output of another job.
    """

    samples: SampleFile
    out: Path | None
    options: dict[str, Any]
    priority: Priority = "bulk"
    batch_size: int = 256
    max_in_flight: int = 8
    overwrite: bool = False
    remedy: str = "name another file, or say --overwrite"

    def check(self) -> Contents:
        """Read the whole input. Raises UserError for an invalid line, and if the output's ending
        claims another format."""
        if self.out is not None:
            check_output(self.out, [self.samples.path])
        return self.samples.check()

    def check_service(self, info: Info) -> None:
        """Raise UserError if another kind of service answers than the columns are for."""
        is_judge = isinstance(self.samples.fields, JudgeColumns)
        if is_judge != (info.service == "judge"):
            hint = "no judge: leave out" if is_judge else "a judge: name its rubric by"
            raise UserError(f"the service is {hint} --task")

    def describe(self, contents: Contents, info: Info) -> dict[str, Any]:
        """Return everything that the output is a function of.

        The first keys are there only if they differ from how every earlier version read the file:
        an output of it can be resumed.
        """
        encoding = self.samples.file.encoding
        special = {
            "blank_rows": "skipped" if contents.blank else None,
            "bad_rows": "skipped" if contents.bad else None,
            "encoding": encoding if encoding != "utf-8" else None,
        }
        return {name: value for name, value in special.items() if value is not None} | {
            "input": contents.digest,
            "format": described_format(self.samples.file.format),
            "fields": asdict(self.samples.fields),
            "options": self.options,
            "model": info.model_dump(include={"service", "model", "revision", "dtype"}),
        }


@dataclass(slots=True)
class ScoreRun:
    """One run of a job.

    bar: shows the progress.
    on_overwrite: is called before an output is emptied by --overwrite.
    tally: of its output.
    num_before: results that the output had, without those that this run retries; None: it has not
    started.
    """

    job: ScoreJob
    client: ScoringClient
    bar: Bar = progress_bar
    on_overwrite: Callable[[], None] | None = None
    tally: ResultCounts = field(default_factory=ResultCounts)
    num_before: int | None = None
    _early: EarlyResults = field(init=False)
    _advance: Callable[[int], None] = field(init=False)

    def __post_init__(self) -> None:
        self._early = EarlyResults(self.job.out and _with_suffix(self.job.out, "early"))

    async def run(self, info: Info, contents: Contents) -> None:
        """Score what is missing of the checked `contents`, and retry transient errors of an earlier
        run.

        Raises UserError for an output of another job, and what the client raises.
        """
        job = self.job
        job.check_service(info)
        if job.out is None:
            with self._progress(contents):
                await self._score_missing(sys.stdout.buffer)
            return
        try:
            with ExitStack() as stack:
                out = open_locked(stack, job.out)
                description = job.describe(contents, info)
                if job.overwrite:  # at the first result: the service may still refuse the options
                    self._early.when_first(partial(self._overwrite, out, job.out, description))
                else:
                    self._resume(out, job.out, description)
                stack.enter_context(self._progress(contents))
                if self.tally.retryable:
                    new_out = open_locked(stack, _with_suffix(job.out, "again"))
                    await self._retry_transient(out, new_out)
                    replace_file(_with_suffix(job.out, "again"), job.out)
                    out = new_out
                await self._score_missing(out)
                self._early.finish()
        except OSError as error:
            raise UserError(f"{error.filename or job.out}: {error.strerror}") from None

    @contextmanager
    def _progress(self, contents: Contents) -> Iterator[None]:
        self.num_before = self.tally.done - self.tally.retryable
        with self.bar(contents.samples, self.num_before) as self._advance:
            yield

    def _overwrite(self, out: BinaryIO, path: Path, description: dict[str, Any]) -> None:
        if self.on_overwrite is not None:
            self.on_overwrite()
        _start_output(out, path, description)

    def _resume(self, out: BinaryIO, path: Path, description: dict[str, Any]) -> None:
        """Cut a torn line, load the early results, and count the output."""
        out.seek(0)
        if out.read(1) == b"":
            if read_description(path) == description:
                self._early.load(after=0)
            else:
                _start_output(out, path, description)
        else:
            check_description(path, description, self.job.remedy)
            for _, result in _results(out, path):
                self.tally.add(result)
            self._early.load(after=0 if self.tally.retryable else self.tally.last_line)
        self.tally.early = len(self._early)

    async def _retry_transient(self, out: BinaryIO, new_out: BinaryIO) -> None:
        """Copy `out` to `new_out`, which an earlier run may have started, and retry errors."""
        old_results = _results(out, Path(out.name))
        last_line = 0
        for (_, new_result), (_, old_result) in zip(
            _results(new_out, Path(new_out.name)), old_results, strict=False
        ):
            self.tally.add(old_result, -1)
            self.tally.add(new_result)
            last_line = new_result["line"]
        lines = self.job.samples.lines(last_line)
        items = (
            _Item(line, old_result, raw)
            for (raw, old_result), line in zip(old_results, lines, strict=False)
        )
        await self._score_items(items, new_out)

    async def _score_missing(self, out: BinaryIO) -> None:
        lines = self.job.samples.lines(after=self.tally.last_line)
        await self._score_items(map(_Item, lines), out)

    async def _score_items(self, items: Iterator[_Item], out: BinaryIO) -> None:
        """Write results in order. `max_in_flight` requests, twice as many batches at once."""
        batches = _batches(items, self.job.batch_size)
        pending: deque[tuple[list[_Item], asyncio.Task[None]]] = deque()
        async with self._early.saving():
            try:
                while True:
                    for batch in islice(batches, 2 * self.job.max_in_flight - len(pending)):
                        pending.append((batch, asyncio.create_task(self._score(batch))))
                    if not pending:
                        return
                    batch, task = pending[0]
                    await task
                    pending.popleft()
                    _append(out, batch, self._early, self.tally)
                    self._advance(sum(item.is_pending for item in batch))
            finally:
                await cancel_all(task for _, task in pending)
                self.tally.early = len(self._early)

    async def _score(self, batch: list[_Item]) -> None:
        pending = [i.line for i in batch if i.is_pending and i.line.number not in self._early]
        for line in pending:
            if line.problem:
                self._early.put(_record(line, failure("invalid_input", line.problem)))
        lines = [line for line in pending if not line.problem]
        await self.client.score(
            [line.sample for line in lines],
            self.job.options,
            priority=self.job.priority,
            batch_size=self.job.batch_size,
            on_result=lambda index, result: self._early.put(_record(lines[index], result)),
        )


def check_output(out: Path, sources: Sequence[Path]) -> None:
    """Raise UserError if the output's ending claims another format, or if it is an input."""
    if out.suffix.lower() in _OTHER_ENDINGS:
        raise UserError(f"{out}: results are JSON lines. Name it .jsonl")
    if any(out.exists() and path.exists() and out.samefile(path) for path in sources):
        raise UserError(f"{out}: the input cannot be the output")


def _start_output(out: BinaryIO, path: Path, description: dict[str, Any]) -> None:
    """Empty the output and start it for this job."""
    out.truncate(0)
    for ending in ("again", "early"):
        _with_suffix(path, ending).unlink(missing_ok=True)
    write_description(path, description)


async def first_info(client: ScoringClient) -> Info:
    """Return `/v1/info`. If nothing listens at any URL, raise at once, not after the deadline.

    A service that is loading is waited for. Raises ServiceUnreachable, RequestError, and UserError
    if two URLs would give different scores."""
    try:
        infos = await client.infos()
    except RequestError as error:
        if not error.retryable:
            raise
        await client.limits()
        infos = await client.infos()
    check_agreement("--url", infos)
    return await client.limits()


def _batches(items: Iterator[_Item], size: int) -> Iterator[list[_Item]]:
    """Yield lists with `size` items to score, and a limited number of items that have a result."""
    batch: list[_Item] = []
    num_pending = 0
    for item in items:
        batch.append(item)
        num_pending += item.is_pending
        if num_pending == size or len(batch) == _MAX_ITEMS_FACTOR * size:
            yield batch
            batch, num_pending = [], 0
    if batch:
        yield batch


def _record(line: Line, result: Result) -> dict[str, Any]:
    """Return a line of the output."""
    record = {"line": line.number, "id": line.id, **result.model_dump(exclude=_EXCLUDED_FIELDS)}
    optional = {"upstream_calls"} if isinstance(result, JudgeScored) else _OPTIONAL_FIELDS
    return {
        name: value for name, value in record.items() if value is not None or name not in optional
    }


def _append(out: BinaryIO, batch: list[_Item], early: EarlyResults, tally: ResultCounts) -> None:
    output_lines = []
    for item in batch:
        if not item.is_pending:
            output_lines.append(item.raw)
            continue
        fields, raw = early.take(item.line.number)
        output_lines.append(raw)
        if item.before is not None:
            tally.add(item.before, -1)
        tally.add(fields)
    out.write(b"".join(output_lines))
    out.flush()


def _results(file: BinaryIO, path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield (line, result) of each complete line; cut off a torn last one. Raises UserError."""
    file.seek(0)
    complete_bytes = 0
    for number, raw in enumerate(file, 1):
        if not raw.endswith(b"\n"):
            break
        try:
            result = from_json(raw)
            ResultCounts().add(result)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(f"{path}: line {number} is not a result. Use --overwrite") from None
        complete_bytes += len(raw)
        yield raw, result
    file.truncate(complete_bytes)


def _is_transient(result: Mapping[str, Any]) -> bool:
    return not result["ok"] and is_transient(result["error"])


def _with_suffix(path: Path, ending: str) -> Path:
    return path.with_name(f"{path.name}.{ending}")


def open_locked(files: ExitStack, path: Path, out: Path | None = None) -> BinaryIO:
    """Open the file to read and append, locked by this process.

    out: the output that is named to the user if another process has the lock; None: the file."""
    file = files.enter_context(path.open("ab+"))
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{out or path}: another process writes it") from None
    return file


#: Seconds between two saves: the most work that a killed run loses.
SAVE_S = 2.0


class EarlyResult(NamedTuple):
    """A line of the output, parsed and as raw bytes."""

    fields: Mapping[str, Any]
    raw: bytes


class EarlyResults:
    """Results that arrived before those of earlier lines, by line number.

    The output has the order of the input. Results that a killed run would lose are saved in
    OUT.early until it is their turn, one JSON line each, as it will be in the output.

    path: file to save them to; None: they are not saved.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._records: dict[int, EarlyResult] = {}
        self._changed = False
        self._on_first: Callable[[], None] | None = None

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, number: int) -> bool:
        return number in self._records

    def when_first(self, act: Callable[[], None]) -> None:
        """Set a function that is called before the first result is added, or at the end."""
        self._on_first = act

    def put(self, fields: Mapping[str, Any]) -> None:
        """Store a result until it is taken.

        fields: with its `line`.
        """
        self._call_on_first()
        self._records[fields["line"]] = EarlyResult(fields, to_json(fields) + b"\n")
        self._changed = True

    def take(self, number: int) -> EarlyResult:
        """Return and remove the result of a line, for the output."""
        return self._records.pop(number)

    def load(self, after: int) -> None:
        """Load what an earlier run saved for the lines after number `after`, but not transient
        errors, which are retried."""
        if self._path is None or not self._path.exists():
            return
        for raw in self._path.read_bytes().splitlines(keepends=True):
            fields = from_json(raw)
            if fields["line"] > after and not _is_transient(fields):
                self._records[fields["line"]] = EarlyResult(fields, raw)

    def save(self) -> None:
        """Write the results if they changed since the last save."""
        if self._changed and self._path is not None:
            self._changed = False
            write_atomic(self._path, b"".join(r.raw for r in self._records.values()), alone=True)

    def finish(self) -> None:
        """Delete the saved results, because the output has them all."""
        self._call_on_first()
        self._records.clear()
        self._changed = False
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    @asynccontextmanager
    async def saving(self) -> AsyncIterator[None]:
        """Save every `SAVE_S` seconds, and at the end of the block, also after an error."""
        timer = asyncio.create_task(self._save_periodically())
        try:
            yield
        finally:
            await cancel_all([timer])
            self.save()

    def _call_on_first(self) -> None:
        act, self._on_first = self._on_first, None
        if act is not None:
            act()

    async def _save_periodically(self) -> None:
        while True:
            await asyncio.sleep(SAVE_S)
            self.save()
