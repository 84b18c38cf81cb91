"""The format reward: a line of narration, then a line of speech."""

from __future__ import annotations

from trainer.roleplay.reply import ParsedReply
from trainer.roleplay.scoring.roles import marker_kinds
from trainer.roleplay.scoring.types import ReplyContext, ReplyScore
from trainer.runs.stats import StatSpec

#: The components of this reward.
STATS = (
    StatSpec(key="format/two_lines", title="two lines", better="higher"),
    StatSpec(key="format/narration", title="a line of narration", better="higher"),
    StatSpec(key="format/quote", title="a line that is a quotation", better="higher"),
    StatSpec(key="format/in_order", title="narration first", better="higher"),
    StatSpec(key="format/text_beside_quote", title="text beside a quotation", better="lower"),
    StatSpec(key="format/role_marker", title="a role marker", better="lower"),
)
_SWAPPED, _ONE_PART = 0.6, 0.3


def score_form(context: ReplyContext, special: frozenset[str]) -> ReplyScore:
    """Return the score of `reward_format`."""
    reply = context.reply
    has_two_lines = len(reply.lines) == 2 and not reply.too_long
    has_narration, has_quote = "narration" in reply.kinds, "quote" in reply.kinds
    is_ordered = (
        has_narration and has_quote and reply.kinds.index("narration") < reply.kinds.index("quote")
    )
    has_marker = bool(marker_kinds(context, special))
    if has_two_lines and has_narration and has_quote and not has_marker:
        value = 1.0 if is_ordered else _SWAPPED
    else:
        value = _ONE_PART if has_narration or reply.spoken else 0.0
    components = {
        "format/two_lines": float(has_two_lines),
        "format/narration": float(has_narration),
        "format/quote": float(has_quote),
        "format/in_order": float(is_ordered),
        # a line with speech has other text, too
        "format/text_beside_quote": float(len(reply.spoken) > reply.kinds.count("quote")),
        "format/role_marker": float(has_marker),
    }
    return ReplyScore(value, components, () if value == 1.0 else _reasons(reply, components))


def _reasons(reply: ParsedReply, components: dict[str, float]) -> tuple[str, ...]:
    if not reply.lines:
        return ("it is empty",)
    reasons = []
    if not components["format/two_lines"]:
        lines = len(reply.lines)
        reasons.append("it is very long" if reply.too_long else f"lines: {lines}, not 2")
    if not components["format/narration"]:
        reasons.append("no line of narration without quotation marks")
    if not components["format/quote"]:
        reasons.append("no line that is one closed pair of double quotation marks")
    if components["format/text_beside_quote"]:
        reasons.append("text beside the quotation in its line")
    if components["format/role_marker"]:
        reasons.append("a role marker")
    if not reasons:
        reasons.append("the quotation stands before the narration")
    return tuple(reasons)
