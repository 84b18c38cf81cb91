"""Request bodies for completions of a vLLM server, by either of its routes.

Texts go to `/v1/completions`, which ignores images silently. Prompts with images go to
`/inference/v1/generate`, and so do all prompts of a run that trains all weights, if the server says
there which weights sampled each token. That route takes one id for each image, and expands that id
itself. An image that has all its ids there would be expanded once more, and be another prompt: so
the ids that the server read are requested and compared.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from trainer.rl.config import SamplingConfig
from trainer.rl.engines.vllm_weights import Weights
from trainer.rl.forward import Image

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
    model_names: what the server may call the model in its answer.
    vocabulary_size: number of ids that the policy has.
    stops, banned: ids that end a completion; that must not be sampled.
    """

    route: str
    body: dict[str, Any]
    ids: list[int]
    n: int
    version: str
    has_labels: bool
    model_names: frozenset[str]
    vocabulary_size: int
    max_tokens: int
    with_logprobs: bool
    stops: frozenset[int]
    banned: frozenset[int]


def version_label(run_id: str, update: int) -> str:
    """Return the name of weights, unique over all runs."""
    return f"{run_id}-{update:06d}"


def request(
    turn: VLLMTurn,
    weights: Weights,
    has_labels: bool,
    model_names: Iterable[str],
    *,
    vocabulary_size: int,
    stops: Sequence[int],
    banned_token_ids: Sequence[int],
    image_id: int | None,
) -> Request:
    """Return a request with every field that settings of the server or model could fill.

    weights: their version separates the prefix cache, too.
    has_labels: whether the server says which weights sampled each token.
    model_names: what the server may call the model, beside the name that is requested.
    vocabulary_size: number of ids that the policy has.
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
    return Request(
        route,
        body,
        ids,
        gen_cfg.num_samples_per_prompt,
        version,
        has_labels,
        model_names=frozenset({weights.model, *model_names}),
        vocabulary_size=vocabulary_size,
        max_tokens=gen_cfg.max_new_tokens,
        with_logprobs=turn.with_logprobs,
        stops=frozenset(stops),
        banned=frozenset(banned_token_ids),
    )


def _collapse_image_ids(ids: Sequence[int], image_id: int | None) -> list[int]:
    """Return the ids with a single id for each image."""
    runs = ((token_id, list(run)) for token_id, run in groupby(ids))
    return [i for token_id, run in runs for i in (run[:1] if token_id == image_id else run)]


def _data_url(image: Image) -> str:
    return f"data:image/png;base64,{b64encode(image.png).decode()}"
