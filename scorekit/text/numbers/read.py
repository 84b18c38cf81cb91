"""Read the numbers of a text: digits and number words become atoms, adjacent atoms a number."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import takewhile
from typing import NamedTuple

from scorekit.text.markup import PLACEHOLDER, TAG, URL, normalized
from scorekit.text.numbers.table import Table


class Atom(NamedTuple):
    """Digits or a word.

    kind: as in a table; "x" for digits that are several numbers.

    other: for digits, their value with the other decimal mark.
    parts: their parts as separate numbers.
    """

    kind: str
    value: Fraction
    start: int
    end: int
    other: Fraction | None = None
    parts: tuple[Fraction, ...] = ()
    digits: bool = False


class Number(NamedTuple):
    """A number of a text: text[start:end].

    values: its readings, the likeliest first.
    parts: its digits as separate numbers ("3:30", "2019.3.1").
    scale: factor of "million" and the like; 1 without.
    digits: whether it has any.
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


def prepare(text: str) -> str:
    """Return the text for reading: NFKC, without links, tags, placeholders and raised digits.

    A mixed fraction ("2½", "2 1/2") and tenths ("3할 4푼 9리") become decimals."""
    if not text.isascii():
        text = text.replace("m²", "m2").replace("m³", "m3")  # units
        text = _VULGAR.sub(lambda match: f" {match.group()} ", _RAISED.sub(" ", text))
        text = normalized("NFKC", text).replace("\u2044", "/")
    text = _LEFT_OUT.sub(" ", text)
    if "." in text:
        text = _BARE_POINT.sub("0.", text)
    if "할" in text:
        text = _TENTHS.sub(r"0.\1\2\3", text)
    if "/" in text:
        text = _AND_A_PART.sub(lambda match: _DECIMALS[match.group(1)], text)
    return text


def numbers(text: str, table: Table) -> Iterator[Number]:
    """Yield the numbers of a prepared text, in order."""
    run: list[Atom] = []
    for atom in _atoms(text, table):
        if run and not _goes_on(text, run, atom, table):
            yield from _numbers(run)
            run = []
        run.append(atom)
    yield from _numbers(run)


def _goes_on(text: str, run: list[Atom], atom: Atom, table: Table) -> bool:
    """Return whether the atom may belong to the number of the run."""
    end = run[-1].end
    if len(run) == _MAX_ATOMS or atom.start - end > _WIDEST_GAP:
        return False
    if atom.digits and not table.mixed:
        return False
    if table.mixed and atom.kind == "n" and not atom.digits and text[end : atom.start] == " ":
        return False
    return table.patterns["gap"].fullmatch(text, end, atom.start) is not None


# -- atoms -----------------------------------------------------------------------------------------


def _atoms(text: str, table: Table) -> list[Atom]:
    """Return digits and words, in order."""
    atoms = [_digit_atom(match, table.decimal) for match in _DIGITS.finditer(text)]
    for match in table.patterns["word"].finditer(text):
        atoms += _word_atoms(match, table)
    return sorted(atoms, key=lambda atom: atom.start)


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
    value, other = [*_readings(raw, chunks, decimal), None, None][:2]
    if value is None:
        return Atom("x", Fraction(0), *match.span(), None, parts, True)
    return Atom("n", value, *match.span(), other, parts if len(parts) == 2 else (), True)


def _readings(raw: str, chunks: list[str], decimal: str) -> list[Fraction]:
    """Return the readings of digits with marks, the likelier first; empty for several numbers."""
    marks = _MARKS.findall(raw)
    if not marks:
        return [_join(chunks)]
    last, earlier_marks = marks[-1], set(marks[:-1])
    are_groups = all(len(chunk) == 3 for chunk in chunks[1:-1])
    if ":" in marks or not are_groups or len(earlier_marks) > 1:
        return []
    if earlier_marks and earlier_marks != {last}:
        return [_decimal(["".join(chunks[:-1]), chunks[-1]])] if last in ".," else []
    is_grouped = len(chunks[0]) <= 3 == len(chunks[-1])
    as_group = [_join(chunks)] if is_grouped and (earlier_marks or chunks[0] != "0") else []
    as_decimal = [_decimal(chunks)] if last in ".," and not earlier_marks else []
    return as_decimal + as_group if last == decimal else as_group + as_decimal


def _join(chunks: list[str]) -> Fraction:
    return Fraction(int("".join(chunks[:_MAX_DIGITS])[:_MAX_DIGITS]))


def _decimal(chunks: list[str]) -> Fraction:
    integer, fraction = (chunk[:_MAX_DIGITS] for chunk in chunks)
    return Fraction(int(integer)) + Fraction(int(fraction), 10 ** len(fraction))


# -- atoms that touch ------------------------------------------------------------------------------


def _numbers(run: list[Atom]) -> Iterator[Number]:
    """Yield the numbers that adjacent atoms make, from left to right."""
    while run:
        first = run[0]
        if first.kind == "x":
            yield Number(first.start, first.end, (), first.parts)
            run = run[1:]
            continue
        value, size = _read(run)
        atoms, run = run[:size], run[size:]
        values = [value]
        if first.other is not None:
            values.append(_read([first._replace(value=first.other), *atoms[1:]])[0])
        if any(atom.kind == "r" for atom in atoms):
            values.append(value * 100)  # "百分之三十"
        last = atoms[-1]
        if last.kind == "f":
            values.append(value * last.value)  # "three quarters"
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


def _scale(atoms: list[Atom], value: Fraction) -> Fraction:
    """Return the factor of the one plain number of these atoms; 1 for small words ("九十")."""
    if not any(atom.digits or atom.kind == "b" for atom in atoms):
        return Fraction(1)
    simple = atoms[0].kind in "nf" and all(atom.kind in "ub" for atom in atoms[1:])
    return value / atoms[0].value if simple and atoms[0].value else Fraction(len(atoms) > 1) + 1


def _read(atoms: Sequence[Atom]) -> tuple[Fraction, int]:
    """Return the longest number at the start of the atoms, and how many of them it has."""
    number = _Sum()
    for index, atom in enumerate(atoms):
        if atom.kind == "r" and 0 < index < len(atoms) - 1:
            counted = list(takewhile(lambda atom: atom.kind != "b", atoms[index + 1 :]))
            if not counted or not number.value:
                return number.value, index
            value, size = _read(counted)
            return value / number.value, index + 1 + size
        if not number.add(atom, index):
            return number.value, max(1, index - number.left)
    return number.value, len(atoms)


@dataclass
class _Sum:
    """A number that is read from left to right.

    total: closed groups.
    group: factors in the open group.
    plain: the number after them.
    factor, scale: the last factor of this group, and the last one that closed a group.
    left: how many atoms at the end belong to the next number.
    """

    total: Fraction = Fraction(0)
    group: Fraction = Fraction(0)
    plain: Fraction | None = None
    factor: Fraction | None = None
    scale: Fraction | None = None
    is_part: bool = False
    left: int = 0
    group_start: int = 0
    plain_start: int = 0

    @property
    def value(self) -> Fraction:
        return self.total + self.group + (self.plain or 0)

    def add(self, atom: Atom, index: int) -> bool:
        """Add an atom. Return False if the number ends before it."""
        add = {"n": self._number, "u": self._factor, "b": self._scale, "f": self._part}
        return atom.kind in add and not self.is_part and add[atom.kind](atom, index)

    def _number(self, atom: Atom, index: int) -> bool:
        if self.plain is None or (self.plain == 0 and not atom.digits):  # "一千零一"
            limit = self.factor or self.scale
            if limit is not None and atom.value >= limit:
                return False
            self.plain, self.plain_start = atom.value, index
            return True
        are_tens = 20 <= self.plain < 100 and self.plain % 10 == 0
        if atom.digits or not (are_tens and 0 < atom.value < 10):
            return False
        self.plain += atom.value
        return True

    def _factor(self, atom: Atom, index: int) -> bool:
        if self.factor is not None and atom.value >= self.factor:  # "one hundred two hundred"
            self.left = index - self.plain_start if self.plain is not None else 0
            self.plain = None
            return False
        self.group += (1 if self.plain is None else self.plain) * atom.value
        self.plain, self.factor = None, atom.value
        return True

    def _scale(self, atom: Atom, index: int) -> bool:
        group = self.group + (self.plain or 0)
        if self.scale is not None and atom.value > self.scale:
            if group:  # "3万5亿"
                self.left, self.group, self.plain = index - self.group_start, Fraction(0), None
                return False
            self.total *= atom.value
        elif group or index == 0:
            self.total += (group or 1) * atom.value
        else:
            return False
        self.group, self.plain, self.factor, self.scale = Fraction(0), None, None, atom.value
        self.group_start = index + 1
        return True

    def _part(self, atom: Atom, index: int) -> bool:
        if self.plain is None:
            if index > 0:
                return False
            self.plain = 1 / atom.value
        elif atom.value == 2:
            self.plain += 1 / atom.value
        else:
            self.plain /= atom.value
            self.is_part = True
        return True
