"""Find what a broken program leaves in a text: lost characters, escapes, wrong encodings.

No translator writes these. What the source has, its translation may have, too.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

from scorekit.text.findings import Certainty, TextFinding, surest
from scorekit.text.markup import CODE, TAG, UNSEEN, URL
from scorekit.text.writing_scripts import scripts_of

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
    """Return the surest finding of a damaged text that the source does not have, or None."""
    return surest(_findings(src, mt, target_lang))


def _findings(src: str, mt: str, target_lang: str) -> Iterator[TextFinding]:
    if not mt.isascii():
        yield from _damaged(src, mt)
        scripts = set(scripts_of(target_lang))
        if scripts in _PLAIN_SCRIPTS:
            yield from _invisible(src, mt)
        if scripts == {"Hangul"}:
            yield from _loose_jamo(src, mt)
    if "&" in mt or "\\" in mt:
        yield from _escapes(src, mt)


def _damaged(src: str, mt: str) -> Iterator[TextFinding]:
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
