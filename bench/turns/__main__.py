"""Measure episodes sampled in this process: continuous batches, and the price of two other ways.

Episodes have turns of drawn lengths and wait for a search after each. What was read of an episode
is kept for its next turn; a third way reads all of it again before each turn. In fixed batches (the
deterministic mode) every turn waits for the slowest episode. The model has random weights: only
times, and how often rounding changes a token, are measured.

    python -m bench.turns [--quick]
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bench.common import Measurement, run
from bench.turns.episodes import Sizes, report

#: The size of the search demo's policy.
SMALL = {
    "vocab_size": 4000,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
}


def questions(quick: bool) -> Iterator[Measurement]:
    """Yield all measurements of this script."""
    sizes = Sizes(SMALL, episodes=8 if quick else 16, turns=2 if quick else 4)
    repeats = 1 if quick else 3
    for row in report(sizes, torch.device("cpu"), [torch.float32, torch.bfloat16], repeats):
        name = f"{sizes.episodes} episodes of {sizes.turns} turns, {row['dtype']}"
        yield Measurement(f"{name}: continuous batches", row["continuous_s"], "s", details=row)
        yield Measurement("  fixed batches", row["fixed_s"], "s")
        price = row["fixed_s"] / row["continuous_s"]
        yield Measurement("  fixed, of the time of continuous ones", price, "")
        price = row["rereading_s"] / row["continuous_s"]
        yield Measurement("  reading all again, of the time of continuous ones", price, "")
        yield Measurement("  tokens that rounding changes, by batch", row["equal_past"], "")
        repeated = float(row["fixed_repeats"])
        yield Measurement("  fixed batches repeat bit by bit", repeated, "", at_least=1.0)


if __name__ == "__main__":
    run("turns", __doc__, questions)
