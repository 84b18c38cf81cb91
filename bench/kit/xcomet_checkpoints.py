"""Checkpoints of the COMET family for tests: the real format and architecture, made-up weights.

A checkpoint is built with unbabel-comet's own class and saved with Lightning, so the code that
loads it cannot tell it from XCOMET-XL. Its encoder's config and tokenizer lie in `encoder/`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import yaml

from scorekit.schemas import Scored, TranslationSample, XCometOptions, score_result
from services.xcomet.joint import Unified
from services.xcomet.model import XCometBackend

_FILE = Path(__file__).parents[2] / "tests" / "data" / "pairs.jsonl"
#: 200 real pairs: all of them without a reference, and the 150 that have one with it.
PAIRS = [json.loads(line) for line in _FILE.read_text(encoding="utf-8").splitlines()]
QE = [{"src": p["src"], "mt": p["mt"]} for p in PAIRS]
REF = [{"src": p["src"], "mt": p["mt"], "ref": p["ref"]} for p in PAIRS if p["ref"]]


def build_tokenizer(folder: Path, texts: Iterable[str], vocab_size: int = 2500) -> Path:
    """Train a small XLM-R tokenizer (sentencepiece unigram, NFKC) on `texts`; returns `folder`."""
    import sentencepiece
    from transformers import XLMRobertaTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_prefix=str(folder / "sentencepiece.bpe"),
        vocab_size=vocab_size,
        model_type="unigram",
        character_coverage=0.995,  # as XLM-R, it knows not every character
        normalization_rule_name="nmt_nfkc",
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=2,
    )
    # XLM-R's own conversion of a sentencepiece model, normaliser and offsets included.
    tokenizer = XLMRobertaTokenizerFast(vocab_file=str(folder / "sentencepiece.bpe.model"))
    tokenizer.save_pretrained(folder)
    return folder


def build_deberta_tokenizer(folder: Path, texts: Iterable[str], vocab_size: int = 2500) -> Path:
    """The same for mDeBERTa's kind of tokenizer, with its marks; returns `folder`."""
    import sentencepiece
    from transformers import DebertaV2TokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    marks = {"pad": "[PAD]", "bos": "[CLS]", "eos": "[SEP]", "unk": "[UNK]"}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_prefix=str(folder / "spm"),
        vocab_size=vocab_size,
        model_type="unigram",
        character_coverage=0.995,
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=2,
        **{f"{name}_id": k for k, name in enumerate(marks)},
        **{f"{name}_piece": mark for name, mark in marks.items()},
    )
    DebertaV2TokenizerFast(vocab_file=str(folder / "spm.model")).save_pretrained(folder)
    return folder


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

    pairs: samples (`src`, `mt`) on which its scores and labels will vary. kind: its class.
    tokenizer: of `build_tokenizer`; for a DeBERTa encoder, of `build_deberta_tokenizer`.
    intermediate: inner width of the encoder's blocks; None: twice `hidden`.
    hparams: arguments of the class that differ. stored_hparams: entries of hparams.yaml that
    differ from them. The path of the encoder is stored as an absolute one, as upstream does.
    """
    import torch
    from comet.models import str2model

    from services.xcomet.deberta import register

    register()
    shape = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": intermediate or 2 * hidden,
    }
    encoder = _build_encoder(folder / "encoder", tokenizer, encoder_model, shape)
    torch.manual_seed(seed)
    words = {"word_layer": layers} if kind in ("xcomet_metric", "unified_metric") else {}
    metric = str2model[kind](
        encoder_model=encoder_model,
        pretrained_model=str(encoder.absolute()),
        load_pretrained_weights=False,
        local_files_only=True,
        **{
            **words,
            "hidden_sizes": [2 * hidden, hidden],
            "layer_transformation": "softmax",
            **(hparams or {}),
        },
    ).eval()
    with torch.no_grad():
        _enliven(metric)
        _calibrate(metric, pairs)
    _save(folder, metric)
    stored = {**dict(metric.hparams), "class_identifier": kind, **(stored_hparams or {})}
    (folder / "hparams.yaml").write_text(yaml.safe_dump(stored), encoding="utf-8")
    return folder


def _save(folder: Path, metric: Any) -> None:
    """As Lightning saves it after training."""
    import pytorch_lightning as lightning

    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.strategy.connect(metric)
    trainer.save_checkpoint(folder / "checkpoints" / "model.ckpt")


def _build_encoder(
    folder: Path, tokenizer: Path, encoder_model: str, shape: dict[str, int]
) -> Path:
    from transformers import (
        AutoTokenizer,
        DebertaV2Config,
        XLMRobertaConfig,
        XLMRobertaTokenizerFast,
        XLMRobertaXLConfig,
    )

    if encoder_model == "DeBERTa":
        own = AutoTokenizer.from_pretrained(tokenizer)
        own.save_pretrained(folder)
        DebertaV2Config(
            vocab_size=len(own),
            **shape,
            # As mDeBERTa-v3-base has them.
            max_position_embeddings=512,
            relative_attention=True,
            position_buckets=256,
            norm_rel_ebd="layer_norm",
            share_att_key=True,
            pos_att_type="p2c|c2p",
            position_biased_input=False,
            type_vocab_size=0,
            layer_norm_eps=1e-7,
            pad_token_id=own.pad_token_id,
        ).save_pretrained(folder)
        return folder
    config_type: dict[str, Any] = {
        "XLM-RoBERTa": XLMRobertaConfig,
        "XLM-RoBERTa-XL": XLMRobertaXLConfig,
    }
    inner = XLMRobertaTokenizerFast.from_pretrained(tokenizer)
    inner.save_pretrained(folder)
    config_type[encoder_model](
        vocab_size=len(inner),
        **shape,
        max_position_embeddings=514,
        pad_token_id=inner.pad_token_id,
        bos_token_id=inner.cls_token_id,
        eos_token_id=inner.sep_token_id,
        type_vocab_size=1,
    ).save_pretrained(folder)
    return folder


def _enliven(metric: Any) -> None:
    """Larger weights than a fresh model's, so that the context of a subword matters."""
    for name, weight in metric.encoder.named_parameters():
        if "embeddings" in name and weight.ndim == 2:
            weight.normal_(std=0.7)
        elif weight.ndim == 2:
            weight.normal_(std=1.5 * weight.shape[1] ** -0.5)
    for scalar in getattr(metric.layerwise_attention, "scalar_parameters", ()):
        scalar.normal_(std=0.3)


def _calibrate(metric: Any, pairs: list[dict[str, str]]) -> None:
    """Scale the heads: scores from below 0 to above 1, every label, "no error" the commonest."""
    import torch

    if not hasattr(metric, "word_level"):  # it reads a reference, too
        batch = metric.prepare_sample([{**p, "ref": p["mt"][::-1]} for p in pairs], stage="predict")
        _calibrate_head(metric, metric.forward(**batch).score)
        return
    segments = metric.hparams.input_segments
    batch = metric.prepare_sample(
        [p if "src" in segments else {"mt": p["mt"], "ref": p["src"]} for p in pairs],
        stage="predict",
    )[0]
    output = metric.forward(**batch)
    _calibrate_head(metric, output.score)
    if not metric.word_level:
        return
    words = output.logits[batch["label_ids"] != -1]  # [positions, 4]
    spread = words.std(0)
    metric.hidden2tag.weight.div_(spread[:, None])
    metric.hidden2tag.bias.copy_(
        (metric.hidden2tag.bias - words.mean(0)) / spread
        + torch.tensor([1.2, 0.2, 0.0, -0.2])[: len(spread)]
    )


def _calibrate_head(metric: Any, scores: Any) -> None:
    last = [layer for layer in metric.estimator.ff if hasattr(layer, "weight")][-1]
    scale = 0.6 / scores.std()
    last.weight.mul_(scale)
    last.bias.copy_((last.bias - scores.mean()) * scale + 0.5)


def loaded(folder: Path, **kwargs: Any) -> XCometBackend:
    """A backend that is ready, on one CPU thread."""
    backend = XCometBackend(str(folder), device="cpu", threads=1, **kwargs)
    backend.check()
    backend.load()
    return backend


def in_float64(folder: Path) -> XCometBackend:
    """A backend of which all sums are in float64, to be used within `float64()`."""
    backend = loaded(folder)
    comet = backend.comet
    comet.transformer.double()
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
    """Score in batches of `sizes` in turn; the results, checked against the wire schema."""
    samples = [TranslationSample(**row) for row in rows]
    encoded: list[Any] = list(backend.encode(samples, XCometOptions(**options)))
    results: list[Any] = []
    sizes = sizes or [32]
    while len(results) < len(rows):
        start = len(results)
        batch = encoded[start : start + sizes[start % len(sizes)]]
        for one, outcome in zip(batch, backend.forward(batch), strict=True):
            wire = {"id": None, "ok": True, "cached": False, **one.fields, **cast(Any, outcome)}
            results.append(score_result.validate_python(wire))
    return results
