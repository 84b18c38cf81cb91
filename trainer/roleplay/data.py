"""Read turns: rows of a file, folder or hub dataset -> messages -> RoleplayTurn -> the columns for
TRL."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import islice
from typing import Any

from scorekit.errors import UserError
from trainer.chat.message_check import MessageCheck, find_placeholder
from trainer.roleplay.config_data import FIELDS, STATED_FIELDS, RoleplayData
from trainer.roleplay.stated_facts import extract_facts, parse_level
from trainer.roleplay.turn import COLUMNS, Message, RoleplayTurn
from trainer.runs.readers import cell, clean_cell, id_cell, parse_rows, read_rows, row_ids

log = logging.getLogger(__name__)


def load_train(data: RoleplayData, check: MessageCheck | None = None) -> list[RoleplayTurn]:
    """Return the turns to train on. Raises UserError.

    check: see `load_turns`.
    """
    if data.train is None:
        raise UserError("data.train: required. Set the turns to train on")
    return load_turns(data.train, data, split=data.train_split, limit=data.train_limit, check=check)


def load_held_out(
    data: RoleplayData, limit: int | None = None, check: MessageCheck | None = None
) -> list[RoleplayTurn]:
    """Return the turns to evaluate on; none if the config names none. Raises UserError.

    check: see `load_turns`.
    """
    if data.eval is None:
        return []
    return load_turns(data.eval, data, split=data.eval_split, limit=limit, check=check)


def load_turns(
    source: str,
    data: RoleplayData,
    *,
    split: str | None = None,
    limit: int | None = None,
    check: MessageCheck | None = None,
) -> list[RoleplayTurn]:
    """Read turns.

    source: a file, a folder (see trainer/runs/readers.py for the formats), or a hub id.
    split: part of a folder or hub dataset.
    limit: read this many rows at most.
    check: of the messages, the reference and the names; None: they are not given to a model.

    A missing id becomes a hash of the row; a missing scenario becomes a hash of its system turn.
    Raises UserError with a line for each wrong row, unless data.bad_rows skips them.
    """
    rows = islice(read_rows(source, split, with_bad=True), limit)
    parse = partial(_turn, data=data, check=check)
    return _with_ids(source, parse_rows(source, rows, parse, data.bad_rows))


def _with_ids(source: str, turns: Sequence[RoleplayTurn]) -> list[RoleplayTurn]:
    def content(turn: RoleplayTurn) -> str:
        return _content(turn.prompt) + "\x1f" + (turn.reference or "")

    ids = row_ids(source, turns, content)
    return [
        dataclasses.replace(unnamed_turn, id=id)
        for unnamed_turn, id in zip(turns, ids, strict=True)
    ]


def columns_of(turns: Sequence[RoleplayTurn]) -> dict[str, list[Any]]:
    """Return field -> its values, one for each turn, for `datasets.Dataset.from_dict`.

    TRL passes them to the reward functions under these names.
    """
    columns: dict[str, list[Any]] = {
        field.name: [getattr(turn, field.name) for turn in turns]
        for field in dataclasses.fields(RoleplayTurn)
    }
    columns["prompt"] = [[dict(message) for message in turn.prompt] for turn in turns]
    return columns


def missing_facts(turns: Iterable[RoleplayTurn]) -> str:
    """Return the fields that rewards use (neutral without a value), each with the number of turns
    without it; "" if there are none."""
    counts = Counter(field for turn in turns for field in COLUMNS if getattr(turn, field) is None)
    return ", ".join(f"{field} {counts[field]}" for field in COLUMNS if counts[field])


def in_both(train: Sequence[RoleplayTurn], held_out: Sequence[RoleplayTurn]) -> str:
    """Return a line on held-out turns whose prompt or scenario is in the training data; ""
    without any."""
    prompts = {_content(turn.prompt) for turn in train}
    scenarios = {turn.scenario for turn in train}
    num_same_prompt = sum(_content(turn.prompt) in prompts for turn in held_out)
    num_same_scenario = sum(turn.scenario in scenarios for turn in held_out)
    if not num_same_scenario and not num_same_prompt:
        return ""
    return (
        f"data.eval: of {len(held_out)} turns {num_same_prompt} have a prompt, and "
        f"{num_same_scenario} a scenario, that is also in data.train. Their stats measure "
        "memorization, too"
    )


def read_stated_facts(
    row: Any, location: str, data: RoleplayData, prompt: Sequence[Message]
) -> dict[str, Any]:
    """Return the other fields of a turn: from columns, else from the system turn. Raises
    UserError."""
    fields: dict[str, Any] = {}
    for field in STATED_FIELDS:
        column = data.columns.get(field, field)
        fields[field] = _read_field(field, cell(row, column), location, column)
    system = prompt[0]["content"] if prompt[0]["role"] == "system" else ""
    if data.from_prompt and system:
        fields |= {
            field: value for field, value in extract_facts(system).items() if fields[field] is None
        }
    fields["scenario"] = fields["scenario"] or (_hash(system) if system else None)
    return fields


def _turn(row: Any, location: str, data: RoleplayData, check: MessageCheck | None) -> RoleplayTurn:
    names = {field: data.columns.get(field, field) for field in FIELDS}
    prompt = _prompt(row, location, names)
    reference = clean_cell(cell(row, names["reference"]), location, names["reference"])
    turn = RoleplayTurn(
        id=id_cell(cell(row, names["id"]), location, names["id"]) or "",
        prompt=prompt,
        reference=reference if reference and reference.strip() else None,
        **read_stated_facts(row, location, data, prompt),
    )
    return turn if check is None else checked_turn(turn, location, check)


def checked_turn(turn: RoleplayTurn, location: str, check: MessageCheck) -> RoleplayTurn:
    """Return a turn with checked messages, reference and names. Raises UserError."""
    messages = list(turn.prompt)
    if turn.reference is not None:
        messages.append({"role": "assistant", "content": turn.reference})
    messages = check.clean(messages, location)
    for field in ("player_name", "character_name"):
        name = getattr(turn, field)
        if name and find_placeholder(name) and check.chat.placeholders == "refuse":
            raise UserError(f"{location}: {field}: {name!r} is a placeholder. Give the name")
    prompt = tuple(messages[: len(turn.prompt)])
    reference = None if turn.reference is None else messages[-1]["content"]
    return dataclasses.replace(turn, prompt=prompt, reference=reference)


def _prompt(row: dict[str, Any], location: str, names: dict[str, str]) -> tuple[Message, ...]:
    """Return `prompt`, else `prompt_messages`; messages are preferred to a text."""
    first, second = cell(row, names["prompt"]), cell(row, names["prompt_messages"])
    name, value = names["prompt"], first
    if first in (None, "") or (isinstance(first, str) and second):
        name, value = names["prompt_messages"], second
    if value in (None, ""):
        row_columns = ", ".join(map(str, row))
        raise UserError(
            f"{location}: no {names['prompt']}, nor {names['prompt_messages']} (the row has "
            f"{row_columns}). Name the column in data.columns"
        )
    try:
        prompt = read_messages(value)
    except WrongMessages as error:
        raise UserError(f"{location}: {name}: {error}") from None
    if prompt[-1]["role"] != "user":
        raise UserError(
            f"{location}: {name}: the last turn is the {prompt[-1]['role']}'s. A prompt has to end "
            "with the user's (dialogues: scorekit roleplay prepare)"
        )
    return prompt


def _read_field(field: str, value: Any, location: str, column: str) -> str | int | None:
    if field in ("scenario", "dialogue", "place"):
        name = id_cell(value, location, column) or None
        if field != "place" or name is None:
            return name
        if not name.isdecimal():
            raise UserError(f"{location}: {column}: expected a whole number, not {name!r:.40}")
        return int(name)
    text = (clean_cell(value, location, column) or "").strip()
    if len(text.splitlines()) > 1:
        raise UserError(f"{location}: {column}: expected one line, not {text!r:.40}")
    if field != "speech_level" or not text:
        return text or None
    return parse_level(f"{location}: {column}", text)


def _content(prompt: Sequence[Message]) -> str:
    return json.dumps(list(prompt), ensure_ascii=False)


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


# -- messages --------------------------------------------------------------------------------------


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
