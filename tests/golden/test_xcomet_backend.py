"""Compare the xCOMET backend with itself: bad samples, other folders, other number formats."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from scorekit.errors import SampleError, UserError
from scorekit.schemas import TranslationSample, XCometOptions
from scorekit.scorers import SampleForScoring
from scorekit.server.backend import Encoded
from services.xcomet.model import XCometBackend, XCometXLScorer
from testing.checkpoints.xcomet import (
    PAIRS,
    QE,
    build_checkpoint,
    loaded,
    score,
)
from tests.kits.comet.golden import GOLDEN


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("small"), GOLDEN, QE, seed=5)


def test_overlong_error(folder):
    """Check that `overlong: error` fails exactly the samples that would be truncated."""
    backend = loaded(folder)
    rows = [QE[0], {"src": " ".join(p["src"] for p in QE[:60]), "mt": QE[0]["mt"]}]
    good, bad = backend.encode(
        [TranslationSample(**row) for row in rows], XCometOptions(overlong="error")
    )
    assert isinstance(good, Encoded)
    assert isinstance(bad, SampleError) and bad.type == "overlong" and "limit 512" in bad.message


def test_padding_marks_in_a_text(folder):
    """Check the offsets: upstream drops a written `<pad>` from the ids, but not from the
    offsets."""
    backend = loaded(folder)
    mt = "Das<pad> ist<pad> gut"
    (marked,) = backend.encode([TranslationSample(src="a", mt=mt)], XCometOptions())
    assert len(marked.payload.read_offsets) == len(marked.payload.offsets) - 2
    for (start, end), token in zip(
        marked.payload.read_offsets[1:-1].tolist(), marked.payload.rows[0][1:], strict=False
    ):
        token_text = backend.comet.tokenizer.convert_ids_to_tokens(token).replace("▁", "")
        assert mt[start:end].strip() == token_text or not token_text


def test_unreadable_text_fails_alone(folder):
    """Check that a lone surrogate, which cannot be encoded, fails its sample alone."""
    backend = loaded(folder)
    samples = [TranslationSample.model_construct(src="a", mt=mt, ref=None) for mt in "x\ud800y"]
    first, bad, last = backend.encode(samples, XCometOptions())
    assert isinstance(first, Encoded) and isinstance(last, Encoded)
    assert isinstance(bad, SampleError) and bad.type == "invalid_input"
    assert bad.message.startswith("mt: ")


def test_non_finite_score_is_a_failure(folder):
    """Check that NaN in the state of one sample fails that sample; NaN in the head fails all."""
    backend = loaded(folder)
    encoded = backend.encode([TranslationSample(**r) for r in QE[:3]], XCometOptions())
    first, second, third = (set(e.payload.rows[0]) for e in encoded)
    token = min(second - first - third)
    with torch.no_grad():
        backend.comet.transformer.embeddings.word_embeddings.weight[token] = float("nan")
    outcomes = backend.forward(encoded)
    assert [isinstance(o, SampleError) for o in outcomes] == [False, True, False]
    assert outcomes[1].type == "non_finite"
    with torch.no_grad():
        backend.comet.hidden2tag.bias[2] = float("nan")
    assert all(isinstance(o, SampleError) for o in backend.forward(encoded))


def test_moved_folder(tmp_path):
    """Check that a broken absolute path is refused clearly, and that `encoder` gives the same
    scores."""
    home = build_checkpoint(tmp_path / "home", GOLDEN, QE, seed=6)
    before = score(loaded(home), QE[:20])
    moved = Path(shutil.move(home, tmp_path / "elsewhere"))
    with pytest.raises(UserError, match="--encoder") as error_info:
        XCometBackend(str(moved)).check()
    assert "\n" not in str(error_info.value) and str(home / "encoder") in str(error_info.value)
    for encoder in ("encoder", str(moved / "encoder")):
        assert score(loaded(moved, encoder=encoder), QE[:20]) == before
    # The .ckpt instead of the folder, and a relative path stored in the checkpoint.
    file = moved / "checkpoints" / "model.ckpt"
    stored = torch.load(file, weights_only=True)
    stored["hyper_parameters"]["pretrained_model"] = "encoder"
    torch.save(stored, file)
    assert score(loaded(file), QE[:20]) == before


def test_description(folder):
    """Check the fields of `/v1/info`; the revision depends on the files."""
    backend = XCometBackend(str(folder), device="cpu")
    described = backend.load()
    assert described.model == folder.name and described.tokenizer == "encoder"
    assert described.max_input_length == 512 and described.score_range.max == 1.0
    assert described.score_range.min is None and described.higher_is_better
    assert described.versions["comet"] is None
    assert described.engine["implementation"] == "own"  # part of the cache's key
    assert described.engine.keys() - {"implementation"} == {
        "attention",
        "layer_transformation",
        "tokenizer_digest",
    }
    assert described.revision == XCometBackend(str(folder), device="cpu").load().revision
    assert backend.memory_bytes() is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(folder, dtype):
    """Check that the scores are close to float32, and finite."""
    full, half = score(loaded(folder), QE), score(loaded(folder, dtype=dtype), QE)
    differences = [abs(a.score - b.score) for a, b in zip(full, half, strict=True)]
    # Most of the difference is a label that flips and so changes the share of the spans.
    assert sum(differences) / len(differences) < 0.02
    assert max(differences) > 1e-6


def test_scorer_in_process(folder):
    """Check `score_batch(samples, cfg) -> RewardOutput` of XCometXLScorer, in order."""
    scorer = XCometXLScorer(str(folder), device="cpu", threads=1)
    samples = [SampleForScoring(p["src"], p["mt"], p["ref"]) for p in PAIRS[140:160]]
    output = scorer.score_batch(samples)
    rows = [{"src": s.src, "mt": s.mt, "ref": s.ref} for s in samples]
    expected = score(loaded(folder), rows)
    # Below 1, in other batches: float32 sums of some hundred terms, 1,000 times 2**-24.
    expected_scores = pytest.approx([r.score for r in expected], abs=1000 * 2**-24)
    assert output.sequence_scores == expected_scores
    for metadata, result in zip(output.metadata, expected, strict=True):
        assert [s.text for s in metadata.error_spans] == [s.text for s in result.error_spans]
