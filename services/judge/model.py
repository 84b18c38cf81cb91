"""The judge's back ends: `rules`, which needs nothing, and `openai`, which asks an LLM.

An upstream server that is away, slow or confused fails samples, never the service: loading,
warm-up and readiness do not ask it.
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
from scorekit.schemas import JudgeOptions, JudgeSample, ScoreRange
from scorekit.server.backend import Encoded, Outcome, installed_versions
from scorekit.server.scoring import ScoreDescription, Scoring
from scorekit.text import chatmarks, chatter, checks, markup, variants, writing_scripts
from scorekit.text import letter_groups as groups
from scorekit.text import rules as shared_rules
from services.judge import answers, rules
from services.judge.asking import JudgeQuestion, JudgeTask, all_of, ask
from services.judge.mqm import MqmTask
from services.judge.rubrics import MQM, Rubric, digest_of
from services.judge.settings import BACKOFF_S, JudgeSettings
from services.judge.spending import Spending, UpstreamCounters

#: What the back end `rules` can judge: task -> variables of the built-in rubric, and the rule.
_RULES: dict[str, tuple[frozenset[str], Callable[[Mapping[str, str]], Outcome]]] = {
    "translation_filter": (
        frozenset({"source_lang", "target_lang", "source_text", "candidate"}),
        rules.judge_translation,
    ),
    "answer_correctness": (frozenset({"query", "answer", "reference"}), answers.judge_answer),
}
_OWN_VERSION: dict[str, str | None] = {"scorekit": __version__}  # in the cache keys: code judges
_ONE_ANSWER = "options.votes: the task has one answer; mqm alone can be asked several times"
#: Clients that are kept open for models that requests named.
MAX_CLIENTS = 8
#: Half of it is the least that one attempt at the upstream server gets, however short a caller's
#: time-out is: an answer that is paid for is in the cache when he comes again.
_LEAST_DEADLINE_S = 20.0


class Probe(JudgeSample):
    """What warm-up and health checks ask with. No request can hold one."""


def _tokens(texts: Mapping[str, str]) -> int:
    """Tokens, counted as four bytes each."""
    return sum(len(text.encode()) for text in texts.values()) // 4 + 1


class _Judge:
    """What both back ends do alike: check samples against their rubrics."""

    service = "judge"
    verb = Scoring(JudgeSample, JudgeOptions)

    def __init__(self, tasks: Mapping[str, JudgeTask], max_input_length: int) -> None:
        self.tasks = tasks
        self.max_input_length = max_input_length

    def encode(self, samples: Sequence[JudgeSample], options: Any) -> list[Encoded | SampleError]:
        """Check the samples."""
        encoded: list[Encoded | SampleError] = []
        for sample in samples:
            try:
                encoded.append(self._encoded(sample, options))
            except SampleError as error:
                encoded.append(error)
        return encoded

    def _encoded(self, sample: JudgeSample, options: JudgeOptions) -> Encoded:
        raise NotImplementedError

    def _texts(self, sample: JudgeSample) -> tuple[JudgeTask, dict[str, str]]:
        task = self.tasks.get(sample.task)
        if task is None:
            known = ", ".join(self.tasks)
            raise SampleError("invalid_input", f"task {sample.task[:64]!r}: there are {known}")
        texts = task.prepare(sample.model_extra or {})
        tokens = _tokens(texts)
        if tokens > self.max_input_length:
            raise SampleError("overlong", f"about {tokens} tokens, limit {self.max_input_length}")
        return task, texts

    def _describe(self, tasks: Mapping[str, JudgeTask], **told: Any) -> ScoreDescription:
        return ScoreDescription(
            max_input_length=self.max_input_length,
            score_range=ScoreRange(min=0.0, max=1.0),
            higher_is_better=True,
            tasks={name: task.info for name, task in tasks.items()},
            **told,
        )

    def memory_bytes(self) -> tuple[int, int, int] | None:
        """Nothing on a device."""
        return None


class RulesBackend(_Judge):
    """Rules over texts: the same verdict everywhere, without any model."""

    def __init__(self, rubrics: Mapping[str, Rubric], max_input_length: int) -> None:
        super().__init__(rubrics, max_input_length)
        self._judged = {n: rubric for n, rubric in rubrics.items() if _has_rule(n, rubric)}

    def load(self) -> ScoreDescription:
        """Load the language identifier. Raises UserError where it is not installed."""
        try:
            checks.language_id("안녕하세요", ["ko", "en"])
        except ImportError:
            raise UserError('the judge needs `pip install -e ".[judge]"` in the checkout') from None
        texts = (shared_rules, checks, chatmarks, chatter, markup, writing_scripts, variants)
        modules = (rules, answers, groups, *texts, languages)
        code = [*(Path(str(module.__file__)) for module in modules), variants.TABLE, groups.TABLE]
        return self._describe(
            self._judged,
            model="rules",
            revision=digest_files(code),
            tokenizer="none",
            dtype="none",
            device="cpu",
            versions=_OWN_VERSION | installed_versions("py3langid"),
        )

    def _encoded(self, sample: JudgeSample, options: JudgeOptions) -> Encoded:
        if options.model not in (None, "rules"):
            raise SampleError("invalid_input", f"options.model {options.model!r}: rules ask none")
        if sample.task == MQM or sample.task in self.tasks.keys() - self._judged.keys():
            raise SampleError("invalid_input", f"task {sample.task!r} needs --backend openai")
        _, texts = self._texts(sample)
        if options.votes not in (None, 1):
            raise SampleError("invalid_input", _ONE_ANSWER)
        rubric = self._judged[sample.task]
        rubric.pictures(sample.images)
        said = sample.model_extra or {}  # languages by their tags: a name may not say the variant
        texts |= {name: said[name] for name, kind in rubric.variables.items() if kind == "language"}
        return Encoded(_tokens(texts), {}, (_RULES[sample.task][1], texts))

    def forward(self, batch: Sequence[Encoded]) -> list[Outcome]:
        """Verdicts, in order."""
        return [rule(texts) for rule, texts in (one.payload for one in batch)]

    def probe(self, words: int) -> JudgeSample:
        """A good translation; its length is no matter."""
        texts: Any = {"source_text": "The house is red.", "candidate": "집은 빨간색이다."}
        return JudgeSample(task="translation_filter", source_lang="en", target_lang="ko", **texts)


def _has_rule(task: str, rubric: Rubric) -> bool:
    """Whether rules judge a task; not one whose rubric the operator has replaced by another."""
    return task in _RULES and rubric.variables.keys() == _RULES[task][0]


class OpenAIBackend(_Judge):
    """Asks an OpenAI-compatible server, about `workers` samples at once: whenever one is answered
    the next one is asked about, however slow the others are.

    An event loop in a thread of its own asks; `forward` waits for it.
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
        self._clients = {self.model: self._new_client(self.model)}
        self._asking: Counter[str] = Counter()  # questions in hand, by model
        self._counters = UpstreamCounters(settings.known_models)
        self.collectors = (self._counters.answers, self._counters.tokens)
        self._loop = asyncio.new_event_loop()

    def load(self) -> ScoreDescription:
        """Nothing to load: the upstream server need not be there yet."""
        threading.Thread(target=self._loop.run_forever, name="upstream", daemon=True).start()
        settings = self._settings
        digests = {name: task.digest for name, task in self.tasks.items()}
        return self._describe(
            self.tasks,
            model=self.model,
            revision=digest_of(digests, settings.effort, settings.mqm_votes),
            tokenizer="upstream",
            dtype="upstream",
            device="upstream",
            versions=_OWN_VERSION,
            engine={
                "base_url": self._clients[self.model].base_url,
                "api": settings.api,
                "mqm": MqmTask.code_digest(),
            },
        )

    def _encoded(self, sample: JudgeSample, options: JudgeOptions) -> Encoded:
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
        )
        if votes > 1 and sampling.temperature == 0:
            raise SampleError("invalid_input", "options.votes: at temperature 0 all answers agree")
        pictures = task.pictures(sample.images)
        model = options.model or self.model
        if not self._settings.may_name(model):
            raise SampleError("invalid_input", "options.model: not a model that may be named here")
        question = JudgeQuestion(task, texts, pictures, model, sampling, votes)
        # A batch is so many samples, however long.
        return Encoded(1, _read_whole(texts) if sample.task == MQM else {}, question)

    def _votes(self, sample: JudgeSample, options: JudgeOptions) -> int:
        """How often the sample is asked about."""
        if sample.task == MQM:
            return options.votes or self._settings.mqm_votes
        if options.votes not in (None, 1):
            raise SampleError("invalid_input", _ONE_ANSWER)
        return 1

    def forward(self, batch: Sequence[Encoded]) -> list[Outcome]:
        """Verdicts, in order; a sample without one has the reason why."""
        asked = self._judge_all([_timed(one.payload, one.timeout_s) for one in batch])
        return asyncio.run_coroutine_threadsafe(asked, self._loop).result()

    async def _judge_all(self, questions: Sequence[JudgeQuestion | None]) -> list[Outcome]:
        models = [question.model for question in questions if question is not None]
        self._asking.update(models)
        try:
            await self._close_idle()
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._judge(question)) for question in questions]
        finally:
            self._asking.subtract(models)
            self._asking = +self._asking  # callers name models: none is kept that nobody asks
        return [task.result() for task in tasks]

    async def _judge(self, question: JudgeQuestion | None) -> Outcome:
        if question is None:  # a probe: the service answers, whatever the upstream does
            return {"score": 1.0}
        if (known := question.task.unasked(question.texts)) is not None:
            return known
        client = self._client(question.model)
        content = repr(question.task.messages(question.texts, question.pictures))
        name = f"judge-{hashlib.blake2b(content.encode(), digest_size=8).hexdigest()}"
        spending = Spending(question.model, self._counters)
        try:
            answers = await all_of(
                [_vote(client, question, i, name, spending) for i in range(question.votes)]
            )
        except SampleError as error:
            error.paid = spending.fields()
            return error
        return question.task.outcome(answers, question.texts) | spending.fields()

    async def _close_idle(self) -> None:
        """Close clients of models that nobody asks now, so that not too many stay open."""
        idle = [name for name in self._clients if name != self.model and not self._asking[name]]
        excess = max(0, len(self._clients) + 1 - MAX_CLIENTS)
        gone = [self._clients.pop(name) for name in idle[:excess]]
        for client in gone:  # all are out of reach before the first wait: others may ask meanwhile
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
        """A sample about which nobody is asked."""
        return Probe(task="probe")


def _timed(question: JudgeQuestion | None, timeout_s: float | None) -> JudgeQuestion | None:
    """Return the question with the time that its caller grants."""
    if question is None or timeout_s is None:
        return question
    return question._replace(deadline_s=max(timeout_s, _LEAST_DEADLINE_S))


async def _vote(
    client: LLMClient, question: JudgeQuestion, number: int, name: str, spending: Spending
) -> Any:
    """One of the answers about a sample. Where one fails the sample does: no majority of fewer is
    passed off as one of all."""
    if question.votes == 1:
        return await ask(client, question, question.sampling, name, spending)
    try:
        sampling = replace(question.sampling, seed=number)
        return await ask(client, question, sampling, f"{name}-{number}", spending)
    except SampleError as error:
        said = f"answer {number + 1} of {question.votes}: {error.message}"
        raise SampleError(error.type, said, retryable=error.retryable) from None


def _read_whole(texts: Mapping[str, str]) -> dict[str, Any]:
    """What is told of the texts of a translation: nothing is ever cut."""
    truncated = {"src": False, "mt": False, "ref": False}
    return {"tokens": _tokens(texts), "truncated": truncated, "mt_covered": len(texts["mt"])}
