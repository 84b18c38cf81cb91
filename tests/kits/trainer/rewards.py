"""Reward services that keep what they were asked, for the trainer's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

from bench.kit.servers import running_app, running_service, wait_ready
from scorekit.errors import SampleError
from scorekit.schemas import TranslationSample
from scorekit.server.app import create_app
from scorekit.server.backend import Encoded
from scorekit.server.fake import FakeBackend
from scorekit.server.http.settings import ServiceSettings
from scorekit.server.scoring import ScoreDescription
from tests.kits.trainer.runs import rollout
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.formula import sample_rewards
from trainer.translation.rewards.services import Rewarder

TEXTS = [("source one", "열기 bad"), ("source two", "저장")]


class Recorder(FakeBackend):
    """Keeps the samples that were asked for; `nan` in a text fails it, `long` is overlong."""

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
        for place, sample in enumerate(samples):
            if "long" in sample.mt:
                encoded[place] = SampleError("overlong", "too long")
            elif "half" in sample.mt:
                encoded[place].fields["mt_covered"] = len(sample.mt) // 2  # type: ignore[union-attr]
        return encoded


class Services:
    """Both services and how to reach them."""

    def __init__(self, metricx: Recorder, xcomet: Recorder, urls: tuple[str, str]) -> None:
        self.metricx, self.xcomet = metricx, xcomet
        self.urls = {"metricx_urls": urls[0], "xcomet_urls": urls[1]}

    def config(self, **changes: Any) -> RewardConfig:
        return RewardConfig(**(self.urls | {"deadline_s": 10.0} | changes))


@contextmanager
def reward_services() -> Iterator[Services]:
    """Both services, running."""
    metricx, xcomet = Recorder("metricx"), Recorder("xcomet")
    with running_service(metricx) as m, running_service(xcomet) as x:
        yield Services(metricx, xcomet, (m, x))


class Switch:
    """An app before a service's: 503 to the requests for scores that `down` says; to every one
    while `away` is set."""

    def __init__(self, app: Any) -> None:
        self.app = app
        self.down: Callable[[str], bool] = lambda body: False
        self.away = False
        self.refused = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        asked = scope["type"] == "http" and scope["path"] == "/v1/score"
        if not asked and not (self.away and scope["type"] == "http"):
            return await self.app(scope, receive, send)
        message = await receive()
        if not self.away and not self.down(message["body"].decode()):
            messages = iter([message])

            async def replay() -> Any:
                return next(messages, None) or await receive()

            return await self.app(scope, replay, send)
        self.refused += 1
        await send({"type": "http.response.start", "status": 503, "headers": []})
        await send({"type": "http.response.body", "body": b"down"})


@contextmanager
def switched_service(service: Any = "metricx") -> Iterator[tuple[Switch, str]]:
    """A service behind a `Switch`."""
    switch = Switch(create_app(FakeBackend(service), ServiceSettings(cache="memory")))
    with running_app(switch) as url:
        wait_ready(url)
        yield switch, url


def rewards_of(cfg: RewardConfig, *texts: str, finish_reason: str = "eos") -> Any:
    """Rewards of texts with a token for each character, and an EOS."""
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
    with closing(Rewarder(cfg)) as rewarder:
        scores = rewarder.score([(r.src_text, r.completion_text) for r in rollouts])
    return sample_rewards(rollouts, scores, cfg)
