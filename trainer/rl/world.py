"""The processes of a run: one, or several that accelerate or torchrun has started.

Rollouts and rewards are gathered whole (ids and a few numbers each), so that every process computes
the advantages of the whole batch, exactly; what is spread is sampling and the passes of an update.

Every exchange begins with a meeting (trainer/rl/meeting.py): a process that the others wait for in
vain is named, and the run ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from scorekit.errors import UserError
from trainer.rl.meeting import Meeting
from trainer.rl.policy import unread_parts, unwrapped, without_wrappers

T = TypeVar("T")


class World:
    """rank, size: which of how many processes this is. accelerator: accelerate's."""

    def __init__(
        self,
        device: torch.device,
        trackers: Sequence[str] = (),
        folder: Path | None = None,
        *,
        patience_s: float = 1800.0,
    ) -> None:
        """patience_s: how long the processes wait for one of them."""
        from accelerate import Accelerator, InitProcessGroupKwargs

        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # accelerate takes the current one where it is alone
        # Within an exchange torch itself waits, longer, so that the meeting can tell first
        waits = timedelta(seconds=patience_s + min(60.0, patience_s))
        self.accelerator = Accelerator(
            cpu=device.type == "cpu",
            log_with=list(trackers) or None,
            project_dir=folder,
            kwargs_handlers=[InitProcessGroupKwargs(timeout=waits)],
        )
        self.device = self.accelerator.device
        self.rank: int = self.accelerator.process_index
        self.size: int = self.accelerator.num_processes
        self._meeting = Meeting(self.rank, self.size, patience_s) if self.size > 1 else None

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
        without a word, and with 0: torchrun ends all with the first that fails, and the main one
        has to tell."""
        failure: UserError | None = None
        if self.is_main:
            try:
                check()
            except UserError as error:
                failure = error
        if any(self.gather([failure is not None])):
            raise failure or SystemExit(0)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Around a run: where this process ends with an error, the others are told at once."""
        if self._meeting is None:
            yield
            return
        try:
            with self._meeting.exchange():
                yield
        except BaseException:
            self._meeting.leave()
            raise

    def at(self, place: str) -> None:
        """Note where this process is ("update 3, sampling"), for whoever waits for it."""
        if self._meeting is not None:
            self._meeting.place = place

    def meet(self) -> None:
        """Until every process is here. Raises Stalled where one does not come."""
        if self._meeting is not None:
            self._meeting.meet()

    def wait(self) -> None:
        """Until every process is here, and what each gave to its device is done."""
        self.meet()
        self.accelerator.wait_for_everyone()

    def prepare(self, model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
        """The model and its optimiser as these processes share them."""
        if not self.is_sharded:
            shared, its_optimizer = self.accelerator.prepare(model, optimizer)
            return shared, its_optimizer
        if whole := self._left_whole(model):
            self.accelerator.state.fsdp_plugin.ignored_modules = whole
        # In place, and what stands in peft's wrapper: FSDP2 takes what is called first for the
        # outermost part, and that is what generates.
        _, its_optimizer = self.accelerator.prepare(without_wrappers(model), optimizer)
        return model, its_optimizer

    def shard(self, model: nn.Module) -> None:
        """Spread the weights of a model that does not learn over the processes, layer by layer:
        each holds its part between two passes, and all have to make the same passes."""
        from torch.distributed.fsdp import fully_shard
        from transformers.modeling_layers import GradientCheckpointingLayer

        whole = {p for part in self._left_whole(model) for p in part.parameters()}
        layers = [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]
        for part in [*layers, model]:
            fully_shard(part, reshard_after_forward=True, ignored_params=whole)

    def _left_whole(self, model: nn.Module) -> list[nn.Module]:
        """What sees, on its device: only those pass through it whose micro-batch has an image, and
        where it were shared they would wait for the others."""
        whole = unread_parts(model)
        for part in whole:
            part.to(self.device)
        return whole

    def most(self, passes: int) -> int:
        """How many passes each process has to make: its own, but where the weights are shared as
        many as the one that has most of them."""
        return max(self.gather([passes])) if self.is_sharded else passes

    def reading(self, model: nn.Module) -> nn.Module:
        """The model for passes without gradient, of which a process makes as many as it has to do
        (where the weights are shared: `most`). DDP's own forward would wait for the others: it
        sends around the model's buffers."""
        reader: nn.Module = model if self.is_sharded else unwrapped(model)
        return reader

    def share(self, items: Sequence[T]) -> list[tuple[int, T]]:
        """(place, item) of the items that are this process's to do."""
        return [(place, items[place]) for place in range(self.rank, len(items), self.size)]

    def gather(self, items: list[T]) -> list[T]:
        """The items of all processes, on each of them, in the order of the ranks."""
        if self.size == 1:
            return items
        from accelerate.utils import gather_object

        self.meet()
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

    def add_up(self, model: nn.Module) -> None:
        """Make gradients that wrappers have averaged over the processes their sum. Afterwards and
        in float32, since a loss that is scaled by 3 has other gradients under bfloat16."""
        for parameter in model.parameters() if self.size > 1 else ():
            if parameter.grad is not None:
                parameter.grad.mul_(self.size)

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

        self._put_back(model)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_optimizer_state_dict(model, optimizer.optimizer, options=options)
        return self.whole_weights(model), state

    def whole_weights(self, model: nn.Module) -> dict[str, Any]:
        """The weights of a model that the processes share, whole on the main process. Every process
        has to call it."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        self._put_back(model)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_model_state_dict(model, options=options)

    def _put_back(self, model: nn.Module) -> None:
        """Leave each process with its part: after a pass without gradient FSDP2 keeps the outermost
        weights whole, which the optimiser does not know."""
        from torch.distributed.fsdp import FSDPModule

        self.meet()
        for part in model.modules():
            if isinstance(part, FSDPModule):
                part.reshard()

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
