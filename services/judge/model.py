"""The judge's backends: `rules`, which needs no model, and `openai`, which asks an LLM.

An upstream server that is down, slow or faulty fails samples, never the service: loading, warm-up
and readiness do not call it.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from scorekit import __version__, languages
from scorekit.digest import digest_files
from scorekit.errors import SampleError, UserError
from scorekit.llm import LLMClient, Sampling
from scorekit.net.loops import gather_or_cancel
from scorekit.schemas import JudgeOptions, JudgeSample, ScoreRange
from scorekit.server.backend import Encoded, Outcome, installed_versions
from scorekit.server.score_endpoint import ScoreDescription, ScoreEndpoint
from scorekit.text import (
    chat_marks,
    checks,
    findings,
    markup,
    meta_text,
    pattern_rows,
    writing_scripts,
)
from scorekit.text import letter_groups as groups
from scorekit.text import rules as shared_rules
from services.judge import rules
from services.judge.llm_judge import (
    JudgeRequest,
    JudgeTask,
    SharedWorker,
    Spending,
    UpstreamCounters,
    VoteSlot,
    ask,
)
from services.judge.mqm import MqmTask
from services.judge.rubrics import MQM, Rubric, digest_of
from services.judge.settings import BACKOFF_S, JudgeSettings

#: Tasks of the backend `rules`: task -> (variables of the built-in rubric, rule).
_RULES: dict[str, tuple[frozenset[str], Callable[[Mapping[str, str]], Outcome]]] = {
    "translation_filter": (
        frozenset({"source_lang", "target_lang", "source_text", "candidate"}),
        rules.judge_translation,
    ),
    "answer_correctness": (frozenset({"query", "answer", "reference"}), rules.judge_answer),
    "answer_any_of": (frozenset({"query", "answer", "references"}), rules.judge_any_of),
}
_SCOREKIT_VERSION: dict[str, str | None] = {"scorekit": __version__}  # part of cache keys
_ONE_ANSWER = "options.votes: the task has one answer; mqm alone can be asked several times"
#: Largest number of open clients for models that requests named.
MAX_CLIENTS = 8
#: Minimum deadline of a call. One attempt gets at least half of it, even if the caller's timeout is
#: shorter: then a paid answer is in the cache when the caller retries.
_MIN_DEADLINE_S = 20.0


#: Samples, at least, that may wait for a retry without holding up others.
_MIN_SPARE = 8


class Probe(JudgeSample):
    """A sample for warm-up and health checks. Requests cannot contain one."""


def _tokens(texts: Mapping[str, str]) -> int:
    """Return the estimated number of tokens, at four bytes each."""
    return sum(len(text.encode()) for text in texts.values()) // 4 + 1


class _Judge:
    """Base of both backends: checks samples against their rubrics."""

    service = "judge"
    endpoint = ScoreEndpoint(JudgeSample, JudgeOptions)

    def __init__(self, tasks: Mapping[str, JudgeTask], max_input_length: int) -> None:
        self.tasks = tasks
        self.max_input_length = max_input_length

    def encode(self, samples: Sequence[JudgeSample], options: Any) -> list[Encoded | SampleError]:
        """Check the samples and prepare them for `forward`."""
        encoded: list[Encoded | SampleError] = []
        for sample in samples:
            try:
                encoded.append(self._encode(sample, options))
            except SampleError as error:
                encoded.append(error)
        return encoded

    def _encode(self, sample: JudgeSample, options: JudgeOptions) -> Encoded:
        raise NotImplementedError

    def _texts(self, sample: JudgeSample) -> tuple[JudgeTask, dict[str, str]]:
        task = self.tasks.get(sample.task)
        if task is None:
            available = ", ".join(self.tasks)
            raise SampleError("invalid_input", f"task {sample.task[:64]!r}: there are {available}")
        texts = task.prepare(sample.model_extra or {})
        tokens = _tokens(texts)
        if tokens > self.max_input_length:
            raise SampleError("overlong", f"about {tokens} tokens, limit {self.max_input_length}")
        return task, texts

    def _describe(self, tasks: Mapping[str, JudgeTask], **fields: Any) -> ScoreDescription:
        return ScoreDescription(
            max_input_length=self.max_input_length,
            score_range=ScoreRange(min=0.0, max=1.0),
            higher_is_better=True,
            tasks={name: task.info for name, task in tasks.items()},
            **fields,
        )

    def memory_bytes(self) -> tuple[int, int, int] | None:
        """Return None: the judge uses no device."""
        return None


class RulesBackend(_Judge):
    """Judges by rules over texts, without a model. Verdicts are the same on every machine."""

    def __init__(self, rubrics: Mapping[str, Rubric], max_input_length: int) -> None:
        super().__init__(rubrics, max_input_length)
        self._judged = {n: rubric for n, rubric in rubrics.items() if _has_rule(n, rubric)}

    def load(self) -> ScoreDescription:
        """Load the language identifier. Raises UserError if it is not installed."""
        try:
            checks.language_id("안녕하세요", ["ko", "en"])
        except ImportError:
            raise UserError('the judge needs `pip install -e ".[judge]"` in the checkout') from None
        texts = (shared_rules, checks, chat_marks, meta_text, pattern_rows, markup, writing_scripts)
        modules = (rules, groups, *texts, findings, languages)
        tables = (meta_text.TABLE, writing_scripts.HAN_VARIANTS, groups.TABLE)
        code = [*(Path(str(module.__file__)) for module in modules), *tables]
        return self._describe(
            self._judged,
            model="rules",
            revision=digest_files(code),
            tokenizer="none",
            dtype="none",
            device="cpu",
            versions=_SCOREKIT_VERSION | installed_versions("py3langid"),
        )

    def _encode(self, sample: JudgeSample, options: JudgeOptions) -> Encoded:
        if options.model not in (None, "rules"):
            raise SampleError(
                "invalid_input",
                f"options.model {options.model!r}: the backend `rules` has no models",
            )
        if sample.task == MQM or sample.task in self.tasks.keys() - self._judged.keys():
            raise SampleError("invalid_input", f"task {sample.task!r} needs --backend openai")
        _, texts = self._texts(sample)
        if options.votes not in (None, 1):
            raise SampleError("invalid_input", _ONE_ANSWER)
        rubric = self._judged[sample.task]
        rubric.image_parts(sample.images)
        # Tags of languages: a name may not include the variant.
        raw_texts = sample.model_extra or {}
        texts |= {
            name: raw_texts[name] for name, kind in rubric.variables.items() if kind == "language"
        }
        return Encoded(_tokens(texts), {}, (_RULES[sample.task][1], texts))

    def forward(self, batch: Sequence[Encoded]) -> list[Outcome]:
        """Return the verdicts in order."""
        return [rule(texts) for rule, texts in (encoded.payload for encoded in batch)]

    def probe(self, words: int) -> JudgeSample:
        """Return a good translation; `words` is ignored."""
        texts: Any = {"source_text": "The house is red.", "candidate": "집은 빨간색이다."}
        return JudgeSample(task="translation_filter", source_lang="en", target_lang="ko", **texts)


def _has_rule(task: str, rubric: Rubric) -> bool:
    """Return True if rules can judge the task with this rubric.

    A rubric of the operator with other variables needs an LLM."""
    return task in _RULES and rubric.variables.keys() == _RULES[task][0]


class OpenAIBackend(_Judge):
    """Asks an OpenAI-compatible server for up to `workers` samples concurrently.

    The calls run in an event loop in a separate thread; `forward` waits for them.
    """

    def __init__(
        self, rubrics: Mapping[str, Rubric], settings: JudgeSettings, key: SecretStr | None
    ) -> None:
        super().__init__(
            {**rubrics, MQM: MqmTask(settings.mqm_examples)}, settings.max_input_length
        )
        if not settings.base_url or not settings.model:
            raise UserError("--backend openai needs --base-url http://HOST:PORT/v1 and --model")
        self.model = settings.model
        self._settings = settings
        self._key = key
        self.workers = settings.max_concurrency
        self.spare_workers = max(_MIN_SPARE, settings.max_concurrency)
        self._clients = {self.model: self._new_client(self.model)}
        self._asking: Counter[str] = Counter()  # running questions by model
        self._counters = UpstreamCounters(settings.known_models)
        self.collectors = (self._counters.answers, self._counters.tokens)
        self._loop = asyncio.new_event_loop()

    def load(self) -> ScoreDescription:
        """Start the event loop. The upstream server does not have to run yet."""
        threading.Thread(target=self._loop.run_forever, name="upstream", daemon=True).start()
        settings = self._settings
        digests = {name: task.digest for name, task in self.tasks.items()}
        return self._describe(
            self.tasks,
            model=self.model,
            revision=digest_of(
                digests, settings.effort, settings.mqm_votes, settings.chat_template_kwargs
            ),
            tokenizer="upstream",
            dtype="upstream",
            device="upstream",
            versions=_SCOREKIT_VERSION,
            engine={
                "base_url": self._clients[self.model].base_url,
                "api": settings.api,
                "mqm": MqmTask.code_digest(),
            },
        )

    def _encode(self, sample: JudgeSample, options: JudgeOptions) -> Encoded:
        if isinstance(sample, Probe):
            return Encoded(1, {}, None)
        task, texts = self._texts(sample)
        votes = self._votes(sample, options)
        temperature, tokens = options.temperature, options.max_tokens
        sampling = Sampling(
            max_tokens=task.max_tokens if tokens is None else tokens,
            temperature=task.temperature_of(votes) if temperature is None else temperature,
            seed=0,
            effort=self._settings.effort,
            chat_template_kwargs=self._settings.chat_template_kwargs,
        )
        if votes > 1 and sampling.temperature == 0:
            raise SampleError("invalid_input", "options.votes: at temperature 0 all answers agree")
        image_parts = task.image_parts(sample.images)
        model = options.model or self.model
        if not self._settings.may_name(model):
            raise SampleError("invalid_input", "options.model: not a model that may be named here")
        question = JudgeRequest(task, texts, image_parts, model, sampling, votes)
        # Batches are counted in samples, regardless of their length.
        return Encoded(1, _input_fields(texts) if sample.task == MQM else {}, question)

    def _votes(self, sample: JudgeSample, options: JudgeOptions) -> int:
        """Return how many answers to request for the sample."""
        if sample.task == MQM:
            return options.votes or self._settings.mqm_votes
        if options.votes not in (None, 1):
            raise SampleError("invalid_input", _ONE_ANSWER)
        return 1

    def forward(self, batch: Sequence[Encoded]) -> list[Outcome]:
        """Return the verdicts in order; a SampleError for a sample without one."""
        outcomes = self._judge_all([_with_caller(encoded) for encoded in batch])
        return asyncio.run_coroutine_threadsafe(outcomes, self._loop).result()

    async def _judge_all(self, questions: Sequence[JudgeRequest | None]) -> list[Outcome]:
        models = [question.model for question in questions if question is not None]
        self._asking.update(models)
        try:
            await self._close_idle()
            return await gather_or_cancel(map(self._judge, questions))
        finally:
            self._asking.subtract(models)
            self._asking = +self._asking  # drop zero counts: callers can name any model

    async def _judge(self, question: JudgeRequest | None) -> Outcome:
        if question is None:  # a probe succeeds, whatever the state of the upstream
            return {"score": 1.0}
        if (known_outcome := question.task.outcome_without_llm(question.texts)) is not None:
            return known_outcome
        client = self._client(question.model)
        content = repr(question.task.messages(question.texts, question.image_parts))
        name = f"judge-{hashlib.blake2b(content.encode(), digest_size=8).hexdigest()}"
        spending = Spending(question.model, self._counters)
        try:
            answers = await gather_or_cancel(
                _vote(client, question, i, name, spending) for i in range(question.votes)
            )
        except SampleError as error:
            error.paid = spending.fields()
            return error
        return question.task.outcome(answers, question.texts) | spending.fields()

    async def _close_idle(self) -> None:
        """Close clients of models without running questions, to limit how many are open."""
        idle = [name for name in self._clients if name != self.model and not self._asking[name]]
        excess = max(0, len(self._clients) + 1 - MAX_CLIENTS)
        closing = [self._clients.pop(name) for name in idle[:excess]]
        for client in closing:  # all are removed before the first await: other tasks run meanwhile
            await client.close()

    def _client(self, model: str) -> LLMClient:
        if model not in self._clients:
            self._clients[model] = self._new_client(model)
        return self._clients[model]

    def _new_client(self, model: str) -> LLMClient:
        settings = self._settings
        return LLMClient(
            settings.base_url or "",
            model,
            api_key=self._key,
            request_timeout_s=settings.request_timeout_s,
            connect_timeout_s=settings.connect_timeout_s,
            max_concurrency=settings.max_concurrency,
            max_attempts=settings.max_attempts,
            backoff_s=BACKOFF_S,
            dialect=settings.api,
        )

    def probe(self, words: int) -> JudgeSample:
        """Return a sample for which no LLM is called."""
        return Probe(task="probe")


def _with_caller(encoded: Encoded) -> JudgeRequest | None:
    """Return the question with its caller's deadline, and a way to see whether the caller waits."""
    question: JudgeRequest | None = encoded.payload
    if question is None:
        return None
    # Without a timeout nobody waits any more, which `is_wanted` says.
    granted_s = encoded.timeout_s
    deadline_s = None if granted_s is None else max(granted_s, _MIN_DEADLINE_S)
    worker = None if encoded.worker is None else SharedWorker(encoded.worker, question.votes)
    return question._replace(deadline_s=deadline_s, is_wanted=encoded.is_wanted, worker=worker)


async def _vote(
    client: LLMClient, question: JudgeRequest, number: int, name: str, spending: Spending
) -> Any:
    """Return one of several answers for a sample.

    If one answer fails, the sample fails: a majority of fewer answers would be a different
    result."""
    slot = None if question.worker is None else VoteSlot(question.worker)
    try:
        if question.votes == 1:
            return await ask(client, question, question.sampling, name, spending, slot)
        sampling = replace(question.sampling, seed=number)
        return await ask(client, question, sampling, f"{name}-{number}", spending, slot)
    except SampleError as error:
        if question.votes == 1:
            raise
        prefixed = f"answer {number + 1} of {question.votes}: {error.message}"
        raise SampleError(error.type, prefixed, retryable=error.retryable) from None
    finally:
        if slot is not None:
            slot.release()


def _input_fields(texts: Mapping[str, str]) -> dict[str, Any]:
    """Return the result's input fields of a translation. The judge never cuts texts."""
    truncated = {"src": False, "mt": False, "ref": False}
    return {"tokens": _tokens(texts), "truncated": truncated, "mt_covered": len(texts["mt"])}
