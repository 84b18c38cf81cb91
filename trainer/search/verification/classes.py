"""Derive the class of a row from the agreements of its answers.

Pure functions; docs/explanation/curation.md has the table.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from typing import Final, Literal, NamedTuple, get_args

from scorekit.numeric.thresholds import below
from scorekit.text.markup import normalized
from trainer.search.curation.config_sections import TruthClass

#: Two answers: yes: the judge accepts one for the other. form: it does not, but they mean the same
#: in another form (`same_but_form`). no: neither.
Agreement = Literal["no", "form", "yes"]
AGREEMENTS: Final[tuple[Agreement, ...]] = get_args(Agreement)
#: The verifier's answers: sure: enough of them are equal. unsure: it says that the pages do not
#: answer the question. differs: its answers differ.
Stance = Literal["sure", "unsure", "differs"]


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
    equal. outvoted: the class if the verifier contradicts a reference with which the generator
    agrees without knowing it.
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
    """Return the stance of the verifier. groups: sizes of the groups of equal, sure answers.
    consensus: the share of all answers that a group needs."""
    best, total = max(groups, default=0), sum(groups) + unsure
    if best and not below(best / total, consensus):
        return "sure"
    return "unsure" if unsure >= best else "differs"


_DIGITS = r"[-−]?\d+(?:,\d{3})*(?:\.\d+)?"
_NUMBER, _WORD = re.compile(_DIGITS), re.compile(r"[^\W\d_]+|[%$€£¥₩°]")
_MEASURE = re.compile(rf"[$€£¥₩]?\s*(?:{_DIGITS})\s*(?P<unit>[^\W\d_]+|[%°])?")
#: Words that scale the number before them.
_ENGLISH = ("hundred", "thousand", "million", "billion", "trillion", "k", "m", "bn", "mn")
_SCALES = frozenset((*_ENGLISH, *"십백천만억조", "백만", "천만"))


def same_but_form(a: str, b: str) -> bool:
    """Return whether two answers differ only in form.

    They differ in case, width, spacing, punctuation or thousands separators, or are the same number
    with and without its unit.
    """
    (numbers, words), (numbers_b, words_b) = _parts(a), _parts(b)
    if numbers != numbers_b or not (numbers or words):
        return False
    if "".join(words) == "".join(words_b):
        return True
    return not (words and words_b) and all(_is_measure(text) for text in (a, b))


def _is_measure(text: str) -> bool:
    """Return whether a text is a number with at most a unit that does not scale it."""
    match = _MEASURE.fullmatch(_flat(text).rstrip("."))
    return match is not None and match["unit"] not in _SCALES


def same_text(a: str, b: str) -> bool:
    """Return whether two answers are equal except for case, width and spacing."""
    return _flat(a) == _flat(b)


def _parts(text: str) -> tuple[list[Decimal], list[str]]:
    flat = _flat(text)
    numbers = [Decimal(n.replace(",", "").replace("−", "-")) for n in _NUMBER.findall(flat)]
    return numbers, _WORD.findall(_NUMBER.sub(" ", flat))


def _flat(text: str) -> str:
    return " ".join(normalized("NFKC", text).casefold().split())
