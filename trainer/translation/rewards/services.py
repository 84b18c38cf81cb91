"""The reward services of a run: opened and checked once, then used a group at a time.

Each is a composite reward of one component, by the engine of scorekit.rewards; `reward.definition`
is another one. The formula over their answers is in sample_reward.py.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from scorekit.client import SyncScoringClient
from scorekit.client.replicas import check_agreement, check_service
from scorekit.errors import (
    TEXT_ERROR_TYPES,
    RequestError,
    ScorekitError,
    ServiceUnreachable,
    UserError,
)
from scorekit.net.addresses import address_of
from scorekit.rewards import (
    CompositeReward,
    RewardDefinition,
    RewardResult,
    SyncCompositeReward,
    load_definition,
)
from scorekit.rewards.results import compose, log_words
from scorekit.schemas import Failed, Info, Result, Scored, Truncated
from scorekit.scorers import ScoringConfig
from trainer.runs.config import MachineConfig
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.reward_batch import (
    BAD_SOURCE,
    CLOSED_GATE,
    COMPOSITE,
    MQM,
    SAMPLE_ERROR_TYPES,
    Composed,
    Fields,
    RewardBatch,
    RewardFailure,
    Scores,
    ServiceName,
    Text,
    failure,
    host,
    is_truncated,
)
from trainer.translation.rewards.short_form import (
    NAMES,
    SERVICES,
    configured_urls,
    expected_name,
    needed_services,
    nested_definition,
    request_of,
    scorer_of,
)

if TYPE_CHECKING:
    from trainer.translation.rollouts import TranslationRollout

log = logging.getLogger(__name__)
#: Timeout in seconds of the /v1/info of a service without a weight, before an evaluation.
_PROBE_S = 10.0
#: Samples of an evaluation in one request, all of which are lost if it fails.
_BATCH = 16
#: Share of samples that a model may read in part before a warning is logged.
_MAX_TRUNCATED = 0.1


class RewardClient:
    """The reward services of a run.

    Opening it checks that each service with a weight answers, runs the model that the config
    requires, and scores in the expected direction. A service that has a URL but no weight is used
    only in evaluations, and may fail: each evaluation tries it again.
    """

    def __init__(
        self,
        cfg: RewardConfig,
        *,
        caching: bool = True,
        offer_unneeded: bool = True,
        only: ServiceName | None = None,
        misc: MachineConfig | None = None,
    ) -> None:
        """Collect the services that the config needs, and those that it offers.

        caching: whether services use their score cache.
        only: open no other service.
        misc: device and threads of scorers in this process, unless their arguments set them.
        """
        self.cfg = cfg
        self._device_args = (
            {} if misc is None else {"device": misc.device, "threads": _threads(misc)}
        )
        self.scoring = ScoringConfig(
            batch_size=cfg.batch_size,
            overlong="error" if cfg.overlong in ("skip", "penalty") else cfg.overlong,
            max_input_length=cfg.max_input_length,
            cache=caching,
        )
        self.needed = tuple(name for name in needed_services(cfg) if only in (None, name))
        self._urls = {name: urls for name in SERVICES if (urls := configured_urls(cfg, name))}
        if COMPOSITE in self.needed:
            self._urls.setdefault(COMPOSITE, [])
        unpaid = {name for name in self._urls if not SERVICES[name].optional}
        offered = {*self.needed, *(unpaid if offer_unneeded else ())}
        #: Services of an evaluation: the needed ones, and those that have a URL.
        self.available = tuple(name for name in SERVICES if name in offered)
        self.infos: dict[str, Info] = {}
        #: What each component's service of the composite reward is.
        self.component_infos: dict[str, Info] = {}
        self._rewards: dict[ServiceName, SyncCompositeReward] = {}
        #: Scorers of this process, as they describe themselves; and the names that they do not get.
        self._described: dict[ServiceName, Any] = {}
        self._unaccepted: dict[ServiceName, set[str]] = {}
        self._warned_truncated: set[ServiceName] = set()
        self._warned_sources: set[tuple[ServiceName, str]] = set()
        try:
            for name in self.available:
                self._open(name)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connections and cancel open requests."""
        while self._rewards:
            self._rewards.popitem()[1].close()

    def batch(
        self,
        services: Sequence[ServiceName] | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> RewardBatch:
        """Return a batch whose groups go to `services` (default: the needed ones).

        A service without a weight that does not answer is skipped at once.
        should_stop: see RewardBatch.
        """
        batch = RewardBatch(self, self.needed if services is None else tuple(services), should_stop)
        for name in batch.service_names:
            if name not in self.needed and (reason := self._absence(name)):
                batch.give_up(name, reason)
        return batch

    def score(
        self,
        samples: Sequence[Text | TranslationRollout],
        services: Sequence[ServiceName] | None = None,
    ) -> Scores:
        """Score samples in batches, so that a failure affects only one of them.

        Each is a group of its own. Raises what `SampleGroup.result` does.
        """
        batch = self.batch(services)
        fields = [
            sample if isinstance(sample, tuple) else sample.reward_fields for sample in samples
        ]
        groups = [
            batch.submit(fields[start : start + _BATCH], range(_BATCH)[: len(fields) - start])
            for start in range(0, len(fields), _BATCH)
        ]
        scores = Scores({name: [] for name in batch.service_names})
        for group in groups:
            for name, results in group.result().results.items():
                scores.results[name] += results
        return scores

    @property
    def needed_urls(self) -> set[str]:
        """Return the URLs of the services with a weight."""
        return {address_of(url) for name in self.needed for url in self._urls.get(name, ())}

    @property
    def needed_models(self) -> set[tuple[str, str]]:
        """Return (id, revision) of the models with a weight, if they describe themselves."""
        descriptions: list[Any] = [i for i in self.infos.values() if i.service in self.needed]
        descriptions += [d for name, d in self._described.items() if name in self.needed]
        descriptions += self.component_infos.values()
        return {(description.model, description.revision) for description in descriptions}

    def ask(
        self, name: ServiceName, samples: Sequence[Fields], groups: Sequence[Hashable]
    ) -> Future[list[Result]]:
        """Send samples to a service and return the future.

        A request has the fields that its service reads: a metric gets no languages."""
        nested = nested_definition(self.cfg) if name == COMPOSITE else None

        async def score(reward: CompositeReward) -> list[Result]:
            results = await reward.score(samples, groups=groups, deadline_s=math.inf)
            if nested is None:
                return [_answer_of(name, result) for result in results]
            pairs = zip(results, samples, strict=True)
            return [_as_composed(nested, result, sample["mt"]) for result, sample in pairs]

        return self._rewards[name].submit(score)

    def refused_sources(self, name: ServiceName, samples: Sequence[Fields]) -> list[str | None]:
        """Return why a service refuses each sample's source with any translation; None: it does
        not, or does not answer now."""
        reasons = self._rewards[name].refused_sources(samples)
        return [reason and f"{name}: {reason.partition(': ')[2]}" for reason in reasons]

    def deadline_s(self, name: ServiceName) -> float:
        """Return the seconds that one request to a service may take with its retries.

        A service without a weight, which may have died, gets no more time than one attempt.
        """
        return self.cfg.deadline_s if name in self.needed else self.cfg.timeout_s

    def max_input_length(self, name: ServiceName) -> int | None:
        """Return the token limit of a service; None if it is unknown."""
        infos = self.infos.values()
        service_limits = [info.max_input_length for info in infos if info.service == host(name)]
        limit = self.cfg.max_input_length
        return min([*service_limits, *([limit] if limit else [])], default=None)

    def settle(
        self, name: ServiceName, samples: Sequence[Fields], results: Sequence[Result]
    ) -> None:
        """Log a warning once if a model does not read much of what it scores, or a source is
        refused. Raises RewardFailure if a score with a weight is missing and `on_failure` is
        `fail`."""
        self._report_truncated(name, results)
        if name not in self.needed:
            return
        self._report_bad_sources(name, samples, results)
        for result in results if self.cfg.on_failure == "fail" else ():
            if isinstance(result, Failed) and result.error.type not in SAMPLE_ERROR_TYPES:
                raise RewardFailure(f"{name}: {result.error.type}: {result.error.message}")

    def _report_bad_sources(
        self, name: ServiceName, samples: Sequence[Fields], results: Sequence[Result]
    ) -> None:
        """Log a warning of sources that were not seen before.

        The policy did not write a source that is refused with any translation: it has no penalty.
        """
        reasons = {
            (name, sample["src"]): result.error.message
            for sample, result in zip(samples, results, strict=True)
            if isinstance(result, Failed) and result.error.type == BAD_SOURCE
        }
        if new := reasons.keys() - self._warned_sources:
            self._warned_sources |= new
            log.warning(
                "%s: no translation of %d sources can be scored (%s). They give no reward.",
                name,
                len(new),
                log_words(reasons[min(new)]),
            )

    def _report_truncated(self, name: ServiceName, results: Sequence[Result]) -> None:
        flags = [is_truncated(result) for result in results if not isinstance(result, Failed)]
        if name not in self._warned_truncated and sum(flags) > _MAX_TRUNCATED * len(flags):
            self._warned_truncated.add(name)
            log.warning(
                "%s could not read %d of %d samples to their end. Their scores are of the part "
                "that it read.",
                name,
                sum(flags),
                len(flags),
            )

    def _open(self, name: ServiceName) -> None:
        if name not in self._urls:
            raise UserError(
                f"{self._key(name)}: required. Set the URL of a running {host(name)} service "
                f"there or in {host(name).upper()}_URL, or set the weight of its reward to 0"
            )
        try:
            self._rewards[name] = self._connect(name, self._urls[name])
        except Exception as error:  # a service without a weight must not end the run
            if name in self.needed:
                raise
            log.warning("%s has no weight and does not answer: %s", name, log_words(error))

    def _absence(self, name: ServiceName) -> str | None:
        """Return why a service without a weight is unavailable now; None: it answers.

        If it could not be opened before, it is opened.
        """
        urls = self._urls[name]
        try:
            if name not in self._rewards:
                self._rewards[name] = self._connect(name, urls)
            elif _is_url(urls[0]) and not any(map(partial(self._is_there, name), urls)):
                self._check(name, urls[0])
        except Exception as error:
            return str(error) or type(error).__name__
        return None

    def _is_there(self, name: ServiceName, url: str) -> bool:
        try:
            return bool(self._check(name, url))
        except ScorekitError:
            return False

    def _connect(self, name: ServiceName, urls: list[str]) -> SyncCompositeReward:
        """Return the opened reward of a service, checked."""
        if name == COMPOSITE:
            return self._opened(name, _with_sources_checked(self.cfg, self.scoring.cache))
        local = [url for url in urls if not _is_url(url)]
        if getattr(self.cfg, f"{name}_scorer_args", None) and not local:
            raise UserError(
                f"reward.{name}_scorer_args: only for a module:Class. The service at "
                f"{urls[0]} has its own settings. Remove them"
            )
        source: dict[str, Any] = {"service": urls}
        if local:
            if host(name) == "judge":
                raise UserError(f"{self._key(name)}: {local[0]!r}: a judge requires a URL")
            if len(urls) > 1:
                raise UserError(f"{self._key(name)}: {local[0]!r} cannot be used with another one")
            source, self._unaccepted[name] = scorer_of(self.cfg, name, local[0], self._device_args)
        else:
            infos = {address_of(url): self._check(name, url) for url in urls}
            check_agreement(self._key(name), infos)
            self.infos |= infos
        return self._opened(name, self._definition(name, source))

    def _definition(self, name: ServiceName, source: Mapping[str, Any]) -> RewardDefinition:
        """Return the definition of the requests to one service, of the component of its name.

        source: its `service`, or `scorer` and `arguments`."""
        part: dict[str, Any] = {**request_of(self.cfg, name), **source, "weight": 1.0}
        options = {"cache": self.scoring.cache}
        if host(name) != "judge":
            options = self.scoring.options()
        max_s = self.deadline_s(name)
        keys: dict[str, Any] = {
            "components": {name: part | {"options": options}},
            "batch_size": self.cfg.batch_size,
            "timeout_s": min(self.cfg.timeout_s, max_s),
            "deadline_s": min(self.cfg.deadline_s, max_s),
        }
        if name == MQM:
            keys["token_rewards"] = {"spans": {name: 1.0}, "omissions": {name: 1.0}}
        if name in self.needed:  # then it is found out whether a text or its source is refused
            keys["refused_text_reward"] = dict.fromkeys(TEXT_ERROR_TYPES, 0.0)
        return load_definition(keys)

    def _opened(self, name: ServiceName, definition: RewardDefinition) -> SyncCompositeReward:
        """Return the reward, whose services have said what they are. Raises UserError."""
        key, part = self._key(name), f"components.{name}"
        reward = None
        try:
            reward = SyncCompositeReward(definition, shares_requests=False)
            infos = reward.check(probe=host(name) == "judge")
            if name == COMPOSITE:
                self.component_infos = infos
            elif name in infos and not isinstance(infos[name], Info):
                self._described[name] = infos[name]
                if problems := self._mismatches(name, infos[name], self._unaccepted[name]):
                    raise UserError(f"{self._urls[name][0]} {'; '.join(problems)}")
            elif name not in infos:
                self._check_undescribed(name)
        except BaseException as error:
            if reward is not None:
                reward.close()
            if not isinstance(error, ServiceUnreachable | RequestError | UserError):
                raise
            words = str(error).removeprefix(f"{part}.scorer: ").removeprefix(f"{part}: ")
            is_scorer = str(error).startswith(f"{part}.scorer: ")
            key = f"{key}, reward.{name}_scorer_args" if is_scorer else key
            raise UserError(f"{key}: {words}") from None
        return reward

    def _check_undescribed(self, name: ServiceName) -> None:
        """Raise UserError if a scorer that does not describe itself is to be of a model."""
        if keys := sorted(self._unaccepted[name]):
            problems = [
                f"neither accepts {name}_{key} nor describes its model. Set reward.{name}_{key} to "
                "null"
                for key in keys
            ]
            raise UserError(f"{self._urls[name][0]} {'; '.join(problems)}")

    def _check(self, name: ServiceName, url: str) -> Info:
        """Return `/v1/info` of one URL, checked against the config."""
        max_s = self.deadline_s(name) if name in self.needed else _PROBE_S
        limits = {
            "timeout_s": min(self.cfg.timeout_s, max_s),
            "deadline_s": min(self.cfg.deadline_s, max_s),
        }
        try:
            with SyncScoringClient([url], **limits) as probe:
                info = probe.info()
        except (ServiceUnreachable, RequestError) as error:
            raise UserError(f"{self._key(name)}: {error}") from None
        check_service(self._key(name), url, info, host(name))
        if problems := self._mismatches(name, info):
            raise UserError(f"{self._key(name)}: {url} {'; '.join(problems)}")
        return info

    def _key(self, name: ServiceName) -> str:
        return self.cfg.urls_key(host(name))

    def _mismatches(
        self, name: ServiceName, described: Any, keys: Collection[str] = NAMES
    ) -> list[str]:
        """Return how an Info, or a scorer's description with such fields, differs from the config.

        keys: the names of model and tokenizer to check.
        """
        task = request_of(self.cfg, name).get("task")
        says, problems = described.higher_is_better, []
        if task is not None:
            says = described.higher_is_better_in(task)
            if name == MQM and task not in (tasks := described.tasks or {}):
                return [f"has no task {task!r}: its /v1/info names {', '.join(tasks) or 'none'}"]
        if says != SERVICES[name].higher_is_better:
            problems.append(f"says higher_is_better={says}" + (f" of {task!r}" if task else ""))
        for key, field_name in (("model_name", "model"), ("tokenizer_name", "tokenizer")):
            expected, actual = expected_name(self.cfg, name, key), getattr(described, field_name)
            if key in keys and expected is not None and expected != actual:
                problems.append(f"runs {actual!r}, but reward.{host(name)}_{key} is {expected!r}")
        if (getattr(described, "inputs", None) or {}).get("ref") == "required":
            problems.append("needs references, which no reward provides. Name another model")
        limit = self.cfg.max_input_length if task is None else None
        if limit is not None and limit > described.max_input_length:
            problems.append(
                f"reads {described.max_input_length} tokens, but reward.max_input_length is {limit}"
            )
        return problems


def _threads(misc: MachineConfig) -> int:
    """Return the number of threads of torch: a scorer without it would set it for the policy,
    too."""
    import torch

    return misc.threads or torch.get_num_threads()


def _is_url(target: str) -> bool:
    return target.startswith(("http://", "https://"))


def _answer_of(name: ServiceName, result: RewardResult) -> Result:
    """Return the answer of the only component, or why it has none."""
    part = result.components[name]
    if part.answer is not None:
        return part.answer
    return failure(part.status, part.message or "", retryable=part.is_transient)


def _with_sources_checked(cfg: RewardConfig, caching: bool) -> RewardDefinition:
    """Return reward.definition for the requests of a run.

    Refused texts have a reward there, so that their sources are checked; where the user gave none,
    it is not used."""
    definition = nested_definition(cfg)
    assert definition is not None, "it has no weight"
    components = definition.components
    if not caching:
        components = {
            name: part
            if part.rule is not None
            else part.model_copy(update={"options": part.options | {"cache": False}})
            for name, part in components.items()
        }
    refused = dict.fromkeys(TEXT_ERROR_TYPES, 0.0) | definition.refused_text_reward
    changes = {"components": components, "refused_text_reward": refused}
    return definition.model_copy(update=changes)


def _as_composed(definition: RewardDefinition, result: RewardResult, mt: str) -> Scored | Failed:
    """Return a composite reward as the score of a translation, or why there is none.

    definition: as the user wrote it. A closed gate is no error of the text: it has no penalty."""
    result = compose(definition, result.components, result.gates)
    missing = [c for c in result.components.values() if c.is_required and c.status != "ok"]
    statuses = [component.status for component in missing if component.status != "skipped"]
    if result.reward is None:
        type = statuses[0] if statuses else CLOSED_GATE
        for status in (*TEXT_ERROR_TYPES, BAD_SOURCE):
            if status in statuses:
                type = status
        return failure(type, result.reason or "no reward", retryable=result.is_transient)
    answers = [c.answer for c in result.components.values() if isinstance(c.answer, Scored)]
    return Composed(
        id=None,
        ok=True,
        score=result.reward,
        tokens=0,
        truncated=Truncated(
            src=any(answer.truncated.src for answer in answers),
            mt=any(answer.truncated.mt for answer in answers),
        ),
        mt_covered=min((answer.mt_covered for answer in answers), default=len(mt)),
        cached=bool(answers) and all(answer.cached for answer in answers),
        stats=result.stats(),
    )
