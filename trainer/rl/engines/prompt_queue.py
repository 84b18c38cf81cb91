"""Prompts that wait in an event loop, and the coroutine that runs them in steps."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from trainer.rl.sampler import SampledCompletion, SeededPrompt


@dataclass(eq=False, slots=True)
class QueuedPrompt:
    """Holds a prompt and the future of its completion."""

    prompt: SeededPrompt
    with_logprobs: bool
    future: asyncio.Future[SampledCompletion] | Future[SampledCompletion]


class PromptQueue(ABC):
    """Completes prompts of one event loop, in steps that block it; other tasks run in between.

    The steps run in the loop's own thread, as long as there is a prompt. So they have the autocast
    state of the code that runs the loop, which must not change meanwhile.
    """

    def __init__(self) -> None:
        self.waiting: deque[QueuedPrompt] = deque()
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @abstractmethod
    def step(self) -> None:
        """Make some progress, and set the results of finished prompts; without gradients."""

    @abstractmethod
    def running(self) -> list[QueuedPrompt]:
        """Return the prompts that no longer wait and are not finished."""

    @abstractmethod
    def clear(self) -> None:
        """Forget the running prompts."""

    async def complete(self, prompt: SeededPrompt, with_logprobs: bool) -> SampledCompletion:
        """Return the completion of a prompt; an error of any step is raised here."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._move_to(loop)
        future = loop.create_future()
        self.waiting.append(QueuedPrompt(prompt, with_logprobs, future))
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._run())
        return await future

    def _move_to(self, loop: asyncio.AbstractEventLoop) -> None:
        """Serve another loop from now on: prompts of a closed one are lost."""
        is_busy = self._task is not None and not self._task.done()
        if is_busy and self._loop is not None and not self._loop.is_closed():
            raise RuntimeError("complete: the sampler is in use in another event loop")
        self.waiting.clear()
        self.clear()
        self._loop, self._task = loop, None

    async def _run(self) -> None:
        try:
            while self._has_prompts():
                with torch.no_grad():
                    self.step()
                await asyncio.sleep(0)
            self.clear()  # the last rows would take memory until the next prompts
        except Exception as error:
            for queued in self._abandon():
                queued.future.set_exception(error)
        except BaseException:
            for queued in self._abandon():
                queued.future.cancel()
            raise

    def _has_prompts(self) -> bool:
        """Remove prompts that nobody waits for any more, and return whether there are any."""
        if any(queued.future.done() for queued in self.waiting):
            self.waiting = deque(q for q in self.waiting if not q.future.done())
        return bool(self.waiting) or any(not q.future.done() for q in self.running())

    def _abandon(self) -> list[QueuedPrompt]:
        """Remove all prompts, and return those that are not finished."""
        prompts = [q for q in (*self.running(), *self.waiting) if not q.future.done()]
        self.waiting.clear()
        self.clear()
        return prompts


class BatchQueue(PromptQueue):
    """Runs the prompts that wait as one fixed batch after another."""

    def __init__(
        self,
        complete_batch: Callable[[Sequence[SeededPrompt], bool], list[SampledCompletion]],
        batch_size: int,
    ) -> None:
        """Prepare to run batches.

        complete_batch: returns the completions of prompts, with log-probabilities or without.
        """
        super().__init__()
        self._complete_batch = complete_batch
        self._batch_size = batch_size
        self._batch: list[QueuedPrompt] = []

    def step(self) -> None:
        """Run one batch from its first token to its last."""
        with_logprobs = self.waiting[0].with_logprobs
        equal = [q for q in self.waiting if q.with_logprobs == with_logprobs]
        self._batch = equal[: self._batch_size]
        self.waiting = deque(q for q in self.waiting if q not in self._batch)
        completions = self._complete_batch([q.prompt for q in self._batch], with_logprobs)
        for queued, completion in zip(self._batch, completions, strict=True):
            queued.future.set_result(completion)
        self.clear()

    def running(self) -> list[QueuedPrompt]:
        """Return the prompts of the batch."""
        return self._batch

    def clear(self) -> None:
        """Forget the batch."""
        self._batch = []
