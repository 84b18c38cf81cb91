"""Reward services that record their requests, for the trainer's tests."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

from scorekit.errors import SampleError
from scorekit.languages import find_language
from scorekit.schemas import JudgeOptions, JudgeSample, ScoreRange, TaskInfo, TranslationSample
from scorekit.server.app import create_app
from scorekit.server.backend import Encoded, Outcome
from scorekit.server.fake import FakeBackend, fake_spans
from scorekit.server.score_endpoint import ScoreDescription, ScoreEndpoint
from scorekit.server.settings import ServiceSettings
from testing.servers import running_app, running_service, wait_ready
from tests.kits.trainer.runs import rollout
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.sample_reward import compute_rewards
from trainer.translation.rewards.services import RewardClient

_VARIABLES = {
    "mqm": {"src", "mt", "src_lang", "tgt_lang"},
    "fluency": {"text", "language"},
    "translation_filter": {"source_text", "candidate", "source_lang", "target_lang"},
}
TEXTS = [("source one", "열기 bad"), ("source two", "저장")]


class Recorder(FakeBackend):
    """Records the samples that were requested. `nan` in a text fails it, `long` is overlong."""

    def __init__(self, service: Any = "metricx", *, higher: bool | None = None) -> None:
        super().__init__(service)
        self.samples: list[TranslationSample] = []
        self.higher = higher

    def load(self) -> ScoreDescription:
        description = super().load()
        if self.higher is not None:
            description.higher_is_better = self.higher
        return description

    def encode(
        self, samples: Sequence[TranslationSample], options: Any
    ) -> list[Encoded | SampleError]:
        self.samples += samples
        encoded = super().encode(samples, options)
        for index, sample in enumerate(samples):
            if "long" in sample.mt:
                encoded[index] = SampleError("overlong", "too long")
            elif "half" in sample.mt:
                encoded[index].fields["mt_covered"] = len(sample.mt) // 2  # type: ignore[union-attr]
        return encoded


class OtherMetric(Recorder):
    """A metric that is no reward. Its score, 0 to 1, is a function of the texts that it reads.

    ref: how it reads references.
    higher: if False, lower scores are better and the score is reversed.
    """

    def __init__(self, ref: Any = "optional", *, model: str = "other", higher: bool = True) -> None:
        super().__init__("xcomet", higher=higher)
        self.ref, self.model = ref, model

    def load(self) -> ScoreDescription:
        description = super().load()
        description.model = self.model
        description.inputs = {"src": "required", "mt": "required", "ref": self.ref}
        return description


class Services:
    """Holds both services and their URLs."""

    def __init__(self, metricx: Recorder, xcomet: Recorder, urls: tuple[str, str]) -> None:
        self.metricx, self.xcomet = metricx, xcomet
        self.urls = {"metricx_urls": urls[0], "xcomet_urls": urls[1]}

    def config(self, **changes: Any) -> RewardConfig:
        return RewardConfig(**(self.urls | {"deadline_s": 10.0} | changes))


@contextmanager
def reward_services() -> Iterator[Services]:
    """Start both services."""
    metricx, xcomet = Recorder("metricx"), Recorder("xcomet")
    with running_service(metricx) as m, running_service(xcomet) as x:
        yield Services(metricx, xcomet, (m, x))


class Switch:
    """An app that is before a service and can answer 503.

    down: returns whether a request for scores is refused.
    away: every request is refused.
    refuses_after: how many requests for scores are answered before one is refused; it waits for
    them.
    """

    def __init__(self, app: Any) -> None:
        self.app = app
        self.down: Callable[[str], bool] = lambda body: False
        self.away = False
        self.answered = self.refused = self.refuses_after = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        is_score_request = scope["type"] == "http" and scope["path"] == "/v1/score"
        if not is_score_request and not (self.away and scope["type"] == "http"):
            return await self.app(scope, receive, send)
        message = await receive()
        if not self.away and not self.down(message["body"].decode()):
            messages = iter([message])

            async def replay() -> Any:
                return next(messages, None) or await receive()

            await self.app(scope, replay, send)
            self.answered += 1
            return None
        while self.answered < self.refuses_after:
            await asyncio.sleep(0.001)
        self.refused += 1
        await send({"type": "http.response.start", "status": 503, "headers": []})
        await send({"type": "http.response.body", "body": b"down"})


@contextmanager
def switched_service(service: Any = "metricx") -> Iterator[tuple[Switch, str]]:
    """Start a service behind a `Switch`."""
    switch = Switch(create_app(FakeBackend(service), ServiceSettings(cache="memory")))
    with running_app(switch) as url:
        wait_ready(url)
        yield switch, url


def rewards_of(cfg: RewardConfig, *texts: str, finish_reason: str = "eos") -> Any:
    """Return rewards of texts with a token for each character, and an EOS."""
    rollouts = [
        rollout(
            [1],
            [5] * (len(text) + 1),
            text,
            src_text=f"source of {text}",
            token_char_offsets=[*((i, i + 1) for i in range(len(text))), (len(text), len(text))],
            finish_reason=finish_reason,
        )
        for text in texts
    ]
    with closing(RewardClient(cfg)) as rewarder:
        scores = rewarder.score([(r.src_text, r.completion_text) for r in rollouts])
    return compute_rewards(rollouts, scores, cfg)


class FakeJudge:
    """A judge without an LLM. Its answers are a function of the texts.

    `mqm`: runs of ASCII letters in `mt` are errors, as in xCOMET's fake, but without a confidence.
    `[words]` of the source that `mt` lacks are omissions. A rubric's score is the share of its
    text's characters that are Hangul. A sample fails if it has `nan` in it or an invalid language.
    """

    service = "judge"

    def __init__(self, *, lower: bool = True, has_mqm: bool = True) -> None:
        self.lower, self.has_mqm = lower, has_mqm
        self.endpoint = ScoreEndpoint(JudgeSample, JudgeOptions)
        self.asked: list[dict[str, Any]] = []

    def load(self) -> ScoreDescription:
        """Do nothing: there is no model."""
        mqm = TaskInfo(score_range=ScoreRange(min=0, max=25), higher_is_better=not self.lower)
        return ScoreDescription(
            model="fake-judge",
            revision="fake",
            tokenizer="none",
            dtype="none",
            device="fake",
            max_input_length=1000,
            score_range=ScoreRange(min=0.0, max=1.0),
            higher_is_better=True,
            tasks={"mqm": mqm} if self.has_mqm else {},
        )

    def encode(self, samples: Sequence[JudgeSample], options: Any) -> list[Encoded | SampleError]:
        """Refuse variables that the task does not have."""
        return [self._encoded(sample) for sample in samples]

    def _encoded(self, sample: JudgeSample) -> Encoded | SampleError:
        texts = dict(sample.model_extra or {})
        self.asked.append({"task": sample.task, **texts})
        variables = _VARIABLES.get(sample.task)
        if variables is None:
            return SampleError("invalid_input", f"no task {sample.task!r}")
        if variables != texts.keys():
            return SampleError("invalid_input", f"variables: {sorted(variables)}")
        if any(find_language(v) is None for k, v in texts.items() if "lang" in k):
            return SampleError("invalid_input", "no such language")
        read = {"tokens": 0, "truncated": {"src": False, "mt": False, "ref": False}}
        fields = read | {"mt_covered": len(texts["mt"])} if sample.task == "mqm" else {}
        return Encoded(1, fields, texts)

    def forward(self, batch: Sequence[Encoded]) -> list[Outcome]:
        """Judge by the texts alone."""
        return [self._outcome(encoded.payload) for encoded in batch]

    def _outcome(self, texts: dict[str, str]) -> Outcome:
        if any("nan" in text for text in texts.values()):
            return SampleError("model_failure", "the model said no verdict")
        if "mt" not in texts:
            text = texts.get("candidate", texts.get("text", ""))
            hangul = sum("가" <= letter <= "힣" for letter in text)
            verdict = {"pass": True, "reason_code": "ok", "notes": ""}
            return {"score": hangul / max(1, len(text)), "verdict": verdict}
        spans = [
            span | {"confidence": None, "category": "fluency"} for span in fake_spans(texts["mt"])
        ]
        omissions = [
            {
                "start": m.start(),
                "end": m.end(),
                "severity": "MAJOR",
                "confidence": None,
                "text": m.group(),
                "category": "accuracy/omission",
            }
            for m in re.finditer(r"\[(\w+)\]", texts["src"])
            if m.group(1) not in texts["mt"]
        ]
        unplaced = [{"quote": "?", "of": "mt", "reason": "ambiguous", "severity": "MINOR"}] * texts[
            "mt"
        ].count("?")
        score = min(25.0, 5.0 * len(omissions) + len(spans) + len(unplaced))
        spans_by_field = {"error_spans": spans, "omissions": omissions, "unplaced": unplaced}
        return {"score": score, **spans_by_field}

    def probe(self, words: int) -> JudgeSample:
        """Return a sample for the warm-up."""
        return JudgeSample(task="fluency", text="말 " * words, language="ko")

    def memory_bytes(self) -> tuple[int, int, int] | None:
        """Return 0."""
        return None


@contextmanager
def judge_service(**settings: Any) -> Iterator[tuple[FakeJudge, str]]:
    """Start a fake judge, and yield it and its URL."""
    judge = FakeJudge(**settings)
    with running_service(judge) as url:
        judge.asked.clear()
        yield judge, url
