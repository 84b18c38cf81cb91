"""From a text to its numbers: digits and number words become atoms, atoms that touch a number.

What a language adds is a `Table`: its words with their values, and what may stand between them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from scorekit.text.markup import PLACEHOLDER, TAG, URL, normalised

#: n: a plain number. u: a factor within a group (hundred, 十, 백). b: a factor that ends a group
#: (million, 万, 억). f: a part ("half", "thirds"). r: "of parts", after their number (分之, 분의).
Word = tuple[str, Fraction]


class Table(NamedTuple):
    """How one language writes numbers. Patterns are matched against `prepared` text."""

    #: Whether digits go on after a scale ("1억 2천만", "3亿5000万").
    mixed: bool
    #: The mark before decimals; the other one of "." and "," groups digits by three.
    decimal: str
    #: Number words, folded, and a pattern that finds them (whole, not within other words).
    words: Mapping[str, Word]
    word: re.Pattern[str]
    #: What may stand between two atoms of one number.
    gap: re.Pattern[str]
    #: Where a word begins that may mean something else than its number (from 11 on).
    unsure: re.Pattern[str]
    #: Words that say a number without being one ("March", "dozen"), folded.
    hints: Mapping[str, Sequence[Fraction]]
    hint: re.Pattern[str]
    #: What stands after a number: tenths ("할"), the hour, a year, a decade, a century, a month,
    #: minutes or months.
    tenths: re.Pattern[str]
    clock: re.Pattern[str]
    year: re.Pattern[str]
    decade: re.Pattern[str]
    century: re.Pattern[str]
    month: re.Pattern[str]
    minutes: re.Pattern[str]
    months: re.Pattern[str]
    #: "and a half" that stands apart from its number, after a counter.
    half: re.Pattern[str]
    #: What stands after a number, or before it, that a translator may say with another number or
    #: with none: days, ordinals, and units that he converts.
    loose: re.Pattern[str]
    loose_before: re.Pattern[str] = re.compile(r"(?!)")
    #: What stands after a day and a month that look like a decimal ("31.12.", "6.25 전쟁").
    after_date: re.Pattern[str] = re.compile(r"(?!)")


NEVER = re.compile(r"(?!)")


def listed(kind: str, first: int, words: str, step: int = 1) -> dict[str, Word]:
    """Words, apart by "|", that count on from `first`."""
    names = "".join(words.split()).split("|")
    return {name: (kind, Fraction(first + step * i)) for i, name in enumerate(names)}


def valued(kind: str, words: Mapping[Any, str]) -> dict[str, Word]:
    """value -> words, apart by "|", turned to word -> its value."""
    return {
        name: (kind, Fraction(value)) for value, names in words.items() for name in names.split("|")
    }


def hints(said: Mapping[Any, str]) -> dict[str, tuple[Fraction, ...]]:
    """value -> words, apart by "|", turned to word -> its values."""
    found: dict[str, tuple[Fraction, ...]] = {}
    for value, words in said.items():
        for word in words.split("|"):
            found[word] = (*found.get(word, ()), Fraction(value))
    return found


def months(names: str) -> dict[str, tuple[Fraction, ...]]:
    """The twelve, apart by "|"."""
    return {name.casefold(): (Fraction(i),) for i, name in enumerate(names.split("|"), 1)}


def one_of(words: Iterable[str], but: Collection[str] = ()) -> str:
    """A pattern of any of the words, longer ones first."""
    return "|".join(sorted(set(words) - set(but), key=lambda word: (-len(word), word)))


class Atom(NamedTuple):
    kind: str
    value: Fraction
    start: int
    end: int
    #: Of digits: the same read with the other decimal mark, and as numbers of their own.
    other: Fraction | None = None
    parts: tuple[Fraction, ...] = ()
    digits: bool = False


class Number(NamedTuple):
    """A number of a text: text[start:end].

    values: its readings, the likeliest first. parts: what its digits are if they are no one number
    ("3:30", "2019.3.1"). scale: what "million" and the like multiply it by; 1 without. digits:
    whether it has any. plain: whether it holds more than factors ("hundreds", "만").
    """

    start: int
    end: int
    values: tuple[Fraction, ...]
    parts: tuple[Fraction, ...] = ()
    scale: Fraction = Fraction(1)
    digits: bool = True
    plain: bool = True


#: More digits than anyone reads; `int` of a million of them would take minutes.
_MOST_DIGITS = 30
#: A number of more atoms is none.
_MOST_ATOMS = 40
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
    """The text as it is read here: NFKC, without links, tags, placeholders and raised digits; a
    mixed fraction ("2½", "2 1/2"), and tenths ("3할 4푼 9리"), as a decimal."""
    text = _VULGAR.sub(lambda found: f" {found.group()} ", _RAISED.sub(" ", text))
    text = _LEFT_OUT.sub(" ", normalised("NFKC", text).replace("\u2044", "/"))
    text = _TENTHS.sub(r"0.\1\2\3", _BARE_POINT.sub("0.", text))
    return _AND_A_PART.sub(lambda found: _DECIMALS[found.group(1)], text)


def numbers(text: str, table: Table) -> Iterator[Number]:
    """The numbers of a `prepared` text, in order."""
    run: list[Atom] = []
    for atom in _atoms(text, table):
        if run and not _goes_on(text, run, atom, table):
            yield from _numbers(run)
            run = []
        run.append(atom)
    yield from _numbers(run)


def _goes_on(text: str, run: list[Atom], atom: Atom, table: Table) -> bool:
    end = run[-1].end
    if len(run) == _MOST_ATOMS or atom.start - end > _WIDEST_GAP:
        return False
    if atom.digits and not table.mixed:
        return False
    if table.mixed and atom.kind == "n" and not atom.digits and text[end : atom.start] == " ":
        return False
    return table.gap.fullmatch(text, end, atom.start) is not None


def _atoms(text: str, table: Table) -> Iterator[Atom]:
    """Digits and words, in order."""
    found = [_digit_atom(match, table.decimal) for match in _DIGITS.finditer(text)]
    for match in table.word.finditer(text):
        found += _word_atoms(match, table)
    return iter(sorted(found, key=lambda atom: atom.start))


def _word_atoms(match: re.Match[str], table: Table) -> Iterator[Atom]:
    """A word of the table, or each of its characters that is one."""
    whole = match.group().casefold()
    if (word := table.words.get(whole)) is not None:
        yield Atom(*word, *match.span())
        return
    digits = [table.words[char][1] for char in whole if char in table.words]
    if len(digits) == len(whole) > 2 and max(digits) < 10:  # "二〇一九"
        value = int("".join(str(digit) for digit in digits[:_MOST_DIGITS]))
        yield Atom("n", Fraction(value), *match.span())
        return
    for place, char in enumerate(whole, match.start()):
        if (word := table.words.get(char)) is not None:
            yield Atom(*word, place, place + 1)


def _digit_atom(match: re.Match[str], decimal: str) -> Atom:
    raw = match.group()
    pieces = _MARKS.split(raw)
    parts = tuple(Fraction(int(piece[:_MOST_DIGITS])) for piece in pieces)
    readings = _readings(raw, pieces, decimal)
    if readings:
        whole, *others = readings
        other = others[0] if others else None
        return Atom("n", whole, *match.span(), other, parts if len(parts) == 2 else (), True)
    return Atom("x", Fraction(0), *match.span(), None, parts, True)


def _readings(raw: str, pieces: list[str], decimal: str) -> list[Fraction]:
    """What digits with marks may say, the likelier first; empty if they are several numbers."""
    marks = _MARKS.findall(raw)
    if not marks:
        return [_joined(pieces)]
    if ":" in marks:
        return []
    last, before = marks[-1], set(marks[:-1])
    grouped = len(pieces[0]) <= 3 and all(len(piece) == 3 for piece in pieces[1:])
    if not before:
        as_decimal = [_decimal(pieces)] if last in ".," else []
        as_group = [_joined(pieces)] if grouped and pieces[0] != "0" else []
        return as_decimal + as_group if last == decimal else as_group + as_decimal
    if before == {last}:
        return [_joined(pieces)] if grouped else []
    if len(before) == 1 and last in ".," and all(len(piece) == 3 for piece in pieces[1:-1]):
        return [_decimal([_text(pieces[:-1]), pieces[-1]])]
    return []


def _text(pieces: list[str]) -> str:
    return "".join(pieces[: _MOST_DIGITS // 3 + 1])


def _joined(pieces: list[str]) -> Fraction:
    return Fraction(int(_text(pieces)[:_MOST_DIGITS]))


def _decimal(pieces: list[str]) -> Fraction:
    whole, part = (piece[:_MOST_DIGITS] for piece in pieces)
    return Fraction(int(whole)) + Fraction(int(part), 10 ** len(part))


# -- atoms that touch ------------------------------------------------------------------------------


def _numbers(run: list[Atom]) -> Iterator[Number]:
    """Cuts neighbours into the numbers that they make, from left to right."""
    at = 0
    while at < len(run):
        first = run[at]
        if first.kind == "x":
            yield Number(first.start, first.end, (), first.parts)
            at += 1
            continue
        value, end = _read(run, at, second=False)
        used = run[at:end]
        values = [value]
        if first.other is not None:
            values.append(_read(run, at, second=True)[0])
        if any(atom.kind == "r" for atom in used):
            values.append(value * 100)  # "百分之三十"
        if used[-1].kind == "f":
            values.append(value * used[-1].value)  # "three quarters"
        last = used[-1]
        if len(used) > 1 and last.kind == "n" and used[-2].kind in "ub" and not last.digits:
            values.append(value - last.value + last.value * used[-2].value / 10)  # "三万五"
        yield Number(
            first.start,
            last.end,
            tuple(values),
            first.parts if len(used) == 1 else (),
            _scale(used, value),
            any(atom.digits for atom in used),
            any(atom.kind == "n" for atom in used),
        )
        at = end


def _scale(used: list[Atom], value: Fraction) -> Fraction:
    """What multiplies the one plain number of these atoms; 1 of small words ("九十")."""
    if not any(atom.digits or atom.kind == "b" for atom in used):
        return Fraction(1)
    simple = used[0].kind in "nf" and all(atom.kind in "ub" for atom in used[1:])
    return value / used[0].value if simple and used[0].value else Fraction(len(used) > 1) + 1


def _read(run: list[Atom], at: int, second: bool) -> tuple[Fraction, int]:
    """(value, where the next number begins) of the longest number that begins at `at`."""
    reader = _Reader(at)
    under: Fraction | None = None
    place = at
    while place < len(run):
        atom = run[place]
        if second and place == at and atom.other is not None:
            atom = atom._replace(value=atom.other)
        if atom.kind == "r" and under is None and at < place < len(run) - 1:
            under, reader = reader.value, _Reader(place + 1)
        elif under is not None and atom.kind == "b":
            break  # "3분의 1만"
        elif (back := reader.take(atom, place)) is not None:
            place = back
            break
        place += 1
    value = reader.value
    return (value / under if under else value), max(place, at + 1)


class _Reader:
    """Reads one number from left to right: groups (total), factors in a group, a plain number."""

    def __init__(self, at: int) -> None:
        self.at = self.group_at = self.plain_at = at
        self.total = self.group = Fraction(0)
        self.plain: Fraction | None = None
        self.factor: Fraction | None = None  # the last one of this group
        self.scale: Fraction | None = None  # the last one that closed a group
        self.closed = False

    @property
    def value(self) -> Fraction:
        return self.total + self.group + (self.plain or 0)

    def take(self, atom: Atom, place: int) -> int | None:
        """None if the atom goes on with the number; else the place where the next one begins."""
        if self.closed:
            return place
        if atom.kind == "n":
            return self._number(atom, place)
        if atom.kind == "u":
            return self._factor(atom, place)
        if atom.kind == "b":
            return self._scale(atom, place)
        return self._part(atom, place) if atom.kind == "f" else place

    def _number(self, atom: Atom, place: int) -> int | None:
        if self.plain is None or (self.plain == 0 and not atom.digits):  # "一千零一"
            room = self.factor or self.scale
            if room is not None and atom.value >= room:
                return place
            self.plain, self.plain_at = atom.value, place
            return None
        tens = self.plain >= 20 and self.plain < 100 and self.plain % 10 == 0
        if atom.digits or not (tens and 0 < atom.value < 10):
            return place
        self.plain += atom.value
        return None

    def _factor(self, atom: Atom, place: int) -> int | None:
        if self.factor is not None and atom.value >= self.factor:
            return self._give_back("plain", place)
        self.group += (1 if self.plain is None else self.plain) * atom.value
        self.plain, self.factor = None, atom.value
        return None

    def _scale(self, atom: Atom, place: int) -> int | None:
        group = self.group + (self.plain or 0)
        if self.scale is not None and atom.value > self.scale:
            if group:
                return self._give_back("group", place)
            self.total *= atom.value
        elif group or place == self.at:
            self.total += (group or 1) * atom.value
        else:
            return place
        self.group, self.plain, self.factor, self.scale = Fraction(0), None, None, atom.value
        self.group_at = place + 1
        return None

    def _part(self, atom: Atom, place: int) -> int | None:
        if self.plain is None:
            if place > self.at:
                return place
            self.plain = 1 / atom.value
        elif atom.value == 2:
            self.plain += 1 / atom.value
        else:
            self.plain /= atom.value
            self.closed = True
        return None

    def _give_back(self, what: str, place: int) -> int:
        """Leaves the open part of the number to the next one."""
        if what == "group":
            self.group, begun = Fraction(0), self.group_at
        else:
            begun = self.plain_at if self.plain is not None else place
        self.plain = None
        return begun
