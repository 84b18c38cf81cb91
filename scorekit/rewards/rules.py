"""Local rules: components and gates that are computed from the texts in this process.

A gate refuses or lowers the reward of a translation.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, get_args

from scorekit.errors import UserError
from scorekit.extras import missing_package
from scorekit.net.loops import run_in_daemon_thread
from scorekit.rewards.definition import (
    ComponentConfig,
    CopyGate,
    LanguageGate,
    LengthGate,
    SampleRule,
)
from scorekit.rewards.results import (
    ComponentResult,
    GateResult,
    component_result,
    missing_component,
)

Fields = Mapping[str, Any]
#: Returns a value of each sample of a group, or of a call; None: there is none.
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

        groups: indices of the samples of each group; used by rules of groups.
        results: gets each component by its sample's index as soon as it is known.
        """
        parts = groups if self.config.is_group_rule else [[index] for index in range(len(samples))]
        if self.config.batch:
            parts = [range(len(samples))] if samples else []
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
    if config.arguments:
        try:
            inspect.signature(function).bind([], **config.arguments)
        except TypeError as error:
            raise UserError(f"{key}: {rule!r}: {error}. Correct `arguments`") from None
        function = partial(function, **config.arguments)
    takes_list = config.group or config.batch
    group_function: GroupFunction = function if takes_list else _for_each_sample(function)
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


GateRule = Callable[[Fields], GateResult]


class LanguageModel(Protocol):
    """Identifies languages."""

    def target_probability(self, sample: Fields) -> float | None:
        """Return the probability that the translation is in `tgt_lang`; None: it is not known."""

    def knows(self, language: str) -> bool:
        """Return whether the model has the language."""


def rule_result(rule: GateRule, sample: Fields) -> GateResult:
    """Return the gate of a sample; unknown if its rule raises, which concerns this sample only."""
    try:
        return rule(sample)
    except Exception as error:
        return GateResult("unknown", message=f"{type(error).__name__}: {error}")


def load_gate(key: str, config: LanguageGate | CopyGate | LengthGate) -> GateRule:
    """Return the function of a gate.

    key: its config key, for errors.

    Raises UserError if a package or a model is missing.
    """
    try:
        importlib.import_module("scorekit.text.rules")
        if isinstance(config, LanguageGate):
            return LanguageRule(config, _load_model(f"{key}.model", config.model))
    except ModuleNotFoundError as error:
        raise UserError(f"{key}: {missing_package(error) or error}") from None
    return _pair_gate(config)


def _load_model(key: str, model: str) -> LanguageModel:
    if model != "py3langid":
        return FastTextLanguages(key, model)
    importlib.import_module("py3langid.langid")
    return _Py3Langid()


class _Py3Langid:
    """The identifier that the checks of texts use, too."""

    def target_probability(self, sample: Fields) -> float | None:
        """Return the probability that the translation is in `tgt_lang`; None: it is not known."""
        from scorekit.rewards.violations import target_probability

        languages = (sample.get("src_lang") or "", sample["tgt_lang"])
        return target_probability(sample["src"], sample["mt"], *languages)

    def knows(self, language: str) -> bool:
        """Return whether the identifier has the language."""
        from scorekit.text.checks import language_probability

        return language_probability("abc", language, ("en", "ko")) is not None


_LABEL_PREFIX = "__label__"


class FastTextLanguages:
    """A fastText model that the user gives by path.

    Labels are codes or tags in any usual form: __label__ko, __label__kor_Hang, __label__zh-CN.
    Install fasttext-predict, which only predicts, or a full build of fastText.
    key: config key, for errors. Raises UserError if the file does not exist, is no model, names
    fewer than two languages, or if fastText is not installed.
    """

    def __init__(self, key: str, path: str) -> None:
        from scorekit.languages import find_language
        from scorekit.text.checks import without_names

        self._find_language, self._without_names = find_language, without_names
        if not Path(path).is_file():
            raise UserError(f"{key}: {path}: this file does not exist. Give a fastText model")
        try:
            import fasttext
        except ModuleNotFoundError:
            raise UserError(f"{key}: install fastText: pip install fasttext-predict") from None
        try:
            self._model: Any = fasttext.load_model(path)
            labels = [label for _, label in self._predict("")]  # the end of the line is a word
        except ValueError as error:
            raise UserError(f"{key}: {path}: not a fastText model: {error}") from None
        self._language_by_label = {
            label: language.madlad
            for label in labels
            if (
                language := self._find_language(label.removeprefix(_LABEL_PREFIX).replace("_", "-"))
            )
        }
        self._languages = set(self._language_by_label.values())
        if len(self._languages) < 2:
            raise UserError(f"{key}: {path}: names fewer than two languages. Give another model")

    def knows(self, language: str) -> bool:
        """Return whether the model has a label for the language."""
        match = self._find_language(language)
        return match is not None and match.madlad in self._languages

    def target_probability(self, sample: Fields) -> float | None:
        """Return the probability of all labels that are the sample's `tgt_lang`.

        Variants of a language (zh-CN, zh-TW) are the same. Code, links and the source's names are
        left out. Returns None if the model has no label for the language.
        """
        language = self._find_language(sample["tgt_lang"])
        if language is None or language.madlad not in self._languages:
            return None
        text = " ".join(self._without_names(sample["mt"], sample["src"]).split())
        total = sum(
            probability
            for probability, label in self._predict(text)
            if self._language_by_label.get(label) == language.madlad
        )
        return min(1.0, total)  # rounding of 32-bit numbers

    def _predict(self, text: str) -> list[tuple[float, str]]:
        """Return (probability, label) of all labels.

        The model's `predict` fails with numpy 2 in the older builds, so the call below it is used.
        """
        line = text.encode("utf-8", "replace").decode() + "\n"
        pairs: list[tuple[float, str]] = self._model.f.predict(line, -1, 0.0, "strict")
        return pairs


class LanguageRule:
    """The rule of a language gate."""

    def __init__(self, config: LanguageGate, model: LanguageModel) -> None:
        self._config, self._model = config, model

    def knows(self, language: str) -> bool:
        """Return whether the gate's model has the language."""
        return self._model.knows(language)

    def __call__(self, sample: Fields) -> GateResult:
        """Return the gate of a sample."""
        from scorekit.text.checks import without_names
        from scorekit.text.rules import weighted_letters

        config, language = self._config, sample.get("tgt_lang")
        if not language:
            return self._undecided("the sample has no tgt_lang")
        bare = without_names(sample["mt"], sample["src"])
        if weighted_letters(bare) < config.min_letters:
            return GateResult("open", message=f"fewer than {config.min_letters} letters")
        probability = self._model.target_probability(sample)
        if probability is None:
            return self._undecided(f"{config.model} does not know the language {language!r}")
        is_open = probability >= config.min_probability
        return GateResult("open" if is_open else "closed", probability)

    def _undecided(self, message: str) -> GateResult:
        status = "open" if self._config.unknown == "pass" else "unknown"
        return GateResult(status, message=message)  # type: ignore[arg-type]


def _pair_gate(config: CopyGate | LengthGate) -> GateRule:
    from scorekit.text import checks, rules

    measure: Callable[[str, str], float]
    find: Callable[[rules.Pair, rules.Thresholds], Any]
    if isinstance(config, CopyGate):
        measure, find = checks.copied_share, rules.copied
        thresholds = rules.Thresholds(copy_letters=config.min_letters, max_copied=config.max_share)
    else:
        measure, find = checks.length_ratio, rules.length_ratio
        thresholds = rules.Thresholds(length_slack=config.slack, length_floor=config.floor)

    def rule(sample: Fields) -> GateResult:
        src, mt = sample["src"], sample["mt"]
        value = measure(src, mt)
        # Two unknown languages are not taken for the same one, in which much may be copied.
        languages = (sample.get("src_lang") or "?src", sample.get("tgt_lang") or "?tgt")
        is_closed = find(rules.Pair(src, mt, *languages), thresholds) is not None
        # An empty source has no finite ratio, and JSON no infinity.
        return GateResult(
            "closed" if is_closed else "open", value if math.isfinite(value) else None
        )

    return rule
