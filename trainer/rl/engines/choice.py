"""Open the sampler that a config names.

If it is vLLM, its servers are asked first whether they can sample for this run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from scorekit.errors import UserError
from scorekit.net.addresses import address_of
from trainer.rl.config import SamplingConfig, VLLMConfig
from trainer.rl.distributed import DistributedContext
from trainer.rl.engines.generate import GenerateSampler
from trainer.rl.engines.vllm import VLLMSampler
from trainer.rl.engines.vllm_http import (
    VLLMError,
    VLLMServer,
    as_user_error,
    first_choice,
    retry,
)
from trainer.rl.engines.vllm_protocol import HINTS, IDS_ROUTE, TEXT_ROUTE, is_finished
from trainer.rl.engines.vllm_sync import ATTEMPTS
from trainer.rl.policy import stop_token_ids, unwrap_distributed, unwrap_peft
from trainer.rl.sampler import Sampler

#: Number of servers whose errors a message has.
_MAX_ERRORS = 3


def probe_engine(cfg: SamplingConfig, *, adapters: bool, images: bool = False) -> str | None:
    """Return the model's name on the vLLM server, or None if this process samples.

    Asked before weights are loaded.
    images: whether prompts have images.
    Raises UserError if the server is unavailable, or does not support what this run needs.
    """
    if cfg.engine == "generate":
        return None
    return probe_server(cfg.vllm, adapters=adapters, images=images)


def open_sampler(
    cfg: SamplingConfig,
    served: str | None,
    model: nn.Module,
    tokenizer: Any,
    world: DistributedContext,
    *,
    adapters: bool,
    run_dir: str | Path,
    role: str = "train",
    banned_token_ids: Sequence[int] = (),
) -> Sampler:
    """Return the sampler of a config. The caller closes it.

    served: the result of `probe_engine`.
    adapters: whether adapters are trained, and not the whole model.
    role: a run_dir may have one sampler of each role at a time.
    banned_token_ids: ids that must not be sampled.
    """
    if served is None:
        return GenerateSampler(model, tokenizer, world, banned_token_ids=banned_token_ids)
    stops = stop_token_ids(unwrap_distributed(model), tokenizer)
    return VLLMSampler(
        cfg.vllm,
        served,
        stops,
        world,
        adapters=adapters,
        run_dir=run_dir,
        role=role,
        banned_token_ids=banned_token_ids,
        image_id=getattr(unwrap_peft(model).config, "image_token_id", None),
    )


def probe_server(cfg: VLLMConfig, *, adapters: bool, images: bool = False) -> str:
    """Return the model's name, which is the same on all servers; loads nothing.

    adapters: whether the servers have to accept adapters.
    images: whether prompts have images.
    Raises UserError if a server is unavailable, or cannot sample for this run.
    """

    async def probe(url: str) -> str:
        server = VLLMServer(url)
        try:
            with as_user_error(server.url):  # an answer that is cut says nothing about the server
                async with asyncio.timeout(cfg.timeout_s):
                    return await retry(
                        lambda: check_server(server, cfg.model, adapters=adapters, images=images),
                        url=server.url,
                        attempts=ATTEMPTS,
                    )
        except TimeoutError:
            raise UserError(
                f"generation.vllm.url: {address_of(server.url)} gave no answer in timeout_s = "
                f"{cfg.timeout_s:g} seconds, while it was checked. Restart the server or correct "
                "the URL"
            ) from None
        finally:
            await server.close()

    async def probe_all() -> list[str | BaseException]:
        return await asyncio.gather(*map(probe, cfg.urls), return_exceptions=True)

    names = []
    errors = []
    for name in asyncio.run(probe_all()):
        if isinstance(name, str):
            names.append(name)
        elif isinstance(name, UserError):
            errors.append(str(name))
        else:
            raise name
    if errors:
        more = f"; and {len(errors) - _MAX_ERRORS} more" if len(errors) > _MAX_ERRORS else ""
        raise UserError("; ".join(errors[:_MAX_ERRORS]) + more)
    for url, name in zip(cfg.urls, names, strict=True):
        if name != names[0]:
            raise UserError(
                f"generation.vllm.model: {cfg.urls[0]} serves {names[0]!r} and {url} {name!r}. "
                "Start all servers with the same --served-model-name"
            )
    return names[0]


async def check_server(
    server: VLLMServer, model: str | None, *, adapters: bool, images: bool
) -> str:
    """Return the name of the model to sample from.

    model: `vllm.model`.
    adapters: whether the policy is trained through adapters.
    images: whether prompts have images.
    Raises UserError if the server cannot sample for a training run: see the flags in
    trainer/rl/engines/vllm.py.
    """
    served = await server.models()
    await server.resume_if_paused()
    bases = [name for name, is_adapter in served.items() if not is_adapter]
    if model is None and len(bases) != 1:
        raise UserError(f"generation.vllm.model: {server.url} serves {bases}. Name one of them")
    name = model or bases[0]
    if name not in bases:
        raise UserError(f"generation.vllm.model: {server.url} serves {bases}, not {name!r}")
    await _check_routes(server, adapters)
    await _check_logprobs(server, name)
    if images:
        await _check_images(server)
    return name


async def _check_routes(server: VLLMServer, adapters: bool) -> None:
    try:
        if adapters:
            await server.ask("POST", "/v1/load_lora_adapter", {})
        else:
            await server.weight_version()
    except VLLMError as error:
        if error.status < 400:  # an answer that no vLLM gives
            raise
        if error.status != 404:  # the route exists: it refuses the empty request
            return
        needed = (
            "--enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
            if adapters
            else "VLLM_SERVER_DEV_MODE=1"
        )
        raise UserError(
            f"generation.vllm.url: {server.url} cannot load new weights. Start it with {needed}"
        ) from None


async def _check_images(server: VLLMServer) -> None:
    try:
        await server.ask("POST", IDS_ROUTE, {})
    except VLLMError as error:
        if error.status in (403, 404):  # the key is valid: an earlier request succeeded
            raise UserError(
                f"generation.vllm.url: {server.url} accepts no ids with images. Start it with "
                "--enable-scale-out"
            ) from None


async def _check_logprobs(server: VLLMServer, model: str) -> None:
    """Raise UserError if log-probabilities are not of the distribution that is sampled from.

    With top_k 1 every sampled token has probability 1, for any model.
    """
    body = {
        "model": model,
        "prompt": [1, 2],
        "max_tokens": 8,
        "temperature": 1.0,
        "top_k": 1,
        "logprobs": 0,
        "return_token_ids": True,
        "seed": 0,
        "ignore_eos": True,
    }
    choice = first_choice(await server.ask("POST", TEXT_ROUTE, body), server.url)
    if not is_finished(choice):
        raise UserError(
            f"generation.vllm.url: {server.url} gave a completion with finish_reason "
            f"{str(choice.get('finish_reason'))[:40]!r}. {HINTS['unfinished']}"
        )
    if not choice.get("token_ids"):
        raise UserError(
            f"generation.vllm.url: {server.url} returns no token ids. Use vLLM 0.32 or later"
        )
    logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or [None]
    # `not <=` finds NaN, too
    if any(value is None or not abs(value) <= 1e-3 for value in logprobs):
        raise UserError(
            f"generation.vllm.url: {server.url} returns log-probabilities of another distribution "
            "than it samples from. Start it with --logprobs-mode processed_logprobs"
        )
