"""Print a labeled conversation in the terminal, with the labeled text in color."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.text import Text

from scorekit.report.render import visible
from trainer.chat.template_check import Finding

#: Styles of labeled text, of the token that ends it, and of other text.
LABELED, STOP, REST = "black on green", "bold white on dark_green", "dim"


def color_text(
    tokenizer: Any, ids: Sequence[int], mask: Sequence[int], *, brackets: bool = False
) -> Text:
    """Return the text of ids with the labeled part in color.

    It is decoded run by run, so that no character of several tokens is split.
    mask: [L].
    brackets: put them around labeled text, for output without colors.
    """
    text = Text()
    position = 0
    for is_labeled, run in groupby(mask):
        count = len(list(run))
        run_ids = list(ids[position : position + count])
        position += count
        decoded = tokenizer.decode(run_ids, clean_up_tokenization_spaces=False)
        if not is_labeled:
            text.append(_visible_lines(decoded), REST)
            continue
        stop = tokenizer.decode(run_ids[-1:]) if run_ids[-1] in _ends(tokenizer) else ""
        text.append("⟦" if brackets else "")
        text.append(_visible_lines(decoded.removesuffix(stop) if stop else decoded), LABELED)
        text.append(_visible_lines(stop), STOP)
        text.append("⟧" if brackets else "")
    return text


def print_conversation(
    console: Console, tokenizer: Any, name: str, ids: Sequence[int], mask: Sequence[int]
) -> None:
    """Print a conversation after a line with its token counts."""
    header = f"{name}: {len(ids)} tokens, {sum(mask)} labelled"
    console.print(Text(visible(header)), soft_wrap=True)
    plain = not console.is_terminal or console.no_color
    console.print(color_text(tokenizer, ids, mask, brackets=plain), soft_wrap=True)


def print_findings(console: Console, findings: Sequence[Finding]) -> None:
    """Print a line for each finding, and its remedy if the check failed."""
    for finding in findings:
        sign, style = ("ok  ", "green") if finding.ok else ("FAIL", "bold red")
        line = Text.assemble((sign, style), " ", (finding.name, "bold"), ": ")
        line.append(visible(finding.result))
        console.print(line, soft_wrap=True)
        if not finding.ok:
            console.print(Text(f"     -> {finding.remedy}"), soft_wrap=True)


def print_diff(console: Console, diff: str) -> None:
    """Print a unified diff in the usual colors."""
    styles = {"+": "green", "-": "red", "@": "cyan"}
    for line in diff.splitlines():
        console.print(Text(visible(line), styles.get(line[:1], "dim")), soft_wrap=True)


def _ends(tokenizer: Any) -> set[int]:
    return {*tokenizer.get_added_vocab().values(), tokenizer.eos_token_id}


def _visible_lines(text: str) -> str:
    """Make control characters visible, except line ends."""
    return "\n".join(visible(line) for line in text.split("\n"))
