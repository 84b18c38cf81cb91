"""Gates: rules about a translation that refuse or lower its reward."""

from __future__ import annotations

import importlib
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
    return _copy_gate(config) if isinstance(config, CopyGate) else _length_gate(config)


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


def _copy_gate(config: CopyGate) -> GateRule:
    from scorekit.text.checks import copied_share
    from scorekit.text.rules import Thresholds, copied

    thresholds = Thresholds(copy_letters=config.min_letters, max_copied=config.max_share)

    def rule(sample: Fields) -> GateResult:
        share = copied_share(sample["src"], sample["mt"])
        is_closed = copied(_pair(sample), thresholds) is not None
        return GateResult("closed" if is_closed else "open", share)

    return rule


def _length_gate(config: LengthGate) -> GateRule:
    from scorekit.text import checks, rules

    thresholds = rules.Thresholds(length_slack=config.slack, length_floor=config.floor)

    def rule(sample: Fields) -> GateResult:
        ratio = checks.length_ratio(sample["src"], sample["mt"])
        is_closed = rules.length_ratio(_pair(sample), thresholds) is not None
        # an empty source has no finite ratio, and JSON no infinity
        value = None if ratio == float("inf") else ratio
        return GateResult("closed" if is_closed else "open", value)

    return rule


def _pair(sample: Fields) -> Any:
    from scorekit.text.rules import Pair

    # Two unknown languages are not taken for the same one, in which much may be copied.
    languages = (sample.get("src_lang") or "?src", sample.get("tgt_lang") or "?tgt")
    return Pair(sample["src"], sample["mt"], *languages)
