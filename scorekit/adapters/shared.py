"""Shared code of the bindings for trainers: settings, rows as samples, rewards, outages.

A binding holds how its trainer hands over a completion, and what a missing reward is there.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from pydantic import Field, ValidationError
from pydantic_core import from_json
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from scorekit.client import ScoringClient
from scorekit.config import describe_with_nearest
from scorekit.credit import Alignment
from scorekit.credit.assign import missed_spans
from scorekit.errors import ServiceUnreachable, UserError
from scorekit.net.loops import ForkSafeClient
from scorekit.net.retry import Deadline
from scorekit.prompts import FIELDS, load_postprocess, load_template
from scorekit.rewards import (
    CompositeReward,
    RewardDefinition,
    RewardResult,
    TokenRewards,
    load_definition,
    raise_for_missing,
    token_rewards,
)
from scorekit.rewards.definition import SeverityWeights
from scorekit.rewards.results import log_words
from scorekit.rewards.services import LANGUAGES, needs_languages
from scorekit.schemas import Info, Overlong

log = logging.getLogger(__name__)

#: What a trainer may give beside single rows.
Sent = Literal["finish_reason", "groups", "tokens"]
#: Statuses of a component whose service has not answered.
_OUTAGES = ("upstream", "timeout")


class RewardSettings(BaseSettings):
    """Settings of an adapter: the service and the fields of a sample.

    Each setting may come from SCOREKIT_REWARD_<NAME>."""

    model_config = SettingsConfigDict(
        env_prefix="SCOREKIT_REWARD_", extra="forbid", frozen=True, allow_inf_nan=False
    )

    url: Annotated[tuple[str, ...], NoDecode] = Field(
        (), description="URLs of a scoring service, separated by commas."
    )
    definition: Annotated[RewardDefinition | None, NoDecode] = Field(
        None,
        description="A composite reward in place of `url`: a YAML file, or a mapping. A sample has "
        "all fields of the dataset's row beside those below.",
    )
    src_key: str = Field(
        "src", description="Field of the dataset's row (or of a JSON label) that is the source."
    )
    src_pattern: str | None = Field(
        None,
        description="Take the source from the prompt instead: a regular expression with a group "
        "named `src`, searched for; `.` matches line ends.",
    )
    src_template: str | None = Field(
        None,
        description="Take the source from the prompt instead, which is this template of "
        "scorekit/prompts.py (a name or a file), filled.",
    )
    ref_key: str | None = Field(
        None, description="Field that is the reference; null: quality estimation."
    )
    task: str | None = Field(
        None, description="Of a judge: the task that scores translations (mqm); null: no judge."
    )
    src_lang: str | None = Field(
        None, description="Language of all sources, for scorers that ask for it (mqm)."
    )
    tgt_lang: str | None = Field(None, description="Language of all translations, as src_lang.")
    src_lang_key: str | None = Field(
        None, description="Or: field that is the source's language; null: src_lang."
    )
    tgt_lang_key: str | None = Field(
        None, description="Or: field that is the translation's language; null: tgt_lang."
    )
    postprocess: str = Field(
        "strip",
        description="What is done to a completion before it is scored: strip (white space at its "
        "ends goes, as in the trainer), none, or module:function.",
    )
    offset: float = Field(
        5.0, description="Reward of a score where lower is better: offset - score."
    )
    overlong: Overlong = Field(
        "truncate",
        description="Inputs over the limit: cut, a failed sample, or windows of sentences.",
    )
    timeout_s: float = Field(120.0, gt=0, description="Seconds the service may take.")
    deadline_s: float = Field(170.0, gt=0, description="Seconds for a request with its retries.")

    @property
    def client_options(self) -> dict[str, Any]:
        """Return the options of the service's client."""
        limits = {"timeout_s": self.timeout_s, "deadline_s": self.deadline_s}
        # A trainer may be started before its service, also in a notebook.
        return {**limits, "first_answer_s": self.deadline_s}


#: Settings that a reward definition has itself, for each component.
_OF_DEFINITION = ("url", "task", "offset", "overlong", "timeout_s", "deadline_s")


def reward_settings(**values: Any) -> RewardSettings:
    """Return the settings from arguments, then from the environment.

    url: one URL or several. definition: as `scorekit.rewards.load_definition` takes it. If one of
    the two is an argument, the other is not taken from the environment.

    Raises UserError if neither is given, or a name is unknown, or a value is wrong or has no
    effect.
    """
    urls, definition = values.get("url"), values.get("definition")
    if not urls and not definition:
        urls = os.environ.get("SCOREKIT_REWARD_URL")
        definition = os.environ.get("SCOREKIT_REWARD_DEFINITION")
    if not urls and not definition:
        raise UserError(
            "no scoring service: give url, or set SCOREKIT_REWARD_URL; or definition, or "
            "set SCOREKIT_REWARD_DEFINITION"
        )
    values["url"] = _urls_of(urls)
    values["definition"] = load_definition(definition) if definition else None
    try:
        settings = RewardSettings(**values)
    except ValidationError as error:
        problem = describe_with_nearest(RewardSettings, error)
        raise UserError(f"reward settings: {problem}") from None
    if settings.definition is not None:
        for name in _OF_DEFINITION:
            if name in settings.model_fields_set and getattr(settings, name) != ():
                raise UserError(f"{name}: has no effect beside definition. Set it in there")
    return settings


def _urls_of(value: Any) -> tuple[str, ...]:
    """Return the URLs of one text or of several. Raises UserError for anything else."""
    parts = value.split(",") if isinstance(value, str) else value or ()
    if not isinstance(parts, Iterable) or not all(isinstance(part, str) for part in parts):
        raise UserError(f"url: {value!r} is no URL. Give one as a text, or a list of them")
    return tuple(part.strip() for part in parts)


class Samples:
    """Finds source and reference of a sample in the fields that a trainer passes.

    Raises UserError if a pattern has no group `src`, if source or language are set in two ways, or
    if `postprocess` does not exist.
    """

    def __init__(self, settings: RewardSettings) -> None:
        if settings.src_pattern is not None and settings.src_template is not None:
            raise UserError("src_pattern and src_template: give one of them")
        fixed = {name: getattr(settings, name) for name in ("src_lang", "tgt_lang")}
        keys = {name: getattr(settings, f"{name}_key") for name in ("ref", "src_lang", "tgt_lang")}
        self._fixed = {name: value for name, value in fixed.items() if value is not None}
        self._keys = {name: key for name, key in keys.items() if key is not None}
        if both := sorted(self._fixed.keys() & self._keys.keys()):
            raise UserError(f"{both[0]} and {both[0]}_key: give one of them")
        self._keeps_fields = settings.definition is not None
        self._postprocess = load_postprocess(settings.postprocess)
        self._src_key = settings.src_key
        self._pattern: re.Pattern[str] | None = None
        if settings.src_template is not None:
            self._pattern = template_pattern(load_template(settings.src_template))
        elif settings.src_pattern is not None:
            self._pattern = _compiled(settings.src_pattern)

    def sample(self, fields: Mapping[str, Any], prompt: str | None, mt: str) -> dict[str, Any]:
        """Return a sample of a request; for a reward definition with all fields of the row.

        fields: the fields of the dataset's row.
        mt: the decoded completion.

        Raises UserError that names the missing field.
        """
        if self._pattern is None:
            src = _text(fields, self._src_key, "src_key")
        else:
            if prompt is None:
                raise UserError("the prompt is not passed along: give src_key, a field that is")
            match = self._pattern.search(prompt)
            if match is None or match["src"] is None:
                raise UserError("the source cannot be found in the prompt: check the pattern")
            src = match["src"]
        row = fields if self._keeps_fields else {}
        sample = {**row, **self._fixed, "src": src, "mt": self._postprocess(mt)}
        return sample | {name: self._value(fields, name) for name in self._keys}

    def _value(self, fields: Mapping[str, Any], name: str) -> str | None:
        """Return a field's text; None, where the row has none and a definition is to decide."""
        key = self._keys[name]
        if self._keeps_fields and key in fields and fields[key] is None:
            return None
        return _text(fields, key, f"{name}_key")


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise UserError(f"src_pattern: {error}") from None
    if "src" not in compiled.groupindex:
        raise UserError("src_pattern has no group (?P<src>...)")
    return compiled


def template_pattern(template: str) -> re.Pattern[str]:
    """Return a pattern that matches exactly the filled template; `{text}` is the group `src`."""
    seen: set[str] = set()
    pattern = ""
    for part in re.split(r"(\{[a-z_]+\})", template):
        name = part[1:-1]
        if not (part.startswith("{") and name in FIELDS):
            pattern += re.escape(part)
            continue
        group = "src" if name == "text" else name
        repeated = f"(?P={group})"
        # Names and codes of languages are short. Without a bound, several groups would make the
        # search polynomial in the length of the text.
        wildcard = ".*" if name == "text" else ".{0,60}?"
        pattern += repeated if group in seen else f"(?P<{group}>{wildcard})"
        seen.add(group)
    return re.compile(rf"\A{pattern}\Z", re.DOTALL)


def _text(fields: Mapping[str, Any], key: str, setting: str) -> str:
    if key not in fields:
        names = ", ".join(sorted(fields)) or "none"
        raise UserError(f"no field {key!r}; there are: {names}. Name the right one by {setting}")
    if not isinstance(fields[key], str):
        raise UserError(f"field {key!r} is not text but {type(fields[key]).__name__}")
    return str(fields[key])


def message_text(message: Any) -> str:
    """Return the text of a prompt or completion.

    message: a string, or a list of chat messages; then the text of the last message that has any
    (`content` is a string, or a list of parts with `text`). Raises UserError for another form."""
    if isinstance(message, str):
        return message
    for turn in reversed(list(message)):
        content = turn.get("content")
        if isinstance(content, str):
            return content
        if content:
            try:
                return "".join(part.get("text") or "" for part in content)
            except (AttributeError, TypeError):
                raise UserError(
                    f"a message's content is neither a text nor a list of parts: {content!r:.60}"
                ) from None
    return ""


def completion_text(completion: Any) -> str:
    """Return the text of a completion: of chat messages the policy's last text, no tool's."""
    if isinstance(completion, str):
        return completion
    return message_text([m for m in completion if m.get("role", "assistant") == "assistant"])


def fields_of(label: Any) -> dict[str, Any]:
    """Return the fields of a label: those of its JSON object, and the full label as `label`."""
    fields: dict[str, Any] = {}
    if isinstance(label, str) and label.lstrip().startswith("{"):
        try:
            fields = from_json(label)
        except ValueError:
            fields = {}
    elif isinstance(label, dict):
        fields = label
    return {**fields, "label": label}


class TrainerRow(NamedTuple):
    """One completion as a trainer hands it over.

    fields: those of the dataset's row.
    prompt: None: the trainer passes none.
    completion: the decoded text, without the marks that end a turn.
    """

    fields: Mapping[str, Any]
    prompt: str | None
    completion: str


class SpanWeights(NamedTuple):
    """The short form of a definition's `token_rewards`: the error spans of one component.

    component: None: the service of `url`.
    weight: of their penalties.
    options: further keys of `token_rewards`; severities as `severities_of` returns them.
    """

    component: str | None = None
    weight: float = 1.0
    options: Mapping[str, Any] = MappingProxyType({})


class TrainerReward:
    """Gives a trainer the rewards of its completions. Use it in one event loop.

    The reward is that of a definition. `url` stands for one component, the service that runs there:
    it is asked once what it is. Samples of concurrent calls share requests.

    trainer: its name, in errors.
    sends: what it gives beside single rows, and so a definition may read: `finish_reason` in the
    fields, the `groups` of the completions, and their `tokens`, which get rewards.
    spans: where the definition has no `token_rewards`.
    Raises UserError if a setting or the definition is wrong or does not fit the trainer, or if a
    rule or a model cannot be loaded.
    """

    def __init__(
        self,
        settings: RewardSettings,
        trainer: str,
        *,
        sends: Collection[Sent] = (),
        spans: SpanWeights | None = None,
    ) -> None:
        self.settings = settings
        self._samples, self._spans = Samples(settings), spans
        self._composite: CompositeReward | None = None
        self._client: ScoringClient | None = None
        if settings.definition is not None:
            definition = settings.definition
            if spans is not None and spans.component is not None:
                definition = with_token_rewards(definition, spans.component, spans)
            check_definition(definition, trainer, sends)
            self._composite = CompositeReward(definition)
        else:
            self._client = ScoringClient(settings.url, **settings.client_options)

    @property
    def deadline_s(self) -> float:
        """Return the seconds that a call may take."""
        return (self.settings.definition or self.settings).deadline_s

    async def composite(self) -> CompositeReward:
        """Return the composite reward. Raises UserError if the service does not fit the settings,
        and the errors of `ScoringClient.limits` if it does not say what it is."""
        if self._composite is None:
            assert self._client is not None
            info = await self._client.limits()
            if self._composite is None:  # else another call was faster
                definition = definition_of_service(self.settings, info)
                if self._spans is not None:
                    definition = with_token_rewards(definition, info.service, self._spans)
                self._composite = CompositeReward(definition)
        return self._composite

    async def check(self, wait_s: float) -> dict[str, Info]:
        """Wait until all services are ready; return what each component's service is.

        Each service with a weight gets one sample, which shows whether it can do what is asked of
        it. Raises UserError if one does not fit, ServiceUnreachable after `wait_s` seconds.
        """
        waiting = Deadline(wait_s)
        if self._client is not None:
            await self._client.wait_ready(wait_s)
        return await (await self.composite()).check(wait_s=waiting.remaining_s(), probe=True)

    async def score(
        self, rows: Iterable[TrainerRow], groups: Sequence[Hashable] | None = None
    ) -> list[RewardResult]:
        """Return the reward of each row, or none, in order. See `CompositeReward.score`."""
        samples = [self._samples.sample(*row) for row in rows]
        return await (await self.composite()).score(samples, groups=groups)

    async def score_one(self, row: TrainerRow) -> RewardResult:
        """Return the result of a row, which has a reward. Raises SampleError if it has none."""
        results = await self.score([row])
        raise_for_missing(results)
        return results[0]

    def token_rewards(self, result: RewardResult, alignment: Alignment) -> TokenRewards:
        """Return the rewards of the tokens of a completion that has a reward.

        result: of `score`.
        alignment: of the completion's tokens in the text that was scored.
        Raises ValueError if a span is outside the text, UserError if a service marks no spans or a
        severity has no weight.
        """
        assert self._composite is not None, "nothing was scored"
        definition = self._composite.definition
        tokens = token_rewards(definition, result, alignment.text, alignment.offsets)
        if tokens is None:
            raise ValueError(f"a span is outside the text of {len(alignment.text)} characters")
        _log_missed(definition, result, alignment)
        return tokens

    def numbers(self, result: RewardResult) -> dict[str, float | None]:
        """Return the numbers of a result by name, the same names for each one: the score of `url`
        under its service's name, or those of `component_numbers`. None: no value."""
        if self.settings.definition is None:
            return {name: component.raw for name, component in result.components.items()}
        return component_numbers(result)

    async def close(self) -> None:
        """Cancel what is in flight, and close the connections."""
        if self._composite is not None:
            await self._composite.close()
        if self._client is not None:
            await self._client.close()


class SyncTrainerReward(ForkSafeClient[TrainerReward]):
    """TrainerReward for code that is not async, also in processes that fork."""

    def __init__(
        self,
        settings: RewardSettings,
        trainer: str,
        *,
        sends: Collection[Sent] = (),
        spans: SpanWeights | None = None,
    ) -> None:
        super().__init__(
            f"reward of {trainer}",
            lambda: TrainerReward(settings, trainer, sends=sends, spans=spans),
            TrainerReward.close,
        )

    def score(
        self, rows: Sequence[TrainerRow], groups: Sequence[Hashable] | None = None
    ) -> list[RewardResult]:
        """See TrainerReward.score."""
        return self.run(lambda reward: reward.score(rows, groups))

    def token_rewards(self, result: RewardResult, alignment: Alignment) -> TokenRewards:
        """See TrainerReward.token_rewards."""
        return self._current()[1].token_rewards(result, alignment)


def with_token_rewards(
    definition: RewardDefinition, component: str, spans: SpanWeights
) -> RewardDefinition:
    """Return a definition that rewards tokens by the error spans of a component.

    Raises UserError if the definition has `token_rewards` itself, or if a key is wrong.
    """
    if definition.token_rewards is not None:
        raise UserError("token_rewards: the definition has it. Set spans and weights in there")
    section = {**spans.options, "spans": {component: spans.weight}}
    return load_definition(definition.model_dump(exclude_unset=True) | {"token_rewards": section})


def severities_of(weights: Mapping[str, float | None]) -> dict[str, float | None]:
    """Return a trainer's `severity_weights` as a definition has them: each severity by name.

    One that is not named has the weight of UNKNOWN, or none.
    """
    by_name = {severity.upper(): weight for severity, weight in weights.items()}
    return dict.fromkeys(SeverityWeights.model_fields, by_name.get("UNKNOWN")) | by_name


def _log_missed(definition: RewardDefinition, result: RewardResult, alignment: Alignment) -> None:
    """Log how many of the spans that become rewards of tokens hit no token."""
    config = definition.token_rewards
    for name in () if config is None else sorted(config.weighted & config.spans.keys()):
        spans = getattr(result.components[name].answer, "error_spans", None) or ()
        if missed := missed_spans(spans, alignment.offsets):
            log.warning("%s: %d spans hit no token", name, missed)


def check_definition(definition: RewardDefinition, trainer: str, sends: Collection[Sent]) -> None:
    """Raise UserError if a definition needs more than a trainer sends. See `TrainerReward`."""
    for name, config in definition.components.items():
        if config.is_group_rule and "groups" not in sends:
            raise UserError(
                f"components.{name}: a rule of groups, but {trainer} sends one completion in a "
                "request. Remove it"
            )
        if config.rule == "truncated" and "finish_reason" not in sends:
            raise UserError(
                f"components.{name}: reads finish_reason, which {trainer} does not send. Remove it"
            )
    if definition.token_rewards is not None and "tokens" not in sends:
        raise UserError(
            f"token_rewards: {trainer} takes one number for a completion. Remove the section, or "
            "see docs/how-to/reward-tokens.md"
        )


def definition_of_service(settings: RewardSettings, info: Info) -> RewardDefinition:
    """Return the definition that `url` stands for: one component, named as the service.

    Its reward is the score, or `offset` - score where a low score is good.
    info: what runs at the URLs.
    Raises UserError if that does not support the settings.
    """
    component: dict[str, Any] = {
        "service": settings.url,
        "task": settings.task,
        "options": _options_for(info, settings),
    }
    if settings.task is None:
        component["reference"] = settings.ref_key is not None
        component["languages"] = needs_languages(info.inputs)
    else:
        component["variables"] = {name: name for name in _sent_names(settings)}
    if not info.higher_is_better_in(settings.task):
        component |= {"offset": settings.offset, "scale": -1.0}
    return load_definition(
        {
            "components": {info.service: component},
            "timeout_s": settings.timeout_s,
            "deadline_s": settings.deadline_s,
        }
    )


def _sent_names(settings: RewardSettings) -> list[str]:
    """Return the fields of a sample that the settings give it."""
    key_by_name = {
        "src": "src",
        "mt": "mt",
        "ref": settings.ref_key,
        "src_lang": settings.src_lang or settings.src_lang_key,
        "tgt_lang": settings.tgt_lang or settings.tgt_lang_key,
    }
    return [name for name, key in key_by_name.items() if key]


def _options_for(info: Info, settings: RewardSettings) -> dict[str, Any]:
    """Return the options of a request. A judge has no option for overlong samples: they fail.

    Raises UserError if the service does not support the settings. Otherwise every sample would
    fail by itself, and a trainer may ignore single failures."""
    if info.service != "judge":
        if settings.task is not None:
            raise UserError(f"task {settings.task!r}: {info.service} is no judge, and has no tasks")
        if (info.inputs or {}).get("ref") == "required" and settings.ref_key is None:
            raise UserError(f"ref_key: {info.model} needs references. Name the field with them")
        if needs_languages(info.inputs):
            _check_languages(settings, f"{info.model} needs")
        return {"overlong": settings.overlong}
    if settings.task is None:
        raise UserError("the service is a judge: name a task that scores translations (task: mqm)")
    if info.tasks is not None and settings.task not in info.tasks:
        raise UserError(f"task {settings.task!r}: this judge has {', '.join(info.tasks)}")
    if settings.overlong == "windows":
        raise UserError("overlong: windows: a judge reads whole texts")
    if settings.task == "mqm":
        _check_languages(settings, "task 'mqm' wants")
    return {}


def _check_languages(settings: RewardSettings, user: str) -> None:
    for name in LANGUAGES:
        if getattr(settings, name) is None and getattr(settings, f"{name}_key") is None:
            raise UserError(f"{user} languages: give {name} or {name}_key")


def raise_for_outage(results: Sequence[RewardResult]) -> None:
    """Raise ServiceUnreachable if `is_outage`."""
    if is_outage(results):
        reason = f"none of {len(results)} samples has a reward: {log_words(results[0].reason)}"
        raise ServiceUnreachable("reward", reason)


def is_outage(results: Sequence[RewardResult]) -> bool:
    """Return whether no sample has a reward, and each lacks a service's answer."""
    return bool(results) and all(
        result.reward is None
        and any(c.is_required and c.status in _OUTAGES for c in result.components.values())
        for result in results
    )


def log_missing(name: str, results: Sequence[RewardResult]) -> None:
    """Log how many completions have no reward, and the cause of the first one.

    The log has names and statuses alone, no word of a service or of a text.
    """
    missing = [result for result in results if result.reward is None]
    if missing:
        log.warning(
            "%s: %d of %d completions have no reward: %s",
            name,
            len(missing),
            len(results),
            missing[0].cause,
        )


def component_numbers(result: RewardResult) -> dict[str, float | None]:
    """Return `component/NAME` (raw), `scaled/NAME` and `gate_closed/NAME` (1 or 0).

    Every sample has all names: verl takes those of the first one of a batch, and fails where
    another lacks one. None: no value. verl's means leave None out, while NaN would make them NaN.
    """
    numbers: dict[str, float | None] = {}
    for name, component in result.components.items():
        numbers[f"component/{name}"] = component.raw
        numbers[f"scaled/{name}"] = component.scaled
    for name, gate in result.gates.items():
        numbers[f"gate_closed/{name}"] = (
            None if gate.status == "unknown" else float(gate.status == "closed")
        )
    return numbers


def component_columns(results: Sequence[RewardResult]) -> dict[str, list[float | None]]:
    """Return the numbers of `RewardResult.stats` by name, one for each result.

    Every component and gate has a column, whichever results have its value. None: no value.
    """
    if not results:
        return {}
    names = [
        *(f"component/{name}" for name in results[0].components),
        *(f"gate_closed/{name}" for name in results[0].gates),
    ]
    stats = [result.stats() for result in results]
    return {name: [values.get(name) for values in stats] for name in names}


Value = TypeVar("Value")
_BY_LOOP: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Any]] = WeakKeyDictionary()


def once_per_loop(name: str, settings: Mapping[str, Any], make: Callable[[], Value]) -> Value:
    """Return what `make` returned at the first call with this name and these settings in the
    running event loop."""
    values = _BY_LOOP.setdefault(asyncio.get_running_loop(), {})
    key = f"{name} {json.dumps(settings, sort_keys=True, default=str)}"
    if key not in values:
        values[key] = make()
    value: Value = values[key]
    return value
