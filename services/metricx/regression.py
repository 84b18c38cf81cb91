"""The network: mT5 that outputs a score instead of a token. Imported only to load a model."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import MT5Config, MT5PreTrainedModel
from transformers.models.mt5.modeling_mt5 import MT5Stack

from scorekit.documents import parse_json
from scorekit.errors import UserError
from scorekit.torch_files import check_torch_file

#: `<extra_id_10>` of mT5's vocabulary, whose logit upstream reads as the score. A checkpoint with
#: another vocabulary sets `score_token_id` in its config.
SCORE_TOKEN_ID = 250089
_TIED = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")


class MT5ForRegression(MT5PreTrainedModel):
    """mT5's encoder, one decoder step from id 0, and one logit.

    Only the score's row [D] of the output matrix [V, D] is kept.
    tied: True if that matrix is the embedding matrix, from `tie_word_embeddings` in config.json.
    transformers 5 replaces that value by true, so it is read from the file.
    """

    def __init__(self, config: MT5Config, tied: bool = False) -> None:
        super().__init__(config)
        self.tied = tied
        self.shared = nn.Embedding(config.vocab_size, config.d_model)
        self.encoder = MT5Stack(_stack_config(config, decoder=False))
        self.decoder = MT5Stack(_stack_config(config, decoder=True))
        self.encoder.embed_tokens = self.decoder.embed_tokens = self.shared
        self.score_row = nn.Parameter(torch.empty(config.d_model))

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """Return raw scores [B] in float32 (not clamped) of ids [B, L] with mask [B, L]."""
        states_BLD = self.encoder(input_ids=input_ids, attention_mask=attention_mask)[0]
        start_B1 = torch.zeros_like(input_ids[:, :1])
        decoded_B1D = self.decoder(
            input_ids=start_B1,
            encoder_hidden_states=states_BLD,
            encoder_attention_mask=attention_mask,
            use_cache=False,
        )[0]
        out_BD = decoded_B1D[:, 0].float()
        if self.tied:
            out_BD = out_BD * self.config.d_model**-0.5
        # Use float32: upstream's bf16 rounds a score near 20 to steps of 0.125.
        scores_B: torch.Tensor = out_BD @ self.score_row.float()
        return scores_B


def _stack_config(config: MT5Config, *, decoder: bool) -> MT5Config:
    stack = copy.deepcopy(config)
    stack.is_decoder = decoder
    stack.is_encoder_decoder = False
    stack.use_cache = False
    # As upstream. The default of transformers 5 sums in another order.
    stack._attn_implementation = "eager"
    if decoder:
        stack.num_layers = config.num_decoder_layers or config.num_layers
    return stack


def empty_regression(config: MT5Config, tied: bool = False) -> MT5ForRegression:
    """Return the network without memory for its weights (meta device)."""
    with torch.device("meta"):
        return MT5ForRegression(config, tied).train(False)


def load_regression(folder: Path, dtype: torch.dtype, device: torch.device) -> MT5ForRegression:
    """Return the network with the weights of a folder. Raises UserError if they do not fit."""
    try:
        config = MT5Config.from_pretrained(folder)
        written = parse_json((folder / "config.json").read_text(encoding="utf-8"))
        model = empty_regression(config, tied=bool(written.get("tie_word_embeddings", False)))
    except Exception as error:  # a field of the wrong type, a size that does not fit
        reason = str(error).split("\n")[0]
        raise UserError(f"{folder}/config.json: not a valid mT5 configuration: {reason}") from None
    row = getattr(config, "score_token_id", SCORE_TOKEN_ID)
    if not isinstance(row, int) or not 0 <= row < config.vocab_size:
        raise UserError(
            f"{folder}/config.json: score_token_id {row} is outside the vocabulary "
            f"of {config.vocab_size}"
        )
    shapes = {name: weight.shape for name, weight in model.state_dict().items()}
    weights: dict[str, torch.Tensor] = {}
    for name, tensor in _tensors(folder):
        if name == "lm_head.weight":
            if len(tensor) <= row:
                raise UserError(f"{folder}: lm_head.weight has {len(tensor)} rows, not {row + 1}")
            name, tensor = "score_row", tensor[row]
        if name not in _TIED:
            if tensor.shape == shapes.get(name):  # another may claim to be larger than its file
                tensor = tensor.to(device=device, dtype=dtype, copy=True)
            weights[name] = tensor
    if model.tied:
        weights.setdefault("score_row", weights["shared.weight"][row].clone())
    _check_fit(folder, model, weights)
    model.load_state_dict(weights, strict=False, assign=True)
    model.encoder.embed_tokens = model.decoder.embed_tokens = model.shared
    return model.requires_grad_(False)


def _check_fit(folder: Path, model: MT5ForRegression, weights: dict[str, torch.Tensor]) -> None:
    expected = {k: v.shape for k, v in model.state_dict().items() if k not in _TIED}
    for name, shape in expected.items():
        if name not in weights:
            stored_name = "lm_head.weight" if name == "score_row" else name
            raise UserError(
                f"{folder}: not a MetricX checkpoint, its weights have no {stored_name}"
            )
        if weights[name].shape != shape:
            raise UserError(
                f"{folder}: {name} has the shape {tuple(weights[name].shape)}, "
                f"its config.json asks for {tuple(shape)}"
            )
    unknown = sorted(set(weights) - set(expected))
    if unknown:
        raise UserError(f"{folder}: not a MetricX checkpoint, it has an unknown {unknown[0]}")


def _tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield (name, tensor) of all weight files, safetensors first. No pickle is executed."""
    try:
        if any(folder.glob("model*.safetensors")):
            for path in _shards(folder, "model", "safetensors"):
                with safe_open(path, framework="pt") as file:
                    for name in file.keys():  # noqa: SIM118 (not a dict)
                        yield name, file.get_tensor(name)
        else:
            for path in _shards(folder, "pytorch_model", "bin"):
                check_torch_file(path)
                content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
                if not isinstance(content, dict) or not all(
                    isinstance(name, str) and isinstance(tensor, torch.Tensor)
                    for name, tensor in content.items()
                ):
                    raise ValueError(f"{path.name} holds more than weights by name")
                yield from content.items()
    except UserError:
        raise
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, OSError, ValueError) as error:
        reason = str(error).split("\n")[0]
        raise UserError(f"{folder}: its weights cannot be read: {reason}") from None


def _shards(folder: Path, stem: str, suffix: str) -> list[Path]:
    index = folder / f"{stem}.{suffix}.index.json"
    if not index.exists():
        return [folder / f"{stem}.{suffix}"]
    content = parse_json(index.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or not isinstance(content.get("weight_map"), dict):
        raise ValueError(f"{index.name} has no weight_map")
    files = list(content["weight_map"].values())
    if not files or not all(isinstance(name, str) and Path(name).name == name for name in files):
        raise ValueError(f"{index.name}: weight_map: expected names of files in this folder")
    return [folder / name for name in sorted(set(files))]
