"""Numbers in English."""

from __future__ import annotations

import re
from fractions import Fraction

from scorekit.text.numbers.read import NEVER, Table, hints, listed, months, one_of, valued

_WORDS = listed(
    "n",
    0,
    """
    zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fourteen|fifteen|
    sixteen|seventeen|eighteen|nineteen""",
)
_WORDS |= listed(
    "n",
    0,
    """
    zeroth|first|second|third|fourth|fifth|sixth|seventh|eighth|ninth|tenth|eleventh|twelfth|
    thirteenth|fourteenth|fifteenth|sixteenth|seventeenth|eighteenth|nineteenth""",
)
_WORDS |= listed("n", 20, "twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety", step=10)
_WORDS |= listed(
    "n",
    20,
    """
    twentieth|thirtieth|fortieth|fiftieth|sixtieth|seventieth|eightieth|ninetieth
    """,
    step=10,
)
_WORDS |= listed("f", 3, "thirds|fourths|fifths|sixths|sevenths|eighths|ninths|tenths")
_WORDS |= valued("f", {2: "half|halves", 4: "quarter|quarters"})
_WORDS |= valued("n", {Fraction(1, 2): "one half|one-half"})
_WORDS |= valued(
    "u",
    {
        10: "decade|decades",
        12: "dozen|dozens",
        20: "score",
        100: "hundred|hundreds|hundredth|centuries",
    },
)
_WORDS |= valued(
    "b",
    {
        10**3: "thousand|thousands|thousandth|k",
        10**6: "million|millions|millionth|mn",
        10**9: "billion|billions|billionth|bn",
        10**12: "trillion|trillions|tn",
        10**15: "quadrillion|quadrillions",
        10**5: "lakh|lakhs",
        10**7: "crore|crores",
    },
)
#: Suffixes of digits: "3.5bn".
_ATTACHED = ("k", "mn", "bn", "tn")

_HINTS = hints(
    {
        0: "no|none|nothing|nil|null|never|nought|zeros|zeroes|zeroed|nonzero",
        2: "twice|double|doubled|doubles|doubling|both|pair|pairs|couple|couples|twin|twins|"
        "two-fold|twofold|duo|dual|binary|secondary|duplicate",
        3: "thrice|triple|tripled|triples|tripling|treble|threefold|trio|tertiary|triplicate",
        4: "quadruple|quadrupled|fourfold|quartet",
        5: "fivefold|quintupled|quintet",
        6: "sixfold",
        7: "sevenfold|week|weeks|weekly",
        8: "eightfold|octal",
        10: "tenfold|decimal|decimals|teen|teens|teenage|teenager|teenagers|adolescent|adolescents",
        12: "noon|midday|midnight",
        14: "fortnight|two weeks",
        16: "hex|hexadecimal",
        24: "day|round-the-clock|around the clock|round the clock|midnight",
        60: "hour",
        100: "century|hundredfold|centennial",
        1000: "millennium|millennia",
        Fraction(1, 2): "halved|halving",
        Fraction(3, 2): "and a half",
        Fraction(1, 12): "twelfth",
        Fraction(1, 20): "twentieth",
        Fraction(1, 100): "hundredth",
    }
)
_DECADES = "twenties|thirties|forties|fifties|sixties|seventies|eighties|nineties"
for _word, (_, _value) in listed("n", 20, _DECADES, step=10).items():
    _HINTS[_word] = (_value, 1900 + _value)
_PARTS = "third|fourth|fifth|sixth|seventh|eighth|ninth|tenth"
for _word, (_, _value) in listed("f", 3, _PARTS).items():
    _HINTS[_word] = (1 / _value,)
_MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
_SHORT = "Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sept|Oct|Nov|Dec"

TABLE = Table(
    mixed=False,
    decimal=".",
    words=_WORDS,
    word=re.compile(
        rf"\b(?:{one_of(_WORDS, but=_ATTACHED)})(?![a-z])|(?<=\d)(?:bn|mn|tn|k)\b", re.I
    ),
    gap=re.compile(r"[ -]?|,? and (?:a )?| a | of | or so "),
    unsure=NEVER,
    hints=_HINTS | months(_MONTHS) | months(_SHORT) | {"sep": (Fraction(9),)},
    hint=re.compile(rf"\b(?:{_MONTHS}|{_SHORT}|Sep)\b|(?i:\b(?:{one_of(_HINTS)})(?![a-z]))"),
    tenths=NEVER,
    clock=re.compile(r" ?(?:o['’]clock|[ap]\.?m\b)", re.I),
    year=re.compile(r"[ -]?year", re.I),
    decade=re.compile(r"['’]?s\b"),
    century=re.compile(r"(?:st|nd|rd|th)?[ -]centur", re.I),
    month=NEVER,
    minutes=re.compile(r"[ -]?(?:min|sec)", re.I),
    months=re.compile(r"[ -]?month", re.I),
    half=re.compile(r"[ -][a-z]{2,9} and a half", re.I),
    loose=re.compile(
        rf"(?:st|nd|rd|th)\b| (?-i:{_MONTHS}|{_SHORT}|Sep)\b|"
        r"[ -]?(?:days?|hours?|weeks?|decades?|miles?|f(?:ee|oo)?t\b|inch|yards?|"
        r"acres?|pounds?|lbs?\b|ounces?|oz\b|gallons?|pints?|mph\b|degrees?|°|[kcm]?m\b|kg\b|"
        r"(?:square |kilo|centi|milli)?met(?:er|re)|(?:kilo)?grams?|lit(?:er|re))",
        re.I,
    ),
    loose_before=re.compile(rf"\b(?:{_MONTHS}|{_SHORT}|Sep)\.? (?:the )?\Z"),
)
