"""A client of OpenAI-compatible chat servers (vLLM): teacher, judge, generator.

async with LLMClient("http://localhost:8000/v1", "teacher", api_key=SecretStr(key)) as client:
    await client.check()
    choices = await client.chat(messages, Sampling(max_tokens=512, seed=7), n=128, request_id="a1")

The wire is spoken directly (`http.py`), as the OpenAI SDK speaks it; of the environment only the
proxies are read, never OPENAI_API_KEY and its like.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import SecretStr
from pydantic_core import from_json
from tenacity import RetryCallState

from scorekit.client.transport import checked_url
from scorekit.errors import UserError
from scorekit.llm.dialects import DIALECTS, DialectName
from scorekit.llm.errors import LLMError, explained, wrong_model
from scorekit.llm.http import ChatServer, Reply
from scorekit.llm.pacing import InFlight, Patience, SeveralChoices, Spacing, log, read_timeout_s
from scorekit.llm.wire import ChatPrompt, Choice, Message, Sampling
from scorekit.net.absence import Absence
from scorekit.net.retry import Deadline, failure_of

Strategy = Literal["auto", "n_parameter", "per_call"]
#: Choices of one request, at most: what a time-out or a broken connection loses.
_PART = 32


@dataclass(slots=True)
class LLMCounts:
    """Since the client was made. requests: sent over HTTP, of which `retries` were sent again;
    fallbacks: requests for several choices that were refused or answered short, so that what was
    missing was asked for one by one; failures: calls of `chat` that raised; tokens: as the server's
    `usage` says."""

    requests: int = 0
    retries: int = 0
    fallbacks: int = 0
    failures: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    choices: int = 0


@dataclass(slots=True)
class _Call:
    """What the requests of one call of `chat` share. failed: one of them did for good, so that
    those which still wait are not sent."""

    prompt: ChatPrompt
    keep: Callable[[list[Choice]], Awaitable[None]] | None
    deadline: Deadline | None = None
    failed: bool = False


class LLMClient:
    """One server, one model.

    base_url: as the OpenAI SDK takes it, with /v1; the attribute is without user name and password.
    api_key: the server's; OPENAI_API_KEY is never read. request_timeout_s: the time that an answer
    of a provider may take; of vLLM the least, and more where the work needs it
    (`llm.pacing.read_timeout_s`).
    max_concurrency: requests in flight. max_sequences: sequences in flight (n=128 counts 128);
    default 32 * max_concurrency. A request that waits for its next attempt keeps its place, so
    that a failing server is asked less. max_attempts, backoff_s, wait_for_server_s:
    `llm.pacing.Patience`. strategy: `n_parameter` asks for up to 32 choices a request, `per_call`
    for one, `auto` for 32 and what is missing one by one; after three such answers in a row only
    for one, for a minute (`llm.pacing.SeveralChoices`). dialect: what the server understands
    (`llm.dialects`). `away`: whether the last attempt found nobody, or no answer in time.

    Use it in one event loop. Raises UserError for what is no http URL.
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
        self._server = ChatServer(checked_url(base_url), api_key, connect_timeout_s)
        self.base_url = self._server.url
        self.model = model
        self.counts = LLMCounts()
        self.away = False
        self._absence = Absence(f"{model} at {self.base_url}")
        self._key = api_key
        self._dialect = DIALECTS[dialect]
        strategy = strategy if self._dialect.several else "per_call"
        self._request_timeout_s = request_timeout_s
        self._patience = (max_attempts, tuple(backoff_s), wait_for_server_s)
        self._strategy = strategy
        self._several = SeveralChoices(strategy == "auto", strategy != "per_call")
        self._in_flight = InFlight(max_concurrency, sequences)
        self._spacing = Spacing(requests_per_minute)

    async def __aenter__(self) -> LLMClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        self._absence.close()
        await self._server.close()

    async def check(self) -> int | None:
        """Return if the server is there, takes the key and knows the model: the tokens that the
        model reads and writes together, None where the server does not say (vLLM does).

        Raises UserError that says what to do; a server that is away is waited for
        `wait_for_server_s` before.
        """
        patience = Patience(1, *self._patience[1:])
        served: dict[str, int | None] = {}
        try:
            async for attempt in patience.tries(_may_pass, lambda state: None):
                with attempt:
                    try:
                        served = await self._served_models()
                    except LLMError as error:
                        self.away = error.server_is_away
                        raise
                    self.away = False
        except LLMError as error:
            raise UserError(
                f"no LLM server answers at {self.base_url}: start it, or mend base_url ({error})"
            ) from None
        for name in (self.model, f"models/{self.model}"):  # Gemini's list has the folder
            if name in served:
                return served[name]
        names = ", ".join(map(repr, served)) or "nothing"
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
    ) -> list[Choice]:
        """n choices in order of index. `request_id` names the request in every attempt's
        X-Request-Id (a part of it: `ID.0-31`, a single candidate: `ID.7`).

        json_schema: what the texts shall be; check them with `parse_json`.
        keep: awaited with the choices of each answer as it comes, so that none is lost where
        another request of the call fails: those under way are waited for before that is raised.
        deadline_s: how long the caller waits. One attempt takes at most half of it, so that a
        server that hangs is asked again in time; to stop at the deadline is the caller's.
        Raises LLMError after the attempts, UserError for what the operator must mend, ValueError
        for several greedy choices (they would be equal, and vLLM refuses them).
        """
        if n < 1 or (n > 1 and sampling.temperature <= 0):
            raise ValueError(f"n={n} at temperature {sampling.temperature}: greedy has one answer")
        if not (request_id.isascii() and request_id.isprintable()):
            raise ValueError(f"request id {request_id!r} does not fit a header")
        prompt = ChatPrompt(messages, sampling, n, request_id, json_schema)
        call = _Call(prompt, keep, None if deadline_s is None else Deadline(deadline_s))
        size = min(self._in_flight.sequences, _PART) if self._several.in_use else 1
        parts = [range(i, min(i + size, n)) for i in range(0, n, size)]
        try:
            found = await self._merged(call, parts)
        except (LLMError, UserError):
            self.counts.failures += 1
            raise
        self.counts.choices += n
        return [found[index] for index in range(n)]

    # -- parts of a logical request ---------------------------------------------------------------

    async def _candidates(self, call: _Call, part: range) -> dict[int, Choice]:
        """Candidates by index: in one request if the server can, what is missing one by one."""
        if len(part) == 1:
            return await self._request(call, part) or {}
        found: dict[int, Choice] | None = {}
        try:
            found = await self._request(call, part)
        except LLMError as error:
            if error.type != "refused" or self._strategy == "n_parameter":
                raise
        was_asked, found = found is not None, found or {}
        missing = [range(i, i + 1) for i in part if i not in found]
        if not missing:
            self._several.note_full()
            return found
        if self._strategy == "n_parameter":
            said = f"{len(found)} of {len(part)} choices: use strategy auto or per_call"
            raise LLMError("incomplete", said, request_id=call.prompt.request_id)
        if was_asked:  # the first one alone shows whether n was at fault
            found |= await self._request(call, missing.pop(0)) or {}
            self._note_short(call.prompt.part_id(part), len(part), len(part) - len(missing) - 1)
        return found | await self._merged(call, missing)

    async def _merged(self, call: _Call, parts: Iterable[range]) -> dict[int, Choice]:
        """Ask for all at once. The first failure is raised: where answers are kept and this was the
        server's, when those that were sent have ended, else at once."""

        async def asked(part: range) -> dict[int, Choice]:
            try:
                return await self._candidates(call, part)
            except BaseException:
                call.failed = True
                raise

        tasks = [asyncio.create_task(asked(part)) for part in parts]
        try:
            answers = await asyncio.gather(*tasks)
        except BaseException as error:
            if call.keep is None or not isinstance(error, LLMError):
                for task in tasks:
                    task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        return {index: choice for of_part in answers for index, choice in of_part.items()}

    def _note_short(self, part_id: str, asked: int, came: int) -> None:
        self.counts.fallbacks += 1
        log.warning(
            "request %s: %d of %d choices came: the others are asked for one by one",
            part_id,
            came,
            asked,
        )
        self._several.note_short()

    async def _request(self, call: _Call, part: range) -> dict[int, Choice] | None:
        """One request with its attempts; None where, while it waited, n fell out of use or another
        request of the call failed."""
        async with self._in_flight.hold(len(part)):
            if call.failed or (len(part) > 1 and not self._several.in_use):
                return None
            found = await self._attempts(call, part)
            if call.keep is not None:
                await call.keep(list(found.values()))
            return found

    async def _attempts(self, call: _Call, part: range) -> dict[int, Choice]:
        with self._absence.trying():
            return await self._tried(call, part)

    async def _tried(self, call: _Call, part: range) -> dict[int, Choice]:
        part_id, attempts = call.prompt.part_id(part), 0
        last: LLMError | None = None

        def again(state: RetryCallState) -> None:
            told, pause = _told(failure_of(state)), state.upcoming_sleep
            log.info("request %s: %s; attempt %d, again in %.1f s", part_id, told, attempts, pause)
            if call.deadline is not None and self.away:
                self._absence.failed(call.deadline)

        def may_help(error: BaseException) -> bool:
            return _may_pass(error) and not call.failed

        try:
            async for attempt in Patience(*self._patience).tries(may_help, again):
                with attempt:
                    if last is not None and call.failed:  # meanwhile
                        raise last
                    attempts += 1
                    try:
                        found = await self._attempt(call, part, attempts - 1)
                    except LLMError as error:
                        last = error
                        self.away = error.server_is_away
                        raise
                    self.away = False
                    self._absence.answered()
                    return found
        except LLMError as error:
            log.warning("request %s: %s; attempt %d was the last", part_id, _told(error), attempts)
            raise
        raise AssertionError  # it goes on until an attempt ends

    async def _attempt(self, call: _Call, part: range, earlier: int) -> dict[int, Choice]:
        await self._spacing.turn()
        self.counts.requests += 1
        self.counts.retries += earlier > 0
        prompt, (read_s, whole_s) = call.prompt, self._time_outs(call)
        part_id = prompt.part_id(part)
        headers = {
            "X-Request-Id": part_id,
            "X-Stainless-Retry-Count": str(earlier),  # as the SDK names them
            "X-Stainless-Read-Timeout": str(read_s),
        }
        try:
            body = self._dialect.body(prompt, self.model, part)
        except ValueError:
            raise LLMError(
                "refused", "not Unicode text (a lone surrogate?)", request_id=part_id
            ) from None
        answer = await self._server.ask(
            self._dialect.path,
            body,
            read_timeout_s=read_s,
            whole_s=whole_s,
            headers=headers,
            request_id=part_id,
        )
        self._raise_refusal(answer, part_id)
        return self._read(answer.body, part, part_id)

    def _time_outs(self, call: _Call) -> tuple[float, float]:
        """Return the seconds of an attempt: between two pieces of the answer, and for all of it."""
        read_s = whole_s = self._request_timeout_s
        if self._dialect.grows:
            tokens, flight = call.prompt.sampling.max_tokens, self._in_flight.sequences_in_flight
            read_s = read_timeout_s(read_s, tokens, flight)
            whole_s = 2 * read_s
        most = math.inf if call.deadline is None else call.deadline.seconds / 2
        return min(read_s, most), min(whole_s, most)

    def _read(self, body: bytes, part: range, part_id: str) -> dict[int, Choice]:
        try:
            found, usage = self._dialect.read(body, part)
        except LLMError as error:
            error.request_id = part_id
            raise
        self.counts.prompt_tokens += usage.prompt_tokens
        self.counts.completion_tokens += usage.completion_tokens
        return found

    async def _served_models(self) -> dict[str, int | None]:
        """Name -> `max_model_len`."""
        answer = await self._server.ask("/models", read_timeout_s=self._request_timeout_s)
        self._raise_refusal(answer)
        try:
            served = from_json(answer.body)["data"]
            lengths = {str(model["id"]): model.get("max_model_len") for model in served}
            return {name: n if type(n) is int else None for name, n in lengths.items()}
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(
                f"{self.base_url} is no OpenAI-compatible API: base_url usually ends in /v1"
            ) from None

    def _raise_refusal(self, answer: Reply, request_id: str = "") -> None:
        if not 200 <= answer.status < 300:
            raise explained(
                answer.status,
                answer.headers,
                answer.body,
                url=self.base_url,
                model=self.model,
                key=self._key.get_secret_value() if self._key else None,
                request_id=request_id,
            )


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, LLMError) and error.retryable


def _told(error: BaseException | None) -> str:
    """For a log; no word of the server's: it may hold what it was sent."""
    assert isinstance(error, LLMError)
    return error.type if error.status is None else f"{error.type}, HTTP {error.status}"
