"""Check messages from files: control tokens of the model, and placeholders in place of names.

A control token in a message is read as the model's own: a user turn with `<|im_end|>` ends there,
and what follows is trained on, or sampled after, as another turn. `{{char}}` is left over from a
card of a character: a program should have put a name there.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from scorekit.errors import UserError
from scorekit.rows.samples import BadRows
from scorekit.text.chat_marks import special_token, split_special_tokens
from trainer.chat.config import MessagesConfig
from trainer.chat.render import read_template
from trainer.chat.rows import Conversation
from trainer.rl.control_tokens import Author, control_tokens
from trainer.runs.readers import report_bad_rows

log = logging.getLogger(__name__)

#: Remedies.
CONTROL_REMEDY = (
    "Remove it, or set chat.control_tokens (--control-tokens) to neutralize, to write it as text, "
    "or to keep if it is meant"
)
PLACEHOLDER_REMEDY = "Put the name there, or set chat.placeholders (--placeholders) to keep"
#: Keys of a message whose values are not written by people.
_NO_TEXTS = ("role", "type", "weight")
#: Types of parts that hold a file: its path or its data is no text of the prompt.
_FILES = ("image", "image_url", "video", "audio", "input_audio")
_PLACEHOLDER = re.compile(
    r"\{\{\s*(?i:char|user|bot)(?i:[ _]?name)?\s*\}\}|<(USER|BOT|CHAR)>(?!(?s:.*)</\1>)"
)
#: Code, where braces have another meaning.
_CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`", re.DOTALL)


class MessageCheck:
    """Checks messages for one model.

    tokenizer: the model's. None: it is not known; then only tokens in forms that are used for
    nothing else are found.
    neutralized: number of conversations with control tokens that were written as text.
    """

    def __init__(self, tokenizer: Any, chat: MessagesConfig) -> None:
        self.chat = chat
        self.neutralized = 0
        self._controls = None
        if tokenizer is not None:
            template = read_template(chat.template) if chat.template else None
            self._controls = control_tokens(tokenizer, template, chat.template_kwargs)

    def clean(self, turns: Iterable[dict[str, Any]], location: str) -> list[dict[str, Any]]:
        """Return the messages, with control tokens as text if the config says so.

        location: file, line and column. Raises UserError that names the message.
        """
        results = []
        is_changed = False
        for number, turn in enumerate(turns, 1):
            errors = self.errors(turn)
            if errors:
                raise UserError(f"{location}: turn {number} ({turn['role']}): {errors[0]}")
            cleaned = self.as_text(turn)
            is_changed = is_changed or cleaned != turn
            results.append(cleaned)
        self.neutralized += is_changed
        return results

    def errors(self, turn: dict[str, Any]) -> list[str]:
        """Return why a message is refused: at most one control token and one placeholder."""
        texts = _texts_of(turn)
        errors = []
        if self.chat.control_tokens == "refuse":
            token = next(filter(None, (self._find(text, _author(turn)) for text in texts)), None)
            if token is not None:
                errors.append(f"has the control token {token!r} of the model. {CONTROL_REMEDY}")
        if self.chat.placeholders == "refuse":
            name = next(filter(None, map(find_placeholder, texts)), None)
            if name is not None:
                errors.append(f"has the placeholder {name!r}. {PLACEHOLDER_REMEDY}")
        return errors

    def note(self, key: str, count: int) -> str:
        """Return a line on how many of `count` conversations were changed; "" for none.

        key: config key of the rows.
        """
        if not self.neutralized:
            return ""
        return (
            f"{key}: {self.neutralized} of {count} rows have control tokens of the model, which "
            "are written as text (chat.control_tokens)"
        )

    def log_neutralized(self, key: str, count: int) -> None:
        """Log the line of `note`, if any."""
        if note := self.note(key, count):
            log.warning("%s", note)

    def _find(self, text: str, author: Author) -> str | None:
        if self._controls is None:
            return special_token(text)
        return next(iter(self._controls.find(text, author)), None)

    def as_text(self, turn: dict[str, Any]) -> dict[str, Any]:
        """Return a message with control tokens as text if the config says so."""
        if self.chat.control_tokens != "neutralize":
            return turn
        author = _author(turn)

        def change(text: str) -> str:
            if self._controls is None:
                return split_special_tokens(text)
            return self._controls.as_text(text, author)

        changed = _changed_turn(turn, change)
        joined = _join(changed)
        if joined is not None and (full_text := change(joined)) != joined:
            changed["content"] = [{"type": "text", "text": full_text}]
        return changed


def clean_rows(
    check: MessageCheck,
    rows: Sequence[Conversation],
    source: str,
    bad_rows: BadRows = "refuse",
) -> list[Conversation]:
    """Return conversations with checked messages.

    source: their file, for messages. Raises UserError with a line for each wrong row, unless
    bad_rows is "skip": all conversations of such a row are left out.
    """
    results: list[Conversation] = []
    error_by_location: dict[str, str] = {}
    for row in rows:
        try:
            results.append(row._replace(turns=check.clean(row.turns, row.location)))
        except UserError as error:
            error_by_location.setdefault(row.location, str(error))
    num_rows = len({row.location for row in rows})
    report_bad_rows(source, list(error_by_location.values()), num_rows, bad_rows)
    return [row for row in results if row.location not in error_by_location]


def find_placeholder(text: str) -> str | None:
    """Return the first placeholder of a name in a text, outside of code."""
    match = _PLACEHOLDER.search(_CODE.sub(" ", text))
    return match and match.group()


def _author(turn: dict[str, Any]) -> Author:
    return "assistant" if turn["role"] == "assistant" else "user"


def _texts_of(turn: dict[str, Any]) -> list[str]:
    """Return all texts of a message, also those within its calls of tools."""
    texts: list[str] = []

    def note(text: str) -> str:
        texts.append(text)
        return text

    _changed_turn(turn, note)
    joined = _join(turn)
    return texts if joined is None else [*texts, joined]


def _join(turn: dict[str, Any]) -> str | None:
    """Return the text of several parts, which templates write without a space between them."""
    parts = turn.get("content")
    if not isinstance(parts, list) or len(parts) < 2:
        return None
    return "".join(str(part.get("text") or "") for part in parts if isinstance(part, dict))


def _changed_turn(turn: dict[str, Any], change: Callable[[str], str]) -> dict[str, Any]:
    """Return a message with every text in it changed; its role and its files stay."""
    changed = {}
    for key, value in turn.items():
        if key == "content" and isinstance(value, list):
            changed[key] = [
                part
                if isinstance(part, dict) and part.get("type") in _FILES
                else _with_texts(part, change)
                for part in value
            ]
        else:
            changed[key] = value if key in _NO_TEXTS else _with_texts(value, change)
    return changed


def _with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Return a JSON value with every text in it changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {
            change(key) if isinstance(key, str) else key: (
                entry if key in _NO_TEXTS else _with_texts(entry, change)
            )
            for key, entry in value.items()
        }
    if isinstance(value, Sequence):
        return [_with_texts(entry, change) for entry in value]
    return value
