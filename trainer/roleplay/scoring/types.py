"""The input and the result of a reward formula."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainer.roleplay.reply import ParsedReply
from trainer.roleplay.turn import SpeechLevel


@dataclass(frozen=True, slots=True)
class ReplyContext:
    """One reply with the fields of its row; None if the row has no value."""

    reply: ParsedReply
    user_turn: str
    reference: str | None = None
    player_name: str | None = None
    character_name: str | None = None
    speech_level: SpeechLevel | None = None


@dataclass(frozen=True, slots=True)
class ReplyScore:
    """A value in [0, 1] before its weight.

    components: by the keys of the reward's stats, those that are defined for this reply.
    reasons: why the value is not 1, in words.
    """

    value: float
    components: dict[str, float] = field(default_factory=dict)
    reasons: tuple[str, ...] = ()
