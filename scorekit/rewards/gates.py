"""Gates: rules about a translation that refuse or lower its reward."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from typing import Any

from scorekit.command import missing_package
from scorekit.errors import UserError
from scorekit.rewards.definition import CopyGate, LanguageGate, LengthGate
from scorekit.rewards.results import GateResult

Fields = Mapping[str, Any]
GateRule = Callable[[Fields], GateResult]
#: Returns the probability that the translation is in `tgt_lang`; None: the model does not know it.
LanguageModel = Callable[[Fields], float | None]


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
            return _language_gate(config, _load_model(f"{key}.model", config.model))
    except ModuleNotFoundError as error:
        raise UserError(f"{key}: {missing_package(error) or error}") from None
    return _pair_gate(config)


def _load_model(key: str, model: str) -> LanguageModel:
    if model != "py3langid":
        from scorekit.rewards.fasttext_model import FastTextLanguages

        return FastTextLanguages(key, model).target_probability
    importlib.import_module("py3langid.langid")
    from scorekit.rewards.violations import target_probability

    return lambda sample: target_probability(
        sample["src"], sample["mt"], sample.get("src_lang") or "", sample["tgt_lang"]
    )


def _language_gate(config: LanguageGate, model: LanguageModel) -> GateRule:
    from scorekit.text.checks import without_names
    from scorekit.text.rules import weighted_letters

    def rule(sample: Fields) -> GateResult:
        language = sample.get("tgt_lang")
        if not language:
            return _undecided(config, "the sample has no tgt_lang")
        bare = without_names(sample["mt"], sample["src"])
        if weighted_letters(bare) < config.min_letters:
            return GateResult("open", message=f"fewer than {config.min_letters} letters")
        probability = model(sample)
        if probability is None:
            return _undecided(config, f"{config.model} does not know the language {language!r}")
        is_open = probability >= config.min_probability
        return GateResult("open" if is_open else "closed", probability)

    return rule


def _undecided(config: LanguageGate, message: str) -> GateResult:
    return GateResult("open" if config.unknown == "pass" else "unknown", message=message)


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
