"""One table of languages: the ids that corpora, metrics and prompts use for the same language."""

from __future__ import annotations

import re
from typing import NamedTuple


class Language(NamedTuple):
    """madlad: MADLAD-400 id; iso639_3; tag: BCP-47 with region; name: English name."""

    madlad: str
    iso639_3: str
    tag: str
    name: str


_TABLE = """
ar ara ar-EG Arabic|bg bul bg-BG Bulgarian|bn ben bn-IN Bengali|ca cat ca-ES Catalan
cs ces cs-CZ Czech|da dan da-DK Danish|de deu de-DE German|el ell el-GR Greek|en eng en-US English
es spa es-MX Spanish|et est et-EE Estonian|fa fas fa-IR Farsi|fi fin fi-FI Finnish
fil fil fil-PH Filipino|fr fra fr-FR French|gu guj gu-IN Gujarati|iw heb he-IL Hebrew
hi hin hi-IN Hindi|hr hrv hr-HR Croatian|hu hun hu-HU Hungarian|id ind id-ID Indonesian
is isl is-IS Icelandic|it ita it-IT Italian|ja jpn ja-JP Japanese|kn kan kn-IN Kannada
ko kor ko-KR Korean|lt lit lt-LT Lithuanian|lv lav lv-LV Latvian|ml mal ml-IN Malayalam
mr mar mr-IN Marathi|nl nld nl-NL Dutch|no nor no-NO Norwegian|pa pan pa-IN Punjabi
pl pol pl-PL Polish|pt por pt-BR Portuguese|ro ron ro-RO Romanian|ru rus ru-RU Russian
sk slk sk-SK Slovak|sl slv sl-SI Slovenian|sr srp sr-RS Serbian|sv swe sv-SE Swedish
sw swa sw-KE Swahili|ta tam ta-IN Tamil|te tel te-IN Telugu|th tha th-TH Thai
tr tur tr-TR Turkish|uk ukr uk-UA Ukrainian|ur urd ur-PK Urdu|vi vie vi-VN Vietnamese
zh zho zh-CN Chinese|zu zul zu-ZA Zulu
"""
LANGUAGES = tuple(
    Language(*entry.split()) for line in _TABLE.strip().splitlines() for entry in line.split("|")
)
#: Other codes in use for a language of the table.
_ALIASES = {"he": "iw", "nb": "no", "nob": "no", "tl": "fil", "cmn": "zh", "pes": "fa", "swh": "sw",
            "persian": "fa", "hebrew": "iw", "mandarin": "zh"}  # fmt: skip
_TAG = re.compile(r"[a-z]{2,3}(-[a-z]{4})?(-([a-z]{2}|\d{3}))?")
_BY_KEY = {key.lower(): lang for lang in LANGUAGES for key in lang}
_BY_KEY |= {alias: _BY_KEY[madlad] for alias, madlad in _ALIASES.items()}


def find_language(key: str) -> Language | None:
    """The language of an id, code, tag or English name in any case; None where none is known.

    A tag of another region or script ("en-GB", "zh-TW") finds its language; the entry's own `tag`
    is that of the table, so keep the caller's where there is one.
    """
    key = key.strip().lower().replace("_", "-")
    primary = key.split("-")[0] if _TAG.fullmatch(key) else key
    return _BY_KEY.get(key) or _BY_KEY.get(primary)
