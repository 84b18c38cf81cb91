"""The processes of a run: one, or several that accelerate or torchrun has started.

Rollouts and rewards are gathered completely (ids and a few numbers each), so that every process
computes the exact advantages of the full batch. Sampling and passes of updates are distributed.

Every exchange begins with a barrier (trainer/rl/barrier.py): if a process does not arrive, the
error names it and the run ends.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn

from scorekit.errors import ScorekitError, UserError
from trainer.rl.barrier import MonitoredBarrier, ProcessStalled
from trainer.rl.policy import unwrap_distributed, unwrap_peft, vision_parts

T = TypeVar("T")


class FailedOnMain(ScorekitError):
    """An error of the main process, in another one: the main process prints it."""


@contextmanager
def _meeting_all() -> Iterator[None]:
    """Turn torch's error at the start of a run, when a process is missing, into ProcessStalled."""
    try:
        yield
    except torch.distributed.DistError as error:
        names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        rank, size, host, port = (os.environ.get(name, "?") for name in names)
        raise ProcessStalled(
            f"process {rank} of {size} has not met the others at {host}:{port} "
            f"({str(error).splitlines()[0]}). See what they print, and whether each host reaches "
            "this address (torchrun --master_addr, --master_port)"
        ) from error


class DistributedContext:
    """Operations between the processes of a run.

    rank, size: index of this process, and number of processes.
    accelerator: accelerate's.
    """

    def __init__(
        self,
        device: torch.device,
        trackers: Sequence[str] = (),
        folder: Path | None = None,
        *,
        patience_s: float = 1800.0,
    ) -> None:
        """Join the processes of the run.

        patience_s: longest wait for another process.
        """
        from accelerate import Accelerator, DistributedType, InitProcessGroupKwargs

        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # a single process of accelerate uses the current device
        # Torch's own timeout within an exchange is longer, so that the barrier reports first
        exchange_timeout = timedelta(seconds=patience_s + min(60.0, patience_s))
        with _meeting_all():
            self.accelerator = Accelerator(
                cpu=device.type == "cpu",
                log_with=list(trackers) or None,
                project_dir=folder,
                kwargs_handlers=[InitProcessGroupKwargs(timeout=exchange_timeout)],
            )
        # Another part that asks accelerate for its state may reset this type
        self._is_sharded = self.accelerator.distributed_type == DistributedType.FSDP
        self.device = self.accelerator.device
        self.rank: int = self.accelerator.process_index
        self.size: int = self.accelerator.num_processes
        self._meeting = (
            MonitoredBarrier(self.rank, self.size, patience_s) if self.size > 1 else None
        )
        self._exchange_timeout = exchange_timeout
        self._group: Any = None  # of torch; None: the default group

    @property
    def is_main(self) -> bool:
        """Return whether this process writes the files of the run."""
        return self.rank == 0

    @property
    def is_sharded(self) -> bool:
        """Return whether no process has all weights (FSDP): then all must make the same passes."""
        return self._is_sharded

    def on_main(self, check: Callable[[], Any]) -> None:
        """Run this on the main process while the others wait; a UserError ends all."""
        self.on_all(check if self.is_main else lambda: None)

    def on_all(self, work: Callable[[], T]) -> T:
        """Run this on every process, and return its result there.

        If it raises a UserError on one of them, the main process raises it, and the others exit
        silently, with 0: torchrun ends all processes with the first that fails, and the main one
        has to print the error.
        """
        result: Any = None
        failure: UserError | None = None
        try:
            result = work()
        except UserError as error:
            failure = error
        failures = self.gather([None if failure is None else str(failure)])
        for rank, message in enumerate(failures):
            if message is None:
                continue
            if not self.is_main:
                raise SystemExit(0)
            raise failure or UserError(f"process {rank} of {self.size}: {message}")
        return cast("T", result)

    def from_main(self, work: Callable[[], T]) -> T:
        """Run this on the main process, and return its result on every process.

        An error of this project is raised on all of them: on the others as `FailedOnMain`.
        """
        if self.size == 1:
            return work()
        outcome: list[Any] = [None, None]
        failure: ScorekitError | None = None
        if self.is_main:
            try:
                outcome[0] = work()
            except ScorekitError as error:
                failure, outcome[1] = error, str(error)
        self.barrier()
        torch.distributed.broadcast_object_list(outcome, src=0, group=self._group)
        if failure is not None:
            raise failure
        if outcome[1] is not None:
            raise FailedOnMain(outcome[1])
        return cast("T", outcome[0])

    @contextmanager
    def monitored(self) -> Iterator[None]:
        """Run within it: if this process ends with an error, the others learn of it at once."""
        if self._meeting is None:
            yield
            return
        try:
            with self._meeting.exchange():
                yield
        except BaseException:
            self._meeting.announce_exit()
            raise

    def fork(self, name: str) -> DistributedContext:
        """Return a context whose exchanges another thread may use; these stay independent of them.

        Every process has to call it, in the same order. The fork gathers and waits; it prepares no
        models. `close` ends its waits.
        """
        twin = copy(self)
        if self._meeting is not None:
            patience_s = self._meeting.patience_s
            twin._meeting = MonitoredBarrier(self.rank, self.size, patience_s, name)
            twin._group = torch.distributed.new_group(
                backend="gloo", timeout=self._exchange_timeout
            )
        return twin

    def close(self) -> None:
        """Make a thread that waits for other processes in this fork raise ProcessStalled."""
        if self._meeting is not None:
            self._meeting.close()

    def set_phase(self, phase: str) -> None:
        """Record the phase of this process ("update 3, sampling"), for errors of the others."""
        if self._meeting is not None:
            self._meeting.set_phase(phase)

    def barrier(self) -> None:
        """Wait until every process has reached this barrier. Raises ProcessStalled."""
        if self._meeting is not None:
            self._meeting.wait()

    def wait(self) -> None:
        """Wait until every process has arrived and its device has finished its work."""
        self.barrier()
        self.accelerator.wait_for_everyone()

    def prepare(self, model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
        """Return the model and its optimizer, distributed over these processes."""
        if not self.is_sharded:
            shared, shared_optimizer = self.accelerator.prepare(model, optimizer)
            return shared, shared_optimizer
        if unsharded := self._unsharded_parts(model):
            self.accelerator.state.fsdp_plugin.ignored_modules = unsharded
        # Prepare the model inside peft's wrapper, in place: FSDP2 treats the first module that is
        # called as the outermost one, and that is the one that generates.
        _, shared_optimizer = self.accelerator.prepare(unwrap_peft(model), optimizer)
        return model, shared_optimizer

    def copy_from_main(self, model: nn.Module) -> None:
        """Give every process the trained weights that the main one began with: adapters are random.

        DDP does so by itself; sharding takes each part from the process that keeps it.
        """
        self.barrier()
        for parameter in model.parameters():
            if parameter.requires_grad:
                torch.distributed.broadcast(parameter.data, src=0)

    def shard(self, model: nn.Module) -> None:
        """Distribute the weights of a frozen model over the processes, layer by layer.

        Between two passes each process keeps its shard. All processes have to make the same passes.
        """
        from torch.distributed.fsdp import fully_shard
        from transformers.modeling_layers import GradientCheckpointingLayer

        unsharded = {p for part in self._unsharded_parts(model) for p in part.parameters()}
        layers = [part for part in model.modules() if isinstance(part, GradientCheckpointingLayer)]
        for part in [*layers, model]:
            fully_shard(part, reshard_after_forward=True, ignored_params=unsharded)

    def _unsharded_parts(self, model: nn.Module) -> list[nn.Module]:
        """Return the image parts, moved to this device, which are not sharded.

        Only processes whose micro-batch has an image run them; if they were sharded, those would
        wait for the others.
        """
        image_parts = vision_parts(model)
        for part in image_parts:
            part.to(self.device)
        return image_parts

    def max_passes(self, passes: int) -> int:
        """Return how many passes this process has to make: the maximum, if weights are sharded."""
        return max(self.gather([passes])) if self.is_sharded else passes

    def inference_model(self, model: nn.Module) -> nn.Module:
        """Return the model for passes without gradient.

        A process makes only its own passes (if weights are sharded: `max_passes`). DDP's own
        forward would wait for the others, because it broadcasts the model's buffers.
        """
        return model if self.is_sharded else unwrap_distributed(model)

    def split_items(self, items: Sequence[T]) -> list[tuple[int, T]]:
        """Return (index, item) of the items that this process has to do."""
        return [(index, items[index]) for index in range(self.rank, len(items), self.size)]

    def own_block(self, items: Sequence[T]) -> Sequence[T]:
        """Return the part of the items that this process has to do: consecutive ones.

        The parts of two processes differ by at most one item. Joined in the order of the ranks they
        are all items in their order.
        """
        start, stop = (len(items) * rank // self.size for rank in (self.rank, self.rank + 1))
        return items[start:stop]

    def gather(self, items: list[T]) -> list[T]:
        """Return the items of all processes on each of them, in the order of the ranks."""
        if self.size == 1:
            return items
        self.barrier()
        if self._group is not None and self._meeting is not None:
            parts: list[Any] = [None] * self.size
            with self._meeting.exchange():  # another thread's error would come without its place
                torch.distributed.all_gather_object(parts, items, group=self._group)
            return [item for part in parts for item in part]
        from accelerate.utils import gather_object

        return list(gather_object(items))

    def sum(self, stats: dict[str, float]) -> dict[str, float]:
        """Return each stat added up over the processes; a stat that one does not have is 0."""
        total: dict[str, float] = {}
        for part in self.gather([stats]):
            for name, value in part.items():
                total[name] = total.get(name, 0.0) + value
        return total

    def no_sync(self, model: nn.Module, *, last: bool) -> AbstractContextManager[Any]:
        """Skip the sum of gradients over the processes, except in a step's last micro-batch."""
        return nullcontext() if last or self.size == 1 else self.accelerator.no_sync(model)

    def sum_gradients(self, model: nn.Module) -> None:
        """Turn gradients that wrappers have averaged over the processes into their sum.

        This is done afterwards, in float32: a loss times 3 has other gradients under bfloat16.
        """
        for parameter in model.parameters() if self.size > 1 else ():
            if parameter.grad is not None:
                parameter.grad.mul_(self.size)

    def full_state_dicts(
        self, model: nn.Module, optimizer: Any
    ) -> tuple[dict[str, Any] | None, dict[str, Any]]:
        """Return the full weights and the full optimizer state, on the main process.

        The weights are None if the model has them. Every process has to call it.
        """
        if not self.is_sharded:
            return None, optimizer.state_dict()
        return self.full_weights(model), self.full_optimizer_state(model, optimizer)

    def full_optimizer_state(self, model: nn.Module, optimizer: Any) -> dict[str, Any]:
        """Return a sharded model's full optimizer state on the main process.

        Every process calls it.
        """
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            get_optimizer_state_dict,
        )

        self._reshard(model)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_optimizer_state_dict(model, optimizer.optimizer, options=options)

    def full_weights(self, model: nn.Module) -> dict[str, Any]:
        """Return a sharded model's full weights on the main process. Every process calls it."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        self._reshard(model)
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_model_state_dict(model, options=options)

    def _reshard(self, model: nn.Module) -> None:
        """Leave each process with its shard.

        After a pass without gradient FSDP2 keeps the outermost weights in full, which the optimizer
        does not handle.
        """
        from torch.distributed.fsdp import FSDPModule

        self.barrier()
        for part in model.modules():
            if isinstance(part, FSDPModule):
                part.reshard()

    def load_optimizer(self, model: nn.Module, optimizer: Any, state: dict[str, Any]) -> None:
        """Load an optimizer state that `full_state_dicts` returned."""
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
        """Clip the gradients to this norm, and return the norm before."""
        return float(self.accelerator.clip_grad_norm_(model.parameters(), max_norm))
