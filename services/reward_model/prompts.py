"""Put samples into prompts: a sample becomes a conversation, or one text or two.

A sample with `src` and `mt` is put into a prompt: one of two built-in ones, or a file like this:

    messages:
      - {role: user, content: "Translate into {tgt_lang}: {src}"}
      - {role: assistant, content: "{mt}"}
    score_range: {min: 0, max: 1}
    higher_is_better: true

A prompt is filled once: braces in a text are never expanded.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

from pydantic import Field, model_validator

from scorekit.config import Config, load_config
from scorekit.errors import SampleError, UserError
from scorekit.schemas import RewardSample, ScoreRange, Wanted
from services.reward_model.endpoint import ROLES

FIELDS = ("src", "mt", "ref", "src_lang", "tgt_lang")
_FIELD = re.compile(r"\{([A-Za-z_]+)\}")


class Form(NamedTuple):
    """Holds the texts of a sample for a model: `messages`, or `text` and perhaps `pair`.

    last: the text whose end counts: the answer, the translation."""

    last: str
    messages: Sequence[dict[str, str]] | None = None
    text: str = ""
    pair: str | None = None


class PromptTurn(Config):
    """A turn of a prompt."""

    role: str = Field(description="system, user, assistant or tool.")
    content: str = Field(description="Text with {src}, {mt}, {ref}, {src_lang}, {tgt_lang}.")


class PromptRange(Config):
    """The values that a score can take."""

    min: float | None = Field(None, description="Least score; null: no bound.")
    max: float | None = Field(None, description="Greatest score; null: no bound.")


class ScoringPrompt(Config):
    """A prompt: what `src` and `mt` are put into, and what the model's score of it means."""

    messages: tuple[PromptTurn, ...] | None = Field(None, description="A conversation.")
    text: str | None = Field(None, description="Or one text, or the first of two.")
    pair: str | None = Field(None, description="The second text.")
    score_range: PromptRange = Field(PromptRange(), description="PromptRange of the score.")
    higher_is_better: bool = Field(True, description="Whether a higher score is a better one.")

    @model_validator(mode="after")
    def _has_one_form(self) -> Self:
        if bool(self.messages) == (self.text is not None):
            raise ValueError("needs either `messages` or `text`. Give one of them")
        if self.pair is not None and self.text is None:
            raise ValueError("`pair` is the second of two texts. Give `text`, too")
        roles = [turn.role for turn in self.messages or ()]
        if unknown := [role for role in roles if role not in ROLES]:
            raise ValueError(f"unknown role {unknown[0]!r}; there are {', '.join(ROLES)}")
        if unknown := sorted(self.fields - set(FIELDS)):
            raise ValueError(f"unknown field {unknown[0]!r}; there are {', '.join(FIELDS)}")
        if "mt" not in self.fields:
            raise ValueError("no text has {mt}, so every translation would have one score")
        return self

    @property
    def fields(self) -> frozenset[str]:
        """Return the names in braces."""
        texts = [turn.content for turn in self.messages or ()]
        texts += [text for text in (self.text, self.pair) if text is not None]
        return frozenset(name for text in texts for name in _FIELD.findall(text))

    def inputs(self) -> dict[str, Wanted]:
        """Return what is done with `src`, `mt` and `ref`, and that a language is required."""
        texts: dict[str, Wanted] = dict.fromkeys(("src", "mt", "ref"), "ignored")
        return texts | dict.fromkeys((name for name in FIELDS if name in self.fields), "required")

    def range(self) -> ScoreRange:
        """Return the range of the score."""
        return ScoreRange(min=self.score_range.min, max=self.score_range.max)

    def form_of(self, sample: RewardSample) -> Form:
        """Return what the model gets. Raises SampleError for a sample without a field of it."""
        if sample.messages is not None:
            messages = [{"role": turn.role, "content": turn.content} for turn in sample.messages]
            return Form(messages[-1]["content"], messages)
        if sample.text is not None:
            return Form(sample.pair or sample.text, text=sample.text, pair=sample.pair)
        if missing := sorted(n for n in self.fields if getattr(sample, n) is None):
            message = f"{missing[0]}: the service's prompt has it, and the sample has none"
            raise SampleError("invalid_input", message)
        if self.messages is not None:
            messages = [
                {"role": t.role, "content": _fill(t.content, sample)} for t in self.messages
            ]
            return Form(sample.mt or "", messages)
        pair = None if self.pair is None else _fill(self.pair, sample)
        return Form(sample.mt or "", text=_fill(self.text or "", sample), pair=pair)


def _fill(template: str, sample: RewardSample) -> str:
    return _FIELD.sub(lambda match: getattr(sample, match[1]), template)


#: Prompts without a file, by name.
BUILT_IN = {
    "messages": ScoringPrompt(
        messages=(
            PromptTurn(role="user", content="{src}"),
            PromptTurn(role="assistant", content="{mt}"),
        )
    ),
    "pair": ScoringPrompt(text="{src}", pair="{mt}"),
    "text": ScoringPrompt(text="{mt}"),
}


def find_prompt(name: str) -> ScoringPrompt:
    """Return a built-in prompt, or that of a file. Raises UserError."""
    if name in BUILT_IN:
        return BUILT_IN[name]
    if not Path(name).is_file():
        raise UserError(f"--prompt {name}: neither one of {', '.join(BUILT_IN)} nor a file")
    return load_config(ScoringPrompt, name)
