"""Read the numbers of a text: digits and number words become atoms, adjacent atoms a number.

A language adds a `Table`: its words with their values, and what may separate them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from scorekit.text.markup import PLACEHOLDER, TAG, URL, normalized

#: n: a plain number. u: a factor within a group (hundred, 十, 백). b: a factor that ends a group
#: (million, 万, 억). f: a part ("half", "thirds"). r: "of parts", after their number (分之, 분의).
Word = tuple[str, Fraction]


class Table(NamedTuple):
    """The number words of one language. Patterns are matched against `prepared` text."""

    #: True if a number can have digits after a scale ("1억 2천만", "3亿5000万").
    mixed: bool
    #: The mark before decimals; the other one of "." and "," groups digits by three.
    decimal: str
    #: Number words, folded, and a pattern that finds them (whole, not within other words).
    words: Mapping[str, Word]
    word: re.Pattern[str]
    #: Text that may be between two atoms of one number.
    gap: re.Pattern[str]
    #: Start of a number word (from 11 on) that may have another meaning.
    unsure: re.Pattern[str]
    #: Words that imply a number ("March", "dozen"), folded.
    hints: Mapping[str, Sequence[Fraction]]
    hint: re.Pattern[str]
    #: Text after a number: tenths ("할"), the hour, a year, a decade, a century, a month, minutes
    #: or months.
    tenths: re.Pattern[str]
    clock: re.Pattern[str]
    year: re.Pattern[str]
    decade: re.Pattern[str]
    century: re.Pattern[str]
    month: re.Pattern[str]
    minutes: re.Pattern[str]
    months: re.Pattern[str]
    #: "and a half" after a counter, separated from its number.
    half: re.Pattern[str]
    #: Text after or before a number that a translator may replace with another number or with none:
    #: days, ordinals, and units that are converted.
    loose: re.Pattern[str]
    loose_before: re.Pattern[str] = re.compile(r"(?!)")
    #: Text after a day and a month that look like a decimal ("31.12.", "6.25 전쟁").
    after_date: re.Pattern[str] = re.compile(r"(?!)")


NEVER = re.compile(r"(?!)")


def listed(kind: str, first: int, words: str, step: int = 1) -> dict[str, Word]:
    """Return words, separated by "|", with values that count up from `first`."""
    names = "".join(words.split()).split("|")
    return {name: (kind, Fraction(first + step * i)) for i, name in enumerate(names)}


def valued(kind: str, words: Mapping[Any, str]) -> dict[str, Word]:
    """Return word -> its value, from value -> words separated by "|"."""
    return {
        name: (kind, Fraction(value)) for value, names in words.items() for name in names.split("|")
    }


def hints(words_by_value: Mapping[Any, str]) -> dict[str, tuple[Fraction, ...]]:
    """Return word -> its values, from value -> words separated by "|"."""
    values_by_word: dict[str, tuple[Fraction, ...]] = {}
    for value, words in words_by_value.items():
        for word in words.split("|"):
            values_by_word[word] = (*values_by_word.get(word, ()), Fraction(value))
    return values_by_word


def months(names: str) -> dict[str, tuple[Fraction, ...]]:
    """Return the names of the twelve months, separated by "|", with their numbers."""
    return {name.casefold(): (Fraction(i),) for i, name in enumerate(names.split("|"), 1)}


def one_of(words: Iterable[str], but: Collection[str] = ()) -> str:
    """Return a pattern of any of the words, longer ones first."""
    return "|".join(sorted(set(words) - set(but), key=lambda word: (-len(word), word)))


class Atom(NamedTuple):
    kind: str
    value: Fraction
    start: int
    end: int
    #: For digits: their value with the other decimal mark, and their parts as separate numbers.
    other: Fraction | None = None
    parts: tuple[Fraction, ...] = ()
    digits: bool = False


class Number(NamedTuple):
    """A number of a text: text[start:end].

    values: its readings, the likeliest first. parts: its digits as separate numbers ("3:30",
    "2019.3.1"). scale: factor of "million" and the like; 1 without. digits: whether it has any.
    plain: whether it has more than factors ("hundreds", "만").
    """

    start: int
    end: int
    values: tuple[Fraction, ...]
    parts: tuple[Fraction, ...] = ()
    scale: Fraction = Fraction(1)
    digits: bool = True
    plain: bool = True


#: No real number has more digits; `int` of a million of them would take minutes.
_MAX_DIGITS = 30
#: No real number has more atoms.
_MAX_ATOMS = 40
_WIDEST_GAP = 12
_LEFT_OUT = re.compile("|".join((URL, TAG, PLACEHOLDER)))
_VULGAR = re.compile("[¼-¾⅐-⅞]")
_BARE_POINT = re.compile(r"(?<![\w.])\.(?=\d)")
_AND_A_PART = re.compile(r"(?<=\d) {1,2}(1/2|1/4|3/4)(?!\d) ?")
_TENTHS = re.compile(r"(?<!\d)(\d) ?할 ?(\d) ?푼(?: ?(\d) ?리)?")
_DECIMALS = {"1/2": ".5", "1/4": ".25", "3/4": ".75"}
_RAISED = re.compile("[²³¹⁰-₉]")
_DIGITS = re.compile(
    r"(?<![\d.,:])\d{1,3}(?: \d{3}(?!\d))++(?:[.,]\d++)?(?![.,:]\d)|\d++(?:[.,:'’]\d++)*+"
)
_MARKS = re.compile(r"[.,:'’ ]")


def prepared(text: str) -> str:
    """Return the text for reading: NFKC, without links, tags, placeholders and raised digits.

    A mixed fraction ("2½", "2 1/2") and tenths ("3할 4푼 9리") become decimals."""
    text = _VULGAR.sub(lambda match: f" {match.group()} ", _RAISED.sub(" ", text))
    text = _LEFT_OUT.sub(" ", normalized("NFKC", text).replace("\u2044", "/"))
    text = _TENTHS.sub(r"0.\1\2\3", _BARE_POINT.sub("0.", text))
    return _AND_A_PART.sub(lambda match: _DECIMALS[match.group(1)], text)


def numbers(text: str, table: Table) -> Iterator[Number]:
    """Yield the numbers of a `prepared` text, in order."""
    run: list[Atom] = []
    for atom in _atoms(text, table):
        if run and not _goes_on(text, run, atom, table):
            yield from _numbers(run)
            run = []
        run.append(atom)
    yield from _numbers(run)


def _goes_on(text: str, run: list[Atom], atom: Atom, table: Table) -> bool:
    end = run[-1].end
    if len(run) == _MAX_ATOMS or atom.start - end > _WIDEST_GAP:
        return False
    if atom.digits and not table.mixed:
        return False
    if table.mixed and atom.kind == "n" and not atom.digits and text[end : atom.start] == " ":
        return False
    return table.gap.fullmatch(text, end, atom.start) is not None


def _atoms(text: str, table: Table) -> Iterator[Atom]:
    """Return digits and words, in order."""
    atoms = [_digit_atom(match, table.decimal) for match in _DIGITS.finditer(text)]
    for match in table.word.finditer(text):
        atoms += _word_atoms(match, table)
    return iter(sorted(atoms, key=lambda atom: atom.start))


def _word_atoms(match: re.Match[str], table: Table) -> Iterator[Atom]:
    """Yield a word of the table, or each of its characters that is one."""
    folded = match.group().casefold()
    if (word := table.words.get(folded)) is not None:
        yield Atom(*word, *match.span())
        return
    digits = [table.words[char][1] for char in folded if char in table.words]
    if len(digits) == len(folded) > 2 and max(digits) < 10:  # "二〇一九"
        value = int("".join(str(digit) for digit in digits[:_MAX_DIGITS]))
        yield Atom("n", Fraction(value), *match.span())
        return
    for index, char in enumerate(folded, match.start()):
        if (word := table.words.get(char)) is not None:
            yield Atom(*word, index, index + 1)


def _digit_atom(match: re.Match[str], decimal: str) -> Atom:
    raw = match.group()
    chunks = _MARKS.split(raw)
    parts = tuple(Fraction(int(chunk[:_MAX_DIGITS])) for chunk in chunks)
    readings = _readings(raw, chunks, decimal)
    if readings:
        value, *other_readings = readings
        other = other_readings[0] if other_readings else None
        return Atom("n", value, *match.span(), other, parts if len(parts) == 2 else (), True)
    return Atom("x", Fraction(0), *match.span(), None, parts, True)


def _readings(raw: str, chunks: list[str], decimal: str) -> list[Fraction]:
    """Return the readings of digits with marks, the likelier first; empty for several numbers."""
    marks = _MARKS.findall(raw)
    if not marks:
        return [_joined(chunks)]
    if ":" in marks:
        return []
    last, earlier_marks = marks[-1], set(marks[:-1])
    grouped = len(chunks[0]) <= 3 and all(len(chunk) == 3 for chunk in chunks[1:])
    if not earlier_marks:
        as_decimal = [_decimal(chunks)] if last in ".," else []
        as_group = [_joined(chunks)] if grouped and chunks[0] != "0" else []
        return as_decimal + as_group if last == decimal else as_group + as_decimal
    if earlier_marks == {last}:
        return [_joined(chunks)] if grouped else []
    if len(earlier_marks) == 1 and last in ".," and all(len(chunk) == 3 for chunk in chunks[1:-1]):
        return [_decimal([_text(chunks[:-1]), chunks[-1]])]
    return []


def _text(chunks: list[str]) -> str:
    return "".join(chunks[: _MAX_DIGITS // 3 + 1])


def _joined(chunks: list[str]) -> Fraction:
    return Fraction(int(_text(chunks)[:_MAX_DIGITS]))


def _decimal(chunks: list[str]) -> Fraction:
    integer, fraction = (chunk[:_MAX_DIGITS] for chunk in chunks)
    return Fraction(int(integer)) + Fraction(int(fraction), 10 ** len(fraction))


# -- atoms that touch ------------------------------------------------------------------------------


def _numbers(run: list[Atom]) -> Iterator[Number]:
    """Yield the numbers that adjacent atoms make, from left to right."""
    index = 0
    while index < len(run):
        first = run[index]
        if first.kind == "x":
            yield Number(first.start, first.end, (), first.parts)
            index += 1
            continue
        value, end = _read(run, index, second=False)
        atoms = run[index:end]
        values = [value]
        if first.other is not None:
            values.append(_read(run, index, second=True)[0])
        if any(atom.kind == "r" for atom in atoms):
            values.append(value * 100)  # "百分之三十"
        if atoms[-1].kind == "f":
            values.append(value * atoms[-1].value)  # "three quarters"
        last = atoms[-1]
        if len(atoms) > 1 and last.kind == "n" and atoms[-2].kind in "ub" and not last.digits:
            values.append(value - last.value + last.value * atoms[-2].value / 10)  # "三万五"
        yield Number(
            first.start,
            last.end,
            tuple(values),
            first.parts if len(atoms) == 1 else (),
            _scale(atoms, value),
            any(atom.digits for atom in atoms),
            any(atom.kind == "n" for atom in atoms),
        )
        index = end


def _scale(atoms: list[Atom], value: Fraction) -> Fraction:
    """Return the factor of the one plain number of these atoms; 1 for small words ("九十")."""
    if not any(atom.digits or atom.kind == "b" for atom in atoms):
        return Fraction(1)
    simple = atoms[0].kind in "nf" and all(atom.kind in "ub" for atom in atoms[1:])
    return value / atoms[0].value if simple and atoms[0].value else Fraction(len(atoms) > 1) + 1


def _read(run: list[Atom], start: int, second: bool) -> tuple[Fraction, int]:
    """Return (value, index after it) of the longest number that begins at `start`."""
    reader = _Reader(start)
    divisor: Fraction | None = None
    index = start
    while index < len(run):
        atom = run[index]
        if second and index == start and atom.other is not None:
            atom = atom._replace(value=atom.other)
        if atom.kind == "r" and divisor is None and start < index < len(run) - 1:
            divisor, reader = reader.value, _Reader(index + 1)
        elif divisor is not None and atom.kind == "b":
            break  # "3분의 1만"
        elif (next_start := reader.take(atom, index)) is not None:
            index = next_start
            break
        index += 1
    value = reader.value
    return (value / divisor if divisor else value), max(index, start + 1)


class _Reader:
    """Read one number from left to right: groups (total), factors in a group, a plain number."""

    def __init__(self, start: int) -> None:
        self.start = self.group_start = self.plain_start = start
        self.total = self.group = Fraction(0)
        self.plain: Fraction | None = None
        self.factor: Fraction | None = None  # the last one of this group
        self.scale: Fraction | None = None  # the last one that closed a group
        self.closed = False

    @property
    def value(self) -> Fraction:
        return self.total + self.group + (self.plain or 0)

    def take(self, atom: Atom, index: int) -> int | None:
        """Return None if the atom continues the number, else the index where the next one
        begins."""
        if self.closed:
            return index
        if atom.kind == "n":
            return self._number(atom, index)
        if atom.kind == "u":
            return self._factor(atom, index)
        if atom.kind == "b":
            return self._scale(atom, index)
        return self._part(atom, index) if atom.kind == "f" else index

    def _number(self, atom: Atom, index: int) -> int | None:
        if self.plain is None or (self.plain == 0 and not atom.digits):  # "一千零一"
            limit = self.factor or self.scale
            if limit is not None and atom.value >= limit:
                return index
            self.plain, self.plain_start = atom.value, index
            return None
        tens = self.plain >= 20 and self.plain < 100 and self.plain % 10 == 0
        if atom.digits or not (tens and 0 < atom.value < 10):
            return index
        self.plain += atom.value
        return None

    def _factor(self, atom: Atom, index: int) -> int | None:
        if self.factor is not None and atom.value >= self.factor:
            return self._leave_to_next("plain", index)
        self.group += (1 if self.plain is None else self.plain) * atom.value
        self.plain, self.factor = None, atom.value
        return None

    def _scale(self, atom: Atom, index: int) -> int | None:
        group = self.group + (self.plain or 0)
        if self.scale is not None and atom.value > self.scale:
            if group:
                return self._leave_to_next("group", index)
            self.total *= atom.value
        elif group or index == self.start:
            self.total += (group or 1) * atom.value
        else:
            return index
        self.group, self.plain, self.factor, self.scale = Fraction(0), None, None, atom.value
        self.group_start = index + 1
        return None

    def _part(self, atom: Atom, index: int) -> int | None:
        if self.plain is None:
            if index > self.start:
                return index
            self.plain = 1 / atom.value
        elif atom.value == 2:
            self.plain += 1 / atom.value
        else:
            self.plain /= atom.value
            self.closed = True
        return None

    def _leave_to_next(self, level: str, index: int) -> int:
        """Leave the open part of the number to the next one."""
        if level == "group":
            self.group, next_start = Fraction(0), self.group_start
        else:
            next_start = self.plain_start if self.plain is not None else index
        self.plain = None
        return next_start
