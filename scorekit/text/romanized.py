"""Recognize names that a translation spells in Latin letters: Haeundae, Kim Minsu, Hangzhou.

Korean letters say how they sound, so a name is looked for in the sounds of the source. They are
compared coarsely, because people spell their names as they like (Jung, Jeong, Chung). Chinese
characters do not: a name is a word of as many Chinese syllables as the source has characters, or
fewer.
"""

from __future__ import annotations

import re

from scorekit.languages import find_language
from scorekit.text.writing_scripts import LETTERS

_NAME = re.compile(r"\b[A-Z][A-Za-z]*+(?:[-'’][A-Za-z]++)*+")
_NOT_LETTER = re.compile(r"[-'’]")
#: Classes of the initial, vowel and final letters of Korean syllables, in the order of Unicode.
_INITIALS = "kknttnmppss-cccktph"
_VOWELS = "aeaeueueuaeeuuueiuuii"
_FINALS = "-kkknnntnkmnnnpnmppttNttktpt"
#: Spellings of family names that do not follow the sounds, and what they are in the classes.
_FAMILY = {"lee": "i", "rhee": "i", "yi": "i", "park": "pak", "pak": "pak", "lim": "im", "oh": "u"}
_FAMILY |= {"ryu": "u", "yoo": "u", "woo": "u", "ahn": "an", "yoon": "un"}
#: Latin spellings and their class, the longest first.
_SPELLINGS = (
    ("yeo yoo you eou", "u"),
    ("yae yai wae", "e"),
    ("eo eu oo ou yo yu wo", "u"),
    ("ae ai oe oi ye we", "e"),
    ("ya wa ah", "a"),
    ("ee ui wi yi", "i"),
    ("ng", "N"),
    ("ch sh", "c s"),
    ("o u", "u"),
    ("a e i h m s n p t k", "a e i h m s n p t k"),
    ("l r", "n"),
    ("b v f", "p"),
    ("d", "t"),
    ("g q c", "k"),
    ("j z", "c"),
)
_CLASSES = {
    spelling: classes.split()[min(i, len(classes.split()) - 1)]
    for spellings, classes in _SPELLINGS
    for i, spelling in enumerate(spellings.split())
}
_SPELLING = re.compile("|".join(sorted(_CLASSES, key=len, reverse=True)))
_TWICE = re.compile(r"(.)\1+")
#: Sounds that a name has at least: shorter ones stand in any source.
_FEWEST_SOUNDS = 3
#: The finals of Chinese syllables, by their initials.
_FINALS_BY_INITIAL = {
    "b": "a ai an ang ao ei en eng i ian iao ie in ing o u",
    "p": "a ai an ang ao ei en eng i ian iao ie in ing o ou u",
    "m": "a ai an ang ao e ei en eng i ian iao ie in ing iu o ou u",
    "f": "a an ang ei en eng o ou u",
    "d": "a ai an ang ao e ei eng i ian iao ie ing iu ong ou u uan ui un uo",
    "t": "a ai an ang ao e eng i ian iao ie ing ong ou u uan ui un uo",
    "n": "a ai an ang ao e ei en eng i ian iang iao ie in ing iu ong u uan uo v ve",
    "l": "a ai an ang ao e ei eng i ia ian iang iao ie in ing iu ong ou u uan un uo v ve",
    "[gkh]": "a ai an ang ao e ei en eng ong ou u ua uai uan uang ui un uo",
    "[jqx]": "i ia ian iang iao ie in ing iong iu u uan ue un",
    "[zcs]h": "a ai an ang ao e ei en eng i ong ou u ua uai uan uang ui un uo",
    "r": "an ang ao e en eng i ong ou u uan ui un uo",
    "[zcs]": "a ai an ang ao e en eng i ong ou u uan ui un uo",
    "y": "a an ang ao e i in ing ong ou u uan ue un",
    "w": "a ai an ang ei en eng o u",
    "": "a ai an ang ao e ei en er o ou",
}
_SYLLABLES = "|".join(
    f"{initial}(?:{finals.replace(' ', '|')})" for initial, finals in _FINALS_BY_INITIAL.items()
)
_PINYIN = re.compile(f"(?:{_SYLLABLES}){{1,5}}")
_LONGEST_PINYIN = 24  # letters
#: Spellings that other languages hardly have.
_TELLING_PINYIN = re.compile("zh|[xq][iu]|shi|ch[aeiou]ng|[aeo]ng[wxqzy]")


def without_romanized(text: str, src: str, source_lang: str) -> str:
    """Return the text without the words that spell a part of the source in Latin letters.

    Such a word begins with a capital letter. Sources in other languages than Korean and Chinese
    leave the text unchanged."""
    language = find_language(source_lang)
    code = language.madlad if language else ""
    if code == "ko":
        sounds = " ".join(map(_korean_sounds, [src, *src.split()]))  # a word may end in "n"
        return _NAME.sub(lambda name: " " if _is_korean(name.group(), sounds) else name[0], text)
    if code in ("zh", "yue"):
        max_letters = 6 * len(LETTERS["Han"].findall(src))
        return _NAME.sub(
            lambda name: " " if _is_chinese(name.group(), max_letters) else name[0], text
        )
    return text


def _is_korean(name: str, sounds: str) -> bool:
    plain = _NOT_LETTER.sub("", name.lower())
    if (family := _FAMILY.get(plain)) is not None:
        return family in sounds
    name_sounds = _merge("".join(_CLASSES[spelling] for spelling in _SPELLING.findall(plain)))
    return len(name_sounds) >= _FEWEST_SOUNDS and name_sounds in sounds


def _korean_sounds(text: str) -> str:
    """Return the classes of the sounds of all Korean syllables in a row."""
    parts = []
    for char in text:
        if "가" <= char <= "힣":
            index = ord(char) - 0xAC00
            initial, vowel, final = index // 588, index // 28 % 21, index % 28
            parts += [_INITIALS[initial], _VOWELS[vowel], _FINALS[final]]
    return _merge("".join(parts).replace("-", ""))


def _merge(sounds: str) -> str:
    """Return the sounds with "ng" and "n g" as one, and doubled ones as one."""
    return _TWICE.sub(r"\1", sounds.replace("Nk", "N").replace("nk", "N"))


def _is_chinese(name: str, max_letters: int) -> bool:
    plain = _NOT_LETTER.sub("", name.lower())
    if not 2 <= len(plain) <= min(_LONGEST_PINYIN, max_letters):
        return False
    return _PINYIN.fullmatch(plain) is not None


def is_surely_romanized(text: str, source_lang: str) -> bool:
    """Return True if words that `without_romanized` left out are hardly of another language."""
    language = find_language(source_lang)
    if language is None or language.madlad == "ko":
        return True
    return _TELLING_PINYIN.search(text.lower()) is not None
