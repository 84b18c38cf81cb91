"""Conversations of files: whole dialogues, or a prompt and its reply."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, Literal, NamedTuple

from scorekit.errors import UserError
from trainer.chat.labelling import Learned
from trainer.runs.readers import clean_cell, read_rows, shortened

#: all: every turn of the assistant is learned where it stands; last: only the last one; each: every
#: one in a row of its own, behind what stands before it.
Which = Literal["all", "last", "each"]
_ROLES = ("system", "user", "assistant", "tool")
#: Column of a prompt -> columns of its reply, in the order in which they are looked for.
_PROMPTS = ("prompt", "prompt_messages")
_REPLIES = ("completion", "reference")


class Conversation(NamedTuple):
    """where: its file and line. turns: messages; the last one the assistant's. learned: of it."""

    where: str
    turns: list[dict[str, Any]]
    learned: Learned


def read_conversations(
    path: str, which: Which = "all", *, split: str | None = None, limit: int | None = None
) -> list[Conversation]:
    """The conversations of a file or dataset, each turn of the assistant in one of its own where
    `which` says so. limit: rows that are read at most. Raises UserError as `conversations`."""
    found = conversations(islice(read_rows(path, split), limit), which)
    if not found:
        raise UserError(f"{path}: no rows")
    return found


def conversations(rows: Iterable[tuple[str, Any]], which: Which) -> list[Conversation]:
    """Those of rows: (where it stands, row).

    A row has `messages`, or a prompt (`prompt`, `prompt_messages`) and its reply (`completion`,
    `reference`: messages or a text), of which only the reply is learned. A turn of the assistant
    with `weight` 0 is not learned. Raises UserError with a line for each row that is no
    conversation.
    """
    found: list[Conversation] = []
    faults: list[str] = []
    for where, row in rows:
        try:
            found += conversations_of(row, where, which)
        except UserError as error:
            faults.append(str(error))
    if faults:
        what = f"{len(faults)} rows are no conversations:"
        raise UserError(what, shortened(faults))
    if len({conversation.learned for conversation in found}) > 1:
        other = next(c for c in found if c.learned != found[0].learned)
        raise UserError(
            f"{other.where}: some rows have `messages` and others a prompt: learn the last turn of "
            "each (turns: last), or give them in two files"
        )
    return found


def conversations_of(row: Any, where: str, which: Which) -> Iterable[Conversation]:
    """Those of one row. Raises UserError."""
    if not isinstance(row, Mapping):
        raise UserError(f"{where}: a row is an object with `messages`, not {type(row).__name__}")
    if row.get("messages") is not None:
        turns = _checked(row["messages"], where, "messages")
        _ends_in_reply(turns, where)
        if which == "each":
            return [
                Conversation(where, turns[: place + 1], "last")
                for place, turn in enumerate(turns)
                if turn["role"] == "assistant"
            ]
        return [Conversation(where, turns, which)]
    prompt = next((name for name in _PROMPTS if row.get(name) is not None), None)
    reply = next((name for name in _REPLIES if row.get(name) is not None), None)
    if prompt is None or reply is None:
        raise UserError(
            f"{where}: neither `messages`, nor a `prompt` with its `completion` or `reference`"
        )
    said = row[reply]
    if isinstance(said, str):
        said = [{"role": "assistant", "content": said}]
    turns = [*_checked(row[prompt], where, prompt), *_checked(said, where, reply)]
    _ends_in_reply(turns, where)
    return [Conversation(where, turns, "last")]


def _checked(messages: Any, where: str, column: str) -> list[dict[str, Any]]:
    """Messages as a template may have them; what a table has no value for (null) is left out."""
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{where}: {column}: a list of messages is wanted")
    turns = []
    for number, message in enumerate(messages, 1):
        here = f"{where}: {column}, turn {number}"
        if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
            raise UserError(f"{here}: an object with a role ({', '.join(_ROLES)}) is wanted")
        turn = {key: value for key, value in message.items() if value is not None}
        if not isinstance(turn.get("content"), list):
            text = clean_cell(turn.get("content"), here, "content")
            if text is None and not turn.get("tool_calls"):
                raise UserError(f"{here}: has no content")
            turn["content"] = text or ""
        elif any(not isinstance(p, Mapping) or p.get("type") != "text" for p in turn["content"]):
            raise UserError(
                f"{here}: parts other than text: give such rows as `input_ids` with an "
                "`action_mask` and `images` (python -m trainer sft)"
            )
        else:
            for part in turn["content"]:
                if clean_cell(part.get("text"), here, "content") is None:
                    raise UserError(f"{here}: content: a part without text")
        if turn.get("weight", 1) not in (0, 1):
            raise UserError(f"{here}: weight: 1 (learned) or 0 (not learned) is wanted")
        turns.append(turn)
    return turns


def _ends_in_reply(turns: list[dict[str, Any]], where: str) -> None:
    roles = [turn["role"] for turn in turns]
    if "assistant" not in roles:
        raise UserError(f"{where}: no turn of the assistant: there is nothing to learn")
    if roles[0] == "assistant":
        raise UserError(
            f"{where}: begins with a turn of the assistant, which answers nobody: put a system or "
            "user turn before it, or leave it out"
        )
    if not str(turns[-1]["content"]).strip() and not turns[-1].get("tool_calls"):
        raise UserError(f"{where}: its last turn is empty")
