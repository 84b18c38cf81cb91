"""Check text lengths by three measures."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scorekit.errors import UserError
from synth.config import BucketingConfig
from synth.sources.measure import approx_tokens, make_measure, whitespace

#: A tokenizer that appends its own end token to every text unless this is disabled.
TOKENIZER = Path(__file__).parents[4] / "demo/models/metricx"


def measure(name, language="en", **more):
    return make_measure(BucketingConfig(measure=name, **more), language)


def test_approx_tokens_knows_scripts():
    lengths = approx_tokens(["a" * 43, "人" * 10, "かな" * 5, "가" * 10, "ก" * 10, "Ж" * 23, ""])
    assert lengths == pytest.approx([10.019, 7, 7, 7.5, 5, 10.005, 0])


def test_a_language_may_have_its_own_factor():
    text = ["Alle Menschen sind frei und gleich an Würde und Rechten geboren."]
    (plain,), (german,) = (
        measure("approx_tokens", "en")(text),
        measure("approx_tokens", "deu")(text),
    )
    assert german == pytest.approx(1.33 * plain)
    assert measure("approx_tokens", "kor")(text) == [plain]


def test_whitespace_is_words_and_half_of_the_punctuation():
    texts = ["Hello, world!", "사람은 자유롭다.", "人人生而自由，平等。", "  ", "a-b «c»"]
    assert whitespace(texts) == [2 + 1, 2 + 0.5, 1 + 1, 0, 2 + 1.5]
    assert measure("whitespace")(texts) == whitespace(texts)


def test_tokenizer_counts_the_tokens_of_a_real_one():
    from transformers import AutoTokenizer

    texts = ["Turn on the light.", "불을 켜세요.", ""]
    real = AutoTokenizer.from_pretrained(TOKENIZER)
    expected = [len(real(text, add_special_tokens=False).input_ids) for text in texts]
    assert measure("tokenizer", tokenizer=str(TOKENIZER))(texts) == expected
    assert expected[0] > 1
    assert measure("tokenizer", tokenizer=str(TOKENIZER))([]) == []


def test_a_tokenizer_that_is_not_there_is_one_clear_line(tmp_path):
    with pytest.raises(UserError, match=r"bucketing.tokenizer: .*nowhere: cannot be loaded"):
        measure("tokenizer", tokenizer=str(tmp_path / "nowhere"))


@given(st.lists(st.text(max_size=30), max_size=8))
def test_a_length_does_not_depend_on_what_is_measured_beside_it(texts):
    for measured in (approx_tokens, whitespace):
        assert measured(texts) == [measured([text])[0] for text in texts]


@pytest.mark.parametrize("content", ['{"version": "1.0", "model": {"type": "None"}}', "[", "{}"])
def test_a_damaged_tokenizer_is_one_line(content, tmp_path):
    """Each raises another type: tokenizers has a bare Exception, transformers a KeyError."""
    (tmp_path / "tokenizer.json").write_text(content)
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    with pytest.raises(UserError, match=r"bucketing\.tokenizer: .*: cannot be loaded: "):
        measure("tokenizer", tokenizer=str(tmp_path))
