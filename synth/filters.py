"""The rules that reject translations: each has a reason code and describes what it saw.

Rules shared with the judge and guards are in scorekit/text/rules.py.

At its default thresholds each rejects fewer than 1 in 100 true translations of demo/data and of
tests/data/prose, which tests/integration/synth/test_filters.py and test_true_pairs.py hold.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field

from scorekit.config import Config
from scorekit.text import chat_marks, checks, meta_text, rules
from scorekit.text.findings import Certainty, TextFinding, debris, lost_emoji, third_script
from scorekit.text.markup import placeholder_difference
from scorekit.text.numbers import compare_numbers, expected_numbers
from scorekit.text.rules import SYNTHESIS, Pair, Thresholds
from scorekit.text.writing_scripts import scripts_of
from synth.reasons import RuleCode


class RuleConfig(Config):
    """Thresholds of the rules."""

    off: list[RuleCode] = Field([], description="Rules that are left out, by their code.")
    min_chars: int = Field(2, ge=1, description="too_short: fewer characters.")
    max_chars: int = Field(10_000, ge=1, description="too_long: more characters.")
    length_slack: float = Field(
        SYNTHESIS.length_slack,
        gt=1,
        description="length_ratio: UTF-8 bytes of the translation for each of the source's, so "
        "many times over or under what is usual for the two languages.",
    )
    length_floor: int = Field(
        SYNTHESIS.length_floor,
        ge=0,
        description="length_ratio: sources of fewer characters get a wider band.",
    )
    min_letters: int = Field(
        SYNTHESIS.copy_letters,
        ge=0,
        description="copied_source, wrong_script, wrong_language: translations of fewer letters "
        "are left alone. What has to be told by shares needs 30 or more.",
    )
    min_language_chars: int = Field(
        SYNTHESIS.least_chars,
        ge=0,
        description="copied_source, wrong_script, wrong_language: translations of fewer "
        "characters are left alone; a name is the same everywhere.",
    )
    max_copied_share: float = Field(
        SYNTHESIS.max_copied,
        gt=0,
        le=1,
        description="copied_source: more of the translation's letters are the source's own, or "
        "more of the source's stand in the translation; links, code and numbers aside.",
    )
    min_script_share: float = Field(
        SYNTHESIS.min_script_share,
        ge=0,
        le=1,
        description="wrong_script: fewer letters in the target language's script, names that the "
        "source has too left out.",
    )
    max_other_variant: float = Field(
        SYNTHESIS.max_other_variant,
        ge=0,
        le=1,
        description="wrong_variant: of the characters that only Traditional or only Simplified "
        "Chinese has, a larger share is not the target's.",
    )
    language_confidence: float = Field(
        SYNTHESIS.language_confidence,
        ge=0,
        le=1,
        description="wrong_language: the identifier is so sure that it is the source's language.",
    )
    language_margin: float | None = Field(
        SYNTHESIS.language_margin,
        gt=0,
        description="wrong_language: natural logarithm of how much likelier a language that is "
        "neither the source's nor the target's must be. Null: it is not asked for, nor in short "
        "texts.",
    )
    short_language_margin: float | None = Field(
        SYNTHESIS.short_language_margin,
        ge=0,
        description="wrong_language, into English or German, also of few letters: natural "
        "logarithm of the odds against the target language that its groups of letters give; into "
        "Chinese, Kana. Null: it is not asked for.",
    )
    max_repetition: float = Field(
        SYNTHESIS.max_repetition,
        ge=0,
        le=1,
        description="repetition: a larger share in loops than in the source.",
    )
    max_missing_numbers: float = Field(
        0.2,
        ge=0,
        le=1,
        description="numbers_missing: the translation has a larger share of the source's numbers "
        "in no form. German, English, Korean and Chinese, compared by value. With a judge only "
        "numbers that are surely wrong count; it decides about the others.",
    )
    allowed_tags: list[str] = Field(
        [], description='tag: names that may stand there ("b", "```"); the source\'s own may, too.'
    )
    require_end_mark: bool = Field(
        False,
        description="truncated: also without an end mark where the source has one. Rejects many "
        "true translations into Korean and Thai.",
    )

    def thresholds(self) -> Thresholds:
        """Return the thresholds of the rules shared with the judge and guards."""
        margin, short_margin = self.language_margin, self.short_language_margin
        if margin is None:
            short_margin = None
        return Thresholds(
            least_chars=self.min_language_chars,
            copy_letters=self.min_letters,
            sure_copy_letters=SYNTHESIS.sure_copy_letters,
            max_copied=self.max_copied_share,
            kept_letters=max(SYNTHESIS.kept_letters, self.min_letters),
            max_source_kept=self.max_copied_share,
            some_script_letters=self.min_letters,
            script_letters=max(SYNTHESIS.script_letters, self.min_letters),
            min_script_share=self.min_script_share,
            max_other_variant=self.max_other_variant,
            language_letters=max(SYNTHESIS.language_letters, self.min_letters),
            language_confidence=self.language_confidence,
            language_margin=math.inf if margin is None else margin,
            short_language_margin=math.inf if short_margin is None else short_margin,
            max_repetition=self.max_repetition,
            length_slack=self.length_slack,
            length_floor=self.length_floor,
        )


@dataclass(frozen=True, slots=True)
class Doubt:
    """An uncertain finding of a rule, for a judge to decide.

    should_reject: reject the translation if there is no judge."""

    seen: str
    should_reject: bool


Rule = Callable[[Pair, RuleConfig], "str | Doubt | None"]


@dataclass(frozen=True, slots=True)
class RuleVerdict:
    """The result of all rules; codes are in the order of RULES.

    failed, doubtful: code -> what was seen. For an empty text the other rules are skipped. A rule
    whose doubt is too weak to reject has passed, too.
    """

    passed: tuple[RuleCode, ...] = ()
    failed: dict[RuleCode, str] = field(default_factory=dict)
    doubtful: dict[RuleCode, str] = field(default_factory=dict)


def check_rules(pair: Pair, cfg: RuleConfig, has_judge: bool = False) -> RuleVerdict:
    """Apply every enabled rule to a translation.

    has_judge: an LLM judge decides about doubts.
    """
    passed: list[RuleCode] = []
    failed: dict[RuleCode, str] = {}
    doubtful: dict[RuleCode, str] = {}
    for code, rule in RULES.items():
        if code in cfg.off:
            continue
        seen = rule(pair, cfg)
        if isinstance(seen, str) or (seen and seen.should_reject and not has_judge):
            failed[code] = seen if isinstance(seen, str) else seen.seen
            if code is RuleCode.EMPTY:
                break
            continue
        if seen:
            doubtful[code] = seen.seen
        if seen is None or not seen.should_reject:
            passed.append(code)
    return RuleVerdict(tuple(passed), failed, doubtful)


def abstentions(source: str, target: str) -> list[str]:
    """Return messages about rules that are weak or inactive for this language pair."""
    messages = []
    if not scripts_of(target):
        messages.append(f"wrong_script says nothing: the script of {target} is not known")
    if not rules.tells_short(target):
        messages.append(
            f"wrong_language: no table for short texts in {target}: under "
            f"{SYNTHESIS.language_letters} letters, another language in its script passes"
        )
    if without_table := [name for name in (source, target) if not expected_numbers("12", name)]:
        messages.append(f"numbers_missing says nothing: no table for {', '.join(without_table)}")
    return messages


def _on_texts(check: Callable[[str, str], str | None]) -> Rule:
    """Return the rule of a check of source and translation that has no thresholds."""
    return lambda pair, cfg: check(pair.src, pair.mt)


def _empty(pair: Pair, cfg: RuleConfig) -> str | None:
    return None if pair.mt.strip() else "no text"


def _too_short(pair: Pair, cfg: RuleConfig) -> str | None:
    length = len(pair.mt.strip())
    return f"{length} characters" if length < cfg.min_chars else None


def _too_long(pair: Pair, cfg: RuleConfig) -> str | None:
    length = len(pair.mt.strip())
    return f"{length} characters" if length > cfg.max_chars else None


def _truncated(pair: Pair, cfg: RuleConfig) -> str | None:
    sign = checks.truncation_sign(pair.src, pair.mt)
    if sign is None or sign == "no end mark":
        return sign if cfg.require_end_mark else None
    return f"{sign} is not closed"


def _tag(pair: Pair, cfg: RuleConfig) -> str | None:
    return checks.marker(pair.src, pair.mt, cfg.allowed_tags)


def _sure_but_of_names(rule: Callable[[Pair, RuleConfig], str | Doubt | None]) -> Rule:
    """Return the rule with a doubt instead of a rejection if a name is copied."""

    def with_doubt(pair: Pair, cfg: RuleConfig) -> str | Doubt | None:
        seen = rule(pair, cfg)
        if isinstance(seen, str) and rules.is_copied_name(pair):
            return Doubt(seen, should_reject=True)
        return seen

    return with_doubt


@_sure_but_of_names
def _copied_source(pair: Pair, cfg: RuleConfig) -> str | None:
    limits = cfg.thresholds()
    if (copied_share := rules.copied(pair, limits)) is not None:
        return f"{copied_share:.2f} of it is the source's"
    source_share = rules.source_kept(pair, limits)
    return None if source_share is None else f"holds {source_share:.2f} of the source"


@_sure_but_of_names
def _wrong_script(pair: Pair, cfg: RuleConfig) -> str | None:
    share = rules.wrong_script(pair, cfg.thresholds())
    if share is None:
        return None
    return f"{share:.2f} of the letters in the script of {pair.target_lang}"


def _on_findings(check: Callable[[Pair], TextFinding | None]) -> Rule:
    """Return the rule of a check that says how sure it is."""

    def rule(pair: Pair, cfg: RuleConfig) -> str | Doubt | None:
        finding = check(pair)
        if finding is None or finding.certainty is Certainty.CERTAIN:
            return finding and finding.seen
        return Doubt(finding.seen, should_reject=finding.certainty is Certainty.LIKELY)

    return rule


def _wrong_variant(pair: Pair, cfg: RuleConfig) -> str | None:
    match = rules.wrong_variant(pair, cfg.thresholds())
    if match is None:
        return None
    return f"{match[0]:.2f} of what tells the variants apart is not {pair.target_lang}: {match[1]}"


@_sure_but_of_names
def _wrong_language(pair: Pair, cfg: RuleConfig) -> str | Doubt | None:
    limits = cfg.thresholds()
    if (match := rules.source_language(pair, limits)) is not None:
        return f"{match[0]} ({match[1]:.2f})"
    if (probability := rules.third_language(pair, limits)) is not None:
        return f"not {pair.target_lang} ({probability:.0e})"
    if (unlike := rules.unlike_target(pair, limits)) is None:
        return None
    evidence, is_certain = unlike
    seen = f"not {pair.target_lang} ({evidence})"
    return seen if is_certain else Doubt(seen, should_reject=True)


def _length_ratio(pair: Pair, cfg: RuleConfig) -> str | None:
    match = rules.length_ratio(pair, cfg.thresholds())
    if match is None:
        return None
    ratio, min_ratio, max_ratio = match
    return f"{ratio:.2f}, not in {min_ratio:.2f} to {max_ratio:.2f}"


def _repetition(pair: Pair, cfg: RuleConfig) -> str | None:
    more = rules.repetition(pair, cfg.thresholds())
    return None if more is None else f"{more:.2f} of it loops"


def _numbers_missing(pair: Pair, cfg: RuleConfig) -> str | Doubt | None:
    """Compare numbers; inactive if one of the languages has no table of numbers."""
    comparison = compare_numbers(pair.src, pair.mt, pair.source_lang, pair.target_lang)
    if comparison.swapped:
        return f"in another order: {'; '.join(comparison.swapped)}"
    if comparison.conflicts:
        return "; ".join(comparison.conflicts)

    def is_too_many(texts: Sequence[str]) -> bool:
        return len(texts) > 0 and len(texts) / len(comparison.expected) > cfg.max_missing_numbers

    if is_too_many(comparison.certain):
        return ", ".join(comparison.missing)
    likely = [*comparison.likely, *comparison.doubts]
    seen = "; ".join(filter(None, [", ".join(comparison.missing), *likely]))
    is_strong = is_too_many(comparison.missing) or bool(comparison.likely)
    return Doubt(seen, is_strong) if seen else None


def _placeholders(pair: Pair, cfg: RuleConfig) -> str | None:
    """Find missing and additional placeholders; additional tags belong to the rule `tag`.

    Messages with plural forms are skipped, because they have words in braces.
    """
    if _PLURAL.search(pair.src):
        return None
    difference = placeholder_difference(pair.src, pair.mt)
    wrong = {k: n for k, n in difference.items() if n < 0 or not k.startswith("<")}
    return ", ".join(f"{key} {count:+d}" for key, count in sorted(wrong.items())) or None


#: ICU's "{count, plural, one {item} other {items}}".
_PLURAL = re.compile(r"\{\s*\w+\s*,\s*(?:plural|select|selectordinal)\s*,")


#: Code -> rule, the most certain first. The first failure names the rejection.
RULES: dict[RuleCode, Rule] = {
    RuleCode.EMPTY: _empty,
    RuleCode.TOO_SHORT: _too_short,
    RuleCode.TOO_LONG: _too_long,
    RuleCode.ROLE_TOKEN: _on_texts(chat_marks.role_token),
    RuleCode.META_PHRASE: _on_texts(meta_text.meta_phrase),
    RuleCode.REFUSAL: _on_texts(meta_text.refusal),
    RuleCode.ADDED_NOTE: _on_texts(meta_text.added_note),
    RuleCode.ADDED_QUOTES: _on_texts(checks.added_quotes),
    RuleCode.TAG: _tag,
    RuleCode.DEBRIS: _on_findings(lambda pair: debris(pair.src, pair.mt, pair.target_lang)),
    RuleCode.COPIED_SOURCE: _copied_source,
    RuleCode.WRONG_SCRIPT: _wrong_script,
    RuleCode.THIRD_SCRIPT: _on_findings(
        lambda pair: third_script(pair.src, pair.mt, pair.source_lang, pair.target_lang)
    ),
    RuleCode.WRONG_VARIANT: _wrong_variant,
    RuleCode.WRONG_LANGUAGE: _wrong_language,
    RuleCode.REPETITION: _repetition,
    RuleCode.TRUNCATED: _truncated,
    RuleCode.LENGTH_RATIO: _length_ratio,
    RuleCode.NUMBERS_MISSING: _numbers_missing,
    RuleCode.PLACEHOLDERS: _placeholders,
    RuleCode.LOST_EMOJI: _on_findings(lambda pair: lost_emoji(pair.src, pair.mt)),
}


def as_metadata(verdict: RuleVerdict) -> dict[str, Any]:
    """Return {"passed": [code], "failed": [code]}, and for doubts "doubtful": {code: what was
    seen}."""
    doubtful = {"doubtful": dict(verdict.doubtful)} if verdict.doubtful else {}
    return {"passed": list(verdict.passed), "failed": list(verdict.failed), **doubtful}
