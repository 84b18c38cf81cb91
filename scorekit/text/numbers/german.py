"""Numbers in German: one word from the highest to the lowest part ("dreihunderteinundzwanzig")."""

from __future__ import annotations

import re
from fractions import Fraction

from scorekit.text.numbers.read import NEVER, Table, hints, listed, months, one_of, valued

_ONES = "ein|zwei|drei|vier|fünf|sechs|sieben|acht|neun"
_TENS = "zwanzig|dreißig|vierzig|fünfzig|sechzig|siebzig|achtzig|neunzig"
_TEENS = "zehn|elf|zwölf|dreizehn|vierzehn|fünfzehn|sechzehn|siebzehn|achtzehn|neunzehn"
_WORDS = listed("n", 0, f"null|{_ONES}|{_TEENS}") | listed("n", 20, _TENS, step=10)
_WORDS |= listed("n", 1, "erst|zweit|dritt|viert|fünft|sechst|siebt|acht|neunt|zehnt|elft|zwölft")
_WORDS |= valued(
    "n", {1: "eins", 2: "zwo", Fraction(3, 2): "anderthalb", Fraction(3, 4): "dreiviertel"}
)
for _digit, _name in enumerate(_ONES.split("|"), 1):
    _WORDS |= listed("n", 20 + _digit, "|".join(f"{_name}und{ten}" for ten in _TENS.split("|")), 10)
    _WORDS |= valued("n", {_digit + Fraction(1, 2): f"{_name}einhalb"})
_WORDS |= valued("u", {10: "jahrzehnt|dekade", 12: "dutzend", 100: "hundert"})
_WORDS |= valued(
    "b",
    {
        10**3: "tausend|tsd",
        10**6: "million|mio",
        10**9: "milliarde|mrd",
        10**12: "billion|bio",
        10**15: "billiarde",
    },
)
_WORDS |= listed("f", 3, "drittel|viertel|fünftel|sechstel|siebtel|achtel|neuntel|zehntel")
_WORDS |= valued("f", {2: "halb|hälfte", 100: "hundertstel"})
_WORDS |= {word.replace("ß", "ss"): value for word, value in _WORDS.items()}
_SHORTENED = ("tsd", "mio", "mrd", "bio")

_HINTS = hints(
    {
        0: "kein|keine|keinen|keiner|keinem|keines|nichts|nie",
        2: "beide|beiden|beider|beides|doppelt|doppelte|doppelten|doppelter|doppeltes|paar|"
        "verdoppeln|verdoppelt|verdoppelte|verdoppelten|verdoppelung|verdopplung|duo|binär|sekundär",
        3: "verdreifacht|verdreifachen|verdreifachte|trio|tertiär",
        4: "vervierfacht|vervierfachen|quartett|quartal",
        5: "verfünffacht",
        7: "woche|wochen|wöchentlich",
        8: "oktal",
        10: "teenager|teenagern|jugendliche|jugendlichen|verzehnfacht|dezimal",
        12: "mittag|mittags|mitternacht",
        14: "zwei wochen",
        16: "hexadezimal",
        24: "mitternacht|tag|rund um die uhr",
        60: "stunde",
        100: "jahrhundert|jahrhunderte|jahrhunderts",
        1000: "jahrtausend|jahrtausende",
        Fraction(1, 2): "halbes|halbe|halben|halber|halbieren|halbiert|halbierte|halbjahr",
        Fraction(1, 4): "viertelstunde|quartal",
    }
)
_MONTHS = "Januar|Februar|März|April|Mai|Juni|Juli|August|September|Oktober|November|Dezember"
_SHORT = "Jan|Feb|Mär|Apr|Mai|Jun|Jul|Aug|Sept|Okt|Nov|Dez"
#: A number word begins at the start of a word, or after a higher part of its number.
_BEGIN = r"(?:\b|(?<=hundert)|(?<=tausend)|(?<=hundertund)|(?<=tausendund))"
_ANY = one_of(_WORDS, but=_SHORTENED)
_ENDINGS = r"(?:s?t)?e[nrsm]?|mal|jährige?[nrs]?|fache?[nrs]?|prozentige?[nrs]?"

TABLE = Table(
    mixed=False,
    decimal=",",
    words=_WORDS,
    word=re.compile(
        # "hundert" and "tausend" stand anywhere: "dreihundert", "Jahrhundert".
        rf"{_BEGIN}(?:{_ANY})(?!ausend)|hundert|tausend|\b(?:tsd|mio|mrd|(?<=\d )bio)\b",
        re.I,
    ),
    gap=re.compile(r"[ -]?|(?:en|n)? ?(?:und ?)?|\. "),
    unsure=re.compile(rf"(?:{_ANY}|und)++(?!\b|(?:{_ENDINGS})\b)", re.I),
    hints=_HINTS | months(_MONTHS) | months(_SHORT) | {"jänner": (Fraction(1),)},
    hint=re.compile(rf"\b(?:{_MONTHS}|{_SHORT}|Jänner)(?![a-zäöüß])|(?i:\b(?:{one_of(_HINTS)})\b)"),
    tenths=NEVER,
    clock=re.compile(r" ?Uhr"),
    year=re.compile(r"[ -]?jahr", re.I),
    decade=re.compile(r"er\b|er-?jahr", re.I),
    century=re.compile(r"\.? (?:Jahrhundert|Jh)"),
    month=NEVER,
    minutes=re.compile(r"[ -]?(?:min|sek)", re.I),
    months=re.compile(r"[ -]?monat", re.I),
    half=re.compile(r" \w{2,9} und (?:ein|eine) halb", re.I),
    loose=re.compile(
        rf"[.]? ?(?:{_MONTHS}|{_SHORT}|Jänner)(?![a-zäöüß])"
        r"|[ -]?(?:Tag|Stunde|Woche|Meile|Fu(?:ß|ss)|Zoll|Yard|Morgen|Hektar|Pfund|Unze|Gallone|"
        r"Grad|°|[kcm]?m\b|kg\b|(?:Quadrat|Kilo|Zenti)?(?:[Mm]eter|[Gg]ramm)|Liter)",
    ),
    # a decimal has a comma; with a dot and a unit it may be one all the same
    after_date=re.compile(r"\.|(?! ?(?:[%€$°A-ZÄÖÜ]|(?:[kcm]?m|kg|g|t|h|s|min|mal|fach)\b))"),
)
