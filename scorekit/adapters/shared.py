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
from functools import lru_cache
from typing import Annotated, Any, Literal, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from pydantic import Field, ValidationError
from pydantic_core import from_json
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from scorekit.client import ScoringClient, SyncScoringClient
from scorekit.config import describe_with_nearest
from scorekit.errors import RequestError, ScorekitError, ServiceUnreachable, UserError
from scorekit.net.fork_safe import ForkSafeClient
from scorekit.net.retry import Deadline
from scorekit.prompts import FIELDS, load_postprocess, load_template
from scorekit.rewards import (
    CompositeReward,
    RewardDefinition,
    RewardResult,
    SyncCompositeReward,
    load_definition,
)
from scorekit.rewards.results import log_words
from scorekit.schemas import Info, JudgeScored, Overlong, Result, Scored

log = logging.getLogger(__name__)

#: Some trainers send one completion per request, from many threads.
MAX_IN_FLIGHT = 256
#: What a trainer may give beside single rows.
Sent = Literal["finish_reason", "groups"]
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
        return {**limits, "max_in_flight": MAX_IN_FLIGHT, "first_answer_s": self.deadline_s}


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
    parts = urls.split(",") if isinstance(urls, str) else urls or ()
    values["url"] = tuple(part.strip() for part in parts)
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


class Samples:
    """Finds source and reference of a sample in the fields that a trainer passes.

    Raises UserError if a pattern has no group `src`, if source or language are set in two ways, or
    if `postprocess` does not exist.
    """

    def __init__(self, settings: RewardSettings) -> None:
        if settings.src_pattern is not None and settings.src_template is not None:
            raise UserError("src_pattern and src_template: give one of them")
        fixed = {name: getattr(settings, name) for name in ("task", "src_lang", "tgt_lang")}
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

        fields: the fields of the dataset's row. mt: the decoded completion.

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


def reward_of(result: Scored | JudgeScored, info: Info, settings: RewardSettings) -> float:
    """Return the reward (higher is better): the score, or offset - score if a low score is good."""
    scale = (info.tasks or {}).get(settings.task or "", info)
    return result.score if scale.higher_is_better else settings.offset - result.score


def options_for(info: Info, settings: RewardSettings) -> dict[str, Any]:
    """Return the options of a request. A judge has no option for overlong samples: they fail.

    Raises UserError if the service does not support the settings. Otherwise every sample would
    fail by itself, and a trainer may ignore single failures."""
    if info.service != "judge":
        if settings.task is not None:
            raise UserError(f"task {settings.task!r}: {info.service} is no judge, and has no tasks")
        return {"overlong": settings.overlong}
    if settings.task is None:
        raise UserError("the service is a judge: name a task that scores translations (task: mqm)")
    if info.tasks is not None and settings.task not in info.tasks:
        raise UserError(f"task {settings.task!r}: this judge has {', '.join(info.tasks)}")
    if settings.overlong == "windows":
        raise UserError("overlong: windows: a judge reads whole texts")
    for name in ("src_lang", "tgt_lang") if settings.task == "mqm" else ():
        if getattr(settings, name) is None and getattr(settings, f"{name}_key") is None:
            raise UserError(f"task 'mqm' wants languages: give {name} or {name}_key")
    return {}


class Rewards:
    """Gets rewards from a scoring service, for code that is not async."""

    def __init__(self, settings: RewardSettings) -> None:
        self.settings = settings
        self.samples = Samples(settings)
        self._client = SyncScoringClient(settings.url, **settings.client_options)

    def score(self, samples: Sequence[Mapping[str, str]]) -> list[Result]:
        """Return the results of samples. See ScoringClient.score."""
        return self._client.score(samples, _options_for(self._client.limits(), self.settings))

    def score_each(self, samples: Sequence[Mapping[str, str]]) -> list[Result | None]:
        """Return the results of samples, or None for a sample whose request fails.

        If a request of many fails, each sample is requested alone, all at once and each with its
        own deadline: one text that a service cannot answer must not cost the others their score.
        What the service has scored before, it answers from its cache.

        Raises ScorekitError if no sample has an answer, and UserError for a wrong setting.
        """
        try:
            return list(self.score(samples))
        except UserError:
            raise
        except ScorekitError as error:
            if len(samples) == 1:
                raise
            kind = type(error).__name__  # its text may be the server's
            log.warning("%s: each of %d samples is requested alone", kind, len(samples))
            results = self._score_alone(samples)
            if all(result is None for result in results):
                raise
            log.warning("%d of %d samples have no answer", results.count(None), len(results))
            return results

    def _score_alone(self, samples: Sequence[Mapping[str, str]]) -> list[Result | None]:
        options = _options_for(self._client.limits(), self.settings)

        async def score_one(client: ScoringClient, sample: Mapping[str, str]) -> Result | None:
            try:
                return (await client.score([sample], options))[0]
            except (ServiceUnreachable, RequestError) as error:
                log.debug("no answer for a sample: %s", type(error).__name__)
                return None

        async def score_all(client: ScoringClient) -> list[Result | None]:
            return await asyncio.gather(*(score_one(client, sample) for sample in samples))

        return self._client.run(score_all)

    def reward(self, result: Scored | JudgeScored) -> float:
        """Return the reward of a result of `score`."""
        return reward_of(result, self._client.limits(), self.settings)


def rewards_for(settings: RewardSettings) -> Rewards:
    """Return the client of these settings. It is reused within a process, because a trainer calls
    this once per batch or once per sample."""
    return _rewards(settings.model_dump_json(), os.getpid())


@lru_cache(maxsize=8)
def _rewards(settings_json: str, pid: int) -> Rewards:
    """Return the client of these settings in this process.

    pid: part of the cache key, because a forked process does not have the client's thread.
    """
    return Rewards(RewardSettings.model_validate_json(settings_json))


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

    fields: those of the dataset's row. prompt: None: the trainer passes none. completion: the
    decoded text, without the marks that end a turn.
    """

    fields: Mapping[str, Any]
    prompt: str | None
    completion: str


class TrainerReward:
    """Gives a trainer the rewards of its completions. Use it in one event loop.

    The reward is that of a definition. `url` stands for one component, the service that runs there:
    it is asked once what it is. Samples of concurrent calls share requests.

    trainer: its name, in errors. sends: what it gives beside single rows, and so a definition may
    read: `finish_reason` in the fields, and the `groups` of the completions.
    Raises UserError if a setting or the definition is wrong or does not fit the trainer, or if a
    rule or a model cannot be loaded.
    """

    def __init__(
        self, settings: RewardSettings, trainer: str, *, sends: Collection[Sent] = ()
    ) -> None:
        self.settings = settings
        self.samples = Samples(settings)
        self._composite: CompositeReward | None = None
        self._client: ScoringClient | None = None
        if settings.definition is not None:
            check_definition(settings.definition, trainer, sends)
            self._composite = CompositeReward(settings.definition)
        else:
            self._client = ScoringClient(settings.url, **settings.client_options)

    async def composite(self) -> CompositeReward:
        """Return the composite reward. Raises UserError if the service does not fit the settings,
        and the errors of `ScoringClient.limits` if it does not say what it is."""
        if self._composite is None:
            assert self._client is not None
            info = await self._client.limits()
            if self._composite is None:  # else another call was faster
                self._composite = CompositeReward(definition_of_service(self.settings, info))
        return self._composite

    async def check(self, wait_s: float) -> dict[str, Info]:
        """Wait until all services are ready; return what each component's service is.

        Raises UserError if one does not fit, ServiceUnreachable after `wait_s` seconds.
        """
        waiting = Deadline(wait_s)
        if self._client is not None:
            await self._client.wait_ready(wait_s)
        return await (await self.composite()).check(wait_s=waiting.remaining_s())

    async def score(
        self, rows: Iterable[TrainerRow], groups: Sequence[Hashable] | None = None
    ) -> list[RewardResult]:
        """Return the reward of each row, or none, in order. See `CompositeReward.score`."""
        samples = [self.samples.sample(*row) for row in rows]
        return await (await self.composite()).score(samples, groups=groups)

    async def close(self) -> None:
        """Cancel what is in flight, and close the connections."""
        if self._composite is not None:
            await self._composite.close()
        if self._client is not None:
            await self._client.close()


class SyncTrainerReward(ForkSafeClient[TrainerReward]):
    """TrainerReward for code that is not async, also in processes that fork."""

    def __init__(
        self, settings: RewardSettings, trainer: str, *, sends: Collection[Sent] = ()
    ) -> None:
        super().__init__(
            f"reward of {trainer}",
            lambda: TrainerReward(settings, trainer, sends=sends),
            TrainerReward.close,
        )

    def score(
        self, rows: Sequence[TrainerRow], groups: Sequence[Hashable] | None = None
    ) -> list[RewardResult]:
        """See TrainerReward.score."""
        return self.run(lambda reward: reward.score(rows, groups))


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


class CompositeRewards:
    """Gets composite rewards from services, for code that is not async."""

    def __init__(self, settings: RewardSettings) -> None:
        self.samples = Samples(settings)
        self._reward = SyncCompositeReward(definition_of(settings))

    def score(
        self, samples: Sequence[Mapping[str, Any]], groups: Sequence[Hashable] | None = None
    ) -> list[RewardResult]:
        """Return the results of samples. See `CompositeReward.score`.

        Raises ServiceUnreachable if no sample has a reward, and each lacks a service's answer.
        """
        results = self._reward.score(samples, groups=groups)
        raise_for_outage(results)
        return results


def definition_of(settings: RewardSettings) -> RewardDefinition:
    """Return the settings' definition. Raises UserError if there is none."""
    if settings.definition is None:
        raise UserError("definition: not set. Give the path of a YAML file")
    return settings.definition


def definition_of_service(settings: RewardSettings, info: Info) -> RewardDefinition:
    """Return the definition that `url` stands for: one component, named as the service.

    Its reward is the score, or `offset` - score where a low score is good. info: what runs at the
    URLs. Raises UserError if that does not support the settings.
    """
    component: dict[str, Any] = {
        "service": settings.url,
        "task": settings.task,
        "options": _options_for(info, settings),
    }
    if settings.task is None:
        component["reference"] = settings.ref_key is not None
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
        return {"overlong": settings.overlong}
    if settings.task is None:
        raise UserError("the service is a judge: name a task that scores translations (task: mqm)")
    if info.tasks is not None and settings.task not in info.tasks:
        raise UserError(f"task {settings.task!r}: this judge has {', '.join(info.tasks)}")
    if settings.overlong == "windows":
        raise UserError("overlong: windows: a judge reads whole texts")
    for name in ("src_lang", "tgt_lang") if settings.task == "mqm" else ():
        if getattr(settings, name) is None and getattr(settings, f"{name}_key") is None:
            raise UserError(f"task 'mqm' wants languages: give {name} or {name}_key")
    return {}


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


def check_no_group_rules(definition: RewardDefinition, trainer: str) -> None:
    """Raise UserError if a rule needs the other completions of a prompt."""
    for name, config in definition.components.items():
        if config.is_group_rule:
            raise UserError(
                f"components.{name}: a rule of groups, but {trainer} sends one completion in a "
                "request. Remove it"
            )


def check_single_samples(definition: RewardDefinition, trainer: str) -> None:
    """Raise UserError if a rule needs more than a trainer's request of one completion has."""
    check_no_group_rules(definition, trainer)
    for name in truncation_rules(definition):
        raise UserError(
            f"components.{name}: reads finish_reason, which {trainer} does not send. Remove it"
        )


def truncation_rules(definition: RewardDefinition) -> list[str]:
    """Return the names of the components that read `finish_reason`."""
    return [name for name, config in definition.components.items() if config.rule == "truncated"]


def composite_rewards_for(settings: RewardSettings) -> CompositeRewards:
    """Return the client of these settings. It is reused within a process, as `rewards_for` is."""
    return _composite_rewards(settings.model_dump_json(), os.getpid())


@lru_cache(maxsize=8)
def _composite_rewards(settings_json: str, pid: int) -> CompositeRewards:
    """Return the client of these settings in this process. pid: see `rewards._rewards`."""
    return CompositeRewards(RewardSettings.model_validate_json(settings_json))


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
