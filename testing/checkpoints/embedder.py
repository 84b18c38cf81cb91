"""Embedding models of random weights in the form of sentence-transformers, made on the spot.

The tokenizer is the demo's small one of XLM-R's kind. Speed does not depend on the weights' values;
for tests they are so large that texts differ clearly.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TOKENIZER = Path(__file__).parents[2] / "demo/models/xcomet/encoder"


def make_plain_folder(
    folder: Path,
    *,
    seed: int = 0,
    hidden: int = 32,
    layers: int = 2,
    heads: int = 2,
    intermediate: int | None = None,
    max_length: int = 64,
    vocab_size: int | None = None,
) -> Path:
    """Write an XLM-R network and its tokenizer, as transformers saves them; return `folder`."""
    import torch
    from transformers import XLMRobertaConfig, XLMRobertaModel

    folder.mkdir(parents=True, exist_ok=True)
    for file in TOKENIZER.glob("*token*.json"):
        shutil.copy(file, folder)
    settings = folder / "tokenizer_config.json"
    settings.write_text(
        json.dumps(json.loads(settings.read_text("utf-8")) | {"model_max_length": max_length})
    )
    torch.manual_seed(seed)
    tokenizer_config = json.loads((TOKENIZER / "config.json").read_text("utf-8"))
    config = XLMRobertaConfig(
        **{
            name: tokenizer_config[name]
            for name in ("pad_token_id", "bos_token_id", "eos_token_id")
        },
        vocab_size=vocab_size or tokenizer_config["vocab_size"],
        type_vocab_size=1,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=intermediate or 2 * hidden,
        max_position_embeddings=max_length + 2,
        initializer_range=0.3 if hidden < 128 else 0.02,
    )
    XLMRobertaModel(config).save_pretrained(folder)
    return folder


def make_folder(
    folder: Path,
    *,
    pooling: str | tuple[str, ...] = "cls",
    dense: int | None = None,
    normalize: bool = True,
    prompts: Mapping[str, str] | None = None,
    default_prompt: str | None = None,
    **shape: Any,
) -> Path:
    """Write a plain folder with modules.json; return `folder`.

    dense: output size of a dense layer over the pooled vectors.
    shape: see `make_plain_folder`.
    """
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import (
        Dense,
        Normalize,
        Pooling,
        Transformer,
    )

    plain = make_plain_folder(folder.with_name(folder.name + "-network"), **shape)
    reader = Transformer(str(plain))
    pool = Pooling(reader.get_embedding_dimension(), pooling)
    steps: list[torch.nn.Module] = [reader, pool]
    if dense is not None:
        torch.manual_seed(shape.get("seed", 0) + 1)
        steps.append(Dense(pool.get_embedding_dimension(), dense))
    if normalize:
        steps.append(Normalize())
    model = SentenceTransformer(
        modules=steps,
        device="cpu",
        prompts=dict(prompts or {}),
        default_prompt_name=default_prompt,
    )
    model.save(str(folder), create_model_card=False)
    shutil.rmtree(plain)
    return folder
