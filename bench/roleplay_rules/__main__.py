"""Measure how often the Korean rules of the role-play rewards are right.

    python -m bench.roleplay_rules [--errors] [--half work]

A row for each rule and half of the sentences in `bench/roleplay_rules`: accuracy, and precision and
recall of its yes. `work` are the sentences that the rules were written with, `unseen` those that
were read for the first time at the end.
"""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from bench.roleplay_rules.accuracy import DECISIONS, HALVES, measure_decision, read_sentences
from scorekit.command import run_command
from trainer.roleplay.korean.questions import asks


def main() -> None:
    """Print the table, and with --errors also the sentences that a rule gets wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--errors", action="store_true", help="list the wrong decisions")
    parser.add_argument("--half", choices=HALVES, action="append", help="only this half")
    args = parser.parse_args()
    halves = args.half or HALVES
    console = Console(width=120, soft_wrap=True, highlight=False, markup=False)
    table = Table("rule", "half", "sentences", "accuracy", "precision", "recall")
    for decision in DECISIONS:
        for half in halves:
            result = measure_decision(decision, half)
            shares = (result.accuracy, result.precision, result.recall)
            cells = ("–" if share is None else f"{share:.3f}" for share in shares)
            table.add_row(decision.title, half, str(result.num_sentences), *cells)
            for sentence in result.errors if args.errors else ():
                console.print(f"{decision.title}, {half}, {sentence.label}: {sentence.text}")
    console.print(table)
    for half in halves:
        unclear = [s for s in read_sentences("questions", half) if s.label == "ambiguous"]
        count = sum(asks(sentence.text) for sentence in unclear)
        console.print(f"read as questions, {half}: {count} of {len(unclear)} ambiguous sentences")


if __name__ == "__main__":
    run_command(main, stdout="log")
