"""Convert dialogues to turns: a row for each turn of the character that answers the player."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from scorekit.errors import UserError
from scorekit.files import replacing_folder
from scorekit.numeric import below
from trainer.roleplay.messages import ROLES, WrongMessages, read_messages
from trainer.roleplay.turn import Message, RoleplayTurn
from trainer.runs.readers import cell

#: Reasons why a turn of the character becomes no row.
REASONS = {
    "not_after_user": "the turn before is not the player's",
    "duplicate": "an earlier row has the same prompt and reference",
    "prompt_too_long": "the rendered prompt has more tokens than --max-prompt-length",
    "reference_too_long": "the reference has more tokens than --max-completion-length",
}


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A dialogue.

    id: unique among the inputs.
    messages: at most one system turn, then user and assistant turns in any order.
    row: the full row, with the other columns.
    """

    id: str
    messages: tuple[Message, ...]
    row: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Dropped:
    """A turn that becomes no row: its reason (of `REASONS`), and its measured length."""

    dialogue: str
    place: int
    reason: str
    measured: str = ""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a turn.

    context: largest number of messages before a turn, without the system turn.
    prompt_tokens, text_tokens: count tokens of a prompt and of a text; only needed with a length
    limit.
    """

    context: int | None = None
    max_prompt_length: int | None = None
    max_completion_length: int | None = None
    prompt_tokens: Callable[[Sequence[Message]], int] | None = None
    text_tokens: Callable[[str], int] | None = None


def read_dialogue(row: Any, name: str, column: str) -> Dialogue:
    """Return a dialogue of `messages`, or of the texts `system`, `user`, `assistant`.

    Raises WrongMessages.
    """
    if not isinstance(row, dict):
        raise WrongMessages(f"expected an object of fields, not {type(row).__name__}")
    value = cell(row, column)
    if value is None and isinstance(row.get("assistant"), str):
        value = [{"role": role, "content": row[role]} for role in ROLES if row.get(role)]
    if value is None:
        raise WrongMessages(
            f"no {column} (the row has {', '.join(map(str, row))}). Name the column "
            "(--column messages=NAME)"
        )
    dialogue_id = row.get("dialogue", row.get("id"))
    has_id = isinstance(dialogue_id, str | int) and not isinstance(dialogue_id, bool)
    return Dialogue(str(dialogue_id) if has_id else name, read_messages(value), row)


def turns_of(dialogue: Dialogue, context: int | None) -> Iterator[RoleplayTurn | Dropped]:
    """Yield a turn for each message of the assistant; `place` counts messages from 0.

    Its prompt is the system turn and the last `context` messages before it. If messages are cut
    off, it begins with one of the player, because templates require alternating turns.
    """
    messages = dialogue.messages
    system = messages[:1] if messages[0]["role"] == "system" else ()
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = messages[len(system) : index]
        context_messages = before if context is None else before[max(0, len(before) - context) :]
        while (
            len(context_messages) < len(before)
            and context_messages
            and context_messages[0]["role"] != "user"
        ):
            context_messages = context_messages[1:]
        if not context_messages or context_messages[-1]["role"] != "user":
            yield Dropped(dialogue.id, index, "not_after_user")
        else:
            yield RoleplayTurn(
                id=f"{dialogue.id}:{index}",
                prompt=(*system, *context_messages),
                reference=message["content"],
                dialogue=dialogue.id,
                place=index,
            )


def find_overlong(turn: RoleplayTurn, limits: Limits) -> Dropped | None:
    """Return why a turn is too long; None if it is not."""
    position = (turn.dialogue or "", turn.place or 0)
    max_prompt, count = limits.max_prompt_length, limits.prompt_tokens
    if max_prompt is not None and count is not None and (length := count(turn.prompt)) > max_prompt:
        return Dropped(*position, "prompt_too_long", f"{length} tokens")
    max_reference, measure = limits.max_completion_length, limits.text_tokens
    if max_reference is not None and measure is not None:
        length = measure(turn.reference or "") + 1  # the token that ends the turn
        if length > max_reference:
            return Dropped(*position, "reference_too_long", f"{length} tokens")
    return None


def prepare(
    dialogues: Iterable[Dialogue], limits: Limits
) -> tuple[list[tuple[RoleplayTurn, Dialogue]], list[Dropped]]:
    """Return the accepted turns, each with its dialogue, and the dropped ones."""
    accepted: list[tuple[RoleplayTurn, Dialogue]] = []
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
            dropped_turn = find_overlong(turn, limits)
            if dropped_turn is None:
                accepted.append((turn, dialogue))
            else:
                dropped.append(dropped_turn)
    return accepted, dropped


def split(
    turns: Sequence[RoleplayTurn], ratio: float, by: Literal["scenario", "dialogue"], seed: int
) -> tuple[list[RoleplayTurn], list[RoleplayTurn]]:
    """Return (train, held out): full scenarios, or dialogues, are held out up to this share of the
    turns.

    Which ones depends on their names and the seed only. Raises UserError if there is only one
    group.
    """
    names = [str(getattr(turn, by) or turn.dialogue) for turn in turns]
    groups = Counter(names)
    if ratio == 0:
        return list(turns), []
    if len(groups) < 2:
        raise UserError(
            f"--eval-ratio: all turns are of one {by}, so none can be held out"
            + (" (--held-out-by dialogue)" if by == "scenario" else "")
        )
    order = sorted(groups, key=lambda name: hashlib.blake2b(f"{seed}\0{name}".encode()).digest())
    held_out_groups: set[str] = set()
    count = 0
    for name in order[:-1]:
        if not below(count, ratio * len(turns)):
            break
        held_out_groups.add(name)
        count += groups[name]
    pairs = list(zip(names, turns, strict=True))
    train = [turn for name, turn in pairs if name not in held_out_groups]
    return train, [turn for name, turn in pairs if name in held_out_groups]


def write_prepared(
    folder: Path,
    parts: dict[str, Sequence[RoleplayTurn]],
    dropped: Sequence[Dropped],
    manifest: dict[str, Any],
) -> None:
    """Write train.jsonl, eval.jsonl, dropped.jsonl and manifest.json, all of them or none."""
    rows: dict[str, Sequence[RoleplayTurn | Dropped]] = {**parts, "dropped": dropped}
    counts = {name: len(turns) for name, turns in rows.items()}
    reasons = dict(sorted(Counter(turn.reason for turn in dropped).items()))
    manifest_text = json.dumps(
        manifest | {"rows": counts, "dropped": reasons}, ensure_ascii=False, indent=2
    )
    with replacing_folder(folder) as new:
        for name, turns in rows.items():
            text = "".join(json.dumps(_fields(turn), ensure_ascii=False) + "\n" for turn in turns)
            (new / f"{name}.jsonl").write_text(text, encoding="utf-8")
        (new / "manifest.json").write_text(manifest_text + "\n", encoding="utf-8")


def _fields(turn: RoleplayTurn | Dropped) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(turn).items() if value is not None}
