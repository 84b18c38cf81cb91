"""The task `mqm`: an LLM marks the errors of a translation, and code locates them in the text.

The prompt is in mqm.yaml. The examples of a language pair come from a file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field
from pydantic_core import to_json

from scorekit.config import Config, load_config
from scorekit.digest import digest_files
from scorekit.errors import SampleError, UserError
from scorekit.languages import find_language
from scorekit.llm import LLMError, Message
from scorekit.schemas import ScoreRange, TaskInfo
from scorekit.text.chat_marks import CLOSES, OPENS
from services.judge import quote_matching, votes
from services.judge.fence import END, RULE, code_of, fenced
from services.judge.quote_matching import QuotedText, TextRange, folded, locate_quote
from services.judge.rubrics import named_language
from services.judge.votes import FoundError, merge_votes

_FOLDER = Path(__file__).parent
#: The one category whose quote comes from the source.
OMISSION = "accuracy/omission"
Category = Literal[
    "accuracy/mistranslation",
    "accuracy/addition",
    "accuracy/omission",
    "accuracy/untranslated",
    "accuracy/wrong-language",
    "terminology",
    "fluency/grammar",
    "fluency/spelling",
    "fluency/punctuation",
    "fluency/register",
    "fluency/garbled",
    "style",
    "locale",
    "other",
]
_SEVERITIES = ("minor", "major", "critical")
_REQUIRED_TEXTS = ("src", "mt", "src_lang", "tgt_lang")
#: Number of examples for a pair without examples of the same pair or target language.
_NUM_FALLBACK_EXAMPLES = 2
#: Schema of examples and answers. It has no length bounds, which some servers do not support.
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "errors": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "quote": {"type": "string"},
                    "context": {"type": "string"},
                    "category": {"enum": list(get_args(Category))},
                    "severity": {"enum": list(_SEVERITIES)},
                },
                "required": ["quote", "context", "category", "severity"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["errors"],
    "additionalProperties": False,
}


class MqmPrompt(Config):
    """The content of mqm.yaml."""

    system: str
    reference: str = Field(description="Added where a sample has a reference.")
    temperature: float = Field(ge=0, le=2)
    votes_temperature: float = Field(gt=0, le=2, description="Where several answers are asked for.")
    max_tokens: int = Field(ge=1, le=32768)


class MqmMark(Config):
    """An error in the form that the model must write."""

    quote: str = Field(min_length=1, description="The wrong words, as they stand in the text.")
    context: str = Field(description="A longer part of the text with the quote in it.")
    category: Category = Field(description="The kind of the error.")
    severity: Literal["minor", "major", "critical"] = Field(description="How bad it is.")


class MqmExample(Config):
    """A translation with its errors."""

    src_lang: str = Field(description="Language of the source: a code or a name.")
    tgt_lang: str = Field(description="Language of the translation: a code or a name.")
    src: str = Field(description="The source.")
    mt: str = Field(description="The translation.")
    errors: list[MqmMark] = Field(description="Its errors; none: an empty list.")


class MqmExamples(Config):
    """A file of examples, possibly empty."""

    examples: list[MqmExample] = Field(description="Shown to the model before each sample.")


class MqmTask:
    """Builds the prompt, parses the answers and computes the outcome.

    Raises UserError for an invalid file of examples.
    """

    schema_ = SCHEMA
    info = TaskInfo(score_range=ScoreRange(min=0.0, max=None), higher_is_better=False)

    def __init__(self, examples: Path | None = None) -> None:
        self.prompt = load_config(MqmPrompt, _FOLDER / "mqm.yaml")
        path = examples or _FOLDER / "mqm_examples.yaml"
        self.examples = load_config(MqmExamples, path).examples
        for number, example in enumerate(self.examples, 1):
            if reason := _example_error(example):
                raise UserError(f"{path}: example {number}: {reason}")
        self.max_tokens = self.prompt.max_tokens

    @cached_property
    def digest(self) -> str:
        """Return 128 bits in hex over everything that shapes an answer."""
        content = [self.prompt.model_dump(), [example.model_dump() for example in self.examples]]
        content += [SCHEMA, RULE, END, OPENS.pattern, CLOSES.pattern]
        return hashlib.blake2b(to_json(content), digest_size=16).hexdigest()

    @staticmethod
    def code_digest() -> str:
        """Return a digest of the code that turns answers into spans and a score."""
        return digest_files(
            [*(Path(str(m.__file__)) for m in (quote_matching, votes)), Path(__file__)]
        )

    def temperature_of(self, votes: int) -> float:
        """Return the temperature to use if the request names none."""
        return self.prompt.votes_temperature if votes > 1 else self.prompt.temperature

    def prepare(self, texts: Mapping[str, str]) -> dict[str, str]:
        """Return the sample's texts, with languages by name and without an empty reference.

        Raises SampleError."""
        if missing := [name for name in _REQUIRED_TEXTS if name not in texts]:
            raise SampleError("invalid_input", f"{missing[0]}: required by the task mqm")
        if texts.keys() - {*_REQUIRED_TEXTS, "ref"}:
            available = ", ".join([*_REQUIRED_TEXTS, "ref"])
            raise SampleError("invalid_input", f"unknown text. The task mqm has {available}")
        return {
            name: named_language(name, text) if name.endswith("_lang") else text
            for name, text in sorted(texts.items())
            if text or name != "ref"
        }

    def image_parts(self, images: Sequence[str]) -> list[dict[str, Any]]:
        """Return an empty list. Raises SampleError if the sample has images."""
        if images:
            raise SampleError("invalid_input", "images: the task mqm takes no images")
        return []

    def outcome_without_llm(self, texts: Mapping[str, str]) -> dict[str, Any] | None:
        """Return the outcome of an empty translation: one critical omission of the full source.

        Returns None for other translations, which an LLM must judge."""
        src, mt = texts["src"], texts["mt"]
        if mt.strip():
            return None
        stripped = src.strip()
        start = src.find(stripped)
        position = TextRange(start, start + len(stripped))
        error = FoundError(stripped, "src", "CRITICAL", OMISSION, position)
        return merge_votes([[error] if stripped else []], src, mt)

    def messages(
        self, texts: Mapping[str, str], images: Sequence[dict[str, Any]] = (), retry_note: str = ""
    ) -> list[Message]:
        """Return the chat that asks for the errors of prepared texts.

        retry_note: text added at the end when the LLM is asked again."""
        code = code_of(bytes.fromhex(self.digest), texts)
        system = [
            self.prompt.system.strip(),
            self._examples_text(texts["src_lang"], texts["tgt_lang"]),
        ]
        parts = {"src": f"Source, in {texts['src_lang']}"}
        if "ref" in texts:
            parts["ref"] = f"Reference, in {texts['tgt_lang']}"
            system.append(self.prompt.reference.strip())
        parts["mt"] = f"Translation into {texts['tgt_lang']}"
        # The parts that samples share come first, for the servers' prefix caches.
        system.append(RULE.format(code=code))
        user = [f"{title}:\n{fenced(name, texts[name], code)}" for name, title in parts.items()]
        user.append(f"{END}{retry_note}")
        return [
            {"role": "system", "content": "\n\n".join(filter(None, system))},
            {"role": "user", "content": "\n\n".join(user)},
        ]

    def read(self, answer: Mapping[str, Any], texts: Mapping[str, str]) -> list[FoundError]:
        """Return the errors of an answer that fits the schema, with their positions.

        A repeated error counts once, with the worse severity. Raises LLMError for an error with a
        blank quote: its text is unknown, but it would still cost points."""
        for number, error in enumerate(answer["errors"]):
            if not any(map(folded, error["quote"])):
                raise LLMError("malformed", f"errors[{number}].quote: blank", retryable=True)
        quoted_texts = {field: QuotedText(texts[field]) for field in ("src", "mt")}
        errors: dict[tuple[Any, ...], FoundError] = {}
        for error in _errors(answer["errors"], quoted_texts):
            position = (
                error.location
                if isinstance(error.location, TextRange)
                else folded(error.quote) or error.quote
            )
            key = (error.field, position, error.category)
            if key not in errors or votes.rank(error) > votes.rank(errors[key]):
                errors[key] = error
        return list(errors.values())

    def outcome(
        self, answers: Sequence[Sequence[FoundError]], texts: Mapping[str, str]
    ) -> dict[str, Any]:
        """Return the score, the spans, the omissions and the errors without a position."""
        return merge_votes(answers, texts["src"], texts["mt"])

    def _examples_text(self, src_lang: str, tgt_lang: str) -> str:
        """Return the examples of the pair, else those of its target language, else the first
        ones."""
        same_target = [e for e in self.examples if _is_same_language(e.tgt_lang, tgt_lang)]
        same_pair = [e for e in same_target if _is_same_language(e.src_lang, src_lang)]
        chosen = same_pair or same_target or self.examples[:_NUM_FALLBACK_EXAMPLES]
        return "\n\n".join(_example_text(example) for example in chosen)


def _errors(marks: Sequence[Any], quoted_texts: Mapping[str, QuotedText]) -> Iterator[FoundError]:
    for error in marks:
        field: Literal["src", "mt"] = "src" if error["category"] == OMISSION else "mt"
        position = locate_quote(quoted_texts[field], error["quote"], error["context"])
        yield FoundError(
            error["quote"], field, error["severity"].upper(), error["category"], position
        )


def _example_text(example: MqmExample) -> str:
    source, target = (named_language("", x) for x in (example.src_lang, example.tgt_lang))
    answer = to_json({"errors": [error.model_dump() for error in example.errors]}).decode()
    return (
        f"For example:\nSource, in {source}: {example.src}\n"
        f"Translation into {target}: {example.mt}\n{answer}"
    )


def _example_error(example: MqmExample) -> str | None:
    """Return why an example would mislead the model; None if it is valid."""
    for name in ("src_lang", "tgt_lang"):
        try:
            named_language(name, getattr(example, name))
        except SampleError as sample_error:
            return sample_error.message
    quoted = {"src": QuotedText(example.src), "mt": QuotedText(example.mt)}
    for error in _errors([mark.model_dump() for mark in example.errors], quoted):
        if not isinstance(error.location, TextRange):
            text = "source" if error.field == "src" else "translation"
            return f"the quote {error.quote[:60]!r} is {error.location} in its {text}"
    return None


def _is_same_language(name: str, other_name: str) -> bool:
    """Return True if two codes, tags or names mean the same language, of any variant."""
    first, second = find_language(name), find_language(other_name)
    if first is None or second is None:
        return name.casefold() == other_name.casefold()
    return first.iso639_3 == second.iso639_3
