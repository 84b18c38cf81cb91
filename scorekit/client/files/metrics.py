"""Metrics that are named on the command line (`--metric NAME=URL`), and their services."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scorekit.client.asynchronous import ScoringClient
from scorekit.client.files.score_file import first_info
from scorekit.errors import UserError
from scorekit.net.loops import gather_or_cancel
from scorekit.schemas import Info

#: Longest name in bytes, so that it fits into the names of files.
_MAX_NAME_BYTES = 150


@dataclass(frozen=True)
class MetricSource:
    """A metric.

    name: of its scores.
    target: URL or file.
    task: of a judge.
    """

    name: str
    target: str
    task: str | None = None

    @property
    def is_service(self) -> bool:
        """Return True if the target is a service, False if it is a file."""
        return self.target.startswith(("http://", "https://"))


@dataclass(frozen=True)
class ServedMetric:
    """A metric whose service answers."""

    source: MetricSource
    client: ScoringClient
    info: Info

    @property
    def higher_is_better(self) -> bool:
        """Return the direction of its scores."""
        return self.info.higher_is_better_in(self.source.task)


def parse_metric(text: str, *, files: bool = True) -> MetricSource:
    """Parse NAME=URL, NAME=URL#task or, with `files`, NAME=FILE. Raises UserError."""
    name, equals, target = text.partition("=")
    name = name.strip()
    if not (name and equals and target.strip()):
        forms = "NAME=URL, NAME=URL#task or NAME=FILE" if files else "NAME=URL or NAME=URL#task"
        raise UserError(f"--metric {text}: write {forms}")
    task = None
    if target.startswith(("http://", "https://")):
        target, _, task = target.partition("#")
    elif not files:
        raise UserError(f"--metric {name}: {target} is no http URL")
    elif not Path(target).is_file():
        raise UserError(f"--metric {name}: {target} is neither an http URL nor a file")
    if any(letter in name for letter in "/\\\0") or name.startswith("."):
        raise UserError(
            f"--metric {name}: a name is part of a file's name: no / and no leading dot"
        )
    if len(name.encode()) > _MAX_NAME_BYTES:
        raise UserError(f"--metric {name[:20]}...: a name is part of a file's name: shorten it")
    return MetricSource(name, target.strip(), task or None)


@asynccontextmanager
async def connected(
    sources: Sequence[MetricSource], **settings: Any
) -> AsyncIterator[list[ServedMetric]]:
    """Yield the metrics, in order, once every service has said what it is.

    settings: of each ScoringClient. Raises UserError for a service that is not what its source
    says, and what `first_info` raises."""
    async with AsyncExitStack() as stack:
        clients = [
            await stack.enter_async_context(ScoringClient(source.target, **settings))
            for source in sources
        ]
        infos = await gather_or_cancel(map(first_info, clients))
        for source, info in zip(sources, infos, strict=True):
            _check_task(source, info)
        yield list(map(ServedMetric, sources, clients, infos))


def _check_task(source: MetricSource, info: Info) -> None:
    if (info.service == "judge") != (source.task is not None):
        advice = (
            "name its task: NAME=URL#mqm" if source.task is None else "leave out #" + source.task
        )
        raise UserError(f"--metric {source.name}: the service is {info.service}: {advice}")
    if source.task is not None and info.tasks is not None and source.task not in info.tasks:
        valid_tasks = ", ".join(sorted(info.tasks))
        raise UserError(
            f"--metric {source.name}: the judge has no task {source.task}; it has {valid_tasks}"
        )


def check_references(
    metrics: Sequence[ServedMetric], missing: int, total: int, remedy: str
) -> None:
    """Raise UserError, with the remedy, for a metric that needs the references that are missing."""
    for metric in metrics:
        if missing and (metric.info.inputs or {}).get("ref") == "required":
            raise UserError(
                f"--metric {metric.source.name}: requires references, but {missing:,} of {total:,} "
                f"translations have none: {remedy}"
            )
