"""Conversations that are difficult to mark.

They have Korean that a tokenizer splits within a character, emoji of several code points, line
ends, and quotes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import Any

from trainer.chat.render import Turns

#: The last characters matter: a mask that ends one token too early loses their bytes.
_TEXTS = (
    "안녕하세요? 오늘은 어디까지 가세요 🙂",
    '민수는 잠시 웃었다.\n"그래, 같이 가자."',
    "저 뷁! 쌰… 됬어요 👩‍👩‍👧‍👦",
    "  spaces in front, and a line end behind\n\nok",
    "끝말이 한글입니다 뷁",
    "1 + 1 = 2\n\n그리고 <b>태그</b>",
)
#: Shapes of conversations without data.
SHAPES = (("user", "assistant"), ("system", "user", "assistant", "user", "assistant"))
_MAX_SHAPES = 4


def probes(conversations: Sequence[Turns]) -> list[Turns]:
    """Return a conversation of these texts for each order of roles in the data, the longest few.

    Other roles than system, user and assistant are left out: their content has a special format.
    """
    shapes = {tuple(str(turn["role"]) for turn in turns) for turns in conversations}
    simple_shapes = [shape for shape in shapes if set(shape) <= {"system", "user", "assistant"}]
    chosen = sorted(simple_shapes, key=len)[-_MAX_SHAPES:] if conversations else SHAPES
    return [_with_texts(shape) for shape in chosen]


def _with_texts(roles: Sequence[str]) -> list[dict[str, Any]]:
    texts = cycle(_TEXTS)
    return [
        {"role": role, "content": f"{number} {next(texts)}"} for number, role in enumerate(roles)
    ]
