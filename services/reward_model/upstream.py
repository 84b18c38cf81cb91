"""`--upstream URL`: another server's reward model, which holds the weights.

vLLM answers `/classify`, `/pooling` and `/score`, Text Embeddings Inference `/predict`. Each is
asked for raw outputs, without softmax or sigmoid. A sample is one request: these servers batch by
themselves, and a failure is that of one sample. What an upstream's failure means, when it is asked
again and what a caller learns of it are as the judge's.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import structlog
from pydantic import SecretStr

from scorekit.errors import SampleError, UserError
from scorekit.llm.errors import (
    CAUSES,
    MISTAKES,
    LLMError,
    OperatorMistake,
    error_in,
    explain,
    message_of,
    sample_error,
)
from scorekit.llm.http import ChatServer, Reply
from scorekit.llm.limits import RetryPolicy
from scorekit.net.loops import gather_or_cancel
from scorekit.net.retry import Deadline
from scorekit.schemas import RewardOptions, RewardSample
from scorekit.server.backend import Encoded, Outcome
from services.reward_model.endpoint import (
    RewardDescription,
    RewardEndpoint,
    RewardRerankEndpoint,
    weighted_sum,
)
from services.reward_model.prompts import BUILT_IN, Form, ScoringPrompt
from services.reward_model.settings import BACKOFF_S

log = structlog.get_logger()

#: Least seconds of a call, so that a retry of the caller finds its result in the cache.
_MIN_DEADLINE_S = 20.0
#: Seconds that the upstream may take to say that it is there.
_FIRST_ANSWER_S = 5.0
#: Most estimated tokens of a sample, where the settings have no limit: the upstream has its own.
_MAX_LENGTH = 131_072
_MALFORMED = "the answer has no outputs of a classifier"
_OTHER_MODEL = "it runs another model"
_OTHER_LABELS = "its labels are not those of --weights, in their order"
_NO_CLASSIFIER = "its model is no classifier"
_NOT_FINITE = "the upstream's output is not finite"
#: Words of a server that has such an output, in small letters: of TEI, and of vLLM, which cannot
#: write it as JSON.
_WORDS_OF_NOT_FINITE = ("score is nan", "out of range float values are not json compliant")

#: Mistakes of the operator that are mended by a setting of this service -> how.
_FIXES = {
    "key": "put the server's key into the environment variable REWARD_MODEL_UPSTREAM_API_KEY",
    "redirect": "which is not followed: name the address behind it in --upstream (https instead of "
    "http, perhaps)",
}


class UpstreamProbe(RewardSample):
    """A sample for warm-up and health checks, about which nobody is asked."""


class _OtherModel(UserError):
    """The upstream has another model or other labels, or no such route: the operator's to mend."""


@dataclass(frozen=True, slots=True)
class Route:
    """A route of an upstream server.

    path: below the server's URL.
    body: of a form and a model's name.
    read: returns outputs in the order of the labels, from a parsed answer and the labels' names.
    takes: forms of samples."""

    path: str
    body: Callable[[Form, str], dict[str, Any]]
    read: Callable[[Any, Sequence[str]], list[float]]
    takes: frozenset[str]


def _classify(form: Form, model: str) -> dict[str, Any]:
    body: dict[str, Any] = {"model": model, "use_activation": False}
    if form.messages is None:
        return body | {"input": form.text}
    # The template writes the special tokens, and no turn is begun.
    chat = {"messages": list(form.messages), "add_generation_prompt": False}
    return body | chat | {"add_special_tokens": False}


def _pool(form: Form, model: str) -> dict[str, Any]:
    return _classify(form, model) | {"task": "classify", "encoding_format": "float"}


def _score(form: Form, model: str) -> dict[str, Any]:
    return {"model": model, "use_activation": False, "text_1": form.text, "text_2": form.pair}


def _predict(form: Form, model: str) -> dict[str, Any]:
    inputs: Any = form.text if form.pair is None else [[form.text, form.pair]]
    return {"inputs": inputs, "raw_scores": True, "truncate": False}


def _number(value: Any) -> float:
    """Return an output. JSON has no NaN: a server writes null, or no answer."""
    return math.nan if value is None else float(value)


def _read_classified(answer: Any, labels: Sequence[str]) -> list[float]:
    (row,) = answer["data"]
    outputs = [_number(value) for value in row["probs"]]
    if len(outputs) != len(labels):
        raise _OtherModel(_OTHER_LABELS)
    best = max(range(len(outputs)), key=outputs.__getitem__)
    is_named = len(labels) > 1 and all(map(math.isfinite, outputs))
    # vLLM names the label of the largest output: it tells another order.
    if is_named and row.get("label") not in (None, labels[best]):
        raise _OtherModel(_OTHER_LABELS)
    return outputs


def _read_pooled(answer: Any, labels: Sequence[str]) -> list[float]:
    (row,) = answer["data"]
    outputs = [_number(value) for value in row["data"]]
    if len(outputs) != len(labels):
        raise _OtherModel(_OTHER_LABELS)
    return outputs


def _read_scored(answer: Any, labels: Sequence[str]) -> list[float]:
    (row,) = answer["data"]
    if len(labels) != 1:
        raise _OtherModel(_OTHER_LABELS)
    return [_number(row["score"])]


def _read_predicted(answer: Any, labels: Sequence[str]) -> list[float]:
    rows = answer[0] if isinstance(answer[0], list) else answer
    by_label = {row["label"]: _number(row["score"]) for row in rows}  # the largest is the first
    if len(labels) == len(by_label) == 1:  # a model with one output has no names
        return list(by_label.values())
    if by_label.keys() != set(labels):
        raise _OtherModel(_OTHER_LABELS)
    return [by_label[label] for label in labels]


#: `--upstream-api` -> how that server is asked.
ROUTES: dict[str, Route] = {
    "classify": Route("/classify", _classify, _read_classified, frozenset({"messages", "text"})),
    "pooling": Route("/pooling", _pool, _read_pooled, frozenset({"messages", "text"})),
    "score": Route("/score", _score, _read_scored, frozenset({"pair"})),
    "predict": Route("/predict", _predict, _read_predicted, frozenset({"text", "pair"})),
}


class UpstreamBackend:
    """A reward model at another server, asked for up to `workers` samples at once.

    model: its name there.
    weights: of its labels, in its order.
    route: a name of ROUTES.
    prompt: what `src` and `mt` are put into. The calls run in an event loop in a separate thread.
    """

    service = "reward_model"
    spare_workers = 0

    def __init__(
        self,
        url: str,
        model: str,
        weights: Mapping[str, float],
        route: str,
        prompt: tuple[str, ScoringPrompt],
        *,
        key: SecretStr | None = None,
        max_input_length: int | None = None,
        max_concurrency: int = 32,
        max_attempts: int = 3,
        request_timeout_s: float = 120.0,
        connect_timeout_s: float = 5.0,
        backoff_s: Sequence[float] = BACKOFF_S,
    ) -> None:
        self.endpoint = RewardEndpoint(RewardRerankEndpoint())
        self.workers = max_concurrency
        url = url.rstrip("/").removesuffix("/v1")  # no route of these begins with it
        self._server = ChatServer(url, key, connect_timeout_s)
        self._first = ChatServer(url, key, connect_timeout_s)  # is closed after its one request
        self._model, self._weights = model, dict(weights)
        self._route_name, self._route = route, ROUTES[route]
        self._prompt_name, self._prompt = prompt
        self._max_length = max_input_length or _MAX_LENGTH
        self._patience = (max_attempts, tuple(backoff_s), 0.0)
        self._timeout_s = request_timeout_s
        self._loop = asyncio.new_event_loop()

    def load(self) -> RewardDescription:
        """Start the event loop.

        The upstream does not have to run yet: the log says whether it does.
        """
        threading.Thread(target=self._loop.run_forever, name="upstream", daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._log_reachability(), self._loop)
        prompt = self._prompt
        content = json.dumps([list(self._weights.items()), prompt.model_dump_json()])
        return RewardDescription(
            model=self._model,
            revision=hashlib.blake2b(content.encode(), digest_size=16).hexdigest(),
            tokenizer="upstream",
            dtype="upstream",
            device="upstream",
            max_input_length=self._max_length,
            score_range=prompt.range(),
            higher_is_better=prompt.higher_is_better,
            inputs=prompt.inputs(),
            engine={"url": self._server.url, "api": self._route_name},
            weights=self._weights,
            has_chat_template="messages" in self._route.takes,
            takes_pairs="pair" in self._route.takes,
            prompt=self._prompt_name,
        )

    def encode(
        self, samples: Sequence[RewardSample], options: RewardOptions
    ) -> list[Encoded | SampleError]:
        """Prepare the samples for `forward`; tokens are estimated, at four bytes each."""
        encoded: list[Encoded | SampleError] = []
        for sample in samples:
            try:
                encoded.append(self._encode(sample, options))
            except SampleError as error:
                encoded.append(error)
        return encoded

    def forward(self, batch: Sequence[Encoded]) -> list[Outcome]:
        """Return the outcomes in order; a SampleError for a sample without one."""
        outcomes = gather_or_cancel(map(self._outcome, batch))
        return asyncio.run_coroutine_threadsafe(outcomes, self._loop).result()

    def probe(self, words: int) -> RewardSample:
        """Return a sample about which nobody is asked."""
        return UpstreamProbe(text="probe")

    def memory_bytes(self) -> None:
        """Return None: the weights are elsewhere."""
        return None

    async def _log_reachability(self) -> None:
        """Log whether the upstream answers within seconds. Any answer counts."""
        url = self._server.url
        try:
            await self._first.ask("/health", read_timeout_s=_FIRST_ANSWER_S)
        except (LLMError, UserError) as error:
            until = "samples fail with `upstream` until it answers"
            log.warning("upstream_does_not_answer", upstream=url, error=str(error), until=until)
        else:
            log.info("upstream_answers", upstream=url)
        finally:
            await self._first.close()

    def _encode(self, sample: RewardSample, options: RewardOptions) -> Encoded:
        if isinstance(sample, UpstreamProbe):
            return Encoded(1, {}, None)
        form = self._prompt.form_of(sample)
        kind = "messages" if form.messages is not None else "text" if form.pair is None else "pair"
        if kind not in self._route.takes:
            accepted = " or ".join(sorted(self._route.takes))
            message = f"{kind}: the upstream's {self._route.path} takes {accepted}"
            raise SampleError("invalid_input", message)
        texts = [turn["content"] for turn in form.messages or ()] + [form.text, form.pair or ""]
        tokens = sum(len(text.encode()) for text in texts) // 4 + 1
        if tokens > self._max_length:
            message = f"about {tokens} tokens, the limit is {self._max_length}"
            raise SampleError("overlong", message)
        truncated = {"src": False, "mt": False, "ref": False}
        fields = {"tokens": tokens, "truncated": truncated, "mt_covered": len(form.last)}
        return Encoded(1, fields, form)  # counted in samples, regardless of their length

    async def _outcome(self, encoded: Encoded) -> Outcome:
        form: Form | None = encoded.payload
        if form is None:  # a probe succeeds, whatever the state of the upstream
            labels = dict.fromkeys(self._weights, 0.0)
            return {"score": 0.0, "labels": labels}
        body = json.dumps(self._route.body(form, self._model)).encode()
        name = f"reward-{hashlib.blake2b(body, digest_size=8).hexdigest()}"
        try:
            outputs, tokens = await self._ask(body, name, encoded)
        except (LLMError, UserError, SampleError) as error:
            left = isinstance(error, LLMError) and error.cause == "left"
            (log.info if left else log.warning)(
                "upstream_failed",
                upstream=self._server.url,
                upstream_request=name,
                error=str(error),
            )
            return _sample_error(error, self._model, name)
        labels = dict(zip(self._weights, outputs, strict=True))
        counted = {} if tokens is None else {"tokens": tokens}
        # The number of tokens is the upstream's, in place of the estimate.
        encoded.fields.update(counted)
        return {"score": weighted_sum(labels, self._weights), "labels": labels}

    async def _ask(
        self, body: bytes, name: str, encoded: Encoded
    ) -> tuple[list[float], int | None]:
        """Return the outputs and the number of tokens, after retries."""
        granted_s = encoded.timeout_s
        deadline = None if granted_s is None else Deadline(max(granted_s, _MIN_DEADLINE_S))
        policy = RetryPolicy(*self._patience, deadline)

        def may_help(error: BaseException) -> bool:
            return isinstance(error, LLMError) and error.retryable

        try:
            async for attempt in policy.tries(may_help, lambda state: None):
                with attempt:
                    if encoded.is_wanted is not None and not encoded.is_wanted():
                        raise LLMError("timeout", CAUSES["left"], cause="left", request_id=name)
                    return await self._attempt(body, name, deadline)
        except LLMError as error:
            if policy.late_pause_s is not None:
                error.note_late_pause(policy.late_pause_s)
            raise
        raise AssertionError  # it goes on until an attempt ends

    async def _attempt(
        self, body: bytes, name: str, deadline: Deadline | None
    ) -> tuple[list[float], int | None]:
        most_s = math.inf if deadline is None else deadline.seconds / 2
        timeout_s = min(self._timeout_s, most_s)
        reply = await self._server.ask(
            self._route.path,
            body,
            read_timeout_s=timeout_s,
            total_s=timeout_s,
            headers={"X-Request-Id": name},
            request_id=name,
        )
        if not reply.is_ok:
            raise self._refusal(reply, name)
        try:
            answer = json.loads(reply.body)
            outputs = self._route.read(answer, list(self._weights))
            model = answer.get("model") if isinstance(answer, dict) else None
            usage = answer.get("usage") if isinstance(answer, dict) else None
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            message = f"{self._server.url}: {_MALFORMED}"
            raise LLMError("malformed", message, retryable=True, request_id=name) from None
        if model not in (None, self._model):
            raise _OtherModel(_OTHER_MODEL)
        tokens = usage.get("prompt_tokens") if isinstance(usage, dict) else None
        return outputs, tokens if type(tokens) is int and tokens >= 0 else None

    def _refusal(self, reply: Reply, name: str) -> LLMError | UserError | SampleError:
        """Return the error of an answer that is not 2xx."""
        words = message_of(error_in(reply.body)).lower()
        if any(part in words for part in _WORDS_OF_NOT_FINITE):
            return SampleError("non_finite", _NOT_FINITE)
        if reply.status == 424 and "not a classifier" in words:  # TEI: the status of what may pass
            return _OtherModel(_NO_CLASSIFIER)
        if reply.status == 501 or (reply.status == 404 and "model" not in words):
            route = f"it has no {self._route.path} for its model (HTTP {reply.status})"
            return _OtherModel(f"{route}: --upstream-api has to fit the server")
        error = explain(
            reply.status,
            reply.headers,
            reply.body,
            url=self._server.url,
            model=self._model,
            authorization=self._server.authorization,
            request_id=name,
        )
        if isinstance(error, OperatorMistake) and error.kind in _FIXES:
            problem = f"{self._server.url}: {MISTAKES[error.kind]} (HTTP {reply.status})"
            return OperatorMistake(f"{problem}: {_FIXES[error.kind]}", kind=error.kind)
        return error


def _sample_error(
    error: LLMError | UserError | SampleError, model: str, request_id: str
) -> SampleError:
    """Return the error that a caller may see."""
    if isinstance(error, SampleError):
        return error
    if isinstance(error, _OtherModel):
        message = f"the upstream server: {error} (the service's log: {request_id})"
        return SampleError("upstream", message, retryable=False)
    if isinstance(error, LLMError) and error.type == "overlong":
        message = f"longer than the upstream's model can read (the service's log: {request_id})"
        return SampleError("overlong", message)
    return sample_error(error, model, request_id)


def default_prompt(route: str) -> str:
    """Return the name of the built-in prompt for a route."""
    return next(name for name in BUILT_IN if name in ROUTES[route].takes)
