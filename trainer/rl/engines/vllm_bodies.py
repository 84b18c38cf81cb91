"""Request and response bodies for completions of a vLLM server, by either of its routes.

Texts go to `/v1/completions`, which ignores images silently. Prompts with images go to
`/inference/v1/generate`, and so do all prompts of a run that trains all weights, if the server says
there which weights sampled each token. That route takes one id for each image, and expands that id
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
from trainer.rl.engines.vllm_weights import Weights
from trainer.rl.forward import Image
from trainer.rl.sampler import CompletionFailed, SampledCompletion

TEXT_ROUTE, IDS_ROUTE = "/v1/completions", "/inference/v1/generate"
#: The server allows no lower bias; it rounds the probability to 0.
_BARRED = -100.0


@dataclass(frozen=True, slots=True)
class VLLMTurn:
    """A prompt to complete.

    affinity: as of `SeededPrompt`. order: turns with a lower number are sent first.
    """

    ids: Sequence[int]
    images: Sequence[Image]
    gen_cfg: SamplingConfig
    seed: int
    with_logprobs: bool
    order: int
    affinity: str = ""


@dataclass(frozen=True, slots=True)
class Request:
    """A request for one prompt.

    ids: all that the model is to read.
    n: number of completions.
    version: of the weights, as the server labels them (`version_label`).
    has_labels: whether the server says which weights sampled each token, since they may change
    before the end; else all tokens have this version.
    """

    route: str
    body: dict[str, Any]
    ids: list[int]
    n: int
    version: str
    has_labels: bool


class UnknownWeights(Exception):
    """A completion was sampled with weights that are not this run's: the server has lost them."""


def version_label(run_id: str, update: int) -> str:
    """Return the name of weights, unique over all runs."""
    return f"{run_id}-{update:06d}"


def update_of(label: str, version: str) -> int:
    """Return the update of a label, if it is of the same run as `version`.

    Raises UnknownWeights if it is not.
    """
    run_id, _, update = label.rpartition("-")
    if run_id != version.rpartition("-")[0] or not update.isdigit():
        raise UnknownWeights(f"tokens were sampled with weights {label!r}, not with this run's")
    return int(update)


def request(
    turn: VLLMTurn,
    weights: Weights,
    has_labels: bool,
    *,
    stops: Sequence[int],
    banned_token_ids: Sequence[int],
    image_id: int | None,
) -> Request:
    """Return a request with every field that settings of the server or model could fill.

    weights: their version separates the prefix cache, too.
    has_labels: whether the server says which weights sampled each token.
    banned_token_ids: ids that must not be sampled.
    image_id: the id that stands for a part of an image.
    """
    gen_cfg, ids = turn.gen_cfg, list(turn.ids)
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
        "seed": turn.seed,
        "ignore_eos": True,  # the policy's stop ids, and no others
        "stop_token_ids": list(stops),
        "logprobs": 0 if turn.with_logprobs else None,  # of the chosen token alone
    }
    if banned_token_ids:
        sampling["logit_bias"] = {str(token_id): _BARRED for token_id in banned_token_ids}
    version = weights.version
    common_fields = {"model": weights.model, "cache_salt": version, "return_token_ids": True}
    route, body = IDS_ROUTE, {**common_fields, "token_ids": ids, "sampling_params": sampling}
    if turn.images:
        parts = [{"type": "image_url", "url": _data_url(image)} for image in turn.images]
        body |= {"token_ids": _collapse_image_ids(ids, image_id), "content_parts": parts}
    elif not has_labels:
        route, body = TEXT_ROUTE, {**common_fields, **sampling, "prompt": ids}
    return Request(route, body, ids, gen_cfg.num_samples_per_prompt, version, has_labels)


def _collapse_image_ids(ids: Sequence[int], image_id: int | None) -> list[int]:
    """Return the ids with a single id for each image."""
    runs = ((token_id, list(run)) for token_id, run in groupby(ids))
    return [i for token_id, run in runs for i in (run[:1] if token_id == image_id else run)]


def _data_url(image: Image) -> str:
    return f"data:image/png;base64,{b64encode(image.png).decode()}"


def completions(answer: Any, prompt_request: Request, url: str) -> list[SampledCompletion]:
    """Return the completions of one prompt.

    Raises CompletionFailed if the server at `url` gave others than were requested, UserError if it
    reads images as other ids, UnknownWeights if it used weights that are not this run's.
    """
    try:
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        sampled = [_sampled(choice, prompt_request) for choice in choices]
        if "content_parts" in prompt_request.body and (
            answer["prompt_token_ids"] != prompt_request.ids
        ):
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


def _sampled(choice: dict[str, Any], prompt_request: Request) -> SampledCompletion:
    ids = [int(token_id) for token_id in choice["token_ids"]]
    version = prompt_request.version
    versions = [update_of(version, version)] * len(ids)
    if prompt_request.has_labels:
        spans = [
            (span["version"], span["end"] - span["start"]) for span in choice["weight_versions"]
        ]
        versions = [
            update for label, count in spans for update in [update_of(label, version)] * count
        ]
    logprobs = choice["logprobs"]
    if logprobs is not None and "content" in logprobs:
        logprobs = [token["logprob"] for token in logprobs["content"]]
    elif logprobs is not None:
        logprobs = logprobs["token_logprobs"]
    values = None if logprobs is None else [float(value) for value in logprobs]
    return SampledCompletion(ids, values, versions)


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
    elif completion.versions is None or len(completion.versions) != len(ids):
        problem = f"{len(completion.versions or ())} weight versions for {len(ids)} ids"
    if problem is not None:
        raise CompletionFailed(f"generation.vllm.url: {url} gave {problem}")
