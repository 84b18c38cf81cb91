"""Compare what we read from sentencepiece files with sentencepiece itself."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from scorekit.server.tokenizers import deberta_tokenizer, read_unigram_file, xlm_roberta_tokenizer

SPIECE = Path(__file__).parents[3] / "golden" / "metricx_tiny" / "spiece.model"


def trained(file: Path, vocab_size: int = 60, **settings) -> Path:
    """Train a small sentencepiece model and return its file."""
    model_bytes = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the house is red", "das Haus ist rot", "집은 빨간색이다"] * 20),
        model_writer=model_bytes,
        vocab_size=vocab_size,
        hard_vocab_limit=False,
        minloglevel=2,
        **settings,
    )
    file.write_bytes(model_bytes.getvalue())
    return file


@pytest.mark.parametrize("settings", [{}, {"byte_fallback": True, "vocab_size": 330}])
def test_pieces_are_those_that_sentencepiece_reads(tmp_path, settings):
    settings = {"unk_id": 3, "pad_id": 0, **settings}
    file = trained(tmp_path / "m", user_defined_symbols=["<sep>"], **settings)
    reference = sentencepiece.SentencePieceProcessor(model_file=str(file))
    vocabulary = read_unigram_file(file)
    assert vocabulary.unk_id == reference.unk_id() == 3
    ids = range(reference.get_piece_size())
    assert vocabulary.scores == [(reference.id_to_piece(k), reference.get_score(k)) for k in ids]
    assert [kind == 3 for kind in vocabulary.kinds] == [reference.is_control(k) for k in ids]
    assert vocabulary.charsmap


def test_a_model_without_a_normaliser_has_no_map(tmp_path):
    vocabulary = read_unigram_file(trained(tmp_path / "m", normalization_rule_name="identity"))
    assert vocabulary.charsmap == b""
    assert "½" in xlm_roberta_tokenizer(vocabulary).normalizer.normalize_str("½")


def test_pieces_of_the_user_s_own_are_found_as_they_are_written(tmp_path):
    vocabulary = read_unigram_file(trained(tmp_path / "m", user_defined_symbols=["<sep>"]))
    for tokenizer in (xlm_roberta_tokenizer(vocabulary), deberta_tokenizer(vocabulary)):
        assert "<sep>" in tokenizer.encode("the<sep>house").tokens


def test_a_model_of_another_kind_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not of the unigram kind"):
        read_unigram_file(trained(tmp_path / "m", model_type="bpe"))


MODEL_BYTES = SPIECE.read_bytes()


@given(data=st.data())
def test_damaged_bytes_are_a_value_error_or_a_model(tmp_path_factory, data):
    """Check that no other exception is raised: readers of the file catch only these."""
    start = data.draw(st.integers(0, 3000))
    damaged = (
        data.draw(st.binary(max_size=40))
        + MODEL_BYTES[start : start + data.draw(st.integers(0, 500))]
    )
    file = tmp_path_factory.getbasetemp() / "damaged"
    file.write_bytes(damaged)
    with pytest.raises(ValueError):
        read_unigram_file(file)
