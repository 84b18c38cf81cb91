"""The services of a run: reached, and compared with what the config and the run's past say."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import SecretStr

from scorekit.client import ScoringClient
from scorekit.errors import RequestError, ServiceUnreachable, UserError
from scorekit.files import write_atomic
from scorekit.schemas import Info
from synth.config import SynthConfig, answers_place
from synth.drive.clients import Clients
from synth.folder.answers import open_answers
from synth.folder.stats import StageStats, scorer_figures
from synth.folder.store import StageFolder, read_json, to_line

if TYPE_CHECKING:
    from scorekit.llm import LLMClient

#: The keys of the config that name the services.
METRICX_URL, JUDGE_URL = "metricx.url", "filters.llm_judge.url"
#: Seconds that a scoring service which is loading is waited for.
READY_S = 60.0
#: Seconds without an answer from which on it is told that a service is away; between two looks.
AWAY_S, _LOOK_S = 5.0, 0.5
#: What makes a service another one, whose answers are not to be mixed.
_IDENTITY = ("model", "revision", "tokenizer", "dtype", "max_input_length")


def open_teacher(cfg: SynthConfig, *, patient: bool = True) -> LLMClient:
    """The client of the teacher; its key comes from the environment. patient: it is asked again, as
    the config says."""
    from scorekit.llm import LLMClient

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
        max_attempts=teacher.retry.max_attempts if patient else 1,
        backoff_s=tuple(teacher.retry.backoff_s),
        requests_per_minute=teacher.requests_per_minute,
        strategy=cfg.final_generation.strategy,
        wait_for_server_s=teacher.wait_for_server_s if patient else 0.0,
    )


def check_metricx(cfg: SynthConfig, info: Info) -> None:
    """The service must be what the config expects. Raises UserError."""
    told = cfg.metricx
    if Path(told.checkpoint).name != Path(info.model).name:
        raise UserError(f"metricx.checkpoint is {told.checkpoint}, the service has {info.model}")
    if info.higher_is_better:
        raise UserError(
            f"metricx.url: of {info.model} the higher score is better, and the lowest is taken: "
            "name a MetricX service"
        )
    if told.device is not None and not info.device.startswith(told.device):
        raise UserError(f"metricx.device is {told.device}, the service runs on {info.device}")


def check_judge(cfg: SynthConfig, info: Info) -> None:
    """Rules ask no model, and a rubric that the config names must be there. Raises UserError."""
    model = cfg.filters.llm_judge.model
    if info.model == "rules" and model not in (None, "rules"):
        raise UserError(
            f"filters.llm_judge.model is {model}, but the judge at {cfg.filters.llm_judge.url} is "
            "the rules back end: start it with --backend openai, or leave the model out"
        )
    task = cfg.filters.llm_judge.doubt_task
    if task is not None and task not in (info.tasks or {}):
        raise UserError(
            f"filters.llm_judge.doubt_task: the judge at {cfg.filters.llm_judge.url} has no rubric "
            f"{task!r}. Start it with --backend openai and --rubrics FOLDER, or leave the key out"
        )


async def service_info(client: ScoringClient, key: str, *, patient: bool = True) -> Info:
    """What a service says of itself, once it is ready. key: of its URL in the config. patient: one
    that is away or loading is waited for. Raises UserError where it is not there."""
    try:
        try:
            info = await client.info()
        except (ServiceUnreachable, RequestError) as error:
            if not (patient and error.retryable):
                raise
            info = None
        if patient:
            await client.wait_ready(READY_S)
        return info or await client.info()
    except (ServiceUnreachable, RequestError) as error:
        raise UserError(f"{key}: {error}; start it, or mend the URL") from None


def is_known(folder: StageFolder, name: str, info: Info) -> bool:
    """Whether the stage was begun with this service. Raises UserError where it was with another:
    half of its answers would be of that."""
    before = read_json(folder.service(name))
    if before is None:
        return False
    told = info.model_dump()
    for key in _IDENTITY:
        if before.get(key) != told[key]:
            raise UserError(
                f"{folder.path}: the {name} service's {key} was {before.get(key)}, is {told[key]}; "
                "start the same one again, or give --overwrite"
            )
    return True


def note_service(folder: StageFolder, name: str, info: Info) -> dict[str, Any]:
    """Keep what the service says of itself, for the stage and for the run; what makes it another
    one. Raises as `is_known`."""
    told = info.model_dump()
    if not is_known(folder, name, info):
        folder.path.mkdir(parents=True, exist_ok=True)
        write_atomic(folder.service(name), to_line(told))
    write_atomic(folder.out_dir / f"service-{name}.json", to_line(told))
    return {key: told[key] for key in _IDENTITY}


def _scoring_client(
    urls: str | list[str], batch_size: int, cache_db: Path | None = None
) -> ScoringClient:
    return ScoringClient(
        urls,
        batch_size=batch_size,
        max_in_flight=16,
        cache_db=cache_db,
        retry_samples=False,  # `Clients` does
    )


class Absences:
    """Tells of a service that has not answered for `AWAY_S`, and that it does again: it is waited
    for, some minutes long, and the tries are in the log alone."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        """tell: called with each line."""
        self._tell = tell
        self._services: dict[str, tuple[ScoringClient | LLMClient, float]] = {}
        self._since: dict[str, float] = {}
        self._told: set[str] = set()

    def mind(self, name: str, service: ScoringClient | LLMClient, patience_s: float) -> None:
        """Look at this one, too. patience_s: how long it is asked again."""
        self._services[name] = service, patience_s

    async def watch(self) -> None:
        """Look again and again."""
        while True:
            self.look()
            await asyncio.sleep(_LOOK_S)

    def look(self) -> None:
        """Tell what is new."""
        now = time.monotonic()
        for name, (service, patience_s) in self._services.items():
            if not service.away:
                self._since.pop(name, None)
                if name in self._told:
                    self._told.remove(name)
                    self._tell(f"{name} answers again")
            elif now - self._since.setdefault(name, now) >= AWAY_S and name not in self._told:
                self._told.add(name)
                self._tell(f"{name} does not answer: it is asked again, for {patience_s:g} s")


@contextmanager
def watching(tell: Callable[[str], None]) -> Iterator[Absences]:
    """Absences that are looked for until the block ends."""
    absences = Absences(tell)
    watch = asyncio.create_task(absences.watch())
    try:
        yield absences
    finally:
        watch.cancel()


@asynccontextmanager
async def open_clients(
    cfg: SynthConfig,
    uses: frozenset[str],
    folder: StageFolder,
    stats: StageStats,
    give_up: bool = False,
    tell: Callable[[str], None] = lambda line: None,
) -> AsyncIterator[Clients]:
    """Connect and check what is there against the config, before anything is spent; and
    against what the stage, if it is resumed, was begun with. give_up: what a service still
    does not answer is a failure for good. tell: of a service that goes away, and is back. Raises
    UserError."""
    async with AsyncExitStack() as stack:
        teacher = metricx = judge = None
        absences = stack.enter_context(watching(tell))
        identities = {}
        before: dict[str, float] = {}
        if "teacher" in uses:
            teacher = await stack.enter_async_context(open_teacher(cfg))
            stats.teacher = teacher.counts  # they go on counting
            absences.mind("the teacher", teacher, cfg.teacher.wait_for_server_s)
            await teacher.check()
        if "metricx" in uses:
            of = cfg.metricx
            client = _scoring_client(of.url, of.batch_size, cache_db=of.cache_db)
            metricx = await stack.enter_async_context(client)
            info = await service_info(metricx, METRICX_URL)
            check_metricx(cfg, info)
            absences.mind("MetricX", metricx, metricx.deadline_s)
            identities["metricx"] = note_service(folder, "metricx", info)
            before = await asyncio.to_thread(scorer_figures, cfg.metricx.url, {})
        if "judge" in uses:
            client = _scoring_client(cfg.filters.llm_judge.url, 16)
            judge = await stack.enter_async_context(client)
            info = await service_info(judge, JUDGE_URL)
            check_judge(cfg, info)
            absences.mind("the judge", judge, judge.deadline_s)
            identities["judge"] = note_service(folder, "judge", info)
        answers = open_answers(answers_place(cfg))
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
            absences.look()
            stats.damaged_answers = answers.damaged
            if metricx is not None:
                stats.scorer = await asyncio.to_thread(scorer_figures, cfg.metricx.url, before)
