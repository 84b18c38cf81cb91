"""The character reward: the name in the narration, and the speech level."""

from __future__ import annotations

from trainer.roleplay.korean.names import find_name
from trainer.roleplay.korean.speech import count, levels
from trainer.roleplay.reply import has_letter
from trainer.roleplay.scoring.types import ReplyContext, ReplyScore
from trainer.runs.stats import StatSpec

#: The components of this reward.
STATS = (
    StatSpec(key="character/name", title="character named", better="higher"),
    StatSpec(key="character/speech", title="sentences at the level", better="higher"),
    StatSpec(key="character/no_quote", title="nothing said aloud", better="lower"),
    StatSpec(key="character/undecided_sentences", title="sentences of no level", better="lower"),
)
_NEUTRAL = 0.5


def score_character(context: ReplyContext) -> ReplyScore:
    """Return the score of `reward_character_consistency`."""
    name, name_reason = _name(context)
    speech, components, speech_reason = _speech(context)
    if context.character_name:
        components["character/name"] = name
    reasons = tuple(reason for reason in (name_reason, speech_reason) if reason)
    return ReplyScore((name + speech) / 2, components, reasons)


def _name(context: ReplyContext) -> tuple[float, str]:
    if not context.character_name:
        return _NEUTRAL, "the row has no name of the character"
    if find_name(context.reply.narration, context.character_name, context.player_name):
        return 1.0, ""
    return 0.0, "the narration does not name the character"


def _speech(context: ReplyContext) -> tuple[float, dict[str, float], str]:
    if not context.speech_level:
        return _NEUTRAL, {}, "the row has no speech level"
    quote = context.reply.quote
    if not quote:
        return 0.0, {"character/speech": 0.0, "character/no_quote": 1.0}, "nothing is said aloud"
    if not has_letter(quote):
        return (
            0.0,
            {"character/speech": 0.0, "character/no_quote": 0.0},
            "the quotation is only marks",
        )
    names = (context.character_name, context.player_name)
    spans = sorted({span for name in names for span in find_name(quote, name)})
    disjoint_spans = [span for k, span in enumerate(spans) if k == 0 or span[0] >= spans[k - 1][1]]
    speech_count = count(levels(quote, disjoint_spans), context.speech_level)
    components = {
        "character/speech": speech_count.share,
        "character/no_quote": 0.0,
        "character/undecided_sentences": float(speech_count.undecided),
    }
    reason = ""
    if not speech_count.right + speech_count.wrong:
        reason = "no sentence of the quotation shows a speech level"
    elif speech_count.wrong:
        decided = speech_count.right + speech_count.wrong
        reason = f"{speech_count.wrong} of {decided} sentences are not {context.speech_level}"
    return speech_count.share, components, reason
