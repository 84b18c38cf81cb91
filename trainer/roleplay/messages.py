"""What stands in a row for a prompt or a dialogue -> messages."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from trainer.roleplay.turn import Message

ROLES = ("system", "user", "assistant")
#: A rendered prompt: the tokens of a chat template, not text that somebody wrote.
_RENDERED = re.compile(
    r"<\|(?:im_start|im_end|begin_of_text|start_header_id|eot_id|system|user|assistant)\|?>"
    r"|<start_of_turn>|<end_of_turn>|\[/?INST\]"
)
#: `SYSTEM: ...`, `USER: ...` at the beginning of a line: messages that were written one below the
#: other.
_FLAT = re.compile(r"^(SYSTEM|USER|ASSISTANT): ?", re.MULTILINE)


class WrongMessages(ValueError):
    """What stands there is no list of messages; says why, and what to do."""


def read_messages(value: Any) -> tuple[Message, ...]:
    """Messages of a list, of such a list as JSON text, or of a text.

    A text with the lines `SYSTEM: `, `USER: `, `ASSISTANT: ` is split at these; any other is what a
    user says. A rendered prompt is refused: the trainer renders prompts itself, by the model's own
    template. Raises WrongMessages.
    """
    if isinstance(value, str):
        value = _of_text(value)
    if not isinstance(value, Sequence) or not value:
        raise WrongMessages("a list of messages is wanted: [{role, content}, ...]")
    messages = tuple(_message(index, one) for index, one in enumerate(value))
    late = [index for index, one in enumerate(messages) if one["role"] == "system" and index]
    if late:
        raise WrongMessages(f"message {late[0]}: a system turn stands first, or nowhere")
    return messages


def _of_text(text: str) -> Any:
    if text.lstrip()[:1] == "[":
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        if isinstance(found, list):
            return found
    if _RENDERED.search(text):
        raise WrongMessages(
            "a prompt that a chat template has rendered: give its messages (prompt_messages), "
            "since the model's own template renders them"
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
    where = f"message {index}"
    if not isinstance(value, dict):
        raise WrongMessages(f"{where}: an object with role and content is wanted")
    role, content = value.get("role"), value.get("content")
    if role not in ROLES:
        raise WrongMessages(f"{where}: the role is none of {', '.join(ROLES)}")
    if isinstance(content, list):  # parts, as chat APIs have them
        kinds = {part.get("type") if isinstance(part, dict) else None for part in content}
        texts = [part["text"] for part in content if isinstance(part, dict) and "text" in part]
        if kinds != {"text"} or not all(isinstance(text, str) for text in texts):
            raise WrongMessages(f"{where}: content: parts other than text cannot be used")
        content = "".join(texts)
    if not isinstance(content, str) or not content.strip():
        raise WrongMessages(f"{where}: content is empty: a text is wanted")
    if "\0" in content:
        raise WrongMessages(f"{where}: content holds a NUL character: take it out")
    try:
        content.encode()
    except UnicodeEncodeError:
        raise WrongMessages(f"{where}: content is not valid Unicode (a lone surrogate)") from None
    return {"role": role, "content": content}
