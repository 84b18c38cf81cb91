"""What is read of sentencepiece's files, against sentencepiece itself."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from scorekit.server.unigram import deberta_tokenizer, read_unigram_file, xlm_roberta_tokenizer

SPIECE = Path(__file__).parents[3] / "golden" / "metricx_tiny" / "spiece.model"


def trained(file: Path, vocab_size: int = 60, **settings) -> Path:
    """A small model of sentencepiece's own making."""
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the house is red", "das Haus ist rot", "집은 빨간색이다"] * 20),
        model_writer=made,
        vocab_size=vocab_size,
        hard_vocab_limit=False,
        minloglevel=2,
        **settings,
    )
    file.write_bytes(made.getvalue())
    return file


@pytest.mark.parametrize("settings", [{}, {"byte_fallback": True, "vocab_size": 330}])
def test_pieces_are_those_that_sentencepiece_reads(tmp_path, settings):
    settings = {"unk_id": 3, "pad_id": 0, **settings}
    file = trained(tmp_path / "m", user_defined_symbols=["<sep>"], **settings)
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(file))
    ours = read_unigram_file(file)
    assert ours.unk_id == theirs.unk_id() == 3
    ids = range(theirs.get_piece_size())
    assert ours.scores == [(theirs.id_to_piece(k), theirs.get_score(k)) for k in ids]
    assert [kind == 3 for kind in ours.kinds] == [theirs.is_control(k) for k in ids]
    assert ours.charsmap


def test_a_model_without_a_normaliser_has_no_map(tmp_path):
    pieces = read_unigram_file(trained(tmp_path / "m", normalization_rule_name="identity"))
    assert pieces.charsmap == b""
    assert "½" in xlm_roberta_tokenizer(pieces).normalizer.normalize_str("½")


def test_pieces_of_the_user_s_own_are_found_as_they_are_written(tmp_path):
    pieces = read_unigram_file(trained(tmp_path / "m", user_defined_symbols=["<sep>"]))
    for tokenizer in (xlm_roberta_tokenizer(pieces), deberta_tokenizer(pieces)):
        assert "<sep>" in tokenizer.encode("the<sep>house").tokens


def test_a_model_of_another_kind_is_refused(tmp_path):
    with pytest.raises(ValueError, match="not of the unigram kind"):
        read_unigram_file(trained(tmp_path / "m", model_type="bpe"))


WHOLE = SPIECE.read_bytes()


@given(data=st.data())
def test_damaged_bytes_are_a_value_error_or_a_model(tmp_path_factory, data):
    """Never another exception: whoever reads the file catches these."""
    start = data.draw(st.integers(0, 3000))
    damaged = (
        data.draw(st.binary(max_size=40)) + WHOLE[start : start + data.draw(st.integers(0, 500))]
    )
    file = tmp_path_factory.getbasetemp() / "damaged"
    file.write_bytes(damaged)
    with pytest.raises(ValueError):
        read_unigram_file(file)
