"""Test COMET-22, CometKiwi and related models behind the backend's protocol.

xCOMET-lite is compared with a plain forward pass by its paper. `test_comet_golden.py` compares
the scores with unbabel-comet."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from scorekit.errors import SampleError
from scorekit.schemas import TranslationSample, XCometOptions
from services.xcomet.model import XCometBackend
from testing.checkpoints.xcomet import QE, REF, in_float64, loaded, score
from tests.kits.comet.golden import LONG
from tests.kits.float64 import float64

#: The required tolerance; in float64 the difference is much smaller.
CLOSE = 1e-5
ROWS = REF[::5]
#: For each checkpoint: how it uses the source and the reference.
INPUTS = {
    "comet_22": ("required", "required"),
    "one_layer_cls": ("required", "required"),
    "older_qe": ("required", "ignored"),
    "ranking": ("required", "required"),
    "kiwi": ("required", "ignored"),
    "kiwi_tags": ("required", "ignored"),
    "all_three_tags": ("required", "optional"),
    "mt_ref": ("ignored", "required"),
}
#: The minimum and maximum of a score, if it has such bounds.
BOUNDS = {"one_layer_cls": (0.0, 1.0), "ranking": (0.0, 1.0)}


@dataclass
class Case:
    name: str
    folder: Path
    backend: XCometBackend
    inputs: dict[str, str]


@pytest.fixture(scope="module", autouse=True)
def exact_on_one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with float64():
        yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=INPUTS)
def case(request, comet_folder) -> Case:
    folder = comet_folder(request.param)
    src, ref = INPUTS[request.param]
    inputs = {"src": src, "mt": "required", "ref": ref}
    return Case(request.param, folder, in_float64(folder), inputs)


def test_overlong_texts_are_refused_where_asked(case):
    options = XCometOptions(overlong="error")
    for row in (LONG, ROWS[0]):
        (encoded,) = case.backend.encode([TranslationSample(**row)], options)
        refused = isinstance(encoded, SampleError) and encoded.type == "overlong"
        assert refused == (row is LONG)


def test_a_missing_reference_fails_its_sample_alone(case):
    rows = [ROWS[0], QE[0], ROWS[1]]
    first, second, third = case.backend.encode(
        [TranslationSample(**row) for row in rows], XCometOptions()
    )
    assert not isinstance(first, SampleError) and not isinstance(third, SampleError)
    if case.inputs["ref"] == "required":
        assert second.type == "invalid_input" and second.message.startswith("ref: ")
    else:
        assert not isinstance(second, SampleError)
    alone = case.backend.forward([first])[0]["score"]
    assert case.backend.forward([third, first])[1]["score"] == pytest.approx(alone, abs=CLOSE)


def test_description_tells_inputs_and_range(case):
    described = XCometBackend(str(case.folder), device="cpu", threads=1).load()
    assert described.inputs == case.inputs
    bounds = (described.score_range.min, described.score_range.max)
    assert bounds == BOUNDS.get(case.name, (None, None))
    assert described.higher_is_better and described.max_input_length == 512


def test_half_precision_is_near(case):
    """Run the encoder in bfloat16 and the heads in float32: near, finite, and not equal."""
    full, half = score(case.backend, ROWS), score(loaded(case.folder, dtype="bfloat16"), ROWS)
    differences = [abs(a.score - b.score) for a, b in zip(full, half, strict=True)]
    assert max(differences) > 1e-7 and sum(differences) / len(differences) < 0.1


def test_the_probe_is_a_valid_sample(case):
    """Check a model that requires a reference, too: the probe warms it up and tests its health."""
    (encoded,) = case.backend.encode([case.backend.probe(20)], XCometOptions())
    assert np.isfinite(case.backend.forward([encoded])[0]["score"])


# ---- xCOMET-lite -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lite(comet_folder) -> Path:
    return comet_folder("xcomet_lite")


class Plain:
    """xCOMET-lite by its paper: one sample at a time, every layer in full, none of our code."""

    def __init__(self, folder: Path) -> None:
        from transformers import DebertaV2Config, DebertaV2Model

        from services.xcomet.tokenizer import read_tokenizer

        stored = torch.load(folder / "checkpoints" / "model.ckpt", weights_only=True)
        weights = {k: v.double() for k, v in stored["state_dict"].items()}
        self.tokenizer = read_tokenizer("DeBERTa", str(folder / "encoder"), local=True)
        self.model = DebertaV2Model(DebertaV2Config.from_pretrained(folder / "encoder")).double()
        part = "encoder.model."
        self.model.load_state_dict({k[len(part) :]: w for k, w in weights.items() if part in k})
        self.model.eval()
        self.weights = weights
        self.word_layer = stored["hyper_parameters"]["word_layer"]

    def heads(self, *texts: str) -> tuple[float, torch.Tensor]:
        """Return the regression score and label probabilities [L, 4] of texts that are read
        together."""
        tokenizer, weights = self.tokenizer, self.weights
        encodings = [
            tokenizer(t, add_special_tokens=False, truncation=True, max_length=506) for t in texts
        ]
        ids = [tokenizer.cls_token_id]
        for encoding in encodings:
            ids += [*encoding.input_ids, tokenizer.sep_token_id]
        with torch.no_grad():
            layers = self.model(torch.tensor([ids[:510]]), output_hidden_states=True).hidden_states
        mix = torch.cat(
            [weights[f"layerwise_attention.scalar_parameters.{k}"] for k in range(len(layers))]
        ).softmax(0)
        vector = sum(m * layer[0, 0] for m, layer in zip(mix, layers, strict=True))
        vector = vector * weights["layerwise_attention.gamma"]
        for k in (0, 3, 6):  # linear, tanh, dropout
            vector = (
                weights[f"estimator.ff.{k}.weight"] @ vector + weights[f"estimator.ff.{k}.bias"]
            )
            vector = vector.tanh() if k < 6 else vector
        words = layers[self.word_layer][0] @ weights["hidden2tag.weight"].T
        return vector.item(), (words + weights["hidden2tag.bias"]).softmax(-1)

    def score(self, row: dict[str, str]) -> tuple[float, list[str]]:
        """Return the score, and the severities of the spans that it counts."""
        mt, src, ref = row["mt"], row["src"], row.get("ref")
        if ref is None:
            passes, shares, tags = [self.heads(mt, src)], [0.78], [1.0]
        else:
            passes = [self.heads(mt, src), self.heads(mt, ref), self.heads(mt, src, ref)]
            shares, tags = [0.12, 0.33, 0.33], [0.1667, 0.3333, 0.5]
        length = len(self.tokenizer(mt, truncation=True, max_length=508).input_ids)
        labels = sum(
            p[:length] * float(np.float32(w)) for (_, p), w in zip(passes, tags, strict=True)
        ).argmax(-1)
        spans, open_span = [], None
        for label in labels.tolist():
            if label and open_span is None:
                open_span = label
            elif not label and open_span is not None:
                spans.append(open_span)
                open_span = None
        points = min(25, sum({1: 1, 2: 5, 3: 10}[s] for s in spans))
        head = sum(min(1.0, s) * w for (s, _), w in zip(passes, shares, strict=True))
        return head + 0.22 * (25 - points) / 25, [
            ("", "MINOR", "MAJOR", "CRITICAL")[s] for s in spans
        ]


def test_lite_equals_a_plain_forward(lite):
    plain, backend = Plain(lite), in_float64(lite)
    rows = [*ROWS[:9], *QE[:9], {"src": LONG["src"], "mt": LONG["mt"]}, {**LONG, "mt": "Ja"}]
    random.Random(1).shuffle(rows)
    spans = 0
    for row, result in zip(
        rows, score(backend, rows, [1, 3, 2], span_offsets="upstream"), strict=True
    ):
        expected, severities = plain.score(row)
        assert result.score == pytest.approx(expected, abs=CLOSE), row
        assert [s.severity for s in result.error_spans] == severities, row
        spans += len(severities)
    assert spans > 20


def test_lite_as_the_hub_has_it_scores_alike(lite, tmp_path):
    """Load `config.json` beside `model.safetensors`, as huggingface_hub's mixin writes them."""
    stored = torch.load(lite / "checkpoints" / "model.ckpt", weights_only=True)
    save_file(stored["state_dict"], tmp_path / "model.safetensors")
    settings = {
        "pretrained_model": str(lite / "encoder"),
        "word_layer": 2,
        "hidden_sizes": [64, 32],
    }
    (tmp_path / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    backend = loaded(tmp_path)
    rows = [*ROWS[:5], *QE[:5]]
    assert score(backend, rows) == score(loaded(lite), rows)
    described = XCometBackend(str(tmp_path), device="cpu", threads=1).load()
    assert described.inputs == {"src": "required", "mt": "required", "ref": "optional"}
    assert described.max_input_length == 510
    marked = [s for r, row in zip(score(backend, rows), rows, strict=True) for s in r.error_spans]
    assert marked and all(s.text == s.text.strip() for s in marked)
