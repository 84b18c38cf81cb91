"""Composite rewards of samples, async and not async.

with SyncCompositeReward("reward.yaml") as reward:
    results = reward.score([{"src": "Hello.", "mt": "안녕하세요.", "tgt_lang": "ko"}])
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from scorekit.client import Sample, ScoringClient
from scorekit.errors import TEXT_ERROR_TYPES
from scorekit.net.fork_safe import ForkSafeClient
from scorekit.net.retry import Deadline
from scorekit.net.tasks import gather_or_cancel, run_in_daemon_thread
from scorekit.rewards.batching import BatchedService
from scorekit.rewards.definition import ComponentConfig, RewardDefinition, load_definition
from scorekit.rewards.formula import compose, missing_component, refusing_gate
from scorekit.rewards.gates import load_gate, rule_result
from scorekit.rewards.local_rules import LocalRule
from scorekit.rewards.results import ComponentResult, GateResult, RewardResult
from scorekit.rewards.samples import Fields, fields_of, group_indices, seconds_of_call
from scorekit.rewards.services import SHORTEST, checks, request_body, request_key, service_component
from scorekit.schemas import Failed, Info, Result

Source = RewardDefinition | Mapping[str, Any] | str | Path


class CompositeReward:
    """Scores samples by a reward definition. Use it in one event loop.

    source: a definition, a mapping, or the path of a YAML file. api_key: of all services; default
    from SCOREKIT_API_KEY.

    Samples of all concurrent calls go to a service in common requests, and components with equal
    requests share one answer.

    Raises UserError if the definition is wrong, or if a rule or a model cannot be loaded.
    """

    def __init__(self, source: Source, *, api_key: str | None = None) -> None:
        self.definition = load_definition(source)
        self._is_closed = False
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
        self._names_by_request: dict[str, list[str]] = {}
        for name, config in components.items():
            if config.service is not None:
                self._names_by_request.setdefault(request_key(config.request), []).append(name)
        self._services = {
            key: self._open(names, api_key) for key, names in self._names_by_request.items()
        }

    def _open(self, names: list[str], api_key: str | None) -> BatchedService:
        definition, request = self.definition, self.definition.components[names[0]].request
        # It ends a little before the caller's own deadline, so that its error arrives.
        deadline_s = Deadline(definition.deadline_s).for_service(definition.deadline_s)
        client = ScoringClient(
            request.service or (),
            api_key=api_key,
            timeout_s=min(definition.timeout_s, deadline_s),
            deadline_s=deadline_s,
            max_in_flight=definition.max_in_flight,
            batch_size=definition.batch_size,
        )
        return BatchedService(
            client,
            request.options,
            partial(checks, definition, names),
            batch_size=definition.batch_size,
            max_in_flight=definition.max_in_flight,
            shared_s=definition.timeout_s,
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

    async def check(self, *, wait_s: float | None = None) -> dict[str, Info]:
        """Ask every service what it is, before a run starts; return the answers by component.

        wait_s: seconds to wait first until all services are ready; None: nothing waits for that.

        Raises UserError if a service does not fit the definition, ServiceUnreachable if it does not
        answer within the deadline, RequestError if it refuses the key.
        """
        waiting = None if wait_s is None else Deadline(wait_s)
        infos: dict[str, Info] = {}
        for key, service in self._services.items():
            info = await service.check(None if waiting is None else waiting.remaining_s())
            infos |= dict.fromkeys(self._names_by_request[key], info)
        return infos

    async def score_group(
        self, samples: Sequence[Sample], *, deadline_s: float | None = None
    ) -> list[RewardResult]:
        """Score the completions of one prompt. See `score`."""
        return await self.score(samples, groups=[0] * len(samples), deadline_s=deadline_s)

    async def score(
        self,
        samples: Sequence[Sample],
        *,
        groups: Sequence[Hashable] | None = None,
        deadline_s: float | None = None,
    ) -> list[RewardResult]:
        """Return the reward of each sample, or none, with its components; in order.

        samples: mappings with `src`, `mt`, and the fields that the definition uses (`ref`,
        `src_lang`, `tgt_lang`, `finish_reason`, a rubric's variables), or SampleForScoring.
        groups: the group of each sample, for rules of groups; the samples of a group must be in one
        call. deadline_s: seconds, instead of the definition's; then what is missing has failed
        with `timeout`.

        Failed samples and failed services are results, never exceptions. Raises UserError if
        samples or services do not fit the definition, RequestError if a service refuses the key,
        ServiceUnreachable if another program answers, or another model than before (ModelChanged).
        """
        if self._is_closed:
            raise RuntimeError("the composite reward is closed")
        fields = fields_of(samples)
        indices = group_indices(groups, len(fields), self.definition.has_group_rules)
        seconds = seconds_of_call(deadline_s, self.definition.deadline_s)
        return await _Call(self, fields, Deadline(seconds)).results(indices)


class SyncCompositeReward(ForkSafeClient[CompositeReward]):
    """CompositeReward for code that is not async. The arguments are the same.

    Threads may share it, and their samples go out in common requests. A forked child creates its
    own connections.
    """

    def __init__(self, source: Source, *, api_key: str | None = None) -> None:
        self.definition = load_definition(source)
        super().__init__(
            "composite reward",
            lambda: CompositeReward(self.definition, api_key=api_key),
            CompositeReward.close,
        )

    def check(self, *, wait_s: float | None = None) -> dict[str, Info]:
        """See CompositeReward.check."""
        return self.run(lambda reward: reward.check(wait_s=wait_s))

    def score(self, samples: Sequence[Sample], **kwargs: Any) -> list[RewardResult]:
        """See CompositeReward.score."""
        return self.run(lambda reward: reward.score(samples, **kwargs))

    def score_group(self, samples: Sequence[Sample], **kwargs: Any) -> list[RewardResult]:
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
        rules = asyncio.ensure_future(self._rule_components(groups))
        services = asyncio.ensure_future(self._service_components(refused))
        try:
            components = [await services, await rules]
        finally:
            for task in (rules, services):
                task.cancel()
        by_name = components[0] | components[1]
        missing = "no result before the deadline"
        return [
            compose(
                self._definition,
                {
                    name: by_name[name][index]
                    if name in by_name
                    else missing_component(config, "timeout", missing, is_transient=True)
                    for name, config in self._definition.components.items()
                },
                gates[index],
            )
            for index in range(len(self._samples))
        ]

    async def _gate_results(self) -> list[dict[str, GateResult]]:
        rules = self._reward._gates

        def evaluate() -> list[dict[str, GateResult]]:
            return [
                {name: rule_result(rule, sample) for name, rule in rules.items()}
                for sample in self._samples
            ]

        if not rules:
            return [{} for _ in self._samples]
        results = await self._in_thread(evaluate)
        if results is None:
            unknown = GateResult("unknown", message="no result before the deadline")
            return [dict.fromkeys(rules, unknown) for _ in self._samples]
        return results

    async def _in_thread(self, function: Any, *args: Any, is_foreign: bool = False) -> Any:
        """Return the function's result, computed in a thread; None if the deadline passes first.

        is_foreign: whether it may hang, so that it must take no thread of other calls."""
        run = run_in_daemon_thread if is_foreign else asyncio.to_thread
        try:
            async with asyncio.timeout(self._deadline.remaining_s()):
                return await run(function, *args)
        except TimeoutError:
            return None

    async def _rule_components(self, groups: list[list[int]]) -> dict[str, list[ComponentResult]]:
        """Return the components of all local rules by name; those without a result are left out."""
        by_kind: dict[bool, dict[str, LocalRule]] = {False: {}, True: {}}
        for name, rule in self._reward._rules.items():
            by_kind[rule.is_foreign][name] = rule

        def evaluate(rules: dict[str, LocalRule]) -> dict[str, list[ComponentResult]]:
            return {name: rule.evaluate(self._samples, groups) for name, rule in rules.items()}

        parts = [
            self._in_thread(evaluate, rules, is_foreign=is_foreign)
            for is_foreign, rules in by_kind.items()
            if rules
        ]
        merged: dict[str, list[ComponentResult]] = {}
        for components in await gather_or_cancel(parts):
            merged |= components or {}
        return merged

    async def _service_components(self, refused: set[int]) -> dict[str, list[ComponentResult]]:
        """Return the components of all services by name. Samples in `refused` are not sent."""
        parts = [
            self._components_of(key, names, refused)
            for key, names in self._reward._names_by_request.items()
        ]
        merged: dict[str, list[ComponentResult]] = {}
        for components in await gather_or_cancel(parts):
            merged |= components
        return merged

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
        limit_s = self._deadline.remaining_s()
        if not any(config.weight for config in configs):  # nobody waits long for a mere report
            limit_s = min(limit_s, self._definition.timeout_s)
        answers = await self._answers(key, list(bodies.values()), limit_s)
        outcomes_by_index = dict(zip(bodies, answers, strict=True))
        bad = await self._bad_source_indices(key, configs, outcomes_by_index)
        outcomes = [outcomes_by_index.get(index, outcome) for index, outcome in enumerate(outcomes)]
        return {
            name: [
                _component(config, outcome, bad.get(index))
                for index, outcome in enumerate(outcomes)
            ]
            for name, config in zip(names, configs, strict=True)
        }

    async def _answers(self, key: str, bodies: list[Fields], limit_s: float) -> list[Result | str]:
        """Return the results of one service in order; "timeout" after `limit_s`."""
        service = self._reward._services[key]
        futures = [service.submit(body) for body in bodies]
        try:
            if futures:
                await asyncio.wait(futures, timeout=limit_s, return_when=asyncio.FIRST_EXCEPTION)
            for future in futures:
                if future.done() and not future.cancelled() and future.exception() is not None:
                    raise future.exception()  # type: ignore[misc]
            return ["timeout" if not future.done() else _result(future) for future in futures]
        finally:
            for future in futures:
                future.cancel()

    async def _bad_source_indices(
        self, key: str, configs: list[ComponentConfig], outcomes: dict[int, Result | str]
    ) -> dict[int, Result | str]:
        """Return, for refused texts, the result of their source with the shortest translation.

        Only asked if a refused text has a reward: the policy is not charged for its source."""
        if not self._definition.refused_text_reward or not any(c.weight for c in configs):
            return {}
        request, sources = configs[0].request, {}
        for index, outcome in outcomes.items():
            if isinstance(outcome, Failed) and outcome.error.type in TEXT_ERROR_TYPES:
                sample = self._samples[index] | {"mt": SHORTEST}
                sources[index], _ = request_body("", request, sample)
        bodies = [body for body in sources.values() if body is not None]
        answers = await self._answers(key, bodies, self._deadline.remaining_s())
        return {
            index: answer
            for index, answer in zip(sources, answers, strict=True)
            if isinstance(answer, Failed | str)
        }


def _result(future: asyncio.Future[Result]) -> Result | str:
    return "cancelled" if future.cancelled() else future.result()


def _component(
    config: ComponentConfig, outcome: Result | str, source_outcome: Result | str | None
) -> ComponentResult:
    """Return a component. source_outcome: why its source cannot be scored either, or None."""
    if isinstance(source_outcome, Failed) and source_outcome.error.type in TEXT_ERROR_TYPES:
        return missing_component(config, "bad_source", source_outcome.error.message)
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
