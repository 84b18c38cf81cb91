"""The processes of a run: one, or several that accelerate or torchrun has started.

Rollouts and rewards are gathered whole (ids and a few numbers each), so that every process computes
the advantages of the whole batch, exactly; what is spread is sampling and the passes of an update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from scorekit.errors import UserError

T = TypeVar("T")


class World:
    """rank, size: which of how many processes this is. accelerator: accelerate's."""

    def __init__(
        self, device: torch.device, trackers: Sequence[str] = (), folder: Path | None = None
    ) -> None:
        from accelerate import Accelerator

        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # accelerate takes the current one where it is alone
        self.accelerator = Accelerator(
            cpu=device.type == "cpu", log_with=list(trackers) or None, project_dir=folder
        )
        self.device = self.accelerator.device
        self.rank: int = self.accelerator.process_index
        self.size: int = self.accelerator.num_processes

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files of the run."""
        return self.rank == 0

    @property
    def is_sharded(self) -> bool:
        """Whether no process holds all weights (FSDP): then all must make the same passes."""
        from accelerate import DistributedType

        return bool(self.accelerator.distributed_type == DistributedType.FSDP)

    def on_main(self, check: Callable[[], Any]) -> None:
        """Let the main process do this, the others wait. Where it raises a UserError, they leave
        with its exit code and without a word."""
        failure: UserError | None = None
        if self.is_main:
            try:
                check()
            except UserError as error:
                failure = error
        if any(self.gather([failure is not None])):
            raise failure or SystemExit(2)

    def wait(self) -> None:
        """Until every process is here."""
        self.accelerator.wait_for_everyone()

    def most(self, passes: int) -> int:
        """How many passes each process has to make: its own, but where the weights are shared as
        many as the one that has most of them."""
        return max(self.gather([passes])) if self.is_sharded else passes

    def share(self, items: Sequence[T]) -> list[tuple[int, T]]:
        """(place, item) of the items that are this process's to do."""
        return [(place, items[place]) for place in range(self.rank, len(items), self.size)]

    def gather(self, items: list[T]) -> list[T]:
        """The items of all processes, on each of them, in the order of the ranks."""
        if self.size == 1:
            return items
        from accelerate.utils import gather_object

        return list(gather_object(items))

    def sum(self, figures: dict[str, float]) -> dict[str, float]:
        """Each figure added up over the processes; one that a process lacks counts 0 there."""
        total: dict[str, float] = {}
        for part in self.gather([figures]):
            for name, value in part.items():
                total[name] = total.get(name, 0.0) + value
        return total

    def no_sync(self, model: nn.Module, *, last: bool) -> AbstractContextManager[Any]:
        """Around forward and backward of a micro-batch: gradients are added up over the processes
        with the last one of an optimiser step."""
        return nullcontext() if last or self.size == 1 else self.accelerator.no_sync(model)

    def whole_states(
        self, model: nn.Module, optimizer: Any
    ) -> tuple[dict[str, Any] | None, dict[str, Any]]:
        """The weights (None: the model has them) and the optimiser's state, whole on the main
        process. Every process has to call it."""
        if not self.is_sharded:
            return None, optimizer.state_dict()
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            get_optimizer_state_dict,
        )

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_optimizer_state_dict(model, optimizer.optimizer, options=options)
        return self.accelerator.get_state_dict(model), state

    def load_optimizer(self, model: nn.Module, optimizer: Any, state: dict[str, Any]) -> None:
        """Put back what `whole_states` gave."""
        if not self.is_sharded:
            optimizer.load_state_dict(state)
            return
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            set_optimizer_state_dict,
        )

        options = StateDictOptions(full_state_dict=True)
        set_optimizer_state_dict(model, optimizer.optimizer, state, options=options)

    def clip(self, model: nn.Module, max_norm: float) -> float:
        """Clip the gradients to this norm; the norm before."""
        return float(self.accelerator.clip_grad_norm_(model.parameters(), max_norm))
