"""Request and response bodies for completions of a vLLM server, by either of its routes.

Texts go to `/v1/completions`, which ignores images silently. Prompts with images go to
`/inference/v1/generate`, which takes ids, too, with one id for each image, and expands that id
itself. An image that has all its ids there would be expanded once more, and be another prompt: so
the ids that the server read are requested and compared.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from math import isfinite
from typing import Any

from scorekit.errors import UserError
from trainer.rl.config import SamplingConfig
from trainer.rl.forward import Image
from trainer.rl.sampler import CompletionFailed, SampledCompletion

TEXT_ROUTE, IMAGE_ROUTE = "/v1/completions", "/inference/v1/generate"
#: The server allows no lower bias; it rounds the probability to 0.
_BARRED = -100.0


@dataclass(frozen=True, slots=True)
class Request:
    """A request for one prompt.

    ids: all that the model is to read.
    n: number of completions.
    """

    route: str
    body: dict[str, Any]
    ids: list[int]
    n: int


def request(
    ids: Sequence[int],
    images: Sequence[Image],
    gen_cfg: SamplingConfig,
    *,
    model: str,
    salt: str,
    seed: int,
    stops: Sequence[int],
    banned_token_ids: Sequence[int],
    image_id: int | None,
    with_logprobs: bool,
) -> Request:
    """Return a request with every field that settings of the server or model could fill.

    salt: separates the prefix cache.
    banned_token_ids: ids that must not be sampled.
    image_id: the id that stands for a part of an image.
    """
    sampling = {
        "n": gen_cfg.num_samples_per_prompt,
        "max_tokens": gen_cfg.max_new_tokens,
        "temperature": gen_cfg.temperature,
        "top_p": gen_cfg.top_p,
        "top_k": gen_cfg.top_k,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed": seed,
        "ignore_eos": True,  # the policy's stop ids, and no others
        "stop_token_ids": list(stops),
        "logprobs": 0 if with_logprobs else None,  # of the chosen token alone
    }
    if banned_token_ids:
        sampling["logit_bias"] = {str(token_id): _BARRED for token_id in banned_token_ids}
    common_fields = {"model": model, "cache_salt": salt, "return_token_ids": True}
    if not images:
        body = {**common_fields, **sampling, "prompt": list(ids)}
        return Request(TEXT_ROUTE, body, list(ids), gen_cfg.num_samples_per_prompt)
    body = {
        **common_fields,
        "token_ids": _collapse_image_ids(ids, image_id),
        "content_parts": [{"type": "image_url", "url": _data_url(image)} for image in images],
        "sampling_params": sampling,
    }
    return Request(IMAGE_ROUTE, body, list(ids), gen_cfg.num_samples_per_prompt)


def _collapse_image_ids(ids: Sequence[int], image_id: int | None) -> list[int]:
    """Return the ids with a single id for each image."""
    runs = ((token_id, list(run)) for token_id, run in groupby(ids))
    return [i for token_id, run in runs for i in (run[:1] if token_id == image_id else run)]


def _data_url(image: Image) -> str:
    return f"data:image/png;base64,{b64encode(image.png).decode()}"


def completions(answer: Any, prompt_request: Request, url: str) -> list[SampledCompletion]:
    """Return the completions of one prompt.

    Raises CompletionFailed if the server at `url` gave others than were requested, UserError if it
    reads images as other ids.
    """
    try:
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        sampled = [_sampled(choice) for choice in choices]
        if prompt_request.route == IMAGE_ROUTE and answer["prompt_token_ids"] != prompt_request.ids:
            raise UserError(
                f"generation.vllm.url: {url} reads a prompt with images as "
                f"{len(answer['prompt_token_ids'])} ids, the trainer as {len(prompt_request.ids)}: "
                "it resizes images differently. Start it with the policy's own processor settings"
            )
    except (KeyError, TypeError, ValueError) as error:
        raise CompletionFailed(
            f"generation.vllm.url: {url} gave an answer that is no completion "
            f"({type(error).__name__}: {str(error)[:100]})"
        ) from None
    if len(choices) != prompt_request.n:
        raise CompletionFailed(
            f"generation.vllm.url: {url} gave {len(choices)} completions for n = {prompt_request.n}"
        )
    for completion in sampled:
        _check(completion, prompt_request, url)
    return sampled


def _sampled(choice: dict[str, Any]) -> SampledCompletion:
    logprobs = choice["logprobs"]
    if logprobs is not None and "content" in logprobs:
        logprobs = [token["logprob"] for token in logprobs["content"]]
    elif logprobs is not None:
        logprobs = logprobs["token_logprobs"]
    values = None if logprobs is None else [float(value) for value in logprobs]
    return SampledCompletion([int(token_id) for token_id in choice["token_ids"]], values)


def _check(completion: SampledCompletion, prompt_request: Request, url: str) -> None:
    """Raise CompletionFailed for ids or log-probabilities that cannot be trained on."""
    ids, logprobs = completion.token_ids, completion.logprobs
    sampling = prompt_request.body.get("sampling_params", prompt_request.body)
    problem = None
    if not 1 <= len(ids) <= sampling["max_tokens"]:
        problem = f"{len(ids)} ids, where 1 to {sampling['max_tokens']} were requested"
    elif logprobs is None and sampling["logprobs"] is not None:
        problem = "no log-probabilities"
    elif logprobs is not None and len(logprobs) != len(ids):
        problem = f"{len(logprobs)} log-probabilities for {len(ids)} ids"
    elif logprobs is not None and not all(isfinite(value) for value in logprobs):
        problem = "log-probabilities that are not finite"
    if problem is not None:
        raise CompletionFailed(f"generation.vllm.url: {url} gave {problem}")
