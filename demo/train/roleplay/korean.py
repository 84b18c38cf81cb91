"""Fill templates in Korean: a particle by the last syllable, an ending by the speech level.

`{food:을}` is the slot `food` with 을 or 를; `[해요/해]` is the polite and the plain form.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from trainer.roleplay.turn import SpeechLevel

#: After a final consonant: after a vowel.
PARTICLES = {
    "을": "를",
    "은": "는",
    "이": "가",
    "과": "와",
    "으로": "로",
    "이에요": "예요",
    "이야": "야",
    "이라": "라",
    "이라고": "라고",
    "이라면": "라면",
    "이라니": "라니",
    "이면": "면",
}
_CHOICE = re.compile(r"\[([^/\]]*)/([^\]]*)\]")
_SLOT = re.compile(r"\{(\w+)(?::(\w+))?\}")
_FINALS, _RIEUL = 28, 8  # a Hangul syllable's number modulo 28 is its final consonant; 0: none


def particle(word: str, form: str) -> str:
    """Return the form of a particle (as after a consonant) that follows `word`.

    Raises ValueError if the word does not end in a Hangul syllable.
    """
    number = ord(word[-1]) - ord("가")
    if not 0 <= number < 11172:
        raise ValueError(f"{word!r} does not end in a Hangul syllable")
    final = number % _FINALS
    if form == "으로" and final == _RIEUL:
        return "로"
    return form if final else PARTICLES.get(form, form)


def render(template: str, level: SpeechLevel, slots: Mapping[str, str]) -> str:
    """Return the text of a template at a speech level. Raise KeyError for a slot without a
    word.
    """
    text = _CHOICE.sub(lambda match: match[1 if level == "polite" else 2], template)

    def fill(match: re.Match[str]) -> str:
        word = slots[match[1]]
        return word + (particle(word, match[2]) if match[2] else "")

    return _SLOT.sub(fill, text)


def slots_of(template: str) -> list[str]:
    """Return the names of the slots in a template, each once, in order."""
    return list(dict.fromkeys(name for name, _ in _SLOT.findall(template)))
