"""Recognize the written standard of a Chinese text: Simplified or Traditional.

Other variants of a language are recognized by their script (scorekit/text/writing_scripts.py) or
not at all: a check of the words cannot separate Brazilian from European Portuguese without
rejecting good translations.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from scorekit.languages import look_up

#: Made by tools/han_variants.py.
TABLE = Path(__file__).parent / "han_variants.txt"


def other_variant(text: str, language: str) -> tuple[float, str] | None:
    """Return how much of a Chinese text is in the standard that the language's tag excludes.

    The result is (share, characters): the characters of the wrong standard, and their share among
    all characters that only one standard has. None if the tag names neither script nor region
    ("zh"), or if both standards have all the characters.
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
    text = TABLE.read_text(encoding="utf-8")
    simplified, traditional = (ln for ln in text.splitlines() if not ln.startswith("#"))
    return frozenset(simplified), frozenset(traditional)
