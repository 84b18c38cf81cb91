"""The reward services of a run: opened and checked once, then used a group at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from scorekit.client import RemoteScorer
from scorekit.client.replicas import check_agreement, check_service
from scorekit.errors import RequestError, ScorekitError, ServiceUnreachable, UserError
from scorekit.net.addresses import address_of
from scorekit.rewards.results import log_words
from scorekit.schemas import Failed, Info, Scored
from scorekit.scorers import RewardOutput, SampleForScoring, ScoringConfig
from trainer.runs.config import MachineConfig
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.reward_batch import (
    COMPOSITE,
    SAMPLE_ERROR_TYPES,
    RewardBatch,
    RewardFailure,
    Scores,
    ServiceName,
    SourceCheck,
    Text,
    host,
    is_truncated,
)
from trainer.translation.rewards.scorers import (
    CompositeScorer,
    JudgeScorer,
    ThreadScorer,
    body_of,
    check_answer,
    load_scorer,
    task_errors,
)
from trainer.translation.rewards.short_form import (
    SERVICES,
    configured_urls,
    needed_services,
    nested_definition,
)

log = logging.getLogger(__name__)
#: Timeout in seconds of the /v1/info of a service without a weight, before an evaluation.
_PROBE_S = 10.0
#: Model names that a config may require of a service.
_NAMES = ("model_name", "tokenizer_name")
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
        self._scorers: dict[ServiceName, RemoteScorer | ThreadScorer | CompositeScorer] = {}
        self._warned_truncated: set[ServiceName] = set()
        #: Finds out whether a failure is caused by the text or by its source.
        self.sources = SourceCheck(self.ask)
        try:
            for name in self.available:
                self._open(name)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connections and cancel open requests."""
        while self._scorers:
            self._scorers.popitem()[1].close()

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

    def score(self, texts: Sequence[Text], services: Sequence[ServiceName] | None = None) -> Scores:
        """Score texts in batches, so that a failure affects only one of them.

        Raises what `SampleGroup.result` does.
        """
        batch = self.batch(services)
        groups = [
            batch.submit(texts[start : start + _BATCH]) for start in range(0, len(texts), _BATCH)
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
        descriptions += [
            s.description
            for n, s in self._scorers.items()
            if n in self.needed and isinstance(s, ThreadScorer)
        ]
        descriptions += self.component_infos.values()
        return {
            (description.model, description.revision)
            for description in descriptions
            if description is not None
        }

    @property
    def component_infos(self) -> dict[str, Info]:
        """Return what the services of the composite reward are, by component."""
        scorer = self._scorers.get(COMPOSITE)
        return scorer.infos if isinstance(scorer, CompositeScorer) else {}

    def ask(self, name: ServiceName, samples: Sequence[SampleForScoring]) -> Future[RewardOutput]:
        """Send samples to a service and return the future.

        Metrics get no languages: they do not use them, and some services may refuse unknown fields.
        """
        if host(name) not in ("judge", COMPOSITE):
            samples = [SampleForScoring(sample.src, sample.mt) for sample in samples]
        return self._scorers[name].submit_batch(samples, self.scoring)

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
        self, name: ServiceName, samples: list[SampleForScoring], results: list[Scored | Failed]
    ) -> None:
        """Replace text errors in `results` by source errors, if the source is the cause.

        Log a warning once if a model does not read much of what it scores. Raises RewardFailure if
        a score with a weight is missing and `on_failure` is `fail`.
        """
        self._report_truncated(name, results)
        if name not in self.needed:
            return
        self.sources.attribute(name, samples, results)
        for result in results if self.cfg.on_failure == "fail" else ():
            if isinstance(result, Failed) and result.error.type not in SAMPLE_ERROR_TYPES:
                raise RewardFailure(f"{name}: {result.error.type}: {result.error.message}")

    def _report_truncated(self, name: ServiceName, results: Sequence[Scored | Failed]) -> None:
        flags = [is_truncated(result) for result in results if isinstance(result, Scored)]
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
            self._scorers[name] = self._connect(name, self._urls[name])
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
            if name not in self._scorers:
                self._scorers[name] = self._connect(name, urls)
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

    def _connect(
        self, name: ServiceName, urls: list[str]
    ) -> RemoteScorer | ThreadScorer | CompositeScorer:
        definition = nested_definition(self.cfg) if name == COMPOSITE else None
        if definition is not None:
            return CompositeScorer(definition, self._key(name), caching=self.scoring.cache)
        local = [url for url in urls if not _is_url(url)]
        if self._scorer_args(name) and not local:
            raise UserError(
                f"reward.{name}_scorer_args: only for a module:Class. The service at "
                f"{urls[0]} has its own settings. Remove them"
            )
        if local:
            if host(name) == "judge":
                raise UserError(f"{self._key(name)}: {local[0]!r}: a judge requires a URL")
            if len(urls) > 1:
                raise UserError(f"{self._key(name)}: {local[0]!r} cannot be used with another one")
            return self._in_process(name, local[0])
        infos = {address_of(url): self._check(name, url) for url in urls}
        check_agreement(self._key(name), infos)
        self.infos |= infos
        scorer = self._remote(name, urls)
        scorer.limits()  # which it caches: else each of the first groups would ask
        return scorer

    def _remote(
        self, name: ServiceName, urls: list[str], max_s: float | None = None
    ) -> RemoteScorer:
        """Return a client.

        max_s: seconds of a request with its retries; default: `deadline_s`.
        """
        max_s = max_s or self.deadline_s(name)
        limits = {
            "timeout_s": min(self.cfg.timeout_s, max_s),
            "deadline_s": min(self.cfg.deadline_s, max_s),
        }
        if host(name) == "judge":
            return JudgeScorer(urls, body_of(name, self.cfg), **limits)
        return RemoteScorer(urls, **limits)

    def _in_process(self, name: ServiceName, target: str) -> ThreadScorer:
        """Return a `module:Class`, checked against the config if it describes itself."""
        names = {key: self._expected(name, key) for key in _NAMES}
        offered = {f"{name}_{key}": value for key, value in names.items()} | self._device_args
        scorer, accepted = load_scorer(f"reward.{name}", target, offered, self._scorer_args(name))
        expected = {
            key for key, value in names.items() if value and f"{name}_{key}" not in accepted
        }
        description = getattr(scorer, "description", None)
        if description is not None:
            problems = self._mismatches(name, description, expected)
        else:
            problems = [
                f"neither accepts {name}_{key} nor describes its model. Set reward.{name}_{key} to "
                "null"
                for key in sorted(expected)
            ]
        if problems:
            raise UserError(f"{self._key(name)}: {target} {'; '.join(problems)}")
        return ThreadScorer(scorer)

    def _check(self, name: ServiceName, url: str) -> Info:
        """Return `/v1/info` of one URL, checked against the config."""
        try:
            with self._remote(name, [url], None if name in self.needed else _PROBE_S) as probe:
                info = probe.info()
                check_service(self._key(name), url, info, host(name))
                if problems := self._mismatches(name, info):
                    raise UserError(f"{self._key(name)}: {url} {'; '.join(problems)}")
                if isinstance(probe, JudgeScorer):
                    check_answer(name, probe, self.cfg, f"{self._key(name)}: {address_of(url)}")
        except (ServiceUnreachable, RequestError) as error:
            raise UserError(f"{self._key(name)}: {error}") from None
        return info

    def _key(self, name: ServiceName) -> str:
        return self.cfg.urls_key(host(name))

    def _scorer_args(self, name: ServiceName) -> dict[str, Any]:
        return getattr(self.cfg, f"{name}_scorer_args", {})

    def _expected(self, name: ServiceName, key: str) -> str | None:
        return getattr(self.cfg, f"{host(name)}_{key}", None)

    def _mismatches(
        self, name: ServiceName, described: Any, keys: Collection[str] = _NAMES
    ) -> list[str]:
        """Return how an Info, or a scorer's description with such fields, differs from the config.

        keys: the names of model and tokenizer to check.
        """
        higher, judge = SERVICES[name].higher_is_better, host(name) == "judge"
        problems = task_errors(name, described, self.cfg, higher) if judge else []
        if not judge and described.higher_is_better != higher:
            problems.append(f"says higher_is_better={described.higher_is_better}")
        for key, field_name in (("model_name", "model"), ("tokenizer_name", "tokenizer")):
            expected, actual = self._expected(name, key), getattr(described, field_name)
            if key in keys and expected is not None and expected != actual:
                problems.append(f"runs {actual!r}, but reward.{host(name)}_{key} is {expected!r}")
        if (getattr(described, "inputs", None) or {}).get("ref") == "required":
            problems.append("needs references, which no reward provides. Name another model")
        limit = None if judge else self.cfg.max_input_length
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
