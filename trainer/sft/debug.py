"""What is learned, shown before anything is: rows in color, and where their labels end."""

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
    """The first rows with what is learned in color, the first and last tokens of each turn, the
    counts of all rows, and what the template check finds."""
    for row in part.rows[:_ROWS]:
        print_conversation(console, tokenizer, row.where, row.ids, row.mask)
        console.print(_ends(tokenizer, row))
    counts = part.counts
    told = f"{counts['rows']} rows, {counts['tokens']} tokens, {counts['learned_tokens']} learned"
    console.print(Text(told), soft_wrap=True)
    for why, number in part.left_out.items():
        console.print(Text(f"{number} rows: {why}"), soft_wrap=True)
    print_findings(console, part.findings)


def _ends(tokenizer: Any, row: SftRow) -> Table:
    """For each turn: the token before it, its first, its last, and the one behind it."""
    table = Table("tokens", "before", "first", "last", "behind")
    for begin, end in actions(row.mask):
        places = (begin - 1, begin, end - 1, end)
        inside = [place if 0 <= place < len(row.ids) else None for place in places]
        said = ["" if at is None else repr(tokenizer.decode([row.ids[at]])) for at in inside]
        table.add_row(f"{begin}-{end - 1}", *(Text(visible(one)) for one in said))
    return table
