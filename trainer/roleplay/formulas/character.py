"""Whether a reply is the character's: their name in the narration, their way of speaking."""

from __future__ import annotations

from trainer.roleplay.formulas.scored import AskedReply, ReplyScore
from trainer.roleplay.korean.names import places
from trainer.roleplay.korean.speech import count, levels
from trainer.roleplay.reply import has_letter
from trainer.runs.figures import Figure

#: Its components.
FIGURES = (
    Figure(key="character/name", title="character named", better="higher"),
    Figure(key="character/speech", title="sentences at the level", better="higher"),
    Figure(key="character/no_quote", title="nothing said aloud", better="lower"),
    Figure(key="character/undecided_sentences", title="sentences of no level", better="lower"),
)
_UNTOLD = 0.5


def score_character(asked: AskedReply) -> ReplyScore:
    """See `reward_character_consistency`."""
    name, name_reason = _name(asked)
    speech, components, speech_reason = _speech(asked)
    if asked.character_name:
        components["character/name"] = name
    reasons = tuple(reason for reason in (name_reason, speech_reason) if reason)
    return ReplyScore((name + speech) / 2, components, reasons)


def _name(asked: AskedReply) -> tuple[float, str]:
    if not asked.character_name:
        return _UNTOLD, "the row has no name of the character"
    if places(asked.reply.narration, asked.character_name, asked.player_name):
        return 1.0, ""
    return 0.0, "the narration does not name the character"


def _speech(asked: AskedReply) -> tuple[float, dict[str, float], str]:
    if not asked.speech_level:
        return _UNTOLD, {}, "the row has no speech level"
    quote = asked.reply.quote
    if not quote:
        return 0.0, {"character/speech": 0.0, "character/no_quote": 1.0}, "nothing is said aloud"
    if not has_letter(quote):
        return (
            0.0,
            {"character/speech": 0.0, "character/no_quote": 0.0},
            "the quotation is only marks",
        )
    names = (asked.character_name, asked.player_name)
    spans = sorted({span for name in names for span in places(quote, name)})
    apart = [span for k, span in enumerate(spans) if k == 0 or span[0] >= spans[k - 1][1]]
    found = count(levels(quote, apart), asked.speech_level)
    components = {
        "character/speech": found.share,
        "character/no_quote": 0.0,
        "character/undecided_sentences": float(found.undecided),
    }
    reason = ""
    if not found.right + found.wrong:
        reason = "no sentence of the quotation shows a speech level"
    elif found.wrong:
        reason = (
            f"{found.wrong} of {found.right + found.wrong} sentences are not {asked.speech_level}"
        )
    return found.share, components, reason
