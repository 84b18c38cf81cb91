"""Write the rows of the role-play demo: noisy dialogues for SFT, prompts for RL, held-out prompts.

    python -m demo.train.roleplay.data

`heldout` was looked at while the demo was made; `final_test` was kept for its figures. Their
scenarios are in no training; their names are. `unseen_names` has names that are in none, either.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from demo.train.roleplay.grammar import TABLES, dialogue
from demo.train.roleplay.noise import noisy_replies
from scorekit.command import run_command

#: File: its seed, its dialogues, whether of held-out scenarios, whether of unseen names.
PROMPTS = {
    "train": (11, 400, False, False),
    "heldout": (12, 96, True, False),
    "final_test": (13, 200, True, False),
    "unseen_names": (15, 96, True, True),
}
LONGEST = 2  # exchanges of a prompt's dialogue; short ones are sampled and learned from faster
SFT_SEED, SFT_DIALOGUES = 14, 1000


def prompts(name: str) -> list[dict[str, Any]]:
    """Return one row per dialogue: the turn that its last reply answers."""
    seed, count, held_out, unseen = PROMPTS[name]
    rng = random.Random(seed)
    dialogues = (
        dialogue(rng, f"{name}-{number:04d}", held_out, LONGEST, unseen) for number in range(count)
    )
    return [asdict(d.turn(len(d.turns) - 1)) for d in dialogues]


def sft() -> list[dict[str, Any]]:
    """Return full dialogues with noisy replies."""
    rng = random.Random(SFT_SEED)
    dialogues = [dialogue(rng, f"sft-{number:04d}") for number in range(SFT_DIALOGUES)]
    return [{"messages": d.messages(len(d.turns), noisy_replies(d, rng))} for d in dialogues]


def write(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write JSON lines."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=TABLES)
    args = parser.parse_args()
    for name in PROMPTS:
        write(args.out / f"{name}.jsonl", prompts(name))
    write(args.out / "sft_noisy.jsonl", sft())


if __name__ == "__main__":
    run_command(main, stdout="log")
