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

from scorekit.errors import UserError
from scorekit.net.addresses import address_of, client_url, proxy_note
from scorekit.net.http_clients import async_client, read_whole
from scorekit.net.masking import server_words
from scorekit.net.retry import failure_of, retrying
from trainer.rl.engines.vllm_protocol import HINTS, IDS_ROUTE, InvalidCompletion, is_finished

log = logging.getLogger(__name__)
T = TypeVar("T")

#: The server loads a model, restarts, or has too many requests.
_TRANSIENT_STATUS = (429, 502, 503, 504)
#: Begins the label of weights that are being loaded.
UNFINISHED = "unfinished "
#: Idle connections that are kept, as httpx does by default.
_KEPT_CONNECTIONS = 20
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
    return is_away(error) or is_status or isinstance(error, InvalidCompletion)


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
        error = failure_of(state)
        # With a limit, the caller says what comes of it, and always of invalid completions.
        is_for_caller = attempts is not None or isinstance(error, InvalidCompletion)
        level = logging.INFO if is_for_caller else logging.WARNING
        log.log(level, "%s failed (attempt %d): %s", url, state.attempt_number, error)

    stop = stop_never if attempts is None else stop_after_attempt(attempts)
    async for attempt in retrying(is_transient, stop=stop, note=log_attempt):
        with attempt:
            return await call()
    raise AssertionError  # unreachable: the loop ends with a return or an error


@contextmanager
def as_user_error(url: str) -> Iterator[None]:
    """Turn an error of the server, or a missing answer, into a UserError."""
    url = address_of(url)
    try:
        yield
    except VLLMError as error:
        hint = "; its key is read from VLLM_API_KEY" if error.status in (401, 403) else ""
        raise UserError(f"generation.vllm.url: {url}: {error}{hint}{proxy_note(url)}") from None
    except InvalidCompletion as error:
        raise UserError(f"generation.vllm.url: {url} gave {error}. {HINTS[error.cause]}") from None
    except httpx.HTTPError as error:
        raise UserError(
            f"generation.vllm.url: cannot connect to {url}. Start the vLLM server or "
            f"correct the URL ({server_words(error) or type(error).__name__}){proxy_note(url)}"
        ) from None


class VLLMServer:
    """One server; use it in one event loop. Raises VLLMError and httpx's errors."""

    def __init__(self, url: str) -> None:
        server = client_url(url, "VLLM_API_KEY")
        self.url = server.address.removesuffix("/v1")
        self._http = async_client(
            [self.url],
            base_url=self.url,
            headers=server.authorization_header(os.environ.get("VLLM_API_KEY")),
            timeout=httpx.Timeout(None, connect=5.0),  # the caller sets a limit
            max_keepalive=_KEPT_CONNECTIONS,
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
        try:
            return {str(model["id"]): bool(model.get("parent")) for model in served["data"]}
        except (KeyError, TypeError, AttributeError):
            raise VLLMError("/v1/models", 200, f"no list of models: {str(served)[:80]}") from None

    async def weight_version(self) -> str:
        """Return the version of the last `reload`; after a start it is the server's own."""
        info = await self.ask("GET", "/weight_info")
        try:
            return str(info["weight_version"])
        except (KeyError, TypeError):
            raise VLLMError("/weight_info", 200, f"no version: {str(info)[:80]}") from None

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
        choice = first_choice(answer, self.url)
        if not is_finished(choice):  # an aborted one names no weights, though others may
            raise VLLMError(IDS_ROUTE, 503, "the server has broken a completion off")
        return bool(choice.get("weight_versions"))

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


def first_choice(answer: Any, url: str) -> dict[str, Any]:
    """Return the first choice of an answer. Raises UserError if it has none."""
    choices = answer.get("choices") if isinstance(answer, dict) else None
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise UserError(f"generation.vllm.url: {url} gave no completion. {HINTS['format']}")
    return choices[0]


def _message(response: httpx.Response) -> str:
    """Return the server's error message in one line."""
    try:
        body = response.json()
        text = body.get("error", body.get("detail", body))
        text = text.get("message", text) if isinstance(text, dict) else text
    except ValueError:
        text = response.text
    authorization = response.request.headers.get("authorization", "")
    return server_words(text, authorization=authorization, max_chars=300)
