"""A conversation as it is learned, for eyes: what is labeled stands out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.text import Text

from scorekit.report.render import visible
from trainer.chat.boundaries import Finding

#: Of labeled text, and of the token that ends it.
LABELLED, STOP, REST = "black on green", "bold white on dark_green", "dim"


def coloured(
    tokenizer: Any, ids: Sequence[int], mask: Sequence[int], *, brackets: bool = False
) -> Text:
    """The text of ids with what is learned in color, decoded run by run, so that no character of
    several tokens is torn. mask: [L]. brackets: around what is learned, where there are no
    colors."""
    text = Text()
    place = 0
    for learned, run in groupby(mask):
        count = len(list(run))
        part = list(ids[place : place + count])
        place += count
        said = tokenizer.decode(part, clean_up_tokenization_spaces=False)
        if not learned:
            text.append(_shown(said), REST)
            continue
        stop = tokenizer.decode(part[-1:]) if part[-1] in _ends(tokenizer) else ""
        text.append("⟦" if brackets else "")
        text.append(_shown(said.removesuffix(stop) if stop else said), LABELLED)
        text.append(_shown(stop), STOP)
        text.append("⟧" if brackets else "")
    return text


def print_conversation(
    console: Console, tokenizer: Any, name: str, ids: Sequence[int], mask: Sequence[int]
) -> None:
    """With a line that counts its tokens."""
    told = f"{name}: {len(ids)} tokens, {sum(mask)} learned"
    console.print(Text(visible(told)), soft_wrap=True)
    plain = not console.is_terminal or console.no_color
    console.print(coloured(tokenizer, ids, mask, brackets=plain), soft_wrap=True)


def print_findings(console: Console, findings: Sequence[Finding]) -> None:
    """A line for each, and its remedy where it is wrong."""
    for finding in findings:
        sign, style = ("ok  ", "green") if finding.ok else ("FAIL", "bold red")
        line = Text.assemble((sign, style), " ", (finding.name, "bold"), ": ")
        line.append(visible(finding.found))
        console.print(line, soft_wrap=True)
        if not finding.ok:
            console.print(Text(f"     -> {finding.remedy}"), soft_wrap=True)


def print_diff(console: Console, diff: str) -> None:
    """A unified diff in the usual colors."""
    styles = {"+": "green", "-": "red", "@": "cyan"}
    for line in diff.splitlines():
        console.print(Text(visible(line), styles.get(line[:1], "dim")), soft_wrap=True)


def _ends(tokenizer: Any) -> set[int]:
    return {*tokenizer.get_added_vocab().values(), tokenizer.eos_token_id}


def _shown(text: str) -> str:
    """Control characters made visible; a line still ends where it ends."""
    return "\n".join(visible(line) for line in text.split("\n"))
