"""The scripts of languages, the code points of their letters, and the variants of Chinese."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

from scorekit.languages import look_up

#: Each script with its code of ISO 15924, and the code points of its letters (and vowel signs) as a
#: regular expression's class.
_SCRIPTS = (
    ("Hangul", "Kore", "\u1100-\u11ff\u3130-\u318f\ua960-\ua97f\uac00-\ud7ff"),
    (
        "Han",
        "Hani",
        "\u2e80-\u2fdf\u3005-\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff",
    ),
    ("Kana", "Kana", "\u3041-\u30fa\u30fc-\u30ff\u31f0-\u31ff\uff66-\uff9f"),
    ("Thai", "Thai", "\u0e01-\u0e3a\u0e40-\u0e4e"),
    ("Cyrillic", "Cyrl", "\u0400-\u052f\u1c80-\u1c8f\u2de0-\u2dff\ua640-\ua69f"),
    (
        "Arabic",
        "Arab",
        "\u0620-\u065f\u066e-\u06d3\u06d5-\u06ef\u06fa-\u06ff\u0750-\u077f\u08a0-\u08ff"
        "\ufb50-\ufdff\ufe70-\ufefc",
    ),
    ("Hebrew", "Hebr", "\u0591-\u05bd\u05d0-\u05f2\ufb1d-\ufb4f"),
    ("Greek", "Grek", "\u0370-\u03ff\u1f00-\u1fff"),
    ("Devanagari", "Deva", "\u0900-\u0963\u0971-\u097f\ua8e0-\ua8ff"),
    ("Bengali", "Beng", "\u0980-\u09e3\u09f0-\u09ff"),
    ("Gurmukhi", "Guru", "\u0a00-\u0a65\u0a70-\u0a7f"),
    ("Gujarati", "Gujr", "\u0a80-\u0ae5\u0af0-\u0aff"),
    ("Tamil", "Taml", "\u0b80-\u0be5\u0bf0-\u0bff"),
    ("Telugu", "Telu", "\u0c00-\u0c65\u0c70-\u0c7f"),
    ("Kannada", "Knda", "\u0c80-\u0ce5\u0cf0-\u0cff"),
    ("Malayalam", "Mlym", "\u0d00-\u0d65\u0d70-\u0d7f"),
    ("Armenian", "Armn", "\u0531-\u0588\ufb13-\ufb17"),
    ("Georgian", "Geor", "\u10a0-\u10ff\u1c90-\u1cbf\u2d00-\u2d2d"),
    ("Ethiopic", "Ethi", "\u1200-\u138f\u2d80-\u2dde\uab01-\uab2e\U0001e7e0-\U0001e7fe"),
    ("Khmer", "Khmr", "\u1780-\u17dd"),
    ("Lao", "Laoo", "\u0e81-\u0edf"),
    ("Myanmar", "Mymr", "\u1000-\u109d\ua9e0-\ua9fe\uaa60-\uaa7f"),
    ("Sinhala", "Sinh", "\u0d81-\u0df3"),
    ("Oriya", "Orya", "\u0b01-\u0b71"),
    ("Tibetan", "Tibt", "\u0f00-\u0fc6"),
    ("Thaana", "Thaa", "\u0780-\u07b1"),
    ("Canadian Aboriginal", "Cans", "\u1401-\u167f\u18b0-\u18f5\U00011ab0-\U00011abf"),
    ("Cherokee", "Cher", "\u13a0-\u13fd\uab70-\uabbf"),
    ("Syriac", "Syrc", "\u0710-\u074f\u0860-\u086a"),
    ("Tifinagh", "Tfng", "\u2d30-\u2d7f"),
    ("Meetei Mayek", "Mtei", "\uaae0-\uaaf6\uabc0-\uabed"),
    ("Ol Chiki", "Olck", "\u1c5a-\u1c7d"),
    ("Mongolian", "Mong", "\u180b-\u18aa"),
    ("Adlam", "Adlm", "\U0001e900-\U0001e94b"),
    ("Latin", "Latn", "A-Za-z\u00aa\u00ba\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u1e00-\u1eff"),
)
SCRIPTS = {name: points for name, _, points in _SCRIPTS}
#: Code -> scripts.
_BY_CODE: dict[str, tuple[str, ...]] = {code: (name,) for name, code, _ in _SCRIPTS}
_BY_CODE |= {"Hang": ("Hangul",), "Hans": ("Han",), "Hant": ("Han",), "Hira": ("Kana",)}
_BY_CODE |= {"Jpan": ("Kana", "Han")}
#: Scripts by MADLAD id if a tag names no script, the most common first: for languages with several
#: scripts, and for languages without current data in CLDR.
_SCRIPTS_OF = {
    "sr": ("Cyrillic", "Latin"),
    "bs": ("Latin", "Cyrillic"),
    "uz": ("Latin", "Cyrillic"),
    "kk": ("Cyrillic", "Latin"),
    "kaa": ("Cyrillic", "Latin"),
    "crh": ("Cyrillic", "Latin"),
    "ku": ("Latin", "Arabic"),
    "sd": ("Arabic", "Devanagari"),
    "ks": ("Arabic", "Devanagari"),
    "mni": ("Bengali", "Meetei Mayek"),
    "iu": ("Canadian Aboriginal", "Latin"),
    "mn": ("Cyrillic", "Mongolian"),
    "ber": ("Tifinagh", "Latin", "Arabic"),
    "tly_IR": ("Arabic", "Latin"),
    "hif": ("Latin", "Devanagari"),
    "grc": ("Greek",),
    "xal": ("Cyrillic",),
    "kjh": ("Cyrillic",),
    "nog": ("Cyrillic",),
    "ksw": ("Myanmar",),
    "rki": ("Myanmar",),
    "bgp": ("Arabic",),
    "tab": ("Cyrillic",),
}
LETTERS = {name: re.compile(f"[{points}]") for name, points in SCRIPTS.items()}


def scripts_of(language: str) -> tuple[str, ...]:
    """Return the scripts of a language: Hangul, Latin, ...; empty if they are unknown.

    If the tag names a script, or its region implies one ("pa-PK": Arabic), it is the only one.
    """
    match = look_up(language)
    if match is None:
        return ()
    if match.scripts is not None:
        return match.scripts
    named = re.search(r"-([A-Z][a-z]{3})\b", match.language.tag)
    several = _SCRIPTS_OF.get(match.language.madlad)
    if several and not named:
        return several
    return _BY_CODE.get(named.group(1) if named else match.script or "", ())


#: Made by tools/han_variants.py.
HAN_VARIANTS = Path(__file__).parent / "han_variants.txt"


def other_variant(text: str, language: str) -> tuple[float, str] | None:
    """Return how much of a Chinese text is in the standard that the language's tag excludes.

    The result is (share, characters): the characters of the wrong standard, and their share among
    all characters that only one standard has. None if the tag names neither script nor region
    ("zh"), or if both standards have all the characters.

    Other variants of a language are recognized by their script or not at all: a check of the words
    cannot separate Brazilian from European Portuguese without rejecting good translations.
    """
    match = look_up(language)
    if match is None or not match.names_variant or match.script not in ("Hans", "Hant"):
        return None
    simplified, traditional = _only()
    expected_chars, other_chars = (
        (simplified, traditional) if match.script == "Hans" else (traditional, simplified)
    )
    wrong = [char for char in text if char in other_chars]
    num_telling = len(wrong) + sum(char in expected_chars for char in text)
    return (len(wrong) / num_telling, "".join(dict.fromkeys(wrong))) if num_telling else None


@lru_cache(maxsize=1)
def _only() -> tuple[frozenset[str], frozenset[str]]:
    """Return the characters of Simplified text only, and those of Traditional text only."""
    text = HAN_VARIANTS.read_text(encoding="utf-8")
    simplified, traditional = (ln for ln in text.splitlines() if not ln.startswith("#"))
    return frozenset(simplified), frozenset(traditional)
