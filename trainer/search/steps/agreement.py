"""Compare answers, references and quotes as texts of words and numbers.

The classes of `verify` follow from who agrees with whom (docs/how-to/curate.md).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from typing import Final, Literal, NamedTuple, get_args

from scorekit.numeric import below
from scorekit.text.markup import normalized

#: OK: the reference is right, and the generator agrees. GT_ERROR: the reference is wrong.
#: GEN_ERROR: the generator is wrong. BOTH_WRONG: both are. UNCERTAIN: the verifier is not sure.
#: FORMAT_DIFF: all mean the same, but the judge rejects the form of the generator's answer.
TruthClass = Literal["OK", "GT_ERROR", "GEN_ERROR", "BOTH_WRONG", "UNCERTAIN", "FORMAT_DIFF"]


CLASSES: Final[tuple[TruthClass, ...]] = get_args(TruthClass)

#: Two answers: yes: the judge accepts one for the other. form: it does not, but they mean the same
#: in another form (`same_but_form`). no: neither.
Agreement = Literal["no", "form", "yes"]


AGREEMENTS: Final[tuple[Agreement, ...]] = get_args(Agreement)


#: The verifier's answers: sure: enough of them are equal. unsure: it says that the pages do not
#: answer the question. differs: its answers differ.
Stance = Literal["sure", "unsure", "differs"]

_PARTS = re.compile(r"(?:(?<!\w)[-+\N{MINUS SIGN}])?\d+(?:[.,]\d+)*|[^\W\d_]+")


_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")

#: The result for a quote. no text layer: the quote cannot be checked.
QuoteCheck = Literal["on the page", "not on the page", "no text layer"]


_WORDS: Final = 0.8  # share of a quote's words that the page has, in any order


_JOINED: Final = 8  # letters of a quote that may be written with other blanks


_OMISSION = re.compile(r"\.\.\.+|…|\[…\]")


def parts_of(text: str) -> list[str]:
    """Return the words and numbers of a text (NFKC, casefolded, without thousands commas)."""
    folded = normalized("NFKC", text).casefold().replace("\N{MINUS SIGN}", "-")
    return _PARTS.findall(_THOUSANDS.sub("", folded))


def flat(text: str) -> str:
    """Return the words and numbers of a text in order. Equal results are equal answers; whether
    different words mean the same, only a judge can decide."""
    return " ".join(parts_of(text))


class Compared(NamedTuple):
    """The agreements of verifier, generator and reference. Those with the verifier are None if it
    is not sure."""

    stance: Stance
    generator_reference: Agreement
    verifier_reference: Agreement | None = None
    generator_verifier: Agreement | None = None


def class_of(compared: Compared, outvoted: Literal["OK", "UNCERTAIN"]) -> TruthClass:
    """Return the class of a row.

    Two answers that agree in any form are equal; if two of the three pairs agree, all three are
    equal.
    outvoted: the class if the verifier contradicts a reference with which the generator agrees
    without knowing it.
    """
    if compared.stance != "sure":
        return "UNCERTAIN"
    generator = compared.generator_reference != "no"
    verifier = compared.verifier_reference not in ("no", None)
    generator_verifier_agree = compared.generator_verifier not in ("no", None)
    if generator + verifier + generator_verifier_agree >= 2:
        return "OK" if compared.generator_reference == "yes" else "FORMAT_DIFF"
    if verifier:
        return "GEN_ERROR"
    if generator_verifier_agree:
        return "GT_ERROR"
    return outvoted if generator else "BOTH_WRONG"


def most_agree(agreements: Sequence[Agreement]) -> Agreement:
    """Return the agreement of more than half of the answers; `form` if both kinds are needed."""
    counts = Counter(agreements)
    if 2 * counts["yes"] > len(agreements):
        return "yes"
    return "form" if 2 * (counts["yes"] + counts["form"]) > len(agreements) else "no"


def stance_of(groups: Sequence[int], unsure: int, consensus: float) -> Stance:
    """Return the stance of the verifier.

    groups: sizes of the groups of equal, sure answers.
    consensus: the share of all answers that a group needs."""
    best, total = max(groups, default=0), sum(groups) + unsure
    if best and not below(best / total, consensus):
        return "sure"
    return "unsure" if unsure >= best else "differs"


_DIGITS = r"[-−]?\d+(?:,\d{3})*(?:\.\d+)?"


_NUMBER, _LETTERS = re.compile(_DIGITS), re.compile(r"[^\W\d_]+|[%$€£¥₩°]")


_MEASURE = re.compile(rf"[$€£¥₩]?\s*(?:{_DIGITS})\s*(?P<unit>[^\W\d_]+|[%°])?")


#: Words that scale the number before them.
_ENGLISH = ("hundred", "thousand", "million", "billion", "trillion", "k", "m", "bn", "mn")


_SCALES = frozenset((*_ENGLISH, *"십백천만억조", "백만", "천만"))


def same_but_form(a: str, b: str) -> bool:
    """Return whether two answers differ only in form.

    They differ in case, width, spacing, punctuation or thousands separators, or are the same number
    with and without its unit.
    """
    (numbers, words), (numbers_b, words_b) = _numbers_and_words(a), _numbers_and_words(b)
    if numbers != numbers_b or not (numbers or words):
        return False
    if "".join(words) == "".join(words_b):
        return True
    return not (words and words_b) and all(_is_measure(text) for text in (a, b))


def _is_measure(text: str) -> bool:
    """Return whether a text is a number with at most a unit that does not scale it."""
    match = _MEASURE.fullmatch(_fold(text).rstrip("."))
    return match is not None and match["unit"] not in _SCALES


def same_text(a: str, b: str) -> bool:
    """Return whether two answers are equal except for case, width and spacing."""
    return _fold(a) == _fold(b)


def _numbers_and_words(text: str) -> tuple[list[Decimal], list[str]]:
    flat = _fold(text)
    numbers = [Decimal(n.replace(",", "").replace("−", "-")) for n in _NUMBER.findall(flat)]
    return numbers, _LETTERS.findall(_NUMBER.sub(" ", flat))


def _fold(text: str) -> str:
    return " ".join(normalized("NFKC", text).casefold().split())


def check_quotes(evidence: Sequence[tuple[int, str]], texts: Sequence[str]) -> list[QuoteCheck]:
    """Return the result for each quote.

    evidence: (number of the image, from 1; quote).
    texts: the text layer of each image's page."""
    return [_check_quote(quote, texts[number - 1]) for number, quote in evidence]


def _check_quote(quote: str, text: str) -> QuoteCheck:
    if not parts_of(text):
        return "no text layer"
    segments = [segment for segment in _OMISSION.split(quote) if parts_of(segment)]
    on_page = bool(segments) and all(_is_in_text(segment, text) for segment in segments)
    return "on the page" if on_page else "not on the page"


def _is_in_text(quote: str, text: str) -> bool:
    """Return whether a text has all numbers and most words of a quote, or its exact letters.

    The order of words does not matter, because a table and its text layer have different orders.
    Letters may have other blanks between them.
    """
    words, page = parts_of(quote), Counter(parts_of(text))
    numbers = [word for word in words if word[-1].isdigit()]
    missing = Counter(words) - page
    misses_number = any(missing[number] for number in numbers)
    num_other_words = len(words) - len(numbers)
    num_missing = missing.total()
    if not misses_number and num_missing <= (1 - _WORDS) * num_other_words:
        return True
    joined, all_letters = "".join(words), "".join(parts_of(text))
    start = all_letters.find(joined) if len(joined) >= _JOINED else -1
    if start < 0:
        return False
    neighbors = all_letters[start - 1 : start] + all_letters[start + len(joined) :][:1]
    return not any(letter.isdigit() for letter in neighbors)
