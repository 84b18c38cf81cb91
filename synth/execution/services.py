"""Connect to the services of a run, and compare them with the config and the run's earlier
state."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from scorekit.client import ScoringClient
from scorekit.errors import RequestError, ServiceUnreachable, UserError
from scorekit.files import write_atomic
from scorekit.llm import LLMClient
from scorekit.paid.store import open_store
from scorekit.schemas import Info
from synth.config import ANSWERS, SynthConfig, answers_place
from synth.execution.clients import Clients
from synth.storage.stats import StageStats, scorer_stats
from synth.storage.store import StageFolder, read_json, to_line

#: Config keys with the services' URLs.
METRICX_URL, JUDGE_URL = "metricx.url", "filters.llm_judge.url"
#: Seconds to wait for a scoring service that is loading.
READY_S = 60.0
#: Seconds without an answer before an outage is reported; seconds between two checks.
AWAY_S, _CHECK_S = 5.0, 0.5
#: Fields that identify a service. Answers of different services must not be mixed.
_IDENTITY = ("model", "revision", "tokenizer", "dtype", "max_input_length")


def open_teacher(cfg: SynthConfig, *, should_wait: bool = True) -> LLMClient:
    """Return the teacher's client; its key comes from the environment.

    should_wait: retry as configured."""
    teacher = cfg.teacher
    key = os.environ.get(teacher.api_key_env)
    return LLMClient(
        teacher.base_url,
        teacher.model,
        api_key=SecretStr(key) if key else None,
        request_timeout_s=teacher.request_timeout_s,
        connect_timeout_s=teacher.connect_timeout_s,
        max_concurrency=teacher.max_concurrency,
        max_sequences=teacher.max_sequences,
        max_attempts=teacher.retry.max_attempts if should_wait else 1,
        backoff_s=tuple(teacher.retry.backoff_s),
        requests_per_minute=teacher.requests_per_minute,
        strategy=cfg.final_generation.strategy,
        wait_for_server_s=teacher.wait_for_server_s if should_wait else 0.0,
    )


def check_metricx(cfg: SynthConfig, info: Info) -> None:
    """Raise UserError unless the service is what the config expects."""
    section = cfg.metricx
    if Path(section.checkpoint).name != Path(info.model).name:
        raise UserError(
            f"metricx.checkpoint is {section.checkpoint}, the service has {info.model}. "
            "Set the key to the model that you mean, or metricx.url to a service that has it"
        )
    if info.higher_is_better:
        raise UserError(
            f"metricx.url: higher scores of {info.model} are better, but the lowest is selected. "
            "Name a MetricX service"
        )
    if section.device is not None and not info.device.startswith(section.device):
        raise UserError(f"metricx.device is {section.device}, the service runs on {info.device}")


def check_judge(cfg: SynthConfig, info: Info) -> None:
    """Raise UserError if the judge lacks the model or the rubric that the config names."""
    model = cfg.filters.llm_judge.model
    if info.model == "rules" and model not in (None, "rules"):
        raise UserError(
            f"filters.llm_judge.model is {model}, but the judge at {cfg.filters.llm_judge.url} is "
            "the rules backend. Start it with --backend openai, or leave the model out"
        )
    task = cfg.filters.llm_judge.doubt_task
    if task is not None and task not in (info.tasks or {}):
        raise UserError(
            f"filters.llm_judge.doubt_task: the judge at {cfg.filters.llm_judge.url} has no rubric "
            f"{task!r}. Start it with --backend openai and --rubrics FOLDER, or leave the key out"
        )


async def service_info(client: ScoringClient, key: str, *, should_wait: bool = True) -> Info:
    """Return a service's info once it is ready.

    key: config key of its URL.
    should_wait: wait for a service that is down or loading.
    Raises UserError if it cannot be reached."""
    try:
        try:
            info = await client.info()
        except (ServiceUnreachable, RequestError) as error:
            if not (should_wait and error.retryable):
                raise
            info = None
        if should_wait:
            await client.wait_ready(READY_S)
        return info or await client.info()
    except (ServiceUnreachable, RequestError) as error:
        raise UserError(f"{key}: {error}. Start it, or correct the URL") from None


def is_known(folder: StageFolder, name: str, info: Info) -> bool:
    """Return True if the stage was started with this service, False if with none yet.

    Raises UserError if it was started with another one, to avoid mixed answers."""
    before = read_json(folder.service(name))
    if before is None:
        return False
    fields = info.model_dump()
    for key in _IDENTITY:
        if before.get(key) != fields[key]:
            raise UserError(
                f"{folder.path}: the {name} service's {key} was {before.get(key)}, "
                f"is {fields[key]}. Start the same one again, or give --overwrite"
            )
    return True


def pin_service_info(folder: StageFolder, name: str, info: Info) -> dict[str, Any]:
    """Store the service's info for the stage and the run; return its identity fields.

    Raises as `is_known`."""
    fields = info.model_dump()
    if not is_known(folder, name, info):
        folder.path.mkdir(parents=True, exist_ok=True)
        write_atomic(folder.service(name), to_line(fields))
    write_atomic(folder.out_dir / f"service-{name}.json", to_line(fields))
    return {key: fields[key] for key in _IDENTITY}


_scoring_client = partial(ScoringClient, max_in_flight=16, retry_samples=False)  # `Clients` does


class OutageReporter:
    """Reports a service that has not answered for `AWAY_S`, and its return.

    The clients retry for some minutes, and log the retries only.
    print_line: called with each line."""

    def __init__(self, print_line: Callable[[str], None]) -> None:
        self._print_line = print_line
        self._services: dict[str, tuple[ScoringClient | LLMClient, float]] = {}
        self._since: dict[str, float] = {}
        self._reported: set[str] = set()

    def watch_service(
        self, name: str, service: ScoringClient | LLMClient, patience_s: float
    ) -> None:
        """Watch a service, too.

        patience_s: how long its client retries.
        """
        self._services[name] = service, patience_s

    async def watch(self) -> None:
        """Check all services repeatedly."""
        while True:
            self.check_outages()
            await asyncio.sleep(_CHECK_S)

    def check_outages(self) -> None:
        """Report services that went down or came back."""
        now = time.monotonic()
        for name, (service, patience_s) in self._services.items():
            if not service.away:
                self._since.pop(name, None)
                if name in self._reported:
                    self._reported.remove(name)
                    self._print_line(f"{name} answers again")
            elif now - self._since.setdefault(name, now) >= AWAY_S and name not in self._reported:
                self._reported.add(name)
                self._print_line(f"{name} does not answer: it is asked again, for {patience_s:g} s")


@contextmanager
def watching(print_line: Callable[[str], None]) -> Iterator[OutageReporter]:
    """Watch for outages until the block ends."""
    outages = OutageReporter(print_line)
    watch = asyncio.create_task(outages.watch())
    try:
        yield outages
    finally:
        watch.cancel()


@asynccontextmanager
async def open_clients(
    cfg: SynthConfig,
    uses: frozenset[str],
    folder: StageFolder,
    stats: StageStats,
    give_up: bool = False,
    print_line: Callable[[str], None] = lambda line: None,
) -> AsyncIterator[Clients]:
    """Connect to the services, and check them against the config and a resumed stage.

    give_up: a missing answer is a permanent failure.
    print_line: called with lines about outages.

    Raises UserError."""
    async with AsyncExitStack() as stack:
        teacher = metricx = judge = None
        outages = stack.enter_context(watching(print_line))
        identities = {}
        before: dict[str, float] = {}
        if "teacher" in uses:
            teacher = await stack.enter_async_context(open_teacher(cfg))
            stats.teacher = teacher.counts  # the client keeps updating them
            outages.watch_service("the teacher", teacher, cfg.teacher.wait_for_server_s)
            await teacher.check()
        if "metricx" in uses:
            metricx_cfg = cfg.metricx
            client = _scoring_client(
                metricx_cfg.url, batch_size=metricx_cfg.batch_size, cache_db=metricx_cfg.cache_db
            )
            metricx = await stack.enter_async_context(client)
            info = await service_info(metricx, METRICX_URL)
            check_metricx(cfg, info)
            outages.watch_service("MetricX", metricx, metricx.deadline_s)
            identities["metricx"] = pin_service_info(folder, "metricx", info)
            before = await asyncio.to_thread(scorer_stats, cfg.metricx.url, {})
        if "judge" in uses:
            client = _scoring_client(cfg.filters.llm_judge.url, batch_size=16)
            judge = await stack.enter_async_context(client)
            info = await service_info(judge, JUDGE_URL)
            check_judge(cfg, info)
            outages.watch_service("the judge", judge, judge.deadline_s)
            identities["judge"] = pin_service_info(folder, "judge", info)
        answers = open_store(answers_place(cfg), ANSWERS)
        stack.push_async_callback(answers.close)
        try:
            yield Clients(
                cfg,
                stats,
                answers,
                teacher,
                metricx,
                judge,
                identities=identities,
                give_up=give_up,
            )
        finally:
            outages.check_outages()
            stats.damaged_answers = answers.damaged
            if metricx is not None:
                stats.scorer = await asyncio.to_thread(scorer_stats, cfg.metricx.url, before)
