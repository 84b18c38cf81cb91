"""Find letters of a script that a translation should not have.

A model that knows many languages sometimes writes a word of another one: a Chinese word in a Korean
sentence, a Russian one in English. Latin and Greek letters stand in texts of every language (names,
units, formulas), and are not looked at.
"""

from __future__ import annotations

import re
from functools import lru_cache

from scorekit.text.findings import Certainty, TextFinding, surest
from scorekit.text.markup import mask
from scorekit.text.writing_scripts import LETTERS, SCRIPTS, scripts_of


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Scripts whose letters stand in texts of every language.
EVERYWHERE = ("Latin", "Greek")
#: Code points of a script that are marks in other texts: the middle dot of Korean, the long sound
#: (a dash), repeat marks (arms of a face: ヽ), the round zero (a gap to fill in).
_MARKS = frozenset("\u318d\u30fc\uff70\u30fd\u30fe\u3003\u3005\u3007\u309b\u309c\uff9e\uff9f")
#: Chinese characters that stand for countries, parties and offices in Korean headlines.
_IN_HEADLINES = frozenset("美中日英獨佛伊露北南韓臺與野靑檢警軍故前現新舊對反親脫無非")
#: Kana that Chinese shops and brands write for fun.
_KANA_IN_CHINESE = frozenset("のノ")
#: Names of languages in themselves, which menus have.
_OWN_NAMES = _words(
    "日本語 中文 简体中文 繁體中文 한국어 русский українська български српски العربية فارسی اردو "
    "עברית हिन्दी ไทย বাংলা ქართული հայերեն"
)
_OPENING = tuple("(（[【「『《〈“\"‘'„")
_BEHIND = tuple(")）]】」』》〉”\"’'“,;/:")


def third_script(src: str, mt: str, source_lang: str, target_lang: str) -> TextFinding | None:
    """Return the surest finding of letters in a script that the target language does not have.

    A word of a script that the source does not have either is certain, except in brackets or
    quotation marks, where it may be a gloss: 효(孝). Where the source has letters of the script,
    the word may stand for a reason, and is a doubt; a word that is foreign to the source's
    language, too, may be copied.

    Returns None if the target's script is not known. Markup, code and links are left out.
    """
    pattern = _pattern(scripts_of(target_lang))
    if pattern is None or pattern.search(mt) is None:
        return None
    src_scripts, src_runs = _scripts_in(src), set(pattern.findall(src))
    source_scripts = scripts_of(source_lang)
    bare = mask(mt)
    findings = []
    for run in pattern.finditer(bare):
        letters = [char for char in run.group() if char not in _MARKS and char.isalpha()]
        if not letters:
            continue
        scripts = {name for char in letters for name in _scripts_of_letter(char)}
        if not scripts & set(source_scripts) and run.group() in src_runs:
            continue
        certainty = _certainty(bare, run, letters, bool(scripts & src_scripts), target_lang)
        if certainty is not None:
            findings.append(TextFinding(f"{run.group()} ({', '.join(sorted(scripts))})", certainty))
    return surest(findings)


def _certainty(
    text: str, run: re.Match[str], letters: list[str], is_in_source: bool, target_lang: str
) -> Certainty | None:
    """Return how sure it is that a run of letters is wrong, or None if it is right."""
    is_set_off = _is_set_off(text, run)
    if run.group().casefold() in _OWN_NAMES:
        return None if is_in_source else Certainty.POSSIBLE
    if _is_gloss(text, run, letters, target_lang):
        return None if is_in_source else Certainty.POSSIBLE
    if is_in_source:
        return Certainty.POSSIBLE if is_set_off else Certainty.LIKELY
    if is_set_off:
        return Certainty.LIKELY
    if len(letters) == 1 and _may_stand_alone(text, run, letters[0], target_lang):
        return Certainty.LIKELY
    return Certainty.CERTAIN


def _is_set_off(text: str, run: re.Match[str]) -> bool:
    """Return True if a bracket or quotation mark stands before the run, and one after it."""
    before, behind = text[max(0, run.start() - 2) : run.start()], text[run.end() : run.end() + 3]
    return before.rstrip().endswith(_OPENING) and behind.lstrip(" .").startswith(_BEHIND)


def _is_gloss(text: str, run: re.Match[str], letters: list[str], target_lang: str) -> bool:
    """Return True for Chinese characters in brackets behind as many Korean syllables: 효(孝)."""
    if scripts_of(target_lang) != ("Hangul",) or not all(map(LETTERS["Han"].match, letters)):
        return False
    before = text[max(0, run.start() - len(letters) - 4) : run.start()]
    if before[-1:] not in ("(", "（", "[") or text[run.end() : run.end() + 1] not in tuple(")）]"):
        return False
    syllables = before[:-1].rstrip(" '\"’”")[-len(letters) :]
    return len(syllables) == len(letters) and all(map(LETTERS["Hangul"].match, syllables))


def _may_stand_alone(text: str, run: re.Match[str], letter: str, target_lang: str) -> bool:
    """Return True if a single letter of another script may be no word: a part of a face (ツ), or a
    character of Korean headlines (美)."""
    adjacent_chars = text[max(0, run.start() - 1) : run.start()] + text[run.end() : run.end() + 1]
    if LETTERS["Han"].match(letter):
        return letter == "一" or (
            letter in _IN_HEADLINES and scripts_of(target_lang) == ("Hangul",)
        )
    if letter in _KANA_IN_CHINESE and scripts_of(target_lang) == ("Han",):
        return True
    return not any(char.isalpha() for char in adjacent_chars)


@lru_cache(maxsize=64)
def _pattern(target_scripts: tuple[str, ...]) -> re.Pattern[str] | None:
    """Return the pattern of runs of letters in scripts that the target does not have."""
    if not target_scripts:
        return None
    other_ranges = "".join(
        points for name, points in SCRIPTS.items() if name not in (*target_scripts, *EVERYWHERE)
    )
    return re.compile(f"[{other_ranges}]+")


@lru_cache(maxsize=10_000)
def _scripts_of_letter(char: str) -> tuple[str, ...]:
    return tuple(name for name, pattern in LETTERS.items() if pattern.match(char))


def _scripts_in(text: str) -> set[str]:
    """Return the scripts of the letters of a text; code and links count, too."""
    if text.isascii():
        return {"Latin"}
    return {name for name, pattern in LETTERS.items() if pattern.search(text)}
