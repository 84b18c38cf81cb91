"""The supported classes and encoders of the COMET family, with the defaults of unbabel-comet
2.2.7."""

from __future__ import annotations

from typing import Any

from scorekit.hub import LITE_ENCODER

#: `encoder_model` of a checkpoint -> `model_type` of its encoder's config.json. unbabel-comet has
#: no DeBERTa encoder.
ENCODERS = {
    "XLM-RoBERTa": "xlm-roberta",
    "XLM-RoBERTa-XL": "xlm-roberta-xl",
    "DeBERTa": "deberta-v2",
}
#: The classes that encode all texts in one sequence, and can tag words.
JOINT = ("unified_metric", "xcomet_metric")

_HEAD: dict[str, Any] = {"dropout": 0.1, "activations": "Tanh", "final_activation": None}
_POOLED: dict[str, Any] = {
    "encoder_model": "XLM-RoBERTa",
    "pretrained_model": "xlm-roberta-large",
    "layer": "mix",
    "layer_transformation": "softmax",
    "layer_norm": True,
    "pool": "avg",
}
_JOINT: dict[str, Any] = {
    **_HEAD,
    "sent_layer": "mix",
    "layer_transformation": "sparsemax",
    "input_segments": ["mt", "src", "ref"],
}
#: `class_identifier` -> the hyper-parameters that a score depends on, with the defaults of that
#: class's `__init__`. Other entries of a checkpoint concern training.
CLASSES: dict[str, dict[str, Any]] = {
    "regression_metric": {**_HEAD, **_POOLED, "hidden_sizes": [3072, 1024]},
    "referenceless_regression_metric": {**_HEAD, **_POOLED, "hidden_sizes": [2048, 1024]},
    "ranking_metric": {**_POOLED, "dropout": 0.1, "pretrained_model": "xlm-roberta-base"},
    "unified_metric": {
        **_JOINT,
        "encoder_model": "XLM-RoBERTa",
        "pretrained_model": "microsoft/infoxlm-large",
        "layer_norm": True,
        "word_layer": 24,
        "hidden_sizes": [3072, 1024],
        "word_level_training": False,
        "error_labels": ["minor", "major"],
    },
    "xcomet_metric": {
        **_JOINT,
        "encoder_model": "XLM-RoBERTa-XL",
        "pretrained_model": "facebook/xlm-roberta-xl",
        "layer_norm": False,
        "word_layer": 36,
        "hidden_sizes": [2560, 1280],
        "word_level_training": True,
        "error_labels": ["minor", "major", "critical"],
    },
}
#: Defaults of xCOMET-lite's class that differ from `XCOMETMetric`'s. Softmax comes from the
#: unbabel-comet version that it was made with (2.2.2: see `decide_layer_transformation`).
LITE: dict[str, Any] = {
    "encoder_model": "DeBERTa",
    "pretrained_model": LITE_ENCODER,
    "layer_transformation": "softmax",
    "word_layer": 8,
    "hidden_sizes": [3072, 1024],
}
#: Values that `XCOMETMetric` never takes from a checkpoint.
_FIXED: dict[str, dict[str, Any]] = {
    "xcomet_metric": {"input_segments": ["mt", "src", "ref"], "word_level_training": True}
}


def hyper_parameters(kind: str, stored: dict[str, Any]) -> dict[str, Any]:
    """Return the hyper-parameters of a class: its checkpoint's values over the defaults."""
    defaults = CLASSES[kind]
    return {**defaults, **{k: stored[k] for k in defaults if k in stored}, **_FIXED.get(kind, {})}
