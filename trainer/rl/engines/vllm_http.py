"""HTTP client of a vLLM server: the served models, sampling, and loading weights."""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
from tenacity import RetryCallState

from scorekit.client.transport import checked_url
from scorekit.errors import UserError
from scorekit.net.answers import read_whole
from scorekit.net.retry import failure_of, retrying
from scorekit.net.tls import ssl_context
from trainer.rl.config import VLLMConfig
from trainer.rl.engines.vllm_bodies import IMAGE_ROUTE, TEXT_ROUTE

log = logging.getLogger(__name__)
T = TypeVar("T")

#: The server loads a model, restarts, or has too many requests.
_TRANSIENT_STATUS = (429, 502, 503, 504)


class VLLMError(Exception):
    """The server answered with an error.

    status: the HTTP status.
    """

    def __init__(self, path: str, status: int, message: str) -> None:
        super().__init__(f"{path}: HTTP {status}: {message}")
        self.status = status


def is_away(error: BaseException) -> bool:
    """Return whether the same request may succeed a little later."""
    return isinstance(error, httpx.TransportError) or (
        isinstance(error, VLLMError) and error.status in _TRANSIENT_STATUS
    )


async def retry_until_done(
    call: Callable[[], Awaitable[T]], is_transient: Callable[[BaseException], bool] = is_away
) -> T:
    """Return the result of `call`, with as many attempts as it takes; the caller sets a limit."""

    def log_attempt(state: RetryCallState) -> None:
        log.warning("vLLM failed (attempt %d): %s", state.attempt_number, failure_of(state))

    async for attempt in retrying(is_transient, note=log_attempt):
        with attempt:
            return await call()
    raise AssertionError  # unreachable: the loop ends with a return or an error


@contextmanager
def as_user_error(cfg: VLLMConfig) -> Iterator[None]:
    """Turn an error of the server, or a missing answer, into a UserError."""
    try:
        yield
    except VLLMError as error:
        hint = "; its key is read from VLLM_API_KEY" if error.status in (401, 403) else ""
        raise UserError(f"generation.vllm.url: {cfg.url}: {error}{hint}") from None
    except httpx.HTTPError as error:
        raise UserError(
            f"generation.vllm.url: cannot connect to {cfg.url}. Start the vLLM server or "
            f"correct the URL ({error or type(error).__name__})"
        ) from None


class VLLMServer:
    """One server; use it in one event loop. Raises `Refused` and httpx's errors."""

    def __init__(self, cfg: VLLMConfig) -> None:
        assert cfg.url is not None  # the config has checked it
        self.url = checked_url(cfg.url).rstrip("/").removesuffix("/v1")
        key = os.environ.get("VLLM_API_KEY")
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            verify=ssl_context(),
            timeout=httpx.Timeout(None, connect=5.0),  # the caller sets a limit
            limits=httpx.Limits(max_connections=None),
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the answer's JSON, or its text."""
        async with self._http.stream(method, path, json=body) as answer:
            response = await read_whole(answer, self.url)
        if response.status_code >= 400:
            raise VLLMError(path, response.status_code, _message(response))
        if not response.headers.get("content-type", "").startswith("application/json"):
            return response.text
        try:
            return response.json()
        except ValueError:  # of a proxy, as if it had answered 502
            raise VLLMError(path, 502, "an answer that is not JSON") from None

    async def models(self) -> dict[str, bool]:
        """Return the names of the served models, and whether each is an adapter."""
        served = await self.ask("GET", "/v1/models")
        return {model["id"]: bool(model.get("parent")) for model in served["data"]}

    async def weight_version(self) -> str:
        """Return the version of the last `reload`; after a start it is the server's own."""
        return str((await self.ask("GET", "/weight_info"))["weight_version"])

    async def reload(self, folder: Path, version: str) -> None:
        """Load all weights from `folder`.

        The workers then drop their image cache, but the scheduler does not, and vLLM 0.32 would
        fail at the next image that both had cached: so all caches are reset.
        """
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await self.ask("POST", "/collective_rpc", body)
        for cache in ("mm", "encoder"):
            await self.ask("POST", f"/reset_{cache}_cache")
        await self.ask("POST", "/update_weight_version", {"new_version": version})

    async def load_adapter(self, folder: Path, name: str) -> None:
        """Load an adapter from `folder`."""
        body = {"lora_name": name, "lora_path": str(folder)}
        await self.ask("POST", "/v1/load_lora_adapter", body)

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter; nothing happens if it is not loaded."""
        try:
            await self.ask("POST", "/v1/unload_lora_adapter", {"lora_name": name})
        except VLLMError as error:
            if error.status != 404:
                raise


def _message(response: httpx.Response) -> str:
    """Return the server's error message in one line."""
    try:
        body = response.json()
        text = body.get("error", body.get("detail", body))
        text = text.get("message", text) if isinstance(text, dict) else text
    except ValueError:
        text = response.text
    return " ".join(str(text).split())[:300]


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
        await server.ask("POST", IMAGE_ROUTE, {})
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
    choice = (await server.ask("POST", TEXT_ROUTE, body))["choices"][0]
    if not choice.get("token_ids"):
        raise UserError(
            f"generation.vllm.url: {server.url} returns no token ids. Use vLLM 0.32 or later"
        )
    if any(abs(value) > 1e-3 for value in choice["logprobs"]["token_logprobs"]):
        raise UserError(
            f"generation.vllm.url: {server.url} returns log-probabilities of another distribution "
            "than it samples from. Start it with --logprobs-mode processed_logprobs"
        )
