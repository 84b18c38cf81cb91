"""Sampling by a vLLM server (0.32 or later) over HTTP, which gets the weights after each update.

    VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=True VLLM_API_KEY=... \\
        vllm serve MODEL --logprobs-mode processed_logprobs --enable-lora --max-lora-rank 16

MODEL is the folder or hub id that the trainer has in `policy.path`.
`--logprobs-mode processed_logprobs`: log-probabilities of the distribution that is sampled from,
with temperature, top_p and top_k applied.
`--enable-lora`, `--max-lora-rank` and VLLM_ALLOW_RUNTIME_LORA_UPDATING: if `policy.lora.r` > 0.
VLLM_SERVER_DEV_MODE: if all weights are trained. Its routes need no key, so keep the port private.
`--enable-scale-out`: if prompts have images. The prompt ids are sent as they are to be read.
On a CPU vLLM packs the head when it starts: a head that is tied to the embeddings is not reloaded.

Weights go through `vllm.sync_dir`, a folder that both sides see under one path. A run has its own
folder there, named by its run_dir. The next start removes the files of a run that was killed, and
its adapters on the server. Each update's adapter has its own name: with `load_inplace` vLLM would
read it from disk at every step. Full weights are reloaded in place. A salt separates the entries of
vLLM's prefix cache by update. A server that restarts loses all this; the sampler sends the weights
again.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
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
from trainer.rl.distributed import DistributedContext
from trainer.rl.engines.vllm_bodies import Request, completions, request
from trainer.rl.engines.vllm_http import (
    VLLMError,
    VLLMServer,
    as_user_error,
    check_server,
    is_away,
    retry_until_done,
)
from trainer.rl.forward import Image, completion_logprobs
from trainer.rl.policy.tokens import embedding_rows
from trainer.rl.policy.wrappers import unwrap_distributed
from trainer.rl.sampler import CompletionFailed, SampledCompletion, SeededPrompt

log = logging.getLogger(__name__)
T = TypeVar("T")

#: Largest mean |log pi trainer - log pi server| of a token for the same model. Kernels and bfloat16
#: give hundredths.
MOST_GAP = 0.3
#: A server that answered within so many seconds has not restarted since: a start takes longer.
_RECENT_S = 1.0


def probe_server(cfg: VLLMConfig, *, adapters: bool, images: bool = False) -> str:
    """Return the model's name on the server; loads nothing.

    adapters: whether the server has to accept adapters.
    images: whether prompts have images.
    Raises UserError if the server is unavailable, or cannot sample for this run.
    """

    async def probe() -> str:
        server = VLLMServer(cfg)
        try:
            return await check_server(server, cfg.model, adapters=adapters, images=images)
        finally:
            await server.close()

    with as_user_error(cfg):
        return asyncio.run(probe())


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights that the server has.

    model: the name to sample from.
    version: unique for these weights, over all runs.
    """

    model: str
    folder: Path
    version: str


class VLLMSampler:
    """Samples from a vLLM server. Requests run in an event loop in its own thread."""

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
        """Prepare to sample from the server of the config.

        model_name: the result of `probe_server`.
        stops: ids that end a completion.
        adapters: whether adapters are trained, and not the whole model.
        role: a run_dir may have one sampler of each role at a time.
        banned_token_ids: ids that must not be sampled.
        image_id: the id that stands for a part of an image, if the model reads images.
        """
        self.cfg, self.model_name, self.stops, self.world = cfg, model_name, stops, world
        self.by_adapters, self.banned_token_ids, self.image_id = (
            adapters,
            banned_token_ids,
            image_id,
        )
        folder = self.cfg.sync_dir or Path(run_dir) / "sync"
        # Named by this run_dir: another run may have the same server and sync_dir.
        owner_key = f"{role} {Path(run_dir).resolve()}"
        self.owner = blake2b(owner_key.encode(), digest_size=6).hexdigest()
        self.folder = Path(folder).expanduser().resolve() / f"scorekit-{self.owner}"
        self.run_id = f"{self.owner}-{uuid4().hex[:12]}"
        if world.is_main:
            clean(self.folder)
        self.weights: Weights | None = None
        # The sampler's loop owns the next four. `weights` belongs to the caller, which changes it
        # between two calls of `sample` only; `_restore` reads it in the loop.
        self._server = VLLMServer(self.cfg)
        self._slots = asyncio.Semaphore(self.cfg.concurrency)
        self._answered_at = float("-inf")
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
    ) -> Iterator[tuple[int, list[SampledCompletion]]]:
        """Yield completions as `Sampler.sample` says.

        Raises UserError if the server refuses, gives no answer in `timeout_s`, or reads images as
        other ids than the prompt's.
        """
        base = int(torch.randint(2**62, ())) if seed is None else seed
        self._wait(retry_until_done(self._restore))
        futures = {}
        for i, prompt in enumerate(prompts):
            prompt_request = self._request(
                prompt,
                images[i] if images else (),
                gen_cfg,
                stream_seed("prompt", base, i),
                with_logprobs,
            )
            futures[self._thread.submit(self._complete(prompt_request))] = i
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
        settings = gen_cfg.model_copy(
            update={
                "temperature": prompt.temperature,
                "max_new_tokens": prompt.max_new_tokens,
                "num_samples_per_prompt": 1,
            }
        )
        prompt_request = self._request(
            prompt.ids, prompt.images, settings, prompt.seed, with_logprobs
        )
        (completion,) = await asyncio.wrap_future(
            self._thread.submit(self._complete(prompt_request, restore=True))
        )
        return completion

    def sync_weights(self, model: nn.Module, update: int) -> None:
        """Write the weights, and make the server load them.

        The first call raises UserError if the server has another model than the trainer.
        """
        old, version = self.weights, f"{self.run_id}-{update:06d}"
        name = f"policy-{version}" if self.by_adapters else self.model_name
        new = Weights(name, self.folder / f"update-{update:06d}-{self.run_id}", version)
        self._save(model, new.folder)
        if self.world.is_main:
            if old is None and self.by_adapters:
                self._wait(self._unload_stale_adapters())
            self._wait(retry_until_done(lambda: self._give(new)))
        self.weights = self.world.gather([new])[0]  # after the main process has sent them
        if old is None:
            self._check_agreement(model)
        elif self.world.is_main:
            self._remove_weights(old)

    def close(self) -> None:
        """Unload the last adapter, if the server still answers, and remove all folders."""
        if self.weights is not None and self.world.is_main:
            self._remove_weights(self.weights)
            clean(self.folder)
        self._thread.stop(self._server.close)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the sampler's loop and return its result."""
        return self._thread.run(self._in_time(work))

    async def _in_time(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result in at most `timeout_s`; errors that a user can fix are UserErrors."""
        try:
            with as_user_error(self.cfg):
                return await asyncio.wait_for(work, self.cfg.timeout_s)
        except TimeoutError:
            raise CompletionFailed(
                f"generation.vllm.url: {self.cfg.url} gave no answer in timeout_s = "
                f"{self.cfg.timeout_s:g} seconds, all attempts together"
            ) from None

    # -- completions -------------------------------------------------------------------------------

    def _request(
        self,
        ids: Sequence[int],
        images: Sequence[Image],
        gen_cfg: SamplingConfig,
        seed: int,
        with_logprobs: bool,
    ) -> Request:
        assert self.weights is not None, "call sync_weights first"
        return request(
            ids,
            images,
            gen_cfg,
            model=self.weights.model,
            salt=self.weights.version,
            seed=seed,
            stops=self.stops,
            banned_token_ids=self.banned_token_ids,
            image_id=self.image_id,
            with_logprobs=with_logprobs,
        )

    async def _complete(
        self, prompt_request: Request, *, restore: bool = False
    ) -> list[SampledCompletion]:
        """Return the completions of one prompt.

        restore: make sure first that the server has the weights, unless it answered just now.
        """
        async with self._slots:
            if restore and time.monotonic() - self._answered_at > _RECENT_S:
                await self._in_time(retry_until_done(lambda: self._restore(_RECENT_S)))
            answer = await self._in_time(self._ask_until_answered(prompt_request))
        return completions(answer, prompt_request, str(self.cfg.url))

    async def _ask_until_answered(self, prompt_request: Request) -> Any:
        """Return the answer, with as many attempts as it takes.

        Each new attempt first makes sure that the server has the weights.
        """
        failed = False

        async def attempt() -> Any:
            nonlocal failed
            if failed:
                await self._restore()
            failed = True
            answer = await self._server.ask("POST", prompt_request.route, prompt_request.body)
            self._answered_at = time.monotonic()
            return answer

        def should_retry(error: BaseException) -> bool:
            # 404: the adapter is not loaded; 500: the server is failing
            return is_away(error) or (isinstance(error, VLLMError) and error.status in (404, 500))

        return await retry_until_done(attempt, should_retry)

    # -- weights -----------------------------------------------------------------------------------

    async def _give(self, weights: Weights) -> None:
        if self.by_adapters:
            await self._server.load_adapter(weights.folder, weights.model)
        else:
            await self._server.reload(weights.folder, weights.version)

    async def _unload_stale_adapters(self) -> None:
        """Unload adapters that an earlier start, which was killed, has loaded."""
        for name in await self._server.models():
            if name.startswith(f"policy-{self.owner}-"):
                await self._server.unload_adapter(name)

    async def _restore(self, recent_s: float = 0.0) -> None:
        """Send the weights to the server again if it has lost them.

        recent_s: do not ask a server that answered within so many seconds.
        """
        weights = self.weights
        assert weights is not None, "call sync first"
        async with self._restoring:
            if time.monotonic() - self._answered_at < recent_s:  # another prompt has just asked it
                return
            if self.by_adapters:
                has_them = weights.model in await self._server.models()
            else:
                has_them = await self._server.weight_version() == weights.version
            if not has_them:
                log.warning("%s has lost the policy's weights. They are sent again.", self.cfg.url)
                await self._give(weights)
            self._answered_at = time.monotonic()

    def _save(self, model: nn.Module, folder: Path) -> None:
        """Write the weights as a folder that appears complete, by a rename."""
        bare: Any = unwrap_distributed(model)
        options: dict[str, Any] = {}
        if self.world.is_sharded:  # every process takes part
            options["state_dict"] = self.world.full_weights(model)
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

    def _remove_weights(self, weights: Weights) -> None:
        """Remove old weights; the run goes on if the server does not answer."""
        if self.by_adapters:
            try:
                self._wait(self._server.unload_adapter(weights.model))
            except UserError as error:
                log.warning("%s keeps the adapter of an earlier update: %s", self.cfg.url, error)
        shutil.rmtree(weights.folder, ignore_errors=True)

    def _check_agreement(self, model: nn.Module) -> None:
        """Raise UserError if the server's log-probabilities are those of another model."""
        rows = min(embedding_rows(unwrap_distributed(model)), 2**15)
        prompt = [(7919 * i) % rows for i in range(1, 17)]
        gen_cfg = SamplingConfig(max_new_tokens=16, num_samples_per_prompt=4)
        ((_, samples),) = self.sample([prompt], gen_cfg, seed=0)
        completion_ids = [sample.token_ids for sample in samples]
        with torch.no_grad():
            trainer_logprobs, _, mask = completion_logprobs(
                model, [prompt] * 4, completion_ids, 1.0, 0, banned_token_ids=self.banned_token_ids
            )
        server_logprobs = torch.tensor(
            [value for sample in samples for value in sample.logprobs or ()]
        )
        gap = (trainer_logprobs[mask].cpu() - server_logprobs).abs().mean().item()
        if gap > MOST_GAP:
            raise UserError(
                f"generation.vllm.url: {self.cfg.url} serves another model than the policy: their "
                f"log-probabilities differ by {gap:.2f} a token. Start it with policy.path"
            )
        log.info("vLLM and trainer differ by %.4f in a token's log-probability", gap)


def clean(folder: Path) -> None:
    """Remove weight folders of a run that was killed; other folders are left alone."""
    for stale_dir in [*folder.glob("update-*-*"), *folder.glob(".update-*-*.partial")]:
        if stale_dir.is_dir() and not stale_dir.is_symlink():
            log.info("removing %s, which an earlier start left", stale_dir)
            shutil.rmtree(stale_dir, ignore_errors=True)
    with suppress(OSError):  # the folder does not exist, or has other files
        folder.rmdir()
