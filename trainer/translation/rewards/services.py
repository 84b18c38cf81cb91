"""The reward services of a run: opened and checked once, then asked a group at a time."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from scorekit.client import RemoteScorer
from scorekit.client.endpoints import check_agreement, check_service
from scorekit.errors import RequestError, ScorekitError, ServiceUnreachable, UserError
from scorekit.schemas import Failed, Info, Scored
from scorekit.scorers import RewardOutput, SampleForScoring, ScoringConfig
from trainer.runs.config import MachineConfig
from trainer.translation.rewards.config import RewardConfig
from trainer.translation.rewards.in_process import ThreadScorer, load_scorer
from trainer.translation.rewards.judging import JudgeScorer, body_of, check_answer, task_faults
from trainer.translation.rewards.score_batch import (
    AskedBatch,
    Scores,
    ServiceName,
    Text,
    host,
    is_truncated,
)
from trainer.translation.rewards.sources import SourceCheck
from trainer.translation.rewards.terms import higher_is_better, needed, only_paid, services

log = logging.getLogger(__name__)
#: Seconds in which a service without weight says that it is there, before an evaluation asks it.
_PROBE_S = 10.0
#: What a config may say of a service's model.
_NAMES = ("model_name", "tokenizer_name")
#: Samples of an evaluation that are put to a service at once: what is lost where that fails.
_PIECE = 16
#: Share of samples that a model may fail to read whole before it is told.
_TRUNCATED_TOLD = 0.1


class Rewarder:
    """The reward services of a run.

    Opening it checks that each service that is needed answers, runs the model that the config
    expects, and scores in the expected direction. A service that has a URL but no weight is asked
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
        """only: leave the others alone. misc: where scorers of this process compute: device and
        threads, unless they are told."""
        self.cfg = cfg
        self._place = {} if misc is None else {"device": misc.device, "threads": _threads(misc)}
        self.scoring = ScoringConfig(
            batch_size=cfg.batch_size,
            overlong="error" if cfg.overlong in ("skip", "penalty") else cfg.overlong,
            max_input_length=cfg.max_input_length,
            cache=caching,
        )
        self.needed = tuple(name for name in needed(cfg) if only in (None, name))
        self._urls = {name: urls for name in services() if (urls := self._named(name))}
        free = {name for name in self._urls if not only_paid(name)}
        offered = {*self.needed, *(free if offer_unneeded else ())}
        #: Services that an evaluation asks: the needed ones, and those that have a URL.
        self.available = tuple(name for name in services() if name in offered)
        self.infos: dict[str, Info] = {}
        self._scorers: dict[ServiceName, RemoteScorer | ThreadScorer] = {}
        self._told_truncated: set[ServiceName] = set()
        #: Whose fault a text is that cannot be scored.
        self.sources = SourceCheck(self.ask)
        try:
            for name in self.available:
                self._open(name)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close the connections; what is still asked for is given up."""
        while self._scorers:
            self._scorers.popitem()[1].close()

    def batch(
        self,
        services: Sequence[ServiceName] | None = None,
        hurry: Callable[[], bool] = lambda: False,
    ) -> AskedBatch:
        """A batch whose groups are put to `services` (default: the needed ones); one of them that
        has no weight and does not answer is given up before it is asked. hurry: see AskedBatch."""
        batch = AskedBatch(self, self.needed if services is None else tuple(services), hurry)
        for name in batch.asked:
            if name not in self.needed and (why := self._absence(name)):
                batch.give_up(name, why)
        return batch

    def score(self, texts: Sequence[Text], services: Sequence[ServiceName] | None = None) -> Scores:
        """Texts in pieces, each of which has its scores or its failures whatever becomes of the
        others. Raises what `Group.result` does."""
        batch = self.batch(services)
        pieces = [batch.submit(texts[at : at + _PIECE]) for at in range(0, len(texts), _PIECE)]
        scores = Scores({name: [] for name in batch.asked})
        for piece in pieces:
            for name, results in piece.result().results.items():
                scores.results[name] += results
        return scores

    @property
    def needed_urls(self) -> set[str]:
        """Where the services with a weight are."""
        return {url.rstrip("/") for name in self.needed for url in self._urls.get(name, ())}

    @property
    def needed_models(self) -> set[tuple[str, str]]:
        """(id, revision) of the models with a weight, as far as they say."""
        told: list[Any] = [i for i in self.infos.values() if i.service in self.needed]
        told += [
            s.description
            for n, s in self._scorers.items()
            if n in self.needed and isinstance(s, ThreadScorer)
        ]
        return {(one.model, one.revision) for one in told if one is not None}

    @property
    def fails_run(self) -> bool:
        """Whether a score that a service failed to give ends the run."""
        return self.cfg.on_failure == "fail"

    def attribute(
        self,
        name: ServiceName,
        samples: Sequence[SampleForScoring],
        results: list[Scored | Failed],
    ) -> None:
        """Put the source's fault in place of the text's in `results`."""
        self.sources.attribute(name, samples, results)

    def ask(self, name: ServiceName, samples: Sequence[SampleForScoring]) -> Future[RewardOutput]:
        """Put samples to a service; the answer is not waited for. Metrics see no languages: they
        read none, and others than ours may refuse what they do not know."""
        if host(name) != "judge":
            samples = [SampleForScoring(sample.src, sample.mt) for sample in samples]
        return self._scorers[name].submit_batch(samples, self.scoring)

    def patience(self, name: ServiceName) -> float:
        """Seconds that one request to a service may take with its retries. One without weight,
        which may have died, is not tried for longer than one attempt may take."""
        return self.cfg.deadline_s if name in self.needed else self.cfg.timeout_s

    def max_input_length(self, name: ServiceName) -> int | None:
        """The most tokens that a service is asked to read; None where it does not say."""
        infos = self.infos.values()
        own = [info.max_input_length for info in infos if info.service == host(name)]
        limit = self.cfg.max_input_length
        return min([*own, *([limit] if limit else [])], default=None)

    def tell_truncated(self, name: ServiceName, results: Sequence[Scored | Failed]) -> None:
        """Warn once where a model does not read much of what it scores."""
        flags = [is_truncated(result) for result in results if isinstance(result, Scored)]
        if name not in self._told_truncated and sum(flags) > _TRUNCATED_TOLD * len(flags):
            self._told_truncated.add(name)
            log.warning(
                "%s could not read %d of %d samples to their end; their scores are of the part "
                "that it read",
                name,
                sum(flags),
                len(flags),
            )

    def _named(self, name: ServiceName) -> list[str]:
        """The URLs of the config, or else of the environment."""
        return self.cfg.urls_of(host(name)) or _from_environment(host(name))

    def _open(self, name: ServiceName) -> None:
        if name not in self._urls:
            raise UserError(
                f"{self._key(name)} is empty: name the URL of a running {host(name)} service "
                f"there or in {host(name).upper()}_URL, or set the weight of its reward to 0"
            )
        try:
            self._scorers[name] = self._connect(name, self._urls[name])
        except Exception as error:  # of a service that is only shown, none may end the run
            if name in self.needed:
                raise
            log.warning("%s has no weight and does not answer: %s", name, error)

    def _absence(self, name: ServiceName) -> str | None:
        """Why a service without weight cannot be asked now; None: it answers. One that could not
        be opened before is opened."""
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

    def _connect(self, name: ServiceName, urls: list[str]) -> RemoteScorer | ThreadScorer:
        local = [url for url in urls if not _is_url(url)]
        if self._scorer_args(name) and not local:
            raise UserError(
                f"reward.{name}_scorer_args are of a module:Class: the service behind "
                f"{urls[0]} has its own settings; leave them out"
            )
        if local:
            if host(name) == "judge":
                raise UserError(f"{self._key(name)}: {local[0]!r}: a judge is asked by its URL")
            if len(urls) > 1:
                raise UserError(f"{self._key(name)}: {local[0]!r} cannot stand beside another")
            return self._in_process(name, local[0])
        infos = {url: self._check(name, url) for url in urls}
        check_agreement(self._key(name), infos)
        self.infos |= infos
        scorer = self._remote(name, urls)
        scorer.info()  # which it remembers: else each of the first groups asks
        return scorer

    def _remote(
        self, name: ServiceName, urls: list[str], most: float | None = None
    ) -> RemoteScorer:
        """most: seconds of a request with its retries; default: `patience`."""
        most = most or self.patience(name)
        limits = {
            "timeout_s": min(self.cfg.timeout_s, most),
            "deadline_s": min(self.cfg.deadline_s, most),
        }
        if host(name) == "judge":
            return JudgeScorer(urls, body_of(name, self.cfg), **limits)
        return RemoteScorer(urls, **limits)

    def _in_process(self, name: ServiceName, target: str) -> ThreadScorer:
        """A `module:Class`, held against the config's expectations if it describes itself."""
        names = {key: self._expected(name, key) for key in _NAMES}
        offered = {f"{name}_{key}": value for key, value in names.items()} | self._place
        scorer, taken = load_scorer(f"reward.{name}", target, offered, self._scorer_args(name))
        expected = {key for key, value in names.items() if value and f"{name}_{key}" not in taken}
        description = getattr(scorer, "description", None)
        if description is not None:
            faults = self._mismatches(name, description, expected)
        else:
            faults = [
                f"neither takes {name}_{key} nor says what it runs: set reward.{name}_{key} to null"
                for key in sorted(expected)
            ]
        if faults:
            raise UserError(f"{self._key(name)}: {target} {'; '.join(faults)}")
        return ThreadScorer(scorer)

    def _check(self, name: ServiceName, url: str) -> Info:
        """`/v1/info` of one URL, held against the config's expectations."""
        try:
            with self._remote(name, [url], None if name in self.needed else _PROBE_S) as probe:
                info = probe.info()
                check_service(self._key(name), url, info, host(name))
                if faults := self._mismatches(name, info):
                    raise UserError(f"{self._key(name)}: {url} {'; '.join(faults)}")
                if isinstance(probe, JudgeScorer):
                    check_answer(name, probe, self.cfg, f"{self._key(name)}: {url}")
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
        """What an Info, or a scorer's description with such fields, says against the config, of
        whose names of model and tokenizer `keys` count."""
        higher, judge = higher_is_better(name), host(name) == "judge"
        faults = task_faults(name, described, self.cfg, higher) if judge else []
        if not judge and described.higher_is_better != higher:
            faults.append(f"says higher_is_better={described.higher_is_better}")
        for key, field_name in (("model_name", "model"), ("tokenizer_name", "tokenizer")):
            expected, actual = self._expected(name, key), getattr(described, field_name)
            if key in keys and expected is not None and expected != actual:
                faults.append(f"runs {actual!r}, but reward.{host(name)}_{key} is {expected!r}")
        if (getattr(described, "inputs", None) or {}).get("ref") == "required":
            faults.append("needs references, which no reward reads: name another model")
        limit = None if judge else self.cfg.max_input_length
        if limit is not None and limit > described.max_input_length:
            faults.append(
                f"reads {described.max_input_length} tokens, but reward.max_input_length is {limit}"
            )
        return faults


def _threads(misc: MachineConfig) -> int:
    """Those of torch, which a scorer that is told none would set anew, for the policy, too."""
    import torch

    return misc.threads or torch.get_num_threads()


def _is_url(target: str) -> bool:
    return target.startswith(("http://", "https://"))


def _from_environment(name: ServiceName) -> list[str]:
    value = os.environ.get(f"{name.upper()}_URL", "")
    return [url.strip() for url in value.split(",") if url.strip()]
