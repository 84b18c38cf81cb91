"""What can be said of a translation by looking at it: measures and found texts, no verdicts.

Each function is pure and gives a number or the text that it found; thresholds are the caller's.
Languages are any code, tag or name that scorekit/languages.py knows.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from copy import copy
from functools import lru_cache
from typing import Any

from scorekit.languages import Language, find_language
from scorekit.text.markup import TAG, mask, normalised
from scorekit.text.writing_scripts import LETTERS, scripts_of

# -- scripts ---------------------------------------------------------------------------------------

_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
#: UTF-8 bytes that a language takes for what English says in one. ko, de, es, zh: medians over
#: translations of software texts, its documentation and talks; the others are set by hand.
_BYTES = {"ko": 1.2, "zh": 0.95, "ja": 1.3, "th": 2.6, "de": 1.2, "es": 1.2}
_BYTES_OF_SCRIPT = {
    "Latin": 1.1,
    "Cyrillic": 1.9,
    "Greek": 2.1,
    "Arabic": 1.6,
    "Hebrew": 1.4,
    "Han": 0.95,
}
_BYTES_OF_OTHERS = 2.6  # the Indic scripts: three bytes a letter


#: A letter of these says as much as two of others.
DENSE = ("Han", "Kana", "Hangul")


def script_share(text: str, language: str, src: str = "") -> float | None:
    """Share of the letters that stand in the language's scripts. Markup, code and links are left
    out, and the source's names: words with a capital letter, digit or underscore that it has too.

    None where there is no letter, or the language is not known.
    """
    scripts = scripts_of(language)
    bare = without_names(text, src)
    letters = sum(char.isalpha() for char in bare)
    if not scripts or not letters:
        return None
    own = sum(match.group().isalpha() for name in scripts for match in LETTERS[name].finditer(bare))
    return own / letters


def without_names(text: str, src: str) -> str:
    """The text without markup, code and links (`mask`), and without the source's names."""
    names = {word for word in _WORD.findall(src) if not word.islower()}
    return _WORD.sub(lambda word: " " if word.group() in names else word.group(), mask(text))


# -- language --------------------------------------------------------------------------------------

#: Ids of the identifier that differ from MADLAD's.
_IDENTIFIER_CODES = {"iw": "he", "fil": "tl"}
#: Languages that the identifier learned in their first script alone, and the code under which it
#: knows texts like theirs in the other.
_IN_OTHER_SCRIPT = {"sr": "hr"}


#: What a text is in that should be in another language, by script: languages with much text. The
#: identifier tells them from their relatives, too, by the margin that is asked for.
_LIKELY_OTHERS = {
    "Latin": (
        "en",
        "de",
        "fr",
        "es",
        "pt",
        "it",
        "nl",
        "pl",
        "cs",
        "ro",
        "hu",
        "sv",
        "da",
        "fi",
        "id",
        "tr",
        "vi",
    ),
    "Cyrillic": ("ru", "uk", "bg"),
    "Arabic": ("ar", "fa", "ur"),
    "Devanagari": ("hi", "mr", "ne"),
    "Han": ("zh", "ja"),
}


def language_id(text: str, candidates: Iterable[str]) -> tuple[str, float] | None:
    """(candidate, probability): the likeliest of these languages, markup, code and links left out.

    None where no letter is left, or fewer than two candidates are known to the identifier: say so
    little of a text under some 40 characters. A text in a language that is no candidate gets one
    all the same, and a mixture the one of its commoner script: look at `script_share`, too.
    """
    bare = mask(text)
    if not any(char.isalpha() for char in bare):
        return None
    known = [(name, found) for name in candidates if (found := find_language(name)) is not None]
    codes = {code: name for name, found in known for code in identifier_codes(found)[1:]}
    codes |= {identifier_codes(found)[0]: name for name, found in known}
    identifier = _identifier(frozenset(codes))
    if identifier is None:
        return None
    code, probability = identifier.classify(bare, datatype="uint32")
    return codes[code], float(probability)


def language_probability(text: str, language: str, others: Iterable[str]) -> float | None:
    """Probability that the text is in `language` rather than in one of the others, which need not
    be known; the text as it is.

    None where it has no letter, or the identifier does not know `language` and one more.
    """
    known = [find_language(name) for name in (language, *others)]
    if known[0] is None or not any(char.isalpha() for char in text):
        return None
    own = identifier_codes(known[0])
    every = {code for found in known if found for code in identifier_codes(found)}
    identifier = _identifier(frozenset(every))
    if identifier is None or own[0] not in identifier.nb_classes:
        return None
    counts = identifier.instance2fv(text, datatype="uint32")
    probabilities = identifier.norm_probs(identifier.nb_classprobs(counts))
    return float(sum(probabilities[identifier.nb_classes.index(code)] for code in own))


def likely_others(language: str) -> tuple[str, ...]:
    """What a text that should be in a language is likely to be in, if it is not: of its scripts,
    those with much text; the language itself may be among them."""
    return tuple(code for script in scripts_of(language) for code in _LIKELY_OTHERS.get(script, ()))


def identifier_codes(language: Language) -> tuple[str, ...]:
    """The identifier's codes for texts of a language in the scripts that its tag allows."""
    usual, scripts = scripts_of(language.iso639_3), scripts_of(language.tag)
    code = _IDENTIFIER_CODES.get(language.madlad, language.madlad)
    other = _IN_OTHER_SCRIPT.get(language.madlad, "")
    if usual and scripts and usual[0] not in scripts:
        return (other,)
    return (code, other) if other and len(scripts) > 1 else (code,)


@lru_cache(maxsize=64)
def _identifier(codes: frozenset[str]) -> Any:
    """One for each set: narrowing a shared one would not be safe in threads."""
    identifier = copy(whole_identifier())
    known = codes & set(identifier.nb_classes)
    if len(known) < 2:
        return None
    identifier.set_languages(known)
    return identifier


@lru_cache(maxsize=1)
def whole_identifier() -> Any:
    """py3langid's, of all its languages: shared, so to be copied before it is narrowed."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_pickled_model(MODEL_FILE, norm_probs=True)


# -- length ----------------------------------------------------------------------------------------


def length_ratio(src: str, mt: str) -> float:
    """UTF-8 bytes of the translation for each of the source's; 0 for two empty texts, infinite for
    an empty source alone."""
    a, b = _size(src), _size(mt)
    return b / a if a else (float("inf") if b else 0.0)


def length_band(
    src: str, source_lang: str, target_lang: str, *, slack: float = 3.0, floor: int = 40
) -> tuple[float, float]:
    """(least, most) `length_ratio` to be expected between two languages.

    The ratio that their scripts make usual, divided and multiplied by `slack`. A source that says
    less than `floor` characters of English do widens the band by as much as it falls short: a
    menu's single word may well become a sentence.
    """
    source, target = _usual_bytes(source_lang), _usual_bytes(target_lang)
    wide = slack * max(1.0, floor * source / max(1, _size(src)))
    return target / source / wide, target / source * wide


def _size(text: str) -> int:
    return len(text.strip().encode("utf-8", "surrogatepass"))


def _usual_bytes(language: str) -> float:
    known = find_language(language)
    if known is None or known.madlad == "en":
        return 1.0
    script = next(iter(scripts_of(language)), "Latin")
    return _BYTES.get(known.madlad, _BYTES_OF_SCRIPT.get(script, _BYTES_OF_OTHERS))


# -- what is copied, and what repeats --------------------------------------------------------------


def copied_share(src: str, mt: str, *, run: int = 12) -> float:
    """Share of the translation's letters and digits in runs of `run` or more that the source has
    too, case and spacing aside, markup, code, links and numbers left out.

    A shorter translation counts whole where the source has it, else not at all. 0 where nothing is
    left to compare.
    """
    theirs, ours = _folded(src), _folded(mt)
    if not ours:
        return 0.0
    run = min(run, len(ours))
    grams = {theirs[i : i + run] for i in range(len(theirs) - run + 1)}
    covered = 0  # up to which character `ours` is counted
    copied = 0
    for start in range(len(ours) - run + 1):
        if ours[start : start + run] in grams:
            copied += start + run - max(covered, start)
            covered = start + run
    return copied / len(ours)


def _folded(text: str) -> str:
    return "".join(char for char in mask(text).casefold() if char.isalnum())


#: Something of 3 to 300 characters, three times or more in a row: up to a long sentence.
_LONGEST_LOOP = 300
_LOOP = re.compile(rf"(.{{3,{_LONGEST_LOOP}}}?)\1{{2,}}", re.S)
_AFTER_A_SENTENCE = re.compile(r"(?<=[.!?。！？…]) ")
#: Characters in which loops are looked for at once: other threads have to wait meanwhile.
_LOOP_PIECE = 2000


def looped_share(text: str) -> float:
    """Share of the characters that stand in loops: something of 3 to 300 characters with a letter
    or digit in it, three times or more in a row. White space counts as one space, and as none
    behind a sentence; the end has it, too, like what stands before it."""
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
    """What `_LOOP.finditer` finds. One that begins in a piece shows within three units more."""
    position = 0
    while position < len(text):
        found = _LOOP.search(text, position, position + _LOOP_PIECE + 3 * _LONGEST_LOOP)
        whole = _LOOP.match(text, found.start()) if found else None
        if whole:
            yield whole
        position = whole.end() if whole else position + _LOOP_PIECE


def _has_loop(text: str) -> bool:
    """Whether `_LOOP` finds anything, told in one pass."""
    places: dict[str, list[int]] = {}
    for i in range(len(text) - 5):
        before = places.setdefault(text[i : i + 6], [])
        for k in reversed(before):
            if (unit := i - k) > _LONGEST_LOOP:
                break
            if unit >= 3 and text[k : k + 2 * unit] == text[i : i + 2 * unit]:
                return True
        before.append(i)
    return False


def repetition(src: str, mt: str) -> float:
    """How much larger the `looped_share` of the translation is than the source's; at least 0."""
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
#: Where a source begins or ends so, its translation may stand in quotation marks: quotes, the dash
#: of a dialogue, what is set off by marks or brackets.
_SET_OFF = frozenset("\"'“”„‘’‚«»‹›「」『』《》〈〉＂`´*_-–—―<>[]()（）【】:：#")


def added_quotes(src: str, mt: str) -> str | None:
    """The quotation marks around the whole translation, such as "“ ”", or those of Markdown (`x`,
    **x**), where the source neither begins nor ends with a mark that sets text off; None without
    them."""
    inner, own = mt.strip().rstrip(".。"), src.strip().rstrip(".。")
    if inner[:2] == inner[-2:] == "**":
        inner = inner[1:-1]
    if len(inner) < 3 or not own or inner[-1] not in _QUOTES.get(inner[0], ""):
        return None
    if own[0] in _SET_OFF or own[-1] in _SET_OFF:
        return None
    if any(char in inner[1:-1] for char in (inner[0], inner[-1])):  # “a” and “b”
        return None
    return f"{inner[0]} {inner[-1]}"


_BULLET = "[-–—•*▪◦➡→▶►✅✔👉⭐]\ufe0f?"
_EMOJI = "[\U0001f300-\U0001faff\u2600-\u27bf]\ufe0f?"
_IS_BULLET, _IS_EMOJI = re.compile(_BULLET), re.compile(_EMOJI)
#: Last: the opening of JSON, a quoted block or a list, at the very start; an emoji at the end.
_MARKER = re.compile(
    rf"```|~~~|{TAG}|</?think(?:ing)?>?|\A[\[{{](?=[\s\[{{]*[\"'“„])|\A>(?=\s)"
    rf"|\A{_BULLET}(?=\s)|{_EMOJI}(?=\s*+\Z)",
    re.I,
)


def marker(src: str, mt: str, allowed: Collection[str] = ()) -> str | None:
    """The first tag, think mark, code fence, opening of JSON, of a quoted block or of a list, or
    emoji at the end, that the source does not have; None without one.

    allowed: names of tags ("b"), or "```", that may stand there all the same.
    """
    excused = {_marker_name(found) for found in _MARKER.findall(src.lstrip())}
    excused |= {name.casefold() for name in allowed}
    for match in _MARKER.finditer(mt.lstrip()):
        if _marker_name(match.group()) not in excused:
            return match.group()
    return None


def _marker_name(found: str) -> str:
    if _IS_BULLET.fullmatch(found):  # whichever
        return "-"
    if _IS_EMOJI.fullmatch(found):
        return "emoji"
    return re.sub(r"^</?|[\s/>].*$", "", found.casefold(), flags=re.S)


# -- what is missing -------------------------------------------------------------------------------

_END_MARKS = frozenset(".!?。．！？…।؟۔:;：；")
_AFTER_END = " \n\t\u3000\"'”’“」』)）]】»*_`"
_PAIRS = (("(", ")"), ("[", "]"), ("{", "}"), ("「", "」"), ("『", "』"), ("“", "”"), ("《", "》"))


def truncation_sign(src: str, mt: str) -> str | None:
    """Why the translation looks cut off: "no end mark" where the source has one, or the bracket or
    quote that it opens and does not close, where the source closes all of its own. None else.

    Korean, Thai and captions often end without a mark where English has one: no proof by itself.
    """
    folded, own = normalised("NFKC", mt), normalised("NFKC", src)
    if own.count("```") % 2 == 0 and folded.count("```") % 2:
        return "```"
    for opening, closing in _PAIRS:
        if opening == "“" and "„" in mt:  # there it closes
            continue
        if own.count(opening) <= own.count(closing) and folded.count(opening) > folded.count(
            closing
        ):
            return opening
    if _ends(src) and not _ends(mt):
        return "no end mark"
    return None


def _ends(text: str) -> bool:
    return text.rstrip(_AFTER_END)[-1:] in _END_MARKS
