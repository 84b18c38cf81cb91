"""Gates: rules about a translation that refuse or lower its reward."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from scorekit.errors import UserError
from scorekit.extras import missing_package
from scorekit.rewards.definition import CopyGate, LanguageGate, LengthGate
from scorekit.rewards.results import GateResult

Fields = Mapping[str, Any]
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
    """Return the function of a gate. key: its config key, for errors.

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
        from scorekit.rewards.fasttext_model import FastTextLanguages

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
