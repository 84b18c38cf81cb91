"""Sampling by vLLM servers (0.32 or later) over HTTP, which get the weights after each update.

    VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=True VLLM_API_KEY=... \\
        vllm serve MODEL --logprobs-mode processed_logprobs --enable-lora --max-lora-rank 16

MODEL is the folder or hub id that the trainer has in `policy.path`.
`--logprobs-mode processed_logprobs`: log-probabilities of the distribution that is sampled from,
with temperature, top_p and top_k applied.
`--enable-lora`, `--max-lora-rank` and VLLM_ALLOW_RUNTIME_LORA_UPDATING: if `policy.lora.r` > 0.
`--max-loras 2`: turns in flight go on with the adapter that they began with; with 1, turns with the
next one wait for them.
VLLM_SERVER_DEV_MODE: if all weights are trained: the routes that load weights, and that pause
(`/pause`, `/resume`), exist only then. They need no key, so keep the port private.
`--enable-scale-out`: if prompts have images, or all weights are trained while turns are in flight.
The prompt ids are sent as they are to be read, and the answer says which weights sampled each
token. Then turns in flight stand still while weights load, and go on with the new ones. Without
it, no turn begins until all that are in flight have ended and the weights are loaded.
`--data-parallel-size N`: with `--api-server-count 1`, since an adapter is loaded by one API server.
On a CPU vLLM packs the head when it starts: a head that is tied to the embeddings is not reloaded.

Weights go through `vllm.sync_dir`, a folder that all sides see under one path. A run has its own
folder there, named by its run_dir. The next start removes the files of a run that was killed, and
its adapters on the servers. Each update's adapter has its own name: with `load_inplace` vLLM would
read it from disk at every step. Full weights are reloaded in place. A salt separates the entries of
vLLM's prefix cache by update. A server that restarts loses all this; the sampler sends the weights
again.

Several servers: see trainer/rl/engines/vllm_pool.py. One that fails is left out, and takes part
again when it completes a turn with the weights. What is no completion of the policy
(trainer/rl/engines/vllm_protocol.py) is counted, and the turn is sampled again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from functools import partial
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import torch
from torch import nn

from scorekit.errors import UserError
from scorekit.net.loops import LoopThread
from scorekit.seeds import stream_seed
from trainer.rl.config import SamplingConfig, VLLMConfig
from trainer.rl.distributed import DistributedContext
from trainer.rl.engines.vllm_http import as_user_error, retry
from trainer.rl.engines.vllm_pool import PooledServer, ServerPool
from trainer.rl.engines.vllm_protocol import (
    FAULT_CAUSES,
    InvalidCompletion,
    Request,
    VLLMTurn,
    request,
    version_label,
)
from trainer.rl.engines.vllm_sync import ATTEMPTS, RECENT_S, WeightSync
from trainer.rl.engines.vllm_turns import TurnRunner
from trainer.rl.engines.vllm_weights import Weights, clean, save_weights
from trainer.rl.forward import Image, completion_logprobs
from trainer.rl.policy import embedding_rows, unwrap_distributed
from trainer.rl.sampler import CompletionFailed, SampledCompletion, SeededPrompt

log = logging.getLogger(__name__)
T = TypeVar("T")

#: Largest mean |log pi trainer - log pi server| of a token for the same model. Kernels and bfloat16
#: give hundredths.
MOST_GAP = 0.3


class VLLMSampler:
    """Samples from vLLM servers. Requests run in an event loop in its own thread.

    Several threads may sample while one syncs weights.
    weights: those of the last sync.
    """

    def __init__(
        self,
        cfg: VLLMConfig,
        model_name: str,
        stops: list[int],
        world: DistributedContext,
        *,
        adapters: bool,
        run_dir: str | Path,
        role: str = "train",
        banned_token_ids: Sequence[int] = (),
        image_id: int | None = None,
    ) -> None:
        """Prepare to sample from the servers of the config.

        model_name: the result of `probe_server`.
        stops: ids that end a completion.
        adapters: whether adapters are trained, and not the whole model.
        role: a run_dir may have one sampler of each role at a time.
        banned_token_ids: ids that must not be sampled.
        image_id: the id that stands for a part of an image, if the model reads images.
        """
        self.cfg, self.model_name, self.stops, self.world = cfg, model_name, stops, world
        self.by_adapters, self.banned_token_ids = adapters, banned_token_ids
        folder = self.cfg.sync_dir or Path(run_dir) / "sync"
        # Named by this run_dir: another run may have the same servers and sync_dir.
        owner_key = f"{role} {Path(run_dir).resolve()}"
        self.owner = blake2b(owner_key.encode(), digest_size=6).hexdigest()
        self.folder = Path(folder).expanduser().resolve() / f"scorekit-{self.owner}"
        self.run_id = f"{self.owner}-{uuid4().hex[:12]}"
        if world.is_main:
            clean(self.folder)
        self.weights: Weights | None = None
        self._orders = count()
        self._removals: set[asyncio.Task[None]] = set()
        self._thread = LoopThread("sampler")  # its loop owns the next three
        self._pool = ServerPool(cfg.urls, cfg.concurrency, cfg.timeout_s, self._thread.loop)
        self._sync = WeightSync(
            self._pool, adapters=adapters, owner=self.owner, is_main=world.is_main
        )
        self._image_id = image_id
        self._vocabulary_size = 0  # of the first weights
        self._turns = TurnRunner(self._pool, self._sync, self._make_request)
        self._total_faults: Counter[str] = Counter()
        if world.size == 1:
            self._sync.uses.on_release = self._remove_soon

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        gen_cfg: SamplingConfig,
        *,
        images: Sequence[Sequence[Image]] | None = None,
        seed: int | None = None,
        with_logprobs: bool = True,
    ) -> Iterator[tuple[int, list[SampledCompletion]]]:
        """Yield completions as `Sampler.sample` says.

        Raises UserError if a server refuses, if none gives a completion in `timeout_s` or all give
        invalid ones, or if images are read as other ids than the prompt's.
        """
        assert self.weights is not None, "call sync_weights first"
        base = int(torch.randint(2**62, ())) if seed is None else seed
        self._wait(self._sync.check_all())
        futures = {}
        for i, prompt in enumerate(prompts):
            turn = VLLMTurn(
                prompt,
                images[i] if images else (),
                gen_cfg,
                stream_seed("prompt", base, i),
                with_logprobs,
                next(self._orders),
            )
            futures[self._thread.submit(self._turns.run(turn))] = i
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            for future in futures:
                future.cancel()

    async def complete(
        self, prompt: SeededPrompt, gen_cfg: SamplingConfig, *, with_logprobs: bool
    ) -> SampledCompletion:
        """Return one completion, as `Sampler.complete` says."""
        assert self.weights is not None, "call sync_weights first"
        settings = gen_cfg.model_copy(
            update={
                "temperature": prompt.temperature,
                "max_new_tokens": prompt.max_new_tokens,
                "num_samples_per_prompt": 1,
            }
        )
        turn = VLLMTurn(
            prompt.ids,
            prompt.images,
            settings,
            prompt.seed,
            with_logprobs,
            next(self._orders),
            prompt.affinity,
        )
        (completion,) = await asyncio.wrap_future(self._thread.submit(self._turns.run(turn)))
        return completion

    def sync_weights(self, model: nn.Module, update: int) -> None:
        """Write the weights, and make all servers load them at the same time.

        Turns in flight are not lost: with adapters they go on as they began, otherwise see the
        flags above. A server that does not take the weights is left out.
        The first call raises UserError if a server has another model than the trainer, or refuses
        the weights; any call if no server takes them in `timeout_s`.
        """
        old = self.weights
        # Before `gather`, so that every process knows it when the main one has sent the weights.
        self._sync.newest_update = update
        if old is None:
            self._vocabulary_size = embedding_rows(unwrap_distributed(model))
            self._sync.try_out = partial(self._turns.try_out, turn=trial_turn(model))
        version = version_label(self.run_id, update)
        name = f"policy-{version}" if self.by_adapters else self.model_name
        new = Weights(name, self.folder / f"update-{update:06d}-{self.run_id}", version, update)
        save_weights(model, new.folder, self.world, adapters=self.by_adapters)
        if old is None:
            self._wait(self._sync.prepare_all(self.model_name))
            if self.by_adapters and self.world.is_main:
                self._wait(self._sync.unload_stale_adapters())
        needed_here = self._thread.run(self._sync.drain())
        needed = set().union(*self.world.gather([needed_here]))
        if self.world.is_main:
            self._wait(self._sync.send(new))
        new = self.world.gather([new])[0]  # after the main process has sent them
        self.weights = new
        self._thread.run(self._adopt(old, new, needed))
        if old is None:
            self._check_agreement(model)

    def stats(self) -> dict[str, float | int | None]:
        """Return stats of all processes since the last call. All processes call it.

        sampler_servers: the least number of servers that took part.
        sampler_moved: turns that were sent to another server after a failure.
        sampler_faults: answers that were no completions of the policy; and by cause.
        """
        every = self.world.gather([self._thread.run(self._take_stats())])
        stats: dict[str, float | int | None] = {
            key: sum(stats[key] for stats in every) for key in every[0]
        }
        stats["sampler_servers"] = min(stats["sampler_servers"] for stats in every)
        return stats

    def close(self) -> None:
        """Unload the adapters, if the servers still answer, and remove all folders."""
        self._thread.run(self._take_stats())
        if self._total_faults:
            causes = ", ".join(f"{cause} {n}" for cause, n in self._total_faults.most_common())
            log.warning(
                "vLLM servers gave %d answers that are no completions of the policy (%s). None of "
                "them was used.",
                self._total_faults.total(),
                causes,
            )
        if self.weights is not None and self.world.is_main:
            self._thread.run(self._remove_all(self.weights))
            clean(self.folder)
        self._thread.stop(self._pool.close)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the sampler's loop, in at most `timeout_s`, and return its result."""

        async def in_time() -> T:
            with as_user_error(", ".join(self.cfg.urls)):
                return await asyncio.wait_for(work, self.cfg.timeout_s)

        try:
            return self._thread.run(in_time())
        except TimeoutError:
            raise CompletionFailed(
                f"generation.vllm.url: {', '.join(self.cfg.urls)} gave no answer in timeout_s = "
                f"{self.cfg.timeout_s:g} seconds, all attempts together"
            ) from None

    async def _take_stats(self) -> dict[str, int]:
        num_moved, self._turns.num_moved = self._turns.num_moved, 0
        num_faults = self._turns.take_faults()
        self._total_faults += num_faults
        return {
            "sampler_servers": self._pool.take_min_servers(),
            "sampler_moved": num_moved,
            "sampler_faults": num_faults.total(),
            **{f"sampler_faults_{cause}": num_faults[cause] for cause in FAULT_CAUSES},
        }

    def _make_request(
        self, turn: VLLMTurn, weights: Weights, has_labels: bool, model_names: Collection[str]
    ) -> Request:
        return request(
            turn,
            weights,
            has_labels,
            model_names,
            vocabulary_size=self._vocabulary_size,
            stops=self.stops,
            banned_token_ids=self.banned_token_ids,
            image_id=self._image_id,
        )

    # -- weights -----------------------------------------------------------------------------------

    async def _adopt(self, old: Weights | None, new: Weights, needed: set[str]) -> None:
        """Use new weights from now on, and remove those that no request needs any more.

        needed: versions that requests of any process needed when the new ones were sent.
        """
        self._sync.adopt(new)
        if old is None or not self.world.is_main:
            return
        uses = self._sync.uses
        if self.world.size == 1:
            uses.retired.append(old)
            await self._sync.remove(uses.take_unneeded(uses.versions))
        else:  # another process may just have sent a request with the old ones
            await self._sync.remove(uses.take_unneeded(needed))
            uses.retired.append(old)

    def _remove_soon(self) -> None:
        """Remove retired weights whose last request has ended."""
        uses = self._sync.uses
        if unneeded := uses.take_unneeded(uses.versions):
            task = asyncio.get_running_loop().create_task(self._sync.remove(unneeded))
            self._removals.add(task)
            task.add_done_callback(self._removals.discard)

    async def _remove_all(self, weights: Weights) -> None:
        await asyncio.gather(*self._removals, return_exceptions=True)
        await self._sync.remove([*self._sync.uses.retired, weights])

    def _check_agreement(self, model: nn.Module) -> None:
        """Raise UserError if a server's log-probabilities are those of another model."""
        turn = trial_turn(model)

        async def ask(server: PooledServer) -> list[SampledCompletion]:
            await self._sync.restore(server, RECENT_S)  # another process has sent the weights
            with as_user_error(server.url):
                return await retry(
                    lambda: self._turns.ask(server, turn),
                    lambda error: isinstance(error, InvalidCompletion),
                    url=server.url,
                    attempts=ATTEMPTS,
                )

        async def ask_all() -> dict[str, list[SampledCompletion]]:
            servers = self._pool.up
            groups = await asyncio.gather(*map(ask, servers))
            return {server.url: group for server, group in zip(servers, groups, strict=True)}

        groups = self._wait(ask_all())
        check_agreement(model, turn.ids, groups, self.banned_token_ids)


def trial_turn(model: nn.Module) -> VLLMTurn:
    """Return a turn of ids that any model has."""
    rows = min(embedding_rows(unwrap_distributed(model)), 2**15)
    gen_cfg = SamplingConfig(max_new_tokens=16, num_samples_per_prompt=4)
    return VLLMTurn([(7919 * i) % rows for i in range(1, 17)], (), gen_cfg, 0, True, -1)


def check_agreement(
    model: nn.Module,
    prompt: Sequence[int],
    completions_by_url: Mapping[str, Sequence[SampledCompletion]],
    banned_token_ids: Sequence[int],
) -> None:
    """Raise UserError if the log-probabilities of a server are those of another model.

    All completions are read in one pass, so that processes that share weights make as many passes.
    """
    completions = [c for group in completions_by_url.values() for c in group]
    with torch.no_grad():
        logprobs_BT, _, mask_BT = completion_logprobs(
            model,
            [list(prompt)] * len(completions),
            [completion.token_ids for completion in completions],
            1.0,
            0,
            banned_token_ids=banned_token_ids,
        )
    trainer_rows = [row[mask].cpu() for row, mask in zip(logprobs_BT, mask_BT, strict=True)]
    first = 0
    for url, group in completions_by_url.items():
        trainer_logprobs = torch.cat(trainer_rows[first : first + len(group)])
        first += len(group)
        server_logprobs = torch.tensor([value for c in group for value in c.logprobs or ()])
        gap = (trainer_logprobs - server_logprobs).abs().mean().item()
        if gap > MOST_GAP:
            raise UserError(
                f"generation.vllm.url: {url} serves another model than the policy: their "
                f"log-probabilities differ by {gap:.2f} a token. Start it with policy.path"
            )
        log.info("%s and trainer differ by %.4f in a token's log-probability", url, gap)
