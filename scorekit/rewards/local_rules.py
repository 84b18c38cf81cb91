"""Components that are computed from the texts in this process."""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from itertools import islice
from typing import Any, get_args

from scorekit.errors import UserError
from scorekit.extras import missing_package
from scorekit.net.tasks import run_in_daemon_thread
from scorekit.rewards.definition import ComponentConfig, SampleRule
from scorekit.rewards.formula import component_result, missing_component
from scorekit.rewards.results import ComponentResult

Fields = Mapping[str, Any]
#: Returns a value of each sample of a group; None: there is none.
GroupFunction = Callable[[Sequence[Fields]], Sequence[float | None]]
#: Calls of a function that may hang at once. A thread cannot be ended, so then no more are made.
MAX_HUNG = 8


class LocalRule:
    """A local rule of a component, loaded once.

    key: the component's config key, for errors. Raises UserError if the rule does not exist or
    needs a package that is not installed.
    """

    def __init__(self, key: str, config: ComponentConfig) -> None:
        self.config = config
        assert config.rule is not None
        self._compute = _load(f"{key}.rule", config)
        #: Whether it is a function of the user's, which may hang.
        self.is_foreign = ":" in config.rule
        #: Calls that nobody waits for any more, and that have not ended.
        self.num_hung = 0

    async def evaluate_within(
        self, samples: Sequence[Fields], groups: Sequence[Sequence[int]], limit_s: float
    ) -> list[ComponentResult]:
        """Return `evaluate`, computed in a thread; a timeout for what is missing after `limit_s`.

        A function of the user's has a thread of its own for each call, and no result of another
        rule waits for it. Where `MAX_HUNG` calls hang, the next fail at once, until one ends.
        """
        if self.num_hung >= MAX_HUNG:
            reason = f"{self.num_hung} calls of {self.config.rule} have not ended"
            return [self._late(reason)] * len(samples)
        results: dict[int, ComponentResult] = {}
        run = run_in_daemon_thread if self.is_foreign else asyncio.to_thread
        call = asyncio.ensure_future(run(self.evaluate, samples, groups, results))
        try:
            done, _ = await asyncio.wait([call], timeout=limit_s)
        except asyncio.CancelledError:
            self._leave(call)
            raise
        if done:
            return call.result()
        self._leave(call)
        ready, late = dict(results), self._late("no result before the deadline")
        return [ready.get(index, late) for index in range(len(samples))]

    def _leave(self, call: asyncio.Future[list[ComponentResult]]) -> None:
        """Wait for a call no longer, and count it until it ends."""
        if not call.done():
            self.num_hung += 1
            call.add_done_callback(self._end)

    def _end(self, call: asyncio.Future[list[ComponentResult]]) -> None:
        self.num_hung -= 1
        if not call.cancelled():
            call.exception()  # nobody reads it

    def _late(self, reason: str) -> ComponentResult:
        return missing_component(self.config, "timeout", reason, is_transient=True)

    def evaluate(
        self,
        samples: Sequence[Fields],
        groups: Sequence[Sequence[int]],
        results: dict[int, ComponentResult] | None = None,
    ) -> list[ComponentResult]:
        """Return the component of each sample. An error of the rule concerns its own samples only.

        groups: indices of the samples of each group; used by rules of groups. results: gets each
        component by its sample's index as soon as it is known.
        """
        parts = groups if self.config.is_group_rule else [[index] for index in range(len(samples))]
        results = {} if results is None else results
        for indices in parts:
            values = self._group([samples[index] for index in indices])
            results.update(zip(indices, values, strict=True))
        return [results[index] for index in range(len(samples))]

    def _group(self, samples: Sequence[Fields]) -> list[ComponentResult]:
        try:
            answer = self._compute([_copied(sample) for sample in samples])
            if isinstance(answer, Mapping | str | Set):
                raise TypeError(f"it returned a {type(answer).__name__}, not a list of values")
            values = list(islice(answer, len(samples) + 1))  # an iterator may be endless
            if len(values) != len(samples):
                count = f"more than {len(samples)}" if len(values) > len(samples) else len(values)
                raise ValueError(f"{count} values for {len(samples)} samples")
            return [self._result(value) for value in values]
        except UserError as error:
            if self.config.weight:
                raise
            return [missing_component(self.config, "rule_error", str(error))] * len(samples)
        except BaseException as error:  # a typed failure of these samples, `sys.exit` too
            reason = _line_of(error)
            return [missing_component(self.config, "rule_error", reason)] * len(samples)

    def _result(self, value: float | None) -> ComponentResult:
        if value is None:
            reason = f"{self.config.rule} gives no value for this sample"
            return missing_component(self.config, "no_value", reason)
        if isinstance(value, str | bytes):  # float() would read it
            raise TypeError(f"it returned the text {value!r:.40}, not a number")
        return component_result(float(value), self.config)


def _line_of(error: BaseException) -> str:
    """Return an error in one line. Its own text may raise, too, or have no end."""
    try:
        text = " ".join(str(error).split())[:300]
    except Exception:
        text = "(its text cannot be read)"
    return f"{type(error).__name__}: {text}"


def _copied(value: Any) -> Any:
    """Return a copy of a sample's dictionaries and lists; what else they hold is the same."""
    if type(value) is dict:
        return {key: _copied(part) for key, part in value.items()}
    if type(value) is list:
        return [_copied(part) for part in value]
    return value


def _load(key: str, config: ComponentConfig) -> GroupFunction:
    rule = config.rule or ""
    if rule == "duplicates":
        return duplicate_shares
    if rule in get_args(SampleRule):
        return _for_each_sample(_load_builtin(key, rule))
    module_name, _, name = rule.partition(":")
    if not module_name or not name:
        valid_names = ", ".join((*get_args(SampleRule), "duplicates"))
        raise UserError(f"{key}: {rule!r} is neither one of {valid_names} nor module:function")
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (Exception, SystemExit) as error:  # the module's own errors, too
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{key}: {rule!r} cannot be loaded: {reason}") from None
    if not callable(function):
        raise UserError(f"{key}: {rule!r} is not a function")
    if inspect.iscoroutinefunction(function):
        raise UserError(f"{key}: {rule!r} is async. Name a plain function")
    group_function: GroupFunction = function if config.group else _for_each_sample(function)
    return group_function


def _for_each_sample(compute: Callable[[Fields], float | None]) -> GroupFunction:
    return lambda samples: [compute(sample) for sample in samples]


def _load_builtin(key: str, rule: str) -> Callable[[Fields], float | None]:
    if rule == "truncated":
        return is_truncated
    try:
        if rule == "chrf":
            importlib.import_module("sacrebleu")
            return chrf
        violation = importlib.import_module("scorekit.rewards.violations").VIOLATIONS[rule]
        if rule == "language":
            importlib.import_module("py3langid.langid")
    except ModuleNotFoundError as error:
        raise UserError(f"{key}: {rule}: {missing_package(error) or error}") from None
    needs_target = rule in ("language", "script")

    def compute(sample: Fields) -> float | None:
        if needs_target and not sample.get("tgt_lang"):
            return None
        languages = (sample.get("src_lang") or "", sample.get("tgt_lang") or "")
        return float(violation(sample["src"], sample["mt"], *languages))

    return compute


def is_truncated(sample: Fields) -> float | None:
    """Return 1 if the completion was cut by the token limit, else 0; None if it is not said.

    `finish_reason` is "length", or another word, as servers of the OpenAI protocol give it."""
    reason = sample.get("finish_reason")
    return None if reason is None else float(reason == "length")


def chrf(sample: Fields) -> float | None:
    """Return sacrebleu's sentence chrF (0 to 100) against `ref`; None without a reference."""
    if not sample.get("ref"):
        return None
    import sacrebleu

    return float(sacrebleu.sentence_chrf(sample["mt"], [sample["ref"]]).score)


def duplicate_shares(samples: Sequence[Fields]) -> list[float]:
    """Return, for each completion of a group, the share of the other ones that are equal to it.

    0 for a group of one. White space at the ends is no difference."""
    texts = [sample["mt"].strip() for sample in samples]
    counts = Counter(texts)
    return [(counts[text] - 1) / max(1, len(texts) - 1) for text in texts]
