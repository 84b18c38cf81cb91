"""Count the processes that an update has work for, from the config alone.

A process without work is a mistake, which `Workload.check` reports before a model is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from scorekit.errors import UserError
from trainer.rl.config import RLConfig


@dataclass(frozen=True, slots=True)
class Workload:
    """Sizes of an update, as far as they are known before it.

    samples: fewest and most sequences of a prompt.
    samples_key: key of their number.
    unit: what sequences are called.
    shares_sequences: processes share sequences when they sample, not prompts with their samples.
    drops_sequences: an update may have fewer sequences in the loss than it has sampled.
    """

    rl: RLConfig
    samples: tuple[int, int]
    samples_key: str
    unit: str = "sequences"
    shares_sequences: bool = False
    drops_sequences: bool = False

    @property
    def prompts(self) -> int:
        """Return the number of prompts of an update."""
        return self.rl.batch_size * self.rl.grad_accum

    @property
    def sequences(self) -> tuple[int, int]:
        """Return the fewest and the most sequences of an update."""
        fewest, largest = self.samples
        return self.prompts * fewest, self.prompts * largest

    @property
    def max_sampling(self) -> int:
        """Return how many processes at most have something to sample."""
        return self.sequences[1] if self.shares_sequences else self.prompts

    @property
    def max_learning(self) -> int:
        """Return the most sequences of an optimizer step: each needs a process at most.

        With `minibatch_size` m, n sequences make ceil(n / m) steps of equal size: 12 of them at 8
        a step are two steps of 6. Where sequences may be dropped, 8 of the 12 may remain.
        """
        rl, (fewest, largest) = self.rl, self.sequences
        size = None if rl.chosen_algorithm.takes_one_step else rl.minibatch_size
        low = 1 if self.drops_sequences else fewest
        if size is not None and largest // size * size >= max(low, size):
            return size
        return -(-largest // rl.num_steps(largest))

    @property
    def max_processes(self) -> int:
        """Return how many processes at most have work, when they sample and when they learn."""
        return min(self.max_sampling, self.max_learning)

    def check(self, processes: int) -> str:
        """Return the sizes of an update in words.

        Raises UserError if more processes are started than have work.
        """
        problems = []
        if (idle := processes - self.max_sampling) > 0:
            problems.append(f"{self._sampled_text}: {_have(idle)} no work when sampling")
        if (idle := processes - self.max_learning) > 0:
            problems.append(f"{self._step_text}: {_have(idle)} no work when learning")
        if problems:
            raise UserError(
                f"{processes} processes, {'; '.join(problems)}. {self._repair(processes)}, or "
                f"start {_count(self.max_processes, 'processes')}"
            )
        return self.text

    @property
    def text(self) -> str:
        """Return the sizes of an update, and how many processes have work."""
        fewest, largest = self.sequences
        low = "" if fewest == largest else f"{fewest} to "
        prompts = "" if self.shares_sequences else f"{_count(self.prompts, 'prompts')}, "
        return (
            f"one update: {prompts}{low}{_count(largest, self.unit)}, minibatches of "
            f"{_count(self.max_learning, self.unit)}: up to "
            f"{_count(self.max_processes, 'processes')} can have work"
        )

    @property
    def _sampled_text(self) -> str:
        keys = "rl.batch_size x rl.grad_accum"
        if self.shares_sequences:
            count = _count(self.max_sampling, self.unit)
            return f"{count} an update ({keys} x {self.samples_key})"
        return f"{_count(self.max_sampling, 'prompts')} an update ({keys})"

    @property
    def _step_text(self) -> str:
        key = "rl.minibatches" if self.rl.minibatch_size is None else "rl.minibatch_size"
        if self.rl.chosen_algorithm.takes_one_step:
            key = f"rl.algorithm {self.rl.algorithm}: one a batch"
        return f"{_count(self.max_learning, self.unit)} a minibatch ({key})"

    def _repair(self, processes: int) -> str:
        """Return the changes of the config that give so many processes work."""
        rl, changes = self.rl, []
        needed = -(-processes // self.samples[1])
        if not self.shares_sequences:
            needed = max(needed, processes)
        if needed > self.prompts:
            batch_size = -(-needed // rl.grad_accum)
            rl = rl.model_copy(update={"batch_size": batch_size})
            changes.append(f"raise rl.batch_size to {batch_size}")
        if (larger := replace(self, rl=rl)).max_learning < processes:
            changes.append(larger._larger_steps(processes))
        repairs = " and ".join(changes)
        return repairs[0].upper() + repairs[1:]

    def _larger_steps(self, processes: int) -> str:
        """Return the change that makes an optimizer step large enough for so many processes."""
        largest = self.sequences[1]
        if self.rl.minibatch_size is None:  # ceil(largest / steps) is at least `processes`
            return f"lower rl.minibatches to {(largest - 1) // (processes - 1)}"
        sizes = (
            size
            for size in range(processes, largest + 1)
            if replace(self, rl=self.rl.model_copy(update={"minibatch_size": size})).max_learning
            >= processes
        )
        return f"raise rl.minibatch_size to {next(sizes)} or more"


def _count(number: int, plural: str) -> str:
    """Return "8 episodes", but "1 episode"."""
    singular = plural.removesuffix("es") if plural == "processes" else plural.removesuffix("s")
    return f"{number} {singular if number == 1 else plural}"


def _have(number: int) -> str:
    return f"{number} has" if number == 1 else f"{number} have"
