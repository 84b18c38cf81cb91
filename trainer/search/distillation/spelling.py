"""Normalize texts, so that odd spellings cannot hide a word from a pattern."""

from __future__ import annotations

import html
import re
import unicodedata
from typing import Final
from urllib.parse import unquote

from scorekit.text.markup import normalized

_ROUNDS = 4  # &amp;lt;
_ESCAPE = re.compile(
    r"(?<!\\)\\++(?:u([0-9a-f]{4})|u\{([0-9a-f]{1,6})\}|x([0-9a-f]{2}))", re.IGNORECASE
)
#: Letters of other scripts that look like Latin ones, and what looks like `<`, `>`, `/` and `_`;
#: full-width and mathematical forms are NFKC's.
_LOOKALIKES: Final = {
    "a": "аɑαᴀ",
    "b": "ьƅвʙ",
    "c": "сϲᴄ",
    "e": "еҽεᴇ",
    "h": "һнʜ",
    "i": "іıιɪ",
    "k": "кκᴋ",
    "l": "ӏʟǀ",
    "m": "мᴍ",
    "n": "пηոɴ",
    "o": "оοօσᴏ",
    "p": "рρᴘ",
    "r": "гᴦʀ",
    "s": "ѕꜱ",
    "t": "тτᴛ",
    "w": "ԝωᴡ",
    "x": "хχ×",
    "<": "‹〈⟨❮❰˂ᐸ≺⧼⟪《«",
    ">": "›〉⟩❯❱˃ᐳ≻⧽⟫》»",
    "/": "⁄∕⧸╱",
    "_": "ˍ⎯",
}
_LATIN: Final = str.maketrans({odd: plain for plain, odds in _LOOKALIKES.items() for odd in odds})
#: Written as nothing: format characters, variation selectors, fillers, marks over a letter.
_UNSEEN: Final = re.compile("[\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0\ufe00-\ufe0f]")


def plain(text: str) -> str:
    """Return a text for pattern matching.

    It is casefolded, with lookalike letters as Latin ones and entities and escapes decoded, and
    without marks over letters and invisible characters.
    """
    for _ in range(_ROUNDS):
        decoded = unquote(_ESCAPE.sub(_read, html.unescape(text)))
        if decoded == text:
            break
        text = decoded
    letters = normalized("NFKD", text).casefold().translate(_LATIN)
    visible = (
        c for c in letters if unicodedata.category(c) not in ("Cf", "Mn", "Cc") or c in "\n\t\r"
    )
    return normalized("NFC", _UNSEEN.sub("", "".join(visible)))


def _read(escape: re.Match[str]) -> str:
    code = int(escape[1] or escape[2] or escape[3], 16)
    return chr(code) if code < 0x110000 and not 0xD800 <= code < 0xE000 else escape[0]
