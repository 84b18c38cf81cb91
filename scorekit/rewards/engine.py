"""The engine of composite rewards: samples in, rewards out, async and not async.

with SyncCompositeReward("reward.yaml") as reward:
    results = reward.score([{"src": "Hello.", "mt": "안녕하세요.", "tgt_lang": "ko"}])

A trainer goes on where a sample has no reward. If none can ever have one, it would train on nothing
to its end: that is a mistake of the definition or of the data, and it ends the first call.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Coroutine, Hashable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

from scorekit.client import Sample, ScoringClient
from scorekit.errors import TEXT_ERROR_TYPES, UserError
from scorekit.net.loops import ForkSafeClient, gather_or_cancel
from scorekit.net.retry import Deadline
from scorekit.rewards.definition import (
    ComponentConfig,
    LanguageGate,
    RewardDefinition,
    load_definition,
)
from scorekit.rewards.results import (
    ComponentResult,
    GateResult,
    RewardResult,
    compose,
    missing_component,
    refusing_gate,
)
from scorekit.rewards.rules import GateRule, LanguageRule, LocalRule, load_gate, rule_result
from scorekit.rewards.services import (
    SHORTEST,
    AnsweringService,
    BatchedService,
    InProcessService,
    check_answer,
    check_direction,
    check_model,
    checks,
    failed_request,
    fields_of_request,
    probe_body,
    request_body,
    request_key,
    service_component,
)
from scorekit.schemas import Failed, Info, Result
from scorekit.scorers import SampleForScoring, check_is_list

Source = RewardDefinition | Mapping[str, Any] | str | Path
Components = dict[str, list[ComponentResult]]
#: Sources of which it is kept whether they are refused.
_MAX_SOURCES = 16_384
#: Seconds for a rule that is only reported, while an earlier call of it still hangs.
_HUNG_REPORT_S = 1.0


class CompositeReward:
    """Scores samples by a reward definition. Use it in one event loop.

    source: a definition, a mapping, or the path of a YAML file.
    api_key: of all services; default from SCOREKIT_API_KEY.

    Samples of all concurrent calls go to a service in common requests, and components with equal
    requests share one answer.

    shares_requests: False: the samples of a call go in requests of their own, all of which fail
    together. For a caller that sends whole groups, asks again after an outage, and is to repeat
    itself: a common request holds what arrived at the same moment.

    Raises UserError if the definition is wrong, or if a rule or a model cannot be loaded.
    """

    def __init__(
        self, source: Source, *, api_key: str | None = None, shares_requests: bool = True
    ) -> None:
        self.definition = load_definition(source)
        self._is_closed = False
        self._shares_requests = shares_requests
        self._sources: dict[tuple[str, str], Result] = {}  # answers by request key and source
        components = self.definition.components
        self._rules = {
            name: LocalRule(f"components.{name}", config)
            for name, config in components.items()
            if config.rule is not None
        }
        self._gates = {
            name: load_gate(f"gates.{name}", config)
            for name, config in self.definition.gates.items()
        }
        self._first = FirstSamples(self.definition, self._gates)
        self._names_by_request: dict[str, list[str]] = {}
        for name, config in components.items():
            if config.rule is None:
                self._names_by_request.setdefault(request_key(config.request), []).append(name)
        self._services = {
            key: self._open(names, api_key) for key, names in self._names_by_request.items()
        }

    def _open(self, names: list[str], api_key: str | None) -> AnsweringService:
        definition, request = self.definition, self.definition.components[names[0]].request
        if request.scorer is not None:
            check = partial(_check_scorer, definition, names)
            key = f"components.{names[0]}"
            return InProcessService(key, request, check, batch_size=definition.batch_size)
        deadline_s = definition.deadline_s
        if self._shares_requests:
            # It ends a little before the caller's own deadline, so that its error arrives.
            deadline_s = Deadline(deadline_s).for_service(deadline_s)
        try:
            client = ScoringClient(
                request.service or (),
                api_key=api_key,
                timeout_s=min(definition.timeout_s, deadline_s),
                deadline_s=deadline_s,
                max_in_flight=definition.max_in_flight,
                batch_size=definition.batch_size,
                first_answer_s=deadline_s,  # a trainer may be started before its services
            )
        except UserError as error:  # a wrong URL
            raise UserError(f"components.{names[0]}.service: {error}") from None
        return BatchedService(
            client,
            request.options,
            partial(checks, definition, names),
            batch_size=definition.batch_size,
            max_in_flight=definition.max_in_flight,
            shared_s=definition.timeout_s if self._shares_requests else None,
        )

    async def __aenter__(self) -> CompositeReward:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancel what is in flight, and close the connections."""
        self._is_closed = True
        for service in self._services.values():
            await service.close()

    async def check(
        self, *, wait_s: float | None = None, probe: bool = False, languages: Iterable[str] = ()
    ) -> dict[str, Info]:
        """Ask every service what it is, before a run starts; return the answers by component.

        wait_s: seconds to wait first until all services are ready; None: nothing waits for that.
        probe: also send one sample to each service with a weight: only an answer shows that a judge
        has the task, and that a model marks errors.
        languages: target languages of the samples. Which fields a sample needs says
        `scorekit.rewards.engine.required_fields`.

        Raises UserError if a service does not fit the definition or a gate does not know a
        language, ServiceUnreachable if a service does not answer within the deadline, RequestError
        if it refuses the key. A scorer of this process is in the answer if it describes itself.
        """
        check_languages(self.definition, self._gates, languages)
        waiting = None if wait_s is None else Deadline(wait_s)
        infos: dict[str, Info] = {}
        for key, service in self._services.items():
            info = await service.check(None if waiting is None else waiting.remaining_s())
            if info is not None:
                infos |= dict.fromkeys(self._names_by_request[key], info)
            if probe:
                await self._probe(key)
        return infos

    async def _probe(self, key: str) -> None:
        components, tokens = self.definition.components, self.definition.token_rewards
        names = [name for name in self._names_by_request[key] if name in self.definition.required]
        body = probe_body(f"components.{names[0]}", components[names[0]].request) if names else None
        if body is None:
            return
        call = _Call(self, [], Deadline(self.definition.deadline_s))
        (answer,) = await call.answers(key, [body], self.definition.deadline_s)
        for name in names:
            marks = [
                field
                for field, weights in (
                    ("error_spans", tokens.spans if tokens else {}),
                    ("omissions", tokens.omissions if tokens else {}),
                )
                if weights.get(name)
            ]
            if not isinstance(answer, str):
                check_answer(f"components.{name}", components[name], answer, marks)

    async def refused_sources(self, samples: Iterable[Sample]) -> list[str | None]:
        """Return why a service with a weight refuses a sample's source with any translation.

        None: none does, or it is not known, since a service does not answer now. Each source is
        asked for once. Raises as `score`.
        """
        fields = fields_of(samples)
        reasons: list[str | None] = [None] * len(fields)
        call = _Call(self, fields, Deadline(math.inf))
        for key, names in self._names_by_request.items():
            if self.definition.required.isdisjoint(names):
                continue
            answers = await call.source_answers(key, names, range(len(fields)))
            for index, answer in answers.items():
                if is_refusal(answer) and reasons[index] is None:
                    reasons[index] = f"{names[0]}: {refusal_of(answer)}"
        return reasons

    async def score_group(
        self, samples: Iterable[Sample], *, deadline_s: float | None = None
    ) -> list[RewardResult]:
        """Score the completions of one prompt. See `score`."""
        check_is_list("samples", samples)
        samples = list(samples)
        return await self.score(samples, groups=[0] * len(samples), deadline_s=deadline_s)

    async def score(
        self,
        samples: Iterable[Sample],
        *,
        groups: Iterable[Hashable] | None = None,
        deadline_s: float | None = None,
    ) -> list[RewardResult]:
        """Return the reward of each sample, or none, with its components; in order.

        samples: mappings with `src`, `mt`, and the fields that the definition uses (`ref`,
        `src_lang`, `tgt_lang`, `finish_reason`, a rubric's variables), or SampleForScoring.
        groups: the group of each sample, for rules of groups; the samples of a group must be in one
        call.
        deadline_s: seconds, instead of the definition's; then what is missing has failed with
        `timeout`. Infinite: each request has the definition's.

        Failed samples and failed services are results, never exceptions. Raises UserError if
        samples or services do not fit the definition, or if the first samples show that none can
        have a reward (see `FirstSamples`); RequestError if a service refuses the key;
        ServiceUnreachable if another program answers, or another model than before (ModelChanged).
        """
        if self._is_closed:
            raise RuntimeError("the composite reward is closed")
        fields = fields_of(samples)
        indices = group_indices(groups, len(fields), self.definition.has_group_rules)
        seconds = seconds_of_call(deadline_s, self.definition.deadline_s)
        self._first.check_fields(fields)
        results = await _Call(self, fields, Deadline(seconds)).results(indices)
        self._first.check_results(fields, results)
        return results


class SyncCompositeReward(ForkSafeClient[CompositeReward]):
    """CompositeReward for code that is not async. The arguments are the same.

    Threads may share it, and their samples go out in common requests. A forked child creates its
    own connections.
    """

    def __init__(self, source: Source, **kwargs: Any) -> None:
        self.definition = load_definition(source)
        super().__init__(
            "composite reward",
            lambda: CompositeReward(self.definition, **kwargs),
            CompositeReward.close,
        )

    def check(self, **kwargs: Any) -> dict[str, Info]:
        """See CompositeReward.check."""
        return self.run(lambda reward: reward.check(**kwargs))

    def refused_sources(self, samples: Iterable[Sample]) -> list[str | None]:
        """See CompositeReward.refused_sources."""
        return self.run(lambda reward: reward.refused_sources(samples))

    def score(self, samples: Iterable[Sample], **kwargs: Any) -> list[RewardResult]:
        """See CompositeReward.score."""
        return self.run(lambda reward: reward.score(samples, **kwargs))

    def score_group(self, samples: Iterable[Sample], **kwargs: Any) -> list[RewardResult]:
        """See CompositeReward.score_group."""
        return self.run(lambda reward: reward.score_group(samples, **kwargs))


class _Call:
    """One call of `CompositeReward.score`."""

    def __init__(self, reward: CompositeReward, samples: list[Fields], deadline: Deadline) -> None:
        self._reward, self._samples, self._deadline = reward, samples, deadline
        self._definition = reward.definition

    async def results(self, groups: list[list[int]]) -> list[RewardResult]:
        """Return the results of all samples."""
        gates = await self._gate_results()
        refused = {
            index
            for index, sample_gates in enumerate(gates)
            if refusing_gate(self._definition, sample_gates)
        }
        by_name: Components = {}
        for components in await gather_or_cancel(self._parts(groups, refused)):
            by_name |= components
        names = self._definition.components
        return [
            compose(self._definition, {name: by_name[name][index] for name in names}, gates[index])
            for index in range(len(self._samples))
        ]

    def _parts(
        self, groups: list[list[int]], refused: set[int]
    ) -> list[Coroutine[Any, Any, Components]]:
        """Return the coroutines of all rules and services. None waits for another."""
        rules = [self._rule(name, rule, groups) for name, rule in self._reward._rules.items()]
        services = [
            self._components_of(key, names, refused)
            for key, names in self._reward._names_by_request.items()
        ]
        return [*rules, *services]

    def _limit_s(self, names: Iterable[str]) -> float:
        """Return the seconds for components; fewer for those that are only reported."""
        limit_s = self._deadline.remaining_s()
        if self._definition.required.isdisjoint(names):
            limit_s = min(limit_s, self._definition.timeout_s)
        return limit_s

    async def _rule(self, name: str, rule: LocalRule, groups: list[list[int]]) -> Components:
        limit_s = self._limit_s([name])
        if not rule.config.weight and rule.num_hung:  # or it would delay every call
            limit_s = min(limit_s, _HUNG_REPORT_S)
        return {name: await rule.evaluate_within(self._samples, groups, limit_s)}

    async def _gate_results(self) -> list[dict[str, GateResult]]:
        rules = self._reward._gates

        def evaluate() -> list[dict[str, GateResult]]:
            return [
                {name: rule_result(rule, sample) for name, rule in rules.items()}
                for sample in self._samples
            ]

        if not rules:
            return [{} for _ in self._samples]
        try:
            async with asyncio.timeout(self._deadline.remaining_s()):
                return await asyncio.to_thread(evaluate)
        except TimeoutError:
            unknown = GateResult("unknown", message="no result before the deadline")
            return [dict.fromkeys(rules, unknown) for _ in self._samples]

    async def _components_of(
        self, key: str, names: list[str], refused: set[int]
    ) -> dict[str, list[ComponentResult]]:
        configs = [self._definition.components[name] for name in names]
        outcomes: list[Result | str] = ["skipped" for _ in self._samples]
        bodies: dict[int, Fields] = {}
        for index, sample in enumerate(self._samples):
            if index in refused:
                continue
            body, field = request_body(f"components.{names[0]}", configs[0].request, sample)
            if body is None:
                outcomes[index] = f"the sample has no {field}"
            else:
                bodies[index] = body
        try:
            answers = await self.answers(key, list(bodies.values()), self._limit_s(names))
        except UserError:
            raise
        except Exception as error:
            if not self._definition.required.isdisjoint(names):
                raise
            answers = [failed_request(error)] * len(bodies)  # what is only reported may fail
        outcomes_by_index = dict(zip(bodies, answers, strict=True))
        bad = await self._bad_source_indices(key, names, outcomes_by_index)
        outcomes = [outcomes_by_index.get(index, outcome) for index, outcome in enumerate(outcomes)]
        return {
            name: [
                _component(config, outcome, bad.get(index))
                for index, outcome in enumerate(outcomes)
            ]
            for name, config in zip(names, configs, strict=True)
        }

    async def answers(self, key: str, bodies: list[Fields], limit_s: float) -> list[Result | str]:
        """Return the results of one service in order; "timeout" after `limit_s`."""
        service = self._reward._services[key]
        futures = service.submit(bodies)
        try:
            if futures:
                await asyncio.wait(futures, timeout=limit_s, return_when=asyncio.FIRST_EXCEPTION)
            done = [future for future in futures if future.done() and not future.cancelled()]
            errors = [error for future in done if (error := future.exception()) is not None]
            if errors:
                raise errors[0]
            return ["timeout" if not future.done() else _result(future) for future in futures]
        finally:
            for future in futures:
                future.cancel()

    async def _bad_source_indices(
        self, key: str, names: list[str], outcomes: dict[int, Result | str]
    ) -> dict[int, Result | str]:
        """Return, for refused texts, the result of their source with the shortest translation.

        Only asked if a refused text has a reward: the policy is not charged for its source."""
        definition = self._definition
        if not definition.refused_text_reward or definition.required.isdisjoint(names):
            return {}
        refused = [index for index, outcome in outcomes.items() if is_refusal(outcome)]
        answers = await self.source_answers(key, names, refused)
        return {
            index: answer for index, answer in answers.items() if isinstance(answer, Failed | str)
        }

    async def source_answers(
        self, key: str, names: list[str], indices: Iterable[int]
    ) -> dict[int, Result | str]:
        """Return what a service answers for sources with the shortest translation, by sample.

        An answer that stays the same is asked for once in the life of the reward."""
        request, answered = self._definition.components[names[0]].request, self._reward._sources
        bodies: dict[int, Fields] = {}
        for index in indices:
            body, _ = request_body("", request, self._samples[index] | {"mt": SHORTEST})
            if body is not None:
                bodies[index] = body
        names_of = {index: (key, repr(sorted(body.items()))) for index, body in bodies.items()}
        missing = {n: bodies[index] for index, n in names_of.items() if n not in answered}
        limit_s = self._deadline.remaining_s()
        answers = await self.answers(key, list(missing.values()), limit_s)
        new: dict[tuple[str, str], Result | str] = dict(zip(missing, answers, strict=True))
        if len(answered) + len(new) > _MAX_SOURCES:
            answered.clear()
        for name, answer in new.items():
            if not isinstance(answer, str) and (answer.ok or is_refusal(answer)):
                answered[name] = answer
        return {index: (answered | new)[name] for index, name in names_of.items()}


def _result(future: asyncio.Future[Result]) -> Result | str:
    return "cancelled" if future.cancelled() else future.result()


def is_refusal(outcome: object) -> TypeGuard[Failed]:
    """Return whether a service has refused the text: another request gets the same answer."""
    return isinstance(outcome, Failed) and outcome.error.type in TEXT_ERROR_TYPES


def refusal_of(outcome: Failed) -> str:
    """Return why a service has refused a text."""
    return f"{outcome.error.type}: {outcome.error.message}"


def _check_scorer(definition: RewardDefinition, names: list[str], described: Any) -> None:
    """Raise UserError if a scorer of this process does not fit one of these components."""
    for name in names:
        config = definition.components[name]
        check_model(f"components.{name}", config, described)
        check_direction(f"components.{name}", config, described)


def _component(
    config: ComponentConfig, outcome: Result | str, source_outcome: Result | str | None
) -> ComponentResult:
    """Return a component.

    source_outcome: why its source cannot be scored either, or None.
    """
    if is_refusal(source_outcome):
        return missing_component(config, "bad_source", refusal_of(source_outcome))
    if source_outcome is not None:  # it is not known whether text or source is the cause
        outcome = source_outcome
    if isinstance(outcome, str):
        return _without_answer(config, outcome)
    return service_component(config, outcome)


def _without_answer(config: ComponentConfig, reason: str) -> ComponentResult:
    if reason == "skipped":
        return missing_component(config, "skipped", "a gate refused the sample")
    if reason in ("timeout", "cancelled"):
        message = "no answer before the deadline" if reason == "timeout" else "closed meanwhile"
        status = "timeout" if reason == "timeout" else "cancelled"
        return missing_component(config, status, message, is_transient=True)  # type: ignore[arg-type]
    return missing_component(config, "no_value", reason)


Fields = dict[str, Any]
#: Fields that every sample has, and those that may be missing; all are texts.
_TEXTS, _LANGUAGES = ("src", "mt"), ("src_lang", "tgt_lang")


def fields_of(samples: Iterable[Sample]) -> list[Fields]:
    """Return the fields of each sample. Raises UserError if one is no sample or lacks a text."""
    check_is_list("samples", samples)
    return [_fields(index, sample) for index, sample in enumerate(samples)]


def _fields(index: int, sample: Sample) -> Fields:
    if isinstance(sample, SampleForScoring):
        return sample.wire()
    if not isinstance(sample, Mapping):
        raise UserError(f"samples.{index}: a {type(sample).__name__}. Give a mapping with src, mt")
    fields = dict(sample)
    for name in _TEXTS:
        if not isinstance(fields.get(name), str):
            raise UserError(f"samples.{index}.{name}: expected text. Give each sample src and mt")
    for name in _LANGUAGES:
        if not isinstance(fields.get(name), str | None):
            kind = type(fields[name]).__name__
            raise UserError(f"samples.{index}.{name}: expected the text of a language, not {kind}")
    return fields


def group_indices(
    groups: Iterable[Hashable] | None, count: int, is_required: bool
) -> list[list[int]]:
    """Return the indices of the samples of each group; [] without groups.

    Raises UserError if groups are missing, or do not fit the samples.
    """
    if groups is None:
        if is_required:
            raise UserError("groups: required. The definition has a rule of groups")
        return []
    # The elements of a tensor equal none: each would be a group of its own.
    groups = groups.tolist() if hasattr(groups, "tolist") else groups
    names = [group.tolist() if hasattr(group, "tolist") else group for group in groups]
    if len(names) != count:
        raise UserError(f"groups: {len(names)} groups for {count} samples. Give one for each")
    indices: dict[Hashable, list[int]] = {}
    for index, group in enumerate(names):
        if group != group:
            raise UserError(f"groups.{index}: {group!r}. Give a number or a text")
        try:
            indices.setdefault(group, []).append(index)
        except TypeError:
            kind = type(group).__name__
            raise UserError(f"groups.{index}: a {kind}. Give a number or a text") from None
    return list(indices.values())


def seconds_of_call(deadline_s: float | None, default_s: float) -> float:
    """Return the seconds of a call. Raises UserError unless they are above 0."""
    if deadline_s is None:
        return default_s
    is_number = isinstance(deadline_s, int | float) and not isinstance(deadline_s, bool)
    if not (is_number and deadline_s > 0):  # NaN is not
        raise UserError(f"deadline_s: {deadline_s} s. Give a number above 0")
    return deadline_s


#: Samples for which a component must fail by its own error before that is a mistake.
MIN_FAILED = 8
#: The field that a local rule reads beside the texts.
_FIELD_OF_RULE = {
    "language": "tgt_lang",
    "script": "tgt_lang",
    "chrf": "ref",
    "truncated": "finish_reason",
}


def required_fields(definition: RewardDefinition) -> dict[str, str]:
    """Return the fields that a sample needs for a reward, each with the key that reads it.

    Without `src` and `mt`, which every sample has, and without those that your functions read.
    """
    keys: dict[str, str] = {}
    for name, gate in definition.gates.items():
        if isinstance(gate, LanguageGate) and gate.unknown == "no_reward":
            keys.setdefault("tgt_lang", f"gates.{name}")
    for name, config in definition.components.items():
        if name not in definition.required:
            continue
        for field in _fields_of(config):
            keys.setdefault(field, f"components.{name}")
    return {field: key for field, key in keys.items() if field not in ("src", "mt")}


def _fields_of(config: ComponentConfig) -> Iterable[str]:
    if config.rule is None:
        return fields_of_request(config.request).values()
    field = _FIELD_OF_RULE.get(config.rule or "")
    return () if field is None else (field,)


def check_languages(
    definition: RewardDefinition, rules: Mapping[str, GateRule], languages: Iterable[str]
) -> None:
    """Raise UserError if a gate without `unknown: pass` does not know a target language.

    rules: the gates' by name.
    """
    if isinstance(languages, str):
        raise UserError("languages: a text. Give a list of languages")
    for language in dict.fromkeys(languages):
        if not isinstance(language, str) or not language:
            raise UserError(f"languages: {language!r} is no language. Give codes or English names")
        for name, rule in rules.items():
            if _is_unknown(definition, name, rule, language):
                raise _unknown_language(definition, name, language)


def _is_unknown(definition: RewardDefinition, name: str, rule: GateRule, language: str) -> bool:
    config = definition.gates[name]
    is_strict = isinstance(config, LanguageGate) and config.unknown == "no_reward"
    return is_strict and isinstance(rule, LanguageRule) and not rule.knows(language)


def _unknown_language(definition: RewardDefinition, name: str, language: str) -> UserError:
    config = definition.gates[name]
    model = config.model if isinstance(config, LanguageGate) else ""
    return UserError(
        f"gates.{name}: {model} does not know the language {language!r}, so no translation into it "
        "has a reward. Correct tgt_lang, or set `unknown: pass`"
    )


class FirstSamples:
    """Looks at samples and their results until every required part has worked once.

    definition: of the reward.
    rules: the gates' by name.
    """

    def __init__(self, definition: RewardDefinition, rules: Mapping[str, GateRule]) -> None:
        self._definition, self._rules = definition, rules
        self._unseen = required_fields(definition)
        self._unproven = set(definition.required)
        self._undecided = set(rules)
        self._failed: Counter[str] = Counter()

    def check_fields(self, samples: Sequence[Mapping[str, Any]]) -> None:
        """Raise UserError if a required field is in none of the samples so far.

        A field that is None is there: its sample alone has no reward.
        """
        for field, key in list(self._unseen.items()):
            if any(field in sample for sample in samples):
                del self._unseen[field]
            elif samples:
                raise UserError(
                    f"{key}: reads the field {field!r}, and no sample has it. Give every sample "
                    f"{field!r}, null where there is none; or take the part out of the definition"
                )

    def check_results(
        self, samples: Sequence[Mapping[str, Any]], results: Sequence[RewardResult]
    ) -> None:
        """Raise UserError if a gate or a component cannot work, for a reason that stays the same.

        That is a language that no gate's model knows, for all samples of a call; and a function
        that raises, or an answer without the value, for the first `MIN_FAILED` samples at least.
        """
        for name in list(self._undecided):
            statuses = [result.gates[name].status for result in results]
            if any(status != "unknown" for status in statuses):
                self._undecided.discard(name)
            else:
                self._check_gate(name, samples)
        for name in list(self._unproven):
            parts = [result.components[name] for result in results]
            if any(part.status == "ok" for part in parts):
                self._unproven.discard(name)
            else:
                self._check_component(name, parts)

    def _check_gate(self, name: str, samples: Sequence[Mapping[str, Any]]) -> None:
        languages = [sample.get("tgt_lang") for sample in samples]
        named = [language for language in languages if language]
        rule = self._rules[name]
        if named and all(_is_unknown(self._definition, name, rule, text) for text in set(named)):
            raise _unknown_language(self._definition, name, named[0])

    def _check_component(self, name: str, parts: Sequence[ComponentResult]) -> None:
        failed = [part for part in parts if _is_own_failure(part)]
        self._failed[name] += len(failed)
        if failed and self._failed[name] >= MIN_FAILED:
            raise UserError(
                f"components.{name}: none of the first {self._failed[name]} samples has a value: "
                f"{failed[0].message}. Correct the definition, the function or the data"
            )


def _is_own_failure(part: ComponentResult) -> bool:
    """Return whether the function raised or gave NaN, or the service's answer lacks the value."""
    has_answer = part.answer is not None
    is_of_function = part.status == "rule_error" or (part.status == "non_finite" and not has_answer)
    return is_of_function or (part.status == "no_value" and has_answer)
