"""A turn of a role-play: the prompt that a reply is sampled for, and what is known of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

#: `{"role": "system" | "user" | "assistant", "content": text}`.
Message: TypeAlias = dict[str, str]
SpeechLevel = Literal["polite", "plain"]


@dataclass(frozen=True, slots=True)
class RoleplayTurn:
    """A prompt whose next turn is the character's.

    id: of this row, unique in its file. prompt: messages, the last one the user's. reference: a
    reply that somebody wrote. player_name, character_name: who the user plays, and who the model.
    speech_level: how the character speaks to the player. scenario: what it is held out by.
    dialogue, place: which dialogue the prompt is of, and the place of its reply there.
    None: the row does not tell.
    """

    id: str
    prompt: tuple[Message, ...]
    reference: str | None = None
    player_name: str | None = None
    character_name: str | None = None
    speech_level: SpeechLevel | None = None
    scenario: str | None = None
    dialogue: str | None = None
    place: int | None = None

    @property
    def user_turn(self) -> str:
        """What the player said last."""
        return self.prompt[-1]["content"]
