"""Convert the prompt or dialogue of a row to messages."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from trainer.roleplay.turn import Message

ROLES = ("system", "user", "assistant")
#: A rendered prompt: with tokens of a chat template.
_RENDERED = re.compile(
    r"<\|(?:im_start|im_end|begin_of_text|start_header_id|eot_id|system|user|assistant)\|?>"
    r"|<start_of_turn>|<end_of_turn>|\[/?INST\]"
)
#: `SYSTEM: ...`, `USER: ...` at the start of a line: messages below each other.
_FLAT = re.compile(r"^(SYSTEM|USER|ASSISTANT): ?", re.MULTILINE)


class WrongMessages(ValueError):
    """A value is no list of messages; the message has the reason and the remedy."""


def read_messages(value: Any) -> tuple[Message, ...]:
    """Return the messages of a list, of a JSON text of such a list, or of a plain text.

    A text with the lines `SYSTEM: `, `USER: `, `ASSISTANT: ` is split at these; any other is one
    user turn. A rendered prompt is refused: the trainer renders prompts with the model's own
    template. Raises WrongMessages.
    """
    if isinstance(value, str):
        value = _of_text(value)
    if not isinstance(value, Sequence) or not value:
        raise WrongMessages("expected a list of messages: [{role, content}, ...]")
    messages = tuple(_message(index, message) for index, message in enumerate(value))
    for index, message in enumerate(messages):
        if index and message["role"] == "system":
            raise WrongMessages(f"message {index}: only the first message may be a system turn")
    return messages


def _of_text(text: str) -> Any:
    if text.lstrip()[:1] == "[":
        try:
            parsed = json.loads(text)
        except (ValueError, RecursionError):
            parsed = None
        if isinstance(parsed, list):
            return parsed
    if _RENDERED.search(text):
        raise WrongMessages(
            "a prompt that a chat template has rendered. Give its messages (prompt_messages): "
            "the model's own template renders them"
        )
    roles = _FLAT.findall(text)
    if not roles or not _FLAT.match(text):
        return [{"role": "user", "content": text}]
    contents = _FLAT.split(text)[2::2]
    return [
        {"role": role.lower(), "content": content.strip("\n")}
        for role, content in zip(roles, contents, strict=True)
    ]


def _message(index: int, value: Any) -> Message:
    label = f"message {index}"
    if not isinstance(value, dict):
        raise WrongMessages(f"{label}: expected an object with role and content")
    role, content = value.get("role"), value.get("content")
    if role not in ROLES:
        raise WrongMessages(f"{label}: expected one of the roles {', '.join(ROLES)}")
    if isinstance(content, list):  # parts, as in chat APIs
        kinds = {part.get("type") if isinstance(part, dict) else None for part in content}
        texts = [part["text"] for part in content if isinstance(part, dict) and "text" in part]
        if kinds != {"text"} or not all(isinstance(text, str) for text in texts):
            raise WrongMessages(f"{label}: content: parts other than text cannot be used")
        content = "".join(texts)
    if not isinstance(content, str) or not content.strip():
        raise WrongMessages(f"{label}: content is empty. A text is required")
    if "\0" in content:
        raise WrongMessages(f"{label}: content has a NUL character. Remove it")
    try:
        content.encode()
    except UnicodeEncodeError:
        raise WrongMessages(f"{label}: content is not valid Unicode (a lone surrogate)") from None
    return {"role": role, "content": content}
