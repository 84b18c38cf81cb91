"""Find in the first samples why no sample could have a reward by a definition.

A trainer goes on where a sample has no reward. If none can ever have one, it would train on nothing
to its end: that is a mistake of the definition or of the data, and it ends the first call.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from scorekit.errors import UserError
from scorekit.rewards.definition import ComponentConfig, LanguageGate, RewardDefinition
from scorekit.rewards.gates import GateRule, LanguageRule
from scorekit.rewards.results import ComponentResult, RewardResult
from scorekit.rewards.services import fields_of_request

Fields = Mapping[str, Any]
#: Samples for which a component must fail by its own error before that is a mistake.
MIN_FAILED = 8
#: The field that a local rule reads beside the texts.
_FIELD_OF_RULE = {
    "language": "tgt_lang",
    "script": "tgt_lang",
    "chrf": "ref",
    "truncated": "finish_reason",
}


def required_fields(definition: RewardDefinition) -> dict[str, str]:
    """Return the fields that a sample needs for a reward, each with the key that reads it.

    Without `src` and `mt`, which every sample has, and without those that your functions read.
    """
    keys: dict[str, str] = {}
    for name, gate in definition.gates.items():
        if isinstance(gate, LanguageGate) and gate.unknown == "no_reward":
            keys.setdefault("tgt_lang", f"gates.{name}")
    for name, config in definition.components.items():
        if not config.weight:
            continue
        for field in _fields_of(config):
            keys.setdefault(field, f"components.{name}")
    return {field: key for field, key in keys.items() if field not in ("src", "mt")}


def _fields_of(config: ComponentConfig) -> Iterable[str]:
    if config.service is not None:
        return fields_of_request(config.request).values()
    field = _FIELD_OF_RULE.get(config.rule or "")
    return () if field is None else (field,)


def check_languages(
    definition: RewardDefinition, rules: Mapping[str, GateRule], languages: Iterable[str]
) -> None:
    """Raise UserError if a gate without `unknown: pass` does not know a target language.

    rules: the gates' by name.
    """
    if isinstance(languages, str):
        raise UserError("languages: a text. Give a list of languages")
    for language in dict.fromkeys(languages):
        if not isinstance(language, str) or not language:
            raise UserError(f"languages: {language!r} is no language. Give codes or English names")
        for name, rule in rules.items():
            if _is_unknown(definition, name, rule, language):
                raise _unknown_language(definition, name, language)


def _is_unknown(definition: RewardDefinition, name: str, rule: GateRule, language: str) -> bool:
    config = definition.gates[name]
    is_strict = isinstance(config, LanguageGate) and config.unknown == "no_reward"
    return is_strict and isinstance(rule, LanguageRule) and not rule.knows(language)


def _unknown_language(definition: RewardDefinition, name: str, language: str) -> UserError:
    config = definition.gates[name]
    model = config.model if isinstance(config, LanguageGate) else ""
    return UserError(
        f"gates.{name}: {model} does not know the language {language!r}, so no translation into it "
        "has a reward. Correct tgt_lang, or set `unknown: pass`"
    )


class FirstSamples:
    """Looks at samples and their results until every required part has worked once.

    definition: of the reward. rules: the gates' by name.
    """

    def __init__(self, definition: RewardDefinition, rules: Mapping[str, GateRule]) -> None:
        self._definition, self._rules = definition, rules
        self._unseen = required_fields(definition)
        self._unproven = {name for name, c in definition.components.items() if c.weight}
        self._undecided = set(rules)
        self._failed: Counter[str] = Counter()

    def check_fields(self, samples: Sequence[Fields]) -> None:
        """Raise UserError if a required field is in none of the samples so far.

        A field that is None is there: its sample alone has no reward.
        """
        for field, key in list(self._unseen.items()):
            if any(field in sample for sample in samples):
                del self._unseen[field]
            elif samples:
                raise UserError(
                    f"{key}: reads the field {field!r}, and no sample has it. Give every sample "
                    f"{field!r}, null where there is none; or take the part out of the definition"
                )

    def check_results(self, samples: Sequence[Fields], results: Sequence[RewardResult]) -> None:
        """Raise UserError if a gate or a component cannot work, for a reason that stays the same.

        That is a language that no gate's model knows, for all samples of a call; and a function
        that raises, or an answer without the value, for the first `MIN_FAILED` samples at least.
        """
        for name in list(self._undecided):
            statuses = [result.gates[name].status for result in results]
            if any(status != "unknown" for status in statuses):
                self._undecided.discard(name)
            else:
                self._check_gate(name, samples)
        for name in list(self._unproven):
            parts = [result.components[name] for result in results]
            if any(part.status == "ok" for part in parts):
                self._unproven.discard(name)
            else:
                self._check_component(name, parts)

    def _check_gate(self, name: str, samples: Sequence[Fields]) -> None:
        languages = [sample.get("tgt_lang") for sample in samples]
        named = [language for language in languages if language]
        rule = self._rules[name]
        if named and all(_is_unknown(self._definition, name, rule, text) for text in set(named)):
            raise _unknown_language(self._definition, name, named[0])

    def _check_component(self, name: str, parts: Sequence[ComponentResult]) -> None:
        failed = [part for part in parts if _is_own_failure(part)]
        self._failed[name] += len(failed)
        if failed and self._failed[name] >= MIN_FAILED:
            raise UserError(
                f"components.{name}: none of the first {self._failed[name]} samples has a value: "
                f"{failed[0].message}. Correct the definition, the function or the data"
            )


def _is_own_failure(part: ComponentResult) -> bool:
    """Return whether the function raised, or the service's answer lacks the value."""
    return part.status == "rule_error" or (part.status == "no_value" and part.answer is not None)
