"""Print the labels of SFT rows before training, in color, and the tokens at their ends."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from scorekit.report.render import visible
from trainer.chat.show import print_conversation, print_findings
from trainer.sft.prepare import SftPart
from trainer.sft.rows import SftRow, actions

_ROWS = 3


def print_label_masks(console: Console, tokenizer: Any, part: SftPart) -> None:
    """Print the first rows with their labels, token counts, and the findings of the template check.

    Each row has a table with the first and last tokens of each turn.
    """
    for row in part.rows[:_ROWS]:
        print_conversation(console, tokenizer, row.location, row.ids, row.mask)
        console.print(_ends(tokenizer, row))
    counts = part.counts
    summary = (
        f"{counts['rows']} rows, {counts['tokens']} tokens, {counts['learned_tokens']} labelled"
    )
    console.print(Text(summary), soft_wrap=True)
    for reason, number in part.left_out.items():
        console.print(Text(f"{number} rows: {reason}"), soft_wrap=True)
    print_findings(console, part.findings)


def _ends(tokenizer: Any, row: SftRow) -> Table:
    """Return a table with the tokens before, at and after the ends of each labeled run."""
    table = Table("tokens", "before", "first", "last", "behind")
    for begin, end in actions(row.mask):
        positions = (begin - 1, begin, end - 1, end)
        texts = [
            repr(tokenizer.decode([row.ids[position]])) if 0 <= position < len(row.ids) else ""
            for position in positions
        ]
        table.add_row(f"{begin}-{end - 1}", *(Text(visible(text)) for text in texts))
    return table
