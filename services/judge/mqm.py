"""The task `mqm`: the errors of a translation, marked by an LLM and placed by code.

The prompt is mqm.yaml's, our own; the examples of a language pair come from a file.
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
from scorekit.text.chatmarks import CLOSES, OPENS
from services.judge import placing, votes
from services.judge.fence import END, RULE, code_of, fenced
from services.judge.placing import Place, QuotedText, folded, place
from services.judge.rubrics import named_language
from services.judge.votes import FoundError, merged

_FOLDER = Path(__file__).parent
#: Its quote is of the source.
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
_WANTED = ("src", "mt", "src_lang", "tgt_lang")
#: Examples that a pair is shown which has none of its own, nor its target language.
_OF_OTHERS = 2
#: What each example and each answer is. Without bounds: not every server knows them.
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
    """mqm.yaml."""

    system: str
    reference: str = Field(description="Added where a sample has a reference.")
    temperature: float = Field(ge=0, le=2)
    votes_temperature: float = Field(gt=0, le=2, description="Where several answers are asked for.")
    max_tokens: int = Field(ge=1, le=32768)


class MqmMark(Config):
    """An error as the model is to write it."""

    quote: str = Field(min_length=1)
    context: str
    category: Category
    severity: Literal["minor", "major", "critical"]


class MqmExample(Config):
    """A translation with its errors."""

    src_lang: str
    tgt_lang: str
    src: str
    mt: str
    errors: list[MqmMark]


class MqmExamples(Config):
    """A file of examples; none: the model is shown none."""

    examples: list[MqmExample]


class MqmTask:
    """What is asked, and what is made of the answers.

    Raises UserError for a file of examples that is not as it should be.
    """

    schema_ = SCHEMA
    info = TaskInfo(score_range=ScoreRange(min=0.0, max=None), higher_is_better=False)

    def __init__(self, examples: Path | None = None) -> None:
        self.prompt = load_config(MqmPrompt, _FOLDER / "mqm.yaml")
        path = examples or _FOLDER / "mqm_examples.yaml"
        self.examples = load_config(MqmExamples, path).examples
        for number, example in enumerate(self.examples, 1):
            if fault := _fault(example):
                raise UserError(f"{path}: example {number}: {fault}")
        self.max_tokens = self.prompt.max_tokens

    @cached_property
    def digest(self) -> str:
        """128 bits in hex over all that shapes an answer."""
        content = [self.prompt.model_dump(), [one.model_dump() for one in self.examples]]
        content += [SCHEMA, RULE, END, OPENS.pattern, CLOSES.pattern]
        return hashlib.blake2b(to_json(content), digest_size=16).hexdigest()

    @staticmethod
    def code_digest() -> str:
        """Of the code that makes spans and a score of answers."""
        return digest_files([*(Path(str(m.__file__)) for m in (placing, votes)), Path(__file__)])

    def temperature_of(self, votes: int) -> float:
        """What is sampled with where the request says nothing."""
        return self.prompt.votes_temperature if votes > 1 else self.prompt.temperature

    def prepare(self, texts: Mapping[str, str]) -> dict[str, str]:
        """The sample's texts, languages by name; an empty reference is none. Raises SampleError."""
        if missing := [name for name in _WANTED if name not in texts]:
            raise SampleError("invalid_input", f"{missing[0]}: mqm wants it")
        if texts.keys() - {*_WANTED, "ref"}:
            known = ", ".join([*_WANTED, "ref"])
            raise SampleError("invalid_input", f"a text that mqm has not; it has {known}")
        return {
            name: named_language(name, text) if name.endswith("_lang") else text
            for name, text in sorted(texts.items())
            if text or name != "ref"
        }

    def pictures(self, images: Sequence[str]) -> list[dict[str, Any]]:
        """None. Raises SampleError where the sample brings some."""
        if images:
            raise SampleError("invalid_input", "images: mqm wants no pictures")
        return []

    def unasked(self, texts: Mapping[str, str]) -> dict[str, Any] | None:
        """The outcome where nobody has to be asked: of an empty translation the whole source is
        missing, which is one critical error."""
        src, mt = texts["src"], texts["mt"]
        if mt.strip():
            return None
        whole = src.strip()
        start = src.find(whole)
        at = Place(start, start + len(whole))
        error = FoundError(whole, "src", "CRITICAL", OMISSION, at)
        return merged([[error] if whole else []], src, mt)

    def messages(
        self, texts: Mapping[str, str], pictures: Sequence[dict[str, Any]] = (), again: str = ""
    ) -> list[Message]:
        """The chat that asks for the errors of prepared texts. again: added to the end where it is
        asked a second time."""
        code = code_of(bytes.fromhex(self.digest), texts)
        system = [self.prompt.system.strip(), self._shown(texts["src_lang"], texts["tgt_lang"])]
        parts = {"src": f"Source, in {texts['src_lang']}"}
        if "ref" in texts:
            parts["ref"] = f"Reference, in {texts['tgt_lang']}"
            system.append(self.prompt.reference.strip())
        parts["mt"] = f"Translation into {texts['tgt_lang']}"
        # What many samples share stands first: servers keep the beginning of a prompt.
        system.append(RULE.format(code=code))
        user = [f"{title}:\n{fenced(name, texts[name], code)}" for name, title in parts.items()]
        user.append(f"{END}{again}")
        return [
            {"role": "system", "content": "\n\n".join(filter(None, system))},
            {"role": "user", "content": "\n\n".join(user)},
        ]

    def read(self, answer: Mapping[str, Any], texts: Mapping[str, str]) -> list[FoundError]:
        """The errors of an answer that fits the schema, with their places. One that it names twice
        counts once, as the worse. Raises LLMError for an error whose quote shows nothing: nobody
        could say what it is of, and it would cost its points all the same."""
        for number, error in enumerate(answer["errors"]):
            if not any(map(folded, error["quote"])):
                raise LLMError("malformed", f"errors[{number}].quote: blank", retryable=True)
        quoted = {of: QuotedText(texts[of]) for of in ("src", "mt")}
        found: dict[tuple[Any, ...], FoundError] = {}
        for error in _errors(answer["errors"], quoted):
            where = error.at if isinstance(error.at, Place) else folded(error.quote) or error.quote
            key = (error.of, where, error.category)
            if key not in found or votes.rank(error) > votes.rank(found[key]):
                found[key] = error
        return list(found.values())

    def outcome(
        self, answers: Sequence[Sequence[FoundError]], texts: Mapping[str, str]
    ) -> dict[str, Any]:
        """Score, spans, omissions and what has no place."""
        return merged(answers, texts["src"], texts["mt"])

    def _shown(self, src_lang: str, tgt_lang: str) -> str:
        """The examples of the pair; where there is none, of its target language; else the first
        ones."""
        into = [e for e in self.examples if _same(e.tgt_lang, tgt_lang)]
        of_pair = [e for e in into if _same(e.src_lang, src_lang)]
        shown = of_pair or into or self.examples[:_OF_OTHERS]
        return "\n\n".join(_written(example) for example in shown)


def _errors(given: Sequence[Any], quoted: Mapping[str, QuotedText]) -> Iterator[FoundError]:
    for error in given:
        of: Literal["src", "mt"] = "src" if error["category"] == OMISSION else "mt"
        at = place(quoted[of], error["quote"], error["context"])
        yield FoundError(error["quote"], of, error["severity"].upper(), error["category"], at)


def _written(example: MqmExample) -> str:
    source, target = (named_language("", x) for x in (example.src_lang, example.tgt_lang))
    answer = to_json({"errors": [error.model_dump() for error in example.errors]}).decode()
    return (
        f"For example:\nSource, in {source}: {example.src}\n"
        f"Translation into {target}: {example.mt}\n{answer}"
    )


def _fault(example: MqmExample) -> str | None:
    """What a model would learn wrongly from it."""
    for name in ("src_lang", "tgt_lang"):
        try:
            named_language(name, getattr(example, name))
        except SampleError as fault:
            return fault.message
    quoted = {"src": QuotedText(example.src), "mt": QuotedText(example.mt)}
    for error in _errors([mark.model_dump() for mark in example.errors], quoted):
        if not isinstance(error.at, Place):
            text = "source" if error.of == "src" else "translation"
            return f"the quote {error.quote[:60]!r} is {error.at} in its {text}"
    return None


def _same(one: str, other: str) -> bool:
    """Whether two codes, tags or names are one language, in whatever variant."""
    first, second = find_language(one), find_language(other)
    if first is None or second is None:
        return one.casefold() == other.casefold()
    return first.iso639_3 == second.iso639_3
