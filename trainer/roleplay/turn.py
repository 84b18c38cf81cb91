"""A turn of role-play: the prompt that a reply is sampled for, and the data of its row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

#: `{"role": "system" | "user" | "assistant", "content": text}`.
Message: TypeAlias = dict[str, str]
SpeechLevel = Literal["polite", "plain"]
#: Columns of the rows that the rewards use; others are ignored, because trainers pass all.
COLUMNS = ("reference", "player_name", "character_name", "speech_level")


@dataclass(frozen=True, slots=True)
class RoleplayTurn:
    """A prompt whose next turn is the character's.

    id: of this row, unique in its file.
    prompt: messages, the last one the user's.
    reference: a reply that a person wrote.
    player_name, character_name: the roles of the user and of the model.
    speech_level: how the character speaks to the player.
    scenario: group for held-out data.
    dialogue, place: the dialogue of the prompt, and the index of its reply there.
    None: the row has no value.
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
        """Return the last text of the player."""
        return self.prompt[-1]["content"]
