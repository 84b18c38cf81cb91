"""Sample the turns of all running episodes together, so that batches do not depend on time.

This is the deterministic mode. An episode waits before each turn until every running episode of the
process waits, too. Then all turns are sampled in the order of the episodes. With weights that the
processes share (FSDP) this is the only mode, since all of them must make the same passes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from trainer.rl.config import SamplingConfig
from trainer.rl.distributed import DistributedContext
from trainer.rl.engines.generate import GenerateSampler
from trainer.rl.sampler import SampledCompletion, SeededPrompt


class FixedBatches:
    """The turns of the running episodes of one process.

    world: of processes that share the weights: all of them make the same calls; None: this process
    alone. Use it in one event loop.
    """

    def __init__(
        self,
        sampler: GenerateSampler,
        gen_cfg: SamplingConfig,
        *,
        with_logprobs: bool,
        world: DistributedContext | None,
    ) -> None:
        self._sampler, self._gen_cfg = sampler, gen_cfg
        self._with_logprobs, self._world = with_logprobs, world
        self._running: dict[str, None] = {}  # in the order of `start`
        self._waiting: dict[str, tuple[SeededPrompt, asyncio.Future[SampledCompletion]]] = {}

    def start(self, trajectory_ids: Sequence[str]) -> None:
        """Wait for these episodes from now on."""
        self._running = dict.fromkeys(trajectory_ids)
        self._waiting = {}

    async def complete(self, trajectory_id: str, prompt: SeededPrompt) -> SampledCompletion:
        """Return the completion of an episode's turn when all running episodes wait for theirs."""
        turn: asyncio.Future[SampledCompletion] = asyncio.get_running_loop().create_future()
        self._waiting[trajectory_id] = prompt, turn
        self._sample_if_all_wait()
        return await turn

    def finish(self, trajectory_id: str) -> None:
        """Do not wait for this episode any more; its caller goes on before the next batch."""
        self._running.pop(trajectory_id, None)
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._sample_if_all_wait)

    def end(self) -> None:
        """Make the calls that other processes still make, without turns of this process."""
        while self._world is not None and self._world.max_passes(0):
            self._sampler.complete_batch([], self._gen_cfg, with_logprobs=self._with_logprobs)

    def _sample_if_all_wait(self) -> None:
        if not self._waiting or len(self._waiting) < len(self._running):
            return
        waiting = [self._waiting.pop(id) for id in self._running]
        try:
            if self._world is not None:
                self._world.max_passes(len(waiting))
            completions = self._sampler.complete_batch(
                [prompt for prompt, _ in waiting], self._gen_cfg, with_logprobs=self._with_logprobs
            )
        except Exception as error:  # for those who wait: `finish` has no caller any more
            for _, turn in waiting:
                if not turn.done():
                    turn.set_exception(error)
            return
        for (_, turn), completion in zip(waiting, completions, strict=True):
            if not turn.done():
                turn.set_result(completion)
