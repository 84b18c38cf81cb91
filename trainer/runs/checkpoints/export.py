"""Export a checkpoint of a run as a plain Hugging Face folder, adapters merged.

The folder gets its name only after it was loaded again and compared with the checkpoint: both
compute logits on a few probe texts, in float32 on the CPU. Weights that no text passes (of images,
of rare tokens) are compared by digests.
"""

from __future__ import annotations

import logging
import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from scorekit.errors import ScorekitError, UserError
from scorekit.files import replacing_folder
from trainer.rl.config import PolicyConfig
from trainer.rl.model_files import save_model
from trainer.rl.policy import (
    embedding_rows,
    load_policy,
    shared_layers,
    stop_token_ids,
    without_tie_warnings,
)
from trainer.runs.checkpoints.adapters import load_on_base, resolve_base_model
from trainer.runs.checkpoints.checkpoint import (
    CheckpointState,
    best_checkpoint,
    cannot_load,
    damage_reason,
    newest_checkpoint,
    read_state,
    save_processors,
)

log = logging.getLogger(__name__)

#: Scripts, digits and code: what they have in common is that tokenizers treat them differently.
_TEXTS = (
    "The quick brown fox jumps over the lazy dog, and 1,234.5 others follow it.",
    "저장하지 않은 변경 사항이 있습니다. 설정을 保存しますか？ ¿Qué más? Да.",
    "def add(a, b):\n    return a + b  # 😀",
)
_MAX_TOKENS = 64
#: How much more than a random walk of rounding errors a difference may be.
_MARGIN = 64.0
#: Logits above this are masks, not predictions.
_MASK = 1e30


def export_policy(
    run_dir: Path, to: Path, *, best: bool = False, dtype: Literal["float32", "bfloat16"]
) -> Path:
    """Write model, tokenizer and generation ids into a new folder, and return the checkpoint.

    That is the newest complete one, or the best by evaluation. Adapters are merged in float32
    before the weights become `dtype`. Raises UserError if there is no such checkpoint, if its base
    has changed, or if `to` exists; ScorekitError if the export would be another model.
    """
    if to.exists() or to.is_symlink():
        raise UserError(f"--to: {to} exists and is not replaced. Name another folder")
    checkpoint = _choose(run_dir / "checkpoints", best)
    model, tokenizer = _load(checkpoint, read_state(checkpoint))
    model = _merge(model, probe_ids(model, tokenizer))
    with replacing_folder(to) as folder:
        write_policy(model, tokenizer, folder, getattr(torch, dtype))
    return checkpoint


def write_policy(model: Any, tokenizer: Any, folder: Path, dtype: torch.dtype) -> None:
    """Write a float32 model on the CPU, load it again and compare.

    The weights of `model` are released meanwhile, for memory: it cannot be used afterwards. Raises
    ScorekitError if the folder has another model.
    """
    probes = probe_ids(model, tokenizer)
    _say_if_untied(model)
    _cast(model, dtype)
    save_model(model, folder)
    save_processors(model, tokenizer, folder)
    _cast(model, torch.float32)
    expected, digests = probe_logits(model, probes), weight_digests(model)
    model.to("meta")
    written = load_policy(PolicyConfig(path=str(folder)), torch.device("cpu"))
    check_tokenizers((model, tokenizer), written, "writing")
    check_weights(digests, weight_digests(written[0]), "writing")
    check_logits(expected, probe_logits(written[0], probes), model, "writing")


def _merge(model: Any, probes: list[list[int]]) -> nn.Module:
    """Return the plain model. Raises ScorekitError if its logits are others."""
    if not hasattr(model, "merge_and_unload"):
        plain: nn.Module = model
        return plain
    expected = probe_logits(model, probes)
    noise = rounding_noise(model, probes, expected)
    for name in shared_layers(model):
        _untie(model, name)
    with without_tie_warnings():
        merged: nn.Module = model.merge_and_unload()
    check_logits(expected, probe_logits(merged, probes), merged, "merging the adapters", noise)
    return merged


def _untie(model: Any, name: str) -> None:
    """Give a layer with adapters its own copy of a weight that it shares."""
    layer = model.get_base_model().get_submodule(name).base_layer
    layer.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=False)


def _say_if_untied(model: Any) -> None:
    """Set `tie_word_embeddings` to false if the model's embeddings are not tied.

    Adapters may have untied them. transformers 5 also loads two different weights beside a config
    that ties them, which others would load as one.
    """
    head = model.get_output_embeddings()
    if head is None or head.weight is model.get_input_embeddings().weight:
        return
    for config in (model.config, model.config.get_text_config()):
        if getattr(config, "tie_word_embeddings", False):
            config.tie_word_embeddings = False
    model.all_tied_weights_keys = model.get_expanded_tied_weights_keys(all_submodels=True)


def _cast(model: Any, dtype: torch.dtype) -> None:
    """Convert the parameters, except those that transformers keeps in float32."""
    float32_modules = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    for name, weight in model.named_parameters():
        stays = any(f".{module}." in f".{name}." for module in float32_modules)
        if weight.is_floating_point() and not stays:
            weight.data = weight.data.to(dtype)


def _choose(folder: Path, best: bool) -> Path:
    checkpoint = best_checkpoint(folder) if best else newest_checkpoint(folder)
    if checkpoint is None:
        description = "checkpoint with an evaluation (data.eval)" if best else "complete checkpoint"
        raise UserError(
            f"{folder}: no {description}. Train a policy first, or name the folder of its run"
        )
    reason = damage_reason(checkpoint)
    if reason is not None:
        raise UserError(f"{checkpoint}: {reason}. Export another (--last)")
    return checkpoint


def _load(checkpoint: Path, state: CheckpointState) -> tuple[Any, Any]:
    """Return the policy in float32 on the CPU, and its saved tokenizer.

    Frozen weights that were rounded to bfloat16 for training are rounded here, too.
    """
    config = PolicyConfig(path=str(checkpoint), tokenizer=str(checkpoint))
    base, adapters = resolve_base_model(config)
    trained = state.config.get("policy", {})
    if adapters is not None:
        base = base.model_copy(update={"weights_dtype": trained.get("weights_dtype", "float32")})
        if trained.get("load_in_4bit"):
            log.warning(
                "%s was trained on weights of 4 bits. Its adapters are merged into the weights "
                "before that rounding, so the export differs a little from what was evaluated",
                checkpoint,
            )
    try:
        model, tokenizer = load_on_base(base, adapters, torch.device("cpu"))
    except UserError as error:
        raise UserError(f"{checkpoint}: {cannot_load(state, error)}") from None
    _cast(model, torch.float32)
    return model, tokenizer


def probe_ids(model: nn.Module, tokenizer: Any) -> list[list[int]]:
    """Return the ids of the probe texts, and one row of ids from all parts of the vocabulary.

    Ids without an embedding, and those that stand for images, are left out.
    """
    rows = embedding_rows(model)
    excluded = _media_ids(model)
    spread = [round(i * (rows - 1) / (_MAX_TOKENS - 1)) for i in range(_MAX_TOKENS)]
    probes = [*(tokenizer(text)["input_ids"] for text in _TEXTS), spread]
    valid = ([i for i in ids if i < rows and i not in excluded] for ids in probes)
    return [ids[:_MAX_TOKENS] for ids in valid if ids]


def probe_logits(model: Any, probes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return the logits [T, V] of each probe."""
    logits = []
    with torch.inference_mode():
        for ids in probes:
            row = torch.tensor([ids])
            output = model(input_ids=row, attention_mask=torch.ones_like(row), use_cache=False)
            logits.append(output.logits[0].float())
    return logits


def rounding_noise(
    model: Any, probes: Sequence[Sequence[int]], expected: Sequence[Tensor]
) -> list[float]:
    """Return how far the logits of each probe move if its embeddings were rounded otherwise.

    Recurrent layers and routers may amplify roundings more than `logit_tolerance` knows.
    """
    generator = torch.Generator().manual_seed(0)

    def nudge(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        is_up = torch.rand(output.shape, generator=generator) < 0.5
        return torch.where(is_up, output * (1 + 2**-23), output)

    hook = model.get_input_embeddings().register_forward_hook(nudge)
    try:
        nudged = probe_logits(model, probes)
    finally:
        hook.remove()
    return [
        _largest_difference(expected_TV, nudged_TV)
        for expected_TV, nudged_TV in zip(expected, nudged, strict=True)
    ]


def check_logits(
    expected: Sequence[Tensor],
    actual: Sequence[Tensor],
    model: Any,
    step: str,
    noise: Sequence[float] | None = None,
) -> None:
    """Raise ScorekitError if logits differ by more than rounding in float32.

    expected, actual: [T, V] of each probe.
    step: of the export, for the message.
    noise: of `rounding_noise`; None: both compute the same sums.
    """
    for expected_TV, actual_TV, probe_noise in zip(
        expected, actual, noise or [0.0] * len(expected), strict=True
    ):
        if expected_TV.shape != actual_TV.shape:
            raise _difference_error(
                step, f"{tuple(actual_TV.shape)} logits, not {tuple(expected_TV.shape)}"
            )
        if expected_TV.isnan().any():
            raise ScorekitError(
                "the checkpoint computes logits that are not numbers, so it cannot be exported. "
                "Export an earlier one (--best), or train again with a lower learning rate"
            )
        largest = _largest_difference(expected_TV, actual_TV)
        tolerance = max(logit_tolerance(expected_TV, model), _MARGIN * probe_noise)
        if not largest <= tolerance:
            raise _difference_error(
                step, f"logits differ by {largest:.3g} (rounding: {tolerance:.1g})"
            )


def _largest_difference(expected_TV: Tensor, actual_TV: Tensor) -> float:
    difference_TV = (actual_TV - expected_TV).abs().masked_fill(actual_TV == expected_TV, 0.0)
    return difference_TV.max().item()


def logit_tolerance(logits_TV: Tensor, model: Any) -> float:
    """Return how far float32 logits of the same model may lie apart.

    A product over a width of n sums n rounding errors of 2**-24, which grow with sqrt(n) as in a
    random walk; each layer adds such an error to the residual stream.
    """
    sizes = model.config.get_text_config()
    scale = logits_TV[logits_TV.abs() < _MASK].abs().max().item()
    width, layers = float(sizes.hidden_size), int(sizes.num_hidden_layers)
    return _MARGIN * 2**-24 * math.sqrt(width) * (layers + 1) * scale


def weight_digests(model: nn.Module) -> dict[str, tuple[str, int]]:
    """Return the shape and a checksum of every weight and saved buffer, by name."""
    digests = {}
    for name, tensor in model.state_dict().items():
        content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        digests[name] = (str(tuple(tensor.shape)), zlib.crc32(memoryview(content.numpy())))
    return digests


def check_weights(
    expected: Mapping[str, tuple[str, int]], actual: Mapping[str, tuple[str, int]], step: str
) -> None:
    """Raise ScorekitError if the results of `weight_digests` differ."""
    for name in [*expected, *actual]:
        if expected.get(name) != actual.get(name):
            raise _difference_error(step, f"the weight {name} is another")


def check_tokenizers(expected: tuple[Any, Any], actual: tuple[Any, Any], step: str) -> None:
    """Raise ScorekitError if ids, chat template or ends of turns differ.

    expected, actual: model and tokenizer.
    """
    for name, value in _tokenizer_traits(*expected).items():
        if _tokenizer_traits(*actual)[name] != value:
            raise _difference_error(step, f"the tokenizer's {name} is another")


def _tokenizer_traits(model: Any, tokenizer: Any) -> dict[str, Any]:
    return {
        "ids": [tokenizer(text)["input_ids"] for text in _TEXTS],
        "vocabulary": tokenizer.get_vocab(),
        "special tokens": (tokenizer.special_tokens_map, sorted(tokenizer.all_special_ids)),
        "chat template": tokenizer.chat_template,
        "ends of turns": stop_token_ids(model, tokenizer),
    }


def _media_ids(model: Any) -> set[int]:
    """Return the ids of the config that stand for images, videos and sounds."""
    ids = model.config.to_dict()
    names = ("image", "video", "vision", "audio")
    return {
        value
        for key, value in ids.items()
        if isinstance(value, int)
        and key.endswith(("_token_id", "_token_index"))
        and key.startswith(names)
    }


def _difference_error(step: str, reason: str) -> ScorekitError:
    """Return the error of a step of the export after which the model is another one."""
    return ScorekitError(
        f"export: {step} makes another model: {reason}. Nothing was written. The checkpoint itself "
        "is whole (policy.path of an evaluation). Report the type of the model as a bug"
    )
