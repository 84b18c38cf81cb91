"""The form of a reply: a line of narration, then a line that is said aloud."""

from __future__ import annotations

from trainer.roleplay.formulas.roles import NO_TOKENS, SpecialTokens, marker_kinds
from trainer.roleplay.formulas.scored import AskedReply, ReplyScore
from trainer.roleplay.reply import CutReply
from trainer.runs.figures import Figure

#: Its components.
FIGURES = (
    Figure(key="format/two_lines", title="two lines", better="higher"),
    Figure(key="format/narration", title="a line of narration", better="higher"),
    Figure(key="format/quote", title="a line that is a quotation", better="higher"),
    Figure(key="format/in_order", title="narration first", better="higher"),
    Figure(key="format/text_beside_quote", title="text beside a quotation", better="lower"),
    Figure(key="format/role_marker", title="a role marker", better="lower"),
)
_SWAPPED, _ONE_PART = 0.6, 0.3


def score_form(asked: AskedReply, special: SpecialTokens = NO_TOKENS) -> ReplyScore:
    """See `reward_format`."""
    reply = asked.reply
    two = len(reply.lines) == 2 and not reply.too_long
    narrated, quoted = "narration" in reply.kinds, "quote" in reply.kinds
    ordered = narrated and quoted and reply.kinds.index("narration") < reply.kinds.index("quote")
    marked = bool(marker_kinds(asked, special))
    if two and narrated and quoted and not marked:
        value = 1.0 if ordered else _SWAPPED
    else:
        value = _ONE_PART if narrated or reply.spoken else 0.0
    components = {
        "format/two_lines": float(two),
        "format/narration": float(narrated),
        "format/quote": float(quoted),
        "format/in_order": float(ordered),
        "format/text_beside_quote": float(_has_text_beside(reply)),
        "format/role_marker": float(marked),
    }
    return ReplyScore(value, components, () if value == 1.0 else _reasons(reply, components))


def _has_text_beside(reply: CutReply) -> bool:
    """Whether something is said aloud in a line that has more in it."""
    aloud = sum(kind == "quote" for kind in reply.kinds)
    return len(reply.spoken) > aloud


def _reasons(reply: CutReply, found: dict[str, float]) -> tuple[str, ...]:
    if not reply.lines:
        return ("it is empty",)
    reasons = []
    if not found["format/two_lines"]:
        lines = len(reply.lines)
        reasons.append("it is very long" if reply.too_long else f"lines: {lines}, not 2")
    if not found["format/narration"]:
        reasons.append("no line of narration without quotation marks")
    if not found["format/quote"]:
        reasons.append("no line that is one closed pair of double quotation marks")
    if found["format/text_beside_quote"]:
        reasons.append("text beside the quotation in its line")
    if found["format/role_marker"]:
        reasons.append("a role marker")
    if not reasons:
        reasons.append("the quotation stands before the narration")
    return tuple(reasons)
