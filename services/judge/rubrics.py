"""Rubrics: YAML files that say what an LLM is asked and how its answer becomes a score."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import jsonschema
from jinja2 import StrictUndefined, Template, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic import ConfigDict, Field
from pydantic_core import to_json

from scorekit.config import Config, load_config
from scorekit.errors import SampleError, UserError
from scorekit.languages import find_language, language_name
from scorekit.llm import LLMError, Message, text_part
from scorekit.schemas import MAX_JUDGED_IMAGES, ScoreRange, TaskInfo
from scorekit.text.chatmarks import CLOSES, OPENS
from services.judge.fence import END, PICTURES, RULE, code_of, fenced
from services.judge.pictures import picture_parts

BUILT_IN = Path(__file__).parent / "rubrics"
#: The task that has no rubric: services/judge/mqm.py.
MQM = "mqm"
#: Longest notes of a verdict, in characters; the rest is cut.
MAX_NOTES = 300
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
#: A language that the table does not have: BCP-47's language, script and region.
_LANGUAGE = re.compile(r"[A-Za-z]{2,3}(?:-[A-Za-z]{4})?(?:-(?:[A-Za-z]{2}|[0-9]{3}))?")
#: Names that a sample already has.
_TAKEN = {"id", "task", "images"}

Kind = Literal["text", "language"]


class ScoreRule(Config):
    """How an answer becomes a score."""

    field: str = Field("pass", description="Property of the answer: a boolean, or 0 to 1.")
    pass_from: float = Field(0.5, ge=0, le=1, description="Least score that passes.")
    pass_reasons: list[str] = Field(
        [], description="The reason_codes that a pass may have; an answer with another is none."
    )
    fail_reasons: list[str] = Field([], description="The same of what does not pass.")


class Rubric(Config):
    """One task of the judge."""

    model_config = ConfigDict(frozen=True)

    variables: dict[str, Kind] = Field(
        min_length=1,
        description="What a sample brings. `text` is fenced off from the instructions; `language` "
        "is a code or name, and becomes the English name.",
    )
    system: str = Field(description="Instructions; the rule about the fence goes before them.")
    user: str = Field(description="Jinja template over the variables; its end goes after it.")
    images: int = Field(
        0,
        ge=0,
        le=MAX_JUDGED_IMAGES,
        description="Most pictures of a sample, which brings one at least; 0: it brings none. They "
        "go after the texts.",
    )
    schema_: dict[str, Any] = Field(alias="schema", description="JSON schema of the answer.")
    score: ScoreRule = ScoreRule()
    temperature: float = Field(0.0, ge=0, le=2)
    max_tokens: int = Field(128, ge=1, le=32768)

    @cached_property
    def _template(self) -> Template:
        # Texts are the template's variables, never part of it.
        environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined)
        return environment.from_string(self.user)

    @cached_property
    def digest(self) -> str:
        """128 bits in hex over all that shapes a verdict, the fence's words included."""
        content = [self.model_dump(by_alias=True), RULE, PICTURES, END, MAX_NOTES]
        content += [OPENS.pattern, CLOSES.pattern]
        return hashlib.blake2b(to_json(content), digest_size=16).hexdigest()

    def prepare(self, texts: Mapping[str, str]) -> dict[str, str]:
        """The sample's texts, languages by name. Raises SampleError where they do not fit."""
        if missing := sorted(self.variables.keys() - texts.keys()):
            raise SampleError("invalid_input", f"{missing[0]}: the rubric wants it")
        if texts.keys() - self.variables.keys():
            known = ", ".join(self.variables)
            raise SampleError("invalid_input", f"a text that the rubric has not; it has {known}")
        return {
            name: texts[name] if kind == "text" else named_language(name, texts[name])
            for name, kind in self.variables.items()
        }

    def pictures(self, images: Sequence[str]) -> list[dict[str, Any]]:
        """The sample's pictures as parts of a message. Raises SampleError where there are more, or
        fewer, than the rubric wants."""
        if not images and not self.images:
            return []
        if not self.images:
            raise SampleError("invalid_input", "images: the rubric wants no pictures")
        if not 1 <= len(images) <= self.images:
            raise SampleError(
                "invalid_input", f"images: {len(images)}, the rubric wants 1 to {self.images}"
            )
        return picture_parts(images)

    def messages(
        self, texts: Mapping[str, str], pictures: Sequence[dict[str, Any]] = (), again: str = ""
    ) -> list[Message]:
        """The chat that asks for a verdict on prepared texts and pictures. again: added to the end
        where it is asked a second time."""
        code = code_of(bytes.fromhex(self.digest), texts)
        values = {
            name: fenced(name, value, code) if self.variables[name] == "text" else value
            for name, value in texts.items()
        }
        rule = RULE.format(code=code) + (f" {PICTURES}" if pictures else "")
        system = f"{rule}\n\n{self.system.strip()}"
        shown = self._template.render(values).strip()
        content: Any = f"{shown}\n\n{END}{again}"
        if pictures:  # the last word stays ours
            content = [text_part(shown), *pictures, text_part(f"{END}{again}")]
        return [{"role": "system", "content": system}, {"role": "user", "content": content}]

    @property
    def info(self) -> TaskInfo:
        """A rubric's score: 0 to 1, 1 is best."""
        return TaskInfo(score_range=ScoreRange(min=0.0, max=1.0), higher_is_better=True)

    def temperature_of(self, votes: int) -> float:
        """What is sampled with where the request says nothing."""
        return self.temperature

    def unasked(self, texts: Mapping[str, str]) -> dict[str, Any] | None:
        """An LLM is always asked."""
        return None

    def outcome(
        self, answers: Sequence[dict[str, Any]], texts: Mapping[str, str]
    ) -> dict[str, Any]:
        """A rubric's one answer is its outcome."""
        return answers[0]

    def read(self, answer: Mapping[str, Any], texts: Mapping[str, str]) -> dict[str, Any]:
        """Score and verdict of an answer that fits the schema. Raises LLMError where its reason
        contradicts it."""
        score = float(answer[self.score.field])
        passes, reason = score >= self.score.pass_from, str(answer.get("reason_code", ""))
        reasons = self.score.pass_reasons if passes else self.score.fail_reasons
        if reasons and reason not in reasons:
            said = f"{self.score.field} {answer[self.score.field]}, but reason_code {reason[:64]!r}"
            raise LLMError("malformed", said, retryable=True)
        notes = str(answer.get("notes", ""))[:MAX_NOTES]
        verdict = {"pass": passes, "reason_code": reason, "notes": notes}
        return {"score": score, "verdict": verdict}

    def check(self) -> None:
        """Raises ValueError that says what is wrong with the rubric."""
        if bad := [n for n in self.variables if not _NAME.fullmatch(n) or n in _TAKEN]:
            raise ValueError(
                f"variables: {bad[0]!r} cannot be a name (a-z, 0-9, _; not id, task, images)"
            )
        self._check_template()
        try:
            jsonschema.Draft202012Validator.check_schema(self.schema_)
        except jsonschema.SchemaError as error:
            raise ValueError(f"schema: {error.message}") from None
        self._check_score()

    def _check_template(self) -> None:
        environment = ImmutableSandboxedEnvironment()
        texts = {name: f"some {name}" for name in self.variables}
        try:
            used = meta.find_undeclared_variables(environment.parse(self.user))
            content = self.messages(texts)[1]["content"]
        except Exception as error:  # a template is a program: it may fail in any way
            raise ValueError(f"user: {type(error).__name__}: {error}") from None
        if unknown := sorted(used - self.variables.keys()):
            raise ValueError(f"user: {unknown[0]!r} is none of the variables")
        code = code_of(bytes.fromhex(self.digest), texts)
        for name, kind in self.variables.items():
            shown = fenced(name, texts[name], code) if kind == "text" else texts[name]
            if shown not in content:
                raise ValueError(f"user: {{{{ {name} }}}} must stand in it, unchanged")

    def _check_score(self) -> None:
        field = self.score.field
        codes = self.schema_.get("properties", {}).get("reason_code", {}).get("enum")
        for reason in [*self.score.pass_reasons, *self.score.fail_reasons]:
            if codes is None or reason not in codes:
                raise ValueError(f"score: {reason!r} is none of the schema's reason_codes")
        shape = self.schema_.get("properties", {}).get(field, {})
        bounded = shape.get("type") == "number" and shape.get("minimum", -1) >= 0
        if shape.get("type") != "boolean" and not (bounded and shape.get("maximum", 2) <= 1):
            raise ValueError(
                f"score: the schema's {field!r} must be a boolean, or a number with minimum 0 "
                "and maximum 1"
            )
        if field not in self.schema_.get("required", ()):
            raise ValueError(f"score: the schema does not require {field!r}")


def load_rubrics(folder: Path | None = None) -> dict[str, Rubric]:
    """The built-in rubrics and those of a folder, by task; one of the folder's replaces a built-in
    one of its name. Raises UserError that names the file and what is wrong with it."""
    folders = [BUILT_IN]
    if folder is not None:
        if not folder.is_dir():
            raise UserError(f"--rubrics {folder}: no such folder")
        folders.append(folder)
    return {
        path.stem: _load(path)
        for place in folders
        for path in sorted([*place.glob("*.yaml"), *place.glob("*.yml")])
    }


def digest_of(digests: Mapping[str, str], *more: Any) -> str:
    """128 bits in hex over the digests of all tasks by their names, and what else is said."""
    parts: list[Any] = [*sorted(digests.items()), *(one for one in more if one is not None)]
    return hashlib.blake2b(to_json(parts), digest_size=16).hexdigest()


def _load(path: Path) -> Rubric:
    if not _NAME.fullmatch(path.stem):
        raise UserError(f"{path}: the file's name is the task's: use a-z, 0-9 and _")
    if path.stem == MQM:
        raise UserError(f"{path}: the task mqm is no rubric: name your examples by --mqm-examples")
    rubric = load_config(Rubric, path)
    try:
        rubric.check()
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    return rubric


def named_language(variable: str, value: str) -> str:
    """The English name of a language, or its tag. Languages stand outside the fence, so they must
    look like one. Raises SampleError."""
    if find_language(value):
        return language_name(value)
    if not _LANGUAGE.fullmatch(value):
        raise SampleError(
            "invalid_input",
            f"{variable}: neither a tag (yue, sr-Latn, pt-BR) nor a known language's English name",
        )
    return value
