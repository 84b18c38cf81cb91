"""Estimate the memory of a run, of our loop or on a trainer of TRL, from config and sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from scorekit.errors import UserError
from trainer.rl.engines.turn_cache import MAX_BYTES
from trainer.rl.forward import CHUNK_ENTRIES
from trainer.runs.config import KeptConfig, RunConfig

GIB = 2**30
#: Bytes of a weight in 4 bits, with its share of the scales (arXiv 2305.14314, section 3).
_BYTES_4BIT = 0.5 + 0.127 / 8
#: Copies of a chunk's logits that exist at once: logits, log-softmax, and their gradients.
_HEAD_COPIES = 4


def estimate_memory(
    cfg: RunConfig, model: nn.Module, longest_prompt: int
) -> list[tuple[str, float]]:
    """Return (label, bytes) of one process that holds all weights, at its peak.

    The peak is in the update or in sampling, whichever needs more.
    model: with its adapters, on the meta device.
    AdamW keeps two float32 numbers for a trained weight. Activations are of one micro-batch.
    """
    has_reference = (cfg.rl.kl_coef or cfg.stop.kl_ceiling is not None) and not (
        cfg.policy.lora.r and cfg.policy.reference_path is None
    )
    sizes = model.config.get_text_config()
    update = activation_bytes(cfg, sizes, longest_prompt)
    length = longest_prompt + cfg.generation.max_new_tokens
    sampling = cache_bytes(cfg, sizes, cfg.generation.batch_size * length)
    rollout = getattr(cfg, "rollout", None)
    if rollout is not None:  # episodes that wait for their next turn
        waiting = cfg.rl.batch_size * rollout.n_agent * length
        sampling += min(MAX_BYTES, cache_bytes(cfg, sizes, waiting))
    if cfg.generation.engine == "vllm":
        sampling = 0.0
    return [*weight_rows(cfg, model, has_reference=bool(has_reference)), peak_row(update, sampling)]


def estimate_trl_memory(
    cfg: Any,
    model: nn.Module,
    tokens: int,
    *,
    sampled_tokens: int = 0,
    has_reference: bool = False,
    shards: int = 1,
) -> list[tuple[str, float]]:
    """Return (label, bytes) of one process at its peak.

    model: with its adapters, on the meta device.
    tokens: of a forward pass with gradients.
    sampled_tokens: of prompts and completions that are sampled at once.
    shards: processes that share weights, optimizer and gradients (FSDP); each also gathers one
    layer at a time, which is not counted.
    """
    rows = weight_rows(cfg, model, has_reference=has_reference)
    sizes: Any = model.config.get_text_config()
    update, sampling = pass_bytes(cfg, sizes, tokens), cache_bytes(cfg, sizes, sampled_tokens)
    return [*((name, size / shards) for name, size in rows), peak_row(update, sampling)]


def weight_rows(
    cfg: KeptConfig, model: nn.Module, *, has_reference: bool
) -> list[tuple[str, float]]:
    """Return (label, bytes) of what is kept for each weight, in a process that holds all."""
    num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    rows = [("policy, weights", _weight_bytes(cfg, model))]
    if has_reference:
        rows.append(("reference, weights", _weight_bytes(cfg, model)))
    rows.append(("optimizer", 8.0 * num_trained))
    rows.append(("gradients", 4.0 * num_trained))
    if cfg.misc.dtype == "bfloat16" and cfg.policy.weights_dtype == "float32":
        rows.append(("weights as bfloat16 (autocast)", 2.0 * _count(model)))
    return rows


def peak_row(update: float, sampling: float) -> tuple[str, float]:
    """Return the row of the larger one: the bytes of a pass of the update, or those of sampling."""
    name = "activations of a micro-batch" if update >= sampling else "key-value cache of sampling"
    return name, max(update, sampling)


def activation_bytes(cfg: RunConfig, sizes: Any, longest_prompt: int) -> float:
    """Return the bytes that the forward pass of a micro-batch stores for the gradient."""
    longest = longest_prompt + cfg.generation.max_new_tokens
    return pass_bytes(cfg, sizes, max(cfg.rl.micro_batch_tokens, longest))


def pass_bytes(cfg: KeptConfig, sizes: Any, tokens: int) -> float:
    """Return the bytes that a forward pass over so many tokens stores for the gradient.

    For a token in a layer of current decoders (normalized, rotary, gated): about 10 vectors of the
    hidden size, 4 of the keys' and values', 4 of the intermediate size. Counted in such a layer of
    transformers (Llama, Qwen 3, Gemma 3) with torch's saved-tensor hooks, which give 0.84 to 1.23
    times that. Attention is assumed to be fused.
    """
    hidden = sizes.hidden_size
    inner = getattr(sizes, "intermediate_size", None) or 4 * hidden
    layer = 10 * hidden + 4 * _key_value_size(sizes) + 4 * inner
    stored = sizes.num_hidden_layers * layer
    if cfg.policy.gradient_checkpointing:
        stored = sizes.num_hidden_layers * hidden + layer
    head = min(float(tokens * sizes.vocab_size), CHUNK_ENTRIES) * 4 * _HEAD_COPIES
    return float(tokens * stored * _arithmetic_bytes(cfg)) + head


def cache_bytes(cfg: KeptConfig, sizes: Any, tokens: int) -> float:
    """Return the bytes of the keys and values of so many tokens."""
    return float(
        tokens * sizes.num_hidden_layers * 2 * _key_value_size(sizes) * _arithmetic_bytes(cfg)
    )


def _key_value_size(sizes: Any) -> int:
    heads = sizes.num_attention_heads
    head = getattr(sizes, "head_dim", None) or sizes.hidden_size // heads
    return int(head * (getattr(sizes, "num_key_value_heads", None) or heads))


def _arithmetic_bytes(cfg: KeptConfig) -> int:
    return 2 if "bfloat16" in (cfg.misc.dtype, cfg.policy.weights_dtype) else 4


def _weight_bytes(cfg: KeptConfig, model: nn.Module) -> float:
    """Return the bytes of the weights: float32 if trained, 4 bits in a 4-bit model's layers."""
    linear = {
        id(part.weight)
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear) and not name.endswith("lm_head")
    }
    frozen = 2 if cfg.policy.weights_dtype == "bfloat16" else 4
    total = 0.0
    for parameter in model.parameters():
        in_4bit = cfg.policy.load_in_4bit and id(parameter) in linear
        size = 4 if parameter.requires_grad else _BYTES_4BIT if in_4bit else frozen
        total += size * parameter.numel()
    return total


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def free_memory(device: torch.device) -> float:
    """Return the bytes that are free on the device now."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    import psutil  # a dependency of accelerate

    return float(psutil.virtual_memory().available)


def peak_gpu_memory(device: torch.device) -> dict[str, float]:
    """Return `gpu_peak_gib`, the most that tensors have taken on the GPU since the last call.

    {} on another device. What PyTorch keeps in reserve, and what CUDA itself needs (about 0.5 GiB),
    is not counted.
    """
    if device.type != "cuda":
        return {}
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return {"gpu_peak_gib": round(peak / GIB, 3)}


def memory_text(
    rows: list[tuple[str, float]],
    sharded: list[tuple[str, float]],
    device: torch.device,
    processes: int,
) -> str:
    """Return the memory of each process in words, with whole and with sharded weights.

    Raises UserError if there is too little for sharded weights, or for one process.
    """
    total, total_sharded = (sum(size for _, size in part) for part in (rows, sharded))
    free = free_memory(device)
    text = f"about {total / GIB:.2f} GiB of {free / GIB:.2f} GiB that are free on {device.type}"
    if processes > 1:
        text = f"each of {processes} processes: {text}; with sharded weights "
        text += f"{total_sharded / GIB:.2f} GiB"
    if total_sharded > free:
        raise UserError(
            f"{text}. Lower per_device_train_batch_size, set policy.gradient_checkpointing, or "
            "train adapters (policy.lora.r)"
        )
    return text
