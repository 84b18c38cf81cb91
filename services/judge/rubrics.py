"""Rubrics: YAML files with the prompt for an LLM and the rule from its answer to a score."""

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
from scorekit.text.chat_marks import CLOSES, OPENS
from services.judge.fence import END, IMAGES, RULE, code_of, fence_text, image_parts

BUILT_IN = Path(__file__).parent / "rubrics"
#: The task without a rubric: services/judge/mqm.py.
MQM = "mqm"
#: Longest notes of a verdict, in characters; longer notes are cut.
MAX_NOTES = 300
_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
#: Form of a language that is not in the table: BCP-47's language, script and region.
_LANGUAGE = re.compile(r"[A-Za-z]{2,3}(?:-[A-Za-z]{4})?(?:-(?:[A-Za-z]{2}|[0-9]{3}))?")
#: Fields of a sample, which cannot be variable names.
_RESERVED = {"id", "task", "images"}

Kind = Literal["text", "language"]


class ScoreRule(Config):
    """The rule from an answer to a score."""

    field: str = Field("pass", description="Property of the answer: a boolean, or 0 to 1.")
    pass_from: float = Field(0.5, ge=0, le=1, description="Least score that passes.")
    pass_reasons: list[str] = Field(
        [], description="The reason_codes that a pass may have; an answer with another is none."
    )
    fail_reasons: list[str] = Field([], description="The same of what does not pass.")


class Rubric(Config):
    """A task of the judge, as its YAML file describes it."""

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
    score: ScoreRule = Field(ScoreRule(), description="How an answer becomes a score.")
    temperature: float = Field(0.0, ge=0, le=2, description="Sampling temperature.")
    max_tokens: int = Field(128, ge=1, le=32768, description="Longest answer, in tokens.")

    @cached_property
    def _template(self) -> Template:
        # Texts are values of the template's variables, never part of the template.
        environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined)
        return environment.from_string(self.user)

    @cached_property
    def digest(self) -> str:
        """Return 128 bits in hex over everything that shapes a verdict, with the fence's texts."""
        content = [self.model_dump(by_alias=True), RULE, IMAGES, END, MAX_NOTES]
        content += [OPENS.pattern, CLOSES.pattern]
        return hashlib.blake2b(to_json(content), digest_size=16).hexdigest()

    def prepare(self, texts: Mapping[str, str]) -> dict[str, str]:
        """Return the sample's texts, with languages by name. Raises SampleError if they do not
        fit."""
        if missing := sorted(self.variables.keys() - texts.keys()):
            raise SampleError("invalid_input", f"{missing[0]}: the rubric wants it")
        if texts.keys() - self.variables.keys():
            available = ", ".join(self.variables)
            raise SampleError("invalid_input", f"unknown text. The rubric has {available}")
        return {
            name: texts[name] if kind == "text" else named_language(name, texts[name])
            for name, kind in self.variables.items()
        }

    def image_parts(self, images: Sequence[str]) -> list[dict[str, Any]]:
        """Return the sample's images as parts of a message.

        Raises SampleError if their number does not fit the rubric."""
        if not images and not self.images:
            return []
        if not self.images:
            raise SampleError("invalid_input", "images: the rubric wants no pictures")
        if not 1 <= len(images) <= self.images:
            raise SampleError(
                "invalid_input",
                f"images: got {len(images)}, the rubric requires 1 to {self.images}",
            )
        return image_parts(images)

    def messages(
        self, texts: Mapping[str, str], images: Sequence[dict[str, Any]] = (), retry_note: str = ""
    ) -> list[Message]:
        """Return the chat that asks for a verdict on prepared texts and images.

        retry_note: text added at the end when the LLM is asked again."""
        code = code_of(bytes.fromhex(self.digest), texts)
        values = {
            name: fence_text(name, value, code) if self.variables[name] == "text" else value
            for name, value in texts.items()
        }
        rule = RULE.format(code=code) + (f" {IMAGES}" if images else "")
        system = f"{rule}\n\n{self.system.strip()}"
        user_text = self._template.render(values).strip()
        content: Any = f"{user_text}\n\n{END}{retry_note}"
        if images:  # the request must not end with an image
            content = [text_part(user_text), *images, text_part(f"{END}{retry_note}")]
        return [{"role": "system", "content": system}, {"role": "user", "content": content}]

    @property
    def info(self) -> TaskInfo:
        """Return the score's range: 0 to 1, 1 is best."""
        return TaskInfo(score_range=ScoreRange(min=0.0, max=1.0), higher_is_better=True)

    def temperature_of(self, votes: int) -> float:
        """Return the temperature to use if the request names none."""
        return self.temperature

    def outcome_without_llm(self, texts: Mapping[str, str]) -> dict[str, Any] | None:
        """Return None: a rubric always needs the LLM."""
        return None

    def outcome(
        self, answers: Sequence[dict[str, Any]], texts: Mapping[str, str]
    ) -> dict[str, Any]:
        """Return the only answer, which is the outcome."""
        return answers[0]

    def read(self, answer: Mapping[str, Any], texts: Mapping[str, str]) -> dict[str, Any]:
        """Return score and verdict of an answer that fits the schema.

        Raises LLMError if its reason code contradicts its score."""
        score = float(answer[self.score.field])
        passes, reason = score >= self.score.pass_from, str(answer.get("reason_code", ""))
        reasons = self.score.pass_reasons if passes else self.score.fail_reasons
        if reasons and reason not in reasons:
            message = (
                f"{self.score.field} {answer[self.score.field]}, but reason_code {reason[:64]!r}"
            )
            raise LLMError("malformed", message, retryable=True)
        notes = str(answer.get("notes", ""))[:MAX_NOTES]
        verdict = {"pass": passes, "reason_code": reason, "notes": notes}
        return {"score": score, "verdict": verdict}

    def check(self) -> None:
        """Raise ValueError if the rubric is invalid."""
        if bad := [n for n in self.variables if not _NAME.fullmatch(n) or n in _RESERVED]:
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
        except Exception as error:  # a template can fail in any way
            raise ValueError(f"user: {type(error).__name__}: {error}") from None
        if unknown := sorted(used - self.variables.keys()):
            raise ValueError(f"user: {unknown[0]!r} is not one of the variables")
        code = code_of(bytes.fromhex(self.digest), texts)
        for name, kind in self.variables.items():
            expected = fence_text(name, texts[name], code) if kind == "text" else texts[name]
            if expected not in content:
                raise ValueError(f"user: the template must contain {{{{ {name} }}}} unchanged")

    def _check_score(self) -> None:
        field = self.score.field
        codes = self.schema_.get("properties", {}).get("reason_code", {}).get("enum")
        for reason in [*self.score.pass_reasons, *self.score.fail_reasons]:
            if codes is None or reason not in codes:
                raise ValueError(f"score: {reason!r} is not one of the schema's reason_codes")
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
    """Return the built-in rubrics and those of a folder, by task.

    A rubric of the folder replaces a built-in one of the same name. Raises UserError for an invalid
    file."""
    folders = [BUILT_IN]
    if folder is not None:
        if not folder.is_dir():
            raise UserError(f"--rubrics {folder}: no such folder")
        folders.append(folder)
    return {
        path.stem: _load(path)
        for directory in folders
        for path in sorted([*directory.glob("*.yaml"), *directory.glob("*.yml")])
    }


def digest_of(digests: Mapping[str, str], *more: Any) -> str:
    """Return 128 bits in hex over the digests of all tasks by their names, and other values."""
    parts: list[Any] = [*sorted(digests.items()), *(value for value in more if value is not None)]
    return hashlib.blake2b(to_json(parts), digest_size=16).hexdigest()


def _load(path: Path) -> Rubric:
    if not _NAME.fullmatch(path.stem):
        raise UserError(f"{path}: invalid task name. Rename the file with a-z, 0-9 and _")
    if path.stem == MQM:
        raise UserError(f"{path}: the task mqm has no rubric. Use --mqm-examples for its examples")
    rubric = load_config(Rubric, path)
    try:
        rubric.check()
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    return rubric


def named_language(variable: str, value: str) -> str:
    """Return the English name of a language, or its tag.

    Languages are put outside the fence, so they must look like languages. Raises SampleError."""
    if find_language(value):
        return language_name(value)
    if not _LANGUAGE.fullmatch(value):
        raise SampleError(
            "invalid_input",
            f"{variable}: neither a tag (yue, sr-Latn, pt-BR) nor a known language's English name",
        )
    return value
