"""What holds of a rewritten row, checked on each: only the words of its thoughts are others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from scorekit.numeric.thresholds import above
from trainer.search.actions import Invalid, parse
from trainer.search.curation.distil.claims import claims
from trainer.search.curation.distil.fidelity import departure
from trainer.search.curation.distil.targets import has_tag, invented, thought_spans, thoughts

#: What a row has broken.
Breach = Literal[
    "other structure",
    "another action",
    "a tag in a thought",
    "a claim of seeing",
    "an invented observation",
    "another language",
    "new content",
    "another claim",
    "unreadable",
    "empty",
    "too long",
]
_SHORT = 200  # letters that any thought may have


def _without_thoughts(text: str) -> str:
    """The turn with empty think blocks."""
    parts, at = [], 0
    for start, end in thought_spans(text):
        parts.append(text[at:start])
        at = end
    return "".join([*parts, text[at:]])


def with_thought(text: str, thought: str) -> str:
    """A turn of one think block, with another thought in it and nothing else changed. Raises
    ValueError for another number of blocks."""
    ((start, end),) = thought_spans(text)
    return text[:start] + thought + text[end:]


def thought_breach(before: str, after: str, longer_at_most: float) -> Breach | None:
    """What a rewritten thought breaks; None: nothing."""
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
    told = claims(before)
    if any(count > told[name] for name, count in claims(after).items()):
        return "a claim of seeing"
    return departure(before, after)


def row_breach(
    before: Sequence[Mapping[str, Any]],
    after: Sequence[Mapping[str, Any]],
    longer_at_most: float,
) -> Breach | None:
    """What a rewritten conversation breaks; None: nothing. Looks at both as they are, and knows
    nothing of how one was made of the other."""
    if len(before) != len(after):
        return "other structure"
    for old, new in zip(before, after, strict=True):
        if old == new:
            continue
        if old["role"] != "assistant" or _but_content(old) != _but_content(new):
            return "other structure"
        if fault := _turn_breach(old["content"], new["content"], longer_at_most):
            return fault
    return None


def _turn_breach(old: str, new: str, longer_at_most: float) -> Breach | None:
    if len(thoughts(old)) != len(thoughts(new)):
        return "a tag in a thought" if has_tag("".join(thoughts(new))) else "other structure"
    for before, after in zip(thoughts(old), thoughts(new), strict=True):
        if fault := thought_breach(before, after, longer_at_most):
            return fault
    if _without_thoughts(old) != _without_thoughts(new):
        return "another action"
    action = parse(old)
    same = not isinstance(action, Invalid) and parse(new) == action
    return None if same else "another action"


def _but_content(message: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != "content"}
