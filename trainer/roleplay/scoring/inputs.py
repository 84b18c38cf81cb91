"""Read the arguments of the reward functions, and reject invalid ones.

An invalid value would be scored like a wrong reply, without an error: so each error names the
argument and the row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

from scorekit.errors import UserError
from trainer.roleplay.formulas import ReplyContext
from trainer.roleplay.reply import ParsedReply, message_text
from trainer.roleplay.stated_facts import parse_level
from trainer.roleplay.turn import SpeechLevel

#: Columns of the rows that the functions use; others are ignored, because trainers pass all.
COLUMNS = ("reference", "player_name", "character_name", "speech_level")


def read_replies(
    prompts: Any, completions: Any, columns: Mapping[str, Any], corner_quotes: bool
) -> list[ReplyContext]:
    """Return one reply for each completion, with what its row says.

    prompts, completions: texts or lists of messages. columns: a value or None for each of
    `COLUMNS`, one per completion; a missing column is all None. Raises UserError.
    """
    replies = _entries("completions", completions, None)
    turns = _entries("prompts", prompts, len(replies))
    nothing = [None] * len(replies)
    values = {
        name: nothing if columns.get(name) is None else _entries(name, columns[name], len(replies))
        for name in COLUMNS
    }
    texts = {
        name: [_optional(f"{name}[{k}]", v) for k, v in enumerate(values[name])] for name in values
    }
    return [
        ReplyContext(
            ParsedReply(_text(f"completions[{index}]", reply), corner_quotes),
            _user_turn(f"prompts[{index}]", turns[index]),
            texts["reference"][index],
            texts["player_name"][index],
            texts["character_name"][index],
            _level(f"speech_level[{index}]", texts["speech_level"][index]),
        )
        for index, reply in enumerate(replies)
    ]


def _level(name: str, text: str | None) -> SpeechLevel | None:
    """Return the level that a text names; None if it is blank. Raises UserError."""
    return parse_level(name, text) if text and text.strip() else None


def _entries(name: str, values: Any, count: int | None) -> list[Any]:
    """Return the entries of a list. count: how many there must be."""
    if isinstance(values, str | bytes | Mapping | Set) or not isinstance(values, Iterable):
        raise UserError(
            f"{name}: expected a list with an entry for each completion, not {_kind(values)}. "
            "Put it into a list."
        )
    entries = list(values)
    if count is not None and len(entries) != count:
        raise UserError(
            f"{name}: {len(entries)} entries for {count} completions. Give one for each."
        )
    return entries


def _optional(name: str, value: Any) -> str | None:
    """Return a text, or None."""
    if value is None or isinstance(value, str):
        return value
    raise UserError(f"{name}: expected a text or None, not {_kind(value)}. Correct the column.")


def _text(name: str, message: Any) -> str:
    """Return the text of a prompt or completion."""
    if not isinstance(message, str):
        _check_messages(name, message)
    return message_text(message)


def _user_turn(name: str, prompt: Any) -> str:
    """Return the last user turn of a prompt; a text as it is."""
    if isinstance(prompt, str):
        return prompt
    _check_messages(name, prompt)
    turns = [turn for turn in prompt if turn.get("role") == "user"]
    return message_text(turns[-1:] or prompt)


def _check_messages(name: str, messages: Any) -> None:
    """Raise UserError if these are no messages with texts, lists of parts or nothing as content."""
    is_list = isinstance(messages, list | tuple)
    if not is_list or not all(isinstance(message, Mapping) for message in messages):
        raise UserError(
            f"{name}: expected a text or a list of messages, not {_kind(messages)}. "
            'A message is {"role": ..., "content": ...}.'
        )
    for message in messages:
        content = message.get("content")
        if not (content is None or isinstance(content, str) or _are_parts(content)):
            raise UserError(
                f"{name}: expected a text as content, not {_kind(content)}. Correct the message."
            )


def _are_parts(content: Any) -> bool:
    """Return whether a content is a list of parts, each with a text or without."""
    return isinstance(content, list) and all(
        isinstance(part, Mapping) and isinstance(part.get("text") or "", str) for part in content
    )


def _kind(value: Any) -> str:
    """Return what a value is, in words."""
    return "None" if value is None else f"{type(value).__name__} {value!r:.40}"
