"""A backend without a model. Its answers depend on the input, so swapped samples are detected.

`python -m scorekit.server.fake` serves it, to write and test callers without a model.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from scorekit.errors import SampleError
from scorekit.schemas import MetricXOptions, ScoreRange, TranslationSample, XCometOptions
from scorekit.server.backend import Encoded, Outcome, translation_probe
from scorekit.server.score_endpoint import ScoreDescription, ScoreEndpoint
from scorekit.server.settings import ServiceSettings

#: Longest input in tokens (words) that the fake reads.
MAX_INPUT_LENGTH = 512
_SEVERITIES = ("MINOR", "MAJOR", "CRITICAL")


def fake_score(sample: TranslationSample, top: float) -> float:
    """Return a number in [0, top) that is a function of the three texts."""
    text = "\x1f".join((sample.src, sample.mt, sample.ref or ""))
    digest = hashlib.blake2b(text.encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48 * top


def fake_spans(mt: str) -> list[dict[str, Any]]:
    """Return an error span for every run of ASCII letters; longer runs have a higher severity."""
    return [
        {
            "start": m.start(),
            "end": m.end(),
            "severity": _SEVERITIES[min(2, len(m.group()) // 4)],
            "confidence": 0.5 + 0.5 / len(m.group()),
            "text": m.group(),
        }
        for m in re.finditer("[A-Za-z]+", mt)
    ]


class FakeBackend:
    """Replaces MetricX or xCOMET.

    seconds_per_batch, seconds_per_pair: duration of `forward`, which sleeps without the GIL, as
    with a GPU.
    poison: if an `mt` contains this text, the full batch raises.
    """

    def __init__(
        self,
        service: Literal["metricx", "xcomet"] = "metricx",
        *,
        seconds_per_batch: float = 0.0,
        seconds_per_pair: float = 0.0,
        poison: str | None = None,
    ) -> None:
        self.service: str = service
        self.seconds_per_batch = seconds_per_batch
        self.seconds_per_pair = seconds_per_pair
        self.poison = poison
        self.batches: list[int] = []  # sizes, in order
        self.endpoint = ScoreEndpoint(
            TranslationSample, MetricXOptions if service == "metricx" else XCometOptions
        )

    def load(self) -> ScoreDescription:
        """Return the description of the fake model; nothing is loaded."""
        metricx = self.service == "metricx"
        return ScoreDescription(
            model=f"fake-{self.service}",
            revision="fake",
            tokenizer="words",
            dtype="float64",
            device="fake",
            max_input_length=MAX_INPUT_LENGTH,
            score_range=ScoreRange(min=0.0, max=25.0 if metricx else 1.0),
            higher_is_better=not metricx,
        )

    def encode(
        self, samples: Sequence[TranslationSample], options: Any
    ) -> list[Encoded | SampleError]:
        """Count words as tokens; overlong samples are cut or refused as the options say."""
        limit = min(options.max_input_length or MAX_INPUT_LENGTH, MAX_INPUT_LENGTH)
        encoded: list[Encoded | SampleError] = []
        for sample in samples:
            words = len(sample.src.split()) + len(sample.mt.split()) + 1
            if words > limit and options.overlong == "error":
                encoded.append(SampleError("overlong", f"{words} tokens, limit {limit}"))
                continue
            fields = {
                "tokens": min(words, limit),
                "truncated": {"src": words > limit, "mt": False, "ref": False},
                "mt_covered": len(sample.mt),
            }
            encoded.append(Encoded(min(words, limit), fields, sample))
        return encoded

    def forward(self, batch: Sequence[Encoded]) -> list[Outcome]:
        """Score a batch; an `mt` that contains `nan` gets a score that is not finite."""
        pause = self.seconds_per_batch + self.seconds_per_pair * len(batch)
        if pause:
            time.sleep(pause)
        self.batches.append(len(batch))
        if self.poison is not None and any(self.poison in e.payload.mt for e in batch):
            raise RuntimeError("poisoned batch")
        return [self._outcome(e.payload) for e in batch]

    def _outcome(self, sample: TranslationSample) -> Outcome:
        if "nan" in sample.mt:
            return {"score": float("nan")}
        if self.service == "metricx":
            return {"score": fake_score(sample, 25.0)}
        return {"score": fake_score(sample, 1.0), "error_spans": fake_spans(sample.mt)}

    def probe(self, words: int) -> TranslationSample:
        """Return a translation of about that many words on each side."""
        return translation_probe(words)

    def memory_bytes(self) -> tuple[int, int, int] | None:
        """Return None: a fake uses no device memory."""
        return None


class FakeSettings(ServiceSettings):
    """Serve made-up scores: a function of the texts, without a model."""

    model_config = SettingsConfigDict(env_prefix="FAKE_", cli_prog_name="scorekit.server.fake")

    service: Literal["metricx", "xcomet"] = Field("metricx", description="What it stands in for.")
    seconds_per_batch: float = Field(0.0, ge=0, description="Pause for each batch.")
    seconds_per_pair: float = Field(0.0, ge=0, description="Pause for each sample of a batch.")


def make_backend(settings: FakeSettings) -> FakeBackend:
    """Return the fake backend of the settings."""
    return FakeBackend(
        settings.service,
        seconds_per_batch=settings.seconds_per_batch,
        seconds_per_pair=settings.seconds_per_pair,
    )


if __name__ == "__main__":
    from scorekit.server.run import main

    main(FakeSettings, make_backend)
