"""The judge's back ends: `rules`, which needs nothing, and `openai`, which asks an LLM.

An upstream server that is away, slow or confused fails samples, never the service: loading,
warm-up and readiness do not ask it.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import SecretStr

from scorekit import languages
from scorekit.digest import digest_files
from scorekit.errors import SampleError, UserError
from scorekit.llm import LLMClient, LLMError, Sampling, parse_json
from scorekit.schemas import JudgeOptions, JudgeSample, ScoreRange
from scorekit.server.backend import Encoded, Outcome, installed_versions
from scorekit.server.scoring import ScoreDescription, Scoring
from scorekit.text import chatmarks, chatter, checks, markup, variants, writing_scripts
from scorekit.text import rules as shared_rules
from services.judge import rules
from services.judge.rubrics import Rubric, digest_of
from services.judge.settings import BACKOFF_S, JudgeSettings

#: The one task of the back end `rules`.
RULES_TASK = "translation_filter"
#: Clients that are kept open for models that requests named.
MAX_CLIENTS = 8
#: Added for the second try after an answer that was not the JSON asked for.
_AGAIN = (
    "\n\nAn earlier answer was not the JSON asked for. Answer with one JSON object, nothing "
    "before or after it."
)


class Probe(JudgeSample):
    """What warm-up and health checks ask with. No request can hold one."""


def _tokens(texts: Mapping[str, str]) -> int:
    """Tokens, counted as four bytes each."""
    return sum(len(text.encode()) for text in texts.values()) // 4 + 1


class _Judge:
    """What both back ends do alike: check samples against their rubrics."""

    service = "judge"
    verb = Scoring(JudgeSample, JudgeOptions)

    def __init__(self, rubrics: Mapping[str, Rubric], max_input_length: int) -> None:
        self.rubrics = rubrics
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

    def _texts(self, sample: JudgeSample) -> tuple[Rubric, dict[str, str]]:
        rubric = self.rubrics.get(sample.task)
        if rubric is None:
            known = ", ".join(self.rubrics)
            raise SampleError("invalid_input", f"task {sample.task[:64]!r}: there are {known}")
        texts = rubric.prepare(sample.model_extra or {})
        tokens = _tokens(texts)
        if tokens > self.max_input_length:
            raise SampleError("overlong", f"about {tokens} tokens, limit {self.max_input_length}")
        return rubric, texts

    def _describe(self, **told: Any) -> ScoreDescription:
        return ScoreDescription(
            max_input_length=self.max_input_length,
            score_range=ScoreRange(min=0.0, max=1.0),
            higher_is_better=True,
            **told,
        )

    def memory_bytes(self) -> tuple[int, int, int] | None:
        """Nothing on a device."""
        return None


class RulesBackend(_Judge):
    """Rules over the two texts: the same verdict everywhere, without any model."""

    def load(self) -> ScoreDescription:
        """Load the language identifier. Raises UserError where it is not installed."""
        try:
            checks.language_id("안녕하세요", ["ko", "en"])
        except ImportError:
            raise UserError('the judge needs `pip install -e ".[judge]"` in the checkout') from None
        texts = (shared_rules, checks, chatmarks, chatter, markup, writing_scripts, variants)
        modules = (rules, *texts, languages)
        code = [*(Path(str(module.__file__)) for module in modules), variants.TABLE]
        return self._describe(
            model="rules",
            revision=digest_files(code),
            tokenizer="none",
            dtype="none",
            device="cpu",
            versions=installed_versions("scorekit", "py3langid"),
        )

    def _encoded(self, sample: JudgeSample, options: JudgeOptions) -> Encoded:
        if options.model not in (None, "rules"):
            raise SampleError("invalid_input", f"options.model {options.model!r}: rules ask none")
        if sample.task in self.rubrics.keys() - {RULES_TASK}:
            raise SampleError("invalid_input", f"task {sample.task!r} needs --backend openai")
        said = sample.model_extra or {}  # by their tags: a name may not say the variant
        texts = self._texts(sample)[1] | {key: said[key] for key in ("source_lang", "target_lang")}
        return Encoded(_tokens(texts), {}, texts)

    def forward(self, batch: Sequence[Encoded]) -> list[Outcome]:
        """Verdicts, in order."""
        return [rules.judge_translation(one.payload) for one in batch]

    def probe(self, words: int) -> JudgeSample:
        """A good translation; its length is no matter."""
        texts = {"source_text": "The house is red.", "candidate": "집은 빨간색이다."}
        return JudgeSample(task=RULES_TASK, source_lang="en", target_lang="ko", **texts)


class _Question(NamedTuple):
    rubric: Rubric
    texts: dict[str, str]
    model: str
    sampling: Sampling


class OpenAIBackend(_Judge):
    """Asks an OpenAI-compatible server, about `workers` samples at once: whenever one is answered
    the next one is asked about, however slow the others are.

    An event loop in a thread of its own asks; `forward` waits for it.
    """

    def __init__(
        self, rubrics: Mapping[str, Rubric], settings: JudgeSettings, key: SecretStr | None
    ) -> None:
        super().__init__(rubrics, settings.max_input_length)
        if not settings.base_url or not settings.model:
            raise UserError("--backend openai needs --base-url http://HOST:PORT/v1 and --model")
        self.model = settings.model
        self._settings = settings
        self._key = key
        self.workers = settings.max_concurrency
        self._clients = {self.model: self._new_client(self.model)}
        self._asking: Counter[str] = Counter()  # questions in hand, by model
        self._loop = asyncio.new_event_loop()

    def load(self) -> ScoreDescription:
        """Nothing to load: the upstream server need not be there yet."""
        threading.Thread(target=self._loop.run_forever, name="upstream", daemon=True).start()
        return self._describe(
            model=self.model,
            revision=digest_of(self.rubrics),
            tokenizer="upstream",
            dtype="upstream",
            device="upstream",
            versions=installed_versions("scorekit"),
            engine={"base_url": self._clients[self.model].base_url},
        )

    def _encoded(self, sample: JudgeSample, options: JudgeOptions) -> Encoded:
        if isinstance(sample, Probe):
            return Encoded(1, {}, None)
        rubric, texts = self._texts(sample)
        temperature, tokens = options.temperature, options.max_tokens
        sampling = Sampling(
            max_tokens=rubric.max_tokens if tokens is None else tokens,
            temperature=rubric.temperature if temperature is None else temperature,
            seed=0,
        )
        question = _Question(rubric, texts, options.model or self.model, sampling)
        return Encoded(1, {}, question)  # a batch is so many requests, however long

    def forward(self, batch: Sequence[Encoded]) -> list[Outcome]:
        """Verdicts, in order; a sample without one has the reason why."""
        asked = self._judge_all([one.payload for one in batch])
        return asyncio.run_coroutine_threadsafe(asked, self._loop).result()

    async def _judge_all(self, questions: Sequence[_Question | None]) -> list[Outcome]:
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

    async def _judge(self, question: _Question | None) -> Outcome:
        if question is None:  # a probe: the service answers, whatever the upstream does
            return {"score": 1.0}
        client = self._client(question.model)
        messages = question.rubric.messages(question.texts)
        name = hashlib.blake2b(repr(messages).encode(), digest_size=8).hexdigest()
        again = [messages[0], messages[1] | {"content": messages[1]["content"] + _AGAIN}]
        try:
            try:
                return await _ask(client, question, messages, f"judge-{name}")
            except _Unfit as unfit:
                if unfit.is_cut:
                    return unfit.error
                return await _ask(client, question, again, f"judge-{name}-again")
        except _Unfit as unfit:
            return unfit.error
        except LLMError as error:
            if error.type == "overlong":
                return SampleError("overlong", f"{error}")
            return SampleError("upstream", f"{error}", retryable=error.retryable)
        except UserError as error:  # a key or a model's name that the upstream refuses
            return SampleError("upstream", f"{error}", retryable=False)

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
        )

    def probe(self, words: int) -> JudgeSample:
        """A sample about which nobody is asked."""
        return Probe(task="probe")


class _Unfit(Exception):
    """The LLM answered, but gave no verdict."""

    def __init__(self, error: LLMError, max_tokens: int) -> None:
        super().__init__(error)
        self.is_cut = error.type == "length"
        if self.is_cut:
            message = f"the judge's JSON was cut at {max_tokens} tokens: raise options.max_tokens"
        else:
            message = f"the judge's answer, asked for twice, is no verdict: {error.message[:200]}"
        self.error = SampleError("model_failure", message)


async def _ask(
    client: LLMClient, question: _Question, messages: list[dict[str, str]], request_id: str
) -> Outcome:
    schema = question.rubric.schema_
    (choice,) = await client.chat(
        messages, question.sampling, request_id=request_id, json_schema=schema
    )
    try:
        return question.rubric.outcome(parse_json(choice, schema))
    except LLMError as error:
        raise _Unfit(error, question.sampling.max_tokens) from None
