"""A client of OpenAI-compatible chat servers (vLLM): teacher, judge, generator.

async with LLMClient("http://localhost:8000/v1", "teacher", api_key=SecretStr(key)) as client:
    await client.check()
    choices = await client.chat(messages, Sampling(max_tokens=512, seed=7), n=128, request_id="a1")

It sends requests itself (`http.py`), in the form of the OpenAI SDK. From the environment it reads
only the proxies, never OPENAI_API_KEY and the like.
"""

from __future__ import annotations

import asyncio
import logging
import math
from asyncio import sleep  # tests replace it
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import SecretStr
from pydantic_core import from_json
from tenacity import RetryCallState

from scorekit.errors import UserError
from scorekit.llm.dialects import DIALECTS, DialectName
from scorekit.llm.errors import CAUSES, MAX_WORDS, LLMError, explain, stated_status, wrong_model
from scorekit.llm.http import ChatServer, Reply
from scorekit.llm.limits import (
    ConcurrencyLimiter,
    PausableSlot,
    RateLimiter,
    RetryPolicy,
    SeveralChoices,
    Slot,
    log,
    read_timeout_s,
)
from scorekit.llm.wire import ChatPrompt, Choice, Message, Sampling
from scorekit.net.masking import server_words
from scorekit.net.retry import Deadline, OutageLog, failure_of

Strategy = Literal["auto", "n_parameter", "per_call"]
#: Largest number of choices of one request: what a timeout or a broken connection loses.
_PART = 32
#: Seconds between two looks, in a pause, at whether anybody still waits for the answer.
_LOOK_S = 0.5


@dataclass(slots=True)
class LLMCounts:
    """Counts since the client was created.

    requests: sent over HTTP; `retries` of them were retries.
    fallbacks: requests for several choices that were refused or returned too few, so that missing
    ones were requested one by one.
    failures: calls of `chat` that raised. tokens: from the server's `usage`.
    """

    requests: int = 0
    retries: int = 0
    fallbacks: int = 0
    failures: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    choices: int = 0


@dataclass(slots=True)
class _Call:
    """Shared state of the requests of a `chat` call.

    failed: one failed; do not send others.
    """

    prompt: ChatPrompt
    keep: Callable[[list[Choice]], Awaitable[None]] | None
    deadline: Deadline | None = None
    is_wanted: Callable[[], bool] | None = None
    outer_slots: Sequence[PausableSlot] = ()
    failed: bool = False

    def check_wanted(self) -> None:
        """Raise LLMError if nobody waits for the answer any more: it would be paid for nobody."""
        if self.is_wanted is not None and not self.is_wanted():
            request_id = self.prompt.request_id
            raise LLMError("timeout", CAUSES["left"], cause="left", request_id=request_id)


class LLMClient:
    """Client of one server and one model.

    base_url: as for the OpenAI SDK, with /v1; the attribute has no user name and password.
    api_key: the server's; OPENAI_API_KEY is never read.
    request_timeout_s: the longest time for an answer of a provider. For vLLM it is the minimum:
    large requests get more (`llm.limits.read_timeout_s`).
    max_concurrency: requests in flight.
    max_sequences: sequences in flight (n=128 counts 128); default 32 * max_concurrency. A request
    that waits for its retry gives its slot up, so that one long pause holds up no other, and is the
    next to get one.
    max_attempts, backoff_s, wait_for_server_s: `llm.limits.RetryPolicy`.
    strategy: `n_parameter` requests up to 32 choices at once, `per_call` one, `auto` 32 and then
    the missing ones one by one; after three incomplete answers in a row `auto` requests one at a
    time for a minute (`llm.limits.SeveralChoices`).
    dialect: the API that the server understands (`llm.dialects`). `away`: whether the last attempt
    found no server, or got no answer in time.

    Use it in one event loop. Raises UserError if the URL is not http.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        api_key: SecretStr | None = None,
        request_timeout_s: float = 120.0,
        connect_timeout_s: float = 5.0,
        max_concurrency: int = 32,
        max_sequences: int | None = None,
        max_attempts: int = 6,
        backoff_s: Sequence[float] = (1, 2, 4, 8, 16, 32),
        requests_per_minute: float | None = None,
        strategy: Strategy = "auto",
        wait_for_server_s: float = 0.0,
        dialect: DialectName = "vllm",
    ) -> None:
        sequences = max_concurrency * _PART if max_sequences is None else max_sequences
        if min(max_concurrency, sequences, max_attempts, len(backoff_s)) < 1:
            raise ValueError("max_concurrency, max_sequences, max_attempts, backoff_s: at least 1")
        self._server = ChatServer(base_url, api_key, connect_timeout_s)
        self.base_url = self._server.url
        self.model = model
        self.counts = LLMCounts()
        self.away = False
        self._outage_log = OutageLog(f"{model} at {self.base_url}")
        self._dialect = DIALECTS[dialect]
        strategy = strategy if self._dialect.several else "per_call"
        self._request_timeout_s = request_timeout_s
        self._patience = (max_attempts, tuple(backoff_s), wait_for_server_s)
        self._strategy = strategy
        self._several = SeveralChoices(strategy == "auto", strategy != "per_call")
        self._in_flight = ConcurrencyLimiter(max_concurrency, sequences)
        self._spacing = RateLimiter(requests_per_minute)

    async def __aenter__(self) -> LLMClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        self._outage_log.close()
        await self._server.close()

    async def check(self) -> int | None:
        """Return the model's context length in tokens, or None if the server does not state it.

        Raises UserError with a hint if the server cannot be reached, refuses the key or lacks the
        model. A server that is away is waited for up to `wait_for_server_s`.
        """
        patience = RetryPolicy(1, *self._patience[1:])
        served: dict[str, int | None] = {}
        try:
            async for attempt in patience.tries(_is_retryable, lambda state: None):
                with attempt:
                    try:
                        served = await self._served_models()
                    except LLMError as error:
                        self.away = error.server_is_away
                        raise
                    self.away = False
        except LLMError as error:
            raise UserError(
                f"base_url: cannot connect to {self.base_url}. Start the server or correct the URL "
                f"({error})"
            ) from None
        for name in (self.model, f"models/{self.model}"):  # Gemini lists names with a prefix
            if name in served:
                return served[name]
        names = self._words(", ".join(map(repr, served)) or "nothing")
        raise wrong_model(self.base_url, self.model, f"it serves {names}")

    async def chat(
        self,
        messages: Sequence[Message],
        sampling: Sampling,
        *,
        n: int = 1,
        request_id: str,
        json_schema: Mapping[str, Any] | None = None,
        keep: Callable[[list[Choice]], Awaitable[None]] | None = None,
        deadline_s: float | None = None,
        is_wanted: Callable[[], bool] | None = None,
        outer_slots: Sequence[PausableSlot] = (),
    ) -> list[Choice]:
        """Return n choices in order of index.

        request_id: names the request in every attempt's X-Request-Id (a part of it: `ID.0-31`, a
        single candidate: `ID.7`).

        json_schema: schema of the texts; check them with `parse_json`.
        keep: awaited with the choices of each answer as it arrives, so that none is lost if another
        request of the call fails: requests in flight are finished before that error is raised.
        deadline_s: how long the caller waits. One attempt takes at most half of it, so that a
        hanging server is retried in time. No request waits beyond it for its turn or its retry: a
        longer pause, such as that of a Retry-After, ends the call at once. An attempt that has
        begun may last longer, so the caller itself has to stop at the deadline.
        is_wanted: whether anybody still waits; if not, nothing is sent any more, and a pause ends.
        outer_slots: what the caller holds of other limits, given up in each pause, too.
        Raises LLMError after the last attempt, UserError for what the operator must fix, ValueError
        for several greedy choices (they would be equal, and vLLM refuses them).
        """
        if n < 1 or (n > 1 and sampling.temperature <= 0):
            raise ValueError(f"n={n} at temperature {sampling.temperature}: greedy has one answer")
        if not (request_id.isascii() and request_id.isprintable()):
            raise ValueError(f"request id {request_id!r} does not fit a header")
        prompt = ChatPrompt(messages, sampling, n, request_id, json_schema)
        deadline = None if deadline_s is None else Deadline(deadline_s)
        call = _Call(prompt, keep, deadline, is_wanted, outer_slots)
        size = min(self._in_flight.sequences, _PART) if self._several.in_use else 1
        parts = [range(start, min(start + size, n)) for start in range(0, n, size)]
        try:
            choices = await self._request_parts(call, parts)
        except (LLMError, UserError):
            self.counts.failures += 1
            raise
        self.counts.choices += n
        return [choices[index] for index in range(n)]

    # -- parts of a logical request ---------------------------------------------------------------

    async def _candidates(self, call: _Call, part: range) -> dict[int, Choice]:
        """Return candidates by index, from one request if possible; missing ones one by one."""
        if len(part) == 1:
            return await self._request(call, part) or {}
        choices: dict[int, Choice] | None = {}
        try:
            choices = await self._request(call, part)
        except LLMError as error:
            if error.type != "refused" or self._strategy == "n_parameter":
                raise
        was_sent, choices = choices is not None, choices or {}
        missing = [range(index, index + 1) for index in part if index not in choices]
        if not missing:
            self._several.note_full()
            return choices
        if self._strategy == "n_parameter":
            message = f"{len(choices)} of {len(part)} choices: use strategy auto or per_call"
            raise LLMError("incomplete", message, request_id=call.prompt.request_id)
        if was_sent:  # a request for one choice shows whether n was the cause
            choices |= await self._request(call, missing.pop(0)) or {}
            num_received = len(part) - len(missing) - 1
            self._note_incomplete(call.prompt.part_id(part), len(part), num_received)
        return choices | await self._request_parts(call, missing)

    async def _request_parts(self, call: _Call, parts: Iterable[range]) -> dict[int, Choice]:
        """Request all parts at once and raise the first failure: at once, or, if answers are kept
        and it is the server's, after the requests in flight have ended."""

        async def run_part(part: range) -> dict[int, Choice]:
            try:
                return await self._candidates(call, part)
            except BaseException:
                call.failed = True
                raise

        tasks = [asyncio.create_task(run_part(part)) for part in parts]
        try:
            answers = await asyncio.gather(*tasks)
        except BaseException as error:
            if call.keep is None or not isinstance(error, LLMError):
                for task in tasks:
                    task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        return {index: choice for choices in answers for index, choice in choices.items()}

    def _note_incomplete(self, part_id: str, num_requested: int, num_received: int) -> None:
        self.counts.fallbacks += 1
        log.warning(
            "request %s: %d of %d choices arrived: requesting the others one by one",
            part_id,
            num_received,
            num_requested,
        )
        self._several.note_short()

    async def _request(self, call: _Call, part: range) -> dict[int, Choice] | None:
        """Send one request with its retries. Returns None if another request of the call failed, or
        n fell out of use."""
        try:
            slot = await self._in_flight.acquire(len(part), call.deadline)
        except TimeoutError:
            raise self._out_of_time(call, part) from None
        try:
            if call.failed or (len(part) > 1 and not self._several.in_use):
                return None
            with self._outage_log.trying():
                choices = await self._send_with_retries(call, part, slot)
            if call.keep is not None:
                await call.keep(list(choices.values()))
            return choices
        finally:
            slot.release()

    def _out_of_time(self, call: _Call, part: range) -> LLMError:
        """Return the error of a request that was not sent before the deadline."""
        assert call.deadline is not None
        message = f"{self.base_url}: not sent within {call.deadline.seconds:.3g} s: " + (
            f"others were first ({self._in_flight.requests_in_flight} in flight)"
        )
        return LLMError("timeout", message, request_id=call.prompt.part_id(part), cause="no_turn")

    async def _pause(self, call: _Call, request_slot: Slot, seconds: float) -> None:
        """Wait for a retry without the slots of the request.

        Raises LLMError if nobody waits for the answer any more, TimeoutError if the slots are not
        free before the deadline."""
        slots: tuple[PausableSlot, ...] = (*call.outer_slots, request_slot)
        for slot in reversed(slots):
            slot.release()
        step = seconds if call.is_wanted is None else _LOOK_S
        while True:
            call.check_wanted()
            await sleep(min(step, seconds))
            if seconds <= step:
                break
            seconds -= step
        async with asyncio.timeout(call.deadline.remaining_s() if call.deadline else None):
            for slot in slots:
                await slot.acquire(is_first=True)

    async def _send_with_retries(self, call: _Call, part: range, slot: Slot) -> dict[int, Choice]:
        part_id, attempts = call.prompt.part_id(part), 0
        last_error: LLMError | None = None
        policy = RetryPolicy(*self._patience, call.deadline)

        def log_retry(state: RetryCallState) -> None:
            error_text, pause = _error_for_log(failure_of(state)), state.upcoming_sleep
            log.info(
                "request %s: %s; attempt %d, again in %.1f s", part_id, error_text, attempts, pause
            )
            if call.deadline is not None and self.away:
                self._outage_log.failed(call.deadline)

        def may_help(error: BaseException) -> bool:
            return _is_retryable(error) and not call.failed

        async def pause(seconds: float) -> None:
            await self._pause(call, slot, seconds)

        try:
            async for attempt in policy.tries(may_help, log_retry, pause):
                with attempt:
                    if last_error is not None and call.failed:  # another one failed in the pause
                        raise last_error
                    attempts += 1
                    try:
                        choices = await self._attempt(call, part, attempts - 1)
                    except LLMError as error:
                        last_error = error
                        self.away = error.server_is_away
                        raise
                    self.away = False
                    self._outage_log.answered()
                    return choices
        except (LLMError, TimeoutError) as failure:
            if isinstance(failure, LLMError):
                final_error = failure
            else:  # its turn did not come before the deadline
                final_error = last_error or self._out_of_time(call, part)
            if policy.late_pause_s is not None:
                final_error.note_late_pause(policy.late_pause_s)
            log.log(
                logging.INFO if final_error.cause == "left" else logging.WARNING,
                "request %s: %s; attempt %d was the last",
                part_id,
                _error_for_log(final_error),
                attempts,
            )
            raise final_error from None
        raise AssertionError  # it goes on until an attempt ends

    async def _attempt(self, call: _Call, part: range, num_earlier: int) -> dict[int, Choice]:
        """Send a request once. Raises TimeoutError if it is not its turn before the deadline."""
        if self._spacing.is_limited:
            async with asyncio.timeout(call.deadline.remaining_s() if call.deadline else None):
                await self._spacing.acquire()
        call.check_wanted()
        self.counts.requests += 1
        self.counts.retries += num_earlier > 0
        prompt, (read_s, total_s) = call.prompt, self._timeouts(call)
        part_id = prompt.part_id(part)
        headers = {
            "X-Request-Id": part_id,
            "X-Stainless-Retry-Count": str(num_earlier),  # header names of the SDK
            "X-Stainless-Read-Timeout": str(read_s),
        }
        try:
            body = self._dialect.body(prompt, self.model, part)
        except ValueError:
            message = "not Unicode text (a lone surrogate?)"
            raise LLMError("refused", message, request_id=part_id) from None
        answer = await self._server.ask(
            self._dialect.path,
            body,
            read_timeout_s=read_s,
            total_s=total_s,
            headers=headers,
            request_id=part_id,
        )
        if not answer.is_ok:
            raise self._refusal(answer, part_id)
        return self._read(answer.body, part, part_id)

    def _timeouts(self, call: _Call) -> tuple[float, float]:
        """Return the read timeout (between two chunks) and the total timeout, in seconds."""
        read_s = total_s = self._request_timeout_s
        if self._dialect.grows:
            max_tokens = call.prompt.sampling.max_tokens
            read_s = read_timeout_s(read_s, max_tokens, self._in_flight.sequences_in_flight)
            total_s = 2 * read_s
        max_s = math.inf if call.deadline is None else call.deadline.seconds / 2
        return min(read_s, max_s), min(total_s, max_s)

    def _read(self, body: bytes, part: range, part_id: str) -> dict[int, Choice]:
        try:
            choices, usage = self._dialect.read(body, part)
        except LLMError as error:
            status = stated_status(body) if error.type in ("malformed", "server_error") else None
            if status is not None:
                raise self._refusal(Reply(status, {}, body), part_id) from None
            error.request_id, error.message = part_id, self._words(error.message)
            raise
        self.counts.prompt_tokens += usage.prompt_tokens
        self.counts.completion_tokens += usage.completion_tokens
        return choices

    async def _served_models(self) -> dict[str, int | None]:
        """Return model name -> `max_model_len`."""
        answer = await self._server.ask("/models", read_timeout_s=self._request_timeout_s)
        if not answer.is_ok:
            raise self._refusal(answer)
        try:
            served = from_json(answer.body)["data"]
            lengths = {str(model["id"]): model.get("max_model_len") for model in served}
            return {
                name: length if type(length) is int else None for name, length in lengths.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(
                f"{self.base_url} is not an OpenAI-compatible API: base_url usually ends in /v1"
            ) from None

    def _words(self, text: str) -> str:
        authorization = self._server.authorization
        return server_words(text, authorization=authorization, max_chars=MAX_WORDS)

    def _refusal(self, answer: Reply, request_id: str = "") -> LLMError | UserError:
        return explain(
            answer.status,
            answer.headers,
            answer.body,
            url=self.base_url,
            model=self.model,
            authorization=self._server.authorization,
            request_id=request_id,
        )


def _is_retryable(error: BaseException) -> bool:
    return isinstance(error, LLMError) and error.retryable


def _error_for_log(error: BaseException | None) -> str:
    """Return the type of an error for a log, and its cause. The server's words may quote the
    input."""
    assert isinstance(error, LLMError)
    text = error.type if error.status is None else f"{error.type}, HTTP {error.status}"
    return text if error.cause is None else f"{text}: {CAUSES[error.cause]}"
