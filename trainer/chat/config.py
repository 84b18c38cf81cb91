"""The section `chat` of a config: how messages become text, the same in SFT, checks and RL."""

from __future__ import annotations

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
