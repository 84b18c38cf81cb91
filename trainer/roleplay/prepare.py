"""Dialogues -> turns: a row for each turn of the character that answers the player's."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from scorekit.errors import UserError
from scorekit.files import replacing_folder
from scorekit.numeric.thresholds import below
from trainer.roleplay.messages import WrongMessages, read_messages
from trainer.roleplay.turn import Message, RoleplayTurn
from trainer.runs.readers import cell

#: Why a turn of the character becomes no row.
REASONS = {
    "not_after_user": "the turn before is not the player's",
    "duplicate": "prompt and reference stand in an earlier row",
    "prompt_too_long": "the rendered prompt has more tokens than --max-prompt-length",
    "reference_too_long": "the reference has more tokens than --max-completion-length",
}


@dataclass(frozen=True, slots=True)
class Dialogue:
    """id: unique among the inputs. messages: a system turn at most, then any order of the two. row:
    the whole row, whose columns tell the rest."""

    id: str
    messages: tuple[Message, ...]
    row: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Dropped:
    """A turn that becomes no row: why (of `REASONS`), and how it measured."""

    dialogue: str
    place: int
    reason: str
    measured: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """context: of the messages before a turn so many at most, the system turn not counted. tokens:
    of a prompt, and of a text; they are asked for only where a length is limited."""

    context: int | None = None
    max_prompt_length: int | None = None
    max_completion_length: int | None = None
    prompt_tokens: Callable[[Sequence[Message]], int] | None = None
    text_tokens: Callable[[str], int] | None = None


def read_dialogue(row: Any, name: str, column: str) -> Dialogue:
    """Of `messages`, or of the texts `system`, `user`, `assistant`. Raises WrongMessages."""
    if not isinstance(row, dict):
        raise WrongMessages(f"a row is an object of fields, not {type(row).__name__}")
    value = cell(row, column)
    if value is None and isinstance(row.get("assistant"), str):
        roles = ("system", "user", "assistant")
        value = [{"role": role, "content": row[role]} for role in roles if row.get(role)]
    if value is None:
        raise WrongMessages(
            f"no {column} (the row has {', '.join(map(str, row))}): name the column "
            "(--column messages=NAME)"
        )
    given = row.get("dialogue", row.get("id"))
    own = isinstance(given, str | int) and not isinstance(given, bool)
    return Dialogue(str(given) if own else name, read_messages(value), row)


def turns_of(dialogue: Dialogue, context: int | None) -> Iterator[RoleplayTurn | Dropped]:
    """A turn for each message of the assistant; `place` counts messages from 0.

    Its prompt is the system turn and the last `context` messages before it; where that cuts some
    off, it begins with one of the player, as templates want that have the two alternate.
    """
    messages = dialogue.messages
    system = messages[:1] if messages[0]["role"] == "system" else ()
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = messages[len(system) : place]
        kept = before if context is None else before[max(0, len(before) - context) :]
        while len(kept) < len(before) and kept and kept[0]["role"] != "user":
            kept = kept[1:]
        if not kept or kept[-1]["role"] != "user":
            yield Dropped(dialogue.id, place, "not_after_user")
        else:
            yield RoleplayTurn(
                id=f"{dialogue.id}:{place}",
                prompt=(*system, *kept),
                reference=message["content"],
                dialogue=dialogue.id,
                place=place,
            )


def fault_of(turn: RoleplayTurn, limits: Limits) -> Dropped | None:
    """Why a turn is too long; None where it is not."""
    where = (turn.dialogue or "", turn.place or 0)
    most, count = limits.max_prompt_length, limits.prompt_tokens
    if most is not None and count is not None and (length := count(turn.prompt)) > most:
        return Dropped(*where, "prompt_too_long", f"{length} tokens")
    longest, measure = limits.max_completion_length, limits.text_tokens
    if longest is not None and measure is not None:
        length = measure(turn.reference or "") + 1  # the token that ends the turn
        if length > longest:
            return Dropped(*where, "reference_too_long", f"{length} tokens")
    return None


def prepare(
    dialogues: Iterable[Dialogue], limits: Limits
) -> tuple[list[tuple[RoleplayTurn, Dialogue]], list[Dropped]]:
    """The turns that are kept, each with its dialogue, and those that are not."""
    kept: list[tuple[RoleplayTurn, Dialogue]] = []
    dropped: list[Dropped] = []
    seen: set[bytes] = set()
    for dialogue in dialogues:
        for turn in turns_of(dialogue, limits.context):
            if isinstance(turn, Dropped):
                dropped.append(turn)
                continue
            content = json.dumps([list(turn.prompt), turn.reference], ensure_ascii=False)
            digest = hashlib.blake2b(content.encode(), digest_size=16).digest()
            if digest in seen:
                dropped.append(Dropped(dialogue.id, turn.place or 0, "duplicate"))
                continue
            seen.add(digest)
            fault = fault_of(turn, limits)
            if fault is None:
                kept.append((turn, dialogue))
            else:
                dropped.append(fault)
    return kept, dropped


def split(
    turns: Sequence[RoleplayTurn], ratio: float, by: Literal["scenario", "dialogue"], seed: int
) -> tuple[list[RoleplayTurn], list[RoleplayTurn]]:
    """(train, held out): whole scenarios, or dialogues, are held out until they have that share of
    the turns. Which ones depends on their names and the seed only. Raises UserError if one group
    is all there is."""
    groups: dict[str, list[RoleplayTurn]] = defaultdict(list)
    for turn in turns:
        groups[str(getattr(turn, by) or turn.dialogue)].append(turn)
    if ratio == 0:
        return list(turns), []
    if len(groups) < 2:
        raise UserError(
            f"--eval-ratio: all turns are of one {by}: nothing can be held out by it"
            + (" (--held-out-by dialogue)" if by == "scenario" else "")
        )
    order = sorted(groups, key=lambda name: hashlib.blake2b(f"{seed}\0{name}".encode()).digest())
    held: set[str] = set()
    count = 0
    for name in order[:-1]:
        if not below(count, ratio * len(turns)):
            break
        held.add(name)
        count += len(groups[name])
    of = [(str(getattr(turn, by) or turn.dialogue) in held, turn) for turn in turns]
    return [turn for out, turn in of if not out], [turn for out, turn in of if out]


def write_prepared(
    folder: Path,
    parts: dict[str, Sequence[RoleplayTurn]],
    dropped: Sequence[Dropped],
    manifest: dict[str, Any],
) -> None:
    """train.jsonl, eval.jsonl, dropped.jsonl and manifest.json, all of them or none."""
    rows: dict[str, Sequence[RoleplayTurn | Dropped]] = {**parts, "dropped": dropped}
    counts = {name: len(of) for name, of in rows.items()}
    reasons = dict(sorted(Counter(one.reason for one in dropped).items()))
    told = json.dumps(manifest | {"rows": counts, "dropped": reasons}, ensure_ascii=False, indent=2)
    with replacing_folder(folder) as new:
        for name, of in rows.items():
            text = "".join(json.dumps(_fields(one), ensure_ascii=False) + "\n" for one in of)
            (new / f"{name}.jsonl").write_text(text, encoding="utf-8")
        (new / "manifest.json").write_text(told + "\n", encoding="utf-8")


def _fields(one: RoleplayTurn | Dropped) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(one).items() if value is not None}
