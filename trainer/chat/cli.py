"""`scorekit template-check`: show what is labeled, and check it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainer.chat.config import (
    ChatConfig,
    ControlTokenAction,
    MessagesConfig,
    PlaceholderAction,
)
from trainer.chat.labels import TrainedTurns
from trainer.chat.render import Turns
from trainer.chat.rows import Conversation, Which, read_conversations

if TYPE_CHECKING:
    from rich.console import Console

    from trainer.chat.message_check import MessageCheck
    from trainer.chat.template_check import Finding

#: Names of the repaired copies.
TEMPLATE, GENERATION = "chat_template.fixed.jinja", "generation_config.fixed.json"


def template_check(
    model: Annotated[str, typer.Option(help="Folder or hub id of the model.")],
    data: Annotated[
        str | None,
        typer.Option(help="Conversations (messages, or prompt and reply); else made-up ones only."),
    ] = None,
    template: Annotated[
        str | None, typer.Option(help="The template of training, if it is not the model's own.")
    ] = None,
    turns: Annotated[
        Which, typer.Option(help="The assistant's turns of a conversation to train on.")
    ] = "all",
    thinking: Annotated[
        bool | None,
        typer.Option("--enable-thinking/--no-thinking", help="For the template (Qwen3)."),
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a conversation at most.")
    ] = None,
    control_tokens: Annotated[
        ControlTokenAction,
        typer.Option(help="As chat.control_tokens: control tokens of the model in a message."),
    ] = "refuse",
    placeholders: Annotated[
        PlaceholderAction, typer.Option(help="As chat.placeholders: {{char}}, {{user}}, ...")
    ] = "refuse",
    limit: Annotated[int, typer.Option(min=1, help="Largest number of rows to check.")] = 200,
    show: Annotated[int, typer.Option(min=0, help="Conversations that are printed.")] = 2,
    fix: Annotated[
        bool, typer.Option("--fix", help="Write a repaired template, and show the diff.")
    ] = False,
    to: Annotated[
        Path | None,
        typer.Option(
            help=f"File for --fix; default: {TEMPLATE} in the model's folder (of a hub "
            "model: in the current one)."
        ),
    ] = None,
) -> None:
    """Check that a chat template labels the assistant's turns correctly, and show the labels.

    Exit code 2: a check failed; training with the template would teach wrong turn ends.
    """
    rows = read_conversations(data, turns, limit=limit) if data else []
    from rich.console import Console

    from trainer.chat.message_check import MessageCheck
    from trainer.chat.render import load_generation_config
    from trainer.chat.show import print_conversation, print_findings
    from trainer.chat.template_check import findings_of, label_samples
    from trainer.rl.config import PolicyConfig
    from trainer.rl.policy import load_tokenizer

    console, tokenizer = Console(), load_tokenizer(PolicyConfig(path=model))
    generation_config = load_generation_config(model)
    chat = MessagesConfig(
        template=template,
        enable_thinking=thinking,
        control_tokens=control_tokens,
        placeholders=placeholders,
    )
    check = MessageCheck(tokenizer, chat)
    trained = rows[0].trained_turns if rows else "all" if turns == "all" else "last"
    names = [row.location for row in rows]
    conversations = [[check.as_text(turn) for turn in row.turns] for row in rows]
    template_chat: ChatConfig = chat
    if fix:
        template_chat, generation_config = _fixed(
            console, tokenizer, conversations, chat, trained, generation_config, model, to
        )
    origin, labeled = label_samples(tokenizer, conversations, template_chat, trained, names)
    for name, conversation in labeled[:show]:
        print_conversation(console, tokenizer, name, conversation.tokens.ids, conversation.mask)
    findings = findings_of(tokenizer, labeled, origin, generation_config, max_length)
    findings += _message_findings(check, rows)
    print_findings(console, findings)
    raise typer.Exit(0 if all(finding.ok for finding in findings) else 2)


def _message_findings(check: MessageCheck, rows: Sequence[Conversation]) -> list[Finding]:
    """Return the findings on the texts of messages: control tokens and placeholders."""
    from trainer.chat.message_check import CONTROL_REMEDY, PLACEHOLDER_REMEDY
    from trainer.chat.template_check import Finding

    errors: dict[str, list[str]] = {CONTROL_REMEDY: [], PLACEHOLDER_REMEDY: []}
    for row in rows:
        for number, turn in enumerate(row.turns, 1):
            for error in check.errors(turn):
                remedy = next(remedy for remedy in errors if error.endswith(remedy))
                text = error.removesuffix(f". {remedy}")
                errors[remedy].append(f"{row.location}: turn {number} ({turn['role']}): {text}")
    right = {
        CONTROL_REMEDY: ("control tokens", "no message is read as the end or start of a turn"),
        PLACEHOLDER_REMEDY: ("placeholders", "no message has one"),
    }
    findings = []
    for remedy, texts in errors.items():
        name, result = right[remedy]
        more = f" (and {len(texts) - 1} more)" if len(texts) > 1 else ""
        result = f"{texts[0]}{more}" if texts else result
        findings.append(Finding(name, not texts, result, remedy if texts else ""))
    return findings


def _fixed(
    console: Console,
    tokenizer: Any,
    conversations: Sequence[Turns],
    chat: ChatConfig,
    trained_turns: TrainedTurns,
    generation_config: Any,
    model: str,
    to: Path | None,
) -> tuple[ChatConfig, Any]:
    """Write the repaired copies, and return the settings that use them."""
    from rich.text import Text

    from trainer.chat.render import end_ids
    from trainer.chat.show import print_diff
    from trainer.chat.template_check import (
        fixed_generation_config,
        fixed_template,
        label_samples,
        write_beside,
    )

    folder = Path(model) if Path(model).is_dir() else Path()
    to = to or folder / TEMPLATE
    repaired, diff = fixed_template(tokenizer, conversations, chat, trained_turns)
    write_beside(to, repaired.template)
    print_diff(console, diff)
    message = f"template: {to} ({repaired.origin}). Set chat.template to it"
    console.print(Text(message), soft_wrap=True)
    chat = chat.model_copy(update={"template": str(to)})
    _, labeled = label_samples(tokenizer, conversations, chat, trained_turns)
    stops = {stop for _, conversation in labeled for stop in conversation.stops}
    ends = end_ids(tokenizer, generation_config)
    if missing := sorted(stops - set(ends)):
        path = to.with_name(GENERATION)
        write_beside(path, fixed_generation_config(folder, missing))
        message = f"generation_config: {path}. Replace the model's own file by it"
        console.print(Text(message), soft_wrap=True)
        generation_config = SimpleNamespace(eos_token_id=[*ends, *missing])
    return chat, generation_config
