"""The definition of a composite reward: one YAML file or mapping for every trainer and adapter.

    components:
      metricx: {service: "http://127.0.0.1:8001", offset: 5.0, scale: -1.0}
      repetition: {rule: repetition, weight: -2.0}
    gates:
      language: {rule: language, min_probability: 0.5}

scaled = offset + scale * raw; reward = sum of weight * scaled, then the gates. A sample that lacks
a component with a weight has no reward.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from scorekit.config import Config, check_config, load_config, split_commas
from scorekit.credit.checks import MAX_FLOAT32
from scorekit.credit.spans import Combine, OverlapPolicy, SourcesCombine
from scorekit.errors import UserError

#: Parts of a service's answer that can be a component. Lists count their entries.
ValueField = Literal["score", "pass", "mt_covered", "error_spans", "omissions", "unplaced"]
LIST_FIELDS = ("error_spans", "omissions", "unplaced")
#: Local rules of single samples, and of a group.
SampleRule = Literal["language", "script", "copy", "length", "repetition", "truncated", "chrf"]
#: Error types of a text that a service refuses.
RefusedType = Literal["invalid_input", "overlong"]


Urls = Annotated[tuple[str, ...], BeforeValidator(split_commas)]


def _check_name(value: Any) -> str:
    """Return a name of a component or gate unchanged. Raises ValueError if it is none."""
    if not isinstance(value, str):
        raise ValueError(f"a name is a text, and this is {value!r}. Write it in quotes")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}", value):
        raise ValueError(
            "a name has up to 64 letters (A to Z), digits, and _ . -, and begins with a letter or "
            "_. Choose another"
        )
    return value


def _check_number(value: Any) -> Any:
    """Return a number unchanged.

    Raises ValueError for a truth value, which is a number to pydantic: YAML reads `yes` so.
    """
    if isinstance(value, bool):
        raise ValueError("this is true or false. Give a number")
    return value


Name = Annotated[str, BeforeValidator(_check_name)]
#: A larger number could be infinite as float32, in which trainers hold rewards.
Number = Annotated[float, BeforeValidator(_check_number), Field(ge=-1e12, le=1e12)]


class ServiceRequest(Config):
    """Holds a component's request. Components with equal requests share one answer."""

    service: Urls | None = Field(
        None, min_length=1, description="URLs of a scoring service, a list or comma-separated."
    )
    task: str | None = Field(
        None, min_length=1, description="A judge's task: a rubric, or mqm; null: no judge."
    )
    variables: dict[str, str] = Field(
        default_factory=dict,
        description="Each variable of a judge's rubric, and the sample's field that it gets.",
    )
    reference: bool = Field(False, description="Send the sample's `ref`, which is then required.")
    languages: bool = Field(
        False,
        description="Send the sample's `src_lang` and `tgt_lang`, which are then required. "
        "The task mqm gets them anyway.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict,
        description="Options of the request, as in docs/reference/protocol.md.",
    )
    scorer: str | None = Field(
        None,
        min_length=1,
        description="A class of this process in place of a service, module:Class, whose "
        "score_batch(samples, options) scores translations.",
    )
    arguments: dict[str, Any] = Field(
        default_factory=dict,
        description="Arguments of that class; of the function of `rule`.",
    )
    model: str | None = Field(
        None, min_length=1, description="The model that the service must run; null: any."
    )
    tokenizer: str | None = Field(
        None, min_length=1, description="The tokenizer that the service must use; null: any."
    )


class ComponentConfig(ServiceRequest):
    """One addend of the reward: the answer of a service or a class, or a local rule."""

    rule: str | None = Field(
        None,
        min_length=1,
        description="A local rule instead of a service: language, script, copy, length or "
        "repetition (violations, 0 to 1), truncated (1 if `finish_reason` is length), chrf (0 to "
        "100, needs `ref`), duplicates (of a group), or a function of yours, module:function.",
    )
    field: ValueField = Field(
        "score",
        description="The value in a service's answer: score, pass (a verdict, 1 or 0), mt_covered, "
        "or the number of error_spans, omissions or unplaced.",
    )
    label: str | None = Field(
        None,
        min_length=1,
        description="Of a reward model with several labels: its output for this one is the value, "
        "in place of the score. Components of equal requests share one answer.",
    )
    severity_weights: dict[str, Number] = Field(
        default_factory=dict,
        description="Of a list field: add the weight of each entry's severity instead of counting. "
        "A severity without a weight is an error of the sample.",
    )
    offset: Number = Field(0.0, description="scaled = offset + scale * raw.")
    scale: Number = Field(1.0, description="scaled = offset + scale * raw.")
    weight: Number = Field(
        1.0, description="Weight of the scaled value; 0: reported, and never missed."
    )
    group: bool = Field(
        False,
        description="The function of `rule` gets all samples of a group, and returns a value each.",
    )
    batch: bool = Field(
        False,
        description="The function of `rule` gets all samples of a call, and returns a value each: "
        "for one that sends them to a server together.",
    )
    applies_to_refused_text: bool = Field(
        False, description="A local rule that counts beside refused_text_reward, too."
    )

    @model_validator(mode="after")
    def _is_service_or_rule(self) -> Self:
        sources = ("service", "rule", "scorer")
        names = [name for name in sources if getattr(self, name) is not None]
        if len(names) != 1:
            raise ValueError("needs either `service`, `rule` or `scorer`. Give one of them")
        default = type(self).model_construct()
        for key in self._unused_names(names[0]):
            if getattr(self, key) != getattr(default, key):
                raise ValueError(f"`{key}` has no effect beside `{names[0]}`. Remove it")
        if self.rule is not None and self.arguments and ":" not in self.rule:
            raise ValueError("`arguments` are for a module:function. Remove them")
        if self.label is not None and self.field != "score":
            raise ValueError("`field` has no effect beside `label`. Remove one of them")
        if self.severity_weights and self.field not in LIST_FIELDS:
            raise ValueError(
                f"`severity_weights` needs `field` set to one of {', '.join(LIST_FIELDS)}"
            )
        if len({name.upper() for name in self.severity_weights}) < len(self.severity_weights):
            raise ValueError("`severity_weights` names a severity twice. Case makes no difference")
        if self.languages and self.task is not None:
            raise ValueError("`languages` are a metric's; a judge gets `variables`. Remove it")
        if self.variables and self.task is None:
            raise ValueError("`variables` are a judge's. Give `task`, too")
        return self._check_group()

    def _unused_names(self, source: str) -> tuple[str, ...]:
        """Return the keys that have no effect beside `service`, `scorer` or `rule`."""
        if source == "rule":
            of_requests = [key for key in ServiceRequest.model_fields if key != "arguments"]
            return (*of_requests, "field", "label", "severity_weights")
        of_rules = ("group", "batch", "applies_to_refused_text")
        if source == "service":
            return (*of_rules, "arguments")
        return (*of_rules, "task", "variables", "label")

    def _check_group(self) -> Self:
        if self.rule is None:
            return self
        for key in ("group", "batch"):
            if getattr(self, key) and ":" not in self.rule:
                raise ValueError(f"`{key}` is for a module:function. Remove it")
        if self.group and self.batch:
            raise ValueError("`group` and `batch`: give one of them")
        if self.applies_to_refused_text and self.is_group_rule:
            raise ValueError("a rule of groups cannot apply to a refused text")
        return self

    @property
    def is_group_rule(self) -> bool:
        """Return whether the value depends on the other completions of the group."""
        return self.group or self.rule == "duplicates"

    @property
    def request(self) -> ServiceRequest:
        """Return the part that is sent to the service."""
        return ServiceRequest(**{name: getattr(self, name) for name in ServiceRequest.model_fields})


class GateConfig(Config):
    """Holds the action of a closed gate, which never raises a reward.

    By default the sample has no reward, and no service is asked for it."""

    factor: float | None = Field(
        None, ge=0, le=1, description="A closed gate multiplies a reward above 0 by this instead."
    )
    reward: Number | None = Field(
        None, description="A closed gate lowers the reward to this number instead."
    )

    @model_validator(mode="after")
    def _has_one_action(self) -> Self:
        if self.factor is not None and self.reward is not None:
            raise ValueError("`factor` and `reward`: give one of them")
        return self


class LanguageGate(GateConfig):
    """Closed if the translation is probably not in the sample's `tgt_lang`."""

    rule: Literal["language"] = Field(description="Selects this gate.")
    model: str = Field(
        "py3langid", min_length=1, description="py3langid, or the path of a fastText model."
    )
    min_probability: float = Field(
        0.5, gt=0, le=1, description="Least probability of the target language."
    )
    min_letters: int = Field(
        40,
        ge=1,
        description="A translation with fewer letters passes: the model may err. Letters of Han, "
        "Kana and Hangul count twice.",
    )
    unknown: Literal["no_reward", "pass"] = Field(
        "no_reward", description="A target language that the model does not know."
    )


class CopyGate(GateConfig):
    """Closed if too much of the translation is copied source."""

    rule: Literal["copy"] = Field(description="Selects this gate.")
    max_share: float = Field(
        0.9, ge=0, lt=1, description="Largest share of letters and digits in copied runs."
    )
    min_letters: int = Field(20, ge=1, description="A translation with fewer letters passes.")


class LengthGate(GateConfig):
    """Closed if the translation is too short or too long for its source."""

    rule: Literal["length"] = Field(description="Selects this gate.")
    slack: float = Field(
        3.0,
        ge=1,
        description="Factor on both sides of the length ratio (UTF-8 bytes) that is usual between "
        "the two languages.",
    )
    floor: int = Field(
        40, ge=0, description="Characters of English below which a source widens the band."
    )


#: None: a span of this severity is an error.
SeverityWeight = (
    Annotated[float, BeforeValidator(_check_number), Field(ge=-MAX_FLOAT32, le=0)] | None
)


class SeverityWeights(Config):
    """Reward of a token inside an error span, by the span's severity.

    null: a span of this severity is an error."""

    MINOR: SeverityWeight = Field(-1.0, description="Weight of a minor error.")
    MAJOR: SeverityWeight = Field(-5.0, description="Weight of a major error.")
    CRITICAL: SeverityWeight = Field(-10.0, description="Weight of a critical error.")
    UNKNOWN: SeverityWeight = Field(
        None, description="Weight of any other severity; null: such a span is an error."
    )

    @model_validator(mode="before")
    @classmethod
    def _any_case(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        by_name = {str(name).upper(): weight for name, weight in data.items()}
        if len(by_name) < len(data):
            raise ValueError("names a severity twice. Case makes no difference")
        return by_name


class AllSeverityWeights(SeverityWeights):
    """Weights also of severities that only some services give, by their names (NEUTRAL)."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, SeverityWeight]

    @model_validator(mode="after")
    def _has_no_misspelled_name(self) -> Self:
        for name in self.model_extra or {}:
            if near := get_close_matches(name, SeverityWeights.model_fields, 1):
                raise ValueError(f"{name!r} is nearly {near[0]}. Correct it")
        return self


TokenWeight = Annotated[float, BeforeValidator(_check_number), Field(ge=0, le=1e12)]


class TokenRewardConfig(Config):
    """Rewards of single tokens, from the error spans and omissions that services mark.

    A component named here is required, also with a weight of 0."""

    spans: dict[str, TokenWeight] = Field(
        default_factory=dict,
        description="Weight of the penalties on tokens inside a component's error spans.",
    )
    omissions: dict[str, TokenWeight] = Field(
        default_factory=dict,
        description="Weight of a component's omissions: the severities' weights, summed, on the "
        "last token.",
    )
    severity_weights: AllSeverityWeights = Field(
        default_factory=AllSeverityWeights,
        description="Reward of a token inside an error span; of an omission.",
    )
    overlap_policy: OverlapPolicy = Field(
        "any_overlap",
        description="A span hits a token if they share one character, or if the span covers at "
        "least `overlap_threshold` of it (majority_overlap).",
    )
    overlap_threshold: float = Field(
        0.5, gt=0.0, le=1.0, description="Share of a token's characters, for majority_overlap."
    )
    combine: Combine = Field(
        "sum",
        description="Several spans on a token: the sum of their penalties, the weakest (min) or "
        "the strongest (max). spread: each span's penalty is shared among its tokens, then summed.",
    )
    sources_combine: SourcesCombine = Field(
        "sum",
        description="A token inside spans of several components: the sum of the penalties, each "
        "times its weight, or the largest one (max).",
    )
    use_confidence: bool = Field(
        False, description="Multiply a penalty by its span's confidence, if it has one."
    )
    uncovered: Literal["exclude", "sequence_only"] = Field(
        "exclude",
        description="Tokens after the part that a model could read: not trained on, or with the "
        "reward of the text only.",
    )

    @model_validator(mode="after")
    def _names_a_component(self) -> Self:
        if not self.spans and not self.omissions:
            raise ValueError("names no component. Give `spans` or `omissions`, or remove it")
        return self

    @property
    def weighted(self) -> frozenset[str]:
        """Return the components with a weight; none if no severity has one."""
        if not any(self.severity_weights.model_dump().values()):
            return frozenset()
        weights = [*self.spans.items(), *self.omissions.items()]
        return frozenset(name for name, weight in weights if weight)


Gate = Annotated[LanguageGate | CopyGate | LengthGate, Field(discriminator="rule")]


class RewardDefinition(Config):
    """A composite reward: components, gates, and the time that a call may take."""

    components: dict[Name, ComponentConfig] = Field(min_length=1, description="By name.")
    gates: dict[Name, Gate] = Field(default_factory=dict, description="By name.")
    token_rewards: TokenRewardConfig | None = Field(
        None, description="Rewards of single tokens, from error spans; null: none."
    )
    refused_text_reward: dict[RefusedType, Number] = Field(
        default_factory=dict,
        description="Reward of a completion whose text a service with a weight refuses, by the "
        "error's type (invalid_input, overlong); without one: no reward. A source that is refused "
        "with any translation never has a reward.",
    )
    deadline_s: float = Field(
        170.0, gt=0, description="Seconds for a call with all retries. Set less than the trainer's."
    )
    timeout_s: float = Field(
        120.0, gt=0, description="Seconds that a service may take for one request."
    )
    batch_size: int = Field(64, ge=1, description="Samples in one request, of all callers.")
    max_in_flight: int = Field(8, ge=1, description="Concurrent requests to one service.")

    @model_validator(mode="after")
    def _has_weights(self) -> Self:
        for key in ("spans", "omissions"):
            for name in getattr(self.token_rewards, key, {}):
                component = self.components.get(name)
                if component is None or component.rule is not None:
                    raise ValueError(
                        f"token_rewards.{key}: {name!r} is no component with a service. Correct "
                        "the name"
                    )
        if not self.required:
            raise ValueError("components: every weight is 0, so no sample would have a reward")
        return self

    @property
    def required(self) -> frozenset[str]:
        """Return the components without which a sample has no reward: those with a weight, of
        texts or of tokens."""
        of_tokens = frozenset() if self.token_rewards is None else self.token_rewards.weighted
        return of_tokens.union(name for name, c in self.components.items() if c.weight)

    @property
    def has_group_rules(self) -> bool:
        """Return whether the groups of the samples are required."""
        return any(component.is_group_rule for component in self.components.values())


def load_definition(source: RewardDefinition | Mapping[str, Any] | str | Path) -> RewardDefinition:
    """Return a checked definition from a mapping or a YAML file.

    Raises UserError, one line that names each wrong key.
    """
    if isinstance(source, RewardDefinition):
        return source
    if isinstance(source, Mapping):
        return check_config(RewardDefinition, source, "reward definition")
    if not isinstance(source, str | Path):
        kind = type(source).__name__
        raise UserError(f"reward definition: expected a mapping or the path of a file, not {kind}")
    return load_config(RewardDefinition, source)
