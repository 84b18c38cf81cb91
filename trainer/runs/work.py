"""Estimate the arithmetic of an update on a trainer of TRL, and its time, from config and sizes.

A multiplication with an addition is two operations. Sampling by transformers is not limited by
operations: each of its steps reads all weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from trainer.runs.config import KeptConfig

#: Of one H100 SXM, by its data sheet: operations a second in bfloat16 without sparsity, and bytes
#: of memory a second. That learning reaches the share below is an assumption.
GPU_OPERATIONS_S, GPU_BYTES_S = 989e12, 3.35e12
REACHED = 0.4


@dataclass(frozen=True, slots=True)
class UpdateWork:
    """The work of one process in an update.

    operations: of the passes that learn.
    steps: of sampling, one after another.
    step_bytes: that a step of sampling reads.
    """

    operations: float
    steps: int = 0
    step_bytes: float = 0.0

    @property
    def learning_s(self) -> float:
        """Return the seconds of learning on the assumed GPU."""
        return self.operations / (GPU_OPERATIONS_S * REACHED)

    @property
    def sampling_s(self) -> float:
        """Return the least seconds of sampling on the assumed GPU."""
        return self.steps * self.step_bytes / GPU_BYTES_S

    def text(self) -> str:
        """Return the work in words."""
        text = f"each process computes {_rounded(self.operations / 1e12)} TFLOP an update"
        seconds = f"{_rounded(self.learning_s)} s"
        if self.steps:
            text += f", and samples in {self.steps} steps of {_rounded(self.step_bytes / 1e9)} GB"
            seconds += f" and at least {_rounded(self.sampling_s)} s"
        return (
            f"{text}: {seconds} on an H100 that reaches {REACHED:.0%} of its operations (assumed, "
            "not measured)"
        )


def update_work(
    cfg: KeptConfig,
    model: nn.Module,
    lengths: Sequence[int],
    sequences: int,
    *,
    steps: int = 0,
    has_reference: bool = False,
) -> UpdateWork:
    """Return the work of one process in an update.

    model: with its adapters, on the meta device.
    lengths: of sequences in tokens, for their mean.
    sequences: that the process learns from in an update.
    steps: of sampling in an update; 0: another program samples.
    has_reference: whether a reference reads the sequences, too.
    """
    per_sequence = sum(row_operations(cfg, model, n, has_reference) for n in lengths)
    in_bfloat16 = "bfloat16" in (cfg.misc.dtype, cfg.policy.weights_dtype)
    per_weight = 0.5 if cfg.policy.load_in_4bit else 2.0 if in_bfloat16 else 4.0
    weights = sum(parameter.numel() for parameter in model.parameters())
    return UpdateWork(sequences * per_sequence / len(lengths), steps, per_weight * weights)


def row_operations(
    cfg: KeptConfig, model: nn.Module, tokens: int, has_reference: bool = False
) -> float:
    """Return the operations of a sequence's pass forward and back, without padding.

    A matrix of n weights takes 2n for a token. Back, it takes as many for the gradient of its
    input, and again for its own, if it is trained. Attention takes 4 times length squared times the
    size of all heads in a layer, and twice that back; that it is causal saves nothing here. With
    gradient checkpointing the layers compute forward once more. Compared with torch's FLOP counter
    for Llama and Qwen 3, which counts 0.92 to 1.02 times that.
    """
    sizes: Any = model.config.get_text_config()
    head_size = getattr(sizes, "head_dim", None) or sizes.hidden_size // sizes.num_attention_heads
    attention = 4.0 * sizes.num_hidden_layers * tokens**2 * sizes.num_attention_heads * head_size
    layers = 2.0 * tokens * _layer_weights(model)
    head = 2.0 * tokens * sizes.vocab_size * sizes.hidden_size
    forward = layers + head + attention
    is_whole = cfg.policy.lora.r == 0
    back = (2 if is_whole else 1) * (layers + head) + 2 * attention
    recomputed = layers + attention if cfg.policy.gradient_checkpointing else 0.0
    return forward + back + recomputed + (forward if has_reference else 0.0)


def _layer_weights(model: nn.Module) -> float:
    """Return how many weights of the layers' matrices a token meets, without adapters.

    Of experts it meets `num_experts_per_tok`. transformers keeps those of a layer in one parameter.
    """
    dense = sum(
        part.weight.numel()
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear) and "lora_" not in name and not name.endswith("lm_head")
    )
    fused = [p for name, p in model.named_parameters() if ".experts." in name and p.ndim == 3]
    if not fused:
        return dense
    sizes: Any = model.config.get_text_config()
    return dense + sum(p.numel() / len(p) for p in fused) * sizes.num_experts_per_tok


def _rounded(value: float) -> str:
    """Return a number with three digits, and without an exponent if it is large."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
