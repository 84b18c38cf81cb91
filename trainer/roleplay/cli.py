"""scorekit roleplay prepare|calibrate: commands that only role-play has."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from scorekit.command import clean_exit
from scorekit.errors import UserError

app = typer.Typer(
    help="Role-play: its data, and the anchors of its rewards.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


Inputs = Annotated[
    list[Path],
    typer.Argument(
        help="Dialogues: files, or folders of shards, whose rows have `messages`, or `system`, "
        "`user` and `assistant`."
    ),
]
Out = Annotated[Path, typer.Option(help="Folder to write: train, eval, dropped, manifest.")]
Column = Annotated[
    list[str] | None,
    typer.Option(help="FIELD=COLUMN: messages, player_name, ...; `meta.player` is nested."),
]
Context = Annotated[
    int | None,
    typer.Option(min=1, help="Messages before a turn in its prompt, without the system turn."),
]
Model = Annotated[
    str | None,
    typer.Option(help="Model whose tokenizer measures lengths and knows the control tokens."),
]
Tokens = Annotated[int | None, typer.Option(min=1, help="In tokens.")]
Thinking = Annotated[
    bool | None, typer.Option("--enable-thinking/--no-thinking", help="For the template.")
]
Ratio = Annotated[float, typer.Option(min=0, max=0.9, help="Share of the turns to hold out.")]
HeldOutBy = Annotated[
    Literal["scenario", "dialogue"], typer.Option(help="Groups that are never split.")
]
FromPrompt = Annotated[
    bool, typer.Option(help="Read names and level from the system turn if no column has them.")
]

ControlTokens = Annotated[
    Literal["refuse", "neutralize", "keep"],
    typer.Option(
        help="Rows with a control token of the model in a message (without --model: in forms such "
        "as <|im_end|>): end the command, put a space inside the token, or keep it."
    ),
]
Placeholders = Annotated[
    Literal["refuse", "keep"],
    typer.Option(help="Rows with {{char}}, {{user}}, <USER> or <BOT>: end the command, or not."),
]


@app.command()
def prepare(
    inputs: Inputs,
    out: Out,
    column: Column = None,
    context: Context = 12,
    model: Model = None,
    max_prompt_length: Tokens = None,
    max_completion_length: Tokens = None,
    enable_thinking: Thinking = None,
    eval_ratio: Ratio = 0.05,
    held_out_by: HeldOutBy = "scenario",
    seed: Annotated[int, typer.Option(help="Selects the held-out turns.")] = 0,
    from_prompt: FromPrompt = True,
    control_tokens: ControlTokens = "refuse",
    placeholders: Placeholders = "refuse",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")] = False,
) -> None:
    """Convert dialogues to rows: one for each turn of the character that answers the player's.

    Dropped turns are in dropped.jsonl with their reason. Full scenarios are held out.
    """
    with clean_exit(stdout="log"):
        from trainer.chat.config import MessagesConfig
        from trainer.chat.message_check import MessageCheck
        from trainer.roleplay.config_data import RoleplayData
        from trainer.roleplay.prepare import Limits, split, write_prepared

        if out.exists() and not overwrite:
            raise UserError(f"{out} exists. Name another folder, or use --overwrite")
        columns = _columns(column or [])
        messages = columns.pop("messages", "messages")
        data = RoleplayData(columns=columns, from_prompt=from_prompt)
        tokenizer = _tokenizer(model)
        chat = MessagesConfig(
            enable_thinking=enable_thinking,
            control_tokens=control_tokens,
            placeholders=placeholders,
        )
        prompt_tokens, text_tokens = _counters(
            tokenizer, (max_prompt_length, max_completion_length), chat
        )
        limits = Limits(
            context, max_prompt_length, max_completion_length, prompt_tokens, text_tokens
        )
        check = MessageCheck(tokenizer, chat)
        turns, dropped = _prepare(inputs, messages, data, limits, check)
        if not turns:
            raise UserError(f"all {len(dropped)} turns were dropped: {_reasons(dropped)}")
        train, held_out = split(turns, eval_ratio, held_out_by, seed)
        settings = {
            "inputs": {str(path): _digest(path) for path in inputs},
            "columns": columns | {"messages": messages},
            "context": context,
            "model": model,
            "max_prompt_length": max_prompt_length,
            "max_completion_length": max_completion_length,
            "eval_ratio": eval_ratio,
            "held_out_by": held_out_by,
            "seed": seed,
            "from_prompt": from_prompt,
            "control_tokens": control_tokens,
            "placeholders": placeholders,
        }
        write_prepared(out, {"train": train, "eval": held_out}, dropped, settings)
        _show(train, held_out, dropped)
        typer.echo(f"written: {out}")


@app.command()
def calibrate(
    data: Annotated[str, typer.Option(help="Turns with references: a file, folder or hub id.")],
    embedding_model: Annotated[
        str, typer.Option(help="URL of an embedding server, or a folder of weights.")
    ],
    out: Annotated[Path, typer.Option(help="File to write; the page is next to it.")] = Path(
        "calibration.json"
    ),
    column: Column = None,
    rows: Annotated[int, typer.Option(min=1, help="Turns to sample.")] = 512,
    embedding_batch_size: Annotated[int, typer.Option(min=1, help="Texts of one request.")] = 16,
    seed: Annotated[int, typer.Option(help="Selects and shuffles the turns.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace existing files.")] = False,
) -> None:
    """Fit the anchors for scoring cosines, and draw the fitted distributions.

    A run does the same on its training data if reward.calibration names no file.
    """
    with clean_exit(stdout="log"):
        from trainer.roleplay.calibrate import calibrate as fit_and_draw
        from trainer.roleplay.config_data import RoleplayData
        from trainer.roleplay.reward_config import RewardConfig

        if out.exists() and not overwrite:
            raise UserError(f"{out} exists. Name another file, or use --overwrite")
        columns = _columns(column or [])
        columns.pop("messages", None)
        cfg = RewardConfig(
            embedding_model=embedding_model,
            embedding_batch_size=embedding_batch_size,
            calibration_rows=rows,
        )
        fit_and_draw(cfg, data, RoleplayData(columns=columns), out, seed)


def _columns(options: Sequence[str]) -> dict[str, str]:
    from trainer.roleplay.config_data import FIELDS

    valid_fields = ("messages", *(name for name in FIELDS if not name.startswith("prompt")))
    columns = {}
    for option in options:
        field, equals, name = option.partition("=")
        if not equals or not name or field not in valid_fields:
            raise UserError(
                f"--column {option}: expected FIELD=COLUMN. FIELD is one of "
                f"{', '.join(valid_fields)}"
            )
        columns[field] = name
    return columns


def _tokenizer(model: str | None) -> Any:
    """Return the tokenizer of a model; None without one."""
    if model is None:
        return None
    from trainer.rl.config import PolicyConfig
    from trainer.rl.policy import load_tokenizer

    return load_tokenizer(PolicyConfig(path=model))


def _counters(tokenizer: Any, lengths: tuple[int | None, ...], chat: Any) -> Any:
    """Return functions that count tokens of a prompt and of a text; None without a length limit."""
    if all(length is None for length in lengths):
        return None, None
    if tokenizer is None:
        raise UserError("length limits require a tokenizer. Name its model (--model)")
    from trainer.chat.render import render

    def text_tokens(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    def prompt_tokens(prompt: Any) -> int:
        return text_tokens(render(tokenizer, prompt, chat, generation_prompt=True))

    return prompt_tokens, text_tokens


def _prepare(inputs: Sequence[Path], column: str, data: Any, limits: Any, check: Any) -> Any:
    """Return all accepted turns with the fields of their rows, and all dropped ones."""
    from trainer.roleplay.data import WrongMessages, read_stated_facts
    from trainer.roleplay.prepare import prepare, read_dialogue
    from trainer.runs.readers import object_of, read_rows, report_bad_rows

    location_by_id: dict[str, str] = {}
    dialogues, errors = [], []
    for path in inputs:
        for location, row in read_rows(str(path), with_bad=True):
            try:
                dialogue = read_dialogue(object_of(row, location), location, column)
            except WrongMessages as error:
                errors.append(f"{location}: {error}")
                continue
            except UserError as error:
                errors.append(str(error))
                continue
            try:
                messages = tuple(check.clean(dialogue.messages, location))
            except UserError as error:
                errors.append(str(error))
                continue
            if dialogue.id in location_by_id:
                first = location_by_id[dialogue.id]
                errors.append(f"{location}: id {dialogue.id!r:.60} is also in {first}")
                continue
            location_by_id[dialogue.id] = location
            dialogues.append(dataclasses.replace(dialogue, messages=messages))
    source = ", ".join(map(str, inputs))
    report_bad_rows(source, errors, len(errors) + len(dialogues), "refuse")
    if not dialogues:
        raise UserError(f"{source}: no rows")
    if note := check.note(source, len(dialogues)):
        typer.echo(note, err=True)
    accepted, dropped = prepare(dialogues, limits)
    turns = []
    for turn, dialogue in accepted:
        fields = read_stated_facts(dialogue.row, location_by_id[dialogue.id], data, turn.prompt)
        fields |= {"dialogue": turn.dialogue, "place": turn.place}
        turns.append(dataclasses.replace(turn, **fields))
    return turns, dropped


def _digest(path: Path) -> str:
    from scorekit.digest import digest_files

    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    return digest_files(files)


def _reasons(dropped: Sequence[Any]) -> str:
    counts = Counter(dropped_turn.reason for dropped_turn in dropped)
    return ", ".join(f"{reason} {count}" for reason, count in counts.most_common()) or "none"


def _show(train: Sequence[Any], held_out: Sequence[Any], dropped: Sequence[Any]) -> None:
    from trainer.roleplay.data import missing_facts
    from trainer.roleplay.prepare import REASONS

    table = Table("", "rows", "scenarios", "without a value")
    for name, turns in (("train", train), ("eval", held_out)):
        scenarios = len({turn.scenario for turn in turns})
        table.add_row(name, f"{len(turns):,}", f"{scenarios:,}", missing_facts(turns) or "-")
    for reason, count in Counter(dropped_turn.reason for dropped_turn in dropped).most_common():
        table.add_row("dropped", f"{count:,}", "", f"{reason}: {REASONS[reason]}")
    Console().print(table)
