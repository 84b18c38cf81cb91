"""Rules that judge, synthesis and guards share: measures of a translation, and their thresholds.

A rule returns its measure if a translation breaks it, else None. The callers choose code and
wording. Each caller has a profile of thresholds; all profiles are here.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from scorekit.languages import find_language
from scorekit.numeric import above
from scorekit.text import checks
from scorekit.text.english_words import english_share
from scorekit.text.letter_groups import has_table, log_odds
from scorekit.text.markup import mask
from scorekit.text.romanized import is_surely_romanized, without_romanized
from scorekit.text.variants import other_variant
from scorekit.text.writing_scripts import LETTERS, scripts_of


@dataclass(frozen=True, slots=True)
class Pair:
    """A source with a translation, and their languages (any code of scorekit/languages.py)."""

    src: str
    mt: str
    source_lang: str
    target_lang: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """The thresholds of the rules; a rule without its threshold always passes. Shares are of 1.

    least_chars: translations with fewer characters are skipped by the rules about copies, scripts
    and languages.
    copy_letters: translations with fewer letters are skipped; max_copied: share of the
    translation's letters that are the source's; below sure_copy_letters, what `_may_stay` accepts
    is not a copy. max_source_kept: share of the source's letters in the translation, from
    kept_letters on. some_script_letters: from this count on at least one is in the target's script;
      script_letters: from this count on at least min_script_share of them.
    max_other_variant: share of the characters that only the other standard of Chinese has.
    language_letters: translations with fewer are skipped, or weighted in proportion;
      language_confidence: probability of the source's language; language_margin: natural logarithm
      of how much likelier a third language is than the target's; short_language_margin: the same by
      `letter_groups`, from some_script_letters on.
    max_repetition: how much larger the share in loops is in the translation than in the source.
    length_slack, length_floor: as for `checks.length_band`.
    """

    least_chars: int = 0
    copy_letters: int = 0
    sure_copy_letters: int = 0
    max_copied: float = 1.0
    kept_letters: int = 0
    max_source_kept: float = 1.0
    some_script_letters: int = 0
    script_letters: int = 0
    min_script_share: float = 0.0
    max_other_variant: float = 1.0
    language_letters: int = 0
    language_confidence: float = 1.0
    language_margin: float = math.inf
    short_language_margin: float = math.inf
    max_repetition: float = 1.0
    length_slack: float = math.inf
    length_floor: int = 0


#: Nine tenths are too much, too.
_UNDER_NINE_TENTHS = math.nextafter(0.9, 0.0)

#: services/judge: it decides alone, so it is more lenient. Its README has the measured rates.
JUDGE = Thresholds(
    copy_letters=20,
    max_copied=_UNDER_NINE_TENTHS,
    some_script_letters=4,
    script_letters=20,
    min_script_share=0.3,
    max_other_variant=0.2,
    language_letters=40,
    language_confidence=_UNDER_NINE_TENTHS,
    max_repetition=0.3,
    length_slack=3.0,
    length_floor=40,
)
#: synth: the defaults of `filters.rules`; a rejected candidate can be replaced by another.
SYNTHESIS = Thresholds(
    least_chars=10,
    copy_letters=4,
    sure_copy_letters=30,
    max_copied=0.85,
    kept_letters=30,
    max_source_kept=0.85,
    some_script_letters=4,
    script_letters=30,
    min_script_share=0.4,
    max_other_variant=0.2,
    language_letters=30,
    language_confidence=0.9,
    language_margin=20.0,
    short_language_margin=1.0,
    max_repetition=0.3,
    length_slack=3.0,
    length_floor=40,
)
#: trainer, guards: the penalty is the measure itself, so only its shape is set here.
GUARDS = Thresholds(
    language_letters=40,
    length_slack=3.0,
    length_floor=40,
)
#: synth, lines of a corpus before they become sources: texts about software have many names in
#: another script.
SOURCES = Thresholds(
    script_letters=40,
    min_script_share=0.2,
    max_other_variant=0.2,
)


def letters(text: str) -> int:
    """Return the number of letters of a text without markup, code and links."""
    return sum(char.isalpha() for char in mask(text))


def same_language(pair: Pair) -> bool:
    """Return True if source and target are variants of one language: much may be copied then."""
    if pair.source_lang.split("-")[0] == pair.target_lang.split("-")[0]:
        return True
    source, target = find_language(pair.source_lang), find_language(pair.target_lang)
    return bool(source and target and source.iso639_3 == target.iso639_3)


def copied(pair: Pair, thresholds: Thresholds) -> float | None:
    """Return the share of the translation copied from the source, if it is too large."""
    count = letters(pair.mt)
    if same_language(pair) or count < thresholds.copy_letters or _is_too_short(pair, thresholds):
        return None
    share = checks.copied_share(pair.src, pair.mt)
    if share <= thresholds.max_copied or (
        count < thresholds.sure_copy_letters and _may_stay(pair, thresholds)
    ):
        return None
    return share


def _may_stay(pair: Pair, thresholds: Thresholds) -> bool:
    """Return True if a short translation with the source's letters may be right.

    It may be a part of the source, because the rest may be names ("UniFi Protect settings");
    name-like words (with a digit, `_` or an inner capital) and fewer than 4 other letters. Between
    two languages in Latin letters, which share words, also text that differs in case or marks
    ("MQTT transport", "MQTT-Transport"), and a single word that does not look like the source's
    language, such as "Administrator".
    """
    if checks.copied_share(pair.mt, pair.src) <= thresholds.max_copied:
        return True
    words = _WORD.findall(mask(pair.mt))
    if _both_latin(pair):
        if pair.mt.split() != pair.src.split():
            return True
        if len(words) == 1:
            return _reads_as_source(words[0], pair) <= _SINGLE_WORD_MARGIN
    plain = "".join(word for word in words if not _NAME.search(word))
    return weighted_letters(plain) < 4


def is_copied_name(pair: Pair) -> bool:
    """Return whether the translation is the source except for case and blanks, and looks like a
    name.

    A name has a few words; each word that has letters has a capital letter or a digit."""
    words = pair.src.split()
    if "".join(words).casefold() != "".join(pair.mt.split()).casefold():
        return False
    if not 1 <= len(words) <= _MOST_WORDS_OF_A_NAME or words[-1].endswith(_NO_END_OF_A_NAME):
        return False
    return all(
        any(char.isupper() or char.isdigit() for char in word)
        for word in words
        if any(char.isalpha() for char in word)
    )


_MOST_WORDS_OF_A_NAME = 6
_NO_END_OF_A_NAME = ("?", "!", ":", "...", "…", "？", "！", "：")
_WORD = re.compile(r"\w+")
_NAME = re.compile(r"[\d_]|\w[A-Z]")
#: "Integration" is below it; nine of ten words of only one of the languages are above.
_SINGLE_WORD_MARGIN = 1.75


def _both_latin(pair: Pair) -> bool:
    return scripts_of(pair.source_lang) == scripts_of(pair.target_lang) == ("Latin",)


def _reads_as_source(word: str, pair: Pair) -> float:
    """Return how much more likely the letters are in the source's language than in the target's."""
    odds = [log_odds(word, language) for language in (pair.source_lang, pair.target_lang)]
    return 0.0 if odds[0] is None or odds[1] is None else odds[0] - odds[1]


def weighted_letters(text: str) -> int:
    """Return the number of letters; those of dense scripts count twice."""
    return sum(char.isalpha() for char in text) + _dense(text, ())


def _dense(text: str, except_scripts: tuple[str, ...]) -> int:
    """Return the number of letters in Han, Kana and Hangul, except the given scripts."""
    return sum(
        len(LETTERS[name].findall(text)) for name in checks.DENSE if name not in except_scripts
    )


def _is_too_short(pair: Pair, thresholds: Thresholds) -> bool:
    return len(pair.mt.strip()) < thresholds.least_chars


def source_kept(pair: Pair, thresholds: Thresholds) -> float | None:
    """Return the share of the source in the translation, if it is too large: a copy with an
    addition."""
    if thresholds.max_source_kept >= 1 or same_language(pair):
        return None
    if min(letters(pair.mt), letters(pair.src)) < thresholds.kept_letters:
        return None
    share = checks.copied_share(pair.mt, pair.src)
    return share if share > thresholds.max_source_kept else None


def wrong_script(pair: Pair, thresholds: Thresholds) -> float | None:
    """Return the share of letters in the target's scripts, without source names, if too small."""
    count = letters(pair.mt)
    if count < thresholds.some_script_letters or _is_too_short(pair, thresholds):
        return None
    share = checks.script_share(pair.mt, pair.target_lang, pair.src)
    if share is None or share >= thresholds.min_script_share:
        return None
    return share if share == 0.0 or count >= thresholds.script_letters else None


def wrong_variant(pair: Pair, thresholds: Thresholds) -> tuple[float, str] | None:
    """Return `variants.other_variant` if too many characters are of the other variant."""
    variant = other_variant(pair.mt, pair.target_lang)
    return variant if variant is not None and variant[0] > thresholds.max_other_variant else None


def source_language(pair: Pair, thresholds: Thresholds) -> tuple[str, float] | None:
    """Return (tag, probability) of the source's language, if the translation is in it."""
    if same_language(pair) or letters(pair.mt) < thresholds.language_letters:
        return None
    detected = checks.language_id(pair.mt, (pair.source_lang, pair.target_lang))
    if (
        detected is None
        or detected[0] == pair.target_lang
        or detected[1] <= thresholds.language_confidence
    ):
        return None
    return detected


def third_language(pair: Pair, thresholds: Thresholds) -> float | None:
    """Return the probability of the target's language, if a third language is much likelier."""
    if math.isinf(thresholds.language_margin) or same_language(pair):
        return None
    bare = checks.without_names(pair.mt, pair.src)
    if sum(char.isalpha() for char in bare) < thresholds.language_letters:
        return None
    other_languages = checks.likely_others(pair.target_lang)
    probability = checks.language_probability(bare, pair.target_lang, other_languages)
    if probability is None or probability >= math.exp(-thresholds.language_margin):
        return None
    return probability


def unlike_target(pair: Pair, thresholds: Thresholds) -> tuple[str, bool] | None:
    """Return evidence that a translation, however short, is not in the target language.

    Returns (evidence, whether it is certain), or None.

    Letters of a dense script (Han, Kana, Hangul) that is not the target's are certain. Letter
    groups that English or German lacks are not: short correct texts have them, too.
    """
    if (
        math.isinf(thresholds.short_language_margin)
        or same_language(pair)
        or _is_too_short(pair, thresholds)
    ):
        return None
    bare = checks.without_names(pair.mt, pair.src)
    count = sum(char.isalpha() for char in bare)
    scripts = scripts_of(pair.target_lang)
    dense = _dense(bare, scripts)
    # Korean may contain Chinese characters
    max_share = 0.99 if scripts == ("Hangul",) else _MOST_DENSE
    if scripts and dense > max_share * count:
        return f"{dense} letters of Han, Kana or Hangul", True
    if count < thresholds.some_script_letters:
        return None
    odds = log_odds(bare, pair.target_lang)
    if odds is None or odds >= -thresholds.short_language_margin:
        return None
    return None if _is_everyday(bare, pair, thresholds) else (f"{odds:.1f}", False)


def _is_everyday(bare: str, pair: Pair, thresholds: Thresholds) -> bool:
    """Return True if a text with unusual letter groups is English, but for names of the source in
    Latin letters: "Jeju Island", "Merry Christmas"."""
    language = find_language(pair.target_lang)
    if language is None or language.iso639_3 != "eng":
        return False
    remaining_text = without_romanized(bare, pair.src, pair.source_lang)
    if remaining_text != bare and not any(
        len(word) > 1 for word in _LETTERS.findall(remaining_text)
    ):
        return is_surely_romanized(bare, pair.source_lang)
    return english_share(remaining_text, has_names=remaining_text != bare) >= _MIN_ENGLISH


_LETTERS = re.compile(r"[^\W\d_]+")
#: Share of the letters in words that other languages seldom have.
_MIN_ENGLISH = 0.5
#: Share of the letters that a name or a quoted word may have.
_MOST_DENSE = 0.1


def tells_short(language: str) -> bool:
    """Return True if `wrong_script` and `unlike_target` detect a short text in another language.

    These are Chinese, English, German, and languages with a script of their own."""
    other_languages = set(checks.likely_others(language)) - {language.split("-")[0]}
    has_own_script = bool(scripts_of(language)) and not other_languages
    return has_own_script or scripts_of(language) == ("Han",) or has_table(language)


def repetition(pair: Pair, thresholds: Thresholds) -> float | None:
    """Return how much larger the share in loops is than in the source, if it is too much."""
    more = checks.repetition(pair.src, pair.mt)
    return more if above(more, thresholds.max_repetition) else None


def length_ratio(pair: Pair, thresholds: Thresholds) -> tuple[float, float, float] | None:
    """Return (translation bytes per source byte, min, max) if the ratio is outside the limits."""
    ratio = checks.length_ratio(pair.src, pair.mt)
    min_ratio, max_ratio = length_band(pair, thresholds)
    return None if min_ratio <= ratio <= max_ratio else (ratio, min_ratio, max_ratio)


def length_band(pair: Pair, thresholds: Thresholds) -> tuple[float, float]:
    """Return the (min, max) length ratio that a pair may have."""
    return checks.length_band(
        pair.src,
        pair.source_lang,
        pair.target_lang,
        slack=thresholds.length_slack,
        floor=thresholds.length_floor,
    )
