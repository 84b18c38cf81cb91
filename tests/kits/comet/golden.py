"""Checkpoints and texts for which `tests/golden/comet` has unbabel-comet's scores and spans.

Everything here is made anew, the same on every machine; only what upstream computes is in files.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

from services.xcomet.classes import JOINT, hyper_parameters
from testing.checkpoints.xcomet import QE, REF, build_checkpoint

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests/golden/comet"
DEMO = ROOT / "demo/models/xcomet"

_TAGS = {"word_level_training": True}
#: name -> how it is built, of the classes but XCOMETMetric.
FAMILY: dict[str, dict[str, Any]] = {
    "comet_22": {"kind": "regression_metric", "hparams": {"layer_norm": False, "pool": "avg"}},
    "normed_max": {
        "kind": "regression_metric",
        "encoder_model": "XLM-RoBERTa",
        "hparams": {"layer_norm": True, "pool": "max", "layer_transformation": "sparsemax"},
    },
    "one_layer_cls": {
        "kind": "regression_metric",
        "hparams": {"layer": 2, "pool": "cls", "final_activation": "Sigmoid"},
    },
    "default_pool": {"kind": "regression_metric", "hparams": {"pool": "default"}},
    "older_qe": {"kind": "referenceless_regression_metric"},
    "ranking": {"kind": "ranking_metric"},
    "ranking_sparse_max": {
        "kind": "ranking_metric",
        "encoder_model": "XLM-RoBERTa",
        "hparams": {"layer_norm": False, "pool": "max", "layer_transformation": "sparsemax"},
    },
    "kiwi": {
        "kind": "unified_metric",
        "encoder_model": "XLM-RoBERTa",
        "hparams": {"input_segments": ["mt", "src"], "layer_norm": True},
        "stored_hparams": {"layer_transformation": "sparsemax_patch"},
    },
    "kiwi_tags": {
        "kind": "unified_metric",
        "hparams": {
            **_TAGS,
            "input_segments": ["mt", "src"],
            "error_labels": ["minor", "major"],
            "layer_norm": False,
        },
    },
    "kiwi_bad_ok": {
        "kind": "unified_metric",
        "hparams": {**_TAGS, "input_segments": ["mt", "src"], "error_labels": ["BAD"]},
    },
    "all_three_tags": {
        "kind": "unified_metric",
        "hparams": {**_TAGS, "error_labels": ["minor", "major", "critical"]},
    },
    "all_three": {
        "kind": "unified_metric",
        "encoder_model": "XLM-RoBERTa",
        "hparams": {"sent_layer": 2},
    },
    "mt_ref": {"kind": "unified_metric", "hparams": {"input_segments": ["mt", "ref"]}},
}
#: Of XCOMETMetric, with random weights of which every severity and every odd span comes out.
XCOMET: dict[str, dict[str, Any]] = {
    "xcomet_mix": {"seed": 1},
    "xcomet_patched": {
        "seed": 2,
        "hidden": 64,
        "layers": 4,
        "heads": 4,
        # As the published ones are stored: trained under the name sparsemax, really softmax.
        "hparams": {"layer_transformation": "sparsemax"},
        "stored_hparams": {"layer_transformation": "sparsemax_patch"},
    },
    "xcomet_sparse_normed": {
        "seed": 3,
        "hidden": 48,
        "hparams": {"layer_transformation": "sparsemax", "layer_norm": True, "word_layer": 2},
    },
    "xcomet_xlmr_one_layer": {
        "seed": 4,
        "layers": 2,
        "encoder_model": "XLM-RoBERTa",
        "hparams": {"sent_layer": 1},
    },
}
LITE = {"xcomet_lite": {"seed": 3, "encoder_model": "DeBERTa", "hparams": {"word_layer": 2}}}
CHECKPOINTS: dict[str, dict[str, Any]] = {**FAMILY, **XCOMET, **LITE}

#: Over 512 ids on every side.
LONG = {name: " ".join(row[name] for row in REF[:70]) for name in ("src", "mt", "ref")}
#: Empty texts, marks inside a text, characters that the tokenizer's normaliser spreads.
_ODD = ["", " ", "…", "½ ﬁ \u200b x", "a </s> b", "<s>", "x <mask> y", "e\u0301 한국🙂", "\t"]
_ODD += ["Haus<pad> ist<pad> gut"]
_WORD = "und"


def build(name: str, folder: Path) -> Path:
    """Write the checkpoint of a name, and return its folder; `demo`: the demo's own."""
    if name == "demo":
        return DEMO
    recipe, tokenizer = CHECKPOINTS[name], GOLDEN
    if recipe.get("encoder_model") == "DeBERTa":
        tokenizer = deberta_tokenizer(folder / "tokenizer")
    pairs = QE if name in XCOMET else QE[::4]
    return build_checkpoint(folder, tokenizer, pairs, **{"seed": 1, **recipe})


def deberta_tokenizer(folder: Path) -> Path:
    """Write the golden tokenizer with DeBERTa's marks, and return its folder."""
    marks = {
        "<s>": "[PAD]",
        "<pad>": "[CLS]",
        "</s>": "[SEP]",
        "<unk>": "[UNK]",
        "<mask>": "[MASK]",
    }
    stored = json.loads((GOLDEN / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = stored["model"]["vocab"]
    for entry in vocabulary:
        entry[0] = marks.get(entry[0], entry[0])
    ids = {
        token_text: k
        for k, (token_text, _) in enumerate(vocabulary)
        if token_text in marks.values()
    }
    for token in stored["added_tokens"]:
        token["content"] = marks[token["content"]]
    first, last = ({"SpecialToken": {"id": mark, "type_id": 0}} for mark in ("[CLS]", "[SEP]"))
    a, b = ({"Sequence": {"id": part, "type_id": 0}} for part in "AB")
    stored["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, a, last],
        "pair": [first, a, last, b, last],
        "special_tokens": {
            mark: {"id": mark, "ids": [ids[mark]], "tokens": [mark]} for mark in ("[CLS]", "[SEP]")
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(stored, ensure_ascii=False)
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    shutil.copy(GOLDEN / "tokenizer_config.json", folder)
    named = {f"{name.lower()}_token": f"[{name}]" for name in ("CLS", "SEP", "PAD", "UNK", "MASK")}
    named |= {"bos_token": "[CLS]", "eos_token": "[SEP]", "tokenizer_class": "DebertaV2Tokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named), encoding="utf-8")
    return folder


def digest(folder: Path) -> str:
    """Return the digest of the weights of a checkpoint, whatever the file's format does."""
    import torch

    stored = torch.load(folder / "checkpoints/model.ckpt", weights_only=True)["state_dict"]
    hasher = hashlib.blake2b(digest_size=16)
    for name in sorted(stored):
        if ".dropout_" not in name:
            hasher.update(name.encode() + stored[name].float().numpy().tobytes())
    return hasher.hexdigest()


def texts_read(name: str) -> tuple[str, ...]:
    """Return the names of the texts that the class of a checkpoint may read."""
    recipe = CHECKPOINTS.get(name, {})
    kind = recipe.get("kind", "xcomet_metric")
    if kind == "referenceless_regression_metric":
        return ("src", "mt")
    if kind not in JOINT:
        return ("src", "mt", "ref")
    segments = hyper_parameters(kind, recipe.get("hparams", {}))["input_segments"]
    return tuple(text for text in ("src", "mt", "ref") if text in segments)


def rows(name: str) -> list[dict[str, str]]:
    """Return the samples of a checkpoint that upstream scored; `ref: ""` is an empty text there."""
    many, read = name in XCOMET, texts_read(name)
    hard = [LONG, {**LONG, "mt": REF[0]["mt"]}, {**LONG, "src": "ja", "ref": "yes"}]
    hard += [{"src": src, "mt": mt, "ref": "the <pad> house"} for mt in _ODD for src in ("", "ich")]
    selected = [*(REF if many else REF[::5]), *hard]
    if "ref" in read:
        selected += [{**row, "ref": ""} for row in REF[::15]]
    if is_joint(name) and len(read) == 3:  # the reference may be missing
        selected += QE if many else QE[::7]
        selected += [{"src": row["src"], "mt": row["mt"]} for row in hard]
    return selected


def is_joint(name: str) -> bool:
    """Return whether the class reads its texts together."""
    return CHECKPOINTS.get(name, {}).get("kind", "xcomet_metric") in JOINT


def edge_rows(limit: int) -> list[dict[str, str]]:
    """Return texts of one token more or less around each limit, with and without a reference."""
    edge_cases = []
    for mt in (0, 1, limit // 2, limit - 5, limit - 4, limit - 3):
        for total in range(limit - 3, limit + 4):
            src = max(0, total - 4 - mt)
            row = {"src": " ".join([_WORD] * src), "mt": " ".join([_WORD] * mt)}
            ref = " ".join([_WORD] * max(1, limit - 6 - mt - src + total % 3))
            edge_cases += [row, {**row, "ref": ref}]
    return edge_cases


def row_digest(ids: list[list[int]], offsets: list[list[int]]) -> str:
    """Return the digest of the ids of a sample's passes, and of its translation's offsets."""
    text = json.dumps([ids, [list(pair) for pair in offsets]])
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


def read(name: str) -> dict[str, Any]:
    """Return what upstream says of a checkpoint's `rows`, as `recompute_comet.py` writes it."""
    stored = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
    return dict(stored)
