"""Makes checkpoints of the COMET family for tests: real format and architecture, random weights.

unbabel-comet loads them, too. They are the same on every machine and under every version of torch,
so that upstream's scores of them can be kept in files. Encoder's config and tokenizer lie in
`encoder/`.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, cast
from zlib import crc32

import numpy as np
import yaml

from scorekit.schemas import Scored, TranslationSample, XCometOptions, score_result
from services.xcomet.classes import ENCODERS, JOINT, hyper_parameters
from services.xcomet.joint import Unified
from services.xcomet.model import XCometBackend
from services.xcomet.tokenizer import read_tokenizer

_FILE = Path(__file__).parents[2] / "tests" / "data" / "pairs.jsonl"
#: 200 real pairs: all of them without a reference, and the 150 that have one with it.
PAIRS = [json.loads(line) for line in _FILE.read_text(encoding="utf-8").splitlines()]
QE = [{"src": p["src"], "mt": p["mt"]} for p in PAIRS]
REF = [{"src": p["src"], "mt": p["mt"], "ref": p["ref"]} for p in PAIRS if p["ref"]]

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
#: As mDeBERTa-v3-base has them.
_DEBERTA = {
    "max_position_embeddings": 512,
    "relative_attention": True,
    "position_buckets": 256,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
    "type_vocab_size": 0,
    "layer_norm_eps": 1e-7,
}


def build_checkpoint(
    folder: Path,
    tokenizer: Path,
    pairs: list[dict[str, str]],
    *,
    seed: int,
    hidden: int = 32,
    layers: int = 3,
    heads: int = 2,
    intermediate: int | None = None,
    kind: str = "xcomet_metric",
    encoder_model: str = "XLM-RoBERTa-XL",
    hparams: dict[str, Any] | None = None,
    stored_hparams: dict[str, Any] | None = None,
) -> Path:
    """Write a checkpoint with random weights to `folder`, which it returns.

    pairs: samples (`src`, `mt`) on which its scores and labels will vary.
    kind: its class.
    tokenizer: folder with the files of one that fits the encoder.
    intermediate: inner width of the encoder's blocks; None: twice `hidden`.
    hparams: arguments of the class that differ.
    stored_hparams: entries of hparams.yaml that differ from them. The path of the encoder is stored
    as an absolute one, as upstream does.
    """
    from services.xcomet.networks import Metric

    shape = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": intermediate or 2 * hidden,
    }
    encoder = _write_encoder(folder / "encoder", tokenizer, encoder_model, shape)
    arguments = {
        "encoder_model": encoder_model,
        "pretrained_model": str(encoder.absolute()),
        **({"word_layer": layers} if kind in JOINT else {}),
        **({"hidden_sizes": [2 * hidden, hidden]} if kind != "ranking_metric" else {}),
        "layer_transformation": "softmax",
        **(hparams or {}),
    }
    metric = Metric(kind, hyper_parameters(kind, arguments), local=True)
    _draw(metric, seed)
    stored = {**arguments, "class_identifier": kind, **(stored_hparams or {})}
    (folder / "hparams.yaml").write_text(yaml.safe_dump(stored), encoding="utf-8")
    save_metric(folder, metric, {**arguments, "class_identifier": kind})
    if metric.estimator is not None:
        _calibrate(metric, folder, pairs)
        save_metric(folder, metric, {**arguments, "class_identifier": kind})
    return folder


def save_metric(folder: Path, metric: Any, hyper_parameters: dict[str, Any]) -> None:
    """Write `checkpoints/model.ckpt` as Lightning does after a training."""
    import torch

    (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
    stored = {
        "state_dict": metric.state_dict(),
        "hyper_parameters": hyper_parameters,
        "pytorch-lightning_version": "2.0.0",
        "epoch": 0,
        "global_step": 0,
    }
    torch.save(stored, folder / "checkpoints" / "model.ckpt")


def _write_encoder(
    folder: Path, tokenizer: Path, encoder_model: str, shape: dict[str, int]
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in _TOKENIZER_FILES:
        if (tokenizer / name).is_file():
            shutil.copy(tokenizer / name, folder)
    encoder_tokenizer = read_tokenizer(encoder_model, str(folder), local=True)
    positions = {"max_position_embeddings": 514, "type_vocab_size": 1}
    marks = {
        "pad_token_id": encoder_tokenizer.pad_token_id,
        "bos_token_id": encoder_tokenizer.cls_token_id,
        "eos_token_id": encoder_tokenizer.sep_token_id,
    }
    config = {
        "model_type": ENCODERS[encoder_model],
        "vocab_size": len(encoder_tokenizer),
        **shape,
        **(_DEBERTA if encoder_model == "DeBERTa" else positions),
        **marks,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    return folder


def _draw(metric: Any, seed: int) -> None:
    """Draw the weights, larger than a fresh model's, so that the context of a subword matters.

    Each is drawn by its name, and lies on a grid: no order of modules, and no last digit of a
    logarithm, changes it.
    """
    import torch

    with torch.no_grad():
        for name, weight in metric.named_parameters():
            values = np.random.RandomState(crc32(f"{seed} {name}".encode())).standard_normal(
                tuple(weight.shape)
            )
            spread, middle = _spread(name, weight)
            grid = torch.from_numpy(np.round(values * 4096) / 4096).float()
            weight.copy_(grid * float(f"{spread:.3g}") + middle)


def _spread(name: str, weight: Any) -> tuple[float, float]:
    """Return the standard deviation and the mean of a weight."""
    if weight.ndim < 2:
        norm = name.startswith("encoder.") and "norm" in name.lower() and name.endswith("weight")
        scalar = "scalar_parameters" in name
        return (0.3 if scalar else 0.05), float(norm or name.endswith("gamma"))
    if not name.startswith("encoder."):
        return weight.shape[1] ** -0.5, 0.0
    return (0.7 if "embeddings" in name else 1.5 * weight.shape[1] ** -0.5), 0.0


def _calibrate(metric: Any, folder: Path, pairs: list[dict[str, str]]) -> None:
    """Scale the heads: scores from below 0 to above 1, every label, "no error" the commonest."""
    import torch

    backend = loaded(folder)
    inputs = backend.comet.inputs
    if inputs["ref"] == "required":  # of another text, backwards where it is the translation's
        other = "mt" if inputs["src"] == "required" else "src"
        pairs = [{**p, "ref": p[other][::-1]} for p in pairs]
    samples = [TranslationSample(**pair) for pair in pairs]
    encoded: list[Any] = list(backend.encode(samples, XCometOptions()))
    seen: dict[str, Any] = {}
    heads = {"score": backend.comet.estimator, "words": getattr(backend.comet, "hidden2tag", None)}
    for name, head in heads.items():
        if head is not None:
            head.register_forward_hook(lambda _, __, out, name=name: seen.update({name: out}))
    backend.forward(encoded)
    with torch.no_grad():
        last = [layer for layer in metric.estimator.ff if hasattr(layer, "weight")][-1]
        scale = _rough(0.6 / seen["score"].std())
        last.weight.mul_(scale)
        last.bias.copy_((last.bias - _rough(seen["score"].mean())) * scale + 0.5)
        if "words" not in seen:
            return
        words = torch.cat(
            [w[: len(e.payload.offsets)] for w, e in zip(seen["words"], encoded, strict=True)]
        )
        spread, mean = words.std(0).cpu(), words.mean(0).cpu()  # of each label
        spread, mean = spread.apply_(_rough), mean.apply_(_rough)
        metric.hidden2tag.weight.div_(spread[:, None])
        metric.hidden2tag.bias.copy_(
            (metric.hidden2tag.bias - mean) / spread
            + torch.tensor([1.2, 0.2, 0.0, -0.2])[: len(spread)]
        )


def _rough(number: Any) -> float:
    """Return three digits of a number: the same ones on every machine."""
    return float(f"{float(number):.3g}")


def loaded(folder: Path, **kwargs: Any) -> XCometBackend:
    """Return a backend that is ready, on one CPU thread."""
    backend = XCometBackend(str(folder), device="cpu", threads=1, **kwargs)
    backend.check()
    backend.load()
    return backend


def in_float64(folder: Path) -> XCometBackend:
    """Return a backend that computes in float64, for use within `float64()`."""
    backend = loaded(folder)
    comet = backend.comet
    comet.transformer.double()
    if comet.estimator is not None:
        comet.estimator.double()
    comet.mix = comet.mix.double()
    if isinstance(comet, Unified) and comet.hidden2tag is not None:
        comet.hidden2tag.double()
    return backend


def score(
    backend: XCometBackend,
    rows: list[dict[str, Any]],
    sizes: list[int] | None = None,
    **options: Any,
) -> list[Scored]:
    """Score in batches of `sizes` in turn, and return the results.

    Each result is checked against the wire schema.
    """
    samples = [TranslationSample(**row) for row in rows]
    encoded: list[Any] = list(backend.encode(samples, XCometOptions(**options)))
    results: list[Any] = []
    sizes = sizes or [32]
    while len(results) < len(rows):
        start = len(results)
        batch = encoded[start : start + sizes[start % len(sizes)]]
        for encoded_sample, outcome in zip(batch, backend.forward(batch), strict=True):
            wire = {
                "id": None,
                "ok": True,
                "cached": False,
                **encoded_sample.fields,
                **cast(Any, outcome),
            }
            results.append(score_result.validate_python(wire))
    return results
