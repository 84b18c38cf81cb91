"""Which script a language is written in, and which code points are a script's letters."""

from __future__ import annotations

import re

from scorekit.languages import find_language

#: Code points of the letters (and vowel signs) of each script, as a regular expression's class.
SCRIPTS = {
    "Hangul": "\u1100-\u11ff\u3130-\u318f\ua960-\ua97f\uac00-\ud7ff",
    "Han": "\u2e80-\u2fdf\u3005-\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff",
    "Kana": "\u3041-\u30fa\u30fc-\u30ff\u31f0-\u31ff\uff66-\uff9f",
    "Thai": "\u0e01-\u0e3a\u0e40-\u0e4e",
    "Cyrillic": "\u0400-\u052f\u1c80-\u1c8f\u2de0-\u2dff\ua640-\ua69f",
    "Arabic": "\u0620-\u065f\u066e-\u06d3\u06d5-\u06ef\u06fa-\u06ff\u0750-\u077f\u08a0-\u08ff"
    "\ufb50-\ufdff\ufe70-\ufefc",
    "Hebrew": "\u0591-\u05bd\u05d0-\u05f2\ufb1d-\ufb4f",
    "Greek": "\u0370-\u03ff\u1f00-\u1fff",
    "Devanagari": "\u0900-\u0963\u0971-\u097f\ua8e0-\ua8ff",
    "Bengali": "\u0980-\u09e3\u09f0-\u09ff",
    "Gurmukhi": "\u0a00-\u0a65\u0a70-\u0a7f",
    "Gujarati": "\u0a80-\u0ae5\u0af0-\u0aff",
    "Tamil": "\u0b80-\u0be5\u0bf0-\u0bff",
    "Telugu": "\u0c00-\u0c65\u0c70-\u0c7f",
    "Kannada": "\u0c80-\u0ce5\u0cf0-\u0cff",
    "Malayalam": "\u0d00-\u0d65\u0d70-\u0d7f",
    "Latin": "A-Za-z\u00aa\u00ba\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u024f\u1e00-\u1eff",
}
#: Scripts of the languages that are not written in the Latin one, by MADLAD id.
_SCRIPTS_OF = {
    "ko": ("Hangul",), "zh": ("Han",), "ja": ("Kana", "Han"), "th": ("Thai",), "el": ("Greek",),
    "bg": ("Cyrillic",), "ru": ("Cyrillic",), "uk": ("Cyrillic",), "sr": ("Cyrillic", "Latin"),
    "ar": ("Arabic",), "fa": ("Arabic",), "ur": ("Arabic",), "iw": ("Hebrew",),
    "hi": ("Devanagari",), "mr": ("Devanagari",), "bn": ("Bengali",), "pa": ("Gurmukhi",),
    "gu": ("Gujarati",), "ta": ("Tamil",), "te": ("Telugu",), "kn": ("Kannada",),
    "ml": ("Malayalam",),
}  # fmt: skip
LETTERS = {name: re.compile(f"[{points}]") for name, points in SCRIPTS.items()}


def scripts_of(language: str) -> tuple[str, ...]:
    """The scripts that a language is written in: Hangul, Latin, ...; empty for an unknown one."""
    known = find_language(language)
    return () if known is None else _SCRIPTS_OF.get(known.madlad, ("Latin",))
