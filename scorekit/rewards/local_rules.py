"""Components that are computed from the texts in this process."""

from __future__ import annotations

import importlib
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, get_args

from scorekit.command import missing_package
from scorekit.errors import UserError
from scorekit.rewards.definition import ComponentConfig, SampleRule
from scorekit.rewards.formula import component_result, missing_component
from scorekit.rewards.results import ComponentResult

Fields = Mapping[str, Any]
#: Returns a value of each sample of a group; None: there is none.
GroupFunction = Callable[[Sequence[Fields]], Sequence[float | None]]


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

    def evaluate(
        self, samples: Sequence[Fields], groups: Sequence[Sequence[int]]
    ) -> list[ComponentResult]:
        """Return the component of each sample. An error of the rule concerns its own samples only.

        groups: indices of the samples of each group; used by rules of groups.
        """
        parts = groups if self.config.is_group_rule else [[index] for index in range(len(samples))]
        results: dict[int, ComponentResult] = {}
        for indices in parts:
            values = self._group([samples[index] for index in indices])
            results.update(zip(indices, values, strict=True))
        return [results[index] for index in range(len(samples))]

    def _group(self, samples: Sequence[Fields]) -> list[ComponentResult]:
        try:
            answer = self._compute([dict(sample) for sample in samples])
            if isinstance(answer, Mapping | str | Set):
                raise TypeError(f"it returned a {type(answer).__name__}, not a list of values")
            values = list(answer)
            if len(values) != len(samples):
                raise ValueError(f"{len(values)} values for {len(samples)} samples")
            return [self._result(value) for value in values]
        except UserError:
            raise
        except BaseException as error:  # a typed failure of these samples, `sys.exit` too
            reason = f"{type(error).__name__}: {error}"
            return [missing_component(self.config, "rule_error", reason)] * len(samples)

    def _result(self, value: float | None) -> ComponentResult:
        if value is None:
            reason = f"{self.config.rule} gives no value for this sample"
            return missing_component(self.config, "no_value", reason)
        return component_result(float(value), self.config)


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
