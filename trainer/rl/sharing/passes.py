"""Cut the sequences of an optimizer step into micro-batches, and share these over the processes.

Micro-batches are padded, not packed. Several sequences in one row, with positions that restart, are
right for texts, but torch's attention then takes a mask of [L, L] numbers: 32 texts of 29 to 128
tokens took twice as long on a CPU as in three padded passes of similar lengths. Without such a mask
only flash attention on a GPU does it, and models that see images compute positions from the ids.
"""

from __future__ import annotations

from collections.abc import Sequence

from trainer.rl.distributed import DistributedContext
from trainer.rl.forward import micro_batches


def own_micro_batches(
    lengths: Sequence[int], chosen: Sequence[int], max_tokens: int, world: DistributedContext
) -> list[list[int]]:
    """Return the micro-batches of this process, the same number on each.

    An empty one is a pass to make only because another process makes one (`idle_pass`).
    For the arguments see `share_sequences`.
    """
    shares = share_sequences(
        lengths, chosen, max_tokens, world.size, passes_in_step=world.is_sharded
    )
    num_passes = max(map(len, shares))
    local_batches = shares[world.rank]
    return local_batches + [[] for _ in range(num_passes - len(local_batches))]


def share_sequences(
    lengths: Sequence[int],
    chosen: Sequence[int],
    max_tokens: int,
    num_processes: int,
    *,
    passes_in_step: bool = False,
) -> list[list[list[int]]]:
    """Return the micro-batches of each process; each chosen sequence is in one of them.

    One process gets those of `micro_batches`. Several make as many passes as they need with
    `max_tokens`, but of equal size: with the smallest number of padded tokens that needs no more.
    The largest micro-batch goes first, each to the process with the fewest padded tokens so far
    (longest processing time first: Graham, SIAM J. Appl. Math. 17 (1969), 416-429).
    The shares depend on the arguments alone, so that all processes compute the same.

    lengths: tokens of each sequence, prompt and completion together.
    max_tokens: padded tokens of a pass, or one sequence.
    passes_in_step: the processes wait for each other in every pass (weights are sharded), so that
    the n-th pass of each has to be of similar size, and none makes more passes than it must.
    """
    batches = list(micro_batches(lengths, max_tokens, chosen))
    if num_processes == 1:
        return [batches]
    ordered = sorted(chosen, key=lambda index: lengths[index])
    max_batches = -(-len(batches) // num_processes) * num_processes
    too_few, enough = 0, max_tokens
    while enough - too_few > 1:
        tokens = (too_few + enough) // 2
        even_batches = list(micro_batches(lengths, tokens, ordered))
        if len(even_batches) > max_batches:
            too_few = tokens
        else:
            enough, batches = tokens, even_batches
    while len(batches) < min(num_processes, len(chosen)):  # equal lengths: still work for each
        largest = max(batches, key=len)
        batches.remove(largest)
        batches += [largest[::2], largest[1::2]]
    return _deal(lengths, batches, num_processes, passes_in_step=passes_in_step)


def padded_tokens(lengths: Sequence[int], batch: Sequence[int]) -> int:
    """Return the tokens of a micro-batch with its padding."""
    return len(batch) * max((lengths[index] for index in batch), default=0)


def _deal(
    lengths: Sequence[int],
    batches: Sequence[list[int]],
    num_processes: int,
    *,
    passes_in_step: bool,
) -> list[list[list[int]]]:
    """Return the micro-batches of each process, those with the most padded tokens first."""
    shares: list[list[list[int]]] = [[] for _ in range(num_processes)]
    tokens = [0] * num_processes
    by_size = sorted(batches, key=lambda batch: -padded_tokens(lengths, batch))
    for number, batch in enumerate(by_size):
        max_passes = number // num_processes if passes_in_step else number
        ranks = [rank for rank, share in enumerate(shares) if len(share) <= max_passes]
        rank = min(ranks, key=lambda rank: tokens[rank])
        shares[rank].append(batch)
        tokens[rank] += padded_tokens(lengths, batch)
    return shares
