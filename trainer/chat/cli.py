"""`python -m trainer template-check`: show what is labeled, and check it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainer.chat.config import ChatConfig
from trainer.chat.rows import Conversation, Which, read_conversations

if TYPE_CHECKING:
    from rich.console import Console

    from trainer.chat.template_check import Finding

#: Names of the repaired copies.
TEMPLATE, GENERATION = "chat_template.fixed.jinja", "generation_config.fixed.json"


@dataclass(frozen=True)
class _Checked:
    """The objects to check, and their settings."""

    tokenizer: Any
    generation_config: Any
    rows: list[Conversation]
    chat: ChatConfig
    turns: Which
    max_length: int | None

    @property
    def trained_turns(self) -> Any:
        if self.rows:
            return self.rows[0].trained_turns
        return "all" if self.turns == "all" else "last"

    @property
    def conversations(self) -> list[list[dict[str, Any]]]:
        return [row.turns for row in self.rows]

    def findings(self) -> list[Finding]:
        from trainer.chat.template_check import check_template

        return check_template(
            self.tokenizer,
            self.conversations,
            self.chat,
            self.generation_config,
            self.max_length,
            trained_turns=self.trained_turns,
            names=[row.location for row in self.rows],
        )


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

    from trainer.chat.show import print_findings
    from trainer.chat.stops import load_generation_config
    from trainer.rl.config import PolicyConfig
    from trainer.rl.policy.tokens import load_tokenizer

    checked = _Checked(
        load_tokenizer(PolicyConfig(path=model)),
        load_generation_config(model),
        rows,
        ChatConfig(template=template, enable_thinking=thinking),
        turns,
        max_length,
    )
    console = Console()
    if fix:
        folder = Path(model) if Path(model).is_dir() else Path()
        checked = _fixed(console, checked, folder, to or folder / TEMPLATE)
    _show(console, checked, show)
    findings = checked.findings()
    print_findings(console, findings)
    raise typer.Exit(0 if all(finding.ok for finding in findings) else 2)


def _show(console: Console, checked: _Checked, count: int) -> None:
    """Print the first rows, or made-up conversations without rows."""
    from trainer.chat.labels import label
    from trainer.chat.show import print_conversation
    from trainer.chat.template_check import collect_conversations, training_template

    settings = (checked.tokenizer, checked.conversations, checked.chat)
    chosen = training_template(*settings, trained_turns=checked.trained_turns).template
    names = [row.location for row in checked.rows]
    for number, (location, turns) in enumerate(collect_conversations(*settings)[:count]):
        labeled = label(checked.tokenizer, turns, checked.chat, chosen, checked.trained_turns)
        name = names[number] if number < len(names) else location
        print_conversation(console, checked.tokenizer, name, labeled.tokens.ids, labeled.mask)


def _fixed(console: Console, checked: _Checked, folder: Path, to: Path) -> _Checked:
    """Write the repaired copies, and return the settings that use them."""
    from rich.text import Text

    from trainer.chat.fix import fixed_generation_config, fixed_template, write_beside
    from trainer.chat.show import print_diff
    from trainer.chat.stops import end_ids
    from trainer.chat.template_check import unknown_stops

    tokenizer, rows = checked.tokenizer, checked.conversations
    repaired, diff = fixed_template(
        tokenizer, rows, checked.chat, trained_turns=checked.trained_turns
    )
    write_beside(to, repaired.template)
    print_diff(console, diff)
    console.print(
        Text(f"template: {to} ({repaired.origin}). Set chat.template to it"), soft_wrap=True
    )
    checked = replace(checked, chat=checked.chat.model_copy(update={"template": str(to)}))
    missing = unknown_stops(
        tokenizer,
        rows,
        checked.chat,
        checked.generation_config,
        trained_turns=checked.trained_turns,
    )
    if missing:
        ends = [*end_ids(tokenizer, checked.generation_config), *missing]
        path = to.with_name(GENERATION)
        write_beside(path, fixed_generation_config(folder, missing))
        message = f"generation_config: {path}. Replace the model's own file by it"
        console.print(Text(message), soft_wrap=True)
        checked = replace(checked, generation_config=SimpleNamespace(eos_token_id=ends))
    return checked
