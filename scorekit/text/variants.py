"""Which written standard of Chinese a text is in: Simplified or Traditional.

Other standards of one language are told by their script (scorekit/text/writing_scripts.py), or not
at all: no check tells Brazilian Portuguese from European by its words without rejecting good
translations.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from scorekit.languages import look_up

#: Made by tools/han_variants.py.
TABLE = Path(__file__).parent / "han_variants.txt"


def other_variant(text: str, language: str) -> tuple[float, str] | None:
    """How much of a Chinese text is in the standard that the language's tag does not mean.

    (share among the characters that only one standard has, those of the other standard). None where
    the tag names neither script nor region ("zh"), or no character tells.
    """
    found = look_up(language)
    if found is None or not found.said or found.script not in ("Hans", "Hant"):
        return None
    simplified, traditional = _only()
    own, other = (simplified, traditional) if found.script == "Hans" else (traditional, simplified)
    wrong = [char for char in text if char in other]
    telling = len(wrong) + sum(char in own for char in text)
    return (len(wrong) / telling, "".join(dict.fromkeys(wrong))) if telling else None


@lru_cache(maxsize=1)
def _only() -> tuple[frozenset[str], frozenset[str]]:
    """Characters that only Simplified text has, and only Traditional text."""
    text = TABLE.read_text(encoding="utf-8")
    simplified, traditional = (ln for ln in text.splitlines() if not ln.startswith("#"))
    return frozenset(simplified), frozenset(traditional)
