"""Sampling by a vLLM server (0.32 or later) over HTTP, which is given the policy's weights after
each update.

    VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=True VLLM_API_KEY=... \\
        vllm serve MODEL --logprobs-mode processed_logprobs --enable-lora --max-lora-rank 16

MODEL is the folder or hub id that the trainer has in `policy.path`.
`--logprobs-mode processed_logprobs`: log-probabilities of the distribution that is sampled from,
with temperature, top_p and top_k applied.
`--enable-lora`, `--max-lora-rank` and VLLM_ALLOW_RUNTIME_LORA_UPDATING: where `policy.lora.r` > 0.
VLLM_SERVER_DEV_MODE: where all weights learn; its routes take no key, so keep the port private.
`--enable-scale-out`: where prompts show images, which are sent as they are to be read.
On a CPU vLLM packs the head when it starts: a head that is tied to the embeddings is not reloaded.

Weights go through `vllm.sync_dir`, a folder that both sides see under one path. There a run has a
folder of its own, by its run_dir; the next start removes what one that was killed left in it, and
its adapters from the server. Each update's
adapter has a name of its own: with `load_inplace` vLLM would read it from disk at every step. All
weights are reloaded in place. What vLLM remembers of prompts (its prefix cache) is kept apart for
each update by a salt. A server that starts again in between has lost all this, and is given it
again.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import as_completed
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import torch
from torch import nn

from scorekit.errors import UserError
from scorekit.files import allow_readers
from scorekit.net.loop_thread import LoopThread
from scorekit.seeds import stream_seed
from trainer.rl.config import SamplingConfig, VLLMConfig
from trainer.rl.engines.vllm_bodies import Request, completions, request
from trainer.rl.engines.vllm_http import (
    Refused,
    VLLMServer,
    check_server,
    is_away,
    mendable,
    patiently,
)
from trainer.rl.forward import Image, completion_logprobs
from trainer.rl.policy import embedding_rows, unwrapped
from trainer.rl.sampler import Sampled
from trainer.rl.world import World

log = logging.getLogger(__name__)
T = TypeVar("T")

#: Mean |log pi trainer - log pi server| of a token, above which it is not the same model. Kernels
#: and bfloat16 give hundredths.
MOST_GAP = 0.3


def probe_server(cfg: VLLMConfig, *, adapters: bool, images: bool = False) -> str:
    """The model's name on the server. adapters: it is to take adapters. images: prompts show some.
    Raises UserError where the server is away, or cannot sample for this run; loads nothing."""

    async def probe() -> str:
        server = VLLMServer(cfg)
        try:
            return await check_server(server, cfg.model, adapters=adapters, images=images)
        finally:
            await server.close()

    with mendable(cfg):
        return asyncio.run(probe())


@dataclass(frozen=True, slots=True)
class Weights:
    """What the server was given: model: the name to sample from. version: of these weights alone,
    in any run."""

    model: str
    folder: Path
    version: str


class VLLMSampler:
    """Samples from a vLLM server. Requests live in an event loop of its own thread."""

    def __init__(
        self,
        cfg: VLLMConfig,
        model_name: str,
        stops: list[int],
        world: World,
        *,
        adapters: bool,
        run_dir: str | Path,
        role: str = "train",
        never: Sequence[int] = (),
        image_id: int | None = None,
    ) -> None:
        """model_name: what `probe_server` gave. stops: ids that end a completion. adapters: they
        learn, not the whole model. role: a run_dir may have a sampler of each role at a time.
        never: ids that are not to be drawn. image_id: the one that stands for a part of an image,
        where the model sees."""
        self.cfg, self.model_name, self.stops, self.world = cfg, model_name, stops, world
        self.by_adapters, self.never, self.image_id = adapters, never, image_id
        folder = self.cfg.sync_dir or Path(run_dir) / "sync"
        # Of this run_dir alone: another run may have the same server and sync_dir.
        whose = f"{role} {Path(run_dir).resolve()}"
        self.owner = blake2b(whose.encode(), digest_size=6).hexdigest()
        self.folder = Path(folder).expanduser().resolve() / f"scorekit-{self.owner}"
        self.run_id = f"{self.owner}-{uuid4().hex[:12]}"
        if world.is_main:
            clean(self.folder)
        self.weights: Weights | None = None
        # Owner of the next three: the sampler's loop. `weights` is the caller's, which changes it
        # between two calls of `sample` only; `_restore` reads it there.
        self._server = VLLMServer(self.cfg)
        self._slots = asyncio.Semaphore(self.cfg.concurrency)
        self._restoring = asyncio.Lock()
        self._thread = LoopThread("sampler")

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        gen_cfg: SamplingConfig,
        *,
        images: Sequence[Sequence[Image]] | None = None,
        seed: int | None = None,
        with_logprobs: bool = True,
    ) -> Iterator[tuple[int, list[Sampled]]]:
        """As the protocol says. Raises UserError where the server refuses, gives no answer in
        `timeout_s`, or reads images as other ids than the prompt's."""
        base = int(torch.randint(2**62, ())) if seed is None else seed
        self._wait(patiently(self._restore))
        assert self.weights is not None, "sync comes first"
        futures = {}
        for i, prompt in enumerate(prompts):
            asked = request(
                prompt,
                images[i] if images else (),
                gen_cfg,
                model=self.weights.model,
                salt=self.weights.version,
                seed=stream_seed("prompt", base, i),
                stops=self.stops,
                never=self.never,
                image_id=self.image_id,
                with_logprobs=with_logprobs,
            )
            futures[self._thread.submit(self._complete(asked))] = i
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            for future in futures:
                future.cancel()

    def sync(self, model: nn.Module, update: int) -> None:
        """Write the weights, and have the server take them. With the first, raises UserError where
        it has another model than the trainer."""
        old, version = self.weights, f"{self.run_id}-{update:06d}"
        name = f"policy-{version}" if self.by_adapters else self.model_name
        new = Weights(name, self.folder / f"update-{update:06d}-{self.run_id}", version)
        self._save(model, new.folder)
        if self.world.is_main:
            if old is None and self.by_adapters:
                self._wait(self._unload_left())
            self._wait(patiently(lambda: self._give(new)))
        self.weights = self.world.gather([new])[0]  # when the main process is through
        if old is None:
            self._check_agreement(model)
        elif self.world.is_main:
            self._forget(old)

    def close(self) -> None:
        """Take back the last adapter, if the server still answers, and all folders."""
        if self.weights is not None and self.world.is_main:
            self._forget(self.weights)
            clean(self.folder)
        self._thread.stop(self._server.close)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it in the sampler's loop."""
        return self._thread.run(self._in_time(work))

    async def _in_time(self, work: Coroutine[Any, Any, T]) -> T:
        """Its result, in `timeout_s` at most; what the user can mend becomes a UserError."""
        try:
            with mendable(self.cfg):
                return await asyncio.wait_for(work, self.cfg.timeout_s)
        except TimeoutError:
            raise UserError(
                f"generation.vllm.url: {self.cfg.url} gave no answer in timeout_s = "
                f"{self.cfg.timeout_s:g} seconds, all attempts together"
            ) from None

    # -- completions -------------------------------------------------------------------------------

    async def _complete(self, asked: Request) -> list[Sampled]:
        """One prompt's completions."""
        async with self._slots:
            answer = await self._in_time(self._patiently(asked))
        return completions(answer, asked, str(self.cfg.url))

    async def _patiently(self, asked: Request) -> Any:
        """The answer, with as many attempts as it takes; before each new one it is made sure that
        the server has the weights."""
        failed = False

        async def attempt() -> Any:
            nonlocal failed
            if failed:
                await self._restore()
            failed = True
            return await self._server.ask("POST", asked.route, asked.body)

        def may_pass(error: BaseException) -> bool:
            # 404: it does not know the adapter; 500: it breaks down
            return is_away(error) or (isinstance(error, Refused) and error.status in (404, 500))

        return await patiently(attempt, may_pass)

    # -- weights -----------------------------------------------------------------------------------

    async def _give(self, weights: Weights) -> None:
        if self.by_adapters:
            await self._server.load_adapter(weights.folder, weights.model)
        else:
            await self._server.reload(weights.folder, weights.version)

    async def _unload_left(self) -> None:
        """Have the server forget adapters of a start that was killed."""
        for name in await self._server.models():
            if name.startswith(f"policy-{self.owner}-"):
                await self._server.unload_adapter(name)

    async def _restore(self) -> None:
        """Give the server the weights again if it has lost them."""
        weights = self.weights
        assert weights is not None, "sync comes first"
        async with self._restoring:
            if self.by_adapters:
                has_them = weights.model in await self._server.models()
            else:
                has_them = await self._server.weight_version() == weights.version
            if not has_them:
                log.warning("%s has lost the policy's weights: they are sent again", self.cfg.url)
                await self._give(weights)

    def _save(self, model: nn.Module, folder: Path) -> None:
        """The weights as a folder, there all at once."""
        bare: Any = unwrapped(model)
        options: dict[str, Any] = {}
        if self.world.is_sharded:  # every process takes part
            options["state_dict"] = self.world.whole_weights(model)
        if not self.world.is_main:
            return
        if self.by_adapters:
            options["save_embedding_layers"] = False
        partial = folder.with_name(f".{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        bare.save_pretrained(partial, **options)
        allow_readers(partial)  # vLLM may run under another user
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)

    def _forget(self, weights: Weights) -> None:
        """Of no matter to the run if the server does not answer."""
        if self.by_adapters:
            try:
                self._wait(self._server.unload_adapter(weights.model))
            except UserError as error:
                log.warning("%s keeps the adapter of an earlier update: %s", self.cfg.url, error)
        shutil.rmtree(weights.folder, ignore_errors=True)

    def _check_agreement(self, model: nn.Module) -> None:
        """Raise UserError where the server's log-probabilities are of another model's."""
        rows = min(embedding_rows(unwrapped(model)), 2**15)
        prompt = [(7919 * i) % rows for i in range(1, 17)]
        told = SamplingConfig(max_new_tokens=16, num_samples_per_prompt=4)
        ((_, samples),) = self.sample([prompt], told, seed=0)
        drawn = [sample.token_ids for sample in samples]
        with torch.no_grad():
            ours, _, mask = completion_logprobs(
                model, [prompt] * 4, drawn, 1.0, 0, never=self.never
            )
        theirs = torch.tensor([value for sample in samples for value in sample.logprobs or ()])
        gap = (ours[mask].cpu() - theirs).abs().mean().item()
        if gap > MOST_GAP:
            raise UserError(
                f"generation.vllm.url: {self.cfg.url} serves another model than the policy: their "
                f"log-probabilities differ by {gap:.2f} a token; start it with policy.path"
            )
        log.info("vLLM and trainer differ by %.4f in a token's log-probability", gap)


def clean(folder: Path) -> None:
    """Remove what a run that was killed has left of the weights it gave away: whole folders that
    are named as ours, and nothing else."""
    for left in [*folder.glob("update-*-*"), *folder.glob(".update-*-*.partial")]:
        if left.is_dir() and not left.is_symlink():
            log.info("%s is removed: an earlier start left it", left)
            shutil.rmtree(left, ignore_errors=True)
    with suppress(OSError):  # not there, or something else is in it
        folder.rmdir()
