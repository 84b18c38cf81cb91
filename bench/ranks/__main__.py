"""Count the ranks that have work in the published set-up, and how evenly they learn.

For the four search presets and 1 to 64 ranks: how many have episodes to sample and sequences to
learn from (`Workload`), and the time of an optimizer step relative to that of ranks with equal
numbers of tokens, where a pass takes time in proportion to its padded tokens. With whole weights
(DDP) ranks wait for each other once a step; with sharded weights (FSDP) in every pass. Episodes are
drawn: they end after a turn with a chance of one in four, and each turn shows a page.

"Before" deals micro-batches, from short to long, to the ranks in turn; "after" is
`share_sequences`. More ranks than a minibatch has episodes are refused: the times of such a row are
those of minibatches of four episodes a rank, or of all episodes of an update.

    python -m bench.ranks [--quick]
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.common import ROOT, Measurement, run
from scorekit.config import load_config
from scorekit.errors import UserError
from trainer.rl.forward import micro_batches
from trainer.rl.update import padded_tokens, share_sequences
from trainer.search.config import SearchConfig
from trainer.search.training.train import workload_of

PRESETS = ("phase1", "focused_r1", "focused_r2", "focused_r3")
RANKS = (1, 2, 4, 8, 16, 32, 64)
#: `micro_batch_tokens`: one episode a pass, as in the presets, or several.
BUDGETS = (1, 32_768)
#: Tokens of the prompt, of a turn's text, and of a page (fewest and most).
PROMPT, TURN, PAGE = 480, (60, 400), (500, 1_400)

Shares = list[list[list[int]]]
Share = Callable[[Sequence[int], int, int, bool], Shares]


def questions(quick: bool) -> Iterator[Measurement]:
    """Yield a measurement of each preset and number of ranks."""
    for preset in PRESETS:
        cfg = load_config(SearchConfig, ROOT / f"configs/search/{preset}.yaml")
        for ranks in RANKS:
            yield _measurement(preset, cfg, ranks, updates=2 if quick else 20)


def _measurement(preset: str, cfg: SearchConfig, ranks: int, updates: int) -> Measurement:
    """Return the table's row. If the preset's minibatches are too small, larger ones are used."""
    workload = workload_of(cfg, [])
    refusal, minibatch = "", cfg.rl.minibatch_size or 1
    try:
        workload.check(ranks)
    except UserError as error:
        refusal, minibatch = str(error), min(4 * ranks, workload.sequences[1])
    details: dict[str, Any] = {
        "ranks": ranks,
        "sampling_before": min(ranks, workload.prompts),
        "sampling": min(ranks, workload.max_sampling),
        "learning": min(ranks, workload.max_learning),
        "refusal": refusal,
        "minibatch": minibatch,
    }
    steps = _steps(workload.sequences[1], minibatch, cfg.episode.max_turns, updates)
    for budget in BUDGETS:
        for weights in ("whole", "sharded"):
            for name, share in (("before", _in_turn), ("after", _balance)):
                key = f"{name}, {weights} weights, {budget} tokens a pass"
                details[key] = statistics.mean(
                    _relative_time(lengths, budget, ranks, weights == "sharded", share)
                    for lengths in steps
                )
    question = f"{preset} ({cfg.rl.batch_size} x {cfg.rollout.n_agent}), {ranks} ranks"
    if refusal:
        question += f", minibatches raised to {minibatch}"
    value = details[f"after, sharded weights, {BUDGETS[1]} tokens a pass"]
    return Measurement(f"{question}: time of a step", value, "x even ranks", details=details)


def _steps(episodes: int, minibatch: int, max_turns: int, updates: int) -> list[list[int]]:
    """Return the lengths of the episodes of each optimizer step."""
    numbers = random.Random(1)
    return [
        [_length(numbers, max_turns) for _ in range(minibatch)]
        for _ in range(updates * -(-episodes // minibatch))
    ]


def _length(numbers: random.Random, max_turns: int) -> int:
    """Draw the tokens of an episode."""
    tokens = PROMPT
    for _ in range(max_turns):
        tokens += numbers.randint(*TURN)
        if numbers.random() < 0.25:
            break
        tokens += numbers.randint(*PAGE)
    return tokens


def _in_turn(lengths: Sequence[int], budget: int, ranks: int, is_sharded: bool) -> Shares:
    batches = list(micro_batches(lengths, budget))
    return [batches[rank::ranks] for rank in range(ranks)]


def _balance(lengths: Sequence[int], budget: int, ranks: int, is_sharded: bool) -> Shares:
    return share_sequences(lengths, range(len(lengths)), budget, ranks, passes_in_step=is_sharded)


def _relative_time(
    lengths: Sequence[int], budget: int, ranks: int, is_sharded: bool, share: Share
) -> float:
    """Return the padded tokens that the slowest rank waits for, over the mean of all tokens."""
    shares = share(lengths, budget, ranks, is_sharded)
    sizes = [[padded_tokens(lengths, batch) for batch in batches] for batches in shares]
    if is_sharded:
        num_passes = max(map(len, sizes))
        padded = [rank_sizes + [0] * (num_passes - len(rank_sizes)) for rank_sizes in sizes]
        slowest = sum(map(max, zip(*padded, strict=True)))
    else:
        slowest = max(map(sum, sizes))
    return slowest * ranks / sum(lengths)


def work_table(measurements: Sequence[Measurement]) -> Table:
    """Return ranks x sizes: who works, and the time of a step before and after."""
    titles = ["set-up, ranks", "sample (before)", "learn", "minibatch"]
    pairs = [(weights, budget) for budget in BUDGETS for weights in ("whole", "sharded")]
    titles += [
        f"{weights}, {'one a pass' if budget == 1 else f'{budget:,} tokens'}"
        for weights, budget in pairs
    ]
    result = Table(*titles)
    for measurement in measurements:
        details = measurement.details
        times = [
            " > ".join(
                f"{details[f'{name}, {weights} weights, {budget} tokens a pass']:.2f}"
                for name in ("before", "after")
            )
            for weights, budget in pairs
        ]
        has_work = f"{details['learning']}{' (refused)' if details['refusal'] else ''}"
        result.add_row(
            measurement.question.split(" ranks")[0].replace("focused_", ""),
            f"{details['sampling']} ({details['sampling_before']})",
            has_work,
            str(details["minibatch"]),
            *times,
        )
    return result


if __name__ == "__main__":
    Console(width=140).print(work_table(run("ranks", __doc__, questions)))
