"""HTTP client of a vLLM server: the served models, sampling, loading weights, and pauses."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
from tenacity import RetryCallState, stop_after_attempt, stop_never

from scorekit.client.transport import checked_url
from scorekit.errors import UserError
from scorekit.net.answers import read_whole
from scorekit.net.retry import failure_of, retrying
from scorekit.net.tls import ssl_context
from trainer.rl.engines.vllm_bodies import IDS_ROUTE, TEXT_ROUTE, UnknownWeights

log = logging.getLogger(__name__)
T = TypeVar("T")

#: The server loads a model, restarts, or has too many requests.
_TRANSIENT_STATUS = (429, 502, 503, 504)
#: Begins the label of weights that are being loaded.
UNFINISHED = "unfinished "
#: Seconds to resume a server in, whatever has happened before.
_RESUME_S = 60.0


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


def may_sample_later(error: BaseException) -> bool:
    """Return whether the same prompt may succeed a little later.

    404: the adapter is not loaded; 500: the server is failing.
    """
    is_status = isinstance(error, VLLMError) and error.status in (404, 500)
    return is_away(error) or is_status or isinstance(error, UnknownWeights)


async def retry(
    call: Callable[[], Awaitable[T]],
    is_transient: Callable[[BaseException], bool] = is_away,
    *,
    url: str,
    attempts: int | None = None,
) -> T:
    """Return the result of `call`.

    attempts: the most of them; None: as many as it takes, and the caller sets a limit.
    """

    def log_attempt(state: RetryCallState) -> None:
        # With a limit, the caller says what comes of it.
        level = logging.WARNING if attempts is None else logging.INFO
        log.log(level, "%s failed (attempt %d): %s", url, state.attempt_number, failure_of(state))

    stop = stop_never if attempts is None else stop_after_attempt(attempts)
    async for attempt in retrying(is_transient, stop=stop, note=log_attempt):
        with attempt:
            return await call()
    raise AssertionError  # unreachable: the loop ends with a return or an error


@contextmanager
def as_user_error(url: str) -> Iterator[None]:
    """Turn an error of the server, or a missing answer, into a UserError."""
    try:
        yield
    except VLLMError as error:
        hint = "; its key is read from VLLM_API_KEY" if error.status in (401, 403) else ""
        raise UserError(f"generation.vllm.url: {url}: {error}{hint}") from None
    except httpx.HTTPError as error:
        raise UserError(
            f"generation.vllm.url: cannot connect to {url}. Start the vLLM server or "
            f"correct the URL ({error or type(error).__name__})"
        ) from None


class VLLMServer:
    """One server; use it in one event loop. Raises VLLMError and httpx's errors."""

    def __init__(self, url: str) -> None:
        self.url = checked_url(url).rstrip("/").removesuffix("/v1")
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

    async def resume_if_paused(self) -> None:
        """Resume a server that a killed run has left paused: it would answer no prompt."""
        try:
            is_paused = (await self.ask("GET", "/is_paused"))["is_paused"]
        except VLLMError as error:
            if is_away(error):
                raise
            return  # it has no such route, so nobody has paused it
        if is_paused:
            log.warning(
                "%s was paused, as a run that was killed leaves it. It is resumed.", self.url
            )
            await self.ask("POST", "/resume")

    async def labels_tokens(self, model: str) -> bool:
        """Return whether the server can pause, and says which weights sampled each token."""
        sampling = {"max_tokens": 1, "temperature": 1.0, "seed": 0, "ignore_eos": True}
        body = {"model": model, "token_ids": [1], "sampling_params": sampling}
        try:
            await self.ask("GET", "/is_paused")
        except VLLMError as error:
            if is_away(error):
                raise
            if error.status in (403, 404):  # no such route; another error does not say so
                return False
        try:
            answer = await self.ask("POST", IDS_ROUTE, body)
        except VLLMError as error:
            if is_away(error):
                raise
            return False
        return bool(answer["choices"][0].get("weight_versions"))

    async def sample_token(self, model: str, salt: str) -> None:
        """Sample one token, to see whether the server can."""
        body = {"model": model, "prompt": [1], "max_tokens": 1, "temperature": 1.0, "top_k": 1}
        body |= {"logprobs": None, "seed": 0, "ignore_eos": True, "cache_salt": salt}
        await self.ask("POST", TEXT_ROUTE, body)

    async def reload_paused(self, folder: Path, version: str) -> None:
        """Load all weights while the turns in flight stand still; they go on with the new ones.

        The pause drops all that was computed with the old weights. Until all is loaded the label is
        `unfinished`, so that no token of half-loaded weights passes for one of either version.
        """
        try:
            await self.ask("POST", "/pause?mode=keep")
            unfinished = {"new_version": f"{UNFINISHED}{version}"}
            await self.ask("POST", "/update_weight_version", unfinished)
            await self.reload(folder, version)
        finally:
            await asyncio.shield(asyncio.wait_for(self._resume(), _RESUME_S))

    async def _resume(self) -> None:
        await retry(lambda: self.ask("POST", "/resume"), url=self.url, attempts=5)

    async def load_adapter(self, folder: Path, name: str) -> None:
        """Load an adapter from `folder`; nothing happens if another process has done so."""
        body = {"lora_name": name, "lora_path": str(folder)}
        try:
            await self.ask("POST", "/v1/load_lora_adapter", body)
        except VLLMError as error:
            if error.status != 400 or name not in await self.models():
                raise

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
