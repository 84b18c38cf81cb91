"""Who agrees with whom, and which class that makes of a row. Pure functions; docs/curation.md has
the table."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from typing import Final, Literal, NamedTuple, get_args

from scorekit.numeric.thresholds import below
from scorekit.text.markup import normalised

#: OK: the reference stands, and the generator finds it. GT_ERROR: the reference is wrong.
#: GEN_ERROR: the generator is. BOTH_WRONG: both are. UNCERTAIN: the verifier does not know.
#: FORMAT_DIFF: all say the same, and the judge does not take the generator's form of it.
TruthClass = Literal["OK", "GT_ERROR", "GEN_ERROR", "BOTH_WRONG", "UNCERTAIN", "FORMAT_DIFF"]
CLASSES: Final[tuple[TruthClass, ...]] = get_args(TruthClass)
#: Of two answers: yes: the judge takes one for the other. form: it does not, though they say the
#: same in another form (`same_but_form`). no: neither.
Agreement = Literal["no", "form", "yes"]
AGREEMENTS: Final[tuple[Agreement, ...]] = get_args(Agreement)
#: Of the verifier's answers: sure: enough of them are one. unsure: it says that the pages do not
#: settle it. differs: they are several.
Stance = Literal["sure", "unsure", "differs"]


class Compared(NamedTuple):
    """Verifier, generator and reference of a row. The two that speak of the verifier's answer are
    None where it is not sure."""

    stance: Stance
    generator_reference: Agreement
    verifier_reference: Agreement | None = None
    generator_verifier: Agreement | None = None


def class_of(compared: Compared, outvoted: Literal["OK", "UNCERTAIN"]) -> TruthClass:
    """The class of a row.

    Two that agree, in whichever form, say the same; where two pairs of the three do, all three do,
    whatever the judge said of the third pair. outvoted: the class where the verifier contradicts a
    reference that the generator, who does not know it, has found as well.
    """
    if compared.stance != "sure":
        return "UNCERTAIN"
    generator = compared.generator_reference != "no"
    verifier = compared.verifier_reference not in ("no", None)
    both = compared.generator_verifier not in ("no", None)
    if generator + verifier + both >= 2:
        return "OK" if compared.generator_reference == "yes" else "FORMAT_DIFF"
    if verifier:
        return "GEN_ERROR"
    if both:
        return "GT_ERROR"
    return outvoted if generator else "BOTH_WRONG"


def most_agree(found: Sequence[Agreement]) -> Agreement:
    """What more than half of several answers do; `form` where that takes both."""
    counts = Counter(found)
    if 2 * counts["yes"] > len(found):
        return "yes"
    return "form" if 2 * (counts["yes"] + counts["form"]) > len(found) else "no"


def stance_of(groups: Sequence[int], unsure: int, consensus: float) -> Stance:
    """Of the verifier's answers. groups: how many there are of each answer of which it is sure.
    consensus: the share of all that one of them needs."""
    best, total = max(groups, default=0), sum(groups) + unsure
    if best and not below(best / total, consensus):
        return "sure"
    return "unsure" if unsure >= best else "differs"


_DIGITS = r"[-−]?\d+(?:,\d{3})*(?:\.\d+)?"
_NUMBER, _WORD = re.compile(_DIGITS), re.compile(r"[^\W\d_]+|[%$€£¥₩°]")
_MEASURE = re.compile(rf"[$€£¥₩]?\s*(?:{_DIGITS})\s*(?P<unit>[^\W\d_]+|[%°])?")
#: Words that change the number before them, so that one without is another number.
_ENGLISH = ("hundred", "thousand", "million", "billion", "trillion", "k", "m", "bn", "mn")
_SCALES = frozenset((*_ENGLISH, *"십백천만억조", "백만", "천만"))


def same_but_form(a: str, b: str) -> bool:
    """Whether two answers say the same for certain, by figures and words alone: in other case,
    width, spacing, punctuation or separators of thousands; or one figure with its unit, and
    without."""
    (numbers, words), (others, more) = _parts(a), _parts(b)
    if numbers != others or not (numbers or words):
        return False
    if "".join(words) == "".join(more):
        return True
    return not (words and more) and all(_is_measure(text) for text in (a, b))


def _is_measure(text: str) -> bool:
    """One figure and at most a unit, which leaves the figure what it is."""
    found = _MEASURE.fullmatch(_flat(text).rstrip("."))
    return found is not None and found["unit"] not in _SCALES


def same_text(a: str, b: str) -> bool:
    """Whether two answers are the same letters, but for case, width and spacing."""
    return _flat(a) == _flat(b)


def _parts(text: str) -> tuple[list[Decimal], list[str]]:
    flat = _flat(text)
    numbers = [Decimal(n.replace(",", "").replace("−", "-")) for n in _NUMBER.findall(flat)]
    return numbers, _WORD.findall(_NUMBER.sub(" ", flat))


def _flat(text: str) -> str:
    return " ".join(normalised("NFKC", text).casefold().split())
