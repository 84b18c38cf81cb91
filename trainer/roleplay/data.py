"""Turns: rows of a file, folder or hub dataset -> RoleplayTurn -> the columns that TRL wants."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from scorekit.errors import UserError
from trainer.roleplay.config_data import FIELDS, TOLD, RoleplayData
from trainer.roleplay.messages import WrongMessages, read_messages
from trainer.roleplay.told import parse_level, told_in
from trainer.roleplay.turn import Message, RoleplayTurn
from trainer.runs.readers import cell, clean_cell, id_cell, read_rows, row_ids, shortened

log = logging.getLogger(__name__)


def load_train(data: RoleplayData) -> list[RoleplayTurn]:
    """The turns to learn from. Raises UserError."""
    if data.train is None:
        raise UserError("data.train is not set: give the turns to learn from")
    return load_turns(data.train, data, split=data.train_split, limit=data.train_limit)


def load_held_out(data: RoleplayData, limit: int | None = None) -> list[RoleplayTurn]:
    """Those to evaluate on; none where the config names none. Raises UserError."""
    if data.eval is None:
        return []
    return load_turns(data.eval, data, split=data.eval_split, limit=limit)


def load_turns(
    source: str, data: RoleplayData, *, split: str | None = None, limit: int | None = None
) -> list[RoleplayTurn]:
    """Read turns.

    source: a file, a folder (trainer/runs/readers.py says in which forms), or a hub id. split:
    names a part of a folder or hub dataset. limit: read this many rows at most.

    A missing id becomes a hash of the row; a missing scenario, one of its system turn. Raises
    UserError with a line for each wrong row: which, what is wrong, what to do.
    """
    turns, faults = [], []
    for where, row in islice(read_rows(source, split), limit):
        try:
            turns.append(_turn(row, where, data))
        except UserError as fault:
            faults.append(str(fault))
    if faults:
        what = f"{len(faults)} of {len(faults) + len(turns)} rows cannot be used"
        raise UserError(f"{source}: {what}:", shortened(faults))
    if not turns:
        raise UserError(f"{source}: no rows")
    return _with_ids(source, turns)


def _with_ids(source: str, turns: Sequence[RoleplayTurn]) -> list[RoleplayTurn]:
    def content(turn: RoleplayTurn) -> str:
        return _content(turn.prompt) + "\x1f" + (turn.reference or "")

    ids = row_ids(source, turns, content)
    return [dataclasses.replace(one, id=id) for one, id in zip(turns, ids, strict=True)]


def columns_of(turns: Sequence[RoleplayTurn]) -> dict[str, list[Any]]:
    """Field -> its values, one a turn: what `datasets.Dataset.from_dict` takes, and what TRL gives
    to the reward functions under these names."""
    columns: dict[str, list[Any]] = {
        field.name: [getattr(turn, field.name) for turn in turns]
        for field in dataclasses.fields(RoleplayTurn)
    }
    columns["prompt"] = [[dict(message) for message in turn.prompt] for turn in turns]
    return columns


def untold(turns: Iterable[RoleplayTurn]) -> dict[str, int]:
    """Field -> how many turns do not tell it, of those that rewards read (neutral there)."""
    fields = ("reference", "player_name", "character_name", "speech_level")
    counts = Counter(field for turn in turns for field in fields if getattr(turn, field) is None)
    return {field: counts[field] for field in fields if counts[field]}


def in_both(train: Sequence[RoleplayTurn], held_out: Sequence[RoleplayTurn]) -> str:
    """A line on the held-out turns whose prompt or scenario is learned from, too; "" where there
    are none."""
    prompts = {_content(turn.prompt) for turn in train}
    scenarios = {turn.scenario for turn in train}
    same = sum(_content(turn.prompt) in prompts for turn in held_out)
    near = sum(turn.scenario in scenarios for turn in held_out)
    if not near and not same:
        return ""
    return (
        f"data.eval: of {len(held_out)} turns {same} have a prompt, and {near} a scenario, that "
        "stands in data.train, too: their figures say how well these were learned"
    )


def told_of(row: Any, where: str, data: RoleplayData, prompt: Sequence[Message]) -> dict[str, Any]:
    """What a row tells besides its prompt, by the fields of a turn: from its columns, else names
    and level from the system turn. Raises UserError."""
    told: dict[str, Any] = {}
    for field in TOLD:
        column = data.columns.get(field, field)
        told[field] = _told(field, cell(row, column), where, column)
    system = prompt[0]["content"] if prompt[0]["role"] == "system" else ""
    if data.from_prompt and system:
        told |= {field: found for field, found in told_in(system).items() if told[field] is None}
    told["scenario"] = told["scenario"] or (_hash(system) if system else None)
    return told


def _turn(row: Any, where: str, data: RoleplayData) -> RoleplayTurn:
    if not isinstance(row, dict):
        kind = "an array" if isinstance(row, list) else type(row).__name__
        raise UserError(f"{where}: a row is an object of fields, not {kind}")
    names = {field: data.columns.get(field, field) for field in FIELDS}
    prompt = _prompt(row, where, names)
    reference = clean_cell(cell(row, names["reference"]), where, names["reference"])
    return RoleplayTurn(
        id=id_cell(cell(row, names["id"]), where, names["id"]) or "",
        prompt=prompt,
        reference=reference if reference and reference.strip() else None,
        **told_of(row, where, data, prompt),
    )


def _prompt(row: dict[str, Any], where: str, names: dict[str, str]) -> tuple[Message, ...]:
    """`prompt`, else `prompt_messages`; a prompt that is one text yields to messages beside it."""
    first, second = cell(row, names["prompt"]), cell(row, names["prompt_messages"])
    name, value = names["prompt"], first
    if first in (None, "") or (isinstance(first, str) and second):
        name, value = names["prompt_messages"], second
    if value in (None, ""):
        there = ", ".join(map(str, row))
        raise UserError(
            f"{where}: no {names['prompt']}, nor {names['prompt_messages']} (the row has {there}): "
            "name the column in data.columns"
        )
    try:
        prompt = read_messages(value)
    except WrongMessages as fault:
        raise UserError(f"{where}: {name}: {fault}") from None
    if prompt[-1]["role"] != "user":
        raise UserError(
            f"{where}: {name}: the last turn is the {prompt[-1]['role']}'s; a prompt ends with the "
            "user's (dialogues: python -m trainer roleplay prepare)"
        )
    return prompt


def _told(field: str, value: Any, where: str, column: str) -> str | int | None:
    if field in ("scenario", "dialogue", "place"):
        name = id_cell(value, where, column) or None
        if field != "place" or name is None:
            return name
        if not name.isdecimal():
            raise UserError(f"{where}: {column}: a whole number is wanted, not {name!r:.40}")
        return int(name)
    text = (clean_cell(value, where, column) or "").strip()
    if len(text.splitlines()) > 1:
        raise UserError(f"{where}: {column}: one line is wanted, not {text!r:.40}")
    if field != "speech_level" or not text:
        return text or None
    return parse_level(f"{where}: {column}", text)


def _content(prompt: Sequence[Message]) -> str:
    return json.dumps(list(prompt), ensure_ascii=False)


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
