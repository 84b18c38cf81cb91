"""Random seeds: a function of the run's seed and of the position in the run, so that a run can
resume anywhere.

Each use has its own stream. The streams of `_FIXED_STREAMS` keep the numbers of existing runs and
published data. A new stream is a name in `Stream` and gets numbers above all of theirs.
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
    "candidates",
    "choice",
    "pairs",
]


def stream_seed(stream: Stream, seed: int, *position: int | str) -> int:
    """Return the seed of a stream at a position of the run.

    adapters                      of fresh adapters
    order, epoch (from 0)         of the data, shuffled
    minibatches, update (from 1)  of a batch, shuffled
    sampling, update, rank        of a process's completions
    prompt, index                 of a prompt at a server, under the seed of `sampling`
    teacher, source id, purpose   of a source's candidates, under the seed of a synthesis run
    anchors, kind                 of the pairs of texts that a calibration compares
    searcher, trajectory id, turn of a turn that a chat server writes
    episodes, update              of the episodes of a searcher's update
    turns, trajectory id, turn    of a turn of these
    further, update               of the questions that may come in place of some of an update
    candidates, first source      of the samples of some sources, of which one is chosen
    choice, source                of a sample that is chosen at random
    pairs                         of the pairs that are mixed with chosen samples

    Equal are, within one run: `order` of epoch u, `minibatches` of update u and `sampling` of
    update u on rank 0; and `adapters` and the first `order` if the seed is 0. This is harmless:
    each seeds its own generator and draws another kind of value (a permutation of the data, one of
    a batch, tokens, weights), and none is compared with another.
    """
    return _FIXED_STREAMS.get(stream, partial(_hashed_seed, stream))(seed, *position)


def _hashed_seed(stream: str, seed: int, *position: int | str) -> int:
    """Return a seed from 2**62 to 2**63, above all fixed streams (for run seeds under 10**12).

    Two streams or positions get the same number with a probability of 2**-62."""
    return 2**62 + (_digest("|".join(map(str, (stream, seed, *position)))) >> 2)


def _linear_seed(seed: int, step: int, rank: int = 0) -> int:
    return seed * 1_000_003 + step + rank * 999_999_937


def _prompt_seed(seed: int, index: int) -> int:
    """Return a seed below 2**63. A prompt's samples count up from it, so prompts are far apart."""
    return _digest(f"{seed}:{index}") >> 2


def _source_seed(seed: int, source: str, purpose: str) -> int:
    """Return a seed below 2**31 - 2**16, so that seed + n fits any server's integer."""
    return _digest(f"{seed}|{source}|{purpose}") % (2**31 - 2**16)


def _digest(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


_FIXED_STREAMS: dict[str, Callable[..., int]] = {
    "adapters": lambda seed: seed,
    "order": _linear_seed,
    "minibatches": _linear_seed,
    "sampling": _linear_seed,
    "prompt": _prompt_seed,
    "teacher": _source_seed,
}
