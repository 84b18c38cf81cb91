"""Keeps what the model has read of each conversation until its next turn.

Without it, each turn reads the whole conversation again: two thirds of the time of an episode of a
small searcher. What is kept belongs to one state of the weights.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from trainer.rl.sampler import SeededPrompt

#: Bytes of keys and values that are kept at most, beside those of the turns that run. Conversations
#: that were read longest ago go first; their next turn reads all again.
MAX_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class ReadTurns:
    """Holds the ids of a conversation that the model has read, and what it computed from them.

    layers: keys and values [heads, ids, size] of each layer.
    """

    ids: list[int]
    layers: list[tuple[Tensor, Tensor]]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all keys and values."""
        return sum(keys.nbytes + values.nbytes for keys, values in self.layers)


class TurnCache:
    """Holds the conversations that may go on, by the `affinity` of their prompts."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        """Start empty. max_bytes: of all conversations together."""
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._read: OrderedDict[str, ReadTurns] = OrderedDict()

    def __len__(self) -> int:
        """Return the number of conversations."""
        return len(self._read)

    def keep(
        self, affinity: str, ids: Sequence[int], layers: Sequence[tuple[Tensor, Tensor]]
    ) -> None:
        """Keep a conversation in place of what was kept of it.

        ids: all that the model has read.
        layers: keys and values [heads, ids, size] of each layer; nobody else may change them. One
        conversation that is too large for all the room is not kept.
        """
        self.forget(affinity)
        read = ReadTurns(list(ids), list(layers))
        if read.num_bytes > self._max_bytes:
            return
        self._read[affinity] = read
        self._num_bytes += read.num_bytes
        while self._num_bytes > self._max_bytes:
            self.forget(next(iter(self._read)))

    def take(self, prompt: SeededPrompt) -> ReadTurns | None:
        """Remove and return what was read of a prompt's conversation.

        Return None if the prompt does not begin with it, or has nothing new. A prompt with images
        is always read as a whole: its positions depend on them.
        """
        if prompt.images:
            return None
        read = self._read.get(prompt.affinity)
        if read is None:
            return None
        self.forget(prompt.affinity)
        length = len(read.ids)
        return read if list(prompt.ids[:length]) == read.ids and length < len(prompt.ids) else None

    def forget(self, affinity: str) -> None:
        """Drop a conversation: it has ended."""
        if (read := self._read.pop(affinity, None)) is not None:
            self._num_bytes -= read.num_bytes

    def clear(self) -> None:
        """Drop all conversations: the weights have changed."""
        self._read.clear()
        self._num_bytes = 0
