"""A reward model without a network: its outputs are a function of the texts."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from scorekit.errors import SampleError
from scorekit.schemas import RewardOptions, RewardSample, ScoreRange
from scorekit.server.backend import Encoded, Outcome
from services.reward_model.endpoint import (
    RewardDescription,
    RewardEndpoint,
    RewardRerankEndpoint,
    weighted_sum,
)
from services.reward_model.prompts import BUILT_IN, ScoringPrompt

WEIGHTS = {"helpful": 0.75, "verbose": -0.5}


class FakeReward:
    """A reward model whose tokens are words. A sample may have `max_length` of them.

    prompt: what `src` and `mt` are put into."""

    service = "reward_model"

    def __init__(self, max_length: int = 64, prompt: ScoringPrompt = BUILT_IN["messages"]) -> None:
        self.endpoint = RewardEndpoint(RewardRerankEndpoint())
        self.max_length, self.prompt = max_length, prompt
        self.batches: list[int] = []

    def load(self) -> RewardDescription:
        """Return the description at once. There is nothing to load."""
        return RewardDescription(
            model="fake",
            revision="0",
            tokenizer="words",
            dtype="float64",
            device="fake",
            max_input_length=self.max_length,
            score_range=ScoreRange(min=None, max=None),
            higher_is_better=True,
            inputs=self.prompt.inputs(),
            weights=WEIGHTS,
            has_chat_template=True,
            takes_pairs=True,
            prompt="messages",
        )

    def encode(
        self, samples: Sequence[RewardSample], options: RewardOptions
    ) -> list[Encoded | SampleError]:
        """Split the texts into words, at most `max_length`."""
        encoded: list[Encoded | SampleError] = []
        for sample in samples:
            form = self.prompt.form_of(sample)
            texts = [turn["content"] for turn in form.messages or ()]
            words = " ".join(texts or [form.text, form.pair or ""]).split()
            is_cut = len(words) > self.max_length
            if is_cut and options.overlong == "error":
                message = f"{len(words)} tokens, the limit is {self.max_length}"
                encoded.append(SampleError("overlong", message))
                continue
            words = words[: self.max_length]
            fields = {
                "tokens": len(words),
                "truncated": {"src": False, "mt": is_cut, "ref": False},
                "mt_covered": 0 if is_cut else len(form.last),
            }
            encoded.append(Encoded(max(1, len(words)), fields, words))
        return encoded

    def forward(self, batch: Sequence[Encoded]) -> list[Outcome]:
        """Return two outputs and their sum; the word `nan` gives one that is not finite."""
        self.batches.append(len(batch))
        return [self._outcome(item.payload) for item in batch]

    def _outcome(self, words: list[str]) -> Outcome:
        digest = hashlib.blake2b(" ".join(words).encode(), digest_size=2).digest()
        labels = {name: byte / 32 - 4 for name, byte in zip(WEIGHTS, digest, strict=True)}
        if "nan" in words:
            labels["verbose"] = float("nan")
        return {"score": weighted_sum(labels, WEIGHTS), "labels": labels}

    def probe(self, words: int) -> RewardSample:
        """Return a text of so many words."""
        return RewardSample(text="w " * words)

    def memory_bytes(self) -> None:
        """Return None: there is no device."""
        return None
