"""`python -m trainer template-check`: what is labeled, and whether that is right."""

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

    from trainer.chat.boundaries import Finding

#: Names of the mended copies.
TEMPLATE, GENERATION = "chat_template.fixed.jinja", "generation_config.fixed.json"


@dataclass(frozen=True)
class _Checked:
    """What is looked at, and by which settings."""

    tokenizer: Any
    generation_config: Any
    rows: list[Conversation]
    chat: ChatConfig
    turns: Which
    max_length: int | None

    @property
    def learned(self) -> Any:
        if self.rows:
            return self.rows[0].learned
        return "all" if self.turns == "all" else "last"

    @property
    def conversations(self) -> list[list[dict[str, Any]]]:
        return [row.turns for row in self.rows]

    def findings(self) -> list[Finding]:
        from trainer.chat.boundaries import check_template

        return check_template(
            self.tokenizer,
            self.conversations,
            self.chat,
            self.generation_config,
            self.max_length,
            learned=self.learned,
            names=[row.where for row in self.rows],
        )


def template_check(
    model: Annotated[str, typer.Option(help="Folder or hub id of the model.")],
    data: Annotated[
        str | None,
        typer.Option(help="Conversations (messages, or prompt and reply); else made-up ones only."),
    ] = None,
    template: Annotated[
        str | None, typer.Option(help="The template of training, where it is not the model's own.")
    ] = None,
    turns: Annotated[
        Which, typer.Option(help="Which turns of the assistant are learned of a conversation.")
    ] = "all",
    thinking: Annotated[
        bool | None,
        typer.Option("--enable-thinking/--no-thinking", help="For the template (Qwen3)."),
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a conversation at most.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Rows that are looked at, at most.")] = 200,
    show: Annotated[int, typer.Option(min=0, help="Conversations that are printed.")] = 2,
    fix: Annotated[
        bool, typer.Option("--fix", help="Write a mended copy of the template, and show the diff.")
    ] = False,
    to: Annotated[
        Path | None,
        typer.Option(
            help=f"Where --fix writes it; default: {TEMPLATE} in the model's folder (of a hub "
            "model: in this one)."
        ),
    ] = None,
) -> None:
    """Check where a chat template lets the assistant's turns begin and end, and show it.

    Exit code 2: something is wrong; training with it would teach the wrong thing.
    """
    rows = read_conversations(data, turns, limit=limit) if data else []
    from rich.console import Console

    from trainer.chat.show import print_findings
    from trainer.chat.stops import load_generation_config
    from trainer.rl.config import PolicyConfig
    from trainer.rl.policy import load_tokenizer

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
    """The first rows, or made-up conversations where there are none."""
    from trainer.chat.boundaries import looked_at, training_template
    from trainer.chat.labelling import label
    from trainer.chat.show import print_conversation

    settings = (checked.tokenizer, checked.conversations, checked.chat)
    chosen = training_template(*settings, learned=checked.learned).template
    named = [row.where for row in checked.rows]
    for number, (where, turns) in enumerate(looked_at(*settings)[:count]):
        labelled = label(checked.tokenizer, turns, checked.chat, chosen, checked.learned)
        name = named[number] if number < len(named) else where
        print_conversation(console, checked.tokenizer, name, labelled.tokens.ids, labelled.mask)


def _fixed(console: Console, checked: _Checked, folder: Path, to: Path) -> _Checked:
    """Write the mended copies; what is to be checked is they."""
    from rich.text import Text

    from trainer.chat.boundaries import unknown_stops
    from trainer.chat.fix import fixed_generation_config, fixed_template, write_beside
    from trainer.chat.show import print_diff
    from trainer.chat.stops import end_ids

    tokenizer, rows = checked.tokenizer, checked.conversations
    made, diff = fixed_template(tokenizer, rows, checked.chat, learned=checked.learned)
    write_beside(to, made.template)
    print_diff(console, diff)
    console.print(Text(f"template: {to} ({made.how}); name it in chat.template"), soft_wrap=True)
    checked = replace(checked, chat=checked.chat.model_copy(update={"template": str(to)}))
    missing = unknown_stops(
        tokenizer, rows, checked.chat, checked.generation_config, learned=checked.learned
    )
    if missing:
        ends = [*end_ids(tokenizer, checked.generation_config), *missing]
        path = to.with_name(GENERATION)
        write_beside(path, fixed_generation_config(folder, missing))
        told = f"generation_config: {path}; put it in the place of the model's own"
        console.print(Text(told), soft_wrap=True)
        checked = replace(checked, generation_config=SimpleNamespace(eos_token_id=ends))
    return checked
