"""Requests for completions of a vLLM server, by either of its routes, and its answers.

Texts go to `/v1/completions`, which ignores images silently. Prompts with images go to
`/inference/v1/generate`, and so do all prompts of a run that trains all weights, if the server says
there which weights sampled each token. That route takes one id for each image, and expands that id
itself. An image that has all its ids there would be expanded once more, and be another prompt: so
the ids that the server read are requested and compared.

An answer that is not a completion of the policy is refused. A server may break a completion off (a
pause aborts by default), stand behind a proxy, or have other weights. What it then returns looks
like a short completion, and would be learned as one. So each answer is compared with its request:
how it ends, ids, log-probabilities, prompt and weights.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import isfinite
from typing import Any, Literal, get_args

from scorekit.errors import UserError
from trainer.rl.config import SamplingConfig
from trainer.rl.engines.vllm_weights import Weights
from trainer.rl.forward import Image
from trainer.rl.sampler import SampledCompletion

TEXT_ROUTE, IDS_ROUTE = "/v1/completions", "/inference/v1/generate"
#: The server allows no lower bias; it rounds the probability to 0.
_BARRED = -100.0
FaultCause = Literal["unfinished", "choices", "ids", "logprobs", "prompt", "weights", "format"]
FAULT_CAUSES: tuple[FaultCause, ...] = get_args(FaultCause)
#: What to do about a server that gives such answers.
HINTS: dict[FaultCause, str] = {
    "unfinished": "Let nothing else pause vLLM or abort its requests, and start it with a "
    "--max-model-len of the policy's context",
    "choices": "Connect to vLLM itself, not to a proxy that changes answers",
    "ids": "Start vLLM with policy.path, and connect to it without a proxy",
    "logprobs": "Start vLLM with --logprobs-mode processed_logprobs, on a device that computes "
    "finite numbers",
    "prompt": "Connect to vLLM itself, not to a proxy that changes requests",
    "weights": "Use the server for no other model, and for no other run that loads weights",
    "format": "Use vLLM 0.32 or later, and connect to it without a proxy",
}
#: Largest log-probability that rounding explains; the true one is at most 0. A server may compute
#: it as logit - logsumexp in float32. Both have half a unit in the last place, which is 2^-10 for
#: logits below 2^14, after the division by the temperature.
MAX_LOGPROB = 2**-10
#: Smallest log-probability of a token that can be sampled in float32: probabilities below 2^-150 =
#: exp(-103.97) are 0 there. vLLM writes -9999 for minus infinity, which JSON does not have.
MIN_LOGPROB = -104.0
#: Errors of reading an answer that has another structure.
_STRUCTURE_ERRORS = (
    KeyError,
    IndexError,
    TypeError,
    ValueError,
    AttributeError,
    OverflowError,
)


@dataclass(frozen=True, slots=True)
class VLLMTurn:
    """A prompt to complete.

    affinity: as of `SeededPrompt`.
    order: turns with a lower number are sent first.
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
    stops: ids that end a completion.
    banned: ids that must not be sampled.
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


class InvalidCompletion(Exception):
    """An answer is not a completion of the policy: a fault of its server.

    cause: the kind of fault, under which it is counted.
    """

    def __init__(self, cause: FaultCause, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class UnknownWeights(InvalidCompletion):
    """A completion was sampled with weights that are not this run's: the server has lost them."""

    def __init__(self, message: str) -> None:
        super().__init__("weights", message)


def update_of(label: str, version: str) -> int:
    """Return the update of a label, if it is of the same run as `version`.

    Raises UnknownWeights if it is not.
    """
    run_id, _, update = label.rpartition("-")
    if run_id != version.rpartition("-")[0] or not (update.isascii() and update.isdigit()):
        raise UnknownWeights(f"tokens were sampled with weights {label!r}, not with this run's")
    return int(update)


def completions(
    answer: Any, request: Request, url: str, newest_update: int
) -> list[SampledCompletion]:
    """Return the completions of one prompt.

    newest_update: that of the newest weights that any server may have.
    Raises InvalidCompletion if the answer of `url` is not what the policy samples for this request,
    UserError if the server reads images as another number of ids.
    """
    try:
        _check_model(answer, request)
        choices = _in_order(answer["choices"], request.n)
        _check_prompt(answer, choices, request, url)
        sampled = [_sampled(choice, request, newest_update) for choice in choices]
        _check_usage(answer, sampled, request)
    except _STRUCTURE_ERRORS as error:
        raise InvalidCompletion(
            "format", f"no completion ({type(error).__name__}: {str(error)[:100]})"
        ) from None
    return sampled


def is_finished(choice: Any) -> bool:
    """Return whether a choice ended by itself or at its limit, and was not broken off."""
    return isinstance(choice, dict) and choice.get("finish_reason") in ("stop", "length")


def _check_model(answer: Any, request: Request) -> None:
    model = answer.get("model")
    if model is not None and model not in request.model_names:
        raise InvalidCompletion("weights", f"a completion of the model {str(model)[:80]!r}")


def _in_order(choices: Any, n: int) -> list[dict[str, Any]]:
    """Return n choices in the order of their index."""
    if not isinstance(choices, list):
        raise TypeError(f"choices of type {type(choices).__name__}")
    choice_by_index: dict[int, dict[str, Any]] = {}
    for choice in choices:
        index = choice["index"]
        if type(index) is not int or not 0 <= index < n:
            raise InvalidCompletion("choices", f"a choice with the index {index!r} for n = {n}")
        if index in choice_by_index:
            raise InvalidCompletion("choices", f"two choices with the index {index}")
        choice_by_index[index] = choice
    if len(choice_by_index) != n:
        raise InvalidCompletion("choices", f"{len(choices)} completions for n = {n}")
    return [choice_by_index[index] for index in range(n)]


def _check_prompt(
    answer: dict[str, Any], choices: Sequence[dict[str, Any]], request: Request, url: str
) -> None:
    """Compare the prompt that was read with that of the request, where the server says it."""
    has_images = "content_parts" in request.body
    echoes = [answer["prompt_token_ids"] if has_images else answer.get("prompt_token_ids")]
    echoes += [choice.get("prompt_token_ids") for choice in choices]
    for ids in echoes:
        if ids is None or ids == request.ids:
            continue
        if has_images and len(ids) != len(request.ids):
            raise UserError(
                f"generation.vllm.url: {url} reads a prompt with images as {len(ids)} ids, the "
                f"trainer as {len(request.ids)}: it resizes images differently. Start it with the "
                "policy's own processor settings"
            )
        raise InvalidCompletion(
            "prompt",
            f"a completion of another prompt ({len(ids)} ids, {len(request.ids)} requested)",
        )


def _check_usage(
    answer: dict[str, Any], sampled: Sequence[SampledCompletion], request: Request
) -> None:
    """Compare the server's own counts, if it has some, with the ids."""
    usage = answer.get("usage") or {}
    num_sampled = sum(len(completion.token_ids) for completion in sampled)
    if usage.get("completion_tokens", num_sampled) != num_sampled:
        raise InvalidCompletion(
            "ids", f"{num_sampled} ids, but says {usage['completion_tokens']!r} in `usage`"
        )
    if usage.get("prompt_tokens", len(request.ids)) != len(request.ids):
        raise InvalidCompletion(
            "prompt",
            f"a completion of a prompt of {usage['prompt_tokens']!r} ids, "
            f"{len(request.ids)} requested",
        )


def _sampled(choice: dict[str, Any], request: Request, newest_update: int) -> SampledCompletion:
    ids = choice["token_ids"]
    if not isinstance(ids, list):
        raise TypeError(f"token_ids of type {type(ids).__name__}")
    _check_end(ids, choice.get("finish_reason"), request)
    _check_ids(ids, request)
    logprobs = _read_logprobs(choice.get("logprobs"), ids, request)
    versions = [update_of(request.version, request.version)] * len(ids)
    if request.has_labels:
        spans = choice["weight_versions"]
        versions = _read_versions(spans, len(ids), request.version, newest_update)
    return SampledCompletion(ids, logprobs, versions)


def _check_end(ids: Sequence[Any], finish_reason: Any, request: Request) -> None:
    """Check that a completion ended with a stop id or at its limit."""
    problem = None
    if finish_reason not in ("stop", "length"):
        problem = f"finish_reason {str(finish_reason)[:40]!r} after"
        if finish_reason is None:
            problem = "no finish_reason after"
    elif ids and ids[-1] in request.stops:
        return
    elif finish_reason == "stop":
        problem = "finish_reason 'stop' without a stop id after"
    elif len(ids) < request.max_tokens:
        problem = "finish_reason 'length' after"
    if problem is not None:
        raise InvalidCompletion("unfinished", f"{problem} {len(ids)} of {request.max_tokens} ids")


def _check_ids(ids: Sequence[Any], request: Request) -> None:
    """Check that the policy can have sampled these ids."""
    problem = None
    if not 1 <= len(ids) <= request.max_tokens:
        problem = f"{len(ids)} ids, where 1 to {request.max_tokens} were requested"
    for position, token_id in enumerate(ids):
        if type(token_id) is not int:  # a bool is an int, too
            problem = f"an id that is {str(token_id)[:40]!r}"
        elif not 0 <= token_id < request.vocabulary_size:
            problem = f"id {token_id}, but the policy has {request.vocabulary_size} ids"
        elif token_id in request.banned:
            problem = f"id {token_id}, which must not be sampled (logit_bias)"
        elif token_id in request.stops and position < len(ids) - 1:
            problem = f"{len(ids) - 1 - position} ids after the stop id {token_id}"
        if problem is not None:
            raise InvalidCompletion("ids", problem)


def _read_logprobs(field: Any, ids: Sequence[int], request: Request) -> list[float] | None:
    """Return the log-probabilities of the ids; None if none were requested."""
    if not request.with_logprobs:
        return None
    if field is None:
        raise InvalidCompletion("logprobs", "no log-probabilities")
    if "content" in field:
        values = [token["logprob"] for token in field["content"]]
        labels = [token.get("token_id", i) for token, i in zip(field["content"], ids, strict=False)]
        if labels != list(ids[: len(labels)]):
            raise InvalidCompletion("logprobs", "log-probabilities of other ids")
    else:
        values = field["token_logprobs"]
    if len(values) != len(ids):
        raise InvalidCompletion("logprobs", f"{len(values)} log-probabilities for {len(ids)} ids")
    for value in values:
        is_number = type(value) in (int, float) and isfinite(value)
        if not is_number or not MIN_LOGPROB <= value <= MAX_LOGPROB:
            raise InvalidCompletion("logprobs", f"a log-probability of {str(value)[:40]}")
    return [float(value) for value in values]


def _read_versions(
    spans: Sequence[dict[str, Any]], num_ids: int, version: str, newest_update: int
) -> list[int]:
    """Return the update of each id. Spans cover all ids in their order, from the oldest weights.

    version: label of the weights that the server had when the request was sent; none are older.
    newest_update: that of the newest weights that the server can have by now.
    Raises InvalidCompletion for spans that do not cover the ids, or of impossible weights.
    """
    versions: list[int] = []
    min_update = update_of(version, version)
    for span in spans:
        update = update_of(span["version"], version)
        if not min_update <= update <= newest_update:
            raise InvalidCompletion(
                "weights",
                f"tokens of the weights of update {update}, where {min_update} to {newest_update} "
                "are possible",
            )
        start, end = span["start"], span["end"]
        if start != len(versions) or not start < end <= num_ids:
            raise InvalidCompletion("weights", f"weight versions of ids {start} to {end}")
        versions += [update] * (end - start)
        min_update = update
    if len(versions) != num_ids:
        raise InvalidCompletion("weights", f"{len(versions)} weight versions for {num_ids} ids")
    return versions
