"""Measures of a translation and evidence found in it, without verdicts.

Each function is pure and returns a number or the matching text; thresholds are the caller's.
Languages are any code, tag or name that scorekit/languages.py knows.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from copy import copy
from functools import lru_cache
from itertools import chain
from typing import Any

from scorekit.languages import Language, find_language
from scorekit.text.markup import TAG, mask, normalized
from scorekit.text.writing_scripts import LETTERS, scripts_of

# -- scripts ---------------------------------------------------------------------------------------

_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
#: UTF-8 bytes of a language for one byte of English. ko, de, es, zh: medians over translations of
#: software texts, its documentation and talks; the others are estimates.
_BYTES = {"ko": 1.2, "zh": 0.95, "ja": 1.3, "th": 2.6, "de": 1.2, "es": 1.2}
_BYTES_OF_SCRIPT = {
    "Latin": 1.1,
    "Cyrillic": 1.9,
    "Greek": 2.1,
    "Arabic": 1.6,
    "Hebrew": 1.4,
    "Han": 0.95,
}
_BYTES_OF_OTHERS = 2.6  # Indic scripts: three bytes per letter


#: Scripts in which a letter says as much as two letters of others.
DENSE = ("Han", "Kana", "Hangul")


def script_share(text: str, language: str, src: str = "") -> float | None:
    """Return the share of letters in the language's scripts.

    Markup, code, links and the source's names (words with a capital, digit or underscore that it
    has) are left out.

    Returns None if there is no letter, or if the language is unknown.
    """
    scripts = scripts_of(language)
    bare = without_names(text, src)
    letters = sum(char.isalpha() for char in bare)
    if not scripts or not letters:
        return None
    num_own = sum(
        match.group().isalpha() for name in scripts for match in LETTERS[name].finditer(bare)
    )
    return num_own / letters


def without_names(text: str, src: str) -> str:
    """Return the text without markup, code and links (`mask`), and without the source's names."""
    names = {word for word in _WORD.findall(src) if not word.islower()}
    return _WORD.sub(lambda word: " " if word.group() in names else word.group(), mask(text))


# -- language --------------------------------------------------------------------------------------

#: Ids of the identifier that differ from MADLAD's.
_IDENTIFIER_CODES = {"iw": "he", "fil": "tl"}
#: Languages that the identifier knows only in their first script -> the code of a similar language
#: in the other script.
_IN_OTHER_SCRIPT = {"sr": "hr"}


#: Likely languages of a text that is not in the expected one, by script: those with much text.
_LIKELY_OTHERS = {
    "Latin": "en de fr es pt it nl pl cs ro hu sv da fi id tr vi",
    "Cyrillic": "ru uk bg",
    "Arabic": "ar fa ur",
    "Devanagari": "hi mr ne",
    "Han": "zh ja",
}


def language_id(text: str, candidates: Iterable[str]) -> tuple[str, float] | None:
    """Return (candidate, probability) of the likeliest language, without markup, code and links.

    Returns None if no letter is left, or if the identifier knows fewer than two candidates. It is
    not reliable under some 40 characters. A text in another language also gets a candidate, and a
    mixture that of its commoner script: check `script_share`, too.
    """
    bare = mask(text)
    if not any(char.isalpha() for char in bare):
        return None
    languages = [
        (name, language) for name in candidates if (language := find_language(name)) is not None
    ]
    codes = {code: name for name, language in languages for code in identifier_codes(language)[1:]}
    codes |= {identifier_codes(language)[0]: name for name, language in languages}
    identifier = _identifier(frozenset(codes))
    if identifier is None:
        return None
    code, probability = identifier.classify(bare, datatype="uint32")
    return codes[code], float(probability)


def language_probability(text: str, language: str, other_languages: Iterable[str]) -> float | None:
    """Return the probability that the text is in `language` rather than in one of the others.

    The text is used as it is; others may be unknown.

    Returns None if it has no letter, or if the identifier does not know `language` and one more.
    """
    languages = [find_language(name) for name in (language, *other_languages)]
    if languages[0] is None or not any(char.isalpha() for char in text):
        return None
    own_codes = identifier_codes(languages[0])
    all_codes = {
        code
        for known_language in languages
        if known_language
        for code in identifier_codes(known_language)
    }
    identifier = _identifier(frozenset(all_codes))
    if identifier is None or own_codes[0] not in identifier.nb_classes:
        return None
    counts = identifier.instance2fv(text, datatype="uint32")
    probabilities = identifier.norm_probs(identifier.nb_classprobs(counts))
    return float(sum(probabilities[identifier.nb_classes.index(code)] for code in own_codes))


def likely_others(language: str) -> tuple[str, ...]:
    """Return likely languages of a text, by the scripts of the expected one, which is included."""
    codes = (_LIKELY_OTHERS.get(script, "").split() for script in scripts_of(language))
    return tuple(chain.from_iterable(codes))


def identifier_codes(language: Language) -> tuple[str, ...]:
    """Return the identifier's codes for texts of a language in the scripts that its tag allows."""
    usual, scripts = scripts_of(language.iso639_3), scripts_of(language.tag)
    code = _IDENTIFIER_CODES.get(language.madlad, language.madlad)
    other = _IN_OTHER_SCRIPT.get(language.madlad, "")
    if usual and scripts and usual[0] not in scripts:
        return (other,)
    return (code, other) if other and len(scripts) > 1 else (code,)


@lru_cache(maxsize=64)
def _identifier(codes: frozenset[str]) -> Any:
    """Return an identifier of these languages only: narrowing a shared one is not thread-safe."""
    identifier = copy(whole_identifier())
    known_codes = codes & set(identifier.nb_classes)
    if len(known_codes) < 2:
        return None
    identifier.set_languages(known_codes)
    return identifier


@lru_cache(maxsize=1)
def whole_identifier() -> Any:
    """Return py3langid's identifier of all languages; copy it before it is narrowed."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_pickled_model(MODEL_FILE, norm_probs=True)


# -- length ----------------------------------------------------------------------------------------


def length_ratio(src: str, mt: str) -> float:
    """Return UTF-8 bytes of the translation per source byte; 0 if both are empty, infinite if only
    the source is."""
    a, b = _size(src), _size(mt)
    return b / a if a else (float("inf") if b else 0.0)


def length_band(
    src: str, source_lang: str, target_lang: str, *, slack: float = 3.0, floor: int = 40
) -> tuple[float, float]:
    """Return the expected (min, max) `length_ratio` between two languages.

    It is the usual ratio of their scripts, divided and multiplied by `slack`. A source that says
    less than `floor` characters of English do widens the band in proportion: a single word of a
    menu may become a sentence.
    """
    source, target = _usual_bytes(source_lang), _usual_bytes(target_lang)
    wide = slack * max(1.0, floor * source / max(1, _size(src)))
    return target / source / wide, target / source * wide


def _size(text: str) -> int:
    return len(text.strip().encode("utf-8", "surrogatepass"))


def _usual_bytes(language: str) -> float:
    found_language = find_language(language)
    if found_language is None or found_language.madlad == "en":
        return 1.0
    script = next(iter(scripts_of(language)), "Latin")
    return _BYTES.get(found_language.madlad, _BYTES_OF_SCRIPT.get(script, _BYTES_OF_OTHERS))


# -- what is copied, and what repeats --------------------------------------------------------------


def copied_share(src: str, mt: str, *, run: int = 12) -> float:
    """Return the share of the translation's letters and digits in runs of at least `run` that the
    source has, too; without case, spacing, markup, code, links and numbers.

    A shorter translation counts completely if the source has it, else not at all. 0 if nothing is
    left to compare.
    """
    src_chars, mt_chars = _fold(src), _fold(mt)
    if not mt_chars:
        return 0.0
    run = min(run, len(mt_chars))
    grams = {src_chars[i : i + run] for i in range(len(src_chars) - run + 1)}
    covered = 0  # the end of the last counted run
    copied = 0
    for start in range(len(mt_chars) - run + 1):
        if mt_chars[start : start + run] in grams:
            copied += start + run - max(covered, start)
            covered = start + run
    return copied / len(mt_chars)


def _fold(text: str) -> str:
    return "".join(char for char in mask(text).casefold() if char.isalnum())


#: A unit of 3 to 300 characters (up to a long sentence), at least three times in a row.
_LONGEST_LOOP = 300
_LOOP = re.compile(rf"(.{{3,{_LONGEST_LOOP}}}?)\1{{2,}}", re.S)
_AFTER_A_SENTENCE = re.compile(r"(?<=[.!?。！？…]) ")
#: Characters searched for loops at once: other threads have to wait meanwhile.
_LOOP_CHUNK = 2000


def looped_share(text: str) -> float:
    """Return the share of characters in loops: units of 3 to 300 characters with a letter or digit,
    at least three times in a row. White space counts as one space, after a sentence or at the end
    as none."""
    text = _AFTER_A_SENTENCE.sub("", " ".join(text.split()) + " ")
    if not _has_loop(text):
        return 0.0
    looped = sum(
        len(match.group())
        for match in _loops(text)
        if any(char.isalnum() for char in match.group(1))
    )
    return min(1.0, looped / len(text.rstrip()))


def _loops(text: str) -> Iterator[re.Match[str]]:
    """Yield the matches of `_LOOP`. A loop that begins in a chunk shows within three more units."""
    position = 0
    while position < len(text):
        candidate = _LOOP.search(text, position, position + _LOOP_CHUNK + 3 * _LONGEST_LOOP)
        match = _LOOP.match(text, candidate.start()) if candidate else None
        if match:
            yield match
        position = match.end() if match else position + _LOOP_CHUNK


def _has_loop(text: str) -> bool:
    """Return True if `_LOOP` matches anywhere, in one pass."""
    positions: dict[str, list[int]] = {}
    for i in range(len(text) - 5):
        earlier = positions.setdefault(text[i : i + 6], [])
        for k in reversed(earlier):
            if (unit := i - k) > _LONGEST_LOOP:
                break
            if unit >= 3 and text[k : k + 2 * unit] == text[i : i + 2 * unit]:
                return True
        earlier.append(i)
    return False


def repetition(src: str, mt: str) -> float:
    """Return how much larger the translation's `looped_share` is than the source's; at least 0."""
    return max(0.0, looped_share(mt) - looped_share(src))


# -- marks that no translation has -----------------------------------------------------------------

#: Opening mark -> the marks that close it.
_QUOTES = {
    '"': '"',
    "'": "'",
    "“": "”",
    "”": "”",
    "„": "“”",
    "‘": "’",
    "«": "»",
    "»": "«",
    "「": "」",
    "『": "』",
    "＂": "＂",
    "`": "`",
    "*": "*",
}
#: If a source begins or ends so, its translation may be in quotation marks: quotes, the dash of a
#: dialogue, marks or brackets.
_SET_OFF = frozenset("\"'“”„‘’‚«»‹›「」『』《》〈〉＂`´*_-–—―<>[]()（）【】:：#")


def added_quotes(src: str, mt: str) -> str | None:
    """Return the quotation marks around the translation ("“ ”"), or those of Markdown (`x`, **x**).

    None without them, or if the source begins or ends with a mark that sets text off."""
    inner, source = mt.strip().rstrip(".。"), src.strip().rstrip(".。")
    if inner[:2] == inner[-2:] == "**":
        inner = inner[1:-1]
    if len(inner) < 3 or not source or inner[-1] not in _QUOTES.get(inner[0], ""):
        return None
    if source[0] in _SET_OFF or source[-1] in _SET_OFF:
        return None
    if any(char in inner[1:-1] for char in (inner[0], inner[-1])):  # “a” and “b”
        return None
    return f"{inner[0]} {inner[-1]}"


_BULLET = "[-–—•*▪◦➡→▶►✅✔👉⭐]\ufe0f?"
_EMOJI = "[\U0001f300-\U0001faff\u2600-\u27bf]\ufe0f?"
_IS_BULLET, _IS_EMOJI = re.compile(_BULLET), re.compile(_EMOJI)
#: The last ones: the opening of JSON, a quoted block or a list, at the start; an emoji at the end.
_MARKER = re.compile(
    rf"```|~~~|{TAG}|</?think(?:ing)?>?|\A[\[{{](?=[\s\[{{]*[\"'“„])|\A>(?=\s)"
    rf"|\A{_BULLET}(?=\s)|{_EMOJI}(?=\s*+\Z)",
    re.I,
)


def marker(src: str, mt: str, allowed: Collection[str] = ()) -> str | None:
    """Return the first marker that the source does not have: a tag, think mark, code fence, opening
    of JSON, of a quoted block or of a list, or an emoji at the end. None without one.

    allowed: names of tags ("b"), or "```", that are permitted.
    """
    excused = {_marker_name(text) for text in _MARKER.findall(src.lstrip())}
    excused |= {name.casefold() for name in allowed}
    for match in _MARKER.finditer(mt.lstrip()):
        if _marker_name(match.group()) not in excused:
            return match.group()
    return None


def _marker_name(marker_text: str) -> str:
    if _IS_BULLET.fullmatch(marker_text):  # whichever
        return "-"
    if _IS_EMOJI.fullmatch(marker_text):
        return "emoji"
    return re.sub(r"^</?|[\s/>].*$", "", marker_text.casefold(), flags=re.S)


# -- what is missing -------------------------------------------------------------------------------

_END_MARKS = frozenset(".!?。．！？…।؟۔:;：；")
_AFTER_END = " \n\t\u3000\"'”’“」』)）]】»*_`"
_PAIRS = (("(", ")"), ("[", "]"), ("{", "}"), ("「", "」"), ("『", "』"), ("“", "”"), ("《", "》"))


def truncation_sign(src: str, mt: str) -> str | None:
    """Return "no end mark" if only the source has one, an open bracket or quote, or None.

    Korean, Thai and captions often end without a mark where English has one: weak evidence alone.
    """
    translation, source = normalized("NFKC", mt), normalized("NFKC", src)
    if source.count("```") % 2 == 0 and translation.count("```") % 2:
        return "```"
    for opening, closing in _PAIRS:
        if opening == "“" and "„" in mt:  # here it is the closing mark
            continue
        if source.count(opening) <= source.count(closing) and translation.count(
            opening
        ) > translation.count(closing):
            return opening
    if _ends(src) and not _ends(mt):
        return "no end mark"
    return None


def _ends(text: str) -> bool:
    return text.rstrip(_AFTER_END)[-1:] in _END_MARKS
