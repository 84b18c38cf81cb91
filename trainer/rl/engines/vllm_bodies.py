"""What a vLLM server is asked for completions, and what it answers, by either of its routes.

Texts go to `/v1/completions`, whose images are silently left out; what shows images to
`/inference/v1/generate`, which takes ids, too, and one id for each image, which it expands itself.
An image that stands there with as many ids as it has would be expanded once more, and be another
prompt: so the ids that it read are asked for and looked at.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from scorekit.errors import UserError
from trainer.rl.config import SamplingConfig
from trainer.rl.forward import Image
from trainer.rl.sampler import Sampled

TEXT_ROUTE, IMAGE_ROUTE = "/v1/completions", "/inference/v1/generate"
#: As good as never: the server takes no less, and rounds the probability to 0.
_BARRED = -100.0


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt's. ids: all that the model is to read. n: how many completions."""

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
    never: Sequence[int],
    image_id: int | None,
    with_logprobs: bool,
) -> Request:
    """Every field that a server's or model's own settings could fill is given.

    salt: keeps what is remembered of prompts apart. never: ids that are not to be drawn. image_id:
    the one that stands for a part of an image.
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
    if never:
        sampling["logit_bias"] = {str(token_id): _BARRED for token_id in never}
    asked = {"model": model, "cache_salt": salt, "return_token_ids": True}
    if not images:
        body = {**asked, **sampling, "prompt": list(ids)}
        return Request(TEXT_ROUTE, body, list(ids), gen_cfg.num_samples_per_prompt)
    body = {
        **asked,
        "token_ids": _one_each(ids, image_id),
        "content_parts": [{"type": "image_url", "url": _data_url(image)} for image in images],
        "sampling_params": sampling,
    }
    return Request(IMAGE_ROUTE, body, list(ids), gen_cfg.num_samples_per_prompt)


def _one_each(ids: Sequence[int], image_id: int | None) -> list[int]:
    """The ids with one for each image."""
    runs = ((token_id, list(run)) for token_id, run in groupby(ids))
    return [i for token_id, run in runs for i in (run[:1] if token_id == image_id else run)]


def _data_url(image: Image) -> str:
    return f"data:image/png;base64,{b64encode(image.png).decode()}"


def completions(answer: dict[str, Any], asked: Request, url: str) -> list[Sampled]:
    """One prompt's. Raises UserError where the server at `url` gave others than were asked for."""
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    if len(choices) != asked.n:
        raise UserError(
            f"generation.vllm.url: {url} gave {len(choices)} completions for n = {asked.n}"
        )
    if asked.route == IMAGE_ROUTE and answer["prompt_token_ids"] != asked.ids:
        raise UserError(
            f"generation.vllm.url: {url} reads a prompt with images as "
            f"{len(answer['prompt_token_ids'])} ids, where the trainer has {len(asked.ids)}: it "
            "resizes images otherwise; start it with the policy's own processor settings"
        )
    return [_sampled(choice) for choice in choices]


def _sampled(choice: dict[str, Any]) -> Sampled:
    told = choice["logprobs"]
    if told is not None and "content" in told:
        told = [token["logprob"] for token in told["content"]]
    elif told is not None:
        told = told["token_logprobs"]
    return Sampled(list(choice["token_ids"]), told)
