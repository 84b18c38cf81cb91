"""The task `mqm`: an LLM marks the errors of a translation, and code locates them in the text.

The prompt is in mqm.yaml. The examples of a language pair come from a file. `merge_votes` makes the
errors of one or several answers to spans without overlap, and a score.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from pydantic import Field
from pydantic_core import to_json

from scorekit.config import Config, load_config
from scorekit.digest import digest_files
from scorekit.errors import SampleError, UserError
from scorekit.languages import find_language
from scorekit.llm import LLMError, Message
from scorekit.schemas import ScoreRange, TaskInfo
from scorekit.text.chat_marks import CLOSES, OPENS
from services.judge import quote_matching
from services.judge.fence import END, RULE, code_of, fence_text
from services.judge.quote_matching import QuotedText, Reason, TextRange, fold, locate_quote
from services.judge.rubrics import named_language

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
#: MQM points of an error (arXiv 2104.14478 has 1 and 5).
POINTS = {"MINOR": 1.0, "MAJOR": 5.0, "CRITICAL": 10.0}
_RANKS = list(POINTS)
#: Longest quote, in characters, of an unplaced error in a result; longer quotes are cut.
MAX_QUOTE = 2000
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
        return digest_files([Path(str(quote_matching.__file__)), Path(__file__)])

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
        user = [f"{title}:\n{fence_text(name, texts[name], code)}" for name, title in parts.items()]
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
            if not any(map(fold, error["quote"])):
                raise LLMError("malformed", f"errors[{number}].quote: blank", retryable=True)
        quoted_texts = {field: QuotedText(texts[field]) for field in ("src", "mt")}
        errors: dict[tuple[Any, ...], FoundError] = {}
        for error in _errors(answer["errors"], quoted_texts):
            position = (
                error.location
                if isinstance(error.location, TextRange)
                else fold(error.quote) or error.quote
            )
            key = (error.field, position, error.category)
            if key not in errors or rank(error) > rank(errors[key]):
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


class FoundError(NamedTuple):
    """An error in one answer.

    field: the text that the quote comes from.
    location: the position, or the reason for having none.
    """

    quote: str
    field: Literal["src", "mt"]
    severity: str
    category: str
    location: TextRange | Reason


class _Span(NamedTuple):
    start: int
    end: int
    severity: str
    category: str


Answers = Sequence[Sequence[FoundError]]


def merge_votes(answers: Answers, src: str, mt: str) -> dict[str, Any]:
    """Return score, error_spans, omissions and unplaced of one answer, or of the majority.

    With one answer, each character gets the worst severity of the errors that cover it. A span is a
    range that belongs to one error: a less severe error gives way, and can be split in two. The
    score is the sum over the errors.

    With several answers, a character is marked if more than half of them mark it. A span is a range
    of marked characters, cut where more than half of the answers begin or end a span. Its severity
    is the median of the answers' severities (of each answer the worst within the range; for an even
    number the milder middle), its category the most frequent one (for ties the first answer's). An
    error without a position counts if more than half of the answers have one with the same quote.
    The score is the sum over the merged errors.
    """
    spans, omissions = _spans(answers, "mt"), _spans(answers, "src")
    unplaced = _errors_without_location(answers)
    scored: Iterable[Any] = answers[0]
    if len(answers) > 1:
        scored = [*spans, *omissions, *unplaced]
    return {
        "score": sum((POINTS[error.severity] for error in scored), 0.0),
        "error_spans": [_span_fields(span, mt) for span in spans],
        "omissions": [_span_fields(span, src) for span in omissions],
        "unplaced": [
            {
                "quote": error.quote[:MAX_QUOTE],
                "of": error.field,
                "reason": error.location,
                "severity": error.severity,
                "category": error.category,
            }
            for error in unplaced
        ],
    }


def _span_fields(span: _Span, text: str) -> dict[str, Any]:
    return {
        "start": span.start,
        "end": span.end,
        "severity": span.severity,
        "confidence": None,
        "text": text[span.start : span.end],
        "category": span.category,
    }


def _spans(answers: Answers, field: str) -> list[_Span]:
    flat = [list(_flat([error for error in errors if error.field == field])) for errors in answers]
    return flat[0] if len(flat) == 1 else list(_majority(flat))


def _flat(errors: Sequence[FoundError]) -> Iterator[_Span]:
    """Yield the errors of one answer as ordered spans without overlap."""
    placed = [(e, e.location) for e in errors if isinstance(e.location, TextRange)]
    # Among equally severe errors the first one keeps its characters.
    placed.sort(key=lambda pair: (-_RANKS.index(pair[0].severity), pair[1]))
    borders = sorted({border for _, position in placed for border in position})
    owners: list[FoundError | None] = [None] * len(borders)
    for error, position in placed:
        for k in range(
            bisect_right(borders, position.start) - 1, bisect_right(borders, position.end) - 1
        ):
            owners[k] = owners[k] or error
    start = 0
    for k, owner in enumerate(owners):
        if owner is None:
            continue
        if k == 0 or owners[k - 1] is not owner:
            start = borders[k]
        if owners[k + 1] is not owner:
            yield _Span(start, borders[k + 1], owner.severity, owner.category)


def _majority(flat: Sequence[Sequence[_Span]]) -> Iterator[_Span]:
    """Yield the spans that more than half of the answers mark."""
    cuts = Counter(border for spans in flat for border in {b for s in spans for b in s[:2]})
    starts = [[span.start for span in spans] for spans in flat]

    def marking(position: int) -> list[_Span | None]:
        covering: list[_Span | None] = []
        for spans, span_starts in zip(flat, starts, strict=True):
            k = bisect_right(span_starts, position) - 1
            covering.append(spans[k] if k >= 0 and position < spans[k].end else None)
        return covering

    run: list[list[_Span | None]] = []
    begin = 0
    for start, end in pairwise([*sorted(cuts), -1]):
        marks = marking(start)
        is_marked = 2 * sum(mark is not None for mark in marks) > len(flat)
        if run and (not is_marked or 2 * cuts[start] > len(flat)):
            yield _merged_span(run, begin, start)
            run = []
        if is_marked and end >= 0:
            begin = begin if run else start
            run.append(marks)


def _merged_span(run: Sequence[Sequence[_Span | None]], start: int, end: int) -> _Span:
    by_answer: dict[int, list[_Span]] = defaultdict(list)
    for marks in run:
        for answer, mark in enumerate(marks):
            if mark is not None:
                by_answer[answer].append(mark)
    worst = [max(by_answer[answer], key=rank) for answer in sorted(by_answer)]
    return _Span(start, end, *_merged_labels(worst))


def _merged_labels(errors: Sequence[Any]) -> tuple[str, str]:
    """Return the merged severity and category of one error in several answers."""
    ranks = sorted(map(rank, errors))
    ((category, _),) = Counter(error.category for error in errors).most_common(1)
    return _RANKS[ranks[(len(ranks) - 1) // 2]], category


def rank(error: Any) -> int:
    """Return the severity as a number; higher is worse."""
    return _RANKS.index(error.severity)


def _errors_without_location(answers: Answers) -> list[FoundError]:
    """Return those of the only answer, or those that more than half of the answers quote."""
    unplaced_by_answer = [
        [error for error in errors if not isinstance(error.location, TextRange)]
        for errors in answers
    ]
    if len(answers) == 1:
        return unplaced_by_answer[0]
    by_quote: dict[tuple[str, str], dict[int, FoundError]] = defaultdict(dict)
    for answer_index, errors in enumerate(unplaced_by_answer):
        for error in sorted(errors, key=rank):  # the worst one overwrites the others
            by_quote[error.field, fold(error.quote)][answer_index] = error
    merged_errors = []
    for error_by_answer in by_quote.values():
        if 2 * len(error_by_answer) > len(answers):
            errors = [error_by_answer[index] for index in sorted(error_by_answer)]
            severity, category = _merged_labels(errors)
            merged_errors.append(errors[0]._replace(severity=severity, category=category))
    return merged_errors
