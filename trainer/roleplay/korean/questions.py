"""Whether somebody asks: by a question mark, or by an ending that asks."""

from __future__ import annotations

import re

from trainer.roleplay.korean.kiwi import forms, sentences

_MARK = re.compile("[?？⁇⁈⁉]")
#: Endings as Kiwi gives them, without what makes them polite.
_ASKING = forms(
    "니 으니 냐 으냐 느냐 까 ᆯ까 을까 ᆸ니까 습니까 나 는가 ᆫ가 은가 던가 ᆯ래 을래 련 으련 대 "
    "느냐고 냐고 는지 ᆫ지 은지 ᆯ지 을지 나이까 옵니까 ᆯ까나"
)


def asks(text: str) -> bool:
    """Whether a sentence of the text is a question: it has a mark, or ends in 니, 냐, ᆯ까, 나요,
    ᆸ니까 ... What only the voice makes a question (밥 먹었어) is none."""
    if _MARK.search(text):
        return True
    endings = (
        next((one for one in reversed(sentence) if one.tag[0] not in "SZW"), None)
        for sentence in sentences(text)
    )
    return any(
        one is not None
        and one.tag in ("EF", "EC")  # 먹었니: at an end Kiwi takes it for the one of 먹었으니
        and (one.form in _ASKING or one.form.removesuffix("요") in _ASKING)
        for one in endings
    )
