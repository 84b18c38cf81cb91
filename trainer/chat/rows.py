"""Read conversations from files: full dialogues, or a prompt and its reply."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Literal, NamedTuple

from scorekit.errors import UserError
from scorekit.rows.samples import BadRows
from trainer.chat.labels import TrainedTurns
from trainer.runs.readers import clean_cell, object_of, read_rows, report_bad_rows

#: The assistant's turns to train on. all: every turn; last: only the last one; each: every turn in
#: a separate row, after the turns before it.
Which = Literal["all", "last", "each"]
_ROLES = ("system", "user", "assistant", "tool")
#: Columns of a prompt, and of its reply, in the order in which they are tried.
_PROMPTS = ("prompt", "prompt_messages")
_REPLIES = ("completion", "reference")


class Conversation(NamedTuple):
    """A conversation of a file.

    location: its file and line.
    turns: messages; the last one is the assistant's.
    trained_turns: the turns to train on.
    """

    location: str
    turns: list[dict[str, Any]]
    trained_turns: TrainedTurns


def read_conversations(
    path: str, which: Which = "all", *, limit: int | None = None
) -> list[Conversation]:
    """Return the conversations of a file or dataset; with `each`, one for every assistant turn.

    limit: read this many rows at most.
    Raises UserError as `conversations`.
    """
    rows = list(islice(read_rows(path, with_bad=True), limit))
    results = conversations(path, rows, which)
    if not results:
        raise UserError(f"{path}: no rows")
    return results


def conversations(
    source: str, rows: Sequence[tuple[str, Any]], which: Which, bad_rows: BadRows = "refuse"
) -> list[Conversation]:
    """Return the conversations of rows: (location, row).

    A row has `messages`, or a prompt (`prompt`, `prompt_messages`) and its reply (`completion`,
    `reference`: messages or a text), of which only the reply is trained on. A turn of the assistant
    with `weight` 0 is not trained on. Raises UserError with a line for each wrong row, unless
    bad_rows is "skip".
    """
    results: list[Conversation] = []
    errors: list[str] = []
    for location, row in rows:
        try:
            results += conversations_of(row, location, which)
        except UserError as error:
            errors.append(str(error))
    report_bad_rows(source, errors, len(rows), bad_rows)
    if len({conversation.trained_turns for conversation in results}) > 1:
        other = next(c for c in results if c.trained_turns != results[0].trained_turns)
        raise UserError(
            f"{other.location}: some rows have `messages` and others a prompt. Train on the last "
            "turn of each (turns: last), or use two files"
        )
    return results


def conversations_of(row: Any, location: str, which: Which) -> Iterable[Conversation]:
    """Return the conversations of one row. Raises UserError."""
    row = object_of(row, location)
    if row.get("messages") is not None:
        turns = _check(row["messages"], location, "messages")
        _ends_in_reply(turns, location)
        if which == "each":
            return [
                Conversation(location, turns[: index + 1], "last")
                for index, turn in enumerate(turns)
                if turn["role"] == "assistant"
            ]
        return [Conversation(location, turns, which)]
    prompt = next((name for name in _PROMPTS if row.get(name) is not None), None)
    reply = next((name for name in _REPLIES if row.get(name) is not None), None)
    if prompt is None or reply is None:
        raise UserError(
            f"{location}: has neither `messages`, nor a `prompt` with `completion` or `reference`"
        )
    messages = row[reply]
    if isinstance(messages, str):
        messages = [{"role": "assistant", "content": messages}]
    turns = [*_check(row[prompt], location, prompt), *_check(messages, location, reply)]
    _ends_in_reply(turns, location)
    return [Conversation(location, turns, "last")]


def _check(messages: Any, row_location: str, column: str) -> list[dict[str, Any]]:
    """Return messages for a template, without null values (empty cells of a table)."""
    if not isinstance(messages, list) or not messages:
        raise UserError(f"{row_location}: {column}: expected a list of messages")
    turns = []
    for number, message in enumerate(messages, 1):
        location = f"{row_location}: {column}, turn {number}"
        if not isinstance(message, Mapping) or message.get("role") not in _ROLES:
            raise UserError(
                f"{location}: expected an object with `role` set to one of {', '.join(_ROLES)}"
            )
        turn = {key: value for key, value in message.items() if value is not None}
        if not isinstance(turn.get("content"), list):
            text = clean_cell(turn.get("content"), location, "content")
            if text is None and not turn.get("tool_calls"):
                raise UserError(f"{location}: has no content")
            turn["content"] = text or ""
        elif any(not isinstance(p, Mapping) or p.get("type") != "text" for p in turn["content"]):
            raise UserError(
                f"{location}: has parts other than text. Give such rows as `input_ids` with an "
                "`action_mask` and `images` (scorekit sft)"
            )
        else:
            for part in turn["content"]:
                if clean_cell(part.get("text"), location, "content") is None:
                    raise UserError(f"{location}: content: a part has no text")
        if turn.get("weight", 1) not in (0, 1):
            raise UserError(f"{location}: weight: expected 1 (train on it) or 0")
        turns.append(turn)
    return turns


def _ends_in_reply(turns: list[dict[str, Any]], location: str) -> None:
    roles = [turn["role"] for turn in turns]
    if "assistant" not in roles:
        raise UserError(f"{location}: no turn of the assistant to train on")
    if roles[0] == "assistant":
        raise UserError(
            f"{location}: begins with a turn of the assistant. Put a system or user turn before "
            "it, or remove it"
        )
    if not str(turns[-1]["content"]).strip() and not turns[-1].get("tool_calls"):
        raise UserError(f"{location}: its last turn is empty")
