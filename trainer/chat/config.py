"""The section `chat` of a config: how messages become text, the same in SFT, checks and RL."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from scorekit.config import Config
from trainer.config_base import may_change


class ChatConfig(Config):
    """Settings for converting messages to text."""

    template: str | None = may_change(
        None, description="A file with a chat template (Jinja); null: the model's own."
    )
    enable_thinking: bool | None = Field(
        None,
        description="Passed to the template under this name (Qwen3); null: not passed, so that the "
        "template's default applies.",
    )

    @property
    def template_kwargs(self) -> dict[str, bool]:
        """Return the arguments of the template besides the messages."""
        return {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}


#: How control tokens of the model in a message are handled.
ControlTokenAction = Literal["refuse", "neutralize", "keep"]
#: How placeholders in a message are handled.
PlaceholderAction = Literal["refuse", "keep"]


class MessagesConfig(ChatConfig):
    """Settings for messages that come from files."""

    control_tokens: ControlTokenAction = Field(
        "refuse",
        description="How a row is handled that has a control token of the model in a message "
        "(<|im_end|>, <end_of_turn>, [INST], <|image_pad|>, ...): refuse the row; neutralize: put "
        "a space inside the token, so that it stays text; or keep it, if it is meant.",
    )
    placeholders: PlaceholderAction = Field(
        "refuse",
        description="How a row is handled that has {{char}}, {{user}}, <USER> or <BOT> in place of "
        "a name, outside of code: refuse the row, or keep the text.",
    )
