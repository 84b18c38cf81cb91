"""The ids of a reply that the policy did not sample: a reference, or a source to translate to."""

from __future__ import annotations

from typing import Any

from jinja2 import TemplateError
from torch import nn

from scorekit.errors import UserError
from trainer.rl.control_tokens import control_tokens
from trainer.rl.policy import stop_token_ids, unwrap_distributed

_TURN = {"role": "user", "content": "a"}
_REPLY = {"role": "assistant", "content": "b"}


class ReplyEnd:
    """Ends replies as the model's template ends the assistant's turn, else with EOS."""

    def __init__(self, model: nn.Module, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.stops = stop_token_ids(unwrap_distributed(model), tokenizer)
        self.id = self._of_template() or self._eos()

    def reply_ids(self, text: str) -> list[int]:
        """Return the ids of a text as the assistant's turn, with the id that ends it.

        Control tokens in the text become text. Raises UserError if one of them cannot.
        """
        safe = control_tokens(self.tokenizer).as_text(text, "outside")
        return [*self.tokenizer(safe, add_special_tokens=False)["input_ids"], self.id]

    def _of_template(self) -> int | None:
        """Return the first id behind a reply that ends a turn; None if the template shows none."""
        if not getattr(self.tokenizer, "chat_template", None):
            return None
        try:
            prompt, full = (
                self.tokenizer.apply_chat_template(turns, tokenize=False, **options)
                for turns, options in (
                    ([_TURN], {"add_generation_prompt": True}),
                    ([_TURN, _REPLY], {}),
                )
            )
        except (TemplateError, ValueError, UserError):
            return None  # such as TranslateGemma's, which takes texts in another form
        if not full.startswith(prompt):
            return None
        ids = self.tokenizer(full[len(prompt) :], add_special_tokens=False)["input_ids"]
        return next((token_id for token_id in ids if token_id in self.stops), None)

    def _eos(self) -> int:
        eos = self.tokenizer.eos_token_id
        return int(eos) if eos in self.stops else self.stops[0]
