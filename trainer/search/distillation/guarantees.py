"""Check a rewritten row: only the words of its thoughts may differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from scorekit.numeric.thresholds import above
from trainer.search.actions import Invalid, parse
from trainer.search.distillation.claims import claims
from trainer.search.distillation.fidelity import Departure, departure
from trainer.search.distillation.targets import has_tag, invented, thought_spans, thoughts

#: The reasons why a rewritten row is invalid.
Breach = Literal[
    "other structure",
    "another action",
    "a tag in a thought",
    "a claim of seeing",
    "an invented observation",
    "unreadable",
    "empty",
    "too long",
    Departure,
]
_SHORT = 200  # letters that are always allowed


def _without_thoughts(text: str) -> str:
    """Return a turn with empty think blocks."""
    parts, position = [], 0
    for start, end in thought_spans(text):
        parts.append(text[position:start])
        position = end
    return "".join([*parts, text[position:]])


def with_thought(text: str, thought: str) -> str:
    """Return a turn with another thought in its think block.

    Raises ValueError unless it has exactly one block.
    """
    ((start, end),) = thought_spans(text)
    return text[:start] + thought + text[end:]


def thought_breach(before: str, after: str, longer_at_most: float) -> Breach | None:
    """Return why a rewritten thought is invalid, or None."""
    if any((ord(c) < 32 and c not in "\n\t") or "\ud800" <= c <= "\udfff" for c in after):
        return "unreadable"
    if has_tag(after):
        return "a tag in a thought"
    if not after.strip() and before.strip():
        return "empty"
    if len(after) > _SHORT and above(len(after), longer_at_most * len(before)):
        return "too long"
    if invented(after) is not None and invented(before) is None:
        return "an invented observation"
    allowed = claims(before)
    if any(count > allowed[name] for name, count in claims(after).items()):
        return "a claim of seeing"
    return departure(before, after)


def row_breach(
    before: Sequence[Mapping[str, Any]],
    after: Sequence[Mapping[str, Any]],
    longer_at_most: float,
) -> Breach | None:
    """Return why a rewritten conversation is invalid, or None.

    It compares only the two results, independently of the code that rewrote one of them.
    """
    if len(before) != len(after):
        return "other structure"
    for old, new in zip(before, after, strict=True):
        if old == new:
            continue
        if old["role"] != "assistant" or _but_content(old) != _but_content(new):
            return "other structure"
        if breach := _turn_breach(old["content"], new["content"], longer_at_most):
            return breach
    return None


def _turn_breach(old: str, new: str, longer_at_most: float) -> Breach | None:
    if len(thoughts(old)) != len(thoughts(new)):
        return "a tag in a thought" if has_tag("".join(thoughts(new))) else "other structure"
    for before, after in zip(thoughts(old), thoughts(new), strict=True):
        if breach := thought_breach(before, after, longer_at_most):
            return breach
    if _without_thoughts(old) != _without_thoughts(new):
        return "another action"
    action = parse(old)
    same = not isinstance(action, Invalid) and parse(new) == action
    return None if same else "another action"


def _but_content(message: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "content"}
