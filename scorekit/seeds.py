"""Seeds: what is drawn by chance is a function of the run's seed and of the place in the run, so
that a run can start again anywhere.

Each use has a stream of its own. The streams of `_STANDING` keep the numbers that runs and
published data have; a new one is a name in `Stream`, and gets numbers above all of theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from typing import Literal

Stream = Literal[
    "adapters",
    "order",
    "minibatches",
    "sampling",
    "prompt",
    "teacher",
    "anchors",
    "searcher",
    "turns",
    "episodes",
    "further",
]


def stream_seed(stream: Stream, seed: int, *place: int | str) -> int:
    """The seed of a stream at a place of the run.

    adapters                      of fresh adapters
    order, epoch (from 0)         of the data, shuffled
    minibatches, update (from 1)  of a batch, shuffled
    sampling, update, rank        of a process's completions
    prompt, index                 of a prompt at a server, under the seed of `sampling`
    teacher, source id, purpose   of a source's candidates, under the seed of a synthesis run
    anchors, kind                 of the pairs of texts that a calibration compares
    searcher, trajectory id, turn of a turn that a chat server writes
    episodes, update, rank, round of the episodes of a searcher's update
    turns, call (from 0)          of a round of turns of these
    further, update               of the questions that may come in place of some of an update

    Equal are, of one run: `order` of epoch u, `minibatches` of update u and `sampling` of update u
    on rank 0; and `adapters` and the first `order` where the seed is 0. That does no harm: each
    starts a generator of its own, or again, and draws another kind of thing from it (a permutation
    of the data, one of a batch, tokens, weights), of which none is compared with another.
    """
    return _STANDING.get(stream, partial(_named, stream))(seed, *place)


def _named(stream: str, seed: int, *place: int | str) -> int:
    """From 2**62 to 2**63, where no standing stream comes (for seeds under 10**12); two streams of
    this kind, or two places, have one number with a chance of 2**-62."""
    return 2**62 + (_digest("|".join(map(str, (stream, seed, *place)))) >> 2)


def _linear(seed: int, step: int, rank: int = 0) -> int:
    return seed * 1_000_003 + step + rank * 999_999_937


def _of_prompt(seed: int, index: int) -> int:
    """Samples of a prompt count on from it, so prompts lie far apart; within 63 bits."""
    return _digest(f"{seed}:{index}") >> 2


def _of_source(seed: int, source: str, purpose: str) -> int:
    """Below 2**31 - 2**16, so that n may be large in any server's integer."""
    return _digest(f"{seed}|{source}|{purpose}") % (2**31 - 2**16)


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


_STANDING: dict[str, Callable[..., int]] = {
    "adapters": lambda seed: seed,
    "order": _linear,
    "minibatches": _linear,
    "sampling": _linear,
    "prompt": _of_prompt,
    "teacher": _of_source,
}
