"""Find what a translation says otherwise: units, times, dates and bounds of equal or other numbers.

A conflict is found only if each text has something that the other lacks: a translation that leaves
a time out, or adds a quantity in brackets, has none.

A bound says that a number is a least or a greatest value: "at least 19", "5명 이하", "höchstens 2".
bounds.toml has the words. A number with neither is a value like any other. A negation elsewhere in
the sentence may turn them round.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from scorekit.text.numbers.forms import NumberedText
from scorekit.text.numbers.moments import Moment, is_other_half, is_turned, unmatched_moments
from scorekit.text.numbers.read import Number
from scorekit.text.numbers.units import EXACT, NumberWithUnit, numbers_in, without_number
from scorekit.text.pattern_rows import compile_patterns

#: A text that names a time zone may state a time or a day in another one.
_ZONE = re.compile(
    r"\b(?:UTC|GMT|[CEMPK]S?[DS]?T|MESZ?|MEZ|local time|time zone|Ortszeit|Zeitzone)\b"
    r"|현지 ?시[간각]|한국 ?시[간각]|표준시|当地时间|當地時間|北京时间|时区"
)
_LUNAR = re.compile(r"음력|农历|農曆|阴历|初[一二三四五六七八九十]|lunar", re.IGNORECASE)
#: By language: the text between the numbers of "one in five", and whether the part stands first.
_SHARES = {
    "en": (re.compile(r" (?:in|out of) (?:every |each )?", re.IGNORECASE), True),
    "de": (re.compile(r"(?:e[nrms]?)? (?:von|aus) (?:je )?", re.IGNORECASE), True),
    "ko": (re.compile(r" ?[가-힣]{0,2} ?중(?:에서?)? ?(?:약 )?"), False),
    "zh": (re.compile(r"[\u4e00-\u9fff]{0,2}[中里裡](?:就)?(?:有|,|，)?"), False),
}
#: Characters between the numbers of a share, at most.
_SHARE_GAP = 12
#: How many times larger or smaller a wrong conversion may be: beyond, it is another thing.
_FARTHEST = 50
LEAST, MOST = "least", "most"
_BOUNDS_TABLE = Path(__file__).parent / "bounds.toml"
#: Characters before and after a number in which its words may stand.
_BEFORE, _AFTER = 28, 36
_SENTENCE_END = re.compile(r"[.!?。！？;]\s|[。！？；\n]")


class Share(NamedTuple):
    """A share of two numbers, "one in five".

    first: index of the first one.
    value: 1/5.
    """

    first: int
    value: Fraction
    written: str


#: What a number is, and which of its kind.
Kind = tuple[str, frozenset[str]]


@dataclass(slots=True)
class Conflicts:
    """Holds what two texts say otherwise.

    certain: sure errors.
    likely: doubts that reject without a judge.
    doubts: others.
    in_src, in_mt: indices of numbers that the other text has, in another unit or form.
    """

    certain: list[str] = field(default_factory=list)
    likely: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    in_src: set[int] = field(default_factory=set)
    in_mt: set[int] = field(default_factory=set)


def find_conflicts(src: NumberedText, mt: NumberedText) -> Conflicts:
    """Return the conflicts of a source and its translation."""
    conflicts = Conflicts()
    if src.is_table or mt.is_table:
        return conflicts
    if src.numbers or mt.numbers:
        _compare_quantities(src, mt, conflicts)
    if src.numbers and mt.numbers:
        _compare_dates(src, mt, conflicts)
        _compare_bounds(src, mt, conflicts)
        _compare_shares(src, mt, conflicts)
    _compare_frequencies(src, mt, conflicts)
    _compare_times(src, mt, conflicts)
    _compare_weekdays(src, mt, conflicts)
    return conflicts


# -- quantities ------------------------------------------------------------------------------------


def _compare_quantities(src: NumberedText, mt: NumberedText, conflicts: Conflicts) -> None:
    if not src.quantities and not mt.quantities:
        return
    open_src, open_mt = _open_quantities(src.quantities, mt.quantities)
    if open_src:
        worded_quantities = [*without_number(mt.text, mt.table.language)]
        open_src = [
            quantity for quantity in open_src if not any(map(quantity.equals, worded_quantities))
        ]
    if open_mt:
        worded_quantities = [*without_number(src.text, src.table.language)]
        open_mt = [
            quantity
            for quantity in open_mt
            if not any(worded.equals(quantity) for worded in worded_quantities)
        ]
    conflicts.in_src |= {
        *numbers_in(quantity for quantity in src.quantities if quantity not in open_src)
    }
    conflicts.in_mt |= {
        *numbers_in(quantity for quantity in mt.quantities if quantity not in open_mt)
    }
    plain_src, plain_mt = _values_without_unit(src), _values_without_unit(mt)
    for quantity in open_src:
        if not plain_mt.isdisjoint(quantity.values):
            continue
        candidates = [
            candidate
            for candidate in open_mt
            if quantity.is_like(candidate) and plain_src.isdisjoint(candidate.values)
        ]
        rivals = [rival for rival in open_src if rival is not quantity and rival.is_like(quantity)]
        for candidate in candidates:
            _add_conflict(
                quantity, candidate, len(candidates) == 1 and not rivals, src, mt, conflicts
            )


def _open_quantities(
    src: list[NumberWithUnit], mt: list[NumberWithUnit]
) -> tuple[list[NumberWithUnit], list[NumberWithUnit]]:
    """Return the quantities of each text that no quantity of the other states.

    The same number with the same unit counts before a conversion, and a conversion of one that is
    left before one of those ("5 miles (8 km)" may be 8 km alone).
    """
    left_src = [quantity for quantity in src if not any(map(quantity.repeats, mt))]
    left_mt = [quantity for quantity in mt if not any(other.repeats(quantity) for other in src)]
    open_src = [quantity for quantity in left_src if not any(map(quantity.equals, left_mt))]
    open_mt = [
        quantity for quantity in left_mt if not any(other.equals(quantity) for other in left_src)
    ]
    return (
        [
            quantity
            for quantity in open_src
            if any(map(quantity.is_like, open_mt)) or not any(map(quantity.equals, mt))
        ],
        [
            quantity
            for quantity in open_mt
            if any(map(quantity.is_like, open_src))
            or not any(other.equals(quantity) for other in src)
        ],
    )


def _values_without_unit(text: NumberedText) -> set[Fraction]:
    values = (
        number.values
        for number in text.numbers
        if not any(quantity.start <= number.start < quantity.end for quantity in text.quantities)
    )
    return set().union(*values)


def _add_conflict(
    src_quantity: NumberWithUnit,
    mt_quantity: NumberWithUnit,
    is_only: bool,
    src: NumberedText,
    mt: NumberedText,
    conflicts: Conflicts,
) -> None:
    """Add the conflict of two quantities of one kind that are not equal."""
    seen = f"{_words(src, src_quantity)} is {_words(mt, mt_quantity)}"
    sure = src_quantity.sure and mt_quantity.sure and is_only
    if src_quantity.has_unit_of(mt_quantity):
        # Numbers that are required are compared without units, too: here are the small words.
        if is_only and src.stated.isdisjoint(mt_quantity.values):
            conflicts.doubts.append(seen)
        return
    is_same_number = not set(src_quantity.values).isdisjoint(mt_quantity.values)
    measures = {unit.measure for unit in (*src_quantity.units, *mt_quantity.units)}
    if is_same_number:
        is_certain = sure and measures <= EXACT and src_quantity.values[0] != 1
        (
            conflicts.certain if is_certain else conflicts.likely if is_only else conflicts.doubts
        ).append(seen)
    elif is_only and "money" not in measures and not measures & {"share", "dose", "times"}:
        is_odd = "duration" in measures and not src.stated.isdisjoint(mt_quantity.values)
        if not is_odd and src_quantity.is_near(mt_quantity, _FARTHEST):
            is_likely = sure and measures <= EXACT and not src_quantity.is_rough(mt_quantity)
            (conflicts.likely if is_likely else conflicts.doubts).append(seen)


# -- times, dates, days ----------------------------------------------------------------------------


def _compare_times(src: NumberedText, mt: NumberedText, conflicts: Conflicts) -> None:
    if not (src.may_have_times and mt.may_have_times and src.times and mt.times):
        return
    open_src, open_mt = unmatched_moments(src.times, mt.times)
    _explain(src, mt, src.times, mt.times, open_src, open_mt, conflicts)
    if not open_src or not open_mt:
        return
    seen = f"{_words(src, open_src[0])} is {_words(mt, open_mt[0])}"
    if len(open_src) > 1 or len(open_mt) > 1 or _ZONE.search(src.text) or _ZONE.search(mt.text):
        conflicts.doubts.append(seen)
    elif is_other_half(open_src[0], open_mt[0]):
        conflicts.certain.append(seen)
    else:
        conflicts.likely.append(seen)


def _compare_dates(src: NumberedText, mt: NumberedText, conflicts: Conflicts) -> None:
    if not (src.may_have_dates and mt.may_have_dates and src.dates and mt.dates):
        return
    open_src, open_mt = unmatched_moments(src.dates, mt.dates)
    _explain(src, mt, src.dates, mt.dates, open_src, open_mt, conflicts)
    for src_date in open_src:
        for mt_date in open_mt:
            seen = f"{_words(src, src_date)} is {_words(mt, mt_date)}"
            if is_turned(src_date, mt_date):
                conflicts.certain.append(seen)
            elif len(open_src) == len(open_mt) == 1:
                is_elsewhere = any(
                    pattern.search(text.text) for text in (src, mt) for pattern in (_ZONE, _LUNAR)
                )
                (conflicts.doubts if is_elsewhere else conflicts.likely).append(seen)


def _compare_weekdays(src: NumberedText, mt: NumberedText, conflicts: Conflicts) -> None:
    if not (src.may_have_weekdays and mt.may_have_weekdays):
        return
    days_src, days_mt = src.weekdays, mt.weekdays
    if days_src and days_mt:
        open_src, open_mt = unmatched_moments(days_src, days_mt)
        if open_src and open_mt:
            conflicts.doubts.append(f"{_words(src, open_src[0])} is {_words(mt, open_mt[0])}")


def _compare_frequencies(src: NumberedText, mt: NumberedText, conflicts: Conflicts) -> None:
    if not (src.may_have_frequencies and mt.may_have_frequencies):
        return
    open_src, open_mt = unmatched_moments(src.frequencies, mt.frequencies)
    if open_src and open_mt:
        is_only = len(src.frequencies) == len(mt.frequencies) == 1
        seen = f"{_words(src, open_src[0])} is {_words(mt, open_mt[0])}"
        (conflicts.likely if is_only else conflicts.doubts).append(seen)


def _explain(
    src: NumberedText,
    mt: NumberedText,
    of_src: list[Moment],
    of_mt: list[Moment],
    open_src: list[Moment],
    open_mt: list[Moment],
    conflicts: Conflicts,
) -> None:
    """Add the numbers of the moments that both texts have."""
    without_src, without_mt = {*open_src}, {*open_mt}
    conflicts.in_src |= {
        *_numbers_of(src, (moment for moment in of_src if moment not in without_src))
    }
    conflicts.in_mt |= {*_numbers_of(mt, (moment for moment in of_mt if moment not in without_mt))}


def _numbers_of(text: NumberedText, spans: Iterable[Moment]) -> Iterator[int]:
    for span in spans:
        for index, number in enumerate(text.numbers):
            if span.start <= number.start < span.end:
                yield index


def _words(text: NumberedText, part: NumberWithUnit | Moment) -> str:
    """Return what the text says there."""
    return text.text[part.start : part.end].strip()


# -- shares ----------------------------------------------------------------------------------------


def _compare_shares(src: NumberedText, mt: NumberedText, conflicts: Conflicts) -> None:
    """Add a doubt for "one in five" that became "four in five"."""
    if len(src.numbers) < 2 or len(mt.numbers) < 2:
        return
    shares_src, shares_mt = [*_shares(src)], [*_shares(mt)]
    if len(shares_src) == len(shares_mt) == 1 and shares_src[0].value != shares_mt[0].value:
        conflicts.doubts.append(f"{shares_src[0].written} is {shares_mt[0].written}")


def _shares(text: NumberedText) -> Iterator[Share]:
    """Yield the shares that are said with two numbers."""
    pattern, is_part_first = _SHARES[text.table.language]
    for index, (first, second) in enumerate(pairwise(text.numbers)):
        if second.start - first.end > _SHARE_GAP or not (first.values and second.values):
            continue
        if not pattern.fullmatch(text.text, first.end, second.start):
            continue
        part, total = (first, second) if is_part_first else (second, first)
        if 0 < part.values[0] < total.values[0]:
            written = text.text[first.start : second.end]
            yield Share(index, part.values[0] / total.values[0], written)


# -- order -----------------------------------------------------------------------------------------


def kinds(text: NumberedText) -> dict[int, Kind]:
    """Return for the index of a number what it is: a part of a date or time, a quantity, a year.

    Two numbers of different kinds cannot change places, because each says what it is."""
    kind_by_index: dict[int, Kind] = {}
    for index, number in enumerate(text.numbers):
        if number.values and 1500 <= number.values[0] < 2100:
            kind_by_index[index] = ("year", frozenset())
    for quantity in text.quantities:
        measures = frozenset(unit.measure for unit in quantity.units)
        kind_by_index |= dict.fromkeys(numbers_in([quantity]), ("quantity", measures))
    if text.may_have_times:
        kind_by_index |= {index: ("time", frozenset()) for index in _numbers_of(text, text.times)}
    if text.may_have_dates:
        for position, date in enumerate(text.dates):
            kind = ("date", frozenset([str(position)]))
            kind_by_index |= dict.fromkeys(_numbers_of(text, [date]), kind)
    for position, share in enumerate(_shares(text)):
        kind_by_index[share.first] = kind_by_index[share.first + 1] = (
            "share",
            frozenset([str(position)]),
        )
    return kind_by_index


def cannot_be_swapped(
    first: Kind | None, second: Kind | None, mt_kinds: Sequence[Kind | None]
) -> bool:
    """Return whether two numbers of the source are what they are in the translation, too.

    mt_kinds: the kinds of the same two numbers there."""
    if first is None or second is None or None in mt_kinds:
        return False
    if first[0] == second[0] and first[0] in ("date", "share"):
        return first[1] == second[1] and mt_kinds[0] == mt_kinds[1]
    return (
        _are_alike(first, mt_kinds[0])
        and _are_alike(second, mt_kinds[1])
        and not _are_alike(first, second)
        and not _are_alike(*mt_kinds)
    )


def _are_alike(first: Kind | None, second: Kind | None) -> bool:
    if first is None or second is None or first[0] != second[0]:
        return False
    return first[0] != "quantity" or not first[1].isdisjoint(second[1])


# -- bounds ----------------------------------------------------------------------------------------


def _compare_bounds(src: NumberedText, mt: NumberedText, conflicts: Conflicts) -> None:
    """Add a doubt for a least value that became a greatest one, or the reverse."""
    for index, number in enumerate(src.numbers):
        if not number.values:
            continue
        src_bound = bound(src.text, number, src.table.language)
        if src_bound is None:
            continue
        partners = [
            partner for partner in mt.numbers if not set(partner.values).isdisjoint(number.values)
        ]
        partners = partners or _partners_by_unit(src, mt, index)
        mt_bounds = {bound(mt.text, partner, mt.table.language) for partner in partners}
        if mt_bounds == {Bound(MOST if src_bound.kind == LEAST else LEAST, src_bound.denied)}:
            conflicts.doubts.append(f"{src.written(number)} is the {src_bound.kind}, not so here")


def _partners_by_unit(src: NumberedText, mt: NumberedText, index: int) -> list[Number]:
    return [
        mt.numbers[other.last]
        for quantity in src.quantities
        if quantity.first <= index <= quantity.last
        for other in mt.quantities
        if quantity.equals(other)
    ]


class BoundWords(NamedTuple):
    """The patterns of a language."""

    before: re.Pattern[str]
    after: re.Pattern[str]
    denies: re.Pattern[str]


@lru_cache(maxsize=8)
def bound_words(language: str) -> BoundWords:
    """Return the patterns of a language ("ko"), from bounds.toml."""
    data = tomllib.loads(_BOUNDS_TABLE.read_text(encoding="utf-8"))[language]
    parts = {"BETWEEN": data["between"], "UNIT": data["unit"], "TURNS": data["turns"]}
    parts |= {f"{name.upper()}_B": rows for name, rows in data["before"].items()}
    parts |= {f"{name.upper()}_A": rows for name, rows in data["after"].items()}
    start = r"\b" if language in ("en", "de") else ""
    before = r"(?P<turned>{TURNS})?" + start + r"(?:(?P<least>{LEAST_B})|(?P<most>{MOST_B}))"
    after = r"{UNIT}(?:(?P<most>{MOST_A})|(?P<least>{LEAST_A}))"
    if language in ("en", "de"):
        after = r"{UNIT} (?:(?P<most>{MOST_A})|(?P<least>{LEAST_A}))"
    rows = {"before": before + r" ?{BETWEEN}{0,2}\Z", "after": after, "denies": data["denies"]}
    return BoundWords(**compile_patterns(rows, parts))


class Bound(NamedTuple):
    """Holds what the words beside a number say.

    kind: LEAST or MOST.
    denied: whether its sentence has a negation besides.
    """

    kind: str
    denied: bool


def bound(text: str, number: Number, language: str) -> Bound | None:
    """Return what the words beside a number of a prepared text say, or None without such."""
    words = bound_words(language)
    before = words.before.search(text, max(0, number.start - _BEFORE), number.start)
    after = words.after.match(text, number.end, number.end + _AFTER)
    if (before is None) == (after is None):
        return None
    match = before or after
    assert match is not None
    is_least = match["least"] is not None
    if before is not None and before["turned"] is not None:
        is_least = not is_least
    return Bound(LEAST if is_least else MOST, _is_denied(text, match, words))


def _is_denied(text: str, match: re.Match[str], words: BoundWords) -> bool:
    """Return whether the sentence has a negation outside of the match."""
    start, end = 0, len(text)
    for sentence_end in _SENTENCE_END.finditer(
        text, max(0, match.start() - 200), match.end() + 200
    ):
        if sentence_end.end() <= match.start():
            start = sentence_end.end()
        elif sentence_end.start() >= match.end():
            end = sentence_end.start() + 1
            break
    denial = words.denies.search(
        text, max(start, match.start() - 200), match.start()
    ) or words.denies.search(text, match.end(), min(end, match.end() + 200))
    return denial is not None
