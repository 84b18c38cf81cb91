"""Find characters in a translation that should not be there, or that are lost.

A finding says what was seen and how sure the check is. `debris` finds what a broken program leaves
in a text: lost characters, escapes, wrong encodings. `third_script` finds letters of a script that
a translation should not have. `lost_emoji` compares the emoji of both texts.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

from scorekit.text.markup import CODE, TAG, UNSEEN, URL, mask
from scorekit.text.writing_scripts import LETTERS, SCRIPTS, scripts_of


class Certainty(IntEnum):
    """Says how sure a check is that a translation is wrong.

    POSSIBLE: a judge should look, and without one the translation passes.
    LIKELY: without a judge it is rejected.
    CERTAIN: no judge is needed.
    """

    POSSIBLE = 1
    LIKELY = 2
    CERTAIN = 3


class TextFinding(NamedTuple):
    """Holds the text that a check saw, and its certainty."""

    seen: str
    certainty: Certainty


def surest(findings: Iterable[TextFinding]) -> TextFinding | None:
    """Return the first of the surest findings, or None if there is none."""
    return max(findings, key=lambda finding: finding.certainty, default=None)


#: The replacement character, control characters, private use, no characters, single surrogates.
_BROKEN = re.compile(
    "[\ufffd\ufffe\uffff\ufdd0-\ufdef\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f\ue000-\uf8ff"
    "\ud800-\udfff\U000f0000-\U0010ffff]"
)
#: Texts that a wrong encoding is known for: U+FFFD read as Korean or Chinese.
_KNOWN = re.compile("占쏙옙|쏙옙쏙|锟斤拷|烫烫烫")
_CP1252 = {
    bytes([code]).decode("cp1252"): code
    for code in range(0x80, 0x100)
    if code not in (0x81, 0x8D, 0x8F, 0x90, 0x9D)
} | {chr(code): code for code in range(0x80, 0xA0)}
_TAIL = "".join(re.escape(char) for char, code in _CP1252.items() if 0x80 <= code < 0xC0)
#: UTF-8 that was read as Windows-1252: é is Ã©, ’ is â€™, 안 is ì•ˆ.
_MOJIBAKE = re.compile(f"[ÃÂ][{_TAIL}]|â[€‚][{_TAIL}]|(?:[ã-í][{_TAIL}]{{2}}){{2}}")
_ENTITY = re.compile(r"&(?:amp|lt|gt|quot|apos|nbsp|#\d{1,6}|#x[0-9a-f]{1,6});", re.I)
#: A line break or tab as it is written in code, at the start or end; the escape of a character.
#: Each run of them is tried once, from its start.
_ESCAPE_AT_EDGE = re.compile(r"\A\s*(?:\\[nrt])+|(?<!\\[nrt])(?:\\[nrt])++[\"'”’」』)\s]*+\Z")
_ESCAPE = re.compile(r"\\u[0-9a-f]{4}|\\x[0-9a-f]{2}|\\[nrt](?![a-z])|\\[\"']", re.I)
_HEX_ESCAPE = re.compile(r"\\[ux]", re.I)
_NOT_TEXT = re.compile("|".join((CODE, URL)), re.S)
_TAGS = re.compile(TAG)

_JAMO = re.compile("[ㄱ-ㆎ]+")
_SYLLABLE = re.compile("[가-힣]")
#: Letters that stand for laughter and tears; a chat has them, also behind a syllable.
_LAUGHTER = frozenset("ㅋㅎㅠㅜㅡ")
_VOWELS = "ㅏㅐㅑㅒㅓㅔㅕㅖㅗㅘㅙㅚㅛㅜㅝㅞㅟㅠㅡㅢㅣ"
#: Vowel -> the sound that it ends in.
_ENDS_IN = dict(zip("ㅑㅕㅘㅙㅚㅛㅝㅞㅟㅠㅢㅒㅖ", "ㅏㅓㅏㅐㅣㅗㅓㅔㅣㅜㅣㅐㅔ", strict=True))
#: A source in which someone laughs, cries or chats.
_CHATS = re.compile(
    r"\b(?:lo+l|lmf?ao|rofl|omg|ha(?:ha)+h?|he(?:he)+|hi(?:hi)+|xd|ja(?:ja)+|www+|btw|plz|thx|bro"
    r"|sob|cry(?:ing)?|laugh(?:s|ing)?|giggl\w+|heul|wein|lach|kicher|kkk+|gonna|wanna|yo)\b"
    r"|[哈呵嘻嘿呜嗚笑哭草]|w\b|ㅋ|ㅎ|ㅠ|ㅜ|[~～♥♡]|!!|！！|\.{3}|…|[:;=]['’]?-?[()DPp]|\^\^|T_T|[xX]D"
    r"|[\U0001f300-\U0001faff\u2600-\u27bf]",
    re.I,
)
#: Invisible characters that writing needs: joiners and marks of direction.
_JOINERS = frozenset("\u200c\u200d\u200e\u200f\u061c\u00ad\ufe0e\ufe0f")
#: Scripts whose texts need no invisible characters, the soft hyphen and those of emoji aside.
_PLAIN_SCRIPTS = ({"Latin"}, {"Hangul"}, {"Han"}, {"Kana", "Han"}, {"Cyrillic"}, {"Greek"})


def debris(src: str, mt: str, target_lang: str) -> TextFinding | None:
    """Return the surest finding of a damaged text that the source does not have, or None.

    No translator writes these. What the source has, its translation may have, too.
    """
    return surest(_damages(src, mt, target_lang))


def _damages(src: str, mt: str, target_lang: str) -> Iterator[TextFinding]:
    if not mt.isascii():
        yield from _broken_characters(src, mt)
        scripts = set(scripts_of(target_lang))
        if scripts in _PLAIN_SCRIPTS:
            yield from _invisible(src, mt)
        if scripts == {"Hangul"}:
            yield from _loose_jamo(src, mt)
    if "&" in mt or "\\" in mt:
        yield from _escapes(src, mt)


def _broken_characters(src: str, mt: str) -> Iterator[TextFinding]:
    """Yield characters that no text has, and text that was read in a wrong encoding."""
    for broken in _BROKEN.finditer(mt):
        if broken.group() not in src:
            yield TextFinding(f"U+{ord(broken.group()):04X}", Certainty.CERTAIN)
            break
    for pattern in (_KNOWN, _MOJIBAKE):
        match = pattern.search(mt)
        if match and not pattern.search(src) and _decodes(match.group()):
            yield TextFinding(match.group(), Certainty.CERTAIN)


def _decodes(text: str) -> bool:
    """Return True if a text of Windows-1252 is UTF-8, or if it is none of Windows-1252."""
    if not all(char in _CP1252 for char in text):
        return True
    try:
        decoded = bytes(_CP1252[char] for char in text).decode("utf-8")
    except UnicodeDecodeError:
        return False
    return all(unicodedata.category(char)[0] in "LPSZ" for char in decoded)


def _invisible(src: str, mt: str) -> Iterator[TextFinding]:
    for match in UNSEEN.finditer(mt):
        char = match.group()
        is_of_emoji = char >= "\U000e0000"
        if char not in _JOINERS and not is_of_emoji and char not in src:
            yield TextFinding(f"U+{ord(char):04X}", Certainty.LIKELY)
            break


def _escapes(src: str, mt: str) -> Iterator[TextFinding]:
    text = _NOT_TEXT.sub(" ", mt)
    entity = _ENTITY.search(text)
    if entity and not _ENTITY.search(src):
        is_markup = _TAGS.search(src) is not None
        yield TextFinding(entity.group(), Certainty.LIKELY if is_markup else Certainty.CERTAIN)
    if "\\" in src:
        return
    if edge := _ESCAPE_AT_EDGE.search(text):
        yield TextFinding(edge.group().strip(), Certainty.CERTAIN)
    elif escape := _ESCAPE.search(text):
        is_hex = _HEX_ESCAPE.match(escape.group()) is not None
        yield TextFinding(escape.group(), Certainty.CERTAIN if is_hex else Certainty.LIKELY)


def _loose_jamo(src: str, mt: str) -> Iterator[TextFinding]:
    """Yield Korean letters that form no syllable behind or between syllables (주세요ㅏ).

    Letters with a word of their own (ㄱ자, 'ㅂ' 불규칙, ㅋㅋㅋ) are right; so is laughter behind a
    syllable in a chat, and a vowel that is drawn out (안돼ㅐㅐ).
    """
    has_chat = None
    for match in _JAMO.finditer(mt):
        letters = match.group().strip("ㆍ")
        before = mt[max(0, match.start() - 1) : match.start()]
        if not letters or letters in src:
            continue
        if set(letters) <= _LAUGHTER:
            has_chat = _CHATS.search(src) is not None if has_chat is None else has_chat
            if not has_chat:
                yield TextFinding(letters, Certainty.LIKELY)
        elif _SYLLABLE.match(before):
            vowel = _vowel_of(before)
            is_drawn_out = set(letters) in ({vowel}, {_ENDS_IN.get(vowel)})
            yield TextFinding(letters, Certainty.POSSIBLE if is_drawn_out else Certainty.CERTAIN)


def _vowel_of(syllable: str) -> str:
    return _VOWELS[(ord(syllable) - 0xAC00) // 28 % 21]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Scripts whose letters stand in texts of every language.
EVERYWHERE = ("Latin", "Greek")
#: Code points of a script that are marks in other texts: the middle dot of Korean, the long sound
#: (a dash), repeat marks (arms of a face: ヽ), the round zero (a gap to fill in).
_LETTER_MARKS = frozenset(
    "\u318d\u30fc\uff70\u30fd\u30fe\u3003\u3005\u3007\u309b\u309c\uff9e\uff9f"
)
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

    A model that knows many languages sometimes writes a word of another one: a Chinese word in a
    Korean sentence, a Russian one in English. Latin and Greek letters stand in texts of every
    language (names, units, formulas), and are not looked at.
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
        letters = [char for char in run.group() if char not in _LETTER_MARKS and char.isalpha()]
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


#: An emoji, without variation selectors, skin tones and what is joined to it. Signs that texts have
#: as bullets, arrows or marks (✔, ★, ☎, ©) are none; ❤, ☀ and a few others are.
_EMOJI = re.compile(
    "[\U0001f1e6-\U0001f1ff]{2}|[\U0001f300-\U0001f3fa\U0001f400-\U0001faff]"
    "|[\u2600-\u2604\u2614\u2615\u2639\u263a\u2614\u26a1\u26bd\u26be\u26c4\u26c5\u2705\u2728"
    "\u274c\u2753\u2757\u2763\u2764\u2b50]"
)
#: What may stand for a face in a chat: letters that laugh and cry, faces of signs.
_FACE = re.compile(
    r"[ㅋㅎㅠㅜ]|\^_?\^|[:;=]['’]?-?[()DPp3]|T_T|<3|♥|♡|\b(?:lol|lmao|ha(?:ha)+|he(?:he)+|xd)\b"
    r"|哈哈|呵呵|嘻嘻|呜呜|[wｗ]{2,}|（?笑",
    re.I,
)
_FACES = re.compile(
    "[\U0001f600-\U0001f64f\U0001f910-\U0001f92f\U0001f970-\U0001f97a\u2639\u263a\u2764]"
)


def lost_emoji(src: str, mt: str) -> TextFinding | None:
    """Return the emoji of the source that the translation does not have, or None.

    Others in their place are a likely mistake (❤ became 💔). Fewer of the same are none, and a face
    may become laughter in letters. Missing ones may be said in words, so they are only possible
    mistakes.
    """
    if src.isascii():
        return None
    src_emoji = dict.fromkeys(_EMOJI.findall(src))
    if not src_emoji:
        return None
    mt_emoji = dict.fromkeys(_EMOJI.findall(mt))
    missing = [emoji for emoji in src_emoji if emoji not in mt_emoji]
    added = [emoji for emoji in mt_emoji if emoji not in src_emoji]
    if _FACE.search(mt):
        missing = [emoji for emoji in missing if not _FACES.match(emoji)]
    if not missing:
        return None
    if added:
        return TextFinding(f"{''.join(missing)} became {''.join(added)}", Certainty.LIKELY)
    return TextFinding("".join(missing), Certainty.POSSIBLE)
