"""The rules that judge, synthesis and guards share: what a translation is told by, from which
thresholds on.

A rule gives what it measured where a translation breaks it, else None: code and wording are the
caller's. Each caller has a profile of thresholds; they stand here one under the other.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from scorekit.languages import find_language
from scorekit.numeric.thresholds import above
from scorekit.text import checks
from scorekit.text.letter_groups import has_table, log_odds
from scorekit.text.markup import mask
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
    """From where on a rule is broken; what is left out is never broken. Shares are of 1.

    least_chars: translations of fewer characters are left alone by what asks for copies, scripts
      and languages.
    copy_letters: translations of fewer are left alone; max_copied: share of the translation's
      letters that are the source's; of fewer than sure_copy_letters, what `_may_stay` is no copy.
    max_source_kept: share of the source's letters in the translation, from kept_letters on.
    some_script_letters: from so many on at least one is in the target's script;
      script_letters: from so many on at least min_script_share of them.
    max_other_variant: share of the characters that only one standard of Chinese has.
    language_letters: translations of fewer are left alone, or believed in proportion;
      language_confidence: probability of the source's language; language_margin: natural logarithm
      of how much likelier a third language is than the target's; short_language_margin: the same
      by `letter_groups`, from some_script_letters on.
    max_repetition: how much more of the translation than of the source stands in loops.
    length_slack, length_floor: as `checks.length_band` takes them.
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


#: Nine tenths themselves are too much, too.
_UNDER_NINE_TENTHS = math.nextafter(0.9, 0.0)

#: services/judge: alone on its verdict, so it lets more pass. Its README has the measured rates.
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
#: synth: the defaults of `filters.rules`; another candidate stands by where one is rejected.
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
#: trainer, guards: a fault is the measure itself, so only what shapes it stands here.
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
    """How many letters a text has, markup, code and links left out."""
    return sum(char.isalpha() for char in mask(text))


def same_language(pair: Pair) -> bool:
    """Whether source and target are variants of one language: there much may be copied."""
    if pair.source_lang.split("-")[0] == pair.target_lang.split("-")[0]:
        return True
    source, target = find_language(pair.source_lang), find_language(pair.target_lang)
    return bool(source and target and source.iso639_3 == target.iso639_3)


def copied(pair: Pair, at: Thresholds) -> float | None:
    """Share of the translation that is the source's own, if too much is."""
    count = letters(pair.mt)
    if same_language(pair) or count < at.copy_letters or _is_too_short(pair, at):
        return None
    share = checks.copied_share(pair.src, pair.mt)
    if share <= at.max_copied or (count < at.sure_copy_letters and _may_stay(pair, at)):
        return None
    return share


def _may_stay(pair: Pair, at: Thresholds) -> bool:
    """Whether a short translation whose letters are the source's may be right all the same.

    Part of the source, for some of that is names ("UniFi Protect settings"); what names are made of
    (a digit, `_`, a capital inside), and fewer than 4 letters more. Between two languages of Latin
    letters, which share words, also what differs in case or marks ("MQTT transport",
    "MQTT-Transport"), and a single word that does not read as the source's language, as
    "Administrator" does not.
    """
    if checks.copied_share(pair.mt, pair.src) <= at.max_copied:
        return True
    words = _WORD.findall(mask(pair.mt))
    if _both_latin(pair):
        if pair.mt.split() != pair.src.split():
            return True
        if len(words) == 1:
            return _reads_as_source(words[0], pair) <= _SINGLE_WORD_MARGIN
    plain = "".join(word for word in words if not _NAME.search(word))
    return _weighed(plain) < 4


def is_copied_name(pair: Pair) -> bool:
    """Return whether the translation is the source, but for case and blanks, and looks like a name.

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
#: "Integration" is within it, nine of ten words of one language alone are not.
_SINGLE_WORD_MARGIN = 1.75


def _both_latin(pair: Pair) -> bool:
    return scripts_of(pair.source_lang) == scripts_of(pair.target_lang) == ("Latin",)


def _reads_as_source(word: str, pair: Pair) -> float:
    """How much more the letters speak for the source's language than for the target's."""
    odds = [log_odds(word, language) for language in (pair.source_lang, pair.target_lang)]
    return 0.0 if odds[0] is None or odds[1] is None else odds[0] - odds[1]


def _weighed(text: str) -> int:
    """Letters; of the dense scripts each counts twice."""
    return sum(char.isalpha() for char in text) + _dense(text, ())


def _dense(text: str, own: tuple[str, ...]) -> int:
    """Letters of Han, Kana and Hangul, but for the own scripts."""
    return sum(len(LETTERS[name].findall(text)) for name in checks.DENSE if name not in own)


def _is_too_short(pair: Pair, at: Thresholds) -> bool:
    return len(pair.mt.strip()) < at.least_chars


def source_kept(pair: Pair, at: Thresholds) -> float | None:
    """Share of the source that stands in the translation, if too much does: copied, and something
    added to it."""
    if at.max_source_kept >= 1 or same_language(pair):
        return None
    if min(letters(pair.mt), letters(pair.src)) < at.kept_letters:
        return None
    share = checks.copied_share(pair.mt, pair.src)
    return share if share > at.max_source_kept else None


def wrong_script(pair: Pair, at: Thresholds) -> float | None:
    """Share of the letters in the target's scripts, the source's names aside, if too few are."""
    count = letters(pair.mt)
    if count < at.some_script_letters or _is_too_short(pair, at):
        return None
    share = checks.script_share(pair.mt, pair.target_lang, pair.src)
    if share is None or share >= at.min_script_share:
        return None
    return share if share == 0.0 or count >= at.script_letters else None


def wrong_variant(pair: Pair, at: Thresholds) -> tuple[float, str] | None:
    """`variants.other_variant` of the translation, if too many characters are the other's."""
    found = other_variant(pair.mt, pair.target_lang)
    return found if found is not None and found[0] > at.max_other_variant else None


def source_language(pair: Pair, at: Thresholds) -> tuple[str, float] | None:
    """(tag, probability) of the source's language, if the translation reads as that."""
    if same_language(pair) or letters(pair.mt) < at.language_letters:
        return None
    found = checks.language_id(pair.mt, (pair.source_lang, pair.target_lang))
    if found is None or found[0] == pair.target_lang or found[1] <= at.language_confidence:
        return None
    return found


def third_language(pair: Pair, at: Thresholds) -> float | None:
    """Probability of the target's language, if another than the source's is so much likelier."""
    if math.isinf(at.language_margin) or same_language(pair):
        return None
    bare = checks.without_names(pair.mt, pair.src)
    if sum(char.isalpha() for char in bare) < at.language_letters:
        return None
    others = checks.likely_others(pair.target_lang)
    probability = checks.language_probability(bare, pair.target_lang, others)
    if probability is None or probability >= math.exp(-at.language_margin):
        return None
    return probability


def unlike_target(pair: Pair, at: Thresholds) -> tuple[str, bool] | None:
    """Return what a translation, however short, has of another language than the target, and
    whether that is certain; None where it has nothing.

    Letters of a dense script (Han, Kana, Hangul) that is not the target's are certain. Groups of
    letters that English or German does not have are not: short true texts have them, too.
    """
    if math.isinf(at.short_language_margin) or same_language(pair) or _is_too_short(pair, at):
        return None
    bare = checks.without_names(pair.mt, pair.src)
    count = sum(char.isalpha() for char in bare)
    scripts = scripts_of(pair.target_lang)
    dense = _dense(bare, scripts)
    # Korean may have Chinese characters beside its own
    most = 0.99 if scripts == ("Hangul",) else _MOST_DENSE
    if scripts and dense > most * count:
        return f"{dense} letters of Han, Kana or Hangul", True
    if count < at.some_script_letters:
        return None
    odds = log_odds(bare, pair.target_lang)
    return None if odds is None or odds >= -at.short_language_margin else (f"{odds:.1f}", False)


#: Share of the letters, in which a name or a word that is quoted may stand.
_MOST_DENSE = 0.1


def tells_short(language: str) -> bool:
    """Whether `wrong_script` and `unlike_target` see that a short text is in another language: one
    whose script no other language with much text has, Chinese, English, German."""
    others = set(checks.likely_others(language)) - {language.split("-")[0]}
    own_script = bool(scripts_of(language)) and not others
    return own_script or scripts_of(language) == ("Han",) or has_table(language)


def repetition(pair: Pair, at: Thresholds) -> float | None:
    """How much more of the translation stands in loops than of the source, if too much does."""
    more = checks.repetition(pair.src, pair.mt)
    return more if above(more, at.max_repetition) else None


def length_ratio(pair: Pair, at: Thresholds) -> tuple[float, float, float] | None:
    """(bytes of the translation for each of the source's, least, most), if it is not between."""
    ratio = checks.length_ratio(pair.src, pair.mt)
    least, most = length_band(pair, at)
    return None if least <= ratio <= most else (ratio, least, most)


def length_band(pair: Pair, at: Thresholds) -> tuple[float, float]:
    """(least, most) length ratio that a pair may have."""
    return checks.length_band(
        pair.src,
        pair.source_lang,
        pair.target_lang,
        slack=at.length_slack,
        floor=at.length_floor,
    )
