"""Build a small language model that can copy before it is trained.

A query consists of words of its question, and a transformer of this size learns to copy late and
badly. So some of the first weights are set to a known solution, an induction head (arXiv
2209.11895). A head of the first layer reads the previous token and stores which it is. A head of
the second layer looks for the position whose previous token equals the present token, and predicts
the token at that position. All other weights are random, and every weight is trained.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

WIDTH, HEAD, LAYERS, HEADS = 128, 64, 3, 3
#: Positions of the width that say which token stands before; embeddings begin without them.
BEFORE = 40
_THETA = 1e6
_SIZE = 0.1  # deviation of the embeddings
_SHARP = 20.0  # how much likelier the right place is, in nats; 1 / sqrt(BEFORE) of it is noise
_AMPLITUDE, _GAIN = 9.0, 3.0


def new_model(vocab_size: int, window: int) -> Qwen2ForCausalLM:
    """Return a model of 0.85 M parameters. Its random weights come from torch's random state.

    It has Qwen2's architecture, which has the biases that the first weights need.
    vocab_size: of the tokenizer.
    window: the number of ids that the model reads.
    """
    head: Any = {"head_dim": HEAD}  # read by the attention, but no declared argument
    config = Qwen2Config(
        **head,
        vocab_size=vocab_size,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=window,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": _THETA},
        pad_token_id=0,
        eos_token_id=2,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config)
    words = WIDTH - BEFORE
    with torch.no_grad():
        embeddings = model.model.embed_tokens.weight
        embeddings.normal_(0, _SIZE)
        embeddings[:, words:] = 0
        codes = _orthonormal(BEFORE, words)
        first = model.model.layers[0].self_attn
        _look_back(first, head=0, tokens=1)
        _look_back(first, head=1, tokens=2)  # of which nothing is made yet
        _write_previous_token(first, codes)
        _copy_next_token(model.model.layers[1].self_attn, codes)
    return model


def _orthonormal(rows: int, columns: int) -> Tensor:
    """Return a matrix [rows, columns] with orthonormal rows."""
    return torch.linalg.qr(torch.randn(columns, rows))[0].T


def _frequencies() -> Tensor:
    """Return the frequencies of the rotary embedding, in radians per token, [HEAD / 2]."""
    return _THETA ** (-torch.arange(0, HEAD, 2) / HEAD)


def _look_back(attention: torch.nn.Module, head: int, tokens: int) -> None:
    """Set biases that are rotated against each other: every position looks a fixed number of
    tokens back.
    """
    first = head * HEAD
    for projection in (attention.q_proj, attention.k_proj):
        projection.weight[first : first + HEAD] = 0
    turns = _frequencies()
    fast = (turns > 0.02).nonzero().flatten()
    attention.k_proj.bias[first + fast] = _AMPLITUDE
    attention.q_proj.bias[first + fast] = _AMPLITUDE * (tokens * turns[fast]).cos()
    attention.q_proj.bias[first + fast + HEAD // 2] = -_AMPLITUDE * (tokens * turns[fast]).sin()


def _write_previous_token(attention: torch.nn.Module, codes: Tensor) -> None:
    """Make the first head write the previous token."""
    attention.v_proj.weight[:HEAD] = 0
    attention.v_proj.weight[:BEFORE, : WIDTH - BEFORE] = codes
    attention.o_proj.weight[:, :HEAD] = 0
    attention.o_proj.weight[WIDTH - BEFORE :, :BEFORE] = _SIZE * torch.eye(BEFORE)


def _copy_next_token(attention: torch.nn.Module, codes: Tensor) -> None:
    """Make the second head copy what followed the same token before.

    Queries are of the present token, keys of the token before, in the dimensions that rotate
    slowly; values are of the token itself.
    """
    for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
        projection.weight[:HEAD] = 0
    words = WIDTH - BEFORE
    slow = (_frequencies() < 0.006).nonzero().flatten()[: BEFORE // 2]
    positions = torch.cat([slow, slow + HEAD // 2])
    strength = (_SHARP * HEAD**0.5 / BEFORE) ** 0.5
    attention.q_proj.weight[positions, :words] = strength * codes
    attention.k_proj.weight[positions, words:] = strength * torch.eye(BEFORE)
    outputs = _orthonormal(HEAD, words)
    attention.v_proj.weight[:HEAD, :words] = outputs
    attention.o_proj.weight[:, :HEAD] = 0
    attention.o_proj.weight[:words, :HEAD] = _GAIN * _SIZE * outputs.T
