"""The services of a definition: what is sent, what is read of an answer, and common requests.

Samples of many callers go to one service in the same requests. A class of this process scores one
call after another.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

from scorekit.client import ScoringClient
from scorekit.client.deduplication import failure
from scorekit.client.sync import resolve_scorer
from scorekit.client.transport import is_retryable
from scorekit.config import check_config
from scorekit.errors import (
    ModelChanged,
    RequestError,
    ScorekitError,
    ServiceUnreachable,
    UserError,
)
from scorekit.net.loops import cancel_all, gather_or_cancel
from scorekit.net.retry import Deadline
from scorekit.rewards.definition import (
    LIST_FIELDS,
    ComponentConfig,
    RewardDefinition,
    ServiceRequest,
)
from scorekit.rewards.results import STATUSES, ComponentResult, component_result, missing_component
from scorekit.schemas import (
    Failed,
    Info,
    JudgeOptions,
    JudgeScored,
    MetricXOptions,
    Options,
    Result,
    RewardOptions,
    Scored,
    XCometOptions,
)
from scorekit.scorers import SampleForScoring, Scorer, ScoringConfig

#: A source that is refused with this translation is refused with any.
SHORTEST = "."
#: The options of each kind of service. Another kind checks its own.
_OPTIONS: dict[str, type[Options]] = {
    "metricx": MetricXOptions,
    "xcomet": XCometOptions,
    "judge": JudgeOptions,
    "reward_model": RewardOptions,
}
#: The judge's task that marks errors; it has languages in place of a rubric's variables.
_MQM = "mqm"
LANGUAGES = ("src_lang", "tgt_lang")
_MQM_VARIABLES = {name: name for name in ("src", "mt", *LANGUAGES)}


def request_key(request: ServiceRequest) -> str:
    """Return a key that is equal for requests that get the same answer.

    `model` and `tokenizer` only say what must run there, and a slash at a URL's end changes
    nothing."""
    values = request.model_dump(mode="json", exclude={"model", "tokenizer"})
    values["service"] = [url.rstrip("/") for url in request.service or ()]
    return json.dumps(values, sort_keys=True)


def fields_of_request(request: ServiceRequest) -> dict[str, str]:
    """Return what a request sends of a sample: each variable, and the sample's field."""
    reference = {"ref": "ref"} if request.reference else {}
    if request.task is None:
        languages = {name: name for name in LANGUAGES} if request.languages else {}
        return {"src": "src", "mt": "mt"} | reference | languages
    return dict(request.variables) if request.variables else _MQM_VARIABLES | reference


def request_body(
    key: str, request: ServiceRequest, sample: Mapping[str, Any]
) -> tuple[dict[str, Any] | None, str]:
    """Return the body of a sample's request, or None and the name of the field that it lacks."""
    names = fields_of_request(request)
    body = {"task": request.task} if request.task is not None else {}
    for variable, name in names.items():
        value = sample.get(name)
        if value is None or (value == "" and name not in ("src", "mt")):
            return None, name
        if not isinstance(value, str):
            raise UserError(
                f"{key}: the sample's field {name!r} is {type(value).__name__}. Give it as text"
            )
        body[variable] = value
    return body, ""


def check_request(key: str, request: ServiceRequest, info: Info) -> None:
    """Raise UserError if a service does not fit a request.

    key: of the component's config.
    """
    url = (request.service or ("",))[0]
    check_model(key, request, info)
    if info.service in _OPTIONS:
        check_config(_OPTIONS[info.service], request.options, f"{key}.options")
    is_judge = info.service == "judge"
    if is_judge != (request.task is not None):
        hint = "Name a task" if is_judge else "Remove task"
        raise UserError(f"{key}.task: {url} is a {info.service} service. {hint}")
    if request.task is not None:
        tasks = info.tasks or {}
        if request.task == _MQM and tasks and _MQM not in tasks:
            raise UserError(f"{key}.task: the judge at {url} has no task mqm. Choose a rubric")
        if request.task != _MQM and not request.variables:
            raise UserError(f"{key}.variables: required. Name the variables of the rubric")


def check_model(key: str, request: ServiceRequest, described: Any) -> None:
    """Raise UserError if a service or a scorer runs another model than a request names.

    described: an Info, or the description of a scorer.
    key: of the component's config.
    """
    target = request.scorer or (request.service or ("",))[0]
    for name in ("model", "tokenizer"):
        expected, actual = getattr(request, name), getattr(described, name)
        if expected is not None and expected != actual:
            raise UserError(
                f"{key}.{name}: {target} runs {actual!r}, not {expected!r}. Correct one of them"
            )
    inputs = getattr(described, "inputs", None) or {}
    if inputs.get("ref") == "required" and not request.reference:
        raise UserError(f"{key}.reference: {described.model} needs references. Set it to true")
    if needs_languages(inputs) and request.task is None and not request.languages:
        raise UserError(f"{key}.languages: {described.model} needs languages. Set it to true")


def needs_languages(inputs: Mapping[str, str] | None) -> bool:
    """Return whether a service requires languages.

    inputs: of its /v1/info.
    """
    return any((inputs or {}).get(name) == "required" for name in LANGUAGES)


def check_direction(key: str, config: ComponentConfig, described: Any) -> None:
    """Raise UserError if the reward would rise where the service's score gets worse.

    No service says whether a high value of a label is good.
    """
    factor = config.weight * config.scale
    if config.label is not None:
        return
    if config.field == "score" and isinstance(described, Info):
        is_higher_better = described.higher_is_better_in(config.task)
    elif config.field == "score":
        is_higher_better = described.higher_is_better
    elif config.field == "pass":
        is_higher_better = True
    elif config.field in LIST_FIELDS and not config.severity_weights:
        is_higher_better = False
    else:
        return
    if factor and (factor > 0) != is_higher_better:
        direction = "higher" if is_higher_better else "lower"
        target = config.scorer or described.service
        raise UserError(
            f"{key}: {direction} values of `{config.field}` are better at {target}, but "
            f"weight * scale is {factor:g}. Change the sign of `scale`"
        )


def checks(definition: RewardDefinition, names: list[str], info: Info) -> None:
    """Raise UserError if a service does not fit one of these components."""
    for name in names:
        config = definition.components[name]
        check_request(f"components.{name}", config, info)
        check_direction(f"components.{name}", config, info)


#: A text and its translation, to ask before a run whether a service can do what is asked of it.
_PROBE = {
    "src": "Good morning.",
    "mt": "Guten Morgen.",
    "ref": "Guten Morgen.",
    "src_lang": "en",
    "tgt_lang": "de",
}


def probe_body(key: str, request: ServiceRequest) -> dict[str, Any] | None:
    """Return the body of a sample to ask before a run; None if it needs a field of the user's."""
    return request_body(key, request, _PROBE)[0]


def check_answer(
    key: str, config: ComponentConfig, result: Result, marks: Sequence[str] = ()
) -> None:
    """Raise UserError if the answer of `probe_body` shows that a service cannot be used.

    marks: error_spans or omissions, where these reward tokens. A metric that fails may be loading:
    only a judge that refuses a task says that it has no such task.
    """
    target = config.scorer or ", ".join(config.service or ())
    if isinstance(result, Failed):
        if config.task is not None:
            reason = f"{result.error.type}: {result.error.message}"
            hint = "Correct the task, or its variables"
            if result.error.retryable:  # its LLM does not answer now
                hint = "Start again when it answers"
            raise UserError(
                f"{key}: {target} has no answer of the task {config.task!r} ({reason}). {hint}"
            )
        return
    for field in marks:
        if getattr(result, field, None) is None:
            raise UserError(
                f"{key}: {target} marks no {field.replace('_', ' ')}. Name one that does (xcomet, "
                "or a judge with task mqm), or take it out of token_rewards"
            )
    raw, reason = _value(config, result)
    if raw is None and config.label is not None:
        raise UserError(f"{key}.label: {target}: {reason}. Choose another one")
    if raw is None and "severity_weights" not in reason:
        raise UserError(f"{key}.field: {target}: {reason}. Choose another field")


def service_component(config: ComponentConfig, result: Result) -> ComponentResult:
    """Return the component that a service's result gives."""
    if isinstance(result, Failed):
        error = result.error
        status = error.type if error.type in STATUSES else "upstream"
        message = f"{error.message}" if status == error.type else f"{error.type}: {error.message}"
        return missing_component(
            config, status, message, is_transient=error.retryable, answer=result
        )
    raw, reason = _value(config, result)
    if raw is None:
        return missing_component(config, "no_value", reason, answer=result)
    return component_result(raw, config, result)


def _value(config: ComponentConfig, result: Scored | JudgeScored) -> tuple[float | None, str]:
    """Return the value of the component's field or label, or None and the reason."""
    if config.label is not None:
        labels = getattr(result, "labels", None) or {}
        if config.label in labels:
            return labels[config.label], ""
        names = ", ".join(labels) or "none"
        return None, f"the answer has no label {config.label!r}; there are {names}"
    if config.field == "score":
        return result.score, ""
    if config.field == "pass":
        if isinstance(result, JudgeScored):
            return float(result.verdict.passed), ""
        return None, "the answer has no verdict"
    value = getattr(result, config.field, None)
    if value is None:
        return None, f"the answer has no {config.field}"
    if config.field == "mt_covered":
        return float(value), ""
    if not config.severity_weights:
        return float(len(value)), ""
    weights = {severity.upper(): weight for severity, weight in config.severity_weights.items()}
    unknown = sorted({entry.severity for entry in value} - weights.keys())
    if unknown:
        return None, f"severity_weights: no weight of {', '.join(unknown)}"
    return sum((weights[entry.severity] for entry in value), 0.0), ""


log = logging.getLogger(__name__)
#: Seconds that a sample waits for those of other callers before it is sent.
_GATHER_S = 0.005
#: Requests that may be spent to find the samples for which a request fails.
_MAX_SPLITS = 32
#: Least seconds of a request.
_SHORTEST_S = 0.05
#: Statuses that no sample causes: a wrong URL or key.
_CONFIG_STATUS = frozenset({401, 403, 404, 405, 415})

Body = Mapping[str, Any]


@dataclass(eq=False, slots=True)
class _Entry:
    body: Body
    future: asyncio.Future[Result]


class AnsweringService(Protocol):
    """Answers the requests of one or several components, in one event loop."""

    async def check(self, wait_s: float | None = None) -> Info | None:
        """Return what it is, checked; None: it does not say."""

    def submit(self, bodies: Sequence[Body]) -> list[asyncio.Future[Result]]:
        """Return the future results of a call's samples."""

    async def close(self) -> None:
        """Cancel what is in flight, and close what is open."""


class BatchedService:
    """One service, to which the samples of all callers go in common requests.

    options: of every request.
    check: raises UserError if the service does not fit; called with its /v1/info until it passes
    once.

    shared_s: seconds for a request of several samples with its retries. Then each sample without an
    answer is requested alone, in the time that the client's deadline leaves. None: the samples of a
    call go in requests of their own, and so are scored with the same ones whenever they are sent.

    A common request that fails for some of its samples is split until these are alone, so that no
    caller loses a reward to another caller's text. Use it in one event loop.
    """

    def __init__(
        self,
        client: ScoringClient,
        options: Mapping[str, Any],
        check: Callable[[Info], None],
        *,
        batch_size: int,
        max_in_flight: int,
        shared_s: float | None,
    ) -> None:
        self._shared_s = shared_s
        self._client, self._options, self._check = client, dict(options), check
        self._batch_size = batch_size
        self._slots = asyncio.Semaphore(max_in_flight)
        self._pending: deque[_Entry] = deque()
        self._sender: asyncio.Task[None] | None = None
        self._requests: set[asyncio.Task[None]] = set()
        self._is_checked = False

    async def close(self) -> None:
        """Cancel what is in flight and close the connections."""
        sender = [self._sender] if self._sender is not None else []
        await cancel_all([*self._requests, *sender])
        for entry in self._pending:
            entry.future.cancel()
        await self._client.close()

    async def check(self, wait_s: float | None = None) -> Info:
        """Return /v1/info, checked. Raises UserError, ServiceUnreachable, RequestError.

        wait_s: seconds to wait until all URLs are ready; None: they are not asked."""
        if wait_s is not None:
            await self._client.wait_ready(wait_s)
        info = await self._client.limits()
        if not self._is_checked:
            self._check(info)
            self._is_checked = True
        return info

    def submit(self, bodies: Sequence[Body]) -> list[asyncio.Future[Result]]:
        """Return the future results of a call's samples. A failure is a result, too.

        A future raises UserError, RequestError or ServiceUnreachable if the service does not fit
        the definition, refuses the key, or runs another model than before. Cancel it if nobody
        waits: a request for which nobody waits is cancelled, too.
        """
        loop = asyncio.get_running_loop()
        entries = [_Entry(body, loop.create_future()) for body in bodies]
        if self._shared_s is None:
            if entries:
                self._start(entries)
        else:
            self._pending += entries
            if self._sender is None or self._sender.done():
                self._sender = asyncio.create_task(self._send_pending())
        return [entry.future for entry in entries]

    async def _send_pending(self) -> None:
        await asyncio.sleep(_GATHER_S)
        while self._pending:
            await self._slots.acquire()
            batch = self._take_batch()
            if not batch:  # their callers gave up
                self._slots.release()
                continue
            self._start(batch).add_done_callback(lambda _: self._slots.release())

    def _start(self, batch: list[_Entry]) -> asyncio.Task[None]:
        request = asyncio.create_task(self._answer(batch))
        self._requests.add(request)
        request.add_done_callback(self._finish)
        for entry in batch:
            entry.future.add_done_callback(partial(_cancel_unwanted, request, batch))
        return request

    def _finish(self, request: asyncio.Task[None]) -> None:
        self._requests.discard(request)
        if not request.cancelled() and (error := request.exception()) is not None:
            log.error("a request for rewards failed", exc_info=error)

    def _take_batch(self) -> list[_Entry]:
        batch: list[_Entry] = []
        while self._pending and len(batch) < self._batch_size:
            entry = self._pending.popleft()
            if not entry.future.done():
                batch.append(entry)
        return batch

    async def _answer(self, batch: list[_Entry]) -> None:
        """Set the result of each entry, or the error that concerns all."""
        try:
            await self.check()
            if self._shared_s is None:
                await self._score_call(batch)
            else:
                await self._score(batch, [_MAX_SPLITS], Deadline(self._client.deadline_s))
        except asyncio.CancelledError:
            for entry in batch:
                entry.future.cancel()
            raise
        except Exception as error:
            is_outage = is_retryable(error)
            if self._shared_s is None:  # its caller goes on, and asks again
                is_outage |= isinstance(error, ServiceUnreachable)
            for entry in batch:
                if entry.future.done():
                    continue
                if is_outage:
                    entry.future.set_result(failed_request(error))
                else:
                    entry.future.set_exception(error)

    async def _score_call(self, batch: list[_Entry]) -> None:
        bodies = [entry.body for entry in batch]
        results = await self._client.score(bodies, self._options)
        for entry, result in zip(batch, results, strict=True):
            if not entry.future.done():
                entry.future.set_result(result)

    async def _score(self, batch: list[_Entry], splits_left: list[int], deadline: Deadline) -> None:
        """Score entries, in halves where a request fails for a reason that a sample may cause.

        If entries have failed for the moment at the end of the time that they share, each is
        requested alone, all at once."""
        batch = [entry for entry in batch if not entry.future.done()]
        if not batch:
            return
        bodies = [entry.body for entry in batch]
        limit_s = deadline.remaining_s()
        if len(batch) > 1 and self._shared_s is not None:
            limit_s = min(limit_s, self._shared_s)
        try:
            results: Sequence[Result] = await self._client.score(
                bodies, self._options, deadline_s=max(limit_s, _SHORTEST_S)
            )
        except ModelChanged:
            raise
        except (RequestError, ServiceUnreachable) as error:
            if isinstance(error, RequestError) and error.status in _CONFIG_STATUS:
                raise
            if is_retryable(error) or len(batch) == 1 or splits_left[0] < 2:
                results = [failed_request(error)] * len(batch)
            else:
                splits_left[0] -= 2
                middle = len(batch) // 2
                # At once: a sample that hangs in one half takes no time from the other.
                halves = (batch[:middle], batch[middle:])
                await gather_or_cancel(self._score(h, splits_left, deadline) for h in halves)
                return
        may_retry = len(batch) > 1 and deadline.remaining_s() > _SHORTEST_S
        alone = []
        for entry, result in zip(batch, results, strict=True):
            if may_retry and isinstance(result, Failed) and result.error.retryable:
                alone.append(entry)
            elif not entry.future.done():
                entry.future.set_result(result)
        await gather_or_cancel(self._score([entry], splits_left, deadline) for entry in alone)


def _cancel_unwanted(
    request: asyncio.Task[None], batch: Sequence[_Entry], _: asyncio.Future[Result]
) -> None:
    """Cancel a request if nobody waits for an answer that it lacks."""
    futures = [entry.future for entry in batch]
    if all(future.done() for future in futures) and any(future.cancelled() for future in futures):
        request.cancel()


def failed_request(error: Exception) -> Failed:
    """Return the failed result of a request that failed after its retries.

    A later request may succeed, unless the service has refused this one (4xx)."""
    failed = failure("upstream", str(error))
    is_transient = is_retryable(error) or isinstance(error, ServiceUnreachable)
    wire_error = failed.error.model_copy(update={"retryable": is_transient})
    return failed.model_copy(update={"error": wire_error})


#: Largest number of scores that a class of this process has cached; the least recently used go.
_MAX_CACHED = 16_384


class InProcessService:
    """A scorer of this process (`scorer: module:Class`), which answers one call after another.

    It runs in a thread of its own, because a model may not support two callers. The thread begins
    with the first samples, and is a daemon, so that it does not delay a Ctrl-C. Its scores are
    cached unless `options` say otherwise, and equal samples of a call are scored once.

    key: of the component's config.
    check: as of BatchedService, with the scorer's `description`.
    Raises UserError if the class cannot be loaded, is no scorer or refuses its arguments, or if it
    does not fit.
    """

    def __init__(
        self, key: str, request: ServiceRequest, check: Callable[[Any], None], *, batch_size: int
    ) -> None:
        options = {"batch_size": batch_size, **request.options}
        self._options = check_config(ScoringConfig, options, f"{key}.options")
        try:
            self._scorer: Scorer = resolve_scorer(request.scorer or "", **request.arguments)
        except UserError as error:
            raise UserError(f"{key}.scorer: {error}") from None
        #: Its description of itself, if it has one.
        self.description = getattr(self._scorer, "description", None)
        if self.description is not None:
            check(self.description)
        elif request.model is not None or request.tokenizer is not None:
            name = "tokenizer" if request.model is None else "model"
            raise UserError(f"{key}.{name}: {request.scorer} does not describe itself. Remove it")
        self._cache: OrderedDict[SampleForScoring, Scored] = OrderedDict()  # the thread's
        self._work: SimpleQueue[Any] = SimpleQueue()
        self._has_thread = False

    async def close(self) -> None:
        """End the thread after everything that was submitted."""
        self._work.put(None)

    async def check(self, wait_s: float | None = None) -> Any:
        """Return the scorer's description of itself; None: it has none."""
        return self.description

    def submit(self, bodies: Sequence[Body]) -> list[asyncio.Future[Result]]:
        """Return the future results of a call's samples. They raise what the scorer raises.

        ScorekitError in place of what is no error of a call, as SystemExit."""
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Result]] = [loop.create_future() for _ in bodies]
        if bodies:
            self._work.put((loop, futures, [SampleForScoring(**body) for body in bodies]))
            if not self._has_thread:
                self._has_thread = True
                threading.Thread(target=self._run, name="scorer", daemon=True).start()
        return futures

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            loop, futures, samples = work
            if all(future.cancelled() for future in futures):
                continue
            results: Sequence[Result] = []
            error: Exception | None = None
            try:
                results = self._score(samples)
            except BaseException as raised:
                error = _error_of_call(raised)
            with suppress(RuntimeError):  # the loop was closed meanwhile
                loop.call_soon_threadsafe(_deliver, futures, results, error)

    def _score(self, samples: Sequence[SampleForScoring]) -> list[Result]:
        if not self._options.cache:
            return self._score_batch(samples)
        results: dict[SampleForScoring, Result] = {}
        missing = []
        for sample in dict.fromkeys(samples):
            if sample in self._cache:
                self._cache.move_to_end(sample)
                results[sample] = self._cache[sample]
            else:
                missing.append(sample)
        for sample, result in zip(missing, self._score_batch(missing), strict=True):
            results[sample] = result
            if isinstance(result, Scored):
                self._cache[sample] = result.model_copy(update={"cached": True})
        while len(self._cache) > _MAX_CACHED:
            self._cache.popitem(last=False)
        return [results[sample] for sample in samples]

    def _score_batch(self, samples: Sequence[SampleForScoring]) -> list[Result]:
        results = self._scorer.score_batch(samples, self._options).metadata if samples else []
        if len(results) != len(samples):
            raise ScorekitError(
                f"the scorer returned {len(results)} results for {len(samples)} samples"
            )
        return list(results)


def _error_of_call(raised: BaseException) -> Exception:
    """Return what a future can raise: with SystemExit the loop would end, and every call hang."""
    if isinstance(raised, Exception) and not isinstance(raised, StopIteration):
        return raised
    return ScorekitError(f"the scorer raised {type(raised).__name__}: {raised}")


def _deliver(
    futures: Sequence[asyncio.Future[Result]],
    results: Sequence[Result],
    error: Exception | None,
) -> None:
    for index, future in enumerate(futures):
        if future.done():
            continue
        if error is None:
            future.set_result(results[index])
        else:
            future.set_exception(error)
